// The experts of a decoder, dealt to ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <memory>

#include "base/refuse.hpp"
#include "isograd/decoder_lm.hpp"
#include "isograd/expert_parallel.hpp"
#include "parallel/expert/dispatch.hpp"

namespace isograd {
namespace {

int ranks_along_ep(const Grid& grid) {
  return grid.has(kExpertAxis) ? grid.size({kExpertAxis}) : 1;
}

// Tokens travel to the ranks that have their experts, and back. The exchanges of backward lie beside the
// reductions that it launches: they have a group of their own.
ModelSeams expert_seams(const Mesh& mesh, std::int64_t experts) {
  const auto dispatch = std::make_shared<ExpertDispatch>(mesh.along({kExpertAxis}, "experts"), experts);
  return {.experts = [dispatch](const at::Tensor& copies, const std::vector<std::int64_t>& begin,
                                const ModelSeams::Experts& compute) {
    const Journey journey = dispatch->plan(begin);
    return dispatch->back(compute(dispatch->to_experts(copies, journey), journey.begin), journey);
  }};
}

}  // namespace

Layout::Named expert_placements(DecoderLM& model, const Grid& grid) {
  const int ranks = ranks_along_ep(grid);
  const std::int64_t experts = model.config().experts.count;
  if (ranks > 1 && ranks > experts)
    refuse("the axis ep", fmt::format("{} ranks for {} experts", ranks, experts),
           "an expert for each, or more", "Use fewer ranks along it");
  Layout::Named placements;
  for (const auto& [name, tensor] : model.named()) {
    std::vector<Cut> cuts;
    if (ranks > 1 && name.find(".experts.") != std::string::npos)
      cuts.push_back(even_cut(grid, kExpertAxis, 0, {experts}));
    placements.emplace_back(name, placed(grid, tensor.sizes().vec(), cuts));
  }
  return placements;
}

Layout deal_experts(DecoderLM& model, const Mesh& mesh) {
  Layout layout(mesh, expert_placements(model, mesh.grid()));
  if (ranks_along_ep(mesh.grid()) == 1) return layout;
  const at::NoGradGuard no_grad;
  for (auto [name, tensor] : model.named())
    if (tensor.sizes() != at::IntArrayRef(layout.parameter(name).local_shape))
      tensor.set_data(layout.local(name, tensor));
  model.set_seams(expert_seams(mesh, model.config().experts.count));
  return layout;
}

}  // namespace isograd
