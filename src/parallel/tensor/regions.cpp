#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <atomic>
#include <cstdlib>
#include <numeric>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "isograd/tensor_parallel.hpp"
#include "layout/flat.hpp"
#include "parallel/tensor/hooks.hpp"

namespace isograd {
namespace {

bool checked_from_the_start() {
  if (std::getenv("ISOGRAD_CHECK_SEAMS")) return true;
#ifdef __OPTIMIZE__
  return false;
#else
  return true;
#endif
}

std::atomic<bool> checking{checked_from_the_start()};

// Whether each rank's tensor is bit for bit rank 0's. Every rank has the same answer.
std::vector<int> differing(const at::Tensor& tensor, Group& tp) {
  const at::Tensor all = tp.all_gather(checksums({tensor}));
  std::vector<int> ranks;
  for (int rank = 1; rank < tp.size(); ++rank)
    if (!all[rank].equal(all[0])) ranks.push_back(rank);
  return ranks;
}

[[noreturn]] void refuse_tensor(const char* function, const std::string& found, const std::string& expected,
                                const std::string& action) {
  throw PeerError(
      {.where = fmt::format("{}()", function), .found = found, .expected = expected, .action = action});
}

void expect_same(const at::Tensor& tensor, Group& tp, const char* function, const char* what) {
  if (!checking) return;
  if (const auto ranks = differing(tensor, tp); !ranks.empty())
    refuse_tensor(
        function, fmt::format("{} of rank {} along {} differs from rank 0's", what, ranks[0], tp.name()),
        "the same on all of these ranks",
        "Give ranks along tp the same batch; reduce_from_tp() what is a part, and copy_to_tp() before it is used again");
}

void expect_parts(const at::Tensor& tensor, Group& tp, const char* function) {
  if (!checking || !differing(tensor, tp).empty() || tensor.count_nonzero().item<std::int64_t>() == 0) return;
  refuse_tensor(function, fmt::format("the same tensor on all {} ranks along {}", tp.size(), tp.name()),
                "each rank's part of a sum",
                "Cut the weight of the product before it along its inputs, or leave this call out: what "
                "is whole already would be counted once for each rank");
}

Group::Rows rows_of(const at::Tensor& whole, const Group& tp, const Group::Rows& rows, const char* function) {
  if (rows.empty()) return split_rows(whole.size(0), tp.size());
  const auto sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  if (static_cast<int>(rows.size()) != tp.size() || sum != whole.size(0))
    refuse(fmt::format("{}()", function),
           fmt::format("{} numbers of rows that add up to {}", rows.size(), sum),
           fmt::format("one for each of {} ranks, {} together", tp.size(), whole.size(0)),
           "Pass the rows that each rank has");
  return rows;
}

at::Tensor own_rows(const at::Tensor& whole, const Group::Rows& rows, int rank) {
  const auto begin = std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0});
  return whole.narrow(0, begin, rows[static_cast<std::size_t>(rank)]);
}

enum class Exchanged { kNothing, kSum, kGather, kScatter, kOwnRows };

// One direction of a function of the table in tensor_parallel.hpp; `rows` of each rank, where tokens are
// split.
at::Tensor exchanged(Exchanged how, Group& tp, const at::Tensor& x, const Group::Rows& rows) {
  if (how == Exchanged::kNothing) return at::alias(x);
  if (how == Exchanged::kOwnRows) return own_rows(x, rows, tp.rank()).clone();
  if (how == Exchanged::kSum) {
    at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
    tp.all_reduce(sum);
    return sum;
  }
  const bool gathers = how == Exchanged::kGather;
  auto sizes = x.sizes().vec();
  sizes.at(0) = gathers ? std::accumulate(rows.begin(), rows.end(), std::int64_t{0})
                        : rows[static_cast<std::size_t>(tp.rank())];
  at::Tensor result = at::empty(sizes, x.options());
  if (gathers)
    tp.all_gather_rows_async(result, x, rows).wait();
  else
    tp.reduce_scatter_async(result, x, ReduceOp::kSum, rows).wait();
  return result;
}

at::Tensor region_map(const char* function, Group tp, const at::Tensor& x, const Group::Rows& rows,
                      Exchanged forward, Exchanged backward) {
  return apply_map(
      x, [tp, rows, forward](const at::Tensor& in) mutable { return exchanged(forward, tp, in, rows); },
      [tp, rows, backward, function](const at::Tensor& gradient) mutable {
        if (backward == Exchanged::kNothing || backward == Exchanged::kOwnRows)
          expect_same(gradient, tp, function, "the gradient of the output");
        return exchanged(backward, tp, gradient, rows);
      });
}

Group::Rows asked(Group& tp, const at::Tensor& split) {
  const at::Tensor all = tp.all_gather(at::full({1}, split.size(0), at::kLong)).flatten();
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
}

}  // namespace

void check_tp_regions(bool on) { checking = on; }

bool tp_regions_are_checked() { return checking; }

Group tensor_group(const Mesh& mesh, const std::string& axis) { return mesh.along({axis}, "tensor"); }

at::Tensor copy_to_tp(Group tp, const at::Tensor& same) {
  if (tp.size() == 1) return same;
  expect_same(same, tp, "copy_to_tp", "the input");
  if (!same.requires_grad()) return same;  // on no rank then
  return region_map("copy_to_tp", tp, same, {}, Exchanged::kNothing, Exchanged::kSum);
}

at::Tensor reduce_from_tp(Group tp, const at::Tensor& part) {
  if (tp.size() == 1) return part;
  expect_parts(part, tp, "reduce_from_tp");
  return region_map("reduce_from_tp", tp, part, {}, Exchanged::kSum, Exchanged::kNothing);
}

at::Tensor reduce_scatter_to_sequence(Group tp, const at::Tensor& part, const Group::Rows& rows) {
  constexpr const char* kName = "reduce_scatter_to_sequence";
  if (tp.size() == 1) return part;
  expect_parts(part, tp, kName);
  return region_map(kName, tp, part, rows_of(part, tp, rows, kName), Exchanged::kScatter, Exchanged::kGather);
}

at::Tensor gather_from_sequence(Group tp, const at::Tensor& split, const Group::Rows& rows) {
  if (tp.size() == 1) return split;
  return region_map("gather_from_sequence", tp, split, rows.empty() ? asked(tp, split) : rows,
                    Exchanged::kGather, Exchanged::kScatter);
}

at::Tensor gather_tokens(Group tp, const at::Tensor& split, const Group::Rows& rows) {
  if (tp.size() == 1) return split;
  return region_map("gather_tokens", tp, split, rows.empty() ? asked(tp, split) : rows, Exchanged::kGather,
                    Exchanged::kOwnRows);
}

at::Tensor split_tokens(Group tp, const at::Tensor& same, const Group::Rows& rows) {
  if (tp.size() == 1) return same;
  expect_same(same, tp, "split_tokens", "the input");
  const Group::Rows each = rows_of(same, tp, rows, "split_tokens");
  if (!same.requires_grad()) return own_rows(same, each, tp.rank());
  return region_map("split_tokens", tp, same, each, Exchanged::kOwnRows, Exchanged::kGather);
}

}  // namespace isograd
