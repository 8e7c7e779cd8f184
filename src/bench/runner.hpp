// The parts that all benchmarks share: sides that take turns, statistics, agreement of the sides, records and
// tables.
#pragma once

#include <fmt/format.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/paths.hpp"
#include "base/python.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "report/report.hpp"

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
  void say(const std::string& text);               // prints and flushes it
  void say(TextRows rows) { say(text_table(std::move(rows), {.indent = 2})); }

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
std::string ranks_text(int ranks);                // "1 rank", "2 ranks"
std::string fixed(double value, int digits = 2);  // with that many digits behind the point

inline constexpr double kMiB = 1 << 20;

double quantile(std::vector<double> values, double q);
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }
// (third − first quartile) / median, "2.3%"; of no values 0.
std::string spread(const std::vector<double>& values);
double seconds_of(const std::function<void()>& work);
// Growth of this process's resident set at its peak. ConfigError on behalf of `bench` without Linux's account
// of it.
double peak_growth(const std::string& bench, const std::function<void()>& work);
double relative_difference(double a, double b);  // infinite for a NaN
// The largest of any element; infinite for lists of different lengths and for empty ones.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// Rounds of one turn of each side, as long as more(number of rounds) says. The order is A B C, C B A, B C A,
// A C B, ...: no side always comes first or last, so that a machine's slow moments fall on all.
void by_turns(std::size_t sides, const std::function<bool(std::size_t round)>& more,
              const std::function<void(std::size_t side)>& turn);
// The seconds of each turn of each side.
std::vector<std::vector<double>> race(const std::vector<std::function<double()>>& sides,
                                      const std::function<bool(std::size_t round)>& more);
// True until that many seconds are over from now on, and for the first `fewest` rounds.
std::function<bool(std::size_t)> until(double seconds, std::size_t fewest = 3);

using ExchangeFolder = TemporaryFolder;  // of what a peer reads and writes
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

// The report of a side about one turn: one line of JSON with these names.
struct Turn {
  std::vector<double> seconds{};  // of each step
  std::vector<double> losses{};
  std::vector<double> norms{};    // of the whole gradient; empty where a side does not report them
  std::vector<double> exposed{};  // seconds of each step that waited for communication; empty likewise
  std::vector<double> parts{};    // e.g. seconds of the parts of a step, medians of the turn; empty likewise
  nlohmann::json profile{};       // of a profiled turn: device_figures()
};
inline constexpr char kTimedTurn = 'g', kProfiledTurn = 'p';

// Starts a side and talks to it through named pipes in the exchange folder: NAME.go.R, one byte a turn for
// each rank, so that a waiting side sleeps in the kernel and leaves the cores to the other; NAME.done, one
// line of JSON a turn. Its output goes to NAME.log.
class Contestant {
 public:
  Contestant(const Side& side, const std::filesystem::path& exchange);
  ~Contestant();  // end of file tells it to stop; killed if it does not
  Contestant(const Contestant&) = delete;
  Contestant& operator=(const Contestant&) = delete;

  void start(char kind = kTimedTurn);
  Turn answer();  // ConfigError with the end of its output when it ended or was silent for ten minutes
  Turn turn() {
    start();
    return answer();
  }

 private:
  bool running();
  [[noreturn]] void fail(const std::string& found);

  std::string where_;
  std::filesystem::path log_;
  pid_t process_ = -1;
  std::vector<int> go_;
  int done_ = -1;
  std::string unread_;
};

// The other end of the pipes, in our sides.
class TurnPipes {
 public:
  // ConfigError where bench made none. Only rank 0 answers.
  TurnPipes(const std::filesystem::path& exchange, const std::string& name, int rank);
  bool wait();  // sleeps until the next turn; false: there is none
  bool profiled() const { return turn_ == kProfiledTurn; }  // this turn is for the profiler, and not timed
  void answer(const Turn& turn);

 private:
  using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
  int turn_ = 0;
  File go_, done_;
};

struct SideResult {
  Side side;
  Turn first{};                              // warms up; what it computed is compared
  std::vector<double> seconds{}, losses{};   // of every step after it
  std::vector<double> rounds{};              // the median of each turn after it
  std::vector<double> exposed{};             // as Turn's, after the first
  std::vector<std::vector<double>> parts{};  // the values of each part
  nlohmann::json profile{};                  // Turn's; null where none was asked for

  double median() const { return quantile(seconds, 0.5); }
};

// The first turn of each, then rounds until `seconds` are over. `on_device`: the first turns run at once,
// because torch.compile takes a minute in them, and a profiled turn comes last.
std::vector<SideResult> take_turns(const std::vector<Side>& sides, const std::filesystem::path& exchange,
                                   double seconds, bool on_device = false, std::size_t fewest_rounds = 3);

// How many times as fast ours is: by the medians, and the lowest and highest of single rounds.
struct Ratio {
  double median = 0, lowest = 0, highest = 0;
  std::string text() const;  // "1.20 (1.10 .. 1.30)"
};
Ratio faster(const SideResult& ours, const SideResult& peer);

// By how much the first turns of two sides may differ for their times to mean anything.
struct Agreement {
  double first_loss = 1e-4, losses = 1e-3, norm = 1e-3;
};
// Empty where they agree.
std::string disagreement(const SideResult& side, const SideResult& reference, const Agreement& allowed = {});

// Rows of the table of verbs, each made by a function in cases/.
using BenchValue = decltype(BenchOption::value);
using Names = std::vector<std::string>;

inline BenchOption flag(const std::string& name, BenchValue value, const std::string& about) {
  return {.name = name, .value = value, .about = about};
}
inline BenchOption file(const std::string& name, BenchValue value, const std::string& about) {
  return {.name = name, .value = value, .about = about, .type = "FILE"};
}
inline BenchOption choice(const std::string& name, BenchValue value, const std::string& about, Names choices,
                          const char* type = "NAME") {
  return {.name = name, .value = value, .about = about, .type = type, .choices = std::move(choices)};
}
inline BenchOption number(const std::string& name, BenchValue value, const std::string& about, double least,
                          double most, const char* type = "N") {
  return {.name = name, .value = value, .about = about, .type = type, .least = least, .most = most};
}
inline BenchOption cases(const std::string& which, Names names) {
  return choice("--case", &BenchOptions::cases, which + "; default: all", std::move(names));
}
inline BenchOption rank_counts(const std::string& which, int least, int most) {
  return number("--ranks", &BenchOptions::rank_counts, which, least, most);
}
inline BenchOption ranks(const std::string& which, int least, int most) {
  return number("--ranks", &BenchOptions::ranks, which, least, most);
}

inline constexpr const char* kSpeed = "A ratio above 1 means that isograd is faster.\n";
inline constexpr const char* kSpeedOrMemory =
    "A ratio above 1 means that isograd is faster or takes less memory.\n";
inline std::string status(const std::string& what) {
  return "Exit status: 0 compared, whatever the ratios; 1 " + what + " differ; 2 bad input.";
}

// A verb with `options`, and those that all have: --json; --seconds, `for_each` of which it takes; --python,
// which has `package`; the last two unless null.
inline BenchVerb verb(const std::string& name, const std::string& about, const std::string& footer,
                      BenchOptions defaults, Names packages, void (*run)(Bench&),
                      std::vector<BenchOption> options, const char* for_each,
                      const char* package = "PyTorch") {
  options.push_back(
      file("--json", &BenchOptions::json,
           "write records {bench, case, ours, peer, peer_name, unit, ratio, processor} as JSON; "
           "without FILE, print the JSON in place of the text"));
  if (for_each)
    options.push_back(number("--seconds", &BenchOptions::seconds,
                             std::string("seconds of measuring") + for_each, 0.1, 1e6, "S"));
  if (package)
    options.push_back(
        file("--python", &BenchOptions::python,
             fmt::format(
                 "Python that has {}; default: $PYTHON, else the checkout's .venv/bin/python, else python3",
                 package)));
  return {name, about, footer, std::move(defaults), std::move(packages), std::move(options), run};
}

}  // namespace isograd
