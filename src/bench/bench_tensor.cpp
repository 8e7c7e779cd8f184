#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "bench/bench.hpp"
#include "bench/exchange.hpp"
#include "bench/rounds.hpp"
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

// Ours first: cut tokens, whole ones, one rank; then PyTorch's ranks and its one process.
constexpr std::size_t kOurs = 3;

std::vector<Side> sides_of(const std::filesystem::path& exchange, const BenchTensorOptions& options) {
  const std::string python = find_python(options.python), peer = find_peer("llama_step.py").string(),
                    ranks = std::to_string(options.ranks);
  const auto ours = [&](const std::string& strategy, const std::string& title, int count) {
    return Side{
        .name = strategy,
        .title = title,
        .command = {bench_self(), "bench", "step-ours", exchange.string(), std::to_string(count), strategy},
        .ranks = count};
  };
  const auto theirs = [&](const std::string& name, const std::string& title, const std::string& mode,
                          int count) {
    return Side{
        .name = name,
        .title = title,
        .command = {python, "-W", "ignore", peer, exchange.string(), std::to_string(count), name, mode},
        .ranks = count};
  };
  return {ours("tensor", find_strategy("tensor").title, options.ranks),
          ours("tensor-whole", find_strategy("tensor-whole").title, options.ranks),
          ours("stage-0", "isograd, one rank", 1),
          theirs("tp", "PyTorch tensor parallel over Gloo", "tp", options.ranks),
          theirs("single", "one PyTorch process", "eager", 1)};
}

bool run_size(const Size& size, const BenchTensorOptions& options, nlohmann::ordered_json& records) {
  const StepCase& step_case = find_step_case(size.step_case);
  const ExchangeFolder exchange;
  write_exchange(exchange.path(), step_case, /*ranks=*/1);
  const auto results = take_turns(sides_of(exchange.path(), options), exchange.path(), options.seconds);
  fmt::print("{}, {} ranks, one batch of {} tokens\n  {:<34} {:>9} {:>7}", size.name, options.ranks,
             step_case.tokens(), "", "ms", "spread");
  for (std::size_t i = 2; i < results.size(); ++i) fmt::print("  {:>20}", "x " + results[i].side.name);
  fmt::print("\n");
  bool comparable = true;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const SideResult& result = results[i];
    fmt::print("  {:<34} {:>9.2f} {:>6.1f}%", result.side.title, result.median() * 1e3,
               100 * result.spread());
    for (std::size_t other = 2; i < kOurs && other < results.size(); ++other) {
      if (other == i) {
        fmt::print("  {:>20}", "");
        continue;
      }
      const Ratio ratio = faster(result, results[other]);
      fmt::print("  {:>20}",
                 fmt::format("{:.2f} ({:.2f} .. {:.2f})", ratio.median, ratio.lowest, ratio.highest));
      records.push_back(bench_record("tensor", fmt::format("{}, {}", size.name, result.side.title),
                                     result.median() * 1e3, results[other].median() * 1e3,
                                     results[other].side.title, "ms", ratio.median));
    }
    fmt::print("\n");
  }
  for (const SideResult& result : results) {
    const Agreement found = compare(result.first, results.back().first);
    if (found.good()) continue;
    comparable = false;
    fmt::print("  NOT COMPARABLE: {}\n", found.text(result.side.title, results.back().side.title));
  }
  std::fflush(stdout);
  return comparable;
}

}  // namespace

std::vector<std::string> bench_tensor_cases() {
  std::vector<std::string> names;
  for (const Size& size : kSizes) names.push_back(size.name);
  return names;
}

int bench_tensor(const BenchTensorOptions& options) {
  fmt::print(
      "whole training steps of one model on one batch, fp32, one thread a rank: median, quartile spread, and "
      "how "
      "much\nfaster than each other side (lowest .. highest of single rounds)\n");
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
