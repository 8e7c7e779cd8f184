// The engine of `isograd serve`: models over bases that are read once, on this process's CPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/sampler.hpp"
#include "serve/service/engine.hpp"

namespace isograd::serve {

struct Ranks;

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
  void load(const std::string& model, const std::filesystem::path& directory, bool optimizer,
            const std::map<std::string, std::string>& metadata) override;
  CreateModel describe(const std::filesystem::path& directory) const override;

  void open_sampler(const std::string& sampler, const std::string& base) override;
  void open_sampler_of(const std::string& sampler, const std::string& model) override;
  void load_sampler(const std::string& sampler, const std::filesystem::path& directory) override;
  void save_sampler(const std::string& sampler, const std::filesystem::path& directory) override;
  void close_sampler(const std::string& sampler) override;
  void submit(const std::string& id, const std::string& sampler, const Sample& request,
              std::uint64_t seed) override;
  std::vector<Sampled> sample_pass() override;
  bool sampling() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd::serve
