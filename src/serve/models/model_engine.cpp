#include "serve/models/model_engine.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/refuse.hpp"
#include "serve/models/fixed_weights.hpp"
#include "serve/models/sampling.hpp"
#include "serve/models/trained_model.hpp"

namespace isograd::serve {
namespace fs = std::filesystem;

struct ModelEngine::Impl {
  ModelEngineOptions options;
  std::vector<BaseModel> infos{};
  std::map<std::string, std::shared_ptr<Base>> bases{};
  std::map<std::string, std::unique_ptr<TrainedModel>> models{};
  std::map<std::string, std::shared_ptr<const FixedWeights>> samplers{};
  Sampling sampling{};

  const std::shared_ptr<Base>& base(const std::string& name) const {
    const auto found = bases.find(name);
    if (found != bases.end()) return found->second;
    std::vector<std::string> known;
    for (const BaseModel& info : infos) known.push_back(info.name);
    refuse("base_model", "'" + name + "'", fmt::format("one of {}", fmt::join(known, ", ")),
           "Pass one of these");
  }
  template <class Map>
  static auto& find(Map& map, const char* what, const std::string& name) {
    const auto found = map.find(name);
    if (found == map.end())
      refuse(what, "'" + name + "', which does not exist", "one that was made", "Make one");
    return found->second;
  }
  void add(const std::string& model, const SavedModel& saved, const fs::path& directory, bool optimizer) {
    if (models.contains(model))
      refuse("a model", "'" + model + "', which exists", "a new name", "Give another");
    models[model] = std::make_unique<TrainedModel>(base(saved.created.base), saved, directory, optimizer,
                                                   options.dtype, options.micro_batch_tokens, options.ranks);
  }
  void open(const std::string& sampler, std::shared_ptr<const FixedWeights> weights) {
    if (!samplers.emplace(sampler, std::move(weights)).second)
      refuse("a sampler", "'" + sampler + "', which exists", "a new name", "Give another");
  }
};

ModelEngine::ModelEngine(ModelEngineOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  if (impl_->options.bases.empty()) refuse("models of a server", "none", "one at least", "Name one");
  for (const auto& [name, directory] : impl_->options.bases) {
    if (name.empty() || impl_->bases.contains(name))
      refuse("models of a server", name.empty() ? "an empty name" : "'" + name + "' twice",
             "names, each once", "Give another name");
    const auto& ranks = impl_->options.ranks;
    const auto base = std::make_shared<Base>(name, directory, impl_->options.dtype, impl_->options.sampler,
                                             /*values=*/!ranks || ranks->first());
    impl_->bases[name] = base;
    impl_->infos.push_back(base->info);
  }
}
ModelEngine::~ModelEngine() = default;

const std::vector<BaseModel>& ModelEngine::bases() const { return impl_->infos; }

void ModelEngine::create(const std::string& model, const CreateModel& request) {
  SavedModel made;
  made.created = request;
  impl_->add(model, made, {}, false);
}
ForwardBackwardResult ModelEngine::forward_backward(const std::string& model,
                                                    const ForwardBackward& request) {
  return Impl::find(impl_->models, "a model", model)->forward_backward(request);
}
Metrics ModelEngine::optim_step(const std::string& model, const AdamParams& params) {
  const fs::path& dumps = impl_->options.dumps;
  return Impl::find(impl_->models, "a model", model)
      ->optim_step(params, dumps.empty() ? dumps : dumps / model);
}
void ModelEngine::drop_gradient(const std::string& model) {
  Impl::find(impl_->models, "a model", model)->drop_gradient();
}
void ModelEngine::remove(const std::string& model) {
  Impl::find(impl_->models, "a model", model);
  impl_->models.erase(model);
}

std::int64_t ModelEngine::save(const std::string& model, Save which, const fs::path& directory) {
  return Impl::find(impl_->models, "a model", model)->save(which, directory);
}
void ModelEngine::load(const std::string& model, const fs::path& directory, bool optimizer,
                       const std::map<std::string, std::string>& metadata) {
  SavedModel saved = read_saved(directory);
  if (!saved.training)
    refuse(directory.string(), "weights for sampling", "a checkpoint of save_weights",
           "Load one of that kind");
  constexpr const char* kNormalise = "isograd.normalise";
  const auto mode = [&](const auto& of) { return of.contains(kNormalise) ? of.at(kNormalise) : "none"; };
  if (optimizer && saved.open.calls > 0 && metadata.contains(kNormalise) &&
      mode(metadata) != mode(saved.created.metadata))
    refuse(kNormalise, mode(metadata),
           mode(saved.created.metadata) + ", by which the sums since the last step were counted",
           "Leave it out, or load without the optimizer");
  for (const auto& [key, value] : metadata) saved.created.metadata[key] = value;
  impl_->add(model, saved, directory, optimizer);
}
CreateModel ModelEngine::describe(const fs::path& directory) const { return read_saved(directory).created; }

void ModelEngine::open_sampler(const std::string& sampler, const std::string& base) {
  impl_->open(sampler, std::make_shared<FixedWeights>(impl_->base(base), nullptr));
}
void ModelEngine::open_sampler_of(const std::string& sampler, const std::string& model) {
  auto weights = Impl::find(impl_->models, "a model", model)->weights(impl_->options.sampler);
  if (weights) impl_->open(sampler, std::move(weights));
}
void ModelEngine::load_sampler(const std::string& sampler, const fs::path& directory) {
  const SavedModel saved = read_saved(directory);
  const std::shared_ptr<Base>& base = impl_->base(saved.created.base);
  std::shared_ptr<const LoraAdapter> adapter;
  std::shared_ptr<SampledModel> whole;
  if (saved.weights == "adapter") adapter = read_peft(directory, base->shape(), impl_->options.dtype)->copy();
  if (saved.weights == "whole") {
    const std::shared_ptr<DecoderLM> model = read_hf(directory, impl_->options.dtype);
    for (const auto& [name, tensor] : model->named()) at::Tensor(tensor).requires_grad_(false);
    whole = std::make_shared<SampledModel>(model, impl_->options.sampler);
  }
  impl_->open(sampler, std::make_shared<FixedWeights>(base, adapter, whole));
}
void ModelEngine::save_sampler(const std::string& sampler, const fs::path& directory) {
  const auto& weights = Impl::find(impl_->samplers, "a sampler", sampler);
  const bool whole = weights->sampled != weights->base->sampled;
  SavedModel saved;
  saved.created.base = weights->base->info.name;
  saved.weights = weights->adapter ? "adapter" : whole ? "whole" : "base";
  LoraShape& shape = saved.created.lora;
  shape.rank = 0;
  if (weights->adapter) {
    const LoraConfig& config = weights->adapter->config();
    shape.rank = config.rank, shape.unembed = config.unembed, shape.mlp = config.mlp;
    shape.attention = config.attention;
  }
  if (weights->adapter || whole)
    write_weights(directory, *weights->base, weights->adapter.get(), *weights->sampled->model);
  write_saved(directory, saved);
}
void ModelEngine::close_sampler(const std::string& sampler) {
  Impl::find(impl_->samplers, "a sampler", sampler);
  impl_->samplers.erase(sampler);
}

void ModelEngine::submit(const std::string& id, const std::string& sampler, const Sample& request,
                         std::uint64_t seed) {
  impl_->sampling.submit(id, Impl::find(impl_->samplers, "a sampler", sampler), request, seed);
}
std::vector<Engine::Sampled> ModelEngine::sample_pass() { return impl_->sampling.pass(); }
bool ModelEngine::sampling() const { return impl_->sampling.busy(); }

}  // namespace isograd::serve
