// The fastest layouts, the front, the laws and the recipe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/recipe.hpp"
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
inline Problem with(const Problem& problem, const Cluster& cluster, const Work& work) {
  return {.model = problem.model,
          .cluster = cluster,
          .calibration = problem.calibration,
          .work = work,
          .constants = problem.constants,
          .program = problem.program};
}

Planned planned(Models& models, const Candidate& candidate);  // with parts and intervals
std::string missing_text(Models& models, const Planned& nearest);
std::vector<Neighbour> neighbours_of(Models& models, const Planned& best);

// laws.cpp: each law of docs/planning.md as a root of the models above, not as a formula of its own.
std::vector<Law> laws_of(Models& models, const Planned& best);

// recipe.cpp: the recipe of docs/planning.md on these numbers, and its three ways out for a cluster larger
// than the batch.
std::vector<RecipeStep> recipe_of(Models& models, const Planned& best);
std::vector<WayOut> ways_out_of(Models& models, const Options& options);

}  // namespace isograd::planner
