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

}  // namespace isograd
