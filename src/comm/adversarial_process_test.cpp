// Failures that only processes can have: they are stopped and continue, fork with a group, die between
// meeting and joining, or run out of descriptors.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/shm/backend.hpp"
#include "comm/shm/members.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Backend = c10::intrusive_ptr<ShmBackend>;

constexpr std::int64_t kShared = 5000;

// A temporary folder and child processes. Both are removed afterwards in any case.
class Processes : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("isograd-adversarial-{}", ::getpid());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    for (pid_t pid : running_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }

  // Runs `body` in a child process. Its return value or exception is its outcome.
  pid_t run(const std::string& name, const std::function<std::string()>& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid != 0) {
      running_.push_back(pid);
      return pid;
    }
    at::set_num_threads(1);
    std::string outcome;
    try {
      outcome = body();
    } catch (const std::exception& error) {
      outcome = error.what();
    }
    tell(name, outcome);
    ::_exit(0);
  }

  void tell(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / (name + ".part")) << text;
    std::filesystem::rename(folder_ / (name + ".part"), folder_ / name);
  }

  // The text published under that name, once it exists.
  std::string text_of(const std::string& name) {
    const auto deadline = std::chrono::steady_clock::now() + 15s;
    while (!std::filesystem::exists(folder_ / name)) {
      if (std::chrono::steady_clock::now() > deadline) return "nothing was published";
      std::this_thread::sleep_for(1ms);
    }
    std::ostringstream text;
    text << std::ifstream(folder_ / name).rdbuf();
    return text.str();
  }

  c10::intrusive_ptr<c10d::Store> files(int size) {
    return c10::make_intrusive<c10d::FileStore>((folder_ / "store").string(), size);
  }
  c10::intrusive_ptr<c10d::Store> store(int size) {
    return c10::make_intrusive<c10d::PrefixStore>("p", files(size));
  }
  Backend join(int rank, int size, std::chrono::milliseconds timeout) {
    return c10::make_intrusive<ShmBackend>(store(size), rank, size, "adverse", timeout,
                                           shm::EngineOptions{.print_history = false});
  }

  std::filesystem::path folder_;
  std::vector<pid_t> running_;
};

// The message arrived while the rank was stopped, so this is no timeout.
TEST_F(Processes, RankThatWasStoppedFindsWhatCameMeanwhile) {
  const pid_t receiver = run("receiver", [&] {
    Backend backend = join(0, 2, 10s);
    Tensors data{at::zeros({4})};
    auto work = backend->recv(data, 1, 0);
    tell("receiving", "");
    work->wait(300ms);
    return fmt::format("{}", data[0].sum().item<float>());
  });
  run("sender", [&] {
    Backend backend = join(1, 2, 10s);
    Tensors data{at::ones({4})};
    text_of("go");
    backend->send(data, 0, 0)->wait();
    tell("sent", "");
    text_of("receiver");
    return std::string("no error");
  });
  text_of("receiving");
  std::this_thread::sleep_for(20ms);  // it probably sleeps by now, but it need not
  ASSERT_EQ(::kill(receiver, SIGSTOP), 0);
  ASSERT_EQ(::waitpid(receiver, nullptr, WUNTRACED), receiver);
  tell("go", "");
  text_of("sent");
  std::this_thread::sleep_for(400ms);  // longer than the timeout
  ::kill(receiver, SIGCONT);
  EXPECT_EQ(text_of("receiver"), "4");
}

// A child process (a data loader, say) inherits the group and drops its copy.
TEST_F(Processes, ForkedChildDoesNotLeaveTheGroup) {
  for (int rank : {0, 1}) {
    run(std::to_string(rank), [&, rank] {
      Backend backend = join(rank, 2, 10s);
      at::Tensor shared = backend->empty_shared(kShared, at::kFloat);
      if (rank == 1) {
        const pid_t child = ::fork();
        if (child == 0) {
          shared = at::Tensor();
          backend.reset();
          ::_exit(0);
        }
        ::waitpid(child, nullptr, 0);
        tell("forked", "");
      } else {
        shared = at::Tensor();  // this rank has released its share of the memory, the other rank has not
        text_of("forked");
      }
      at::Tensor next = backend->empty_shared(1, at::kFloat);  // frees memory that no rank needs
      if (rank == 1) std::this_thread::sleep_for(400ms);       // the other checks whether this one has left
      Tensors data{rank == 1 ? shared.fill_(1) : at::ones({kShared})};
      backend->allreduce(data)->wait();
      return fmt::format("{}", data[0].sum().item<float>());
    });
  }
  for (int rank : {0, 1}) EXPECT_EQ(text_of(std::to_string(rank)), fmt::format("{}", 2. * kShared));
}

// In the child the group is unusable. The child reports that itself; the others need not detect it.
TEST_F(Processes, ForkedChildCannotCommunicate) {
  run("parent", [&] {
    Backend backend = join(0, 1, 10s);
    const pid_t child = ::fork();
    if (child == 0) {
      std::string outcome = "no error";
      try {
        backend->barrier()->wait();
      } catch (const Error& error) {
        outcome = error.what();
      }
      tell("child", outcome);
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
    backend->barrier()->wait();
    return std::string("no error");
  });
  EXPECT_THAT(text_of("child"), AllOf(HasSubstr("ConfigError"), HasSubstr("fork")));
  EXPECT_EQ(text_of("parent"), "no error");
}

// A store that kills the process as soon as its `fatal` key is written.
class FatalStore final : public c10d::PrefixStore {
 public:
  FatalStore(c10::intrusive_ptr<c10d::Store> store, std::string fatal)
      : PrefixStore("p", std::move(store)), fatal_(std::move(fatal)) {}
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    PrefixStore::set(key, value);
    if (key.ends_with(fatal_)) ::_exit(7);
  }
  std::string fatal_;
};

TEST_F(Processes, RankThatDiesBetweenMeetingAndJoiningIsNamed) {
  const pid_t victim = run("victim", [&]() -> std::string {
    auto fatal = c10::make_intrusive<FatalStore>(files(3), "member/1");
    c10::make_intrusive<ShmBackend>(fatal, 1, 3, "adverse", 10s);
    return "survived";
  });
  siginfo_t info;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(victim), &info, WEXITED | WNOWAIT), 0);  // it stays a zombie
  for (int rank : {0, 2}) {
    run(std::to_string(rank), [&, rank] {
      join(rank, 3, 10s);
      return std::string("no error");
    });
  }
  for (int rank : {0, 2}) {
    const std::string error = text_of(std::to_string(rank));
    EXPECT_THAT(error,
                AllOf(HasSubstr("PeerError"), HasSubstr("rank 1 (host "),
                      HasSubstr(fmt::format("pid {}, ended)", victim)), HasSubstr("before it had joined")));
  }
}

// A process that cannot open more files still knows that its peers are alive.
TEST_F(Processes, PeersDoNotDieOfFullDescriptorTables) {
  run("observer", [&] {
    const pid_t child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const rlim_t before = limit.rlim_cur;
    shm::MemberInfo member = shm::describe_self(), self = member;
    member.pid = child;
    {
      std::ifstream file(fmt::format("/proc/{}/stat", child));
      std::string word;
      for (int i = 0; i < 22; ++i) file >> word;
      member.started = std::stoull(word);
    }
    std::string outcome;
    for (const bool full_before : {false, true}) {
      limit.rlim_cur = full_before ? 3 : before;
      ::setrlimit(RLIMIT_NOFILE, &limit);
      shm::Watch watch({self, member});
      limit.rlim_cur = 3;
      ::setrlimit(RLIMIT_NOFILE, &limit);
      outcome += fmt::format("{} {} ", watch.dead().size(),
                             shm::describe(1, member).find("ended") == std::string::npos);
      limit.rlim_cur = before;
      ::setrlimit(RLIMIT_NOFILE, &limit);
      outcome += fmt::format("{}; ", watch.dead().size());
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    return outcome;
  });
  EXPECT_EQ(text_of("observer"), "0 true 0; 0 true 0; ");
}

}  // namespace
}  // namespace isograd
