#include "bench/side_table.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/exchange.hpp"

namespace isograd {

Side our_side(const std::filesystem::path& exchange, const std::string& strategy, const std::string& title,
              int ranks) {
  return {.name = strategy,
          .title = title,
          .command = {bench_self(), "bench", "step-ours", exchange.string(), std::to_string(ranks), strategy},
          .ranks = ranks};
}

Side peer_side(const std::filesystem::path& exchange, const std::string& python, const std::string& script,
               const std::string& mode, const std::string& title, int ranks) {
  return {.name = mode,
          .title = title,
          .command = {find_python(python), "-W", "ignore", find_peer(script).string(), exchange.string(),
                      std::to_string(ranks), mode, mode},
          .ranks = ranks};
}

bool print_sides(const SideTable& table, const std::vector<SideResult>& results,
                 nlohmann::ordered_json& records) {
  fmt::print("  {:<40} {:>9} {:>7}", "", "ms", "spread");
  for (std::size_t i = table.peers; i < results.size(); ++i)
    fmt::print("  {:>20}", "x " + results[i].side.name);
  fmt::print("\n");
  for (std::size_t i = 0; i < results.size(); ++i) {
    const SideResult& result = results[i];
    fmt::print("  {:<40} {:>9.2f} {:>6.1f}%", result.side.title, result.median() * 1e3,
               100 * result.spread());
    for (std::size_t other = table.peers; i < table.ours && other < results.size(); ++other) {
      if (other == i) {
        fmt::print("  {:>20}", "");
        continue;
      }
      const Ratio ratio = faster(result, results[other]);
      fmt::print("  {:>20}",
                 fmt::format("{:.2f} ({:.2f} .. {:.2f})", ratio.median, ratio.lowest, ratio.highest));
      records.push_back(bench_record(table.bench, fmt::format("{}, {}", table.name, result.side.title),
                                     result.median() * 1e3, results[other].median() * 1e3,
                                     results[other].side.title, "ms", ratio.median));
    }
    fmt::print("\n");
  }
  if (table.products > 0)
    fmt::print("  {:<40} {:>9.2f}  {:.0f} % of the step of {}\n", "a rank's products alone",
               table.products * 1e3, 100 * table.products / results.front().median(),
               results.front().side.title);
  bool comparable = true;
  for (const SideResult& result : results) {
    const Agreement found = compare(result.first, results.back().first);
    if (found.good()) continue;
    comparable = false;
    fmt::print("  NOT COMPARABLE: {}\n", found.text(result.side.title, results.back().side.title));
  }
  std::fflush(stdout);
  return comparable;
}

}  // namespace isograd
