// A layout's step on this rank's part of the batch, what it says of itself, and digests that ranks compare.
#pragma once

#include "isograd/verify.hpp"

namespace isograd {

// A hash of the bytes of each tensor, [P] int64.
at::Tensor digest(const std::vector<at::Tensor>& tensors);
std::vector<std::uint64_t> checksums(const at::Tensor& digests);

// Indices of the tensors whose digests differ on some rank. Collective.
std::vector<std::size_t> differing_over_ranks(const at::Tensor& digests, Group& group);

// Σ modulo 2^64 of a hash of each (sample, position, token, target): independent of their order.
std::uint64_t digest(const MicroBatches& batches);

// digest() of the batches of all ranks together. Collective.
std::uint64_t digest_over_ranks(const MicroBatches& local, Group& group);

class ReplayedChoices;
class Step;

// The parameters that every run starts from, in the run's precision; `values` are copies on the CPU.
struct Initial {
  std::vector<std::string> names;
  std::vector<at::Tensor> values;
  std::vector<bool> trainable;
  bool chooses_experts = false;  // VerifyModel::choose_experts
  bool other_values = false;     // nudged(): the oracle replays choices too

  // The oracle's choice of experts, which runs in the run's precision replay; null: they choose.
  std::shared_ptr<ReplayedChoices> choices{};

  explicit Initial(const VerifyModel& model);
  VerifyModel model(const VerifyProblem& problem, at::ScalarType dtype) const;
  // In fp64 and on the CPU, wherever the run is: the parameters are moved there, and `logits` goes with them.
  VerifyModel oracle(const VerifyProblem& problem) const;
  // Each value an ulp or two up or down, as chance has it (zeros stay); each `draw` otherwise.
  Initial nudged(std::uint64_t draw) const;
};

// Records what an optimizer sees of a step, and passes the update on or moves nothing.
class RecordingOptimizer;

class LayoutRun {
 public:
  // `inner`: what updates; none: nothing moves.
  LayoutRun(const VerifyProblem& problem, const LayoutUnderTest& layout, VerifyModel model, Group group,
            std::unique_ptr<Optimizer> inner = nullptr);
  // problem.live_run in place of a fresh layout; nothing moves.
  LayoutRun(const VerifyProblem& problem, Group group);
  ~LayoutRun();

  struct RecordedStep {
    StepFigures figures;
    std::vector<std::string> names;
    std::vector<at::Tensor> gradients;  // copies on the CPU, as the step left them; whole
    std::vector<std::pair<std::string, double>> terms;
    double bytes_moved = 0;
    StepDump::Named named() const;
  };
  // Collective over the group.
  RecordedStep step(const MicroBatches& local);
  std::vector<at::Tensor> parameters();  // copies on the CPU, whole
  DataParallel& layout();
  // Names of the model's buffers that are not the same on all ranks by now. Collective.
  std::vector<std::string> differing_buffers();

  // Fills in what the ranks have, each for itself: collective, after step(). `initial` are checksums.
  void describe(const RecordedStep& made, const std::vector<std::uint64_t>& initial, StepDump& dump);

 private:
  struct Metered;
  void make_step(const ForwardLossTerms& forward, LookAhead look_ahead, std::unique_ptr<Optimizer> inner);
  at::Tensor whole(const std::string& name, const at::Tensor& held) const;  // collective where it is cut
  // By trained parameter, in the model's order, those of other stages too: copies on the CPU, whole.
  std::vector<std::pair<std::string, at::Tensor>> whole_views(at::Tensor DataParallel::View::*of);
  // On how many ranks each element counts, the least and the most, by parameter. Collective.
  std::vector<std::pair<std::int64_t, std::int64_t>> owners(const std::vector<std::string>& names);
  const VerifyProblem& problem_;
  Group group_;
  VerifyModel model_;  // of a fresh layout
  std::unique_ptr<Normalizer> normalizer_;
  std::unique_ptr<Metered> layout_;
  std::unique_ptr<RecordingOptimizer> recorder_;
  std::unique_ptr<Step> step_;
};

// Waits for work of some ranks within the group's timeout: they tick() after each piece of it, and every rank
// calls finish() when it has no more. Where any rank's `stop` is true, all throw VerifyStopped.
class Heartbeat {
 public:
  explicit Heartbeat(Group& group, std::function<bool()> stop = {}) : group_(group), stop_(std::move(stop)) {}

  void tick();
  void finish();

 private:
  bool somebody_works(bool this_rank);

  Group& group_;
  std::function<bool()> stop_;
};

}  // namespace isograd
