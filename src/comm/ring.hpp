// The ring: collectives built from send and receive alone, and what they cost.
//
// N ranks stand in a circle; each only ever sends to its right neighbour (rank + 1) and receives from its
// left one. An all-reduce cuts the data into N parts, one per rank, and goes round twice. Three ranks with
// parts a, b, c, where a01 is the sum of part a over ranks 0 and 1:
//
//                       rank 0            rank 1            rank 2
//   at the start        a0   b0   c0      a1   b1   c1      a2   b2   c2
//                         sends c0          sends a1          sends b2
//   reduce-scatter, 1   a0   b02  c0      a1   b1   c01     a12  b2   c2
//                         sends b02         sends c01         sends a12
//   reduce-scatter, 2   a012 b02  c0      a1   b012 c01     a12  b2   c012    each has its own part
//                         sends a012        sends b012        sends c012
//   all-gather, 1       a012 b02  c012    a012 b012 c01     a12  b012 c012
//                         sends c012        sends a012        sends b012
//   all-gather, 2       a012 b012 c012    a012 b012 c012    a012 b012 c012
//
// 2(N-1) steps in each of which every rank sends one part, D/N bytes, while it receives another. With α
// seconds for a message, however small, and β bytes per second between neighbours:
//
//   T = 2(N-1) α + 2(N-1)/N · D/β
//
// The second term hardly grows with N: the ring is as good as can be for large D, and poor for small D and
// large N. The order of a part's sum starts right of the rank that owns it; it is the same in every run.
// Parts travel in segments, so that a rank adds one segment while the next travels, and passes it on before
// the rest has come; each is a message, with an α of its own. Sums and products of 16-bit floats travel as
// float32 and are rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/steps.hpp"
#include "isograd/group.hpp"

namespace isograd {

inline constexpr std::int64_t kRingSegmentBytes = 256 << 10;
inline constexpr int kRingTag = 32'000;  // of all its messages; callers' own messages use lower ones

// The group needs send and receive only. Tensors are contiguous; the same calls in the same order on all
// ranks.
void ring_all_reduce(Group group, at::Tensor tensor, ReduceOp op = ReduceOp::kSum,
                     std::int64_t segment_bytes = kRingSegmentBytes);
// This rank's rows (split_rows) of the combined inputs.
at::Tensor ring_reduce_scatter(Group group, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                               std::int64_t segment_bytes = kRingSegmentBytes);
// [size, ...input.sizes()]
at::Tensor ring_all_gather(Group group, const at::Tensor& input,
                           std::int64_t segment_bytes = kRingSegmentBytes);

// The same and the rest as Steps, to be moved on by progress(). Flat tensors.
namespace ring {
using Rows = Group::Rows;
Steps all_reduce(Group group, at::Tensor tensor, ReduceOp op, std::int64_t segment_bytes);
Steps reduce_scatter(Group group, at::Tensor output, at::Tensor input, Rows counts, ReduceOp op,
                     std::int64_t segment_bytes);
Steps all_gather(Group group, at::Tensor output, at::Tensor input, std::int64_t segment_bytes);
Steps broadcast(Group group, at::Tensor tensor, int root, std::int64_t segment_bytes);  // a chain from root
Steps reduce(Group group, at::Tensor tensor, int root, ReduceOp op, std::int64_t segment_bytes);  // one to it
Steps gather(Group group, std::vector<at::Tensor> outputs, at::Tensor input, int root);
Steps scatter(Group group, at::Tensor output, std::vector<at::Tensor> inputs, int root);
// In step k every rank sends to the one k places to its right and receives from the one k to its left.
Steps all_to_all(Group group, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
Steps barrier(Group group);
}  // namespace ring

// What one rank sends in a ring_all_reduce.
struct RingTraffic {
  std::int64_t messages = 0;
  std::int64_t bytes = 0;
};
RingTraffic ring_all_reduce_traffic(int rank, int size, std::int64_t numel, at::ScalarType dtype, ReduceOp op,
                                    std::int64_t segment_bytes = kRingSegmentBytes);

// α and β between two ranks: medians over ping-pongs of 8 bytes and of `bytes` between ranks 0 and 1.
// Collective (the others wait); the same answer on all ranks. Needs 2 ranks.
struct LinkCost {
  double seconds_per_message = 0;  // α
  double bytes_per_second = 0;     // β
};
LinkCost measure_link(Group group, std::int64_t bytes = 4 << 20, int repetitions = 21);

// The formula above, with the messages and bytes that really travel: T = messages · α + bytes / β.
double predicted_seconds(const RingTraffic& traffic, const LinkCost& link);

}  // namespace isograd
