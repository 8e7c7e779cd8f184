// Race: one collective, carried out by several contestants in turn and timed in C++.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/refuse.hpp"
#include "isograd/group.hpp"
#include "isograd_comm/bindings.hpp"
#include "isograd_comm/meeting.hpp"

namespace isograd::python {
namespace {

constexpr std::int64_t kPeriod = 32;  // of the values; with the ranks' numbers added bf16 still sums exactly

// Element i of rank r: i mod 32, plus r.
at::Tensor pattern(std::int64_t numel, std::int64_t rank, at::ScalarType dtype) {
  const at::Tensor block = at::arange(kPeriod, at::kFloat).add_(static_cast<double>(rank)).to(dtype);
  return block.repeat({numel / kPeriod + 1}).narrow(0, 0, numel);
}

// The same memory may serve several contestants: it is rewritten before each call. One vector and no parts
// are made beforehand, which calls of a c10d backend take.
struct Buffers {
  Buffers(const std::optional<at::Tensor>& in, const std::optional<at::Tensor>& out)
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
  // `bytes` is that of the largest buffer of a rank: the tensor of all_reduce, broadcast and round_trip, the
  // input of reduce_scatter and all_to_all, the output of all_gather.
  Race(std::shared_ptr<Meeting> meeting, std::string operation, std::int64_t bytes, at::ScalarType dtype)
      : meeting_(std::move(meeting)), operation_(std::move(operation)), bytes_(bytes), dtype_(dtype) {
    if (!kOperations.contains(operation_))
      refuse(
          "a benchmark of collectives", "operation '" + operation_ + "'",
          "all_reduce, broadcast, barrier, reduce_scatter, all_gather, all_gather_in_place, all_to_all or round_trip",
          "Name one of these");
  }

  // Elements of the input and the output of a rank; an output of 0: in place.
  std::pair<std::int64_t, std::int64_t> numel() const {
    const std::int64_t numel = bytes_ / static_cast<std::int64_t>(c10::elementSize(dtype_)),
                       ranks = meeting_->size();
    const std::int64_t part = numel / ranks, all = part * ranks;
    if (gathers()) return {part, all};
    if (operation_ == "reduce_scatter") return {all, part};
    return operation_ == "all_to_all" ? std::pair{all, all} : std::pair{numel, std::int64_t{0}};
  }

  void add_backend(const std::string& name, const Backend& backend, const Buffers& buffers) {
    contestants_.push_back(
        {name, buffers, [=, call = kOperations.at(operation_).backend](Buffers& b) { call(*backend, b); }});
  }
  void add_group(const std::string& name, Group group, Buffers buffers) {
    if (gathers()) buffers.rows = buffers.output.view({group.size(), -1});
    const auto call = kOperations.at(operation_).group;
    contestants_.push_back(
        {name, buffers, [call, group = std::move(group)](Buffers& b) mutable { call(group, b); }});
  }
  void add_memcpy(const std::string& name, const Buffers& buffers) {  // input to output
    const auto copy = [](Buffers& b) {
      std::memcpy(b.output.data_ptr(), b.input.data_ptr(), b.input.nbytes());
    };
    contestants_.push_back({name, buffers, copy, false});
  }

  // Rounds of one call of each, A B C, C B A, ..., until `seconds` have passed; at least `fewest` rounds and
  // at most `most`. Before them a round that is not timed, whose results are compared with the right ones
  // (std::runtime_error otherwise). The seconds that the slowest rank took, by contestant.
  std::map<std::string, std::vector<double>> run(double seconds, int fewest, int most) {
    std::map<std::string, std::vector<double>> times;
    for (Contestant& contestant : contestants_) {
      time(contestant, -1);
      if (contestant.checked) check(contestant);
    }
    const auto start = Clock::now();
    for (int round = 0; round < most; ++round) {
      const std::chrono::duration<double> elapsed = Clock::now() - start;
      if (meeting_->largest(elapsed.count()) > seconds && round >= fewest) break;
      for (std::size_t i = 0; i < contestants_.size(); ++i) {
        auto& contestant = contestants_[round % 2 == 0 ? i : contestants_.size() - 1 - i];
        times[contestant.name].push_back(time(contestant, round));
      }
    }
    return times;
  }

 private:
  struct Contestant {
    std::string name;
    Buffers buffers;
    std::function<void(Buffers&)> call;
    bool checked = true;
  };
  bool gathers() const { return operation_.starts_with("all_gather"); }

  void rewrite(const Buffers& buffers, int round) const {
    if (!buffers.input.defined()) return;
    if (round >= 0) {
      buffers.input.fill_(static_cast<double>(round % 16 + meeting_->rank()));
      return;
    }
    if (buffers.output.defined()) buffers.output.fill_(-1);
    buffers.input.copy_(pattern(buffers.input.numel(), meeting_->rank(), dtype_));
  }

  void check(const Contestant& contestant) const {
    const at::Tensor &input = contestant.buffers.input, &output = contestant.buffers.output;
    if (!input.defined()) return;
    const int rank = meeting_->rank(), size = meeting_->size();
    const auto of = [&](int r) { return pattern(input.numel(), r, dtype_); };
    at::Tensor expected;
    if (operation_ == "all_reduce" || operation_ == "reduce_scatter") {
      expected = of(0);
      for (int r = 1; r < size; ++r) expected.add_(of(r));
      if (output.defined()) expected = expected.narrow(0, rank * output.numel(), output.numel());
    } else if (operation_ == "broadcast") {
      expected = of(0);
    } else if (operation_ == "round_trip") {
      expected = of(rank < 2 ? 0 : rank);
    } else {
      std::vector<at::Tensor> parts;
      const std::int64_t part = output.numel() / size;
      for (int r = 0; r < size; ++r) parts.push_back(gathers() ? of(r) : of(r).narrow(0, rank * part, part));
      expected = at::cat(parts);
    }
    if (!at::equal(output.defined() ? output : input, expected))
      throw std::runtime_error(operation_ + " of " + contestant.name + " gave a wrong result on rank " +
                               std::to_string(rank));
  }

  double time(Contestant& contestant, int round) {
    rewrite(contestant.buffers, round);
    meeting_->start_together();
    const auto start = Clock::now();
    contestant.call(contestant.buffers);
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    return meeting_->largest(elapsed.count());
  }

  std::shared_ptr<Meeting> meeting_;
  std::string operation_;
  std::int64_t bytes_;
  at::ScalarType dtype_;
  std::vector<Contestant> contestants_;
};

}  // namespace

void bind_timing(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  using Maybe = std::optional<at::Tensor>;
  py::class_<Meeting, std::shared_ptr<Meeting>>(module, "_Meeting")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
             const py::gil_scoped_release release;
             return std::make_shared<Meeting>(*store, rank, size);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"))
      .def("round_trip", &Meeting::round_trip, Release())
      .def("exchange", &Meeting::exchange, Release());
  py::class_<Race>(module, "_Race")
      .def(py::init<std::shared_ptr<Meeting>, std::string, std::int64_t, at::ScalarType>())
      .def("numel", &Race::numel)
      .def("add_backend",
           [](Race& race, const std::string& name, const Backend& backend, const Maybe& input,
              const Maybe& output) {
             race.add_backend(name, backend, {input, output});
           })
      .def("add_group",
           [](Race& race, const std::string& name, const Backend& backend, const Maybe& input,
              const Maybe& output) {
             Group group(backend, "bench", std::chrono::minutes(5), {.self_test = false});
             race.add_group(name, std::move(group), {input, output});
           })
      .def("add_memcpy",
           [](Race& race, const std::string& name, const at::Tensor& input, const at::Tensor& output) {
             race.add_memcpy(name, {input, output});
           })
      .def("run", &Race::run, py::arg("seconds"), py::arg("fewest"), py::arg("most"), Release());
}

}  // namespace isograd::python
