#include "isograd/group.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/pending.hpp"
#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

const char* name_of(ReduceOp op) {
  return op == ReduceOp::kSum ? "sum" : op == ReduceOp::kMax ? "max" : "min";
}

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  throw ConfigError({.where = "a reduction",
                     .found = fmt::format("reduction number {}", static_cast<int>(op)),
                     .expected = "kSum, kMax or kMin",
                     .action = "Use one of these; a mean is a sum divided where the loss is normalised"});
}

// Runs `action` of a backend; what a foreign backend throws becomes a PeerError that says where.
template <typename Action>
auto translate(const std::string& where, Action&& action) {
  try {
    return action();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError({.where = where,
                     .found = error.what(),
                     .expected = "a completed operation",
                     .action = "See what the backend reports, then recreate the group"});
  }
}

struct BackendWork final : Pending::State {
  BackendWork(c10::intrusive_ptr<c10d::Work> work, std::string where, std::chrono::milliseconds timeout)
      : work_(std::move(work)), where_(std::move(where)), timeout_(timeout) {}

  bool progress() override {
    if (auto* shm = dynamic_cast<ShmWork*>(work_.get())) return shm->progress();
    return translate(where_, [&] { return work_->isCompleted(); });
  }

  void wait() override {
    const bool finished = translate(where_, [&] { return work_->wait(timeout_); });
    if (!finished) {
      throw PeerError({.where = where_,
                       .found = "the backend aborted the operation",
                       .expected = "a completed operation",
                       .action = "Recreate the group"});
    }
  }

  c10::intrusive_ptr<c10d::Work> work_;
  std::string where_;
  std::chrono::milliseconds timeout_;
};

}  // namespace

// A Pending without a state is complete: what a group of one rank gives.
bool Pending::progress() {
  return !state_ || state_->progress();
}

void Pending::wait() {
  if (state_) state_->wait();
}

struct Group::Impl {
  c10::intrusive_ptr<c10d::Backend> backend;  // null: alone
  std::string name;
  std::chrono::milliseconds timeout{};
  int rank = 0;
  int size = 1;

  bool alone() const { return size == 1; }
  ShmBackend* shm() const { return dynamic_cast<ShmBackend*>(backend.get()); }

  std::string where(const std::string& operation) const {
    return fmt::format("{} of group '{}' on rank {} of {}", operation, name, rank, size);
  }

  void check(const at::Tensor& tensor, const char* operation) const {
    if (tensor.defined() && tensor.is_contiguous()) return;
    throw ConfigError({.where = where(operation),
                       .found = tensor.defined() ? "a tensor that is not contiguous" : "an undefined tensor",
                       .expected = "a contiguous tensor",
                       .action = "Call contiguous() first"});
  }

  Pending start(const std::string& operation,
                const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& call) const {
    const std::string place = where(operation);
    auto work = translate(place, [&] { return call(*backend); });
    return Pending(std::make_shared<BackendWork>(std::move(work), place, timeout));
  }
};

Group Group::solo() {
  auto impl = std::make_shared<Impl>();
  impl->name = "solo";
  return Group(std::move(impl));
}

Group::Group(c10::intrusive_ptr<c10d::Backend> backend, std::string name, std::chrono::milliseconds timeout)
    : impl_(std::make_shared<Impl>()) {
  if (!backend) {
    throw ConfigError({.where = fmt::format("group '{}'", name),
                       .found = "no backend",
                       .expected = "a c10d backend",
                       .action = "Give one, or use Group::solo()"});
  }
  impl_->rank = backend->getRank();
  impl_->size = backend->getSize();
  impl_->backend = std::move(backend);
  impl_->name = std::move(name);
  impl_->timeout = timeout;
}

int Group::rank() const {
  return impl_->rank;
}
int Group::size() const {
  return impl_->size;
}
const std::string& Group::name() const {
  return impl_->name;
}
std::chrono::milliseconds Group::timeout() const {
  return impl_->timeout;
}

Pending Group::all_reduce_async(at::Tensor tensor, ReduceOp op) {
  impl_->check(tensor, "all_reduce");
  if (impl_->alone()) return {};
  return impl_->start(fmt::format("all_reduce({})", name_of(op)), [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    options.timeout = impl_->timeout;
    return backend.allreduce(tensors, options);
  });
}

void Group::all_reduce(at::Tensor tensor, ReduceOp op) {
  all_reduce_async(std::move(tensor), op).wait();
}

void Group::broadcast(at::Tensor tensor, int root) {
  impl_->check(tensor, "broadcast");
  if (root < 0 || root >= impl_->size) {
    throw ConfigError({.where = impl_->where("broadcast"),
                       .found = fmt::format("root {}", root),
                       .expected = fmt::format("0 to {}", impl_->size - 1),
                       .action = "Name a rank of the group"});
  }
  if (impl_->alone()) return;
  impl_
      ->start(fmt::format("broadcast from rank {}", root),
              [&](c10d::Backend& backend) {
                std::vector<at::Tensor> tensors{tensor};
                c10d::BroadcastOptions options;
                options.rootRank = root;
                options.timeout = impl_->timeout;
                return backend.broadcast(tensors, options);
              })
      .wait();
}

at::Tensor Group::all_gather(const at::Tensor& tensor) {
  impl_->check(tensor, "all_gather");
  if (impl_->alone()) return tensor.unsqueeze(0).clone();
  std::vector<std::int64_t> shape{impl_->size};
  shape.insert(shape.end(), tensor.sizes().begin(), tensor.sizes().end());
  at::Tensor output = at::empty(shape, tensor.options().requires_grad(false));
  impl_
      ->start("all_gather",
              [&](c10d::Backend& backend) {
                at::Tensor flat = output.view({-1});
                at::Tensor input = tensor.detach().reshape({-1});
                c10d::AllgatherOptions options;
                options.timeout = impl_->timeout;
                return backend._allgather_base(flat, input, options);
              })
      .wait();
  return output;
}

void Group::barrier() {
  if (impl_->alone()) return;
  impl_
      ->start("barrier",
              [&](c10d::Backend& backend) {
                c10d::BarrierOptions options;
                options.timeout = impl_->timeout;
                return backend.barrier(options);
              })
      .wait();
}

at::Tensor Group::empty_shared(std::int64_t numel, at::ScalarType dtype) {
  if (ShmBackend* shm = impl_->shm(); shm && !impl_->alone()) return shm->empty_shared(numel, dtype);
  return at::zeros({numel}, at::TensorOptions(dtype));
}

void Group::poison(const std::string& reason) noexcept {
  if (!impl_->backend) return;
  if (ShmBackend* shm = impl_->shm()) return shm->poison(reason);
  try {
    impl_->backend->abort();
  } catch (...) {  // a backend without abort(): its peers have its own timeout
  }
}

}  // namespace isograd
