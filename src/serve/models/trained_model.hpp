// A model that a client trains: raw sums of gradients over any number of calls, then one division and one
// update.
#pragma once

#include <filesystem>
#include <memory>

#include "isograd/data_parallel.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/verify.hpp"
#include "serve/models/fixed_weights.hpp"
#include "serve/models/spread_model.hpp"

namespace isograd::serve {

// The keys "isograd.*" of a client's user_metadata.
struct ModelSettings {
  std::string normalise = "none";  // by which number the gradient of a step is divided
  double alpha = 32;
  bool dump = false, norms = false;
};

class TrainedModel {
 public:
  // `directory` empty: a new one. `optimizer`: with moments, step and open sums of the directory.
  // `ranks`: null, or the ranks that compute it together; all calls are then collective.
  TrainedModel(std::shared_ptr<Base> base, const SavedModel& saved, const std::filesystem::path& directory,
               bool optimizer, at::ScalarType dtype, std::int64_t micro_batch_tokens,
               std::shared_ptr<const Ranks> ranks = nullptr);

  // As Engine has them. An exception in mid-call other than a ConfigError of the request breaks the model.
  ForwardBackwardResult forward_backward(const ForwardBackward& request);
  // `dumps`: the folder in which step N of a model with isograd.dump becomes the dump N.
  Metrics optim_step(const AdamParams& params, const std::filesystem::path& dumps);
  void drop_gradient();
  std::int64_t save(Engine::Save which, const std::filesystem::path& directory);
  // As they are now; the same object until the next step. Null on ranks other than the first.
  std::shared_ptr<const FixedWeights> weights(const TextSamplerOptions& options);

 private:
  DecoderLM& model() const { return whole_ ? *whole_ : *base_->sampled->model; }
  void make_alone(const std::filesystem::path& directory);
  void make_spread(const std::filesystem::path& directory);
  std::shared_ptr<LoraAdapter> make_adapter(const std::filesystem::path& directory, bool values) const;
  bool first() const { return !ranks_ || ranks_->first(); }
  bool is_whole() const { return created_.lora.rank == 0; }
  DataParallel& layout() const { return spread_ ? spread_->layout() : *layout_; }
  const Layout* placed() const { return spread_ ? spread_->placed() : nullptr; }
  // By bucket: this rank's part of the sums since the last step.
  std::vector<at::Tensor> sums() const;
  // Gathers the trained weights; calls `take` with their stream on the first rank.
  void gather_weights(const std::function<void(const TensorStream&)>& take);
  StepDump::Named whole_gradients(double scale);
  void restore(const SavedModel& saved, const std::filesystem::path& directory);
  void require_sound() const;

  std::shared_ptr<Base> base_;
  CreateModel created_;
  ModelSettings settings_;
  at::ScalarType dtype_;
  std::int64_t micro_batch_tokens_;
  std::shared_ptr<const Ranks> ranks_;
  std::unique_ptr<SpreadModel> spread_;   // with ranks
  std::shared_ptr<DecoderLM> whole_;      // alone, rank 0: a copy of the base, which is trained
  std::shared_ptr<LoraAdapter> adapter_;  // not rank 0; with ranks its tensors are this rank's parts
  std::unique_ptr<DataParallel> layout_;  // alone
  std::unique_ptr<AdamW> optimizer_;
  Counted open_{};  // calls > 0: there are sums of these calls
  bool broken_ = false;
  bool weights_are_current_ = false;
  std::shared_ptr<const FixedWeights> weights_;
};

}  // namespace isograd::serve
