// A model that a client trains: raw sums of gradients over any number of calls, then one division and one
// update.
#pragma once

#include <filesystem>
#include <memory>

#include "isograd/data_parallel.hpp"
#include "isograd/optimizer.hpp"
#include "serve/models/fixed_weights.hpp"

namespace isograd::serve {

// The number by which the gradient of a step is divided (user_metadata isograd.normalise).
enum class Normalise { kNone, kTokens, kWeights, kSequences };

class TrainedModel {
 public:
  // `directory` empty: a new one. `optimizer`: with moments, step and open sums of the directory.
  TrainedModel(std::shared_ptr<Base> base, const SavedModel& saved, const std::filesystem::path& directory,
               bool optimizer, at::ScalarType dtype, std::int64_t micro_batch_tokens);

  // As Engine has them. An exception in mid-call other than a ConfigError of the request breaks the model.
  ForwardBackwardResult forward_backward(const ForwardBackward& request);
  Metrics optim_step(const AdamParams& params);
  std::int64_t save(Engine::Save which, const std::filesystem::path& directory);
  // As they are now; the same object until the next step.
  std::shared_ptr<const FixedWeights> weights(const TextSamplerOptions& options);

 private:
  DecoderLM& model() const { return whole_ ? *whole_ : *base_->sampled->model; }
  RowLossResult losses(const PackedRows& rows, const CheckedCall& call);
  double denominator() const;
  void restore(const SavedModel& saved, const std::filesystem::path& directory);
  void require_sound() const;

  std::shared_ptr<Base> base_;
  CreateModel created_;
  Normalise normalise_;
  at::ScalarType dtype_;
  std::int64_t micro_batch_tokens_;
  std::shared_ptr<DecoderLM> whole_;      // rank 0: a copy of the base, which is trained
  std::shared_ptr<LoraAdapter> adapter_;  // else
  std::unique_ptr<DataParallel> layout_;
  std::unique_ptr<AdamW> optimizer_;
  Counted open_{};  // calls > 0: the layout's gradients are the sums of these calls
  bool broken_ = false;
  std::shared_ptr<const FixedWeights> weights_;  // null: of an earlier step
};

}  // namespace isograd::serve
