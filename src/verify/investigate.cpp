#include "verify/investigate.hpp"

#include <bit>

#include "verify/digest.hpp"

namespace isograd {

std::vector<std::uint64_t> checksums_of(const Initial& initial) {
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < initial.values.size(); ++i)
    if (initial.trainable[i]) values.push_back(initial.values[i]);
  const at::Tensor bits = digest(values);
  std::vector<std::uint64_t> checksums;
  for (std::int64_t i = 0; i < bits.numel(); ++i)
    checksums.push_back(std::bit_cast<std::uint64_t>(bits[i].item<std::int64_t>()));
  return checksums;
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
  dump.axes = found.axes;
  dump.precision = "fp64";
  dump.ranks.push_back({.initial = checksums_of(initial), .gradients = {}});
  dump.ranks[0].norm = oracle.figures.norm;
  dump.ranks[0].owned_norm = oracle.figures.norm;
  if (bytes_needed > 0) dump.ranks[0].bytes_moved = bytes_needed;
  return dump;
}

// As LayoutUnderTest says: not given, one axis of all ranks.
static std::vector<std::pair<std::string, int>> axes_of(const LayoutUnderTest& layout, const Group& group) {
  if (!layout.axes.empty()) return layout.axes;
  return {{"the ranks", group.size()}};
}

void Investigation::describe(const LayoutRun::Made& made, StepDump& dump) {
  exact_.describe(made, checksums_of(initial_), dump);
  dump.precision = "fp64";
  dump.axes = axes_of(layout_, group_);
  if (group_.rank() != 0) return;
  for (std::size_t i = 0; i < made.names.size(); ++i)
    dump.gradients.emplace_back(made.names[i], made.gradients[i]);
  dump.figures = made.figures;
  dump.terms = made.terms;
}

std::vector<Finding> Investigation::diagnose(RunPair pair, bool failed, const DataByRank* data) {
  const auto is_part = [](const Batch& batch) { return batch.cut != nullptr; };
  at::Tensor cut =
      at::full({1}, std::any_of(problem_.local.begin(), problem_.local.end(), is_part) ? 1 : 0, at::kLong);
  group_.all_reduce(cut, ReduceOp::kMax);
  is_cut_ = cut.item<std::int64_t>() != 0;
  if (group_.rank() == 0) {
    auto findings = isograd::diagnose(pair);
    const bool asks = problem_.experiments && (failed || !findings.empty());
    if (!asks) {
      share_experiment(std::nullopt, group_);
      return findings;
    }
    findings = isograd::diagnose(pair, [&](const Experiment& experiment) {
      share_experiment(experiment, group_);
      return again(experiment, *data);
    });
    share_experiment(std::nullopt, group_);
    return findings;
  }
  while (const auto experiment = share_experiment(std::nullopt, group_)) again(*experiment, *data);
  return {};
}

std::optional<RunPair> Investigation::again(const Experiment& experiment, const DataByRank& data) {
  const bool reports = group_.rank() == 0;
  // Decided alike on all ranks, from what all of them know.
  if (experiment.without_resume && !problem_.uninterrupted) return std::nullopt;
  if (experiment.ranks > 0 && !problem_.subgroup) return std::nullopt;
  const bool as_given = experiment == Experiment{};
  if ((is_cut_ || problem_.loss.global) && !as_given) return std::nullopt;
  if (problem_.loss.replicas && !(experiment == Experiment{})) return std::nullopt;
  VerifyModel in_fp64 = initial_.model(problem_, at::kDouble);
  if (experiment.without_noise) {
    if (!in_fp64.without_noise) return std::nullopt;
    in_fp64.without_noise();
  }
  std::optional<DataByRank> dealt;
  if (experiment.without_resume)
    dealt = gather_batches(problem_.uninterrupted(), group_);
  else
    dealt = arrange(data, experiment);
  if (!dealt) return std::nullopt;

  RunPair pair;
  pair.found.counts = counts_of(*dealt);
  if (problem_.loss.mean != Mean::kTargets) pair.found.counts.clear();
  pair.found.samples = as_given ? samples_over_ranks(problem_.local, group_) : samples_of(all_of(*dealt));
  pair.found.axes = axes_of(layout_, group_);
  {
    Turns turns(group_);
    if (reports) {
      VerifyModel model = initial_.model(problem_, at::kDouble);
      if (experiment.without_noise) model.without_noise();
      // The step as given is compared with the whole step as one process would have it.
      const bool given = experiment == Experiment{} || experiment.without_resume;
      const MicroBatches whole = given ? problem_.whole() : all_of(*dealt);
      const auto parts =
          given && problem_.loss.replicas ? problem_.loss.replicas() : std::vector<MicroBatches>{whole};
      const OracleStep oracle =
          oracle_step(model, parts, problem_.loss, problem_.step.max_norm, [&turns] { turns.tick(); });
      pair.expected = dump_of(oracle, initial_, pair.found, samples_of(whole), 0);
    }
    turns.finish();
  }
  if (experiment.reference_only) return pair;

  std::vector<int> members;
  for (int rank = 0; rank < (experiment.ranks > 0 ? experiment.ranks : group_.size()); ++rank)
    members.push_back(rank);
  if (group_.rank() >= static_cast<int>(members.size())) return std::nullopt;
  Group group = experiment.ranks > 0 ? problem_.subgroup(members) : group_;
  const MicroBatches& local = as_given ? problem_.local : (*dealt)[static_cast<std::size_t>(group.rank())];
  std::optional<LayoutRun> fresh;
  if (!(experiment == Experiment{})) fresh.emplace(problem_, layout_, std::move(in_fp64), group);
  LayoutRun& run = fresh ? *fresh : exact_;
  const LayoutRun::Made made = run.step(local);
  if (experiment.ranks > 0) run.describe(made, checksums_of(initial_), pair.found);
  pair.found.precision = "fp64";
  for (std::size_t i = 0; i < made.names.size(); ++i)
    pair.found.gradients.emplace_back(made.names[i], made.gradients[i]);
  pair.found.figures = made.figures;
  pair.found.terms = made.terms;
  return pair;
}

}  // namespace isograd
