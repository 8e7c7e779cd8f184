// Our side of `bench step`: what a user of the library writes, timed.
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/memory.hpp"
#include "bench/bench.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/cases/strategy.hpp"
#include "bench/device_profile.hpp"
#include "bench/pipes.hpp"
#include "bench/rounds.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "train/device.hpp"

namespace isograd {
namespace {

void run_step_rank(const std::filesystem::path& exchange, const std::string& name) {
  const StepSetting setting = read_setting(exchange);
  at::set_num_threads(setting.threads);
  keep_freed_memory();  // as `isograd train` does
  const bool on_gpu = setting.device == "cuda";
  World world = join({.backend = on_gpu ? "nccl" : "shm"});
  const at::Device device =
      on_gpu ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(world.rank)) : at::Device(at::kCPU);
  const StepCase& step_case = find_step_case(read_case_name(exchange));
  const Strategy& strategy = find_strategy(name);
  const bool one_batch = strategy.one_batch();
  const auto steps = read_steps(exchange, step_case, one_batch ? 0 : world.rank, one_batch ? 1 : world.size);
  const auto model = read_hf(exchange / "model", setting.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
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
  const std::int64_t in_a_turn = read_steps_per_turn(exchange);
  const auto train = [&] { return step(steps[next++ % steps.size()]); };
  while (pipes.wait()) {
    std::vector<double> seconds, losses, norms, exposed;
    world.group.barrier();
    if (pipes.profiled()) {
      constexpr std::int64_t kProfiled = 3;
      pipes.answer(
          {{"seconds", seconds}, {"losses", losses}, {"profile", profile_steps(device, kProfiled, train)}});
      continue;
    }
    for (std::int64_t i = 0; i < in_a_turn; ++i) {
      const double waited = layout->exposed_seconds();
      const auto start = std::chrono::steady_clock::now();
      const StepReport report = train();
      synchronize(device);
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      losses.push_back(report.loss);
      norms.push_back(report.norm);
      exposed.push_back(layout->exposed_seconds() - waited);
    }
    pipes.answer({{"seconds", seconds}, {"losses", losses}, {"norms", norms}, {"exposed", exposed}});
  }
}

}  // namespace

int bench_step_ours(const std::filesystem::path& exchange, int ranks, const std::string& strategy) {
  if (ranks > 1 && !std::getenv("RANK"))
    return launch_ranks(
        {bench_self(), "bench", "step-ours", exchange.string(), std::to_string(ranks), strategy},
        {.ranks = ranks, .backend = read_setting(exchange).device == "cuda" ? "nccl" : "shm"});
  run_step_rank(exchange, strategy);
  return 0;
}

}  // namespace isograd
