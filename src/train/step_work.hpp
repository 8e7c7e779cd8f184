// A rank's micro-batches as work: what a step trains on and what an evaluation only looks at are counted,
// prepared, computed and divided by the same lines.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "isograd/step.hpp"
#include "loss/local_mean.hpp"
#include "loss/term_sums.hpp"
#include "parallel/pipeline/split_backward.hpp"
#include "train/captured.hpp"

namespace isograd {

class StepWork : public MicroBatchWork {
 public:
  // Keeps references: all arguments outlive it. `parts`, `micro_batches_of`: as StepOptions has them.
  StepWork(const ForwardLossTerms& forward, DataParallel& layout, Normalizer& mean, std::size_t parts = 1,
           std::size_t micro_batches_of = 1, bool capture = false);

  void clear() { sums_.clear(), readings_.clear(); }  // before the first micro-batches of a step
  // Collective; the work is theirs from then on. `even`: ranks with fewer than others get empty ones, as they
  // do where the layout asks for it.
  void count(MicroBatches micro_batches, bool stop_requested, bool even);
  const MicroBatches& micro_batches() const { return batches_; }
  const Census& census() const { return census_; }
  const Denominator& denominator() const { return denominator_; }
  const LocalMeans& local_means() const { return local_means_; }  // of all steps so far
  // Waits for the device, once, for all that was left in readings().
  const TermSums& sums() {
    readings_.read();
    return sums_;
  }
  Readings& readings() { return readings_; }
  TermNames& names() { return names_; }  // agreed in an earlier step

  std::size_t size() const override { return batches_.size(); }
  // With the one division: the share of the global loss.
  void forward(std::size_t i, std::size_t part = 0) override;
  void backward(std::size_t i, bool last, std::size_t part = 0) override;
  void backward_inputs(std::size_t i, std::size_t part = 0) override;
  void backward_weights(std::size_t i, bool last, std::size_t part = 0) override;

  // ConfigError where the schedule leaves something out or takes it in an impossible order.
  void run(const MicroBatchSchedule& schedule);
  void look();  // each forward, logged, and no backward

 private:
  struct PendingLoss {  // of the global loss, between a forward and its backward
    LossTerms terms{};
    at::Tensor value{};
    std::optional<WeightsBackward> weights{};  // between the halves of a backward
    bool captured = false;                     // forward and backward are one, in backward()
  };
  PendingLoss& pending_loss(std::size_t i, std::size_t part) { return shares_.at(part * size() + i); }
  // Whether there is anything to differentiate: not in a constant of a micro-batch without targets.
  // ConfigError: targets, and nothing that they train.
  static bool is_differentiable(const at::Tensor& share, const Batch& batch);
  void compute(std::size_t i, PendingLoss& share);
  void begin_gradients(std::size_t i, bool last);
  void log(PendingLoss& share);
  void check(bool holds, std::size_t i, const char* expected) const;  // the rules of a schedule

  const ForwardLossTerms& forward_;
  DataParallel& layout_;
  Normalizer& mean_;
  MicroBatches batches_{};
  std::size_t parts_, micro_batches_of_;
  std::vector<PendingLoss> shares_{};  // by part and micro-batch
  std::size_t left_ = 0;               // backwards to come
  Census census_{};
  Denominator denominator_{};
  std::unique_ptr<CapturedWork> captured_{};  // null: nothing is
  Readings readings_{};
  TermSums sums_{};
  TermNames names_{};
  LocalMeans local_means_{};
};

}  // namespace isograd
