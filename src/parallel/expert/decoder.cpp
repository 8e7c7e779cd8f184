// The experts of a decoder, dealt to ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <memory>
#include <numeric>

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
auto dealt_experts(const Mesh& mesh, std::int64_t experts) {
  const auto dispatch = std::make_shared<ExpertDispatch>(mesh.along({kExpertAxis}, "experts"), experts);
  return [dispatch](const at::Tensor& copies, const std::vector<std::int64_t>& begin,
                    const ModelSeams::Experts& compute) {
    const Journey journey = dispatch->plan(begin);
    return dispatch->back(compute(dispatch->to_experts(copies, journey), journey.begin), journey);
  };
}

bool is_expert(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

}  // namespace

Layout::Named expert_placements(DecoderLM& model, const Grid& grid, Layout::Named others) {
  const int ranks = ranks_along_ep(grid);
  const std::int64_t experts = model.config().experts.count;
  if (ranks > 1 && ranks > experts)
    refuse("the axis ep", fmt::format("{} ranks for {} experts", ranks, experts),
           "an expert for each, or more", "Use fewer ranks along it");
  if (others.empty())
    for (const auto& [name, tensor] : model.named())
      others.emplace_back(name, placed(grid, tensor.sizes().vec()));
  for (auto& [name, placement] : others) {
    if (ranks == 1 || !is_expert(name)) continue;
    placement.cuts.push_back(even_cut(grid, kExpertAxis, 0, {experts}));
    placement = placed(grid, placement.whole_shape, placement.cuts, placement.stages,
                       without(placement.summed, kDataAxes));
  }
  return others;
}

Layout deal_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others) {
  Layout layout(mesh, expert_placements(model, mesh.grid(), std::move(others)));
  if (ranks_along_ep(mesh.grid()) == 1) return layout;
  const at::NoGradGuard no_grad;
  for (auto [name, tensor] : model.named()) {
    if (!is_expert(name)) continue;
    // Whatever else it is cut along: experts are the first dimension, of which the rank's follow one another.
    const std::vector<std::int64_t> dealt =
        split_rows(model.config().experts.count, mesh.size({kExpertAxis}));
    const auto place = mesh.place({kExpertAxis});
    const auto first = std::accumulate(dealt.begin(), dealt.begin() + place, std::int64_t{0});
    tensor.set_data(tensor.narrow(0, first, dealt[static_cast<std::size_t>(place)]).clone());
  }
  ModelSeams seams = model.seams();
  seams.experts = dealt_experts(mesh, model.config().experts.count);
  model.set_seams(std::move(seams));
  return layout;
}

}  // namespace isograd
