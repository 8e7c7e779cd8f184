// The decoder language model on text.
#include <fmt/ranges.h>

#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "model/hf_weights.hpp"
#include "train/build.hpp"
#include "train/compose.hpp"
#include "train/evaluate.hpp"
#include "train/rank_zero.hpp"
#include "train/router_losses.hpp"
#include "train/router_plain.hpp"
#include "train/selection_bias.hpp"
#include "train/task.hpp"
#include "train/utilisation.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

class TextModel : public TaskModel {
 public:
  TextModel(std::shared_ptr<DecoderLM> model, const RunConfig& config,
            std::shared_ptr<const Tokenizer> tokenizer)
      : model_(std::move(model)), config_(config), tokenizer_(std::move(tokenizer)) {
    if (model_->config().experts.count > 0)
      routers_ = std::make_shared<RouterLosses>(config_, model_->config());
  }

  DecoderLM& decoder() { return *model_; }
  std::vector<std::pair<std::string, at::Tensor>> named() override { return model_->named(); }
  ModelUnits make_units() override { return model_units(*model_, config_); }
  ForwardLossTerms loss() override { return forward_loss(*model_, config_, routers_); }
  LookAhead look_ahead(const ForwardLossTerms& forward) override {
    if (!routers_ || !routers_->looks_ahead()) return {};
    return [routers = routers_, forward](const MicroBatches& micro_batches, const Group& data) {
      routers->look_ahead(micro_batches, data, forward);
    };
  }
  DealtExperts dealt_experts() const override {
    const DecoderConfig& shape = model_->config();
    DealtExperts dealt{.experts = shape.experts.count, .hidden = shape.hidden};
    const auto& of = model_->seams().stages;
    for (const auto& stage : of ? of() : std::vector<ModelSeams::Stage>{{.count = shape.layers}})
      for (std::int64_t layer = stage.begin; layer < stage.begin + stage.count; ++layer)
        dealt.layers += shape.has_experts(layer);
    return dealt;
  }
  Tally tally() override {
    if (!routers_) return {};
    routers_->count_choices();
    return [routers = routers_] { return routers->take_choices(); };
  }
  void after_update(const std::vector<double>& tally, DataParallel& layout) override {
    if (!model_->config().experts.sigmoid || config_.loss.selection_bias_rate == 0) return;
    if (!bias_) bias_.emplace(*model_, layout, config_.loss.selection_bias_rate);
    bias_->move(tally);
  }
  std::vector<ExpertLoad> expert_loads(const std::vector<double>& tally) const override {
    return routers_ ? routers_->loads_of(tally) : std::vector<ExpertLoad>();
  }
  std::string take_not_finite() override { return routers_ ? routers_->take_not_finite() : std::string(); }
  bool choose_experts(const DecoderLM::ChooseExperts& choose) override {
    if (!routers_) return false;
    model_->set_choice_of_experts(choose);
    return true;
  }
  void to(at::Device device) override {
    if (!model_->output_weight().is_meta()) model_->to(device);
  }
  at::Tensor outputs(const Batch& batch) override { return model_->logits(batch); }
  void attend_over(const Mesh& mesh) override {
    if (routers_ && !over_stages()) routers_->sum_over(mesh.counting());
    isograd::attend_over(*model_, mesh);
  }
  Layout::Named placements(const Grid& grid) override { return decoder_placements(*model_, config_, grid); }
  Layout cut(const Mesh& mesh) override {
    ComposedDecoder made = compose_decoder(*model_, config_, mesh);
    pipeline_ = made.pipeline;
    if (over_stages()) {
      AxisSet axes = data_axes(mesh.grid());
      axes.insert(kStageAxis);
      routers_->sum_over_stages(mesh.along(axes, "routers"));
    }
    return std::move(made.layout);
  }
  const Pipeline* pipeline() const override { return pipeline_.get(); }
  void write(const fs::path& directory, const TensorStream& weights) override {
    write_hf(directory, model_->config(), weights);
    if (tokenizer_) tokenizer_->write(directory);
  }

 private:
  // Whether router statistics are those of all stages. Of one micro-batch they are not: its stages compute it
  // one after another.
  bool over_stages() const { return routers_ && pipeline_ && routers_->looks_ahead(); }

  std::shared_ptr<DecoderLM> model_;
  RunConfig config_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<RouterLosses> routers_{};  // null: a model without experts
  std::shared_ptr<Pipeline> pipeline_{};     // null: one stage
  std::optional<SelectionBias> bias_{};      // once something has been trained
};

ShapeKeys shape_keys(const DecoderConfig& shape) {
  ShapeKeys keys;
  const auto add = [&](const char* key, const auto& value) {
    keys.emplace_back(key, fmt::format("{}", value));
  };
  add("model.family", shape.family);
  add("model.vocabulary", shape.vocabulary);
  add("model.hidden", shape.hidden);
  add("model.layers", shape.layers);
  add("model.heads", shape.heads);
  add("model.key_value_heads", shape.key_value_heads);
  add("model.head_dim", shape.head_dim);
  add("model.feed_forward", shape.feed_forward);
  add("model.experts", shape.experts.count);
  add("model.experts_per_token", shape.experts.count > 0 ? shape.experts.per_token : 0);
  add("model.expert_feed_forward", shape.experts.feed_forward);
  add("model.normalise_experts", shape.experts.count == 0 || shape.experts.normalise);
  add("model.expert_groups", shape.experts.groups);
  add("model.expert_groups_per_token", shape.experts.groups_per_token);
  add("model.expert_scale", shape.experts.scale);
  add("model.shared_expert_feed_forward", shape.experts.shared_feed_forward);
  add("model.experts_every (layers without experts)",
      fmt::format("{}", fmt::join(shape.experts.dense_layers, " ")));
  add("model.max_positions", shape.max_positions);
  add("model.rope_theta", shape.rope_theta);
  add("model.rope_scaling.kind", shape.rope_scaling.kind);
  add("model.rope_scaling.factor", shape.rope_scaling.factor);
  add("model.attention_bias", shape.attention_bias);
  add("model.output_bias", shape.output_bias);
  add("model.mlp_bias", shape.mlp_bias);
  add("model.query_key_norm", shape.query_key_norm);
  add("model.norm_epsilon", shape.norm_epsilon);
  add("model.tied_output", shape.tied_output);
  add("model.pad", shape.pad);
  return keys;
}

// bos and eos of a model that has none are the tokenizer's, which it is trained with.
DecoderConfig with_marks(DecoderConfig shape, const Tokenizer* tokenizer) {
  if (tokenizer && shape.bos < 0) shape.bos = tokenizer->bos();
  if (tokenizer && shape.eos < 0) shape.eos = tokenizer->eos();
  return shape;
}

// With the corpus's bos and eos. ConfigError when a token of the corpus has no row in the embedding, or packs
// are longer than the model's positions.
DecoderConfig model_shape(const RunConfig& config, const Corpus& corpus) {
  const bool loaded = !config.model.load.empty();
  const DecoderConfig shape = with_marks(configured_shape(config), corpus.tokenizer.get());
  const std::int64_t needed =
      std::max<std::int64_t>(static_cast<std::int64_t>(corpus.tokens->max_token()) + 1,
                             corpus.tokenizer ? corpus.tokenizer->vocabulary() : 0);
  const std::string where = loaded ? config.model.load + " (model.load)" : "model.vocabulary";
  if (needed > shape.vocabulary)
    refuse(where, fmt::format("a vocabulary of {}", shape.vocabulary),
           fmt::format("at least {}, the tokens that the corpus and its tokenizer use", needed),
           loaded ? "Use the tokenizer that these weights were trained with (data.tokenizer)"
                  : fmt::format("Set model.vocabulary = {}", needed));
  // Dynamic scaling exists for documents beyond max_positions; a window may not slide.
  const bool beyond = shape.rope_scaling.kind == "dynamic";
  if (config.data.pack_length > shape.max_positions && !beyond)
    refuse("data.pack_length", std::to_string(config.data.pack_length),
           fmt::format("at most {}, the model's positions", shape.max_positions),
           fmt::format("Set data.pack_length = {}{}", shape.max_positions,
                       loaded ? "; the model of model.load has no more positions"
                              : fmt::format(", or model.max_positions = {}", config.data.pack_length)));
  if (shape.sliding_window > 0 && config.data.pack_length > shape.sliding_window)
    refuse("data.pack_length", std::to_string(config.data.pack_length),
           fmt::format("at most {}, the sliding window of {}: attention within a window is not supported",
                       shape.sliding_window, config.model.load),
           "Shorten the packs");
  check(shape);
  return shape;
}

constexpr std::int64_t kMicroPack = 64;  // tokens of a pack of Task::micro_sized()

class TextTask : public Task {
 public:
  TextTask(const RunConfig& config, Corpus corpus)
      : Task(config), corpus_(std::move(corpus)), shape_(model_shape(config, corpus_)) {}

  std::unique_ptr<Task> under(const RunConfig& config) const override {
    return std::make_unique<TextTask>(config, corpus_);
  }

  std::unique_ptr<BatchLoader> make_loader(int rank, int size) const override {
    return training_loader(rank, size);
  }

  std::unique_ptr<BatchLoader> make_validation_loader(int rank, int size) const override {
    if (corpus_.split.validation.empty()) return nullptr;
    LoaderOptions options = loader_options(rank, size);
    options.packs_per_step = config().train.evaluate_packs;
    options.shuffle = false;  // in document order
    options.read_ahead = false;
    return std::make_unique<TextLoader>(corpus_.tokens, corpus_.split.validation, options);
  }

  CutOptions cut_options() const override { return {.token_cost = 6 * shape_.hidden}; }

  std::pair<std::int64_t, std::int64_t> heads() const override {
    const DecoderConfig& shape = shape_;
    return {shape.heads, shape.key_value_heads};
  }

  TaskFacts facts() const override {
    const RunConfig& c = config();
    return {.perplexity = c.loss.kind == "token_mean" && !normalises_by_replica(c),
            .batch = fmt::format("{} packs of {} tokens", c.batch.packs_per_step, c.data.pack_length),
            .micro_batch = fmt::format("{} packs", c.batch.packs_per_micro_batch),
            .train_documents = static_cast<std::int64_t>(corpus_.split.train.size()),
            .validation_documents = static_cast<std::int64_t>(corpus_.split.validation.size()),
            .num_tokens = corpus_.tokens->num_tokens(),
            .tokenizer = corpus_.tokens->tokenizer_name()};
  }

  std::string describe_step(std::int64_t step, int ranks) const override {
    const auto loader = training_loader(0, ranks);
    const LoaderPosition position = position_of_step(*loader, step);
    return fmt::format("step {}: step {} of {} of epoch {}\n", step, position.step + 1,
                       loader->steps_per_epoch(), position.epoch + 1) +
           describe_packs(loader->packs(position), *corpus_.tokens, corpus_.tokenizer.get());
  }

  double step_flops(const BatchLoader& loader, LoaderPosition position) const override {
    double tokens = 0, pairs = 0;
    for (const PackContents& pack : static_cast<const TextLoader&>(loader).packs(position))
      for (const auto& part : pack.parts) {
        const auto length = static_cast<double>(part.end - part.begin);
        tokens += length;
        pairs += length * (length + 1) / 2;  // a token attends to those before it and to itself
      }
    return decoder_flops(shape_, tokens, pairs);
  }

  Baseline baseline(Group& group) const override {
    return {
        .name = "unigram entropy", .of = "of the training text", .value = unigram_entropy(corpus_, group)};
  }

  std::shared_ptr<TaskModel> make_model(at::ScalarType dtype) const override {
    const DecoderConfig& shape = shape_;
    if (!config().model.load.empty()) {
      const HfWeights weights(config().model.load, dtype);
      return with(weights.model(marked(weights.config())));
    }
    return with(std::make_shared<DecoderLM>(shape, dtype, static_cast<std::uint64_t>(config().run.seed)));
  }

  std::shared_ptr<TaskModel> make_model_without_values() const override {
    return with(DecoderLM::without_values(shape_, scalar_type(config().train.dtype)));
  }

  std::shared_ptr<TaskModel> make_blank_model(at::ScalarType dtype) const override {
    return with(std::make_shared<DecoderLM>(shape_, dtype, 0));
  }

  ModelToLayOut make_model_to_lay_out(const fs::path& directory) const override {
    const fs::path from = directory.empty() ? fs::path(config().model.load) : directory;
    const at::ScalarType dtype = scalar_type(config().train.dtype);
    if (from.empty()) {
      const auto model = DecoderLM::without_values(shape_, dtype);
      return {.model = with(model),
              .fill = [model, seed = static_cast<std::uint64_t>(config().run.seed)](const std::string& name,
                                                                                    at::Tensor& values) {
                model->initialize(name, values, seed);
              }};
    }
    const auto weights = std::make_shared<const HfWeights>(from, dtype);
    return {.model = with(DecoderLM::without_values(marked(weights->config()), dtype)),
            .fill = [weights](const std::string& name, at::Tensor& values) { weights->fill(name, values); },
            .check_values = [weights] { weights->check_values(); }};
  }

  ShapeKeys shape() const override { return shape_keys(shape_); }
  ShapeKeys saved_shape(const fs::path& directory) const override {
    return shape_keys(read_hf_config(directory));
  }

  bool shows_model() const override { return corpus_.tokenizer && config().sample.tokens > 0; }
  Showing show(TaskModel& model, const Outcome&, const Outcome*) const override {
    if (!shows_model()) return {};
    return {.text = sample_text(static_cast<TextModel&>(model).decoder(), *corpus_.tokenizer,
                                config().sample.prompt,
                                {.max_tokens = config().sample.tokens,
                                 .temperature = config().sample.temperature,
                                 .seed = static_cast<std::uint64_t>(config().run.seed)})};
  }

  std::string loss_name() const override { return "cross_entropy"; }
  std::vector<PlainTerm> plain_terms() const override {
    return plain_router_terms(config(), shape_, [](TaskModel& model) -> DecoderLM& {
      return static_cast<TextModel&>(model).decoder();
    });
  }

  RunConfig micro_sized(int ranks, std::int64_t step) const override {
    RunConfig micro = config();
    micro.batch.packs_per_step = ranks + 1;
    micro.batch.packs_per_micro_batch = 1;
    micro.data.pack_length = std::min(micro.data.pack_length, kMicroPack);
    micro.run.seed += step;
    return micro;
  }

 private:
  std::unique_ptr<TextLoader> training_loader(int rank, int size) const {
    LoaderOptions options = loader_options(rank, size);
    options.packs_per_step = config().batch.packs_per_step;
    options.shuffle_packs = config().data.shuffle_packs;
    return std::make_unique<TextLoader>(corpus_.tokens, corpus_.split.train, options);
  }
  LoaderOptions loader_options(int rank, int size) const {
    return {.pack_length = config().data.pack_length,
            .packs_per_micro_batch = config().batch.packs_per_micro_batch,
            .seed = static_cast<std::uint64_t>(config().run.seed),
            .rank = rank,
            .size = size};
  }
  DecoderConfig marked(const DecoderConfig& shape) const {
    return with_marks(shape, corpus_.tokenizer.get());
  }
  std::shared_ptr<TaskModel> with(std::shared_ptr<DecoderLM> model) const {
    return std::make_shared<TextModel>(std::move(model), config(), corpus_.tokenizer);
  }

  Corpus corpus_;
  DecoderConfig shape_;
};

}  // namespace

std::shared_ptr<TaskModel> text_model_without_values(const RunConfig& config) {
  const DecoderConfig shape = configured_shape(config);
  check(shape);
  return std::make_shared<TextModel>(DecoderLM::without_values(shape, scalar_type(config.train.dtype)),
                                     config, nullptr);
}

std::unique_ptr<Task> make_text_task(const RunConfig& config, Group& group) {
  Corpus corpus = open_corpus(config, group);
  const std::string& prompt = config.sample.prompt;
  std::unique_ptr<Task> task;
  on_every_rank(group, [&] {
    if (!prompt.empty() && !corpus.tokenizer)
      refuse("sample.prompt", "a prompt, and data.shards of a tokenizer that is not known here",
             "no prompt: nothing can be encoded or generated as text", "Leave sample.prompt out");
    if (!prompt.empty())
      check_prompt(*corpus.tokenizer, prompt, model_shape(config, corpus), "sample.prompt");
    task = std::make_unique<TextTask>(config, std::move(corpus));
  });
  return task;
}

}  // namespace isograd
