// The model of a scorer's run: the perceptron, the loss that it is trained by, the files of both.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "isograd/error.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/safetensors.hpp"
#include "train/own_model.hpp"
#include "train/scorer_task.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr OwnFamily kScorerFamily{.type = "isograd_scorer", .run = "a scorer's run"};
constexpr const char* kQueueFile = "ranking.safetensors";  // what the loss keeps from step to step

ShapeFields fields(ScorerShape& shape) {
  return {{"features", &shape.features},
          {"hidden", &shape.hidden},
          {"layers", &shape.layers},
          {"output_bias", &shape.output_bias}};
}

// Rules for pairs of layers: the first is column parallel, the second row parallel. A layer without a
// partner is computed by every rank.
std::vector<CutRule> rules_of(const ScorerShape& shape, const Grid& grid) {
  std::vector<CutRule> rules;
  if (!grid.has("tp") || grid.size({"tp"}) == 1) return rules;
  for (std::int64_t layer = 0; layer + 1 <= shape.layers; layer += 2) {
    rules.push_back(cut_along(fmt::format("layers.{}.*", layer), 0));
    rules.push_back(cut_along(fmt::format("layers.{}.weight", layer + 1), 1));
  }
  return rules;
}

template <typename Options>
Options with_base(const RunConfig& config) {
  Options options;
  options.queue_size = config.ranking.queue_size;
  if (config.ranking.temperature > 0) options.temperature = config.ranking.temperature;
  options.seed = static_cast<std::uint64_t>(config.run.seed);
  return options;
}

}  // namespace

ScorerShape scorer_shape(const RunConfig& config, const ScorerData& data, const std::string& loss) {
  const bool differences_alone = loss == "smooth_ap" || loss == "pauc_pairwise";
  return {.features = data.features.size(1),
          .hidden = config.model.scorer_units,
          .layers = config.model.scorer_layers,
          .output_bias = !differences_alone};
}

ScorerShape read_scorer_shape(const fs::path& directory) {
  ScorerShape shape;
  read_own_shape(directory, kScorerFamily, fields(shape));
  return shape;
}

ScorerModel make_scorer(std::shared_ptr<Scorer> scorer) {
  ModelUnits units{.root = UnitHandle([scorer] {
                     std::vector<at::Tensor> all;
                     for (auto& [name, tensor] : scorer->named()) all.push_back(tensor);
                     return all;
                   }),
                   .blocks = {}};
  return {scorer, units};
}

ScorerModel make_scorer(const RunConfig& config, const ScorerData& data, const std::string& loss,
                        at::ScalarType dtype) {
  return make_scorer(std::make_shared<Scorer>(scorer_shape(config, data, loss), dtype,
                                              static_cast<std::uint64_t>(config.run.seed)));
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

RankedTableModel::RankedTableModel(ScorerModel model, const ScorerShape& shape, const RunConfig& config,
                                   std::shared_ptr<const ScorerData> data, Group group)
    : model_(std::move(model)),
      shape_(shape),
      name_(config.ranking.loss),
      data_(std::move(data)),
      group_(std::move(group)),
      training_(make_ranking_loss(config, name_, group_)) {
  RunConfig without_queue = config;
  without_queue.ranking.queue_size = 0;
  held_out_ = make_ranking_loss(without_queue, name_, group_);
  if (held_out_) held_out_->eval();
}

ForwardLossTerms RankedTableModel::loss() {
  const ForwardLossTerms training = scorer_loss(model_, *data_, name_, training_, group_);
  if (repeatable_ || !training_) return training;
  // Rows of an evaluation are ranked among themselves and do not change the queue.
  return [training, held_out = scorer_loss(model_, *data_, name_, held_out_, group_)](const Batch& batch) {
    return at::GradMode::is_enabled() ? training(batch) : held_out(batch);
  };
}

std::vector<std::pair<std::string, at::Tensor>> RankedTableModel::buffers() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  if (training_)
    for (auto& [buffer, value] : training_->state()) all.emplace_back("loss." + buffer, value);
  return all;
}

at::Tensor RankedTableModel::outputs(const Batch& batch) {
  return model_.scorer->scores(data_->features.index_select(0, batch.tokens));
}

void RankedTableModel::attend_over(const Mesh& mesh) {
  group_ = mesh.counting();
  for (const auto& loss : {training_, held_out_})
    if (loss) loss->group() = group_;
}

Layout::Named RankedTableModel::placements(const Grid& grid) {
  return cut_placements(named(), grid, rules_of(shape_, grid));
}

Layout RankedTableModel::cut(const Mesh& mesh) {
  const auto rules = rules_of(shape_, mesh.grid());
  const Layout layout = isograd::cut(named(), mesh, rules);
  if (!rules.empty())
    model_.scorer->set_hooks(
        {.copy_to_tp = [tp = tensor_group(mesh)](const at::Tensor& x) { return copy_to_tp(tp, x); },
         .reduce_from_tp =
             [tp = tensor_group(mesh)](const at::Tensor& part) { return reduce_from_tp(tp, part); }});
  return layout;
}

void RankedTableModel::fix_queue(const QueuedRows& queued) {
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

void RankedTableModel::write(const fs::path& directory, const TensorStream& weights) {
  ScorerShape shape = shape_;
  write_own_model(directory, kScorerFamily, fields(shape), weights);
  if (training_) write_safetensors(directory / kQueueFile, training_->state());
}

void RankedTableModel::read(const fs::path& directory, bool with_queue) {
  OwnWeights(directory).copy_into(named());
  if (!with_queue || !training_) return;
  const auto saved = read_safetensors(directory / kQueueFile);
  training_->load_state({saved.begin(), saved.end()});
}

ShapeKeys scorer_shape_keys(const ScorerShape& shape) {
  return {{"the number of features (data.table)", fmt::format("{}", shape.features)},
          {"model.scorer_units", fmt::format("{}", shape.hidden)},
          {"model.scorer_layers", fmt::format("{}", shape.layers)}};
}

}  // namespace isograd
