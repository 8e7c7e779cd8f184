// Ranks that send one another tokens choose experts by the same rules.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/model.hpp"

namespace isograd {
namespace {

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

}  // namespace isograd
