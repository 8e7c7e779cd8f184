// A program for the tests that need ranks as processes: rank_program BACKEND MODE [ARGUMENTS].
// Files it leaves in the folder it is given tell the test what each rank saw.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "comm/backend_testing.hpp"
#include "comm/environment.hpp"
#include "comm/group_testing.hpp"
#include "comm/hosts_testing.hpp"
#include "comm/mpi/mpi.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using Arguments = std::vector<std::string>;

// Milliseconds on a clock that all processes share.
double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void leave(const std::string& folder, const std::string& name, const std::string& text) {
  const std::string path = folder + "/" + name;
  std::ofstream(path + ".part") << text;
  std::filesystem::rename(path + ".part", path);
}

int own_rank() { return read_rank_environment()->rank; }

std::string backend_name = "shm";

World join_by_backend(std::chrono::milliseconds timeout = std::chrono::minutes(5)) {
  return join({.timeout = timeout, .backend = backend_name});
}

at::Tensor encode(int rank, std::int64_t numel) { return at::arange(numel, at::kDouble).add(1000.0 * rank); }

// Every operation once, with the right answers known.
int check_operations(const Arguments& arguments) {
  World world = join_by_backend();
  Group& group = world.group;
  const int size = world.size;
  const std::int64_t numel = 300'001;  // several chunks of staging
  const at::Tensor expected = encode(0, numel).mul(size).add(1000.0 * size * (size - 1) / 2);
  at::Tensor plain = encode(world.rank, numel), shared = group.empty_shared(numel, at::kDouble);
  shared.copy_(plain);
  Pending pending = group.all_reduce_async(shared);
  group.all_reduce(plain);
  pending.wait();
  at::Tensor sent = encode(world.rank, 77);
  group.broadcast(sent, size - 1);
  const at::Tensor gathered = group.all_gather(encode(world.rank, 5));
  group.barrier();
  bool right =
      at::equal(plain, expected) && at::equal(shared, expected) && at::equal(sent, encode(size - 1, 77));
  for (int r = 0; r < size; ++r) right = right && at::equal(gathered[r], encode(r, 5));
  const auto wrong =
      testing::check_operations(group, {.numels = {11}, .dtypes = {at::kDouble, at::kBFloat16, at::kBool}});
  right = right && wrong.empty();
  leave(
      arguments.at(0), fmt::format("{}.done", world.rank),
      fmt::format("{} threads={} host={}", right ? "right" : fmt::format("wrong {}", fmt::join(wrong, "; ")),
                  at::get_num_threads(), world.host));
  return right ? 0 : 1;
}

// The correctness matrix of matrix_test, between processes.
int check_matrix(const Arguments& arguments) {
  World world = join_by_backend();
  const auto failures = testing::check_operations(world.group);
  leave(arguments.at(0), fmt::format("{}.done", world.rank),
        failures.empty() ? "right" : fmt::format("{} wrong, the first: {}", failures.size(), failures[0]));
  return failures.empty() ? 0 : 1;
}

// Reductions without end; rank `victim` kills itself (SIGKILL) or stops itself (SIGSTOP) after a while. The
// others leave the message they got and how long after it that was.
int lose_a_rank(const Arguments& arguments) {
  const std::string& folder = arguments.at(0);
  const int victim = std::stoi(arguments.at(1)), signal = std::stoi(arguments.at(2));
  const auto delay = std::chrono::milliseconds(std::stoi(arguments.at(3)));
  const bool absent = arguments.at(4) == "absent";  // the victim dies outside of any operation
  const bool in_shared = arguments.at(4) == "shared";
  World world = join_by_backend(std::chrono::milliseconds(std::stoi(arguments.at(5))));
  at::Tensor tensor = in_shared ? world.group.empty_shared(500'000, at::kFloat) : at::zeros({500'000});
  world.group.barrier();
  std::thread assassin;
  if (world.rank == victim) {
    const auto strike = [&] {
      std::this_thread::sleep_for(delay);
      leave(folder, "struck", std::to_string(now()));
      ::kill(::getpid(), signal);
    };
    if (absent) strike();
    assassin = std::thread(strike);
  }
  try {
    for (;;) world.group.all_reduce(tensor);
  } catch (const PeerError& error) {
    const double noticed = now();
    double struck = 0;
    std::ifstream(folder + "/struck") >> struck;
    leave(folder, fmt::format("{}.error", world.rank), fmt::format("{}\n{}", noticed - struck, error.what()));
    std::_Exit(exit_status(error));
  }
}

int throw_in_one_rank(const Arguments& arguments) {
  World world = join_by_backend();
  try {
    if (world.rank == 1)
      throw ConfigError(
          {.where = "rank 1's file", .found = "a hole", .expected = "none", .action = "Fill it"});
    world.group.barrier();
  } catch (const std::exception& error) {
    world.group.poison(error.what());
    leave(arguments.at(0), fmt::format("{}.error", world.rank), error.what());
    return dynamic_cast<const Error*>(&error) ? exit_status(error) : 4;
  }
  return 0;
}

// A limit of this process on file sizes stands for a machine whose shared memory is used up.
int run_out_of_memory(const Arguments& arguments) {
  World world = join_by_backend();
  if (world.rank == 1) {
    ::signal(SIGXFSZ, SIG_DFL);
    const rlimit limit{8 << 20, 8 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  std::string text = "no error";
  try {
    world.group.empty_shared(16 << 20, at::kByte);
  } catch (const ConfigError& error) {
    text = error.what();
  }
  at::Tensor one = at::ones({1});  // the group goes on
  world.group.all_reduce(one);
  leave(arguments.at(0), fmt::format("{}.error", world.rank), fmt::format("{}\n{}", one.item<float>(), text));
  return 0;
}

// Overlapping groups that live side by side, some with one name, each made by its members only.
int check_subgroups(const Arguments& arguments) {
  World world = join_by_backend();
  const int size = world.size;
  bool right = true;
  const auto sum = [&](Group& group) {
    at::Tensor tensor = at::full({3}, 1 << world.rank, at::kLong);
    group.all_reduce(tensor);
    return tensor[1].item<std::int64_t>();
  };
  std::vector<std::pair<Group, std::int64_t>> groups;
  for (int round = 0; round < 2; ++round) {
    for (int r = 0; r < size; ++r) {  // neighbours on a ring, in both orders
      const std::vector<int> ranks = {(r + round) % size, (r + 1 - round + size) % size};
      if (std::find(ranks.begin(), ranks.end(), world.rank) == ranks.end()) continue;
      Group group = world.subgroup(ranks, "pair");
      right = right && group.size() == 2 && ranks[static_cast<std::size_t>(group.rank())] == world.rank;
      groups.emplace_back(group, (1 << ranks[0]) + (1 << ranks[1]));
    }
    std::vector<int> backwards;
    for (int r = size - 1; r >= 0; --r) backwards.push_back(r);
    groups.emplace_back(world.subgroup(backwards, "pair"), (1 << size) - 1);
    right = right && groups.back().first.rank() == size - 1 - world.rank;
  }
  for (auto& [group, expected] : groups) right = right && sum(group) == expected;
  right = right && sum(world.group) == (1 << size) - 1;
  right = right && world.subgroup({world.rank}, "alone").size() == 1;
  for (const std::vector<int>& wrong : {std::vector<int>{},
                                        {(world.rank + 1) % size},
                                        {world.rank, world.rank},
                                        {world.rank, size},
                                        {-1, world.rank}}) {
    try {
      world.subgroup(wrong, "wrong");
      right = false;
    } catch (const ConfigError&) {
    }
  }
  leave(arguments.at(0), fmt::format("{}.done", world.rank), right ? "right" : "wrong");
  return right ? 0 : 1;
}

// The backend's own surface, whole and in pieces of few elements.
int check_mpi_backend(const Arguments& arguments) {
  World world = join_by_backend();
  std::string text;
  for (const std::int64_t most : {mpi::kMostElements, std::int64_t{300}}) {
    auto backend = mpi::make_world("checked", std::chrono::minutes(1), most);
    if (most < 1000) {  // only what can be cut
      std::vector<at::Tensor> tensors{encode(world.rank, 1000)}, sent{encode(world.rank, 1000)},
          got{at::zeros({1000}, at::kDouble)};
      backend->allreduce(tensors)->wait();
      backend->broadcast(sent)->wait();
      const at::Tensor sum = encode(0, 1000).mul(world.size).add(1000.0 * world.size * (world.size - 1) / 2);
      if (!at::equal(tensors[0], sum)) text += "all_reduce in pieces\n";
      if (!at::equal(sent[0], encode(0, 1000))) text += "broadcast in pieces\n";
      std::vector<at::Tensor> message{encode(world.rank, 1000)};
      auto send = backend->send(message, (world.rank + 1) % world.size, 0);
      const int left = (world.rank + world.size - 1) % world.size;
      backend->recv(got, left, 0)->wait();
      send->wait();
      if (!at::equal(got[0], encode(left, 1000))) text += "recv in pieces\n";
      at::Tensor output = at::zeros({1000 * world.size}, at::kDouble), input = encode(world.rank, 1000);
      try {
        backend->_allgather_base(output, input);
        text += "no ConfigError\n";
      } catch (const ConfigError&) {
      }
    } else {
      for (const std::string& problem : testing::check_backend(*backend)) text += problem + "\n";
    }
  }
  leave(arguments.at(0), fmt::format("{}.done", world.rank), text.empty() ? "right" : text);
  return text.empty() ? 0 : 1;
}

int check_hosts(const Arguments& arguments) {
  World world = join_by_backend();
  leave(arguments.at(0), fmt::format("{}.done", world.rank), testing::told_of_hosts(world));
  return 0;
}

// The last rank comes to a reduction later than the timeout, without stopping.
int come_late(const Arguments& arguments) {
  World world = join_by_backend(std::chrono::milliseconds(300));
  world.group.barrier();
  const bool late = world.rank == world.size - 1;
  if (late) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  std::string text;
  at::Tensor tensor = at::ones({1000});
  for (int i = 0; i < 2; ++i) {
    const double begin = now();
    try {
      world.group.all_reduce(tensor);
      text += "no error\n";
    } catch (const PeerError& error) {
      text += fmt::format("{} {}\n", now() - begin, error.what());
    }
  }
  leave(arguments.at(0), fmt::format("{}.late", world.rank), text);
  if (!late) std::this_thread::sleep_for(std::chrono::milliseconds(2000));  // so that nobody is ended before
  return 3;
}

// Addresses at which the launcher or this rank listens for connections from a network, once all have joined.
int list_listeners(const Arguments& arguments) {
  World world = join({.backend = backend_name});
  world.group.barrier();
  std::set<std::string> own;
  for (const pid_t process : {::getpid(), ::getppid()})
    for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", process))) {
      std::error_code error;
      own.insert(std::filesystem::read_symlink(entry.path(), error).string());
    }
  std::string found;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(file);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state;
      std::string queues, timer, retransmissions, user, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retransmissions >> user >> timeout >>
          inode;
      if (state == "0A" && own.contains(fmt::format("socket:[{}]", inode))) found += local + "\n";
    }
  }
  leave(arguments.at(0), fmt::format("{}.listeners", own_rank()), found);
  world.group.barrier();
  return 0;
}

int sleep_long(const Arguments& arguments) {
  leave(arguments.at(0), fmt::format("{}.pid", own_rank()), std::to_string(::getpid()));
  std::this_thread::sleep_for(std::chrono::minutes(2));
  return 0;
}

int run(const std::string& mode, const Arguments& arguments, const std::string& program) {
  const std::map<std::string, int (*)(const Arguments&)> modes = {{"subgroups", check_subgroups},
                                                                  {"hosts", check_hosts},
                                                                  {"backend", check_mpi_backend},
                                                                  {"late", come_late},
                                                                  {"operations", check_operations},
                                                                  {"matrix", check_matrix},
                                                                  {"lose", lose_a_rank},
                                                                  {"throw", throw_in_one_rank},
                                                                  {"memory", run_out_of_memory},
                                                                  {"listeners", list_listeners},
                                                                  {"sleep", sleep_long}};
  if (mode == "launch")
    return launch_ranks({program, backend_name, "sleep", arguments.at(0)},
                        {.ranks = 2, .backend = backend_name});
  return modes.at(mode)(arguments);
}

}  // namespace
}  // namespace isograd

#if defined(ISOGRAD_SANITIZE_ADDRESS)
// Memory that Open MPI never frees was taken by plugins that are unloaded by then: no suppression could name
// them.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return isograd::backend_name != "shm"; }
#endif

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    isograd::backend_name = arguments.at(0);
    return isograd::run(arguments.at(1), {arguments.begin() + 2, arguments.end()}, argv[0]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return isograd::exit_status(error);
  }
}
