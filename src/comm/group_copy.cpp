// The operations of Group that copy data: broadcast, all_gather, gather, scatter, all_to_all.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/group_impl.hpp"

namespace isograd {
namespace {

std::vector<std::int64_t> stacked(std::int64_t first, at::IntArrayRef rest) {
  std::vector<std::int64_t> sizes{first};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return sizes;
}

at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return at::empty(sizes, tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

std::int64_t sum(const Group::Rows& rows) {
  std::int64_t total = 0;
  for (std::int64_t part : rows) total += part;
  return total;
}

}  // namespace

Started Group::Impl::broadcast(const Call& call, at::Tensor tensor, int root) const {
  check(call, tensor, "tensor");
  check_root(call, root);
  Started started;
  if (alone() || nothing_to_send(tensor)) return started;
  count(TrafficCounter::kBroadcast, tensor);
  started.kept.push_back(rank == root ? readable(std::move(tensor))
                                      : writable(call, std::move(tensor), false, started));
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->broadcast(started.kept, options); });
  return started;
}

Started Group::Impl::all_gather(const Call& call, at::Tensor output, at::Tensor input) const {
  check(call, input, "input");
  check(call, output, "output");
  check_stack(call, output, "output", size, input, 0);
  Started started;
  if (alone()) started.copies.push_back({output, input.unsqueeze(0)});
  if (alone() || nothing_to_send(input)) return started;
  count(TrafficCounter::kAllGather, output);
  at::Tensor from = !shm && input.is_alias_of(output) ? plain_copy(input) : readable(std::move(input));
  at::Tensor to = writable(call, std::move(output), false, started);
  if (!shm) {  // some backends require a shape of their own; all accept a flat one
    const at::NoGradGuard no_graph;
    from = from.view(-1);
    to = to.view(-1);
  }
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->_allgather_base(to, from, options); });
  started.kept = {std::move(to), std::move(from)};
  return started;
}

Started Group::Impl::all_gather_rows(const Call& call, at::Tensor output, at::Tensor input,
                                     const Rows& rows) const {
  check(call, input, "input");
  check(call, output, "output");
  check_has_rows(call, input, "input");
  check_has_rows(call, output, "output");
  check_rows(call, rows, output.size(0), "rows");
  check_stack(call, output, "output", output.size(0), input, 1);
  if (input.size(0) != rows[static_cast<std::size_t>(rank)]) {
    refuse(call, fmt::format("an input of {} rows", input.size(0)),
           fmt::format("{}, as the given rows say", rows[static_cast<std::size_t>(rank)]),
           "Give the number of rows that each rank has");
  }
  Started started;
  if (alone()) started.copies.push_back({output, input});
  if (alone() || nothing_to_send(output)) return started;
  count(TrafficCounter::kAllGather, output);

  const at::NoGradGuard no_graph;
  at::Tensor from = readable(std::move(input)), to = writable(call, std::move(output), false, started);
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  if (std::all_of(rows.begin(), rows.end(), [&](auto part) { return part == rows[0]; })) {
    if (!shm) {
      from = from.view(-1);
      to = to.view(-1);
    }
    started.work = guarded(call, [&] { return backend->_allgather_base(to, from, options); });
    started.kept = {std::move(to), std::move(from)};
    return started;
  }
  std::vector<at::Tensor> views = to.split_with_sizes(rows);
  if (shm) {
    started.kept = {std::move(from)};
    std::vector<std::vector<at::Tensor>> lists{std::move(views)};
    started.work = guarded(call, [&] { return backend->allgather(lists, started.kept, options); });
    return started;
  }
  // Other backends need equal parts, so every part is padded to the longest.
  std::vector<std::int64_t> sizes = from.sizes().vec();
  sizes[0] = *std::max_element(rows.begin(), rows.end());
  at::Tensor padded = at::zeros(sizes, from.options());
  padded.narrow(0, 0, from.size(0)).copy_(from);
  at::Tensor padded_output = empty_like(from, stacked(size, sizes));
  std::vector<Started::Copy> copies;  // made before any copy from `to` to the caller's tensor
  for (int r = 0; r < size; ++r) {
    const auto part = static_cast<std::size_t>(r);
    copies.push_back({views[part], padded_output.select(0, r).narrow(0, 0, rows[part])});
  }
  started.copies.insert(started.copies.begin(), copies.begin(), copies.end());
  at::Tensor flat_output = padded_output.view(-1), flat = padded.view(-1);
  started.work = guarded(call, [&] { return backend->_allgather_base(flat_output, flat, options); });
  started.kept = {std::move(flat_output), std::move(flat)};
  return started;
}

// The exchange also compares the sizes of rows: an error about rows is clearer than one about bytes.
Group::Rows Group::Impl::exchange_rows(const Call& call, const at::Tensor& input) const {
  check(call, input, "input");
  check_has_rows(call, input, "input");
  if (alone()) return {input.size(0)};
  std::int64_t width = 1;
  for (std::int64_t length : input.sizes().slice(1)) width *= length;
  const at::Tensor mine = at::empty({2}, at::kLong);
  mine.data_ptr<std::int64_t>()[0] = input.size(0);
  mine.data_ptr<std::int64_t>()[1] = width;
  at::Tensor all = at::empty({size, 2}, mine.options().device(input.device()));
  Started started = all_gather(call, all, mine.to(input.device()));
  complete(call, started);
  all = all.cpu();
  Rows rows;
  for (int r = 0; r < size; ++r) {
    const std::int64_t* of_rank = all.data_ptr<std::int64_t>() + 2 * r;
    rows.push_back(of_rank[0]);
    if (of_rank[1] == all.data_ptr<std::int64_t>()[1]) continue;
    throw PeerError({.where = where(call),
                     .found = fmt::format("rows of {} elements on rank 0 and of {} on rank {}",
                                          all.data_ptr<std::int64_t>()[1], of_rank[1], r),
                     .expected = "rows of one size",
                     .action = "Give every rank an input whose dimensions but the first are the same"});
  }
  return rows;
}

Started Group::Impl::gather(const Call& call, at::Tensor output, at::Tensor input, int root) const {
  check(call, input, "input");
  check_root(call, root);
  Started started;
  const bool here_is_root = rank == root;
  if (here_is_root) {
    check(call, output, "output");
    check_stack(call, output, "output", size, input, 0);
  }
  if (alone()) started.copies.push_back({output, input.unsqueeze(0)});
  if (alone() || nothing_to_send(input)) return started;
  const std::int64_t sent = here_is_root ? 0 : static_cast<std::int64_t>(input.nbytes());
  count_bytes(TrafficCounter::kGather, sent, here(root) ? 0 : sent);
  std::vector<std::vector<at::Tensor>> lists;
  if (here_is_root) {
    const at::NoGradGuard no_graph;
    lists.push_back(writable(call, std::move(output), false, started).unbind(0));
  }
  started.kept.push_back(readable(std::move(input)));
  c10d::GatherOptions options;
  options.rootRank = root;
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->gather(lists, started.kept, options); });
  if (here_is_root) started.kept.insert(started.kept.end(), lists[0].begin(), lists[0].end());
  return started;
}

Started Group::Impl::scatter(const Call& call, at::Tensor output, at::Tensor input, int root) const {
  check(call, output, "output");
  check_root(call, root);
  Started started;
  const bool here_is_root = rank == root;
  if (here_is_root) {
    check(call, input, "input");
    check_stack(call, input, "input", size, output, 0);
  }
  if (alone()) started.copies.push_back({output, input.squeeze(0)});
  if (alone() || nothing_to_send(output)) return started;
  std::int64_t others = 0, elsewhere = 0;
  for (int other = 0; here_is_root && other < size; ++other) {
    if (other != rank) ++others;
    if (!here(other)) ++elsewhere;
  }
  const auto one = static_cast<std::int64_t>(output.nbytes());
  count_bytes(TrafficCounter::kScatter, one * others, one * elsewhere);
  std::vector<std::vector<at::Tensor>> lists;
  if (here_is_root) {
    const at::NoGradGuard no_graph;
    lists.push_back(readable(std::move(input)).unbind(0));
  }
  started.kept.push_back(writable(call, std::move(output), false, started));
  c10d::ScatterOptions options;
  options.rootRank = root;
  options.timeout = timeout;
  started.work = guarded(call, [&] { return backend->scatter(started.kept, lists, options); });
  if (here_is_root) started.kept.insert(started.kept.end(), lists[0].begin(), lists[0].end());
  return started;
}

Started Group::Impl::all_to_all(const Call& call, at::Tensor output, at::Tensor input, Rows output_rows,
                                Rows input_rows) const {
  check(call, input, "input");
  check(call, output, "output");
  check_has_rows(call, input, "input");
  check_has_rows(call, output, "output");
  if (output_rows.empty() && input_rows.empty()) {
    if (input.size(0) % size != 0) {
      refuse(call, fmt::format("an input of {} rows without numbers of rows", input.size(0)),
             fmt::format("rows that {} ranks can share evenly", size),
             "Give input_rows and output_rows, one number for each rank");
    }
    check_stack(call, output, "output", input.size(0), input, 1);
  } else {
    check_rows(call, input_rows, input.size(0), "input_rows");
    check_rows(call, output_rows, output.size(0), "output_rows");
    check_stack(call, output, "output", output.size(0), input, 1);
    const auto own = static_cast<std::size_t>(rank);
    if (input_rows[own] != output_rows[own]) {
      refuse(call,
             fmt::format("{} rows to this rank itself and {} from it", input_rows[own], output_rows[own]),
             "as many", "Count the rows of each rank");
    }
  }
  Started started;
  if (alone()) {
    started.copies.push_back({output, input});
    return started;
  }
  // Rows that stay on this rank are not sent. With uneven parts their number differs.
  const std::int64_t rows = input.size(0), staying = input_rows.empty()
                                                         ? rows_of_part(rows, size, rank)
                                                         : input_rows[static_cast<std::size_t>(rank)];
  std::int64_t leaving = 0;
  for (int other = 0; other < size; ++other)
    if (!here(other))
      leaving +=
          input_rows.empty() ? rows_of_part(rows, size, other) : input_rows[static_cast<std::size_t>(other)];
  const std::int64_t row = rows == 0 ? 0 : static_cast<std::int64_t>(input.nbytes()) / rows;
  count_bytes(TrafficCounter::kAllToAll, row * (rows - staying), row * leaving);
  at::Tensor from = readable(std::move(input)), to = writable(call, std::move(output), false, started);
  c10d::AllToAllOptions options;
  options.timeout = timeout;
  started.work =
      guarded(call, [&] { return backend->alltoall_base(to, from, output_rows, input_rows, options); });
  started.kept = {std::move(to), std::move(from)};
  return started;
}

void Group::broadcast(at::Tensor tensor, int root, Site site) {
  const Call call{"broadcast", site, root};
  Started started = impl_->broadcast(call, std::move(tensor), root);
  impl_->complete(call, started);
}

Pending Group::broadcast_async(at::Tensor tensor, int root, Site site) {
  const Call call{"broadcast", site, root};
  return Impl::pend(impl_, call, impl_->broadcast(call, std::move(tensor), root));
}

at::Tensor Group::all_gather(const at::Tensor& input, Site site) {
  const Call call{"all_gather", site};
  impl_->check(call, input, "input");
  at::Tensor output = empty_like(input, stacked(impl_->size, input.sizes()));
  Started started = impl_->all_gather(call, output, input);
  impl_->complete(call, started);
  return output;
}

Pending Group::all_gather_async(at::Tensor output, at::Tensor input, Site site) {
  const Call call{"all_gather", site};
  return Impl::pend(impl_, call, impl_->all_gather(call, std::move(output), std::move(input)));
}

at::Tensor Group::all_gather_rows(const at::Tensor& input, Site site) {
  const Call call{"all_gather_rows", site};
  const Rows rows = impl_->exchange_rows(call, input);
  at::Tensor output = empty_like(input, stacked(sum(rows), input.sizes().slice(1)));
  Started started = impl_->all_gather_rows(call, output, input, rows);
  impl_->complete(call, started);
  return output;
}

Pending Group::all_gather_rows_async(at::Tensor output, at::Tensor input, Rows rows, Site site) {
  const Call call{"all_gather_rows", site};
  return Impl::pend(impl_, call, impl_->all_gather_rows(call, std::move(output), std::move(input), rows));
}

at::Tensor Group::gather(const at::Tensor& input, int root, Site site) {
  const Call call{"gather", site, root};
  impl_->check(call, input, "input");
  at::Tensor output;
  if (impl_->rank == root) output = empty_like(input, stacked(impl_->size, input.sizes()));
  Started started = impl_->gather(call, output, input, root);
  impl_->complete(call, started);
  return output;
}

Pending Group::gather_async(at::Tensor output, at::Tensor input, int root, Site site) {
  const Call call{"gather", site, root};
  return Impl::pend(impl_, call, impl_->gather(call, std::move(output), std::move(input), root));
}

void Group::scatter(at::Tensor output, const at::Tensor& input, int root, Site site) {
  const Call call{"scatter", site, root};
  Started started = impl_->scatter(call, std::move(output), input, root);
  impl_->complete(call, started);
}

Pending Group::scatter_async(at::Tensor output, at::Tensor input, int root, Site site) {
  const Call call{"scatter", site, root};
  return Impl::pend(impl_, call, impl_->scatter(call, std::move(output), std::move(input), root));
}

at::Tensor Group::all_to_all(const at::Tensor& input, Site site) {
  const Call call{"all_to_all", site};
  impl_->check(call, input, "input");
  at::Tensor output = empty_like(input, input.sizes());
  Started started = impl_->all_to_all(call, output, input, {}, {});
  impl_->complete(call, started);
  return output;
}

at::Tensor Group::all_to_all(const at::Tensor& input, Rows output_rows, Rows input_rows, Site site) {
  const Call call{"all_to_all", site};
  impl_->check(call, input, "input");
  impl_->check_has_rows(call, input, "input");
  impl_->check_rows(call, output_rows, sum(output_rows), "output_rows");
  at::Tensor output = empty_like(input, stacked(sum(output_rows), input.sizes().slice(1)));
  Started started = impl_->all_to_all(call, output, input, std::move(output_rows), std::move(input_rows));
  impl_->complete(call, started);
  return output;
}

Pending Group::all_to_all_async(at::Tensor output, at::Tensor input, Rows output_rows, Rows input_rows,
                                Site site) {
  const Call call{"all_to_all", site};
  return Impl::pend(impl_, call,
                    impl_->all_to_all(call, std::move(output), std::move(input), std::move(output_rows),
                                      std::move(input_rows)));
}

}  // namespace isograd
