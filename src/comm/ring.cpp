#include "comm/ring.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/group_impl.hpp"

namespace isograd {
namespace {

// The rank `steps` places to the right of `rank` (to the left if negative).
int neighbour(int rank, int steps, int size) {
  return ((rank + steps) % size + size) % size;
}

bool is_widened(at::ScalarType dtype, ReduceOp op) {
  return (dtype == at::kBFloat16 || dtype == at::kHalf) && (op == ReduceOp::kSum || op == ReduceOp::kProduct);
}

std::int64_t segment_length(std::int64_t segment_bytes, at::ScalarType dtype) {
  return std::max<std::int64_t>(1, segment_bytes / static_cast<std::int64_t>(c10::elementSize(dtype)));
}

using Segments = std::vector<at::Tensor>;

Segments cut(const at::Tensor& flat, std::int64_t segment_bytes) {
  const std::int64_t length = segment_length(segment_bytes, flat.scalar_type());
  Segments segments;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += length) {
    segments.push_back(flat.narrow(0, begin, std::min(length, flat.numel() - begin)));
  }
  return segments;
}

// [part][segment], parts of `counts` elements.
std::vector<Segments> cut_parts(const at::Tensor& flat, const Group::Rows& counts,
                                std::int64_t segment_bytes) {
  std::vector<Segments> parts;
  for (const at::Tensor& part : flat.split_with_sizes(counts)) parts.push_back(cut(part, segment_bytes));
  return parts;
}

void combine(at::Tensor into, const at::Tensor& other, ReduceOp op) {
  if (op == ReduceOp::kMax) {
    at::maximum_out(into, into, other);
  } else if (op == ReduceOp::kMin) {
    at::minimum_out(into, into, other);
  } else if (op == ReduceOp::kProduct) {
    into.mul_(other);
  } else {
    into.add_(other);
  }
}

// The first time round: afterwards parts[rank] is combined over all ranks, the others are partial.
Steps go_round_combining(Group group, std::vector<Segments> parts, ReduceOp op) {
  const int size = group.size(), rank = group.rank();
  if (size == 1) co_return;
  const int left = neighbour(rank, -1, size), right = neighbour(rank, 1, size);
  const auto part = [&](int steps_left) -> const Segments& {
    return parts[static_cast<std::size_t>(neighbour(rank, -steps_left, size))];
  };
  Messages sent;
  for (const at::Tensor& segment : part(1)) sent.push_back(group.send_async(segment, right, kRingTag));

  Segments arriving;  // in the order in which the left neighbour sends them
  for (int step = 2; step <= size; ++step) {
    arriving.insert(arriving.end(), part(step).begin(), part(step).end());
  }
  const std::size_t to_pass_on = arriving.size() - part(size).size();  // all but this rank's own part
  at::Tensor scratch[2];                                               // one is added, the next travels
  const auto receive = [&](std::size_t k) {
    if (k >= arriving.size()) return Pending();
    scratch[k % 2] = at::empty_like(arriving[k]);
    return group.recv_async(scratch[k % 2], left, kRingTag);
  };
  Pending next = receive(0);
  for (std::size_t k = 0; k < arriving.size(); ++k) {
    co_await both(std::move(next));
    next = receive(k + 1);
    combine(arriving[k], scratch[k % 2], op);
    if (k < to_pass_on) sent.push_back(group.send_async(arriving[k], right, kRingTag));
  }
  co_await std::move(sent);
}

// The second time round: from parts[rank] on every rank to all parts on all.
Steps go_round_copying(Group group, std::vector<Segments> parts) {
  const int size = group.size(), rank = group.rank();
  if (size == 1) co_return;
  const int left = neighbour(rank, -1, size), right = neighbour(rank, 1, size);
  const auto part = [&](int steps_left) -> const Segments& {
    return parts[static_cast<std::size_t>(neighbour(rank, -steps_left, size))];
  };
  Messages sent;
  for (const at::Tensor& segment : part(0)) sent.push_back(group.send_async(segment, right, kRingTag));

  Segments arriving;
  for (int step = 1; step < size; ++step) {
    arriving.insert(arriving.end(), part(step).begin(), part(step).end());
  }
  const std::size_t to_pass_on = arriving.size() - part(size - 1).size();  // the right neighbour's own part
  const auto receive = [&](std::size_t k) {
    return k < arriving.size() ? group.recv_async(arriving[k], left, kRingTag) : Pending();
  };
  Pending next = receive(0);
  for (std::size_t k = 0; k < arriving.size(); ++k) {
    co_await both(std::move(next));
    next = receive(k + 1);
    if (k < to_pass_on) sent.push_back(group.send_async(arriving[k], right, kRingTag));
  }
  co_await std::move(sent);
}

}  // namespace

namespace ring {

Steps all_reduce(Group group, at::Tensor tensor, ReduceOp op, std::int64_t segment_bytes) {
  const at::Tensor flat = tensor.view(-1);
  const Rows counts = split_rows(flat.numel(), group.size());
  const at::Tensor wide = is_widened(flat.scalar_type(), op) ? flat.to(at::kFloat) : flat;
  co_await go_round_combining(group, cut_parts(wide, counts, segment_bytes), op);
  if (!wide.is_same(flat)) {
    const auto own = static_cast<std::size_t>(group.rank());
    flat.split_with_sizes(counts)[own].copy_(wide.split_with_sizes(counts)[own]);
  }
  co_await go_round_copying(group, cut_parts(flat, counts, segment_bytes));
}

Steps reduce_scatter(Group group, at::Tensor output, at::Tensor input, Rows counts, ReduceOp op,
                     std::int64_t segment_bytes) {
  const at::Tensor flat = input.view(-1);
  const at::Tensor work = is_widened(flat.scalar_type(), op) ? flat.to(at::kFloat) : flat.clone();
  co_await go_round_combining(group, cut_parts(work, counts, segment_bytes), op);
  const auto own = static_cast<std::size_t>(group.rank());
  output.view(-1).copy_(work.split_with_sizes(counts)[own]);
}

Steps all_gather(Group group, at::Tensor output, at::Tensor input, std::int64_t segment_bytes) {
  const at::Tensor flat = output.view(-1);
  const auto own = static_cast<std::size_t>(group.rank());
  const Rows counts(static_cast<std::size_t>(group.size()), input.numel());
  flat.split_with_sizes(counts)[own].copy_(input.view(-1));
  co_await go_round_copying(group, cut_parts(flat, counts, segment_bytes));
}

Steps broadcast(Group group, at::Tensor tensor, int root, std::int64_t segment_bytes) {
  const int size = group.size(), rank = group.rank();
  const int left = neighbour(rank, -1, size), right = neighbour(rank, 1, size);
  Messages sent;
  for (const at::Tensor& segment : cut(tensor.view(-1), segment_bytes)) {
    if (rank != root) co_await both(group.recv_async(segment, left, kRingTag));
    if (right != root) sent.push_back(group.send_async(segment, right, kRingTag));
  }
  co_await std::move(sent);
}

// From root + 1 rightwards to root, so that messages go the way they always go. The tensors of the others are
// read only.
Steps reduce(Group group, at::Tensor tensor, int root, ReduceOp op, std::int64_t segment_bytes) {
  const int size = group.size(), rank = group.rank();
  const int left = neighbour(rank, -1, size), right = neighbour(rank, 1, size);
  const at::Tensor flat = tensor.view(-1);
  const at::Tensor wide = is_widened(flat.scalar_type(), op) ? flat.to(at::kFloat) : flat;
  Messages sent;
  for (const at::Tensor& segment : cut(wide, segment_bytes)) {
    at::Tensor sum = segment;
    if (left != root) {
      sum = at::empty_like(segment);
      co_await both(group.recv_async(sum, left, kRingTag));
      combine(sum, segment, op);
    }
    if (rank != root) {
      sent.push_back(group.send_async(sum, right, kRingTag));
    } else {
      segment.copy_(sum);
    }
  }
  co_await std::move(sent);
  if (rank == root && !wide.is_same(flat)) flat.copy_(wide);
}

Steps gather(Group group, std::vector<at::Tensor> outputs, at::Tensor input, int root) {
  Messages messages;
  if (group.rank() != root) {
    messages.push_back(group.send_async(input, root, kRingTag));
  } else {
    for (int r = 0; r < group.size(); ++r) {
      const at::Tensor& output = outputs[static_cast<std::size_t>(r)];
      if (r == root) {
        output.copy_(input);
      } else {
        messages.push_back(group.recv_async(output, r, kRingTag));
      }
    }
  }
  co_await std::move(messages);
}

Steps scatter(Group group, at::Tensor output, std::vector<at::Tensor> inputs, int root) {
  Messages messages;
  if (group.rank() != root) {
    messages.push_back(group.recv_async(output, root, kRingTag));
  } else {
    for (int r = 0; r < group.size(); ++r) {
      const at::Tensor& input = inputs[static_cast<std::size_t>(r)];
      if (r == root) {
        output.copy_(input);
      } else {
        messages.push_back(group.send_async(input, r, kRingTag));
      }
    }
  }
  co_await std::move(messages);
}

Steps all_to_all(Group group, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  const int size = group.size(), rank = group.rank();
  outputs[static_cast<std::size_t>(rank)].copy_(inputs[static_cast<std::size_t>(rank)]);
  for (int step = 1; step < size; ++step) {
    const int to = neighbour(rank, step, size), from = neighbour(rank, -step, size);
    co_await both(group.recv_async(outputs[static_cast<std::size_t>(from)], from, kRingTag),
                  group.send_async(inputs[static_cast<std::size_t>(to)], to, kRingTag));
  }
}

// After the step of distance d a rank knows of the 2d - 1 ranks to its left that they have come.
Steps barrier(Group group) {
  const int size = group.size(), rank = group.rank();
  const at::Tensor sent = at::zeros({1}, at::kByte), received = at::zeros({1}, at::kByte);
  for (int distance = 1; distance < size; distance *= 2) {
    co_await both(group.recv_async(received, neighbour(rank, -distance, size), kRingTag),
                  group.send_async(sent, neighbour(rank, distance, size), kRingTag));
  }
}

}  // namespace ring

void ring_all_reduce(Group group, at::Tensor tensor, ReduceOp op, std::int64_t segment_bytes) {
  ring::all_reduce(std::move(group), std::move(tensor), op, segment_bytes).wait();
}

at::Tensor ring_reduce_scatter(Group group, const at::Tensor& input, ReduceOp op,
                               std::int64_t segment_bytes) {
  const at::NoGradGuard no_graph;
  std::vector<std::int64_t> sizes = input.sizes().vec();
  const std::int64_t width = sizes[0] > 0 ? input.numel() / sizes[0] : 0;
  Group::Rows counts = split_rows(sizes[0], group.size());
  sizes[0] = counts[static_cast<std::size_t>(group.rank())];
  for (std::int64_t& count : counts) count *= width;
  at::Tensor output = at::empty(sizes, input.options());
  ring::reduce_scatter(std::move(group), output, input, std::move(counts), op, segment_bytes).wait();
  return output;
}

at::Tensor ring_all_gather(Group group, const at::Tensor& input, std::int64_t segment_bytes) {
  const at::NoGradGuard no_graph;
  std::vector<std::int64_t> sizes{group.size()};
  sizes.insert(sizes.end(), input.sizes().begin(), input.sizes().end());
  at::Tensor output = at::empty(sizes, input.options());
  ring::all_gather(std::move(group), output, input, segment_bytes).wait();
  return output;
}

// Of the first round a rank sends all parts but its own, of the second all but its right neighbour's.
RingTraffic ring_all_reduce_traffic(int rank, int size, std::int64_t numel, at::ScalarType dtype, ReduceOp op,
                                    std::int64_t segment_bytes) {
  RingTraffic traffic;
  const auto add_part = [&](int part, at::ScalarType type) {
    const std::int64_t count = rows_of_part(numel, size, part), length = segment_length(segment_bytes, type);
    traffic.messages += (count + length - 1) / length;
    traffic.bytes += count * static_cast<std::int64_t>(c10::elementSize(type));
  };
  for (int part = 0; part < size && size > 1; ++part) {
    if (part != rank) add_part(part, is_widened(dtype, op) ? at::kFloat : dtype);
    if (part != neighbour(rank, 1, size)) add_part(part, dtype);
  }
  return traffic;
}

}  // namespace isograd
