// Random operations of every kind for a long time: isograd_soak SECONDS [SEED] [RANKS].
// Ranks are processes; they work in the group of all and in overlapping subgroups, on private and on shared
// memory, with several operations under way, and each sleeps now and then. Every result is checked against
// its closed form; the memory of each rank may not grow after the first fifth of the time. Ends with one
// line.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;
using Tensors = std::vector<at::Tensor>;
using Works = c10::intrusive_ptr<c10d::Work>;

constexpr std::int64_t kMost = 300'000;  // elements of a rank in one operation
constexpr std::size_t kUnderWay = 12;

// Small integers: sums of a few are exact in every number format.
at::Tensor values(int rank, std::uint64_t step, int to, std::int64_t count, at::ScalarType dtype) {
  const auto first = static_cast<std::int64_t>(step % 1000) * 7 + rank * 31 + to * 13;
  return at::arange(first, first + count, at::kLong).remainder(13).to(dtype);
}

at::Tensor sum_of(const std::vector<int>& ranks, std::uint64_t step, int to, std::int64_t count,
                  at::ScalarType dtype) {
  at::Tensor sum = at::zeros({count}, at::kLong);
  for (int rank : ranks) sum += values(rank, step, to, count, at::kLong);
  return sum.to(dtype);
}

struct Member {
  c10::intrusive_ptr<ShmBackend> backend;  // null: this rank is not in it
  std::vector<int> ranks;
  at::Tensor shared;
};

struct UnderWay {
  Works work;
  std::function<bool()> right;
  std::string what;
};

// A leak would add to heap in use, and mappings (segments of its peers among them). Resident memory
// tells less: it grows as shared buffers are touched and with what the allocator keeps for later.
struct Memory {
  double heap_kilobytes = 0;
  int mappings = 0;
};

Memory measure() {
  Memory memory;
  const struct mallinfo2 info = ::mallinfo2();
  memory.heap_kilobytes = static_cast<double>(info.uordblks + info.hblkhd) / 1024;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++memory.mappings;
  return memory;
}

class Soak {
 public:
  Soak(int rank, int size, const std::string& folder, std::uint64_t seed) : rank_(rank), seed_(seed) {
    auto store = c10::make_intrusive<c10d::FileStore>(folder + "/store", size);
    std::vector<std::vector<int>> sets{{}};
    for (int r = 0; r < size; ++r) sets[0].push_back(r);
    for (int r = 0; r < size; ++r) sets.push_back({r, (r + 1) % size});
    if (size > 2) sets.push_back({0, 1, size - 1});
    for (auto& ranks : sets) {
      std::sort(ranks.begin(), ranks.end());
      Member group{nullptr, ranks, {}};
      const auto place = std::find(ranks.begin(), ranks.end(), rank);
      if (place != ranks.end()) {
        group.backend = c10::make_intrusive<ShmBackend>(store, static_cast<int>(place - ranks.begin()),
                                                        static_cast<int>(ranks.size()),
                                                        fmt::format("group {}", groups_.size()), 60s);
        group.shared = group.backend->empty_shared(4 * kMost, at::kFloat);
      }
      groups_.push_back(group);
    }
  }

  // One operation, the same on every rank of the group that it falls on.
  void step(std::uint64_t number) {
    Random common(seed_ ^ (number * 0x9e3779b97f4a7c15));
    const Member& group = groups_[common() % groups_.size()];
    const int kind = static_cast<int>(common() % 11);
    const double size = std::uniform_real_distribution<double>(0, 1)(common);
    const auto count = static_cast<std::int64_t>(std::pow(static_cast<double>(kMost), size)) - 1;
    static constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kInt};
    const at::ScalarType dtype = kTypes[common() % 5];
    const auto root = static_cast<int>(common() % group.ranks.size());
    if (!group.backend) return;
    const bool in_shared = own_() % 3 == 0 && dtype == at::kFloat && !shared_in_use_;
    const auto take = [&](std::int64_t numel) {
      return in_shared ? group.shared.narrow(0, 0, numel) : at::empty({numel}, dtype);
    };
    begin(group, kind, count, dtype, root, number, take);
    shared_in_use_ |= in_shared;
    while (under_way_.size() > own_() % kUnderWay) end_one(own_() % under_way_.size());
  }

  void end_all() {
    while (!under_way_.empty()) end_one(under_way_.size() - 1);
    for (const Member& group : groups_) {
      if (group.backend) group.backend->barrier()->wait();
    }
  }
  void nap() {
    if (own_() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 20'000));
    if (own_() % 4000 == 0) std::this_thread::sleep_for(200ms);
  }
  std::uint64_t checked() const { return checked_; }

 private:
  template <typename Take>
  void begin(const Member& group, int kind, std::int64_t count, at::ScalarType dtype, int root,
             std::uint64_t number, const Take& take) {
    ShmBackend& backend = *group.backend;
    const int me = backend.getRank(), size = backend.getSize();
    const std::vector<int> ranks = group.ranks;
    const auto n = count / size;
    const auto check = [&](Works work, const char* name, at::Tensor result,
                           std::function<at::Tensor()> expected) {
      under_way_.push_back({std::move(work), [result, expected] { return at::equal(result, expected()); },
                            fmt::format("{} of {} {} in a group of {}, step {}", name, count,
                                        c10::toString(dtype), size, number)});
    };
    switch (kind) {
      case 0:
      case 1: {
        Tensors one{take(count)};
        one[0].copy_(values(rank_, number, 0, count, dtype));
        check(backend.allreduce(one), "all_reduce", one[0],
              [=] { return sum_of(ranks, number, 0, count, dtype); });
        break;
      }
      case 2: {
        Tensors one{take(count)};
        one[0].copy_(values(rank_, number, 0, count, dtype));
        const int self = rank_;
        check(backend.reduce(one, {.rootRank = root}), "reduce", one[0], [=] {
          return me == root ? sum_of(ranks, number, 0, count, dtype) : values(self, number, 0, count, dtype);
        });
        break;
      }
      case 3: {
        Tensors one{take(count)};
        one[0].copy_(values(rank_, number, 0, count, dtype));
        check(backend.broadcast(one, {.rootRank = root}), "broadcast", one[0],
              [=] { return values(ranks[static_cast<std::size_t>(root)], number, 0, count, dtype); });
        break;
      }
      case 4:
      case 5: {
        at::Tensor whole = take(n * size), own = values(rank_, number, 0, n, dtype);
        check(backend._allgather_base(whole, own), "all_gather", whole, [=] {
          Tensors all;
          for (int r : ranks) all.push_back(values(r, number, 0, n, dtype));
          return at::cat(all);
        });
        break;
      }
      case 6:
      case 7: {
        at::Tensor whole = take(n * size), own = at::empty({n}, dtype);
        for (int r = 0; r < size; ++r) whole.narrow(0, r * n, n).copy_(values(rank_, number, r, n, dtype));
        check(backend._reduce_scatter_base(own, whole), "reduce_scatter", own,
              [=] { return sum_of(ranks, number, me, n, dtype); });
        break;
      }
      case 8: {
        at::Tensor input = take(n * size), output = at::empty({n * size}, dtype);
        for (int r = 0; r < size; ++r) input.narrow(0, r * n, n).copy_(values(rank_, number, r, n, dtype));
        std::vector<std::int64_t> even;
        check(backend.alltoall_base(output, input, even, even), "all_to_all", output, [=] {
          Tensors all;
          for (int r : ranks) all.push_back(values(r, number, me, n, dtype));
          return at::cat(all);
        });
        break;
      }
      case 9: {
        if (size < 2) break;
        const int to = (me + 1) % size, from = (me + size - 1) % size;
        Tensors out{take(count)}, in{at::empty({count}, dtype)};
        out[0].copy_(values(rank_, number, to, count, dtype));
        const int tag = static_cast<int>(number % 3);
        check(backend.send(out, to, tag), "send", at::zeros({1}), [] { return at::zeros({1}); });
        check(backend.recv(in, from, tag), "recv", in[0],
              [=] { return values(ranks[static_cast<std::size_t>(from)], number, me, count, dtype); });
        break;
      }
      default: {  // shared memory comes and goes
        at::Tensor fresh = backend.empty_shared(std::min<std::int64_t>(count, 10'000), dtype);
        fresh.fill_(1);
        Tensors one{fresh};
        check(backend.allreduce(one), "all_reduce of new memory", fresh,
              [=] { return at::full({fresh.numel()}, size, dtype); });
      }
    }
  }

  void end_one(std::size_t index) {
    UnderWay each = std::move(under_way_[index]);
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(index));
    each.work->wait();
    if (!each.right()) throw std::runtime_error("wrong result of " + each.what);
    ++checked_;
    if (under_way_.empty()) shared_in_use_ = false;
  }

  int rank_;
  std::uint64_t seed_;
  Random own_{static_cast<std::uint64_t>(rank_) + 17};
  std::vector<Member> groups_;
  std::deque<UnderWay> under_way_;
  bool shared_in_use_ = false;
  std::uint64_t checked_ = 0;
};

// Waits at round ends only: the ranks agree on when to stop by the number of rounds that rank 0 asks for.
int run_rank(int rank, int size, const std::string& folder, double seconds, std::uint64_t seed) {
  constexpr int kRound = 500;
  at::set_num_threads(1);
  try {
    Soak soak(rank, size, folder, seed);
    const auto begin = Clock::now();
    double elapsed = 0;
    Memory settled, last;
    std::uint64_t number = 0;
    c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::FileStore>(folder + "/clock", size);
    for (std::uint64_t round = 0;; ++round) {
      for (int i = 0; i < kRound; ++i) {
        soak.step(number++);
        soak.nap();
      }
      soak.end_all();
      elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
      last = measure();
      if (settled.mappings == 0 && elapsed > seconds / 5) settled = last;
      const std::string key = fmt::format("go-{}", round);
      if (rank == 0) store->set(key, std::string(elapsed < seconds ? "on" : "stop"));
      if (store->get_to_str(key) == "stop") break;
    }
    // Nothing is under way now, as when `settled` was taken: a leak of 10 bytes an operation shows in 10
    // minutes.
    const double growth = last.heap_kilobytes - settled.heap_kilobytes, allowed = 512;
    const int more = last.mappings - settled.mappings, allowed_more = 40;
    std::cout << fmt::format(
                     "rank {}: {} operations, {} results checked, heap {:.0f} KiB, {:+.0f} since the first "
                     "fifth (allowed {:.0f}), {} mappings, {:+} (allowed {})\n",
                     rank, number, soak.checked(), last.heap_kilobytes, growth, allowed, last.mappings, more,
                     allowed_more)
              << std::flush;
    return growth <= allowed && more <= allowed_more ? 0 : 1;
  } catch (const std::exception& error) {
    std::cout << fmt::format("rank {}: {}\n", rank, error.what()) << std::flush;
    return 1;
  }
}

int run(double seconds, std::uint64_t seed, int ranks) {
  std::string folder = (std::filesystem::temp_directory_path() / "isograd-soak-XXXXXX").string();
  if (!::mkdtemp(folder.data())) {
    std::cerr << "cannot make a folder like " << folder << "\n";
    return 2;
  }
  std::cout << fmt::format("soak: {} ranks for {} s, seed {}\n", ranks, seconds, seed) << std::flush;
  std::vector<pid_t> pids;
  for (int r = 0; r < ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(run_rank(r, ranks, folder, seconds, seed));
    pids.push_back(pid);
  }
  int failed = 0;
  for (pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    failed += status != 0;
  }
  std::filesystem::remove_all(folder);
  std::cout << (failed ? fmt::format("soak: {} of {} ranks failed\n", failed, ranks)
                       : std::string("soak: no error, no growth\n"));
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace isograd

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: isograd_soak SECONDS [SEED] [RANKS]\n";
    return 2;
  }
  const auto seed = argc > 2 ? std::stoull(argv[2]) : std::random_device{}();
  return isograd::run(std::stod(argv[1]), seed, argc > 3 ? std::stoi(argv[3]) : 4);
}
