// Gathering rows of all ranks for a loss over the global batch: three ways to treat the gradient.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include "isograd/group.hpp"

// Each takes [N_r, ...] and gives [Σ N_r, ...], the ranks' rows one after another. N_r may be 0 and may
// differ; further dims and type must agree, which the header that is exchanged first checks: a mismatch is a
// ConfigError on every rank that names the ranks. On one rank the result is the input itself (detached:
// no_grad).
//
// L is a function of the gathered rows, computed alike on every rank, G = ∂L/∂θ that of one process:
//
//   helper               | backward on rank r             | parameter gradients summed | averaged
//   ---------------------+--------------------------------+----------------------------+----------
//   all_gather_with_grad | its own rows' part of ∂L       | G                          | G / W
//   all_gather_sum_grad  | Σ over ranks of their ∂L there | W · G                      | G
//   all_gather_no_grad   | none                           | 0                          | 0
//
// Where every rank computes only its share L_r of L = Σ L_r, all_gather_sum_grad is the one that is right:
// exact under a sum. (all_gather_with_grad then has a wrong direction, not a wrong factor.)
//
// One collective when `rows` says how many rows each rank has (nothing but that is checked then), two
// otherwise.
namespace isograd {

// The local slice keeps its graph, the others' rows are constants. No collective in backward.
at::Tensor all_gather_with_grad(Group group, const at::Tensor& input, const Group::Rows& rows = {});

// Backward is a reduce-scatter (sum): a collective that every rank must reach (differentiable.hpp).
at::Tensor all_gather_sum_grad(Group group, const at::Tensor& input, const Group::Rows& rows = {});

at::Tensor all_gather_no_grad(Group group, const at::Tensor& input, const Group::Rows& rows = {});

}  // namespace isograd
