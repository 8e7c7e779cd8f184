#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/cases/comm_case.hpp"
#include "bench/exchange.hpp"
#include "comm/mpi/mpi.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

bool is_asked(const CommCase& what, const BenchCommOptions& options) {
  return options.operations.empty() || std::find(options.operations.begin(), options.operations.end(),
                                                 what.operation) != options.operations.end();
}

std::vector<CommResult> measure(int ranks, const BenchCommOptions& options) {
  const ExchangeFolder exchange;
  nlohmann::json plan = {{"module", find_module().string()}, {"cases", nlohmann::json::array()}};
  for (const CommCase& what : comm_cases(options.quick)) {
    if (!is_asked(what, options)) continue;
    plan["cases"].push_back({{"operation", what.operation},
                             {"bytes", what.bytes},
                             {"dtype", what.dtype},
                             {"seconds", what.seconds * options.patience},
                             {"fewest", what.fewest},
                             {"most", what.most}});
  }
  write_file(exchange.path() / "cases.json", plan.dump());
  const std::vector<std::string> command = {find_python(options.python), "-W", "ignore",
                                            find_peer("collectives.py").string(), exchange.path().string()};
  const std::string backend = options.mpi && mpi::built() ? "mpi" : "shm";  // says who starts the ranks
  if (const int status = launch_ranks(command, {.ranks = ranks, .backend = backend}); status != 0)
    throw ConfigError({.where = fmt::format("isograd bench comm on {} ranks", ranks),
                       .found = fmt::format("ranks that ended with status {}", status),
                       .expected = "a measurement of each case",
                       .action = "Read what they printed; they need a Python with torch (variable PYTHON)"});
  std::vector<CommResult> results;
  std::istringstream lines(read_file(exchange.path() / "results.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto json = parse_json(line).value;
    CommResult result;
    result.what = {.operation = json["operation"], .bytes = json["bytes"], .dtype = json["dtype"]};
    result.ranks = ranks;
    result.round_trip = json["round_trip"];
    result.seconds = json["seconds"].get<std::map<std::string, std::vector<double>>>();
    // Without tensors there is no memory of any kind.
    if (result.what.bytes == 0) {
      result.seconds["shared"] = result.seconds["ordinary"];
      result.seconds.erase("ordinary");
    }
    results.push_back(std::move(result));
  }
  return results;
}

std::string ratio(const CommResult& result, const std::string& ours, const std::string& peer) {
  if (!result.has(ours) || !result.has(peer)) return "";
  const double value = result.at(peer, 0.5) / result.at(ours, 0.5);
  return fmt::format("{:.{}f}", value, value < 9.95 ? 2 : value < 99.5 ? 1 : 0);
}

void print_times(const std::vector<CommResult>& results) {
  fmt::print(
      "\nmicroseconds of the slowest rank: p50 (p10 .. p90), {} ranks; buffers rewritten before each call\n"
      "{:<27}",
      results.at(0).ranks, "");
  for (const auto& contestant : kCommContestants) fmt::print(" {:>23}", comm_title(contestant));
  fmt::print(" {:>7} {:>6}\n", "cores", "rounds");
  for (const CommResult& result : results) {
    fmt::print("{:<27}", result.title());
    for (const auto& contestant : kCommContestants) {
      std::string cell;
      if (result.has(contestant))
        cell =
            fmt::format("{} ({} .. {})", microseconds(result.at(contestant, 0.5)),
                        microseconds(result.at(contestant, 0.1)), microseconds(result.at(contestant, 0.9)));
      fmt::print(" {:>23}", cell);
    }
    fmt::print(" {:>4.0f} ns {:>6}\n", result.round_trip * 1e9, result.seconds.at("gloo").size());
  }
}

void print_ratios(const std::vector<CommResult>& results) {
  const bool mpi = results.at(0).has("mpi");
  fmt::print(
      "\ntimes as fast as (medians); memcpy: of as many bytes by all ranks at once\n{:<27} {:^31} {:^31}\n",
      "", "tensors in shared memory", "ordinary tensors");
  fmt::print("{:<27}", "");
  for (int side = 0; side < 2; ++side) fmt::print(" {:>9} {:>10} {:>10}", "Gloo", mpi ? "MPI" : "", "memcpy");
  fmt::print("\n");
  for (const CommResult& result : results) {
    fmt::print("{:<27}", result.title());
    for (const char* ours : {"shared", "ordinary"})
      fmt::print(" {:>9} {:>10} {:>10}", ratio(result, ours, "gloo"), ratio(result, ours, "mpi"),
                 ratio(result, ours, "memcpy"));
    fmt::print("\n");
  }
  std::fflush(stdout);
}

nlohmann::ordered_json records(const std::vector<CommResult>& results) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  const auto add = [&](const CommResult& result, const std::string& ours, const std::string& peer,
                       const std::string& peer_name) {
    if (!result.has(ours) || !result.has(peer)) return;
    const double mine = result.at(ours, 0.5), theirs = result.at(peer, 0.5);
    all.push_back({{"bench", "comm"},
                   {"case", fmt::format("{}, {} ranks, {}", result.title(), result.ranks, comm_title(ours))},
                   {"ours", mine * 1e6},
                   {"peer", theirs * 1e6},
                   {"peer_name", peer_name},
                   {"unit", "us"},
                   {"ratio", theirs / mine}});
  };
  for (const CommResult& result : results) {
    for (const char* ours : {"shared", "ordinary"})
      for (const char* peer : {"gloo", "mpi", "memcpy"}) add(result, ours, peer, comm_title(peer));
    add(result, "group", "shared", "its c10d backend");
  }
  return all;
}

}  // namespace

int bench_comm(const BenchCommOptions& options) {
  require_packages("comm", options.python, {"torch"});
  std::vector<CommResult> all;
  double seconds = 0;  // of each number of ranks
  for (const CommCase& what : comm_cases(options.quick))
    if (is_asked(what, options)) seconds += what.seconds * options.patience;
  Waiting waiting("part", std::ssize(options.ranks), seconds);
  for (const int ranks : options.ranks) {
    waiting.begin(fmt::format("{} ranks", ranks));
    const auto results = measure(ranks, options);
    waiting.end();
    print_times(results);
    print_ratios(results);
    all.insert(all.end(), results.begin(), results.end());
  }
  if (!options.json.empty()) write_file(options.json, records(all).dump(2) + "\n");
  if (!options.svg.empty()) write_file(options.svg, comm_svg(all));
  if (!options.html.empty()) write_file(options.html, comm_html(all));
  return 0;
}

}  // namespace isograd
