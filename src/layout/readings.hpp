// Numbers that a step computes on a device and the host reads.
#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <functional>
#include <optional>
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
  // The same with a part of the loss, which must be finite.
  void add_loss(const at::Tensor& value, const std::function<void(double)>& use) {
    if (value.is_cpu()) {
      const double here = value.item<double>();
      finite_here_ = finite_here_ && std::isfinite(here);
      return use(here);
    }
    add(value, use);
    losses_.push_back(values_.back());
  }
  // Whether the parts of the loss are finite when added up, as one bool on the device; undefined where none
  // is there.
  at::Tensor loss_is_finite() const {
    if (losses_.empty() || !finite_here_) return {};
    return at::stack(losses_).sum().isfinite();
  }

  // Copies them to the host, without a wait: what the device is given from here on need not be done when they
  // are read.
  void start() {
    if (values_.empty()) return;
    const at::Tensor numbers = at::stack(std::exchange(values_, {}));
    numbers_ = at::empty_like(numbers, numbers.options().device(at::kCPU).pinned_memory(true));
    numbers_.copy_(numbers, /*non_blocking=*/true);
    copied_.emplace(numbers.device().type());
    copied_->record(c10::impl::VirtualGuardImpl(numbers.device().type()).getStream(numbers.device()));
  }
  void read() {
    start();
    if (!copied_) return;
    std::exchange(copied_, std::nullopt)->synchronize();
    const auto uses = std::exchange(uses_, {});
    for (std::size_t i = 0; i < uses.size(); ++i) uses[i](numbers_.const_data_ptr<double>()[i]);
  }
  void clear() { *this = {}; }

 private:
  std::vector<at::Tensor> values_{}, losses_{};
  std::vector<std::function<void(double)>> uses_{};
  at::Tensor numbers_{};  // on the host, once `copied_`
  std::optional<c10::Event> copied_{};
  bool finite_here_ = true;
};

}  // namespace isograd
