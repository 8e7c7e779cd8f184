#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/contestant.hpp"
#include "bench/exchange.hpp"

namespace isograd {
namespace {

struct WrappingOutcome {
  double ours = 0, peer = 0, floor = 0;  // seconds of the median step
  double lowest = 0, highest = 0;
  int rounds = 0;
  bool equal = true;  // the losses
};

WrappingOutcome compare(const std::string& wrapper, const BenchWrappedOptions& options) {
  const ExchangeFolder exchange;
  const auto side = [&](const std::string& name, const std::string& backend) {
    return std::vector<std::string>{find_python(options.python),
                                    "-W",
                                    "ignore",
                                    find_peer("wrapped_step.py").string(),
                                    exchange.path().string(),
                                    std::to_string(options.ranks),
                                    name,
                                    backend,
                                    wrapper,
                                    options.size,
                                    find_module().string()};
  };
  Contestant ours("ours", side("ours", "isograd"), exchange.path(), options.ranks);
  Contestant peer("peer", side("peer", "gloo"), exchange.path(), options.ranks);
  Contestant floor("floor", side("floor", "fake"), exchange.path(), options.ranks);
  WrappingOutcome outcome;
  std::vector<double> our_seconds, peer_seconds, floor_seconds, ratios;
  const auto start = std::chrono::steady_clock::now();
  // The first round warms up. A B, B A, ...: neither side always comes first.
  for (int round = 0;; ++round) {
    Turn mine, theirs;
    if (round % 2 == 0) mine = ours.turn();
    theirs = peer.turn();
    if (round % 2 != 0) mine = ours.turn();
    const Turn without = floor.turn();
    // A sum of two is the same in any order; of more, the losses agree closely.
    for (std::size_t i = 0; i < std::min(mine.losses.size(), theirs.losses.size()); ++i) {
      const double allowed = options.ranks == 2 ? 0 : 1e-4 * std::abs(theirs.losses[i]);
      outcome.equal = outcome.equal && std::abs(mine.losses[i] - theirs.losses[i]) <= allowed;
    }
    if (round == 0) continue;
    our_seconds.insert(our_seconds.end(), mine.seconds.begin(), mine.seconds.end());
    peer_seconds.insert(peer_seconds.end(), theirs.seconds.begin(), theirs.seconds.end());
    floor_seconds.insert(floor_seconds.end(), without.seconds.begin(), without.seconds.end());
    ratios.push_back(quantile(theirs.seconds, 0.5) / quantile(mine.seconds, 0.5));
    outcome.rounds = round;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (round >= 3 && elapsed.count() > options.seconds) break;
  }
  outcome.ours = quantile(our_seconds, 0.5);
  outcome.peer = quantile(peer_seconds, 0.5);
  outcome.floor = quantile(floor_seconds, 0.5);
  outcome.lowest = quantile(ratios, 0);
  outcome.highest = quantile(ratios, 1);
  return outcome;
}

}  // namespace

int bench_wrapped(const BenchWrappedOptions& options) {
  require_packages("wrapped", options.python, {"torch"});
  find_module();
  fmt::print(
      "ms of a training step of PyTorch (median), by the name of the backend; one thread a rank\n"
      "(floor: a backend whose collectives do nothing; limit: the ratio that it would have)\n"
      "{:<36} {:>10} {:>10} {:>10}   {:>5}  {:>5}  {}\n",
      "case", "isograd", "gloo", "floor", "ratio", "limit", "single rounds");
  std::fflush(stdout);
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool equal = true;
  const auto wrappers = options.cases.empty() ? std::vector<std::string>{"ddp", "fsdp2"} : options.cases;
  Waiting waiting("case", std::ssize(wrappers), options.seconds);
  for (const std::string& wrapper : wrappers) {
    waiting.begin(wrapper);
    const WrappingOutcome outcome = compare(wrapper, options);
    waiting.end();
    const std::string name = fmt::format("{}, {}, {} ranks", wrapper, options.size, options.ranks);
    const double ratio = outcome.peer / outcome.ours;
    fmt::print("{:<36} {:>10.1f} {:>10.1f} {:>10.1f}   {:>5.2f}  {:>5.2f}  {:.2f} .. {:.2f} in {}\n", name,
               outcome.ours * 1e3, outcome.peer * 1e3, outcome.floor * 1e3, ratio,
               outcome.peer / outcome.floor, outcome.lowest, outcome.highest, outcome.rounds);
    if (!outcome.equal) fmt::print("  NOT COMPARABLE: the losses differ\n");
    std::fflush(stdout);
    equal = equal && outcome.equal;
    records.push_back({{"bench", "wrapped"},
                       {"case", name},
                       {"ours", outcome.ours * 1e3},
                       {"peer", outcome.peer * 1e3},
                       {"peer_name", "Gloo"},
                       {"unit", "ms"},
                       {"ratio", ratio},
                       {"floor", outcome.floor * 1e3}});
  }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return equal ? 0 : 1;
}

}  // namespace isograd
