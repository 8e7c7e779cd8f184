// isograd train: a whole run, with verify's proof at its end.
#include <ATen/Parallel.h>

#include <csignal>
#include <thread>

#include "base/memory.hpp"
#include "base/waiting.hpp"
#include "cli/verbs.hpp"
#include "comm/environment.hpp"
#include "isograd/trainer.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/rank_zero.hpp"
#include "train/run_folder.hpp"
#include "train/task.hpp"
#include "verify/run.hpp"

namespace isograd {

namespace {

constexpr double kForward = 1.0 / 3;  // of a forward and backward

// Seconds of the proof; 0: not known. In shares of the step's batch, one process makes in fp64 the oracle's
// step, three runs of the first sample, and on one micro-batch four runs and a forward that look for leaks;
// with experts a forward in fp64 and one in the run's precision. All ranks make one step in fp64, two in the
// run's precision.
double proof_seconds(const FinishedRun& run) {
  if (run.micro_batches == 0 || device_kind(run.config) != "cpu")
    return 0;  // the oracle is always on the CPU
  const bool fp64 = run.config.train.dtype == "float64";
  // How much longer a pass takes in fp64, by the oracle's plain code. Measured: 2.1 to 2.6 over fp32.
  const double slower = fp64 ? 1 : 2.5;
  const auto samples = static_cast<double>(kind_of(run.config).samples_per_step(run.config));
  const auto micro_batches =
      static_cast<double>(run.micro_batches * grid_of(run.config, run.world.size).size(kSampleAxes));
  double passes = slower * (1 + 3 / samples + (4 + kForward) / micro_batches);
  if (!fp64 && run.model.choose_experts({})) passes += kForward * (slower + 1);
  // One process does alone what ranks do at the same time, with as many threads as a rank has.
  const double threads = at::get_num_threads(), cores = std::thread::hardware_concurrency();
  const double at_once = std::clamp(cores / threads, 1.0, static_cast<double>(run.world.size));
  return run.step_seconds * (at_once * passes + slower + (fp64 ? 1 : 2));
}

std::string proof_begins(const FinishedRun& run) {
  const double about = proof_seconds(run);
  return fmt::format(
      "proving the gradient of a step against one process in fp64 (verify.at_end){}; Ctrl-C "
      "skips it, the checkpoint is saved",
      about > 0 ? ", about " + human_seconds(about) : "");
}

ReportTable proof_skipped() {
  return {
      .title = "Parity with one process",
      .summary =
          "skipped by a signal: nothing is proved; isograd verify with the same configuration proves a step",
      .columns = {},
      .rows = {}};
}

}  // namespace

Verb train_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb = program.add_subcommand("train", "Train the model that a configuration describes");
  struct Flags : RunFlags {
    std::string json_log;
    bool memory = false;
    std::optional<std::int64_t> verify_every;
  };
  auto flags = std::make_shared<Flags>();
  add_run_flags(*verb, *flags);
  add_option(*verb, "--json-log", flags->json_log,
             "write metrics to this file, one JSON object per line (run.json_log)", "FILE");
  verb->add_flag("--overwrite", flags->overwrite,
                 "replace the checkpoints, metrics and report of an earlier run in run.directory");
  verb->add_flag(
      "--memory", flags->memory,
      "print the bytes that each rank keeps and sends, next to the bytes that formulas predict (run.memory)");
  add_option(*verb, "--verify-every", flags->verify_every,
             "every N steps, prove the gradient of a small step and compare the replicas (verify.every, "
             "verify.checksums_every)",
             "N");
  verb->footer(
      "Writes report.html, metrics.jsonl, tensorboard/, config.toml and checkpoints/ to run.directory.\n"
      "A folder that holds an earlier run is refused: name another one, resume, or give --overwrite.\n"
      "Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop all ranks after the current step. isograd then saves a\n"
      "checkpoint and prints the command that continues. SIGUSR2 saves and goes on (run.on_signal).\n"
      "With checkpoint.resume=auto one command starts and continues a run: docs/preemption.md.\n"
      "\n"
      "  isograd train examples/first_light.toml --ranks 2\n"
      "  isograd train run.toml --set checkpoint.resume=latest\n"
      "\n"
      "Exit status: 0 finished or stopped in order; 1 diverged, or a proof failed; 2 bad input;\n"
      "3 a rank was lost; 4 a defect of isograd; 75 saved, with checkpoint.resume=auto: run the same\n"
      "command again; 128 + n: ended by signal n before it could save.");
  const auto action = [flags, &invocation] {
    StopSignals::hold();
    flags->handles_user_signals = true;
    std::signal(SIGPIPE, SIG_IGN);  // a run continues when its output is closed: the folder has the results
    std::vector<std::string> sets;
    if (!flags->json_log.empty()) sets.push_back("run.json_log=" + flags->json_log);
    if (flags->memory) sets.push_back("run.memory=true");
    if (flags->verify_every)
      for (const char* key : {"verify.every", "verify.checksums_every"})
        sets.push_back(fmt::format("{}={}", key, *flags->verify_every));
    const RunConfig config = configuration(*flags, sets);
    if (!read_rank_environment()) RunFolder::check_free(config);  // before ranks are started
    return on_ranks(invocation, *flags, config, [&](World& world) {
      keep_freed_memory();
      TrainerHooks hooks;
      hooks.check = [](RunningRun& run) { return check_running(run); };
      if (config.verify.at_end)
        hooks.on_finish = [](FinishedRun& run) -> std::vector<ReportTable> {
          if (run.say) run.say(proof_begins(run));
          const auto stoppable = [&](VerifyProblem& problem, World&) { problem.stop = run.interrupted; };
          try {
            const Verdict verdict = verify_finished(run, stoppable);
            if (run.world.rank == 0) return {to_table(verdict)};
          } catch (const VerifyStopped&) {
            if (run.world.rank == 0) return {proof_skipped()};
          }
          return {};
        };
      return Trainer(config, world, hooks).run().exit_status();
    });
  };
  return {verb, action, /*leaves_files=*/true};
}

}  // namespace isograd
