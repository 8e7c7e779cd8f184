// Our side of `bench step`, `tensor`, `expert` and `pipeline`: what a user of the library writes, timed. And
// how a side of ours starts its ranks.
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <chrono>
#include <cstdlib>
#include <set>
#include <thread>

#include "base/memory.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/runner.hpp"
#include "isograd/error.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "train/build.hpp"
#include "train/device.hpp"

namespace isograd {
namespace {

// All that a step of a model needs under a strategy.
struct Prepared {
  std::unique_ptr<DataParallel> layout;
  ForwardLossTerms forward;
  StepOptions options{};
  std::shared_ptr<Pipeline> pipeline{};
};

Prepared prepare(const Strategy& strategy, DecoderLM& model, const World& world) {  // collective
  using enum Strategy::Parallel;
  const auto kind = strategy.parallel;
  const bool tensor = kind == kSequence || kind == kWholeTokens;
  RunConfig config;
  auto& parallel = config.parallel;
  parallel.share_parameters = strategy.share_parameters ? "on" : "off";
  parallel.overlap = parallel.prefetch = strategy.overlap;
  parallel.sequence_parallel = kind == kSequence;
  (kind == kData      ? parallel.strategy
   : kind == kExperts ? parallel.expert_overlap
   : kind == kStages  ? parallel.schedule
                      : parallel.tensor_overlap) = strategy.setting;
  if (kind != kData) (tensor ? parallel.tp : kind == kExperts ? parallel.ep : parallel.pp) = world.size;
  const Mesh mesh(world, tensor            ? Grid({{"tp", world.size}})
                         : kind == kStages ? Grid({{kStageAxis, world.size}})
                                           : grid_of(config, world.size));
  std::optional<ComposedDecoder> composed;
  if (kind != kData) composed = compose_decoder(model, config, mesh);
  const ModelUnits units = model_units(model, config);
  Prepared prepared{
      make_layout(config, model.named(), units, mesh, composed ? &composed->layout : nullptr),
      inside(units.root, [&model](const Batch& batch) -> LossTerms {
        const DecoderOutputs outputs = model.outputs(batch);
        if (outputs.passed_on.defined()) return {{"cross_entropy", outputs.passed_on}};
        return {{"cross_entropy", cross_entropy_sum(model.logits_of(outputs.hidden), batch.targets,
                                                    {.shard = model.vocabulary()})}};
      })};
  if (composed && composed->pipeline) {
    prepared.pipeline = composed->pipeline;
    prepared.options = through(*prepared.pipeline);
  }
  return prepared;
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Runs `step` that many times under LibTorch's profiler, for device_figures(): {"steps", "issued" (the time
// in ns when the host had issued all), "events": [[on the host, name, begin, end]...], "peak_bytes" (of
// LibTorch's allocator)}, or {"problem": why there are none}. Empty on a CPU.
nlohmann::json profile_steps(c10::Device device, std::int64_t steps, const std::function<void()>& step) {
  namespace impl = torch::profiler::impl;
  namespace profiler = torch::autograd::profiler;
  if (device.is_cpu()) return nlohmann::json::object();
  nlohmann::json profile = {{"steps", steps}, {"events", nlohmann::json::array()}};
  synchronize(device);
  auto* const allocator = c10::getDeviceAllocator(device.type());
  allocator->resetPeakStats(device.index());
  try {
    const impl::ProfilerConfig config(impl::ProfilerState::KINETO);
    const std::set<impl::ActivityType> activities{impl::ActivityType::CUDA};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    for (std::int64_t i = 0; i < steps; ++i) step();
    profile["issued"] = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
    // Apart in time, so that the profiler's clock tells the steps' waits from this one.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    synchronize(device);
    const auto result = profiler::disableProfiler();
    for (const auto& event : result->events())
      profile["events"].push_back(
          {event.deviceType() == c10::kCPU, event.name().substr(0, 120), event.startNs(), event.endNs()});
  } catch (const std::exception& error) {
    profile["problem"] = std::string(error.what()).substr(0, 500);
  }
  const auto bytes = allocator->getDeviceStats(device.index()).allocated_bytes;
  profile["peak_bytes"] = bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak;
  return profile;
}

struct OurSide {
  std::string verb;
  void (*run_rank)(const std::filesystem::path& exchange, const std::string& name);
};
const OurSide kSides[] = {
    {"step-ours", run_step_rank}, {"optim-ours", run_optim_rank}, {"context-ours", run_context_rank}};

}  // namespace

void run_step_rank(const std::filesystem::path& exchange, const std::string& name) {
  const nlohmann::json description = read_case(exchange);
  at::set_num_threads(description.at("threads").get<int>());
  keep_freed_memory();  // as `isograd train` does
  const bool on_gpu = description.at("device") == "cuda";
  World world = join({.backend = on_gpu ? "nccl" : "shm"});
  const at::Device device =
      on_gpu ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(world.rank)) : at::Device(at::kCPU);
  const StepCase step_case =
      find_step_case(description.at("verb").get<std::string>(), description.at("name").get<std::string>());
  const Strategy& strategy = find_strategy(name);
  const auto steps = read_steps(exchange, step_case, strategy.one_batch() ? 0 : world.rank,
                                strategy.one_batch() ? 1 : world.size);
  const auto model =
      read_hf(exchange / "model", description.at("dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat);
  model->to(device);
  Prepared prepared = prepare(strategy, *model, world);
  const ForwardLossTerms forward = on_device(device, prepared.forward);
  const auto optimizer = adamw(bench_adamw());
  TokenMean mean;
  prepared.options.max_norm = kBenchMaxNorm;
  prepared.options.capture = on_gpu;
  DataParallel* layout = prepared.layout.get();
  Step step(forward, *layout, mean, *optimizer, prepared.options);

  TurnPipes pipes(exchange, name, world.rank);
  std::size_t next = 0;
  const auto in_a_turn = description.at("steps_per_turn").get<std::int64_t>();
  const auto train = [&] { return step(steps[next++ % steps.size()]); };
  while (pipes.wait()) {
    Turn turn;
    world.group.barrier();
    if (pipes.profiled()) turn.profile = profile_steps(device, 3, train);
    for (std::int64_t i = 0; !pipes.profiled() && i < in_a_turn; ++i) {
      const double waited = layout->exposed_seconds();
      StepReport report;
      turn.seconds.push_back(seconds_of([&] {
        report = train();
        synchronize(device);
      }));
      turn.losses.push_back(report.loss);
      turn.norms.push_back(report.norm);
      turn.exposed.push_back(layout->exposed_seconds() - waited);
    }
    pipes.answer(turn);
  }
}

std::vector<std::string> bench_sides() {
  std::vector<std::string> verbs;
  for (const OurSide& side : kSides) verbs.push_back(side.verb);
  return verbs;
}

int run_bench_side(const std::string& verb, const std::filesystem::path& exchange, int ranks,
                   const std::string& name) {
  if (ranks > 1 && !std::getenv("RANK"))
    return launch_ranks(
        {bench_self(), "bench", verb, exchange.string(), std::to_string(ranks), name},
        {.ranks = ranks, .backend = read_case(exchange).value("device", "cpu") == "cuda" ? "nccl" : "shm"});
  const auto* side = std::ranges::find(kSides, verb, &OurSide::verb);
  ISOGRAD_INVARIANT(side != std::end(kSides), verb);
  side->run_rank(exchange, name);
  return 0;
}

}  // namespace isograd
