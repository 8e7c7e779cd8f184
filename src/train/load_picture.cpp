#include "train/load_picture.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/markup.hpp"

namespace isograd {
namespace {

using LoadRows = std::vector<const MetricRow*>;
using ExpertCounts = std::vector<double>;  // by expert

// In units of the viewBox; near a phone's width, so that text stays legible there.
constexpr double kMapWidth = 440, kMapLeft = 62, kMapRight = 2, kMapInner = kMapWidth - kMapLeft - kMapRight;
constexpr double kMapTop = 46, kMapLine = 19;
constexpr std::size_t kMostStrips = 12, kMostColumns = 90, kMostCells = 40'000;
constexpr std::size_t kMostNumbers = 8;  // experts whose part of the width holds "1.32"
constexpr std::size_t kMostCurves = 6;

// Colour by the ratio of an expert's choices to an even share: none, then up to each of these bounds.
constexpr std::array<double, 6> kBounds = {0.25, 0.5, 0.8, 1.25, 2, 4};
constexpr std::size_t kLevels = kBounds.size() + 2;

std::size_t level_of(double ratio) {
  if (ratio == 0) return 0;
  return 1 +
         static_cast<std::size_t>(std::upper_bound(kBounds.begin(), kBounds.end(), ratio) - kBounds.begin());
}

bool is_far(std::size_t level) {  // dark on light, light on dark
  return level <= 1 || level + 1 == kLevels;
}

// Rectangles of one colour each are one path; neighbours in a row become one.
class HeatMap {
 public:
  HeatMap(double left, double top, double cell_width, double cell_height)
      : left_(left), top_(top), width_(cell_width), height_(cell_height) {}
  void row(std::size_t row, const std::vector<std::optional<double>>& ratios) {
    for (std::size_t begin = 0; begin < ratios.size();) {
      std::size_t end = begin + 1;
      if (ratios[begin]) {
        const std::size_t level = level_of(*ratios[begin]);
        while (end < ratios.size() && ratios[end] && level_of(*ratios[end]) == level) ++end;
        paths_[level] += fmt::format("M{:.4g} {:.5g}H{:.4g}v{:.4g}H{:.4g}z", x(begin),
                                     top_ + static_cast<double>(row) * height_, x(end), height_, x(begin));
      }
      begin = end;
    }
  }
  std::string svg() const {
    std::string text;
    for (std::size_t level = 0; level < kLevels; ++level)
      if (!paths_[level].empty())
        text += fmt::format("<path class=\"heat h{}\" d=\"{}\"/>", level, paths_[level]);
    return text;
  }

 private:
  double x(std::size_t column) const { return left_ + static_cast<double>(column) * width_; }
  double left_, top_, width_, height_;
  std::array<std::string, kLevels> paths_{};
};

std::string heat_legend() {
  constexpr double kSwatch = 44, kHeight = 10;
  std::string text;
  for (std::size_t level = 0; level < kLevels; ++level) {
    const double left = level == 0 ? 0 : kSwatch * static_cast<double>(level) + 14;
    text += fmt::format("<path class=\"heat h{}\" d=\"M{:.1f} 2h{:.1f}v{:.1f}h-{:.1f}z\"/>", level, left,
                        kSwatch, kHeight, kSwatch);
    if (level == 0)
      text += svg_text("tick", left, 28, "start", "none");
    else if (level <= kBounds.size())
      text += svg_text("tick", left + kSwatch, 28, "middle", fmt::format("{:g}", kBounds[level - 1]));
  }
  return text;
}

std::string heat_picture(const std::string& title, double height, const std::string& inside) {
  return fmt::format("<svg viewBox=\"0 0 {:.0f} {:.1f}\" role=\"img\" aria-label=\"{}\">{}{}</svg>",
                     kMapWidth, height, escape_html(title), heat_legend(), inside);
}

std::size_t experts_of(const LoadRows& rows) {
  return rows.back()->expert_loads.front().choices.size();
}

void add_load(ExpertCounts& counts, const ExpertLoad& load) {
  counts.resize(load.choices.size());
  for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += static_cast<double>(load.choices[e]);
}

// Each expert's choices over an even share; nothing if there was no choice.
std::vector<std::optional<double>> ratios_of(const ExpertCounts& counts, std::size_t experts) {
  const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
  std::vector<std::optional<double>> ratios(experts);
  for (std::size_t e = 0; e < experts && all > 0; ++e)
    ratios[e] = counts[e] * static_cast<double>(experts) / all;
  return ratios;
}

LoadRows last_of(const LoadRows& rows) {
  const std::size_t most = std::min<std::size_t>(rows.size(), kDeadAfter);
  return {rows.end() - static_cast<std::ptrdiff_t>(most), rows.end()};
}

ExpertCounts sum_of(const LoadRows& rows, std::size_t layer) {
  ExpertCounts counts;
  for (const MetricRow* row : rows) add_load(counts, row->expert_loads[layer]);
  return counts;
}

double max_of(const std::vector<std::optional<double>>& ratios) {
  double most = 0;
  for (const auto& ratio : ratios) most = std::max(most, ratio.value_or(0));
  return most;
}

// Layers that have a strip, ascending.
std::vector<std::size_t> shown_layers(const LoadRows& rows) {
  const std::size_t layers = rows.back()->expert_loads.size();
  std::vector<std::size_t> order(layers);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (layers <= kMostStrips) return order;
  std::vector<double> uneven;
  const LoadRows last = last_of(rows);
  for (std::size_t layer = 0; layer < layers; ++layer)
    uneven.push_back(max_of(ratios_of(sum_of(last, layer), experts_of(rows))));
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return uneven[a] > uneven[b]; });
  order.resize(kMostStrips);
  std::sort(order.begin(), order.end());
  return order;
}

// Steps from the first row to this one. fp64, because a log may contain any number.
double steps_to(const LoadRows& rows, const MetricRow& row) {
  return static_cast<double>(row.step) - static_cast<double>(rows.front()->step);
}

double span_of(const LoadRows& rows) {
  return std::max(steps_to(rows, *rows.back()) + 1, 1.0);
}

std::size_t columns_of(const LoadRows& rows, std::size_t strips) {
  const std::size_t most = std::clamp<std::size_t>(kMostCells / (strips * experts_of(rows)), 8, kMostColumns);
  return static_cast<std::size_t>(std::min(static_cast<double>(most), span_of(rows)));
}

}  // namespace

std::vector<const MetricRow*> rows_with_loads(const std::vector<MetricRow>& rows) {
  LoadRows found;
  const auto same = [](const MetricRow& a, const MetricRow& b) {
    return std::ranges::equal(a.expert_loads, b.expert_loads, [](const ExpertLoad& x, const ExpertLoad& y) {
      return x.layer == y.layer && x.choices.size() == y.choices.size();
    });
  };
  for (auto row = rows.rbegin(); row != rows.rend(); ++row)
    if (!row->expert_loads.empty() && (found.empty() || same(*row, *found.front()))) found.push_back(&*row);
  std::reverse(found.begin(), found.end());
  return found;
}

Chart load_chart(const LoadRows& rows) {
  Chart chart{.title = "Load of experts",
              .x_label = "step",
              .y_label = "most chosen over mean",
              .series = {},
              .marks = {{"even", 1}}};
  const std::size_t layers = rows.back()->expert_loads.size();
  if (layers <= kMostCurves) {
    for (std::size_t layer = 0; layer < layers; ++layer) {
      Series& series = chart.series.emplace_back();
      series.name = fmt::format("layer {}", rows.back()->expert_loads[layer].layer);
      for (const MetricRow* row : rows)
        series.points.push_back({static_cast<double>(row->step), row->expert_loads[layer].max_over_mean()});
    }
    return chart;
  }
  chart.series = {{.name = "highest of the layers", .points = {}}, {.name = "their median", .points = {}}};
  for (const MetricRow* row : rows) {
    std::vector<double> values;
    for (const ExpertLoad& load : row->expert_loads) values.push_back(load.max_over_mean());
    std::sort(values.begin(), values.end());
    const auto step = static_cast<double>(row->step);
    chart.series[0].points.push_back({step, values.back()});
    chart.series[1].points.push_back({step, values[values.size() / 2]});
  }
  return chart;
}

std::string load_strips(const LoadRows& rows) {
  const std::size_t experts = experts_of(rows);
  const auto shown = shown_layers(rows);
  const std::size_t columns = columns_of(rows, shown.size());
  const auto lines = static_cast<double>(shown.size() * experts);
  const double cell = std::clamp(900 / lines, 1.0, 9.0);
  const double strip = cell * static_cast<double>(experts);
  std::string inside;
  double top = kMapTop;
  for (const std::size_t layer : shown) {
    std::vector<ExpertCounts> by_column(columns);
    for (const MetricRow* row : rows) {
      const double part = std::clamp(steps_to(rows, *row) / span_of(rows), 0.0, 1.0);
      const auto column = static_cast<std::size_t>(part * static_cast<double>(columns));
      add_load(by_column[std::min(column, columns - 1)], row->expert_loads[layer]);
    }
    std::vector<std::vector<std::optional<double>>> by_expert(experts);
    for (const ExpertCounts& counts : by_column) {
      const auto ratios = ratios_of(counts, experts);
      for (std::size_t e = 0; e < experts; ++e) by_expert[e].push_back(ratios[e]);
    }
    HeatMap map(kMapLeft, top, kMapInner / static_cast<double>(columns), cell);
    for (std::size_t e = 0; e < experts; ++e) map.row(e, by_expert[e]);
    const ExpertLoad& load = rows.back()->expert_loads[layer];
    inside += map.svg() + svg_text("label", kMapLeft - 8, top + std::min(strip, 12.0), "end",
                                   fmt::format("layer {}", load.layer));
    if (strip > 2 * kMapLine)
      inside += svg_text("tick", kMapLeft - 8, top + strip - 1, "end", fmt::format("{} experts", experts));
    top += strip + 8;
  }
  inside +=
      svg_text("tick", kMapLeft, top + 8, "start", fmt::format("step {}", rows.front()->step)) +
      svg_text("tick", kMapWidth - kMapRight, top + 8, "end", fmt::format("step {}", rows.back()->step));
  return heat_picture("Load by expert over time", top + 14, inside);
}

std::string load_map(const LoadRows& rows) {
  const std::size_t experts = experts_of(rows), layers = rows.back()->expert_loads.size();
  const LoadRows last = last_of(rows);
  const bool numbers = experts <= kMostNumbers;
  const double height = numbers ? 26 : std::clamp(420.0 / static_cast<double>(layers), 5.0, 18.0);
  const double width = kMapInner / static_cast<double>(experts);
  const auto every = static_cast<std::size_t>(std::ceil(kMapLine / height));  // rows per label
  HeatMap map(kMapLeft, kMapTop, width, height);
  std::string labels;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto ratios = ratios_of(sum_of(last, layer), experts);
    map.row(layer, ratios);
    const double middle = kMapTop + (static_cast<double>(layer) + 0.5) * height + 4.5;
    if (layer % every == 0)
      labels += svg_text("label", kMapLeft - 8, middle, "end",
                         fmt::format("layer {}", rows.back()->expert_loads[layer].layer));
    for (std::size_t e = 0; numbers && e < experts; ++e)
      if (ratios[e])
        labels += svg_text(is_far(level_of(*ratios[e])) ? "cell far" : "cell",
                           kMapLeft + (static_cast<double>(e) + 0.5) * width, middle, "middle",
                           *ratios[e] == 0 ? "none" : fmt::format("{:.2f}", *ratios[e]));
  }
  const double bottom = kMapTop + height * static_cast<double>(layers) + 17;
  const std::size_t step = numbers ? 1 : (experts + 7) / 8;
  for (std::size_t e = 0; e < experts; e += step)
    labels += svg_text("tick", kMapLeft + (static_cast<double>(e) + 0.5) * width, bottom, "middle",
                       std::to_string(e));
  labels += svg_text("label", kMapLeft - 8, bottom, "end", "expert");
  return heat_picture("Load by layer and expert", bottom + 6, map.svg() + labels);
}

ReportTable load_table(const LoadRows& rows) {
  const LoadRows last = last_of(rows);
  const MetricRow& end = *rows.back();
  ReportTable table{
      .title = "Experts by layer",
      .summary = fmt::format(
          "The most chosen expert's choices over the mean of all; the last columns are of the last "
          "{} logged steps together, with an even share as 1.",
          last.size()),
      .columns = {"layer", fmt::format("step {}", rows.front()->step), fmt::format("step {}", end.step),
                  fmt::format("last {}", last.size()), "least chosen", "most chosen", "without a token"},
      .rows = {}};
  for (std::size_t layer = 0; layer < end.expert_loads.size(); ++layer) {
    const auto ratios = ratios_of(sum_of(last, layer), experts_of(rows));
    const auto least = std::ranges::min_element(ratios), most = std::ranges::max_element(ratios);
    const auto named = [&](const auto& which) {
      return fmt::format("expert {} ({:.2f})", which - ratios.begin(), which->value_or(0));
    };
    std::string dead;
    for (std::size_t e = 0; e < ratios.size(); ++e)
      if (ratios[e].value_or(0) == 0) dead += fmt::format("{}{}", dead.empty() ? "" : ", ", e);
    table.rows.push_back({std::to_string(end.expert_loads[layer].layer),
                          fmt::format("{:.2f}", rows.front()->expert_loads[layer].max_over_mean()),
                          fmt::format("{:.2f}", end.expert_loads[layer].max_over_mean()),
                          fmt::format("{:.2f}", most->value_or(0)), named(least), named(most),
                          dead.empty() ? "none" : dead});
  }
  return table;
}

void report_loads(Report& report, const LoadRows& rows) {
  const std::size_t layers = rows.back()->expert_loads.size(), shown = shown_layers(rows).size();
  const std::string which =
      shown < layers ? fmt::format(" Of {} layers the {} most uneven ones.", layers, shown) : std::string();
  report.figure(
      "Load by expert over time",
      fmt::format("A row is an expert, from 0 downwards; its colour is what part of the layer's choices "
                  "fell on it, over an even share: 1 where all get the same.{} Dead experts: {}.",
                  which, dead_in_words(*rows.back())),
      load_strips(rows));
  report.figure("Load by layer and expert",
                fmt::format("Over the last {} logged steps, as shares of an even one.", last_of(rows).size()),
                load_map(rows));
  report.table(load_table(rows));
}

std::string last_load(const std::vector<ExpertLoad>& loads) {
  const auto most = std::max_element(loads.begin(), loads.end(), [](const auto& a, const auto& b) {
    return a.max_over_mean() < b.max_over_mean();
  });
  return fmt::format("at most {:.2f} of the mean (layer {})", most->max_over_mean(), most->layer);
}

std::string dead_in_words(const MetricRow& row) {
  const std::string steps = fmt::format("in the last {} logged steps", row.dead.steps);
  if (row.dead.count() == 0) return "none, each had tokens " + steps;
  return fmt::format("{}, without a token {}", name_dead(row.dead, row.expert_loads), steps);
}

}  // namespace isograd
