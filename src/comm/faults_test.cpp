// Every way to lose a rank × every phase of every operation, with ranks as processes. No rank hangs, every
// rank reports who was lost and in which operation, and nothing is left behind. ISOGRAD_FAULTS=all runs the
// whole matrix (`./dev faults`). Otherwise one case in eight runs, spread over all operations, faults and
// phases.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using shm::Kind;
using shm::Phase;
using Tensors = std::vector<at::Tensor>;

constexpr int kRanks = 3;
constexpr std::int64_t kNumel = 300'000;  // fp32 numbers: several chunks of staging, several rounds of a ring

// ---- the matrix ------------------------------------------------------------------------------------------

struct OperationCase {
  const char* name;
  Kind kind;  // the phases of this kind count
  // Every rank calls it with `count` elements, in shared memory for some operations.
  void (*call)(ShmBackend&, at::Tensor& memory, std::int64_t count);
};

Tensors parts_of(const at::Tensor& memory, std::int64_t count) {
  Tensors parts;
  for (int r = 0; r < kRanks; ++r) parts.push_back(memory.narrow(0, r * count, count));
  return parts;
}

void exchange_messages(ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
  const int rank = backend.getRank();
  Tensors out{memory.narrow(0, 0, count)}, in{memory.narrow(0, count, count)};
  auto send = backend.send(out, (rank + 1) % kRanks, 4);
  auto receive = backend.recv(in, (rank + kRanks - 1) % kRanks, 4);
  send->wait();
  receive->wait();
}

void all_reduce(ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
  Tensors one{memory.narrow(0, 0, count)};
  backend.allreduce(one)->wait();
}

const std::vector<OperationCase>& operations() {
  static const std::vector<OperationCase> all = {
      {"all_reduce", Kind::kAllReduce, all_reduce},
      {"all_reduce_shared", Kind::kAllReduce, all_reduce},
      {"reduce", Kind::kReduce,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         Tensors one{memory.narrow(0, 0, count)};
         backend.reduce(one, {.rootRank = 2})->wait();
       }},
      {"broadcast", Kind::kBroadcast,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         Tensors one{memory.narrow(0, 0, count)};
         backend.broadcast(one, {.rootRank = 1})->wait();
       }},
      {"all_gather", Kind::kAllGather,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         at::Tensor input = memory.narrow(0, 3 * count, count), output = memory.narrow(0, 0, 3 * count);
         backend._allgather_base(output, input)->wait();
       }},
      {"reduce_scatter", Kind::kReduceScatter,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         at::Tensor output = memory.narrow(0, 3 * count, count), input = memory.narrow(0, 0, 3 * count);
         backend._reduce_scatter_base(output, input)->wait();
       }},
      {"gather", Kind::kGather,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         std::vector<Tensors> lists{parts_of(memory, count)};
         Tensors one{memory.narrow(0, 3 * count, count)};
         if (backend.getRank() != 0) lists.clear();
         backend.gather(lists, one, {.rootRank = 0})->wait();
       }},
      {"scatter", Kind::kScatter,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         std::vector<Tensors> lists{parts_of(memory, count)};
         Tensors one{memory.narrow(0, 3 * count, count)};
         if (backend.getRank() != 1) lists.clear();
         backend.scatter(one, lists, {.rootRank = 1})->wait();
       }},
      {"all_to_all", Kind::kAllToAll,
       [](ShmBackend& backend, at::Tensor& memory, std::int64_t count) {
         Tensors outputs = parts_of(memory, count),
                 inputs = parts_of(memory.narrow(0, 3 * count, 3 * count), count);
         backend.alltoall(outputs, inputs)->wait();
       }},
      {"barrier", Kind::kBarrier,
       [](ShmBackend& backend, at::Tensor&, std::int64_t) { backend.barrier()->wait(); }},
      {"empty_shared", Kind::kAllocate,
       [](ShmBackend& backend, at::Tensor&, std::int64_t count) { backend.empty_shared(count, at::kFloat); }},
      {"send", Kind::kSend, exchange_messages},
      {"recv", Kind::kReceive, exchange_messages},
  };
  return all;
}

enum class Fault { kKill, kStop, kExit, kThrow, kLate, kMismatch, kMissing };
constexpr const char* kFaultNames[] = {"kill", "stop", "exit", "throw", "late", "mismatch", "missing"};
constexpr const char* kPhaseNames[] = {"start", "announced", "worked", "complete"};

struct Case {
  const OperationCase* operation;
  Fault fault;
  Phase phase;  // for a fault during a call
  int victim;

  bool in_shared_memory() const { return operation->name == std::string("all_reduce_shared"); }
  bool is_message() const { return operation->kind == Kind::kSend || operation->kind == Kind::kReceive; }
  std::chrono::milliseconds timeout() const {
    if (fault == Fault::kStop) return 1500ms;
    return fault == Fault::kLate || (fault == Fault::kMissing && is_message()) ? 400ms : 20'000ms;
  }
};

std::vector<Case> matrix(bool all) {
  std::vector<Case> cases;
  int number = 0;
  for (const OperationCase& operation : operations()) {
    for (int fault = 0; fault < 7; ++fault) {
      const bool at_phases = fault < static_cast<int>(Fault::kMismatch);
      for (int phase = 0; phase < (at_phases ? 4 : 1); ++phase) {
        // A receive has announced nothing before it is matched.
        if (operation.kind == Kind::kReceive && at_phases && phase == 0) continue;
        ++number;
        if (all || number % 8 == 3)
          cases.push_back(
              {&operation, static_cast<Fault>(fault), static_cast<Phase>(phase), number % kRanks});
      }
    }
  }
  return cases;
}

// ---- what a rank does ------------------------------------------------------------------------------------

double now() { return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count(); }

void leave(const std::filesystem::path& file, const std::string& text) {
  std::ofstream(file.string() + ".part") << text;
  std::filesystem::rename(file.string() + ".part", file);
}

struct Planted : std::runtime_error {
  Planted() : std::runtime_error("planted failure") {}
};

[[noreturn]] void run_rank(const Case& test, int rank, const std::filesystem::path& folder) {
  at::set_num_threads(1);
  const bool is_victim = rank == test.victim;
  bool armed = false;
  const auto strike = [&] {
    leave(folder / "struck", std::to_string(now()));
    switch (test.fault) {
      case Fault::kKill: ::kill(::getpid(), SIGKILL); break;
      case Fault::kStop: ::kill(::getpid(), SIGSTOP); break;
      case Fault::kExit: ::_exit(7);
      case Fault::kThrow: throw Planted();
      case Fault::kLate: std::this_thread::sleep_for(3 * test.timeout()); break;
      default: break;
    }
  };
  shm::EngineOptions options;
  options.observer = [&](Phase phase, const shm::Task& task) {
    if (!armed || phase != test.phase || task.fingerprint().kind != test.operation->kind) return;
    armed = false;
    strike();
  };
  std::string outcome = "no error";
  c10::intrusive_ptr<ShmBackend> backend;
  try {
    auto store = c10::make_intrusive<c10d::FileStore>((folder / "store").string(), kRanks);
    backend = c10::make_intrusive<ShmBackend>(store, rank, kRanks, "faulty", 20s, options);
    backend->setTimeout(test.timeout());
    at::Tensor memory =
        test.in_shared_memory() ? backend->empty_shared(6 * kNumel, at::kFloat) : at::ones({6 * kNumel});
    backend->barrier()->wait();
    armed = is_victim && test.fault < Fault::kMismatch;
    if (is_victim && test.fault >= Fault::kMismatch) strike();
    if (is_victim && test.fault == Fault::kMismatch) {
      if (test.operation->kind == Kind::kBarrier) {
        all_reduce(*backend, memory, 10);
      } else {
        test.operation->call(*backend, memory, kNumel - 1);
      }
    } else if (!(is_victim && test.fault == Fault::kMissing)) {
      test.operation->call(*backend, memory, kNumel);
    }
    at::Tensor other = at::ones({5});  // ranks that could complete the call detect the fault in this one
    all_reduce(*backend, other, 5);
  } catch (const Error& error) {
    outcome = error.what();
  } catch (const std::exception& error) {
    outcome = error.what();
    if (backend) backend->poison(error.what());  // as a World does for a rank that throws
  }
  leave(folder / fmt::format("{}.outcome", rank), fmt::format("{}\n{}", now(), outcome));
  ::_exit(0);
}

// ---- what the test checks --------------------------------------------------------------------------------

std::string name_of(const Case& test) {
  std::string name = fmt::format("{}_{}", test.operation->name, kFaultNames[static_cast<int>(test.fault)]);
  if (test.fault < Fault::kMismatch) name += fmt::format("_{}", kPhaseNames[static_cast<int>(test.phase)]);
  return name;
}

std::set<std::string> shared_memory_names() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.find("isograd") != std::string::npos) names.insert(name);  // other programs may start and end
  }
  return names;
}

class Faults : public ::testing::TestWithParam<Case> {};

TEST_P(Faults, EndWithTheRightName) {
  const Case& test = GetParam();
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("isograd-faults-{}", ::getpid());
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto names = shared_memory_names();
  std::vector<pid_t> ranks;
  std::fflush(nullptr);
  for (int r = 0; r < kRanks; ++r) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      if (std::freopen((folder / fmt::format("{}.stderr", r)).c_str(), "w", stderr) == nullptr) ::_exit(9);
      run_rank(test, r, folder);
    }
    ranks.push_back(pid);
  }
  const auto begin = Clock::now();
  std::set<int> running{0, 1, 2};
  while (!running.empty() && Clock::now() - begin < 15s) {
    std::erase_if(running, [&](int r) { return ::waitpid(ranks[r], nullptr, WNOHANG) == ranks[r]; });
    if (test.fault == Fault::kStop && running == std::set<int>{test.victim}) break;
    std::this_thread::sleep_for(2ms);
  }
  const auto hung = running;
  for (int r : running) {
    ::kill(ranks[r], SIGKILL);
    ::waitpid(ranks[r], nullptr, 0);
  }
  EXPECT_EQ(hung, test.fault == Fault::kStop ? std::set<int>{test.victim} : std::set<int>{}) << "ranks hung";

  const auto text = [&](const std::string& file) {
    std::ostringstream all;
    all << std::ifstream(folder / file).rdbuf();
    return all.str();
  };
  const double struck = std::atof(text("struck").c_str());
  ASSERT_GT(struck, 0) << "the fault was never planted";
  const std::string victim = fmt::format("rank {}", test.victim);
  for (int r = 0; r < kRanks; ++r) {
    const bool silent = r == test.victim && test.fault <= Fault::kExit;
    const std::string outcome = text(fmt::format("{}.outcome", r));
    if (silent) {
      EXPECT_EQ(outcome, "") << "it should be gone";
      continue;
    }
    const std::string message = outcome.substr(std::min(outcome.size(), outcome.find('\n') + 1));
    SCOPED_TRACE(fmt::format("rank {} got: {}", r, message));
    if (r == test.victim && test.fault == Fault::kThrow) {
      EXPECT_EQ(message, "planted failure");
      continue;
    }
    EXPECT_THAT(message, ::testing::StartsWith("PeerError: "));
    EXPECT_TRUE(std::regex_search(message, std::regex(" of group 'faulty' on rank [0-2] of 3")));
    const double waited = std::atof(outcome.c_str()) - struck;
    const double timeout = static_cast<double>(test.timeout().count());
    switch (test.fault) {
      case Fault::kKill:
      case Fault::kExit:
        EXPECT_LT(waited, 1000);
        EXPECT_THAT(message, ::testing::HasSubstr(fmt::format("pid {}) has ended", ranks[test.victim])));
        EXPECT_TRUE(std::regex_search(message, std::regex(victim + " \\(host [^ ,]+, pid ")));
        break;
      case Fault::kThrow:
        EXPECT_LT(waited, 1000);
        EXPECT_THAT(message, ::testing::HasSubstr(victim + " failed: planted failure"));
        break;
      case Fault::kStop:
        EXPECT_GT(waited, timeout - 200);
        EXPECT_LT(waited, timeout + 1000);
        EXPECT_TRUE(std::regex_search(message, std::regex(fmt::format("{} \\(host [^ ,]+, pid {}, stopped\\)",
                                                                      victim, ranks[test.victim]))));
        EXPECT_THAT(text(fmt::format("{}.stderr", r)),
                    ::testing::ContainsRegex(fmt::format("waits for {} .*stopped", victim)));
        break;
      case Fault::kLate:
        EXPECT_LT(waited, 3 * timeout + 1000);
        if (r == test.victim) break;
        EXPECT_THAT(message, ::testing::ContainsRegex(victim + " .*did not arrive within"));
        break;
      case Fault::kMismatch:
        EXPECT_LT(waited, 5000) << "long before the timeout";
        EXPECT_THAT(message, ::testing::HasSubstr("the ranks disagreed"));
        EXPECT_THAT(message, ::testing::HasSubstr(victim));
        break;
      case Fault::kMissing:
        EXPECT_THAT(message, ::testing::HasSubstr(victim));
        if (!test.is_message()) {
          EXPECT_LT(waited, 5000) << "long before the timeout";
          EXPECT_THAT(message, ::testing::HasSubstr("the ranks disagreed"));
        }
        break;
    }
  }
  EXPECT_EQ(shared_memory_names(), names) << "something stayed in shared memory";
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Matrix, Faults,
                         ::testing::ValuesIn(matrix(std::getenv("ISOGRAD_FAULTS") != nullptr &&
                                                    std::getenv("ISOGRAD_FAULTS") == std::string("all"))),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace isograd
