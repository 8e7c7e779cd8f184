#include "bench/runner.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "base/shell.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using BenchClock = std::chrono::steady_clock;

double seconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double>(BenchClock::now() - start).count();
}

// A line of /proc/self/status in bytes, e.g. VmRSS.
double status_bytes(const std::string& bench, const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return 1024 * std::stod(line.substr(name.size() + 1));
  refuse("bench " + bench, "no " + name + " in /proc/self/status", "Linux's account of a process's memory",
         "Run it on Linux");
}

// The output of a command; empty when it fails.
std::string output_of(const std::vector<std::string>& command) {
  std::string output;
  if (std::FILE* process = popen((shell_words(command) + " 2>/dev/null").c_str(), "re")) {
    char buffer[4096];
    for (std::size_t size; (size = std::fread(buffer, 1, sizeof buffer, process)) > 0;)
      output.append(buffer, size);
    if (pclose(process) != 0) output.clear();
  }
  return output;
}

}  // namespace

nlohmann::ordered_json& Bench::record(const std::string& of, double ours, double peer,
                                      const std::string& peer_name, const std::string& unit, double ratio) {
  records.push_back({{"bench", name},
                     {"case", of},
                     {"ours", ours},
                     {"peer", peer},
                     {"peer_name", peer_name},
                     {"unit", unit},
                     {"ratio", ratio},
                     {"processor", processor_text()}});
  return records.back();
}

void Bench::refuse_comparison(const std::string& why) {
  comparable = false;
  fmt::print("  NOT COMPARABLE: {}\n", why);
}

int run_bench(const BenchVerb& verb, const BenchOptions& options) {
  if (!verb.packages.empty()) require_packages(verb.name, options.python, verb.packages);
  Bench bench{.name = verb.name, .options = options};
  verb.run(bench);
  std::fflush(stdout);
  if (!options.json.empty()) write_file(options.json, bench.records.dump(2) + "\n");
  return bench.comparable ? 0 : 1;
}

std::string ranks_text(int ranks) {
  return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const auto high = std::min(low + 1, values.size() - 1);
  return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
}

double spread(const std::vector<double>& values) {
  return values.empty() ? 0 : (quantile(values, 0.75) - quantile(values, 0.25)) / median(values);
}

double seconds_of(const std::function<void()>& work) {
  const auto start = BenchClock::now();
  work();
  return seconds_since(start);
}

double peak_growth(const std::string& bench, const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs")
      << "5";  // the peak starts anew; without it, it began with the inputs
  const double before = status_bytes(bench, "VmRSS");
  work();
  return status_bytes(bench, "VmHWM") - before;
}

double relative_difference(double a, double b) {
  const double difference = std::abs(a - b) / std::max(std::abs(b), 1e-300);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, relative_difference(a[i], b[i]));
  return largest;
}

std::vector<std::size_t> turn_order(std::size_t round, std::size_t sides) {
  std::vector<std::size_t> order(sides);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(round / 2 % sides), order.end());
  if (round % 2 != 0) std::reverse(order.begin(), order.end());
  return order;
}

void by_turns(std::size_t sides, const std::function<bool(std::size_t)>& more,
              const std::function<void(std::size_t)>& turn) {
  for (std::size_t round = 0; more(round); ++round)
    for (const std::size_t side : turn_order(round, sides)) turn(side);
}

std::function<bool(std::size_t)> until(double seconds, std::size_t fewest) {
  return [=, start = BenchClock::now()](std::size_t round) {
    return round < fewest || seconds_since(start) < seconds;
  };
}

ExchangeFolder::ExchangeFolder() {
  std::string name = (fs::temp_directory_path() / "isograd-bench-XXXXXX").string();
  if (!mkdtemp(name.data()))
    refuse("isograd bench", "cannot make a folder in " + fs::temp_directory_path().string(),
           "a temporary folder that can be written", "Set TMPDIR");
  path_ = name;
}

ExchangeFolder::~ExchangeFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void write_case(const fs::path& exchange, const nlohmann::ordered_json& description) {
  write_file(exchange / "case.json", description.dump(2) + "\n");
}

nlohmann::json read_case(const fs::path& exchange) {
  return parse_json(read_file(exchange / "case.json")).value;
}

void require_packages(const std::string& bench, const std::string& wish,
                      const std::vector<std::string>& packages) {
  const std::string python = find_python(wish);
  // Nothing is imported, and nothing of the working folder, which `python -c` puts first, is found.
  const std::string script = fmt::format(
      "import importlib.util, sys\nsys.path[:] = [p for p in sys.path if p]\n"
      "print('isograd', *(n for n in ('{}',) if not importlib.util.find_spec(n)))",
      fmt::join(packages, "', '"));
  const std::string where = "isograd bench " + bench;
  const std::string needed =
      fmt::format("a Python that has {}, which the peer needs", fmt::join(packages, " and "));
  std::istringstream words(output_of({python, "-W", "ignore", "-c", script}));
  std::string word;
  if (!(words >> word) || word != "isograd")
    refuse(where, fmt::format("{}, which does not run as a Python", python), needed,
           "Name one with --python or in the variable PYTHON");
  std::vector<std::string> missing, install = {python, "-m", "pip", "install"};
  while (words >> word) {
    missing.push_back(word);
    install.push_back(word == "torch"               ? "torch==2.13.0"
                      : word == "imbalanced_losses" ? "imbalanced-losses==0.6.0"
                                                    : word);
  }
  if (!missing.empty())
    refuse(where, fmt::format("{} without {}", python, fmt::join(missing, " and ")), needed,
           fmt::format("Run `{}`, or name another Python with --python", shell_words(install)));
}

std::string find_peer(const std::string& script) {
  const char* elsewhere = std::getenv("ISOGRAD_PEERS");  // of a program that was built on another machine
  const fs::path path = fs::path(elsewhere ? elsewhere : ISOGRAD_PEERS) / script;
  if (!fs::exists(path))
    refuse("isograd bench", "no " + path.string(), "the peer's script",
           "Run a build whose source tree is still there, or name its bench/peers in ISOGRAD_PEERS");
  return path.string();
}

std::string find_module() {
  const fs::path folder = fs::path(bench_self()).parent_path().parent_path() / "python";
  if (!fs::exists(folder / "isograd_comm.so"))
    refuse("isograd bench", "no isograd_comm.so in " + folder.string(),
           "the Python module, which carries isograd into the peer's processes",
           "Run ./dev build isograd_python_comm; it needs Python's headers (python3-dev)");
  return folder.string();
}

std::string bench_self() {
  return fs::read_symlink("/proc/self/exe").string();
}

Side our_side(const std::string& verb, const std::string& name, const std::string& title, int ranks) {
  return {.name = name, .title = title, .ranks = ranks, .starts = {bench_self(), "bench", verb}};
}

Side peer_side(const std::string& python, const std::string& script, const std::string& name,
               const std::string& title, int ranks, std::vector<std::string> more) {
  return {.name = name,
          .title = title,
          .ranks = ranks,
          .starts = {find_python(python), "-W", "ignore", find_peer(script)},
          .more = std::move(more)};
}

std::unique_ptr<Contestant> start(const Side& side, const fs::path& exchange) {
  std::vector<std::string> command = side.starts;
  command.insert(command.end(), {exchange.string(), std::to_string(side.ranks), side.name});
  command.insert(command.end(), side.more.begin(), side.more.end());
  return std::make_unique<Contestant>(side.name, command, exchange, side.ranks);
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

std::vector<SideResult> take_turns(const std::vector<Side>& sides, const fs::path& exchange, double seconds,
                                   bool on_device) {
  std::vector<std::unique_ptr<Contestant>> contestants;
  std::vector<SideResult> results;
  for (const Side& side : sides) {
    contestants.push_back(start(side, exchange));
    results.push_back({.side = side});
  }
  for (std::size_t i = 0; on_device && i < sides.size(); ++i) contestants[i]->start();
  for (std::size_t i = 0; i < sides.size(); ++i)
    results[i].first = on_device ? contestants[i]->answer() : contestants[i]->turn();
  by_turns(sides.size(), until(seconds), [&](std::size_t i) {
    const Turn turn = contestants[i]->turn();
    SideResult& result = results[i];
    const auto append = [](std::vector<double>& all, const std::vector<double>& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    append(result.seconds, turn.seconds), append(result.losses, turn.losses),
        append(result.exposed, turn.exposed);
    if (!turn.parts.empty()) result.parts.push_back(turn.parts);
    result.rounds.push_back(quantile(turn.seconds, 0.5));
  });
  for (std::size_t i = 0; on_device && i < sides.size(); ++i) {
    contestants[i]->start(kProfiledTurn);
    results[i].profile = contestants[i]->answer().profile;
  }
  return results;
}

Ratio faster(const SideResult& ours, const SideResult& peer) {
  Ratio ratio{.median = peer.median() / ours.median(), .lowest = HUGE_VAL, .highest = 0};
  for (std::size_t i = 0; i < ours.rounds.size(); ++i) {
    ratio.lowest = std::min(ratio.lowest, peer.rounds.at(i) / ours.rounds[i]);
    ratio.highest = std::max(ratio.highest, peer.rounds.at(i) / ours.rounds[i]);
  }
  return ratio;
}

std::string disagreement(const SideResult& side, const SideResult& reference, const Agreement& allowed) {
  const Turn &a = side.first, &b = reference.first;
  const auto first = [](const std::vector<double>& values) {
    return values.empty() ? std::nan("") : values.front();
  };
  const Agreement found = {.first_loss = relative_difference(first(a.losses), first(b.losses)),
                           .losses = relative_difference(a.losses, b.losses),
                           .norm = relative_difference(first(a.norms), first(b.norms))};
  if (found.first_loss <= allowed.first_loss && found.losses <= allowed.losses && found.norm <= allowed.norm)
    return "";
  if (a.losses.size() != b.losses.size())
    return fmt::format("{} reports {} losses a turn, {} reports {}", side.side.title, a.losses.size(),
                       reference.side.title, b.losses.size());
  return fmt::format(
      "{} differs from {}: first losses by {:.2g} ({:.2g} allowed), those of the first turn by {:.2g} "
      "({:.2g} allowed), "
      "first norm by {:.2g} ({:.2g} allowed)",
      side.side.title, reference.side.title, found.first_loss, allowed.first_loss, found.losses,
      allowed.losses, found.norm, allowed.norm);
}

}  // namespace isograd
