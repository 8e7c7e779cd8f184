// isograd train: a whole run, with verify's proof at its end.
#include <csignal>

#include "base/memory.hpp"
#include "base/waiting.hpp"
#include "cli/ranks.hpp"
#include "cli/verbs.hpp"
#include "comm/environment.hpp"
#include "isograd/trainer.hpp"
#include "train/run_folder.hpp"
#include "verify/run.hpp"

namespace isograd {

namespace {

// Duration of the proof in steps of the run: a rough count of the passes below, in fp64 and in the run's
// precision, not fitted to a run.
constexpr double kProofOfOneRank = 8, kProofOfRanks = 6;

// The proof makes a plain step in fp64 in one process, and three steps on all ranks.
std::string proof_begins(const FinishedRun& run) {
  const double about = run.step_seconds * (kProofOfOneRank * run.world.size + kProofOfRanks);
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
  CLI::App* verb = program.add_subcommand("train", "Train a model as a configuration says");
  struct Flags : RunFlags {
    std::string json_log;
    bool memory = false;
    std::optional<std::int64_t> verify_every;
  };
  auto flags = std::make_shared<Flags>();
  add_run_flags(*verb, *flags);
  verb->add_option("--json-log", flags->json_log, "file for metrics as JSON lines (run.json_log)")
      ->type_name("FILE");
  verb->add_flag("--overwrite", flags->overwrite,
                 "replace the checkpoints, metrics and report of an earlier run in run.directory");
  verb->add_flag("--memory", flags->memory,
                 "print what each rank keeps and sends, next to the formulas (run.memory)");
  verb->add_option("--verify-every", flags->verify_every,
                   "every N steps prove a micro-sized step and compare replicas (verify.every,\n"
                   "verify.checksums_every)")
      ->type_name("N");
  verb->footer(
      "Leaves report.html, metrics.jsonl, tensorboard/, config.toml and checkpoints/ in "
      "run.directory.\n"
      "A folder with an earlier run in it is left alone: name another, resume, or "
      "--overwrite.\n"
      "Ctrl-C, SIGTERM and SIGHUP end the step on all ranks alike, save, and say how to "
      "continue.\n\n"
      "  isograd train examples/first_light.toml --ranks 2\n"
      "  isograd train run.toml --set checkpoint.resume=latest\n\n"
      "Status: 0 finished or stopped in order; 1 diverged, or a proof failed; 2 bad input;\n"
      "3 a rank was lost; 4 a defect of isograd; 128 + n: ended by signal n before it could "
      "save.");
  const auto action = [flags, &invocation] {
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
