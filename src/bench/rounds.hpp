// Any number of sides taking turns, and the figures that come of it.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/contestant.hpp"

namespace isograd {

struct Side {
  std::string name;   // of its pipes: a word
  std::string title;  // for people
  std::vector<std::string> command{};
  int ranks = 1;
};

struct SideResult {
  Side side;
  Turn first{};                   // warms up; what it computed is compared
  std::vector<double> seconds{};  // of every step after it
  std::vector<double> rounds{};   // the median of each turn after it

  std::vector<double> exposed{};  // as Turn's, after the first

  std::vector<std::vector<double>> parts{};  // Turn's, of each turn after the first

  std::string profile{};  // Turn's; empty where none was asked for

  double median() const;
  std::vector<double> median_parts() const;
  double spread() const;  // (third − first quartile) / median
};

// The first turn of each, then rounds until `seconds` are over, three at least: A B C, C B A, ... so that no
// side always comes first and a machine's slow moments fall on all. `on_device`: the first turns run at once,
// because torch.compile takes a minute in them, and a profiled turn comes last.
std::vector<SideResult> take_turns(const std::vector<Side>& sides, const std::filesystem::path& exchange,
                                   double seconds, bool on_device = false);

// How much faster ours is: of the medians, and the lowest and highest of single rounds.
struct Ratio {
  double median = 0, lowest = 0, highest = 0;
};
Ratio faster(const SideResult& ours, const SideResult& peer);

// What the first turn of a side must share with the reference's for the comparison to mean anything.
struct Agreement {
  double first_loss = 0, losses = 0, norm = 0;  // relative differences
  bool good() const { return first_loss <= 1e-4 && losses <= 1e-3 && norm <= 1e-3; }
  std::string text(const std::string& side, const std::string& reference) const;
};
Agreement compare(const Turn& side, const Turn& reference);

std::string bench_self();  // this program

double relative_difference(double a, double b);
// The largest over the elements that both have; infinite where one has none, or a NaN.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio", "processor"}
nlohmann::ordered_json bench_record(const std::string& bench, const std::string& name, double ours,
                                    double peer, const std::string& peer_name, const std::string& unit,
                                    double ratio);

}  // namespace isograd
