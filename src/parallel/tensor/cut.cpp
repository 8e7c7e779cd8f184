// Which rows of which parameters a rank has along tp, and the hooks of the models' forwards.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/paths.hpp"
#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "parallel/tensor/hooks.hpp"

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

// ---- rules of the library's models ----

constexpr const char *kHeads = "tp_heads", *kCopies = "tp_copies";

// Where key heads are relative to the query heads that read them.
enum class KeyHeads { kCut, kCutWithCopies, kWhole };

KeyHeads key_heads_of(const DecoderConfig& config, const Grid& grid) {
  const int ranks = ranks_along_tp(grid);
  if (config.key_value_heads % ranks == 0) return KeyHeads::kCut;
  const bool viewed = grid.has(kHeads) && grid.has(kCopies);
  if (!viewed || grid.size({kHeads}) != config.key_value_heads || config.heads % ranks != 0)
    return KeyHeads::kWhole;
  // The ranks of a key head's copies are those whose query heads read it: neighbours along tp.
  for (int rank = 0; rank < grid.ranks(); ++rank)
    if (grid.place({kTensorAxis}, rank) !=
        grid.place({kHeads}, rank) * grid.size({kCopies}) + grid.place({kCopies}, rank))
      return KeyHeads::kWhole;
  return KeyHeads::kCutWithCopies;
}

// A norm's weight, and all else that no row names (routers, biases added to the stream): whole on every rank.
// Under sequence parallelism it sees only this rank's tokens, so its gradient is summed over tp.
std::optional<CutRule> rule_of_norm(const std::string& name, const TensorParallelOptions& options) {
  return options.sequence_parallel ? std::optional(summed_along(name)) : std::nullopt;
}

// A rule per parameter: the first row whose text occurs in its name, but not of a row-parallel weight for its
// bias.
std::vector<CutRule> by_rows(const Named& named, const std::vector<CutRule>& rows,
                             const TensorParallelOptions& options) {
  std::vector<CutRule> rules;
  for (const auto& [name, tensor] : named) {
    const auto row = std::ranges::find_if(rows, [&, &of = name](const CutRule& one) {
      return of.find(one.name) != std::string::npos && !(one.dim == 1 && of.ends_with(".bias"));
    });
    auto rule = row == rows.end() ? rule_of_norm(name, options) : *row;
    if (!rule) continue;
    rule->name = name;
    rules.push_back(std::move(*rule));
  }
  return rules;
}

// By Hugging Face names. Norms of queries and keys work on this rank's heads.
std::vector<CutRule> rules_of(DecoderLM& model, const Grid& grid, const TensorParallelOptions& options) {
  if (ranks_along_tp(grid) == 1) return {};
  const KeyHeads lie = key_heads_of(model.config(), grid);
  const std::int64_t head = model.config().head_dim;
  const auto of_keys = [&](const char* name) {
    if (lie == KeyHeads::kWhole) return summed_along(name);
    CutRule rule = cut_along(name, 0, head);
    if (lie == KeyHeads::kCutWithCopies) rule.axis = kHeads, rule.summed = {kCopies};
    return rule;
  };
  return by_rows(
      model.named(),
      // An adapter's `a` reads what its matrix reads, and its `b` writes what that writes. What is whole
      // there gets a part of its gradient from each rank's features.
      {cut_along("o_proj.lora_A", 1, head), cut_along(".experts.down_proj.lora_A", 2),
       cut_along("down_proj.lora_A", 1), summed_along("lora_A"), summed_along("o_proj.lora_B"),
       summed_along("down_proj.lora_B"),                               //
       cut_along(".experts.down_proj", 2), cut_along(".experts.", 1),  // [experts, out, in]
       summed_along("q_norm"), summed_along("k_norm"), cut_along("q_proj", 0, head), of_keys("k_proj"),
       of_keys("v_proj"), cut_along("gate_proj", 0), cut_along("up_proj", 0), cut_along("embed_tokens", 0),
       cut_along("lm_head", 0), cut_along("o_proj", 1, head), cut_along("down_proj", 1)},
      options);
}

std::vector<CutRule> rules_of(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options) {
  if (ranks_along_tp(grid) == 1) return {};
  const std::int64_t head = model.config().width_of_head();
  return by_rows(model.named(),
                 {summed_along("q_norm"), summed_along("k_norm"), cut_along("attention.q.", 0, head),
                  cut_along("attention.k.", 0, head), cut_along("attention.v.", 0, head),
                  cut_along("feed_forward.in.", 0), cut_along("attention.o.", 1, head),
                  cut_along("feed_forward.out.", 1)},
                 options);
}

// Which key heads this rank's query heads read, where it has all of them.
void read_key_heads(TensorHooks& hooks, const DecoderConfig& config, const Grid& grid, int place) {
  const Cut heads = even_cut(grid, kTensorAxis, 0, {config.heads});
  const auto& each = heads.rows[0];
  const auto first = std::accumulate(each.begin(), each.begin() + place, std::int64_t{0});
  const std::int64_t count = each[static_cast<std::size_t>(place)],
                     readers = config.heads / config.key_value_heads;
  hooks.first_key_head = first / readers;
  for (std::int64_t head = first; head < first + count; ++head)
    hooks.readers.push_back(head / readers - hooks.first_key_head);
  hooks.key_heads = hooks.readers.back() + 1;
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

Layout cut(const ModuleRef& model, const Mesh& mesh, const std::vector<CutRule>& rules) {
  Named named;
  for (const auto& item : model->named_parameters()) {
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

Grid with_key_head_view(const Grid& grid, const DecoderConfig& config) {
  const int ranks = ranks_along_tp(grid);
  const std::int64_t keys = config.key_value_heads;
  if (keys >= ranks || ranks % keys != 0 || config.heads % ranks != 0) return grid;
  return grid.viewed({kTensorAxis},
                     {{kHeads, static_cast<int>(keys)}, {kCopies, static_cast<int>(ranks / keys)}});
}

Layout::Named decoder_placements(DecoderLM& model, const Grid& grid, const TensorParallelOptions& options) {
  return cut_placements(model.named(), grid, rules_of(model, grid, options));
}

Layout cut_decoder(DecoderLM& model, const Mesh& mesh, const TensorParallelOptions& options) {
  const Layout layout = cut(model.named(), mesh, rules_of(model, mesh.grid(), options));
  if (ranks_along_tp(mesh.grid()) == 1) return layout;
  const DecoderConfig& config = model.config();
  const Group tp = tensor_group(mesh);
  TensorHooks hooks = stream_hooks(tp, options);
  const VocabularyShard inputs = vocabulary_shard(layout, "model.embed_tokens.weight");
  hooks.embed = [output = hooks.region_output, inputs](const at::Tensor& weight, const at::Tensor& tokens,
                                                       std::int64_t pad) {
    return output(embedding_part(weight, tokens, inputs, pad));
  };
  hooks.vocabulary = config.tied_output ? inputs : vocabulary_shard(layout, "lm_head.weight");
  hooks.whole_logits = [tp](const at::Tensor& columns) {
    const at::NoGradGuard no_grad;
    return Group(tp).all_gather_rows(columns.t().contiguous()).t();
  };
  if (key_heads_of(config, mesh.grid()) == KeyHeads::kWhole)
    read_key_heads(hooks, config, mesh.grid(), mesh.place({kTensorAxis}));
  model.hooks().tensor = std::move(hooks);
  return layout;
}

Layout::Named video_placements(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options) {
  return cut_placements(model.named(), grid, rules_of(model, grid, options));
}

Layout cut_video(VideoDiT& model, const Mesh& mesh, const TensorParallelOptions& options) {
  const Layout layout = cut(model.named(), mesh, rules_of(model, mesh.grid(), options));
  if (ranks_along_tp(mesh.grid()) == 1) return layout;
  const Group tp = tensor_group(mesh);
  TensorHooks hooks = stream_hooks(tp, options);
  if (options.sequence_parallel)
    hooks.own_tokens = [tp](std::int64_t tokens) {
      const Group::Rows rows = split_rows(tokens, tp.size());
      return std::pair(std::accumulate(rows.begin(), rows.begin() + tp.rank(), std::int64_t{0}),
                       rows[static_cast<std::size_t>(tp.rank())]);
    };
  model.hooks().tensor = std::move(hooks);
  return layout;
}

}  // namespace isograd
