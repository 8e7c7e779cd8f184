#include "parallel/data/same_parameters.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>

#include "base/refuse.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

constexpr const char* kWriteTogether =
    "Call write() of the layout on every rank, or write the same values in place on all of "
    "them before the same step";

// Columns of a fingerprint row.
enum : std::int64_t { kIdentity, kValues, kWidth };

std::string identity(const NamedParameter& parameter) {
  return fmt::format("'{}', {} {}", parameter.name, c10::toString(parameter.tensor.scalar_type()),
                     c10::str(parameter.tensor.sizes()));
}

// [W, P] of `gather`, which may make the group too. Called where something has changed: ranks where nothing
// has do something else in the group meanwhile.
at::Tensor from_all_ranks(const std::function<at::Tensor()>& gather, const std::string& parameter,
                          const std::string& change, const std::string& expected, const std::string& action) {
  try {
    return gather();
  } catch (const PeerError& error) {
    throw PeerError({.where = fmt::format("parameter '{}'", parameter),
                     .found = change + " on this rank, and not on every rank: " + error.text().found,
                     .expected = expected,
                     .action = action});
  }
}

at::Tensor fingerprints(const std::vector<NamedParameter>& parameters, bool values_too) {  // [P, kWidth]
  at::NoGradGuard no_grad;
  at::Tensor rows = at::empty({static_cast<std::int64_t>(parameters.size()), kWidth}, at::kLong);
  auto row = rows.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::string text = identity(parameters[i]);
    row[i][kIdentity] = hash_of(text.data(), text.size());
    row[i][kValues] = 0;
    if (values_too) row[i][kValues] = ValueHashes::of(parameters[i].tensor);
  }
  return rows;
}

// The first that was frozen or unfrozen since it was last looked at; none: empty.
std::string changed_one(const TrainableParameters& parameters, const std::vector<Bucket>& buckets) {
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots)
      if (parameters[slot.index].tensor.requires_grad() != slot.trained) return slot.name;
  for (const NamedParameter& parameter : parameters.frozen)
    if (parameter.tensor.requires_grad()) return parameter.name;
  return "";
}

void check_same_on_all_ranks(const TrainableParameters& parameters, const std::string& changed,
                             Group& group) {
  const auto all = all_parameters(parameters);
  std::vector<std::int64_t> trained;
  for (const NamedParameter* parameter : all) trained.push_back(parameter->tensor.requires_grad());
  const char* const action = "Freeze and unfreeze parameters on all ranks in the same step";
  const at::Tensor by_rank =
      from_all_ranks([&] { return group.all_gather(at::tensor(trained, at::kLong)); }, changed,
                     "requires_grad changed", "the same on every rank", action);
  const auto table = by_rank.accessor<std::int64_t, 2>();
  for (int rank = 1; rank < group.size(); ++rank)
    for (std::size_t i = 0; i < all.size(); ++i)
      if (const auto p = static_cast<std::int64_t>(i); table[rank][p] != table[0][p])
        refuse(fmt::format("parameter '{}'", all[i]->name),
               fmt::format("requires_grad {} on rank {} and {} on rank 0", table[rank][p] != 0, rank,
                           table[0][p] != 0),
               "the same on every rank", action);
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

// ---- written values ----

std::int64_t ValueHashes::of(const at::Tensor& values) {
  const at::Tensor bytes = values.detach().cpu().contiguous();
  const std::int64_t own = hash_of(bytes.const_data_ptr(), bytes.nbytes());
  return own == kNone ? 1 : own;
}

at::Tensor ValueHashes::mine() const { return at::tensor(hashes_, at::kLong); }

std::optional<ErrorText> ValueHashes::first_difference(const at::Tensor& by_rank, const std::string& given,
                                                       const std::string& action) const {
  const auto table = by_rank.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < by_rank.size(1); ++i)
    for (std::int64_t rank = 1; rank < by_rank.size(0); ++rank) {
      if (table[rank][i] == table[0][i]) continue;
      const bool both = table[rank][i] != kNone && table[0][i] != kNone;
      const std::int64_t writer = table[0][i] != kNone ? 0 : rank;
      return ErrorText{
          .where = fmt::format("parameter '{}'", names_.at(static_cast<std::size_t>(i))),
          .found = both ? fmt::format("other values {} on rank {} than on rank 0 of those with copies of it",
                                      given, rank)
                        : fmt::format("values {} on rank {} and none on rank {} of those with copies of it",
                                      given, writer, writer == 0 ? rank : 0),
          .expected = "the same values on every rank",
          .action = action};
    }
  return std::nullopt;
}

void WrittenValues::add(const std::string& name, const AxisSet& copies, const at::Tensor& values) {
  if (mesh_.size(copies) > 1) hashes_.insert_or_assign(name, Hash{copies, ValueHashes::of(values)});
}

void WrittenValues::watch(const std::vector<NamedParameter>& frozen) {
  for (const NamedParameter& parameter : frozen)  // of others there are no bytes to hash
    if (parameter.tensor.layout() == at::kStrided && !parameter.tensor.is_meta())
      watched_.push_back(parameter);
  writes_ = Writes(watched_);
}

void WrittenValues::compare(const TrainableParameters& parameters) {
  for (std::size_t place : writes_.written()) {
    writes_.settle(place);
    const NamedParameter& parameter = watched_[place];
    add(parameter.name, parameter.sync.copies, parameter.tensor);
  }
  std::set<AxisSet> kinds;
  for (const auto& [name, hash] : hashes_) kinds.insert(hash.copies);
  for (const AxisSet& copies : kinds) compare(parameters, copies);
  hashes_.clear();
}

void WrittenValues::compare(const TrainableParameters& parameters, const AxisSet& copies) const {
  ValueHashes hashes;
  std::string first;
  for (const NamedParameter* parameter : all_parameters(parameters)) {
    if (parameter->sync.copies != copies) continue;
    const auto written = hashes_.find(parameter->name);
    hashes.add(parameter->name, written == hashes_.end() ? ValueHashes::kNone : written->second.value);
    if (first.empty() && written != hashes_.end()) first = parameter->name;
  }
  const at::Tensor by_rank =
      from_all_ranks([&] { return mesh_.along(copies).all_gather(hashes.mine()); }, first,
                     "values written in place", "the same values on every rank", kWriteTogether);
  if (const auto difference = hashes.first_difference(by_rank, "written in place", kWriteTogether))
    throw ConfigError(*difference);
}

}  // namespace isograd
