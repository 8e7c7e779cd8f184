// The recipe: batch, sequence, micro-batch, data ranks, accumulation; the tables of memory and traffic; and
// its answers to a cluster that is larger than the batch.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/refuse.hpp"
#include "isograd/parameters.hpp"
#include "plan/search.hpp"

namespace isograd::planner {

BatchNumbers batch_numbers(const Work& work, std::int64_t micro_batch, std::int64_t data_ranks) {
  check(work);
  if (micro_batch < 1) refuse("the micro-batch", std::to_string(micro_batch), "at least 1", "Correct it");
  if (data_ranks < 1) refuse("data ranks", std::to_string(data_ranks), "at least 1", "Correct the number");
  const std::int64_t samples = work.samples();
  const auto most = double(micro_batch) * double(data_ranks);
  // Samples of a rank at a time; beyond all samples the quotient is 1 without the product, which may
  // overflow.
  const bool rich = most > double(samples);
  const std::int64_t at_once = rich ? samples : micro_batch * data_ranks;
  return {.samples = samples,
          .accumulation = most_of(samples, at_once),
          .too_many_ranks = rich,
          .fewer_ranks = std::max<std::int64_t>(samples / micro_batch, 1),
          .larger_batch = most * double(work.sequence),
          .smaller_micro_batch = samples / data_ranks};
}

std::vector<ZeroRow> zero_table(std::int64_t ranks) {
  constexpr int kMostRanks = 1 << 24;
  if (ranks < 1 || ranks > kMostRanks)
    refuse("ranks", std::to_string(ranks), "1 to 16777216", "Correct the number");
  // As many parameters as ranks: a shard is one element, and nothing is rounded.
  DataParallelPlan plan;
  plan.elements = {{.numel = ranks, .shards = int(ranks)}};
  const auto each = double(ranks);
  std::vector<ZeroRow> rows;
  for (const Strategy strategy : kStrategies) {
    plan.stage = int(strategy);
    const auto kept = [&](int gradient) {
      DataParallelPlan other = plan;
      other.bytes.gradient = gradient;
      return double(persistent_bytes(other).total()) / each;
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

namespace {

Candidate with_micro_batch(const Problem& problem, Candidate candidate, std::int64_t size) {
  candidate.micro_batch = size;
  candidate.micro_batches = batch_numbers(problem.work, size, candidate.data_ranks()).accumulation;
  return candidate;
}

// The largest micro-batch, of powers of two, that fits; 0: not even one sequence.
std::int64_t largest_micro_batch(Models& models, const Candidate& candidate) {
  const Problem& problem = models.problem;
  std::int64_t largest = 0;
  for (std::int64_t size = 1; size <= problem.work.samples(); size *= 2) {
    if (models.memory.of(with_micro_batch(problem, candidate, size)).total() > problem.cluster.device.memory)
      break;
    largest = size;
  }
  return largest;
}

// The recipe's own layout: all ranks along the data but `tp`.
Candidate along_data(Strategy strategy, std::int64_t data_ranks, std::int32_t tp) {
  Candidate made{.ranks = std::int32_t(data_ranks) * tp, .tp = tp, .strategy = strategy};
  (strategy == Strategy::kBucketed ? made.replicas : made.shards) = std::int32_t(data_ranks);
  return made;
}

}  // namespace

std::vector<RecipeStep> recipe_of(Models& models, const Planned& best) {
  const Work& work = models.problem.work;
  const Candidate& c = best.candidate;
  const std::int64_t inner = std::int64_t{c.tp} * c.pp * c.cp_ring * c.cp_ulysses;
  const BatchNumbers numbers = batch_numbers(work, c.micro_batch, c.data_ranks());
  const double psi = models.problem.model.parameters(), of_rank = psi / (double(c.tp) * c.pp);
  std::vector<RecipeStep> steps;
  const auto add = [&](const char* name, std::string formula, std::string result, const char* origin) {
    steps.push_back({name, std::move(formula), std::move(result), origin});
  };
  add("global batch", "in tokens, from the literature or from runs",
      fmt::format("{:.0f} tokens", work.tokens), "given");
  add("sequence length", "S; longer than most documents gives little in pretraining",
      fmt::format("{} tokens", work.sequence), "given");
  add("samples", fmt::format("gbs = {:.0f} / {}", work.tokens, work.sequence),
      fmt::format("{} sequences", numbers.samples), "exact");
  add("largest micro-batch", "doubled until the memory of a device is exhausted",
      fmt::format("{} sequences with this layout; the plan takes {}", largest_micro_batch(models, c),
                  c.micro_batch),
      "predicted; --try measures it");
  add("data ranks", fmt::format("dp = {} / {}", c.ranks, inner), fmt::format("{}", c.data_ranks()), "exact");
  add("accumulation",
      fmt::format("grad_acc = {} / ({} x {})", numbers.samples, c.micro_batch, c.data_ranks()),
      fmt::format("{} {}", numbers.accumulation,
                  unit_of(static_cast<double>(numbers.accumulation), "micro-batches")),
      "exact");
  add("parameters alone", "2 bytes each in bfloat16",
      fmt::format("{:.4g} GB = {:.4g} GiB for {:.4g} parameters", 2 * psi / 1e9, gibibytes(2 * psi), psi),
      "exact");
  const std::int64_t sharing = c.data_ranks() * c.cp_ring * c.cp_ulysses;
  for (const ZeroRow& row : zero_table(sharing)) {
    add("memory", fmt::format("{}: {}, N = {}", row.strategy, row.kept_formula, sharing),
        fmt::format(
            "{:.3g} bytes a parameter ({:.3g} with fp32 gradients in addition; {:.3g} as isograd keeps them, "
            "{:.1f} GiB a rank)",
            row.kept, row.kept_with_fp32_gradients, row.isograd_kept, gibibytes(row.isograd_kept * of_rank)),
        "exact");
    add("traffic", fmt::format("{}: {}", row.strategy, row.sent_formula),
        fmt::format("{:.3g} elements a parameter", row.sent), "exact");
  }
  return steps;
}

std::vector<WayOut> ways_out_of(Models& models, const Options& options) {
  const Problem& problem = models.problem;
  const Work& work = problem.work;
  Options one = options;
  one.top = 1;
  // As few ranks along tp as possible, and the largest micro-batch of all strategies.
  const std::int64_t devices = problem.cluster.devices, host = problem.cluster.per_host;
  std::int64_t largest = 0, data_ranks = 0;
  std::int32_t tp = 1;
  for (; tp <= std::min(host, devices); tp *= 2) {
    data_ranks = devices / tp;
    for (const Strategy strategy : kStrategies)
      largest = std::max(largest, largest_micro_batch(models, along_data(strategy, data_ranks, tp)));
    if (largest > 0) break;
  }
  if (largest == 0) return {};
  const BatchNumbers numbers = batch_numbers(work, largest, data_ranks);
  if (!numbers.too_many_ranks) return {};

  std::vector<WayOut> ways;
  const auto add = [&](std::string name, const Problem& asked, std::int64_t most) {
    Models others(asked);
    Searched found = search(others, usable_devices(asked, most), one, false);
    if (!found.top.empty())
      ways.push_back({std::move(name), asked.work.tokens, std::move(found.top.front())});
  };
  Cluster fewer = problem.cluster;
  fewer.devices = numbers.fewer_ranks * tp;
  if (fewer.devices > host) fewer.devices -= fewer.devices % host;
  add(fmt::format("fewer devices: {} of {}", fewer.devices, devices), with(problem, fewer, work),
      fewer.devices);
  Work more = work;
  more.tokens = numbers.larger_batch;
  add(fmt::format("a larger batch: {:.0f} tokens in place of {:.0f}", more.tokens, work.tokens),
      with(problem, problem.cluster, more), devices);
  if (numbers.smaller_micro_batch == 0) {
    add(fmt::format("a sequence on several ranks, with tp, cp or pp: {} sequences for {} data ranks",
                    numbers.samples, data_ranks),
        problem, devices);
    return ways;
  }
  std::optional<Planned> fastest;
  for (const Strategy strategy : kStrategies) {
    const Candidate candidate =
        with_micro_batch(problem, along_data(strategy, data_ranks, tp), most_of(numbers.samples, data_ranks));
    const Planned made = planned(models, candidate);
    if (made.head_room >= 0 && (!fastest || made.seconds.value < fastest->seconds.value)) fastest = made;
  }
  if (fastest)
    ways.push_back(
        {fmt::format("smaller micro-batches: {} in place of {}", fastest->candidate.micro_batch, largest),
         work.tokens, *fastest});
  return ways;
}

}  // namespace isograd::planner
