// The bytes that each strategy keeps and sends: one table, read as numbers and as formulas.
#include <fmt/format.h>

#include <string>

#include "base/refuse.hpp"
#include "isograd/parameters.hpp"

namespace isograd {
namespace {

void check(const DataParallelPlan& plan) {
  const auto in = [](const char* what, std::int64_t found, std::int64_t least, std::int64_t most) {
    if (found < least || found > most)
      refuse("a data-parallel plan", fmt::format("{} {}", what, found),
             most == INT64_MAX ? fmt::format("{} or more", least) : fmt::format("{} to {}", least, most),
             "Change it");
  };
  in("stage", plan.stage, 0, 3);
  in("micro_batches", plan.micro_batches, 1, INT64_MAX);
  for (const DataParallelPlan::Elements& each : plan.elements) {
    in("numel", each.numel, 0, INT64_MAX);
    in("whole", each.whole, 0, each.numel);
    in("shards", each.shards, 1, INT64_MAX);
    in("replicas", each.replicas, 1, INT64_MAX);
  }
}

// A row of the table: what is kept in shards, and how often gradients and parameters travel one way in a
// step. Parameters that stay whole travel `whole` times less.
struct Row {
  bool shards_parameters, shards_gradients, shards_state;
  std::int64_t gradients, parameters, whole;
};

Row row_of(const DataParallelPlan& plan) {
  check(plan);
  const std::int64_t rounds = plan.micro_batches, reductions = plan.reduce_once ? 1 : rounds;
  const bool late = !plan.reduce_once;  // whole gradients are kept until the last micro-batch otherwise
  if (plan.share_parameters)
    return plan.stage < 2 ? Row{true, false, true, 1, 0, 0} : Row{true, late, true, reductions, 0, 0};
  switch (plan.stage) {
    case 0: return {false, false, false, 2, 0, 0};
    case 1: return {false, false, true, 1, 1, 0};
    case 2: return {false, late, true, reductions, 1, 0};
    default: return {true, late, true, reductions, 2 * rounds, rounds};
  }
}

// Bytes that a rank sends in a reduce-scatter or an all-gather of n bytes over `parts` ranks.
double one_way(double bytes, int parts) { return bytes * (parts - 1) / parts; }

std::string times(std::int64_t factor, const std::string& symbol) {
  return factor == 1 ? symbol : fmt::format("{}{}", factor, symbol);
}

// The formula of each kind of elements; `suffix` makes symbols of it: Ψ, Ψw, N or Ψe, Ψew, Ne.
template <class Formula>
std::string joined(const DataParallelPlan& plan, const Formula& formula) {
  std::string text;
  for (std::size_t i = 0; i < plan.elements.size(); ++i)
    if (i == 0 || plan.elements[i].numel > 0)
      text += (i == 0 ? "" : " + ") + formula(plan.elements[i], std::string(i == 0 ? "" : "e"));
  return text;
}

}  // namespace

PersistentBytes& PersistentBytes::operator+=(const PersistentBytes& more) {
  parameters += more.parameters, gradients += more.gradients;
  master += more.master, state += more.state;
  return *this;
}

TrafficBytes& TrafficBytes::operator+=(const TrafficBytes& more) {
  reduce += more.reduce, gather += more.gather, replicate += more.replicate;
  return *this;
}

PersistentBytes persistent_bytes(const DataParallelPlan& plan) {
  const Row row = row_of(plan);
  PersistentBytes sum;
  for (const DataParallelPlan::Elements& each : plan.elements) {
    // The largest shard. All are as large where the storage was padded.
    const std::int64_t shard = (each.numel + each.shards - 1) / each.shards;
    const std::int64_t states = row.shards_state ? shard : each.numel;
    sum += {.parameters = (row.shards_parameters ? shard : each.numel) * plan.bytes.parameter,
            .gradients = (row.shards_gradients ? shard : each.numel) * plan.bytes.gradient,
            .master = states * plan.bytes.master,
            .state = states * plan.bytes.state};
  }
  return sum;
}

TrafficBytes traffic_bytes(const DataParallelPlan& plan) {
  const Row row = row_of(plan);
  TrafficBytes sum;
  for (const DataParallelPlan::Elements& each : plan.elements) {
    const auto numel = static_cast<double>(each.numel);
    const double gradients = numel * plan.bytes.gradient, parameters = numel * plan.bytes.parameter;
    if (!row.shards_state) {
      sum += {.reduce = 2 * one_way(gradients, each.shards * each.replicas)};
      continue;
    }
    sum += {.reduce = static_cast<double>(row.gradients) * one_way(gradients, each.shards),
            .gather = one_way(static_cast<double>(row.parameters) * parameters -
                                  static_cast<double>(row.whole * each.whole * plan.bytes.parameter),
                              each.shards),
            .replicate = 2 * one_way(gradients, each.replicas) / each.shards};
  }
  return sum;
}

std::string persistent_formula(const DataParallelPlan& plan) {
  const Row row = row_of(plan);
  std::int64_t whole = 0, sharded = 0;
  (row.shards_parameters ? sharded : whole) += plan.bytes.parameter;
  (row.shards_gradients ? sharded : whole) += plan.bytes.gradient;
  (row.shards_state ? sharded : whole) += plan.bytes.optimizer();
  return joined(plan, [&](const DataParallelPlan::Elements&, const std::string& suffix) {
    if (sharded == 0) return times(whole, "Ψ" + suffix);
    const std::string shard = times(sharded, "Ψ" + suffix) + "/N" + suffix;
    return whole == 0 ? shard : times(whole, "Ψ" + suffix) + " + " + shard;
  });
}

std::string traffic_formula(const DataParallelPlan& plan) {
  const Row row = row_of(plan);
  return joined(plan, [&](const DataParallelPlan::Elements& each, const std::string& suffix) {
    const std::string numel = "Ψ" + suffix, shards = "N" + suffix;
    const std::string gradients = times(row.gradients * plan.bytes.gradient, numel);
    std::string parameters = times(row.parameters * plan.bytes.parameter, numel);
    if (row.whole > 0 && each.whole > 0)
      parameters += " - " + times(row.whole * plan.bytes.parameter, numel + "w");
    const auto others = [](const std::string& ranks) { return fmt::format("({0} - 1)/{0}", ranks); };
    if (!row.shards_state) return gradients + others(each.replicas > 1 ? shards + "R" : shards);
    std::string text =
        (row.parameters == 0 ? gradients : "(" + gradients + " + " + parameters + ")") + others(shards);
    if (each.replicas > 1)
      text += " + " + times(std::int64_t{2} * plan.bytes.gradient, numel) + "/" + shards + " (R - 1)/R";
    return text;
  });
}

}  // namespace isograd
