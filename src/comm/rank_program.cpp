// A program for the tests that need ranks as processes: rank_program MODE [ARGUMENTS].
// Files it leaves in the folder it is given tell the test what each rank saw.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

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

int own_rank() {
  return std::atoi(std::getenv("RANK"));
}

at::Tensor encode(int rank, std::int64_t numel) {
  return at::arange(numel, at::kDouble).add(1000.0 * rank);
}

// Every operation once, with the right answers known.
int check_operations(const Arguments& arguments) {
  World world = join();
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
  leave(arguments.at(0), fmt::format("{}.done", world.rank),
        fmt::format("{} threads={} host={}", right ? "right" : "wrong", at::get_num_threads(), world.host));
  return right ? 0 : 1;
}

// Reductions without end; rank `victim` kills itself (SIGKILL) or stops itself (SIGSTOP) after a while. The
// others leave the message they got and how long after it that was.
int lose_a_rank(const Arguments& arguments) {
  const std::string& folder = arguments.at(0);
  const int victim = std::stoi(arguments.at(1)), signal = std::stoi(arguments.at(2));
  const auto delay = std::chrono::milliseconds(std::stoi(arguments.at(3)));
  const bool absent = arguments.at(4) == "absent";  // the victim dies outside of any operation
  const bool in_shared = arguments.at(4) == "shared";
  World world = join({.timeout = std::chrono::milliseconds(std::stoi(arguments.at(5)))});
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
  World world = join();
  try {
    if (world.rank == 1)
      throw ConfigError(
          {.where = "rank 1's file", .found = "a hole", .expected = "none", .action = "Mend it"});
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
  World world = join();
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

int list_listeners(const Arguments& arguments) {
  std::string found;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(file);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state;
      fields >> number >> local >> remote >> state;
      const auto colon = local.find(':');
      const int port = static_cast<int>(std::stol(local.substr(colon + 1), nullptr, 16));
      if (state == "0A" && port == std::atoi(std::getenv("MASTER_PORT")))
        found += local.substr(0, colon) + "\n";
    }
  }
  leave(arguments.at(0), fmt::format("{}.listeners", own_rank()), found);
  return 0;
}

int sleep_long(const Arguments& arguments) {
  leave(arguments.at(0), fmt::format("{}.pid", own_rank()), std::to_string(::getpid()));
  std::this_thread::sleep_for(std::chrono::minutes(2));
  return 0;
}

int run(const std::string& mode, const Arguments& arguments, const std::string& program) {
  const std::map<std::string, int (*)(const Arguments&)> modes = {
      {"operations", check_operations}, {"lose", lose_a_rank},         {"throw", throw_in_one_rank},
      {"memory", run_out_of_memory},    {"listeners", list_listeners}, {"sleep", sleep_long}};
  if (mode == "launch") return launch_ranks({program, "sleep", arguments.at(0)}, {.ranks = 2});
  return modes.at(mode)(arguments);
}

}  // namespace
}  // namespace isograd

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    return isograd::run(arguments.at(0), {arguments.begin() + 1, arguments.end()}, argv[0]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return isograd::exit_status(error);
  }
}
