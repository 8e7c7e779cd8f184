// A table played out: whether it is complete and ends, when each action begins, and what a rank keeps.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/refuse.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;

[[noreturn]] void refuse_table(const PipelineTable& table, std::string found, std::string expected,
                               std::string action = "Change the table's 'ranks'") {
  refuse(fmt::format("the schedule '{}'", table.name), std::move(found), std::move(expected),
         std::move(action));
}

// Sums of these are finite, and one can be drawn in a picture of the other.
constexpr double kLeastTime = 1e-100, kMostTime = 1e100;

// By stage and micro-batch.
class Places {
 public:
  explicit Places(const PipelineTable& table)
      : micro_batches_(static_cast<std::size_t>(table.micro_batches)) {}
  std::size_t operator()(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * micro_batches_ + static_cast<std::size_t>(micro_batch);
  }

 private:
  std::size_t micro_batches_;
};

// Everything about a table that needs no time: each action once, where it belongs, after what it needs of its
// own rank.
class Completeness {
 public:
  explicit Completeness(const PipelineTable& table)
      : table_(table),
        at_(table),
        seen_(static_cast<std::size_t>(std::max(0, table.stages)) *
                  static_cast<std::size_t>(std::max(0, table.micro_batches)),
              0) {}

  void check() {
    if (table_.stages < 1 || table_.micro_batches < 1 || table_.ranks.empty())
      refuse_table(table_,
                   fmt::format("{} stages, {} micro-batches, {} ranks", table_.stages, table_.micro_batches,
                               table_.ranks.size()),
                   "1 or more of each", "Change the table's 'stages', 'micro_batches' or 'ranks'");
    check_stages();
    for (const auto& actions : table_.ranks)
      for (const PipelineAction& action : actions) transfers_ |= action.is_transfer();
    for (std::size_t rank = 0; rank < table_.ranks.size(); ++rank)
      for (const PipelineAction& action : table_.ranks[rank]) take(static_cast<int>(rank), action);
    for (int stage = 0; stage < table_.stages; ++stage)
      for (int i = 0; i < table_.micro_batches; ++i) check_all_there(stage, i);
  }
  bool has_transfers() const { return transfers_; }

 private:
  void check_stages() const {
    if (table_.rank_of_stage.size() != static_cast<std::size_t>(table_.stages))
      refuse_table(table_, fmt::format("ranks of {} stages", table_.rank_of_stage.size()),
                   fmt::format("one for each of {}", table_.stages), "Change PipelineTable::rank_of_stage");
    for (int stage = 0; stage < table_.stages; ++stage)
      if (const int rank = rank_of(stage); rank < 0 || rank >= static_cast<int>(table_.ranks.size()))
        refuse_table(table_, fmt::format("stage {} on rank {}", stage, rank),
                     fmt::format("ranks 0 to {}", table_.ranks.size() - 1),
                     "Change PipelineTable::rank_of_stage");
  }
  int rank_of(int stage) const { return table_.rank_of_stage[static_cast<std::size_t>(stage)]; }
  bool has(int stage, int i, Kind kind) const { return seen_[at_(stage, i)] >> static_cast<int>(kind) & 1; }
  bool is_elsewhere(int stage, int rank) const {
    return stage >= 0 && stage < table_.stages && rank_of(stage) != rank;
  }

  void take(int rank, const PipelineAction& action) {
    const auto& [kind, stage, i] = action;
    const auto bad = [&](const std::string& found, const std::string& expected) {
      refuse_table(table_, fmt::format("{} on rank {}{}", to_text(action), rank, found), expected);
    };
    if (stage < 0 || stage >= table_.stages) bad("", fmt::format("stages 0 to {}", table_.stages - 1));
    if (i < 0 || i >= table_.micro_batches)
      bad("", fmt::format("micro-batches 0 to {}", table_.micro_batches - 1));
    if (rank_of(stage) != rank)
      bad(fmt::format(", stage {} on rank {}", stage, rank_of(stage)), "each stage on one rank");
    if (has(stage, i, kind)) bad(" a second time", "each once");
    const auto after = [&](Kind other) {
      if (!has(stage, i, other)) bad(" before " + to_text({other, stage, i}), "the other way round");
    };
    const auto one_way_of_two = [&](Kind other) {
      if (has(stage, i, other))
        bad(" and " + to_text({other, stage, i}), "a whole backward, or its two halves");
    };
    const bool from_before = transfers_ && is_elsewhere(stage - 1, rank),
               from_behind = transfers_ && is_elsewhere(stage + 1, rank);
    switch (kind) {
      case Kind::kForward:
        if (from_before) after(Kind::kReceiveInput);
        break;
      case Kind::kBackward:
      case Kind::kBackwardInputs:
        one_way_of_two(kind == Kind::kBackward ? Kind::kBackwardInputs : Kind::kBackward);
        after(Kind::kForward);
        if (from_behind) after(Kind::kReceiveGradient);
        break;
      case Kind::kBackwardWeights:
        one_way_of_two(Kind::kBackward);
        after(Kind::kBackwardInputs);
        break;
      case Kind::kSendOutput:
      case Kind::kReceiveGradient:
        if (!from_behind) bad("", "transfers between two ranks alone");
        if (kind == Kind::kSendOutput) after(Kind::kForward);
        break;
      case Kind::kSendGradient:
      case Kind::kReceiveInput:
        if (!from_before) bad("", "transfers between two ranks alone");
        if (kind == Kind::kSendGradient && !has(stage, i, Kind::kBackward)) after(Kind::kBackwardInputs);
        break;
    }
    seen_[at_(stage, i)] |= static_cast<std::uint8_t>(1 << static_cast<int>(kind));
  }

  void check_all_there(int stage, int i) const {
    const auto wants = [&](Kind kind) {
      if (!has(stage, i, kind))
        refuse_table(table_, fmt::format("no {} on rank {}", to_text({kind, stage, i}), rank_of(stage)),
                     "every micro-batch once through each stage and back");
    };
    wants(Kind::kForward);
    if (!has(stage, i, Kind::kBackwardInputs)) wants(Kind::kBackward);
    if (has(stage, i, Kind::kBackwardInputs)) wants(Kind::kBackwardWeights);
    if (!transfers_) return;
    if (is_elsewhere(stage + 1, rank_of(stage))) wants(Kind::kSendOutput);
    if (is_elsewhere(stage - 1, rank_of(stage))) wants(Kind::kSendGradient);
  }

  const PipelineTable& table_;
  Places at_;
  std::vector<std::uint8_t> seen_;  // a bit for each kind
  bool transfers_ = false;
};

// Plays the actions in order: a rank waits for what another, or itself, makes. With transfers in the table
// what is waited for is what was sent, otherwise what was computed.
class Play {
 public:
  Play(const PipelineTable& table, const PipelineTimes& times, bool has_transfers, double between_halves)
      : table_(table),
        times_(times),
        at_(table),
        has_transfers_(has_transfers),
        cells_(static_cast<std::size_t>(table.stages) * static_cast<std::size_t>(table.micro_batches)),
        next_(table.ranks.size(), 0),
        clock_(table.ranks.size(), 0),
        between_halves_(between_halves) {
    ready_.assign((has_transfers ? 4 : 2) * cells_, -1);
    waiting_.assign(ready_.size(), -1);
    result_.spans.resize(table.ranks.size());
    result_.busy.assign(table.ranks.size(), 0);
    result_.most_live.assign(table.ranks.size(), 0);
    result_.most_kept.assign(table.ranks.size(), 0);
    whole_.assign(table.ranks.size(), 0);
    halved_.assign(table.ranks.size(), 0);
    for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
      result_.spans[rank].reserve(table.ranks[rank].size());
  }

  PipelineTimeline run() {
    std::vector<int> able(table_.ranks.size());
    std::iota(able.rbegin(), able.rend(), 0);
    while (!able.empty()) {
      const int rank = able.back();
      able.pop_back();
      while (next_[index(rank)] < table_.ranks[index(rank)].size())
        if (!act(rank, able)) break;
    }
    for (std::size_t rank = 0; rank < table_.ranks.size(); ++rank)
      if (next_[rank] < table_.ranks[rank].size()) refuse_deadlock(static_cast<int>(rank));
    result_.length = *std::max_element(clock_.begin(), clock_.end());
    return std::move(result_);
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  const PipelineAction& action_of(int rank) const { return table_.ranks[index(rank)][next_[index(rank)]]; }
  int rank_of(int stage) const { return table_.rank_of_stage[index(stage)]; }
  // Computed outputs, computed gradients of inputs; with transfers both as sent.
  std::size_t output(int stage, int i) const { return at_(stage, i); }
  std::size_t gradient(int stage, int i) const { return cells_ + at_(stage, i); }

  struct Need {
    std::size_t what;
    PipelineAction made_by;
    double transfer;
  };
  // The next action of a rank may need what another action makes; what it needs of its own rank has been
  // checked before.
  std::optional<Need> need_of(int rank) const {
    const auto& [kind, stage, i] = action_of(rank);
    const bool last = stage + 1 == table_.stages;
    switch (kind) {
      case Kind::kForward:
        if (stage == 0) return std::nullopt;
        if (has_transfers_ && rank_of(stage - 1) != rank) return std::nullopt;
        return Need{output(stage - 1, i), {Kind::kForward, stage - 1, i}, delay(stage - 1, rank)};
      case Kind::kBackward:
      case Kind::kBackwardInputs:
        if (last || (has_transfers_ && rank_of(stage + 1) != rank)) return std::nullopt;
        return Need{gradient(stage + 1, i), {Kind::kBackward, stage + 1, i}, delay(stage + 1, rank)};
      case Kind::kReceiveInput:
        return Need{2 * cells_ + output(stage - 1, i), {Kind::kSendOutput, stage - 1, i}, times_.transfer};
      case Kind::kReceiveGradient:
        return Need{
            2 * cells_ + gradient(stage + 1, i), {Kind::kSendGradient, stage + 1, i}, times_.transfer};
      default: return std::nullopt;
    }
  }
  double delay(int from_stage, int to_rank) const {
    return rank_of(from_stage) == to_rank ? 0 : times_.transfer;
  }

  // False where the rank has to wait.
  bool act(int rank, std::vector<int>& able) {
    const PipelineAction& action = action_of(rank);
    double begin = clock_[index(rank)];
    if (const auto need = need_of(rank)) {
      if (ready_[need->what] < 0) {
        waiting_[need->what] = rank;
        return false;
      }
      begin = std::max(begin, ready_[need->what] + need->transfer);
    }
    const double end = begin + time_of(action);
    const auto makes = [&](std::size_t what) {
      ready_[what] = end;
      if (waiting_[what] >= 0) able.push_back(waiting_[what]);
    };
    const auto& [kind, stage, i] = action;
    if (kind == Kind::kForward) makes(output(stage, i));
    if (kind == Kind::kBackward || kind == Kind::kBackwardInputs) makes(gradient(stage, i));
    keep(index(rank), kind);
    if (kind == Kind::kSendOutput) makes(2 * cells_ + output(stage, i));
    if (kind == Kind::kSendGradient) makes(2 * cells_ + gradient(stage, i));
    if (!action.is_transfer()) result_.busy[index(rank)] += end - begin;
    result_.spans[index(rank)].push_back({begin, end});
    clock_[index(rank)] = end;
    ++next_[index(rank)];
    return true;
  }

  // Counts what the rank keeps when an action is done.
  void keep(std::size_t rank, Kind kind) {
    int &whole = whole_[rank], &halved = halved_[rank];
    if (kind == Kind::kForward) ++whole;
    if (kind == Kind::kBackward || kind == Kind::kBackwardInputs) --whole;
    if (kind == Kind::kBackwardInputs) ++halved;
    if (kind == Kind::kBackwardWeights) --halved;
    int& live = result_.most_live[rank];
    live = std::max(live, whole + halved);
    double& kept = result_.most_kept[rank];
    kept = std::max(kept, whole + between_halves_ * halved);
  }

  double time_of(const PipelineAction& action) const {
    const std::size_t stage = index(action.stage);
    switch (action.kind) {
      case Kind::kForward: return times_.forward[stage];
      case Kind::kBackward: return times_.backward_inputs[stage] + times_.backward_weights[stage];
      case Kind::kBackwardInputs: return times_.backward_inputs[stage];
      case Kind::kBackwardWeights: return times_.backward_weights[stage];
      default: return 0;
    }
  }

  // Who waits for whom, from this rank on, until somebody is met again.
  [[noreturn]] void refuse_deadlock(int rank) const {
    std::string text;
    std::vector<bool> met(table_.ranks.size(), false);
    for (int shown = 0; !met[index(rank)] && shown < 8; ++shown) {
      met[index(rank)] = true;
      const Need need = need_of(rank).value();
      const int maker = rank_of(need.made_by.stage);
      text += fmt::format("{}rank {} waits before {} for {} of rank {}", text.empty() ? "" : "; ", rank,
                          to_text(action_of(rank)), to_text(need.made_by), maker);
      if (maker == rank) break;
      rank = maker;
    }
    refuse_table(table_, text, "an order in which each rank's next action can be done at last");
  }

  const PipelineTable& table_;
  const PipelineTimes& times_;
  Places at_;
  bool has_transfers_;
  std::size_t cells_;
  std::vector<std::size_t> next_;
  std::vector<double> clock_;
  std::vector<double> ready_{};  // when; -1: not yet
  std::vector<int> waiting_{};   // the rank that does; -1: none
  double between_halves_;
  std::vector<int> whole_{}, halved_{};  // micro-batches of stages by rank: with all that their forward kept,
                                         // and with what the second half of their backward needs
  PipelineTimeline result_{};
};

}  // namespace

PipelineTimes uniform_times(int stages, double forward, double backward_inputs, double backward_weights,
                            double transfer) {
  const auto all = [&](double time) { return std::vector<double>(static_cast<std::size_t>(stages), time); };
  return {.forward = all(forward),
          .backward_inputs = all(backward_inputs),
          .backward_weights = all(backward_weights),
          .transfer = transfer};
}

double PipelineTimeline::bubble() const {
  const double all = length * static_cast<double>(busy.size());
  return all > 0 ? 1 - std::accumulate(busy.begin(), busy.end(), 0.0) / all : 0;
}

PipelineTimeline simulate(const PipelineTable& table, const PipelineTimes& times, double between_halves) {
  Completeness completeness(table);
  completeness.check();
  const auto check_time = [&](double time, const std::string& of) {
    if (time == 0 || (time >= kLeastTime && time <= kMostTime)) return;
    refuse_table(table, fmt::format("{} that takes {}", of, time),
                 fmt::format("0, or {} to {}", kLeastTime, kMostTime), "Change that time, or the unit");
  };
  for (const auto& [each, of] : {std::pair{&times.forward, "a forward"},
                                 {&times.backward_inputs, "a backward of inputs"},
                                 {&times.backward_weights, "a backward of weights"}}) {
    if (each->size() != static_cast<std::size_t>(table.stages))
      refuse_table(table, fmt::format("{} times of {}", each->size(), of),
                   fmt::format("one for each of {} stages", table.stages), "Give as many times as stages");
    for (std::size_t stage = 0; stage < each->size(); ++stage)
      check_time((*each)[stage], fmt::format("{} of stage {}", of, stage));
  }
  check_time(times.transfer, "a transfer");
  if (!(between_halves >= 0) || !std::isfinite(between_halves))
    refuse_table(table,
                 fmt::format("{} of a forward's memory between the halves of a backward", between_halves),
                 "a finite number, 0 or more", "Change between_halves");
  return Play(table, times, completeness.has_transfers(), between_halves).run();
}

void check_pipeline(const PipelineTable& table) { simulate(table, uniform_times(std::max(1, table.stages))); }

}  // namespace isograd
