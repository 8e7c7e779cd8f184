#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "base/paths.hpp"
#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "isograd/tensor_parallel.hpp"

namespace isograd {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

[[noreturn]] void refuse_rule(const CutRule& rule, std::string found, std::string expected,
                              std::string action) {
  refuse(fmt::format("the rule for '{}'", rule.name), std::move(found), std::move(expected),
         std::move(action));
}

void check_matches_some(const CutRule& rule, const Named& named) {
  if (std::ranges::any_of(named, [&](const auto& each) { return matches(rule.name, each.first); })) return;
  const std::string* nearest = nullptr;
  for (const auto& each : named)
    if (!nearest || edit_distance(rule.name, each.first) < edit_distance(rule.name, *nearest))
      nearest = &each.first;
  refuse_rule(rule, "no parameter whose name matches", fmt::format("one of the model's {}", named.size()),
              nearest ? fmt::format("Correct the name; '{}' is near", *nearest) : "Correct the name");
}

std::int64_t pieces_of(const CutRule& rule, const std::vector<std::int64_t>& blocks,
                       const std::string& name) {
  std::int64_t least = INT64_MAX;
  for (const std::int64_t block : blocks) {
    if (block % rule.unit != 0)
      refuse_rule(rule, fmt::format("{} rows of '{}' in pieces of {}", block, name, rule.unit),
                  "pieces that the rows are a multiple of",
                  "Correct `unit` (the size of a head) or `blocks`");
    least = std::min(least, block / rule.unit);
  }
  return least;
}

Placement placement_of(const CutRule& rule, const std::string& name, const at::Tensor& tensor,
                       const Grid& grid) {
  const std::vector<std::int64_t> shape = tensor.sizes().vec();
  if (rule.dim < 0) return placed(grid, shape, {}, {}, rule.summed);
  if (rule.dim >= tensor.dim())
    refuse_rule(rule, fmt::format("dimension {} of '{}', {}", rule.dim, name, c10::str(tensor.sizes())),
                fmt::format("0 to {}", tensor.dim() - 1), "Correct the dimension");
  const auto blocks = rule.blocks.empty()
                          ? std::vector<std::int64_t>{shape[static_cast<std::size_t>(rule.dim)]}
                          : rule.blocks;
  const int ranks = grid.size({rule.axis});
  if (const std::int64_t pieces = pieces_of(rule, blocks, name); pieces < ranks)
    refuse_rule(rule,
                fmt::format("{} piece{} of {} rows in '{}' for {} ranks along {}", pieces,
                            pieces == 1 ? "" : "s", rule.unit, name, ranks, rule.axis),
                "a piece (a head) for each rank, or more",
                fmt::format("Use at most {} ranks along {}", pieces, rule.axis));
  return placed(grid, shape, {even_cut(grid, rule.axis, rule.dim, blocks, rule.unit)}, {}, rule.summed);
}

}  // namespace

CutRule cut_along(std::string name, int dim, std::int64_t unit, std::vector<std::int64_t> blocks) {
  return {.name = std::move(name), .dim = dim, .unit = unit, .blocks = std::move(blocks)};
}

CutRule summed_along(std::string name, AxisSet axes) {
  return {.name = std::move(name), .summed = std::move(axes)};
}

Layout::Named cut_placements(const Named& named, const Grid& grid, const std::vector<CutRule>& rules) {
  for (const CutRule& rule : rules) {
    if (rule.name.size() > kMostPattern)
      refuse("a rule of cut()", fmt::format("a name of {} characters", rule.name.size()),
             fmt::format("at most {}", kMostPattern), "Shorten it");
    if (rule.unit < 1)
      refuse_rule(rule, fmt::format("pieces of {} rows", rule.unit), "1 or more", "Correct `unit`");
    check_matches_some(rule, named);
  }
  Layout::Named placements;
  for (const auto& [name, tensor] : named) {
    const CutRule* rule = nullptr;
    for (const CutRule& each : rules) {
      if (!matches(each.name, name)) continue;
      if (rule)
        refuse_rule(each, fmt::format("'{}', which the rule for '{}' matches too", name, rule->name),
                    "one rule for a parameter", "Make the names narrower");
      rule = &each;
    }
    placements.emplace_back(
        name, rule ? placement_of(*rule, name, tensor, grid) : placed(grid, tensor.sizes().vec()));
  }
  return placements;
}

Layout cut(const Named& named, const Mesh& mesh, const std::vector<CutRule>& rules) {
  Layout layout(mesh, cut_placements(named, mesh.grid(), rules));
  const at::NoGradGuard no_grad;
  for (auto [name, tensor] : named)  // the whole one is freed unless others keep it
    if (tensor.sizes() != at::IntArrayRef(layout.parameter(name).local_shape))
      tensor.set_data(layout.local(name, tensor));
  return layout;
}

Layout cut(torch::nn::Module& model, const Mesh& mesh, const std::vector<CutRule>& rules) {
  Named named;
  for (const auto& item : model.named_parameters()) {
    const bool tied = std::any_of(named.begin(), named.end(),
                                  [&](const auto& each) { return each.second.is_same(item.value()); });
    if (!tied) named.emplace_back(item.key(), item.value());
  }
  return cut(named, mesh, rules);
}

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
