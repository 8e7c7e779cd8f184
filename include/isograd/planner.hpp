// The planner: which layout, how large, how fast, and what limits it (docs/planning.md). Plain data and pure
// functions: no LibTorch type, no rank, no device is needed. `isograd plan` is these functions and a table.
#pragma once

#include "isograd/error.hpp"

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace isograd::planner {

// ---- numbers with their origin ----

// From best to worst. A number made of several has the worst of theirs.
enum class Origin : std::uint8_t {
  kExact,       // arithmetic on the layout: kept and sent bytes, counts
  kMeasured,    // by a run on this machine (--try)
  kCalibrated,  // by `isograd calibrate` on this kind of machine
  kFitted,      // a constant fitted on published runs (Constants)
  kDataSheet,
  kAssumed
};

// `low` to `high` held nine of ten of the validation rows of the same kind (docs/planning.md); equal to
// `value` where it is exact. Bytes and seconds, never GB or ms.
struct Estimate {
  double value = 0, low = 0, high = 0;
  Origin origin = Origin::kExact;
};

// ---- what is asked ----

enum class Precision : std::uint8_t { kFloat64, kFloat32, kBFloat16, kFloat8 };
inline constexpr std::size_t kPrecisions = 4;
double bytes_of(Precision precision);           // of an element of a matrix
std::string_view name_of(Precision precision);  // of train.dtype; "float8" is planned alone
std::string_view name_of(Origin origin);

// A decoder as numbers. isograd trains those with `gated`; others can be planned, not written.
struct ModelShape {
  std::string name{}, family = "llama";
  std::int64_t layers = 0, hidden = 0, heads = 0, key_value_heads = 0, head_dim = 0, feed_forward = 0,
               vocabulary = 0;
  bool gated = true;  // three matrices of the feed-forward network, not two
  bool tied_output = false, attention_bias = false, output_bias = false, mlp_bias = false,
       query_key_norm = false;
  struct Experts {
    std::int64_t count = 0, per_token = 0, feed_forward = 0, shared_feed_forward = 0;  // count 0: none
    std::vector<std::int64_t> dense_layers{};                                          // ascending
  } experts{};
  std::filesystem::path file{};  // that it was read from, whose other keys to_toml() keeps; empty: numbers

  bool has_experts(std::int64_t layer) const;
  double parameters() const, active_parameters() const;  // active: those that compute a token
};

// ConfigError, all three: docs/planning_reference.md lists what is refused. A file: an isograd TOML, or a
// Hugging Face directory or config.json.
ModelShape read_model(const std::filesystem::path& file);
void check(const ModelShape& model);

// A level of the network joins `ranks` consecutive ranks (a host, a rack, all), over what the level inside of
// it does not reach. Latency is of one step of a ring.
struct Link {
  std::string name{};
  std::int64_t ranks = 1;
  double latency = 0;    // seconds
  double bandwidth = 0;  // bytes/s, each way, of a rank
  Origin origin = Origin::kDataSheet;
};

struct Device {
  std::string name{};
  double memory = 0, memory_bandwidth = 0;       // bytes, bytes/s
  std::array<double, kPrecisions> peak{};        // FLOP/s by Precision; 0: not known
  std::array<double, kPrecisions> best_found{};  // the best product that was measured; 0: not known
  std::string source{};                          // of these numbers
};

struct Cluster {
  std::string name{};
  Device device{};
  std::int64_t devices = 1, per_host = 1;
  std::vector<Link> links{};  // innermost first; the last joins all
  bool host_memory = false;   // ranks of a host share memory: parallel.share_parameters
  double reserve = 0;         // bytes of a device that libraries and fragmentation take
  std::int64_t hosts() const { return (devices + per_host - 1) / per_host; }
};

// A name of the built-in table, "here" (the file that `isograd calibrate` wrote), or a TOML file. `devices`
// replaces the number in it.
Cluster read_cluster(const std::string& name_or_file, std::optional<std::int64_t> devices = std::nullopt);
void check(const Cluster& cluster);
std::vector<std::string> built_in_clusters();

// The findings of `isograd calibrate`, part of the same TOML file as its cluster. A list may be empty: the
// planner then takes the data sheet and says so.
struct Calibration {
  std::string machine{};  // processor or device, cores, libraries: refused for another one
  struct Product {
    std::int64_t m = 0, n = 0, k = 0;
    Precision precision = Precision::kFloat32;
    double flops = 0, spread = 0;  // FLOP/s; (third - first quartile) / median
  };
  struct Collective {
    std::string operation{}, backend{};  // "all_reduce", "shm"
    std::int64_t ranks = 0;
    double latency = 0, bandwidth = 0, spread = 0;  // t = latency + bytes sent by a rank / bandwidth
  };
  // Forward and backward of causal attention in fragments of `length` tokens.
  struct Attention {
    std::int64_t length = 0, head_dim = 0;
    Precision precision = Precision::kFloat32;
    double flops = 0, spread = 0;
  };
  std::vector<Product> products{};
  std::vector<Attention> attention{};
  std::vector<Collective> collectives{};
  // Bytes/s of passes, of copies of tokens to experts and back, and of updates; seconds.
  double memory_bandwidth = 0, expert_bandwidth = 0, optimizer_bandwidth = 0, operator_overhead = 0;
  std::optional<double> overlap{};          // part of a collective that computation hides
  std::vector<std::string> not_measured{};  // a sentence each
  bool empty() const { return products.empty() && collectives.empty(); }
};
Calibration read_calibration(const std::string& name_or_file);

// The training job.
struct Work {
  double tokens = 0;  // of the global batch
  std::int64_t sequence = 4096;
  Precision precision = Precision::kBFloat16;
  bool fp32_gradients = true;
  int states = 2;  // fp32 numbers of the optimizer for each parameter: AdamW 2
  // Tokens of documents, as a corpus has them; empty: each sequence is one document. They decide how many
  // pairs attention computes and how uneven ranks are.
  std::vector<std::int64_t> documents{};

  std::int64_t samples() const;  // sequences of the global batch
};
void check(const Work& work);

// ---- a layout ----

enum class Strategy : std::uint8_t { kBucketed, kZero1, kZero2, kZero3 };
enum class Schedule : std::uint8_t { kNone, kOneFOneB, kGPipe, kInterleaved, kZeroBubbleH1, kZeroBubbleV };
std::string_view name_of(Strategy strategy);  // of parallel.strategy
std::string_view name_of(Schedule schedule);  // of parallel.schedule

// The keys of [parallel] and [batch] that the planner chooses; the others have their defaults.
struct Candidate {
  std::int32_t ranks = 1, replicas = 1, shards = 1;  // dp_replicate, dp_shard
  std::int32_t cp_ring = 1, cp_ulysses = 1, tp = 1, ep = 1, pp = 1, stages_per_rank = 1;
  Strategy strategy = Strategy::kBucketed;
  Schedule schedule = Schedule::kNone;
  bool sequence_parallel = true, reduce_once = false, share_parameters = false;
  bool checkpoint = false,
       reshard = true;             // of zero3: the forward again in backward; blocks freed in between
  std::int64_t micro_batch = 1;    // sequences of a data rank's micro-batch
  std::int64_t micro_batches = 1;  // of a data rank's step, the most of any rank: the accumulation
  std::int64_t bucket_bytes = 25 << 20;

  std::int64_t data_ranks() const { return std::int64_t{replicas} * shards; }  // with other samples
  bool operator==(const Candidate&) const = default;
};
std::string to_text(const Candidate& candidate);  // "zero3, dp 64 x tp 8, micro-batch 2 x 4"

// The sentence with which `isograd train` would refuse it, or nothing. The same rules: src/train/rules.hpp.
std::optional<ErrorText> refusal(const ModelShape& model, const Cluster& cluster, const Work& work,
                                 const Candidate& candidate);

// ---- what is predicted of a layout ----

// Bytes of the rank that needs most, and its place in the pipeline. Kept: as `isograd layout` counts them.
struct MemoryParts {
  double parameters = 0, gradients = 0, masters = 0, states = 0;  // kept from step to step
  double activations = 0;  // what backward needs of all micro-batches in flight
  double logits = 0;       // of the last stage, with their gradient
  double gathered = 0;     // whole units of zero3, those ahead included
  double buffers = 0;      // of buckets and of what travels
  double passing = 0;      // the largest operator's own tensors in backward
  double reserve = 0;      // of the cluster
  int rank_of_pipeline = 0;

  double kept() const { return parameters + gradients + masters + states; }
  double total() const { return kept() + activations + logits + gathered + buffers + passing + reserve; }
};

// Seconds of a step, without what is hidden behind something else; `hidden` has that, by axis.
struct StepParts {
  double products = 0, attention = 0, memory_bound = 0, overhead = 0;  // of the slowest rank
  double tp = 0, cp = 0, ep = 0;                                       // exchanges inside layers
  double bubble = 0;              // a rank waits for other stages, transfers included
  double gather = 0, reduce = 0;  // of parameters and gradients: what backward and forward do not hide
  double tail = 0;                // of reduce: the last bucket, which nothing can hide
  double norm = 0, optimizer = 0, publish = 0;
  double uneven = 0;  // the slowest rank's longer packs
  struct Hidden {
    double tp = 0, cp = 0, ep = 0, gather = 0, reduce = 0;
  } hidden{};

  double total() const;
};

// One lane's span of the timeline of a step.
struct Span {
  std::string lane{}, name{};  // "stage 0 compute", "F3"
  double begin = 0, end = 0;
};

MemoryParts memory_of(const ModelShape&, const Cluster&, const Work&, const Candidate&);
StepParts step_of(const ModelShape&, const Cluster&, const Calibration&, const Work&, const Candidate&);
// Bytes that the rank sends in a step, as `isograd train --memory` counts them (without tp, cp, ep and pp).
double sent_bytes_of(const ModelShape&, const Work&, const Candidate&);
std::vector<Span> timeline_of(const ModelShape&, const Cluster&, const Calibration&, const Work&,
                              const Candidate&);

// ---- the plan ----

struct Planned {
  Candidate candidate{};
  MemoryParts memory{};
  StepParts step{};
  Estimate seconds{}, bytes{}, tokens_per_second{};
  double mfu = 0;        // model FLOPs over the data sheet's peak of all devices used
  double head_room = 0;  // bytes; below 8 % of the device's memory the plan warns
  bool proved = false;   // its combination of axes is in the table that `tests` prove
  struct Part {
    std::string name{}, formula{};  // "states", "12 Ψ/N, with Ψ = 8.03e9, N = 64"
    Estimate number{};
  };
  std::vector<Part> memory_parts{}, step_parts{};
};

// A neighbour of the best layout and the reason why it is not that.
struct Neighbour {
  std::string change{}, reason{};  // "tp 16", "its all-reduce leaves the host: +41 %"
  std::optional<double> seconds{};
};

// A law of docs/planning_reference.md: the number of devices (or tokens, or bytes) at which it begins to
// cost.
struct Law {
  std::string name{}, unit{}, statement{}, moved_by{};
  Estimate at{};
  double now = 0;  // the same quantity of the best layout
  bool reached = false;
};

struct RecipeStep {
  std::string name{}, formula{}, result{}, origin{};
};

// For a cluster larger than the batch: fewer devices, a larger batch, a smaller micro-batch.
struct WayOut {
  std::string name{};
  double tokens = 0;  // of the batch
  Planned planned{};
};

struct ScalingPoint {
  std::int64_t devices = 0;
  Planned best{};
  double efficiency = 0;  // tokens/s a device over that of the smallest point
  std::string law{};      // whose limit is reached first
};

struct Options {
  std::size_t top = 5;
  std::optional<Strategy> only_strategy{};
  std::vector<std::int64_t> scaling{};  // numbers of devices; empty: none
};

struct Plan {
  ModelShape model{};
  Cluster cluster{};
  Work work{};
  std::vector<Planned> top{};    // fastest first; empty: nothing fits, `nearest` says what is missing
  std::vector<Planned> front{};  // not dominated in tokens/s, head-room and devices
  std::optional<Planned> nearest{};
  std::string missing{};  // "lacks 3.1 GiB at tp 8; fits with checkpointing"
  std::vector<Neighbour> neighbours{};
  std::vector<Law> laws{};
  std::vector<RecipeStep> recipe{};
  std::vector<WayOut> ways_out{};
  std::vector<ScalingPoint> scaling{};
  std::vector<std::string> warnings{};
  std::int64_t candidates = 0, fitting = 0;  // examined
};

// The same result on every run and for any order of the links. ConfigError: what check() refuses.
Plan plan(const ModelShape&, const Cluster&, const Calibration&, const Work&, const Options& = {});

std::string to_text(const Plan& plan);  // lines of at most 100 columns
std::string to_json(const Plan& plan);  // docs/planning_reference.md has the keys
// A configuration that `isograd train` runs and `isograd verify` proves: of the model's file all but what the
// plan decides. ConfigError: a model or precision that isograd does not train.
std::string to_toml(const Plan& plan, const Planned& planned);

}  // namespace isograd::planner
