// The experts of a decoder, dealt to ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <memory>
#include <numeric>

#include "base/refuse.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/model.hpp"
#include "parallel/expert/dispatch.hpp"

namespace isograd {
namespace {

int ranks_along_ep(const Grid& grid) {
  return grid.has(kExpertAxis) ? grid.size({kExpertAxis}) : 1;
}

bool is_expert(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

// Tokens travel to the ranks that have their experts, and back. `besides` is computed while they are on their
// way, or at the end.
std::vector<at::Tensor> sent_to_experts(ExpertDispatch& dispatch,
                                        const std::vector<ModelSeams::Copies>& parts,
                                        const ModelSeams::Experts& compute,
                                        const std::function<void()>& besides, bool meanwhile) {
  std::vector<std::vector<std::int64_t>> begins;
  for (const auto& part : parts) begins.push_back(part.begin);
  const std::vector<Journey> journeys = dispatch.plan(begins);
  std::vector<Exchange> there, back;
  for (std::size_t i = 0; i < parts.size(); ++i) there.push_back(dispatch.depart(parts[i].rows, journeys[i]));
  if (meanwhile) besides();
  // The next part's rows travel while those of this one are computed.
  for (std::size_t i = 0; i < parts.size(); ++i)
    back.push_back(dispatch.depart_back(compute(dispatch.arrive(there[i], journeys[i]), journeys[i].begin),
                                        journeys[i]));
  std::vector<at::Tensor> made;
  for (Exchange& exchange : back) made.push_back(exchange.finish());
  if (!meanwhile) besides();
  return made;
}

}  // namespace

ExpertOverlap expert_overlap_named(const std::string& name) {
  if (name == "shared") return ExpertOverlap::kShared;
  if (name == "halves") return ExpertOverlap::kHalves;
  if (name != "none")
    refuse("what is computed while tokens travel to experts", name, "none, shared, halves",
           "Choose one of them");
  return ExpertOverlap::kNone;
}

std::int64_t expert_traffic_bytes(const ExpertTrafficPlan& plan, int rank) {
  const auto ranks = static_cast<int>(plan.choices.size());
  const auto experts = static_cast<std::int64_t>(plan.choices.at(0).size());
  const auto own = split_rows(experts, ranks);
  std::int64_t rows = 0;
  for (int from = 0; from < ranks; ++from) {
    auto next = plan.choices[static_cast<std::size_t>(from)].begin();
    for (int to = 0; to < ranks; ++to) {
      const auto end = next + own[static_cast<std::size_t>(to)];
      if (from != to && (from == rank || to == rank)) rows += std::accumulate(next, end, std::int64_t{0});
      next = end;
    }
  }
  constexpr std::int64_t kCount = 8;  // bytes
  return (plan.forwards + 1) * rows * plan.hidden * plan.bytes +
         plan.forwards * plan.exchanges * (ranks - 1) * experts * kCount;
}

Layout::Named expert_placements(DecoderLM& model, const Grid& grid, Layout::Named others) {
  const int ranks = ranks_along_ep(grid);
  const std::int64_t experts = model.config().experts.count;
  if (ranks > 1 && ranks > experts)
    refuse("the axis ep", fmt::format("{} ranks for {} experts", ranks, experts),
           "an expert for each, or more", "Use fewer ranks along it");
  if (others.empty()) others = whole_placements(model.named(), grid);
  for (auto& [name, placement] : others) {
    if (ranks == 1 || !is_expert(name)) continue;
    placement.cuts.push_back(even_cut(grid, kExpertAxis, 0, {experts}));
    placement = placed(grid, placement.whole_shape, placement.cuts, placement.stages,
                       without(placement.summed, kDataAxes));
  }
  return others;
}

Layout deal_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others,
                    const ExpertParallelOptions& options) {
  check_same_routing(model, mesh, options);
  Layout layout(mesh, expert_placements(model, mesh.grid(), std::move(others)));
  if (ranks_along_ep(mesh.grid()) == 1) return layout;
  // The exchanges of backward lie beside the reductions that it launches: they have a group of their own.
  const auto dispatch =
      std::make_shared<ExpertDispatch>(mesh.along({kExpertAxis}, kExpertGroup), model.config().experts.count);
  const at::NoGradGuard no_grad;
  for (auto [name, tensor] : model.named())  // experts are the first dimension, whatever else is cut
    if (is_expert(name))
      tensor.set_data(tensor.narrow(0, dispatch->first_expert(), dispatch->own_experts()).clone());
  ModelSeams seams = model.seams();
  seams.expert_parts = options.overlap == ExpertOverlap::kHalves ? 2 : 1;
  seams.experts = [dispatch, meanwhile = options.overlap != ExpertOverlap::kNone](
                      const std::vector<ModelSeams::Copies>& parts, const ModelSeams::Experts& compute,
                      const std::function<void()>& besides) {
    return sent_to_experts(*dispatch, parts, compute, besides, meanwhile);
  };
  model.set_seams(std::move(seams));
  return layout;
}

}  // namespace isograd
