// Numbers that a step computes on a device and the host reads.
#pragma once

#include <ATen/ops/stack.h>

#include <functional>
#include <utility>
#include <vector>

namespace isograd {

// Reads such numbers together at the end of a step, because each read waits for all work of the device.
class Readings {
 public:
  // Passes the one number of `value` to `use`: at once if it is on the CPU, otherwise in read(), in the
  // order of add().
  void add(const at::Tensor& value, std::function<void(double)> use) {
    if (value.is_cpu()) return use(value.item<double>());
    values_.push_back(value.detach().reshape({}).to(at::kDouble));
    uses_.push_back(std::move(use));
  }
  void read() {
    if (values_.empty()) return;
    const at::Tensor numbers = at::stack(std::exchange(values_, {})).cpu();
    const auto uses = std::exchange(uses_, {});
    for (std::size_t i = 0; i < uses.size(); ++i) uses[i](numbers.const_data_ptr<double>()[i]);
  }
  void clear() { values_.clear(), uses_.clear(); }

 private:
  std::vector<at::Tensor> values_{};
  std::vector<std::function<void(double)>> uses_{};
};

}  // namespace isograd
