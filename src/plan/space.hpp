// Every layout that `isograd train` accepts, in a fixed order. The rules are those of train/rules.hpp; no
// rule is written here.
#pragma once

#include <functional>
#include <vector>

#include "plan/problem.hpp"
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

}  // namespace isograd::planner
