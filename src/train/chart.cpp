// Line charts as SVG: axes with round ticks, gaps where values are not finite, at most a few points a pixel.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "train/progress.hpp"
#include "train/report.hpp"

namespace isograd {
namespace {

// In units of the viewBox; the page scales the picture.
constexpr double kWidth = 520, kHeight = 270;
constexpr double kLeft = 62, kRight = 14, kTop = 12, kBottom = 42;
constexpr double kInnerWidth = kWidth - kLeft - kRight, kInnerHeight = kHeight - kTop - kBottom;
constexpr std::size_t kFewPoints = 40;     // each gets a marker
constexpr std::size_t kMostCrosses = 100;  // marks of values that cannot be drawn
constexpr double kLargest = 1e300;         // differences of larger values overflow
constexpr std::size_t kColours = 6;

bool drawable(const Point& point) {
  return std::isfinite(point.x) && std::abs(point.y) < kLargest;
}

struct Axis {
  double low = 0, high = 1, tick = 0.2;
};

// The smallest of 1, 2, 5 times a power of ten that gives at most `most` ticks.
double round_tick(double span, int most) {
  const double power = std::pow(10, std::floor(std::log10(span / most)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (span / (factor * power) <= most) return factor * power;
  return 10 * power;
}

Axis make_axis(double low, double high, int ticks, bool whole) {
  if (!(low <= high)) return {};  // nothing to draw
  if (high - low <= 1e-9 * std::max(std::abs(low), std::abs(high))) {
    const double around = low == 0 || whole ? std::max(1.0, 0.05 * std::abs(low)) : 0.05 * std::abs(low);
    low -= around;
    high += around;
  }
  double tick = round_tick(high - low, ticks);
  if (whole) tick = std::max(tick, 1.0);
  return {low, high, tick};
}

// One unit for all ticks of an axis, and as many digits as neighbours need to differ.
std::string tick_label(double value, const Axis& axis) {
  if (std::abs(value) < 1e-9 * axis.tick) return "0";
  const double largest = std::max(std::abs(axis.low), std::abs(axis.high));
  if (largest < 1e-3 || largest >= 1e18) return fmt::format("{:.3g}", value);
  const std::pair<double, const char*> units[] = {
      {1e15, "P"}, {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  double unit = 1;
  std::string name;
  for (const auto& [size, letter] : units) {
    if (largest < (size == 1e3 ? 1e4 : size)) continue;
    unit = size;
    name = letter;
    break;
  }
  const int decimals = std::clamp(static_cast<int>(-std::floor(std::log10(axis.tick / unit * 1.0001))), 0, 9);
  return fmt::format("{:.{}f}{}", value / unit, decimals, name);
}

struct Frame {
  Axis x, y;
  double px(double value) const { return kLeft + (value - x.low) / (x.high - x.low) * kInnerWidth; }
  double py(double value) const { return kTop + (y.high - value) / (y.high - y.low) * kInnerHeight; }
};

Frame frame_of(const Chart& chart) {
  const double infinity = std::numeric_limits<double>::infinity();
  double left = infinity, right = -infinity, low = infinity, high = -infinity;
  bool whole = true;
  for (const auto& series : chart.series)
    for (const auto& point : series.points) {
      if (!std::isfinite(point.x)) continue;
      left = std::min(left, point.x);
      right = std::max(right, point.x);
      whole = whole && point.x == std::floor(point.x);
      if (!drawable(point)) continue;
      low = std::min(low, point.y);
      high = std::max(high, point.y);
    }
  if (low <= high)  // marks belong to values
    for (const auto& [name, value] : chart.marks) {
      low = std::min(low, value);
      high = std::max(high, value);
    }
  if (chart.from_zero && low > 0) low = 0;
  Frame frame{make_axis(left, right, 7, whole), make_axis(low, high, 6, false)};
  const double room = 0.04 * (frame.y.high - frame.y.low);
  frame.y.high += room;
  if (!(chart.from_zero && low == 0)) frame.y.low -= room;
  return frame;
}

// At most four points for each column of one unit: the first, the lowest, the highest and the last, in order.
// What a screen shows is the same, and no spike is lost.
std::vector<Point> thinned(const std::vector<Point>& points, const Frame& frame) {
  if (points.size() <= 2 * static_cast<std::size_t>(kInnerWidth)) return points;
  std::vector<Point> result;
  for (std::size_t begin = 0; begin < points.size();) {
    const double column = std::floor(frame.px(points[begin].x));
    std::size_t end = begin + 1, low = begin, high = begin;
    for (; end < points.size() && std::floor(frame.px(points[end].x)) == column; ++end) {
      if (points[end].y < points[low].y) low = end;
      if (points[end].y > points[high].y) high = end;
    }
    std::vector<std::size_t> kept = {begin, std::min(low, high), std::max(low, high), end - 1};
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
    for (const auto i : kept) result.push_back(points[i]);
    begin = end;
  }
  return result;
}

std::string drawn_series(const Series& series, const Frame& frame, std::size_t colour, bool lines) {
  std::string path, markers;
  const auto place = [&](const Point& point) {
    return fmt::format("{:.1f} {:.1f}", frame.px(point.x), frame.py(point.y));
  };
  const bool few = series.points.size() <= kFewPoints || !lines;
  std::vector<Point> piece;
  const auto finish_piece = [&] {
    const auto points = thinned(piece, frame);
    for (std::size_t i = 0; i < points.size() && points.size() > 1 && lines; ++i)
      path += (i == 0 ? "M" : "L") + place(points[i]);
    if (few || piece.size() == 1)
      for (const auto& point : piece)
        markers += fmt::format(
            "<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"><title>{}: {:.6g} at "
            "{:.10g}</title></circle>",
            colour, frame.px(point.x), frame.py(point.y), piece.size() == 1 ? "4" : "3.2",
            escape_html(series.name), point.y, point.x);
    piece.clear();
  };
  std::size_t crosses = 0;
  for (const auto& point : series.points) {
    if (drawable(point)) {
      piece.push_back(point);
      continue;
    }
    finish_piece();
    if (!std::isfinite(point.x) || ++crosses > kMostCrosses) continue;
    const double x = frame.px(point.x), y = kTop + kInnerHeight - 6;
    markers += fmt::format(
        "<path class=\"cross\" d=\"M{:.1f} {:.1f}l6 6m0 -6l-6 6\"><title>{}: {} at {:.10g}</title></path>",
        x - 3, y - 3, escape_html(series.name), point.y, point.x);
  }
  finish_piece();
  if (!path.empty()) path = fmt::format("<path class=\"line c{}\" d=\"{}\"/>", colour, path);
  return path + markers;
}

std::string drawn_axes(const Chart& chart, const Frame& frame) {
  std::string text;
  const auto ticks = [](const Axis& axis, const auto& each) {
    for (double i = std::ceil(axis.low / axis.tick - 1e-6); i * axis.tick <= axis.high + 1e-6 * axis.tick;
         ++i)
      each(i * axis.tick);
  };
  ticks(frame.y, [&](double value) {
    const double y = frame.py(value);
    text += fmt::format(
        "<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/><text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" "
        "text-anchor=\"end\">{}</text>",
        kLeft, y, kWidth - kRight, kLeft - 8, y + 4, tick_label(value, frame.y));
  });
  const double bottom = kTop + kInnerHeight;
  ticks(frame.x, [&](double value) {
    const double x = frame.px(value);
    text += fmt::format(
        "<path class=\"axis\" d=\"M{:.1f} {:.1f}v5\"/><text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" "
        "text-anchor=\"middle\">{}</text>",
        x, bottom, x, bottom + 18, tick_label(value, frame.x));
  });
  text += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", kLeft, bottom, kWidth - kRight);
  text += fmt::format("<text class=\"label\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>",
                      kWidth - kRight, kHeight - 6, escape_html(chart.x_label));
  return text;
}

}  // namespace

std::string svg(const Chart& chart) {
  const Frame frame = frame_of(chart);
  std::string text = fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">", kWidth,
                                 kHeight, escape_html(chart.title));
  bool empty = true;
  for (const auto& series : chart.series)
    empty = empty && std::none_of(series.points.begin(), series.points.end(), drawable);
  if (empty) {
    text += fmt::format(
        "<text class=\"label\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">no value that could be drawn</text>",
        kWidth / 2, kHeight / 2);
    return text + "</svg>";
  }
  text += drawn_axes(chart, frame);
  for (const auto& [name, value] : chart.marks)
    text += fmt::format("<path class=\"mark\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", kLeft, frame.py(value),
                        kWidth - kRight);
  for (std::size_t i = 0; i < chart.series.size(); ++i)
    text += drawn_series(chart.series[i], frame, i % kColours, chart.lines);
  for (const auto& [name, value] : chart.marks)
    text += fmt::format(
        "<text class=\"label over\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{} {:.4g}</text>",
        kWidth - kRight - 4, frame.py(value) - 5, escape_html(name), value);
  return text + "</svg>";
}

std::vector<Chart> training_charts(const std::vector<MetricRow>& rows, double baseline,
                                   const ChartWords& words) {
  const auto series = [&](std::string name, auto field) {
    Series result{.name = std::move(name), .points = {}};
    for (const auto& row : rows)
      if (row.*field) result.points.push_back({static_cast<double>(row.step), *(row.*field)});
    return result;
  };
  Chart loss{.title = "Loss",
             .x_label = "step",
             .y_label = words.unit,
             .series = {series("training", &MetricRow::loss)}};
  if (auto validation = series("validation", &MetricRow::validation_loss); !validation.points.empty())
    loss.series.push_back(std::move(validation));
  if (baseline > 0) loss.marks = {{words.baseline, baseline}};
  return {std::move(loss),
          {.title = "Gradient norm",
           .x_label = "step",
           .y_label = "before clipping",
           .series = {series("norm", &MetricRow::norm)},
           .from_zero = true},
          {.title = "Throughput",
           .x_label = "step",
           .y_label = words.tokens + "/s, all ranks",
           .series = {series(words.tokens + "/s", &MetricRow::tokens_per_second)},
           .from_zero = true},
          {.title = "Learning rate",
           .x_label = "step",
           .y_label = "",
           .series = {series("learning rate", &MetricRow::learning_rate)},
           .from_zero = true}};
}

}  // namespace isograd
