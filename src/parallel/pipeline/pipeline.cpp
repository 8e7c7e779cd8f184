// Runs a table: which stage computes, and what travels between stages.
#include "isograd/pipeline_parallel.hpp"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <compare>
#include <deque>
#include <map>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;

constexpr std::int64_t kMostDims = 8;
enum Way : int { kOutputs, kGradients };

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Autograd knows these types; tensors of others go between stages without a gradient.
bool has_gradients(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

// Which tensor it is that goes between two stages.
struct Address {
  int stage;  // that takes it
  Way way;
  std::int64_t micro_batch;  // kOutsideOfSteps: of a forward that no step makes
  auto operator<=>(const Address&) const = default;
};
constexpr std::int64_t kOutsideOfSteps = -1;

// Goes before each tensor from rank to rank. What a rank sends to another arrives in its order, which may be
// another than that in which it is taken: two stages may take micro-batches in different orders, and a step
// that was given up may have left some that nobody took.
struct Header {
  std::int64_t pipeline, period, stage, way, micro_batch, type, dims, sizes[kMostDims];

  Address address() const { return {static_cast<int>(stage), static_cast<Way>(way), micro_batch}; }
  at::IntArrayRef shape() const { return {sizes, static_cast<std::size_t>(dims)}; }
};
constexpr std::int64_t kHeaderNumbers = sizeof(Header) / sizeof(std::int64_t);
at::Tensor empty_header() { return at::empty({kHeaderNumbers}, at::kLong); }
Header& header_in(const at::Tensor& numbers) { return *static_cast<Header*>(numbers.mutable_data_ptr()); }

std::int64_t digest_of(const PipelineTable& table) {
  std::vector<int> numbers{table.stages, table.micro_batches};
  numbers.insert(numbers.end(), table.rank_of_stage.begin(), table.rank_of_stage.end());
  for (const auto& actions : table.ranks) {
    numbers.push_back(static_cast<int>(actions.size()));
    for (const auto& [kind, stage, i] : actions)
      numbers.insert(numbers.end(), {static_cast<int>(kind), stage, i});
  }
  return hash_of(numbers.data(), numbers.size() * sizeof(int));
}

std::string text_of(at::IntArrayRef sizes) {
  std::vector<std::string> texts;
  for (const std::int64_t size : sizes) texts.push_back(size < 0 ? "any" : std::to_string(size));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}

// ConfigError on every rank: one without a stage, or the first with another table than rank 0's. Collective
// along pp.
void check_same_table(const PipelineTable& table, Group ranks) {
  for (int rank = 0; rank < ranks.size(); ++rank)
    if (std::ranges::find(table.rank_of_stage, rank) == table.rank_of_stage.end())
      refuse(fmt::format("the schedule '{}'", table.name), fmt::format("no stage on rank {} along pp", rank),
             "one on each rank at least", "Assign the stages to all ranks, or start fewer along pp");
  if (ranks.size() == 1) return;
  const at::Tensor all = ranks.all_gather(at::full({1}, digest_of(table), at::kLong));  // [ranks, 1]
  for (int rank = 1; rank < ranks.size(); ++rank)
    if (!all[rank].equal(all[0]))
      refuse("the schedule of a pipeline",
             fmt::format("another table on rank {} along pp than on rank 0", rank),
             "the same one on all of them", "Give every rank the same PipelineOptions");
}

// ConfigError unless what `stage` was given by the one before has these sizes, -1 where any will do.
void check_sizes(const at::Tensor& given, const std::vector<std::int64_t>& sizes, int stage,
                 std::int64_t micro_batch) {
  const at::IntArrayRef found = given.sizes();
  const bool fits =
      std::equal(found.begin(), found.end(), sizes.begin(), sizes.end(),
                 [](std::int64_t own, std::int64_t wanted) { return wanted < 0 || own == wanted; });
  if (fits) return;
  refuse(fmt::format("stage {} of a pipeline", stage),
         fmt::format("{} from stage {}, {}", text_of(found), stage - 1,
                     micro_batch < 0 ? "outside of a step" : fmt::format("of micro-batch {}", micro_batch)),
         text_of(sizes), "Make the two stages agree on what goes between them");
}

// ConfigError after a forward that did not call receive() or pass_on() as its stage must.
void check_exchanged(bool received, bool passed_on, int stage, int stages, std::int64_t micro_batch) {
  const auto refuse_forward = [&](const char* call, int other) {
    refuse(
        fmt::format("stage {} of a pipeline", stage),
        fmt::format("a forward of micro-batch {} without a call of {}", micro_batch, call),
        fmt::format("one, because stage {} {}", other, other < stage ? "has passed something on" : "waits"),
        "Call it in every forward of the stage, whatever the micro-batch holds");
  };
  if (stage > 0 && !received) refuse_forward("receive()", stage - 1);
  if (stage + 1 < stages && !passed_on) refuse_forward("pass_on()", stage + 1);
}

// The messages of a rank to other stages. One from ordinary memory flows through a ring that its sender must
// fill, and a sender that computes the next action does not. So messages are copied into slots of shared
// memory, which the receiver reads by itself (src/comm/shm/README.md). The slots are as many and as large as
// the steps before needed; a message without a slot goes from its own memory.
class Outbox {
 public:
  explicit Outbox(Group ranks) : ranks_(std::move(ranks)) {}

  // `values` contiguous; they may be changed after the call.
  void send(const at::Tensor& values, int to) {
    forget_what_was_taken();
    const auto bytes = static_cast<std::int64_t>(values.nbytes());
    const std::int64_t slot = values.is_cpu() ? free_slot(bytes) : -1;
    at::Tensor from = values;
    if (slot >= 0) {
      used_[static_cast<std::size_t>(slot)] = true;
      from = memory_[slot].narrow(0, 0, bytes).view(values.scalar_type()).view(values.sizes());
      from.copy_(values);
    }
    sent_.push_back({ranks_.send_async(from, to), slot, bytes});
    if (!values.is_cpu() || bytes <= kSmall) return;
    largest_ = std::max(largest_, bytes);
    const auto large = std::ranges::count_if(sent_, [](const Sent& one) { return one.bytes > kSmall; });
    most_under_way_ = std::max(most_under_way_, static_cast<std::int64_t>(large));
  }
  void wait_for_last() {
    if (!sent_.empty()) sent_.back().pending.wait();
  }
  // Waits until all that was sent has been taken.
  void wait() {
    for (Sent& one : sent_) one.pending.wait();
    sent_.clear();
    used_.assign(used_.size(), false);
  }
  // Collective, with nothing under way: memory for all that this step sent.
  void grow() {
    at::Tensor wanted = at::tensor({most_under_way_, largest_}, at::kLong);
    ranks_.all_reduce(wanted, ReduceOp::kMax);
    const auto slots = wanted[0].item<std::int64_t>();
    const std::int64_t bytes = (wanted[1].item<std::int64_t>() + kAlignment - 1) / kAlignment * kAlignment;
    const auto enough = [&](std::int64_t has, std::int64_t of) { return memory_.defined() && has >= of; };
    if (slots == 0 || bytes == 0 ||
        (enough(static_cast<std::int64_t>(used_.size()), slots) && enough(memory_.size(1), bytes)))
      return;
    memory_ = at::Tensor();  // given back before more is taken
    memory_ = ranks_.empty_shared(slots * bytes, at::kByte).view({slots, bytes});
    used_.assign(static_cast<std::size_t>(slots), false);
  }

 private:
  static constexpr std::int64_t kAlignment = 64;  // bytes, for any type
  static constexpr std::int64_t kSmall = 1024;    // bytes that travel with a message's announcement
  struct Sent {
    Pending pending;
    std::int64_t slot;  // -1: from its own memory
    std::int64_t bytes;
  };

  void forget_what_was_taken() {
    std::erase_if(sent_, [&](Sent& one) {
      if (!one.pending.progress()) return false;
      if (one.slot >= 0) used_[static_cast<std::size_t>(one.slot)] = false;
      return true;
    });
  }
  std::int64_t free_slot(std::int64_t bytes) {
    if (!memory_.defined() || bytes > memory_.size(1) || bytes <= kSmall) return -1;
    const auto found = std::find(used_.begin(), used_.end(), false);
    return found == used_.end() ? -1 : found - used_.begin();
  }

  Group ranks_;
  std::deque<Sent> sent_{};
  at::Tensor memory_{};  // [slots, bytes of each], uint8
  std::vector<bool> used_{};
  std::int64_t largest_ = 0;         // bytes of a message, ever
  std::int64_t most_under_way_ = 0;  // messages, ever
};

}  // namespace

struct Pipeline::Impl {
  Group ranks;  // along pp
  PipelineOptions options;
  int stages = 1;
  std::vector<int> rank_of_stage{}, own{};
  std::map<std::size_t, PipelineTable> tables{};  // by micro-batches

  // Whose turn it is; outside of run() the only stage, if there is one alone.
  int stage = 0;
  std::int64_t micro_batch = kOutsideOfSteps;
  bool running = false, looked_at = false;

  // Messages of other pipelines over these ranks, and of steps before this one, are left over from steps that
  // were given up. A period is a run(), or the time until the next one.
  std::int64_t id = 0, period = 0;

  // The last run: its micro-batches, and when each action of this rank computed, by a clock that the ranks of
  // a host share.
  std::size_t measured_micro_batches = 0;
  std::vector<PipelineTimeline::Span> measured{};
  PipelineTimeline::Span* now = nullptr;  // of the action that runs

  // Tensors that this rank has passed on to itself, or that came before another one that was waited for.
  std::multimap<Address, at::Tensor> here{};
  Outbox outbox{ranks};
  // Gradients by stage and micro-batch: of what a stage was given, to be sent back, and of what it has passed
  // on, to be taken. A backward that autograd does not run (a step without a target) leaves both open.
  struct Like {
    std::vector<std::int64_t> sizes;
    at::TensorOptions options;
  };
  using Open = std::map<std::pair<int, std::int64_t>, Like>;
  Open owed{}, awaited{};
  bool received = false, passed_on = false;  // by the forward that runs, with gradients enabled

  void post(const at::Tensor& tensor, const Address& address) {
    const int to = rank_of_stage.at(static_cast<std::size_t>(address.stage));
    const at::Tensor values = tensor.detach().contiguous();
    if (to == ranks.rank()) {
      here.emplace(address, values);
      return;
    }
    if (values.dim() > kMostDims)
      refuse("what a stage passes on", fmt::format("{} dimensions", values.dim()),
             fmt::format("at most {}", kMostDims), "Flatten some of them");
    const at::Tensor numbers = empty_header();
    Header& header = header_in(numbers);
    header = {.pipeline = id,
              .period = period,
              .stage = address.stage,
              .way = address.way,
              .micro_batch = address.micro_batch,
              .type = static_cast<std::int64_t>(values.scalar_type()),
              .dims = values.dim(),
              .sizes = {}};
    std::ranges::copy(values.sizes(), header.sizes);
    outbox.send(numbers, to);
    outbox.send(values, to);
  }

  // `like`: of a gradient, which comes where the output was.
  at::Tensor take(const Address& address, int from_stage, const Like* like = nullptr) {
    const int from = rank_of_stage.at(static_cast<std::size_t>(from_stage));
    auto found = here.lower_bound(address);
    const auto is_here = [&] { return found != here.end() && found->first == address; };
    const bool waits = !is_here();
    while (!is_here()) {
      ISOGRAD_INVARIANT(from != ranks.rank(),
                        fmt::format("stage {} before stage {} on one rank", address.stage, from_stage));
      take_next(from, address, like);
      found = here.lower_bound(address);
    }
    at::Tensor values = std::move(found->second);
    here.erase(found);
    if (like) values = values.to(like->options.device());  // it is there, unless it came before its turn
    if (now && waits) now->begin = seconds();
    return values;
  }

  // The next of what that rank has sent, whatever it is.
  void take_next(int from, const Address& wanted, const Like* like) {
    const at::Tensor numbers = empty_header();
    ranks.recv(numbers, from);
    const Header& header = header_in(numbers);
    const bool is_own = header.pipeline == id;
    if (is_own && header.period > period)
      throw PeerError({.where = fmt::format("stage {} of a pipeline", wanted.stage),
                       .found = fmt::format("a message of a later step, from rank {} along pp", from),
                       .expected = "all ranks in the same step",
                       .action = "Give a step up on all ranks in the same micro-batch, or on none"});
    at::TensorOptions type(static_cast<at::ScalarType>(header.type));
    if (like && header.address() == wanted) type = type.device(like->options.device());
    const at::Tensor values = at::empty(header.shape(), type);
    ranks.recv(values, from);
    if (is_own && header.period == period) here.emplace(header.address(), values);
  }

  // The gradient of what stage `of_stage` was given, once.
  void give_back(int of_stage, std::int64_t i, const at::Tensor& gradient) {
    const auto found = owed.find({of_stage, i});
    if (found == owed.end()) return;
    const Like& like = found->second;
    post(gradient.defined() ? gradient : at::zeros(like.sizes, like.options), {of_stage - 1, kGradients, i});
    owed.erase(found);
  }

  // The gradient of what that stage has passed on, once.
  at::Tensor take_gradient(int of_stage, std::int64_t i) {
    const auto found = awaited.find({of_stage, i});
    ISOGRAD_INVARIANT(found != awaited.end(), fmt::format("a gradient of stage {} taken twice", of_stage));
    const Like like = found->second;
    awaited.erase(found);
    return take({of_stage, kGradients, i}, of_stage + 1, &like);
  }

  // Ends what a backward has left open: all ranks send and take as many gradients as outputs, whatever their
  // losses.
  void close(int of_stage, std::int64_t i) {
    now = nullptr;
    if (awaited.contains({of_stage, i})) take_gradient(of_stage, i);
    give_back(of_stage, i, at::Tensor());
  }

  int turn() const {
    if (!running && !looked_at && own.size() != 1)
      refuse("a stage of a pipeline",
             fmt::format("a forward outside of a step, of a rank with {} stages", own.size()),
             "the schedule of a step, which says whose turn it is",
             "Make the forward within a step, or say look_at() before each");
    return stage;
  }

  // Within a step a second call would wait for a tensor that nobody sends.
  void check_first(bool before, const char* call) const {
    if (!running || !before) return;
    refuse(fmt::format("stage {} of a pipeline", stage),
           fmt::format("a second call of {} in the forward of micro-batch {}", call, micro_batch), "one",
           "Pass one tensor on from stage to stage, and take it once");
  }

  const PipelineTable& table_for(std::size_t micro_batches) {
    if (options.table) {
      const auto wanted = static_cast<std::size_t>(options.table->micro_batches);
      if (micro_batches != wanted)
        refuse(fmt::format("the schedule '{}'", options.table->name),
               fmt::format("{} micro-batches in the step", micro_batches), std::to_string(wanted),
               "Cut the step into as many, or make a table for these");
      return *options.table;
    }
    const auto known = tables.find(micro_batches);
    if (known != tables.end()) return known->second;
    return tables
        .emplace(micro_batches, make_pipeline(options.schedule, ranks.size(), options.stages_of_rank,
                                              static_cast<int>(micro_batches)))
        .first->second;
  }

  // Works on the stage and the micro-batch whose turn it is.
  void compute(const PipelineWork& work, Kind kind, bool last) {
    const auto part = static_cast<std::size_t>(std::ranges::lower_bound(own, stage) - own.begin());
    const auto i = static_cast<std::size_t>(micro_batch);
    if (kind == Kind::kForward) return work.forward(i, part);
    if (kind == Kind::kBackward) return work.backward(i, last, part);
    ISOGRAD_INVARIANT(work.inputs && work.weights, "a table with halves of backwards, and work without");
    if (kind == Kind::kBackwardInputs) return work.inputs(i, part);
    work.weights(i, last, part);
  }

  void run(std::size_t micro_batches, const PipelineWork& work) {
    if (micro_batches == 0) return;
    const auto& actions = table_for(micro_batches).ranks.at(static_cast<std::size_t>(ranks.rank()));
    const auto gives_weights = [](const PipelineAction& one) {  // their gradients
      return one.kind == Kind::kBackward || one.kind == Kind::kBackwardWeights;
    };
    auto left = std::count_if(actions.begin(), actions.end(), gives_weights);
    here.clear(), owed.clear(), awaited.clear();
    const auto at_the_end = c10::make_scope_exit([this] {
      running = false, now = nullptr, micro_batch = kOutsideOfSteps;
      here.clear(), ++period;
    });
    running = true, looked_at = false, ++period;
    measured_micro_batches = micro_batches;
    measured.assign(actions.size(), {});
    for (std::size_t place = 0; place < actions.size(); ++place) {
      const PipelineAction& action = actions[place];
      if (action.is_transfer()) continue;  // a receive waits, a send does not: their places say nothing more
      stage = action.stage;
      micro_batch = action.micro_batch;
      received = passed_on = false;
      now = &measured[place];
      now->begin = seconds();
      compute(work, action.kind, gives_weights(action) && --left == 0);
      measured[place].end = seconds();
      if (action.kind == Kind::kForward)
        check_exchanged(received, passed_on, stage, stages, micro_batch);
      else if (action.kind != Kind::kBackwardWeights)
        close(stage, micro_batch);
      now = nullptr;
    }
    outbox.wait();
    if (ranks.size() > 1) outbox.grow();
  }
};

Pipeline::Pipeline(const Mesh& mesh, PipelineOptions options)
    : impl_(std::make_shared<Impl>(
          Impl{.ranks = mesh.grid().has(kStageAxis) ? mesh.along({kStageAxis}, "stages") : Group::solo(),
               .options = std::move(options)})) {
  Impl& own = *impl_;
  const int ranks = own.ranks.size();
  const auto refuse_table = [&](std::string found, std::string expected) {
    refuse(
        fmt::format("the schedule '{}'", own.options.table ? own.options.table->name : own.options.schedule),
        std::move(found), std::move(expected), "Take another schedule, or other ranks along pp");
  };
  if (own.options.table) check_pipeline(*own.options.table);
  // A table of another number of micro-batches has the same stages.
  const PipelineTable table =
      own.options.table ? *own.options.table
                        : make_pipeline(own.options.schedule, ranks, own.options.stages_of_rank, ranks);
  if (static_cast<int>(table.ranks.size()) != ranks)
    refuse_table(fmt::format("{} ranks along pp", ranks), fmt::format("{}", table.ranks.size()));
  check_same_table(table, own.ranks);
  at::Tensor id = at::full({1}, std::chrono::steady_clock::now().time_since_epoch().count(), at::kLong);
  if (ranks > 1) own.ranks.broadcast(id, 0);
  own.id = id.item<std::int64_t>();
  own.stages = table.stages;
  own.rank_of_stage = table.rank_of_stage;
  for (int stage = 0; stage < table.stages; ++stage)
    if (rank_of(stage) == own.ranks.rank()) own.own.push_back(stage);
  own.stage = own.own.front();
}

int Pipeline::stages() const { return impl_->stages; }
const std::vector<int>& Pipeline::own_stages() const { return impl_->own; }
int Pipeline::rank_of(int stage) const { return impl_->rank_of_stage.at(static_cast<std::size_t>(stage)); }
int Pipeline::stage() const { return impl_->turn(); }
bool Pipeline::in_step() const { return impl_->running; }

void Pipeline::look_at(int stage) {
  ISOGRAD_INVARIANT(!impl_->running, "a stage chosen within a step, which does so itself");
  if (std::ranges::find(impl_->own, stage) == impl_->own.end())
    refuse("Pipeline::look_at", fmt::format("stage {}, of rank {} along pp", stage, impl_->ranks.rank()),
           fmt::format("one of this rank's, {}", fmt::join(impl_->own, ", ")), "Ask own_stages()");
  impl_->stage = stage;
  impl_->looked_at = true;
}

at::Tensor Pipeline::receive(at::IntArrayRef sizes) {
  const auto impl = impl_;
  const int stage = impl->turn();
  const std::int64_t i = impl->micro_batch;
  ISOGRAD_INVARIANT(stage > 0, "what is before the first stage");
  const bool with_gradients = at::GradMode::is_enabled();
  impl->check_first(impl->received, "receive()");
  impl->received = with_gradients;
  return apply_map(
      at::empty({0}, at::kDouble),
      [impl, stage, i, with_gradients, sizes = sizes.vec()](const at::Tensor&) {
        const at::Tensor given = impl->take({stage, kOutputs, i}, stage - 1);
        if (!sizes.empty()) check_sizes(given, sizes, stage, i);
        if (with_gradients && has_gradients(given))
          impl->owed[{stage, i}] = {given.sizes().vec(), given.options()};
        return given;
      },
      [impl, stage, i](const at::Tensor& gradient) {
        impl->give_back(stage, i, gradient);
        return at::zeros({0}, at::kDouble);
      });
}

at::Tensor Pipeline::pass_on(const at::Tensor& output) {
  const auto impl = impl_;
  const int stage = impl->turn();
  const std::int64_t i = impl->micro_batch;
  const bool with_gradients = at::GradMode::is_enabled();
  impl->check_first(impl->passed_on, "pass_on()");
  impl->passed_on = with_gradients;
  const auto send = [impl, stage, i](const at::Tensor& values) {
    impl->post(values, {stage + 1, kOutputs, i});
    if (!impl->running) impl->outbox.wait_for_last();  // the next stage waits for nothing else
    return at::zeros({}, at::kDouble);
  };
  if (!has_gradients(output)) {  // a zero with a backward all the same, in which nothing comes back
    const at::Tensor zero = send(output);
    return apply_map(
        at::empty({0}, at::kDouble), [zero](const at::Tensor&) { return zero; },
        [](const at::Tensor&) { return at::zeros({0}, at::kDouble); });
  }
  if (with_gradients) impl->awaited[{stage, i}] = {output.sizes().vec(), output.options()};
  return apply_map(output, send,
                   [impl, stage, i](const at::Tensor&) { return impl->take_gradient(stage, i); });
}

void Pipeline::run(std::size_t micro_batches, const PipelineWork& work) const {
  impl_->run(micro_batches, work);
}

std::size_t Pipeline::micro_batches_of() const {
  const bool whole_rounds = !impl_->options.table && impl_->options.schedule == "interleaved";
  return whole_rounds ? static_cast<std::size_t>(impl_->ranks.size()) : 1;
}

std::optional<Pipeline::Measured> Pipeline::measured() const {
  Impl& own = *impl_;
  if (own.measured_micro_batches == 0) return std::nullopt;
  Measured all{.table = own.table_for(own.measured_micro_batches), .timeline = {}};
  PipelineTimeline& timeline = all.timeline;
  // How many are live follows from the order alone.
  timeline.most_live = simulate(all.table, uniform_times(all.table.stages)).most_live;
  double first = HUGE_VAL;
  for (int rank = 0; rank < own.ranks.size(); ++rank) {
    const auto& actions = all.table.ranks[static_cast<std::size_t>(rank)];
    std::vector<PipelineTimeline::Span> spans(actions.size());
    if (rank == own.ranks.rank()) spans = own.measured;
    if (!actions.empty() && own.ranks.size() > 1) {
      at::Tensor numbers =
          at::from_blob(spans.data(), {static_cast<std::int64_t>(spans.size()), 2}, at::kDouble);
      own.ranks.broadcast(numbers, rank);
    }
    double& busy = timeline.busy.emplace_back(0);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      busy += spans[i].end - spans[i].begin;
      if (!actions[i].is_transfer()) first = std::min(first, spans[i].begin);
    }
    timeline.spans.push_back(std::move(spans));
  }
  for (std::size_t rank = 0; rank < timeline.spans.size(); ++rank)
    for (std::size_t i = 0; i < timeline.spans[rank].size(); ++i) {
      PipelineTimeline::Span& span = timeline.spans[rank][i];
      if (all.table.ranks[rank][i].is_transfer()) continue;
      span.begin -= first, span.end -= first;
      timeline.length = std::max(timeline.length, span.end);
    }
  return all;
}

std::vector<StageLayers> assign_layers(const std::vector<double>& costs, int stages, double behind) {
  const auto layers = static_cast<std::int64_t>(costs.size());
  if (stages < 1 || stages > layers)
    refuse("stages of a pipeline", fmt::format("{} for {} layers", stages, layers),
           fmt::format("1 to {}, a layer for each", layers),
           "Use fewer ranks along pp, or fewer stages on each");
  // The least possible cost of the dearest stage, stage after stage: best[s][n] for the first n layers.
  const auto n = static_cast<std::size_t>(layers), s = static_cast<std::size_t>(stages);
  std::vector<double> sum(n + 1, 0);
  for (std::size_t i = 0; i < n; ++i) sum[i + 1] = sum[i] + costs[i];
  std::vector<std::vector<double>> best(s + 1, std::vector<double>(n + 1, HUGE_VAL));
  std::vector<std::vector<std::size_t>> cut(s + 1, std::vector<std::size_t>(n + 1, 0));
  best[0][0] = 0;
  for (std::size_t k = 1; k <= s; ++k)
    for (std::size_t end = k; end + (s - k) <= n; ++end)
      for (std::size_t begin = k - 1; begin < end; ++begin) {
        const double own = sum[end] - sum[begin] + (k == s ? behind : 0);
        const double dearest = std::max(best[k - 1][begin], own);
        if (dearest < best[k][end]) best[k][end] = dearest, cut[k][end] = begin;
      }
  std::vector<StageLayers> result(s);
  for (std::size_t k = s, end = n; k > 0; --k) {
    const std::size_t begin = cut[k][end];
    result[k - 1] = {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end - begin)};
    end = begin;
  }
  return result;
}

}  // namespace isograd
