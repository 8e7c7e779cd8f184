#include "verify/investigate.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

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
  dump.amounts = found.amounts;
  dump.counted = found.counted;
  dump.axes = found.axes;
  dump.precision = "fp64";
  dump.ranks.push_back({.initial = checksums_of(initial), .gradients = {}});
  dump.ranks[0].norm = oracle.figures.norm;
  dump.ranks[0].owned_norm = oracle.figures.norm;
  if (bytes_needed > 0) dump.ranks[0].bytes_moved = bytes_needed;
  return dump;
}

// As LayoutUnderTest says: not given, one axis of all ranks.
static std::vector<Axis> axes_under_test(const LayoutUnderTest& layout, const Group& group) {
  return layout.axes.empty() ? std::vector<Axis>{{"the ranks", group.size()}} : layout.axes;
}

static bool any_part(const DataByRank& data) {
  for (const auto& batches : data)
    for (const Batch& batch : batches)
      if (batch.cut) return true;
  return false;
}

// A run of our own records all of them.
static void note_not_numbers(StepDump& dump) {
  dump.not_numbers.clear();
  const auto note = [&](const std::string& key, double value) {
    if (std::isnan(value)) dump.not_numbers.push_back(key);
  };
  note("loss", dump.figures.loss);
  note("norm", dump.figures.norm);
  note("clip_coefficient", dump.figures.clip_coefficient);
  for (const auto& [name, value] : dump.terms) note("terms." + name, value);
}

void Investigation::describe(const LayoutRun::RecordedStep& made, StepDump& dump) {
  exact_.describe(made, checksums_of(initial_), dump);
  dump.precision = "fp64";
  dump.axes = axes_under_test(layout_, group_);
  if (group_.rank() != 0) return;
  for (std::size_t i = 0; i < made.names.size(); ++i)
    dump.gradients.emplace_back(made.names[i], made.gradients[i]);
  dump.figures = made.figures;
  dump.terms = made.terms;
  note_not_numbers(dump);
}

Investigation::StepData Investigation::step_data_of(const VerifyProblem& problem, Group counting) {
  StepData step_data;
  if (!problem.dealing) {
    step_data.data = gather_batches(problem.local, counting);
    for (int rank = 0; rank < counting.size(); ++rank) step_data.data_rank.push_back(rank);
    return step_data;
  }
  // Ranks that share samples have the same ones: the first of them speaks for all.
  const at::Tensor ranks =
      counting.all_gather(at::full({1}, problem.dealing->data_rank, at::kLong)).reshape({-1});
  for (int rank = 0; rank < counting.size(); ++rank)
    step_data.data_rank.push_back(static_cast<int>(ranks[rank].item<std::int64_t>()));
  const auto first =
      std::find(step_data.data_rank.begin(), step_data.data_rank.end(), problem.dealing->data_rank);
  const bool speaks = first - step_data.data_rank.begin() == counting.rank();
  const DataByRank all = gather_batches(speaks ? problem.dealing->whole : MicroBatches{}, counting);
  step_data.data.resize(static_cast<std::size_t>(
      *std::max_element(step_data.data_rank.begin(), step_data.data_rank.end()) + 1));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) step_data.data[static_cast<std::size_t>(step_data.data_rank[rank])] = all[rank];
  return step_data;
}

bool Investigation::by_data_rank(Experiment& experiment, const StepData& step_data) {
  for (int* rank : {&experiment.empty_rank, &experiment.swapped[0], &experiment.swapped[1]})
    if (*rank >= 0) *rank = step_data.data_rank.at(static_cast<std::size_t>(*rank));
  return experiment.swapped[0] < 0 || experiment.swapped[0] != experiment.swapped[1];
}

bool Investigation::leave_only(DataByRank& data, const VerifyProblem& problem, const StepData& step_data,
                               int rank, int micro_batch, Group counting) {
  const auto owner = static_cast<std::size_t>(step_data.data_rank.at(static_cast<std::size_t>(rank)));
  for (std::size_t other = 0; other < data.size(); ++other)
    if (other != owner) data[other].clear();
  MicroBatches& own = data[owner];
  if (micro_batch >= static_cast<int>(own.size())) return false;
  if (problem.dealing) {
    const MicroBatches parts = counting.rank() == rank ? problem.dealing->cut(own) : MicroBatches{};
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

std::vector<Finding> Investigation::diagnose(RunPair pair, bool failed) {
  at::Tensor asks = at::zeros({1}, at::kLong);
  std::vector<Finding> findings;
  if (group_.rank() == 0) {
    findings = isograd::diagnose(pair);
    if (problem_.experiments && (failed || !findings.empty())) asks.fill_(1);
  }
  group_.broadcast(asks, 0);
  if (asks.item<std::int64_t>() == 0) return findings;
  step_data_ = step_data_of(problem_, problem_.counting(group_));
  if (group_.rank() == 0) {
    findings = isograd::diagnose(pair, [&](const Experiment& experiment) {
      share_experiment(experiment, group_);
      return again(experiment);
    });
    share_experiment(std::nullopt, group_);
    return findings;
  }
  while (const auto experiment = share_experiment(std::nullopt, group_)) again(*experiment);
  return {};
}

std::optional<RunPair> Investigation::again(const Experiment& asked) {
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
  std::optional<DataByRank> dealt;
  MicroBatches of;  // what is dealt before all but one rank's are taken away
  if (asked.without_resume) {
    dealt = gather_batches(problem.uninterrupted(), counting);
  } else {
    const StepData other = along ? step_data_of(problem, counting) : StepData{};
    const StepData& step_data = along ? other : step_data_;
    Experiment experiment = asked;
    experiment.only_rank = experiment.only_micro_batch = -1;
    // Parts of ranks that share samples can only be run as they were cut, by whoever made the problem.
    if (any_part(step_data.data) && !as_given) return std::nullopt;
    if (!by_data_rank(experiment, step_data)) return std::nullopt;
    dealt = arrange(step_data.data, experiment);
    if (dealt) of = all_of(*dealt);
    if (dealt && asked.only_rank >= 0 &&
        !leave_only(*dealt, problem, step_data, asked.only_rank, asked.only_micro_batch, counting))
      return std::nullopt;
  }
  if (!dealt) return std::nullopt;

  const bool shared = problem.dealing && asked.ranks == 0 && !asked.without_resume;
  const auto part_of = [&](int rank) {
    return shared ? problem.dealing->cut((*dealt)[static_cast<std::size_t>(problem.dealing->data_rank)])
           : rank < static_cast<int>(dealt->size()) ? (*dealt)[static_cast<std::size_t>(rank)]
                                                    : MicroBatches{};
  };
  RunPair pair;
  pair.found.axes = axes_under_test(layout, group_);
  if (asked.ranks > 0) pair.found.axes = {{"the ranks", asked.ranks}};
  if (!asked.reference_only)
    count_as_declared(shared ? gather_batches(part_of(counting.rank()), counting) : *dealt, problem.loss,
                      pair.found);
  pair.found.samples = as_given ? samples_over_ranks(problem.local, counting) : samples_of(all_of(*dealt));
  {
    Heartbeat heartbeat(group_);
    if (reports) {
      VerifyModel model = initial_.oracle(problem);
      if (asked.without_noise) model.without_noise();
      // The step as given is compared with the whole step as one process would have it.
      const bool given = as_given || asked.without_resume;
      const MicroBatches whole = given ? problem.whole() : all_of(*dealt);
      const auto parts =
          given && problem.loss.replicas ? problem.loss.replicas() : std::vector<MicroBatches>{whole};
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
  pair.found.precision = "fp64";
  for (std::size_t i = 0; i < made.names.size(); ++i)
    pair.found.gradients.emplace_back(made.names[i], made.gradients[i]);
  pair.found.figures = made.figures;
  pair.found.terms = made.terms;
  note_not_numbers(pair.found);
  return pair;
}

}  // namespace isograd
