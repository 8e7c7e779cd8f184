// Group: its operations, the bytes they move, and its handles.
#include "isograd/group.hpp"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/account.hpp"
#include "base/refuse.hpp"
#include "comm/group_impl.hpp"
#include "comm/hosts/backend.hpp"
#include "comm/nccl/nccl.hpp"
#include "comm/shm/backend.hpp"
#include "comm/squares.hpp"
#include "isograd/world.hpp"

namespace isograd {

// Defined before their first use, because guarded() returns what `action` returns.
template <typename Action>
auto Group::Impl::guarded(const Call& call, Action&& action) const {
  const CallSiteScope scope(call.site());
  try {
    return action();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    lost(call, error.what());
  }
}

template <typename Operation, typename... Arguments>
void Group::Impl::now(const Call& call, Operation operation, Arguments&&... arguments) const {
  Started started = operation(*this, call, std::forward<Arguments>(arguments)...);
  complete(call, started);
}

template <typename Operation, typename... Arguments>
Pending Group::Impl::later(const std::shared_ptr<Impl>& impl, const Call& call, Operation operation,
                           Arguments&&... arguments) {
  return pend(impl, call, operation(*impl, call, std::forward<Arguments>(arguments)...));
}

namespace {

using Impl = Group::Impl;
using Rows = Group::Rows;

std::size_t at_rank(int rank) { return static_cast<std::size_t>(rank); }

// The rows that split_rows assigns to part number `part`.
std::int64_t rows_of_part(std::int64_t rows, int parts, int part) {
  return rows / parts + (part < rows % parts ? 1 : 0);
}

std::vector<std::int64_t> stacked(std::int64_t first, at::IntArrayRef rest) {
  std::vector<std::int64_t> sizes{first};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return sizes;
}

at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return at::empty(sizes, tensor.options().requires_grad(false).memory_format(at::MemoryFormat::Contiguous));
}

std::int64_t sum(const Rows& rows) { return c10::sum_integers(rows); }

bool all_equal(const Rows& rows) {
  return std::ranges::all_of(rows, [&](std::int64_t part) { return part == rows[0]; });
}

c10d::ReduceOp::RedOpType checked(const Call& call, const at::Tensor& tensor, ReduceOp op) {
  if (op == ReduceOp::kAverage)
    call.refuse("ReduceOp::kAverage",
                "a sum: gradients are summed and one place divides; a mean of per-rank means is another loss",
                "Use kSum and let the loss's normaliser divide, once, by what all ranks counted");
  if (op != ReduceOp::kSum && op != ReduceOp::kMax && op != ReduceOp::kMin && op != ReduceOp::kProduct)
    call.refuse(fmt::format("reduction number {}", static_cast<int>(op)), "kSum, kMax, kMin or kProduct",
                "Use one of these");
  call.number(tensor);
  return op == ReduceOp::kSum   ? c10d::ReduceOp::SUM
         : op == ReduceOp::kMax ? c10d::ReduceOp::MAX
         : op == ReduceOp::kMin ? c10d::ReduceOp::MIN
                                : c10d::ReduceOp::PRODUCT;
}

// Nothing to send: other backends get no empty tensors, because some of them reject these.
bool is_idle(const Impl& group, const at::Tensor& tensor) {
  return group.alone() || (!group.shm && tensor.numel() == 0);
}

// Some backends require a shape of their own; all accept a flat one.
void flatten(const Impl& group, at::Tensor& from, at::Tensor& to) {
  if (group.shm) return;
  const at::NoGradGuard no_graph;
  from = from.view(-1);
  to = to.view(-1);
}

// ---- the operations: check, count the traffic, start -----------------------------------------------------

Started all_reduce(const Impl& group, const Call& call, at::Tensor tensor, ReduceOp op) {
  call.dense(tensor);
  const auto reduction = checked(call, tensor, op);
  Started started;
  if (is_idle(group, tensor)) return started;
  group.count(TrafficCounter::kAllReduce, tensor, 2);
  started.kept.push_back(group.writable(call, std::move(tensor), true, started));
  started.work = group.guarded(call, [&] {
    return group.backend->allreduce(started.kept, {.reduceOp = reduction, .timeout = group.timeout});
  });
  return started;
}

Started reduce(const Impl& group, const Call& call, at::Tensor tensor, int root, ReduceOp op) {
  call.dense(tensor);
  const auto reduction = checked(call, tensor, op);
  call.root(root);
  Started started;
  if (is_idle(group, tensor)) return started;
  group.count(TrafficCounter::kReduce, tensor);
  if (group.rank == root)
    started.kept.push_back(group.writable(call, std::move(tensor), true, started));
  else  // other backends may use the other ranks' tensors for partial sums
    started.kept.push_back(group.shm ? group.readable(std::move(tensor)) : group.plain_copy(tensor));
  started.work = group.guarded(call, [&] {
    return group.backend->reduce(started.kept,
                                 {.reduceOp = reduction, .rootRank = root, .timeout = group.timeout});
  });
  return started;
}

Started reduce_scatter(const Impl& group, const Call& call, at::Tensor output, at::Tensor input, ReduceOp op,
                       const Rows& rows, std::shared_ptr<double> squares) {
  call.dense(input, "input");
  call.dense(output, "output");
  call.has_rows(input, "input");
  const auto reduction = checked(call, input, op);
  if (!rows.empty()) call.rows(rows, input.size(0), "rows");
  const std::int64_t mine =
      rows.empty() ? rows_of_part(input.size(0), group.size, group.rank) : rows[at_rank(group.rank)];
  call.stack(output, "output", mine, input, 1);
  Started started;
  if (group.alone()) started.copies.push_back({output, input});
  if (is_idle(group, input)) return started;
  group.count(TrafficCounter::kReduceScatter, input);

  const c10d::ReduceScatterOptions options{.reduceOp = reduction, .timeout = group.timeout};
  // Our backend may write this rank's part over its input. Others need not support that.
  at::Tensor from = group.readable(std::move(input));
  at::Tensor to = !group.shm && output.is_alias_of(from)
                      ? group.plain_twin(call, output, false, started)
                      : group.writable(call, std::move(output), false, started);
  if (rows.empty() ? from.size(0) % group.size == 0 : all_equal(rows)) {
    flatten(group, from, to);
    started.work = group.guarded(call, [&] {
      return squares ? group.shm->reduce_scatter_with_squares(to, from, std::move(squares), group.timeout)
                     : group.backend->_reduce_scatter_base(to, from, options);
    });
    started.kept = {std::move(to), std::move(from)};
    return started;
  }

  const at::NoGradGuard no_graph;
  const Rows parts = rows.empty() ? split_rows(from.size(0), group.size) : rows;
  Tensors views = from.split_with_sizes(parts);
  if (group.shm) {
    started.kept = {std::move(to)};
    std::vector<Tensors> lists{std::move(views)};
    started.work =
        group.guarded(call, [&] { return group.backend->reduce_scatter(started.kept, lists, options); });
    return started;
  }
  // Other backends need equal parts, so every part is padded to the longest.
  const auto sizes = stacked(std::ranges::max(parts), from.sizes().slice(1));
  at::Tensor padded_output = at::empty(sizes, from.options());
  at::Tensor padded = at::zeros(stacked(group.size, sizes), from.options());
  for (int r = 0; r < group.size; ++r)
    padded.select(0, r).narrow(0, 0, parts[at_rank(r)]).copy_(views[at_rank(r)]);
  // This copy comes before any copy from `to` to the caller's tensor.
  started.copies.insert(started.copies.begin(), {to, padded_output.narrow(0, 0, mine)});
  started.kept = {padded_output.view(-1), padded.view(-1)};
  started.work = group.guarded(
      call, [&] { return group.backend->_reduce_scatter_base(started.kept[0], started.kept[1], options); });
  return started;
}

Started broadcast(const Impl& group, const Call& call, at::Tensor tensor, int root) {
  call.dense(tensor);
  call.root(root);
  Started started;
  if (is_idle(group, tensor)) return started;
  group.count(TrafficCounter::kBroadcast, tensor);
  started.kept.push_back(group.rank == root ? group.readable(std::move(tensor))
                                            : group.writable(call, std::move(tensor), false, started));
  started.work = group.guarded(call, [&] {
    return group.backend->broadcast(started.kept, {.rootRank = root, .timeout = group.timeout});
  });
  return started;
}

// `rows`: the rows of each rank; null: every input is one part of the output.
Started gather_all(const Impl& group, const Call& call, at::Tensor output, at::Tensor input,
                   const Rows* rows) {
  const at::NoGradGuard no_graph;
  Started started;
  if (group.alone()) started.copies.push_back({output, rows ? input : input.unsqueeze(0)});
  if (is_idle(group, output)) return started;
  group.count(TrafficCounter::kAllGather, output);
  at::Tensor from =
      !group.shm && input.is_alias_of(output) ? group.plain_copy(input) : group.readable(std::move(input));
  at::Tensor to = group.writable(call, std::move(output), false, started);
  const c10d::AllgatherOptions options{.timeout = group.timeout};
  if (!rows || all_equal(*rows)) {
    flatten(group, from, to);
    started.work = group.guarded(call, [&] { return group.backend->_allgather_base(to, from, options); });
    started.kept = {std::move(to), std::move(from)};
    return started;
  }
  Tensors views = to.split_with_sizes(*rows);
  if (group.shm) {
    started.kept = {std::move(from)};
    std::vector<Tensors> lists{std::move(views)};
    started.work =
        group.guarded(call, [&] { return group.backend->allgather(lists, started.kept, options); });
    return started;
  }
  // Other backends need equal parts, so every part is padded to the longest.
  const auto sizes = stacked(std::ranges::max(*rows), from.sizes().slice(1));
  at::Tensor padded = at::zeros(sizes, from.options());
  padded.narrow(0, 0, from.size(0)).copy_(from);
  at::Tensor padded_output = empty_like(from, stacked(group.size, sizes));
  std::vector<Started::Copy> copies;  // made before any copy from `to` to the caller's tensor
  for (int r = 0; r < group.size; ++r)
    copies.push_back({views[at_rank(r)], padded_output.select(0, r).narrow(0, 0, (*rows)[at_rank(r)])});
  started.copies.insert(started.copies.begin(), copies.begin(), copies.end());
  started.kept = {padded_output.view(-1), padded.view(-1)};
  started.work = group.guarded(
      call, [&] { return group.backend->_allgather_base(started.kept[0], started.kept[1], options); });
  return started;
}

Started all_gather(const Impl& group, const Call& call, at::Tensor output, at::Tensor input) {
  call.dense(input, "input");
  call.dense(output, "output");
  call.stack(output, "output", group.size, input, 0);
  return gather_all(group, call, std::move(output), std::move(input), nullptr);
}

Started all_gather_rows(const Impl& group, const Call& call, at::Tensor output, at::Tensor input,
                        const Rows& rows) {
  call.dense(input, "input");
  call.dense(output, "output");
  call.has_rows(input, "input");
  call.has_rows(output, "output");
  call.rows(rows, output.size(0), "rows");
  call.stack(output, "output", output.size(0), input, 1);
  if (const std::int64_t mine = rows[at_rank(group.rank)]; input.size(0) != mine)
    call.refuse(fmt::format("an input of {} rows", input.size(0)),
                fmt::format("{}, as the given rows say", mine), "Give the number of rows that each rank has");
  return gather_all(group, call, std::move(output), std::move(input), &rows);
}

// A gather, or a scatter, its reverse. `own`: this rank's part; `all`: every rank's, on the root alone.
Started to_or_from_root(const Impl& group, const Call& call, at::Tensor own, at::Tensor all, int root,
                        bool gathers) {
  call.dense(own, gathers ? "input" : "output");
  call.root(root);
  Started started;
  const bool here_is_root = group.rank == root;
  if (here_is_root) {
    const char* which = gathers ? "output" : "input";
    call.dense(all, which);
    call.stack(all, which, group.size, own, 0);
  }
  if (group.alone())
    started.copies.push_back(gathers ? Started::Copy{all, own.unsqueeze(0)}
                                     : Started::Copy{own, all.squeeze(0)});
  if (is_idle(group, own)) return started;
  std::int64_t sent = 0, elsewhere = 0;
  for (int other = 0; other < group.size; ++other) {
    if (other == group.rank || (gathers ? other != root : !here_is_root)) continue;
    sent += static_cast<std::int64_t>(own.nbytes());
    if (!group.is_here(other)) elsewhere += static_cast<std::int64_t>(own.nbytes());
  }
  group.count_bytes(gathers ? TrafficCounter::kGather : TrafficCounter::kScatter, sent, elsewhere);
  std::vector<Tensors> lists;
  if (here_is_root) {
    const at::NoGradGuard no_graph;
    all = gathers ? group.writable(call, std::move(all), false, started) : group.readable(std::move(all));
    lists.push_back(all.unbind(0));
  }
  started.kept.push_back(gathers ? group.readable(std::move(own))
                                 : group.writable(call, std::move(own), false, started));
  started.work = group.guarded(call, [&] {
    return gathers
               ? group.backend->gather(lists, started.kept, {.rootRank = root, .timeout = group.timeout})
               : group.backend->scatter(started.kept, lists, {.rootRank = root, .timeout = group.timeout});
  });
  if (here_is_root) started.kept.insert(started.kept.end(), lists[0].begin(), lists[0].end());
  return started;
}

Started gather(const Impl& group, const Call& call, at::Tensor output, at::Tensor input, int root) {
  return to_or_from_root(group, call, std::move(input), std::move(output), root, /*gathers=*/true);
}

Started scatter(const Impl& group, const Call& call, at::Tensor output, at::Tensor input, int root) {
  return to_or_from_root(group, call, std::move(output), std::move(input), root, /*gathers=*/false);
}

Started all_to_all(const Impl& group, const Call& call, at::Tensor output, at::Tensor input, Rows output_rows,
                   Rows input_rows) {
  call.dense(input, "input");
  call.dense(output, "output");
  call.has_rows(input, "input");
  call.has_rows(output, "output");
  const bool even = output_rows.empty() && input_rows.empty();
  if (even) {
    call.even_rows(input.size(0));
  } else {
    call.rows(input_rows, input.size(0), "input_rows");
    call.rows(output_rows, output.size(0), "output_rows");
  }
  call.stack(output, "output", even ? input.size(0) : output.size(0), input, 1);
  const auto rows_to = [&](int rank) {
    return even ? rows_of_part(input.size(0), group.size, rank) : input_rows[at_rank(rank)];
  };
  const std::int64_t staying = rows_to(group.rank);
  if (!even && staying != output_rows[at_rank(group.rank)])
    call.refuse(
        fmt::format("{} rows to this rank itself and {} from it", staying, output_rows[at_rank(group.rank)]),
        "as many", "Count the rows of each rank");
  Started started;
  if (group.alone()) {
    started.copies.push_back({output, input});
    return started;
  }
  // Rows that stay on this rank are not sent. With uneven parts their number differs.
  std::int64_t leaving = 0;
  for (int other = 0; other < group.size; ++other)
    if (!group.is_here(other)) leaving += rows_to(other);
  const std::int64_t rows = input.size(0),
                     row = rows == 0 ? 0 : static_cast<std::int64_t>(input.nbytes()) / rows;
  group.count_bytes(TrafficCounter::kAllToAll, row * (rows - staying), row * leaving);
  started.kept = {group.writable(call, std::move(output), false, started), group.readable(std::move(input))};
  started.work = group.guarded(call, [&] {
    return group.backend->alltoall_base(started.kept[0], started.kept[1], output_rows, input_rows,
                                        {.timeout = group.timeout});
  });
  return started;
}

Started send(const Impl& group, const Call& call, at::Tensor tensor, int to, int tag) {
  call.dense(tensor);
  call.message(to, tag);
  Started started;
  if (is_idle(group, tensor)) return started;
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  group.count_bytes(TrafficCounter::kSend, bytes, group.is_here(to) ? 0 : bytes);
  started.kept.push_back(group.readable(std::move(tensor)));
  started.work = group.guarded(call, [&] { return group.backend->send(started.kept, to, tag); });
  return started;
}

Started recv(const Impl& group, const Call& call, at::Tensor tensor, int from, int tag) {
  call.dense(tensor);
  call.message(from, tag);
  Started started;
  if (is_idle(group, tensor)) return started;
  started.kept.push_back(group.writable(call, std::move(tensor), false, started));
  started.work = group.guarded(call, [&] { return group.backend->recv(started.kept, from, tag); });
  return started;
}

Started barrier(const Impl& group, const Call& call) {
  Started started;
  if (group.alone()) return started;
  group.count_bytes(TrafficCounter::kBarrier, 0, 0);
  c10d::BarrierOptions options;
  options.timeout = group.timeout;
  started.work = group.guarded(call, [&] { return group.backend->barrier(options); });
  return started;
}

// The numbers of rows that all_gather_rows needs. The exchange also compares the sizes of rows: an error
// about rows is clearer than one about bytes.
Rows exchange_rows(const Impl& group, const Call& call, const at::Tensor& input) {
  call.dense(input, "input");
  call.has_rows(input, "input");
  if (group.alone()) return {input.size(0)};
  const at::Tensor mine =
      at::tensor({input.size(0), c10::multiply_integers(input.sizes().slice(1))}, at::kLong);
  at::Tensor all = at::empty({group.size, 2}, mine.options().device(input.device()));
  group.now(call, all_gather, all, mine.to(input.device()));
  all = all.cpu();
  const auto of_ranks = all.accessor<std::int64_t, 2>();
  Rows rows;
  for (int r = 0; r < group.size; ++r) {
    rows.push_back(of_ranks[r][0]);
    if (of_ranks[r][1] == of_ranks[0][1]) continue;
    throw_peer_error(
        call.where(),
        fmt::format("rows of {} elements on rank 0 and of {} on rank {}", of_ranks[0][1], of_ranks[r][1], r),
        "rows of one size", "Give every rank an input whose dimensions but the first are the same");
  }
  return rows;
}

}  // namespace

// A work of any backend.
struct Pending::State {
  std::shared_ptr<Impl> impl;
  Call call;
  Started started;
  bool done = false;
};

// Advances our work; those of other backends advance by themselves.
bool Pending::progress() {
  if (!state_ || state_->done) return true;
  c10d::Work* work = state_->started.work.get();
  const bool ready = state_->impl->guarded(state_->call, [&] {
    return state_->impl->shm ? static_cast<ShmWork*>(work)->progress() : work->isCompleted();
  });
  if (ready) wait();  // complete now, because a foreign backend's errors come from here
  return ready;
}

void Pending::wait() {
  if (!state_ || state_->done) return;
  state_->impl->complete(state_->call, state_->started);
  state_->done = true;
  state_->started = {};
}

// ---- calling the backend ---------------------------------------------------------------------------------

// A backend that lacks an operation reports it in c10d's words, on every rank and before anything is sent.
void Group::Impl::lost(const Call& call, const std::string& found) {
  if (found.find("does not support") != std::string::npos ||
      found.find("does not implement") != std::string::npos)
    throw MissingOperation({.where = call.where(),
                            .found = found,
                            .expected = "a backend that has this operation",
                            .action = "Use another backend"});
  throw_peer_error(call.where(), found, "a completed operation",
                   "See what the backend reports, then recreate the group");
}

void Group::Impl::complete(const Call& call, Started& started) const {
  if (started.work) {
    using Clock = std::chrono::steady_clock;
    const auto counted =
        c10::make_scope_exit([&, begin = Clock::now()] { traffic.add_wait(Clock::now() - begin); });
    if (!guarded(call, [&] { return started.work->wait(timeout); }))
      lost(call, "the backend aborted the operation");
  }
  if (started.copies.empty()) return;
  const at::NoGradGuard no_graph;
  for (Started::Copy& copy : started.copies) copy.to.copy_(copy.from);
  started.copies.clear();
}

Pending Group::Impl::pend(const std::shared_ptr<Impl>& impl, const Call& call, Started started) {
  if (started.work)
    return Pending(std::make_shared<Pending::State>(Pending::State{impl, call, std::move(started)}));
  impl->complete(call, started);
  return {};  // complete: a group of one rank returns it
}

at::Tensor Group::Impl::plain_empty(const at::Tensor& like) const {
  return at::empty(like.sizes(), like.options().device(device).memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor Group::Impl::plain_copy(const at::Tensor& tensor) const {
  const at::NoGradGuard no_graph;
  return plain_empty(tensor).copy_(tensor);
}

at::Tensor Group::Impl::plain_twin(const Call& call, const at::Tensor& tensor, bool read,
                                   Started& started) const {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    call.refuse("a tensor to write to whose elements share memory (expanded?)", "a place for each element",
                "Call clone() first");
  at::Tensor twin = plain_empty(tensor);
  const at::NoGradGuard no_graph;
  if (read) twin.copy_(tensor);
  started.copies.push_back({tensor, twin});
  return twin;
}

// ---- Group -----------------------------------------------------------------------------------------------

std::vector<std::int64_t> split_rows(std::int64_t rows, int parts) {
  if (rows < 0 || parts < 1)
    refuse("split_rows", fmt::format("{} rows for {} parts", rows, parts),
           "0 rows or more, for at least one part", "Check how the numbers were computed");
  std::vector<std::int64_t> result;
  for (int part = 0; part < parts; ++part) result.push_back(rows_of_part(rows, parts, part));
  return result;
}

Group Group::solo() {
  auto impl = std::make_shared<Impl>();
  impl->name = "solo";
  return Group(std::move(impl));
}

std::shared_ptr<Group::Impl> Group::Impl::wrap(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
                                               std::chrono::milliseconds timeout) {
  if (!backend)
    refuse(fmt::format("group '{}'", name), "no backend", "a c10d backend", "Give one, or use Group::solo()");
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

int Group::rank() const { return impl_->rank; }
int Group::size() const { return impl_->size; }
const std::string& Group::name() const { return impl_->name; }
std::chrono::milliseconds Group::timeout() const { return impl_->timeout; }

void Group::all_reduce(at::Tensor tensor, ReduceOp op, Site site) {
  impl_->now(impl_->call("all_reduce", site), isograd::all_reduce, std::move(tensor), op);
}
Pending Group::all_reduce_async(at::Tensor tensor, ReduceOp op, Site site) {
  return Impl::later(impl_, impl_->call("all_reduce", site), isograd::all_reduce, std::move(tensor), op);
}

void Group::reduce(at::Tensor tensor, int root, ReduceOp op, Site site) {
  impl_->now(impl_->call("reduce", site), isograd::reduce, std::move(tensor), root, op);
}
Pending Group::reduce_async(at::Tensor tensor, int root, ReduceOp op, Site site) {
  return Impl::later(impl_, impl_->call("reduce", site), isograd::reduce, std::move(tensor), root, op);
}

void Group::broadcast(at::Tensor tensor, int root, Site site) {
  impl_->now(impl_->call("broadcast", site), isograd::broadcast, std::move(tensor), root);
}
Pending Group::broadcast_async(at::Tensor tensor, int root, Site site) {
  return Impl::later(impl_, impl_->call("broadcast", site), isograd::broadcast, std::move(tensor), root);
}

at::Tensor Group::all_gather(const at::Tensor& input, Site site) {
  const Call call = impl_->call("all_gather", site);
  call.dense(input, "input");
  at::Tensor output = empty_like(input, stacked(impl_->size, input.sizes()));
  impl_->now(call, isograd::all_gather, output, input);
  return output;
}
Pending Group::all_gather_async(at::Tensor output, at::Tensor input, Site site) {
  return Impl::later(impl_, impl_->call("all_gather", site), isograd::all_gather, std::move(output),
                     std::move(input));
}

at::Tensor Group::all_gather_rows(const at::Tensor& input, Site site) {
  const Call call = impl_->call("all_gather_rows", site);
  const Rows rows = exchange_rows(*impl_, call, input);
  at::Tensor output = empty_like(input, stacked(sum(rows), input.sizes().slice(1)));
  impl_->now(call, isograd::all_gather_rows, output, input, rows);
  return output;
}
Pending Group::all_gather_rows_async(at::Tensor output, at::Tensor input, Rows rows, Site site) {
  return Impl::later(impl_, impl_->call("all_gather_rows", site), isograd::all_gather_rows, std::move(output),
                     std::move(input), rows);
}

at::Tensor Group::reduce_scatter(const at::Tensor& input, ReduceOp op, Site site) {
  const Call call = impl_->call("reduce_scatter", site);
  call.dense(input, "input");
  call.has_rows(input, "input");
  at::Tensor output = empty_like(
      input, stacked(rows_of_part(input.size(0), impl_->size, impl_->rank), input.sizes().slice(1)));
  impl_->now(call, isograd::reduce_scatter, output, input, op, Rows(), nullptr);
  return output;
}
Pending Group::reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op, Rows rows, Site site) {
  return Impl::later(impl_, impl_->call("reduce_scatter", site), isograd::reduce_scatter, std::move(output),
                     std::move(input), op, rows, nullptr);
}

std::optional<Pending> reduce_scatter_with_squares(const Group& group, at::Tensor output, at::Tensor input,
                                                   std::shared_ptr<double> squares, Group::Site site) {
  const auto& impl = Impl::of(group);
  const auto type = input.defined() ? input.scalar_type() : at::kByte;
  if (!impl->shm || impl->alone() || (type != at::kFloat && type != at::kDouble && type != at::kBFloat16) ||
      input.dim() == 0 || input.size(0) % impl->size != 0)
    return std::nullopt;
  return Impl::later(impl, impl->call("reduce_scatter", site), reduce_scatter, std::move(output),
                     std::move(input), ReduceOp::kSum, Rows(), std::move(squares));
}

at::Tensor Group::gather(const at::Tensor& input, int root, Site site) {
  const Call call = impl_->call("gather", site);
  call.dense(input, "input");
  at::Tensor output;
  if (impl_->rank == root) output = empty_like(input, stacked(impl_->size, input.sizes()));
  impl_->now(call, isograd::gather, output, input, root);
  return output;
}
Pending Group::gather_async(at::Tensor output, at::Tensor input, int root, Site site) {
  return Impl::later(impl_, impl_->call("gather", site), isograd::gather, std::move(output), std::move(input),
                     root);
}

void Group::scatter(at::Tensor output, const at::Tensor& input, int root, Site site) {
  impl_->now(impl_->call("scatter", site), isograd::scatter, std::move(output), input, root);
}
Pending Group::scatter_async(at::Tensor output, at::Tensor input, int root, Site site) {
  return Impl::later(impl_, impl_->call("scatter", site), isograd::scatter, std::move(output),
                     std::move(input), root);
}

at::Tensor Group::all_to_all(const at::Tensor& input, Site site) {
  const Call call = impl_->call("all_to_all", site);
  call.dense(input, "input");
  at::Tensor output = empty_like(input, input.sizes());
  impl_->now(call, isograd::all_to_all, output, input, Rows(), Rows());
  return output;
}
at::Tensor Group::all_to_all(const at::Tensor& input, Rows output_rows, Rows input_rows, Site site) {
  const Call call = impl_->call("all_to_all", site);
  call.dense(input, "input");
  call.has_rows(input, "input");
  call.rows(output_rows, sum(output_rows), "output_rows");
  at::Tensor output = empty_like(input, stacked(sum(output_rows), input.sizes().slice(1)));
  impl_->now(call, isograd::all_to_all, output, input, std::move(output_rows), std::move(input_rows));
  return output;
}
Pending Group::all_to_all_async(at::Tensor output, at::Tensor input, Rows output_rows, Rows input_rows,
                                Site site) {
  return Impl::later(impl_, impl_->call("all_to_all", site), isograd::all_to_all, std::move(output),
                     std::move(input), std::move(output_rows), std::move(input_rows));
}

void Group::send(const at::Tensor& tensor, int to, int tag, Site site) {
  const auto& impl = Impl::messenger_of(impl_);
  impl->now(impl->call("send", site), isograd::send, tensor, to, tag);
}
Pending Group::send_async(at::Tensor tensor, int to, int tag, Site site) {
  const auto& impl = Impl::messenger_of(impl_);
  return Impl::later(impl, impl->call("send", site), isograd::send, std::move(tensor), to, tag);
}

void Group::recv(at::Tensor tensor, int from, int tag, Site site) {
  const auto& impl = Impl::messenger_of(impl_);
  impl->now(impl->call("recv", site), isograd::recv, std::move(tensor), from, tag);
}
Pending Group::recv_async(at::Tensor tensor, int from, int tag, Site site) {
  const auto& impl = Impl::messenger_of(impl_);
  return Impl::later(impl, impl->call("recv", site), isograd::recv, std::move(tensor), from, tag);
}

void Group::barrier(Site site) {
  impl_->now(impl_->call("barrier", site), isograd::barrier);
  if (impl_->messenger) Group(impl_->messenger).barrier(site);  // on the host, too
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

bool Group::has_host_memory() const { return impl_->alone() || impl_->shm; }

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

bool Group::Impl::is_here(int other) const { return !hosts || hosts->here(other); }

HostBytes host_bytes(const Group& group) {
  const auto& impl = Group::Impl::of(group);
  HostBytes bytes{.across = impl->hosts ? impl->hosts->across() : 0};
  bytes.within = std::max<std::int64_t>(0, impl->traffic.read().bytes() - bytes.across);
  return bytes;
}

}  // namespace isograd
