#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "bench/bench.hpp"
#include "bench/contestant.hpp"
#include "bench/exchange.hpp"
#include "bench/step_case.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;

struct Result {
  std::string name;
  std::string peer_name;
  double ours = 0, peer = 0;                  // tokens/s, of the median step
  double ours_spread = 0, peer_spread = 0;    // (third − first quartile) / median of a step's time
  double ratio = 0, lowest = 0, highest = 0;  // of the medians; of single rounds
  std::size_t rounds = 0;
  double first_loss = 0, first_difference = 0;  // relative
  double largest_difference = 0;                // over the steps of the first turn
  bool comparable = false;
};

double relative(double a, double b) {
  return std::abs(a - b) / std::max(std::abs(b), 1e-300);
}

Result run_case(const StepCase& step_case, int ranks, const BenchStepOptions& options) {
  const fs::path script = find_peer("llama_step.py");
  const ExchangeFolder exchange;
  write_exchange(exchange.path(), step_case, ranks);
  const std::string self = fs::read_symlink("/proc/self/exe").string();
  Contestant ours("ours", {self, "bench", "step-ours", exchange.path().string(), std::to_string(ranks)},
                  exchange.path(), ranks);
  Contestant peer(
      "peer", {find_python(options.python), script.string(), exchange.path().string(), std::to_string(ranks)},
      exchange.path(), ranks);

  Result result;
  result.name = fmt::format("{}, {} rank{}", step_case.name, ranks, ranks == 1 ? "" : "s");
  result.peer_name = ranks == 1 ? "PyTorch eager" : "PyTorch DDP over Gloo";
  // The first turn warms up and shows that both compute the same.
  const Turn our_first = ours.turn(), peer_first = peer.turn();
  const std::size_t steps = std::min(our_first.losses.size(), peer_first.losses.size());
  for (std::size_t i = 0; i < steps; ++i)
    result.largest_difference =
        std::fmax(result.largest_difference, relative(our_first.losses[i], peer_first.losses[i]));
  result.first_loss = our_first.losses.at(0);
  result.first_difference = relative(our_first.losses.at(0), peer_first.losses.at(0));
  result.comparable = result.first_difference <= 1e-4 && result.largest_difference <= 1e-3;

  std::vector<double> our_seconds, peer_seconds, ratios;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  constexpr std::size_t kFewest = 3;
  // A B, B A, A B, ...: neither side always comes first.
  while (result.rounds < kFewest || elapsed() < options.seconds) {
    const bool we_begin = result.rounds % 2 == 0;
    Turn our_turn, peer_turn;
    if (we_begin) our_turn = ours.turn();
    peer_turn = peer.turn();
    if (!we_begin) our_turn = ours.turn();
    our_seconds.insert(our_seconds.end(), our_turn.seconds.begin(), our_turn.seconds.end());
    peer_seconds.insert(peer_seconds.end(), peer_turn.seconds.begin(), peer_turn.seconds.end());
    ratios.push_back(quantile(peer_turn.seconds, 0.5) / quantile(our_turn.seconds, 0.5));
    ++result.rounds;
  }
  const double tokens = static_cast<double>(step_case.tokens() * ranks);
  const double our_median = quantile(our_seconds, 0.5), peer_median = quantile(peer_seconds, 0.5);
  result.ours = tokens / our_median;
  result.peer = tokens / peer_median;
  result.ours_spread = (quantile(our_seconds, 0.75) - quantile(our_seconds, 0.25)) / our_median;
  result.peer_spread = (quantile(peer_seconds, 0.75) - quantile(peer_seconds, 0.25)) / peer_median;
  result.ratio = peer_median / our_median;
  result.lowest = quantile(ratios, 0);
  result.highest = quantile(ratios, 1);
  return result;
}

void print(const Result& result) {
  fmt::print("{:<24} {:>10.0f} {:>6.1f}%  {:>10.0f} {:>6.1f}%   {:>5.2f}  {:.2f} .. {:.2f} in {:<3}  {}\n",
             result.name, result.ours, 100 * result.ours_spread, result.peer, 100 * result.peer_spread,
             result.ratio, result.lowest, result.highest, result.rounds, result.peer_name);
  if (!result.comparable)
    fmt::print(
        "  NOT COMPARABLE: first losses differ by {:.2g} (1e-4 allowed), those of the first turn by {:.2g} "
        "(1e-3 allowed)\n",
        result.first_difference, result.largest_difference);
  std::fflush(stdout);
}

}  // namespace

std::vector<std::string> bench_step_cases() {
  std::vector<std::string> names;
  for (const auto& step_case : step_cases()) names.push_back(step_case.name);
  return names;
}

int bench_step(const BenchStepOptions& options) {
  std::vector<StepCase> cases;
  for (const auto& name : options.cases) cases.push_back(find_step_case(name));
  if (cases.empty())
    std::copy_if(step_cases().begin(), step_cases().end(), std::back_inserter(cases),
                 [](const StepCase& step_case) { return step_case.standard; });
  fmt::print(
      "tokens/s of whole training steps, fp32, one thread a rank; median, quartile spread, turns taken\n"
      "{:<24} {:>10} {:>7}  {:>10} {:>7}   {:>5}  {}\n",
      "case", "ours", "spread", "peer", "spread", "ratio", "single rounds");
  std::fflush(stdout);
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  for (const auto& step_case : cases)
    for (int ranks : options.ranks) {
      const Result result = run_case(step_case, ranks, options);
      print(result);
      comparable = comparable && result.comparable;
      records.push_back({{"bench", "step"},
                         {"case", result.name},
                         {"ours", result.ours},
                         {"peer", result.peer},
                         {"peer_name", result.peer_name},
                         {"unit", "tokens/s"},
                         {"ratio", result.ratio}});
    }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
