// Step: one optimizer step, its options and its report (src/train/step.cpp).
#pragma once

#include "isograd/error.hpp"

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/loss.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

class Pipeline;

// A rank's micro-batches in a step, each in as many parts as the rank has stages (pipeline_parallel.hpp).
class MicroBatchWork {
 public:
  virtual ~MicroBatchWork() = default;
  virtual std::size_t size() const = 0;
  // Computes micro-batch i and its share of the global loss; kept until backward(i, part).
  virtual void forward(std::size_t i, std::size_t part = 0) = 0;
  // Adds the share's gradient. `last`: this rank's last backward in the step; its gradient is then complete.
  virtual void backward(std::size_t i, bool last, std::size_t part = 0) = 0;
  // The halves of a backward: first the gradients that other ranks wait for, at any time later those of
  // parameters. ConfigError where both are computed at once: under ZeRO-3.
  virtual void backward_inputs(std::size_t i, std::size_t part = 0);
  virtual void backward_weights(std::size_t i, bool last, std::size_t part = 0);
};
// Runs every part's forward once and, after it, its backward once, whole or in halves.
using MicroBatchSchedule = std::function<void(MicroBatchWork& work)>;
void one_after_another(MicroBatchWork& work);  // alternates forward and backward, in order

// Runs before the first forward of each accumulate(), on this rank's micro-batches and over the ranks that
// see different data, for terms that use statistics of the whole step (BalanceLoss). Collective; without
// gradient; recomputing() is true, so that buffers (running statistics) change only in the forwards that
// follow.
using LookAhead = std::function<void(const MicroBatches& micro_batches, const Group& data)>;

// Counters to sum over ranks (e.g. tokens per expert) since the last call, always as many. Called at the
// beginning of a step, where the result is dropped, and in finish().
using Counters = std::function<std::vector<double>()>;

struct StepOptions {
  double max_norm = 1.0;  // 0: no clipping
  // Ranks with fewer micro-batches run the forward on empty ones too, for terms with a collective
  // (BalanceLoss).
  bool even_micro_batches = false;
  LookAhead look_ahead{};
  Counters counters{};  // summed over the ranks in the norm's message: no collective of its own
  // Reports norms of parts of the gradient. Their squares travel in the same message; costs one more pass.
  NormParts norm_parts{};
  // On a GPU, computes micro-batches as CUDA graphs where their backwards exchange nothing (docs/gpu.md).
  // Only for a forward that depends on the batch's tensors alone and gives terms of the same names, weights
  // and means for every batch: its code runs when a graph is recorded, not for each micro-batch.
  bool capture = false;
  // Checks that ranks divide by the same numbers, with one more collective per step (BrokenInvariant).
  bool check_denominators = debug_build();
  MicroBatchSchedule schedule = one_after_another;
  // For pipelines: this rank's stages, and what the number of micro-batches is padded to a multiple of.
  std::size_t parts = 1, micro_batches_of = 1;
};

// Options for micro-batches that go through a pipeline, which must outlive the step.
StepOptions through(const Pipeline& pipeline, StepOptions others = {});

struct StepReport {
  double loss = 0;  // Σ numerators / Σ denominators over all ranks: the loss that was differentiated
  std::vector<TermValue> terms;         // each term of the loss; the same on all ranks
  StepCounts step_counts;               // global counts
  std::vector<double> counters;         // of StepOptions::counters, over all ranks
  double norm = 0;                      // of the whole gradient, before clipping
  std::vector<TermValue> part_norms{};  // of StepOptions::norm_parts, before clipping
  double clip_coefficient = 1;          // factor of the gradient
  double gradient_scale = 1;            // with a deferred mean: views() hold the gradient divided by this
  bool finite = true;                   // false: nothing was updated, on any rank
  bool updated = false;                 // also false when the step had no valid target
};

// ---- the step ----

class StepWork;

// A forward with one loss: returns its sum over the micro-batch, a scalar. one_term() names it in reports.
using ForwardSum = std::function<at::Tensor(const Batch&)>;
ForwardLossTerms one_term(ForwardSum forward, const std::string& name = "loss");

namespace step_arguments {

template <typename T>
inline constexpr bool is_forward =
    std::is_constructible_v<ForwardLossTerms, T> || std::is_constructible_v<ForwardSum, T>;
// An lvalue of this class or of one derived from it.
template <typename T, typename Base>
inline constexpr bool is_kept = std::is_lvalue_reference_v<T>&& std::is_convertible_v<T, Base&>;
template <typename Forward, typename Layout, typename Mean, typename Optimizes>
inline constexpr bool fit = is_forward<Forward>&& is_kept<Layout, DataParallel>&& is_kept<Mean, Normalizer>&&
    is_kept<Optimizes, Optimizer>;
// Arguments of a call that begin with micro-batches.
template <typename...>
inline constexpr bool are_batches = false;
template <typename First, typename... Rest>
inline constexpr bool are_batches<First, Rest...> =
    std::convertible_to<First, MicroBatches> || std::same_as<First, Batch>;

}  // namespace step_arguments

// A step is accumulate() then finish(). With a Deferred mean accumulate() may be called any number of times
// before finish(), equally often on every rank. The step's gradients stay readable in DataParallel::views()
// until the next accumulate().
//
// The forward returns sums over its micro-batch, never means: the step divides, once. In the first step
// finish() looks in the autograd graph of each term for a mean (e.g. F::cross_entropy with its default
// reduction) or a sum divided by the micro-batch's targets or tokens, and throws ConfigError on every rank
// before a weight moves. With a further factor (0.5 * mse_loss) it needs two micro-batches of different
// sizes. It does not check terms of Mean::kNone (NoDenominator) or Mean::kMicroBatches, replicated terms, and
// the inside of custom autograd functions.
class Step {
 public:
  // Keeps references: all arguments outlive the Step.
  Step(ForwardLossTerms forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
       StepOptions options = {});
  Step(ForwardSum forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
       StepOptions options = {})
      : Step(one_term(std::move(forward)), layout, mean, optimizer, std::move(options)) {}
  // Only for its messages: which of the arguments is none of the above.
  template <typename Forward, typename Layout, typename Mean, typename Optimizes>
  requires(!step_arguments::fit<Forward, Layout, Mean, Optimizes>)
      Step(Forward&&, Layout&&, Mean&&, Optimizes&&, StepOptions = {})
      : Step(nullptr) {
    static_assert(step_arguments::is_forward<Forward>,
                  "Step's argument 1, the forward, takes a const isograd::Batch& and returns "
                  "isograd::LossTerms, or one at::Tensor: the sum of the micro-batch's losses. A lambda that "
                  "returns {{name, sum}} needs -> isograd::LossTerms");
    static_assert(step_arguments::is_kept<Layout, DataParallel>,
                  "Step's argument 2, the layout, is a variable of isograd::DataParallel: *layout of what "
                  "bucketed() or fully_shard() returned");
    static_assert(step_arguments::is_kept<Mean, Normalizer>,
                  "Step's argument 3, the mean, is a variable of an isograd::Normalizer that outlives the "
                  "Step: isograd::TokenMean mean;");
    static_assert(step_arguments::is_kept<Optimizes, Optimizer>,
                  "Step's argument 4, the optimizer, is a variable of isograd::Optimizer: *adamw of "
                  "isograd::adamw(), or *sgd of isograd::sgd(), and none of torch::optim");
  }
  ~Step();

  // Runs this rank's micro-batches of the step, possibly none. Collective, like finish().
  void accumulate(const MicroBatches& micro_batches, Requests requests = {});
  StepReport finish();
  StepReport operator()(const MicroBatches& micro_batches, Requests requests = {});
  template <std::same_as<Batch> One>  // step(batch): one micro-batch; step({}) stays none
  StepReport operator()(const One& batch, Requests requests = {}) {
    return (*this)(MicroBatches{batch}, requests);
  }
  template <typename... Arguments>
  requires(!step_arguments::are_batches<Arguments...>) StepReport operator()(const Arguments&...) {
    static_assert(misused<Arguments...>,
                  "a Step is called with this rank's micro-batches: one isograd::Batch, a std::vector of "
                  "them, or {} for none. batch_of_samples() makes a Batch of tensors");
    return {};
  }

 private:
  explicit Step(std::nullptr_t);  // declared only
  bool update_ahead(const at::Tensor& squares, double scale);

  ForwardLossTerms forward_;
  DataParallel& layout_;
  Normalizer& mean_;
  Optimizer& optimizer_;
  StepOptions options_;
  std::unique_ptr<StepWork> work_;
  bool accumulated_ = false;
};

// ---- evaluation ----

struct Evaluation {
  std::int64_t step = 0;
  double loss = 0;                   // in the task's unit, e.g. nats per token
  std::int64_t targets = 0;          // 0: nothing is held out; only `figures` are set
  std::vector<TermValue> figures{};  // the task's other measures of the model
};

// Σ of the losses of all ranks' micro-batches / the mean's denominator, without a gradient. A deferred mean's
// step that is under way is left alone. Buffers change if the module is in training mode. Collective.
Evaluation evaluate(const ForwardLossTerms& forward, Normalizer& mean, DataParallel& layout,
                    MicroBatches micro_batches);
inline Evaluation evaluate(ForwardSum forward, Normalizer& mean, DataParallel& layout,
                           MicroBatches micro_batches) {
  return evaluate(one_term(std::move(forward)), mean, layout, std::move(micro_batches));
}

}  // namespace isograd
