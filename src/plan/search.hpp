// The space of layouts, the fastest of them, the front, the laws and the recipe.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/time.hpp"
#include "train/rules.hpp"

namespace isograd::planner {

// The values that each key is tried with. A test takes the product of all of them through check_but_devices()
// and compares.
struct Space {
  std::int64_t devices = 1;
  std::vector<std::int64_t> sizes{};  // of an axis: the divisors of `devices`
  std::vector<std::int64_t> stages_per_rank{1, 2, 3, 4, 6, 8, 12};
  std::vector<Strategy> strategies{};
  std::vector<Schedule> schedules{};
  std::vector<std::int64_t> bucket_bytes{};  // decided after the layout (best_bucket_bytes), not enumerated
  bool share_parameters = false;
};
Space space_of(const Problem& problem, std::int64_t devices);
// Sequences of a micro-batch of a data rank that has `samples` in a step: powers of two and divisors,
// ascending.
std::vector<std::int64_t> micro_batches_of(std::int64_t samples);

LayoutNumbers numbers_of(const Candidate& candidate, const Work& work);

// The axes of one mesh: what is the same for all candidates on it. Meshes come in lexicographic order of
// (pp, stages_per_rank, tp, cp_ring, cp_ulysses, ep, replicas); accepted ones alone.
using VisitMesh = std::function<void(const Candidate& mesh)>;
void for_each_mesh(const Problem& problem, const Space& space, const VisitMesh& visit);
// Strategy, schedule, micro-batch, checkpointing, reduce_once and sharing on that mesh; accepted ones alone.
// `visit` returns false to leave out larger micro-batches of the same kind (they need more memory).
using VisitCandidate = std::function<bool(const Candidate& candidate)>;
void for_each_candidate(const Problem& problem, const Space& space, const Candidate& mesh,
                        const VisitCandidate& visit);

// The most devices of whole hosts, at most `devices`, that some layout can use: for prime numbers of them.
std::int64_t usable_devices(const Problem& problem, std::int64_t devices);

// Whether tests prove this combination of axes, strategy and schedule (tests/hybrid_cells.hpp; held by a
// test).
bool is_proved(const Candidate& candidate);

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

// laws.cpp: each law of docs/planning_reference.md as a root of the models above, not as a formula of its
// own.
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
