// What a run sends between hosts, and what is said of its mesh where that is more than it need be.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "isograd/world.hpp"

namespace isograd {

// Of ranks on one host: nothing, at no cost.
class HostTraffic {
 public:
  HostTraffic(const World& world, const Grid& grid);
  // Which ranks are on which host, then what had better be otherwise.
  const std::vector<std::string>& said() const { return said_; }
  void before_step();
  // Of all ranks together, since before_step(); empty: there is one host. Collective.
  std::optional<std::int64_t> across_in_step();
  // "rank 0: 1.5 MB across, 6.0 within; rank 1: ...", of the last step. Collective; the text is on rank 0.
  std::string by_rank();

 private:
  const World* world_;
  bool several_;
  std::vector<std::string> said_{};
  HostBytes before_{}, last_{};
};

}  // namespace isograd
