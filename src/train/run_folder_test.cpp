// Only one run at a time writes to a folder, and none overwrites another's files unless told to.
#include "train/run_folder.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "isograd/checkpoint.hpp"
#include "train/checkpoint_files.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_runs::config_error_of;

class RunFolders : public testing_runs::TinyRuns {
 protected:
  void SetUp() override {
    TinyRuns::SetUp();
    config_ = tiny("run");
    directory_ = config_.run.directory;
  }
  // Writes the files of a finished run.
  void leave_a_run(const std::vector<std::int64_t>& steps) {
    fs::create_directories(directory_);
    for (const auto step : steps)
      publish_directory(checkpoint_path(checkpoint_root(config_), step),
                        [](const fs::path& folder) { write_file(folder / "state.json", "{}"); });
    write_file(directory_ / "metrics.jsonl", "{\"step\":1}\n{\"step\":2}\n");
    write_file(directory_ / "report.html", "a report");
    write_file(directory_ / kLastOperations, "of a rank that lost another");
    write_file(directory_ / kStageTrace, "{}");
    fs::create_directories(directory_ / "tensorboard");
    write_file(directory_ / "tensorboard/events.out.tfevents.1.isograd", "events");
    write_file(directory_ / "notes.txt", "the user's own");
  }
  std::string taking() {
    return config_error_of([&] { RunFolder folder(config_); });
  }
  std::size_t checkpoints() { return list_checkpoints(checkpoint_root(config_)).size(); }

  RunConfig config_;
  fs::path directory_;
};

TEST_F(RunFolders, ASecondRunIsKeptOutAndToldByWhom) {
  {
    RunFolder first(config_);
    EXPECT_THAT(taking(),
                AllOf(HasSubstr("another run that is writing there"),
                      HasSubstr("process " + std::to_string(getpid())), HasSubstr("run.directory")));
    config_.overwrite = true;  // is no way around a run that lives
    EXPECT_THAT(taking(), HasSubstr("another run that is writing there"));
  }
  EXPECT_EQ(taking(), "no error");
}

// --overwrite would take it away from the run that writes it.
TEST_F(RunFolders, ALogElsewhereOfARunThatLivesIsLeftAlone) {
  const fs::path log = directory_.parent_path() / "elsewhere.jsonl";
  config_.run.json_log = log.string();
  write_file(log, "{}\n");
  const int held = ::open(log.c_str(), O_WRONLY);
  ASSERT_EQ(::flock(held, LOCK_EX | LOCK_NB), 0);
  for (const bool overwrite : {false, true}) {
    config_.overwrite = overwrite;
    EXPECT_THAT(taking(), HasSubstr("the log of a run that is under way"));
    EXPECT_THAT(config_error_of([&] { RunFolder::check_free(config_); }), HasSubstr("run.json_log = "));
  }
  EXPECT_EQ(read_file(log), "{}\n");
  ::close(held);
  EXPECT_EQ(taking(), "no error");
}

TEST_F(RunFolders, TheLockEndsWithItsProcessHoweverThatEnds) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    RunFolder folder(config_);
    folder.begin();
    (void)!::write(ready[1], "", 1);
    ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(taking(), HasSubstr("process " + std::to_string(child)));
  // The same command again waits for the start before, if that is ending.
  config_.checkpoint.resume = "auto", config_.parallel.timeout_seconds = 0.5;
  EXPECT_THAT(taking(), HasSubstr("process " + std::to_string(child)));
  config_.parallel.timeout_seconds = 60;
  std::thread ends([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ::kill(child, SIGKILL);
  });
  EXPECT_EQ(taking(), "no error");
  ends.join();
  ::waitpid(child, nullptr, 0);
  config_.checkpoint.resume.clear();
  EXPECT_EQ(taking(), "no error");
  for (const int end : ready) ::close(end);
}

TEST_F(RunFolders, ANewRunDoesNotTouchAnEarlierOnesFiles) {
  leave_a_run({30, 40});
  const std::string said = taking();
  EXPECT_THAT(said, AllOf(HasSubstr("2 checkpoints up to step-00000040"), HasSubstr("2 rows of metrics"),
                          HasSubstr("report.html"), HasSubstr("--set run.directory="),
                          HasSubstr("checkpoint.resume=latest"), HasSubstr("--overwrite")));
  EXPECT_EQ(config_error_of([&] { RunFolder::check_free(config_); }), said) << "before ranks are started too";
  EXPECT_EQ(checkpoints(), 2u);
  EXPECT_EQ(read_file(directory_ / "report.html"), "a report");
  EXPECT_FALSE(fs::exists(directory_ / "LOCK"));
}

TEST_F(RunFolders, OverwriteReplacesARunAndNothingElse) {
  leave_a_run({30, 40});
  config_.overwrite = true;
  {
    RunFolder folder(config_);
    EXPECT_EQ(checkpoints(), 2u) << "nothing is removed before this run writes";
    EXPECT_THAT(folder.notice(), AllOf(HasSubstr("--overwrite"), HasSubstr("step-00000040")));
    folder.begin();
  }
  EXPECT_EQ(checkpoints(), 0u);
  for (const char* name : {"metrics.jsonl", "report.html", "tensorboard/events.out.tfevents.1.isograd",
                           kLastOperations, kStageTrace})
    EXPECT_FALSE(fs::exists(directory_ / name)) << name;
  EXPECT_EQ(read_file(directory_ / "notes.txt"), "the user's own");
}

TEST_F(RunFolders, ARunThatGoesOnKeepsItsFolder) {
  leave_a_run({30, 40});
  config_.checkpoint.resume = "latest";
  {
    RunFolder folder(config_);
    EXPECT_EQ(folder.notice(), "");
  }
  config_.checkpoint.resume = (directory_ / "checkpoints/step-00000030/").string();
  {
    RunFolder folder(config_);
    EXPECT_THAT(folder.notice(), AllOf(HasSubstr("step-00000030"), HasSubstr("step-00000040")));
  }
  EXPECT_EQ(checkpoints(), 2u);
}

TEST_F(RunFolders, ARunThatGoesOnElsewhereIsNewThere) {
  leave_a_run({30});
  RunConfig other = tiny("other");
  other.checkpoint.resume = (directory_ / "checkpoints/step-00000030").string();
  { RunFolder folder(other); }
  other.run.directory = config_.run.directory + "2";
  fs::copy(directory_, other.run.directory, fs::copy_options::recursive);
  EXPECT_THAT(config_error_of([&] { RunFolder folder(other); }),
              AllOf(HasSubstr("--overwrite"), Not(HasSubstr("resume=latest"))));
}

// A scorer is compared with one trained by cross entropy, in a folder inside its own.
TEST_F(RunFolders, TheRunToCompareWithIsUnderTheSameRule) {
  config_.model.kind = "scorer";
  leave_a_run({30});
  fs::rename(directory_, root_ / "cross_entropy");
  fs::create_directories(directory_);
  fs::rename(root_ / "cross_entropy", directory_ / "cross_entropy");
  const std::string said = taking();
  EXPECT_THAT(said, AllOf(HasSubstr("run/cross_entropy\""), HasSubstr("the checkpoint step-00000030"),
                          HasSubstr("trained for comparison"), HasSubstr("--overwrite"),
                          Not(HasSubstr("resume=latest"))));
  EXPECT_EQ(config_error_of([&] { RunFolder::check_free(config_); }), said) << "before ranks are started too";
  for (void (*const change)(RunConfig&) :
       {+[](RunConfig& c) { c.overwrite = true; }, +[](RunConfig& c) { c.ranking.compare = false; },
        +[](RunConfig& c) { c.ranking.loss = "cross_entropy"; },  // nothing to compare with
        +[](RunConfig& c) { c.model.kind = "decoder"; }}) {
    RunConfig changed = config_;
    change(changed);
    EXPECT_EQ(config_error_of([&] { EXPECT_FALSE(RunFolder(changed).goes_on()); }), "no error");
  }
  leave_a_run({40});
  config_.checkpoint.resume = "latest";
  EXPECT_TRUE(RunFolder(config_).goes_on()) << "the other goes on too";
}

TEST_F(RunFolders, AnyTextInTheFileOfMetricsIsSomebodys) {
  for (const char* text : {"{\"step\":1}\n", "{\"precious\": 1}"}) {  // with and without a line feed
    config_.run.json_log = (root_ / "logs.jsonl").string();
    write_file(config_.run.json_log, text);
    EXPECT_THAT(taking(), AllOf(HasSubstr("logs.jsonl"), HasSubstr("--overwrite")));
    EXPECT_EQ(read_file(config_.run.json_log), text);
  }
}

TEST_F(RunFolders, AConfigurationThatNoRunHasWrittenStays) {
  fs::create_directories(directory_);
  write_file(directory_ / "config.toml", "# mine\n");
  for (const bool overwrite : {false, true}) {
    config_.overwrite = overwrite;
    EXPECT_THAT(taking(), AllOf(HasSubstr("config.toml"), HasSubstr("--set run.directory=")));
  }
  EXPECT_EQ(read_file(directory_ / "config.toml"), "# mine\n");
}

// Whoever may read a file may hold a lock on it.
TEST_F(RunFolders, TheLockIsTheOwnersAlone) {
  const auto permissions = [&] { return fs::status(directory_ / "LOCK").permissions(); };
  const fs::perms owner = fs::perms::owner_read | fs::perms::owner_write;
  {
    RunFolder folder(config_);
    folder.begin();
    EXPECT_EQ(permissions(), owner);
  }
  fs::permissions(directory_ / "LOCK",
                  owner | fs::perms::group_read | fs::perms::others_read);  // an older one
  config_.overwrite = true;
  RunFolder folder(config_);
  EXPECT_EQ(permissions(), owner);
}

TEST_F(RunFolders, ARefusedRunLeavesNoFolder) {
  { RunFolder folder(config_); }
  EXPECT_FALSE(fs::exists(directory_));
}

TEST_F(RunFolders, AFolderOrALockThatGoesAwayIsNamed) {
  RunFolder folder(config_);
  folder.begin();
  folder.check();
  const auto missing = [&] { return config_error_of([&] { folder.check(); }); };
  fs::remove(directory_ / "LOCK");
  EXPECT_TRUE(folder.is_there());
  EXPECT_THAT(missing(), AllOf(HasSubstr("LOCK"), HasSubstr("removed")));
  fs::rename(directory_, root_ / "moved");
  EXPECT_FALSE(folder.is_there());
  EXPECT_THAT(missing(), HasSubstr("removed or moved"));
  fs::create_directories(directory_);
  write_file(directory_ / "LOCK", "");
  EXPECT_THAT(missing(), HasSubstr("removed or moved")) << "another of that name";
}

// On thread ranks: an error on rank 0 is thrown on every rank, and nothing more is written.
TEST_F(RunFolders, ARunWhoseFolderIsRemovedEndsWithAnErrorOnAllRanks) {
  config_.train.steps = 50;
  config_.checkpoint.every = 10;
  std::atomic<int> told{0};
  const auto what = config_error_of([&] {
    run_ranks(3, [&](World& world) {
      TrainerHooks hooks;
      hooks.on_step = [&](const StepEvent& event) {
        if (world.rank == 0 && event.step == 4) fs::remove_all(directory_);
      };
      try {
        Trainer(config_, world, hooks).run();
      } catch (const ConfigError&) {
        ++told;
        throw;
      }
    });
  });
  EXPECT_THAT(what, HasSubstr("removed or moved while the run wrote to it"));
  EXPECT_EQ(told, 3);
  EXPECT_FALSE(fs::exists(directory_));
}

TEST_F(RunFolders, ALogThatIsRemovedIsAnError) {
  config_.train.steps = 50;
  const auto what = config_error_of([&] {
    run(config_, 2, [&](World& world, TrainerHooks& hooks) {
      hooks.on_step = [&, rank = world.rank](const StepEvent& event) {
        if (rank == 0 && event.step == 4) fs::remove(directory_ / "metrics.jsonl");
      };
    });
  });
  EXPECT_THAT(what, AllOf(HasSubstr("metrics.jsonl"), HasSubstr("removed while the run wrote to it")));
  EXPECT_EQ(checkpoints(), 1u) << "what the run had learned is saved";
}

}  // namespace
}  // namespace isograd
