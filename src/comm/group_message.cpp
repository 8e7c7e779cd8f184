// The operations of Group that involve two ranks or no data: send, recv, barrier.
#include "comm/group_impl.hpp"

namespace isograd {

Started Group::Impl::send(const Call& call, at::Tensor tensor, int to, int tag) const {
  check(call, tensor, "tensor");
  check_peer(call, to, tag);
  Started started;
  if (nothing_to_send(tensor)) return started;
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  count_bytes(TrafficCounter::kSend, bytes, here(to) ? 0 : bytes);
  started.kept.push_back(readable(std::move(tensor)));
  started.work = guarded(call, [&] { return backend->send(started.kept, to, tag); });
  return started;
}

Started Group::Impl::recv(const Call& call, at::Tensor tensor, int from, int tag) const {
  check(call, tensor, "tensor");
  check_peer(call, from, tag);
  Started started;
  if (nothing_to_send(tensor)) return started;
  started.kept.push_back(writable(call, std::move(tensor), false, started));
  started.work = guarded(call, [&] { return backend->recv(started.kept, from, tag); });
  return started;
}

Started Group::Impl::barrier(const Call& call) const {
  Started started;
  if (alone()) return started;
  count_bytes(TrafficCounter::kBarrier, 0, 0);
  c10d::BarrierOptions options;
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->barrier(options); });
  return started;
}

void Group::send(const at::Tensor& tensor, int to, int tag, Site site) {
  const Call call{"send", site, to};
  const auto& impl = Impl::messenger_of(impl_);
  Started started = impl->send(call, tensor, to, tag);
  impl->complete(call, started);
}

Pending Group::send_async(at::Tensor tensor, int to, int tag, Site site) {
  const Call call{"send", site, to};
  const auto& impl = Impl::messenger_of(impl_);
  return Impl::pend(impl, call, impl->send(call, std::move(tensor), to, tag));
}

void Group::recv(at::Tensor tensor, int from, int tag, Site site) {
  const Call call{"recv", site, from};
  const auto& impl = Impl::messenger_of(impl_);
  Started started = impl->recv(call, std::move(tensor), from, tag);
  impl->complete(call, started);
}

Pending Group::recv_async(at::Tensor tensor, int from, int tag, Site site) {
  const Call call{"recv", site, from};
  const auto& impl = Impl::messenger_of(impl_);
  return Impl::pend(impl, call, impl->recv(call, std::move(tensor), from, tag));
}

void Group::barrier(Site site) {
  const Call call{"barrier", site};
  Started started = impl_->barrier(call);
  impl_->complete(call, started);
  if (impl_->messenger) Group(impl_->messenger).barrier(site);  // on the host, too
}

}  // namespace isograd
