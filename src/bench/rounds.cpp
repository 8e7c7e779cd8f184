#include "bench/rounds.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/exchange.hpp"
#include "bench/processor.hpp"

namespace isograd {

double SideResult::median() const {
  return quantile(seconds, 0.5);
}
double SideResult::spread() const {
  return (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / quantile(seconds, 0.5);
}

std::vector<double> SideResult::median_parts() const {
  std::vector<double> medians;
  for (std::size_t part = 0; !parts.empty() && part < parts.front().size(); ++part) {
    std::vector<double> values;
    for (const auto& turn : parts) values.push_back(turn.at(part));
    medians.push_back(quantile(values, 0.5));
  }
  return medians;
}

std::vector<SideResult> take_turns(const std::vector<Side>& sides, const std::filesystem::path& exchange,
                                   double seconds, bool on_device) {
  std::vector<std::unique_ptr<Contestant>> contestants;
  std::vector<SideResult> results;
  for (const Side& side : sides) {
    contestants.push_back(std::make_unique<Contestant>(side.name, side.command, exchange, side.ranks));
    results.push_back({.side = side});
  }
  for (std::size_t i = 0; on_device && i < sides.size(); ++i) contestants[i]->start();
  for (std::size_t i = 0; i < sides.size(); ++i)
    results[i].first = on_device ? contestants[i]->answer() : contestants[i]->turn();

  constexpr int kFewest = 3;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (int round = 0; round < kFewest || elapsed() < seconds; ++round)
    for (std::size_t place = 0; place < sides.size(); ++place) {
      const std::size_t i = round % 2 == 0 ? place : sides.size() - 1 - place;
      const Turn turn = contestants[i]->turn();
      SideResult& result = results[i];
      result.seconds.insert(result.seconds.end(), turn.seconds.begin(), turn.seconds.end());
      result.exposed.insert(result.exposed.end(), turn.exposed.begin(), turn.exposed.end());
      if (!turn.parts.empty()) result.parts.push_back(turn.parts);
      result.rounds.push_back(quantile(turn.seconds, 0.5));
    }
  for (std::size_t i = 0; on_device && i < sides.size(); ++i) {
    contestants[i]->start(kProfiledTurn);
    results[i].profile = contestants[i]->answer().profile;
  }
  return results;
}

Ratio faster(const SideResult& ours, const SideResult& peer) {
  Ratio ratio{.median = peer.median() / ours.median(), .lowest = HUGE_VAL, .highest = 0};
  for (std::size_t i = 0; i < std::min(ours.rounds.size(), peer.rounds.size()); ++i) {
    ratio.lowest = std::min(ratio.lowest, peer.rounds[i] / ours.rounds[i]);
    ratio.highest = std::max(ratio.highest, peer.rounds[i] / ours.rounds[i]);
  }
  return ratio;
}

Agreement compare(const Turn& side, const Turn& reference) {
  const auto first = [](const std::vector<double>& values) {
    return values.empty() ? std::nan("") : values.front();
  };
  return {.first_loss = relative_difference(first(side.losses), first(reference.losses)),
          .losses = relative_difference(side.losses, reference.losses),
          .norm = relative_difference(first(side.norms), first(reference.norms))};
}

std::string Agreement::text(const std::string& side, const std::string& reference) const {
  return fmt::format(
      "{} differs from {}: first losses by {:.2g} (1e-4 allowed), those of the first turn by {:.2g} (1e-3 "
      "allowed), first norm by {:.2g} (1e-3 allowed)",
      side, reference, first_loss, losses, norm);
}

std::string bench_self() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

double relative_difference(double a, double b) {
  const double difference = std::abs(a - b) / std::max(std::abs(b), 1e-300);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || b.empty()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    largest = std::max(largest, relative_difference(a[i], b[i]));
  return largest;
}

nlohmann::ordered_json bench_record(const std::string& bench, const std::string& name, double ours,
                                    double peer, const std::string& peer_name, const std::string& unit,
                                    double ratio) {
  return {{"bench", bench},         {"case", name}, {"ours", ours},   {"peer", peer},
          {"peer_name", peer_name}, {"unit", unit}, {"ratio", ratio}, {"processor", processor_text()}};
}

}  // namespace isograd
