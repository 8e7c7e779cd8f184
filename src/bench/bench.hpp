// isograd bench: our speed against a peer's, in the same run, taking turns.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace isograd {

struct BenchStepOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  std::vector<int> ranks{1, 2};    // 1: PyTorch eager; more: PyTorch DDP over Gloo
  std::filesystem::path json;      // where the records go; empty: nowhere
  double seconds = 24;             // of taking turns, for each case and number of ranks
  std::string python;              // empty: $PYTHON, .venv/bin/python here, python3
};

// "small", "medium", "communication", and "tiny", which only shows that the comparison works.
std::vector<std::string> bench_step_cases();

// `isograd bench step`: whole training steps (forward, backward, clip, AdamW) of one Llama, ours and
// PyTorch's, from the same weights on the same tokens with one thread a rank. Prints a table and writes
// records
// {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio"}; a ratio above 1 means that ours is faster.
// Returns 0 whatever the ratios are; 1 when the losses of the two differ, for then the comparison is void.
int bench_step(const BenchStepOptions& options);

// Hidden verb `isograd bench step-ours EXCHANGE RANKS`: our side, started by bench_step. Starts its ranks
// itself.
int bench_step_ours(const std::filesystem::path& exchange, int ranks);

}  // namespace isograd
