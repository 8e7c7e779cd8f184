// The schedules, each as the order in which one rank acts.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "parallel/pipeline/stages.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;

// One rank's actions as they are written down; each kind goes through the micro-batches of a stage in order.
class Writer {
 public:
  Writer(int stages, int micro_batches) : micro_batches_(micro_batches) {
    for (auto* next : {&forwards_, &backwards_, &weights_}) next->assign(static_cast<std::size_t>(stages), 0);
  }

  void forward(int stage) { write(Kind::kForward, stage, forwards_); }
  void backward(int stage) { write(Kind::kBackward, stage, backwards_); }
  void inputs(int stage) { write(Kind::kBackwardInputs, stage, backwards_); }
  void weights(int stage) { write(Kind::kBackwardWeights, stage, weights_); }

  int forwards(int stage) const { return forwards_[static_cast<std::size_t>(stage)]; }
  int backwards(int stage) const { return backwards_[static_cast<std::size_t>(stage)]; }
  int pending_weights(int stage) const {
    return backwards(stage) - weights_[static_cast<std::size_t>(stage)];
  }
  std::vector<PipelineAction> take() { return std::move(actions_); }

 private:
  // Micro-batches beyond the last are counted and not written: orders for many leave out what fewer lack.
  void write(Kind kind, int stage, std::vector<int>& next) {
    const int micro_batch = next[static_cast<std::size_t>(stage)]++;
    if (micro_batch < micro_batches_) actions_.push_back({kind, stage, micro_batch});
  }

  int micro_batches_;
  std::vector<int> forwards_{}, backwards_{}, weights_{};
  std::vector<PipelineAction> actions_{};
};

struct Shape {
  int ranks, stages_of_rank, micro_batches;
  int stages() const { return ranks * stages_of_rank; }
};

void one_after_another(Writer& to, const Shape& shape, int rank) {
  for (int i = 0; i < shape.micro_batches; ++i) {
    for (int stage = rank; stage < shape.stages(); stage += shape.ranks) to.forward(stage);
    for (int stage = rank + shape.stages() - shape.ranks; stage >= 0; stage -= shape.ranks)
      to.backward(stage);
  }
}

void gpipe(Writer& to, const Shape& shape, int rank) {
  for (int i = 0; i < shape.micro_batches; ++i) to.forward(rank);
  for (int i = 0; i < shape.micro_batches; ++i) to.backward(rank);
}

// A rank is ahead by the ranks behind it: when its first gradient comes back, they all are busy.
void one_forward_one_backward(Writer& to, const Shape& shape, int rank) {
  const int ahead = std::min(shape.micro_batches, shape.ranks - 1 - rank);
  for (int i = 0; i < ahead; ++i) to.forward(rank);
  for (int i = ahead; i < shape.micro_batches; ++i) to.forward(rank), to.backward(rank);
  for (int i = 0; i < ahead; ++i) to.backward(rank);
}

// Micro-batches go through a rank's stages in groups of as many as there are ranks: the first stage of the
// whole group, then the second. Backwards take the stages the other way round.
void interleaved(Writer& to, const Shape& shape, int rank) {
  const int total = shape.micro_batches * shape.stages_of_rank;
  const auto stage_of = [&](int step, bool forward) {
    const int place = step / shape.ranks % shape.stages_of_rank;
    return rank + shape.ranks * (forward ? place : shape.stages_of_rank - 1 - place);
  };
  const int ahead = std::min(total, 2 * (shape.ranks - 1 - rank) + (shape.stages_of_rank - 1) * shape.ranks);
  for (int i = 0; i < ahead; ++i) to.forward(stage_of(i, true));
  for (int i = ahead; i < total; ++i) to.forward(stage_of(i, true)), to.backward(stage_of(i - ahead, false));
  for (int i = total - ahead; i < total; ++i) to.backward(stage_of(i, false));
}

// 1f1b with the gradients of weights delayed. Rank r delays up to r of them, because it is r micro-batches
// less ahead than rank 0. So every rank keeps as many activations as rank 0, no rank delays the one before
// it, and the delayed work fills the end.
void zero_bubble_h1(Writer& to, const Shape& shape, int rank) {
  const int ahead = std::min(shape.micro_batches, shape.ranks - 1 - rank);
  const auto backward = [&] {
    to.inputs(rank);
    if (to.pending_weights(rank) > rank) to.weights(rank);
  };
  for (int i = 0; i < ahead; ++i) to.forward(rank);
  for (int i = ahead; i < shape.micro_batches; ++i) to.forward(rank), backward();
  for (int i = 0; i < ahead; ++i) backward();
  while (to.pending_weights(rank) > 0) to.weights(rank);
}

// The order of the paper's ZB-V: rank r has the stages r (down) and 2 ranks - 1 - r (back up).
void zero_bubble_v(Writer& to, const Shape& shape, int rank) {
  const int down = rank, up = shape.stages() - 1 - rank;
  const int micro_batches =
      std::max(2 * shape.ranks - 1, shape.micro_batches);  // with fewer, some are left out
  for (int i = 0; i < 2 * (shape.ranks - rank) - 1; ++i) to.forward(down);
  for (int i = 0; i < rank; ++i) to.forward(up), to.forward(down);
  for (int i = 0; i < shape.ranks - rank; ++i) to.forward(up), to.inputs(up), to.weights(up);
  while (to.forwards(up) < to.forwards(down) || to.forwards(down) < micro_batches) {
    if (to.forwards(down) < micro_batches) to.forward(down);
    to.inputs(down), to.weights(down);
    to.forward(up), to.inputs(up), to.weights(up);
  }
  for (int i = 0; i < rank; ++i) to.inputs(down), to.inputs(up);
  for (int i = 0; i < shape.ranks - rank; ++i) to.inputs(down), to.weights(down);
  while (to.pending_weights(up) > 0) to.weights(up);
  while (to.pending_weights(down) > 0) to.weights(down);
}

struct Schedule {
  ScheduleFacts facts;
  void (*write)(Writer&, const Shape&, int rank);
};
constexpr Schedule kSchedules[] = {{{"one-after-another", 1, 0, false, false}, one_after_another},
                                   {{"gpipe", 1, 1, false, false}, gpipe},
                                   {{"1f1b", 1, 1, false, false}, one_forward_one_backward},
                                   {{"interleaved", 2, 0, true, false}, interleaved},
                                   {{"zb-h1", 1, 1, false, true}, zero_bubble_h1},
                                   {{"zb-v", 2, 2, false, true}, zero_bubble_v}};

const Schedule* find(std::string_view name) {
  const auto* found = std::ranges::find(kSchedules, name, [](const Schedule& one) { return one.facts.name; });
  return found == std::end(kSchedules) ? nullptr : found;
}

const Schedule& named(std::string_view name) {
  if (const Schedule* found = find(name)) return *found;
  refuse("a pipeline's schedule", std::string(name), fmt::format("{}", fmt::join(pipeline_schedules(), ", ")),
         "Choose one of them");
}

void check(const ScheduleFacts& schedule, const Shape& shape) {
  const auto refuse = [&](std::string found, std::string expected, std::string action) {
    isograd::refuse(fmt::format("the schedule {}", schedule.name), std::move(found), std::move(expected),
                    std::move(action));
  };
  for (const auto& [number, what] : {std::pair{shape.ranks, "ranks"},
                                     {shape.stages_of_rank, "stages on a rank"},
                                     {shape.micro_batches, "micro-batches"}})
    if (number < 1) refuse(fmt::format("{} {}", number, what), "1 or more", "Change it");
  const double forwards = double(shape.ranks) * shape.stages_of_rank * shape.micro_batches;
  if (forwards > kMostForwards)
    refuse(fmt::format("{} ranks, {} stages on each and {} micro-batches: {:.0f} forwards", shape.ranks,
                       shape.stages_of_rank, shape.micro_batches, forwards),
           fmt::format("at most {} forwards", kMostForwards), "Ask for fewer stages or micro-batches");
  const int most = schedule.most_stages;
  if (shape.stages_of_rank < schedule.least_stages || (most > 0 && shape.stages_of_rank > most))
    refuse(fmt::format("{} stages on each rank", shape.stages_of_rank),
           most == schedule.least_stages ? std::to_string(most)
                                         : fmt::format("{} or more", schedule.least_stages),
           "Give each rank as many, or take another schedule");
  if (const int rounds = shape.micro_batches / shape.ranks;
      schedule.whole_rounds && shape.micro_batches % shape.ranks != 0)
    refuse(fmt::format("{} micro-batches on {} ranks", shape.micro_batches, shape.ranks),
           fmt::format("a multiple of the ranks: {}{}",
                       rounds > 0 ? fmt::format("{} or ", rounds * shape.ranks) : "",
                       (rounds + 1) * shape.ranks),
           "Change the micro-batches, or take another schedule");
}

}  // namespace

std::vector<std::string> pipeline_schedules() {
  std::vector<std::string> names;
  for (const Schedule& schedule : kSchedules) names.emplace_back(schedule.facts.name);
  return names;
}

const ScheduleFacts* find_schedule(std::string_view name) {
  const Schedule* found = find(name);
  return found ? &found->facts : nullptr;
}

const ScheduleFacts& schedule_named(std::string_view name) { return named(name).facts; }

PipelineTable make_pipeline(const std::string& name, int ranks, int stages_of_rank, int micro_batches) {
  const Schedule& schedule = named(name);
  const Shape shape{ranks, stages_of_rank, micro_batches};
  check(schedule.facts, shape);
  PipelineTable table{.name = name, .stages = shape.stages(), .micro_batches = micro_batches};
  for (int stage = 0; stage < table.stages; ++stage) {
    const bool back = name == "zb-v" && stage >= ranks;
    table.rank_of_stage.push_back(back ? table.stages - 1 - stage : stage % ranks);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    Writer writer(table.stages, micro_batches);
    schedule.write(writer, shape, rank);
    table.ranks.push_back(writer.take());
  }
  return table;
}

bool has_halves(const PipelineTable& table) {
  for (const auto& actions : table.ranks)
    for (const PipelineAction& action : actions)
      if (action.kind == Kind::kBackwardInputs || action.kind == Kind::kBackwardWeights) return true;
  return false;
}

PipelineTable with_transfers(const PipelineTable& table) {
  PipelineTable result = table;
  const auto rank_of = [&](int stage) { return table.rank_of_stage.at(static_cast<std::size_t>(stage)); };
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank) {
    auto& actions = result.ranks[rank];
    actions.clear();
    const auto elsewhere = [&](int stage) {
      return stage >= 0 && stage < table.stages && rank_of(stage) != static_cast<int>(rank);
    };
    for (const PipelineAction& action : table.ranks[rank]) {
      if (action.is_transfer()) continue;
      const auto& [kind, stage, micro_batch] = action;
      const bool forward = kind == Kind::kForward, backward = !forward && kind != Kind::kBackwardWeights;
      if (forward && elsewhere(stage - 1)) actions.push_back({Kind::kReceiveInput, stage, micro_batch});
      if (backward && elsewhere(stage + 1)) actions.push_back({Kind::kReceiveGradient, stage, micro_batch});
      actions.push_back(action);
      if (forward && elsewhere(stage + 1)) actions.push_back({Kind::kSendOutput, stage, micro_batch});
      if (backward && elsewhere(stage - 1)) actions.push_back({Kind::kSendGradient, stage, micro_batch});
    }
  }
  return result;
}

}  // namespace isograd
