#include "kernels/threads/parallel_for.hpp"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

namespace isograd {
namespace {

thread_local bool in_part = false;  // this thread runs a part of a loop

#ifdef ISOGRAD_SANITIZE_THREAD
// The sanitizer does not see how LibTorch's threads synchronise.
void for_each_part(std::int64_t parts, c10::function_ref<void(std::int64_t part)> body) {
  std::vector<std::exception_ptr> thrown(parts);
  std::vector<std::thread> threads;
  for (std::int64_t part = 0; part < parts; ++part)
    threads.emplace_back([&body, &thrown, part] {
      try {
        body(part);
      } catch (...) {
        thrown[part] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& each : thrown)
    if (each) std::rethrow_exception(each);
}
#else
void for_each_part(std::int64_t parts, c10::function_ref<void(std::int64_t part)> body) {
  const at::Tensor places = at::empty({parts}, at::TensorOptions(at::kByte));
  const auto* const first = static_cast<const char*>(places.const_data_ptr());
  at::TensorIterator iterator = at::TensorIteratorConfig()
                                    .check_all_same_dtype(false)  // there is no input to compare with
                                    .set_check_mem_overlap(false)
                                    .resize_outputs(false)  // the outputs' size determines the loop's length
                                    .add_output(places)
                                    .build();
  iterator.for_each(
      [&](char** place, const std::int64_t*, std::int64_t count, std::int64_t) {
        for (std::int64_t i = 0; i < count; ++i) body(*place - first + i);
      },
      /*grain_size=*/1);
}
#endif

}  // namespace

void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  c10::function_ref<void(std::int64_t begin, std::int64_t end)> body) {
  if (begin >= end) return;
  const std::int64_t count = end - begin;
  const std::int64_t parts =
      std::min<std::int64_t>(at::get_num_threads(), count / std::max<std::int64_t>(1, grain));
  if (parts <= 1 || in_part || at::in_parallel_region()) return body(begin, end);
  // The first `longer` parts have one more.
  const std::int64_t each = count / parts, longer = count % parts;
  for_each_part(parts, [&](std::int64_t part) {
    const std::int64_t from = begin + part * each + std::min(part, longer);
    const auto after = c10::make_scope_exit([] { in_part = false; });
    in_part = true;
    body(from, from + each + (part < longer ? 1 : 0));
  });
}

}  // namespace isograd
