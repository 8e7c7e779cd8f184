#include "isograd/trainer.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/operations_file.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "train/build.hpp"
#include "train/checkpoint_files.hpp"
#include "train/cut_batches.hpp"
#include "train/device.hpp"
#include "train/evaluate.hpp"
#include "train/memory.hpp"
#include "train/peers.hpp"
#include "train/presenter.hpp"
#include "train/rank_layout.hpp"
#include "train/rank_zero.hpp"
#include "train/resume.hpp"
#include "train/run_folder.hpp"
#include "train/stop.hpp"
#include "train/task.hpp"
#include "train/utilisation.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool divides(std::int64_t every, std::int64_t step) {
  return every > 0 && step % every == 0;
}

bool due(std::int64_t every, std::int64_t step, std::int64_t total) {
  return step == total || divides(every, step);
}

// Bytes that a run sends between hosts, and notices about a mesh that sends more than necessary. On one
// host it does nothing.
class HostTraffic {
 public:
  HostTraffic(const World& world, const Grid& grid);
  // The hosts of the ranks, then recommendations.
  const std::vector<std::string>& said() const { return said_; }
  void before_step();
  // Bytes of all ranks since before_step(); nothing on one host. Collective.
  std::optional<std::int64_t> across_in_step();
  // "rank 0: 1.5 MB across, 6.0 within; rank 1: ..." for the last step. Collective; only rank 0 gets the
  // text.
  std::string by_rank();

 private:
  const World* world_;
  bool several_;
  std::vector<std::string> said_{};
  HostBytes before_{}, last_{};
};

HostTraffic::HostTraffic(const World& world, const Grid& grid) : world_(&world) {
  const Hosts hosts = hosts_of(world);
  several_ = hosts.count() > 1;
  if (!several_) return;
  said_ = said_of_hosts(grid, hosts);
  said_.insert(said_.begin(), hosts_text(grid, hosts));
}

void HostTraffic::before_step() {
  if (several_) before_ = host_bytes(*world_);
}

std::optional<std::int64_t> HostTraffic::across_in_step() {
  if (!several_) return std::nullopt;
  const HostBytes now = host_bytes(*world_);  // before what follows
  last_ = {.within = now.within - before_.within, .across = now.across - before_.across};
  const at::Tensor sum = at::full({1}, last_.across, at::kLong);
  Group(world_->group).all_reduce(sum);
  return sum.item<std::int64_t>();
}

std::string HostTraffic::by_rank() {
  if (!several_) return {};
  const at::Tensor all = Group(world_->group).all_gather(at::tensor({last_.across, last_.within}, at::kLong));
  std::string text;
  for (int rank = 0; rank < world_->size; ++rank) {
    const auto* bytes = all[rank].const_data_ptr<std::int64_t>();
    text += fmt::format("{}rank {}: {} bytes across hosts, {} within", rank == 0 ? "" : "; ", rank, bytes[0],
                        bytes[1]);
  }
  return text;
}

}  // namespace

struct Trainer::Impl {
  RunConfig config;
  World& world;
  TrainerHooks hooks;

  std::unique_ptr<Task> task{};
  TrainingState state{};
  std::shared_ptr<TaskModel> model{};
  std::optional<ModelUnits> units{};
  std::optional<Mesh> mesh{};
  std::optional<CutBatches> parts{};
  std::optional<Layout> placed{};  // layout of a model-parallel model
  std::int64_t parameters = 0;     // of the whole model
  std::string parameter_map{};     // text of rank 0
  at::Device device = at::kCPU;
  std::unique_ptr<DataParallel> layout{};
  std::unique_ptr<Optimizer> optimizer{};
  const ClipsGroups* clips = nullptr;  // the optimizer, where it is one (train.clip_groups)
  NormParts norm_parts{};              // train.part_norms
  std::unique_ptr<BatchLoader> loader{}, validation{};
  ForwardLossTerms forward{};
  LookAhead look_ahead{};
  std::unique_ptr<Normalizer> mean{};
  std::unique_ptr<RunFolder> folder{};  // rank 0 only, like the presenter
  std::unique_ptr<Presenter> presenter{};
  std::optional<ErrorText> file_error{};  // error of rank 0 with its files, until all ranks agree on it
  std::optional<MemoryWatch> memory{};    // run.memory
  std::optional<HostTraffic> hosts{};
  Outcome outcome{};
  std::int64_t tokens_seen = 0, saved_step = -1, evaluated_step = -1;
  std::int64_t rounds = 0;  // micro-batches of the last step; loaders vary
  double step_seconds = 0, exposed_seconds = 0;
  std::int64_t steps_timed = 0;
  Peak peak{};
  double flops = 0, all_flops = 0;  // of the model: of this step, of all steps since the start or resume
  std::string failed_check{};       // result of a failed check
  std::string learning_rates{};     // notice that a resume has changed them
  bool is_comparison = false;       // comparison of another run, which prints the notices
  std::optional<OperationsFile> operations{};

  void prepare() {
    Group& group = world.group;
    check_same_configuration(config, group);  // first, so that every rank is refused what one has alone
    check(config, world.size);
    device = device_of(config, world);
    on_rank_zero(group, [&] { folder = std::make_unique<RunFolder>(config); });
    task = make_task(config, group);
    ClippingOptimizer made = make_clipping_optimizer(config, group);
    optimizer = std::move(made.optimizer), clips = made.clips;
    mean = make_normalizer(config, world.size);
    mesh.emplace(world, grid_of(config, world.size));
    hosts.emplace(world, mesh->grid());
    parts.emplace(*task, *mesh, group);
    loader = task->make_loader(mesh->place(kSampleAxes), mesh->size(kSampleAxes));
    validation = task->make_validation_loader(mesh->place(kSampleAxes), mesh->size(kSampleAxes));
    if (config.run.memory) memory.emplace(device);
    if (config.checkpoint.resume.empty()) {
      state = fresh_state(*task);
      make_layout_of_model({}, {});
    } else {
      Resumed resumed = resume_run(*task, group);
      make_layout_of_model(resumed.directory, resumed.state.bucket_order);
      restore_optimizer(resumed.directory, resumed.state, *layout, *optimizer, cut_layout());
      state = resumed.state;
      learning_rates = schedule_change(state, config);
      state.config = to_toml(config);
      loader->seek(state.position);
      outcome.checkpoint = resumed.directory, saved_step = state.step;
    }
    if (memory) memory->follow_experts(config, *mesh, model->sharded_experts());
    model->attend_over(*mesh);
    forward = on_device(device, inside(units->root, model->loss()));
    if (hooks.wrap_forward) forward = hooks.wrap_forward(forward);
    look_ahead = model->look_ahead(forward);
    outcome.steps = state.step, outcome.skipped = state.skipped;
    const Baseline baseline = task->baseline(group);
    outcome.baseline = baseline.value;
    if (task->step_flops(*loader, loader->position()) > 0)
      peak = find_peak(config, scalar_type(config.train.dtype), device, group);
    on_rank_zero(group, [&] {
      folder->begin();
      presenter = std::make_unique<Presenter>(config, facts(baseline));
      const std::string unseen = validation ? "" : nothing_held_out(task->facts());
      const std::string no_peak = peak.flops_per_second > 0 ? "" : peak.source;
      for (const std::string& text : {folder->notice(), learning_rates, unseen, no_peak})
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

  // Loads the weights of `directory`; empty: the initial ones.
  void make_layout_of_model(const std::filesystem::path& directory,
                            const std::vector<std::string>& bucket_order) {
    ModelToLayOut made;
    on_every_rank(world.group, [&] { made = task->make_model_to_lay_out(directory); });
    model = made.model;
    const bool sharded = stage_of(config.parallel.strategy) == 3;
    if (sharded && made.check_values) on_rank_zero(world.group, made.check_values);
    for (const auto& [name, tensor] : model->named()) parameters += tensor.numel();
    check_clip_groups(config, model->named());
    norm_parts = norm_parts_of(config, model->named());
    if (held_together(config)) placed.emplace(model->cut(*mesh));
    if (made.fill && !sharded)
      on_every_rank(world.group, [&] { give_values(model->named(), made.fill, cut_layout(), device); });
    model->to(device);
    units = model->make_units();
    units->initialize = made.fill;
    if (world.rank == 0)
      parameter_map = to_text(lay_out(config, model->named(), *units, world.group, 0,
                                      placed ? placed->placements() : Layout::Named{}));
    layout = make_layout(config, model->named(), *units, *mesh, cut_layout(), bucket_order, device);
  }

  const Layout* cut_layout() const { return placed ? &*placed : nullptr; }

  RunFacts facts(const Baseline& baseline) const {
    return RunFacts{.ranks = world.size,
                    .layout = describe_layout(config, world.group),
                    .device = device.is_cpu() ? "cpu" : device.str() + " on rank 0",
                    .parameters = parameters,
                    .parameter_map = parameter_map,
                    .task = task->facts(),
                    .baseline = baseline,
                    .peak = peak,
                    .steps_per_epoch = loader->steps_per_epoch(),
                    .first_step = state.step,
                    .hosts = hosts->said().empty() ? "" : hosts->said()[0]};
  }

  // Makes every step until the last, a stop or a divergence. After a step, ranks act only on its report and
  // the configuration. Both are the same on all ranks, so all enter the same collectives.
  void loop() {
    const std::int64_t total = config.train.steps;
    const Schedule schedule = make_schedule(config);
    StepOptions options =
        step_options(config, look_ahead, memory ? memory->remembering(model->tally()) : model->tally());
    options.norm_parts = norm_parts;
    options.capture =
        options.capture && !options.tally && !memory;  // experts' rows vary; memory is asked in mid-pass
    if (const Pipeline* pipeline = model->pipeline()) options = through(*pipeline, std::move(options));
    Step step(forward, *layout, *mean, *optimizer, std::move(options));
    while (state.step < total) {
      const auto start = Clock::now();
      const double exposed_before = exposed_so_far();
      if (memory) memory->before_step(*layout);
      hosts->before_step();
      optimizer->set_learning_rate(schedule.at(state.step));
      if (peak.flops_per_second > 0) flops = task->step_flops(*loader, loader->position());
      const MicroBatches own = parts->of_step(loader->next());
      if (presenter && !parts->first_step().empty()) presenter->notice("first step: " + parts->first_step());
      const StepReport report = step(own, StopSignals::requested() || file_error);
      if (report.updated) model->after_update(report.tally, *layout);
      const double seconds = seconds_since(start), exposed = exposed_so_far() - exposed_before;
      if (memory)
        memory->after_step(*layout, *optimizer, plan().share_parameters, report.census.global_micro_batches);
      const bool diverged = !report.finite && config.train.on_non_finite == "stop";
      if (!report.finite) outcome.not_finite = first_text(world.group, model->take_not_finite());
      if (presenter && !diverged && !report.finite && !outcome.not_finite.empty())
        presenter->notice("first not finite: " + outcome.not_finite);
      if (!diverged) count(report);
      show(report, seconds, exposed, total, diverged);
      if (diverged) {
        outcome.end = Outcome::End::kDiverged;
        return;
      }
      if (!checked()) return;
      if (report.census.stop_requested) {
        outcome.end = Outcome::End::kStopped;
        save();
        return;
      }
      if (due(config.train.evaluate_every, state.step, total)) measure();
      if (due(config.checkpoint.every, state.step, total)) save();
    }
    if (evaluated_step != state.step) measure();  // a resume of a run that had made all its steps
  }

  double exposed_so_far() const { return layout->exposed_seconds() + mesh->waited_apart(); }

  void count(const StepReport& report) {
    ++state.step;
    state.position = loader->position(), state.updates = optimizer->updates();
    if (!report.finite) ++state.skipped;
    if (report.finite && !report.updated) ++outcome.empty;
    outcome.steps = state.step, outcome.skipped = state.skipped;
  }

  void show(const StepReport& report, double seconds, double exposed, std::int64_t total, bool diverged) {
    tokens_seen += report.census.tokens, rounds = report.census.global_micro_batches;
    ++steps_timed, step_seconds += seconds, exposed_seconds += exposed, all_flops += flops;
    outcome.exposed = exposed_seconds / step_seconds, outcome.loss = report.loss;
    outcome.tokens_per_second = static_cast<double>(tokens_seen) / step_seconds;
    if (peak.flops_per_second > 0) outcome.mfu = all_flops / step_seconds / peak.flops_per_second;
    StepEvent event{.step = state.step + (diverged ? 1 : 0),
                    .total = total,
                    .report = report,
                    .learning_rate = optimizer->learning_rate(),
                    .seconds = seconds,
                    .exposed_seconds = exposed,
                    .tokens_per_second = static_cast<double>(report.census.tokens) / seconds,
                    .mfu = {},
                    .expert_loads = {},
                    .clipped = clips && report.updated ? clips->last() : std::vector<ClippedGroup>{},
                    .bytes_across_hosts = hosts->across_in_step()};
    if (report.finite) event.expert_loads = model->expert_loads(report.tally);
    if (peak.flops_per_second > 0) event.mfu = flops / seconds / peak.flops_per_second;
    present([&] { presenter->step(event); });
    if (hooks.on_step) hooks.on_step(event);
  }

  // Checks run before saving, so no checkpoint of a run that is known to be wrong is written.
  bool checked() {
    if (!hooks.check ||
        !(divides(config.verify.every, state.step) || divides(config.verify.checksums_every, state.step)))
      return true;
    RunningRun running{
        {config, world, *task, *model, cut_layout()}, *layout, state.step, forward, look_ahead};
    failed_check = hooks.check(running);
    if (!failed_check.empty()) outcome.end = Outcome::End::kRefuted;
    return failed_check.empty();
  }

  void measure() {
    evaluated_step = state.step;
    auto evaluation = evaluate(
        validation.get(), [this](const MicroBatches& whole) { return parts->of(whole); }, forward, *mean,
        *layout, state.step);
    outcome.figures = task->figures(*model, *layout);
    if (evaluation) outcome.validation_loss = evaluation->loss;
    if (!evaluation && outcome.figures.empty()) return;
    if (!evaluation) evaluation = {.step = state.step};
    evaluation->figures = outcome.figures;
    present([&] { presenter->evaluation(*evaluation); });
    if (hooks.on_evaluation) hooks.on_evaluation(*evaluation);
  }

  void save() {
    check_run_folder();
    // A deleted run folder is not recreated. A problem with a log alone does not prevent a checkpoint.
    throw_agreed(world.group, file_error && !folder->is_there() ? file_error : std::nullopt);
    try {
      if (saved_step != state.step) write_checkpoint();
    } catch (const AgreedConfigError&) {
      check_run_folder();                     // the folder may have been deleted meanwhile
      throw_agreed(world.group, file_error);  // what came first
      throw;
    }
    throw_agreed(world.group, file_error);
  }
  void write_checkpoint() {
    state.bucket_order = layout->bucket_order();
    outcome.checkpoint = save_checkpoint(
        save_options(config, cut_layout()), state,
        [this](const std::filesystem::path& directory, const TensorStream& weights) {
          model->write(directory, weights);
        },
        *layout, *optimizer);
    saved_step = state.step;
    if (presenter && !file_error) presenter->saved(outcome.checkpoint);
    if (hooks.on_checkpoint) hooks.on_checkpoint(outcome.checkpoint);
  }

  DataParallelPlan plan() const { return plan_of(config, *layout, rounds, world.group); }

  // Makes the run that a finished one is compared with, by the same loop in a folder of its own.
  std::optional<Outcome> compare() {
    std::optional<RunConfig> other = task->comparison();
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
    outcome.balance = parts->balance();
    if (memory) outcome.to_experts = memory->use().to_experts;
    const std::optional<Outcome> comparison = finished ? compare() : std::nullopt;
    const bool to_show = finished && std::isfinite(outcome.loss);
    std::shared_ptr<const void> whole;
    if (finished && (hooks.on_finish || task->shows_model())) whole = layout->whole_parameters();
    if (finished && hooks.on_finish) {
      FinishedRun run{config, world, *task, *model, cut_layout()};
      run.interrupted = StopSignals::requested;
      if (steps_timed > 0) run.step_seconds = step_seconds / static_cast<double>(steps_timed);
      run.micro_batches = rounds;
      if (presenter) run.say = [this](const std::string& text) { presenter->line(text); };
      outcome.tables = hooks.on_finish(run);
    }
    outcome.tables = tables_of_rank_zero(world.group, std::move(outcome.tables));
    if (comparison && comparison->exit_status() != 0)
      outcome.tables.push_back({"Comparison", "the run to compare with failed", {}, {}, /*passed=*/false});
    std::vector<Showing::Picture> stages;
    if (const Pipeline* pipeline = model->pipeline())
      stages = show_stages(*pipeline, *mesh, config.run.directory);
    const std::string bytes =
        memory ? memory_table(memory->use(), plan(), config, *layout, world.group) + hosts->by_rank() : "";
    Showing showing;
    const auto show = [&] { showing = task->show(*model, outcome, comparison ? &*comparison : nullptr); };
    if (to_show && placed) on_every_rank(world.group, show);  // its forward takes all of them
    on_rank_zero(world.group, [&] {
      if (memory) presenter->notice("memory and traffic of the last step\n" + bytes);
      if (to_show && !placed)
        show();
      else if (finished && !to_show)
        presenter->notice("the last step's loss is not finite: there is nothing to show of the model");
      outcome.sample = showing.text;
      showing.pictures.insert(showing.pictures.end(), stages.begin(), stages.end());
      if (!finished) presenter->notice(early_end(outcome, config, world.size, failed_check));
      outcome.report = presenter->finish(outcome, showing);
    });
  }
};

Trainer::Trainer(const RunConfig& config, World& world, TrainerHooks hooks)
    : impl_(new Impl{.config = config, .world = world, .hooks = std::move(hooks)}) {}
Trainer::~Trainer() = default;

Outcome Trainer::run() {
  StopSignals signals;
  try {
    impl_->prepare();
    impl_->loop();
    impl_->finish();
  } catch (const AgreedConfigError&) {
    throw;
  } catch (const std::exception& error) {
    impl_->world.group.poison(error.what());
    if (const auto* lost = dynamic_cast<const PeerError*>(&error); lost && impl_->operations)
      rethrow(*lost, impl_->config, impl_->world.size, impl_->state.step, impl_->outcome.checkpoint);
    throw;
  }
  return impl_->outcome;
}

}  // namespace isograd
