// Race: one collective, carried out by several contestants in turn and timed in C++, by ranks that meet
// before each call.
#include <ATen/ATen.h>
#include <sched.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/refuse.hpp"
#include "comm/shm/segment.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd_comm/bindings.hpp"

namespace isograd::python {
namespace {

using Clock = std::chrono::steady_clock;  // one clock for all processes of a host

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How the ranks of a benchmark begin at one moment and learn each other's times, without help from what they
// measure. They are processes of one host.
class Meeting {
 public:
  Meeting(c10d::Store& store, int rank, int size)  // collective
      : rank_(rank),
        size_(size),
        own_cores_(size <= static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))) {
    if (size > kMostRanks)
      refuse("a benchmark of collectives", std::to_string(size) + " ranks",
             "at most " + std::to_string(kMostRanks), "Compare fewer ranks");
    const std::string key = "isograd/bench/meeting", purpose = "the meeting point of a benchmark";
    if (rank == 0) {
      segment_ = shm::Segment::create(sizeof(Shared), purpose);
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(&segment_->id());
      store.set(key, std::vector<std::uint8_t>(bytes, bytes + sizeof(shm::SegmentId)));
    } else {
      shm::SegmentId id;
      const auto bytes = store.get(key);
      std::memcpy(&id, bytes.data(), std::min(bytes.size(), sizeof id));
      segment_ = shm::Segment::open(id, purpose);
    }
    shared_ = reinterpret_cast<Shared*>(segment_->data());
    exchange(0);
    segment_->close_descriptor();
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Returns on all ranks at once: at an agreed moment where each rank has a core, else as soon as all came.
  void start_together() {
    // Longer than a rank needs to see that the last one came; much shorter than a time slice.
    const std::chrono::nanoseconds notice(3000 + 100 * size_);
    const double last = largest(static_cast<double>(Clock::now().time_since_epoch().count()));
    const Clock::time_point moment(notice + std::chrono::nanoseconds(static_cast<std::int64_t>(last)));
    while (own_cores_ && Clock::now() < moment) pause_core();
  }

  // Everyone's value, by rank.
  std::vector<double> exchange(double mine) {
    auto& values = shared_->values[(meetings_ + 1) % 2];
    values[rank_].value.store(std::bit_cast<std::uint64_t>(mine), std::memory_order_relaxed);
    // Everything that a rank wrote before it arrived is visible to those that saw it arrive.
    shared_->arrived[rank_].value.store(++meetings_, std::memory_order_release);
    std::vector<double> all;
    for (int r = 0; r < size_; ++r) {
      wait_until([&] { return shared_->arrived[r].value.load(std::memory_order_acquire) >= meetings_; });
      all.push_back(std::bit_cast<double>(values[r].value.load(std::memory_order_relaxed)));
    }
    return all;
  }
  double largest(double mine) { return std::ranges::max(exchange(mine)); }

  // Seconds that a cache line takes from rank 0's core to rank 1's and back; median of a few hundred trips.
  double round_trip() {
    constexpr int kBatches = 15, kTrips = 30;
    auto& ball = shared_->ball.value;  // even: at rank 0, odd: at rank 1
    std::vector<double> batches;
    for (int batch = 0; size_ > 1 && batch < kBatches; ++batch) {
      start_together();
      const auto start = Clock::now();
      for (int trip = 0; trip < kTrips && rank_ < 2; ++trip, ++trips_) {
        wait_until([&] { return ball.load(std::memory_order_acquire) == 2 * trips_ + (rank_ == 1 ? 1 : 0); });
        ball.store(rank_ == 0 ? 2 * trips_ + 1 : 2 * trips_ + 2, std::memory_order_release);
      }
      if (rank_ == 0) wait_until([&] { return ball.load(std::memory_order_acquire) == 2 * trips_; });
      batches.push_back(std::chrono::duration<double>(Clock::now() - start).count() / kTrips);
    }
    if (batches.empty()) return 0;
    std::ranges::nth_element(batches, batches.begin() + kBatches / 2);
    return exchange(batches[kBatches / 2])[0];
  }

 private:
  static constexpr int kMostRanks = 64;
  // Every word has a cache line to itself: whoever waits for one is not disturbed by writes to another.
  struct Shared {
    struct alignas(64) Word {
      std::atomic<std::uint64_t> value;
    };
    Word arrived[kMostRanks];    // the number of the meeting that the rank has come to
    Word values[2][kMostRanks];  // of even and of odd meetings: a quick rank may be one meeting ahead
    Word ball;
  };

  template <typename Condition>
  void wait_until(Condition&& condition) const {
    const auto deadline = Clock::now() + std::chrono::minutes(5);
    // Few: who has finished must not keep a core from the threads of a contestant that has not.
    const int spins = own_cores_ ? 200 : 10;
    while (true) {
      for (int i = 0; i < spins; ++i) {
        if (condition()) return;
        pause_core();
      }
      sched_yield();
      if (Clock::now() > deadline)
        throw PeerError({.where = "rank " + std::to_string(rank_) + " of a benchmark of collectives",
                         .found = "a rank that does not come",
                         .expected = "all ranks",
                         .action = "See what the other ranks printed"});
    }
  }

  int rank_, size_;
  bool own_cores_;  // each rank can have one
  std::shared_ptr<shm::Segment> segment_;
  Shared* shared_ = nullptr;
  std::uint64_t meetings_ = 0, trips_ = 0;
};

// The same memory may serve several contestants: it is rewritten before each call. One vector and no parts
// are made beforehand, which calls of a c10d backend take.
using Maybe = std::optional<at::Tensor>;
struct Buffers {
  Buffers(const Maybe& in, const Maybe& out)
      : input(in.value_or(at::Tensor())), output(out.value_or(at::Tensor())), one{input} {}
  at::Tensor input, output, rows{};  // the output as all_gather_async takes it
  std::vector<at::Tensor> one;
  std::vector<std::int64_t> equal_parts{};
};
using Backend = c10::intrusive_ptr<c10d::Backend>;

// A call of each operation, by a c10d backend and by Group. The input of both gathers is this rank's part of
// the output.
struct OperationCalls {
  void (*backend)(c10d::Backend&, Buffers&);
  void (*group)(Group&, Buffers&);
};
void backend_gathers(c10d::Backend& backend, Buffers& b) {
  backend._allgather_base(b.output, b.input)->wait();
}
void group_gathers(Group& group, Buffers& b) { group.all_gather_async(b.rows, b.input).wait(); }
const std::map<std::string, OperationCalls> kOperations = {
    {"all_reduce",
     {[](c10d::Backend& backend, Buffers& b) { backend.allreduce(b.one)->wait(); },
      [](Group& group, Buffers& b) { group.all_reduce(b.input); }}},
    {"broadcast",
     {[](c10d::Backend& backend, Buffers& b) { backend.broadcast(b.one)->wait(); },
      [](Group& group, Buffers& b) { group.broadcast(b.input, 0); }}},
    {"barrier",
     {[](c10d::Backend& backend, Buffers&) { backend.barrier()->wait(); },
      [](Group& group, Buffers&) { group.barrier(); }}},
    {"reduce_scatter",
     {[](c10d::Backend& backend, Buffers& b) { backend._reduce_scatter_base(b.output, b.input)->wait(); },
      [](Group& group, Buffers& b) { group.reduce_scatter_async(b.output, b.input).wait(); }}},
    {"all_gather", {backend_gathers, group_gathers}},
    {"all_gather_in_place", {backend_gathers, group_gathers}},
    {"all_to_all",
     {[](c10d::Backend& backend, Buffers& b) {
        backend.alltoall_base(b.output, b.input, b.equal_parts, b.equal_parts)->wait();
      },
      [](Group& group, Buffers& b) { group.all_to_all_async(b.output, b.input).wait(); }}},
    {"round_trip",
     {[](c10d::Backend& backend, Buffers& b) {
        const int rank = backend.getRank();
        if (rank == 0) backend.send(b.one, 1, 0)->wait();
        if (rank < 2) backend.recv(b.one, 1 - rank, 0)->wait();
        if (rank == 1) backend.send(b.one, 0, 0)->wait();
      },
      [](Group& group, Buffers& b) {
        const int rank = group.rank();
        if (rank == 0) group.send(b.input, 1);
        if (rank < 2) group.recv(b.input, 1 - rank);
        if (rank == 1) group.send(b.input, 0);
      }}}};

class Race {
 public:
  Race(std::shared_ptr<Meeting> meeting, const std::string& operation)
      : meeting_(std::move(meeting)), gathers_(operation.starts_with("all_gather")) {
    const auto found = kOperations.find(operation);
    if (found == kOperations.end())
      refuse(
          "a benchmark of collectives", "operation '" + operation + "'",
          "all_reduce, broadcast, barrier, reduce_scatter, all_gather, all_gather_in_place, all_to_all or round_trip",
          "Name one of these");
    calls_ = found->second;
  }

  void add_backend(const std::string& name, const Backend& backend, const Maybe& input, const Maybe& output) {
    contestants_.push_back(
        {name, {input, output}, [backend, call = calls_.backend](Buffers& b) { call(*backend, b); }});
  }
  void add_group(const std::string& name, const Backend& backend, const Maybe& input, const Maybe& output) {
    Buffers buffers(input, output);
    Group group(backend, "bench", std::chrono::minutes(5), {.self_test = false});
    if (gathers_) buffers.rows = buffers.output.view({group.size(), -1});
    contestants_.push_back(
        {name, buffers, [group, call = calls_.group](Buffers& b) mutable { call(group, b); }});
  }
  void add_memcpy(const std::string& name, const at::Tensor& from, const at::Tensor& to) {
    const auto copy = [](Buffers& b) {
      std::memcpy(b.output.data_ptr(), b.input.data_ptr(), b.input.nbytes());
    };
    contestants_.push_back({name, {from, to}, copy});
  }

  // One call of the contestant that was added last, with its buffers as they are.
  void call() { time(contestants_.back()); }

  // Rounds of one call of each, A B C, C B A, ..., until `seconds` have passed; at least `fewest` rounds and
  // at most `most`. The seconds that the slowest rank took, by contestant.
  std::map<std::string, std::vector<double>> run(double seconds, int fewest, int most) {
    std::map<std::string, std::vector<double>> times;
    const auto start = Clock::now();
    for (int round = 0; round < most; ++round) {
      const std::chrono::duration<double> elapsed = Clock::now() - start;
      if (meeting_->largest(elapsed.count()) > seconds && round >= fewest) break;
      for (std::size_t i = 0; i < contestants_.size(); ++i) {
        auto& contestant = contestants_[round % 2 == 0 ? i : contestants_.size() - 1 - i];
        if (const at::Tensor& input = contestant.buffers.input; input.defined())
          input.fill_(static_cast<double>(round % 16 + meeting_->rank()));
        times[contestant.name].push_back(time(contestant));
      }
    }
    return times;
  }

 private:
  struct Contestant {
    std::string name;
    Buffers buffers;
    std::function<void(Buffers&)> call;
  };

  double time(Contestant& contestant) {
    meeting_->start_together();
    const auto start = Clock::now();
    contestant.call(contestant.buffers);
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    return meeting_->largest(elapsed.count());
  }

  std::shared_ptr<Meeting> meeting_;
  bool gathers_;
  OperationCalls calls_{};
  std::vector<Contestant> contestants_;
};

}  // namespace

void bind_timing(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Meeting, std::shared_ptr<Meeting>>(module, "_Meeting")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
             const py::gil_scoped_release release;
             return std::make_shared<Meeting>(*store, rank, size);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"))
      .def("round_trip", &Meeting::round_trip, Release());
  py::class_<Race>(module, "_Race")
      .def(py::init<std::shared_ptr<Meeting>, const std::string&>())
      .def("add_backend", &Race::add_backend)
      .def("add_group", &Race::add_group)
      .def("add_memcpy", &Race::add_memcpy)
      .def("call", &Race::call, Release())
      .def("run", &Race::run, py::arg("seconds"), py::arg("fewest"), py::arg("most"), Release());
}

}  // namespace isograd::python
