#include "train/peers.hpp"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "layout/copies.hpp"

namespace isograd {
namespace {

// Whole numbers that add up to another sum, or another one of these, for other batches.
std::vector<std::int64_t> described(const MicroBatches& micro_batches) {
  std::vector<at::Tensor> tensors;
  for (const Batch& batch : micro_batches) {
    tensors.push_back(at::tensor(batch.cu_seqlens, at::kLong));
    tensors.push_back(at::tensor(batch.sample_ids, at::kLong));
    for (const at::Tensor& each : {batch.tokens, batch.targets, batch.positions, batch.weights})
      if (each.defined()) tensors.push_back(each);
    tensors.insert(tensors.end(), batch.inputs.begin(), batch.inputs.end());
  }
  const at::Tensor sums = checksums(tensors);
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < sums.numel(); ++i)  // of another order another sum
    sum = sum * 0x100000001b3 + static_cast<std::uint64_t>(sums[i].item<std::int64_t>());
  return {static_cast<std::int64_t>(micro_batches.size()), static_cast<std::int64_t>(sum >> 2)};
}

}  // namespace

bool agree_with_peers(const MicroBatches& micro_batches, bool stop_requested, const Mesh& mesh) {
  Group peers = mesh.along(mesh.grid().complement(mesh.data()));
  if (peers.size() == 1) return stop_requested;
  std::vector<std::int64_t> numbers = described(micro_batches);
  numbers.push_back(stop_requested ? 1 : 0);
  const at::Tensor all = peers.all_gather(at::tensor(numbers, at::kLong));  // [peers, 3]
  for (int rank = 1; rank < peers.size(); ++rank) {
    const bool same_number = all[rank][0].equal(all[0][0]);
    if (same_number && all[rank][1].equal(all[0][1])) continue;
    refuse("the batches of ranks that compute one loss together",
           same_number
               ? fmt::format("other micro-batches on rank {} than on rank 0 of {}", rank, peers.name())
               : fmt::format("{} micro-batches on rank {}, {} on rank 0 of {}",
                             all[rank][0].item<std::int64_t>(), rank, all[0][0].item<std::int64_t>(),
                             peers.name()),
           "the same on all of these ranks",
           "Deal samples by Mesh::place() along Mesh::data(), not by the rank in the world");
  }
  return all.select(1, 2).max().item<std::int64_t>() != 0;
}

}  // namespace isograd
