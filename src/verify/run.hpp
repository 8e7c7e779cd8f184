// verify for a configured run, and the smallest configuration that still fails.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"
#include "train/config.hpp"

namespace isograd {

// Lets a caller, or a test that plants a fault, change the problem before it is verified. On every rank.
using ChangeProblem = std::function<void(VerifyProblem&, World&)>;

// Called on rank 0 as the number-th of `total` layouts begins; number 0: the plain step before the first.
using LayoutBegins = std::function<void(std::int64_t number, std::int64_t total, const std::string& layout)>;

// Collective: one step of the configured batch. `layouts` as chosen_layouts() reads them, and "meshes".
Verdict verify_run(const RunConfig& config, World& world, const std::vector<std::string>& layouts = {},
                   const ChangeProblem& change = {}, const TakeDump& take_dump = {},
                   const LayoutBegins& begins = {});

// Makes the meshes of models and of layouts from configured grids; tests replace them.
using MakeMesh = std::function<Mesh(const World& world, const Grid& grid)>;
inline Mesh plain_mesh(const World& world, const Grid& grid) { return Mesh(world, grid); }
struct MeshesOfProblem {
  MakeMesh model = plain_mesh, layouts = plain_mesh;
};

// Collective: the problem of verify_run(). Keeps a reference to `world`.
VerifyProblem configured_problem(const RunConfig& config, World& world,
                                 const std::vector<std::string>& layouts = {},
                                 const MeshesOfProblem& meshes = {});

// Collective, for TrainerHooks::on_finish: the same with the weights as they are now.
Verdict verify_finished(FinishedRun& run, const ChangeProblem& change = {});

// Collective, for TrainerHooks::check: compares replicas bit for bit every verify.checksums_every steps and
// verifies a small step with the weights of now every verify.every. Returns why the run must stop, on all
// ranks.
std::string check_running(RunningRun& run, const ChangeProblem& change = {});

struct Trial {
  RunConfig config;
  int ranks = 1;
};

// Names a trial's failure, independent of sizes; empty: none, as for an impossible trial (ConfigError).
using FailureOf = std::function<std::string(const Trial&)>;

struct Minimised {
  Trial trial;
  std::string failure;               // the one that was kept
  int tried = 0;                     // trials made
  std::vector<std::string> changes;  // "model.layers 4 -> 1", in the order of the configuration's keys
};

// Shrinks sizes and ranks and switches options off as long as the same failure stays, each to its least, else
// by bisection, until no single change is left. Nothing when `trial` does not fail within `most_trials`.
std::optional<Minimised> minimise(const Trial& trial, const FailureOf& failure_of, int most_trials = 400);

// The same for the first of `layouts` (as in verify_run) that fails on `ranks` thread ranks.
std::optional<Minimised> minimise_run(const RunConfig& config, int ranks,
                                      const std::vector<std::string>& layouts,
                                      const ChangeProblem& change = {});

// A configuration file that fails by itself, with the command that shows it.
std::string minimised_toml(const Minimised& minimised, const std::string& file);
std::string verify_command(const std::string& file, int ranks);

}  // namespace isograd
