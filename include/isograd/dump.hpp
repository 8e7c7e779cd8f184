// What one training step says of itself, whoever made it: the currency of comparison and diagnosis.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

// What a step says of itself, beside the gradient.
struct StepFigures {
  double loss = 0;
  std::int64_t targets = 0;
  std::int64_t tokens = 0;
  double norm = 0;  // of the whole gradient, before clipping
  double clip_coefficient = 1;
};

// One optimizer step. A field that its writer did not record is empty, or NaN; what needs it is then not
// claimed. Lists by parameter have the order of `gradients`.
struct StepDump {
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  // Whole (not sharded), summed over ranks and micro-batches as the optimizer would see them, before
  // clipping.
  Named gradients;
  StepFigures figures;
  std::vector<std::int64_t>
      samples;  // ids of the samples seen, sorted; an id once for each time it was counted
  std::vector<std::vector<std::int64_t>> counts;  // [rank][micro-batch] targets that carry loss
  std::vector<std::pair<std::string, int>> axes;  // {"dp_shard", 4}, ..., outermost first
  std::string precision;                          // "fp64", "fp32", "bf16"

  std::vector<std::pair<std::string, double>> terms;  // of the loss, each by itself, without its weight
  // By how much one update of plain SGD with learning rate 1 lowers each parameter: the gradient as it was
  // applied, after clipping.
  Named applied;
  // By parameter, on how many ranks an element counts in norms: least and most over its elements. 1 and 1
  // where each has one owner.
  std::vector<std::pair<std::int64_t, std::int64_t>> owners;

  // What a rank says for itself.
  struct RankView {
    // xxHash of the bits of each parameter before the step, and of each gradient as this rank has it.
    std::vector<std::uint64_t> initial, gradients;
    double spread = 0;      // largest ‖g − g of rank 0‖ / ‖g of rank 0‖ over the parameters
    double owned_norm = 0;  // of the elements that this rank counts
    double norm = std::numeric_limits<double>::quiet_NaN();         // of the whole gradient, as it has it
    double bytes_moved = std::numeric_limits<double>::quiet_NaN();  // to make the step
  };
  std::vector<RankView> ranks;
};

// What a diagnosis says.
struct Finding {
  std::string id;        // class of the diagnosis: "averaged_over_axis", "mean_of_rank_means", ..., "unknown"
  std::string sentence;  // in words: "all parameters scaled by 1/4: averaged over dp_shard (4)"
  std::vector<std::string> evidence;  // what was run, and the numbers
};

}  // namespace isograd
