#include <numeric>

#include "isograd/model.hpp"
#include "parallel/tensor/model_seams.hpp"

namespace isograd {
namespace {

std::vector<CutRule> rules_of(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options) {
  std::vector<CutRule> rules;
  if (ranks_along_tp(grid) == 1) return rules;
  const std::int64_t head = model.config().width_of_head();
  for (const auto& [name, tensor] : model.named()) {
    const bool is_bias = name.ends_with(".bias");
    if (is_any_of(name, {"q_norm", "k_norm"}))
      rules.push_back(summed_along(name));  // works on this rank's heads
    else if (is_any_of(name, {"attention.q.", "attention.k.", "attention.v."}))
      rules.push_back(cut_along(name, 0, head));
    else if (is_any_of(name, {"feed_forward.in."}))
      rules.push_back(cut_along(name, 0));
    else if (is_any_of(name, {"attention.o."}) && !is_bias)
      rules.push_back(cut_along(name, 1, head));
    else if (is_any_of(name, {"feed_forward.out."}) && !is_bias)
      rules.push_back(cut_along(name, 1));
    else if (options.sequence_parallel)
      rules.push_back(summed_along(name));  // works on this rank's tokens: modulations and embeddings too
  }
  return rules;
}

}  // namespace

Layout::Named video_placements(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options) {
  return cut_placements(model.named(), grid, rules_of(model, grid, options));
}

Layout cut_video(VideoDiT& model, const Mesh& mesh, const TensorParallelOptions& options) {
  const Layout layout = cut(model.named(), mesh, rules_of(model, mesh.grid(), options));
  if (ranks_along_tp(mesh.grid()) == 1) return layout;
  const Group tp = tensor_group(mesh);
  ModelSeams seams = stream_seams(tp, options);
  if (options.sequence_parallel) {
    seams.own_tokens = [tp](std::int64_t tokens) {
      const Group::Rows rows = split_rows(tokens, tp.size());
      return std::pair(std::accumulate(rows.begin(), rows.begin() + tp.rank(), std::int64_t{0}),
                       rows[static_cast<std::size_t>(tp.rank())]);
    };
    seams.all_tokens = [tp](const at::Tensor& own, std::int64_t tokens) {
      return gather_tokens(tp, own, split_rows(tokens, tp.size()));
    };
  }
  model.set_seams(std::move(seams));
  return layout;
}

}  // namespace isograd
