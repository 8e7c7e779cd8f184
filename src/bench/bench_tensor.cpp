#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "bench/bench.hpp"
#include "bench/exchange.hpp"
#include "bench/side_table.hpp"
#include "bench/step_case.hpp"
#include "bench/strategy.hpp"

namespace isograd {
namespace {

struct Size {
  std::string name, step_case;
};
const std::vector<Size> kSizes = {{"communication", "tensor-64"},
                                  {"middle", "tensor-512"},
                                  {"compute", "tensor-2048"},
                                  {"tiny", "tensor-tiny"}};

bool run_size(const Size& size, const BenchTogetherOptions& options, nlohmann::ordered_json& records) {
  const StepCase& step_case = find_step_case(size.step_case);
  const ExchangeFolder exchange;
  write_exchange(exchange.path(), step_case, /*ranks=*/1);
  const int ranks = options.ranks;
  const auto ours = [&](const std::string& strategy) {
    return our_side(exchange.path(), strategy, find_strategy(strategy).title, ranks);
  };
  const auto theirs = [&](const std::string& mode, const std::string& title, int processes) {
    return peer_side(exchange.path(), options.python, "llama_step.py", mode, title, processes);
  };
  const auto results = take_turns(
      {ours("tensor"), ours("tensor-whole"), our_side(exchange.path(), "stage-0", "isograd, one rank", 1),
       theirs("tp", "PyTorch tensor parallel over Gloo", ranks), theirs("eager", "one PyTorch process", 1)},
      exchange.path(), options.seconds);
  fmt::print("{}, {} ranks, one batch of {} tokens\n", size.name, ranks, step_case.tokens());
  return print_sides({.bench = "tensor", .name = size.name, .ours = 3, .peers = 2}, results, records);
}

}  // namespace

std::vector<std::string> bench_tensor_cases() {
  std::vector<std::string> names;
  for (const Size& size : kSizes) names.push_back(size.name);
  return names;
}

int bench_tensor(const BenchTogetherOptions& options) {
  fmt::print(
      "whole training steps of one model on one batch, fp32, one thread a rank: median, quartile spread, and "
      "how much\nfaster than each other side (lowest .. highest of single rounds)\n");
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  for (const Size& size : kSizes) {
    const bool asked =
        std::find(options.cases.begin(), options.cases.end(), size.name) != options.cases.end();
    if (asked || (options.cases.empty() && size.name != "tiny"))
      comparable = run_size(size, options, records) && comparable;
  }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
