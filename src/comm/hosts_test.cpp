// The host of a rank, and the text for axes across hosts.
#include "isograd/world.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "comm/hosts/meeting.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Grid grid(std::vector<Axis> axes) { return Grid(std::move(axes)); }

TEST(Hosts, NeighboursShareAHostSoThatOuterAxesLieAcross) {
  const Grid all = grid({{"pp", 2}, {"dp_replicate", 2}, {"dp_shard", 1}, {"tp", 2}});
  EXPECT_THAT(axes_across(all, planned_hosts(8, 2)), ElementsAre("pp"));
  EXPECT_THAT(axes_across(all, planned_hosts(8, 4)), ElementsAre("pp", "dp_replicate"));
  EXPECT_THAT(axes_across(all, planned_hosts(8, 8)), ElementsAre("pp", "dp_replicate", "tp"));
  EXPECT_THAT(axes_across(all, planned_hosts(8, 1)), IsEmpty());
  EXPECT_THAT(said_of_hosts(all, planned_hosts(8, 4)), IsEmpty());
  EXPECT_EQ(hosts_text(all, planned_hosts(8, 2)),
            "2 hosts (host0: ranks 0-3; host1: ranks 4-7), across: pp, within: dp_replicate, tp");
  EXPECT_EQ(hosts_text(all, planned_hosts(8, 1)), "");
}

TEST(Hosts, AxesThatHadBetterLieWithinAreNamedWithTwoRanks) {
  const Grid all = grid({{"dp_replicate", 2}, {"dp_shard", 1}, {"tp", 2}});
  const Hosts interleaved{{0, 1, 0, 1}, {"a", "b"}};
  EXPECT_THAT(axes_across(all, interleaved), ElementsAre("tp"));
  EXPECT_THAT(said_of_hosts(all, interleaved),
              ElementsAre(HasSubstr("tp crosses hosts (rank 0 on a, rank 1 on b)")));
  EXPECT_EQ(hosts_text(all, interleaved),
            "2 hosts (a: ranks 0, 2; b: ranks 1, 3), across: tp, within: dp_replicate");
  // Three ranks on one host and one on the other: a single pair of tp crosses hosts.
  EXPECT_THAT(said_of_hosts(all, {{0, 0, 0, 1}, {"a", "b"}}),
              ElementsAre(HasSubstr("tp crosses hosts (rank 2 on a, rank 3 on b)")));
  const Grid views = grid({{"dp_replicate", 1}, {"dp_shard", 4}, {"cp_ring", 2}, {"tp", 1}})
                         .viewed({"dp_shard", "cp_ring"}, {{"edp", 2}, {"ep", 4}});
  EXPECT_THAT(said_of_hosts(views, planned_hosts(8, 2)),
              ElementsAre(HasSubstr("dp_shard crosses hosts (rank 0 on host0, rank 4 on host1)")));
  EXPECT_THAT(said_of_hosts(views, planned_hosts(8, 4)),
              ElementsAre(HasSubstr("ep crosses hosts"), HasSubstr("parallel.replicas = 4")));
}

// Groups whose sums are copies of each other must add them in the same order, or use only MPI.
TEST(Hosts, GroupsOfAMeshThatLieOnHostsOtherwiseThanTheirSiblingsAreFound) {
  const auto alike = [](const Grid& all, std::vector<int> placing, const std::vector<int>& ranks) {
    return siblings_split_alike(all, {std::move(placing), {"a", "b", "c"}}, ranks);
  };
  const Grid all = grid({{"dp_replicate", 1}, {"dp_shard", 3}, {"tp", 2}});
  for (const std::vector<int>& ranks : {std::vector{0, 2, 4}, {1, 3, 5}}) {
    EXPECT_TRUE(alike(all, {0, 0, 0, 0, 1, 1}, ranks));   // tp within
    EXPECT_TRUE(alike(all, {0, 1, 0, 1, 0, 1}, ranks));   // each group on its own host
    EXPECT_TRUE(alike(all, {0, 0, 1, 1, 0, 0}, ranks));   // alternating hosts
    EXPECT_FALSE(alike(all, {0, 0, 0, 1, 1, 1}, ranks));  // 0, 2 | 4 and 1 | 3, 5
    EXPECT_FALSE(alike(all, {0, 0, 0, 0, 0, 1}, ranks));  // one of them has all ranks on one host
  }
  EXPECT_FALSE(alike(all, {0, 0, 0, 1, 1, 1}, {0, 1}));  // along tp: split for ranks 2 and 3
  EXPECT_TRUE(alike(all, {0, 0, 0, 1, 1, 1}, {0, 1, 2, 3, 4, 5}));
  // Expert ranks of a view, and ranks at some places along an axis.
  const Grid views = grid({{"dp_replicate", 1}, {"dp_shard", 4}, {"cp_ring", 1}, {"tp", 2}})
                         .viewed({"dp_shard", "cp_ring"}, {{"edp", 2}, {"ep", 2}});
  EXPECT_TRUE(alike(views, planned_hosts(8, 2).of_rank, views.ranks_along({"edp"}, 0)));
  EXPECT_FALSE(alike(views, {0, 0, 0, 0, 0, 1, 1, 1}, views.ranks_along({"edp"}, 0)));
  const Grid stages = grid({{"pp", 4}, {"dp_shard", 2}});
  EXPECT_TRUE(alike(stages, planned_hosts(8, 2).of_rank, {0, 6}));
  EXPECT_FALSE(alike(stages, {0, 0, 0, 0, 1, 1, 0, 1}, {0, 6}));
}

TEST(Hosts, PlannedOnesAreAsEvenAsPossible) {
  EXPECT_THAT(planned_hosts(5, 2).of_rank, ElementsAre(0, 0, 0, 1, 1));
  for (const auto& [ranks, hosts] : {std::pair(2, 3), {2, 0}, {4, -1}})
    EXPECT_THROW(planned_hosts(ranks, hosts), ConfigError) << ranks << " " << hosts;
}

class HostVariable : public ::testing::Test {
 protected:
  static HostIdentity with(const std::string& text, const char* rank = nullptr, const char* size = nullptr) {
    ::setenv(kHostVariable, text.c_str(), 1);
    if (rank) ::setenv("RANK", rank, 1);
    if (size) ::setenv("WORLD_SIZE", size, 1);
    return identify_host();
  }
  void TearDown() override {
    for (const char* name : {kHostVariable, "RANK", "WORLD_SIZE"}) ::unsetenv(name);
  }
};

TEST_F(HostVariable, NamesOneHostOrThatOfEachRank) {
  const HostIdentity machine = identify_host();
  const HostIdentity alpha = with("alpha");
  EXPECT_EQ(alpha.name, "alpha");
  EXPECT_NE(alpha.machine, machine.machine);
  EXPECT_EQ(identify_meeting_place(alpha), alpha.machine);  // the network does not matter
  EXPECT_NE(identify_meeting_place(machine), machine.machine);
  EXPECT_EQ(with("a,a,b", "2", "3").name, "b");
  EXPECT_EQ(with("a,a,b", "0", "3").machine, with("a,a,b", "1", "3").machine);
  EXPECT_EQ(with("").machine, machine.machine);
}

TEST_F(HostVariable, BadOnesAreRefused) {
  for (const std::string text : {"a,", ",", "a b", "a/b", "a,b,c"})
    EXPECT_THROW(with(text, "0", "2"), ConfigError) << text;
  EXPECT_THROW(with(std::string(65, 'x')), ConfigError);
  try {
    with("a,b,c", "1", "2");
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("3 names for 2 ranks"));
  }
}

}  // namespace
}  // namespace isograd
