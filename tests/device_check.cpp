// One step on a device against one process in fp64 on the CPU: what ./dev gpu-check runs on a GPU, alone and
// as several ranks, and what the tests run on the CPU, so that the program itself is known to work.
//   device_check [--device cpu|cuda] [--backend shm|nccl]      ranks: isograd launch -n N -- device_check ...
//   device_check --device cuda --plant left-behind             must fail: a tensor stayed on the CPU
// Each strategy under one of two means in each type, by turns; ISOGRAD_FULL_TESTS=1 (tools/gpu_check.py):
// both. Ranks are processes: autograd has one thread a GPU, which ranks as threads would share and wait in.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

#include "full_tests.hpp"
#include "hybrid_oracle.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "kernels/flat.hpp"
#include "kernels/gpu/kernels.hpp"
#include "kernels/matmul/product.hpp"
#include "model/attention/attention.hpp"
#include "model/attention/kernel.hpp"
#include "model/decoder_testing.hpp"
#include "model/fused.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "train/build.hpp"
#include "train/router_losses.hpp"

namespace isograd::device {
namespace {

using hybrid::rms_of;
using hybrid::scale_of;
using hybrid::Wanted;

constexpr double kExact = 1e-10;  // E1

DecoderConfig small_decoder() {
  DecoderConfig config;
  config.vocabulary = 31, config.hidden = 24, config.layers = 2, config.heads = 12;
  config.key_value_heads = 2, config.head_dim = 4, config.feed_forward = 20;
  config.max_positions = 128, config.initializer_range = 0.3;
  return config;
}

// Each rank has uneven packs of documents; one sample has a part in every micro-batch.
std::vector<MicroBatches> batches_of(int ranks) {
  constexpr std::int64_t kShared = 9000;
  std::vector<MicroBatches> all(static_cast<std::size_t>(ranks));
  std::int64_t shared_targets = 0;
  for (int rank = 0; rank < ranks; ++rank)
    for (const int i : {0, 1}) {
      const std::vector<std::int64_t> lengths = {5 + 4 * rank + 2 * i, 1, 9, 3, 12, 7, 2, 6};
      Batch batch = make_batch(lengths, 31, static_cast<std::uint64_t>(10 * rank + i));
      batch.targets = batch.tokens.roll(-1);
      batch.sample_targets.clear();
      for (std::size_t f = 0; f < lengths.size(); ++f) {
        if (lengths[f] > 1) batch.targets[batch.cu_seqlens[f + 1] - 1] = kIgnoreIndex;
        const bool shared = f + 1 == lengths.size();
        batch.sample_ids[f] = shared ? kShared : 100 * rank + 10 * i + static_cast<std::int64_t>(f);
        batch.sample_targets.push_back(std::max<std::int64_t>(1, lengths[f] - 1));
        if (shared) shared_targets += batch.sample_targets.back();
      }
      all[static_cast<std::size_t>(rank)].push_back(std::move(batch));
    }
  for (MicroBatches& batches : all)
    for (Batch& batch : batches) batch.sample_targets.back() = shared_targets;
  return all;
}

// One process in fp64 with the weights of a model of `values`.
Wanted reference(const DecoderConfig& shape, const MicroBatches& whole, bool samples, at::ScalarType values) {
  RunConfig config;
  config.model.shape = shape;
  config.loss.kind = samples ? "sample_mean" : "token_mean";
  hybrid::Values weights;
  for (const auto& [name, tensor] : DecoderLM(shape, values, 3).named())
    weights.emplace_back(name, tensor.detach().to(at::kDouble));
  return hybrid::text_oracle(config, {whole}, weights);
}

struct Strategy {
  testing::Strategy flat{};
  bool zero3 = false, checkpoint = false;
  std::string name() const { return zero3 ? (checkpoint ? "zero3 checkpointed" : "zero3") : flat.name; }
};
std::vector<Strategy> all_strategies() {
  std::vector<Strategy> all;
  for (const testing::Strategy& flat : testing::strategies()) all.push_back({.flat = flat});
  all.push_back({.zero3 = true});
  all.push_back({.zero3 = true, .checkpoint = true});
  return all;
}

struct Case {
  Strategy strategy;
  at::ScalarType dtype = at::kDouble;
  bool samples = false;
  bool fault = false;  // planted: the ranks' gradients are averaged (museum B3)
  int steps = 1;       // of several the last one's gradients, after updates
  bool offload = false;
  bool stale = false;  // planted: the update does not come back to the device
  std::string text() const {
    return fmt::format("{:<20} {:<9} {}", strategy.name(), c10::toString(dtype),
                       samples ? "sample mean" : "token mean");
  }
};

struct Unpublished final : DataParallel {
  std::unique_ptr<DataParallel> inner;
  explicit Unpublished(std::unique_ptr<DataParallel> inner_) : inner(std::move(inner_)) {}
  void zero_gradients() override { inner->zero_gradients(); }
  void begin_backward(bool last) override { inner->begin_backward(last); }
  void finish_reduction() override { inner->finish_reduction(); }
  bool needs_even_micro_batches() const override { return inner->needs_even_micro_batches(); }
  std::vector<Bucket>& buckets() override { return inner->buckets(); }
  const Mesh& mesh() const override { return inner->mesh(); }
};

// Tensors of a layout with offload, and the optimizer's state.
void check_in_host_memory(DataParallel& layout, Optimizer& optimizer) {
  std::vector<at::Tensor> held;
  for (const Bucket& bucket : layout.buckets())
    held.insert(held.end(), {bucket.gradients, bucket.master, bucket.parameters});
  for (const auto& [name, tensors] : optimizer.state(layout.buckets()))
    held.insert(held.end(), tensors.begin(), tensors.end());
  for (const at::Tensor& tensor : held)
    ISOGRAD_INVARIANT(tensor.is_cpu(), fmt::format("offloaded, yet on {}", tensor.device().str()));
}

std::map<std::string, at::Tensor> gradients_of(const Case& one, const DecoderConfig& config,
                                               const MicroBatches& batches, at::Device device, Group group) {
  DecoderLM model(config, one.dtype, 3);
  model.to(device);
  ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
    const Batch moved = to_device(batch, device);
    return {
        {"cross_entropy", cross_entropy_sum(model.logits(moved), moved.targets, {.weights = moved.weights})}};
  };
  std::unique_ptr<DataParallel> layout;
  if (one.strategy.zero3) {
    const ModelUnits units = model_units(model, RunConfig{});
    layout = fully_shard(units.root, model.named(), units.blocks, group,
                         {.checkpoint = one.strategy.checkpoint, .offload = one.offload});
    forward = inside(units.root, forward);
  } else {
    layout = one.strategy.flat.make(trainable_parameters(model.named()), group,
                                    {.offload = one.offload, .bucket_bytes = 1024});
  }
  if (one.stale) layout = std::make_unique<Unpublished>(std::move(layout));
  std::unique_ptr<Normalizer> mean = std::make_unique<TokenMean>();
  if (one.samples) mean = std::make_unique<SampleMean>();
  const auto optimizer = sgd({.learning_rate = one.steps > 1 ? 0.1 : 0, .momentum = 0.9});
  Step step(forward, *layout, *mean, *optimizer, {});
  for (int i = 0; i < one.steps; ++i) step(batches);
  if (one.offload) check_in_host_memory(*layout, *optimizer);
  std::map<std::string, at::Tensor> gradients;
  for (auto& view : layout->views()) {
    gradients[view.name] = view.gradient.detach().to(at::kCPU, at::kDouble);
    if (one.fault) gradients[view.name] = gradients[view.name] / group.size();
  }
  return gradients;
}

// Largest share of what is allowed that a parameter's error takes: E1 in fp64; below it E2, from one process
// on the same device.
double used(const Case& one, const std::map<std::string, at::Tensor>& found,
            const std::map<std::string, at::Tensor>& alone, const Wanted& wanted, int pieces) {
  const double unit = std::ldexp(1.0, one.dtype == at::kFloat ? -24 : -8);
  double worst = 0;
  const double rms = rms_of(wanted);
  for (const auto& [name, g] : wanted.gradients) {
    const double error = (found.at(name) - g).norm().item<double>();
    const double allowed = one.dtype == at::kDouble ? kExact * scale_of(rms, g)
                                                    : 4 * (alone.at(name) - g).norm().item<double>() +
                                                          unit * std::sqrt(pieces) * scale_of(rms, g);
    worst = std::isfinite(error) ? std::max(worst, error / allowed) : HUGE_VAL;
  }
  return worst;
}

// Updates in host memory against updates on the device: the gradients two steps later.
int check_offload(World& world, at::Device device, const DecoderConfig& config, const MicroBatches& batches) {
  int failed = 0;
  for (const Strategy& strategy : all_strategies()) {
    if (strategy.flat.share) continue;
    const Case here{.strategy = strategy, .steps = 3};
    const auto wanted = gradients_of(here, config, batches, device, world.group);
    for (const bool stale : {false, true}) {
      Case away = here;
      away.offload = true;
      away.stale = stale;
      const auto found = gradients_of(away, config, batches, device, world.group);
      double worst = 0;
      for (const auto& [name, g] : wanted) {
        const double share = (found.at(name) - g).norm().item<double>() / (kExact * g.norm().item<double>());
        worst = std::isfinite(share) ? std::max(worst, share) : HUGE_VAL;
      }
      at::Tensor most = at::full({1}, worst, at::kDouble);
      world.group.all_reduce(most, ReduceOp::kMax);
      worst = most.item<double>();
      const bool good = (worst <= 1) != stale;
      failed += good ? 0 : 1;
      if (world.rank == 0 && (!good || !stale))
        std::printf("%s  offloaded, %.3f of the error allowed%s%s\n", here.text().c_str(), worst,
                    stale ? " with a planted fault" : "", good ? "" : "  FAILED");
    }
  }
  return failed;
}

// A block that draws on the device.
struct Masked : torch::nn::Module {
  at::Tensor weight;
  explicit Masked(at::Device device) {
    weight = register_parameter("weight", at::linspace(-1, 1, 35, at::kDouble).view({5, 7}).to(device));
  }
  at::Tensor forward(at::Tensor x) { return x * weight * at::empty_like(x).bernoulli_(0.5); }
};
struct MaskedModel : torch::nn::Module {
  Sharded<Masked> block;
  explicit MaskedModel(at::Device device)
      : block(register_module("block", std::make_shared<Masked>(device))) {}
  at::Tensor forward(at::Tensor x) { return block(x).sum(); }
};

at::Tensor masked_gradient(World& world, at::Device device, bool checkpoint, std::uint64_t seed) {
  const Sharded<MaskedModel> model(std::make_shared<MaskedModel>(device));
  const auto layout = fully_shard(model, {model->block}, world.group, {.checkpoint = checkpoint});
  {
    at::Generator random = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(random.mutex());
    random.set_current_seed(seed + static_cast<std::uint64_t>(world.rank));
  }
  const at::TensorOptions options = at::TensorOptions(at::kDouble).device(device);
  layout->zero_gradients();
  const at::Tensor loss = model(at::ones({5, 7}, options));
  (void)at::empty({11}, options).bernoulli_(0.5);  // others draw, too
  layout->begin_backward(true);
  loss.backward();
  layout->finish_reduction();
  return layout->views().at(0).gradient.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

// A checkpointed block's recomputation draws on the device what its forward drew.
int check_random_numbers(World& world, at::Device device) {
  const at::Tensor wanted = masked_gradient(world, device, false, 5);
  const bool same = at::equal(masked_gradient(world, device, true, 5), wanted);
  const bool seen = !at::equal(masked_gradient(world, device, true, 105), wanted);  // planted: other numbers
  if (world.rank == 0)
    std::printf("random numbers drawn on the device in a checkpointed block%s\n",
                same && seen ? "" : "  FAILED");
  return same && seen ? 0 : 1;
}

// Nodes of the graph of `value` whose gradients are on the CPU.
std::vector<std::string> nodes_on_cpu(const at::Tensor& value) {
  std::vector<std::string> found;
  std::set<torch::autograd::Node*> seen{nullptr};
  std::vector<torch::autograd::Node*> left{value.grad_fn().get()};
  while (!left.empty()) {
    torch::autograd::Node* node = left.back();
    left.pop_back();
    if (!seen.insert(node).second) continue;
    for (std::uint32_t i = 0; i < node->num_inputs(); ++i)
      if (node->input_metadata(i).device().is_cpu()) found.push_back(node->name());
    for (const torch::autograd::Edge& edge : node->next_edges()) left.push_back(edge.function.get());
  }
  return found;
}

// A graph that is partly on the CPU has a backward thread more there: which of a tensor's gradients comes
// first, and so the bits of their sum, would change from run to run.
int check_graph(World& world, at::Device device, const Batch& batch) {
  DecoderConfig config = small_decoder();
  config.family = "qwen3_moe", config.query_key_norm = true;
  config.experts = {.count = 4, .feed_forward = 8};
  RunConfig run;
  run.loss.balance = 0.1, run.loss.router_z = 0.1, run.loss.balance_scope = "micro_batch";
  DecoderLM model(config, at::kFloat, 3);
  model.to(device);
  const Batch moved = to_device(batch, device);
  const DecoderOutputs outputs = model.outputs(moved);
  LossTerms terms;
  RouterLosses(run, config).add_terms(outputs, terms);
  int failed = terms.size() == 2 ? 0 : 1;
  for (const LossTerm& term : terms) {
    const auto found = nodes_on_cpu(term.sum);
    if (!found.empty() && !device.is_cpu())
      std::printf("%s: %s computes on the CPU  FAILED\n", term.name.c_str(), found.front().c_str()), ++failed;
    if (found.empty() && device.is_cpu()) ++failed;  // there all do
  }
  // Planted: the sum on the CPU.
  if (nodes_on_cpu(outputs.router_logits.at(0).sum().cpu().square()).empty()) ++failed;
  if (world.rank == 0)
    std::printf("graph of router losses on %s%s\n", device.str().c_str(), failed == 0 ? "" : "  FAILED");
  return failed;
}

// Whether a device's numbers are those in fp64, but for their own rounding and that of a few operations in
// fp32.
bool agrees(const at::Tensor& found, const at::Tensor& expected) {
  const double unit = found.scalar_type() == at::kBFloat16 ? std::ldexp(1., -8) : 0;
  const at::Tensor wide = found.to(at::kCPU).to(at::kDouble);
  const double few = 32 * std::ldexp(1., -24) * expected.abs().max().item<double>();
  return ((wide - expected).abs() <= expected.abs() * unit + few).all().item<bool>();
}

at::Tensor normal(at::IntArrayRef shape, at::ScalarType type, at::Device device) {
  return at::randn(shape, at::kFloat).to(type).to(device);
}

bool swiglu_agrees(std::int64_t count, std::int64_t shift, at::ScalarType type, at::Device device) {
  const auto made = [&] { return normal({count + shift}, type, device).narrow(0, shift, count); };
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(true); };
  const auto wide = [&](const at::Tensor& x) { return leaf(x.detach().to(at::kCPU).to(at::kDouble)); };
  const at::Tensor gate = leaf(made() * 4), up = leaf(made()), dy = made();
  const at::Tensor wide_gate = wide(gate), wide_up = wide(up);
  const at::Tensor y = swiglu(gate, up), expected = naive_twin::swiglu(wide_gate, wide_up);
  y.backward(dy), expected.backward(dy.to(at::kCPU).to(at::kDouble));
  return agrees(y, expected) && agrees(gate.grad(), wide_gate.grad()) && agrees(up.grad(), wide_up.grad());
}

bool rotary_agrees(std::int64_t heads, std::int64_t half, std::int64_t gap, at::ScalarType type,
                   at::Device device) {
  const std::int64_t tokens = 37, dim = 2 * half;
  const at::Tensor around = normal({tokens, heads * dim + gap}, type, device);
  const at::Tensor x = around.narrow(1, gap, heads * dim).view({tokens, heads, dim}).detach();
  const at::Tensor wide = x.to(at::kCPU).to(at::kDouble).requires_grad_(true);
  x.requires_grad_(true);
  const at::Tensor angles = at::randn({tokens, half}, at::kFloat), cos = angles.cos(), sin = angles.sin();
  const at::Tensor dy = normal({tokens, heads, dim}, type, device);
  const at::Tensor y = rotary(x, cos.to(device), sin.to(device)),
                   expected = naive_twin::rotary(wide, cos.to(at::kDouble), sin.to(at::kDouble));
  y.backward(dy), expected.backward(dy.to(at::kCPU).to(at::kDouble));
  return agrees(y, expected) && agrees(x.grad(), wide.grad());
}

// `planted`: the residual's gradient is another.
bool norm_agrees(std::int64_t rows, std::int64_t width, at::ScalarType type, at::Device device,
                 bool planted) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(true); };
  const auto wide = [&](const at::Tensor& x) { return x.detach().to(at::kCPU).to(at::kDouble); };
  const at::Tensor x = leaf(normal({rows, width}, type, device)),
                   weight = leaf(normal({width}, type, device)), dy = normal({rows, width}, type, device),
                   other = normal({rows, width}, type, device);
  const at::Tensor wide_x = leaf(wide(x)), wide_weight = leaf(wide(weight));
  const auto run = [&] {
    x.mutable_grad() = weight.mutable_grad() = at::Tensor();
    const auto [y, kept] = rms_norm_and_residual(x, weight, 1e-5);
    torch::autograd::backward({y, kept}, {dy, planted ? other * 1.1 : other});
    return std::vector<at::Tensor>{y.detach(), x.grad(), weight.grad()};
  };
  const auto found = run(), again = run();
  const at::Tensor expected = naive_twin::rms_norm(wide_x, wide_weight, 1e-5);
  torch::autograd::backward({expected, wide_x.view_as(wide_x)}, {wide(dy), wide(other)});
  bool good =
      agrees(found[0], expected) && agrees(found[1], wide_x.grad()) && agrees(found[2], wide_weight.grad());
  for (std::size_t i = 0; i < found.size(); ++i) good = good && at::equal(found[i], again[i]);
  return good;
}

// The CPU's bits. Runs of these lengths, the first of which decays, then every other one.
bool adamw_agrees(const std::vector<std::int64_t>& lengths, std::int64_t begin, at::ScalarType type,
                  at::Device device) {
  std::vector<gpu::RunEnd> ends;
  std::int64_t count = begin;
  for (const std::int64_t length : lengths) ends.push_back({count += length, ends.size() % 2 == 0});
  const at::Tensor gradients = normal({count}, type, at::kCPU), wide = gradients.to(at::kFloat),
                   master = at::randn({count}), first = at::randn({count}), second = at::rand({count}),
                   low = at::zeros({count}, at::kBFloat16);
  const auto moved = [&](const at::Tensor& x) { return x.to(device, x.scalar_type(), false, /*copy=*/true); };
  const at::Tensor on[] = {moved(gradients), moved(master), moved(first), moved(second), moved(low)};
  kernels::AdamW with{.gradient_scale = 0.7, .keep = 0.9, .step_size = 0.01, .inverse_root_correction = 1.3};
  gpu::adamw({.scale = static_cast<float>(with.gradient_scale),
              .keep = static_cast<float>(with.keep),
              .beta2 = static_cast<float>(with.beta2),
              .new1 = static_cast<float>(1 - with.beta1),
              .new2 = static_cast<float>(1 - with.beta2),
              .step = static_cast<float>(with.step_size),
              .correction = static_cast<float>(with.inverse_root_correction),
              .epsilon = static_cast<float>(with.epsilon)},
             begin, ends, on[0], on[1], on[2], on[3], on[4]);
  std::int64_t at = begin;
  for (const gpu::RunEnd& run : ends) {
    with.keep = run.decays ? 0.9 : 1;
    kernels::adamw(with, wide.const_data_ptr<float>() + at, master.mutable_data_ptr<float>() + at,
                   first.mutable_data_ptr<float>() + at, second.mutable_data_ptr<float>() + at,
                   static_cast<kernels::Bfloat16*>(low.mutable_data_ptr()) + at, run.end - at);
    at = run.end;
  }
  return on[1].cpu().equal(master) && on[2].cpu().equal(first) && on[3].cpu().equal(second) &&
         on[4].cpu().equal(low);
}

bool products_agree(at::Device device) {
  const at::Tensor a = normal({96, 72}, at::kBFloat16, device), b = normal({40, 72}, at::kBFloat16, device);
  const at::Tensor expected = a.cpu().to(at::kDouble).mm(b.cpu().to(at::kDouble).t());
  const at::Tensor result = at::full({96, 40}, std::nan(""), at::TensorOptions(at::kFloat).device(device));
  multiply_widening_into(result, a, b, false);
  const bool writes = agrees(result, expected);
  multiply_widening_into(result, a, b, true);
  return writes && agrees(result, 2 * expected);
}

// gpu/kernels.hpp where the device has them, its twins elsewhere.
int check_kernels(World& world, at::Device device) {
  at::manual_seed(7);
  int failed = 0, compared = 0;
  const auto note = [&](bool good, const std::string& of) {
    ++compared;
    if (!good) ++failed, std::printf("kernel %s  FAILED\n", of.c_str());
  };
  const bool has = gpu::has_kernels(at::empty({1}, at::TensorOptions(at::kFloat).device(device)));
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t count : {1, 7, 4096, 100003})
      for (const std::int64_t shift : {0, 1, 4, 8})
        note(swiglu_agrees(count, shift, type, device),
             fmt::format("swiglu {} {} {}", c10::toString(type), count, shift));
    for (const auto& [heads, half] : {std::pair(1, 1), {3, 13}, {8, 64}, {32, 64}, {5, 8}})
      for (const std::int64_t gap : {0, 3, 8, 64})
        note(rotary_agrees(heads, half, gap, type, device),
             fmt::format("rotary {} {} {} {}", c10::toString(type), heads, half, gap));
    for (const auto& [rows, width] : {std::pair(1, 256), {37, 264}, {1030, 1024}, {600, 4096}})
      for (const bool planted : {false, true}) {
        if (!has && !device.is_cpu()) continue;  // LibTorch's rounds twice where gradients are added
        note(norm_agrees(rows, width, type, device, planted) != planted,
             fmt::format("rms_norm {} {} {}{}", c10::toString(type), rows, width,
                         planted ? ", with a planted fault" : ""));
      }
    if (has)
      for (const std::int64_t begin : {0, 4, 7})
        for (const auto& lengths : std::vector<std::vector<std::int64_t>>{
                 {1}, {17, 2, 1, 8}, {4096, 5, 123457, 11, 4096, 3}, std::vector<std::int64_t>(500, 9)})
          note(adamw_agrees(lengths, begin, type, device),
               fmt::format("adamw {} {} {}", c10::toString(type), begin, lengths.size()));
  }
  if (products_widen(device)) note(products_agree(device), "product of bf16 in fp32");
  if (world.rank == 0)
    std::printf("%d comparisons of swiglu, rotary, rms_norm and adamw, %s, products of bf16 %s\n", compared,
                has ? "by kernels of gpu/" : "without kernels of gpu/",
                products_widen(device) ? "in fp32" : "rounded");
  return failed;
}

bool all_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i], b[i])) return false;
  return a.size() == b.size();
}

// An optimizer that is told of an update in one way alone.
struct Told final : Optimizer {
  enum class When {
    kAhead,
    kAfterwards,
    kAheadAlways
  };  // the last one planted: also of a step that is not finite
  std::unique_ptr<Optimizer> inner;
  When when;
  Told(std::unique_ptr<Optimizer> inner_, When when_) : inner(std::move(inner_)), when(when_) {}
  void update(std::vector<Bucket>& buckets, double scale) override { inner->update(buckets, scale); }
  bool update_unless(std::vector<Bucket>& buckets, const at::Tensor& stop, const at::Tensor& scale) override {
    if (when == When::kAfterwards) return false;
    return inner->update_unless(buckets, when == When::kAhead ? stop : at::zeros_like(stop), scale);
  }
  void count_update(const std::vector<Bucket>& buckets) override { inner->count_update(buckets); }
  void set_learning_rate(double rate) override { inner->set_learning_rate(rate); }
  double learning_rate() const override { return inner->learning_rate(); }
  std::int64_t updates() const override { return inner->updates(); }
  OptimizerState state(const std::vector<Bucket>& buckets) override { return inner->state(buckets); }
  void set_updates(std::int64_t updates) override { inner->set_updates(updates); }
};

// Parameters and moments after three steps of AdamW on one rank; in the second one the loss may be a NaN.
std::vector<at::Tensor> after_three_steps(const DecoderConfig& config, const MicroBatches& batches,
                                          at::Device device, at::ScalarType dtype, Told::When when,
                                          bool nan) {
  DecoderLM model(config, dtype, 3);
  model.to(device);
  int steps = 0;
  const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
    const Batch moved = to_device(batch, device);
    const at::Tensor sum = cross_entropy_sum(model.logits(moved), moved.targets, {.weights = moved.weights});
    return {{"cross_entropy", nan && steps == 1 ? sum * std::nan("") : sum}};
  };
  const auto strategies = all_strategies();
  const auto strategy = std::ranges::find_if(strategies, [](const Strategy& each) {
    return !each.zero3 && !each.flat.share && !each.flat.is_naive;
  });
  const auto layout = strategy->flat.make(trainable_parameters(model.named()), Group::solo(), {});
  TokenMean mean;
  Told optimizer(adamw({.learning_rate = 0.1}), when);
  Step step(forward, *layout, mean, optimizer, {.max_norm = 0.01});
  for (; steps < 3; ++steps) {
    const bool moves = !(nan && steps == 1);
    const StepReport report = step(batches);
    ISOGRAD_INVARIANT(when == Told::When::kAheadAlways || (report.finite == moves && report.updated == moves),
                      fmt::format("step {} is {}finite", steps, report.finite ? "" : "not "));
  }
  ISOGRAD_INVARIANT(when == Told::When::kAheadAlways || optimizer.updates() == (nan ? 2 : 3),
                    fmt::format("{} updates", optimizer.updates()));
  std::vector<at::Tensor> found;
  for (const auto& view : layout->views())
    found.insert(found.end(), {view.parameter.clone(), view.master.clone()});
  for (const auto& [name, tensors] : optimizer.state(layout->buckets()))
    found.insert(found.end(), tensors.begin(), tensors.end());
  return found;
}

// Losses and parameters after four steps with captured micro-batches, and how often a forward was captured.
// `full`: there is no memory for what is captured.
std::pair<std::vector<at::Tensor>, int> after_captured_steps(const DecoderConfig& config, const Batch& batch,
                                                             at::Device device, bool full) {
  DecoderLM model(config, at::kBFloat16, 3);
  model.to(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream outer = guard.getStream(device);
  int captured = 0;
  const ForwardLossTerms forward = [&](const Batch& prepared) -> LossTerms {
    const Batch moved = to_device(prepared, device);
    const at::Tensor logits = model.logits(moved);
    if (guard.getStream(device) != outer) {  // a recording has a stream of its own
      ++captured;
      if (full) (void)at::empty({1LL << 50}, at::TensorOptions(at::kByte).device(device));
    }
    return {{"cross_entropy", cross_entropy_sum(logits, moved.targets, {.weights = moved.weights})}};
  };
  const auto strategies = all_strategies();
  const auto strategy = std::ranges::find_if(strategies, [](const Strategy& each) {
    return !each.zero3 && !each.flat.share && !each.flat.is_naive;
  });
  const auto layout = strategy->flat.make(trainable_parameters(model.named()), Group::solo(), {});
  TokenMean mean;
  const auto optimizer = adamw({.learning_rate = 0.1});
  Step step(forward, *layout, mean, *optimizer, {.capture = true});
  std::vector<at::Tensor> found;
  for (int i = 0; i < 4; ++i) found.push_back(at::scalar_tensor(step({batch}).loss, at::kDouble));
  for (const auto& view : layout->views()) found.push_back(view.parameter.clone());
  return {found, captured};
}

// Where a recording finds no memory the steps are computed without it, with the same bits.
int check_capture_without_memory(World& world, at::Device device, const DecoderConfig& config,
                                 const Batch& batch) {
  const auto [expected, captured] = after_captured_steps(config, batch, device, false);
  const auto [found, tried] = after_captured_steps(config, batch, device, true);
  const bool good = all_equal(found, expected) && captured == tried;
  if (world.rank == 0)
    std::printf("steps of which a recording finds no memory, %d tried%s\n", tried, good ? "" : "  FAILED");
  return good ? 0 : 1;
}

// An update that the device decides on against one that the host decides on: the same bits, and none of a
// step that is not finite.
int check_update_ahead(World& world, at::Device device, const DecoderConfig& config,
                       const MicroBatches& batches) {
  int failed = 0;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const bool nan : {false, true}) {
      const auto after = [&](Told::When when) {
        return after_three_steps(config, batches, device, dtype, when, nan);
      };
      const auto expected = after(Told::When::kAfterwards);
      bool good = all_equal(after(Told::When::kAhead), expected);
      if (nan && !device.is_cpu()) good = good && !all_equal(after(Told::When::kAheadAlways), expected);
      if (!good)
        ++failed,
            std::printf("update ahead in %s%s  FAILED\n", c10::toString(dtype), nan ? ", with a NaN" : "");
    }
  if (world.rank == 0) std::printf("updates decided on by the device%s\n", failed == 0 ? "" : "  FAILED");
  return failed;
}

// q [T, H, D], k and v [T, Hkv, D], views of one tensor as a model's are, and the gradient of `out`.
struct AttentionCase {
  at::Tensor q, k, v, gradient;
};
AttentionCase attention_case(std::int64_t tokens, std::int64_t heads, std::int64_t key_heads,
                             std::int64_t dim, at::Device device) {
  const at::Tensor all = normal({tokens, heads + 2 * key_heads, dim}, at::kBFloat16, device);
  return {all.narrow(1, 0, heads), all.narrow(1, heads, key_heads),
          all.narrow(1, heads + key_heads, key_heads), normal({tokens, heads, dim}, at::kBFloat16, device)};
}

using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

// `out` and the gradients of q, k and v.
std::vector<at::Tensor> attended(const AttentionCase& one, const Attend& attend,
                                 const std::function<at::Tensor(const at::Tensor&)>& in) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor* x : {&one.q, &one.k, &one.v}) leaves.push_back(in(*x).detach().requires_grad_(true));
  const at::Tensor out = attend(leaves[0], leaves[1], leaves[2]);
  out.backward(in(one.gradient));
  return {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

// Attention in bf16 against the naive twin in fp64 on the CPU. It may be off by four times what the twin in
// bf16 is, and one rounding. Whether it agrees, and whether a planted fault does: the other mask.
std::array<bool, 2> attention_agrees(const AttentionCase& one, const std::vector<std::int64_t>& cu_seqlens,
                                     bool causal) {
  const auto same = [](const at::Tensor& x) { return x; };
  const auto naive = [&](bool masks) -> Attend {
    return [&cu_seqlens, masks](const auto& q, const auto& k, const auto& v) {
      return naive_variable_length_attention(q, k, v, cu_seqlens, masks);
    };
  };
  const auto own = [&](bool planted) {
    return attended(
        one,
        [&](const auto& q, const auto& k, const auto& v) {
          return variable_length_attention(q, k, v, cu_seqlens, causal != planted);
        },
        same);
  };
  const auto rounded = attended(one, naive(causal), same),
             exact = attended(one, naive(causal), [](const at::Tensor&x) { return x.cpu().to(at::kDouble); });
  const auto error = [&](const at::Tensor& x, std::size_t i) {
    return (x.cpu().to(at::kDouble) - exact[i]).norm().item<double>();
  };
  const auto agrees = [&](const std::vector<at::Tensor>& found) {
    for (std::size_t i = 0; i < found.size(); ++i)
      if (!(error(found[i], i) <= 4 * error(rounded[i], i) + std::ldexp(exact[i].norm().item<double>(), -8)))
        return false;
    return true;
  };
  const auto found = own(false);
  return {agrees(found) && all_equal(found, own(false)), agrees(own(true))};
}

// Milliseconds of one of several.
double milliseconds_of(const std::function<at::Tensor()>& work) {
  constexpr int kTimes = 10;
  const auto wait = [](const at::Tensor& x) {
    (void)x.reshape({-1}).narrow(0, 0, 1).to(at::kFloat).item<float>();
  };
  wait(work());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 1; i < kTimes; ++i) (void)work();
  wait(work());
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() / kTimes;
}

// The shapes of one Llama 3 8B layer: the same bits each time, by cuDNN and by LibTorch's kernel, and how
// long they take.
int check_long_attention(at::Device device) {
  constexpr std::int64_t kTokens = 8192;
  const AttentionCase one = attention_case(kTokens, 32, 8, 128, device);
  const Qkv of{one.q, one.k, one.v};
  const at::Tensor cu_seqlens = at::tensor({std::int64_t{0}, kTokens}, at::kInt).to(device);
  const at::NoGradGuard no_grad;
  int failed = 0;
  for (const bool by_cudnn : {true, false}) {
    const auto forward = [&] {
      return by_cudnn ? cudnn::attend(of, true) : fragments::attend(of, cu_seqlens, kTokens, true);
    };
    const auto forwarded = forward();
    const auto backward = [&] {
      return by_cudnn ? cudnn::attend_backward(of, one.gradient, forwarded, true)
                      : fragments::attend_backward(of, one.gradient, forwarded, cu_seqlens, kTokens, true);
    };
    const auto wanted = backward();
    bool same = true;
    for (int i = 0; i < 8; ++i) {
      const auto found = backward();
      same = same && all_equal({forward().out, found.q, found.k, found.v},
                               {forwarded.out, wanted.q, wanted.k, wanted.v});
    }
    failed += same ? 0 : 1;
    std::printf("attention of 8,192 tokens by %s: forward %.2f ms, backward %.2f ms, same bits%s\n",
                by_cudnn ? "cuDNN" : "LibTorch", milliseconds_of([&] { return forward().out; }),
                milliseconds_of([&] { return backward().q; }), same ? "" : "  FAILED");
  }
  return failed;
}

int check_attention(World& world, at::Device device) {
  at::manual_seed(11);
  int failed = 0, compared = 0;
  bool by_cudnn = false;
  for (const auto& [heads, key_heads, dim] : {std::array{4, 2, 64}, {3, 3, 32}, {8, 2, 128}})
    for (const auto& cu_seqlens : std::vector<std::vector<std::int64_t>>{
             {0, 256}, {0, 640}, {0, 256, 512}, {0, 100, 130, 384}, {0, 200}})
      for (const bool causal : {true, false}) {
        const AttentionCase one = attention_case(cu_seqlens.back(), heads, key_heads, dim, device);
        by_cudnn = by_cudnn || cudnn::serves({one.q, one.k, one.v}, causal);
        const auto agrees = attention_agrees(one, cu_seqlens, causal);
        for (const bool planted : {false, true}) {
          ++compared;
          if (agrees[planted] != planted) continue;
          ++failed;
          std::printf("attention of %d and %d heads of %d, %d tokens in %d fragments%s%s  FAILED\n", heads,
                      key_heads, dim, static_cast<int>(cu_seqlens.back()),
                      static_cast<int>(cu_seqlens.size()) - 1, causal ? ", causal" : "",
                      planted ? ", with a planted fault" : "");
        }
      }
  if (by_cudnn && world.size == 1) failed += check_long_attention(device);
  if (world.rank == 0)
    std::printf("%d comparisons of attention in bf16, one fragment %s\n", compared,
                by_cudnn ? "by cuDNN" : "without cuDNN");
  return failed;
}

int run(World& world, at::Device device) {
  const DecoderConfig config = small_decoder();
  const auto whole = batches_of(world.size);
  MicroBatches all;
  for (const MicroBatches& batches : whole) all.insert(all.end(), batches.begin(), batches.end());
  int failed = 0, checked = 0;
  std::size_t turn = 0;
  // By type and mean: the same for every strategy.
  std::map<std::pair<at::ScalarType, bool>, Wanted> references;
  std::map<std::pair<at::ScalarType, bool>, std::map<std::string, at::Tensor>> ones;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const bool samples : {false, true}) {
      references[{dtype, samples}] = reference(config, all, samples, dtype);
      if (dtype == at::kDouble) continue;
      const Case naive{
          .strategy = {.flat = {.name = "naive", .is_naive = true}}, .dtype = dtype, .samples = samples};
      ones[{dtype, samples}] = gradients_of(naive, config, all, device, Group::solo());
    }
  for (const Strategy& strategy : all_strategies()) {
    if (strategy.flat.share && !device.is_cpu()) continue;  // refused there, see parallel/data
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const bool first = takes_first(turn++);
      for (const bool samples : {false, true})
        for (const bool fault : {false, true}) {
          if (!full_tests() && samples == first) continue;
          if (fault && (world.size == 1 || dtype != at::kDouble)) continue;
          const Case one{.strategy = strategy, .dtype = dtype, .samples = samples, .fault = fault};
          const Wanted& wanted = references[{dtype, samples}];
          const auto found =
              gradients_of(one, config, whole[static_cast<std::size_t>(world.rank)], device, world.group);
          const auto& alone = ones[{dtype, samples}];
          at::Tensor share = at::full({1}, used(one, found, alone, wanted, 2 * world.size), at::kDouble);
          world.group.all_reduce(share, ReduceOp::kMax);
          const double worst = share.item<double>();
          const bool good = (worst <= 1) != fault;
          failed += good ? 0 : 1, ++checked;
          if (world.rank == 0 && (!good || !fault))
            std::printf("%s  %.3f of the error allowed%s%s\n", one.text().c_str(), worst,
                        fault ? " with a planted fault" : "", good ? "" : "  FAILED");
        }
    }
  }
  if (!device.is_cpu())
    failed += check_offload(world, device, config, whole[static_cast<std::size_t>(world.rank)]);
  // One rank's own work, once on each device: on the first one, and on the CPU, by a process that is alone.
  if (world.size == 1 || device.index() > 0) {
    failed += check_kernels(world, device);
    failed += check_attention(world, device);
    failed += check_update_ahead(world, device, config, whole.front());
  }
  failed += check_capture_without_memory(world, device, config, all.front());
  failed += check_random_numbers(world, device);
  failed += check_graph(world, device, all.front());
  if (world.rank == 0)
    std::printf("%s, %d rank(s): %d cases, %d failed\n", device.str().c_str(), world.size, checked, failed);
  return failed == 0 ? 0 : 1;
}

int main_of(int argc, char** argv) {
  std::string device = "cpu", planted;
  JoinOptions options;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--device") == 0) device = argv[i + 1];
    if (std::strcmp(argv[i], "--backend") == 0) options.backend = argv[i + 1];
    if (std::strcmp(argv[i], "--plant") == 0) planted = argv[i + 1];
  }
  const int gpus = at::detail::getCUDAHooks().hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  if (device == "cuda" && gpus == 0) {
    std::printf("no GPU that this LibTorch can use: nothing was checked\n");
    return 0;
  }
  World world = join(options);
  at::Device place = at::kCPU;
  if (device == "cuda") place = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(world.rank % gpus));
  try {
    if (planted == "left-behind") at::ones({2, 2}, place).mm(at::ones({2, 2}));
    const int status = run(world, place);
    if (options.backend == "nccl") world.group.barrier();  // nobody ends while others read from it
    return status;
  } catch (const std::exception& error) {
    world.group.poison(error.what());
    std::fprintf(stderr, "rank %d: %s\n", world.rank, error.what());
    return 1;
  }
}

}  // namespace
}  // namespace isograd::device

int main(int argc, char** argv) { return isograd::device::main_of(argc, argv); }
