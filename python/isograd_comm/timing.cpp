#include "isograd_comm/timing.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "isograd/error.hpp"
#include "isograd_comm/bindings.hpp"

namespace isograd::python {
namespace {

constexpr std::int64_t kPeriod = 32;  // of the values; with the ranks' numbers added bf16 still sums exactly

// Element i of rank r: i mod 32, plus r.
at::Tensor pattern(std::int64_t numel, std::int64_t rank, at::ScalarType dtype) {
  const at::Tensor block = at::arange(kPeriod, at::kFloat).add_(static_cast<double>(rank)).to(dtype);
  return block.repeat({numel / kPeriod + 1}).narrow(0, 0, numel);
}

// In place: the input is this rank's part of the output.
bool gathers(const std::string& operation) {
  return operation == "all_gather" || operation == "all_gather_in_place";
}

// What one call does over a c10d backend; the vectors it takes are made beforehand.
std::function<void()> call_of(const Case& what, const c10::intrusive_ptr<c10d::Backend>& backend,
                              const Buffers& buffers) {
  struct Held {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::vector<at::Tensor> one;
    Buffers buffers;
    std::vector<std::int64_t> equal_parts = {};
  };
  auto held = std::make_shared<Held>(Held{backend, {buffers.input}, buffers});
  const std::string& operation = what.operation;
  if (operation == "all_reduce") return [held] { held->backend->allreduce(held->one)->wait(); };
  if (operation == "broadcast") return [held] { held->backend->broadcast(held->one)->wait(); };
  if (operation == "barrier") return [held] { held->backend->barrier()->wait(); };
  if (operation == "reduce_scatter")
    return [held] { held->backend->_reduce_scatter_base(held->buffers.output, held->buffers.input)->wait(); };
  if (gathers(operation))
    return [held] { held->backend->_allgather_base(held->buffers.output, held->buffers.input)->wait(); };
  if (operation == "all_to_all")
    return [held] {
      held->backend
          ->alltoall_base(held->buffers.output, held->buffers.input, held->equal_parts, held->equal_parts)
          ->wait();
    };
  if (operation == "round_trip") {
    const int rank = backend->getRank();
    if (rank > 1) return [] {};
    return [held, rank] {
      if (rank == 0) held->backend->send(held->one, 1, 0)->wait();
      held->backend->recv(held->one, 1 - rank, 0)->wait();
      if (rank == 1) held->backend->send(held->one, 0, 0)->wait();
    };
  }
  throw ConfigError({.where = "a benchmark of collectives",
                     .found = "operation '" + operation + "'",
                     .expected = "all_reduce, broadcast, barrier, reduce_scatter, all_gather, "
                                 "all_gather_in_place, all_to_all or round_trip",
                     .action = "Name one of these"});
}

std::function<void()> call_of(const Case& what, Group group, const Buffers& buffers) {
  const at::Tensor input = buffers.input, output = buffers.output;
  const std::string& operation = what.operation;
  if (operation == "all_reduce") return [=]() mutable { group.all_reduce(input); };
  if (operation == "broadcast") return [=]() mutable { group.broadcast(input, 0); };
  if (operation == "barrier") return [=]() mutable { group.barrier(); };
  if (operation == "reduce_scatter")
    return [=]() mutable { group.reduce_scatter_async(output, input).wait(); };
  if (gathers(operation))
    return
        [=, rows = output.view({group.size(), -1})]() mutable { group.all_gather_async(rows, input).wait(); };
  if (operation == "all_to_all") return [=]() mutable { group.all_to_all_async(output, input).wait(); };
  const int rank = group.rank();
  if (rank > 1) return [] {};
  return [=]() mutable {
    if (rank == 0) group.send(input, 1);
    group.recv(input, 1 - rank);
    if (rank == 1) group.send(input, 0);
  };
}

}  // namespace

std::int64_t Case::input_numel(int ranks) const {
  const std::int64_t numel = bytes / static_cast<std::int64_t>(c10::elementSize(dtype));
  if (gathers(operation)) return numel / ranks;
  return operation == "reduce_scatter" || operation == "all_to_all" ? numel / ranks * ranks : numel;
}

std::int64_t Case::output_numel(int ranks) const {
  if (operation == "reduce_scatter") return input_numel(ranks) / ranks;
  if (gathers(operation)) return input_numel(ranks) * ranks;
  return operation == "all_to_all" ? input_numel(ranks) : 0;
}

void Race::add_backend(const std::string& name, c10::intrusive_ptr<c10d::Backend> backend, Buffers buffers) {
  contestants_.push_back({name, buffers, call_of(case_, backend, buffers)});
}

void Race::add_group(const std::string& name, Group group, Buffers buffers) {
  contestants_.push_back({name, buffers, call_of(case_, std::move(group), buffers)});
}

void Race::add_memcpy(const std::string& name, Buffers buffers) {
  const auto copy = [buffers] {
    std::memcpy(buffers.output.data_ptr(), buffers.input.data_ptr(), buffers.input.nbytes());
  };
  contestants_.push_back({name, buffers, copy, false});
}

void Race::rewrite(const Contestant& contestant, int round) const {
  if (!contestant.buffers.input.defined()) return;
  at::Tensor input = contestant.buffers.input;
  if (round < 0) {
    if (contestant.buffers.output.defined()) at::Tensor(contestant.buffers.output).fill_(-1);
    input.copy_(pattern(input.numel(), meeting_->rank(), case_.dtype));
  } else {
    input.fill_(static_cast<double>(round % 16 + meeting_->rank()));
  }
}

void Race::check(const Contestant& contestant) const {
  const at::Tensor input = contestant.buffers.input, output = contestant.buffers.output;
  if (!input.defined()) return;
  const int rank = meeting_->rank(), size = meeting_->size();
  const auto of = [&](int r) { return pattern(input.numel(), r, case_.dtype); };
  const auto summed = [&] {
    at::Tensor sum = of(0);
    for (int r = 1; r < size; ++r) sum.add_(of(r));
    return sum;
  };
  const std::string& operation = case_.operation;
  at::Tensor expected, result = output.defined() ? output : input;
  if (operation == "all_reduce") {
    expected = summed();
  } else if (operation == "reduce_scatter") {
    expected = summed().narrow(0, rank * output.numel(), output.numel());
  } else if (operation == "broadcast") {
    expected = of(0);
  } else if (operation == "round_trip") {
    expected = of(rank < 2 ? 0 : rank);
  } else {
    std::vector<at::Tensor> parts;
    const std::int64_t part = output.numel() / size;
    for (int r = 0; r < size; ++r)
      parts.push_back(gathers(operation) ? of(r) : of(r).narrow(0, rank * part, part));
    expected = at::cat(parts);
  }
  if (at::equal(result, expected)) return;
  throw std::runtime_error(case_.operation + " of " + contestant.name + " gave a wrong result on rank " +
                           std::to_string(rank));
}

double Race::time(const Contestant& contestant, int round) {
  rewrite(contestant, round);
  meeting_->start_together();
  const auto start = Clock::now();
  contestant.call();
  const std::chrono::duration<double> elapsed = Clock::now() - start;
  return meeting_->largest(elapsed.count());
}

std::map<std::string, std::vector<double>> Race::run(double seconds, int fewest, int most) {
  std::map<std::string, std::vector<double>> times;
  for (const Contestant& contestant : contestants_) {
    time(contestant, -1);
    if (contestant.checked) check(contestant);
  }
  const auto start = Clock::now();
  for (int round = 0; round < most; ++round) {
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    if (meeting_->largest(elapsed.count()) > seconds && round >= fewest) break;
    for (std::size_t i = 0; i < contestants_.size(); ++i) {
      const auto& contestant = contestants_[round % 2 == 0 ? i : contestants_.size() - 1 - i];
      times[contestant.name].push_back(time(contestant, round));
    }
  }
  return times;
}

void bind_timing(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Meeting, std::shared_ptr<Meeting>>(module, "_Meeting")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
             const py::gil_scoped_release release;
             return std::make_shared<Meeting>(*store, rank, size);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"))
      .def("round_trip", &Meeting::round_trip, Release())
      .def("exchange", &Meeting::exchange, Release());

  const auto buffers = [](const std::optional<at::Tensor>& input, const std::optional<at::Tensor>& output) {
    return Buffers{input.value_or(at::Tensor()), output.value_or(at::Tensor())};
  };
  using Maybe = std::optional<at::Tensor>;
  py::class_<Race>(module, "_Race")
      .def(py::init([](std::shared_ptr<Meeting> meeting, std::string operation, std::int64_t bytes,
                       at::ScalarType dtype) {
        return Race(std::move(meeting), Case{std::move(operation), bytes, dtype});
      }))
      .def("numel", [](const Race& race) { return std::make_pair(race.input_numel(), race.output_numel()); })
      .def("add_backend",
           [buffers](Race& race, const std::string& name, c10::intrusive_ptr<c10d::Backend> backend,
                     const Maybe& input, const Maybe& output) {
             race.add_backend(name, std::move(backend), buffers(input, output));
           })
      .def("add_group",
           [buffers](Race& race, const std::string& name, c10::intrusive_ptr<c10d::Backend> backend,
                     const Maybe& input, const Maybe& output) {
             Group group(std::move(backend), "bench", std::chrono::minutes(5), {.self_test = false});
             race.add_group(name, std::move(group), buffers(input, output));
           })
      .def("add_memcpy",
           [](Race& race, const std::string& name, const at::Tensor& input, const at::Tensor& output) {
             race.add_memcpy(name, {input, output});
           })
      .def("run", &Race::run, py::arg("seconds"), py::arg("fewest"), py::arg("most"), Release());
}

}  // namespace isograd::python
