#include <fmt/format.h>

#include <string>
#include <vector>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/parameters.hpp"

namespace isograd {
namespace {

void check(const DataParallelPlan& plan) {
  const auto refuse = [](const char* what, std::int64_t found, const char* expected) {
    isograd::refuse("a data-parallel plan", fmt::format("{} {}", what, found), expected, "Change it");
  };
  if (plan.numel < 0) refuse("numel", plan.numel, "0 or more");
  if (plan.stage < 0 || plan.stage > 3) refuse("stage", plan.stage, "0, 1, 2 or 3");
  if (plan.shards < 1) refuse("shards", plan.shards, "1 or more");
  if (plan.replicas < 1) refuse("replicas", plan.replicas, "1 or more");
  if (plan.micro_batches < 1) refuse("micro_batches", plan.micro_batches, "1 or more");
  if (plan.whole < 0 || plan.whole > plan.numel) refuse("whole", plan.whole, "0 to numel");
  if (plan.dealt < 0 || plan.dealt > plan.numel) refuse("dealt", plan.dealt, "0 to numel");
  if (plan.dealt_whole < 0 || plan.dealt_whole > plan.whole)
    refuse("dealt_whole", plan.dealt_whole, "0 to whole");
  if (plan.dealt_copies < 1) refuse("dealt_copies", plan.dealt_copies, "1 or more");
}

bool shards_state(const DataParallelPlan& plan) {
  return plan.stage >= 1 || plan.share_parameters;
}
bool shards_gradients(const DataParallelPlan& plan) {
  return plan.stage >= 2 && !plan.reduce_once;
}
bool shards_parameters(const DataParallelPlan& plan) {
  return plan.stage == 3 || plan.share_parameters;
}

// The largest of `parts` parts of the elements: all of them are as large where the storage was padded.
std::int64_t part(std::int64_t numel, int parts) {
  return (numel + parts - 1) / parts;
}

// Bytes that a rank sends in a reduce-scatter or an all-gather of n bytes over `parts` ranks.
double one_way(double bytes, int parts) {
  return bytes * (parts - 1) / parts;
}

// Multiples of Ψ that travel one way: gradients and parameters. Parameters that stay whole travel less
// often.
struct Volumes {
  std::int64_t gradients = 0, parameters = 0, whole = 0;
};

Volumes volumes(const DataParallelPlan& plan) {
  const std::int64_t rounds = plan.micro_batches;
  const std::int64_t reductions = plan.reduce_once ? 1 : rounds;
  if (plan.share_parameters) return {plan.stage >= 2 ? reductions : 1, 0};
  switch (plan.stage) {
    case 0:
      return {2, 0};
    case 1:
      return {1, 1};
    case 2:
      return {reductions, 1};
    default:
      return {reductions, 2 * rounds, plan.whole > 0 ? rounds : 0};
  }
}

std::string times(std::int64_t factor, const std::string& symbol) {
  return factor == 1 ? symbol : fmt::format("{}{}", factor, symbol);
}

// Elements with the same number of sharers, and their symbol in formulas: the parameters that every rank
// copies and, with sharded experts, a rank's experts.
struct Part {
  DataParallelPlan plan;
  std::string elements, whole, shards;
};

std::vector<Part> parts_of(const DataParallelPlan& plan) {
  check(plan);
  DataParallelPlan rest = plan, dealt = plan;
  rest.numel -= plan.dealt;
  rest.whole -= plan.dealt_whole;
  dealt.numel = plan.dealt;
  dealt.whole = plan.dealt_whole;
  dealt.shards = plan.dealt_copies;
  dealt.replicas = 1;
  std::vector<Part> parts{{rest, "Ψ", "Ψw", "N"}};
  if (plan.dealt > 0) parts.push_back({dealt, "Ψe", "Ψew", "Ne"});
  return parts;
}

PersistentBytes bytes_of(const DataParallelPlan& plan) {
  const std::int64_t whole = plan.numel, shard = part(plan.numel, plan.shards);
  return {.parameters = (shards_parameters(plan) ? shard : whole) * plan.bytes.parameter,
          .gradients = (shards_gradients(plan) ? shard : whole) * plan.bytes.gradient,
          .master = (shards_state(plan) ? shard : whole) * plan.bytes.master,
          .state = (shards_state(plan) ? shard : whole) * plan.bytes.state};
}

TrafficBytes traffic_of(const DataParallelPlan& plan) {
  const Volumes volume = volumes(plan);
  const auto numel = static_cast<double>(plan.numel);
  const double gradients = numel * plan.bytes.gradient, parameters = numel * plan.bytes.parameter;
  if (!shards_state(plan)) return {.reduce = 2 * one_way(gradients, plan.shards * plan.replicas)};
  return {.reduce = static_cast<double>(volume.gradients) * one_way(gradients, plan.shards),
          .gather = one_way(static_cast<double>(volume.parameters) * parameters -
                                static_cast<double>(volume.whole * plan.whole * plan.bytes.parameter),
                            plan.shards),
          .replicate = 2 * one_way(gradients, plan.replicas) / plan.shards};
}

std::string bytes_formula(const Part& one) {
  std::int64_t whole = 0, sharded = 0;
  const auto add = [&](bool of_a_shard, int bytes) { (of_a_shard ? sharded : whole) += bytes; };
  add(shards_parameters(one.plan), one.plan.bytes.parameter);
  add(shards_gradients(one.plan), one.plan.bytes.gradient);
  add(shards_state(one.plan), one.plan.bytes.optimizer());
  if (sharded == 0) return times(whole, one.elements);
  const std::string shard = times(sharded, one.elements) + "/" + one.shards;
  return whole == 0 ? shard : times(whole, one.elements) + " + " + shard;
}

std::string sent_formula(const Part& one) {
  const DataParallelPlan& plan = one.plan;
  const Volumes volume = volumes(plan);
  const std::string gradients = times(volume.gradients * plan.bytes.gradient, one.elements);
  std::string parameters = times(volume.parameters * plan.bytes.parameter, one.elements);
  if (volume.whole > 0) parameters += " - " + times(volume.whole * plan.bytes.parameter, one.whole);
  const auto others = [](const std::string& ranks) { return fmt::format("({0} - 1)/{0}", ranks); };
  if (!shards_state(plan)) return gradients + others(plan.replicas > 1 ? one.shards + "R" : one.shards);
  std::string text = volume.parameters == 0 ? gradients : "(" + gradients + " + " + parameters + ")";
  text += others(one.shards);
  if (plan.replicas > 1)
    text +=
        " + " + times(std::int64_t{2} * plan.bytes.gradient, one.elements) + "/" + one.shards + " (R - 1)/R";
  return text;
}

std::string joined(const std::vector<Part>& parts, std::string (*formula)(const Part&)) {
  std::string text;
  for (const Part& one : parts) text += (text.empty() ? "" : " + ") + formula(one);
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
  PersistentBytes sum;
  for (const Part& one : parts_of(plan)) sum += bytes_of(one.plan);
  return sum;
}

TrafficBytes traffic_bytes(const DataParallelPlan& plan) {
  TrafficBytes sum;
  for (const Part& one : parts_of(plan)) sum += traffic_of(one.plan);
  return sum;
}

std::string persistent_formula(const DataParallelPlan& plan) {
  return joined(parts_of(plan), bytes_formula);
}

std::string traffic_formula(const DataParallelPlan& plan) {
  return joined(parts_of(plan), sent_formula);
}

}  // namespace isograd
