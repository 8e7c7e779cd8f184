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
constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
double at_least_one(std::int64_t number) { return double(std::max<std::int64_t>(1, number)); }

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
    // The limit that is reached first comes first.
    std::ranges::stable_sort(laws_, {}, &Room::room);
  }

  std::vector<Law> all() const {
    std::vector<Law> laws;
    for (const Room& one : laws_) laws.push_back(one.law);
    return laws;
  }

 private:
  // How often the present number fits into the law's: its limit is reached at 1.
  struct Room {
    Law law{};
    double room = 0;
  };
  // A law whose limit is reached where the best layout's number, `now`, is as large (kMost), or as small.
  // `applies`: to the best layout.
  enum Bound { kLeast, kMost };
  void add(const char* name, const char* unit, std::string statement, std::string moved_by, Estimate at,
           double now, Bound bound, bool applies = true) {
    const double room = bound == kMost ? at.value / now : now / at.value;
    laws_.push_back({{name, unit, std::move(statement), std::move(moved_by), at, now, applies && room <= 1},
                     applies ? room : std::numeric_limits<double>::infinity()});
  }
  Estimate timed(double value, Axis axis) const {
    return within(value, width_.seconds,
                  std::max(models_.step.rates().origin(), models_.step.origin_of(c_, axis)));
  }

  // The same inner layout on another number of data ranks.
  Candidate on(std::int64_t data_ranks) const {
    Candidate other = c_;
    const auto all = std::int32_t(data_ranks);
    (c_.strategy == Strategy::kBucketed ? other.replicas : other.shards) = all;
    (c_.strategy == Strategy::kBucketed ? other.shards : other.replicas) = 1;
    other.ranks = all * c_.pp * c_.tp * c_.cp_ring * c_.cp_ulysses;
    const std::int64_t own = std::max<std::int64_t>(1, most_of(samples_, data_ranks));
    other.micro_batch = std::min(c_.micro_batch, own);
    other.micro_batches = most_of(own, other.micro_batch);
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
    add("batch", "data ranks",
        fmt::format(
            "{} sequences in micro-batches of {}: {:.0f} data ranks compute one each, and more than {} have "
            "nothing to do",
            samples_, c_.micro_batch, at, samples_),
        "a larger batch, or tp, cp and pp, which divide the work of a sequence",
        within(at, 0, Origin::kExact), double(c_.data_ranks()), kMost);
  }

  void tokens() {
    const Reach reach = reach_of(c_, Axis::kData, problem_.cluster);
    if (reach.ranks == 1) return;
    const double of_rank = problem_.model.parameters() / (double(c_.tp) * c_.pp) * gradient_bytes();
    const double transfer = models_.step.network().cost(Operation::kAllReduce, of_rank, reach).transfer;
    const double at = tokens_of_micro_batch() * transfer / (models_.step.overlap() * behind_.backward);
    add("bandwidth", "tokens of a rank's micro-batch",
        "with fewer, the bytes of the gradients alone take longer than the backward that hides them, whatever the "
        "size of the model",
        "larger micro-batches, gradients of 2 bytes, or a faster network", timed(at, Axis::kData),
        tokens_of_micro_batch(), kLeast);
  }

  // Ranks along the shards until which a layer's gather hides behind the layer before.
  std::int64_t most_gathering(bool backward) const {
    const double hides = models_.step.overlap() * (backward ? behind_.layer_backward : behind_.layer_forward);
    const auto numel = double(block());
    return last_of(kMostRanks, [&](std::int64_t ranks) {
      const Reach reach = reach_of(ranks, c_.tp, problem_.cluster);
      const Network& network = models_.step.network();
      double seconds = network.seconds(Operation::kAllGather, numel * parameter_bytes(), reach);
      if (backward) seconds += network.seconds(Operation::kReduceScatter, numel * gradient_bytes(), reach);
      return seconds <= hides;
    });
  }
  void gathers() {
    const std::int64_t forward = most_gathering(false), backward = most_gathering(true);
    if (std::min(forward, backward) == kMostRanks) return;
    const bool applies = c_.strategy == Strategy::kZero3;
    add("zero3's rings", "ranks that share parameters",
        fmt::format(
            "a layer's gather hides behind its forward on up to {} ranks, gather and reduction behind its "
            "backward on up to {}: a ring's latency grows with its ranks",
            forward, backward),
        "replicas of fewer shards, or more tokens in a micro-batch" + (applies ? with_replicas() : ""),
        timed(at_least_one(std::min(forward, backward)), Axis::kShard), double(c_.shards) * cp(), kMost,
        applies);
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
    const double each = behind_.backward / tokens_of_micro_batch(),
                 batch = double(samples_) * double(problem_.work.sequence);
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
    if (at == most) return;  // the sums hide on as many ranks as there can be
    add("all-reduce", "data ranks",
        "with this batch a rank's backward shrinks with more ranks, and the latency of the sums grows: beyond these "
        "they no longer hide",
        "larger buckets, a larger batch, or fewer data ranks with tp or pp",
        timed(at_least_one(at), Axis::kData), double(c_.data_ranks()), kMost,
        c_.strategy != Strategy::kZero3);
  }

  void overlap() {
    const double reduce = best_.step.reduce + best_.step.hidden.reduce;
    if (reduce <= 0) return;
    const double hidden = best_.step.hidden.reduce + best_.step.hidden.gather;
    add("overlap", "seconds of reduction in a step",
        fmt::format(
            "step = forward + max(backward, reduction) + last bucket + optimizer = {:.4g} s; one after the "
            "other {:.4g} s",
            best_.seconds.value, best_.seconds.value + hidden),
        "more tokens in a micro-batch, fewer ranks, or a faster network",
        timed(models_.step.overlap() * behind_.backward * reductions() + best_.step.tail, Axis::kData),
        reduce, kMost);
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
    add("ceiling", "data ranks",
        "twice as many give less than half as much more" + (losses.empty() ? "" : "; below " + losses),
        "a larger batch, or tp and pp in place of data ranks", timed(double(stop), Axis::kData),
        double(c_.data_ranks()), kMost);
  }

  void micro_batch() {
    const std::int64_t most = std::max<std::int64_t>(1, samples_ / c_.data_ranks());
    const std::int64_t at = last_of(std::int64_t{1} << 20, [&](std::int64_t size) {
      Candidate other = c_;
      other.micro_batch = size, other.micro_batches = std::max<std::int64_t>(1, most / size);
      return models_.memory.of(other).total() <= capacity_;
    });
    Estimate value = within(at_least_one(at), width_.memory, Origin::kAssumed);
    value.low = std::floor(value.low), value.high = std::ceil(value.high);
    add("memory of activations", "sequences of a micro-batch",
        "zero shards states, not activations: a micro-batch beyond this does not fit",
        "checkpointing, tp with sequence parallelism, or cp", value, double(c_.micro_batch), kMost);
  }

  // The width at which a layer of zero3, gathered, no longer fits on a device.
  void layer() {
    const ModelShape& model = problem_.model;
    constexpr std::int64_t kWidest = std::int64_t{1} << 20;
    const std::int64_t at = last_of(kWidest, [&](std::int64_t hidden) {
      ModelShape wide = model;
      wide.hidden = hidden;
      for (std::int64_t* size :
           {&wide.heads, &wide.key_value_heads, &wide.feed_forward, &wide.experts.feed_forward})
        *size =
            std::max<std::int64_t>(1, std::llround(double(*size) * (double(hidden) / double(model.hidden))));
      const Problem other{wide,          problem_.cluster,   problem_.calibration,
                          problem_.work, problem_.constants, problem_.program};
      Candidate one = alone();
      constexpr std::int32_t kManyShards = 1 << 16;
      one.shards = kManyShards, one.replicas = 1, one.micro_batch = 1;
      one.ranks = kManyShards * one.tp * one.cp_ring * one.cp_ulysses;
      one.strategy = Strategy::kZero3, one.checkpoint = true, one.reshard = true, one.reduce_once = false;
      Pipelines none;
      return MemoryModel(other, none).of(one).total() <= capacity_;
    });
    add("a layer must fit", "hidden size",
        fmt::format(
            "zero3 on any number of ranks still gathers whole layers: with tp {} a model of {} layers as wide "
            "as this fills {:.0f} GiB",
            c_.tp, model.layers, gibibytes(capacity_)),
        "tp, which divides a layer; a shorter sequence where logits and activations are the most",
        within(at_least_one(at), width_.memory, Origin::kAssumed), double(model.hidden), kMost);
  }

  void bubble() {
    constexpr double kShare = 0.1;
    const double busy = behind_.forward + behind_.backward;
    // Once a schedule is filled, its bubble stays and the rest grows.
    const double at = std::ceil(best_.step.bubble / busy * (1 - kShare) / kShare);
    add("bubble", "micro-batches of a data rank",
        fmt::format(
            "with fewer the {} ranks of the pipeline wait for more than a tenth of the time; now {:.1f} %",
            c_.pp, 100 * best_.step.bubble / best_.seconds.value),
        "more micro-batches, more stages on a rank, a schedule that splits backwards, or a smaller pp",
        timed(std::max(1.0, at), Axis::kStage), double(c_.micro_batches), kLeast);
  }

  // Ranks along an axis until which its exchanges take less than half as long as what is computed.
  double most_exchanging(std::int64_t most, std::int32_t Candidate::*axis,
                         double StepModel::Behind::*exchange) const {
    Candidate other = alone();
    return at_least_one(last_of(most, [&](std::int64_t size) {
      other.*axis = std::int32_t(size);
      constexpr double kHalfOfTheRest = 1.0 / 3;
      return models_.step.behind(other).*exchange <= kHalfOfTheRest;
    }));
  }
  void tensor() {
    const double at = most_exchanging(problem_.model.heads, &Candidate::tp, &StepModel::Behind::tp);
    const Link& fast = problem_.cluster.links.front();
    add("tp", "ranks along tp",
        fmt::format("beyond these exchanges take more than half as long as what is computed; {} joins {}",
                    fast.name, fast.ranks),
        "cp or pp in its place; parallel.tensor_overlap", timed(at, Axis::kTp), double(c_.tp), kMost,
        c_.tp > 1);
  }
  void experts() {
    const double at = most_exchanging(problem_.model.experts.count, &Candidate::ep, &StepModel::Behind::ep);
    add("ep", "ranks along ep",
        "beyond these, tokens travel to experts for more than half as long as is computed",
        "ep inside a host; parallel.expert_overlap", timed(at, Axis::kExpert), double(c_.ep), kMost,
        c_.ep > 1);
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
