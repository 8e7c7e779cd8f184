// The recipe: batch, sequence, micro-batch, data ranks, accumulation; the tables of memory and traffic.
#include "plan/recipe.hpp"

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/parameters.hpp"

namespace isograd::planner {

BatchNumbers batch_numbers(const Work& work, std::int64_t micro_batch, std::int64_t data_ranks) {
  check(work);
  if (micro_batch < 1) refuse("the micro-batch", std::to_string(micro_batch), "at least 1", "Correct it");
  if (data_ranks < 1) refuse("data ranks", std::to_string(data_ranks), "at least 1", "Correct the number");
  const std::int64_t samples = work.samples();
  const auto most = static_cast<double>(micro_batch) * static_cast<double>(data_ranks);
  // Samples of a rank at a time; beyond all samples the quotient is 1 without the product, which may
  // overflow.
  const bool rich = most > static_cast<double>(samples);
  const std::int64_t at_once = rich ? samples : micro_batch * data_ranks;
  return {.samples = samples,
          .accumulation = (samples + at_once - 1) / at_once,
          .too_many_ranks = rich,
          .fewer_ranks = std::max<std::int64_t>(samples / micro_batch, 1),
          .larger_batch = most * static_cast<double>(work.sequence),
          .smaller_micro_batch = samples / data_ranks};
}

std::vector<ZeroRow> zero_table(std::int64_t ranks) {
  constexpr int kMostRanks = 1 << 24;
  if (ranks < 1 || ranks > kMostRanks)
    refuse("ranks", std::to_string(ranks), "1 to 16777216", "Correct the number");
  // As many parameters as ranks: a shard is one element, and nothing is rounded.
  DataParallelPlan plan;
  plan.elements = {{.numel = ranks, .shards = static_cast<int>(ranks)}};
  const auto each = static_cast<double>(ranks);
  std::vector<ZeroRow> rows;
  for (const Strategy strategy :
       {Strategy::kBucketed, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
    plan.stage = static_cast<int>(strategy);
    const auto kept = [&](int gradient) {
      DataParallelPlan other = plan;
      other.bytes.gradient = gradient;
      return static_cast<double>(persistent_bytes(other).total()) / each;
    };
    const double ends = ranks > 1 ? each / (each - 1) : 0;
    rows.push_back({.strategy = std::string(name_of(strategy)),
                    .kept_formula = persistent_formula(plan),
                    .sent_formula = traffic_formula(plan),
                    .kept = kept(2),
                    .kept_with_fp32_gradients = kept(2 + 4),
                    .isograd_kept = kept(4),
                    .sent = traffic_bytes(plan).total() / plan.bytes.gradient / each * ends});
  }
  return rows;
}

}  // namespace isograd::planner
