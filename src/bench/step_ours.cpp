// Our side of `bench step`: what a user of the library writes, timed.
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bench/bench.hpp"
#include "bench/step_case.hpp"
#include "isograd/error.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_file(const std::filesystem::path& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode), &std::fclose);
  if (!file)
    throw ConfigError({.where = "bench step-ours",
                       .found = "cannot open " + path.string(),
                       .expected = "a pipe made by bench step",
                       .action = "Run `isograd bench step`, which starts this"});
  return file;
}

void run_rank(const std::filesystem::path& exchange) {
  at::set_num_threads(1);
  World world = join();
  const StepCase& step_case = find_step_case(read_case_name(exchange));
  const auto batches = read_batches(exchange, step_case, world.rank, world.size);
  const auto model = read_hf(exchange / "model", at::kFloat);
  const auto layout = bucketed(trainable_parameters(model->named()), world.group);
  const auto optimizer = adamw(bench_adamw());
  TokenMean mean;
  Step step(
      [&](const Batch& batch) -> LossTerms {
        return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets)}};
      },
      *layout, mean, *optimizer, {.max_norm = kBenchMaxNorm});

  const File go = open_file(exchange / ("ours.go." + std::to_string(world.rank)), "rb");
  const File done = world.rank == 0 ? open_file(exchange / "ours.done", "w") : File(nullptr, &std::fclose);
  std::size_t next = 0;
  while (std::fgetc(go.get()) != EOF) {
    std::vector<double> seconds, losses;
    world.group.barrier();
    for (std::int64_t i = 0; i < step_case.steps_per_turn; ++i) {
      const auto start = std::chrono::steady_clock::now();
      const StepReport report = step({batches[next++ % batches.size()]});
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      losses.push_back(report.loss);
    }
    if (!done) continue;
    std::fputs((nlohmann::json{{"seconds", seconds}, {"losses", losses}}.dump() + "\n").c_str(), done.get());
    std::fflush(done.get());
  }
}

}  // namespace

int bench_step_ours(const std::filesystem::path& exchange, int ranks) {
  if (ranks > 1 && !std::getenv("RANK")) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    return launch_ranks({self, "bench", "step-ours", exchange.string(), std::to_string(ranks)},
                        {.ranks = ranks});
  }
  run_rank(exchange);
  return 0;
}

}  // namespace isograd
