// A trained model over several ranks: composed from the same pieces as a run of `isograd train`
// (PreparedRun).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/lora.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "serve/models/datums.hpp"
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

class SpreadModel {
 public:
  // `fill`: whole values, on every rank. `adapter`: null, or one without values, which alone is trained.
  // Collective.
  SpreadModel(std::shared_ptr<const Ranks> ranks, const DecoderConfig& shape, at::ScalarType dtype,
              std::shared_ptr<LoraAdapter> adapter, const FillValues& fill);
  SpreadModel(const SpreadModel&) = delete;  // the forward refers to it
  SpreadModel& operator=(const SpreadModel&) = delete;

  DataParallel& layout() { return *layout_; }
  const Layout* placed() const { return placed_ ? &*placed_ : nullptr; }  // null: each rank has a whole model

  // The call on all ranks, each with its part; the same results on every rank. With gradients it adds the
  // call's, summed over the ranks, to sums(). Collective.
  ForwardBackwardResult compute(const ForwardBackward& request, const CheckedCall& call,
                                std::int64_t most_tokens, Optimizer& optimizer);
  // By bucket, [held.size()]. Apart from the layout's gradients, and summed after each call, so that the bits
  // of a step do not depend on when a snapshot was taken.
  std::vector<at::Tensor>& sums() { return sums_; }

 private:
  struct Found {
    std::int64_t datum = 0, begin = 0;  // position
    at::Tensor log_probabilities;
  };
  MicroBatches own_part(const ForwardBackward& request, const CheckedCall& call,
                        std::int64_t most_tokens) const;
  LossTerms terms(const Batch& batch);

  std::shared_ptr<const Ranks> ranks_;
  std::shared_ptr<DecoderLM> model_;
  std::shared_ptr<LoraAdapter> adapter_;
  std::optional<Layout> placed_;
  std::shared_ptr<Pipeline> pipeline_;
  std::optional<ModelUnits> units_;
  std::unique_ptr<DataParallel> layout_;
  ForwardLossTerms forward_;
  std::vector<at::Tensor> sums_;

  // These belong to the call that is being computed.
  const ForwardBackward* request_ = nullptr;
  const CheckedCall* call_ = nullptr;
  std::vector<Found> found_;
  double loss_ = 0;
};

}  // namespace isograd::serve
