// Configurations that are refused for a number of ranks, and keys that do not go with others.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "train/config.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refused(const std::string& toml, int ranks) {
  try {
    check(parse_config(toml, "run.toml"), ranks);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ConfigOfRanks, KeysOfShardsAreRefusedWithoutShards) {
  for (const char* strategy : {"naive", "overlapped", "bucketed"})
    for (const char* key : {"replicas = 2", "cp_fsdp_mode = \"none\""}) {
      const std::string said = refused(fmt::format("[parallel]\nstrategy = \"{}\"\n{}\n", strategy, key), 4);
      EXPECT_THAT(said,
                  HasSubstr(fmt::format("parallel.{}, which has no effect: parallel.strategy is \"{}\", "
                                        "which does not shard",
                                        key, strategy)));
    }
  for (const char* strategy : {"zero1", "zero2", "zero3"})
    EXPECT_EQ(refused(fmt::format("[parallel]\nstrategy = \"{}\"\nreplicas = 2\ncp_fsdp_mode = \"none\"\n",
                                  strategy),
                      4),
              "accepted");
}

TEST(ConfigOfRanks, OneCopyOfTheParametersNeedsRanksThatShareIt) {
  const auto on = [](const std::string& keys, int ranks) {
    return refused("[parallel]\nshare_parameters = \"on\"\n" + keys, ranks);
  };
  const auto of_nobody = [](const std::string& ranks) {
    return AllOf(HasSubstr("parallel.share_parameters"),
                 HasSubstr("\"on\" for " + ranks + ", of which none has another one's parameters"),
                 HasSubstr("Leave it out"));
  };
  EXPECT_EQ(on("", 2), "accepted");
  EXPECT_THAT(on("", 1), of_nobody("one rank"));
  EXPECT_EQ(on("strategy = \"zero2\"\nreplicas = 2\n", 4), "accepted");
  EXPECT_THAT(on("strategy = \"zero2\"\nreplicas = 4\n", 4), of_nobody("4 ranks"));
  EXPECT_EQ(on("strategy = \"zero3\"\ncp_ring = 2\n", 2), "accepted");
  EXPECT_THAT(on("strategy = \"zero3\"\ncp_ring = 2\ncp_fsdp_mode = \"none\"\n", 2), of_nobody("2 ranks"));
  EXPECT_THAT(on("tp = 2\n", 2), of_nobody("2 ranks"));
}

TEST(ConfigOfRanks, MoreRanksThanPacksIsRefused) {
  const RunConfig config = parse_config("[batch]\npacks_per_step = 4\n", "");
  check(config, 4);
  try {
    check(config, 5);
    FAIL() << "5 ranks for 4 packs were accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("--ranks 5"), HasSubstr("more ranks than packs"),
                                    HasSubstr("--set batch.packs_per_step=5")));
  }
}

}  // namespace
}  // namespace isograd
