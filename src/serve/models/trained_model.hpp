// A model that a client trains: raw sums of gradients over any number of calls, then one division and one
// update.
#pragma once

#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "isograd/verify.hpp"
#include "isograd/world.hpp"
#include "serve/models/fixed_weights.hpp"
#include "train/build.hpp"
#include "train/config.hpp"

namespace isograd::serve {

// All models of a server have these in common: its ranks, on the grid of `config`'s parallel.* keys.
struct Ranks {
  // ConfigError: keys that do not go together, or not with that many ranks. Collective.
  Ranks(World& of, RunConfig run);
  World& world;
  RunConfig config;
  Mesh mesh;
  bool first() const { return world.rank == 0; }
};

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
  ~TrainedModel() { settle(); }
  TrainedModel(const TrainedModel&) = delete;  // the forward refers to it
  TrainedModel& operator=(const TrainedModel&) = delete;

  // As Engine has them. An exception in mid-call other than a ConfigError of the request breaks the model.
  ForwardBackwardResult forward_backward(const ForwardBackward& request);
  // `dumps`: the folder in which step N of a model with isograd.dump becomes the dump N.
  Metrics optim_step(const AdamParams& params, const std::filesystem::path& dumps);
  void drop_gradient();
  std::int64_t save(Engine::Save which, const std::filesystem::path& directory) {
    return write(directory, which, saved_now(which));
  }
  Engine::Write saving();  // null with ranks: they would all have to write at that time
  // As they are now; the same object until the next step. Null on ranks other than the first.
  std::shared_ptr<const FixedWeights> weights(const TextSamplerOptions& options);

 private:
  bool first() const { return !ranks_ || ranks_->first(); }
  bool is_whole() const { return created_.lora.rank == 0; }
  void make_alone(const std::filesystem::path& directory);
  std::shared_ptr<LoraAdapter> make_adapter(const std::filesystem::path& directory, bool values) const;
  ForwardBackwardResult compute(const ForwardBackward& request, const CheckedCall& call);
  // By bucket: this rank's part of the sums since the last step.
  std::vector<at::Tensor> sums() const;
  void zero_sums();
  const Layout* placed() const { return placed_ ? &*placed_ : nullptr; }  // null: each rank has a whole model

  // Several ranks (on_ranks.cpp). `fill`: whole values, on every rank.
  void make_on_ranks(const FillValues& fill);
  MicroBatches own_part(const ForwardBackward& request, const CheckedCall& call) const;
  LossTerms terms(const Batch& batch);
  // Each rank with its part; the same results on every rank.
  ForwardBackwardResult compute_on_ranks(const ForwardBackward& request, const CheckedCall& call);

  // Gathers the trained weights; calls `take` with their stream on the first rank.
  void gather_weights(const std::function<void(const TensorStream&)>& take);
  StepDump::Named whole_gradients(double scale);
  SavedModel saved_now(Engine::Save which) const;
  std::int64_t write(const std::filesystem::path& directory, Engine::Save which, const SavedModel& saved);
  void settle();  // before anything changes that a saving() may still read
  void restore(const SavedModel& saved, const std::filesystem::path& directory);
  void require_sound() const;

  std::shared_ptr<Base> base_;
  CreateModel created_;
  ModelSettings settings_;
  at::ScalarType dtype_;
  std::int64_t micro_batch_tokens_;
  std::shared_ptr<const Ranks> ranks_;
  // The base's; of rank 0 a copy of the base, which is trained; with ranks the part of this one.
  std::shared_ptr<DecoderLM> model_;
  std::shared_ptr<LoraAdapter> adapter_;  // not rank 0; with ranks its tensors are this rank's parts
  std::optional<Layout> placed_;
  std::shared_ptr<Pipeline> pipeline_;
  std::optional<ModelUnits> units_;
  std::unique_ptr<DataParallel> layout_;
  // With ranks: sums() apart from the layout's gradients, and summed over the ranks after each call, so that
  // the bits of a step do not depend on when a snapshot was taken.
  std::vector<at::Tensor> sums_;
  std::unique_ptr<AdamW> optimizer_;
  Counted open_{};  // calls > 0: there are sums of these calls
  bool broken_ = false;
  std::future<void> read_{};  // by the last saving()
  bool weights_are_current_ = false;
  std::shared_ptr<const FixedWeights> weights_;

  // The call that is being computed on several ranks, and its results on this one.
  struct Found {
    std::int64_t datum = 0, begin = 0;  // position
    at::Tensor log_probabilities;
  };
  ForwardLossTerms forward_;
  const ForwardBackward* request_ = nullptr;
  const CheckedCall* call_ = nullptr;
  std::vector<Found> found_;
  double loss_ = 0;
};

}  // namespace isograd::serve
