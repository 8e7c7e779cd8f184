// Collectives that gradients flow through: the backward of each is the dual collective.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include "isograd/group.hpp"

// A collective is a linear map A of all ranks' inputs together; the gradient goes through its adjoint:
//
//   forward                        | backward
//   -------------------------------+-------------------------------------
//   all_reduce (sum)               | all_reduce (sum)
//   reduce (sum) to root           | broadcast from root
//   broadcast from root            | reduce (sum) to root
//   all_gather                     | reduce_scatter (sum)
//   all_gather_rows                | reduce_scatter (sum) of these rows
//   reduce_scatter (sum)           | all_gather_rows
//   gather to root                 | scatter from root
//   scatter from root              | gather to root
//   all_to_all                     | all_to_all, the numbers of rows swapped
//   send                           | recv
//   recv                           | send
//
// In a table's row both sides add up, never average. Results are new tensors; inputs are not changed.
//
// The backward is a collective too: every rank must reach it. Therefore a result of a floating type always
// requires a gradient (where gradients are enabled at all), whether this rank's input does or not, and it
// must take part in what backward() is called on, on every rank. Where a rank has no result (reduce and
// gather away from the root, send) it gets one to keep the graph together: zeros, or a tensor without
// elements; add its sum() to the loss. Ranks that build the same graph run the backwards in the same order,
// the reverse of their forwards. Backwards can be differentiated again. Integers just pass through.
namespace isograd::differentiable {

at::Tensor all_reduce(Group group, const at::Tensor& input);

// The sum on root, zeros elsewhere.
at::Tensor reduce(Group group, const at::Tensor& input, int root);

// Root's input. Elsewhere only the input's sizes and type matter; its gradient is zero.
at::Tensor broadcast(Group group, const at::Tensor& input, int root);

// [size, ...input.sizes()]
at::Tensor all_gather(Group group, const at::Tensor& input);

// The ranks' rows (dim 0) one after another; the first form asks the ranks how many each has.
at::Tensor all_gather_rows(Group group, const at::Tensor& input);
at::Tensor all_gather_rows(Group group, const at::Tensor& input, const Group::Rows& rows);

// This rank's rows of the sum: split_rows of dim 0, or `rows`.
at::Tensor reduce_scatter(Group group, const at::Tensor& input, const Group::Rows& rows = {});

// [size, ...input.sizes()] on root; [0, ...input.sizes()] elsewhere.
at::Tensor gather(Group group, const at::Tensor& input, int root);

// root's input[rank]. `input` is [size, ...] on root; elsewhere [n, ...] with any n, 0 for instance: its
// sizes but the first, and its type, say what arrives. Its gradient is zero there.
at::Tensor scatter(Group group, const at::Tensor& input, int root);

// Equal parts of dim 0, or input_rows[r] to rank r and output_rows[r] from it.
at::Tensor all_to_all(Group group, const at::Tensor& input, const Group::Rows& output_rows = {},
                      const Group::Rows& input_rows = {});

// Sends `input`; the result has no elements ([0]).
at::Tensor send(Group group, const at::Tensor& input, int to, int tag = 0);

// What rank `from` sends, in the sizes and type of `like`, whose gradient is zero. Autograd's grad(), unlike
// backward(), runs only what leads to the tensors it is asked for: give it a `like` that does.
at::Tensor recv(Group group, const at::Tensor& like, int from, int tag = 0);

}  // namespace isograd::differentiable
