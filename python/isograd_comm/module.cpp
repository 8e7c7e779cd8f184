// isograd_comm: importing it gives torch.distributed the backend "isograd", collectives over shared memory
// between the ranks of one host.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <cstring>
#include <string_view>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/mpi/mpi.hpp"
#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"
#include "isograd_comm/bindings.hpp"
#include "kernels/threads/first_calls.hpp"

namespace isograd::python {
namespace {

constexpr const char* kModuleText =
    "The backend \"isograd\" of torch.distributed: collectives over shared memory between the ranks of one "
    "host.\n\n"
    "    import isograd_comm\n"
    "    torch.distributed.init_process_group(\"isograd\")\n";

// Called by init_process_group and new_group, on every rank of the group.
c10::intrusive_ptr<ShmBackend> create(const c10d::DistributedBackendOptions& options, const py::object&) {
  const auto timeout = std::chrono::milliseconds(std::llround(std::ceil(options.timeout.count() * 1e3)));
  const py::gil_scoped_release release;  // it waits for the other ranks
  // A program may destroy its groups and make them again in a store that still holds what the first ones
  // wrote (torchrun's). All ranks of a group join it before any joins its successor: counting tells which.
  const std::string ranks = fmt::format("isograd/{}", fmt::join(options.global_ranks_in_group, ","));
  const auto turn = (options.store->add(ranks + "/joins", 1) - 1) / options.group_size;
  auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}/{}", ranks, turn), options.store);
  return c10::make_intrusive<ShmBackend>(std::move(store), options.group_rank, options.group_size,
                                         options.group_id, timeout);
}

// "isograd_mpi", for processes that mpirun started. torch's ranks must be MPI's.
c10::intrusive_ptr<c10d::Backend> create_mpi(const c10d::DistributedBackendOptions& options,
                                             const py::object&) {
  const auto timeout = std::chrono::milliseconds(std::llround(std::ceil(options.timeout.count() * 1e3)));
  const py::gil_scoped_release release;
  const mpi::Rank mine = mpi::start(timeout);
  const auto& global = options.global_ranks_in_group;  // empty: the world
  const auto expected = global.empty() ? static_cast<std::int64_t>(options.group_rank)
                                       : global.at(static_cast<std::size_t>(options.group_rank));
  if (expected != mine.rank || (global.empty() && options.group_size != mine.size)) {
    throw ConfigError({.where = "the backend \"isograd_mpi\"",
                       .found = fmt::format("rank {} of torch.distributed as rank {} of {} of MPI", expected,
                                            mine.rank, mine.size),
                       .expected = "the same ranks in both",
                       .action = "Start the program through mpirun and give init_process_group its ranks"});
  }
  if (global.empty()) return mpi::make_world(options.group_id, timeout);
  return mpi::make_subgroup({global.begin(), global.end()}, options.group_id, options.group_id, timeout);
}

// The group's backend for CPU tensors, whatever torch has wrapped around it (TORCH_DISTRIBUTED_DEBUG=DETAIL).
py::object cpu_backend(const py::object& group) {
  py::object of = group;
  if (of.is_none()) of = py::module_::import("torch.distributed").attr("group").attr("WORLD");
  py::object backend = of.attr("_get_backend")(py::module_::import("torch").attr("device")("cpu"));
  return py::hasattr(backend, "wrapped_pg") ? backend.attr("wrapped_pg") : backend;
}

at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype, const py::object& group) {
  const py::object backend = cpu_backend(group);
  if (!py::isinstance<ShmBackend>(backend)) {
    throw ConfigError(
        {.where = "isograd_comm.empty_shared",
         .found = "a group whose backend for the CPU is " + backend.attr("name")().cast<std::string>(),
         .expected = "isograd",
         .action = "Give it a group made with the backend \"isograd\""});
  }
  auto shm = backend.cast<c10::intrusive_ptr<ShmBackend>>();
  const py::gil_scoped_release release;
  return shm->empty_shared(numel, dtype);
}

// Without the family's name: Python writes it in front.
std::string message_of(const Error& error, std::string_view family) {
  const std::string_view text = error.what();
  return std::string(text.starts_with(family) ? text.substr(family.size() + std::strlen(": ")) : text);
}

void register_errors(py::module_& module, const py::object& distributed) {
  // Kept for good, as is the interpreter's own table of exceptions.
  static const py::handle config_error =
      py::exception<ConfigError>(module, "ConfigError", PyExc_RuntimeError).release();
  static const py::handle peer_error =
      py::exception<PeerError>(module, "PeerError", distributed.attr("DistBackendError")).release();
  config_error.attr("__doc__") =
      "The input is wrong: an argument, a configuration, a file. Fix it and call again.";
  peer_error.attr("__doc__") =
      "A rank was lost, late or called something else. The group cannot be used any more: make a new one.";
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ConfigError& error) {
      PyErr_SetString(config_error.ptr(), message_of(error, "ConfigError").c_str());
    } catch (const PeerError& error) {
      PyErr_SetString(peer_error.ptr(), message_of(error, "PeerError").c_str());
    }
  });
}

}  // namespace

PYBIND11_MODULE(isograd_comm, module) {
  module.doc() = kModuleText;
  make_first_calls();
  // Brings the classes of torch that ours derive from.
  const py::object distributed = py::module_::import("torch.distributed");
  register_errors(module, distributed);

  py::class_<ShmBackend, c10d::Backend, c10::intrusive_ptr<ShmBackend>>(module, "ShmBackend");
  module.def(
      "empty_shared", &empty_shared, py::arg("numel"), py::arg("dtype"), py::arg("group") = py::none(),
      "A flat, zero-filled tensor in memory that all ranks of `group` reach: collectives of the group "
      "copy nothing.\nCollective: all ranks call it with the same arguments. It stays usable until the "
      "tensor is gone on all ranks.");
  bind_timing(module);
  bind_losses(module);
  bind_verdict(module);

  // Futures call Python functions from a thread of ours, which must not need the interpreter once it ends.
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { shm::stop_background(); }, py::call_guard<py::gil_scoped_release>()));

  distributed.attr("Backend").attr("register_backend")("isograd", py::cpp_function(&create),
                                                       py::arg("extended_api") = true,
                                                       py::arg("devices") = py::list(py::make_tuple("cpu")));
  if (mpi::built())
    distributed.attr("Backend").attr("register_backend")(
        "isograd_mpi", py::cpp_function(&create_mpi), py::arg("extended_api") = true,
        py::arg("devices") = py::list(py::make_tuple("cpu")));
}

}  // namespace isograd::python
