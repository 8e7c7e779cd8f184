#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "bench/bench.hpp"
#include "bench/exchange.hpp"
#include "bench/side_table.hpp"
#include "bench/step_case.hpp"
#include "bench/strategy.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

struct Routing {
  std::string name, step_case, text;
};
const std::vector<Routing> kRoutings = {
    {"even", "expert-even", "tokens go where an untrained router sends them"},
    {"uneven", "expert-uneven", "a quarter of the experts computes all tokens"},
    {"tiny", "expert-tiny", "to see that the comparison works"}};

std::vector<Side> sides_of(const std::filesystem::path& exchange, int ranks, const std::string& python) {
  if (ranks == 1)
    return {our_side(exchange, "stage-0", "isograd, one rank", 1),
            peer_side(exchange, python, "experts_step.py", "transformers", "transformers' Mixtral", 1)};
  return {
      our_side(exchange, "expert", find_strategy("expert").title, ranks),
      our_side(exchange, "stage-0", "isograd, all experts on each rank", ranks),
      peer_side(exchange, python, "experts_step.py", "ep", "PyTorch, all-to-all over Gloo, FSDP2", ranks)};
}

bool run_routing(const Routing& routing, int ranks, const BenchTogetherOptions& options,
                 nlohmann::ordered_json& records) {
  const StepCase& step_case = find_step_case(routing.step_case);
  const ExchangeFolder exchange;
  write_exchange(exchange.path(), step_case, ranks);
  const auto results =
      take_turns(sides_of(exchange.path(), ranks, options.python), exchange.path(), options.seconds);
  const std::string name = fmt::format("{}, {} rank{}", routing.name, ranks, ranks == 1 ? "" : "s");
  fmt::print("{}, {} tokens each: {}\n", name, step_case.tokens(), routing.text);
  return print_sides({.bench = "expert", .name = name, .ours = results.size() - 1, .peers = 1}, results,
                     records);
}

}  // namespace

std::vector<std::string> bench_expert_cases() {
  std::vector<std::string> names;
  for (const Routing& routing : kRoutings) names.push_back(routing.name);
  return names;
}

int bench_expert(const BenchTogetherOptions& options) {
  if (find_step_case(kRoutings[0].step_case).shape.experts.count % options.ranks != 0)
    throw ConfigError({.where = "isograd bench expert --ranks",
                       .found = std::to_string(options.ranks),
                       .expected = "2, 4 or 8: the PyTorch peer deals its 8 experts evenly",
                       .action = "Choose one of them"});
  fmt::print(
      "whole training steps of a mixture of 8 experts, 2 to a token, fp32, one thread a rank: median, "
      "quartile "
      "spread, and\nhow much faster than each other side (lowest .. highest of single rounds)\n");
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  for (const Routing& routing : kRoutings) {
    const bool asked =
        std::find(options.cases.begin(), options.cases.end(), routing.name) != options.cases.end();
    if (!asked && (!options.cases.empty() || routing.name == "tiny")) continue;
    for (int ranks : {1, options.ranks})
      comparable = run_routing(routing, ranks, options, records) && comparable;
  }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
