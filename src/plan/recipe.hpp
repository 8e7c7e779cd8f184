// The recipe's arithmetic and tables, which need no search.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/planner.hpp"

namespace isograd::planner {

// Samples of a step and how often a data rank accumulates, where it computes `micro_batch` samples at a time.
struct BatchNumbers {
  std::int64_t samples = 0;       // tokens / sequence
  std::int64_t accumulation = 1;  // samples / (micro-batch * ranks), rounded up
  bool too_many_ranks = false;    // micro-batch * ranks is more than the samples

  // The three answers to too many ranks. Each alone makes the accumulation 1 on all ranks used.
  std::int64_t fewer_ranks = 0;  // samples / micro-batch
  double larger_batch = 0;       // in tokens: micro-batch * ranks * sequence
  std::int64_t smaller_micro_batch =
      0;  // samples / ranks; 0: a rank has not even one: another axis is needed
};
BatchNumbers batch_numbers(const Work& work, std::int64_t micro_batch, std::int64_t data_ranks);

// Bytes kept and elements sent for each parameter at N ranks, by persistent_bytes() and traffic_bytes().
struct ZeroRow {
  std::string strategy{}, kept_formula{}, sent_formula{};
  double kept = 0;                      // bfloat16 with masters and moments of AdamW
  double kept_with_fp32_gradients = 0;  // in addition to those in bfloat16
  double isograd_kept = 0;              // fp32 gradients instead of them, as isograd keeps them
  double sent = 0;                      // in parts of (N - 1)/N, as tables have it: of a ring without ends
};
std::vector<ZeroRow> zero_table(std::int64_t ranks);

}  // namespace isograd::planner
