#include "serve/models/model_engine.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/refuse.hpp"
#include "serve/models/trained_model.hpp"

namespace isograd::serve {

namespace {

template <class Map>
auto& find(Map& map, const char* what, const std::string& name) {
  const auto found = map.find(name);
  if (found == map.end())
    refuse(what, "'" + name + "', which does not exist", "one that was made", "Make one");
  return found->second;
}

}  // namespace

ModelEngine::ModelEngine(ModelEngineOptions options) : options_(std::move(options)) {
  if (options_.bases.empty()) refuse("models of a server", "none", "one at least", "Name one");
  for (const auto& [name, directory] : options_.bases) {
    if (name.empty() || bases_.contains(name))
      refuse("models of a server", name.empty() ? "an empty name" : "'" + name + "' twice",
             "names, each once", "Give another name");
    bases_[name] = std::make_shared<Base>(name, directory, options_.dtype, options_.sampler,
                                          /*values=*/!options_.ranks || options_.ranks->first());
    infos_.push_back(bases_[name]->info);
  }
}
ModelEngine::~ModelEngine() = default;

const std::vector<BaseModel>& ModelEngine::bases() const { return infos_; }

const std::shared_ptr<Base>& ModelEngine::base(const std::string& name) const {
  const auto found = bases_.find(name);
  if (found != bases_.end()) return found->second;
  std::vector<std::string> known;
  for (const BaseModel& info : infos_) known.push_back(info.name);
  refuse("base_model", "'" + name + "'", fmt::format("one of {}", fmt::join(known, ", ")),
         "Pass one of these");
}
TrainedModel& ModelEngine::model(const std::string& name) { return *find(models_, "a model", name); }
const std::shared_ptr<const FixedWeights>& ModelEngine::sampler(const std::string& name) const {
  return find(samplers_, "a sampler", name);
}
void ModelEngine::add(const std::string& model, const SavedModel& saved, const fs::path& directory,
                      bool optimizer) {
  if (models_.contains(model))
    refuse("a model", "'" + model + "', which exists", "a new name", "Give another");
  models_[model] =
      std::make_unique<TrainedModel>(base(saved.created.base), saved, directory, optimizer, options_.dtype,
                                     options_.micro_batch_tokens, options_.ranks);
}
void ModelEngine::open(const std::string& sampler, std::shared_ptr<const FixedWeights> weights) {
  if (!samplers_.emplace(sampler, std::move(weights)).second)
    refuse("a sampler", "'" + sampler + "', which exists", "a new name", "Give another");
}

void ModelEngine::create(const std::string& model, const CreateModel& request) {
  SavedModel made;
  made.created = request;
  add(model, made, {}, false);
}
ForwardBackwardResult ModelEngine::forward_backward(const std::string& model,
                                                    const ForwardBackward& request) {
  return this->model(model).forward_backward(request);
}
Metrics ModelEngine::optim_step(const std::string& model, const AdamParams& params) {
  const fs::path& dumps = options_.dumps;
  return this->model(model).optim_step(params, dumps.empty() ? dumps : dumps / model);
}
void ModelEngine::drop_gradient(const std::string& model) { this->model(model).drop_gradient(); }
void ModelEngine::remove(const std::string& model) {
  find(models_, "a model", model);
  models_.erase(model);
}

std::int64_t ModelEngine::save(const std::string& model, Save which, const fs::path& directory) {
  return this->model(model).save(which, directory);
}
Engine::Write ModelEngine::saving(const std::string& model) { return this->model(model).saving(); }
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
  add(model, saved, directory, optimizer);
}

void ModelEngine::open_sampler(const std::string& sampler, const std::string& base) {
  open(sampler, std::make_shared<FixedWeights>(this->base(base), nullptr));
}
void ModelEngine::open_sampler_of(const std::string& sampler, const std::string& model) {
  auto weights = this->model(model).weights(options_.sampler);
  if (weights) open(sampler, std::move(weights));
}
void ModelEngine::load_sampler(const std::string& sampler, const fs::path& directory) {
  const SavedModel saved = read_saved(directory);
  const std::shared_ptr<Base>& base = this->base(saved.created.base);
  std::shared_ptr<const LoraAdapter> adapter;
  std::shared_ptr<SampledModel> whole;
  if (saved.weights == "adapter") adapter = read_peft(directory, base->shape(), options_.dtype)->copy();
  if (saved.weights == "whole") {
    const std::shared_ptr<DecoderLM> model = read_hf(directory, options_.dtype);
    for (const auto& [name, tensor] : model->named()) at::Tensor(tensor).requires_grad_(false);
    whole = std::make_shared<SampledModel>(model, options_.sampler);
  }
  open(sampler, std::make_shared<FixedWeights>(base, adapter, whole));
}
Engine::Write ModelEngine::saving_sampler(const std::string& sampler) {
  const auto& weights = this->sampler(sampler);
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
  // Not `weights`, whose end takes pages from the sampler and belongs to the calling thread.
  return [base = weights->base, adapter = weights->adapter, sampled = weights->sampled, whole,
          saved](const fs::path& directory) {
    if (adapter || whole) write_weights(directory, *base, adapter.get(), *sampled->model);
    write_saved(directory, saved);
  };
}
void ModelEngine::close_sampler(const std::string& sampler) {
  find(samplers_, "a sampler", sampler);
  samplers_.erase(sampler);
}

}  // namespace isograd::serve
