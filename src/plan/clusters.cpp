// The table of devices and clusters: every number with its source.
#include <algorithm>
#include <iterator>
#include <string>

#include "plan/inputs.hpp"

namespace isograd::planner {
namespace {

// Where the columns of a row are from; other sources are named in the row.
//   bfloat16, best, memory, fast: stas00/ml-engineering, compute/accelerator/README.md and network/README.md
//     (commit 744d01e1). `best`: the best product that was measured there.
//   fp32, fp64: without sparsity: what matrix products of that type reach, so fp32 without TF32, fp64 by
//     tensor cores where the device has some.
//   Not compared with a source yet, and not to be printed as one: fp32 and fp64 of all but the B300, the
//     row of the V100, the networks of AMD's devices and of v6e, v4's links; AMD's float8 is twice its
//     bfloat16.
//   memory: a sheet's "80 GB" are GiB (an A100 of 40 shows 39.5 GiB); 186, 270 and 279 of Blackwell are what
//     devices show (verda.com/blog/gb300-nvl72-architecture).
//   TPUs: docs.cloud.google.com/tpu/docs, v4, v5e, v5p, v6e. Links "bidirectional", so half of it each way.
struct BuiltIn {
  const char *name, *source;
  double memory, memory_rate;                 // GiB, TB/s
  double fp64, fp32, bfloat16, float8, best;  // TFLOP/s; 0: not known
  std::int64_t per_host, joined;              // devices of a host, and of the fast link
  double fast, network;                       // GB/s each way, of a device
  const char* link = "NVLink";
};

constexpr const char* kDgx = "data sheets of the device and of DGX";
constexpr const char* kCloud = "data sheet of the device; network of the instance type";

constexpr BuiltIn kBuiltIns[] = {
    // V100: peak of fp16, since it has no bfloat16. DGX-1: 4 x 100 Gb/s for 8.
    {"v100", kDgx, 32, 0.9, 7.8, 15.7, 125, 0, 0, 8, 8, 150, 6.25},
    // DGX A100: 8 x 200 Gb/s. Bandwidth of the 40 GB part: glennklockwood.com/garden/processors/A100.
    {"a100-40", kDgx, 40, 1.555, 19.5, 19.5, 312, 0, 0, 8, 8, 300, 25},
    {"a100-80", kDgx, 80, 2.0, 19.5, 19.5, 312, 0, 271, 8, 8, 300, 25},
    {"aws-p4d", kCloud, 40, 1.555, 19.5, 19.5, 312, 0, 0, 8, 8, 300, 6.25},  // 4 x 100 Gb/s
    // DGX H100: 8 x 400 Gb/s.
    {"h100", kDgx, 80, 3.35, 67, 67, 989, 1979, 794.5, 8, 8, 450, 50},
    {"aws-p5", kCloud, 80, 3.35, 67, 67, 989, 1979, 794.5, 8, 8, 450, 50},       // 32 x 100 Gb/s
    {"gcp-a3", kCloud, 80, 3.35, 67, 67, 989, 1979, 794.5, 8, 8, 450, 12.5},     // 4 x 200 Gb/s
    {"gcp-a3-mega", kCloud, 80, 3.35, 67, 67, 989, 1979, 794.5, 8, 8, 450, 25},  // 8 x 200 Gb/s
    {"h100-96", "pytorch/torchtitan, docs/performance.md (commit 4d88a8a4): 500 W, HBM2e", 96, 2.4, 67, 67,
     989, 1979, 0, 8, 8, 450, 50},
    {"h200", kDgx, 141, 4.8, 67, 67, 989, 1979, 794.5, 8, 8, 450, 50},
    {"aws-p5en", kCloud, 141, 4.8, 67, 67, 989, 1979, 794.5, 8, 8, 450, 50},  // 16 x 200 Gb/s
    {"b200", kDgx, 180, 8, 37, 75, 2250, 4500, 1745, 8, 8, 900, 50},          // 8 x 400 Gb/s
    // fp8: NVIDIA/dgxc-benchmarking. Hosts of 4, NVLink over the rack.
    {"gb200", kDgx, 186, 8, 40, 75, 2500, 4900, 1822, 4, 72, 900, 50},
    // DGX B300: 8 x 800 Gb/s. fp64: glennklockwood.com/garden/processors/B300.
    {"b300", kDgx, 270, 8, 1.25, 75, 2250, 4500, 1769, 8, 8, 900, 100},
    {"gb300", kDgx, 279, 8, 1.3, 80, 2500, 5000, 0, 4, 72, 900, 100},  // 72 ConnectX-8
    // AMD: 64 GB/s to each of 7 peers. Network: hosts with 8 x 400 Gb/s.
    {"mi300x", kCloud, 192, 5.3, 163.4, 163.4, 1300, 2600, 668, 8, 8, 448, 50, "xGMI"},
    {"mi325x", kCloud, 256, 6, 163.4, 163.4, 1300, 2600, 785, 8, 8, 448, 50, "xGMI"},
    {"mi355x", kCloud, 288, 8, 78.6, 157.3, 2300, 4600, 1565, 8, 8, 448, 50, "xGMI"},
    // v4: 6 links of 50 GB/s (arXiv:2304.01433). Networks of v5e, v5p and v6e: 6.4 Tb/s for 256, 50 Gb/s for
    // each, 25.6 Tb/s for 256; v4 as v5p, which is assumed.
    {"tpu-v4", "docs.cloud.google.com/tpu/docs/v4", 32, 1.2, 0, 0, 275, 0, 0, 4, 4096, 300, 6.25, "ICI"},
    {"tpu-v5e", "docs.cloud.google.com/tpu/docs/v5e", 16, 0.819, 0, 0, 197, 0, 0, 8, 256, 200, 3.125, "ICI"},
    {"tpu-v5p", "docs.cloud.google.com/tpu/docs/v5p", 95, 2.765, 0, 0, 459, 459, 0, 4, 8960, 600, 6.25,
     "ICI"},
    {"tpu-v6e", "docs.cloud.google.com/tpu/docs/v6e", 32, 1.638, 0, 0, 918, 0, 0, 8, 256, 400, 12.5, "ICI"},
};

Cluster cluster_of(const BuiltIn& row) {
  // A step of a ring by NCCL (src/graph/tuning.cc, commit 5067397c, protocol Simple): 3.4 us over NVLink, and
  // 14 us over a network, times 1.4 from Ampere on. Not NCCL's devices: taken from it, so assumed.
  constexpr double kStepInside = 3.4e-6, kStepAcross = 1.4 * 14e-6;
  constexpr double kGiB = 1 << 30, kTera = 1e12, kGiga = 1e9;
  // A context with its libraries, NCCL's buffers and fragmentation.
  constexpr double kReserve = 1.5 * kGiB;
  constexpr std::int64_t kDevices = 64;  // until a user says how many
  const bool nccl = std::string_view(row.link) == "NVLink";
  const Origin origin = nccl ? Origin::kDataSheet : Origin::kAssumed;
  Cluster cluster;
  cluster.name = row.name;
  cluster.device = {.name = row.name,
                    .memory = row.memory * kGiB,
                    .memory_bandwidth = row.memory_rate * kTera,
                    .peak = {row.fp64 * kTera, row.fp32 * kTera, row.bfloat16 * kTera, row.float8 * kTera},
                    .best_found = {0, 0, row.best * kTera, 0},
                    .source = row.source};
  cluster.devices = kDevices;
  cluster.per_host = row.per_host;
  cluster.links = {{row.link, row.joined, kStepInside, row.fast * kGiga, origin},
                   {"network", kMostDevices, kStepAcross, row.network * kGiga, origin}};
  cluster.reserve = kReserve;
  return cluster;
}

const std::vector<Cluster>& table() {
  static const std::vector<Cluster> clusters = [] {
    std::vector<Cluster> made;
    std::ranges::transform(kBuiltIns, std::back_inserter(made), cluster_of);
    return made;
  }();
  return clusters;
}

}  // namespace

const Cluster* built_in(std::string_view name) {
  const auto found = std::ranges::find(table(), name, &Cluster::name);
  return found == table().end() ? nullptr : &*found;
}

std::vector<std::string> built_in_clusters() {
  std::vector<std::string> names;
  for (const Cluster& cluster : table()) names.push_back(cluster.name);
  return names;
}

}  // namespace isograd::planner
