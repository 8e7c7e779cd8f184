#include "parallel/data/bucket_order.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>
#include <unordered_map>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

std::vector<std::size_t> order_by_names(const std::vector<NamedParameter>& parameters,
                                        const std::vector<std::string>& names) {
  if (names.empty()) return {};
  const auto refuse = [](std::string found) {
    isograd::refuse("the order of buckets", std::move(found), "the name of each trainable parameter once",
                    "Give the order of a run of the same model, or none");
  };
  std::unordered_map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < parameters.size(); ++i) places.emplace(parameters[i].name, i);
  std::vector<std::size_t> order;
  for (const std::string& name : names) {
    const auto found = places.find(name);
    if (found == places.end()) refuse(fmt::format("'{}', unknown or for the second time", name));
    order.push_back(found->second);
    places.erase(found);
  }
  if (!places.empty()) refuse(fmt::format("nothing about '{}'", places.begin()->first));
  return order;
}

std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t parameters,
                                        Group& group) {
  const auto count = static_cast<std::int64_t>(parameters);
  at::Tensor first = at::full({1}, arrivals.empty() ? group.size() : group.rank(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  const auto root = first.item<std::int64_t>();
  if (root == group.size()) return {};
  std::vector<std::int64_t> when(parameters, count);  // a gradient came, in which place
  for (std::size_t place = 0; place < arrivals.size(); ++place)
    when.at(arrivals[place]) = static_cast<std::int64_t>(place);
  at::Tensor message = at::tensor(when, at::kLong);
  group.broadcast(message, static_cast<int>(root));
  const auto* agreed = message.const_data_ptr<std::int64_t>();
  std::vector<std::size_t> order(parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return agreed[a] < agreed[b]; });
  return order;
}

}  // namespace isograd
