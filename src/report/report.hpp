// A report: one self-contained HTML file without scripts and external resources; all text is escaped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace isograd {

struct Point {
  double x = 0, y = 0;
  std::string label = {};  // shown for the point in place of its series and numbers
};

struct Series {
  std::string name;
  std::vector<Point> points;  // ascending x; a y that is not finite leaves a gap and is counted
};

struct Chart {
  std::string title;
  std::string x_label;                                     // e.g. "step"
  std::string y_label;                                     // with its unit, e.g. "nats per token"
  std::vector<Series> series;                              // at most 6; drawn in this order
  bool from_zero = false;                                  // the y axis starts at zero
  std::vector<std::pair<std::string, double>> marks = {};  // horizontal lines, e.g. {"unigram entropy", 3.4}
  bool lines = true;                                       // between the points; off: every point is a dot
  // Draws the running median over the first series, and scales by the medians: values far off are marked and
  // counted.
  bool smooth = false;
  bool log_x = false, log_y = false;  // a value of 0 or less is then not drawn; for charts without `marks`
  // Neither widens the axes: vertical lines with their names, and dashed lines behind the series.
  std::vector<std::pair<std::string, double>> x_marks = {};
  std::vector<std::vector<Point>> guides = {};
};

// Stacked bars, one below the other, with their legend.
struct Bars {
  struct Bar {
    std::string label, note;     // above the bar, on the left and on the right
    std::vector<double> values;  // of `parts`
  };
  std::string title, unit;
  std::vector<std::string> parts;  // at most 8
  std::vector<Bar> bars;
  std::vector<std::pair<std::string, double>> limits = {};  // vertical lines
};

// Spans of time in rows, one for each lane, in the order in which they come, above an axis of time. Spans of
// a lane that touch and are narrower than a letter are drawn as one, "F0 to B3": there may be thousands of
// them.
struct Lanes {
  struct Span {
    std::string lane, name;
    double begin = 0, end = 0;
  };
  std::string title;
  std::vector<Span> spans;
  double end = 0;                      // of the axis, at least
  std::string unit;                    // of the axis
  std::string (*time_text)(double);    // of a time, on the axis and under the pointer
  const char* (*colour)(const Span&);  // "c0" to "c7"
  // Colours and their meaning, shown if a span has them; "lane": where a row has no span.
  std::vector<std::pair<std::string, std::string>> legend;
  bool titled = false;  // the title is drawn: for a file of its own
};
inline constexpr double kLanesWidth = 1000;  // pixels

std::size_t characters(std::string_view text);  // of UTF-8
// Five digits; from 10000 on four, with the unit of an axis: 48.16k.
std::string short_number(double value);

// The first row is the heading. Columns are as wide as their widest cell, those of numbers are right-aligned.
using TextRows = std::vector<std::vector<std::string>>;
struct TextTable {
  std::size_t indent = 0;
  std::size_t most_columns = std::string::npos;  // of a line: the first cell is elided to keep to it
};
std::string text_table(TextRows rows, const TextTable& style = {});

class Report {
 public:
  explicit Report(std::string title, std::string subtitle = {});

  // Sections appear in the order of the calls.
  void verdict(bool good, std::string text);        // a coloured line below the title
  void fact(std::string label, std::string value);  // a tile of the summary
  void chart(Chart chart);                          // neighbouring charts share a row
  // Numeric columns are right-aligned. A table of any type that has these fields, e.g. ReportTable.
  template <class Table>
  void table(const Table& fields) {
    table(fields.title, fields.summary, fields.columns, fields.rows);
  }
  void table(const std::string& title, const std::string& summary, const std::vector<std::string>& columns,
             const std::vector<std::vector<std::string>>& rows);
  // `svg` as it is. `width`: pixels below which it scrolls sideways instead of shrinking; 0: it shrinks.
  void figure(std::string title, std::string caption, std::string svg, double width = 0);
  void prose(std::string title, std::vector<std::string> paragraphs);
  // Statements, each followed by its evidence.
  void list(std::string title, std::vector<std::pair<std::string, std::vector<std::string>>> items);
  void text(std::string title, std::string body);    // preformatted: a sample, a configuration
  void folded(std::string title, std::string body);  // the same, closed until clicked
  // Sections between the two are closed until clicked, and open on paper.
  void fold(std::string title);
  void unfold();

  std::string html() const;
  void write(const std::filesystem::path& file) const;  // atomically

 private:
  void section(std::string html);
  std::string title_, subtitle_;
  std::string verdicts_, facts_, body_;
  bool in_charts_ = false;
};

std::string svg(const Chart& chart);
std::string svg(const Bars& bars);
std::string svg(const Lanes& lanes);
std::string svg_file(const std::string& picture);  // of a page, as a file of its own
// A file of its own with all charts, whose series have the same names.
std::string svg_sheet(const std::string& title, const std::vector<Chart>& charts);
std::string base64(std::string_view bytes);  // RFC 4648, with padding
// Each point's median over median_reach() neighbours on both sides, of values that can be drawn.
std::vector<Point> running_median(const std::vector<Point>& points);
std::size_t median_reach(std::size_t points);
bool draws_median(const Chart& chart);
// Values that the y axis of a smoothed chart does not show.
struct OffScale {
  std::size_t count = 0;
  double furthest = 0;
};
OffScale off_scale(const Chart& chart);

}  // namespace isograd
