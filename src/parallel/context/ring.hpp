// Ring attention: queries stay, keys and values travel.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/group.hpp"
#include "model/attention/tiles.hpp"

namespace isograd {

// Rows taken from one buffer to another.
struct RowCopy {
  std::int64_t from = 0, to = 0, length = 0;

  bool operator==(const RowCopy&) const = default;
};
std::int64_t num_rows(const std::vector<RowCopy>& copies);

// The work of one rank of a ring on one batch: plain data, known to every rank without asking. At hop h a
// rank computes with the block of the rank h places to its left, h = 0 being its own.
struct RingPlan {
  struct Hop {
    std::vector<Span> keys;   // of the block, as they lie in this hop's buffer
    std::int64_t rows = 0;    // of that buffer
    std::vector<Tile> tiles;  // of this rank's queries and these keys
    std::vector<RowCopy>
        pass_on;  // from this hop's buffer into the message for the right neighbour's next hop
    // Gradients of keys that ranks from the block's owner to this one have used, as they leave this rank.
    std::int64_t gradient_rows = 0;
    std::vector<RowCopy> own_gradients;       // from this hop's buffer into them
    std::vector<RowCopy> received_gradients;  // from the left neighbour's, of the hop before
    std::int64_t received_rows = 0;
  };
  int rank = 0, size = 1;
  std::int64_t tokens = 0;  // this rank's
  std::vector<Hop> hops;    // [size]
  // From the message that comes home from the left neighbour's last hop into this rank's rows.
  std::vector<RowCopy> home;
  std::int64_t home_rows = 0;
};

// `blocks[i]`: what ring rank i holds, rows within its tensors. Within and between blocks spans of a document
// are disjoint.
RingPlan make_ring_plan(const std::vector<std::vector<Span>>& blocks, int rank, bool causal);

// q [T, H, D], k and v [T, Hkv, D] of this rank's block. Collective over the ring, like its backward.
Attended ring_attend(Group ring, const RingPlan& plan, const Qkv& own);
// Gradients of this rank's q, k and v from those of all ranks' outputs.
Qkv ring_attend_backward(Group ring, const RingPlan& plan, const Qkv& own, const AttendedGradient& attended);

}  // namespace isograd
