// verify for a configured run: the same data, model and layout that `isograd train` would use.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"
#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd {

// Lets a caller, or a test that plants a fault, change the problem before it is verified. On every rank.
using ChangeProblem = std::function<void(VerifyProblem&, World&)>;

// Told on rank 0 what begins: the number-th of `total` layouts, or, as number 0, the plain step before the
// first.
using LayoutBegins = std::function<void(std::int64_t number, std::int64_t total, const std::string& layout)>;

// Collective: one step of the configured batch, from the configured initial weights. `layouts` as
// parse_layout() reads them, "all": every one that the ranks allow, with and without accumulation, or
// "meshes": the configured one on other meshes of the ranks (meshes.hpp); empty: the configured one.
// ConfigError on an unknown layout.
Verdict verify_run(const RunConfig& config, World& world, const std::vector<std::string>& layouts = {},
                   const ChangeProblem& change = {}, const TakeDump& take_dump = {},
                   const LayoutBegins& begins = {});

// How the meshes of a problem are made, of grids that the configuration gives: that which models communicate
// over, and those of layouts. Tests put a mesh of groups that do something else in their place.
using MakeMesh = std::function<Mesh(const World& world, const Grid& grid)>;
inline Mesh plain_mesh(const World& world, const Grid& grid) {
  return Mesh(world, grid);
}
struct MeshesOfProblem {
  MakeMesh model = plain_mesh, layouts = plain_mesh;
};

// Collective: what verify_run() judges, for those who make the step themselves. Keeps a reference to `world`.
VerifyProblem configured_problem(const RunConfig& config, World& world,
                                 const std::vector<std::string>& layouts = {},
                                 const MeshesOfProblem& meshes = {});

OptimizerOptions configured_optimizer(const RunConfig& config);

// Collective: the same for a run that has just ended, with the weights as they are now. For
// TrainerHooks::on_finish.
Verdict verify_finished(FinishedRun& run, const ChangeProblem& change = {});

// Collective, for TrainerHooks::check: where verify.checksums_every divides the step, what replicas keep is
// compared bit for bit; where verify.every does, a step of at most ranks + 1 short packs, others each time,
// is verified with the weights as they are now. Why the run must stop, on every rank; empty when all is well.
std::string check_running(RunningRun& run, const ChangeProblem& change = {});

}  // namespace isograd
