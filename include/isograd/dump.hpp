// What one training step says of itself, whoever made it: the currency of comparison and diagnosis.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "isograd/grid.hpp"

namespace isograd {

// What a step says of itself, beside the gradient.
struct StepFigures {
  double loss = 0;
  std::int64_t targets = 0;
  std::int64_t tokens = 0;
  double norm = 0;  // of the whole gradient, before clipping
  double clip_coefficient = 1;
  // Of a step that clips groups apart, whose gradient and `norm` are those after the clip: the norm before.
  double unclipped_norm = std::numeric_limits<double>::quiet_NaN();
};

inline constexpr std::int64_t kNotRecorded = -1;  // a count that its writer left out

// What a diagnosis says.
struct Finding {
  std::string id;        // class of the diagnosis: "averaged_over_axis", "mean_of_rank_means", ..., "unknown"
  std::string sentence;  // in words: "all parameters scaled by 1/4: averaged over dp_shard (4)"
  std::vector<std::string> evidence;  // what was run, and the numbers
};

// One optimizer step. A field that its writer did not record is empty, NaN or, for a count, kNotRecorded;
// what needs it is then not claimed. Lists by parameter have the order of `gradients`.
struct StepDump {
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  // Whole (not sharded), summed over ranks and micro-batches as the optimizer would see them, before
  // clipping.
  Named gradients;
  StepFigures figures;
  std::vector<std::int64_t>
      samples;  // ids of the samples seen, sorted; an id once for each time it was counted
  std::vector<std::vector<std::int64_t>> counts;  // [rank][micro-batch] targets that carry loss
  // [rank][micro-batch] what the declared mean counts there, if that is not targets: "samples" (a part of one
  // counts as that part of its targets), "weights". Not written to files.
  std::vector<std::vector<double>> amounts{};
  std::string counted{};
  std::vector<Axis> axes;  // {"dp_shard", 4}, ..., outermost first
  std::string precision;   // "fp64", "fp32", "bf16"

  std::vector<std::pair<std::string, double>> terms;  // of the loss, each by itself, without its weight
  // Figures that were recorded and are no number, by their keys in step.json ("loss", "norm",
  // "clip_coefficient", "terms.NAME", "scales.NAME", "ranks.0.norm"): NaN anywhere else means not recorded.
  std::vector<std::string> not_numbers{};
  // Factors of the trainer's own that a gradient may have been multiplied by: {"learning_rate", 0.1}, ...
  std::vector<std::pair<std::string, double>> scales{};
  // By how much one update of plain SGD with learning rate 1 lowers each parameter: the gradient as it was
  // applied, after clipping.
  Named applied;
  // By parameter, on how many ranks an element counts in norms: least and most over its elements. 1 and 1
  // where each has one owner.
  std::vector<std::pair<std::int64_t, std::int64_t>> owners;

  // By parameter, of a reference: how far its gradient moves where the parameters move by no more than
  // rounding in the precision of the run is worth, the largest ‖g64(p + Δp) − g64(p)‖ of several Δp. Of a
  // loss whose derivative jumps (ReLU) that is far more than the rounding of sums: no run in that precision
  // can tell these gradients apart, so that it may be off by as much. Empty: it is held to what gradients
  // without jumps are.
  std::vector<double> moves{};
  // By parameter, of one process in a lower precision: the largest distance of several runs from the same
  // step in fp64.
  std::vector<double> rounding{};

  // What a rank says for itself.
  struct RankView {
    // xxHash of the bits of each parameter before the step, and of each gradient as this rank has it.
    std::vector<std::uint64_t> initial, gradients;
    double spread = 0;  // largest ‖g − g of rank 0‖ / ‖g of rank 0‖ over the parameters
    double owned_norm = std::numeric_limits<double>::quiet_NaN();   // of the elements that this rank counts
    double norm = std::numeric_limits<double>::quiet_NaN();         // of the whole gradient, as it has it
    double bytes_moved = std::numeric_limits<double>::quiet_NaN();  // to make the step
  };
  std::vector<RankView> ranks;

  // Of parameters whose copies differ between ranks that see the same batch: their sum over these ranks, and
  // the axes that they lie along.
  struct PeerSum {
    std::string name, axes;
    at::Tensor sum;
  };
  std::vector<PeerSum> peer_sums{};
  // Parameters that ranks have parts of, and the axis that each is cut along. Not written to files.
  struct CutParameter {
    std::string name;
    Axis axis;
  };
  std::vector<CutParameter> cut{};

  // The recorder saw these by itself to be wrong or not proven, apart from all that is compared: a parameter
  // that no optimizer holds. Ids are those of a diagnosis; without evidence.
  std::vector<Finding> findings{};

  // [rank][micro-batch] the part of `gradients` that its tokens made, so that all of them add up to it. With
  // it, wrong weights can be told where the step cannot be made again. Empty where there are no tokens.
  std::vector<std::vector<Named>> shares{};
};

// A dump as a directory: gradients.safetensors and step.json, with applied.safetensors and
// share-RANK-MICROBATCH.safetensors where there is any (docs/verify.md). Written beside and renamed: whole or
// not at all. An earlier dump of that name is replaced, any other directory is refused (ConfigError).
void write_dump(const StepDump& dump, const std::filesystem::path& directory);

// Tensors come back in fp64, in the order that was recorded, else by name. The files are not trusted:
// ConfigError names the file and the key on anything that is not a dump.
StepDump read_dump(const std::filesystem::path& directory);

}  // namespace isograd
