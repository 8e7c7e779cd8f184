// The operations of Group that combine: all_reduce, reduce, reduce_scatter.
#include <ATen/ATen.h>

#include <algorithm>

#include "comm/group_impl.hpp"
#include "comm/shm/backend.hpp"
#include "comm/squares.hpp"

namespace isograd {
namespace {

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    default:  // all others are refused before
      return c10d::ReduceOp::SUM;
  }
}

}  // namespace

Started Group::Impl::all_reduce(const Call& call, at::Tensor tensor, ReduceOp op) const {
  check(call, tensor, "tensor");
  check_reduction(call, tensor, op);
  Started started;
  if (alone() || nothing_to_send(tensor)) return started;
  count(TrafficCounter::kAllReduce, tensor, 2);
  started.kept.push_back(writable(call, std::move(tensor), true, started));
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->allreduce(started.kept, options); });
  return started;
}

Started Group::Impl::reduce(const Call& call, at::Tensor tensor, int root, ReduceOp op) const {
  check(call, tensor, "tensor");
  check_reduction(call, tensor, op);
  check_root(call, root);
  Started started;
  if (alone() || nothing_to_send(tensor)) return started;
  count(TrafficCounter::kReduce, tensor);
  if (rank == root) {
    started.kept.push_back(writable(call, std::move(tensor), true, started));
  } else {  // other backends may use the other ranks' tensors for partial sums
    started.kept.push_back(shm ? readable(std::move(tensor)) : plain_copy(tensor));
  }
  c10d::ReduceOptions options;
  options.reduceOp = to_c10d(op);
  options.rootRank = root;
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->reduce(started.kept, options); });
  return started;
}

Started Group::Impl::reduce_scatter(const Call& call, at::Tensor output, at::Tensor input, ReduceOp op,
                                    const Rows& rows, std::shared_ptr<double> squares) const {
  check(call, input, "input");
  check(call, output, "output");
  check_has_rows(call, input, "input");
  check_reduction(call, input, op);
  if (!rows.empty()) check_rows(call, rows, input.size(0), "rows");
  const std::int64_t mine =
      rows.empty() ? rows_of_part(input.size(0), size, rank) : rows[static_cast<std::size_t>(rank)];
  check_stack(call, output, "output", mine, input, 1);
  Started started;
  if (alone()) started.copies.push_back({output, input});
  if (alone() || nothing_to_send(input)) return started;
  count(TrafficCounter::kReduceScatter, input);

  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(op);
  options.timeout = timeout;
  // Our backend may write this rank's part over its input. Others need not support that.
  at::Tensor from = readable(std::move(input)), to = !shm && output.is_alias_of(from)
                                                         ? plain_twin(call, output, false, started)
                                                         : writable(call, std::move(output), false, started);
  const bool even = rows.empty()
                        ? from.size(0) % size == 0
                        : std::all_of(rows.begin(), rows.end(), [&](auto part) { return part == rows[0]; });
  if (even) {
    if (!shm) {  // some backends require a shape of their own; all accept a flat one
      const at::NoGradGuard no_graph;
      from = from.view(-1);
      to = to.view(-1);
    }
    started.work = guarded(call, [&] {
      return squares ? shm->reduce_scatter_with_squares(to, from, std::move(squares), timeout)
                     : backend->_reduce_scatter_base(to, from, options);
    });
    started.kept = {std::move(to), std::move(from)};
    return started;
  }

  const at::NoGradGuard no_graph;
  const Rows parts = rows.empty() ? split_rows(from.size(0), size) : rows;
  std::vector<at::Tensor> views = from.split_with_sizes(parts);
  if (shm) {
    started.kept = {std::move(to)};
    std::vector<std::vector<at::Tensor>> lists{std::move(views)};
    started.work = guarded(call, [&] { return backend->reduce_scatter(started.kept, lists, options); });
    return started;
  }
  // Other backends need equal parts, so every part is padded to the longest.
  std::vector<std::int64_t> sizes = from.sizes().vec();
  sizes[0] = *std::max_element(parts.begin(), parts.end());
  at::Tensor padded_output = at::empty(sizes, from.options());
  sizes.insert(sizes.begin(), size);
  at::Tensor padded = at::zeros(sizes, from.options());
  for (int r = 0; r < size; ++r) {
    const auto part = static_cast<std::size_t>(r);
    padded.select(0, r).narrow(0, 0, parts[part]).copy_(views[part]);
  }
  // This copy comes before any copy from `to` to the caller's tensor.
  started.copies.insert(started.copies.begin(), {to, padded_output.narrow(0, 0, mine)});
  at::Tensor flat_output = padded_output.view(-1), flat = padded.view(-1);
  started.work = guarded(call, [&] { return backend->_reduce_scatter_base(flat_output, flat, options); });
  started.kept = {std::move(flat_output), std::move(flat)};
  return started;
}

bool Group::Impl::can_square(const at::Tensor& input) const {
  const auto type = input.scalar_type();
  return shm && !alone() && input.dim() > 0 && input.size(0) % size == 0 &&
         (type == at::kFloat || type == at::kDouble || type == at::kBFloat16);
}

std::optional<Pending> reduce_scatter_with_squares(const Group& group, at::Tensor output, at::Tensor input,
                                                   std::shared_ptr<double> squares, Group::Site site) {
  const auto& impl = Group::Impl::of(group);
  if (!input.defined() || !impl->can_square(input)) return std::nullopt;
  const Call call{"reduce_scatter", site};
  return Group::Impl::pend(impl, call,
                           impl->reduce_scatter(call, std::move(output), std::move(input), ReduceOp::kSum, {},
                                                std::move(squares)));
}

void Group::all_reduce(at::Tensor tensor, ReduceOp op, Site site) {
  const Call call{"all_reduce", site};
  Started started = impl_->all_reduce(call, std::move(tensor), op);
  impl_->complete(call, started);
}

Pending Group::all_reduce_async(at::Tensor tensor, ReduceOp op, Site site) {
  const Call call{"all_reduce", site};
  return Impl::pend(impl_, call, impl_->all_reduce(call, std::move(tensor), op));
}

void Group::reduce(at::Tensor tensor, int root, ReduceOp op, Site site) {
  const Call call{"reduce", site, root};
  Started started = impl_->reduce(call, std::move(tensor), root, op);
  impl_->complete(call, started);
}

Pending Group::reduce_async(at::Tensor tensor, int root, ReduceOp op, Site site) {
  const Call call{"reduce", site, root};
  return Impl::pend(impl_, call, impl_->reduce(call, std::move(tensor), root, op));
}

at::Tensor Group::reduce_scatter(const at::Tensor& input, ReduceOp op, Site site) {
  const Call call{"reduce_scatter", site};
  impl_->check(call, input, "input");
  impl_->check_has_rows(call, input, "input");
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes[0] = rows_of_part(sizes[0], impl_->size, impl_->rank);
  at::Tensor output = at::empty(sizes, input.options().requires_grad(false));
  Started started = impl_->reduce_scatter(call, output, input, op, {});
  impl_->complete(call, started);
  return output;
}

Pending Group::reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op, Rows rows, Site site) {
  const Call call{"reduce_scatter", site};
  return Impl::pend(impl_, call, impl_->reduce_scatter(call, std::move(output), std::move(input), op, rows));
}

}  // namespace isograd
