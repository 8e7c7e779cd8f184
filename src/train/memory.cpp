#include "train/memory.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

#include "kernels/matmul/product.hpp"

namespace isograd {
namespace {

std::string megabytes(double bytes) { return fmt::format("{:.2f}", bytes / 1e6); }

// Bytes that the device's allocator has handed out.
c10::CachingAllocator::Stat allocated(at::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

}  // namespace

PersistentBytes measure_kept(const std::vector<Bucket>& buckets, const OptimizerState& state,
                             const Grid* shared_on, std::optional<at::DeviceType> only) {
  std::set<const void*> seen;
  const auto bytes = [&](const at::Tensor& tensor) -> std::int64_t {
    if (!tensor.defined() || (only && tensor.device().type() != *only)) return 0;
    if (!seen.insert(tensor.storage().data()).second) return 0;
    return static_cast<std::int64_t>(tensor.storage().nbytes());
  };
  PersistentBytes kept;
  for (const Bucket& bucket : buckets) {
    const int sharers = shared_on ? shared_on->size(bucket.sharded) : 1;
    kept.parameters += split_rows(bytes(bucket.parameters), sharers)[0];
    kept.gradients += bytes(bucket.gradients);
    kept.master += bytes(bucket.master);
  }
  for (const auto& [name, tensors] : state)
    for (const at::Tensor& tensor : tensors) kept.state += bytes(tensor);
  return kept;
}

MemoryWatch::MemoryWatch(at::Device device) : device_(device) {
  // A device's allocator has no statistics before its first tensor.
  if (!device.is_cpu()) at::empty({1}, at::TensorOptions(at::kByte).device(device));
  start_ = alive() + (device.is_cpu() ? meter_.shared() : 0);
}

std::int64_t MemoryWatch::alive() const {
  return device_.is_cpu() ? meter_.alive() : allocated(device_).current;
}
std::int64_t MemoryWatch::peak() const { return device_.is_cpu() ? meter_.peak() : allocated(device_).peak; }
void MemoryWatch::restart_peak() {
  if (device_.is_cpu()) return meter_.restart_peak();
  c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
}

void MemoryWatch::follow_experts(const RunConfig& config, const Mesh& mesh,
                                 const TaskModel::ShardedExperts& sharded) {
  if (config.parallel.ep == 1) return;
  const AxisSet axes{kExpertAxis};
  experts_ = std::make_shared<Experts>(
      Experts{.exchanges = mesh.along(axes, kExpertGroup), .others = mesh.along(axes, "experts' bytes")});
  const bool again = config.parallel.checkpoint_activations && stage_of(config.parallel.strategy) == 3,
             ahead = config.loss.balance != 0 && config.loss.balance_scope == "step";
  experts_->plan = {
      .choices = std::vector(static_cast<std::size_t>(mesh.size(axes)),
                             std::vector<std::int64_t>(static_cast<std::size_t>(sharded.experts))),
      .hidden = sharded.hidden,
      .bytes = static_cast<std::int64_t>(c10::elementSize(scalar_type(config.train.dtype))),
      .forwards = 1 + (again ? 1 : 0) + (ahead ? 1 : 0)};
  experts_->layers = sharded.layers * (config.parallel.expert_overlap == "halves" ? 2 : 1);
}

Counters MemoryWatch::remembering(Counters counters) {
  if (!experts_) return counters;
  return [experts = experts_, counters = std::move(counters)] { return experts->choices = counters(); };
}

Outcome::Sent MemoryWatch::Experts::sent(std::int64_t rounds) {
  const std::int64_t bytes = exchanges.traffic().bytes() - before;
  const auto experts = static_cast<std::int64_t>(plan.choices[0].size());
  const at::Tensor own = at::tensor(choices, at::kDouble).view({-1, experts}).sum(0).to(at::kLong);
  const at::Tensor all = others.all_gather(own);
  for (std::size_t rank = 0; rank < plan.choices.size(); ++rank)
    std::copy_n(all[static_cast<std::int64_t>(rank)].const_data_ptr<std::int64_t>(), experts,
                plan.choices[rank].begin());
  plan.exchanges = layers * rounds;
  return {.bytes = bytes, .by_formula = expert_traffic_bytes(plan, exchanges.rank())};
}

void MemoryWatch::before_step(DataParallel& layout) {
  if (experts_) experts_->before = experts_->exchanges.traffic().bytes();
  restart_peak();
  alive_ = alive();
  sent_ = layout.bytes_sent();
}

void MemoryWatch::after_step(DataParallel& layout, Optimizer& optimizer, bool shared, std::int64_t rounds) {
  if (experts_) use_.to_experts = experts_->sent(rounds);
  const Grid* shared_on = shared ? &layout.mesh().grid() : nullptr;
  const OptimizerState state = optimizer.state(layout.buckets());
  use_.kept = measure_kept(layout.buckets(), state, shared_on);
  const std::int64_t here = measure_kept(layout.buckets(), state, shared_on, device_.type()).total();
  use_.in_host_memory = use_.kept.total() - here;
  use_.other = alive() + (device_.is_cpu() ? meter_.shared() : 0) - start_ - here;
  use_.passing = peak() - alive_;
  use_.sent = layout.bytes_sent() - sent_;
  if (const auto* sharded = dynamic_cast<const FullySharded*>(&layout)) {
    use_.gathered = sharded->most_gathered_bytes();
    use_.gather_bound = sharded->gather_bound_bytes();
  }
}

namespace {

// Whatever is offloaded is of the rank's shard.
DataParallelPlan kept_plan(DataParallelPlan plan, bool offload) {
  if (offload && plan.stage > 0) plan.stage = 3;
  return plan;
}

}  // namespace

std::string kept_by_formula(const DataParallelPlan& plan, const std::string& more, bool offload) {
  const std::string strategy = plan.share_parameters ? std::string("one copy of the parameters")
                                                     : fmt::format("ZeRO stage {}", plan.stage);
  const SharedElements& all = plan.elements.at(0);
  std::string text = fmt::format("{}: keeps {}{}, with Ψ = {} parameters", strategy,
                                 persistent_formula(kept_plan(plan, offload)), more, all.numel);
  if (all.whole > 0) text += fmt::format(", Ψw = {} whole through forward and backward", all.whole);
  if (all.shards > 1) text += fmt::format(", N = {}", all.shards);
  if (all.replicas > 1) text += fmt::format(", R = {}", all.replicas);
  if (plan.elements.size() == 1 || plan.elements[1].numel == 0) return text;
  const SharedElements& experts = plan.elements[1];
  text +=
      fmt::format(", Ψe = {} of the rank's experts, which Ne = {} ranks have", experts.numel, experts.shards);
  return experts.whole > 0 ? text + fmt::format(", Ψew = {} whole", experts.whole) : text;
}

MemoryShown memory_shown(const MemoryUse& use, const DataParallelPlan& plan, const RunConfig& config,
                         DataParallel& layout, Group& group) {
  const Outcome::Sent to_experts = use.to_experts.value_or(Outcome::Sent{});
  const at::Tensor own =
      at::tensor({use.kept.parameters, use.kept.gradients, use.kept.master, use.kept.state, use.other,
                  use.passing, use.sent, to_experts.bytes, to_experts.by_formula},
                 at::kLong);
  const at::Tensor all = group.all_gather(own);  // [ranks, 9]
  if (group.rank() != 0) return {};
  MemoryShown shown{.table = {.title = "Memory and traffic of the last step",
                              .summary = {},
                              .columns = {"MB", "parameters", "gradients", "masters", "state", "total",
                                          "other", "in passing", "sent"},
                              .rows = {}},
                    .bars = {.title = "Memory of the ranks in the last step",
                             .unit = "MB",
                             .parts = {"parameters", "gradients", "masters", "state", "other", "in passing"},
                             .bars = {}}};
  // `above`: other and in passing.
  const auto add = [&](const std::string& head, const PersistentBytes& kept, const std::vector<double>& above,
                       const std::string& sent) {
    std::vector<double> parts;
    for (const std::int64_t bytes : {kept.parameters, kept.gradients, kept.master, kept.state})
      parts.push_back(static_cast<double>(bytes));
    std::vector<std::string> row = {head};
    for (const double bytes : parts) row.push_back(megabytes(bytes));
    row.push_back(megabytes(static_cast<double>(kept.total())));
    for (const double bytes : above) row.push_back(megabytes(bytes));
    row.resize(shown.table.columns.size() - 1);
    row.push_back(sent);
    shown.table.rows.push_back(std::move(row));
    parts.insert(parts.end(), above.begin(), above.end());
    const double all = std::accumulate(parts.begin(), parts.end(), 0.0);
    parts.resize(shown.bars.parts.size());
    for (double& each : parts) each /= 1e6;
    shown.bars.bars.push_back({.label = head, .note = megabytes(all) + " MB", .values = std::move(parts)});
  };
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* at = all[rank].const_data_ptr<std::int64_t>();
    add(fmt::format("rank {}", rank), {at[0], at[1], at[2], at[3]},
        {static_cast<double>(at[4]), static_cast<double>(at[5])}, megabytes(static_cast<double>(at[6])));
  }
  DataParallelPlan by_bucket = plan;
  by_bucket.elements = shared_elements(layout, sharded_axes(config), /*padded=*/true);
  const TrafficBytes sent = traffic_bytes(by_bucket);
  // How often a stage of a pipeline gathers what stays whole depends on the schedule.
  const bool by_schedule = config.parallel.pp > 1 && plan.stage == 3;
  DataParallelPlan kept = kept_plan(plan, config.parallel.offload);
  add("formula", persistent_bytes(kept), {}, by_schedule ? "" : megabytes(sent.total()));
  // Along tp, one rank's parameters are summed over different ranks.
  std::string& text = shown.table.summary = kept_by_formula(
      plan,
      config.parallel.tp > 1 ? ", of rank 0's part" : fmt::format(", sends {} a step", traffic_formula(plan)),
      config.parallel.offload);
  if (use.to_experts) {
    text += "\nto other ranks' experts and back, with gradients, bytes sent (and by formula):";
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto* at = all[rank].const_data_ptr<std::int64_t>();
      text += fmt::format("{} rank {}: {} ({})", rank == 0 ? "" : ",", rank, at[7], at[8]);
    }
  }
  if (use.gather_bound > 0)
    text += fmt::format("\ngathered: at most {} MB of parameters at a time, of {} that the units allow",
                        megabytes(static_cast<double>(use.gathered)),
                        megabytes(static_cast<double>(use.gather_bound)));
  if (use.in_host_memory > 0) {
    kept.stage = 1;  // gradients of a rank are whole
    const std::int64_t on_gpu = persistent_bytes(plan).parameters +
                                (plan.stage < 2 || plan.reduce_once ? persistent_bytes(kept).gradients : 0);
    text += fmt::format(
        "\noffload: {} MB of rank 0's total are in host memory; its GPU keeps {} MB by formula, "
        "which are under other with the memory that it works in",
        megabytes(static_cast<double>(use.in_host_memory)), megabytes(static_cast<double>(on_gpu)));
  }
  return shown;
}

// ---- model FLOPs utilisation ----

namespace {

using Clock = std::chrono::steady_clock;

double seconds_of_product(const at::Tensor& square) {
  const auto start = Clock::now();
  (void)product(square, square).select(0, 0).select(0, 0).item<double>();  // waits for a GPU
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Ranks share processors: the best time is of a moment in which others waited, the median is not.
double median_of(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

std::optional<double> steady_time(const std::vector<std::vector<double>>& rounds) {
  std::vector<double> all, medians;
  for (const auto& round : rounds) {
    all.insert(all.end(), round.begin(), round.end());
    medians.push_back(median_of(round));
  }
  if (!std::ranges::all_of(all, [](double time) { return std::isfinite(time); })) return std::nullopt;
  const auto [least, most] = std::minmax_element(medians.begin(), medians.end());
  if (!(*most <= kSteadyPeak * *least)) return std::nullopt;
  return median_of(std::move(all));
}

double decoder_flops(const DecoderConfig& shape, double tokens, double pairs) {
  const auto [h, heads, kv, d, ff] =
      std::array<double, 5>{static_cast<double>(shape.hidden), static_cast<double>(shape.heads),
                            static_cast<double>(shape.key_value_heads), static_cast<double>(shape.head_dim),
                            static_cast<double>(shape.feed_forward)};
  const auto layers = static_cast<double>(shape.layers);
  const double attention = h * d * (heads + 2 * kv) + heads * d * h;
  const ExpertsShape& experts = shape.experts;
  // A layer with experts: its router, a token's experts, the shared expert with its gate.
  const double routed =
      h * static_cast<double>(experts.count) +
      3 * h * static_cast<double>(experts.per_token * experts.feed_forward + experts.shared_feed_forward) +
      (experts.shared_feed_forward > 0 ? h : 0);
  double weights = layers * attention + h * static_cast<double>(shape.vocabulary);
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    weights += shape.has_experts(layer) ? routed : 3 * h * ff;
  return 6 * weights * tokens + 12 * layers * heads * d * pairs;
}

Peak find_peak(const RunConfig& config, at::ScalarType dtype, at::Device device, Group& group) {
  if (config.run.peak_tflops > 0)
    return {config.run.peak_tflops * 1e12 * group.size(),
            fmt::format("run.peak_tflops = {:g} of each rank", config.run.peak_tflops)};
  constexpr double kLongEnough = 4e-3;  // seconds of a product, so that starting it costs little
  constexpr std::int64_t kLargest = 16384;
  const at::NoGradGuard none;
  std::int64_t n = 128;
  at::Tensor square;
  do {
    n *= 2;
    square = at::ones({n, n}, at::TensorOptions(dtype).device(device));
    seconds_of_product(square);  // the first one prepares the kernel
  } while (seconds_of_product(square) < kLongEnough && n < kLargest);
  std::vector<std::vector<double>> rounds(3, std::vector<double>(7));
  for (auto& round : rounds)
    for (double& time : round) time = seconds_of_product(square);
  const std::optional<double> time = steady_time(rounds);
  at::Tensor said = at::zeros({2}, at::kDouble);  // FLOP/s, ranks that are not steady
  said[0] = time ? 2.0 * static_cast<double>(n * n * n) / *time : 0.0, said[1] = time ? 0 : 1;
  group.all_reduce(said);
  const std::string what = fmt::format("products of {0} x {0} matrices in {1}", n, config.train.dtype);
  if (said[1].item<double>() > 0)
    return {0, fmt::format(
                   "no MFU: three rounds of {} differ by more than a factor of {}, as on a machine that is "
                   "busy with something else; run.peak_tflops gives a peak",
                   what, kSteadyPeak)};
  return {said[0].item<double>(), "measured on all ranks at once: " + what};
}

}  // namespace isograd
