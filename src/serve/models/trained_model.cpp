#include "serve/models/trained_model.hpp"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "layout/flat.hpp"
#include "layout/readings.hpp"
#include "model/hf.hpp"
#include "model/safetensors.hpp"
#include "train/whole_tensors.hpp"

namespace isograd::serve {
namespace {

constexpr const char* kGradientFile = "gradient.safetensors";
constexpr const char* kGradient = "gradient";

using Denominator = double (*)(const Counted&);
const std::map<std::string, Denominator> kDenominators = {
    {"none", [](const Counted&) { return 1.0; }},
    {"tokens", [](const Counted& counted) { return static_cast<double>(counted.tokens); }},
    {"weights", [](const Counted& counted) { return counted.weights; }},
    {"sequences", [](const Counted& counted) { return static_cast<double>(counted.sequences); }}};

// ConfigError: a key "isograd.*" that does not exist, a value that does not fit.
ModelSettings settings_of(const std::map<std::string, std::string>& metadata) {
  ModelSettings settings;
  for (const auto& [key, value] : metadata) {
    if (!key.starts_with("isograd.")) continue;
    const auto want = [&where = key, &found = value](bool holds, const char* expected) {
      if (!holds) refuse("user_metadata " + where, "'" + found + "'", expected, "Change it");
    };
    if (key == "isograd.normalise") {
      want(kDenominators.contains(value), "none, tokens, weights or sequences");
      settings.normalise = value;
    } else if (key == "isograd.alpha") {
      char* end = nullptr;
      settings.alpha = std::strtod(value.c_str(), &end);
      want(!value.empty() && *end == 0 && settings.alpha > 0 && std::isfinite(settings.alpha),
           "a number above 0");
    } else if (key == "isograd.dump" || key == "isograd.norms") {
      want(value == "true" || value == "false", "true or false");
      (key == "isograd.dump" ? settings.dump : settings.norms) = value == "true";
    } else {
      refuse("user_metadata " + key, "an unknown key",
             "isograd.normalise, isograd.alpha, isograd.dump or isograd.norms", "Leave it out");
    }
  }
  return settings;
}

// `take` writes the whole tensors on the first rank; the others take part to the end, whatever happens there.
void gathered(DataParallel& layout, const OptimizerState& parts, const Layout* placed, bool first,
              const std::function<void(const TensorStream&)>& take) {
  WholeTensors tensors(layout, parts, placed);
  if (!first) return tensors.drain();
  std::exception_ptr problem;
  try {
    take(tensors.stream());
  } catch (...) {
    problem = std::current_exception();
  }
  tensors.drain();
  if (problem) std::rethrow_exception(problem);
}

std::int64_t bytes_in(const fs::path& directory) {
  std::int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.is_regular_file()) bytes += static_cast<std::int64_t>(entry.file_size());
  return bytes;
}

}  // namespace

TrainedModel::TrainedModel(std::shared_ptr<Base> base, const SavedModel& saved, const fs::path& directory,
                           bool optimizer, at::ScalarType dtype, std::int64_t micro_batch_tokens,
                           std::shared_ptr<const Ranks> ranks)
    : base_(std::move(base)),
      created_(saved.created),
      settings_(settings_of(created_.metadata)),
      dtype_(dtype),
      micro_batch_tokens_(micro_batch_tokens),
      ranks_(std::move(ranks)) {
  const LoraShape& lora = created_.lora;
  if (is_whole() && (!lora.attention || !lora.mlp || !lora.unembed))
    refuse("lora_config", "rank 0, the whole weights, without some of them", "all of them",
           "Give a rank above 0");
  if (!ranks_) {
    make_alone(directory);
  } else {
    const auto of_model = std::make_shared<const HfWeights>(
        is_whole() && !directory.empty() ? directory : base_->info.directory, dtype_);
    std::shared_ptr<LoraAdapter> of_adapter;
    if (!is_whole()) {
      adapter_ = make_adapter(directory, /*values=*/false);
      if (!directory.empty()) of_adapter = read_peft(directory, base_->shape(), dtype_);
    }
    make_on_ranks([of_model, of_adapter, seed = created_.lora.seed.value_or(0)](const std::string& name,
                                                                                at::Tensor& values) {
      if (adapted_matrix(name).empty()) return of_model->fill(name, values);
      if (!of_adapter) return initialize_lora(name, values, seed);
      values.copy_(std::ranges::find(of_adapter->named(), name, &NamedTensors::value_type::first)->second);
    });
  }
  optimizer_ = adamw({});
  if (optimizer) restore(saved, directory);
}

// The adapter that a request asks for, or the one of a directory, whose scale the request may not contradict.
std::shared_ptr<LoraAdapter> TrainedModel::make_adapter(const fs::path& directory, bool values) const {
  const LoraShape& lora = created_.lora;
  LoraConfig config{.rank = lora.rank,
                    .alpha = settings_.alpha,
                    .attention = lora.attention,
                    .mlp = lora.mlp,
                    .unembed = lora.unembed};
  check(config);
  std::shared_ptr<LoraAdapter> adapter;
  if (!directory.empty()) {
    adapter = read_peft(directory, base_->shape(), dtype_);
    config = adapter->config();
    if (created_.metadata.contains("isograd.alpha") && config.alpha != settings_.alpha)
      refuse("user_metadata isograd.alpha", fmt::format("{}", settings_.alpha),
             fmt::format("{}, that of the saved adapter", config.alpha), "Leave it out");
  }
  if (!values) return LoraAdapter::without_values(base_->shape(), config, dtype_);
  return adapter ? adapter
                 : std::make_shared<LoraAdapter>(base_->shape(), config, dtype_, lora.seed.value_or(0));
}

void TrainedModel::make_alone(const fs::path& directory) {
  model_ = base_->sampled->model;
  if (is_whole())
    model_ = read_hf(directory.empty() ? base_->info.directory : directory, dtype_);
  else
    adapter_ = make_adapter(directory, /*values=*/true);
  TrainableParameters parameters = trainable_parameters(adapter_ ? adapter_->named() : model_->named());
  for (NamedParameter& parameter : parameters) parameter.decays = true;  // as torch.optim.AdamW
  layout_ = bucketed(std::move(parameters), Mesh(Group::solo()));
}

void TrainedModel::require_sound() const {
  if (broken_)
    refuse("this model", "a call that failed on the server in the middle of its change",
           "whole calls and updates", "Create a model from its last checkpoint");
}

ForwardBackwardResult TrainedModel::forward_backward(const ForwardBackward& request) {
  require_sound();
  const CheckedCall call = check_call(request, base_->shape(), base_->info.context);
  if (settings_.normalise == "weights" && call.negative_weights)
    refuse("weights", "negative ones, and isograd.normalise = weights",
           "weights of 0 or more: their sum divides",
           "Create the model with another isograd.normalise, none for instance");
  if (ranks_ && call.loss == RowLoss::kGspo && ranks_->mesh.size(kContextAxes) > 1)
    refuse("loss_fn", "gspo, whose ratio is a sequence's, and sequences that are cut over context ranks",
           "a server without parallel.cp_ring and parallel.cp_ulysses", "Pass loss_fn=ppo or cispo");
  const bool trains = !request.forward_only;
  broken_ = trains;
  if (trains && ranks_ && open_.calls == 0) zero_sums();
  ForwardBackwardResult result = ranks_ ? compute_on_ranks(request, call) : compute(request, call);
  broken_ = false;
  if (trains) open_ += call.counted;
  return result;
}

ForwardBackwardResult TrainedModel::compute(const ForwardBackward& request, const CheckedCall& call) {
  model_->set_adapter(adapter_.get());
  const auto plain_again = c10::make_scope_exit([this] { model_->set_adapter(nullptr); });
  const at::AutoGradMode mode(!request.forward_only);
  ForwardBackwardResult result{.metrics = {{"loss:sum", 0.0}}};
  bool fresh = !request.forward_only && open_.calls == 0;
  for (const Batch& batch : pack(request, call, micro_batch_tokens_)) {
    const RowLossResult found = losses_of(*model_, model_->hidden(batch), request, call, batch);
    if (!request.forward_only) {
      settle();
      if (std::exchange(fresh, false)) zero_sums();
      layout_->begin_backward(/*last=*/false);
      found.sum.backward();
    }
    result.metrics["loss:sum"] += found.value.item<double>();
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      const std::int64_t begin = batch.cu_seqlens[f], end = batch.cu_seqlens[f + 1];
      result.log_probabilities.push_back(array_of(found.log_probabilities.narrow(0, begin, end - begin)));
    }
  }
  return result;
}

std::vector<at::Tensor> TrainedModel::sums() const {
  if (ranks_) return sums_;
  std::vector<at::Tensor> all;
  for (const Bucket& bucket : layout_->buckets()) all.push_back(bucket.gradients);
  return all;
}

void TrainedModel::zero_sums() {
  if (!ranks_) return layout_->zero_gradients();
  for (const at::Tensor& sum : sums_) sum.zero_();
}

Metrics TrainedModel::optim_step(const AdamParams& params, const fs::path& dumps) {
  require_sound();
  if (settings_.dump && dumps.empty())
    refuse("user_metadata isograd.dump", "an engine without a folder for dumps", "a server with one",
           "Leave it out");
  if (open_.calls == 0)
    refuse("optim_step", "no forward_backward since the last one", "a gradient",
           "Call forward_backward first");
  const double divisor = kDenominators.at(settings_.normalise)(open_);
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
  settle();
  OwnedSquares squares;
  if (ranks_) {  // reduced with each call
    std::vector<Bucket>& buckets = layout_->buckets();
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      buckets[i].gradients.copy_(sums_[i]);
      squares.add(buckets[i]);
    }
  } else {
    layout_->finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
      taken ? squares.add(*taken) : squares.add(bucket);
    });
  }
  std::vector<double> sums = {0};
  const GlobalNorm sum = global_norm(squares.value(), sums, layout_->mesh().all());
  if (!sum.finite) {
    open_ = {};
    refuse("optim_step", "a gradient that is not finite", "finite numbers",
           "Look for what made it; the weights are as before, and the sums since the last step are dropped");
  }
  // The one division, in the same pass as clip and update.
  const double scale = 1 / divisor, norm = sum.norm * scale;
  const double coefficient = clip_coefficient(norm, std::max(params.clip, 0.0));
  const StepDump::Named gradients = whole_gradients(scale);
  broken_ = true;  // until the update is whole
  optimizer_->update(layout_->buckets(), coefficient * scale);
  layout_->publish_parameters();
  broken_ = false;
  const Counted counted = std::exchange(open_, {});
  weights_.reset(), weights_are_current_ = false;
  Metrics metrics = {{"grad_norm", norm},
                     {"grad_norm_sum", sum.norm},
                     {"denominator", divisor},
                     {"learning_rate", params.learning_rate},
                     {"tokens", static_cast<double>(counted.tokens)},
                     {"step", static_cast<double>(optimizer_->updates())}};
  if (settings_.norms)
    for (const auto& [name, gradient] : gradients)
      metrics[kNormOf + name] = gradient.to(at::kDouble).norm().item<double>();
  if (!settings_.dump) return metrics;
  metrics["dump"] = metrics.at("step");
  if (!first()) return metrics;
  StepDump dump;
  dump.gradients = gradients;
  dump.figures = {.loss = std::numeric_limits<double>::quiet_NaN(),
                  .targets = kNotRecorded,
                  .tokens = kNotRecorded,
                  .norm = norm,
                  .clip_coefficient = coefficient};
  dump.precision = float_type(dtype_).precision;
  dump.scales = {{"learning_rate", params.learning_rate}, {"denominator", divisor}};
  fs::create_directories(dumps);
  write_dump(dump, dumps / std::to_string(optimizer_->updates()));
  return metrics;
}

// On the first rank, where the client asked for dumps or norms; else nothing.
StepDump::Named TrainedModel::whole_gradients(double scale) {
  StepDump::Named whole;
  if (!settings_.dump && !settings_.norms) return whole;
  gathered(*layout_, {{"", sums()}}, placed(), first(), [&](const TensorStream& stream) {
    std::size_t next = 0;
    stream.each([&](const at::Tensor& sum) { whole.emplace_back(stream.entries[next++].name, sum * scale); });
  });
  return whole;
}

// The next call begins with zeros.
void TrainedModel::drop_gradient() {
  require_sound();
  settle();
  open_ = {};
}

void TrainedModel::gather_weights(const std::function<void(const TensorStream&)>& take) {
  OptimizerState parts;
  for (const Bucket& bucket : layout_->buckets()) parts[""].push_back(bucket.parameters);
  gathered(*layout_, parts, placed(), first(), take);
}

Engine::Write TrainedModel::saving() {
  if (ranks_) return {};
  settle();
  optimizer_->state(layout_->buckets());  // makes what there is not yet
  struct Reading {
    std::promise<void> done{};
    ~Reading() { done.set_value(); }
  };
  const auto reading = std::make_shared<Reading>();
  read_ = reading->done.get_future();
  constexpr auto kTraining = Engine::Save::kTraining;
  return [this, reading, saved = saved_now(kTraining)](const fs::path& directory) {
    write(directory, kTraining, saved);
  };
}

void TrainedModel::settle() {
  if (read_.valid()) read_.get();
}

SavedModel TrainedModel::saved_now(Engine::Save which) const {
  SavedModel saved;
  saved.created = created_, saved.weights = is_whole() ? "whole" : "adapter";
  if (which != Engine::Save::kTraining) return saved;
  require_sound();
  saved.training = true, saved.dtype = float_type(dtype_).name, saved.updates = optimizer_->updates(),
  saved.open = open_;
  return saved;
}

std::int64_t TrainedModel::write(const fs::path& directory, Engine::Save which, const SavedModel& saved) {
  const at::NoGradGuard no_grad;
  const DecoderConfig& shape = base_->shape();
  if (!ranks_)
    write_weights(directory, *base_, adapter_.get(), *model_);
  else
    gather_weights([&](const TensorStream& stream) {
      adapter_ ? write_peft(directory, adapter_->config(), shape, stream, base_->info.name)
               : write_hf(directory, shape, stream);
    });
  if (which == Engine::Save::kExternal) return first() ? bytes_in(directory) : 0;
  if (saved.training) {
    OptimizerState state = optimizer_->state(layout_->buckets());
    for (const Bucket& bucket : layout_->buckets())
      if (bucket.master.scalar_type() != bucket.plan.dtype) state["master"].push_back(bucket.master);
    const auto put = [&](const char* name, const OptimizerState& parts) {
      gathered(*layout_, parts, placed(), first(),
               [&](const TensorStream& stream) { write_safetensors(directory / name, stream); });
    };
    put("optimizer.safetensors", state);
    if (saved.open.calls > 0) put(kGradientFile, {{kGradient, sums()}});
  }
  if (!first()) return 0;
  write_saved(directory, saved);
  return bytes_in(directory);
}

void TrainedModel::restore(const SavedModel& saved, const fs::path& directory) {
  if (saved.dtype != float_type(dtype_).name)
    refuse(directory.string(), "optimizer state of " + saved.dtype,
           std::string("this server's dtype, ") + float_type(dtype_).name,
           "Load the weights without the optimizer, or start the server with --dtype " + saved.dtype);
  TrainingState state;
  state.updates = saved.updates;
  restore_optimizer(directory, state, *layout_, *optimizer_, placed());
  open_ = saved.open;
  if (open_.calls == 0) return;
  std::vector<Bucket>& buckets = layout_->buckets();
  zero_sums();
  const std::vector<at::Tensor> sums = this->sums();
  const auto stored = read_safetensors(directory / kGradientFile);
  for (std::size_t i = 0; i < buckets.size(); ++i)
    for (const Slot& slot : buckets[i].plan.slots) {
      const at::IntArrayRef shape =
          placed() ? placed()->parameter(slot.name).placement.whole_shape : slot.shape;
      const auto found = stored.find(slot.name + "." + kGradient);
      if (found == stored.end() || found->second.sizes() != shape)
        refuse((directory / kGradientFile).string(), "no gradient of " + slot.name + " of its shape",
               "the sums since the last step", "Load the weights without the optimizer");
      write_slot(sums[i], buckets[i].held, slot,
                 placed() ? placed()->local(slot.name, found->second) : found->second);
    }
}

std::shared_ptr<const FixedWeights> TrainedModel::weights(const TextSamplerOptions& options) {
  if (std::exchange(weights_are_current_, true)) return weights_;
  NamedTensors to;  // filled on the first rank
  std::shared_ptr<LoraAdapter> adapter;
  std::shared_ptr<DecoderLM> whole;
  if (first()) {
    const at::NoGradGuard no_grad;
    if (is_whole())
      whole = std::make_shared<DecoderLM>(base_->shape(), dtype_, 0), to = whole->named();
    else
      adapter = std::make_shared<LoraAdapter>(base_->shape(), adapter_->config(), dtype_, 0),
      to = adapter->named();
    for (const auto& [name, tensor] : to) at::Tensor(tensor).requires_grad_(false);
  }
  gather_weights([&](const TensorStream& stream) {
    std::size_t next = 0;
    stream.each([&](const at::Tensor& values) {
      const std::string& name = stream.entries.at(next++).name;
      at::Tensor(std::ranges::find(to, name, &NamedTensors::value_type::first)->second).copy_(values);
    });
  });
  if (first())
    weights_ =
        whole ? std::make_shared<FixedWeights>(base_, nullptr, std::make_shared<SampledModel>(whole, options))
              : std::make_shared<FixedWeights>(base_, adapter);
  return weights_;
}

}  // namespace isograd::serve
