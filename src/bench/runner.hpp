// The parts of all benchmarks: turns, statistics, agreement of the sides, records, and the exchange folder.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/python.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/contestant.hpp"

namespace isograd {

// One run of a verb.
struct Bench {
  std::string name;
  const BenchOptions& options;
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;

  // Adds {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio", "processor"}; a ratio above 1: ours
  // is better.
  nlohmann::ordered_json& record(const std::string& of, double ours, double peer,
                                 const std::string& peer_name, const std::string& unit, double ratio);
  // As record(), for seconds or bytes, which are better when they are fewer.
  void record_less(const std::string& of, double ours, double peer, const std::string& peer_name,
                   const std::string& unit) {
    record(of, ours, peer, peer_name, unit, peer / ours);
  }
  void refuse_comparison(const std::string& why);  // prints NOT COMPARABLE

  // Progress, in parts that take `seconds` each.
  void expect(std::ptrdiff_t parts, double seconds, const char* part = "case") {
    waiting_.emplace(part, parts, seconds);
  }
  void begin(const std::string& part) { waiting_->begin(part); }
  void end() { waiting_->end(); }

  std::optional<Waiting> waiting_{};
};

// The cases that were asked for, or the standard ones. A Case has a name and says whether it is `standard`.
template <typename Case>
std::vector<Case> chosen(const std::vector<Case>& all, const std::vector<std::string>& names) {
  std::vector<Case> cases;
  std::ranges::copy_if(all, std::back_inserter(cases), [&](const Case& one) {
    return names.empty() ? one.standard : std::ranges::count(names, one.name) > 0;
  });
  return cases;
}
template <typename Case>
std::vector<std::string> names_of(const std::vector<Case>& all) {
  std::vector<std::string> names;
  for (const Case& one : all) names.push_back(one.name);
  return names;
}
std::string ranks_text(int ranks);  // "1 rank", "2 ranks"

inline constexpr double kMiB = 1 << 20;

double quantile(std::vector<double> values, double q);
inline double median(const std::vector<double>& values) {
  return quantile(values, 0.5);
}
double spread(const std::vector<double>& values);  // (third − first quartile) / median; 0 for no values
double seconds_of(const std::function<void()>& work);
// Growth of this process's resident set at its peak. ConfigError on behalf of `bench` without Linux's account
// of it.
double peak_growth(const std::string& bench, const std::function<void()>& work);
double relative_difference(double a, double b);  // infinite for a NaN
// The largest of any element; infinite for lists of different lengths and for empty ones.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// The order of turns in a round: A B C, C B A, B C A, A C B, ... No side always comes first or last, so that
// a machine's slow moments fall on all.
std::vector<std::size_t> turn_order(std::size_t round, std::size_t sides);
// Rounds of one turn of each side, as long as more(number of rounds) says.
void by_turns(std::size_t sides, const std::function<bool(std::size_t round)>& more,
              const std::function<void(std::size_t side)>& turn);
// True until that many seconds are over from now on, and for the first `fewest` rounds.
std::function<bool(std::size_t)> until(double seconds, std::size_t fewest = 3);

// A folder below the temporary folder, removed with everything in it.
class ExchangeFolder {
 public:
  ExchangeFolder();
  ~ExchangeFolder();
  ExchangeFolder(const ExchangeFolder&) = delete;
  ExchangeFolder& operator=(const ExchangeFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};
void write_case(const std::filesystem::path& exchange, const nlohmann::ordered_json& description);
nlohmann::json read_case(const std::filesystem::path& exchange);

// ConfigError unless the peers' Python has these packages, with the command that installs them.
void require_packages(const std::string& bench, const std::string& wish,
                      const std::vector<std::string>& packages);
std::string find_peer(const std::string& script);  // of bench/peers; ConfigError when the source tree is gone
std::string find_module();  // the folder of isograd_comm.so; ConfigError where it was not built
std::string bench_self();   // this program

// Processes that take turns. `starts` EXCHANGE RANKS NAME `more`... starts them.
struct Side {
  std::string name;   // of its pipes: a word
  std::string title;  // human-readable
  int ranks = 1;
  std::vector<std::string> starts{}, more{};
  bool other_tokens = false;  // one process that computes what one of several ranks does: it has other losses
  bool is_ours() const { return starts.front() == bench_self(); }
};
Side our_side(const std::string& verb, const std::string& name, const std::string& title, int ranks);
Side peer_side(const std::string& python, const std::string& script, const std::string& name,
               const std::string& title, int ranks, std::vector<std::string> more = {});

std::unique_ptr<Contestant> start(const Side& side, const std::filesystem::path& exchange);

struct SideResult {
  Side side;
  Turn first{};                             // warms up; what it computed is compared
  std::vector<double> seconds{}, losses{};  // of every step after it
  std::vector<double> rounds{};             // the median of each turn after it
  std::vector<double> exposed{};            // as Turn's, after the first
  std::vector<std::vector<double>> parts{};
  std::string profile{};  // Turn's; empty where none was asked for

  double median() const { return quantile(seconds, 0.5); }
  std::vector<double> median_parts() const;
};

// The first turn of each, then rounds until `seconds` are over. `on_device`: the first turns run at once,
// because torch.compile takes a minute in them, and a profiled turn comes last.
std::vector<SideResult> take_turns(const std::vector<Side>& sides, const std::filesystem::path& exchange,
                                   double seconds, bool on_device = false);

// How many times as fast ours is: by the medians, and the lowest and highest of single rounds.
struct Ratio {
  double median = 0, lowest = 0, highest = 0;
};
Ratio faster(const SideResult& ours, const SideResult& peer);

// By how much the first turns of two sides differ, or may differ for their times to mean anything.
struct Agreement {
  double first_loss = 1e-4, losses = 1e-3, norm = 1e-3;
};
// Empty where they agree.
std::string disagreement(const SideResult& side, const SideResult& reference, const Agreement& allowed = {});

}  // namespace isograd
