// A backward in halves: first the gradient of what a stage was given, which the stage before waits for, and
// at any time later those of its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace isograd {

// The second half, and what it needs: gradients that have come as far as the parameters'
// nodes, and what these nodes have saved. All else that the forward kept is free already.
class WeightsBackward {
 public:
  struct Left;  // split_backward.cpp

  WeightsBackward();  // nothing is left
  explicit WeightsBackward(std::unique_ptr<Left> left);
  WeightsBackward(WeightsBackward&&) noexcept;
  WeightsBackward& operator=(WeightsBackward&&) noexcept;
  ~WeightsBackward();

  // Adds to the gradients of leaves, whose hooks fire here. Once; frees the graph.
  void run();

 private:
  std::unique_ptr<Left> left_;
};

// The first half: from `loss`, a scalar that requires a gradient, to what came from other ranks, or else to
// what was computed first. Both halves do what loss.backward() does: the same gradients, added up at each
// leaf in the same order, so the same bits.
//
// No matrix product is made twice: LibTorch's own nodes and those declared separable (comm/autograd.hpp)
// compute each gradient in the half that it belongs to. Any other node runs once, here, with all its
// gradients; so all that is exchanged with other ranks is exchanged in this half, in the order of a whole
// backward. Hooks of a tensor whose node takes part in both halves are called in both.
WeightsBackward backward_of_inputs(const at::Tensor& loss);

}  // namespace isograd
