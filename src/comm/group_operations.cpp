// The operations of Group: checks of arguments, the call of the backend, and the public forms.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "base/refuse.hpp"
#include "comm/group_impl.hpp"
#include "comm/shm/backend.hpp"
#include "comm/squares.hpp"

namespace isograd {
namespace {

bool can_be_combined(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

std::string describe(at::IntArrayRef sizes, at::ScalarType type) {
  return fmt::format("[{}] of {}", fmt::join(sizes, ", "), c10::toString(type));
}

std::string describe(const at::Tensor& tensor) {
  return describe(tensor.sizes(), tensor.scalar_type());
}

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

bool all_equal(const Group::Rows& rows) {
  return std::ranges::all_of(rows, [&](std::int64_t part) { return part == rows[0]; });
}

}  // namespace

// ---- checks and errors -----------------------------------------------------------------------------------

std::string Group::Impl::where(const Call& call) const {
  const char* file = call.site.file_name();
  const char* slash = std::strrchr(file, '/');
  return fmt::format("{} of group '{}' on rank {} of {} at {}:{}", call.operation, name, rank, size,
                     slash ? slash + 1 : file, call.site.line());
}

void Group::Impl::refuse(const Call& call, std::string found, std::string expected,
                         std::string action) const {
  isograd::refuse(where(call), std::move(found), std::move(expected), std::move(action));
}

// A backend that lacks an operation reports it in c10d's words, on every rank and before anything is sent.
void Group::Impl::lost(const Call& call, const char* what) const {
  if (std::strstr(what, "does not support") || std::strstr(what, "does not implement")) {
    throw MissingOperation({.where = where(call),
                            .found = what,
                            .expected = "a backend that has this operation",
                            .action = "Use another backend"});
  }
  throw PeerError({.where = where(call),
                   .found = what,
                   .expected = "a completed operation",
                   .action = "See what the backend reports, then recreate the group"});
}

void Group::Impl::aborted(const Call& call) const {
  throw PeerError({.where = where(call),
                   .found = "the backend aborted the operation",
                   .expected = "a completed operation",
                   .action = "Recreate the group"});
}

void Group::Impl::check(const Call& call, const at::Tensor& tensor, const char* which) const {
  if (tensor.defined() && tensor.layout() == at::kStrided) return;
  refuse(call, fmt::format("{} {}", tensor.defined() ? "a sparse" : "an undefined", which),
         "a dense tensor on the backend's device", "Give one");
}

void Group::Impl::check_reduction(const Call& call, const at::Tensor& tensor, ReduceOp op) const {
  if (op == ReduceOp::kAverage) {
    refuse(call, "ReduceOp::kAverage",
           "a sum: gradients are summed and one place divides; a mean of per-rank means is another loss",
           "Use kSum and let the loss's normaliser divide, once, by what all ranks counted");
  }
  if (op != ReduceOp::kSum && op != ReduceOp::kMax && op != ReduceOp::kMin && op != ReduceOp::kProduct) {
    refuse(call, fmt::format("reduction number {}", static_cast<int>(op)), "kSum, kMax, kMin or kProduct",
           "Use one of these");
  }
  if (!can_be_combined(tensor.scalar_type())) {
    refuse(call, fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())),
           "float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8 or bool",
           "Convert the tensor first (of complex numbers, sum view_as_real)");
  }
}

void Group::Impl::check_root(const Call& call, int root) const {
  if (root >= 0 && root < size) return;
  refuse(call, fmt::format("root {}", root), fmt::format("0 to {}", size - 1), "Name a rank of the group");
}

void Group::Impl::check_peer(const Call& call, int peer, int tag) const {
  if (peer < 0 || peer >= size || peer == rank) {
    refuse(call, fmt::format("rank {} as the other end", peer),
           fmt::format("a rank from 0 to {} that is not this one", size - 1),
           "Name another rank of the group");
  }
  if (tag < 0) refuse(call, fmt::format("tag {}", tag), "0 or more", "Choose another tag");
}

void Group::Impl::check_stack(const Call& call, const at::Tensor& whole, const char* which,
                              std::int64_t first, const at::Tensor& part, std::int64_t skip) const {
  const auto rest = part.sizes().slice(static_cast<std::size_t>(skip));
  if (whole.dim() == static_cast<std::int64_t>(rest.size()) + 1 && whole.size(0) == first &&
      whole.sizes().slice(1) == rest && whole.scalar_type() == part.scalar_type()) {
    return;
  }
  std::vector<std::int64_t> sizes{first};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  refuse(call, fmt::format("an {} {}", which, describe(whole)), describe(sizes, part.scalar_type()),
         fmt::format("Make the {} of these sizes, or view it so", which));
}

void Group::Impl::check_has_rows(const Call& call, const at::Tensor& tensor, const char* which) const {
  if (tensor.dim() > 0) return;
  refuse(call, fmt::format("an {} without dimensions", which), "one with rows (dim 0)",
         "Call unsqueeze(0) first");
}

void Group::Impl::check_rows(const Call& call, const Rows& rows, std::int64_t total,
                             const char* which) const {
  std::int64_t sum = 0;
  bool sound = rows.size() == static_cast<std::size_t>(size);
  for (std::int64_t part : rows) {
    sound = sound && part >= 0 && part <= total - sum;
    sum += part;
  }
  if (sound && sum == total) return;
  refuse(call, fmt::format("{} [{}] for {} rows", which, fmt::join(rows, ", "), total),
         fmt::format("a number for each of {} ranks, {} together", size, total),
         "Count the rows of each rank (split_rows gives the most even numbers)");
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
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(call, "a tensor to write to whose elements share memory (expanded?)", "a place for each element",
           "Call clone() first");
  }
  const at::NoGradGuard no_graph;
  at::Tensor twin = read ? plain_copy(tensor) : plain_empty(tensor);
  started.copies.push_back({tensor, twin});
  return twin;
}

void Group::Impl::copy_results(Started& started) {
  const at::NoGradGuard no_graph;
  for (Started::Copy& copy : started.copies) copy.to.copy_(copy.from);
  started.copies.clear();
}

// ---- reductions ------------------------------------------------------------------------------------------

Started Group::Impl::all_reduce(const Call& call, at::Tensor tensor, ReduceOp op) const {
  check(call, tensor, "tensor");
  check_reduction(call, tensor, op);
  Started started;
  if (alone() || nothing_to_send(tensor)) return started;
  count(TrafficCounter::kAllReduce, tensor, 2);
  started.kept.push_back(writable(call, std::move(tensor), true, started));
  auto options = with_timeout<c10d::AllreduceOptions>();
  options.reduceOp = to_c10d(op);
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
  auto options = with_timeout<c10d::ReduceOptions>();
  options.reduceOp = to_c10d(op);
  options.rootRank = root;
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

  auto options = with_timeout<c10d::ReduceScatterOptions>();
  options.reduceOp = to_c10d(op);
  // Our backend may write this rank's part over its input. Others need not support that.
  at::Tensor from = readable(std::move(input)), to = !shm && output.is_alias_of(from)
                                                         ? plain_twin(call, output, false, started)
                                                         : writable(call, std::move(output), false, started);
  if (rows.empty() ? from.size(0) % size == 0 : all_equal(rows)) {
    flatten(from, to);
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
  const auto sizes = stacked(*std::ranges::max_element(parts), from.sizes().slice(1));
  at::Tensor padded_output = at::empty(sizes, from.options());
  at::Tensor padded = at::zeros(stacked(size, sizes), from.options());
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
  return Group::Impl::later(impl, {"reduce_scatter", site}, &Group::Impl::reduce_scatter, std::move(output),
                            std::move(input), ReduceOp::kSum, Group::Rows(), std::move(squares));
}

void Group::all_reduce(at::Tensor tensor, ReduceOp op, Site site) {
  impl_->now({"all_reduce", site}, &Impl::all_reduce, std::move(tensor), op);
}

Pending Group::all_reduce_async(at::Tensor tensor, ReduceOp op, Site site) {
  return Impl::later(impl_, {"all_reduce", site}, &Impl::all_reduce, std::move(tensor), op);
}

void Group::reduce(at::Tensor tensor, int root, ReduceOp op, Site site) {
  impl_->now({"reduce", site, root}, &Impl::reduce, std::move(tensor), root, op);
}

Pending Group::reduce_async(at::Tensor tensor, int root, ReduceOp op, Site site) {
  return Impl::later(impl_, {"reduce", site, root}, &Impl::reduce, std::move(tensor), root, op);
}

at::Tensor Group::reduce_scatter(const at::Tensor& input, ReduceOp op, Site site) {
  const Call call{"reduce_scatter", site};
  impl_->check(call, input, "input");
  impl_->check_has_rows(call, input, "input");
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes[0] = rows_of_part(sizes[0], impl_->size, impl_->rank);
  at::Tensor output = at::empty(sizes, input.options().requires_grad(false));
  impl_->now(call, &Impl::reduce_scatter, output, input, op, Rows(), nullptr);
  return output;
}

Pending Group::reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op, Rows rows, Site site) {
  return Impl::later(impl_, {"reduce_scatter", site}, &Impl::reduce_scatter, std::move(output),
                     std::move(input), op, rows, nullptr);
}

// ---- copies ----------------------------------------------------------------------------------------------

Started Group::Impl::broadcast(const Call& call, at::Tensor tensor, int root) const {
  check(call, tensor, "tensor");
  check_root(call, root);
  Started started;
  if (alone() || nothing_to_send(tensor)) return started;
  count(TrafficCounter::kBroadcast, tensor);
  started.kept.push_back(rank == root ? readable(std::move(tensor))
                                      : writable(call, std::move(tensor), false, started));
  auto options = with_timeout<c10d::BroadcastOptions>();
  options.rootRank = root;
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
  flatten(from, to);
  auto options = with_timeout<c10d::AllgatherOptions>();
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
  auto options = with_timeout<c10d::AllgatherOptions>();
  if (all_equal(rows)) {
    flatten(from, to);
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
  const auto sizes = stacked(*std::ranges::max_element(rows), from.sizes().slice(1));
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
  const std::int64_t width = c10::multiply_integers(input.sizes().slice(1));
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
  auto options = with_timeout<c10d::GatherOptions>();
  options.rootRank = root;
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
  auto options = with_timeout<c10d::ScatterOptions>();
  options.rootRank = root;
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
  auto options = with_timeout<c10d::AllToAllOptions>();
  started.work =
      guarded(call, [&] { return backend->alltoall_base(to, from, output_rows, input_rows, options); });
  started.kept = {std::move(to), std::move(from)};
  return started;
}

void Group::broadcast(at::Tensor tensor, int root, Site site) {
  impl_->now({"broadcast", site, root}, &Impl::broadcast, std::move(tensor), root);
}

Pending Group::broadcast_async(at::Tensor tensor, int root, Site site) {
  return Impl::later(impl_, {"broadcast", site, root}, &Impl::broadcast, std::move(tensor), root);
}

at::Tensor Group::all_gather(const at::Tensor& input, Site site) {
  const Call call{"all_gather", site};
  impl_->check(call, input, "input");
  at::Tensor output = empty_like(input, stacked(impl_->size, input.sizes()));
  impl_->now(call, &Impl::all_gather, output, input);
  return output;
}

Pending Group::all_gather_async(at::Tensor output, at::Tensor input, Site site) {
  return Impl::later(impl_, {"all_gather", site}, &Impl::all_gather, std::move(output), std::move(input));
}

at::Tensor Group::all_gather_rows(const at::Tensor& input, Site site) {
  const Call call{"all_gather_rows", site};
  const Rows rows = impl_->exchange_rows(call, input);
  at::Tensor output = empty_like(input, stacked(sum(rows), input.sizes().slice(1)));
  impl_->now(call, &Impl::all_gather_rows, output, input, rows);
  return output;
}

Pending Group::all_gather_rows_async(at::Tensor output, at::Tensor input, Rows rows, Site site) {
  return Impl::later(impl_, {"all_gather_rows", site}, &Impl::all_gather_rows, std::move(output),
                     std::move(input), rows);
}

at::Tensor Group::gather(const at::Tensor& input, int root, Site site) {
  const Call call{"gather", site, root};
  impl_->check(call, input, "input");
  at::Tensor output;
  if (impl_->rank == root) output = empty_like(input, stacked(impl_->size, input.sizes()));
  impl_->now(call, &Impl::gather, output, input, root);
  return output;
}

Pending Group::gather_async(at::Tensor output, at::Tensor input, int root, Site site) {
  return Impl::later(impl_, {"gather", site, root}, &Impl::gather, std::move(output), std::move(input), root);
}

void Group::scatter(at::Tensor output, const at::Tensor& input, int root, Site site) {
  impl_->now({"scatter", site, root}, &Impl::scatter, std::move(output), input, root);
}

Pending Group::scatter_async(at::Tensor output, at::Tensor input, int root, Site site) {
  return Impl::later(impl_, {"scatter", site, root}, &Impl::scatter, std::move(output), std::move(input),
                     root);
}

at::Tensor Group::all_to_all(const at::Tensor& input, Site site) {
  const Call call{"all_to_all", site};
  impl_->check(call, input, "input");
  at::Tensor output = empty_like(input, input.sizes());
  impl_->now(call, &Impl::all_to_all, output, input, Rows(), Rows());
  return output;
}

at::Tensor Group::all_to_all(const at::Tensor& input, Rows output_rows, Rows input_rows, Site site) {
  const Call call{"all_to_all", site};
  impl_->check(call, input, "input");
  impl_->check_has_rows(call, input, "input");
  impl_->check_rows(call, output_rows, sum(output_rows), "output_rows");
  at::Tensor output = empty_like(input, stacked(sum(output_rows), input.sizes().slice(1)));
  impl_->now(call, &Impl::all_to_all, output, input, std::move(output_rows), std::move(input_rows));
  return output;
}

Pending Group::all_to_all_async(at::Tensor output, at::Tensor input, Rows output_rows, Rows input_rows,
                                Site site) {
  return Impl::later(impl_, {"all_to_all", site}, &Impl::all_to_all, std::move(output), std::move(input),
                     std::move(output_rows), std::move(input_rows));
}

// ---- messages --------------------------------------------------------------------------------------------

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
  auto options = with_timeout<c10d::BarrierOptions>();
  started.work = guarded(call, [&] { return backend->barrier(options); });
  return started;
}

void Group::send(const at::Tensor& tensor, int to, int tag, Site site) {
  Impl::messenger_of(impl_)->now({"send", site, to}, &Impl::send, tensor, to, tag);
}

Pending Group::send_async(at::Tensor tensor, int to, int tag, Site site) {
  return Impl::later(Impl::messenger_of(impl_), {"send", site, to}, &Impl::send, std::move(tensor), to, tag);
}

void Group::recv(at::Tensor tensor, int from, int tag, Site site) {
  Impl::messenger_of(impl_)->now({"recv", site, from}, &Impl::recv, std::move(tensor), from, tag);
}

Pending Group::recv_async(at::Tensor tensor, int from, int tag, Site site) {
  return Impl::later(Impl::messenger_of(impl_), {"recv", site, from}, &Impl::recv, std::move(tensor), from,
                     tag);
}

void Group::barrier(Site site) {
  impl_->now({"barrier", site}, &Impl::barrier);
  if (impl_->messenger) Group(impl_->messenger).barrier(site);  // on the host, too
}

}  // namespace isograd
