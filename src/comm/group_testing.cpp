#include "comm/group_testing.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdlib>
#include <thread>

namespace isograd::testing {
namespace {

using Rows = Group::Rows;
using Sizes = std::vector<std::int64_t>;

struct Layout {
  bool shared, strided, async;
};

Layout layout_of(int turn) { return {(turn & 1) != 0, (turn & 2) != 0, (turn & 4) != 0}; }

const char* name_of(ReduceOp op) {
  return op == ReduceOp::kSum   ? "sum"
         : op == ReduceOp::kMax ? "max"
         : op == ReduceOp::kMin ? "min"
                                : "product";
}

// Values distinguish ranks, slots and indices. Sums over eight ranks are exact in float32 and in the
// integers. In 16-bit floats they are not, so that rounded partial sums are detected.
std::int64_t largest_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool: return 2;
    case at::kChar:
    case at::kByte: return 15;
    case at::kBFloat16: return 251;
    case at::kHalf: return 2003;
    case at::kShort: return 4001;
    default: return 100'003;
  }
}

at::Tensor encode(int rank, int slot, const Sizes& sizes, at::ScalarType dtype) {
  std::int64_t numel = 1;
  for (std::int64_t length : sizes) numel *= length;
  const at::Tensor mixed = at::arange(numel, at::kLong).mul(7919).add(rank * 104'729 + slot * 13'007 + 5);
  return mixed.bitwise_right_shift(3).remainder(largest_of(dtype)).to(dtype).view(sizes);
}

bool is_16_bit_float(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

class Checker {
 public:
  Checker(Group group, const OperationCases& cases) : group_(std::move(group)), cases_(cases) {
    const std::int64_t largest = *std::max_element(cases.numels.begin(), cases.numels.end());
    arena_ =
        group_.empty_shared(16 * 2 * 8 * (group_.size() * (largest + group_.size() + 8) * 2 + 64), at::kByte);
  }

  std::vector<std::string> run() {
    for (at::ScalarType dtype : cases_.dtypes) {
      for (std::int64_t numel : cases_.numels) {
        dtype_ = dtype;
        numel_ = numel;
        run_all();
      }
    }
    return failures_;
  }

 private:
  using Check = void (Checker::*)();

  void run_all() {
    for (Check check : {&Checker::all_reduce, &Checker::reduce, &Checker::broadcast, &Checker::all_gather,
                        &Checker::all_gather_rows, &Checker::reduce_scatter, &Checker::gather,
                        &Checker::scatter, &Checker::all_to_all, &Checker::messages}) {
      for (int turn = 0; turn < (cases_.every_layout ? 8 : 1); ++turn) {
        layout_ = layout_of(cases_.every_layout ? turn : turn_++);
        (this->*check)();
      }
    }
    turn_ += 3;  // a different start with the next type and size
    group_.barrier();
  }

  // Starts a new operation with its own values and a fresh arena.
  void begin(std::string name) {
    name_ = std::move(name);
    ++slot_;
    used_ = 0;
    gaps_.clear();
    root_ = slot_ % group_.size();
  }

  at::Tensor values(int rank, const Sizes& sizes) const { return encode(rank, slot_, sizes, dtype_); }
  at::Tensor own(const Sizes& sizes) const { return values(group_.rank(), sizes); }

  at::Tensor place(const at::Tensor& content) {
    Sizes sizes = content.sizes().vec();
    if (layout_.strided) sizes.push_back(2);
    at::Tensor base;
    if (layout_.shared) {
      std::int64_t numel = 1;
      for (std::int64_t length : sizes) numel *= length;
      const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype_));
      base = arena_.narrow(0, used_, bytes).view(dtype_).view(sizes);
      used_ += (bytes + 63) / 64 * 64;
    } else {
      base = at::empty(sizes, dtype_);
    }
    base.fill_(1);
    if (layout_.strided) {
      gaps_.push_back(base.select(-1, 1));
      base = base.select(-1, 0);
    }
    return base.copy_(content);
  }
  at::Tensor blank(const Sizes& sizes) { return place(at::ones(sizes, dtype_)); }

  void finish(Pending pending) {
    if (slot_ % 2) {
      while (!pending.progress()) std::this_thread::yield();
    }
    pending.wait();
  }

  void expect(const at::Tensor& found, const at::Tensor& expected, const char* what = "") {
    for (const at::Tensor& gap : gaps_) {
      if (!gap.eq(1).all().item<bool>()) report(what, "memory between the elements was written to");
    }
    if (found.sizes() != expected.sizes()) return report(what, "the sizes are wrong");
    if (at::equal(found, expected)) return;
    const at::Tensor a = found.reshape(-1).to(at::kDouble), b = expected.reshape(-1).to(at::kDouble);
    const auto i = a.ne(b).nonzero()[0].item<std::int64_t>();
    report(what, fmt::format("element {} is {}, expected {}", i, a[i].item<double>(), b[i].item<double>()));
  }
  void report(const char* what, const std::string& problem) {
    failures_.push_back(fmt::format(
        "{}{} of {} x {}, {}, {}, {}, on rank {} of {}: {}", name_, what, numel_, c10::toString(dtype_),
        layout_.shared ? "shared" : "private", layout_.strided ? "strided" : "contiguous",
        layout_.async ? "asynchronous" : "blocking", group_.rank(), group_.size(), problem));
  }

  at::Tensor operand(int rank, const Sizes& sizes, ReduceOp op) const {
    const at::Tensor content = values(rank, sizes);
    // Powers of two, so products are exact or wrap around in the same way.
    return op == ReduceOp::kProduct && dtype_ != at::kBool
               ? content.to(at::kLong).remainder(2).add(1).to(dtype_)
               : content;
  }
  at::Tensor combined(const Sizes& sizes, ReduceOp op) const {
    const auto wide = [&](int rank) {
      const at::Tensor content = operand(rank, sizes, op);
      return is_16_bit_float(dtype_) ? content.to(at::kFloat) : content;
    };
    at::Tensor result = wide(0);
    for (int r = 1; r < group_.size(); ++r) {
      const at::Tensor next = wide(r);
      result = op == ReduceOp::kSum       ? result + next
               : op == ReduceOp::kProduct ? result * next
               : op == ReduceOp::kMax     ? at::maximum(result, next)
                                          : at::minimum(result, next);
    }
    return result.to(dtype_);
  }

  void all_reduce() {
    for (auto op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
      begin(fmt::format("all_reduce({})", name_of(op)));
      const at::Tensor x = place(operand(group_.rank(), {numel_}, op));
      layout_.async ? finish(group_.all_reduce_async(x, op)) : group_.all_reduce(x, op);
      expect(x, combined({numel_}, op));
    }
  }

  void reduce() {
    for (auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
      begin(fmt::format("reduce({})", name_of(op)));
      const at::Tensor mine = operand(group_.rank(), {numel_}, op), x = place(mine);
      layout_.async ? finish(group_.reduce_async(x, root_, op)) : group_.reduce(x, root_, op);
      expect(x, group_.rank() == root_ ? combined({numel_}, op) : mine);
    }
  }

  void broadcast() {
    begin("broadcast");
    const at::Tensor x = place(own({numel_}));
    layout_.async ? finish(group_.broadcast_async(x, root_)) : group_.broadcast(x, root_);
    expect(x, values(root_, {numel_}));
  }

  at::Tensor stacked(const Sizes& sizes) const {
    std::vector<at::Tensor> all;
    for (int r = 0; r < group_.size(); ++r) all.push_back(values(r, sizes));
    return at::stack(all);
  }

  void all_gather() {
    begin("all_gather");
    const at::Tensor x = place(own({numel_, 2}));
    at::Tensor output;
    if (layout_.async) {
      output = blank({group_.size(), numel_, 2});
      finish(group_.all_gather_async(output, x));
    } else {
      output = group_.all_gather(x);
    }
    expect(output, stacked({numel_, 2}));
    expect(x, own({numel_, 2}), " (input)");
    if (!layout_.async) return;
    begin("all_gather (in place)");
    output = blank({group_.size(), numel_, 2});
    output.select(0, group_.rank()).copy_(own({numel_, 2}));
    finish(group_.all_gather_async(output, output.select(0, group_.rank())));
    expect(output, stacked({numel_, 2}));
  }

  std::int64_t rows_of(int rank) const { return numel_ == 0 || rank % 3 == 1 ? 0 : numel_ + rank; }
  Rows all_rows() const {
    Rows rows;
    for (int r = 0; r < group_.size(); ++r) rows.push_back(rows_of(r));
    return rows;
  }
  static std::int64_t sum(const Rows& rows) {
    std::int64_t total = 0;
    for (std::int64_t part : rows) total += part;
    return total;
  }

  void all_gather_rows() {
    begin("all_gather_rows");
    const at::Tensor x = place(own({rows_of(group_.rank()), 2}));
    at::Tensor output;
    if (layout_.async) {
      output = blank({sum(all_rows()), 2});
      finish(group_.all_gather_rows_async(output, x, all_rows()));
    } else {
      output = group_.all_gather_rows(x);
    }
    std::vector<at::Tensor> all;
    for (int r = 0; r < group_.size(); ++r) all.push_back(values(r, {rows_of(r), 2}));
    expect(output, at::cat(all));
  }

  void reduce_scatter() {
    for (const bool given : {false, true}) {
      const auto op = given ? ReduceOp::kMax : ReduceOp::kSum;
      begin(fmt::format("reduce_scatter({}{})", name_of(op), given ? ", rows" : ""));
      const Rows rows = given ? all_rows() : split_rows(numel_, group_.size());
      const Sizes sizes{sum(rows), 2};
      const at::Tensor x = place(operand(group_.rank(), sizes, op));
      at::Tensor output;
      if (layout_.async || given) {
        output = blank({rows[static_cast<std::size_t>(group_.rank())], 2});
        finish(group_.reduce_scatter_async(output, x, op, given ? rows : Rows{}));
      } else {
        output = group_.reduce_scatter(x, op);
      }
      const auto parts = combined(sizes, op).split_with_sizes(rows);
      expect(output, parts[static_cast<std::size_t>(group_.rank())]);
      expect(x, operand(group_.rank(), sizes, op), " (input)");
    }
  }

  void gather() {
    begin("gather");
    const bool here = group_.rank() == root_;
    const at::Tensor x = place(own({numel_}));
    at::Tensor output;
    if (layout_.async) {
      if (here) output = blank({group_.size(), numel_});
      finish(group_.gather_async(output, x, root_));
    } else {
      output = group_.gather(x, root_);
    }
    if (here) expect(output, stacked({numel_}));
    if (!here && output.defined()) report("", "a result where none belongs");
  }

  void scatter() {
    begin("scatter");
    const Sizes sizes{group_.size(), numel_};
    at::Tensor input;
    if (group_.rank() == root_) input = place(values(root_, sizes));
    const at::Tensor output = blank({numel_});
    layout_.async ? finish(group_.scatter_async(output, input, root_)) : group_.scatter(output, input, root_);
    expect(output, values(root_, sizes)[group_.rank()]);
  }

  // The rows that rank `from` has for rank `to`.
  std::int64_t rows_between(int from, int to) const {
    return numel_ == 0 ? 0 : (from + 2 * to) % 3 + numel_ / 7;
  }

  void all_to_all() {
    for (const bool even : {true, false}) {
      begin(even ? "all_to_all" : "all_to_all of uneven rows");
      const int rank = group_.rank(), size = group_.size();
      const auto part = [&](int from, int to) { return even ? numel_ : rows_between(from, to); };
      Rows to, from;
      for (int r = 0; r < size; ++r) {
        to.push_back(part(rank, r));
        from.push_back(part(r, rank));
      }
      const at::Tensor x = place(own({sum(to), 2}));
      at::Tensor output;
      if (layout_.async) {
        output = blank({sum(from), 2});
        finish(even ? group_.all_to_all_async(output, x) : group_.all_to_all_async(output, x, from, to));
      } else {
        output = even ? group_.all_to_all(x) : group_.all_to_all(x, from, to);
      }
      std::vector<at::Tensor> expected;
      for (int r = 0; r < size; ++r) {
        Rows theirs;
        for (int other = 0; other < size; ++other) theirs.push_back(part(r, other));
        expected.push_back(
            values(r, {sum(theirs), 2}).split_with_sizes(theirs)[static_cast<std::size_t>(rank)]);
      }
      expect(output, at::cat(expected));
    }
  }

  void messages() {
    begin("send and recv");
    const int rank = group_.rank(), size = group_.size(), tag = slot_ % 3;
    if (size == 1) return;  // nobody to send to
    const int left = (rank + size - 1) % size, right = (rank + 1) % size;
    const at::Tensor x = place(own({numel_})), output = blank({numel_});
    if (layout_.async) {
      Pending received = group_.recv_async(output, left, tag), sent = group_.send_async(x, right, tag);
      finish(received);
      finish(sent);
    } else {
      if (rank % 2 == 0) group_.send(x, right, tag);
      group_.recv(output, left, tag);
      if (rank % 2 == 1) group_.send(x, right, tag);
    }
    expect(output, values(left, {numel_}));
  }

  Group group_;
  const OperationCases& cases_;
  at::Tensor arena_;
  std::int64_t used_ = 0;  // bytes of the arena
  std::vector<at::Tensor> gaps_;
  Layout layout_{};
  at::ScalarType dtype_ = at::kFloat;
  std::int64_t numel_ = 0;
  int slot_ = 0, root_ = 0, turn_ = 0;
  std::string name_;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> check_operations(Group group, const OperationCases& cases) {
  return Checker(std::move(group), cases).run();
}

}  // namespace isograd::testing
