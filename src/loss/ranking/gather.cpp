#include "isograd/ranking.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "loss/checks.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kMostDims = 8;

// How many rows each rank has; the header that finds out holds type and sizes as well.
Group::Rows agreed_rows(const std::string& where, Group& group, const at::Tensor& input,
                        const Group::Rows& given) {
  const bool fits = input.defined() && input.dim() >= 1 && input.dim() <= kMostDims;
  if (!given.empty()) {
    if (!fits || static_cast<int>(given.size()) != group.size() || given[group.rank()] != input.size(0))
      refuse(where, fmt::format("rows {}", fmt::join(given, ", ")),
             fmt::format("one number for each of {} ranks, this one's its own", group.size()),
             "Give the true numbers, or none");
    return given;
  }
  at::Tensor own = at::full({kMostDims + 2}, -1, at::kLong);  // type, dims, sizes
  auto* header = own.data_ptr<std::int64_t>();
  if (fits) {
    header[0] = static_cast<std::int64_t>(input.scalar_type());
    header[1] = input.dim();
    for (std::int64_t d = 0; d < input.dim(); ++d) header[2 + d] = input.size(d);
  }
  const at::Tensor all = group.all_gather(own);
  Group::Rows rows;
  const auto described = [&](int rank) {
    const std::int64_t* of = all.const_data_ptr<std::int64_t>() + rank * (kMostDims + 2);
    if (of[0] < 0) return std::string("no tensor of 1 to 8 dims");
    return fmt::format("[.., {}] of {}", fmt::join(of + 3, of + 2 + of[1], ", "),
                       c10::toString(static_cast<at::ScalarType>(of[0])));
  };
  std::string found = "rank 0: " + described(0);
  bool agree = described(0)[0] == '[';
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank > 0) found += fmt::format(", rank {}: {}", rank, described(rank));
    agree = agree && described(rank) == described(0);
    rows.push_back(all.const_data_ptr<std::int64_t>()[rank * (kMostDims + 2) + 2]);
  }
  if (!agree)
    refuse(where, found, "one type and one size of every dim but the first",
           "Give tensors that differ in their rows alone");
  return rows;
}

at::Tensor gathered(Group& group, const at::Tensor& input, const Group::Rows& rows) {
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes[0] = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  at::Tensor result = at::empty(sizes, input.options());
  group.all_gather_rows_async(result, input.detach().contiguous(), rows).wait();
  return result;
}

struct LocalSlice final : torch::autograd::Function<LocalSlice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& all, std::int64_t begin) {
    context->saved_data["begin"] = begin;
    context->saved_data["rows"] = input.size(0);
    return all.alias();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradient) {
    return {gradient[0].narrow(0, context->saved_data["begin"].toInt(), context->saved_data["rows"].toInt()),
            {},
            {}};
  }
};

}  // namespace

at::Tensor all_gather_with_grad(Group group, const at::Tensor& input, const Group::Rows& rows) {
  if (group.size() == 1) return input;
  const Group::Rows agreed = agreed_rows("all_gather_with_grad", group, input, rows);
  const at::Tensor all = gathered(group, input, agreed);
  if (!at::GradMode::is_enabled() || !input.requires_grad()) return all;
  return LocalSlice::apply(input, all,
                           std::accumulate(agreed.begin(), agreed.begin() + group.rank(), std::int64_t{0}));
}

at::Tensor all_gather_sum_grad(Group group, const at::Tensor& input, const Group::Rows& rows) {
  if (group.size() == 1) return input;
  const Group::Rows agreed = agreed_rows("all_gather_sum_grad", group, input, rows);
  return differentiable::all_gather_rows(group, input.contiguous(), agreed);
}

at::Tensor all_gather_no_grad(Group group, const at::Tensor& input, const Group::Rows& rows) {
  if (group.size() == 1) return input.defined() ? input.detach() : input;
  return gathered(group, input, agreed_rows("all_gather_no_grad", group, input, rows));
}

}  // namespace isograd
