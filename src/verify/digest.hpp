// Digests that ranks compare: of tensors bit for bit, of batches whatever their order and their cut.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/group.hpp"

namespace isograd {

// A hash of the bytes of each tensor, [P] int64.
at::Tensor digest(const std::vector<at::Tensor>& tensors);

// Indices of the tensors whose digests differ on some rank. Collective.
std::vector<std::size_t> differing_over_ranks(const at::Tensor& digests, Group& group);

// Σ over tokens, modulo 2^64, of a hash of (sample, position in its fragment, token, target). Two sets of
// batches with the same tokens have the same digest, in whatever order; a token twice or never changes it.
std::uint64_t digest(const MicroBatches& batches);

// digest() of the batches of all ranks together. Collective.
std::uint64_t digest_over_ranks(const MicroBatches& local, Group& group);

}  // namespace isograd
