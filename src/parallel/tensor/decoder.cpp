#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "isograd/error.hpp"
#include "parallel/tensor/model_seams.hpp"

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

// What becomes of each parameter, by its Hugging Face name.
std::vector<CutRule> rules_of(DecoderLM& model, const Grid& grid, const TensorParallelOptions& options) {
  if (ranks_along_tp(grid) == 1) return {};
  const KeyHeads keys = key_heads_of(model.config(), grid);
  const std::int64_t head = model.config().head_dim;
  std::vector<CutRule> rules;
  for (const auto& [name, tensor] : model.named()) {
    const bool is_bias = name.ends_with(".bias");
    if (is_any_of(name, {".experts."})) {  // [experts, out, in]
      rules.push_back(cut_along(name, is_any_of(name, {"down_proj"}) ? 2 : 1));
    } else if (is_any_of(name, {"q_norm", "k_norm"})) {
      rules.push_back(summed_along(name));  // works on this rank's heads
    } else if (is_any_of(name, {"q_proj"})) {
      rules.push_back(cut_along(name, 0, head));
    } else if (is_any_of(name, {"k_proj", "v_proj"})) {
      CutRule rule = cut_along(name, 0, head);
      if (keys == KeyHeads::kCutWithCopies) rule.axis = kHeads, rule.summed = {kCopies};
      rules.push_back(keys == KeyHeads::kWhole ? summed_along(name) : rule);
    } else if (is_any_of(name, {"gate_proj", "up_proj", "embed_tokens", "lm_head"})) {
      rules.push_back(cut_along(name, 0));
    } else if (is_any_of(name, {"o_proj", "down_proj"}) && !is_bias) {
      rules.push_back(cut_along(name, 1, is_any_of(name, {"o_proj"}) ? head : 1));
    } else if (options.sequence_parallel) {
      // Norms, routers, biases added to the stream: of this rank's tokens.
      rules.push_back(summed_along(name));
    }
  }
  return rules;
}

// Which key heads this rank's query heads read, where it has all of them.
void read_key_heads(ModelSeams& seams, const DecoderConfig& config, const Grid& grid, int place) {
  const Cut heads = even_cut(grid, kTensorAxis, 0, {config.heads});
  const auto& each = heads.rows[0];
  const auto first = std::accumulate(each.begin(), each.begin() + place, std::int64_t{0});
  const std::int64_t count = each[static_cast<std::size_t>(place)],
                     readers = config.heads / config.key_value_heads;
  seams.first_key_head = first / readers;
  for (std::int64_t head = first; head < first + count; ++head)
    seams.readers.push_back(head / readers - seams.first_key_head);
  seams.key_heads = seams.readers.back() + 1;
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
  ModelSeams seams = stream_seams(tp, options);
  const VocabularyShard inputs = vocabulary_shard(layout, "model.embed_tokens.weight");
  seams.embed = [leave = seams.leave, inputs](const at::Tensor& weight, const at::Tensor& tokens,
                                              std::int64_t pad) {
    return leave(embedding_part(weight, tokens, inputs, pad));
  };
  seams.vocabulary = config.tied_output ? inputs : vocabulary_shard(layout, "lm_head.weight");
  seams.whole_logits = [tp](const at::Tensor& columns) {
    const at::NoGradGuard no_grad;
    return Group(tp).all_gather_rows(columns.t().contiguous()).t();
  };
  if (key_heads_of(config, mesh.grid()) == KeyHeads::kWhole)
    read_key_heads(seams, config, mesh.grid(), mesh.place({kTensorAxis}));
  model.set_seams(std::move(seams));
  return layout;
}

std::int64_t tensor_traffic_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                                  std::int64_t bytes, bool smoothed_labels) {
  // An all-reduce and its dual, or a reduce-scatter and an all-gather each way: 2 (ranks - 1) of the buffer
  // for a seam's forward and backward; the embedding's, two of each block, those before them and before the
  // head.
  const std::int64_t seams = 2 * (2 * config.layers + 1), statistics = (smoothed_labels ? 4 : 3) * 8;
  return seams * 2 * (ranks - 1) * tokens * config.hidden * bytes + ranks * (ranks - 1) * tokens * statistics;
}

std::int64_t tensor_activation_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                                     const TensorParallelOptions& options, std::int64_t bytes) {
  const auto most = [ranks](std::int64_t number) { return split_rows(number, ranks)[0]; };
  const std::int64_t stream = options.sequence_parallel ? most(tokens) : tokens, heads = most(config.heads);
  const Grid grid = with_key_head_view(Grid({{kTensorAxis, ranks}}), config);
  const KeyHeads lie = key_heads_of(config, grid);
  const std::int64_t keys = lie == KeyHeads::kCut             ? most(config.key_value_heads)
                            : lie == KeyHeads::kCutWithCopies ? 1
                                                              : heads;
  const std::int64_t readers = config.heads / config.key_value_heads,  // query heads of each key head
      normed_keys = lie == KeyHeads::kWhole ? (heads + readers - 1) / readers : keys,
                     normed_heads = config.query_key_norm ? heads + normed_keys : 0;
  const std::int64_t kept = 2 * stream * config.hidden + 2 * tokens * config.hidden +
                            tokens * config.head_dim * (2 * heads + 2 * keys + normed_heads) +
                            3 * tokens * most(config.feed_forward);
  return kept * bytes + (2 * stream + tokens * (heads + normed_heads)) * std::max<std::int64_t>(bytes, 4);
}

}  // namespace isograd
