#include "serve/models/trained_model.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cmath>

#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "layout/flat.hpp"
#include "layout/readings.hpp"
#include "model/safetensors.hpp"
#include "train/whole_tensors.hpp"

namespace isograd::serve {
namespace fs = std::filesystem;
namespace {

constexpr const char* kGradientFile = "gradient.safetensors";
constexpr const char* kGradient = "gradient";

struct Settings {
  Normalise normalise = Normalise::kNone;
  double alpha = 32;
};

// ConfigError: a key "isograd.*" that does not exist, a value that does not fit.
Settings settings_of(const std::map<std::string, std::string>& metadata) {
  static const std::map<std::string, Normalise> modes = {{"none", Normalise::kNone},
                                                         {"tokens", Normalise::kTokens},
                                                         {"weights", Normalise::kWeights},
                                                         {"sequences", Normalise::kSequences}};
  Settings settings;
  for (const auto& [key, value] : metadata) {
    if (!key.starts_with("isograd.")) continue;
    const std::string where = "user_metadata " + key;
    if (key == "isograd.normalise") {
      const auto mode = modes.find(value);
      if (mode == modes.end())
        refuse(where, "'" + value + "'", "none, tokens, weights or sequences", "Change it");
      settings.normalise = mode->second;
    } else if (key == "isograd.alpha") {
      char* end = nullptr;
      settings.alpha = std::strtod(value.c_str(), &end);
      if (value.empty() || *end != 0 || !(settings.alpha > 0) || !std::isfinite(settings.alpha))
        refuse(where, "'" + value + "'", "a number above 0", "Change it");
    } else {
      refuse(where, "an unknown key", "isograd.normalise, isograd.alpha", "Leave it out");
    }
  }
  return settings;
}

std::string dtype_name(at::ScalarType type) {
  return type == at::kDouble ? "float64" : type == at::kBFloat16 ? "bfloat16" : "float32";
}

// The forwards and backwards of its life are those of an adapted model.
struct Adapted {
  Adapted(DecoderLM& of, const Adapter* adapter) : model(of) { model.set_adapter(adapter); }
  ~Adapted() { model.set_adapter(nullptr); }
  Adapted(const Adapted&) = delete;
  Adapted& operator=(const Adapted&) = delete;
  DecoderLM& model;
};

std::vector<Array> arrays_of(const at::Tensor& log_probabilities, const PackedRows& rows) {
  const at::Tensor flat = log_probabilities.detach().to(at::kCPU, at::kFloat).contiguous();
  const auto* from = flat.const_data_ptr<float>();
  const std::int64_t columns = flat.dim() == 2 ? flat.size(1) : 1;
  std::vector<Array> arrays;
  for (std::size_t f = 0; f + 1 < rows.batch.cu_seqlens.size(); ++f) {
    const std::int64_t begin = rows.batch.cu_seqlens[f], end = rows.batch.cu_seqlens[f + 1];
    Array& array = arrays.emplace_back();
    array.shape = {end - begin};
    if (flat.dim() == 2) array.shape.push_back(columns);
    array.numbers.assign(from + begin * columns, from + end * columns);
  }
  return arrays;
}

std::int64_t bytes_in(const fs::path& directory) {
  std::int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.is_regular_file()) bytes += static_cast<std::int64_t>(entry.file_size());
  return bytes;
}

}  // namespace

TrainedModel::TrainedModel(std::shared_ptr<Base> base, const SavedModel& saved, const fs::path& directory,
                           bool optimizer, at::ScalarType dtype, std::int64_t micro_batch_tokens)
    : base_(std::move(base)),
      created_(saved.created),
      dtype_(dtype),
      micro_batch_tokens_(micro_batch_tokens) {
  const Settings settings = settings_of(created_.metadata);
  normalise_ = settings.normalise;
  const LoraShape& lora = created_.lora;
  if (lora.rank == 0) {
    if (!lora.attention || !lora.mlp || !lora.unembed)
      refuse("lora_config", "rank 0, the whole weights, without some of them", "all of them",
             "Give a rank above 0");
    whole_ = read_hf(directory.empty() ? base_->info.directory : directory, dtype);
  } else {
    const LoraConfig config{.rank = lora.rank,
                            .alpha = settings.alpha,
                            .attention = lora.attention,
                            .mlp = lora.mlp,
                            .unembed = lora.unembed};
    check(config);
    adapter_ = directory.empty()
                   ? std::make_shared<LoraAdapter>(base_->shape(), config, dtype, lora.seed.value_or(0))
                   : read_peft(directory, base_->shape(), dtype);
    if (created_.metadata.contains("isograd.alpha") && adapter_->config().alpha != settings.alpha)
      refuse("user_metadata isograd.alpha", fmt::format("{}", settings.alpha),
             fmt::format("{}, that of the saved adapter", adapter_->config().alpha), "Leave it out");
  }
  const NamedTensors named = whole_ ? whole_->named() : adapter_->named();
  TrainableParameters parameters = trainable_parameters(named);
  for (NamedParameter& parameter : parameters) parameter.decays = true;  // as torch.optim.AdamW
  layout_ = bucketed(std::move(parameters), Mesh(Group::solo()));
  optimizer_ = adamw({});
  if (optimizer) restore(saved, directory);
}

void TrainedModel::require_sound() const {
  if (broken_)
    refuse("this model", "a call that failed on the server in the middle of its change",
           "whole calls and updates", "Create a model from its last checkpoint");
}

RowLossResult TrainedModel::losses(const PackedRows& rows, const CheckedCall& call) {
  std::optional<LowRankUpdate> head;
  if (const LowRank* of_head = adapter_ ? adapter_->find(0, Projection::kHead) : nullptr)
    head = LowRankUpdate{.a = of_head->a, .b = of_head->b, .scale = of_head->scale};
  return linear_row_loss(model().hidden(rows.batch), model().output_weight(), rows.inputs, call.loss,
                         call.options, head ? &*head : nullptr);
}

ForwardBackwardResult TrainedModel::forward_backward(const ForwardBackward& request) {
  require_sound();
  const CheckedCall call = check_call(request, base_->shape(), base_->info.context);
  if (normalise_ == Normalise::kWeights && call.negative_weights)
    refuse("weights", "negative ones, and isograd.normalise = weights",
           "weights of 0 or more: their sum divides",
           "Create the model with another isograd.normalise, none for instance");
  const bool trains = !request.forward_only;
  if (trains && open_.calls == 0) layout_->zero_gradients();
  ForwardBackwardResult result;
  double loss = 0;
  const Adapted adapted(model(), adapter_.get());
  const at::AutoGradMode mode(trains);
  broken_ = trains;
  for (const PackedRows& rows : pack(request, call, micro_batch_tokens_)) {
    const RowLossResult found = losses(rows, call);
    if (trains) {
      layout_->begin_backward(/*last=*/false);
      found.sum.backward();
    }
    loss += found.value.item<double>();
    for (Array& array : arrays_of(found.log_probabilities, rows))
      result.log_probabilities.push_back(std::move(array));
  }
  broken_ = false;
  if (trains) open_ += call.counted;
  result.metrics["loss:sum"] = loss;
  return result;
}

double TrainedModel::denominator() const {
  switch (normalise_) {
    case Normalise::kNone: return 1;
    case Normalise::kTokens: return static_cast<double>(open_.tokens);
    case Normalise::kWeights: return open_.weights;
    case Normalise::kSequences: return static_cast<double>(open_.sequences);
  }
  return 0;
}

Metrics TrainedModel::optim_step(const AdamParams& params) {
  require_sound();
  if (open_.calls == 0)
    refuse("optim_step", "no forward_backward since the last one", "a gradient",
           "Call forward_backward first");
  const double divisor = denominator();
  if (!(divisor > 0))
    refuse("optim_step",
           fmt::format("a denominator of {}: the sum of what was given since the last step", divisor),
           "a number above 0 to divide by",
           "Give weights, or create the model with isograd.normalise = none");
  if (std::isnan(params.clip)) refuse("grad_clip_norm", "nan", "a number; 0: no clipping", "Change it");
  if (dtype_ != at::kDouble &&
      (static_cast<float>(params.epsilon) == 0 || !std::isfinite(static_cast<float>(params.learning_rate)) ||
       !std::isfinite(static_cast<float>(params.weight_decay))))
    refuse("adam_params",
           fmt::format("learning_rate {}, eps {}, weight_decay {}", params.learning_rate, params.epsilon,
                       params.weight_decay),
           "numbers that fp32 has", "Change them, or start the server with --dtype float64");
  optimizer_->set_options({.learning_rate = params.learning_rate,
                           .beta1 = params.beta1,
                           .beta2 = params.beta2,
                           .epsilon = params.epsilon,
                           .weight_decay = params.weight_decay});
  OwnedSquares squares;
  layout_->finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
    taken ? squares.add(*taken) : squares.add(bucket);
  });
  std::vector<double> sums = {0};
  const GlobalNorm sum = global_norm(squares.value(), sums, layout_->mesh().all());
  if (!sum.finite) {
    open_ = {};
    refuse("optim_step", "a gradient that is not finite", "finite numbers",
           "Look for what made it; the weights are as before, and the sums since the last step are dropped");
  }
  // The one division, in the same pass as clip and update.
  const double scale = 1 / divisor, norm = sum.norm * scale;
  broken_ = true;  // until the update is whole
  optimizer_->update(layout_->buckets(), clip_coefficient(norm, std::max(params.clip, 0.0)) * scale);
  layout_->publish_parameters();
  broken_ = false;
  const Counted counted = std::exchange(open_, {});
  weights_.reset();
  return {{"grad_norm", norm},
          {"grad_norm_sum", sum.norm},
          {"denominator", divisor},
          {"learning_rate", params.learning_rate},
          {"tokens", static_cast<double>(counted.tokens)},
          {"step", static_cast<double>(optimizer_->updates())}};
}

std::int64_t TrainedModel::save(Engine::Save which, const fs::path& directory) {
  write_weights(directory, *base_, adapter_.get(), model());
  if (which == Engine::Save::kExternal) return bytes_in(directory);
  SavedModel saved;
  saved.created = created_, saved.weights = whole_ ? "whole" : "adapter";
  if (which == Engine::Save::kTraining) {
    require_sound();
    saved.training = true, saved.dtype = dtype_name(dtype_), saved.updates = optimizer_->updates(),
    saved.open = open_;
    OptimizerState state = optimizer_->state(layout_->buckets());
    std::vector<at::Tensor> gradients;
    for (const Bucket& bucket : layout_->buckets()) {
      if (bucket.master.scalar_type() != bucket.plan.dtype) state["master"].push_back(bucket.master);
      gradients.push_back(bucket.gradients);
    }
    const auto write = [&](const char* name, const OptimizerState& parts) {
      WholeTensors tensors(*layout_, parts, nullptr);
      write_safetensors(directory / name, tensors.stream());
    };
    write("optimizer.safetensors", state);
    if (open_.calls > 0) write(kGradientFile, {{kGradient, gradients}});
  }
  write_saved(directory, saved);
  return bytes_in(directory);
}

void TrainedModel::restore(const SavedModel& saved, const fs::path& directory) {
  if (saved.dtype != dtype_name(dtype_))
    refuse(directory.string(), "optimizer state of " + saved.dtype,
           "this server's dtype, " + dtype_name(dtype_),
           "Load the weights without the optimizer, or start the server with --dtype " + saved.dtype);
  TrainingState state;
  state.updates = saved.updates;
  restore_optimizer(directory, state, *layout_, *optimizer_);
  open_ = saved.open;
  if (open_.calls == 0) return;
  layout_->zero_gradients();
  const auto stored = read_safetensors(directory / kGradientFile);
  for (const Bucket& bucket : layout_->buckets())  // zeros, to which the next backwards add
    for (const Slot& slot : bucket.plan.slots) {
      const auto found = stored.find(slot.name + "." + kGradient);
      if (found == stored.end() || found->second.sizes() != at::IntArrayRef(slot.shape))
        refuse((directory / kGradientFile).string(), "no gradient of " + slot.name + " of its shape",
               "the sums since the last step", "Load the weights without the optimizer");
      write_slot(bucket.gradients, bucket.held, slot, found->second);
    }
}

std::shared_ptr<const FixedWeights> TrainedModel::weights(const TextSamplerOptions& options) {
  if (weights_) return weights_;
  if (!whole_) return weights_ = std::make_shared<FixedWeights>(base_, adapter_->copy());
  const at::NoGradGuard no_grad;
  const auto copy =
      std::make_shared<DecoderLM>(whole_->config(), whole_->named().front().second.scalar_type(), 0);
  const NamedTensors from = whole_->named(), to = copy->named();
  for (std::size_t i = 0; i < to.size(); ++i) {
    at::Tensor(to[i].second).copy_(from[i].second);
    at::Tensor(to[i].second).requires_grad_(false);
  }
  return weights_ =
             std::make_shared<FixedWeights>(base_, nullptr, std::make_shared<SampledModel>(copy, options));
}

}  // namespace isograd::serve
