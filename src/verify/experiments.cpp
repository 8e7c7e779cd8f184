#include "verify/experiments.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace isograd {
namespace {

// Leaves the first `keep` of the batch's targets.
void keep_targets(Batch& batch, std::int64_t keep) {
  batch.targets = batch.targets.clone();
  auto* target = batch.targets.mutable_data_ptr<std::int64_t>();
  for (std::int64_t t = 0; t < batch.targets.numel(); ++t)
    if (target[t] != kIgnoreIndex && keep-- <= 0) target[t] = kIgnoreIndex;
}

void change_counts(DataByRank& data, Experiment::Counts counts) {
  std::int64_t least = 0;
  for (const auto& batches : data)
    for (const Batch& batch : batches)
      if (const auto own = batch.num_targets(); own > 0) least = least ? std::min(least, own) : own;
  for (std::size_t rank = 0; rank < data.size(); ++rank)
    for (std::size_t j = 0; j < data[rank].size(); ++j) {
      Batch& batch = data[rank][j];
      const auto share = static_cast<std::int64_t>(1 + (5 * rank + 3 * j) % 7);  // of seven
      const std::int64_t own = batch.num_targets();
      keep_targets(batch, counts == Experiment::Counts::kEqual ? least : (own * share + 6) / 7);
    }
}

// The document's own loss takes no part; `perturbed`: its tokens go round by one, its inputs become others.
void mute(DataByRank& data, std::int64_t document, bool perturbed) {
  for (auto& batches : data)
    for (Batch& batch : batches) {
      if (std::find(batch.sample_ids.begin(), batch.sample_ids.end(), document) == batch.sample_ids.end())
        continue;
      batch.targets = batch.targets.clone();
      batch.tokens = batch.tokens.clone();
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
        if (batch.sample_ids[f] != document) continue;
        const auto begin = batch.cu_seqlens[f], end = batch.cu_seqlens[f + 1];
        batch.targets.slice(0, begin, end).fill_(kIgnoreIndex);
        if (!perturbed) continue;
        batch.tokens.slice(0, begin, end).copy_(batch.tokens.slice(0, begin, end).roll(1));
        perturb_inputs(batch, static_cast<std::int64_t>(f));
      }
    }
}

void count_samples(DataByRank& data) {
  std::map<std::int64_t, std::int64_t> targets;
  const auto each = [&](const auto& visit) {
    for (auto& batches : data)
      for (Batch& batch : batches) visit(batch);
  };
  each([&](Batch& batch) {
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      targets[batch.sample_ids[f]] += batch.targets.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1])
                                          .ne(kIgnoreIndex)
                                          .sum()
                                          .template item<std::int64_t>();
  });
  each([&](Batch& batch) {
    batch.sample_targets.clear();
    for (auto id : batch.sample_ids) batch.sample_targets.push_back(targets[id]);
  });
}

}  // namespace

void perturb_inputs(Batch& batch, std::int64_t fragment) {
  for (at::Tensor& input : batch.inputs) {
    input = input.clone();
    at::Tensor row = input[fragment];
    if (row.is_floating_point())
      row.add_(1);
    else  // the same numbers elsewhere: they may be indices
      row.copy_(row.flatten().roll(1).view_as(row));
  }
}

Batch joined(const MicroBatches& batches) {
  Batch whole;
  whole.draw = batches.front().draw;  // of one step all have the same
  std::vector<at::Tensor> tokens, targets, positions, weights;
  const bool any_weights =
      std::any_of(batches.begin(), batches.end(), [](const Batch& batch) { return batch.weights.defined(); });
  for (const Batch& batch : batches) {
    const std::int64_t offset = whole.cu_seqlens.back();
    tokens.push_back(batch.tokens);
    targets.push_back(batch.targets);
    positions.push_back(batch.positions);
    if (batch.weights.defined())
      weights.push_back(batch.weights);
    else if (any_weights)
      weights.push_back(at::ones({batch.num_tokens()}, at::kDouble));
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      whole.cu_seqlens.push_back(offset + batch.cu_seqlens[f + 1]);
    whole.sample_ids.insert(whole.sample_ids.end(), batch.sample_ids.begin(), batch.sample_ids.end());
  }
  whole.tokens = at::cat(tokens);
  whole.targets = at::cat(targets);
  whole.positions = at::cat(positions);
  if (!weights.empty()) whole.weights = at::cat(weights);
  // Batches without fragment may have none.
  const auto one =
      std::find_if(batches.begin(), batches.end(), [](const Batch& batch) { return !batch.inputs.empty(); });
  for (std::size_t i = 0; one != batches.end() && i < one->inputs.size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const Batch& batch : batches)
      if (!batch.inputs.empty()) parts.push_back(batch.inputs[i]);
    whole.inputs.push_back(at::cat(parts));
  }
  return whole;
}

Batch fragments_of(const Batch& batch, std::int64_t first, std::int64_t last) {
  const auto at = [&](std::int64_t fragment) { return batch.cu_seqlens[static_cast<std::size_t>(fragment)]; };
  Batch part;
  part.draw = batch.draw;
  const auto cut = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.slice(0, at(first), at(last)) : tensor;
  };
  part.tokens = cut(batch.tokens);
  part.targets = cut(batch.targets);
  part.positions = cut(batch.positions);
  part.weights = cut(batch.weights);
  for (const at::Tensor& input : batch.inputs) part.inputs.push_back(input.slice(0, first, last));
  for (std::int64_t f = first; f < last; ++f) {
    part.cu_seqlens.push_back(at(f + 1) - at(first));
    part.sample_ids.push_back(batch.sample_ids[static_cast<std::size_t>(f)]);
  }
  return part;
}

std::vector<std::vector<std::int64_t>> counts_of(const DataByRank& data) {
  std::vector<std::vector<std::int64_t>> counts;
  for (const auto& batches : data) {
    counts.emplace_back();
    for (const Batch& batch : batches) counts.back().push_back(batch.num_targets());
  }
  return counts;
}

void count_as_declared(const DataByRank& data, const DeclaredLoss& declared, StepDump& dump) {
  dump.counts.clear();
  dump.amounts.clear();
  if (declared.replicas || declared.global) return;
  if (declared.mean == Mean::kTargets) dump.counts = counts_of(data);
  if (declared.mean != Mean::kSamples && declared.mean != Mean::kWeights) return;
  const bool samples = declared.mean == Mean::kSamples;
  dump.counted = samples ? "samples" : "weights";
  const auto each = [&](const Batch& batch, const auto& visit) {
    at::Tensor weights = batch.targets.ne(kIgnoreIndex).to(at::kDouble);
    if (batch.weights.defined()) weights = at::where(weights.ne(0), batch.weights.to(at::kDouble), weights);
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      visit(batch.sample_ids[f],
            weights.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).sum().item<double>());
  };
  std::map<std::int64_t, double> whole;
  for (const auto& batches : data)
    for (const Batch& batch : batches)
      each(batch, [&](std::int64_t id, double weight) { whole[id] += weight; });
  for (const auto& batches : data) {
    dump.amounts.emplace_back();
    for (const Batch& batch : batches) {
      double own = 0;
      each(batch, [&](std::int64_t id, double weight) {
        if (weight > 0) own += samples ? weight / whole.at(id) : weight;
      });
      dump.amounts.back().push_back(own);
    }
  }
}

std::vector<std::int64_t> samples_of(const MicroBatches& batches) {
  std::vector<std::int64_t> ids;
  for (const Batch& batch : batches) {
    if (!batch.cut) {
      ids.insert(ids.end(), batch.sample_ids.begin(), batch.sample_ids.end());
      continue;
    }
    // Of a fragment that is cut over ranks the first piece counts.
    const auto& pieces = batch.cut->own();
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      if (batch.sample_ids[f] != kPaddingSample && pieces[f].begin == 0 && pieces[f].length > 0)
        ids.push_back(batch.sample_ids[f]);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::vector<std::int64_t> samples_over_ranks(const MicroBatches& local, Group& group) {
  const auto own = samples_of(local);
  const at::Tensor all = group.all_gather_rows(at::tensor(own, at::kLong));
  std::vector<std::int64_t> ids(all.const_data_ptr<std::int64_t>(),
                                all.const_data_ptr<std::int64_t>() + all.numel());
  std::sort(ids.begin(), ids.end());
  return ids;
}

MicroBatches all_of(const DataByRank& data) {
  MicroBatches all;
  for (const auto& batches : data) all.insert(all.end(), batches.begin(), batches.end());
  return all;
}

std::optional<DataByRank> arrange(const DataByRank& data, const Experiment& experiment) {
  DataByRank result = data;
  const auto size = static_cast<int>(data.size());
  const auto at = [&](int rank) -> MicroBatches& { return result[static_cast<std::size_t>(rank)]; };
  if (std::max({experiment.empty_rank, experiment.only_rank, experiment.swapped[0], experiment.swapped[1]}) >=
          size ||
      experiment.ranks >= size)
    return std::nullopt;
  if (experiment.swapped[0] >= 0) std::swap(at(experiment.swapped[0]), at(experiment.swapped[1]));
  if (experiment.empty_rank >= 0) at(experiment.empty_rank).clear();
  if (experiment.counts != Experiment::Counts::kAsGiven) change_counts(result, experiment.counts);
  if (experiment.muted_document >= 0) mute(result, experiment.muted_document, experiment.perturbed);
  if (experiment.split_micro_batches) {
    bool any = false;
    for (auto& batches : result) {
      MicroBatches pieces;
      for (const Batch& batch : batches) {
        const std::int64_t middle = batch.num_fragments() / 2;
        any = any || middle > 0;
        if (middle > 0) pieces.push_back(fragments_of(batch, 0, middle));
        pieces.push_back(fragments_of(batch, middle, batch.num_fragments()));
      }
      batches = std::move(pieces);
    }
    if (!any) return std::nullopt;
  }
  if (experiment.one_micro_batch) {
    bool several = false;
    for (auto& batches : result) {
      several = several || batches.size() > 1;
      if (batches.size() > 1) batches = {joined(batches)};
    }
    if (!several) return std::nullopt;
  }
  if (experiment.without_silent)
    for (auto& batches : result)
      std::erase_if(batches, [](const Batch& batch) { return batch.num_targets() == 0; });
  if (experiment.only_rank >= 0)
    for (int rank = 0; rank < size; ++rank) {
      if (rank != experiment.only_rank) {
        at(rank).clear();
      } else if (experiment.only_micro_batch >= 0) {
        if (experiment.only_micro_batch >= static_cast<int>(at(rank).size())) return std::nullopt;
        at(rank) = {at(rank)[static_cast<std::size_t>(experiment.only_micro_batch)]};
      }
    }
  if (experiment.ranks > 0) {
    DataByRank fewer(static_cast<std::size_t>(experiment.ranks));
    for (int rank = 0; rank < size; ++rank) {
      auto& part = fewer[static_cast<std::size_t>(rank % experiment.ranks)];
      part.insert(part.end(), at(rank).begin(), at(rank).end());
    }
    result = std::move(fewer);
  }
  count_samples(result);
  for (const auto& counts : counts_of(result))
    for (auto count : counts)
      if (count > 0) return result;
  return std::nullopt;
}

std::optional<Experiment> share_experiment(const std::optional<Experiment>& experiment, Group& group) {
  std::array<std::int64_t, 17> fields{};
  if (experiment) {
    const Experiment& e = *experiment;
    fields = {1,
              static_cast<std::int64_t>(e.counts),
              e.one_micro_batch,
              e.without_silent,
              e.empty_rank,
              e.only_rank,
              e.only_micro_batch,
              e.swapped[0],
              e.swapped[1],
              e.only_axis,
              e.ranks,
              e.without_noise,
              e.without_resume,
              e.reference_only,
              e.split_micro_batches,
              e.muted_document,
              e.perturbed};
  }
  at::Tensor shared = at::empty({static_cast<std::int64_t>(fields.size())}, at::kLong);
  std::copy(fields.begin(), fields.end(), shared.mutable_data_ptr<std::int64_t>());
  group.broadcast(shared, 0);
  const auto* v = shared.const_data_ptr<std::int64_t>();
  if (v[0] == 0) return std::nullopt;
  const auto number = [&](int i) { return static_cast<int>(v[i]); };
  return Experiment{.counts = static_cast<Experiment::Counts>(v[1]),
                    .split_micro_batches = v[14] != 0,
                    .one_micro_batch = v[2] != 0,
                    .without_silent = v[3] != 0,
                    .empty_rank = number(4),
                    .only_rank = number(5),
                    .only_micro_batch = number(6),
                    .swapped = {number(7), number(8)},
                    .only_axis = number(9),
                    .muted_document = v[15],
                    .perturbed = v[16] != 0,
                    .ranks = number(10),
                    .without_noise = v[11] != 0,
                    .without_resume = v[12] != 0,
                    .reference_only = v[13] != 0};
}

}  // namespace isograd
