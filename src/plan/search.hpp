// The fastest layouts, the front, the laws and the recipe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/space.hpp"
#include "plan/time.hpp"

namespace isograd::planner {

// One problem's models, which share their caches.
struct Models {
  explicit Models(const Problem& problem);
  const Problem& problem;
  Pipelines pipelines{};
  MemoryModel memory;
  StepModel step;
};

struct Searched {
  std::vector<Planned> top{}, front{};
  std::optional<Planned> nearest{};  // where nothing fits: the one that lacks the fewest bytes
  std::int64_t candidates = 0, fitting = 0;
};
// Rules, then memory, then the least time, then the time; ties by the order of the space. Holds `top` and the
// front alone, so that memory does not grow with the candidates.
Searched search(Models& models, std::int64_t devices, const Options& options, bool with_front = true);

inline double gibibytes(double bytes) { return bytes / (1 << 30); }

// The same question of another cluster or job, which must outlive it.
inline Problem with(const Problem& of, const Cluster& cluster, const Work& work) {
  return {of.model, cluster, of.calibration, work, of.constants, of.program};
}

Planned planned(Models& models, const Candidate& candidate);  // with parts and intervals
std::string missing_text(Models& models, const Planned& nearest);
std::vector<Neighbour> neighbours_of(Models& models, const Planned& best);

// laws.cpp: each law of docs/planning.md as a root of the models above, not as a formula of its own.
std::vector<Law> laws_of(Models& models, const Planned& best);

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

// recipe.cpp: the recipe of docs/planning.md on these numbers, and its three ways out for a cluster larger
// than the batch.
std::vector<RecipeStep> recipe_of(Models& models, const Planned& best);
std::vector<WayOut> ways_out_of(Models& models, const Options& options);

}  // namespace isograd::planner
