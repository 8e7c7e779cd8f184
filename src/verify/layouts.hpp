// The layouts and meshes that a configured run can be verified on, by name, and which axes are to blame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

}  // namespace isograd
