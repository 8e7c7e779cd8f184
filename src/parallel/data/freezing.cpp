#include "parallel/data/freezing.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {
namespace {

// The first that was frozen or unfrozen since it was last looked at; none: empty.
std::string changed_one(const TrainableParameters& parameters, const std::vector<Bucket>& buckets) {
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots)
      if (parameters[slot.index].tensor.requires_grad() != slot.trained) return slot.name;
  for (const NamedParameter& parameter : parameters.frozen)
    if (parameter.tensor.requires_grad()) return parameter.name;
  return "";
}

// Called where something has changed: ranks where nothing has do something else in the group meanwhile.
at::Tensor from_all_ranks(const std::vector<std::int64_t>& trained, const std::string& changed,
                          Group& group) {
  try {
    return group.all_gather(at::tensor(trained, at::kLong));  // [W, P]
  } catch (const PeerError& error) {
    throw PeerError(
        {.where = fmt::format("parameter '{}'", changed),
         .found = "requires_grad changed on this rank, and not on every rank: " + error.text().found,
         .expected = "the same on every rank",
         .action = "Freeze and unfreeze parameters on all ranks in the same step"});
  }
}

void check_same_on_all_ranks(const TrainableParameters& parameters, const std::string& changed,
                             Group& group) {
  std::vector<const NamedParameter*> all;
  std::vector<std::int64_t> trained;
  for (const auto* list : {static_cast<const std::vector<NamedParameter>*>(&parameters), &parameters.frozen})
    for (const NamedParameter& parameter : *list) {
      all.push_back(&parameter);
      trained.push_back(parameter.tensor.requires_grad());
    }
  const at::Tensor by_rank = from_all_ranks(trained, changed, group);
  const auto table = by_rank.accessor<std::int64_t, 2>();
  for (int rank = 1; rank < group.size(); ++rank)
    for (std::size_t i = 0; i < all.size(); ++i)
      if (const auto p = static_cast<std::int64_t>(i); table[rank][p] != table[0][p])
        refuse(fmt::format("parameter '{}'", all[i]->name),
               fmt::format("requires_grad {} on rank {} and {} on rank 0", table[rank][p] != 0, rank,
                           table[0][p] != 0),
               "the same on every rank", "Freeze and unfreeze parameters on all ranks in the same step");
}

}  // namespace

std::vector<BucketPlan> plan_joined(TrainableParameters& parameters,
                                    const std::vector<NamedParameter>& unfrozen, std::int64_t bucket_bytes) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const NamedParameter& parameter : unfrozen) named.emplace_back(parameter.name, parameter.tensor);
  auto joined = trainable_parameters(named);  // refuses what cannot be trained
  for (std::size_t i = 0; i < joined.size(); ++i) joined[i].sync = unfrozen[i].sync;
  std::vector<BucketPlan> plans = plan_buckets(joined, bucket_bytes);
  for (BucketPlan& plan : plans)
    for (Slot& slot : plan.slots) slot.index += parameters.size();
  parameters.insert(parameters.end(), joined.begin(), joined.end());
  return plans;
}

std::vector<NamedParameter> follow_freezing(TrainableParameters& parameters, std::vector<Bucket>& buckets,
                                            const Mesh& mesh) {
  const std::string changed = changed_one(parameters, buckets);
  if (changed.empty()) return {};
  if (Group group = ranks_of_same_parameters(mesh); group.size() > 1)
    check_same_on_all_ranks(parameters, changed, group);
  for (Bucket& bucket : buckets)
    for (Slot& slot : bucket.plan.slots) slot.trained = parameters[slot.index].tensor.requires_grad();
  std::vector<NamedParameter> unfrozen;
  std::erase_if(parameters.frozen, [&](const NamedParameter& parameter) {
    if (!parameter.tensor.requires_grad()) return false;
    unfrozen.push_back(parameter);
    return true;
  });
  return unfrozen;
}

}  // namespace isograd
