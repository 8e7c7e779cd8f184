// Seconds of collectives, of work, and of a step of the slowest rank.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "plan/memory.hpp"

namespace isograd::planner {

// ---- collectives ----

enum class Operation : std::uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kSend };
std::string_view name_of(Operation operation);  // "all_reduce", as calibrations have it
enum class Axis : std::uint8_t { kTp, kUlysses, kRing, kShard, kReplicate, kData, kExpert, kStage };

// `ranks` ranks at the distance `stride` from one another; as many groups as share a host's network at a
// time.
struct Reach {
  std::int64_t ranks = 1, stride = 1, sharing = 1;
  bool in_place = false;  // of gradients and parameters: in memory that ranks of a host share
};
// Backends of calibrated collectives: tensors in a rank's own memory, and in memory that ranks share.
inline constexpr const char *kOwnMemory = "shm", *kInPlace = "shm in place";
// Axes stand outermost first: pp, dp_replicate, dp_shard, cp_ring, cp_ulysses, tp (docs/hosts.md). kData: all
// that a gradient is summed over; kExpert: neighbours among the ranks with other tokens.
Reach reach_of(const Candidate& candidate, Axis axis, const Cluster& cluster);
// The same for any group; its like for other ranks work at the same time.
Reach reach_of(std::int64_t ranks, std::int64_t stride, const Cluster& cluster);

class Network {
 public:
  Network(const Cluster& cluster, const Calibration& calibration, double share_inside, double share_across);
  // `bytes`: of the whole buffer, as one rank has it before (reduce) or after (gather). A ring, level by
  // level: latency * steps inside + latency * steps across + bytes that the slowest link carries / its
  // bandwidth; an all-reduce takes a tree where that is faster. A calibration of this operation on this
  // number of ranks within one host replaces the formula.
  double seconds(Operation operation, double bytes, const Reach& reach) const;
  // The two parts of seconds(), for the laws of docs/planning_reference.md.
  struct Cost {
    double latency = 0, transfer = 0;
    Origin origin = Origin::kDataSheet;  // of the link that limits it
  };
  Cost cost(Operation operation, double bytes, const Reach& reach) const;

 private:
  Cluster cluster_;
  Calibration calibration_;
  double share_inside_, share_across_;
};

// ---- work and rates ----

// A linear layer of m tokens, k inputs and n outputs, `count` times: one of its three products.
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  double count = 1;
};
// A rank's work for one micro-batch in a layer, or at an end of the model. Exchanges are whole buffers.
struct LayerWork {
  std::vector<Product> products{};  // of the forward, and as many in either half of the backward
  double pairs = 0;                 // FLOPs of attention, forward
  double bytes = 0;                 // read and written by operators that no product hides, forward
  double copies = 0;                // the same, to experts and back
  int operators = 0;                // launches or calls, forward
  double tp_bytes = 0, ring_bytes = 0, ulysses_bytes = 0, expert_bytes = 0;
};
// `pairs`: of a sequence, where they are known already.
LayerWork layer_work(const Problem& problem, const Candidate& candidate, std::int64_t layer,
                     std::optional<double> pairs = std::nullopt);
LayerWork output_work(const Problem& problem, const Candidate& candidate);  // head and loss

// Rates of a device: calibrated ones go before the data sheet's.
class Rates {
 public:
  explicit Rates(const Problem& problem);
  // Between the nearest calibrated shapes, linear in 1/size.
  double seconds(const Product& product) const;
  // Causal, of fragments of `length` tokens.
  double attention(double flops, std::int64_t length, std::int64_t head_dim) const;
  double memory(double bytes) const { return bytes / memory_; }
  double copies(double bytes) const { return bytes / copies_; }
  double operators(int count) const { return count * operator_; }
  double optimizer(double bytes) const { return bytes / optimizer_; }
  Origin origin() const { return origin_; }

  // A calibrated rate, and the sizes that it is of.
  struct Known {
    std::array<double, 3> sizes{1, 1, 1};
    double rate = 0;
  };

 private:
  double flops_, attention_flops_, memory_, copies_, operator_, optimizer_;
  Origin origin_;
  std::vector<Known> products_{}, attention_{};  // of the precision
};

// Pairs of each packed sequence: documents one behind another, cut where a sequence ends.
std::vector<double> pairs_by_sequence(const Work& work);
// Their average, and how much longer the slowest of `ranks` ranks computes than the mean one (1: even).
struct Packs {
  double pairs = 0, slowest = 1;
};
Packs packs_of(const std::vector<double>& pairs, std::int64_t ranks = 1, std::int64_t sequences_of_rank = 1);

// Bytes that an update moves for an element: its gradient is read, masters and states are read and written,
// the parameter is written.
inline double update_bytes(const ElementBytes& bytes) {
  return bytes.gradient + 2 * (bytes.master + bytes.state) + bytes.parameter;
}

// The rest of `seconds` that `behind` seconds do not hide, of which a part can hide: the
// overlap law, forward + max(backward, reduce) = forward + backward + exposed(reduce, backward, 1).
inline double exposed(double seconds, double behind, double part) {
  return seconds > part * behind ? seconds - part * behind : 0;
}

// Multiplications of a token in a layer, as tables of published runs count them.
inline double products_of_layer(const ModelShape& model) {
  const double h = double(model.hidden);
  return 2 * h * h * (1 + double(model.key_value_heads) / double(model.heads)) +
         (model.gated ? 3 : 2) * h * double(model.feed_forward);
}
// Steps of other programs (published.cpp), with their own stages.
StepParts published_step(const Problem& problem, const Candidate& candidate,
                         const std::vector<StageShape>& stages);

class StepModel {
 public:
  StepModel(const Problem& problem, Pipelines& pipelines, MemoryModel& memory);

  StepParts of(const Candidate& candidate);
  // At most of(candidate).total() with any size of buckets, without a simulation: for leaving out.
  double least(const Candidate& candidate);
  // The same without what gradients and parameters take: no strategy is asked.
  double least_length(const Candidate& candidate);
  // At most that of every strategy and schedule on a mesh with this micro-batch, and cheaper still.
  double least_of_mesh(const Candidate& mesh);
  // The size of buckets, at most `most`, that makes latency and tail least.
  std::int64_t best_bucket_bytes(const Candidate& candidate, std::int64_t most = 1 << 30);
  std::vector<Planned::Part> explain(const Candidate& candidate, const StepParts& parts);
  // Seconds of a micro-batch on the slowest rank, and of one layer: collectives hide behind them.
  struct Behind {
    double forward = 0, backward = 0, layer_forward = 0, layer_backward = 0;
    double tp = 0, ep = 0;  // parts of a layer's time (of one with experts) that exchanges take
  };
  Behind behind(const Candidate& candidate);
  StepParts data_parallel(const Candidate& candidate);  // what gradients and parameters take, alone
  std::vector<Span> timeline(const Candidate& candidate);
  // Says where the network's numbers along an axis are from.
  Origin origin_of(const Candidate& candidate, Axis axis) const {
    return network_.cost(Operation::kAllGather, 1, reach_of(candidate, axis, problem_.cluster)).origin;
  }
  double overlap() const { return overlap_; }
  const Network& network() const { return network_; }
  const Rates& rates() const { return rates_; }

 private:
  // A rank's seconds of a forward, or of a half of a backward.
  struct Seconds {
    double products = 0, attention = 0, memory = 0, overhead = 0, tp = 0, cp = 0, ep = 0;
    double hidden_tp = 0, hidden_cp = 0, hidden_ep = 0;

    void add(const Seconds& more, double times = 1) {
      products += times * more.products, attention += times * more.attention, memory += times * more.memory;
      overhead += times * more.overhead, tp += times * more.tp, cp += times * more.cp, ep += times * more.ep;
      hidden_tp += times * more.hidden_tp, hidden_cp += times * more.hidden_cp,
          hidden_ep += times * more.hidden_ep;
    }
    double total() const { return products + attention + memory + overhead + tp + cp + ep; }
  };
  struct Pass {
    Seconds forward{}, inputs{}, weights{};  // `inputs`: of a checkpointed layer with its forward again
    void add(const Pass& more, double times = 1) {
      forward.add(more.forward, times), inputs.add(more.inputs, times), weights.add(more.weights, times);
    }
    double backward() const { return inputs.total() + weights.total(); }
  };
  // The passes of a layer of either kind, and of the output.
  struct Passes {
    Pass dense{}, mixture{}, output{};
  };
  // Seconds of the stages of one micro-batch, and the rank of the pipeline that computes longest.
  struct Staged {
    StageTimes times{};
    int slowest = 0;
    Pass of_slowest{};
  };
  using Shape = std::tuple<int, int, int, int, std::int64_t, bool, bool>;
  static Shape shape_of(const Candidate& c);
  const Passes& passes_of(const Candidate& c);
  Pass computed(const Candidate& c, std::int64_t layer) const;
  const Staged& staged(const Candidate& c);
  static double shortest(const Candidate& c, const StageTimes& times);
  void add_data_parallel(StepParts& parts, const Candidate& c, const Staged& staged,
                         std::int64_t bucket_bytes);
  StepParts made(const Candidate& c, const Staged& times, double length, std::int64_t bucket_bytes);

  const Problem& problem_;
  Pipelines& pipelines_;
  MemoryModel& memory_;
  Network network_;
  Rates rates_;
  double overlap_;             // part of a collective that computation hides
  std::vector<double> pairs_;  // of the sequences of a corpus, and their mean
  double mean_pairs_;
  std::int64_t fragment_;  // tokens of a fragment, on the average
  std::map<Shape, Passes> passes_{};
  std::map<std::tuple<Shape, int, int, bool>, Staged> stages_{};
  std::map<std::pair<std::int64_t, std::int64_t>, double> slowest_{};
};

}  // namespace isograd::planner
