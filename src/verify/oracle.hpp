// The outside oracle: one process, the whole batch, plain LibTorch.
#pragma once

#include "isograd/verify.hpp"

namespace isograd {

struct OracleStep {
  StepFigures figures;
  std::vector<std::string> names;                     // trainable parameters, in the model's order
  std::vector<at::Tensor> gradients;                  // on the CPU, fp64 for fp64 parameters, otherwise fp32
  std::vector<std::pair<std::string, double>> terms;  // of the loss, without their weights
};

// How the gradient is clipped: as a whole, or the parameters that each pattern fits by their own norm, and
// the rest by `max_norm`. 0: not.
struct OracleClip {
  double max_norm = 0;
  std::vector<ClipGroup> groups{};
};
inline OracleClip clip_of(const VerifyProblem& problem) {
  return {problem.step.max_norm, problem.clip_groups};
}

// Gradients of a scalar in `leaves`, dense (embeddings can make sparse ones); undefined where unused.
std::vector<at::Tensor> dense_gradients(const at::Tensor& scalar, const std::vector<at::Tensor>& leaves);

// The loss of each token [T], 0 where it has no target.
at::Tensor plain_token_losses(const at::Tensor& logits, const Batch& batch, const DeclaredLoss& declared);

// The step of `model` on the whole batch under the declared loss: it counts, sums, takes the norm and clips
// by itself, and shares with the product only the model's forward. Where groups are clipped apart,
// `gradients` are those after the clip, and the norm is theirs (and `unclipped_norm` the one before).
// `parts`: the whole batch once, or what each replica sees where the loss is a mean of theirs.
// `after_micro_batch` is called after each micro-batch.
OracleStep oracle_step(const VerifyModel& model, const std::vector<MicroBatches>& parts,
                       const DeclaredLoss& declared, const OracleClip& clip,
                       const std::function<void()>& after_micro_batch);

// The gradient that `part` of the step would have alone, but for samples that lie in it only partly: their
// tokens weigh what they weigh in the `whole`. Times part / whole of what the mean counts it is the part's
// share of the step's gradient.
OracleStep oracle_part(const VerifyModel& model, const MicroBatches& part, const MicroBatches& whole,
                       const DeclaredLoss& declared, const std::function<void()>& after_micro_batch);

// Makes `updates` such steps on the same data, each followed by an update of plain LibTorch: the values of
// the trainable parameters afterwards, and for each ‖p − p0‖ and the error allowed in ‖p − p64‖ where every
// gradient may be off by E1's 1e-10 s. Moves the model's parameters.
struct OracleUpdates {
  std::vector<at::Tensor> parameters;
  std::vector<double> moved, allowed;
};
OracleUpdates oracle_updates(const VerifyModel& model, const std::vector<MicroBatches>& parts,
                             const DeclaredLoss& declared, const OracleClip& clip,
                             const OptimizerOptions& options, int updates,
                             const std::function<void()>& after_micro_batch);

}  // namespace isograd
