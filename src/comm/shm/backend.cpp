#include "comm/shm/backend.hpp"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <limits>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/shm/operation.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

std::int8_t code_of(const at::Tensor& tensor) {
  return static_cast<std::int8_t>(tensor.scalar_type());
}

kernels::Number number_of(const at::Tensor& tensor, const char* operation) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return kernels::Number::kFloat64;
    case at::kFloat:
      return kernels::Number::kFloat32;
    case at::kBFloat16:
      return kernels::Number::kBFloat16;
    case at::kHalf:
      return kernels::Number::kFloat16;
    case at::kLong:
      return kernels::Number::kInt64;
    case at::kInt:
      return kernels::Number::kInt32;
    case at::kByte:
      return kernels::Number::kUInt8;
    default:
      throw ConfigError({.where = operation,
                         .found = fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())),
                         .expected = "float64, float32, bfloat16, float16, int64, int32 or uint8",
                         .action = "Convert the tensor first"});
  }
}

kernels::Combine combine_of(const c10d::ReduceOp& op, const char* operation) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return kernels::Combine::kSum;
    case c10d::ReduceOp::MAX:
      return kernels::Combine::kMax;
    case c10d::ReduceOp::MIN:
      return kernels::Combine::kMin;
    default:
      throw ConfigError({.where = operation,
                         .found = fmt::format("reduction number {} of c10d", static_cast<int>(op.op_)),
                         .expected = "SUM, MAX or MIN",
                         .action = "Sum, then divide once where the loss is normalised"});
  }
}

}  // namespace

ShmWork::ShmWork(std::shared_ptr<shm::Engine> engine, std::shared_ptr<shm::Operation> operation, int rank,
                 c10d::OpType type, std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
    : c10d::Work(rank, type),
      engine_(std::move(engine)),
      operation_(std::move(operation)),
      results_(std::move(results)),
      timeout_(timeout) {}

bool ShmWork::progress() {
  if (auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  if (!engine_->progress(*operation_)) return false;
  finish();
  return true;
}

bool ShmWork::isCompleted() {
  try {
    return progress();
  } catch (...) {
    finish(std::current_exception());
    return true;
  }
}

bool ShmWork::isSuccess() const {
  return operation_->complete();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  try {
    engine_->wait(*operation_, timeout == kNoTimeout ? timeout_ : timeout);
  } catch (...) {
    finish(std::current_exception());
    throw;
  }
  finish();
  return true;
}

std::uint64_t ShmWork::getSequencenumber() const {
  return operation_->sequence();
}

ShmBackend::ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
                       std::chrono::milliseconds timeout, shm::EngineOptions options)
    : c10d::Backend(rank, size),
      store_(c10::make_intrusive<c10d::PrefixStore>("shm/" + name, std::move(store))),
      name_(std::move(name)),
      timeout_(timeout),
      engine_(std::make_shared<shm::Engine>(*store_, rank, size, name_, timeout, options)) {}

ShmBackend::Works ShmBackend::start(std::shared_ptr<shm::Operation> operation, c10d::OpType type,
                                    Tensors used, Tensors results, std::chrono::milliseconds timeout) {
  operation->keep_alive = std::make_shared<Tensors>(std::move(used));
  engine_->start(operation);
  return c10::make_intrusive<ShmWork>(engine_, std::move(operation), rank_, type, std::move(results),
                                      timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
}

void ShmBackend::check(const at::Tensor& tensor, const char* operation) const {
  std::string found;
  if (!tensor.defined()) {
    found = "an undefined tensor";
  } else if (!tensor.device().is_cpu()) {
    found = "a tensor on " + tensor.device().str();
  } else if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    found = "a tensor that is not contiguous";
  }
  if (found.empty()) return;
  throw ConfigError(
      {.where = fmt::format("{} of group '{}' (shm)", operation, name_),
       .found = found,
       .expected = "a contiguous tensor on the CPU",
       .action = "Call contiguous() or cpu() first, or give the group a backend of that device"});
}

const at::Tensor& ShmBackend::only(const Tensors& tensors, const char* operation) const {
  if (tensors.size() != 1) {
    throw ConfigError({.where = fmt::format("{} of group '{}' (shm)", operation, name_),
                       .found = fmt::format("{} tensors", tensors.size()),
                       .expected = "one tensor",
                       .action = "Call it once for each tensor"});
  }
  check(tensors[0], operation);
  return tensors[0];
}

ShmBackend::Works ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  return start(shm::all_reduce(bytes_of(tensor), tensor.numel(), code_of(tensor),
                               number_of(tensor, "all_reduce"), combine_of(options.reduceOp, "all_reduce")),
               c10d::OpType::ALLREDUCE, tensors, tensors, options.timeout);
}

ShmBackend::Works ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  if (options.rootRank < 0 || options.rootRank >= size_) {
    throw ConfigError({.where = fmt::format("broadcast of group '{}' (shm)", name_),
                       .found = fmt::format("root {}", options.rootRank),
                       .expected = fmt::format("0 to {}", size_ - 1),
                       .action = "Name a rank of the group"});
  }
  const int root = static_cast<int>(options.rootRank);
  return start(shm::broadcast(bytes_of(tensor), tensor.numel(), code_of(tensor), tensor.element_size(), root,
                              size_, rank_ == root),
               c10d::OpType::BROADCAST, tensors, tensors, options.timeout);
}

ShmBackend::Works ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  std::vector<std::byte*> places;
  for (const Tensors& list : outputs) {
    for (const at::Tensor& output : list) {
      check(output, "all_gather");
      if (output.numel() == input.numel() && output.scalar_type() == input.scalar_type()) {
        places.push_back(bytes_of(output));
      }
    }
  }
  if (outputs.size() != 1 || places.size() != static_cast<std::size_t>(size_)) {
    throw ConfigError({.where = fmt::format("all_gather of group '{}' (shm)", name_),
                       .found = fmt::format("{} outputs of the input's size and type", places.size()),
                       .expected = fmt::format("{}, one for each rank", size_),
                       .action = "Give one tensor like the input for each rank"});
  }
  Tensors used = outputs[0];
  used.push_back(input);
  return start(shm::all_gather(bytes_of(input), places, input.numel(), code_of(input), input.element_size()),
               c10d::OpType::ALLGATHER, used, outputs[0], options.timeout);
}

ShmBackend::Works ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  check(input, "all_gather");
  check(output, "all_gather");
  if (output.numel() != input.numel() * size_ || output.scalar_type() != input.scalar_type()) {
    throw ConfigError({.where = fmt::format("all_gather of group '{}' (shm)", name_),
                       .found = fmt::format("an output of {} {} for an input of {} {}", output.numel(),
                                            c10::toString(output.scalar_type()), input.numel(),
                                            c10::toString(input.scalar_type())),
                       .expected = fmt::format("the input's type and {} times its elements", size_),
                       .action = "Give an output with a place for each rank's input"});
  }
  std::vector<std::byte*> places;
  for (int r = 0; r < size_; ++r)
    places.push_back(bytes_of(output) + r * static_cast<std::int64_t>(input.nbytes()));
  return start(shm::all_gather(bytes_of(input), places, input.numel(), code_of(input), input.element_size()),
               c10d::OpType::_ALLGATHER_BASE, {output, input}, {output}, options.timeout);
}

ShmBackend::Works ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  check(input, "reduce_scatter");
  check(output, "reduce_scatter");
  if (input.numel() != output.numel() * size_ || output.scalar_type() != input.scalar_type()) {
    throw ConfigError({.where = fmt::format("reduce_scatter of group '{}' (shm)", name_),
                       .found = fmt::format("an input of {} {} for an output of {} {}", input.numel(),
                                            c10::toString(input.scalar_type()), output.numel(),
                                            c10::toString(output.scalar_type())),
                       .expected = fmt::format("the output's type and {} times its elements", size_),
                       .action = "Pad the input to a multiple of the group's size"});
  }
  // The output may be this rank's own part of the input: no peer reads that.
  return start(
      shm::reduce_scatter(bytes_of(input), bytes_of(output), output.numel(), size_, code_of(input),
                          number_of(input, "reduce_scatter"), combine_of(options.reduceOp, "reduce_scatter")),
      c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, options.timeout);
}

ShmBackend::Works ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(shm::barrier(), c10d::OpType::BARRIER, {}, {}, options.timeout);
}

at::Tensor ShmBackend::empty_shared(std::int64_t numel, at::ScalarType dtype) {
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  if (numel < 0 || numel > (std::int64_t{1} << 60) / (width * size_)) {
    throw ConfigError({.where = fmt::format("empty_shared of group '{}'", name_),
                       .found = fmt::format("{} elements of {} bytes", numel, width),
                       .expected = "a size that memory can have",
                       .action = "Check how the size was computed"});
  }
  auto allocation = engine_->allocate(static_cast<std::uint64_t>(numel * width),
                                      static_cast<std::int8_t>(dtype), numel, timeout_);
  std::byte* data = allocation->own();
  return at::from_blob(
      data, {numel}, [allocation](void*) { allocation->release(); }, at::TensorOptions(dtype));
}

void ShmBackend::refuse(const char* operation) const {
  throw ConfigError(
      {.where = fmt::format("{} of group '{}'", operation, name_),
       .found = "an operation that the shm backend does not have",
       .expected = "allreduce, broadcast, allgather, _allgather_base, _reduce_scatter_base or barrier",
       .action = "Use one of these, or give the group another backend"});
}

ShmBackend::Works ShmBackend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  refuse("allreduce_sparse");
}
ShmBackend::Works ShmBackend::allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) {
  refuse("allreduce_coalesced");
}
ShmBackend::Works ShmBackend::reduce(Tensors&, const c10d::ReduceOptions&) {
  refuse("reduce");
}
ShmBackend::Works ShmBackend::allgather_coalesced(std::vector<Tensors>&, Tensors&,
                                                  const c10d::AllgatherOptions&) {
  refuse("allgather_coalesced");
}
ShmBackend::Works ShmBackend::allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                                              const c10d::AllgatherOptions&) {
  refuse("allgather_into_tensor_coalesced");
}
ShmBackend::Works ShmBackend::gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) {
  refuse("gather");
}
ShmBackend::Works ShmBackend::scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) {
  refuse("scatter");
}
ShmBackend::Works ShmBackend::reduce_scatter(Tensors&, std::vector<Tensors>&,
                                             const c10d::ReduceScatterOptions&) {
  refuse("reduce_scatter (of lists)");
}
ShmBackend::Works ShmBackend::reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                                              const c10d::ReduceScatterOptions&) {
  refuse("reduce_scatter_tensor_coalesced");
}
ShmBackend::Works ShmBackend::alltoall_base(at::Tensor&, at::Tensor&, std::vector<std::int64_t>&,
                                            std::vector<std::int64_t>&, const c10d::AllToAllOptions&) {
  refuse("alltoall_base");
}
ShmBackend::Works ShmBackend::alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) {
  refuse("alltoall");
}
ShmBackend::Works ShmBackend::send(Tensors&, int, int) {
  refuse("send");
}
ShmBackend::Works ShmBackend::recv(Tensors&, int, int) {
  refuse("recv");
}
ShmBackend::Works ShmBackend::recvAnysource(Tensors&, int) {
  refuse("recvAnysource");
}

}  // namespace isograd
