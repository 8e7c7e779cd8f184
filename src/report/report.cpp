#include "report/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"

namespace isograd {
namespace {

// Colours of series are chosen to differ for colour-blind readers too (after Okabe and Ito).
constexpr const char* kChartStyle = R"css(
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#60646c;--rule:#e3e4e8;
--good:#18794e;--good-back:#e6f4ec;--bad:#b42318;--bad-back:#fdecea;--shade:#0003;
--on-dark:#fff;--on-light:#111;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a64d8c;--c4:#b88a00;--c5:#56707f;--c6:#56b4e9;--c7:#c3c6cc}
@media screen and (prefers-color-scheme:dark){:root{--page:#131518;--card:#1b1e22;--ink:#eceef0;--soft:#9ba1a8;--rule:#31353b;
--good:#5ccf97;--good-back:#132d20;--bad:#ff8f85;--bad-back:#391815;--shade:#000b;
--on-dark:#111;--on-light:#fff;--c0:#5fb3ec;--c1:#ff9a52;--c2:#3fcf9f;--c3:#dd8fc6;--c4:#e3bb45;--c5:#9db4c0;--c6:#2f7ab0;--c7:#4a4f57}}
.tick,.label{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}
.over{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.mark{stroke:var(--soft);stroke-dasharray:4 4;fill:none}
.line,.raw{fill:none;stroke:currentColor;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke-width:1;opacity:.4}.line,.raw,.grid,.mark,.over{pointer-events:none}
.strip{fill:transparent}.strip:hover{fill:var(--rule)}.off{fill:currentColor}
.dot,.part{fill:currentColor;stroke:var(--card)}.lane{fill:var(--rule);opacity:.5}.key.lane{stroke:var(--soft)}
.inside{fill:var(--on-dark);font-size:11px}.c1+.inside,.c2+.inside,.c4+.inside{fill:#111}.c6+.inside,.c7+.inside{fill:var(--on-light)}
.cross{stroke:var(--bad);stroke-width:1.5;fill:none}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.c6{color:var(--c6)}.c7{color:var(--c7)}
)css";
constexpr const char* kPageStyle = R"css(
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 24px 72px}
h1{font-size:28px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:40px 0 10px;letter-spacing:-.005em;overflow-wrap:anywhere}
.subtitle{color:var(--soft);margin:6px 0 0}
.verdict{margin:14px 0 0;padding:9px 14px;border-radius:8px;font-weight:550;overflow-wrap:anywhere}
.verdict+.verdict{margin-top:8px}
.good{color:var(--good);background:var(--good-back)}.bad{color:var(--bad);background:var(--bad-back)}
.facts{display:flex;flex-wrap:wrap;gap:10px;margin:22px 0 0;padding:0}
.facts div{flex:1 1 auto;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:11px 14px;min-width:150px;max-width:100%}
dt,dd{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
dt{color:var(--soft);font-size:12.5px}
dd{margin:2px 0 0;font-size:18px;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px;margin:30px 0 0}
figure{margin:0;max-width:560px;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 14px 8px;min-width:0}
.charts figure:last-child:nth-child(odd){grid-column:1/-1;max-width:none}.charts svg{max-height:320px}
figure h3{font-size:14.5px;margin:0 2px 2px;overflow-wrap:anywhere}
figure h3 span{color:var(--soft);font-weight:400;margin-left:6px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 2px 6px;font-size:12.5px;color:var(--soft)}
figcaption span{max-width:100%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
figcaption b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle;background:currentColor}
svg{display:block;width:100%;height:auto;overflow:visible}
.wide{overflow:auto;max-height:560px;border:1px solid var(--rule);border-radius:10px;
background:linear-gradient(90deg,var(--card) 40%,transparent) 0 0/48px 100% no-repeat local,
linear-gradient(270deg,var(--card) 40%,transparent) 100% 0/48px 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/12px 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/12px 100% no-repeat scroll,var(--card)}
.hint{margin:0 2px;overflow:hidden;font-size:12.5px;color:var(--soft)}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:6px 12px;border-bottom:1px solid var(--rule);vertical-align:top}
th{position:sticky;top:0;background:var(--card);color:var(--soft);font-weight:500;vertical-align:bottom;box-shadow:0 1px var(--rule)}
tr:last-child td{border-bottom:0}
.number{width:1%;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
th.number{white-space:normal}.roomy th{white-space:nowrap}
.long{min-width:160px}.sentences{min-width:440px}
.whole{max-height:none}.fit{width:fit-content;max-width:100%}.fit table{width:auto}.fit .number{width:auto}.drawing{padding:14px;max-height:none}.natural .label,.natural .tick{font-size:12px}.scaled>svg{max-width:520px}
.drawing h3{font-size:14.5px;margin:18px 0 6px;font-weight:600}.drawing h3:first-child{margin-top:0}.drawing h3 span{color:var(--soft);font-weight:400;margin-left:6px}
.frames{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:4px 12px;align-items:center;font-size:12.5px;color:var(--soft)}
.frames img{display:block;height:88px;width:auto;max-width:100%;object-fit:contain;object-position:left;image-rendering:pixelated;border-radius:4px}
p.prose{margin:0 0 10px;max-width:76ch}div+p.prose{margin-top:10px}
.item{background:var(--card);border:1px solid var(--rule);border-left:4px solid var(--bad);border-radius:8px;padding:10px 14px;margin:0 0 10px}
.item p{margin:0;font-weight:550;overflow-wrap:anywhere}.item ul{margin:6px 0 0;padding-left:20px;color:var(--soft);font-size:13.5px}
.item li{overflow-wrap:anywhere}
p.summary{margin:0 0 10px;color:var(--soft);overflow-wrap:anywhere}
pre{margin:0;padding:14px 16px;background:var(--card);border:1px solid var(--rule);border-radius:10px;
font-size:13px;line-height:1.55;white-space:pre-wrap;overflow-wrap:anywhere;tab-size:4}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}code{font-size:.92em;overflow-wrap:anywhere}
summary{cursor:pointer;font-size:17px;font-weight:650;margin:40px 0 10px}
@media (max-width:560px){main{padding:24px 14px 48px}.tick,.label{font-size:14.5px}figure{padding:12px 10px 6px}
.charts{margin-top:22px}.frames{grid-template-columns:1fr}.frames img{height:auto;max-height:88px}th,td{padding:6px 9px}}
@media screen and (max-width:560px){.cards thead,.cards-hint{display:none}.cards table,.cards tbody{display:block}
.cards tr{display:flex;flex-wrap:wrap;gap:1px 14px;padding:8px 10px;border-bottom:1px solid var(--rule)}.cards tr:last-child{border:0}
.cards td{padding:0;border:0;width:auto;min-width:0;text-align:left;white-space:normal;overflow-wrap:anywhere}
.cards td::before{content:attr(data-h)" ";color:var(--soft)}.cards td:empty{display:none}}
@page{margin:14mm}
@media print{:root{--page:#fff}body{font-size:12px}main{max-width:none;padding:0}.hint{display:none}
i,.verdict,.item,.strip{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.wide{max-height:none;overflow:visible;background:none}.natural{width:auto!important}th{position:static}
table,pre,.item ul,figcaption{font-size:10px}figure h3{font-size:11.5px}th,td{padding:3px 5px}.long,.sentences{min-width:0;overflow-wrap:anywhere}.roomy th{white-space:normal}
.charts{grid-template-columns:1fr 1fr}
details::details-content{content-visibility:visible;display:block;height:auto}
h2,h3,summary,p.summary{break-after:avoid}figure,.drawing,.item,tr{break-inside:avoid}}
)css";

// "1.5e-3", "-12", "3.1 %", "12.3k", "NaN", "–": what belongs on the right of its column. `unit`: characters
// that may follow the number, with a space before them.
bool numeric(const std::string& cell, std::size_t unit = 2) {
  if (cell.empty() || cell == "–" || cell == "-" || cell == "NaN" || cell == "nan" || cell == "inf")
    return true;
  std::size_t i = cell[0] == '-' || cell[0] == '+' ? 1 : 0;
  if (i >= cell.size() || !std::isdigit(static_cast<unsigned char>(cell[i]))) return false;
  const std::size_t end = cell.find_first_not_of("0123456789.,eE+-", i);
  return end == std::string::npos || cell.size() - end <= unit;
}

bool digit_at(const std::string& text, std::size_t i) {
  return i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])) != 0;
}

// Marks places where a long name may break: after dots, slashes and underscores, but not in a number.
std::string with_breaks(const std::string& escaped) {
  std::string html;
  for (std::size_t i = 0; i < escaped.size(); ++i) {
    html += escaped[i];
    const bool point = i > 0 && escaped[i] == '.' && digit_at(escaped, i - 1) && digit_at(escaped, i + 1);
    if ((escaped[i] == '.' && !point) || escaped[i] == '/' || escaped[i] == '_') html += "<wbr>";
  }
  return html;
}

// `code` of escaped text, as in Markdown.
std::string with_code(std::string html) {
  for (std::size_t open = 0; (open = html.find('`', open)) != std::string::npos;) {
    const std::size_t close = html.find('`', open + 1);
    if (close == std::string::npos) break;
    html.replace(close, 1, "</code>").replace(open, 1, "<code>");
    open = close;
  }
  return html;
}

constexpr std::size_t kLongCell = 24;     // characters from which a cell's text may take several lines
constexpr double kLongWidth = 160;        // pixels that such a column has at least (.long)
constexpr std::size_t kSentences = 120;   // characters from which a narrow cell among others fills the screen
constexpr double kSentencesWidth = 440;   // pixels that such a column has at least (.sentences)
constexpr double kPageWidth = 1030;       // pixels of the widest section
constexpr double kNarrowTable = 600;      // pixels up to which a table is as wide as its content
constexpr std::size_t kRowsInSight = 15;  // of a table, which scrolls beyond its height

constexpr double kNarrowest = 360;  // pixels of a section on a telephone

// Shown on screens that are narrower than something `width` pixels wide with the page's margins.
std::string hint(double width, const char* what, const char* kind = "hint") {
  constexpr double kMargins = 50;
  if (width <= kNarrowest) return {};
  return fmt::format(
      "<p class=\"{}\" style=\"max-height:{}\">{} is wider than the screen: scroll it sideways →</p>\n", kind,
      width > kPageWidth ? "none" : fmt::format("clamp(0px,({:.0f}px - 100vw)*99,3em)", width + kMargins),
      what);
}

// Shortens a long name at its beginning, because the end is more specific.
std::string elided(const std::string& text, std::size_t width) {
  if (characters(text) <= width) return text;
  std::string end;
  for (std::size_t at = text.size(); at-- > 0 && characters(end) + 1 < width;)
    end.insert(end.begin(), text[at]);
  while (!end.empty() && (end.front() & 0xc0) == 0x80) end.erase(end.begin());  // an incomplete character
  return "…" + end;
}

std::size_t longest_word(const std::string& text) {
  std::size_t longest = 0, length = 0;
  for (const char c : text) {
    length = c == ' ' ? 0 : length + 1;
    longest = std::max(longest, length);
  }
  return longest;
}

std::string last_value(const Series& series) {
  for (auto point = series.points.rbegin(); point != series.points.rend(); ++point)
    if (std::isfinite(point->y)) return short_number(point->y);
  return "–";
}

}  // namespace

std::size_t characters(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));  // bytes that begin one
}

std::string text_table(TextRows rows, const TextTable& style) {
  std::vector<std::size_t> width;
  std::vector<bool> right;
  std::size_t all = style.indent;
  for (auto& row : rows) {
    width.resize(std::max(width.size(), row.size())), right.resize(width.size(), true);
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = printable(row[i]);
      width[i] = std::max(width[i], characters(row[i]));
      right[i] = i > 0 && right[i] && (&row == &rows.front() || numeric(row[i]));
    }
  }
  for (const std::size_t each : width) all += each + 2;
  constexpr std::size_t kLeastName = 12;
  if (all - 2 > style.most_columns)
    width[0] = std::max(kLeastName, width[0] - std::min(width[0], all - 2 - style.most_columns));
  std::string text;
  for (auto& row : rows) {
    std::string line(style.indent, ' ');
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string cell = i == 0 ? elided(row[0], width[0]) : row[i];
      const std::string padding(width[i] - std::min(width[i], characters(cell)), ' ');
      line += (i == 0 ? "" : "  ") + (right[i] ? padding + cell : cell + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string svg_file(const std::string& picture) {
  const std::size_t name = std::string_view("<svg").size(), head = picture.find('>') + 1;
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" font-family=\"system-ui, sans-serif\"" +
         picture.substr(name, head - name) +
         fmt::format("\n<style>{}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"var(--card)\"/>\n",
                     kChartStyle) +
         picture.substr(head) + "\n";
}

std::string svg_sheet(const std::string& title, const std::vector<Chart>& charts) {
  constexpr double kWide = 460, kTall = 300, kHead = 50;  // of a chart with its title; of the legend
  const std::size_t columns = std::clamp<std::size_t>(charts.size(), 1, 3);
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:g} {:g}\" font-family=\"system-ui, sans-serif\">\n"
      "<title>{}</title>\n<style>{}text{{fill:currentColor}}</style>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"var(--card)\"/>\n",
      static_cast<double>(columns) * kWide,
      kHead + static_cast<double>((charts.size() + columns - 1) / columns) * kTall, escape_html(title),
      kChartStyle);
  const auto write = [&](double x, double y, const std::string& kind, const std::string& words) {
    text += fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\" class=\"{}\">{}</text>\n", x, y, kind,
                        escape_html(words));
  };
  double x = 24;
  for (std::size_t i = 0; !charts.empty() && i < charts.front().series.size(); ++i) {
    const std::string& name = charts.front().series[i].name;
    write(x, 28, fmt::format("c{}", i % 6), "— " + name);
    x += 46 + 8 * static_cast<double>(name.size());
  }
  for (std::size_t i = 0; i < charts.size(); ++i) {
    const double left = static_cast<double>(i % columns) * kWide + 10,
                 top = kHead + static_cast<double>(i / columns) * kTall;
    write(left + 58, top + 16, "label", charts[i].title + ", " + charts[i].y_label);
    text += fmt::format("<g transform=\"translate({:.0f} {:.0f})\">{}</g>\n", left, top + 24, svg(charts[i]));
  }
  return text + "</svg>\n";
}

Report::Report(std::string title, std::string subtitle)
    : title_(std::move(title)), subtitle_(std::move(subtitle)) {}

void Report::section(std::string html) {
  if (in_charts_) body_ += "</div>\n";
  in_charts_ = false;
  body_ += html + "\n";
}

void Report::verdict(bool good, std::string text) {
  verdicts_ += fmt::format("<p class=\"verdict {}\">{} {}</p>\n", good ? "good" : "bad", good ? "✓" : "✗",
                           with_breaks(escape_html(text)));
}

void Report::fact(std::string label, std::string value) {
  facts_ += fmt::format("<div title=\"{0}: {1}\"><dt>{0}</dt><dd>{1}</dd></div>\n", escape_html(label),
                        escape_html(value));
}

void Report::chart(Chart chart) {
  if (!in_charts_) body_ += "<div class=\"charts\">\n";
  in_charts_ = true;
  std::string legend;
  std::size_t bad = 0;
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const auto& series = chart.series[i];
    legend += fmt::format("<span title=\"{0}\"><i class=\"c{1}\"></i>{0}{2}</span>", escape_html(series.name),
                          i % 6, chart.lines ? fmt::format(" <b>{}</b>", last_value(series)) : "");
    for (const auto& point : series.points) bad += !std::isfinite(point.y);
    if (i == 0 && draws_median(chart))
      legend += fmt::format("<span>median of {} {} <b>{}</b></span>",
                            2 * median_reach(series.points.size()) + 1, escape_html(chart.x_label + "s"),
                            last_value({series.name, running_median(series.points)}));
  }
  if (const OffScale off = off_scale(chart); off.count > 0)
    legend += fmt::format("<span>{} value{} off the scale, furthest <b>{}</b></span>", off.count,
                          off.count == 1 ? "" : "s", short_number(off.furthest));
  if (bad > 0)
    legend +=
        fmt::format("<span class=\"not-finite\">{} value{} not finite</span>", bad, bad == 1 ? "" : "s");
  body_ += fmt::format("<figure><h3>{}<span>{}</span></h3><figcaption>{}</figcaption>{}</figure>\n",
                       escape_html(chart.title), escape_html(chart.y_label), legend, svg(chart));
}

void Report::table(const std::string& title, const std::string& summary,
                   const std::vector<std::string>& headings,
                   const std::vector<std::vector<std::string>>& rows) {
  const std::size_t columns = headings.size();
  constexpr std::size_t kUnit = 4;  // " GiB"
  std::vector<bool> right(columns, true);
  std::vector<std::size_t> longest(columns), word(columns);
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size() && i < columns; ++i) {
      right[i] = right[i] && numeric(row[i], kUnit);
      longest[i] = std::max(longest[i], characters(row[i]));
      word[i] = std::max(word[i], longest_word(row[i]));
    }
  const auto sentences = [&](std::size_t i) { return longest[i] > kSentences && columns > 2; };
  // Estimated: 7.5 pixels a character. Headings take one line where the page is wide enough for that.
  const auto width_with = [&](std::size_t (*of_heading)(const std::string&), bool least) {
    double width = 0;
    for (std::size_t i = 0; i < columns; ++i) {
      const std::size_t letters = least && !right[i] ? word[i] : longest[i];
      width += 24 + std::max(sentences(i)             ? kSentencesWidth
                             : longest[i] > kLongCell ? kLongWidth
                                                      : 7.5 * static_cast<double>(letters),
                             7.5 * static_cast<double>(of_heading(headings[i])));
    }
    return width;
  };
  const auto in_a_line = [](const std::string& heading) { return characters(heading); };
  const double in_one_line = width_with(in_a_line, false);
  const bool roomy = in_one_line <= kPageWidth;
  const double width = roomy ? width_with(in_a_line, true) : width_with(longest_word, true);
  const bool cards = columns > 2 && width > kNarrowest;  // on a telephone each row is one
  const auto cells = [&](const std::vector<std::string>& row, std::string_view tag) {
    std::string html = "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i) {
      const bool number = i < columns && right[i] && !rows.empty();
      const bool wraps = i < columns && longest[i] > kLongCell;
      html += fmt::format(
          "<{0}{1}{2}>{3}</{0}>", tag,
          cards && tag == "td" && i < columns ? fmt::format(" data-h=\"{}\"", escape_html(headings[i])) : "",
          number  ? " class=\"number\""
          : wraps ? (sentences(i) ? " class=\"sentences\"" : " class=\"long\"")
                  : "",
          wraps ? with_breaks(escape_html(row[i])) : escape_html(row[i]));
    }
    return html + "</tr>\n";
  };
  std::string html = fmt::format("<h2>{}</h2>\n", escape_html(title));
  if (!summary.empty())
    html += fmt::format("<p class=\"summary\">{}</p>\n", with_code(with_breaks(escape_html(summary))));
  html += hint(width, "This table", cards ? "hint cards-hint" : "hint");
  const bool cut = rows.size() > kRowsInSight;
  if (cut) html += fmt::format("<p class=\"hint\">{} rows: scroll down in the table ↓</p>\n", rows.size());
  html += std::string("<div class=\"wide") + (cut ? "" : " whole") + (cards ? " cards" : "") +
          (in_one_line <= kNarrowTable ? " fit" : "") + "\"><table" + (roomy ? " class=\"roomy\"" : "") +
          "><thead>" + cells(headings, "th") + "</thead><tbody>\n";
  for (const auto& row : rows) html += cells(row, "td");
  section(html + "</tbody></table></div>");
}

void Report::figure(std::string title, std::string caption, std::string svg, double width) {
  section(
      fmt::format("<h2>{}</h2>\n<p class=\"summary\">{}</p>\n{}<div class=\"wide drawing\"><div "
                  "class=\"{}\"{}>{}</div></div>",
                  escape_html(title), escape_html(caption), width > 0 ? hint(width + 30, "This picture") : "",
                  width > 0 ? "natural" : "scaled",
                  width > 0 ? fmt::format(" style=\"width:{:.0f}px\"", width) : "", svg));
}

void Report::prose(std::string title, std::vector<std::string> paragraphs) {
  std::string html = title.empty() ? "" : fmt::format("<h2>{}</h2>\n", escape_html(title));
  for (const auto& paragraph : paragraphs)
    html += fmt::format("<p class=\"prose\">{}</p>\n", with_code(escape_html(paragraph)));
  section(html);
}

void Report::list(std::string title, std::vector<std::pair<std::string, std::vector<std::string>>> items) {
  std::string html = fmt::format("<h2>{}</h2>\n", escape_html(title));
  for (const auto& [statement, reasons] : items) {
    html += fmt::format("<div class=\"item\"><p>{}</p>\n", with_code(escape_html(statement)));
    if (!reasons.empty()) {
      html += "<ul>";
      for (const auto& reason : reasons) html += fmt::format("<li>{}</li>\n", with_code(escape_html(reason)));
      html += "</ul>";
    }
    html += "</div>\n";
  }
  section(html);
}

void Report::text(std::string title, std::string body) {
  // A line break right after <pre> would be swallowed: one more keeps the body as it is.
  section(fmt::format("<h2>{}</h2>\n<pre>\n{}</pre>", escape_html(title), escape_html(body)));
}

void Report::folded(std::string title, std::string body) {
  fold(std::move(title));
  section(fmt::format("<pre>\n{}</pre>", escape_html(body)));
  unfold();
}

void Report::fold(std::string title) {
  section(fmt::format("<details><summary>{}</summary>", escape_html(title)));
}

void Report::unfold() { section("</details>"); }

std::string Report::html() const {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src "
      "data:; style-src 'unsafe-inline'\">\n"
      "<title>{0}</title>\n<style>{1}</style>\n</head>\n<body>\n<main>\n<header><h1>{0}</h1>\n{2}{3}</header>\n{4}{5}{6}</main>\n</body>\n</html>\n",
      escape_html(title_), std::string(kChartStyle) + kPageStyle,
      subtitle_.empty() ? "" : fmt::format("<p class=\"subtitle\">{}</p>\n", escape_html(subtitle_)),
      verdicts_, facts_.empty() ? "" : "<dl class=\"facts\">\n" + facts_ + "</dl>\n", body_,
      in_charts_ ? "</div>\n" : "");
}

void Report::write(const fs::path& file) const {
  if (file.has_parent_path()) make_folders(file.parent_path());
  write_file(file, html());
}

std::string base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    const std::size_t taken = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t j = 0; j < 3; ++j)
      group = group << 8 | (j < taken ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    for (std::size_t j = 0; j < 4; ++j) text += j <= taken ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

}  // namespace isograd
