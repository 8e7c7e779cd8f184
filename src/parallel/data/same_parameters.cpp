#include "parallel/data/same_parameters.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// Columns of a fingerprint row.
enum : std::int64_t { kIdentity, kValues, kWidth };

std::int64_t hash(const void* data, std::size_t bytes) {
  return static_cast<std::int64_t>(std::stoull(checksum(data, bytes), nullptr, 16));
}

std::string identity(const NamedParameter& parameter) {
  return fmt::format("'{}', {} {}", parameter.name, c10::toString(parameter.tensor.scalar_type()),
                     c10::str(parameter.tensor.sizes()));
}

at::Tensor fingerprints(const std::vector<NamedParameter>& parameters, bool values_too) {  // [P, kWidth]
  at::NoGradGuard no_grad;
  at::Tensor rows = at::empty({static_cast<std::int64_t>(parameters.size()), kWidth}, at::kLong);
  auto row = rows.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::string text = identity(parameters[i]);
    row[i][kIdentity] = hash(text.data(), text.size());
    row[i][kValues] = 0;
    if (!values_too) continue;
    const at::Tensor values = parameters[i].tensor.cpu().contiguous();
    row[i][kValues] = hash(values.const_data_ptr(), values.nbytes());
  }
  return rows;
}

}  // namespace

void check_same_parameters(const std::vector<NamedParameter>& parameters, Group group, bool compare_values) {
  if (group.size() == 1) return;
  const at::Tensor mine = fingerprints(parameters, compare_values);
  const at::Tensor counts = group.all_gather(at::full({1}, mine.size(0), at::kLong)).flatten();  // [W]
  const auto common = counts.min().item<std::int64_t>();
  const at::Tensor all = group.all_gather(mine.narrow(0, 0, common).contiguous());  // [W, common, kWidth]
  const auto table = all.accessor<std::int64_t, 3>();
  for (std::int64_t i = 0; i < common; ++i)
    for (int rank = 1; rank < group.size(); ++rank)
      for (const auto column : {kIdentity, kValues})
        if (table[rank][i][column] != table[0][i][column])
          refuse(fmt::format("parameters over the ranks of group '{}'", group.name()),
                 fmt::format("rank {} and rank 0 differ in the {} of parameter {}, which is {} on rank {}",
                             rank, column == kIdentity ? "name, shape or dtype" : "values", i,
                             identity(parameters[i]), group.rank()),
                 "the same model on every rank",
                 "Seed the initialisation by parameter, not by rank, and load the same file everywhere");
  if (common != counts.max().item<std::int64_t>())
    refuse(fmt::format("parameters over the ranks of group '{}'", group.name()),
           fmt::format("{} trainable parameters on rank {}, between {} and {} on the ranks",
                       parameters.size(), group.rank(), common, counts.max().item<std::int64_t>()),
           "the same model on every rank",
           "Build the same model and freeze the same parameters on every rank");
}

void check_same_parameters(const std::vector<NamedParameter>& parameters, const Mesh& mesh,
                           bool compare_values) {
  // By the axes of their copies; those that every rank has first, for a rank without any must find out too.
  std::vector<std::pair<AxisSet, std::vector<NamedParameter>>> kinds{
      {sync_axes(placed(mesh.grid(), {}), mesh.grid()).copies, {}}};
  for (const NamedParameter& parameter : parameters) {
    auto kind = std::find_if(kinds.begin(), kinds.end(),
                             [&](const auto& known) { return known.first == parameter.sync.copies; });
    if (kind == kinds.end()) kind = kinds.insert(kind, {parameter.sync.copies, {}});
    kind->second.push_back(parameter);
  }
  for (const auto& [copies, members] : kinds)
    check_same_parameters(members, mesh.along(copies), compare_values);
}

Group ranks_of_same_parameters(const Mesh& mesh) {
  return mesh.along(without(mesh.grid().names(), {kStageAxis}));
}

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
