#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/cases/optim_case.hpp"
#include "bench/cases/strategy.hpp"
#include "bench/exchange.hpp"
#include "bench/rounds.hpp"

namespace isograd {
namespace {

const char* const kPeerName = "PyTorch clip_grad_norm_ + fused AdamW";

// Bytes of a parameter (read or written, 4 at a time) that all ranks move together.
double bytes_per_parameter(const std::string& side, int ranks) {
  constexpr double kNorm = 4, kUpdate = 28;  // gradient; gradient, and parameter, m, v to and fro
  const double w = ranks;
  if (side == "triad") return 12;
  if (side == "peer") return w * (kNorm + 8 + kUpdate);  // clip_grad_norm_ writes the clipped gradient back
  if (ranks == 1) return kNorm + kUpdate;
  const double sum = 4 * w;  // every rank's gradient is read once
  if (side == "stage-0") return sum + 4 * w + kNorm + w * kUpdate;
  // Squares are taken of what was just summed, in the cache.
  if (side == "shared") return sum + 4 + kUpdate;
  return sum + 4 + kUpdate + 8 * (w - 1);  // ZeRO-1: updated parameters are copied
}

struct Difference {
  double found = 0, allowed = 0;
  bool comparable() const { return found <= allowed; }
};

Difference compare_parameters(const std::filesystem::path& exchange, const SideResult& ours,
                              const SideResult& peer) {
  const MappedFile a(exchange / (ours.side.name + ".parameters")), b(exchange / "peer.parameters");
  Difference difference;
  const auto norms = relative_difference(ours.first.norms, peer.first.norms);
  if (a.size() != b.size()) return {HUGE_VAL, 0};
  const auto* x = reinterpret_cast<const float*>(a.data());
  const auto* y = reinterpret_cast<const float*>(b.data());
  const std::size_t count = a.size() / sizeof(float);
  double largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::fmax(largest, std::fabs(y[i]));
    const double apart = std::fabs(static_cast<double>(x[i]) - y[i]);
    difference.found = std::isnan(apart) ? HUGE_VAL : std::max(difference.found, apart);
  }
  // A norm in fp32 is off by √count roundings (they are as often up as down); more is another norm.
  difference.allowed = norms <= std::sqrt(static_cast<double>(count)) * 0x1p-24
                           ? allowed_difference(ours.first.norms, peer.first.norms, largest)
                           : 0;
  return difference;
}

std::vector<Side> make_sides(const std::filesystem::path& exchange, int ranks,
                             const BenchOptimOptions& options) {
  std::vector<Side> sides;
  const auto ours = [&](const std::string& name, const std::string& title) {
    sides.push_back(
        {.name = name,
         .title = title,
         .command = {bench_self(), "bench", "optim-ours", exchange.string(), std::to_string(ranks), name},
         .ranks = ranks});
  };
  if (ranks > 1)
    for (const char* name : {"shared", "zero-1", "stage-0"}) ours(name, find_strategy(name).title);
  else
    ours("stage-0", "one rank");
  sides.push_back(
      {.name = "peer",
       .title = kPeerName,
       .command = {find_python(options.python), "-W", "ignore", find_peer("optim_step.py").string(),
                   exchange.string(), std::to_string(ranks), "peer"},
       .ranks = ranks});
  ours("triad", "triad a = b + s c");
  return sides;
}

bool run_case(const OptimCase& of, int ranks, const BenchOptimOptions& options, Waiting& waiting,
              nlohmann::ordered_json& records) {
  waiting.begin(fmt::format("{}, {} rank{}", of.name, ranks, ranks == 1 ? "" : "s"));
  const ExchangeFolder exchange;
  write_optim_exchange(exchange.path(), of, ranks);
  const auto results =
      take_turns(make_sides(exchange.path(), ranks, options), exchange.path(), options.seconds);
  waiting.end();
  const auto find = [&](const std::string& name) -> const SideResult& {
    return *std::find_if(results.begin(), results.end(), [&](auto& each) { return each.side.name == name; });
  };
  const SideResult& peer = find("peer");
  const auto gigabytes = [&](const SideResult& result) {
    return bytes_per_parameter(result.side.name, ranks) * static_cast<double>(of.numel()) / result.median() /
           1e9;
  };
  fmt::print("{}, {} rank{}, {:.1f} M parameters\n", of.name, ranks, ranks == 1 ? "" : "s",
             static_cast<double>(of.numel()) / 1e6);
  bool comparable = true;
  for (const SideResult& result : results) {
    fmt::print("  {:<40} {:>8.2f} {:>6.1f}% {:>8.1f}", result.side.title, result.median() * 1e3,
               100 * result.spread(), gigabytes(result));
    if (&result == &peer || result.side.name == "triad") {
      fmt::print("\n");
      continue;
    }
    const Ratio ratio = faster(result, peer);
    fmt::print("   {:>5.2f}  {:.2f} .. {:.2f} in {}\n", ratio.median, ratio.lowest, ratio.highest,
               result.rounds.size());
    const auto parts = result.median_parts();
    fmt::print("    sum {:.2f}, norm {:.2f}, update {:.2f}, publication {:.2f}\n", parts.at(0) * 1e3,
               parts.at(1) * 1e3, parts.at(2) * 1e3, parts.at(3) * 1e3);
    const Difference difference = compare_parameters(exchange.path(), result, peer);
    if (!difference.comparable()) {
      comparable = false;
      fmt::print("  NOT COMPARABLE: parameters differ by {:.2g}, {:.2g} allowed; norms by {:.2g}\n",
                 difference.found, difference.allowed,
                 relative_difference(result.first.norms, peer.first.norms));
    }
    const std::string name =
        fmt::format("{}, {} rank{}, {}", of.name, ranks, ranks == 1 ? "" : "s", result.side.title);
    records.push_back(bench_record("optim", name, result.median() * 1e3, peer.median() * 1e3, kPeerName, "ms",
                                   ratio.median));
    const SideResult& memory = find("triad");
    records.push_back(bench_record("optim", name, gigabytes(result), gigabytes(memory), "triad", "GB/s",
                                   gigabytes(result) / gigabytes(memory)));
  }
  std::fflush(stdout);
  return comparable;
}

}  // namespace

std::vector<std::string> bench_optim_cases() {
  std::vector<std::string> names;
  for (const auto& of : optim_cases()) names.push_back(of.name);
  return names;
}

int bench_optim(const BenchOptimOptions& options) {
  std::vector<OptimCase> cases;
  for (const auto& name : options.cases) cases.push_back(find_optim_case(name));
  if (cases.empty())
    std::copy_if(optim_cases().begin(), optim_cases().end(), std::back_inserter(cases),
                 [](const OptimCase& of) { return of.standard; });
  require_packages("optim", options.python, {"torch"});
  fmt::print(
      "ms from gradients to updated parameters, fp32, one thread a rank; median, quartile spread, bytes that "
      "all\n"
      "ranks read and write by that time, and how much faster than PyTorch, whose processes sum nothing\n"
      "  {:<40} {:>8} {:>7} {:>8}   {:>5}  {}\n",
      "", "ms", "spread", "GB/s", "ratio", "single rounds");
  std::fflush(stdout);
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  Waiting waiting("case", std::ssize(cases) * std::ssize(options.ranks), options.seconds);
  for (const auto& of : cases)
    for (int ranks : options.ranks) comparable = run_case(of, ranks, options, waiting, records) && comparable;
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
