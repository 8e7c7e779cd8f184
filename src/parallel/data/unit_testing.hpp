// A host without ranks for tests of units: keeps each unit's values aside, puts a copy in while it is used,
// and writes down what it is asked.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>

#include "parallel/data/unit_node.hpp"
#include "parallel/data/unit_storage.hpp"

namespace isograd::testing {

class FakeHost final : public UnitHost {
 public:
  // Parameters that an earlier unit has are left to it. Call it for the root last, with everything.
  void add(std::size_t unit, const std::string& name, const UnitHandle& handle, bool checkpoint = false,
           const std::shared_ptr<FakeHost>& self = {}) {
    Unit made{.name = name};
    std::vector<Slot> slots;
    std::int64_t numel = 0;
    at::ScalarType dtype = at::kDouble;
    for (const at::Tensor& parameter : handle.binding()->parameters()) {
      if (!taken_.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (parameter.requires_grad()) trained_.insert(parameter.unsafeGetTensorImpl());
      made.parameters.push_back(parameter);
      slots.push_back(
          {.name = name, .offset = numel, .numel = parameter.numel(), .shape = parameter.sizes().vec()});
      numel += parameter.numel();
      dtype = parameter.scalar_type();
    }
    made.storage =
        std::make_unique<UnitStorage>(numel, dtype, at::kCPU, "parameter read while sharded: " + name);
    made.kept = at::empty({numel}, dtype);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      at::NoGradGuard no_grad;
      made.kept.narrow(0, slots[i].offset, slots[i].numel).copy_(made.parameters[i].reshape({-1}));
      made.parameters[i].set_data(made.storage->view(slots[i]));
    }
    units_[unit] = std::move(made);
    handle.binding()->call = {self, unit, checkpoint};
  }

  const std::string& unit_name(std::size_t unit) const override { return units_.at(unit).name; }
  std::size_t enter_forward(std::size_t unit) override {
    gather(unit, "forward ");
    uses_.push_back(unit);
    return uses_.size() - 1;
  }
  void leave_forward(std::size_t use) override {
    if (uses_[use] != kRootUnit || !at::GradMode::is_enabled()) free(uses_[use]);
  }
  void enter_backward(std::size_t use) override {
    if (!units_.at(uses_.at(use)).storage->is_in()) gather(uses_[use], "backward ");
  }
  void leave_backward(std::size_t use) override { free(uses_.at(use)); }
  void take_gradient(const at::Tensor& parameter, at::Tensor gradient) override {
    at::Tensor& sum = gradients[parameter.unsafeGetTensorImpl()];
    sum = sum.defined() ? sum + gradient : gradient.clone();
  }
  void abandon() noexcept override {
    for (auto& [unit, state] : units_)
      if (state.storage->is_in()) free(unit);
  }
  bool is_trained(const c10::TensorImpl* leaf) const override { return trained_.contains(leaf); }
  bool is_freed_memory(const c10::StorageImpl* storage) const override {
    return std::any_of(units_.begin(), units_.end(), [&](const auto& unit) {
      const auto own = unit.second.storage->storages();
      return std::find(own.begin(), own.end(), storage) != own.end();
    });
  }

  std::size_t whole() const {
    return std::count_if(units_.begin(), units_.end(),
                         [](const auto& unit) { return unit.second.storage->is_in(); });
  }

  std::vector<std::string> log;
  std::size_t most_whole = 0;
  std::map<const c10::TensorImpl*, at::Tensor> gradients;

 private:
  struct Unit {
    std::string name;
    std::vector<at::Tensor> parameters{};
    std::unique_ptr<UnitStorage> storage{};
    at::Tensor kept{};
  };

  void gather(std::size_t unit, const char* pass) {
    Unit& state = units_.at(unit);
    log.push_back(pass + state.name);
    state.storage->put_in(state.kept.clone());
    most_whole = std::max(most_whole, whole());
  }
  void free(std::size_t unit) {
    at::Tensor memory = units_.at(unit).storage->take_out();
    if (memory.numel() > 0) memory.fill_(std::nan(""));  // whoever still reads it shall be seen
  }

  std::map<std::size_t, Unit> units_;
  std::set<const c10::TensorImpl*> taken_, trained_;
  std::vector<std::size_t> uses_;
};

}  // namespace isograd::testing
