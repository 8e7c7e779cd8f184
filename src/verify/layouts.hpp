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
// ranks, with one copy of the parameters (where `host_memory`: ranks can reach one another's) and without.
// Where the loss is a mean of replicas' means, only layouts with as many replicas as configured.
std::vector<LayoutChoice> layout_matrix(const RunConfig& config, int ranks, bool host_memory);
// The layouts that --layout asks for: names as above, kAllLayouts for the matrix, nothing for the configured
// one. kAllMeshes (meshes.hpp) asks for none of these.
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

// At most this many meshes are run; above it, a covering set: those that cover each axis at each of its
// sizes, each axis alone and each two axes together, wherever there is a mesh that does.
inline constexpr std::size_t kMostMeshes = 16;

// Heads of a model's attention, Task::heads().
using Heads = std::pair<std::int64_t, std::int64_t>;

bool splits_heads(const Heads& heads, int ulysses);  // over so many ranks of Ulysses

// Every way to factor `ranks` over pp, dp_replicate, dp_shard, cp_ring, cp_ulysses and tp, with ep where the
// model may have experts, that the configuration allows, by what check() says of it, and the model: Ulysses
// deals its heads over ranks. Strategies that do not shard have no replicas beside shards, and a mean of
// replicas' means keeps its replicas. The configured mesh comes first. Pure: the same on every rank.
ProposedMeshes propose_meshes(const RunConfig& config, int ranks, const Heads& heads,
                              std::size_t most = kMostMeshes);

// Runs what is proposed, in order, and adds each verdict to `verdict`. What `verify_mesh` refuses by a
// ConfigError counts as not admissible; a verdict without layouts, on a step that ended in an error, fails
// all. Collective, as `verify_mesh` is; rank 0's MeshesTried is complete.
MeshesTried try_meshes(const RunConfig& config, int ranks, const Heads& heads, Verdict& verdict,
                       const std::function<Verdict(const MeshChoice&)>& verify_mesh);

// The fewest axes that tell the failed meshes from the others: "wrong along tp: ..." or "right with tp alone
// (tp 4) and with cp_ring alone (cp_ring 4), wrong together: ...". Empty: none failed.
std::vector<std::string> guilty_axes(const std::vector<MeshesTried::One>& tried);

// Another proof of the same step: its layouts join those of the first.
void join(Verdict& verdict, Verdict more);

}  // namespace isograd
