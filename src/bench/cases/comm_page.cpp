// The picture of `bench comm`, and the page around it. No script, no external resource.
#include <algorithm>
#include <cmath>

#include "bench/cases/comm_case.hpp"
#include "report/report.hpp"

namespace isograd {
namespace {

// Of one chart, in the picture's units.
constexpr double kWidth = 400, kHeight = 270, kLeft = 52, kRight = 14, kTop = 34, kBottom = 40;
constexpr double kLegend = 44;
constexpr int kColumns = 3;

// Chosen to differ for colour-blind readers too (after Okabe and Ito).
const std::map<std::string, std::string> kColours = {{"shared", "#0072b2"},   {"group", "#56b4e9"},
                                                     {"ordinary", "#009e73"}, {"gloo", "#d55e00"},
                                                     {"mpi", "#cc79a7"},      {"memcpy", "#777777"}};

struct Panel {
  std::string title;
  std::vector<const CommResult*> results;  // by size
};

std::vector<Panel> panels_of(const std::vector<CommResult>& results) {
  std::vector<Panel> panels;
  for (const CommResult& result : results) {
    if (result.what.bytes == 0) continue;
    const std::string title = fmt::format("{}, {}, {} ranks", result.what.operation,
                                          result.what.dtype == "float32" ? "fp32" : "bf16", result.ranks);
    auto place =
        std::find_if(panels.begin(), panels.end(), [&](const Panel& panel) { return panel.title == title; });
    if (place == panels.end()) place = panels.insert(panels.end(), {title, {}});
    place->results.push_back(&result);
  }
  return panels;
}

std::string time_title(double seconds) {
  if (seconds < 0.9e-3) return fmt::format("{:g} µs", std::round(seconds * 1e8) / 100);
  return seconds < 0.9 ? fmt::format("{:g} ms", std::round(seconds * 1e3)) : fmt::format("{:g} s", seconds);
}

std::string draw(const Panel& panel, double left, double top) {
  double low = 1e9, high = 0;
  for (const auto* result : panel.results)
    for (const auto& [name, seconds] : result->seconds) {
      low = std::min(low, result->at(name, 0.1));
      high = std::max(high, result->at(name, 0.9));
    }
  const double first = std::floor(std::log10(low)), last = std::max(first + 1, std::ceil(std::log10(high)));
  const double size_low = std::log2(panel.results.front()->what.bytes),
               size_high = std::max(size_low + 1, std::log2(panel.results.back()->what.bytes));
  const double width = kWidth - kLeft - kRight, height = kHeight - kTop - kBottom;
  const auto x_of = [&](double bytes) {
    return left + kLeft + width * (std::log2(bytes) - size_low) / (size_high - size_low);
  };
  const auto y_of = [&](double seconds) {
    return top + kTop + height * (last - std::log10(std::max(seconds, 1e-12))) / (last - first);
  };

  std::string svg =
      fmt::format("<text x=\"{}\" y=\"{}\" class=\"title\">{}</text>\n", left + kLeft, top + 20, panel.title);
  for (double power = first; power <= last; ++power) {
    const double y = y_of(std::pow(10, power));
    svg += fmt::format(
        "<path d=\"M{:.1f} {:.1f}h{:.1f}\" class=\"grid\"/><text x=\"{:.1f}\" y=\"{:.1f}\" "
        "class=\"tick\" text-anchor=\"end\">{}</text>\n",
        left + kLeft, y, width, left + kLeft - 6, y + 4, time_title(std::pow(10, power)));
  }
  for (const auto* result : panel.results) {
    const double x = x_of(static_cast<double>(result->what.bytes));
    svg += fmt::format(
        "<path d=\"M{0:.1f} {1:.1f}v{2:.1f}\" class=\"grid\"/><text x=\"{0:.1f}\" y=\"{3:.1f}\" "
        "class=\"tick\" text-anchor=\"middle\">{4}</text>\n",
        x, top + kTop, height, top + kTop + height + 18, size_title(result->what.bytes));
  }
  for (const auto& name : kCommContestants) {
    std::string line, marks;
    for (const auto* result : panel.results) {
      if (!result->has(name)) continue;
      const double x = x_of(static_cast<double>(result->what.bytes)), y = y_of(result->at(name, 0.5));
      line += fmt::format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L", x, y);
      // The bar spans p10 to p90.
      marks += fmt::format(
          "<path d=\"M{0:.1f} {1:.1f}V{2:.1f}\" class=\"bar\" stroke=\"{4}\"/>"
          "<circle cx=\"{0:.1f}\" cy=\"{3:.1f}\" r=\"2.6\" fill=\"{4}\"/>",
          x, y_of(result->at(name, 0.1)), y_of(result->at(name, 0.9)), y, kColours.at(name));
    }
    if (line.empty()) continue;
    svg += fmt::format("<path d=\"{}\" class=\"curve\" stroke=\"{}\"{}/>{}\n", line, kColours.at(name),
                       name == "memcpy" ? " stroke-dasharray=\"5 4\"" : "", marks);
  }
  return svg;
}

double picture_width(std::size_t panels) {
  const int columns = std::min<int>(kColumns, std::max<int>(1, static_cast<int>(panels)));
  return std::max(columns * kWidth, 860.0);
}

}  // namespace

std::string comm_svg(const std::vector<CommResult>& results) {
  const auto panels = panels_of(results);
  const int columns = std::min<int>(kColumns, std::max<int>(1, static_cast<int>(panels.size())));
  const auto rows =
      (panels.size() + static_cast<std::size_t>(columns) - 1) / static_cast<std::size_t>(columns);
  const double width = picture_width(panels.size()), height = kLegend + static_cast<double>(rows) * kHeight;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" width=\"{0:g}\" "
      "height=\"{1:g}\" "
      "font-family=\"system-ui, sans-serif\">\n<title>Time of collectives over size</title>\n"
      "<style>.title{{font-size:14px;font-weight:600;fill:#1c2024}}.tick{{font-size:11px;fill:#60646c}}"
      ".key{{font-size:13px;fill:#1c2024}}.grid{{stroke:#e3e4e8;fill:none}}.curve{{fill:none;stroke-width:1."
      "8}"
      "}"
      ".bar{{stroke-width:1.2;opacity:.55}}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      width, height);
  double x = 24;
  for (const auto& name : kCommContestants) {
    if (std::none_of(results.begin(), results.end(), [&](const auto& result) { return result.has(name); }))
      continue;
    svg += fmt::format(
        "<path d=\"M{:g} 22h18\" class=\"curve\" stroke=\"{}\"/><text x=\"{:g}\" y=\"26\" "
        "class=\"key\">{}</text>\n",
        x, kColours.at(name), x + 24, comm_title(name));
    x += 44 + 7.4 * static_cast<double>(comm_title(name).size());
  }
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const auto column = static_cast<double>(i % static_cast<std::size_t>(columns));
    const auto row = static_cast<double>(i / static_cast<std::size_t>(columns));
    svg += draw(panels[i], column * kWidth, kLegend + row * kHeight);
  }
  return svg + "</svg>\n";
}

std::string comm_html(const std::vector<CommResult>& results) {
  Report report("Collectives: isograd beside Gloo, MPI and memcpy");
  report.prose(
      "",
      {"Time of the slowest rank. All contestants took turns in the same processes, each call on buffers "
       "that had "
       "just been rewritten. The same by Group: through isograd::Group instead of the c10d backend. memcpy: "
       "every rank copies as many bytes at once."});
  const std::string picture = comm_svg(results);
  report.figure("Time over size", "Dots are medians, bars reach from the 10th to the 90th percentile.",
                picture, picture_width(panels_of(results).size()));
  ReportTable table{.title = "Microseconds",
                    .summary = "The median, and from the 10th to the 90th percentile.",
                    .columns = {"case"},
                    .rows = {}};
  for (const auto& name : kCommContestants) table.columns.push_back(comm_title(name));
  table.columns.insert(table.columns.end(), {"cores", "rounds"});
  for (const CommResult& result : results) {
    std::vector<std::string> row = {fmt::format("{}, {} ranks", result.title(), result.ranks)};
    for (const auto& name : kCommContestants)
      row.push_back(result.has(name)
                        ? fmt::format("{} ({} to {})", microseconds(result.at(name, 0.5)),
                                      microseconds(result.at(name, 0.1)), microseconds(result.at(name, 0.9)))
                        : "");
    row.push_back(fmt::format("{:.0f} ns", result.round_trip * 1e9));
    row.push_back(std::to_string(result.seconds.at("gloo").size()));
    table.rows.push_back(std::move(row));
  }
  report.table(std::move(table));
  return report.html();
}

}  // namespace isograd
