// verify for a configured run: the same data, model and layout that `isograd train` would use; and the
// smallest configuration that still fails.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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

struct Trial {
  RunConfig config;
  int ranks = 1;
};

// Names a trial's failure, independent of sizes; empty when nothing is. May throw
// ConfigError: such a configuration is impossible, and no failure.
using FailureOf = std::function<std::string(const Trial&)>;

struct Minimised {
  Trial trial;
  std::string failure;               // the one that was kept
  int tried = 0;                     // trials made
  std::vector<std::string> changes;  // "model.layers 4 -> 1", in the order of the configuration's keys
};

// Shrinks model, batch, accumulation and ranks and switches options off, as long as the same failure stays:
// each size to its least, else by halving the interval between a size that passes and one that fails, round
// after round until nothing shrinks. Local: no single change makes the result smaller. Nothing when `trial`
// does not fail, or `most_trials` are used up before it is known.
std::optional<Minimised> minimise(const Trial& trial, const FailureOf& failure_of, int most_trials = 400);

// The same for `isograd verify`: the first of `layouts` (as in verify_run) that fails on `ranks` thread ranks
// of this process. Nothing when all of them pass.
std::optional<Minimised> minimise_run(const RunConfig& config, int ranks,
                                      const std::vector<std::string>& layouts,
                                      const ChangeProblem& change = {});

// A configuration file that fails by itself, with the command that shows it.
std::string minimised_toml(const Minimised& minimised, const std::string& file);
std::string verify_command(const std::string& file, int ranks);

}  // namespace isograd
