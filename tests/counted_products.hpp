// How many matrix products LibTorch makes.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

namespace isograd {

// Matrix products made by all threads while it lives, by at::mm, at::addmm and addmm_(): in fp64 there are no
// others.
class CountedProducts {
 public:
  CountedProducts() {
    count = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& called)
                                                                   -> std::unique_ptr<at::ObserverContext> {
                                      for (const char* name : {"aten::mm", "aten::addmm", "aten::addmm_"})
                                        if (std::strcmp(called.name(), name) == 0) ++count;
                                      return nullptr;
                                    }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountedProducts() { at::removeCallback(handle_); }
  CountedProducts(const CountedProducts&) = delete;
  CountedProducts& operator=(const CountedProducts&) = delete;
  static inline std::atomic<std::int64_t> count = 0;

 private:
  at::CallbackHandle handle_;
};

}  // namespace isograd
