// The experts of a decoder, assigned to ranks along ep.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <memory>
#include <numeric>

#include "base/refuse.hpp"
#include "isograd/expert_parallel.hpp"
#include "model/hooks.hpp"
#include "parallel/expert/dispatch.hpp"

namespace isograd {
namespace {

int ranks_along_ep(const Grid& grid) { return grid.has(kExpertAxis) ? grid.size({kExpertAxis}) : 1; }

bool is_expert(const std::string& name) { return name.find(".experts.") != std::string::npos; }

// Tokens go to the ranks that have their experts, and back. `rest` is computed while they travel, or at the
// end.
std::vector<at::Tensor> dispatched(const ExpertDispatch& dispatch,
                                   const std::vector<ExpertHooks::Copies>& parts,
                                   const ExpertHooks::Compute& compute, const std::function<void()>& rest,
                                   bool overlaps) {
  std::vector<std::vector<std::int64_t>> begins;
  for (const auto& part : parts) begins.push_back(part.begin);
  const std::vector<DispatchPlan> plans = dispatch.plan(begins);
  std::vector<Exchange> there, back;
  for (std::size_t i = 0; i < parts.size(); ++i)
    there.push_back(dispatch.start_dispatch(parts[i].rows, plans[i]));
  if (overlaps) rest();
  // The next part's rows travel while those of this one are computed.
  for (std::size_t i = 0; i < parts.size(); ++i)
    back.push_back(dispatch.start_combine(
        compute(dispatch.finish_dispatch(there[i], plans[i]), plans[i].begin), plans[i]));
  std::vector<at::Tensor> outputs;
  for (Exchange& exchange : back) outputs.push_back(exchange.finish());
  if (!overlaps) rest();
  return outputs;
}

using Numbers = std::vector<std::pair<const char*, double>>;

Numbers rules_of(const ExpertsShape& experts, ExpertOverlap overlap) {
  const auto number = [](auto value) { return static_cast<double>(value); };
  double dense = 0;
  for (const std::int64_t layer : experts.dense_layers) dense = 31 * dense + number(layer + 1);
  return {{"model.experts", number(experts.count)},
          {"model.experts_per_token", number(experts.per_token)},
          {"model.expert_feed_forward", number(experts.feed_forward)},
          {"model.normalise_experts", number(experts.normalise)},
          {"model.shared_expert_feed_forward", number(experts.shared_feed_forward)},
          {"sigmoid routers", number(experts.sigmoid)},
          {"model.expert_groups", number(experts.groups)},
          {"model.expert_groups_per_token", number(experts.groups_per_token)},
          {"model.expert_scale", experts.scale},
          {"dense layers, their number", number(experts.dense_layers.size())},
          {"dense layers, a checksum", dense},
          {"parallel.expert_overlap, of none, shared, halves that of index", number(overlap)}};
}

}  // namespace

void check_same_routing(const DecoderLM& model, const Mesh& mesh, const ExpertParallelOptions& options) {
  Group all = mesh.all();
  if (all.size() == 1) return;
  const Numbers own = rules_of(model.config().experts, options.overlap);
  at::Tensor numbers = at::empty({static_cast<std::int64_t>(own.size())}, at::kDouble);
  auto* next = numbers.mutable_data_ptr<double>();
  for (const auto& [name, value] : own) *next++ = value;
  const at::Tensor gathered = all.all_gather(numbers);  // [ranks, rules]
  const auto found = gathered.accessor<double, 2>();
  for (std::size_t i = 0; i < own.size(); ++i)
    for (int rank = 1; rank < all.size(); ++rank) {
      const double here = found[rank][static_cast<std::int64_t>(i)],
                   first = found[0][static_cast<std::int64_t>(i)];
      if (here != first)
        refuse("the rules by which ranks send tokens to experts",
               fmt::format("{} {} on rank {}, {} on rank 0", own[i].first, here, rank, first),
               "the same on all ranks", "Start every rank with one configuration");
    }
}

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
           "at least one expert for each", "Use fewer ranks along it");
  if (others.empty()) others = whole_placements(model.named(), grid);
  for (auto& [name, placement] : others) {
    if (ranks == 1 || !is_expert(name)) continue;
    placement.cuts.push_back(even_cut(grid, kExpertAxis, 0, {experts}));
    placement = placed(grid, placement.whole_shape, placement.cuts, placement.stages,
                       without(placement.summed, kDataAxes));
  }
  return others;
}

Layout shard_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others,
                     const ExpertParallelOptions& options) {
  check_same_routing(model, mesh, options);
  Layout layout(mesh, expert_placements(model, mesh.grid(), std::move(others)));
  if (ranks_along_ep(mesh.grid()) == 1) return layout;
  // Exchanges in backward are not ordered with the reductions that it launches: they have their own group.
  const auto dispatch =
      std::make_shared<ExpertDispatch>(mesh.along({kExpertAxis}, kExpertGroup), model.config().experts.count);
  const at::NoGradGuard no_grad;
  for (auto [name, tensor] : model.named())  // experts are the first dimension, whatever else is cut
    if (is_expert(name))
      tensor.set_data(tensor.narrow(0, dispatch->first_expert(), dispatch->own_experts()).clone());
  ExpertHooks& hooks = model.hooks().experts;
  hooks.parts = options.overlap == ExpertOverlap::kHalves ? 2 : 1;
  hooks.dispatch = [dispatch, overlaps = options.overlap != ExpertOverlap::kNone](
                       const std::vector<ExpertHooks::Copies>& parts, const ExpertHooks::Compute& compute,
                       const std::function<void()>& rest) {
    return dispatched(*dispatch, parts, compute, rest, overlaps);
  };
  return layout;
}

}  // namespace isograd
