#include "verify/digest.hpp"

#include <bit>

#include "base/files.hpp"
#include "isograd/random.hpp"

namespace isograd {

at::Tensor digest(const std::vector<at::Tensor>& tensors) {
  at::Tensor digests = at::empty({static_cast<std::int64_t>(tensors.size())}, at::kLong);
  auto* value = digests.data_ptr<std::int64_t>();
  for (const auto& tensor : tensors) {
    const at::Tensor flat = tensor.detach().cpu().contiguous();
    const auto hex = checksum(flat.const_data_ptr(), static_cast<std::size_t>(flat.nbytes()));
    *value++ = std::bit_cast<std::int64_t>(static_cast<std::uint64_t>(std::stoull(hex, nullptr, 16)));
  }
  return digests;
}

std::vector<std::size_t> differing_over_ranks(const at::Tensor& digests, Group& group) {
  const at::Tensor all = group.all_gather(digests);  // [W, P]
  const at::Tensor same = all.eq(all.select(0, 0)).all(0);
  std::vector<std::size_t> differing;
  for (std::int64_t i = 0; i < digests.numel(); ++i)
    if (!same[i].item<bool>()) differing.push_back(static_cast<std::size_t>(i));
  return differing;
}

std::uint64_t digest(const MicroBatches& batches) {
  std::uint64_t sum = 0;
  for (const auto& batch : batches) {
    const at::Tensor tokens = batch.tokens.cpu().contiguous(), targets = batch.targets.cpu().contiguous();
    const auto* token = tokens.const_data_ptr<std::int64_t>();
    const auto* target = targets.const_data_ptr<std::int64_t>();
    const auto flat = [](const at::Tensor& tensor, at::ScalarType dtype) {
      return tensor.defined() ? tensor.detach().to(at::kCPU, dtype).contiguous() : tensor;
    };
    const at::Tensor weights = flat(batch.weights, at::kDouble), positions = flat(batch.positions, at::kLong);
    const auto* weight = weights.defined() ? weights.const_data_ptr<double>() : nullptr;
    const auto* position = positions.defined() ? positions.const_data_ptr<std::int64_t>() : nullptr;
    for (std::int64_t fragment = 0; fragment < batch.num_fragments(); ++fragment) {
      const auto index = static_cast<std::size_t>(fragment);
      if (batch.sample_ids[index] == kPaddingSample) continue;
      const auto begin = batch.cu_seqlens[index], end = batch.cu_seqlens[index + 1];
      const auto before = batch.cut ? batch.cut->own()[index].begin : 0;  // tokens of the fragment elsewhere
      const auto sample = static_cast<std::uint64_t>(batch.sample_ids[index]);
      for (auto t = begin; t < end; ++t) {
        const auto place = static_cast<std::uint64_t>(before + t - begin);
        sum += random_bits({.seed = static_cast<std::uint64_t>(token[t]),
                            .step = static_cast<std::uint64_t>(target[t]),
                            .sample = sample,
                            .layer = hash_name("batch digest")},
                           place);
        sum += random_bits({.seed = std::bit_cast<std::uint64_t>(weight ? weight[t] : 1.0),
                            .step = position ? static_cast<std::uint64_t>(position[t]) : place,
                            .sample = sample,
                            .layer = hash_name("weights digest")},
                           place);
      }
      for (std::size_t i = 0; i < batch.inputs.size(); ++i)
        sum +=
            random_bits({.seed = static_cast<std::uint64_t>(
                             digest(std::vector<at::Tensor>{batch.inputs[i][fragment]}).item<std::int64_t>()),
                         .sample = static_cast<std::uint64_t>(batch.sample_ids[index]),
                         .layer = hash_name("inputs digest")},
                        i);
    }
  }
  return sum;
}

std::uint64_t digest_over_ranks(const MicroBatches& local, Group& group) {
  const auto own = std::bit_cast<std::int64_t>(digest(local));
  const at::Tensor all = group.all_gather(at::full({1}, own, at::kLong));
  std::uint64_t sum = 0;
  for (std::int64_t rank = 0; rank < group.size(); ++rank)
    sum += std::bit_cast<std::uint64_t>(all[rank].item<std::int64_t>());
  return sum;
}

}  // namespace isograd
