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
#include "isograd/world.hpp"
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

// Every layout that `ranks` allow: each strategy, sharded ones with each number of replicas that divides the
// ranks, with one copy of the parameters (where ranks share `host_memory`) and without. A mean of replicas'
// means keeps the configured number of replicas.
std::vector<LayoutChoice> layout_matrix(const RunConfig& config, int ranks, bool host_memory);
// The layouts that --layout asks for: names as above, kAllLayouts for the matrix, nothing for the configured
// one. kAllMeshes asks for none of these.
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

// At most this many meshes are run; above it, a set that covers each axis at each of its sizes, each axis
// alone and each two axes together.
inline constexpr std::size_t kMostMeshes = 16;

// Heads of a model's attention, Task::heads().
using Heads = std::pair<std::int64_t, std::int64_t>;

bool splits_heads(const Heads& heads, int ulysses);  // over this many ranks of Ulysses

// Every way to factor `ranks` over the axes (ep where the model may have experts) that check() and the
// model's heads allow; a mean of replicas' means keeps its replicas. The configured mesh comes first. The
// same on every rank.
ProposedMeshes propose_meshes(const RunConfig& config, int ranks, const Heads& heads,
                              std::size_t most = kMostMeshes);

// Runs what is proposed and adds each verdict to `verdict`. A ConfigError of `verify_mesh`: not admissible; a
// verdict without layouts, of a step that ended in an error, fails all. Collective; rank 0's is complete.
MeshesTried try_meshes(const RunConfig& config, int ranks, const Heads& heads, Verdict& verdict,
                       const std::function<Verdict(const MeshChoice&)>& verify_mesh);

// The fewest axes that tell the failed meshes from the others: "wrong along tp: ..." or "right with tp alone
// (tp 4) and with cp_ring alone (cp_ring 4), wrong together: ...". Empty: none failed.
std::vector<std::string> guilty_axes(const std::vector<MeshesTried::One>& tried);

// Another proof of the same step: its layouts join those of the first.
void join(Verdict& verdict, Verdict more);

}  // namespace isograd
