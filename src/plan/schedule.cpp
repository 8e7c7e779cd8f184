// A pipeline's length from a short simulation: once a schedule is filled, its actions repeat, and so does
// what they wait for.
#include "plan/memory.hpp"

#include <algorithm>
#include <cmath>

#include "plan/problem.hpp"

namespace isograd::planner {
namespace {

using Kind = PipelineAction::Kind;

// As many micro-batches as the schedule takes: whole rounds where ranks go through them in groups.
std::int64_t rounded(const Candidate& candidate, std::int64_t micro_batches) {
  if (candidate.schedule != Schedule::kInterleaved) return micro_batches;
  return most_of(micro_batches, candidate.pp) * candidate.pp;
}

// When the actions of each micro-batch end: [micro-batch][stage and kind].
std::vector<std::vector<double>> ends_of(const PipelineTable& table, const PipelineTimeline& timeline) {
  constexpr std::size_t kKinds = 4;
  std::vector<std::vector<double>> ends(std::size_t(table.micro_batches),
                                        std::vector<double>(std::size_t(table.stages) * kKinds, 0));
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
    for (std::size_t i = 0; i < table.ranks[rank].size(); ++i) {
      const PipelineAction& action = table.ranks[rank][i];
      ends[std::size_t(action.micro_batch)][std::size_t(action.stage) * kKinds + std::size_t(action.kind)] =
          timeline.spans[rank][i].end;
    }
  return ends;
}

struct Period {
  std::int64_t micro_batches = 1;
  double seconds = 0;
};

// The smallest number of micro-batches after which everything happens again, later by the same time, before a
// schedule begins to empty. What a micro-batch waits for lies at most `reach` of them back, so that as many
// which repeat do so for ever.
std::optional<Period> period_of(const PipelineTable& table, const PipelineTimeline& timeline,
                                std::int64_t reach, std::int64_t step) {
  const auto ends = ends_of(table, timeline);
  const std::int64_t behind = table.micro_batches - reach;  // where it begins to empty
  for (std::int64_t period = step; period <= behind - 2 * reach; period += step) {
    const double later = ends[std::size_t(behind - 1)][0] - ends[std::size_t(behind - 1 - period)][0];
    const double slack = 1e-13 * timeline.length;
    bool repeats = true;
    for (std::int64_t i = behind - reach; i < behind && repeats; ++i) {
      const auto &one = ends[std::size_t(i)], &before = ends[std::size_t(i - period)];
      for (std::size_t k = 0; k < one.size() && repeats; ++k)
        repeats = one[k] == 0 || std::abs(one[k] - before[k] - later) <= slack;
    }
    if (repeats) return Period{period, later};
  }
  return std::nullopt;
}

}  // namespace

const PipelineTable& Pipelines::table(const Candidate& candidate, std::int64_t micro_batches) {
  const Key key = key_of(candidate, micro_batches);
  if (const auto found = tables_.find(key); found != tables_.end()) return found->second;
  constexpr std::size_t kMostActions = 4'000'000;  // 50 MB
  if (actions_ > kMostActions) tables_.clear(), actions_ = 0;
  PipelineTable made = make_pipeline(std::string(name_of(candidate.schedule)), candidate.pp,
                                     candidate.stages_per_rank, int(micro_batches));
  for (const auto& rank : made.ranks) actions_ += rank.size();
  return tables_.emplace(key, std::move(made)).first->second;
}

double Pipelines::length(const Candidate& candidate, const StageTimes& times, std::int64_t micro_batches) {
  const auto simulated = [&](std::int64_t count) { return simulate(table(candidate, count), times).length; };
  if (candidate.schedule == Schedule::kGPipe) {
    // Two flow shops of equal jobs, which grow by their slowest stage from the first job on.
    if (micro_batches < 3) return simulated(micro_batches);
    const double one = simulated(1), two = simulated(2);
    return one + double(micro_batches - 1) * (two - one);
  }
  const std::int64_t reach = candidate.pp * (candidate.stages_per_rank > 1 ? 2 : 1);
  for (std::int64_t most = rounded(candidate, 4 * reach + 2); most < micro_batches; most *= 2) {
    const PipelineTable& filled = table(candidate, most);
    const PipelineTimeline timeline = simulate(filled, times);
    const auto period = period_of(filled, timeline, reach, rounded(candidate, 1));
    if (!period) continue;
    const std::int64_t rest = (micro_batches - most) % period->micro_batches,
                       more = (micro_batches - most) / period->micro_batches;
    return (rest == 0 ? timeline.length : simulated(most + rest)) + double(more) * period->seconds;
  }
  return simulated(micro_batches);
}

double Pipelines::seconds(const Candidate& candidate, const StageTimes& times) {
  const std::int64_t micro_batches = rounded(candidate, candidate.micro_batches);
  if (candidate.schedule == Schedule::kNone)
    return double(micro_batches) *
           (times.forward.front() + times.backward_inputs.front() + times.backward_weights.front());
  std::vector<double> all = times.forward;
  for (const auto* more : {&times.backward_inputs, &times.backward_weights})
    all.insert(all.end(), more->begin(), more->end());
  all.push_back(times.transfer);
  const auto [found, is_new] = lengths_.try_emplace({key_of(candidate, micro_batches), std::move(all)}, 0);
  if (is_new) found->second = length(candidate, times, micro_batches);
  return found->second;
}

double Pipelines::most_kept(const Candidate& candidate, int rank_of_pipeline, const std::vector<double>& kept,
                            const std::vector<double>& between_halves, const std::vector<double>& passing,
                            const std::vector<double>& passing_weights) {
  if (candidate.schedule == Schedule::kNone) return kept.front() + passing.front();
  const std::int64_t asked = rounded(candidate, candidate.micro_batches);
  // No rank has more in flight than twice the stages' ranks; gpipe has all of them.
  const std::int64_t played = std::min(asked, rounded(candidate, std::int64_t{4} * candidate.pp));
  double alive = 0, most = 0;
  for (const auto& [kind, stage, i] : this->table(candidate, played).ranks[std::size_t(rank_of_pipeline)]) {
    const auto at = std::size_t(stage);
    if (kind == Kind::kForward) {
      most = std::max(most, alive += kept[at]);
      continue;
    }
    most = std::max(most, alive + (kind == Kind::kBackwardWeights ? passing_weights : passing)[at]);
    if (kind == Kind::kBackward) alive -= kept[at];
    if (kind == Kind::kBackwardInputs) alive += between_halves[at] - kept[at];
    if (kind == Kind::kBackwardWeights) alive -= between_halves[at];
  }
  if (candidate.schedule == Schedule::kGPipe)
    most += double(asked - played) * kept[std::size_t(rank_of_pipeline)];
  return most;
}

PipelineTimeline Pipelines::timeline(const Candidate& candidate, const StageTimes& times,
                                     PipelineTable& table) {
  table = this->table(candidate, rounded(candidate, candidate.micro_batches));
  return simulate(table, times);
}

}  // namespace isograd::planner
