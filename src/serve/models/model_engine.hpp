// The engine of `isograd serve`: models over bases that are read once, on this process's CPU.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serve/models/fixed_weights.hpp"
#include "serve/service/engine.hpp"

namespace isograd::serve {

struct Ranks;
class TrainedModel;
struct SavedModel;

struct ModelEngineOptions {
  std::vector<std::pair<std::string, std::filesystem::path>> bases;  // name and Hugging Face directory
  at::ScalarType dtype = at::kFloat;
  // The most of a micro-batch. It decides on speed and memory, and on nothing but the last bits of a sum.
  std::int64_t micro_batch_tokens = 2048;
  TextSamplerOptions sampler{};
  // Here a step of a model with user_metadata isograd.dump leaves MODEL/STEP, for `isograd compare`.
  std::filesystem::path dumps{};
  // Null: this process alone. Else every rank makes the same calls of those that are collective: create(),
  // forward_backward(), optim_step(), remove(), save(), load(), open_sampler_of(). The others are the
  // first's.
  std::shared_ptr<const Ranks> ranks{};
};

class ModelEngine : public Engine {
 public:
  explicit ModelEngine(ModelEngineOptions options);  // ConfigError: no base, a name twice, as read_hf()
  ~ModelEngine() override;
  const std::vector<BaseModel>& bases() const override;

  void create(const std::string& model, const CreateModel& request) override;
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& request) override;
  Metrics optim_step(const std::string& model, const AdamParams& params) override;
  void drop_gradient(const std::string& model) override;
  void remove(const std::string& model) override;

  std::int64_t save(const std::string& model, Save which, const std::filesystem::path& directory) override;
  Write saving(const std::string& model) override;
  Write saving_sampler(const std::string& sampler) override;
  void load(const std::string& model, const std::filesystem::path& directory, bool optimizer,
            const std::map<std::string, std::string>& metadata) override;

  void open_sampler(const std::string& sampler, const std::string& base) override;
  void open_sampler_of(const std::string& sampler, const std::string& model) override;
  void load_sampler(const std::string& sampler, const std::filesystem::path& directory) override;
  void close_sampler(const std::string& sampler) override;
  void submit(const std::string& id, const std::string& sampler, const Sample& request,
              std::uint64_t seed) override;
  std::vector<Sampled> sample_pass() override;
  bool sampling() const override { return !turns_.empty(); }

 private:
  const std::shared_ptr<Base>& base(const std::string& name) const;
  TrainedModel& model(const std::string& name);
  void add(const std::string& model, const SavedModel& saved, const std::filesystem::path& directory,
           bool optimizer);
  const std::shared_ptr<const FixedWeights>& sampler(const std::string& name) const;
  void open(const std::string& sampler, std::shared_ptr<const FixedWeights> weights);

  ModelEngineOptions options_;
  std::vector<BaseModel> infos_{};
  std::map<std::string, std::shared_ptr<Base>> bases_{};
  std::map<std::string, std::unique_ptr<TrainedModel>> models_{};
  std::map<std::string, std::shared_ptr<const FixedWeights>> samplers_{};
  struct Waiting {
    std::shared_ptr<const FixedWeights> weights;
    Sample request;
  };
  std::map<std::string, Waiting> waiting_{};  // samples, by id
  std::deque<SampledModel*> turns_{};         // of those that wait, each once
};

}  // namespace isograd::serve
