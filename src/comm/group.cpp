// Group and Pending as objects, and the count of its bytes. The operations are in group_operations.cpp.
#include "isograd/group.hpp"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/account.hpp"
#include "base/refuse.hpp"
#include "comm/group_impl.hpp"
#include "comm/hosts/backend.hpp"
#include "comm/nccl/nccl.hpp"
#include "comm/self_test.hpp"
#include "comm/shm/backend.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

// A work of any backend. progress() advances ours; others advance by themselves.
class BackendState final : public Pending::State {
 public:
  BackendState(std::shared_ptr<Group::Impl> impl, const Call& call, Started started)
      : impl_(std::move(impl)),
        call_(call),
        started_(std::move(started)),
        ours_(impl_->shm ? static_cast<ShmWork*>(started_.work.get()) : nullptr) {}

  bool progress() override {
    if (done_) return true;
    const bool ready = ours_ ? impl_->guarded(call_, [&] { return ours_->progress(); })
                             : impl_->guarded(call_, [&] { return started_.work->isCompleted(); });
    if (!ready) return false;
    wait();  // complete now, because a foreign backend's errors come from here
    return true;
  }

  void wait() override {
    if (done_) return;
    impl_->complete(call_, started_);
    done_ = true;
    ours_ = nullptr;
    started_ = {};
  }

 private:
  std::shared_ptr<Group::Impl> impl_;
  Call call_;
  Started started_;
  ShmWork* ours_;
  bool done_ = false;
};

}  // namespace

// A Pending without a state is complete. A group of one rank returns it.
bool Pending::progress() {
  return !state_ || state_->progress();
}

void Pending::wait() {
  if (state_) state_->wait();
}

std::vector<std::int64_t> split_rows(std::int64_t rows, int parts) {
  if (rows < 0 || parts < 1) {
    refuse("split_rows", fmt::format("{} rows for {} parts", rows, parts),
           "0 rows or more, for at least one part", "Check how the numbers were computed");
  }
  std::vector<std::int64_t> result;
  for (int part = 0; part < parts; ++part) result.push_back(rows_of_part(rows, parts, part));
  return result;
}

Pending Group::Impl::pend(const std::shared_ptr<Impl>& impl, const Call& call, Started started) {
  if (!started.work) {
    impl->complete(call, started);
    return {};
  }
  return Pending(std::make_shared<BackendState>(impl, call, std::move(started)));
}

Group Group::solo() {
  auto impl = std::make_shared<Impl>();
  impl->name = "solo";
  return Group(std::move(impl));
}

std::shared_ptr<Group::Impl> Group::Impl::wrap(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
                                               std::chrono::milliseconds timeout) {
  if (!backend) {
    isograd::refuse(fmt::format("group '{}'", name), "no backend", "a c10d backend",
                    "Give one, or use Group::solo()");
  }
  auto impl = std::make_shared<Impl>();
  impl->device = nccl::device_of(*backend).value_or(at::kCPU);
  impl->rank = backend->getRank();
  impl->size = backend->getSize();
  impl->backend = std::move(backend);
  impl->shm = dynamic_cast<ShmBackend*>(impl->backend.get());
  impl->over_hosts = dynamic_cast<HostsBackend*>(impl->backend.get());
  impl->name = std::move(name);
  impl->timeout = timeout;
  return impl;
}

Group::Group(c10::intrusive_ptr<c10d::Backend> backend, std::string name, std::chrono::milliseconds timeout,
             GroupOptions options)
    : Group(Impl::make_group(std::move(backend), nullptr, name, timeout, options)) {}

Group Group::Impl::make_group(c10::intrusive_ptr<c10d::Backend> backend,
                              c10::intrusive_ptr<c10d::Backend> messages, const std::string& name,
                              std::chrono::milliseconds timeout, GroupOptions options) {
  Group group(wrap(std::move(backend), name, timeout));
  if (messages) group.impl_->messenger = wrap(std::move(messages), name, timeout);
  if (options.self_test) self_test(group, group.impl_->device);
  return group;
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

at::Tensor Group::empty_shared(std::int64_t numel, at::ScalarType dtype, at::Device device) {
  if (impl_->shm && !impl_->alone() && device.is_cpu()) {
    count_shared(numel * static_cast<std::int64_t>(c10::elementSize(dtype)));
    return impl_->shm->empty_shared(numel, dtype);
  }
  if (impl_->over_hosts && device.is_cpu()) return impl_->over_hosts->empty_shared(numel, dtype);
  return at::zeros({numel}, at::TensorOptions(dtype).device(device));
}

at::Tensor Group::host_shared(std::int64_t numel, at::ScalarType dtype) {
  if (impl_->alone()) return at::zeros({numel}, at::TensorOptions(dtype));
  if (!impl_->shm)
    refuse(fmt::format("host_shared of group '{}'", impl_->name),
           fmt::format("backend {}", impl_->backend->getBackendName()), "shm, whose ranks reach one memory",
           "Run the ranks of one host over the shm backend, or do not share parameters");
  const std::int64_t bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  count_shared(split_rows(bytes, impl_->size)[impl_->rank]);  // this rank's part of the one copy
  return impl_->shm->host_shared(numel, dtype);
}

bool Group::has_host_memory() const {
  return impl_->alone() || impl_->shm;
}

Traffic Group::traffic() const {
  Traffic traffic = impl_->traffic.read();
  if (!impl_->messenger) return traffic;
  Traffic messages = impl_->messenger->traffic.read();
  traffic.waited_seconds += messages.waited_seconds;
  traffic.operations.merge(messages.operations);  // barriers are counted by the backend's group
  return traffic;
}

void Group::poison(const std::string& reason) noexcept {
  if (!impl_->backend) return;
  if (impl_->messenger) Group(impl_->messenger).poison(reason);
  if (impl_->shm) return impl_->shm->poison(reason);
  if (impl_->over_hosts) return impl_->over_hosts->give_up(reason);
  try {
    impl_->backend->abort();
  } catch (...) {  // a backend without abort(): its peers have its own timeout
  }
}

std::int64_t Traffic::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [name, operation] : operations) sum += operation.bytes;
  return sum;
}

Traffic TrafficCounter::read() const {
  constexpr const char* kNames[kKinds] = {"all_reduce", "reduce", "reduce_scatter", "broadcast",
                                          "all_gather", "gather", "scatter",        "all_to_all",
                                          "send",       "barrier"};
  Traffic traffic;
  traffic.waited_seconds = static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  for (std::size_t kind = 0; kind < kKinds; ++kind)
    if (const std::int64_t calls = calls_[kind].load(std::memory_order_relaxed); calls > 0)
      traffic.operations[kNames[kind]] = {calls, bytes_[kind].load(std::memory_order_relaxed)};
  return traffic;
}

void Group::Impl::count(TrafficCounter::Kind kind, const at::Tensor& whole, std::int64_t turns) const {
  const std::int64_t bytes = turns * static_cast<std::int64_t>(whole.nbytes()) * (size - 1) / size;
  const bool summed_by_host =
      over_hosts && (kind == TrafficCounter::kAllReduce || kind == TrafficCounter::kReduceScatter ||
                     kind == TrafficCounter::kAllGather);
  count_bytes(kind, bytes, hosts && !summed_by_host && !hosts->next_is_here() ? bytes : 0);
}

void Group::Impl::count_bytes(TrafficCounter::Kind kind, std::int64_t bytes, std::int64_t across) const {
  traffic.add(kind, bytes);
  if (!hosts) return;
  hosts->add(bytes);
  if (across > 0) hosts->add_across(across);
}

bool Group::Impl::here(int other) const {
  return !hosts || hosts->here(other);
}

HostBytes host_bytes(const Group& group) {
  const auto& impl = Group::Impl::of(group);
  HostBytes bytes{.across = impl->hosts ? impl->hosts->across() : 0};
  bytes.within = std::max<std::int64_t>(0, impl->traffic.read().bytes() - bytes.across);
  return bytes;
}

}  // namespace isograd
