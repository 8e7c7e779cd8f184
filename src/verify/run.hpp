// verify for a configured run: layouts and meshes by name, the problem, the smallest failing configuration.
#pragma once

#include "isograd/verify.hpp"
#include "train/config.hpp"

namespace isograd {

// A strategy and what of [parallel] goes before the configuration.
struct LayoutChoice {
  std::string strategy;
  std::optional<std::int64_t> replicas{};
  std::optional<bool> share_parameters{};

  std::string text() const;              // as parse_layout() reads it: "zero2:replicas=2:share=off"
  RunConfig in(RunConfig config) const;  // the configuration with this layout
};

inline constexpr const char* kAllLayouts = "all";

// ConfigError on anything that is not STRATEGY[:replicas=N][:share=on|off].
LayoutChoice parse_layout(const std::string& text);

// Every layout that `ranks` allow: each strategy, with each number of replicas, with and without one copy of
// the parameters (`host_memory`). A mean of replicas' means keeps the configured number of replicas.
std::vector<LayoutChoice> layout_matrix(const RunConfig& config, int ranks, bool host_memory);
// The layouts that --layout names; kAllLayouts is the matrix, nothing the configured one, kAllMeshes none.
std::vector<LayoutChoice> chosen_layouts(const RunConfig& config, const std::vector<std::string>& names,
                                         const World& world);

// --layout meshes: the configured strategy on other meshes of as many ranks; part of --layout all.
inline constexpr const char* kAllMeshes = "meshes";

struct MeshChoice {
  std::string name;        // "tp 2 x dp_shard 2"
  std::vector<Axis> axes;  // of more than one rank, outermost first, then ep
  RunConfig config;
};

struct ProposedMeshes {
  std::vector<MeshChoice> run;
  std::vector<std::string> left, refused;  // MeshesTried
};

// Above this many meshes, a set is run that covers each axis alone, at each size, and each two axes.
inline constexpr std::size_t kMostMeshes = 16;

// Heads of a model's attention, Task::heads().
using Heads = std::pair<std::int64_t, std::int64_t>;

bool splits_heads(const Heads& heads, int ulysses);  // over this many ranks of Ulysses

// Every way to factor `ranks` over the axes that check() and the model's heads allow, the configured one
// first; a mean of replicas' means keeps its replicas. The same on every rank.
ProposedMeshes propose_meshes(const RunConfig& config, int ranks, const Heads& heads,
                              std::size_t most = kMostMeshes);

// Runs the proposed meshes and joins their verdicts. A ConfigError of `verify_mesh`: not admissible; a
// verdict without layouts fails all. Collective; rank 0's is complete.
MeshesTried try_meshes(const RunConfig& config, int ranks, const Heads& heads, Verdict& verdict,
                       const std::function<Verdict(const MeshChoice&)>& verify_mesh);

// The fewest axes that tell failed meshes from others: "wrong along tp: ...", "right with tp alone (tp 4) and
// with cp_ring alone (cp_ring 4), wrong together: ...". Empty: none failed.
std::vector<std::string> guilty_axes(const std::vector<MeshesTried::One>& tried);

// Another proof of the same step: its layouts join those of the first.
void join(Verdict& verdict, Verdict more);

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
// verifies a small step with the present weights every verify.every. Returns, on all, why the run must stop.
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
