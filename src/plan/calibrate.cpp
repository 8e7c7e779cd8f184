// Parts are measured in rounds, each round through all parts: a machine that is busy for some seconds then
// disturbs a round and not a part. A part takes the median of all its rounds, as steps meet the slow moments
// of a machine as often as the fast ones, and of a round the mean, as a step is a sum.
#include "plan/calibrate.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <deque>
#include <fstream>
#include <map>
#include <numeric>

#include "isograd/optimizer.hpp"
#include "kernels/matmul/product.hpp"
#include "kernels/versions.hpp"
#include "layout/flat.hpp"
#include "model/attention/attention.hpp"
#include "model/experts.hpp"
#include "model/fused.hpp"
#include "plan/problem.hpp"
#include "plan/time.hpp"
#include "train/build.hpp"
#include "train/device.hpp"
#include "train/memory.hpp"
#include "train/rank_zero.hpp"

namespace isograd::planner {
namespace {

constexpr int kRounds = 5, kMostRounds = 9;

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Measurement {
 public:
  Measurement(World& world, const CalibrateOptions& options) : world_(world), options_(options) {}

  // Something that is measured, of the kind that `not_measured` names: `share` seconds of a round; a rate is
  // of `size` FLOPs or bytes. `once` returns the seconds of one, on this rank.
  using Found = std::function<void(double rate, double spread)>;
  void add(std::string kind, double share, double size, std::function<double()> once, Found found) {
    parts_.push_back({std::move(kind), share, size, std::move(once), std::move(found)});
  }
  // The same, of one rate.
  void add(std::string kind, double share, double size, std::function<void()> work, double& rate_found) {
    add(
        std::move(kind), share, size, [=] { return seconds_of(work); },
        [&rate_found](double rate, double) { rate_found = rate; });
  }

  // Collective. Returns sentences about what was not measured.
  std::vector<std::string> run() {
    for (int round = 0; round < kMostRounds; ++round)
      for (Part& part : parts_) {
        if (round == 0) part.times = times_of(part);
        if (part.times == 0 || part.seconds > 0 || (round >= kRounds && again_ > options_.seconds / 8))
          continue;
        const auto begin = std::chrono::steady_clock::now();
        double sum = 0;
        for (std::size_t i = 0; i < part.times; ++i) sum += told(part, part.once(), round);
        part.rounds.push_back(sum / double(part.times));
        if (round + 1 >= kRounds) compare_rounds(part);
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (round >= kRounds) again_ += agreed({took})[0];
      }
    struct Missing {
      int all = 0, unsteady = 0, late = 0;
    };
    std::map<std::string, Missing> kinds;
    for (Part& part : parts_) {
      Missing& missing = kinds[part.kind];
      ++missing.all;
      if (part.times == 0) {
        ++missing.late;
        continue;
      }
      part.seconds > 0 ? part.found(part.size / part.seconds, part.spread) : void(++missing.unsteady);
    }
    std::vector<std::string> sentences;
    for (const auto& [kind, missing] : kinds) {
      const auto of = [&](int count) {
        return missing.all == 1 ? kind : fmt::format("{}, {} of {}", kind, count, missing.all);
      };
      if (missing.unsteady > 0)
        sentences.push_back(fmt::format(
            "{}: the middle half of {} to {} rounds differs by more than a factor of {}, as on a machine that "
            "is busy with something else",
            of(missing.unsteady), kRounds, kMostRounds, kSteadyPeak));
      if (missing.late > 0)
        sentences.push_back(fmt::format("{}: {:g} s were over before", of(missing.late), options_.seconds));
    }
    return sentences;
  }

 private:
  struct Part {
    std::string kind;
    double share, size;
    std::function<double()> once;
    Found found;
    std::size_t times = 0;           // in a round; 0: there was no time
    std::vector<double> rounds{};    // the mean seconds of each
    double seconds = 0, spread = 0;  // of all rounds; no seconds: they do not agree
  };
  // The largest of any rank.
  std::array<double, 3> agreed(std::array<double, 3> own) {
    const at::Tensor all = at::tensor(at::ArrayRef<double>(own), at::kDouble);
    world_.group.all_reduce(all, ReduceOp::kMax);
    std::copy_n(all.const_data_ptr<double>(), own.size(), own.begin());
    return own;
  }
  double told(const Part& part, double seconds, int round) const {
    return options_.told ? options_.told(part.kind, round, part.size) : seconds;
  }
  // On all ranks alike: a part is steady if it is on each of them.
  void compare_rounds(Part& part) {
    std::vector<double> rounds = part.rounds;
    std::ranges::sort(rounds);
    const std::size_t last = rounds.size() - 1;
    const double low = rounds[last / 4], high = rounds[last - last / 4],
                 median = (rounds[last / 2] + rounds[last - last / 2]) / 2;
    const auto [seconds, spread, unsteady] =
        agreed({median, (high - low) / median, high <= kSteadyPeak * low ? 0.0 : 1.0});
    if (unsteady == 0) part.seconds = seconds, part.spread = spread;
  }
  // As many as its share allows, the same on all ranks; 0 where all rounds would take too long.
  std::size_t times_of(const Part& part) {
    constexpr double kMost = 200;
    if (spent_ > options_.seconds) return 0;
    part.once();  // prepares itself
    double once = 0;
    const double all = seconds_of([&] { once = told(part, part.once(), 0); });  // with what is not timed
    once = agreed({std::max(once, all)})[0];
    const double times = std::floor(std::clamp(part.share / once, 1.0, kMost));
    spent_ += once * (2 + kRounds * times);
    return std::size_t(times);
  }

  World& world_;
  const CalibrateOptions& options_;
  double spent_ = 0, again_ = 0;  // seconds, in the rounds of all parts and in the further ones
  std::vector<Part> parts_{};
};

// ---- products and attention ----

// Operands out of the cache, as a step has them: one after another from memory larger than that. Results are
// kept as long, so that the next one does not take their place there.
class Operands {
 public:
  explicit Operands(at::ScalarType type) : type_(type) {}
  at::Tensor matrix(std::int64_t rows, std::int64_t columns) {
    if (!memory_.defined())
      memory_ = at::rand({std::int64_t(kBytes / at::elementSize(type_))}, at::kFloat).to(type_);
    const std::int64_t numel = rows * columns;
    if (next_ + numel > memory_.numel()) next_ = 0;
    const at::Tensor taken = memory_.narrow(0, next_, numel).view({rows, columns});
    next_ += (numel + 63) / 64 * 64;
    return taken;
  }
  void keep(const std::vector<at::Tensor>& results) {
    for (const at::Tensor& result : results) kept_.push_back(result), kept_bytes_ += result.nbytes();
    for (; kept_bytes_ > kBytes; kept_.pop_front()) kept_bytes_ -= kept_.front().nbytes();
  }

 private:
  static constexpr std::size_t kBytes = 96 << 20;
  at::ScalarType type_;
  at::Tensor memory_{};
  std::int64_t next_ = 0;
  std::deque<at::Tensor> kept_{};
  std::size_t kept_bytes_ = 0;
};

// The three products of a linear layer: x Wᵀ, and in the backward dy W and dyᵀ x, which is written where
// gradients are summed. The operator before has just written x or dy; all else was written long ago.
double seconds_of_products(Operands& operands, const Product& of) {
  const auto x = [&] { return operands.matrix(of.m, of.k); };
  const auto weight = [&] { return operands.matrix(of.n, of.k); };
  const at::Tensor in = x(), kept = x(), forward = weight(), backward = weight(), sum = weight(),
                   gradient = operands.matrix(of.m, of.n);
  std::vector<at::Tensor> made(2);
  in.neg_();
  double seconds = seconds_of([&] { made[0] = product(in, forward); });
  gradient.neg_();
  seconds += seconds_of([&] {
    made[1] = product(gradient, backward.t());
    multiply_into(sum, gradient.t(), kept.t());
  });
  operands.keep(made);
  return seconds;
}

void add_products(Measurement& measurement, ClusterFile& into, Precision precision,
                  const std::shared_ptr<Operands>& operands) {
  // fp64 is for proofs: fewer, and smaller ones.
  const double most = precision == Precision::kFloat64 ? 0x1p25 : 0x1p31;
  for (const std::int64_t m : {32, 128, 512, 2048})
    for (const std::int64_t n : {64, 256, 1024, 4096})
      for (const std::int64_t k : {64, 256, 1024, 4096}) {
        const Product of{m, n, k};
        const double multiplied = double(m) * double(n) * double(k);
        if (multiplied > most) continue;
        measurement.add(
            fmt::format("matrix products in {}", name_of(precision)), 0.03, 3 * 2 * multiplied,
            [=] { return seconds_of_products(*operands, of); },
            [=, &into](double rate, double spread) {
              into.calibration.products.push_back({m, n, k, precision, rate, spread});
              for (auto* all : {&into.cluster.device.peak, &into.cluster.device.best_found})
                (*all)[std::size_t(precision)] = std::max((*all)[std::size_t(precision)], rate);
            });
      }
}

void add_attention(Measurement& measurement, ClusterFile& into, Precision precision,
                   const std::shared_ptr<Operands>& operands) {
  for (const std::int64_t length : {64, 256, 1024, 4096})
    for (const std::int64_t dim : {16, 64, 256}) {
      constexpr std::int64_t kHeads = 2, kTokens = 1024;
      if (length * dim > 1 << 18 || (precision == Precision::kFloat64 && length * dim > 1 << 16)) continue;
      const std::int64_t count = std::max<std::int64_t>(1, kTokens / length);
      std::vector<std::int64_t> bounds{0};
      for (std::int64_t i = 0; i < count; ++i) bounds.push_back(bounds.back() + length);
      // Causal, as in Rates: forward two products of each pair, backward five.
      const double flops = 3.5 * 4 * double(count * kHeads * dim) * double(length) * double(length + 1) / 2;
      const auto once = [=] {
        std::vector<at::Tensor> inputs, made;
        for (int i = 0; i < 3; ++i)
          inputs.push_back(operands->matrix(count * length, kHeads * dim)
                               .view({count * length, kHeads, dim})
                               .detach()
                               .requires_grad_());
        const double seconds = seconds_of([&] {
          const at::Tensor out = variable_length_attention(inputs[0], inputs[1], inputs[2], bounds);
          made = torch::autograd::grad({out}, inputs, {out.detach()});
          made.push_back(out.detach());
        });
        operands->keep(made);
        return seconds;
      };
      measurement.add(fmt::format("attention in {}", name_of(precision)), 0.03, flops, once,
                      [=, &into](double rate, double spread) {
                        into.calibration.attention.push_back({length, dim, precision, rate, spread});
                      });
    }
}

// ---- passes over memory ----

// The layer and the micro-batch whose passes are timed.
constexpr std::int64_t kTokens = 512;
ModelShape model_of(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t feed_forward) {
  return {.name = "measured",
          .layers = layers,
          .hidden = hidden,
          .heads = heads,
          .key_value_heads = heads,
          .head_dim = hidden / heads,
          .feed_forward = feed_forward,
          .vocabulary = 16};
}

LayerWork work_of(const ModelShape& model, std::int64_t tokens) {
  const Cluster cluster;
  const Calibration calibration;
  const Work work{.tokens = double(tokens), .sequence = tokens, .precision = Precision::kFloat32};
  return layer_work({model, cluster, calibration, work}, Candidate{}, 0);
}

// All of a layer but its products and attention, forward and backward. Other memory is written between two
// timings, as the rest of a step would take the place of the operands in the cache.
void add_passes(Measurement& measurement, ClusterFile& into) {
  const ModelShape of = model_of(2, 512, 8, 1408);
  const auto given = [](std::vector<std::int64_t> shape) { return at::randn(shape).requires_grad_(); };
  // Both norms, and queries and keys, as one of twice as many rows.
  const at::Tensor x = given({2 * kTokens, of.hidden}), scale = given({of.hidden}),
                   queries = given({2 * kTokens, of.heads, of.head_dim}),
                   gate = given({kTokens, of.feed_forward}), up = given({kTokens, of.feed_forward}),
                   cos = at::randn({2 * kTokens, of.head_dim / 2}), others = at::zeros({8 << 20});
  const auto passes = [=] {
    const auto [normed, residual] = rms_norm_and_residual(x, scale, 1e-5);
    torch::autograd::grad({normed, residual, rotary(queries, cos, cos), swiglu(gate, up)},
                          {x, scale, queries, gate, up},
                          {x.detach(), x.detach(), queries.detach(), up.detach()});
  };
  // Backward moves gradients, too.
  measurement.add(
      "passes of a layer", 0.12, 3 * work_of(of, kTokens).bytes,
      [=] {
        others.add_(1);
        return seconds_of(passes);
      },
      [&into](double rate, double) { into.calibration.memory_bandwidth = rate; });
  // Tokens go to two of eight experts, and results come back.
  ModelShape mixture = of;
  mixture.experts = {.count = 8, .per_token = 2, .feed_forward = of.feed_forward};
  const at::Tensor tokens = given({kTokens, of.hidden}), weights = given({kTokens, 2});
  const ByExpert order =
      sort_by_expert(at::randint(mixture.experts.count, {kTokens, 2}, at::kLong), mixture.experts.count);
  const auto copies = [=] {
    torch::autograd::grad({copy_to_experts(tokens, order), add_by_weight(x, weights, order)},
                          {tokens, x, weights}, {x.detach(), tokens.detach()});
  };
  measurement.add(
      "copies to experts", 0.12, 3 * work_of(mixture, kTokens).copies,
      [=] {
        others.add_(1);
        return seconds_of(copies);
      },
      [&into](double rate, double) { into.calibration.expert_bandwidth = rate; });
  // A model so small that starting its operators is all that takes time.
  const ModelShape tiny = model_of(4, 16, 2, 32);
  constexpr std::int64_t kFew = 8;
  const auto model = std::make_shared<DecoderLM>(decoder_of(tiny), at::kFloat, 1);
  Batch batch = empty_batch();
  batch.tokens = at::arange(kFew, at::kLong), batch.positions = at::arange(kFew, at::kLong);
  batch.cu_seqlens = {0, kFew}, batch.sample_ids = {0};
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : model->named()) parameters.push_back(tensor.requires_grad_());
  const LayerWork layer = work_of(tiny, kFew);
  const double operators = layer.operators * 2.5 * double(tiny.layers);  // as time.cpp counts a backward
  const auto pass = [=] {
    const at::Tensor out = model->hidden(batch);
    torch::autograd::grad({out}, parameters, {out.detach()}, std::nullopt, false, true);
  };
  measurement.add(
      "overhead of an operator", 0.12, operators, [=] { return seconds_of(pass); },
      [&into](double rate, double) { into.calibration.operator_overhead = 1 / rate; });
}

void add_optimizer(Measurement& measurement, ClusterFile& into) {
  constexpr std::int64_t kParameters = 8 << 20;
  struct Updated {
    std::vector<NamedParameter> parameters =
        trainable_parameters({{"weight", at::zeros({kParameters / 1024, 1024}).requires_grad_()}});
    std::vector<Bucket> buckets{
        make_bucket(plan_buckets(parameters, 1 << 30).at(0), parameters, at::ones({kParameters}), 0, 1)};
    std::unique_ptr<AdamW> optimizer = adamw({});
  };
  const auto updated = std::make_shared<Updated>();
  measurement.add(
      "update of an optimizer", 0.2, double(kParameters) * update_bytes(element_bytes(at::kFloat, 2)),
      [=] { updated->optimizer->update(updated->buckets, 1); }, into.calibration.optimizer_bandwidth);
  // McCalpin's triad: 12 bytes an element.
  const auto abc = std::make_shared<std::array<at::Tensor, 3>>();
  for (at::Tensor& one : *abc) one = at::ones({kParameters});
  measurement.add(
      "memory bandwidth", 0.2, 12 * double(kParameters),
      [=] { at::add_out((*abc)[0], (*abc)[1], (*abc)[2], 3); }, into.cluster.device.memory_bandwidth);
}

// ---- collectives ----

constexpr Operation kOperations[] = {Operation::kAllReduce, Operation::kReduceScatter, Operation::kAllGather,
                                     Operation::kAllToAll, Operation::kSend};

// Makes a collective of a buffer of `bytes`; in memory that ranks share, or in a rank's own.
std::function<void()> collective(Group group, Operation operation, std::int64_t bytes, bool in_place) {
  const std::int64_t n = group.size(), numel = bytes / 4 / n * n;
  const at::Tensor whole = in_place ? group.empty_shared(numel, at::kFloat) : at::zeros({numel}),
                   own = whole.narrow(0, group.rank() * numel / n, numel / n);
  switch (operation) {
    case Operation::kAllReduce: return [=]() mutable { group.all_reduce(whole); };
    case Operation::kReduceScatter: return [=]() mutable { group.reduce_scatter_async(own, whole).wait(); };
    case Operation::kAllGather:
      return [=]() mutable { group.all_gather_async(whole.view({n, numel / n}), own).wait(); };
    case Operation::kAllToAll: return [=]() mutable { group.all_to_all(whole); };
    case Operation::kSend: break;
  }
  const at::Tensor comes = at::zeros({numel});  // round the ring
  const int next = (group.rank() + 1) % int(n), before = (group.rank() + int(n) - 1) % int(n);
  return [=]() mutable {
    Pending sent = group.send_async(whole, next);
    group.recv(comes, before);
    sent.wait();
  };
}

// Latency and bandwidth of one operation of one group, from several sizes.
struct Points {
  std::vector<double> bytes{}, seconds{};  // sent by a rank; of one
  double spread = 0;
};

// The line t = latency + bytes / bandwidth with the least sum of squared relative errors.
Calibration::Collective line_through(const Points& points) {
  double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
  for (std::size_t i = 0; i < points.bytes.size(); ++i) {
    const double x = points.bytes[i], y = points.seconds[i], weight = 1 / (y * y);
    w += weight, wx += weight * x, wy += weight * y, wxx += weight * x * x, wxy += weight * x * y;
  }
  const double slope = (w * wxy - wx * wy) / (w * wxx - wx * wx), start = (wy - slope * wx) / w;
  return {.latency = std::max(0.0, start), .bandwidth = 1 / slope, .spread = points.spread};
}

// By operation, backend and ranks.
using Groups = std::map<std::tuple<std::string, std::string, std::int64_t>, std::shared_ptr<Points>>;

void add_collectives(Measurement& measurement, Groups& groups, Group group, const std::string& backend) {
  const bool in_place = backend == kInPlace;
  for (const Operation operation : kOperations) {
    if (in_place && operation == Operation::kSend) continue;
    const auto points = std::make_shared<Points>();
    groups[{std::string(name_of(operation)), backend, group.size()}] = points;
    for (const int bytes : {1 << 12, 1 << 16, 1 << 20, 1 << 24}) {
      const double n = group.size(), part = (n - 1) / n;
      const double sent = double(bytes) * (operation == Operation::kAllReduce ? 2 * part
                                           : operation == Operation::kSend    ? 1
                                                                              : part);
      // By turns, as a step does not find a buffer in the cache in which the last one was.
      std::vector<std::function<void()>> each;
      for (int i = 0; i < std::clamp((1 << 24) / bytes, 1, 16); ++i)
        each.push_back(collective(group, operation, bytes, in_place));
      const auto once = [=, next = std::size_t{0}]() mutable {
        group.barrier();
        return seconds_of(each[next++ % each.size()]);
      };
      measurement.add(fmt::format("{} over {}, {} ranks", name_of(operation), backend, group.size()), 0.02,
                      sent, once, [=](double rate, double spread) {
                        points->bytes.push_back(sent), points->seconds.push_back(sent / rate);
                        points->spread = std::max(points->spread, spread);
                      });
    }
  }
}

// How much of a reduction a product hides that is computed meanwhile.
void add_overlap(Measurement& measurement, ClusterFile& into, Group group) {
  constexpr std::int64_t kBytes = 4 << 20, kSize = 512;
  const auto operands = std::make_shared<Operands>(at::kFloat);
  const at::Tensor whole = group.empty_shared(kBytes / 4, at::kFloat);
  const auto compute = [=] { product(operands->matrix(kSize, kSize), operands->matrix(kSize, kSize)); };
  const auto seconds = std::make_shared<std::array<double, 3>>();
  const std::array<std::function<void()>, 3> all = {compute, [=]() mutable { group.all_reduce(whole); },
                                                    [=]() mutable {
                                                      Pending pending = group.all_reduce_async(whole);
                                                      compute();
                                                      pending.wait();
                                                    }};
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto once = [=]() mutable {
      group.barrier();
      return seconds_of(all[i]);
    };
    measurement.add("overlap of a reduction and a product", 0.06, 1, once, [=, &into](double rate, double) {
      (*seconds)[i] = 1 / rate;
      const auto [product, reduction, both] = *seconds;
      if (product > 0 && reduction > 0 && both > 0)
        into.calibration.overlap =
            std::clamp((product + reduction - both) / std::min(product, reduction), 0.0, 1.0);
    });
  }
}

// ---- the machine ----

// The memory of a rank that has opened LibTorch and has no model yet.
double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double all = 0, resident = 0;
  file >> all >> resident;
  return resident * double(::sysconf(_SC_PAGE_SIZE));
}

Cluster cluster_of(const World& world, std::int64_t per_host) {
  Cluster cluster{.name = "here", .devices = world.size, .per_host = per_host, .host_memory = true};
  cluster.device.name = fmt::format("a rank on {}", kernels::processor_name());
  cluster.device.memory =
      double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE)) / double(per_host);
  cluster.device.source = "isograd calibrate, on this machine; peaks are the best products found";
  cluster.reserve = resident_bytes();
  return cluster;
}

}  // namespace

ClusterFile calibrate(World& world, const CalibrateOptions& options) {
  ClusterFile found{.cluster = cluster_of(world, world.size)};
  Calibration& calibration = found.calibration;
  calibration.machine = machine_text();
  Measurement measurement(world, options);
  Groups groups;
  // In the order in which they may be left out: without the first ones there is nothing to plan from.
  for (std::int64_t size = 2; size <= world.size; ++size) {
    const bool power = std::has_single_bit(static_cast<std::uint64_t>(size));
    if (world.size % size != 0 || (!power && size != world.size)) continue;
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), world.rank / int(size) * int(size));
    const Group group = size == world.size ? world.group : world.subgroup(ranks, "calibrated");
    for (const char* backend : {kOwnMemory, kInPlace}) add_collectives(measurement, groups, group, backend);
  }
  add_optimizer(measurement, found);
  add_passes(measurement, found);
  if (options.mpi) add_collectives(measurement, groups, *options.mpi, "mpi");
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16, Precision::kFloat64}) {
    const auto operands = std::make_shared<Operands>(type_of(precision));
    add_products(measurement, found, precision, operands);
    add_attention(measurement, found, precision, operands);
    if (precision == Precision::kFloat32 && world.size > 1) add_overlap(measurement, found, world.group);
  }
  calibration.not_measured = measurement.run();
  for (const auto& [key, points] : groups) {
    if (points->bytes.size() < 2) continue;
    Calibration::Collective line = line_through(*points);
    if (!(line.bandwidth > 0 && std::isfinite(line.bandwidth))) continue;
    std::tie(line.operation, line.backend, line.ranks) = key;
    calibration.collectives.push_back(line);
    if (line.operation == name_of(Operation::kAllGather) && line.backend == kOwnMemory &&
        line.ranks == world.size)
      found.cluster.links = {
          {"shared memory", world.size, line.latency, line.bandwidth, Origin::kCalibrated}};
  }
  const bool enough = found.cluster.device.memory_bandwidth > 0 && !calibration.products.empty() &&
                      (world.size == 1 || !found.cluster.links.empty());
  std::optional<ErrorText> problem;
  if (!enough)
    problem = {"isograd calibrate", fmt::format("{}", fmt::join(calibration.not_measured, "; ")),
               "steady times of memory, products and collectives", "Run it again while nothing else runs"};
  throw_agreed(world.group, problem);
  auto& missing = calibration.not_measured;
  if (world.size == 1) missing.emplace_back("collectives: there was one rank");
  if (!options.mpi) missing.emplace_back("MPI: no ranks over it");
  missing.push_back(fmt::format("GPUs and NCCL: processors alone are measured ({})", find_gpus().text()));
  missing.emplace_back("networks: one host was measured");
  missing.emplace_back("float8: isograd has no products in it");
  return found;
}

}  // namespace isograd::planner
