// The layouts that a configured run can be verified on, by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

}  // namespace isograd
