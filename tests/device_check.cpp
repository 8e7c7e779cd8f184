// One step on a device against one process in fp64 on the CPU: what ./dev gpu-check runs on a GPU, alone and
// as several ranks, and what the tests run on the CPU, so that the program itself is known to work.
//   device_check [--device cpu|cuda] [--backend shm|nccl]      ranks: isograd launch -n N -- device_check ...
//   device_check --device cuda --plant left-behind             must fail: a tensor stayed on the CPU
// Ranks are processes: autograd has one thread a GPU, which ranks as threads would share and wait in.
#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

#include "context_step.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/step.hpp"
#include "kernels/flat.hpp"
#include "kernels/gpu/kernels.hpp"
#include "kernels/matmul/product.hpp"
#include "model/fused.hpp"
#include "train/router_losses.hpp"

namespace isograd::context {
namespace {

constexpr double kExact = 1e-10;  // E1

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

// What a layout with offload holds, and the optimizer's state.
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
            const std::map<std::string, at::Tensor>& alone, const Reference& wanted, int pieces) {
  if (one.dtype == at::kDouble) return worst_error(found, wanted) / kExact;
  const double unit = std::ldexp(1.0, one.dtype == at::kFloat ? -24 : -8);
  double worst = 0;
  const double rms = rms_of(wanted);
  for (const auto& [name, g] : wanted.gradients) {
    const double error = (found.at(name) - g).norm().item<double>();
    const double allowed =
        4 * (alone.at(name) - g).norm().item<double>() + unit * std::sqrt(pieces) * scale_of(rms, g);
    worst = std::isfinite(error) ? std::max(worst, error / allowed) : HUGE_VAL;
  }
  return worst;
}

// What is updated in host memory against what is updated on the device: the gradients two steps later.
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
  DecoderConfig config = small_decoder(1);
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
    if (has)
      for (const std::int64_t begin : {0, 4, 7})
        for (const auto& lengths : std::vector<std::vector<std::int64_t>>{
                 {1}, {17, 2, 1, 8}, {4096, 5, 123457, 11, 4096, 3}, std::vector<std::int64_t>(500, 9)})
          note(adamw_agrees(lengths, begin, type, device),
               fmt::format("adamw {} {} {}", c10::toString(type), begin, lengths.size()));
  }
  if (products_widen(device)) note(products_agree(device), "product of bf16 in fp32");
  if (world.rank == 0)
    std::printf("%d comparisons of swiglu, rotary and adamw, %s, products of bf16 %s\n", compared,
                has ? "by kernels of gpu/" : "without kernels of gpu/",
                products_widen(device) ? "in fp32" : "rounded");
  return failed;
}

int run(World& world, at::Device device) {
  const DecoderConfig config = small_decoder(1);
  const auto whole = make_step(kLayouts[1], world.size, 2);
  MicroBatches all;
  for (const MicroBatches& batches : whole) all.insert(all.end(), batches.begin(), batches.end());
  int failed = 0, checked = 0;
  for (const Strategy& strategy : all_strategies()) {
    if (strategy.flat.share && !device.is_cpu()) continue;  // refused there, see parallel/data
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
      for (const bool samples : {false, true})
        for (const bool fault : {false, true}) {
          if (fault && (world.size == 1 || dtype != at::kDouble)) continue;
          const Case one{.strategy = strategy, .dtype = dtype, .samples = samples, .fault = fault};
          const Reference wanted = reference(config, whole, samples, dtype);
          const auto found =
              gradients_of(one, config, whole[static_cast<std::size_t>(world.rank)], device, world.group);
          const auto alone = dtype == at::kDouble
                                 ? std::map<std::string, at::Tensor>{}
                                 : gradients_of({.strategy = {.flat = {.name = "naive", .is_naive = true}},
                                                 .dtype = dtype,
                                                 .samples = samples},
                                                config, all, device, Group::solo());
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
  if (!device.is_cpu())
    failed += check_offload(world, device, config, whole[static_cast<std::size_t>(world.rank)]);
  failed += check_kernels(world, device);
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
}  // namespace isograd::context

int main(int argc, char** argv) {
  return isograd::context::main_of(argc, argv);
}
