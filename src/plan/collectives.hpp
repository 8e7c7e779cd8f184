// Seconds of a collective: alpha-beta by level of the network and by where an axis lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/planner.hpp"

namespace isograd::planner {

enum class Operation : std::uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kSend };
std::string_view name_of(Operation operation);  // "all_reduce", as calibrations have it
enum class Axis : std::uint8_t { kTp, kUlysses, kRing, kShard, kReplicate, kData, kExpert, kStage };

// `ranks` ranks at the distance `stride` from one another; as many groups as share a host's network at a
// time.
struct Reach {
  std::int64_t ranks = 1, stride = 1, sharing = 1;
  bool in_place = false;  // of gradients and parameters: in memory that ranks of a host share
};
// Backends of calibrated collectives: tensors in a rank's own memory, and in memory that ranks share.
inline constexpr const char *kOwnMemory = "shm", *kInPlace = "shm in place";
// Axes stand outermost first: pp, dp_replicate, dp_shard, cp_ring, cp_ulysses, tp (docs/hosts.md). kData: all
// that a gradient is summed over; kExpert: neighbours among the ranks with other tokens.
Reach reach_of(const Candidate& candidate, Axis axis, const Cluster& cluster);
// The same for any group; its like for other ranks work at the same time.
Reach reach_of(std::int64_t ranks, std::int64_t stride, const Cluster& cluster);

class Network {
 public:
  Network(const Cluster& cluster, const Calibration& calibration, double share_inside, double share_across);
  // `bytes`: of the whole buffer, as one rank has it before (reduce) or after (gather). A ring, level by
  // level: latency * steps inside + latency * steps across + bytes that the slowest link carries / its
  // bandwidth; an all-reduce takes a tree where that is faster. A calibrated collective of this size and
  // number of ranks goes before the formula.
  double seconds(Operation operation, double bytes, const Reach& reach) const;
  // The two parts of seconds(), for the laws of docs/planning.md.
  struct Cost {
    double latency = 0, transfer = 0;
    std::string level{};  // that limits it
    Origin origin = Origin::kDataSheet;
  };
  Cost cost(Operation operation, double bytes, const Reach& reach) const;

 private:
  Cluster cluster_;
  Calibration calibration_;
  double share_inside_, share_across_;
};

}  // namespace isograd::planner
