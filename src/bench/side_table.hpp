// Sides that take turns over whole steps: their commands, and the table of what they took.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/rounds.hpp"

namespace isograd {

// Ranks of ours under a strategy (strategy.hpp).
Side our_side(const std::filesystem::path& exchange, const std::string& strategy, const std::string& title,
              int ranks);
// Processes of a script of bench/peers in one of its modes.
Side peer_side(const std::filesystem::path& exchange, const std::string& python, const std::string& script,
               const std::string& mode, const std::string& title, int ranks);

struct SideTable {
  std::string bench, name;  // of records
  std::size_t ours = 1;     // the first sides, in rows with ratios
  std::size_t peers = 1;    // from this side on they are what others are compared with
  double products = 0;      // seconds of a rank's matrix products alone; 0: not timed
};

// Prints each side's step and how much faster each of ours is than each peer, and adds records. False where
// the first turn of a side does not agree with the last side's; that is printed.
bool print_sides(const SideTable& table, const std::vector<SideResult>& results,
                 nlohmann::ordered_json& records);

}  // namespace isograd
