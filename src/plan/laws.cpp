// The laws that limit training: for each the size at which it begins to cost, where the models that time
// layouts say so.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "plan/inputs.hpp"
#include "plan/search.hpp"

namespace isograd::planner {
namespace {

// The largest number up to `most` of which `holds` is true, as it is of all below; 0: of none.
std::int64_t last_of(std::int64_t most, const std::function<bool(std::int64_t)>& holds) {
  std::int64_t good = 0, bad = most + 1;
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (holds(middle) ? good : bad) = middle;
  }
  return good;
}

class Laws {
 public:
  Laws(Models& models, const Planned& best)
      : models_(models),
        problem_(models.problem),
        best_(best),
        c_(best.candidate),
        samples_(problem_.work.samples()),
        capacity_(problem_.cluster.device.memory),
        width_(widths_of(problem_.program, models.step.rates().origin(), problem_.model.experts.count > 0)),
        behind_(models.step.behind(c_)) {
    // A device that no link joins to others has no laws of exchanges.
    const bool joined = !problem_.cluster.links.empty();
    batch();
    if (joined) tokens(), gathers(), reduction(), overlap(), ceiling();
    micro_batch(), layer();
    if (c_.pp > 1) bubble();
    if (joined) tensor();
    if (joined && problem_.model.experts.count > 0) experts();
    // The one that bites first comes first.
    std::ranges::stable_sort(laws_, {}, &Room::room);
  }

  std::vector<Law> all() const {
    std::vector<Law> laws;
    for (const Room& one : laws_) laws.push_back(one.law);
    return laws;
  }

 private:
  // How often the present number fits into the law's: it bites at 1.
  struct Room {
    Law law{};
    double room = 0;
  };
  // A law that bites where the number is as large (`upper`), or as small. `applies`: to the best layout.
  void add(Law law, bool upper, bool applies = true) {
    const double room = upper ? law.at.value / law.now : law.now / law.at.value;
    law.bites = applies && room <= 1;
    laws_.push_back({std::move(law), applies ? room : std::numeric_limits<double>::infinity()});
  }
  Estimate exact(double value) const { return {value, value, value, Origin::kExact}; }
  Estimate timed(double value, Axis axis) const {
    const Origin network =
        models_.step.network().cost(Operation::kAllGather, 1, reach_of(c_, axis, problem_.cluster)).origin;
    const double w = width_.seconds;
    return {value, value * (1 - w), value * (1 + w), std::max(models_.step.rates().origin(), network)};
  }

  // The same inner layout on another number of data ranks.
  Candidate on(std::int64_t data_ranks) const {
    Candidate other = c_;
    const auto all = std::int32_t(data_ranks);
    (c_.strategy == Strategy::kBucketed ? other.replicas : other.shards) = all;
    (c_.strategy == Strategy::kBucketed ? other.shards : other.replicas) = 1;
    other.ranks = all * c_.pp * c_.tp * c_.cp_ring * c_.cp_ulysses;
    const std::int64_t own = std::max<std::int64_t>(1, (samples_ + data_ranks - 1) / data_ranks);
    other.micro_batch = std::min(c_.micro_batch, own);
    other.micro_batches = (own + other.micro_batch - 1) / other.micro_batch;
    return other;
  }
  // One micro-batch without a pipeline, for what a layer does.
  Candidate alone() const {
    Candidate other = c_;
    other.pp = other.stages_per_rank = 1, other.schedule = Schedule::kNone, other.micro_batches = 1;
    return other;
  }

  double cp() const { return double(c_.cp_ring) * c_.cp_ulysses; }
  double tokens_of_micro_batch() const {
    return double(c_.micro_batch) * double(problem_.work.sequence) / cp();
  }
  std::int64_t block() const {
    std::int64_t largest = 1;
    for (const StageShape& stage : models_.memory.stages(c_))
      largest = std::max(largest, stage.largest_block);
    return largest;
  }
  double parameter_bytes() const { return std::max(2.0, bytes_of(problem_.work.precision)); }
  double gradient_bytes() const {
    return problem_.work.fp32_gradients ? std::max(4.0, parameter_bytes()) : parameter_bytes();
  }

  void batch() {
    const double at = double(samples_) / double(c_.micro_batch);
    add({.name = "batch",
         .unit = "data ranks",
         .statement =
             fmt::format("{} sequences in micro-batches of {}: {:.0f} data ranks compute one each, and more "
                         "than {} have nothing to do",
                         samples_, c_.micro_batch, at, samples_),
         .moved_by = "a larger batch, or tp, cp and pp, which divide the work of a sequence",
         .at = exact(at),
         .now = double(c_.data_ranks())},
        true);
  }

  void tokens() {
    const Reach reach = reach_of(c_, Axis::kData, problem_.cluster);
    if (reach.ranks == 1) return;
    const double of_rank = problem_.model.parameters() / (double(c_.tp) * c_.pp) * gradient_bytes();
    const double transfer = models_.step.network().cost(Operation::kAllReduce, of_rank, reach).transfer;
    const double at = tokens_of_micro_batch() * transfer / (models_.step.overlap() * behind_.backward);
    add({.name = "bandwidth",
         .unit = "tokens of a rank's micro-batch",
         .statement =
             "with fewer, the bytes of the gradients alone take longer than the backward that hides them, "
             "whatever the size of the model",
         .moved_by = "larger micro-batches, gradients of 2 bytes, or a faster network",
         .at = timed(at, Axis::kData),
         .now = tokens_of_micro_batch()},
        false);
  }

  // Ranks along the shards until which a layer's gather hides behind the layer before.
  std::int64_t most_gathering(bool backward) const {
    const double hides = models_.step.overlap() * (backward ? behind_.layer_backward : behind_.layer_forward);
    const auto numel = double(block());
    constexpr std::int64_t kMost = std::int64_t{1} << 24;
    return last_of(kMost, [&](std::int64_t ranks) {
      const Reach reach = reach_of(ranks, c_.tp, problem_.cluster);
      const Network& network = models_.step.network();
      double seconds = network.seconds(Operation::kAllGather, numel * parameter_bytes(), reach);
      if (backward) seconds += network.seconds(Operation::kReduceScatter, numel * gradient_bytes(), reach);
      return seconds <= hides;
    });
  }
  void gathers() {
    const std::int64_t forward = most_gathering(false), backward = most_gathering(true);
    const bool applies = c_.strategy == Strategy::kZero3;
    Law law{
        .name = "zero3's rings",
        .unit = "ranks that share parameters",
        .statement = fmt::format("a layer's gather hides behind its forward on up to {} ranks, gather and "
                                 "reduction behind its backward on up to {}: a ring's latency grows with its "
                                 "ranks",
                                 forward, backward),
        .moved_by = "replicas of fewer shards, or more tokens in a micro-batch",
        .at = timed(double(std::max<std::int64_t>(1, std::min(forward, backward))), Axis::kShard),
        .now = double(c_.shards) * cp()};
    if (applies) law.moved_by += with_replicas();
    add(std::move(law), true, applies);
  }
  // Shards inside the fast link, if they fit.
  std::string with_replicas() const {
    const auto inside =
        std::int32_t(std::max<double>(1, double(problem_.cluster.links.front().ranks) / (c_.tp * cp())));
    Candidate other = c_;
    if (inside >= c_.shards || c_.shards % inside != 0) return "";
    other.shards = inside, other.replicas = c_.replicas * (c_.shards / inside);
    const double needs = models_.memory.of(other).total();
    if (needs > capacity_)
      return fmt::format("; {} shards need {:.1f} GiB, which is too much", inside, gibibytes(needs));
    return fmt::format("; replicas {} of {} shards: {:.3g} s in place of {:.3g} s", other.replicas, inside,
                       models_.step.of(other).total(), best_.seconds.value);
  }

  void reduction() {
    const double each = behind_.backward / tokens_of_micro_batch(), sequence = double(problem_.work.sequence),
                 batch = double(samples_) * sequence;
    const std::int64_t most = kMostDevices / (std::int64_t{c_.pp} * c_.tp * c_.cp_ring * c_.cp_ulysses);
    const std::int64_t at = last_of(most, [&](std::int64_t ranks) {
      Candidate other = on(ranks);
      other.strategy = Strategy::kBucketed, other.replicas = std::int32_t(ranks), other.shards = 1;
      other.checkpoint = other.reduce_once = false;
      other.bucket_bytes = models_.step.best_bucket_bytes(other);
      const StepParts parts = models_.step.data_parallel(other);
      const double tokens = std::min(tokens_of_micro_batch(), batch / double(ranks) / cp());
      return parts.reduce + parts.hidden.reduce - parts.tail <= models_.step.overlap() * each * tokens;
    });
    add({.name = "all-reduce",
         .unit = "data ranks",
         .statement =
             "with this batch a rank's backward shrinks with more ranks, and the latency of the sums grows: "
             "beyond these they no longer hide",
         .moved_by = "larger buckets, a larger batch, or fewer data ranks with tp or pp",
         .at = timed(double(std::max<std::int64_t>(1, at)), Axis::kData),
         .now = double(c_.data_ranks())},
        true, c_.strategy != Strategy::kZero3);
  }

  void overlap() {
    const double reduce = best_.step.reduce + best_.step.hidden.reduce;
    if (reduce <= 0) return;
    const double hidden = best_.step.hidden.reduce + best_.step.hidden.gather;
    add({.name = "overlap",
         .unit = "seconds of reduction in a step",
         .statement = fmt::format(
             "step = forward + max(backward, reduction) + last bucket + optimizer = {:.4g} s; one "
             "after the other {:.4g} s",
             best_.seconds.value, best_.seconds.value + hidden),
         .moved_by = "more tokens in a micro-batch, fewer ranks, or a faster network",
         .at = timed(models_.step.overlap() * behind_.backward * reductions() + best_.step.tail, Axis::kData),
         .now = reduce},
        true);
  }
  double reductions() const {
    const bool each = (c_.strategy == Strategy::kZero2 || c_.strategy == Strategy::kZero3) && !c_.reduce_once;
    return each ? double(c_.micro_batches) : 1;
  }

  // The same batch on more data ranks.
  void ceiling() {
    const auto seconds = [&](std::int64_t ranks) {
      Candidate other = on(ranks);
      other.bucket_bytes = models_.step.best_bucket_bytes(other);
      return models_.step.of(other).total();
    };
    const double first = seconds(1);
    std::int64_t stop = 0;
    std::string losses;
    double before = first;
    constexpr double kLeft[] = {0.9, 0.75, 0.5};
    std::size_t next = 0;
    for (std::int64_t ranks = 2; ranks <= samples_ && (stop == 0 || next < std::size(kLeft)); ranks *= 2) {
      const double now = seconds(ranks);
      while (next < std::size(kLeft) && first / (now * double(ranks)) < kLeft[next])
        losses += fmt::format("{}{:.0f} % of one rank's speed each at {}", losses.empty() ? "" : ", ",
                              100 * kLeft[next++], ranks);
      constexpr double kHalfOfDoubling = 1.5;
      if (stop == 0 && before < kHalfOfDoubling * now) stop = ranks / 2;
      before = now;
    }
    if (stop == 0) return;  // the batch ends before
    add({.name = "ceiling",
         .unit = "data ranks",
         .statement = "twice as many give less than half as much more" +
                      (losses.empty() ? std::string() : "; below " + losses),
         .moved_by = "a larger batch, or tp and pp in place of data ranks",
         .at = timed(double(stop), Axis::kData),
         .now = double(c_.data_ranks())},
        true);
  }

  void micro_batch() {
    const std::int64_t most = std::max<std::int64_t>(1, samples_ / c_.data_ranks());
    const std::int64_t at = last_of(std::int64_t{1} << 20, [&](std::int64_t size) {
      Candidate other = c_;
      other.micro_batch = size, other.micro_batches = std::max<std::int64_t>(1, most / size);
      return models_.memory.of(other).total() <= capacity_;
    });
    const double w = width_.memory;
    const auto value = double(std::max<std::int64_t>(1, at));
    add({.name = "memory of activations",
         .unit = "sequences of a micro-batch",
         .statement = "zero shards states, not activations: a micro-batch beyond this does not fit",
         .moved_by = "checkpointing, tp with sequence parallelism, or cp",
         .at = {value, std::floor(value * (1 - w)), std::ceil(value * (1 + w)), Origin::kAssumed},
         .now = double(c_.micro_batch)},
        true);
  }

  // The width at which a layer of zero3, gathered, no longer fits on a device.
  void layer() {
    const ModelShape& model = problem_.model;
    const auto times = [&](std::int64_t number, double factor) {
      return std::max<std::int64_t>(1, std::llround(double(number) * factor));
    };
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    const std::int64_t at = last_of(kMost, [&](std::int64_t hidden) {
      const double factor = double(hidden) / double(model.hidden);
      ModelShape wide = model;
      wide.hidden = hidden, wide.heads = times(model.heads, factor);
      wide.key_heads = times(model.key_heads, factor);
      wide.feed_forward = times(model.feed_forward, factor);
      wide.experts.feed_forward = times(model.experts.feed_forward, factor);
      const Problem other{.model = wide,
                          .cluster = problem_.cluster,
                          .calibration = problem_.calibration,
                          .work = problem_.work,
                          .constants = problem_.constants,
                          .program = problem_.program};
      Candidate one = alone();
      constexpr std::int32_t kManyShards = 1 << 16;
      one.shards = kManyShards, one.replicas = 1, one.micro_batch = 1;
      one.ranks = kManyShards * one.tp * one.cp_ring * one.cp_ulysses;
      one.strategy = Strategy::kZero3, one.checkpoint = true, one.reshard = true, one.reduce_once = false;
      Pipelines none;
      return MemoryModel(other, none).of(one).total() <= capacity_;
    });
    const double w = width_.memory, value = double(std::max<std::int64_t>(1, at));
    add({.name = "a layer must fit",
         .unit = "hidden size",
         .statement =
             fmt::format("zero3 on any number of ranks still gathers whole layers: with tp {} a model of {} "
                         "layers as wide as this fills {:.0f} GiB",
                         c_.tp, model.layers, gibibytes(capacity_)),
         .moved_by =
             "tp, which divides a layer; a shorter sequence where logits and activations are the most",
         .at = {value, value * (1 - w), value * (1 + w), Origin::kAssumed},
         .now = double(model.hidden)},
        true);
  }

  void bubble() {
    constexpr double kShare = 0.1;
    const double busy = behind_.forward + behind_.backward;
    // Once a schedule is filled, its bubble stays and the rest grows.
    const double at = std::ceil(best_.step.bubble / busy * (1 - kShare) / kShare);
    add({.name = "bubble",
         .unit = "micro-batches of a data rank",
         .statement = fmt::format(
             "with fewer the {} ranks of the pipeline wait for more than a tenth of the time; now "
             "{:.1f} %",
             c_.pp, 100 * best_.step.bubble / best_.seconds.value),
         .moved_by =
             "more micro-batches, more stages on a rank, a schedule that splits backwards, or a smaller pp",
         .at = timed(std::max(1.0, at), Axis::kStage),
         .now = double(c_.micro_batches)},
        false);
  }

  // Ranks along an axis until which its exchanges take less than half as long as what is computed.
  std::int64_t most_exchanging(std::int64_t most, std::int32_t Candidate::*axis,
                               double StepModel::Behind::*exchange) const {
    Candidate other = alone();
    return std::max<std::int64_t>(1, last_of(most, [&](std::int64_t size) {
                                    other.*axis = std::int32_t(size);
                                    constexpr double kHalfOfTheRest = 1.0 / 3;
                                    return models_.step.behind(other).*exchange <= kHalfOfTheRest;
                                  }));
  }
  void tensor() {
    const std::int64_t at = most_exchanging(problem_.model.heads, &Candidate::tp, &StepModel::Behind::tp);
    const Link& fast = problem_.cluster.links.front();
    add({.name = "tp",
         .unit = "ranks along tp",
         .statement = fmt::format(
             "beyond these exchanges take more than half as long as what is computed; {} joins {}", fast.name,
             fast.ranks),
         .moved_by = "cp or pp in its place; parallel.tensor_overlap",
         .at = timed(double(at), Axis::kTp),
         .now = double(c_.tp)},
        true, c_.tp > 1);
  }
  void experts() {
    const std::int64_t at =
        most_exchanging(problem_.model.experts.count, &Candidate::ep, &StepModel::Behind::ep);
    add({.name = "ep",
         .unit = "ranks along ep",
         .statement = "beyond these, tokens travel to experts for more than half as long as is computed",
         .moved_by = "ep inside a host; parallel.expert_overlap",
         .at = timed(double(at), Axis::kExpert),
         .now = double(c_.ep)},
        true, c_.ep > 1);
  }

  Models& models_;
  const Problem& problem_;
  const Planned& best_;
  const Candidate& c_;
  std::int64_t samples_;
  double capacity_;
  Widths width_;
  StepModel::Behind behind_;
  std::vector<Room> laws_{};
};

}  // namespace

std::vector<Law> laws_of(Models& models, const Planned& best) { return Laws(models, best).all(); }

}  // namespace isograd::planner
