// The rules of each model's parameters along tp, and the hooks of its forward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "isograd/error.hpp"
#include "parallel/tensor/hooks.hpp"

namespace isograd {
namespace {

constexpr const char *kHeads = "tp_heads", *kCopies = "tp_copies";

// How key heads lie beside the query heads that read them.
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

// A rule per parameter: the first row whose text occurs in its name, but not of a row-parallel weight for its
// bias. What no row names (norms, routers, biases added to the stream) works on this rank's tokens under
// sequence parallelism.
std::vector<CutRule> by_rows(const NamedTensors& named, const std::vector<CutRule>& rows,
                             const TensorParallelOptions& options) {
  std::vector<CutRule> rules;
  for (const auto& [name, tensor] : named) {
    const auto row = std::ranges::find_if(rows, [&, &of = name](const CutRule& one) {
      return of.find(one.name) != std::string::npos && !(one.dim == 1 && of.ends_with(".bias"));
    });
    if (row == rows.end() && !options.sequence_parallel) continue;
    rules.push_back(row == rows.end() ? summed_along(name) : *row);
    rules.back().name = name;
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
      {cut_along(".experts.down_proj", 2), cut_along(".experts.", 1),  // [experts, out, in]
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
