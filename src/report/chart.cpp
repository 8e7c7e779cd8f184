// Line charts as SVG: axes with round ticks, gaps where values are not finite, at most a few points a pixel.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "base/print.hpp"
#include "report/report.hpp"

namespace isograd {
namespace {

// In units of the viewBox; the page scales the picture.
constexpr double kWidth = 440, kHeight = 260;  // near a phone's width, so that text stays legible there
constexpr double kLeft = 58, kRight = 12, kTop = 14, kBottom = 44;
constexpr double kLine = 16;  // between the base lines of two labels, at their largest
constexpr int kTicksAcross = 5, kTicksUp = 6;
constexpr double kInnerWidth = kWidth - kLeft - kRight, kInnerHeight = kHeight - kTop - kBottom;
constexpr std::size_t kFewPoints = 40;     // each gets a marker
constexpr std::size_t kManyPoints = 200;   // of a chart without lines: smaller markers
constexpr std::size_t kMostCrosses = 100;  // marks of values that cannot be drawn
constexpr double kLargest = 1e300;         // differences of larger values overflow
constexpr std::size_t kColours = 6;
constexpr std::size_t kSmoothed = 20;  // from this many points on a running median is drawn

bool drawable(const Point& point) { return std::isfinite(point.x) && std::abs(point.y) < kLargest; }

struct Axis {
  double low = 0, high = 1, tick = 0.2;
  bool log = false;  // numbers are powers of ten
};

// The smallest of 1, 2, 5 times a power of ten that gives at most `most` ticks.
double round_tick(double span, int most) {
  const double power = std::pow(10, std::floor(std::log10(span / most)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (span / (factor * power) <= most) return factor * power;
  return 10 * power;
}

Axis make_axis(double low, double high, int ticks, bool whole, bool log) {
  if (!(low <= high)) return {};  // nothing to draw
  if (log) low = std::floor(low), high = std::max(low + 1, std::ceil(high)), whole = true;
  if (high - low <= 1e-9 * std::max(std::abs(low), std::abs(high))) {
    const double around = low == 0 || whole ? std::max(1.0, 0.05 * std::abs(low)) : 0.05 * std::abs(low);
    low -= around;
    high += around;
  }
  double tick = round_tick(high - low, ticks);
  if (whole) tick = std::max(tick, 1.0);
  return {low, high, tick, log};
}

// All ticks of an axis have one unit, and as many digits as neighbours need to differ.
std::string tick_label(double value, const Axis& axis) {
  if (axis.log)
    return value >= -3 && value < 4 ? fmt::format("{:g}", std::pow(10, value))
                                    : fmt::format("1e{:.0f}", value);
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
  bool shows(const Point& point) const { return point.y >= y.low && point.y <= y.high; }
};

// The range of some numbers; none yet: low > high.
struct Extent {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double value) { low = std::min(low, value), high = std::max(high, value); }
};

// The y axis shows all of a series, or of a smoothed one its running median and half of that beyond it.
Extent shown_range(const Series& series, bool smooth) {
  const auto range = [](const std::vector<Point>& points) {
    Extent found;
    for (const auto& point : points)
      if (drawable(point)) found.add(point.y);
    return found;
  };
  const Extent all = range(series.points);
  if (!smooth || series.points.size() < kSmoothed) return all;
  const Extent usual = range(running_median(series.points));
  const double beyond = 0.5 * (usual.high - usual.low);
  return {std::max(all.low, usual.low - beyond), std::min(all.high, usual.high + beyond)};
}

Frame frame_of(const Chart& chart) {
  Extent x, y;
  bool whole = true;
  for (const auto& series : chart.series) {
    for (const auto& point : series.points) {
      if (!std::isfinite(point.x)) continue;
      x.add(point.x);
      whole = whole && point.x == std::floor(point.x);
    }
    const Extent shown = shown_range(series, chart.smooth);
    y = {std::min(y.low, shown.low), std::max(y.high, shown.high)};
  }
  if (y.low <= y.high)  // marks belong to values
    for (const auto& [name, value] : chart.marks) y.add(value);
  if (chart.from_zero && y.low > 0) y.low = 0;
  Frame frame{make_axis(x.low, x.high, kTicksAcross, whole, chart.log_x),
              make_axis(y.low, y.high, kTicksUp, false, chart.log_y)};
  const double room = 0.04 * (frame.y.high - frame.y.low);
  frame.y.high += room;
  if (!(chart.from_zero && y.low == 0)) frame.y.low -= room;
  return frame;
}

// Powers of ten in place of the values of logarithmic axes.
Chart on_axes(Chart chart) {
  const auto change = [&](std::vector<Point>& points) {
    for (Point& point : points) {
      if (chart.log_x) point.x = std::log10(point.x);
      if (chart.log_y) point.y = std::log10(point.y);
    }
  };
  for (Series& series : chart.series) change(series.points);
  for (std::vector<Point>& guide : chart.guides) change(guide);
  if (chart.log_x)
    for (auto& mark : chart.x_marks) mark.second = std::log10(mark.second);
  return chart;
}

// A line of text. `kind`: its CSS class; `anchor`: "start", "middle" or "end"; `text`: escaped.
std::string svg_text(const char* kind, double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", kind, x, y,
                     anchor, text);
}

// At most four points per pixel column: first, lowest, highest, last. The picture is the same, spikes
// included.
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

// `line_class`: "raw" where a median is drawn over it. `marks`: of points and of values that cannot be drawn.
std::string drawn_series(const Series& series, const Frame& frame, std::size_t colour, bool lines,
                         const char* line_class = "line", bool marks = true, const char* radius = "3.2") {
  std::string path, markers;
  const auto mark = [&](const Point& point, const std::string& element) {
    const std::string text = point.label.empty()
                                 ? fmt::format("{}: {:.6g} at {:.10g}", series.name, point.y, point.x)
                                 : point.label;
    const auto tag = element.substr(1, element.find(' ') - 1);
    markers += fmt::format("{}><title>{}</title></{}>", element, escape_html(text), tag);
  };
  const bool few = series.points.size() <= kFewPoints || !lines;
  std::vector<Point> piece;
  const auto finish_piece = [&] {
    const auto points = thinned(piece, frame);
    for (std::size_t i = 0; i < points.size() && points.size() > 1 && lines; ++i)
      path += fmt::format("{}{:.1f} {:.1f}", i == 0 ? "M" : "L", frame.px(points[i].x),
                          frame.py(std::clamp(points[i].y, frame.y.low, frame.y.high)));
    for (const Point& point : piece)
      if ((few || piece.size() == 1) && frame.shows(point))
        mark(point, fmt::format("<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"", colour,
                                frame.px(point.x), frame.py(point.y), piece.size() == 1 ? "4" : radius));
    piece.clear();
  };
  std::size_t crosses = 0;
  for (const auto& point : series.points) {
    if (drawable(point)) {
      piece.push_back(point);
      if (frame.shows(point) || ++crosses > kMostCrosses) continue;
      const bool above = point.y > frame.y.high;  // drawn on the border
      mark(point, fmt::format("<path class=\"off c{}\" d=\"M{:.1f} {:.1f}l4 {}h-8z\"", colour,
                              frame.px(point.x), above ? kTop - 7 : kTop + kInnerHeight + 7, above ? 6 : -6));
      continue;
    }
    finish_piece();
    if (!std::isfinite(point.x) || ++crosses > kMostCrosses) continue;
    mark(point, fmt::format("<path class=\"cross\" d=\"M{:.1f} {:.1f}l6 6m0 -6l-6 6\"", frame.px(point.x) - 3,
                            kTop + kInnerHeight - 9));
  }
  finish_piece();
  if (!path.empty()) path = fmt::format("<path class=\"{} c{}\" d=\"{}\"/>", line_class, colour, path);
  return marks ? path + markers : path;
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
    text += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", kLeft, y, kWidth - kRight) +
            svg_text("tick", kLeft - 8, y + 4, "end", tick_label(value, frame.y));
  });
  const double bottom = kTop + kInnerHeight;
  ticks(frame.x, [&](double value) {
    const double x = frame.px(value);
    text += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}v5\"/>", x, bottom) +
            svg_text("tick", x, bottom + 18, "middle", tick_label(value, frame.x));
  });
  text += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", kLeft, bottom, kWidth - kRight);
  return text + svg_text("label", kWidth - kRight, kHeight - 6, "end", escape_html(chart.x_label));
}

// Where a line of many points has no markers: columns that name the values in them.
std::string drawn_strips(const Chart& chart, const Frame& frame) {
  constexpr std::size_t kMostStrips = 100;
  std::size_t points = 0;
  for (const Series& series : chart.series) points = std::max(points, series.points.size());
  if (points <= kFewPoints || !chart.lines || chart.log_x || chart.log_y) return {};
  const std::size_t strips = std::min(points, kMostStrips);
  const double each = (frame.x.high - frame.x.low) / static_cast<double>(strips);
  std::string text;
  for (std::size_t i = 0; i < strips; ++i) {
    const double from = frame.x.low + each * static_cast<double>(i), to = from + each;
    std::string values;
    for (const Series& series : chart.series) {
      const auto last = std::ranges::partition_point(series.points, [&](const Point& point) {
        return point.x < to || (i + 1 == strips && point.x <= to);
      });
      if (last == series.points.begin() || (last - 1)->x < from) continue;
      const Point& point = *(last - 1);
      values += values.empty() ? fmt::format("{} {:.10g}: ", chart.x_label, point.x) : ", ";
      values += fmt::format("{} {}", series.name, short_number(point.y));
    }
    if (!values.empty())
      text += fmt::format(
          "<rect class=\"strip\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"><title>{}</title></rect>",
          frame.px(from), kTop, kInnerWidth / static_cast<double>(strips), kInnerHeight, escape_html(values));
  }
  return text;
}

// Above its line, below it at the top of the picture; each clear of the one before it. At the end of the line
// where fewer points are in its way.
std::string mark_labels(const Chart& chart, const Frame& frame) {
  constexpr double kLetter = 6.5, kInset = 4;
  const auto in_the_way = [&](double left, double right, double bottom) {
    std::ptrdiff_t found = 0;
    for (const Series& series : chart.series)
      found += std::ranges::count_if(series.points, [&](const Point& point) {
        const double x = frame.px(point.x), y = frame.py(point.y);
        return x >= left - kLine && x <= right + kLine && y >= bottom - kLine && y <= bottom + kLine / 2;
      });
    return found;
  };
  std::vector<std::pair<std::string, double>> marks = chart.marks;
  std::stable_sort(marks.begin(), marks.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  double last = -kLine;
  for (const auto& [name, value] : marks) {
    double y = frame.py(value) - 5;
    if (y < kTop + 10) y = frame.py(value) + 14;
    last = std::max(y, last + kLine);
    const std::string label = fmt::format("{} {:.4g}", name, value);
    const double left = kLeft + kInset, right = kWidth - kRight - kInset,
                 wide = kLetter * static_cast<double>(characters(label));
    const bool first = in_the_way(left, left + wide, last) < in_the_way(right - wide, right, last);
    text += svg_text("label over", first ? left : right, last, first ? "start" : "end", escape_html(label));
  }
  return text;
}

// Lines from top to bottom, then their names over them, each in a row of its own from the bottom up.
std::string drawn_x_marks(const Chart& chart, const Frame& frame) {
  std::string lines, names;
  double y = kTop + kInnerHeight - 8;
  for (const auto& [name, value] : chart.x_marks) {
    if (!(value >= frame.x.low && value <= frame.x.high)) continue;
    const double x = frame.px(value);
    const bool right = x < kLeft + kInnerWidth / 2;
    lines += fmt::format("<path class=\"mark\" d=\"M{:.1f} {:.1f}v{:.1f}\"/>", x, kTop, kInnerHeight);
    names += svg_text("label over", x + (right ? 5 : -5), y, right ? "start" : "end", escape_html(name));
    y -= kLine;
  }
  return lines + names;
}

std::string drawn_guides(const Chart& chart, const Frame& frame) {
  std::string text;
  for (const std::vector<Point>& guide : chart.guides) {
    text += "<path class=\"mark\" d=\"";
    for (std::size_t i = 0; i < guide.size(); ++i)
      text += fmt::format("{}{:.1f} {:.1f}", i == 0 ? "M" : "L", frame.px(guide[i].x),
                          frame.py(std::clamp(guide[i].y, frame.y.low, frame.y.high)));
    text += "\"/>";
  }
  return text;
}

std::string head(const std::string& title, double height) {
  return fmt::format(
      "<svg width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" aria-label=\"{2}\">",
      kWidth, height, escape_html(title));
}

constexpr const char* kNothing = "no value that could be drawn";

// Squares of the classes with their names, in as many lines as they take from `top` on; returns their height.
double add_legend(std::string& text, const std::vector<std::pair<std::string, std::string>>& entries,
                  double left, double right, double top) {
  constexpr double kLetter = 8, kSwatch = 12;  // a letter at its largest
  double x = left, y = top + 14;
  for (const auto& [kind, name] : entries) {
    const double width = kSwatch + 5 + kLetter * static_cast<double>(characters(name)) + 12;
    if (x + width > right && x > left) x = left, y += kLine + 2;
    text +=
        fmt::format("<rect class=\"key {}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" rx=\"2\"/>",
                    kind, x, y - 10, kSwatch, kSwatch);
    text += svg_text("label", x + kSwatch + 5, y, "start", escape_html(name));
    x += width;
  }
  return y - top;
}

}  // namespace

std::string short_number(double value) {
  if (!(std::abs(value) >= 1e4 && std::abs(value) < 1e18)) return fmt::format("{:.5g}", value);
  std::size_t unit = 0;
  for (; std::abs(value) >= 1e3; ++unit) value /= 1e3;
  return fmt::format("{:.4g}{}", value, " kMGTP"[unit]);
}

std::size_t median_reach(std::size_t points) { return std::clamp<std::size_t>(points / 60, 2, 50); }

std::vector<Point> running_median(const std::vector<Point>& points) {
  std::vector<Point> result = points;
  std::vector<double> window;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (!drawable(points[i])) continue;
    // Short at the start, to follow the first fall of a loss, but more values than two can outvote.
    const std::size_t reach = std::min(median_reach(points.size()), i + 4);
    window.clear();
    for (std::size_t j = i - std::min(i, reach); j <= std::min(i + reach, points.size() - 1); ++j)
      if (drawable(points[j])) window.push_back(points[j].y);
    const auto middle = window.begin() + static_cast<std::ptrdiff_t>(window.size() / 2);
    std::nth_element(window.begin(), middle, window.end());
    result[i].y = *middle;
  }
  return result;
}

bool draws_median(const Chart& chart) {
  return chart.smooth && !chart.series.empty() && chart.series[0].points.size() >= kSmoothed;
}

OffScale off_scale(const Chart& chart) {
  const Frame frame = frame_of(chart);
  OffScale found;
  for (const auto& series : chart.series)
    for (const auto& point : series.points) {
      if (!drawable(point) || frame.shows(point)) continue;
      if (found.count++ == 0 || std::abs(point.y) > std::abs(found.furthest)) found.furthest = point.y;
    }
  return found;
}

std::string svg(const Chart& given) {
  const Chart chart = on_axes(given);
  const Frame frame = frame_of(chart);
  std::string text = head(chart.title, kHeight);
  if (std::ranges::none_of(chart.series,
                           [](const Series& series) { return std::ranges::any_of(series.points, drawable); }))
    return text + svg_text("label", kWidth / 2, kHeight / 2, "middle", kNothing) + "</svg>";
  text += drawn_strips(chart, frame) + drawn_axes(chart, frame) + drawn_guides(chart, frame);
  for (const auto& [name, value] : chart.marks)
    text += fmt::format("<path class=\"mark\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", kLeft, frame.py(value),
                        kWidth - kRight);
  std::size_t points = 0;
  for (const Series& series : chart.series) points += series.points.size();
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const bool median = i == 0 && draws_median(chart);
    text += drawn_series(chart.series[i], frame, i % kColours, chart.lines, median ? "raw" : "line", true,
                         chart.lines || points <= kManyPoints ? "3.2" : "2");
    if (median) {
      const Series smooth{chart.series[i].name + ", median", running_median(chart.series[i].points)};
      text += drawn_series(smooth, frame, i % kColours, true, "line", /*marks=*/false);
    }
  }
  return text + drawn_x_marks(chart, frame) + mark_labels(chart, frame) + "</svg>";
}

std::string svg(const Bars& bars) {
  constexpr double kBar = 22, kSide = 8;
  constexpr std::size_t kOneLine = 50;  // letters of a label with its note
  std::string legend, body;
  std::vector<std::pair<std::string, std::string>> parts;
  for (const std::string& part : bars.parts) parts.emplace_back(fmt::format("part c{}", parts.size()), part);
  double x = kSide, y = add_legend(legend, parts, kSide, kWidth, 0);
  double most = 0;
  const auto total = [](const Bars::Bar& bar) {
    return std::accumulate(bar.values.begin(), bar.values.end(), 0.0);
  };
  for (const Bars::Bar& bar : bars.bars) most = std::max(most, total(bar));
  if (!(most > 0 && most < kLargest))
    return head(bars.title, 60) + svg_text("label", kWidth / 2, 30, "middle", kNothing) + "</svg>";
  for (const auto& [name, value] : bars.limits) most = std::max(most, value);
  const Axis axis = make_axis(0, most, kTicksAcross, false, false);
  const auto wide = [&](double value) { return value / axis.high * (kWidth - 2 * kSide); };
  const double top = y + 12;
  y = top + kLine * static_cast<double>(bars.limits.size());
  for (const Bars::Bar& bar : bars.bars) {
    std::vector<std::string> lines(1);
    std::istringstream words(bar.label);
    for (std::string word; words >> word;) {
      if (!lines.back().empty() && lines.back().size() + 1 + word.size() > kOneLine) lines.emplace_back();
      lines.back() += (lines.back().empty() ? "" : " ") + word;
    }
    if (lines.back().size() + 1 + bar.note.size() > kOneLine) lines.emplace_back();
    for (const std::string& line : lines)
      body += svg_text("label over", kSide, y += kLine, "start", escape_html(line));
    body += svg_text("label over", kWidth - kSide, y, "end", escape_html(bar.note));
    y += 5, x = kSide;
    for (std::size_t i = 0; i < bar.values.size(); ++i) {
      if (!(bar.values[i] > 0)) continue;
      body += fmt::format(
          "<rect class=\"part c{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\"><title>{}: {:.4g} {}</title></rect>",
          i, x, y, wide(bar.values[i]), kBar, escape_html(bars.parts[i]), bar.values[i],
          escape_html(bars.unit));
      x += wide(bar.values[i]);
    }
    y += kBar + 4;
  }
  std::string under, names;
  for (double tick = 0; tick <= axis.high * (1 + 1e-6); tick += axis.tick) {
    const double at = kSide + wide(tick);
    under += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>", at, top, y);
    names += svg_text("tick", at, y + 15,
                      tick == 0          ? "start"
                      : at > kWidth - 40 ? "end"
                                         : "middle",
                      tick_label(tick, axis));
  }
  double row = top;
  for (const auto& [name, value] : bars.limits) {
    const double at = kSide + wide(value);
    row += kLine;
    under += fmt::format("<path class=\"mark\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>", at, row - 10, y);
    names += svg_text("label over", at - 5, row - 2, "end", escape_html(name));
  }
  names += svg_text("label", kWidth - kSide, y + 32, "end", escape_html(bars.unit));
  return head(bars.title, y + 40) + legend + under + body + names + "</svg>";
}

std::string svg(const Lanes& lanes) {
  constexpr double kNames = 130, kRow = 24, kLetter = 7, kWide = kLanesWidth - kNames - 12;
  constexpr int kTicks = 12;
  double end = lanes.end, y = 4;
  for (const Lanes::Span& span : lanes.spans) end = std::max(end, span.end);
  const auto at = [&](double time) { return end > 0 ? time / end * kWide : 0; };
  const double narrow = end * kLetter / kWide;
  std::vector<std::pair<std::string, std::vector<Lanes::Span>>> rows;
  std::map<std::string, std::size_t> row_of;
  for (const Lanes::Span& span : lanes.spans) {
    const auto [place, fresh] = row_of.try_emplace(span.lane, rows.size());
    if (fresh) rows.push_back({span.lane, {}});
    std::vector<Lanes::Span>& drawn = rows[place->second].second;
    const bool joins = !drawn.empty() && span.end - drawn.back().begin < narrow &&
                       span.begin - drawn.back().end < narrow / 8;
    if (!joins) {
      drawn.push_back(span);
      continue;
    }
    drawn.back().name = drawn.back().name.substr(0, drawn.back().name.find(' ')) + " to " + span.name;
    drawn.back().end = span.end;
  }
  std::set<std::string> seen = {"lane"};
  for (const auto& [lane, spans] : rows)
    for (const Lanes::Span& span : spans) seen.insert(lanes.colour(span));
  std::string text, body;
  if (lanes.titled) text += svg_text("label over", kNames, y += 14, "start", escape_html(lanes.title));
  std::vector<std::pair<std::string, std::string>> legend;
  for (const auto& [colour, name] : lanes.legend)
    if (seen.contains(colour)) legend.emplace_back(colour == "lane" ? colour : "part " + colour, name);
  const double top = y += add_legend(text, legend, kNames, kLanesWidth, y) + 10;
  for (const auto& [lane, spans] : rows) {
    body += svg_text("label", kNames - 8, y + 15, "end", escape_html(lane));
    body += fmt::format("<rect class=\"lane\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>", kNames, y,
                        kWide, kRow - 2);
    for (const Lanes::Span& span : spans) {
      const double x = kNames + at(span.begin), wide = at(span.end - span.begin);
      body += fmt::format(
          "<rect class=\"part {}\" x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\"><title>{}: {} to {}</title></rect>",
          lanes.colour(span), x, y, wide, kRow - 2, escape_html(span.name), lanes.time_text(span.begin),
          lanes.time_text(span.end));
      if (wide > kLetter * static_cast<double>(span.name.size()))
        body += svg_text("inside", x + wide / 2, y + 15, "middle", escape_html(span.name));
    }
    y += kRow;
  }
  if (end > 0 && end < kLargest) {
    const Axis axis = make_axis(0, end, kTicks, false, false);
    for (double tick = 0; tick <= end * (1 + 1e-6); tick += axis.tick) {
      const double x = kNames + at(tick);
      text += fmt::format("<path class=\"grid\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/>", x, top, y + 4);
      body += svg_text("tick", x, y + 17, tick > 0.98 * end ? "end" : "middle", lanes.time_text(tick));
    }
  }
  body += svg_text("label", kNames + kWide, y + 34, "end", escape_html(lanes.unit));
  return fmt::format(
             "<svg width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" aria-label=\"{2}\">",
             kLanesWidth, y + 40, escape_html(lanes.title)) +
         text + body + "</svg>";
}

}  // namespace isograd
