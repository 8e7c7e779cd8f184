// `isograd bench comm`: each collective by isograd, Gloo, MPI and, as the limit, memcpy, in the same
// processes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "bench/cases/verbs.hpp"
#include "bench/runner.hpp"
#include "comm/mpi/mpi.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kKilo = 1024, kMega = 1024 * kKilo;

struct CommCase {
  std::string operation;
  std::int64_t bytes = 0;  // of the largest buffer of a rank; 0: none
  std::string dtype = "float32";
};
std::vector<CommCase> comm_cases(const BenchOptions& options) {
  const bool quick = options.quick;
  std::vector<CommCase> cases;
  for (const char* operation : {"all_reduce", "reduce_scatter", "all_gather", "all_gather_in_place",
                                "broadcast", "all_to_all", "round_trip"})
    for (const std::int64_t bytes : {4 * kKilo, 64 * kKilo, 512 * kKilo, 4 * kMega, 64 * kMega, 256 * kMega})
      if (!quick || bytes == 64 * kKilo || bytes == 4 * kMega ||
          (operation == std::string("all_reduce") && bytes <= 64 * kMega))
        cases.push_back({operation, bytes});
  for (const std::int64_t bytes : {64 * kKilo, 4 * kMega, 64 * kMega})
    if (!quick || bytes == 4 * kMega) cases.push_back({"all_reduce", bytes, "bfloat16"});
  cases.push_back({"barrier"});
  std::erase_if(cases, [&](const CommCase& of) {
    return !options.operations.empty() && std::ranges::count(options.operations, of.operation) == 0;
  });
  return cases;
}
double seconds_for(const CommCase& of, const BenchOptions& options) {
  return options.patience * (options.quick ? 0.6 : of.bytes >= 64 * kMega ? 3 : 1.5);
}

// Ours: tensors in shared memory, those by isograd::Group, other tensors. Peers; memcpy: every rank copies as
// many bytes. The colours differ for colour-blind readers too (after Okabe and Ito).
struct CommSide {
  std::string name, title, colour;
};
const std::vector<CommSide> kCommSides = {{"shared", "shared memory", "#0072b2"},
                                          {"group", "the same by Group", "#56b4e9"},
                                          {"ordinary", "ordinary tensors", "#009e73"},
                                          {"gloo", "Gloo", "#d55e00"},
                                          {"mpi", "MPI", "#cc79a7"},
                                          {"memcpy", "memcpy", "#777777"}};
std::string comm_title(const std::string& side) {
  return std::ranges::find(kCommSides, side, &CommSide::name)->title;
}

std::string size_title(std::int64_t bytes) {
  return bytes >= kMega ? fmt::format("{} MB", bytes / kMega) : fmt::format("{} KB", bytes / kKilo);
}

struct CommResult {
  CommCase of;
  int ranks = 2;
  double round_trip = 0;                                 // seconds, between the cores of ranks 0 and 1
  std::map<std::string, std::vector<double>> seconds{};  // of the slowest rank, each round, by side

  bool has(const std::string& side) const { return seconds.contains(side); }
  double at(const std::string& side, double q) const { return quantile(seconds.at(side), q); }
  std::string dtype() const { return of.dtype == "float32" ? "fp32" : "bf16"; }
  std::string title() const {  // "all_reduce fp32 64 KB"
    return of.bytes == 0 ? of.operation
                         : fmt::format("{} {} {}", of.operation, dtype(), size_title(of.bytes));
  }
};

std::vector<CommResult> measure_collectives(int ranks, const BenchOptions& options) {
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
  std::vector<CommResult> results;
  std::istringstream lines(read_file(exchange.path() / "results.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto json = parse_json(line).value;
    CommResult result{.of = {json["operation"], json["bytes"], json["dtype"]},
                      .ranks = ranks,
                      .round_trip = json["round_trip"],
                      .seconds = json["seconds"]};
    // Without tensors there is no memory of any kind.
    if (result.of.bytes == 0) {
      result.seconds["shared"] = result.seconds["ordinary"];
      result.seconds.erase("ordinary");
    }
    results.push_back(std::move(result));
  }
  return results;
}

// "1.42", "44.9", "19700": three digits.
std::string microseconds(double seconds) {
  const double value = seconds * 1e6;
  return fmt::format("{:.{}f}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

std::string ratio_text(const CommResult& result, const std::string& ours, const std::string& peer) {
  if (!result.has(ours) || !result.has(peer)) return "";
  const double value = result.at(peer, 0.5) / result.at(ours, 0.5);
  return fmt::format("{:.{}f}", value, value < 9.95 ? 2 : value < 99.5 ? 1 : 0);
}

void print_collectives(const std::vector<CommResult>& results) {
  fmt::print(
      "\nmicroseconds of the slowest rank: p50 (p10 .. p90), {} ranks; buffers rewritten before each "
      "call\n{:<27}",
      results.at(0).ranks, "");
  for (const CommSide& side : kCommSides) fmt::print(" {:>23}", side.title);
  fmt::print(" {:>7} {:>6}\n", "cores", "rounds");
  for (const CommResult& result : results) {
    fmt::print("{:<27}", result.title());
    for (const auto& [side, title, colour] : kCommSides)
      fmt::print(" {:>23}",
                 result.has(side)
                     ? fmt::format("{} ({} .. {})", microseconds(result.at(side, 0.5)),
                                   microseconds(result.at(side, 0.1)), microseconds(result.at(side, 0.9)))
                     : "");
    fmt::print(" {:>4.0f} ns {:>6}\n", result.round_trip * 1e9, result.seconds.at("gloo").size());
  }
  fmt::print(
      "\ntimes as fast as (medians); memcpy: of as many bytes by all ranks at once\n{:<27} {:^31} "
      "{:^31}\n{:<27}",
      "", "tensors in shared memory", "ordinary tensors", "");
  for (int i = 0; i < 2; ++i)
    fmt::print(" {:>9} {:>10} {:>10}", "Gloo", results.at(0).has("mpi") ? "MPI" : "", "memcpy");
  fmt::print("\n");
  for (const CommResult& result : results) {
    fmt::print("{:<27}", result.title());
    for (const char* ours : {"shared", "ordinary"})
      fmt::print(" {:>9} {:>10} {:>10}", ratio_text(result, ours, "gloo"), ratio_text(result, ours, "mpi"),
                 ratio_text(result, ours, "memcpy"));
    fmt::print("\n");
  }
  std::fflush(stdout);
}

// The picture: time over size, a chart for each operation, a line for each side; both axes logarithmic. In
// its units:
constexpr double kWidth = 400, kHeight = 270, kLeft = 52, kTop = 34, kLegend = 44;  // of one chart
constexpr double kPlotWidth = kWidth - kLeft - 14, kPlotHeight = kHeight - kTop - 40;

std::string chart_svg(const std::string& title, const std::vector<const CommResult*>& by_size, double left,
                      double top) {
  double low = 1e9, high = 0;
  for (const auto* result : by_size)
    for (const auto& [name, seconds] : result->seconds)
      low = std::min(low, quantile(seconds, 0.1)), high = std::max(high, quantile(seconds, 0.9));
  const double first = std::floor(std::log10(low)), last = std::max(first + 1, std::ceil(std::log10(high)));
  const double smallest = std::log2(by_size.front()->of.bytes),
               largest = std::max(smallest + 1, std::log2(by_size.back()->of.bytes));
  left += kLeft, top += kTop;
  const auto x_of = [&](const CommResult& result) {
    return left + kPlotWidth * (std::log2(result.of.bytes) - smallest) / (largest - smallest);
  };
  const auto y_of = [&](double seconds) {
    return top + kPlotHeight * (last - std::log10(std::max(seconds, 1e-12))) / (last - first);
  };
  std::string svg = fmt::format("<text x=\"{}\" y=\"{}\" class=\"title\">{}</text>\n", left, top - 14, title);
  const auto tick = [&](double x, double y, const std::string& line, double text_x, double text_y,
                        const char* anchor, const std::string& text) {
    svg += fmt::format(
        "<path d=\"M{:.1f} {:.1f}{}\" class=\"grid\"/><text x=\"{:.1f}\" y=\"{:.1f}\" class=\"tick\" "
        "text-anchor=\"{}\">{}</text>\n",
        x, y, line, text_x, text_y, anchor, text);
  };
  for (double power = first; power <= last; ++power) {
    const double seconds = std::pow(10, power), y = y_of(seconds);
    const auto text = seconds < 0.9e-3 ? fmt::format("{:g} µs", std::round(seconds * 1e8) / 100)
                      : seconds < 0.9  ? fmt::format("{:g} ms", std::round(seconds * 1e3))
                                       : fmt::format("{:g} s", seconds);
    tick(left, y, fmt::format("h{:.1f}", kPlotWidth), left - 6, y + 4, "end", text);
  }
  for (const auto* result : by_size)
    tick(x_of(*result), top, fmt::format("v{:.1f}", kPlotHeight), x_of(*result), top + kPlotHeight + 18,
         "middle", size_title(result->of.bytes));
  for (const CommSide& side : kCommSides) {
    std::string line, marks;
    for (const auto* result : by_size) {
      if (!result->has(side.name)) continue;
      const double x = x_of(*result), y = y_of(result->at(side.name, 0.5));
      line += fmt::format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L", x, y);
      // The bar spans p10 to p90.
      marks += fmt::format(
          "<path d=\"M{0:.1f} {1:.1f}V{2:.1f}\" class=\"bar\" stroke=\"{4}\"/><circle cx=\"{0:.1f}\" "
          "cy=\"{3:.1f}\" "
          "r=\"2.6\" fill=\"{4}\"/>",
          x, y_of(result->at(side.name, 0.1)), y_of(result->at(side.name, 0.9)), y, side.colour);
    }
    if (!line.empty())
      svg += fmt::format("<path d=\"{}\" class=\"curve\" stroke=\"{}\"{}/>{}\n", line, side.colour,
                         side.name == "memcpy" ? " stroke-dasharray=\"5 4\"" : "", marks);
  }
  return svg;
}

std::string comm_svg(const std::vector<CommResult>& results) {
  std::vector<std::pair<std::string, std::vector<const CommResult*>>> charts;
  for (const CommResult& result : results) {
    if (result.of.bytes == 0) continue;
    const std::string title =
        fmt::format("{}, {}, {} ranks", result.of.operation, result.dtype(), result.ranks);
    auto place = std::ranges::find(charts, title, [](const auto& chart) { return chart.first; });
    if (place == charts.end()) place = charts.insert(charts.end(), {title, {}});
    place->second.push_back(&result);
  }
  const std::size_t columns = std::clamp<std::size_t>(charts.size(), 1, 3),
                    rows = (charts.size() + columns - 1) / columns;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" width=\"{0:g}\" "
      "height=\"{1:g}\" "
      "font-family=\"system-ui, sans-serif\">\n<title>Time of collectives over size</title>\n"
      "<style>.title{{font-size:14px;font-weight:600;fill:#1c2024}}.tick{{font-size:11px;fill:#60646c}}"
      ".key{{font-size:13px;fill:#1c2024}}.grid{{stroke:#e3e4e8;fill:none}}.curve{{fill:none;stroke-width:1."
      "8}}"
      ".bar{{stroke-width:1.2;opacity:.55}}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      std::max(static_cast<double>(columns) * kWidth, 860.0), kLegend + static_cast<double>(rows) * kHeight);
  double x = 24;
  for (const CommSide& side : kCommSides) {
    if (std::ranges::none_of(results, [&](const CommResult& result) { return result.has(side.name); }))
      continue;
    svg += fmt::format(
        "<path d=\"M{:g} 22h18\" class=\"curve\" stroke=\"{}\"/><text x=\"{:g}\" y=\"26\" "
        "class=\"key\">{}</text>\n",
        x, side.colour, x + 24, side.title);
    x += 44 + 7.4 * static_cast<double>(side.title.size());
  }
  for (std::size_t i = 0; i < charts.size(); ++i)
    svg += chart_svg(charts[i].first, charts[i].second, static_cast<double>(i % columns) * kWidth,
                     kLegend + static_cast<double>(i / columns) * kHeight);
  return svg + "</svg>\n";
}

}  // namespace

void bench_comm(Bench& bench) {
  const BenchOptions& options = bench.options;
  std::vector<CommResult> all;
  double seconds = 0;  // of each number of ranks
  for (const CommCase& of : comm_cases(options)) seconds += seconds_for(of, options);
  bench.expect(std::ssize(options.rank_counts), seconds, "part");
  for (const int ranks : options.rank_counts) {
    bench.begin(fmt::format("{} ranks", ranks));
    const auto results = measure_collectives(ranks, options);
    bench.end();
    print_collectives(results);
    all.insert(all.end(), results.begin(), results.end());
  }
  for (const CommResult& result : all) {
    const auto add = [&](const std::string& ours, const std::string& peer, const std::string& peer_name) {
      if (result.has(ours) && result.has(peer))
        bench.record_less(fmt::format("{}, {} ranks, {}", result.title(), result.ranks, comm_title(ours)),
                          result.at(ours, 0.5) * 1e6, result.at(peer, 0.5) * 1e6, peer_name, "us");
    };
    for (const char* ours : {"shared", "ordinary"})
      for (const char* peer : {"gloo", "mpi", "memcpy"}) add(ours, peer, comm_title(peer));
    add("group", "shared", "its c10d backend");
  }
  if (!options.svg.empty()) write_file(options.svg, comm_svg(all));
}

}  // namespace isograd
