#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/tensor_parallel.hpp"

namespace isograd {

VocabularyShard vocabulary_shard(const Layout& layout, const std::string& name) {
  const PlacedParameter& parameter = layout.parameter(name);
  const Placement& placement = parameter.placement;
  const Mesh& mesh = layout.mesh();
  VocabularyShard shard{.vocabulary = placement.whole_shape.at(0)};
  if (placement.cuts.empty()) return shard;
  const Cut& rows = placement.cuts[0];
  if (placement.cuts.size() > 1 || rows.dim != 0 || rows.blocks.size() > 1)
    refuse(fmt::format("the vocabulary of '{}'", name),
           fmt::format("{} cuts, the first of dimension {} in {} blocks", placement.cuts.size(), rows.dim,
                       rows.blocks.size()),
           "rows cut along one axis", "Cut it with cut_along(name, 0)");
  shard.group = tensor_group(mesh, rows.axis);
  for (int place = 0; place < mesh.place({rows.axis}); ++place)
    shard.first += rows.rows[0][static_cast<std::size_t>(place)];
  return shard;
}

at::Tensor embedding_part(const at::Tensor& weight, const at::Tensor& tokens, const VocabularyShard& shard,
                          std::int64_t pad) {
  const std::int64_t rows = weight.size(0);
  if (rows == 0) return at::zeros({tokens.size(0), weight.size(1)}, weight.options()) + weight.sum();
  const at::Tensor own = tokens - shard.first, here = own.ge(0).logical_and(own.lt(rows));
  const bool has_pad = pad >= shard.first && pad < shard.first + rows;
  return at::embedding(weight, at::where(here, own, 0), has_pad ? pad - shard.first : -1) *
         here.unsqueeze(1).to(weight.scalar_type());
}

}  // namespace isograd
