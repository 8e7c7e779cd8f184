#include "verify/experiments.hpp"

#include <ATen/core/List.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <type_traits>

#include "train/rank_zero.hpp"

namespace isograd {
namespace {

constexpr at::Tensor Batch::*kByToken[] = {&Batch::tokens, &Batch::targets, &Batch::positions,
                                           &Batch::weights};

// Leaves the first `keep` of the batch's targets.
void keep_targets(Batch& batch, std::int64_t keep) {
  batch.targets = batch.targets.clone();
  auto* target = batch.targets.mutable_data_ptr<std::int64_t>();
  for (std::int64_t t = 0; t < batch.targets.numel(); ++t)
    if (target[t] != kIgnoreIndex && keep-- <= 0) target[t] = kIgnoreIndex;
}

void change_counts(DataByRank& data, Experiment::Counts counts) {
  std::int64_t least = 0;
  for (const auto& rank : counts_of(data))
    for (const std::int64_t own : rank)
      if (own > 0) least = least ? std::min(least, own) : own;
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
      if (std::ranges::find(batch.sample_ids, document) == batch.sample_ids.end()) continue;
      batch.targets = batch.targets.clone();
      batch.tokens = batch.tokens.clone();
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
        if (batch.sample_ids[f] != document) continue;
        of_fragment(batch.targets, batch, f).fill_(kIgnoreIndex);
        if (!perturbed) continue;
        at::Tensor tokens = of_fragment(batch.tokens, batch, f);
        tokens.copy_(tokens.roll(1));
        perturb_inputs(batch, static_cast<std::int64_t>(f));
      }
    }
}

void count_samples(DataByRank& data) {
  std::map<std::int64_t, std::int64_t> targets;
  for (const auto& batches : data)
    for (const Batch& batch : batches)
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
        targets[batch.sample_ids[f]] +=
            of_fragment(batch.targets, batch, f).ne(kIgnoreIndex).sum().item<std::int64_t>();
  for (auto& batches : data)
    for (Batch& batch : batches) {
      batch.sample_targets.clear();
      for (auto id : batch.sample_ids) batch.sample_targets.push_back(targets[id]);
    }
}

c10::IValue packed(const Batch& batch) {
  const auto flat = [&](const at::Tensor& tensor) {  // cloned: a view would take its whole storage along
    return tensor.defined() ? tensor.to(at::kCPU, at::kLong).reshape({-1}).clone()
                            : at::zeros({batch.num_tokens()}, at::kLong);
  };
  c10::List<at::Tensor> inputs;
  for (const at::Tensor& input : batch.inputs)
    inputs.push_back(input.detach().to(at::kCPU).clone(at::MemoryFormat::Contiguous));
  const bool weighted = batch.weights.defined();
  return c10::ivalue::Tuple::create(
      {batch.draw, weighted, batch.cu_seqlens, batch.sample_ids, batch.sample_targets, flat(batch.tokens),
       flat(batch.targets), flat(batch.positions),
       weighted ? batch.weights.to(at::kCPU, at::kDouble).clone() : at::empty({0}, at::kDouble), inputs});
}

Batch unpacked(const c10::IValue& value) {
  const auto& all = value.toTupleRef().elements();
  Batch batch;
  batch.draw = all[0].toInt();
  batch.cu_seqlens = all[2].toIntVector();
  batch.sample_ids = all[3].toIntVector();
  batch.sample_targets = all[4].toIntVector();
  batch.tokens = all[5].toTensor();
  batch.targets = all[6].toTensor();
  batch.positions = all[7].toTensor();
  if (all[1].toBool()) batch.weights = all[8].toTensor();
  batch.inputs = all[9].toTensorVector();
  return batch;
}

// As LayoutUnderTest says: not given, one axis of all ranks.
std::vector<Axis> axes_under_test(const LayoutUnderTest& layout, const Group& group) {
  return layout.axes.empty() ? std::vector<Axis>{{"the ranks", group.size()}} : layout.axes;
}

// Fills in what a step in fp64 reports of itself.
void note_step(const LayoutRun::RecordedStep& made, StepDump& dump) {
  dump.precision = "fp64";
  dump.gradients = made.named();
  dump.figures = made.figures;
  dump.terms = made.terms;
  dump.not_numbers.clear();  // a run of our own records all of them
  const auto note = [&](const std::string& key, double value) {
    if (std::isnan(value)) dump.not_numbers.push_back(key);
  };
  note("loss", dump.figures.loss);
  note("norm", dump.figures.norm);
  note("clip_coefficient", dump.figures.clip_coefficient);
  for (const auto& [name, value] : dump.terms) note("terms." + name, value);
}

// xxHash of the initial bits of the trainable parameters.
std::vector<std::uint64_t> checksums_of(const Initial& initial) {
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < initial.values.size(); ++i)
    if (initial.trainable[i]) values.push_back(initial.values[i]);
  return checksums(digest(values));
}

}  // namespace

DataByRank gather_batches(const MicroBatches& local, Group& group) {
  std::vector<c10::IValue> batches;
  for (const Batch& batch : local) batches.push_back(packed(batch));
  std::vector<char> own = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(batches)));
  const auto size = static_cast<std::int64_t>(own.size());
  const at::Tensor sizes = group.all_gather_rows(at::full({1}, size, at::kLong));
  const at::Tensor all = group.all_gather_rows(at::from_blob(own.data(), {size}, at::kByte));
  DataByRank data(static_cast<std::size_t>(group.size()));
  const char* next = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  for (int rank = 0; rank < group.size(); ++rank) {
    const char* begin = std::exchange(next, next + sizes[rank].item<std::int64_t>());
    const c10::IValue theirs = torch::jit::pickle_load({begin, next});
    for (const c10::IValue& batch : theirs.toTupleRef().elements())
      data[static_cast<std::size_t>(rank)].push_back(unpacked(batch));
  }
  return data;
}

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
  const bool weighted =
      std::ranges::any_of(batches, [](const Batch& batch) { return batch.weights.defined(); });
  for (const auto of : kByToken) {
    if (of == &Batch::weights && !weighted) continue;
    std::vector<at::Tensor> parts;
    for (const Batch& batch : batches)
      parts.push_back(of == &Batch::weights && !batch.weights.defined()
                          ? at::ones({batch.num_tokens()}, at::kDouble)
                          : batch.*of);
    whole.*of = at::cat(parts);
  }
  std::vector<std::vector<at::Tensor>> inputs;
  for (const Batch& batch : batches) {
    const std::int64_t offset = whole.cu_seqlens.back();
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      whole.cu_seqlens.push_back(offset + batch.cu_seqlens[f + 1]);
    whole.sample_ids.insert(whole.sample_ids.end(), batch.sample_ids.begin(), batch.sample_ids.end());
    inputs.resize(std::max(inputs.size(), batch.inputs.size()));  // batches without fragment may have none
    for (std::size_t i = 0; i < batch.inputs.size(); ++i) inputs[i].push_back(batch.inputs[i]);
  }
  for (const auto& parts : inputs) whole.inputs.push_back(at::cat(parts));
  return whole;
}

Batch fragments_of(const Batch& batch, std::int64_t first, std::int64_t last) {
  const auto at = [&](std::int64_t fragment) { return batch.cu_seqlens[static_cast<std::size_t>(fragment)]; };
  Batch part;
  part.draw = batch.draw;
  for (const auto of : kByToken)
    if ((batch.*of).defined()) part.*of = (batch.*of).slice(0, at(first), at(last));
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
      visit(batch.sample_ids[f], of_fragment(weights, batch, f).sum().item<double>());
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
    // The first piece of a fragment that is split over ranks counts.
    const auto& pieces = batch.cut->own();
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      if (batch.sample_ids[f] != kPaddingSample && pieces[f].begin == 0 && pieces[f].length > 0)
        ids.push_back(batch.sample_ids[f]);
  }
  std::ranges::sort(ids);
  return ids;
}

std::vector<std::int64_t> samples_over_ranks(const MicroBatches& local, Group& group) {
  const auto own = samples_of(local);
  const at::Tensor all = group.all_gather_rows(at::tensor(own, at::kLong));
  std::vector<std::int64_t> ids(all.const_data_ptr<std::int64_t>(),
                                all.const_data_ptr<std::int64_t>() + all.numel());
  std::ranges::sort(ids);
  return ids;
}

static MicroBatches all_of(const DataByRank& data) {
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
  bool changed = false;
  for (auto& batches : result)
    if (experiment.split_micro_batches) {
      MicroBatches pieces;
      for (const Batch& batch : batches) {
        const std::int64_t middle = batch.num_fragments() / 2;
        changed = changed || middle > 0;
        if (middle > 0) pieces.push_back(fragments_of(batch, 0, middle));
        pieces.push_back(fragments_of(batch, middle, batch.num_fragments()));
      }
      batches = std::move(pieces);
    } else if (experiment.one_micro_batch && batches.size() > 1) {
      changed = true;
      batches = {joined(batches)};
    }
  if ((experiment.split_micro_batches || experiment.one_micro_batch) && !changed) return std::nullopt;
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
    if (std::ranges::any_of(counts, [](std::int64_t count) { return count > 0; })) return result;
  return std::nullopt;
}

std::optional<Experiment> share_experiment(std::optional<Experiment> experiment, Group& group) {
  static_assert(std::is_trivially_copyable_v<std::optional<Experiment>>);
  at::Tensor bytes = at::from_blob(&experiment, {sizeof(experiment)}, at::kByte);
  group.broadcast(bytes, 0);
  return experiment;
}

StepDump dump_of(const OracleStep& oracle, const Initial& initial, const StepDump& found,
                 std::vector<std::int64_t> samples, double bytes_needed) {
  StepDump dump;
  for (std::size_t i = 0; i < oracle.names.size(); ++i) {
    dump.gradients.emplace_back(oracle.names[i], oracle.gradients[i]);
    dump.applied.emplace_back(oracle.names[i], oracle.gradients[i] * oracle.figures.clip_coefficient);
  }
  dump.figures = oracle.figures;
  dump.terms = oracle.terms;
  dump.samples = std::move(samples);
  dump.counts = found.counts;
  dump.amounts = found.amounts;
  dump.counted = found.counted;
  dump.axes = found.axes;
  dump.precision = "fp64";
  dump.ranks.push_back({.initial = checksums_of(initial),
                        .gradients = {},
                        .owned_norm = oracle.figures.norm,
                        .norm = oracle.figures.norm});
  if (bytes_needed > 0) dump.ranks[0].bytes_moved = bytes_needed;
  return dump;
}

void Investigation::describe(const LayoutRun::RecordedStep& made, StepDump& dump) {
  exact_.describe(made, checksums_of(initial_), dump);
  dump.precision = "fp64";
  dump.axes = axes_under_test(layout_, group_);
  if (group_.rank() == 0) note_step(made, dump);
}

// A step's data before any cut, by data rank, and the data rank of each place in `counting`.
struct Investigation::StepData {
  DataByRank data;
  std::vector<int> data_rank;
  StepData(const VerifyProblem& problem, Group counting);  // collective
};

Investigation::StepData::StepData(const VerifyProblem& problem, Group counting) {
  if (!problem.shared_samples) {
    data = gather_batches(problem.local, counting);
    for (int rank = 0; rank < counting.size(); ++rank) data_rank.push_back(rank);
    return;
  }
  // Ranks that share samples have the same ones: the first of them gives them.
  const at::Tensor ranks =
      counting.all_gather(at::full({1}, problem.shared_samples->data_rank, at::kLong)).reshape({-1});
  for (int rank = 0; rank < counting.size(); ++rank)
    data_rank.push_back(static_cast<int>(ranks[rank].item<std::int64_t>()));
  const auto first = std::ranges::find(data_rank, problem.shared_samples->data_rank);
  const bool contributes = first - data_rank.begin() == counting.rank();
  const DataByRank all =
      gather_batches(contributes ? problem.shared_samples->whole : MicroBatches{}, counting);
  data.resize(static_cast<std::size_t>(*std::max_element(data_rank.begin(), data_rank.end()) + 1));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) data[static_cast<std::size_t>(data_rank[rank])] = all[rank];
}

// The ranks of the experiment become data ranks. False: it makes no sense there.
static bool by_data_rank(Experiment& experiment, const std::vector<int>& data_rank) {
  for (int* rank : {&experiment.empty_rank, &experiment.swapped[0], &experiment.swapped[1]})
    if (*rank >= 0) *rank = data_rank.at(static_cast<std::size_t>(*rank));
  return experiment.swapped[0] < 0 || experiment.swapped[0] != experiment.swapped[1];
}

// Leaves of `data` the part of `rank` alone, whose data rank is `owner`.
static bool leave_only(DataByRank& data, const VerifyProblem& problem, std::size_t owner, int rank,
                       int micro_batch, Group counting) {
  for (std::size_t other = 0; other < data.size(); ++other)
    if (other != owner) data[other].clear();
  MicroBatches& own = data[owner];
  if (micro_batch >= static_cast<int>(own.size())) return false;
  if (problem.shared_samples) {
    const MicroBatches parts = counting.rank() == rank ? problem.shared_samples->cut(own) : MicroBatches{};
    for (std::size_t j = 0; j < own.size(); ++j) {
      at::Tensor keep = at::zeros({own[j].num_tokens()}, at::kLong);
      if (counting.rank() == rank) {
        const ContextCut& cut = *parts.at(j).cut;
        for (const Piece& piece : cut.own())
          if (piece.document < own[j].num_fragments())
            keep.narrow(0, own[j].cu_seqlens[static_cast<std::size_t>(piece.document)] + piece.begin,
                        piece.length)
                .fill_(1);
      }
      counting.broadcast(keep, rank);
      own[j].targets = own[j].targets.masked_fill(keep.eq(0), kIgnoreIndex);
    }
  }
  if (micro_batch >= 0) own = {own[static_cast<std::size_t>(micro_batch)]};
  return true;
}

std::vector<Finding> Investigation::diagnose(std::optional<ComparedStep>& compared, bool failed) {
  std::vector<Finding> findings;
  if (group_.rank() == 0) findings = isograd::diagnose(*compared);
  if (!of_rank_zero(group_, problem_.experiments && (failed || !findings.empty()))) return findings;
  const StepData given(problem_, problem_.counting(group_));
  if (group_.rank() == 0) {
    findings = isograd::diagnose(compared->pair(), [&](const Experiment& experiment) {
      share_experiment(experiment, group_);
      return again(experiment, given);
    });
    share_experiment(std::nullopt, group_);
    return findings;
  }
  while (const auto experiment = share_experiment(std::nullopt, group_)) again(*experiment, given);
  return {};
}

std::optional<RunPair> Investigation::again(const Experiment& asked, const StepData& given) {
  const bool reports = group_.rank() == 0, as_given = asked == Experiment{};
  // Decided alike on all ranks, from what all of them know.
  if (asked.without_resume && !problem_.uninterrupted) return std::nullopt;
  if (asked.ranks > 0 && !problem_.subgroup) return std::nullopt;
  if ((problem_.loss.global || problem_.loss.replicas) && !as_given) return std::nullopt;
  std::shared_ptr<VerifyProblem> along;
  if (asked.only_axis >= 0) {
    const auto axes = axes_under_test(layout_, group_);
    if (!layout_.along || asked.only_axis >= static_cast<int>(axes.size())) return std::nullopt;
    along = layout_.along(axes[static_cast<std::size_t>(asked.only_axis)].name);
    if (!along) return std::nullopt;
  }
  const VerifyProblem& problem = along ? *along : problem_;
  const LayoutUnderTest& layout = along ? along->layouts.at(0) : layout_;
  Group counting = problem.counting(group_);  // ranks of an experiment, but for asked.ranks, are places in it
  VerifyModel in_fp64 = initial_.model(problem, at::kDouble);
  if (asked.without_noise) {
    if (!in_fp64.without_noise) return std::nullopt;
    in_fp64.without_noise();
  }
  std::optional<DataByRank> assigned;
  MicroBatches of;  // what is assigned before all but one rank's are taken away
  if (asked.without_resume) {
    assigned = gather_batches(problem.uninterrupted(), counting);
  } else {
    const StepData& step_data = along ? StepData(problem, counting) : given;
    Experiment experiment = asked;
    experiment.only_rank = experiment.only_micro_batch = -1;
    // Parts of ranks that share samples can only be run as they were cut, by whoever made the problem.
    const auto is_part = [](const Batch& batch) { return batch.cut != nullptr; };
    if (std::ranges::any_of(all_of(step_data.data), is_part) && !as_given) return std::nullopt;
    if (!by_data_rank(experiment, step_data.data_rank)) return std::nullopt;
    assigned = arrange(step_data.data, experiment);
    if (assigned) of = all_of(*assigned);
    if (assigned && asked.only_rank >= 0 &&
        !leave_only(
            *assigned, problem,
            static_cast<std::size_t>(step_data.data_rank.at(static_cast<std::size_t>(asked.only_rank))),
            asked.only_rank, asked.only_micro_batch, counting))
      return std::nullopt;
  }
  if (!assigned) return std::nullopt;

  const bool shared = problem.shared_samples && asked.ranks == 0 && !asked.without_resume;
  const auto part_of = [&](int rank) {
    return shared ? problem.shared_samples->cut(
                        (*assigned)[static_cast<std::size_t>(problem.shared_samples->data_rank)])
           : rank < static_cast<int>(assigned->size()) ? (*assigned)[static_cast<std::size_t>(rank)]
                                                       : MicroBatches{};
  };
  RunPair pair;
  pair.found.axes = axes_under_test(layout, group_);
  if (asked.ranks > 0) pair.found.axes = {{"the ranks", asked.ranks}};
  if (!asked.reference_only)
    count_as_declared(shared ? gather_batches(part_of(counting.rank()), counting) : *assigned, problem.loss,
                      pair.found);
  pair.found.samples = as_given ? samples_over_ranks(problem.local, counting) : samples_of(all_of(*assigned));
  {
    Heartbeat heartbeat(group_);
    if (reports) {
      VerifyModel model = initial_.oracle(problem);
      if (asked.without_noise) model.without_noise();
      // The step as given is compared with the whole step as one process would have it.
      const bool as_one = as_given || asked.without_resume;
      const MicroBatches whole = as_one ? problem.whole() : all_of(*assigned);
      const auto parts =
          as_one && problem.loss.replicas ? problem.loss.replicas() : std::vector<MicroBatches>{whole};
      const auto tick = [&heartbeat] { heartbeat.tick(); };
      const OracleStep oracle = asked.only_rank >= 0
                                    ? oracle_part(model, whole, of, problem.loss, tick)
                                    : oracle_step(model, parts, problem.loss, clip_of(problem), tick);
      pair.expected = dump_of(oracle, initial_, pair.found, samples_of(whole), 0);
    }
    heartbeat.finish();
  }
  if (asked.reference_only) return pair;

  std::vector<int> members;
  for (int rank = 0; rank < (asked.ranks > 0 ? asked.ranks : group_.size()); ++rank) members.push_back(rank);
  if (group_.rank() >= static_cast<int>(members.size())) return std::nullopt;
  Group group = asked.ranks > 0 ? problem.subgroup(members) : group_;
  std::optional<LayoutRun> fresh;
  if (!as_given) fresh.emplace(problem, layout, std::move(in_fp64), group);
  LayoutRun& run = fresh ? *fresh : exact_;
  const int place = asked.ranks > 0 ? group.rank() : counting.rank();
  const LayoutRun::RecordedStep made = run.step(as_given ? problem.local : part_of(place));
  if (asked.ranks > 0) run.describe(made, checksums_of(initial_), pair.found);
  note_step(made, pair.found);
  return pair;
}

}  // namespace isograd
