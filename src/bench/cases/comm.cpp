// `isograd bench comm`: each collective by isograd, Gloo, MPI and, as the limit, memcpy, in the same
// processes.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "bench/runner.hpp"
#include "comm/mpi/mpi.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kKilo = 1024, kMega = 1024 * kKilo;
const std::vector<std::string> kOperations = {"all_reduce",          "reduce_scatter", "all_gather",
                                              "all_gather_in_place", "broadcast",      "all_to_all",
                                              "round_trip",          "barrier"};

// Ours: tensors in shared memory, those by isograd::Group, other tensors. Peers; memcpy: every rank copies as
// many bytes.
const std::vector<std::pair<std::string, std::string>> kCommSides = {{"shared", "shared memory"},
                                                                     {"group", "the same by Group"},
                                                                     {"ordinary", "ordinary tensors"},
                                                                     {"gloo", "Gloo"},
                                                                     {"mpi", "MPI"},
                                                                     {"memcpy", "memcpy"}};

std::string comm_title(const std::string& side) {
  return std::ranges::find(kCommSides, side, [](const auto& each) { return each.first; })->second;
}

struct CommCase {
  std::string operation;
  std::int64_t bytes = 0;  // of the largest buffer of a rank; 0: none
  std::string dtype = "float32";
  // Results.
  int ranks = 2;
  double round_trip = 0;                                 // seconds, between the cores of ranks 0 and 1
  std::map<std::string, std::vector<double>> seconds{};  // of the slowest rank, each round, by side

  bool has(const std::string& side) const { return seconds.contains(side); }
  double microseconds(const std::string& side, double q = 0.5) const {
    return 1e6 * quantile(seconds.at(side), q);
  }
  std::string type() const { return dtype == "float32" ? "fp32" : "bf16"; }
  std::string title() const {  // "all_reduce fp32 64 KB"
    if (bytes == 0) return operation;
    return fmt::format(
        "{} {} {}", operation, type(),
        bytes >= kMega ? fmt::format("{} MB", bytes / kMega) : fmt::format("{} KB", bytes / kKilo));
  }
};

std::vector<CommCase> comm_cases(const BenchOptions& options) {
  std::vector<CommCase> cases;
  for (const std::string& operation : kOperations)
    for (const std::int64_t bytes : {4 * kKilo, 64 * kKilo, 512 * kKilo, 4 * kMega, 64 * kMega, 256 * kMega})
      if (operation != "barrier" && (!options.quick || bytes == 64 * kKilo || bytes == 4 * kMega ||
                                     (operation == "all_reduce" && bytes <= 64 * kMega)))
        cases.push_back({operation, bytes});
  for (const std::int64_t bytes : {64 * kKilo, 4 * kMega, 64 * kMega})
    if (!options.quick || bytes == 4 * kMega) cases.push_back({"all_reduce", bytes, "bfloat16"});
  cases.push_back({"barrier"});
  std::erase_if(cases, [&](const CommCase& of) {
    return !options.operations.empty() && std::ranges::count(options.operations, of.operation) == 0;
  });
  return cases;
}
double seconds_for(const CommCase& of, const BenchOptions& options) {
  return options.patience * (options.quick ? 0.6 : of.bytes >= 64 * kMega ? 3 : 1.5);
}

std::vector<CommCase> measure_collectives(int ranks, const BenchOptions& options) {
  const ExchangeFolder exchange;
  nlohmann::json plan = {{"module", find_module()}, {"cases", nlohmann::json::array()}};
  for (const CommCase& of : comm_cases(options))
    plan["cases"].push_back({{"operation", of.operation},
                             {"bytes", of.bytes},
                             {"dtype", of.dtype},
                             {"seconds", seconds_for(of, options)},
                             {"fewest", options.quick ? 3 : 5},  // rounds
                             {"most", 3000}});
  write_file(exchange.path() / "cases.json", plan.dump());
  const std::vector<std::string> command = {find_python(options.python), "-W", "ignore",
                                            find_peer("collectives.py"), exchange.path().string()};
  const std::string backend = options.mpi && mpi::built() ? "mpi" : "shm";  // decides who starts the ranks
  if (const int status = launch_ranks(command, {.ranks = ranks, .backend = backend}); status != 0)
    refuse(fmt::format("isograd bench comm on {} ranks", ranks),
           fmt::format("ranks that ended with status {}", status), "a measurement of each case",
           "Read what they printed; they need a Python with torch (variable PYTHON)");
  std::vector<CommCase> results;
  std::istringstream lines(read_file(exchange.path() / "results.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto json = parse_json(line).value;
    CommCase of{.operation = json["operation"],
                .bytes = json["bytes"],
                .dtype = json["dtype"],
                .ranks = ranks,
                .round_trip = json["round_trip"],
                .seconds = json["seconds"]};
    if (of.bytes == 0) {  // without tensors there is no memory of any kind
      auto ordinary = of.seconds.extract("ordinary");
      ordinary.key() = "shared";
      of.seconds.insert(std::move(ordinary));
    }
    results.push_back(std::move(of));
  }
  return results;
}

// "1.42", "44.9", "19700": three digits.
std::string three_digits(double value) { return fixed(value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0); }

std::string times(const CommCase& of, const std::string& side) {
  if (!of.has(side)) return "";
  return fmt::format("{} ({} .. {})", three_digits(of.microseconds(side)),
                     three_digits(of.microseconds(side, 0.1)), three_digits(of.microseconds(side, 0.9)));
}

void say_collectives(Bench& bench, const std::vector<CommCase>& results) {
  TextRows medians{{""}}, ratios{{"times as fast as (medians)"}};
  for (const auto& [side, title] : kCommSides) medians[0].push_back(title);
  medians[0].insert(medians[0].end(), {"cores", "rounds"});
  for (const char* ours : {"shared", "ordinary"})
    for (const char* peer : {"gloo", "mpi", "memcpy"})
      ratios[0].push_back(fmt::format("{}: {}", ours, comm_title(peer)));
  for (const CommCase& of : results) {
    medians.push_back({of.title()}), ratios.push_back({of.title()});
    for (const auto& [side, title] : kCommSides) medians.back().push_back(times(of, side));
    medians.back().push_back(fixed(of.round_trip * 1e9, 0) + " ns");
    medians.back().push_back(std::to_string(of.seconds.at("gloo").size()));
    for (const char* ours : {"shared", "ordinary"})
      for (const char* peer : {"gloo", "mpi", "memcpy"})
        ratios.back().push_back(
            of.has(ours) && of.has(peer) ? three_digits(of.microseconds(peer) / of.microseconds(ours)) : "");
  }
  bench.say(fmt::format(
      "\nmicroseconds of the slowest rank: p50 (p10 .. p90), {} ranks; buffers rewritten before each call\n",
      results.at(0).ranks));
  bench.say(medians);
  bench.say("\nmemcpy: of as many bytes by all ranks at once\n");
  bench.say(ratios);
}

// Time over size: a chart for each operation and a line for each side.
std::vector<Chart> comm_charts(const std::vector<CommCase>& results) {
  std::vector<Chart> charts;
  for (const CommCase& of : results) {
    if (of.bytes == 0) continue;
    const std::string title = fmt::format("{}, {}, {} ranks", of.operation, of.type(), of.ranks);
    if (std::ranges::count(charts, title, &Chart::title) == 0) {
      charts.push_back(
          {.title = title, .x_label = "KB", .y_label = "µs", .series = {}, .log_x = true, .log_y = true});
      for (const auto& [side, name] : kCommSides)
        charts.back().series.push_back({.name = name, .points = {}});
    }
    Chart& chart = *std::ranges::find(charts, title, &Chart::title);
    for (std::size_t i = 0; i < kCommSides.size(); ++i)
      if (const auto& [side, name] = kCommSides[i]; of.has(side))
        chart.series[i].points.push_back({static_cast<double>(of.bytes) / kKilo, of.microseconds(side),
                                          fmt::format("{}, {}: {} µs", name, of.title(), times(of, side))});
  }
  return charts;
}

void bench_comm(Bench& bench) {
  const BenchOptions& options = bench.options;
  std::vector<CommCase> all;
  double seconds = 0;  // of each number of ranks
  for (const CommCase& of : comm_cases(options)) seconds += seconds_for(of, options);
  bench.expect(std::ssize(options.rank_counts), seconds, "part");
  for (const int ranks : options.rank_counts) {
    bench.begin(fmt::format("{} ranks", ranks));
    const auto results = measure_collectives(ranks, options);
    bench.end();
    say_collectives(bench, results);
    all.insert(all.end(), results.begin(), results.end());
  }
  for (const CommCase& of : all) {
    const auto add = [&](const std::string& ours, const std::string& peer, const std::string& peer_name) {
      if (of.has(ours) && of.has(peer))
        bench.record_less(fmt::format("{}, {} ranks, {}", of.title(), of.ranks, comm_title(ours)),
                          of.microseconds(ours), of.microseconds(peer), peer_name, "us");
    };
    for (const char* ours : {"shared", "ordinary"})
      for (const char* peer : {"gloo", "mpi", "memcpy"}) add(ours, peer, comm_title(peer));
    add("group", "shared", "its c10d backend");
  }
  if (!options.svg.empty())
    write_file(options.svg, svg_sheet("Time of collectives over size", comm_charts(all)));
}

}  // namespace

BenchVerb comm_verb() {
  return verb(
      "comm", "Collectives compared with Gloo, MPI and memcpy",
      "A ratio above 1 means that isograd is faster. Exit status: 0 measured; 2 bad input.",
      {.rank_counts = {2}}, {"torch"}, bench_comm,
      {rank_counts("number of ranks; default: 2", 2, 64),
       choice("--operation", &BenchOptions::operations, "operation to measure; default: all", kOperations,
              "OP"),
       file("--svg", &BenchOptions::svg, "write a picture of time over size to this file"),
       flag("--quick", &BenchOptions::quick, "measure fewer sizes, in less than 40 s"),
       flag("!--no-mpi", &BenchOptions::mpi,
            "do not compare with MPI, which takes part by default where this build has it"),
       number("--patience", &BenchOptions::patience, "factor on the time for each case", 0.001, 1e3, "X")},
      nullptr);
}

}  // namespace isograd
