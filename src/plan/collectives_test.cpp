// Collectives against the laws in closed form, where axes lie, and NCCL's own sums.
#include "plan/time.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "plan/problem.hpp"

namespace isograd::planner {
namespace {

Cluster flat(std::int64_t ranks) {
  return {.devices = ranks, .per_host = ranks, .links = {{"link", ranks, 5e-6, 1e11}}};
}
// Hosts of 8 on NVLink 450 GB/s, an adapter of 50 GB/s for each; latencies of a ring's steps in NCCL's
// tuning.cc.
Cluster hosts_of_8(std::int64_t count) {
  return {.devices = 8 * count,
          .per_host = 8,
          .links = {{"NVLink", 8, 3.4e-6, 450e9}, {"network", 8 * count, 19.6e-6, 50e9, Origin::kAssumed}}};
}

TEST(PlanCollectives, AreTheRingLaw) {
  for (const std::int64_t ranks : {2, 3, 8, 512}) {
    const Network network(flat(ranks), {}, 1, 1);
    const double n = static_cast<double>(ranks), bytes = 3.2e9;
    const double gather = (n - 1) * (5e-6 + bytes / n / 1e11);
    for (const Operation one : {Operation::kAllGather, Operation::kReduceScatter, Operation::kAllToAll})
      EXPECT_NEAR(network.seconds(one, bytes, {ranks, 1, 1}), gather, 1e-12 * gather);
    // Large, so that the ring goes before the tree.
    EXPECT_NEAR(network.seconds(Operation::kAllReduce, bytes, {ranks, 1, 1}), 2 * gather, 1e-12 * gather);
    EXPECT_NEAR(network.seconds(Operation::kSend, bytes, {2, 1, 1}), 5e-6 + bytes / 1e11, 1e-12);
  }
  EXPECT_EQ(Network(flat(8), {}, 1, 1).seconds(Operation::kAllReduce, 1e9, {1, 1, 1}), 0);
}

TEST(PlanCollectives, TakeATreeWhereLatencyCosts) {
  const Network network(hosts_of_8(64), {}, 1, 1);
  const double tree = 2 * (7 * 3.4e-6 + 6 * 19.6e-6) + 2 * 511.0 / 512 * 1e6 / 400e9 / kTreeShare;
  EXPECT_NEAR(network.seconds(Operation::kAllReduce, 1e6, {512, 1, 1}), tree, 1e-12);
  // A gather has none.
  EXPECT_GT(network.seconds(Operation::kAllGather, 1e6, {512, 1, 1}), 448 * 3.4e-6 + 63 * 19.6e-6);
}

TEST(PlanCollectives, SumStepsInsideAndBetweenHosts) {
  const Network network(hosts_of_8(4), {}, 0.8, 0.4);
  // 32 neighbours: 28 steps inside, 3 between; all 8 adapters of a host, 160 GB/s, are slower than NVLink.
  const auto whole = network.cost(Operation::kAllGather, 8e9, {32, 1, 1});
  EXPECT_NEAR(whole.latency, 28 * 3.4e-6 + 3 * 19.6e-6, 1e-15);
  EXPECT_NEAR(whole.transfer, 31.0 / 32 * 8e9 / 160e9, 1e-12);
  EXPECT_EQ(whole.origin, Origin::kAssumed);  // the network limits it
  // One of each host, while 7 other groups do the same: one adapter, no step inside.
  const auto apart = network.cost(Operation::kAllGather, 8e9, {4, 8, 8});
  EXPECT_NEAR(apart.latency, 3 * 19.6e-6, 1e-15);
  EXPECT_NEAR(apart.transfer, 0.75 * 8e9 / 20e9, 1e-12);
  // Alone it has all adapters, and what does not leave the host does not use them.
  EXPECT_NEAR(network.cost(Operation::kAllGather, 8e9, {4, 8, 1}).transfer, 0.75 * 8e9 / 160e9, 1e-12);
  EXPECT_NEAR(network.cost(Operation::kAllGather, 8e9, {8, 1, 1}).transfer, 0.875 * 8e9 / 360e9, 1e-12);
  // In an exchange among 32, 24/32 leave the host, through a rank's own adapter.
  EXPECT_NEAR(network.cost(Operation::kAllToAll, 8e9, {32, 1, 1}).transfer, 0.75 * 8e9 / 20e9, 1e-12);
}

TEST(PlanCollectives, LieWhereTheirAxesDo) {
  const Candidate candidate{.ranks = 64, .replicas = 2, .shards = 4, .cp_ring = 2, .tp = 2, .pp = 2};
  const auto expect = [&](Axis axis, std::int64_t ranks, std::int64_t stride, std::int64_t sharing) {
    const Reach reach = reach_of(candidate, axis, hosts_of_8(8));
    EXPECT_EQ(reach.ranks, ranks);
    EXPECT_EQ(reach.stride, stride);
    EXPECT_EQ(reach.sharing, sharing);
  };
  expect(Axis::kTp, 2, 1, 1);
  expect(Axis::kRing, 2, 2, 1);
  expect(Axis::kShard, 8, 2, 2);       // shards and ring: 16 ranks, 4 of a group in a host
  expect(Axis::kReplicate, 2, 16, 8);  // every rank of a host in a group of its own
  expect(Axis::kData, 16, 2, 2);
  expect(Axis::kStage, 2, 32, 8);
}

TEST(PlanCollectives, GoBehindWhatWasCalibrated) {
  Calibration calibration;
  calibration.collectives = {{"all_gather", "shm", 2, 1e-5, 4e9, 0.02}};
  const Network network(flat(8), calibration, 1, 1);
  const auto found = network.cost(Operation::kAllGather, 8e6, {2, 1, 1});
  EXPECT_EQ(found.origin, Origin::kCalibrated);
  EXPECT_NEAR(found.latency + found.transfer, 1e-5 + 4e6 / 4e9, 1e-15);
  EXPECT_EQ(network.cost(Operation::kAllGather, 8e6, {4, 1, 1}).origin, Origin::kDataSheet);
}

}  // namespace
}  // namespace isograd::planner
