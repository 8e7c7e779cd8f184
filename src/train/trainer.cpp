#include "isograd/trainer.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "comm/failures.hpp"
#include "train/checkpoint_files.hpp"
#include "train/config_table.hpp"
#include "train/memory.hpp"
#include "train/prepared_run.hpp"
#include "train/presenter.hpp"
#include "train/rank_zero.hpp"
#include "train/run_folder.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_turn(std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; }

bool due(std::int64_t every, std::int64_t step, std::int64_t total) {
  return step == total || is_turn(every, step);
}

// Bytes that a run sends between hosts, and notices about a mesh that sends many. Does nothing on one host.
class HostTraffic {
 public:
  HostTraffic(const World& world, const Grid& grid) : world_(&world) {
    const Hosts hosts = hosts_of(world);
    several_ = hosts.count() > 1;
    if (!several_) return;
    said_ = said_of_hosts(grid, hosts);
    said_.insert(said_.begin(), hosts_text(grid, hosts));
  }
  // The hosts of the ranks, then recommendations.
  const std::vector<std::string>& said() const { return said_; }
  void before_step() {
    if (several_) before_ = host_bytes(*world_);
  }
  // Bytes of all ranks since before_step(); nothing on one host. Collective.
  std::optional<std::int64_t> across_in_step() {
    if (!several_) return std::nullopt;
    const HostBytes now = host_bytes(*world_);  // before what follows
    last_ = {.within = now.within - before_.within, .across = now.across - before_.across};
    const at::Tensor sum = at::full({1}, last_.across, at::kLong);
    Group(world_->group).all_reduce(sum);
    return sum.item<std::int64_t>();
  }
  // "rank 0: 1.5 MB across, 6.0 within; ..." for the last step. Collective; only rank 0 gets it.
  std::string by_rank() {
    if (!several_) return {};
    const at::Tensor all =
        Group(world_->group).all_gather(at::tensor({last_.across, last_.within}, at::kLong));
    std::string text;
    for (int rank = 0; rank < world_->size; ++rank) {
      const auto* bytes = all[rank].const_data_ptr<std::int64_t>();
      text += fmt::format("{}rank {}: {} bytes across hosts, {} within", rank == 0 ? "" : "; ", rank,
                          bytes[0], bytes[1]);
    }
    return text;
  }

 private:
  const World* world_;
  bool several_ = false;
  std::vector<std::string> said_{};
  HostBytes before_{}, last_{};
};

}  // namespace

// The loop around a prepared run: its folder, its notices and figures, and what ends it.
struct Trainer::Impl {
  RunConfig config;
  World& world;
  TrainerHooks hooks;

  std::optional<PreparedRun> run{};
  std::unique_ptr<RunFolder> folder{};  // rank 0 only, like the presenter
  std::unique_ptr<Presenter> presenter{};
  std::optional<ErrorText> file_error{};  // error of rank 0 with its files, until all ranks agree on it
  std::optional<HostTraffic> hosts{};
  Outcome outcome{};
  std::int64_t tokens_seen = 0, saved_step = -1, evaluated_step = -1, steps_timed = 0;
  double step_seconds = 0, exposed_seconds = 0;
  Peak peak{};
  Clock::time_point last_save{};
  double flops = 0, all_flops = 0;  // of the model: of this step, of all steps since the start or resume
  std::string failed_check{};       // result of a failed check
  bool is_comparison = false;       // comparison of another run, which prints the notices
  std::optional<OperationsFile> operations{};

  void prepare() {
    Group& group = world.group;
    run.emplace(config, world, hooks.wrap_forward,
                [&] { on_rank_zero(group, [&] { folder = std::make_unique<RunFolder>(config); }); });
    hosts.emplace(world, run->mesh->grid());
    if (!run->resumed_from.empty()) outcome.checkpoint = run->resumed_from, saved_step = run->state.step;
    outcome.steps = run->state.step, outcome.skipped = run->state.skipped;
    const Baseline baseline = run->task->baseline(group);
    outcome.baseline = baseline.value;
    if (run->task->step_flops(*run->loader, run->loader->position()) > 0)
      peak = find_peak(config, scalar_type(config.train.dtype), run->device, group);
    on_rank_zero(group, [&] {
      folder->begin();
      presenter = std::make_unique<Presenter>(config, facts(baseline));
      const std::string unseen = run->validation ? "" : nothing_held_out(run->task->facts());
      const std::string no_peak = peak.flops_per_second > 0 ? "" : peak.source;
      std::string made;
      if (run->state.step >= config.train.steps)
        made = fmt::format("all {} steps were made before: this run repeats its end alone", run->state.step);
      for (const std::string& text : {folder->notice(), run->learning_rates, unseen, no_peak, made})
        if (!text.empty()) presenter->notice(text);
      for (const std::string& text : hosts->said()) presenter->notice(text);
    });
    if (!is_comparison) operations.emplace(std::filesystem::path(config.run.directory) / kLastOperations);
  }

  // Shows and logs on rank 0. If that fails, all ranks stop after the next step and throw its error.
  template <class Show>
  void present(const Show& show) {
    if (!presenter || file_error) return;
    try {
      folder->check();
      show();
    } catch (const ConfigError& error) {
      file_error = error.text();
    }
  }

  void check_run_folder() {
    present([] {});
  }

  RunFacts facts(const Baseline& baseline) const {
    return RunFacts{.ranks = world.size,
                    .layout = describe_layout(config, world.group),
                    .device = run->device.is_cpu() ? "cpu" : run->device.str() + " on rank 0",
                    .parameters = run->parameters,
                    .parameter_map = run->parameter_map,
                    .task = run->task->facts(),
                    .baseline = baseline,
                    .peak = peak,
                    .steps_per_epoch = run->loader->steps_per_epoch(),
                    .first_step = run->state.step,
                    .hosts = hosts->said().empty() ? "" : hosts->said()[0]};
  }

  // Makes steps until the last, a stop or a divergence. Between steps, ranks act only on reports and
  // configuration, which are the same everywhere, so all enter the same collectives.
  void loop() {
    const std::int64_t total = config.train.steps, &step = run->state.step;
    last_save = Clock::now();
    make_up_for_validation();
    while (step < total) {
      const auto start = Clock::now();
      const double exposed_before = exposed_so_far();
      if (run->memory) run->memory->before_step(*run->layout);
      hosts->before_step();
      if (peak.flops_per_second > 0) flops = run->task->step_flops(*run->loader, run->loader->position());
      // Before the step is made: it says why one may not fit.
      const auto notice = [&] {
        if (presenter && !run->parts->first_step().empty())
          presenter->notice("first step: " + run->parts->first_step());
      };
      const bool save_is_due = world.rank == 0 && config.checkpoint.every_seconds > 0 &&
                               seconds_since(last_save) >= config.checkpoint.every_seconds;
      const bool stops = StopSignals::requested() || file_error, told_to_save = StopSignals::take_save();
      const StepReport report = run->step({stops, told_to_save || save_is_due}, notice);
      const double seconds = seconds_since(start), exposed = exposed_so_far() - exposed_before;
      if (run->memory)
        run->memory->after_step(*run->layout, *run->optimizer, run->plan().share_parameters, run->rounds);
      const bool diverged = run->diverged(report);
      if (!report.finite) outcome.not_finite = first_text(world.group, run->model->take_not_finite());
      if (presenter && !diverged && !report.finite && !outcome.not_finite.empty())
        presenter->notice("first not finite: " + outcome.not_finite);
      if (report.finite && !report.updated) ++outcome.empty;
      show(report, seconds, exposed, diverged);
      if (diverged) {
        outcome.end = Outcome::End::kDiverged;
        return;
      }
      if (!checked()) return;
      if (report.step_counts.stop_requested) {
        outcome.end = Outcome::End::kStopped;
        save();
        outcome.again = goes_on_by_the_same_command();
        return;
      }
      const bool asked = report.step_counts.save_requested;
      if (asked && on_any_rank(world.group, told_to_save)) StopSignals::save_begins();
      bool saves = due(config.checkpoint.every, step, total) || asked;
      if (due(config.train.evaluate_every, step, total)) {
        measure();
        saves = saves || is_among_the_best();
      }
      if (saves) save();
    }
    if (evaluated_step != step) measure();  // a resume of a run that had made all its steps
  }

  // A stop saves without the validation that is due in its step, for which there may be no time. Collective.
  void make_up_for_validation() {
    if (run->resumed_from.empty() || !run->validation || run->state.validation_loss ||
        !due(config.train.evaluate_every, run->state.step, config.train.steps))
      return;
    measure();
    if (!is_among_the_best()) return;
    saved_step = -1;  // the same step again, with its validation loss
    save();
  }

  // After a stop. Ctrl-C is a user's wish that the run ends. Collective.
  bool goes_on_by_the_same_command() {
    return config.checkpoint.resume == "auto" && !on_any_rank(world.group, StopSignals::by_hand());
  }

  // Whether checkpoint.keep_best keeps a checkpoint with the validation loss of this step. Collective.
  bool is_among_the_best() {
    const auto& loss = run->state.validation_loss;
    if (config.checkpoint.keep_best == 0 || !loss) return false;
    bool among = false;
    on_rank_zero(world.group, [&] {
      const auto best = best_checkpoints(checkpoint_root(config), run->state.step - 1);
      const auto better = std::ranges::count_if(best, [&](const auto& each) { return each.first <= *loss; });
      among = better < config.checkpoint.keep_best;
    });
    return of_rank_zero(world.group, among);
  }

  double exposed_so_far() const { return run->layout->exposed_seconds() + run->mesh->waited_apart(); }

  void show(const StepReport& report, double seconds, double exposed, bool diverged) {
    tokens_seen += report.step_counts.tokens;
    ++steps_timed, step_seconds += seconds, exposed_seconds += exposed, all_flops += flops;
    outcome.steps = run->state.step, outcome.skipped = run->state.skipped;
    outcome.exposed = exposed_seconds / step_seconds, outcome.loss = report.loss;
    outcome.tokens_per_second = static_cast<double>(tokens_seen) / step_seconds;
    if (peak.flops_per_second > 0) outcome.mfu = all_flops / step_seconds / peak.flops_per_second;
    const bool clipped = run->clips && report.updated;
    StepEvent event{.step = run->state.step + (diverged ? 1 : 0),
                    .total = config.train.steps,
                    .report = report,
                    .learning_rate = run->optimizer->learning_rate(),
                    .seconds = seconds,
                    .exposed_seconds = exposed,
                    .tokens_per_second = static_cast<double>(report.step_counts.tokens) / seconds,
                    .mfu = {},
                    .expert_loads = {},
                    .clipped = clipped ? run->clips->last() : std::vector<ClippedGroup>{},
                    .bytes_across_hosts = hosts->across_in_step()};
    if (report.finite) event.expert_loads = run->model->expert_loads(report.counters);
    if (peak.flops_per_second > 0) event.mfu = flops / seconds / peak.flops_per_second;
    present([&] { presenter->step(event); });
    if (hooks.on_step) hooks.on_step(event);
  }

  FinishedRun as_finished() { return {config, world, *run->task, *run->model, run->placed()}; }

  // Checks run before saving, so no checkpoint of a run that is known to be wrong is written.
  bool checked() {
    const std::int64_t step = run->state.step;
    if (!hooks.check || !(is_turn(config.verify.every, step) || is_turn(config.verify.checksums_every, step)))
      return true;
    RunningRun running{as_finished(), *run->layout, step, run->forward, run->look_ahead};
    failed_check = hooks.check(running);
    if (!failed_check.empty()) outcome.end = Outcome::End::kRefuted;
    return failed_check.empty();
  }

  void measure() {
    evaluated_step = run->state.step;
    auto evaluation = run->evaluate();
    outcome.figures = run->task->figures(*run->model, *run->layout);
    if (evaluation) outcome.validation_loss = evaluation->loss;
    if (!evaluation && outcome.figures.empty()) return;
    if (!evaluation) evaluation = {.step = run->state.step};
    evaluation->figures = outcome.figures;
    present([&] { presenter->evaluation(*evaluation); });
    if (hooks.on_evaluation) hooks.on_evaluation(*evaluation);
  }

  void save() {
    check_run_folder();
    // A deleted run folder is not recreated. A problem with a log alone does not prevent a checkpoint.
    throw_agreed(world.group, file_error && !folder->is_there() ? file_error : std::nullopt);
    try {
      if (saved_step != run->state.step) {
        outcome.checkpoint = run->save();
        saved_step = run->state.step;
        if (presenter && !file_error) presenter->saved(outcome.checkpoint);
        if (hooks.on_checkpoint) hooks.on_checkpoint(outcome.checkpoint);
      }
      last_save = Clock::now();
    } catch (const AgreedConfigError&) {
      check_run_folder();                     // the folder may have been deleted meanwhile
      throw_agreed(world.group, file_error);  // what came first
      throw;
    }
    throw_agreed(world.group, file_error);
  }

  // A rank that was lost during a save may have been lost after rank 0 had written the checkpoint.
  std::filesystem::path last_checkpoint() const {
    std::filesystem::path last = outcome.checkpoint;
    if (run)
      for (const auto& checkpoint : list_checkpoints(checkpoint_root(config)))
        if (*checkpoint_step(checkpoint) <= run->state.step) last = checkpoint;
    return last;
  }

  // Makes the run that a finished one is compared with, by the same loop in a folder of its own.
  std::optional<Outcome> compare() {
    std::optional<RunConfig> other = kind_of(config).comparison(config);
    if (!other) return std::nullopt;
    other->source = std::filesystem::path(other->run.directory) / kRunConfig;
    std::string resume;
    on_rank_zero(world.group, [&] {
      if (folder->goes_on() && !list_checkpoints(checkpoint_root(*other)).empty()) resume = "latest";
      // A continued run may replace what its comparison left before the first checkpoint.
      other->overwrite = resume.empty() && (config.overwrite || folder->goes_on());
      presenter->notice(fmt::format("for comparison: the same by {}", other->source.string()));
    });
    other->checkpoint.resume = broadcast_text(world.group, resume);
    Trainer comparison(*other, world);
    comparison.impl_->is_comparison = true;
    return comparison.run();
  }

  void finish() {
    throw_agreed(world.group, file_error);
    const bool finished = outcome.end == Outcome::End::kFinished;
    outcome.balance = run->parts->balance();
    if (run->memory) outcome.to_experts = run->memory->use().to_experts;
    const std::optional<Outcome> comparison = finished ? compare() : std::nullopt;
    const bool to_show = finished && std::isfinite(outcome.loss), together = run->placed() != nullptr;
    std::shared_ptr<const void> whole;
    if (finished && (hooks.on_finish || run->task->shows_model())) whole = run->layout->whole_parameters();
    if (finished && hooks.on_finish) {
      FinishedRun ended = as_finished();
      ended.interrupted = StopSignals::requested;
      if (steps_timed > 0) ended.step_seconds = step_seconds / static_cast<double>(steps_timed);
      ended.micro_batches = run->rounds;
      if (presenter) ended.say = [this](const std::string& text) { presenter->line(text); };
      outcome.tables = hooks.on_finish(ended);
    }
    outcome.tables = tables_of_rank_zero(world.group, std::move(outcome.tables));
    // A signal skips what is left of these two.
    if (finished && (comparison || hooks.on_finish) && on_any_rank(world.group, StopSignals::requested()))
      outcome.again = goes_on_by_the_same_command();
    if (comparison && comparison->exit_status() != 0)
      outcome.tables.push_back({"Comparison", "the run to compare with failed", {}, {}, /*passed=*/false});
    std::vector<Showing::Picture> stages;
    if (const Pipeline* pipeline = run->model->pipeline())
      stages = show_stages(*pipeline, *run->mesh, config.run.directory);
    std::optional<MemoryShown> memory;
    if (run->memory) {
      memory = memory_shown(run->memory->use(), run->plan(), config, *run->layout, world.group);
      memory->table.summary += "\n" + hosts->by_rank();
    }
    Showing showing;
    const auto show = [&] {
      showing = run->task->show(*run->model, outcome, comparison ? &*comparison : nullptr);
    };
    if (to_show && together) on_every_rank(world.group, show);  // its forward takes all of them
    on_rank_zero(world.group, [&] {
      if (to_show && !together)
        show();
      else if (finished && !to_show)
        presenter->notice("the last step's loss is not finite: there is nothing to show of the model");
      outcome.sample = showing.text;
      showing.pictures.insert(showing.pictures.end(), stages.begin(), stages.end());
      if (memory) presenter->memory(std::move(*memory));
      if (!finished) {
        showing.early_end = early_end(outcome, config, world.size, failed_check);
        presenter->line(showing.early_end);
      } else if (outcome.again) {
        presenter->line(fmt::format("stopped by a signal after the last step; {}", kRunAgain));
      }
      outcome.report = presenter->finish(outcome, showing);
    });
  }
};

Trainer::Trainer(const RunConfig& config, World& world, TrainerHooks hooks)
    : impl_(new Impl{.config = config, .world = world, .hooks = std::move(hooks)}) {}
Trainer::~Trainer() = default;

Outcome Trainer::run() {
  StopSignals signals(impl_->config);
  try {
    impl_->prepare();
    impl_->loop();
    impl_->finish();
  } catch (const AgreedConfigError&) {
    throw;
  } catch (const std::exception& error) {
    impl_->world.group.poison(error.what());
    if (const auto* lost = dynamic_cast<const PeerError*>(&error); lost && impl_->operations)
      rethrow(*lost, impl_->config, impl_->world.size, impl_->run ? impl_->run->state.step : 0,
              impl_->last_checkpoint());
    throw;
  }
  return impl_->outcome;
}

}  // namespace isograd
