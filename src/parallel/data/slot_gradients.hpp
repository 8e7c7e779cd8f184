// The gradients of one bucket's parameters, from micro-batch to micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/gradient_place.hpp"
#include "isograd/data_parallel.hpp"

namespace isograd {

// The first gradient of a step is written to its slot, later ones are added: nothing is set to zero but slots
// whose gradient does not come. Between a step's beginning and a parameter's first gradient its .grad is
// undefined; from then on it is the view of its slot.
class SlotGradients {
 public:
  // `memory` [plan.numel], zeros. .grad of the parameters becomes views of it.
  SlotGradients(const BucketPlan& plan, at::Tensor memory, const std::vector<NamedParameter>& parameters);

  // A step begins.
  void forget(const std::vector<NamedParameter>& parameters);
  // Autograd has put a gradient into .grad, the first one or one that it has added to it. ConfigError where
  // it has replaced the view (create_graph).
  void arrived(std::size_t slot, const at::Tensor& parameter);
  // differentiable::GradientPlace
  differentiable::GradientPlace::Taken take(std::size_t slot, const at::Tensor& parameter,
                                            at::ScalarType type);
  // Slots without a gradient get zeros; from then on all of the memory can be read.
  void complete(const std::vector<NamedParameter>& parameters);
  // For a backward that is replayed (DataParallel::gradient_places()): two bits a place, whether it is
  // written and whether its parameter is trained, appended to `words`; the state of earlier ones, from `word`
  // on; all of them written, as after a backward.
  void append_places(const std::vector<NamedParameter>& parameters, std::vector<std::uint64_t>& words) const;
  void restore_places(const std::vector<NamedParameter>& parameters, const std::vector<std::uint64_t>& words,
                      std::size_t& word);
  void arrive_again(const std::vector<NamedParameter>& parameters);
  bool all_arrived(const std::vector<NamedParameter>& parameters) const;
  // ConfigError where a gradient has come, and .grad is not the view of it any more.
  void check(const std::vector<NamedParameter>& parameters) const;

 private:
  struct Place {
    Slot slot;
    bool written = true;  // its memory is what .grad has, or is to have
    bool taken = false;   // by somebody who computes into it
  };
  at::Tensor view(const Place& place) const;
  [[noreturn]] void refuse_lost(const Place& place) const;

  std::vector<Place> places_;
  at::Tensor memory_;
  bool complete_ = true;
};

}  // namespace isograd
