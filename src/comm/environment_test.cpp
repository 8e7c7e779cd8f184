// join() reads the variables of launchers, set here as launchers set them.
#include "comm/environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "comm/store.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using Variables = std::vector<std::pair<const char*, const char*>>;

class Environment : public ::testing::Test {
 protected:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           kLaunchedVariable,
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_USE_AGENT_STORE",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "PMI_RANK",
                                           "PMI_SIZE",
                                           "PMIX_RANK",
                                           "PMIX_SERVER_TMPDIR",
                                           "OMPI_FILE_LOCATION",
                                           "MPI_LOCALRANKID",
                                           "MPI_LOCALNRANKS",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_STEP_NUM_TASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_STEP_NUM_NODES",
                                           "SLURM_NNODES",
                                           "SLURM_STEP_NODELIST",
                                           "SLURM_JOB_NODELIST",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "SLURM_STEPID",
                                           "PMIX_NAMESPACE",
                                           "TORCHELASTIC_RESTART_COUNT"};
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : kNames) ::unsetenv(name);
  }
  static void set(const Variables& variables) {
    clear();
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  }
  static RankEnvironment read(const Variables& variables) {
    set(variables);
    const auto environment = read_rank_environment();
    EXPECT_TRUE(environment.has_value());
    return environment.value_or(RankEnvironment{});
  }
};

TEST_F(Environment, MpirunOfOpenMpi) {
  const RankEnvironment found = read({{"OMPI_COMM_WORLD_RANK", "2"},
                                      {"OMPI_COMM_WORLD_SIZE", "4"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                      {"PMIX_RANK", "2"},
                                      {"PMIX_SERVER_TMPDIR", "/job"}});
  EXPECT_EQ(found.launcher, RankEnvironment::Launcher::kMpirun);
  EXPECT_EQ(found.rank, 2);
  EXPECT_EQ(found.size, 4);
  EXPECT_EQ(found.session_folder, "/job");
  EXPECT_EQ(found.address, "");
  check_one_host(found);
  check_mpi(found);
}

TEST_F(Environment, MpirunOfOtherMpis) {
  const RankEnvironment found =
      read({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(found.size, 2);
  check_mpi(found);
  EXPECT_THROW(check_one_host(found), ConfigError) << "nobody says where the store is";
  check_one_host(
      read({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}));
}

TEST_F(Environment, SrunOnOneHostAndOnSeveral) {
  Variables variables = {{"SLURM_PROCID", "1"},         {"SLURM_NTASKS", "3"},
                         {"SLURM_STEP_NUM_TASKS", "3"}, {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_STEP_NODELIST", "node7"},
                         {"SLURM_JOB_ID", "4123456"}};
  RankEnvironment found = read(variables);
  EXPECT_EQ(found.launcher, RankEnvironment::Launcher::kSrun);
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.size, 3);
  EXPECT_EQ(found.address, "127.0.0.1");
  EXPECT_EQ(found.port, 18456);
  check_one_host(found);
  check_mpi(found);

  variables[4] = {"SLURM_STEP_NUM_NODES", "3"};
  for (const auto& [list, first] : Variables{{"node[007-009,12]", "node007"},
                                             {"a1,b[2-3]", "a1"},
                                             {"n[3,5]-ib,m", "n3-ib"},
                                             {"rack[1-2]n[04-05]", "rack1n04"},
                                             {"login", "login"}}) {
    variables[5] = {"SLURM_STEP_NODELIST", list};
    EXPECT_EQ(read(variables).address, first) << list;
  }
  EXPECT_THROW(check_one_host(read(variables)), ConfigError);
  variables.emplace_back("MASTER_ADDR", "here");
  variables.emplace_back("MASTER_PORT", "1234");
  found = read(variables);
  EXPECT_EQ(found.address, "here");
  EXPECT_EQ(found.port, 1234);
}

// Each pair may run on one host at the same time, the second even at the first one's MASTER_PORT.
TEST_F(Environment, RunsAtTheSamePlaceMeetInStoresOfTheirOwn) {
  const Variables srun = {{"SLURM_PROCID", "1"},
                          {"SLURM_STEP_NUM_TASKS", "2"},
                          {"SLURM_STEP_NUM_NODES", "1"},
                          {"SLURM_JOB_ID", "4123456"}};
  const Variables mpirun = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_SERVER_TMPDIR", "/server"}};
  const Variables torchrun = {{"RANK", "1"},
                              {"WORLD_SIZE", "2"},
                              {"LOCAL_WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", "29500"}};
  struct Case {
    Variables same;
    const char *name, *one, *other;
  };
  const std::vector<Case> cases = {{srun, "SLURM_STEP_ID", "0", "1"},
                                   {srun, "SLURM_STEPID", "3", "4"},
                                   {srun, "SLURM_STEP_ID", "1", "4294967290"},
                                   {srun, "SLURM_JOB_ID", "4123456", "4133456"},
                                   {mpirun, "PMIX_NAMESPACE", "prterun-a@1", "prterun-a@2"},
                                   {torchrun, "TORCHELASTIC_RUN_ID", "one", "other"},
                                   {torchrun, "TORCHELASTIC_RESTART_COUNT", "0", "1"}};
  for (const Case& of : cases)
    for (const bool port_given : {false, true}) {
      const auto with = [&](const char* value) {
        Variables variables = of.same;
        if (port_given)
          variables.insert(variables.end(), {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1234"}});
        variables.emplace_back(of.name, value);
        return read(variables);
      };
      const RankEnvironment one = with(of.one), other = with(of.other);
      EXPECT_NE(local_store_name(one, 0), local_store_name(other, 0)) << of.name << " " << of.other;
      EXPECT_NE(store_prefix(one, 0), store_prefix(other, 0)) << of.name << " " << of.other;
      EXPECT_EQ(local_store_name(one, 0), local_store_name(with(of.one), 0)) << of.name;
    }
  Variables variables = srun;
  variables.emplace_back("SLURM_STEP_ID", "0");
  EXPECT_EQ(read(variables).port, 18456);
  variables.back().second = "1";
  EXPECT_EQ(read(variables).port, 19069);
}

TEST_F(Environment, ABatchScriptIsNoRank) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "7"}});
  EXPECT_FALSE(read_rank_environment());
}

// torchrun and our launcher may have been started by mpirun or srun, one on each host.
TEST_F(Environment, WhoStartedTheRankItselfIsBelieved) {
  const Variables outer = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  for (const char* name : {"TORCHELASTIC_RUN_ID", kLaunchedVariable}) {
    Variables variables = outer;
    variables.insert(variables.end(), {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {name, "1"}});
    EXPECT_EQ(read(variables).rank, 3) << name;
    EXPECT_EQ(read(variables).size, 4) << name;
  }
  // mpirun inside an allocation starts its daemons by srun.
  Variables variables = outer;
  variables.insert(variables.end(), {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}});
  EXPECT_EQ(read(variables).rank, 1);
  // Set by hand from mpirun's variables: two equal sources.
  variables = outer;
  variables.insert(variables.end(), {{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(read(variables).launcher, RankEnvironment::Launcher::kMpirun);
}

TEST_F(Environment, ALauncherDoesNotPassOnWhoItIs) {
  for (const char* name :
       {"RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "MASTER_ADDR"})
    EXPECT_TRUE(says_rank(name)) << name;
  for (const char* name : {"PATH", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_btl", "SLURM_JOB_ID", "RANKS"})
    EXPECT_FALSE(says_rank(name)) << name;
}

TEST_F(Environment, WithoutVariablesAWorldOfOne) {
  const World world = join();
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.size, 1);
  EXPECT_FALSE(world.host.empty());
}

TEST_F(Environment, ContradictionsAreConfigErrors) {
  const std::vector<Variables> cases = {
      {{"RANK", "0"}},
      {{"WORLD_SIZE", "2"}},
      {{"RANK", "2"}, {"WORLD_SIZE", "2"}},
      {{"RANK", "-1"}, {"WORLD_SIZE", "2"}},
      {{"RANK", "x"}, {"WORLD_SIZE", "2"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "70000"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}},
      {{"OMPI_COMM_WORLD_RANK", "0"}},
      {{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_RANK", "1"}},
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}},
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}},
      {{"PMI_SIZE", "2"}},
      {{"PMIX_RANK", "0"}},
      {{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "3"}},
      {{"SLURM_PROCID", "0"},
       {"SLURM_STEP_NUM_TASKS", "2"},
       {"SLURM_STEP_NUM_NODES", "2"},
       {"SLURM_JOB_ID", "7"}},
      {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}}};
  for (const auto& variables : cases) {
    set(variables);
    EXPECT_THROW(join(), ConfigError) << variables.back().first << "=" << variables.back().second;
  }
  clear();
  EXPECT_THROW(join({.backend = "carrier-pigeon"}), ConfigError);
  EXPECT_THROW(join({.timeout = std::chrono::milliseconds(0)}), ConfigError);
}

TEST_F(Environment, MpiNeedsRanksOfMpirunAndProcesses) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
  EXPECT_THROW(join({.backend = "mpi"}), ConfigError);
  EXPECT_THROW(run_ranks(2, [](World&) {}, {.backend = "mpi"}), ConfigError);
}

TEST_F(Environment, MissingRanksAreAPeerErrorWithinTheTimeout) {
  const Listener free = listen_on("127.0.0.1", 0);
  ::close(free.descriptor);
  const std::string port = std::to_string(free.port);
  set({{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port.c_str()}});
  try {
    join({.timeout = std::chrono::milliseconds(300)});
    FAIL() << "must throw";
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("nothing from rank 1, 2 within 300 ms"));
  }
}

}  // namespace
}  // namespace isograd
