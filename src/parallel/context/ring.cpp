#include "parallel/context/ring.hpp"

#include <ATen/ATen.h>

#include <map>

namespace isograd {
namespace {

constexpr int kKeysTag = 1, kGradientsTag = 2;

// The same spans one after another from row 0.
std::vector<Span> packed(std::vector<Span> spans) {
  std::int64_t row = 0;
  for (Span& span : spans) {
    span.row = row;
    row += span.length;
  }
  return spans;
}

std::int64_t length_of(const std::vector<Span>& spans) {
  std::int64_t length = 0;
  for (const Span& span : spans) length += span.length;
  return length;
}

// Those spans of `from` that are in `to` as well.
std::vector<RowCopy> copies(const std::vector<Span>& from, const std::vector<Span>& to) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> row;
  for (const Span& span : to) row[{span.document, span.position}] = span.row;
  std::vector<RowCopy> result;
  for (const Span& span : from) {
    const auto place = row.find({span.document, span.position});
    if (place == row.end() || span.length == 0) continue;
    if (!result.empty() && result.back().from + result.back().length == span.row &&
        result.back().to + result.back().length == place->second)
      result.back().length += span.length;
    else
      result.push_back({span.row, place->second, span.length});
  }
  return result;
}

int neighbour(int rank, int steps, int size) { return ((rank + steps) % size + size) % size; }

void copy_rows(const at::Tensor& from, const std::vector<RowCopy>& rows, at::Tensor to) {
  for (const RowCopy& part : rows)
    to.narrow(0, part.to, part.length).copy_(from.narrow(0, part.from, part.length));
}

void add_rows(const at::Tensor& from, const std::vector<RowCopy>& rows, at::Tensor to) {
  for (const RowCopy& part : rows)
    to.narrow(0, part.to, part.length).add_(from.narrow(0, part.from, part.length));
}

// Keys and values of one hop at a time, those of the next one on their way in a second buffer.
class TravellingKeys {
 public:
  TravellingKeys(Group ring, const RingPlan& plan, const at::Tensor& k, const at::Tensor& v)
      : ring_(std::move(ring)), plan_(plan), k_(k), v_(v) {}

  const at::Tensor& k() const { return k_; }
  const at::Tensor& v() const { return v_; }

  // Posts what the hop after `hop` needs, there and here.
  void send_for(std::size_t hop) {
    if (hop + 1 == plan_.hops.size()) return;
    const auto& pass_on = plan_.hops[hop].pass_on;
    const int left = neighbour(plan_.rank, -1, plan_.size), right = neighbour(plan_.rank, 1, plan_.size);
    if (const std::int64_t rows = num_rows(pass_on); rows > 0) {
      const bool all = buffer_.defined() && buffer_.size(0) == rows;
      leaving_ = all ? buffer_ : at::empty({rows, 2, k_.size(1), k_.size(2)}, k_.options());
      if (!all) {
        copy_rows(k_, pass_on, leaving_.select(1, 0));
        copy_rows(v_, pass_on, leaving_.select(1, 1));
      }
      sending_ = ring_.send_async(leaving_, right, kKeysTag);
    }
    arriving_ = at::empty({plan_.hops[hop + 1].rows, 2, k_.size(1), k_.size(2)}, k_.options());
    if (arriving_.size(0) > 0) receiving_ = ring_.recv_async(arriving_, left, kKeysTag);
  }

  void progress() {
    if (leaving_.defined()) sending_.progress();
    if (arriving_.defined() && arriving_.size(0) > 0) receiving_.progress();
  }

  // Takes the next hop's keys in hand.
  void arrive_after(std::size_t hop) {
    if (hop + 1 == plan_.hops.size()) return;
    if (arriving_.size(0) > 0) receiving_.wait();
    if (leaving_.defined()) sending_.wait();
    leaving_.reset();
    buffer_ = std::move(arriving_);
    arriving_.reset();
    k_ = buffer_.select(1, 0), v_ = buffer_.select(1, 1);
  }

 private:
  Group ring_;
  const RingPlan& plan_;
  at::Tensor k_, v_;   // [rows, Hkv, D] of this hop
  at::Tensor buffer_;  // [rows, 2, Hkv, D], what they are views of; undefined: this rank's own
  at::Tensor leaving_, arriving_;
  Pending sending_, receiving_;
};

}  // namespace

std::int64_t num_rows(const std::vector<RowCopy>& copies) {
  std::int64_t rows = 0;
  for (const RowCopy& part : copies) rows += part.length;
  return rows;
}

RingPlan make_ring_plan(const std::vector<std::vector<Span>>& blocks, int rank, bool causal) {
  const int size = static_cast<int>(blocks.size());
  const auto block = [&](int i) -> const std::vector<Span>& {
    return blocks[static_cast<std::size_t>(neighbour(i, 0, size))];
  };
  // The spans of block `owner` that some rank from `first` to `last` places to its right computes with.
  const auto used_by = [&](int owner, int first, int last) {
    std::vector<Span> spans;
    for (const Span& span : block(owner)) {
      bool used = false;
      for (int steps = first; steps <= last && !used; ++steps)
        used = sees_any(block(owner + steps), span, causal);
      if (used) spans.push_back(span);
    }
    return packed(std::move(spans));
  };

  RingPlan plan{.rank = rank, .size = size, .tokens = length_of(block(rank)), .hops = {}, .home = {}};
  for (int hop = 0; hop < size; ++hop) {
    const int owner = rank - hop;
    RingPlan::Hop now;
    now.keys = hop == 0 ? block(owner) : used_by(owner, hop, size - 1);
    now.rows = length_of(now.keys);
    now.tiles = tiles_between(block(rank), now.keys, causal);
    if (hop + 1 < size) now.pass_on = copies(now.keys, used_by(owner, hop + 1, size - 1));
    if (hop > 0) {
      const auto leaving = used_by(owner, 1, hop);
      now.gradient_rows = length_of(leaving);
      now.own_gradients = copies(now.keys, leaving);
      if (hop > 1) {
        const auto received = used_by(owner, 1, hop - 1);
        now.received_rows = length_of(received);
        now.received_gradients = copies(received, leaving);
      }
    }
    plan.hops.push_back(std::move(now));
  }
  if (size > 1) {
    const auto coming_home = used_by(rank, 1, size - 1);
    plan.home_rows = length_of(coming_home);
    plan.home = copies(coming_home, block(rank));
  }
  return plan;
}

Attended ring_attend(Group ring, const RingPlan& plan, const Qkv& own) {
  Attended attended = Attended::nothing(own.q);
  TravellingKeys keys(std::move(ring), plan, own.k, own.v);
  for (std::size_t hop = 0; hop < plan.hops.size(); ++hop) {
    keys.send_for(hop);
    for (const Tile& tile : plan.hops[hop].tiles) {
      attend({own.q, keys.k(), keys.v()}, tile, attended);
      keys.progress();
    }
    keys.arrive_after(hop);
  }
  return attended;
}

Qkv ring_attend_backward(Group ring, const RingPlan& plan, const Qkv& of, const AttendedGradient& attended) {
  const auto options = of.q.options().dtype(accumulating_type(of.q.scalar_type()));
  const Qkv own{at::zeros(of.q.sizes(), options), at::zeros(of.k.sizes(), options),
                at::zeros(of.v.sizes(), options)};
  const auto buffer = [&](std::int64_t rows) {
    return at::zeros({rows, 2, of.k.size(1), of.k.size(2)}, options);
  };
  const int left = neighbour(plan.rank, -1, plan.size), right = neighbour(plan.rank, 1, plan.size);
  TravellingKeys keys(ring, plan, of.k, of.v);
  at::Tensor leaving;  // gradients on their way to the right neighbour
  Pending sending;
  for (std::size_t i = 0; i < plan.hops.size(); ++i) {
    const RingPlan::Hop& hop = plan.hops[i];
    keys.send_for(i);
    at::Tensor received, part = i > 0 ? buffer(hop.rows) : at::Tensor();
    Pending receiving;
    if (hop.received_rows > 0) {
      received = buffer(hop.received_rows);
      receiving = ring.recv_async(received, left, kGradientsTag);
    }
    const Qkv to{own.q, i > 0 ? part.select(1, 0) : own.k, i > 0 ? part.select(1, 1) : own.v};
    for (const Tile& tile : hop.tiles) {
      attend_backward({of.q, keys.k(), keys.v()}, attended, tile, to);
      keys.progress();
    }
    if (hop.gradient_rows > 0) {
      const bool all = hop.own_gradients == std::vector<RowCopy>{{0, 0, hop.gradient_rows}} &&
                       hop.rows == hop.gradient_rows;
      at::Tensor sum = all ? part : buffer(hop.gradient_rows);
      if (!all) add_rows(part, hop.own_gradients, sum);
      if (received.defined()) {
        receiving.wait();
        add_rows(received, hop.received_gradients, sum);
      }
      if (leaving.defined()) sending.wait();
      leaving = sum;
      sending = ring.send_async(leaving, right, kGradientsTag);
    }
    keys.arrive_after(i);
  }
  if (plan.home_rows > 0) {
    at::Tensor received = buffer(plan.home_rows);
    ring.recv(received, left, kGradientsTag);
    add_rows(received.select(1, 0), plan.home, own.k);
    add_rows(received.select(1, 1), plan.home, own.v);
  }
  if (leaving.defined()) sending.wait();
  return own;
}

}  // namespace isograd
