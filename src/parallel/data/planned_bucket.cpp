#include "parallel/data/planned_bucket.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>
#include <unordered_map>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/rank_roles.hpp"

namespace isograd {

std::vector<PlannedBucket> plan_naive(TrainableParameters parameters, const Grid& grid, int rank,
                                      const DataParallelOptions& options) {
  place_parameters(parameters, grid, rank);
  std::vector<PlannedBucket> result;
  for (BucketPlan& plan : plan_buckets(parameters, options.bucket_bytes)) {
    PlannedBucket& bucket = result.emplace_back();
    bucket.gradients = gradient_type(plan.dtype, options.fp32_gradients);
    bucket.plan = std::move(plan);
  }
  return result;
}

std::vector<PlannedBucket> plan_bucketed(TrainableParameters parameters, const Grid& grid, int rank,
                                         const DataParallelOptions& options) {
  place_parameters(parameters, grid, rank);
  const BucketRules rules(options, parameters, grid);
  std::vector<PlannedBucket> result;
  for (BucketPlan& plan : plan_buckets(parameters, options.bucket_bytes, options.first_bucket_bytes,
                                       order_by_names(parameters, options.order))) {
    pad_for(plan, grid.size(plan.sync.summed));
    PlannedBucket& bucket = result.emplace_back();
    bucket.asked = options.sharded;
    bucket.in_shards = rules.sharded;
    bucket.parameters_in_shards = rules.parameters_shared;
    bucket.gradients_in_shards = rules.reduces_each_micro_batch;
    bucket.gradients = gradient_type(plan.dtype, options.fp32_gradients);
    bucket.plan = std::move(plan);
  }
  return result;
}

std::vector<PlannedBucket> plan_fully_sharded(const UnitHandle& root, const NamedTensors& named,
                                              const std::vector<UnitHandle>& blocks, const Grid& grid,
                                              int rank, const FullyShardOptions& options) {
  std::vector<PlannedBucket> result;
  for (UnitPlan& unit : plan_units(unit_uses(root, blocks), named,
                                   unit_members(named, options.placements, grid, rank), options, grid))
    for (auto& [plan, trained] : unit.flats) {
      if (!trained) continue;
      PlannedBucket& bucket = result.emplace_back();
      bucket.unit = unit.name;
      bucket.asked = options.sharded;
      bucket.in_shards = bucket.parameters_in_shards = true;
      bucket.gradients_in_shards = !options.reduce_once;
      bucket.gradients = gradient_type(plan.dtype, unit.fp32_gradients);
      bucket.plan = std::move(plan);
    }
  return result;
}

BucketRules::BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters,
                         const Grid& grid) {
  if (options.stage < 0 || options.stage > 2)
    refuse("stage", std::to_string(options.stage), "0, 1 or 2", "Use fully_shard() for stage 3");
  if (most_shards(parameters, grid, options.sharded) == 1) return;  // there is nothing to shard or to share
  parameters_shared = options.share_parameters;
  sharded = options.stage > 0 || parameters_shared;
  reduces_each_micro_batch = options.stage == 2 && !options.reduce_once;
}

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
