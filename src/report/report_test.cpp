#include "report/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <iomanip>
#include <limits>
#include <map>
#include <regex>
#include <sstream>

#include "base/files.hpp"
#include "report/event_file.hpp"
#include "report/tags_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Chart chart_of(std::vector<Point> points) {
  return {.title = "t", .x_label = "step", .y_label = "u", .series = {{"s", std::move(points)}}};
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// The points of the drawn line, in the picture's units.
std::vector<Point> line_of(const std::string& picture) {
  std::vector<Point> points;
  const std::string begins = "class=\"line c0\" d=\"";
  const auto path = picture.find(begins);
  if (path == std::string::npos) return points;
  const auto first = path + begins.size();
  const std::string text = picture.substr(first, picture.find('"', first) - first);  // M1.5 2L3 4.5...
  for (auto at = text.find_first_of("ML"); at != std::string::npos; at = text.find_first_of("ML", at + 1)) {
    std::size_t length = 0;
    const double x = std::stod(text.substr(at + 1), &length);
    points.push_back({x, std::stod(text.substr(at + 1 + length))});
  }
  return points;
}

std::string fixed(double value) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << value;
  return text.str();
}

TEST(Report, EscapesEverything) {
  const std::string evil = "<script>alert(\"1\")</script>&'\x01\xff\u202e\u200f\u0085\u2028";
  Report report(evil, evil);
  report.verdict(true, evil);
  report.fact(evil, evil);
  Chart chart{.title = evil, .x_label = evil, .y_label = evil, .series = {{evil, {{1, 1}, {2, kNaN}}}}};
  chart.marks = {{evil, 1.0}};
  report.chart(chart);
  report.table(evil, evil, {evil}, {{evil}});
  report.text(evil, evil);
  report.folded(evil, evil);
  const std::string html = report.html();
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr("alert(\"")));
  EXPECT_THAT(html, Not(HasSubstr("\x01")));
  EXPECT_THAT(html, Not(HasSubstr("\xff")));
  for (const char* turned : {"\u202e", "\u200f", "\u0085", "\u2028"})
    EXPECT_THAT(html, Not(HasSubstr(turned)));
  EXPECT_THAT(
      html, HasSubstr("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;\uFFFD\uFFFD\uFFFD\uFFFD"));
}

TEST(Report, NeedsNothingFromOutside) {
  Report report("run");
  report.chart(chart_of({{1, 1}}));
  const std::string html = report.html();
  for (const char* part : {"http://", "https://", "src=", "href=", "url(", "@import", "<link", "<script"})
    EXPECT_THAT(html, Not(HasSubstr(part)));
  EXPECT_THAT(html, HasSubstr("default-src 'none'"));
}

TEST(Report, TagsAreClosedInOrder) {
  Report report("run", "done");
  report.verdict(true, "fine");
  report.fact("a", "b");
  report.chart(chart_of({{1, 1}, {2, 2}}));
  report.chart(chart_of({{1, 1}}));
  report.table("T", "", {"a", "b"}, {{"1", "2"}});
  report.chart(chart_of({{1, kNaN}}));
  EXPECT_THAT(open_tags(report.html()), ::testing::IsEmpty());
}

TEST(Report, WritesTheWholeFile) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / ("report-" + std::to_string(getpid()));
  Report report("run");
  report.write(folder / "deep/report.html");
  EXPECT_EQ(read_file(folder / "deep/report.html"), report.html());
  std::filesystem::remove_all(folder);
}

TEST(Report, NumbersStandOnTheRight) {
  Report report("run");
  report.table("T", "", {"name", "error"},
               {{"1 fish", "1.5e-13"}, {"b", "NaN"}, {"c", "–"}, {"d", "12.3k"}, {"e", "3 %"}});
  EXPECT_EQ(count(report.html(), "<td class=\"number\">"), 5u);
  EXPECT_THAT(report.html(), HasSubstr("<td>1 fish</td>"));
}

TEST(Chart, LineGoesThroughItsPoints) {
  // x and y are affine, so proportions are kept; y grows downwards in the picture.
  const auto line = line_of(svg(chart_of({{0, 0}, {10, 1}, {20, 4}})));
  ASSERT_EQ(line.size(), 3u);
  const double places = 0.1;  // coordinates have one decimal
  EXPECT_NEAR(line[1].x - line[0].x, line[2].x - line[1].x, 2 * places);
  EXPECT_NEAR(3 * (line[0].y - line[1].y), line[1].y - line[2].y, 4 * places);
  EXPECT_GT(line[0].y, line[2].y);
}

TEST(Chart, OnePointIsADot) {
  const std::string picture = svg(chart_of({{1, 5.5}}));
  EXPECT_EQ(count(picture, "<circle"), 1u);
  EXPECT_TRUE(line_of(picture).empty());
  EXPECT_THAT(picture, Not(HasSubstr("nan")));
}

TEST(Chart, NotFiniteLeavesAGapAndAMark) {
  std::vector<Point> points;
  for (int i = 0; i < 100; ++i)
    points.push_back({double(i), i == 50 ? kNaN : i == 60 ? -INFINITY : 1.0 + i % 3});
  const std::string picture = svg(chart_of(points));
  EXPECT_EQ(count(picture, "class=\"cross\""), 2u);
  const std::string path = picture.substr(picture.find("class=\"line c0\""));
  EXPECT_EQ(count(path.substr(0, path.find("/>")), "M"), 3u);
  Report report("run");
  report.chart(chart_of(points));
  EXPECT_THAT(report.html(), HasSubstr("2 values not finite"));
}

TEST(Chart, NothingToDrawIsSaid) {
  EXPECT_THAT(svg(chart_of({})), HasSubstr("no value that could be drawn"));
  EXPECT_THAT(svg(chart_of({{1, kNaN}})), HasSubstr("no value that could be drawn"));
  EXPECT_THAT(svg({.title = "t", .x_label = "", .y_label = "", .series = {}}),
              HasSubstr("no value that could be drawn"));
}

TEST(Chart, TenThousandPointsKeepEverySpike) {
  std::vector<Point> points;
  for (int i = 0; i < 10000; ++i)
    points.push_back({double(i), i == 7321 ? 100.0 : i == 2222 ? -100.0 : std::sin(i)});
  const std::string picture = svg(chart_of(points));
  const auto line = line_of(picture);
  EXPECT_LT(line.size(), 2100u);  // four a column of the picture
  EXPECT_LT(picture.size(), 60000u);
  const auto [low, high] =
      std::minmax_element(line.begin(), line.end(), [](auto& a, auto& b) { return a.y < b.y; });
  const auto whole = line_of(svg(chart_of({{0, 0}, {2222, -100}, {7321, 100}, {9999, 0}})));
  EXPECT_NEAR(high->x, whole[1].x, 0.2);
  EXPECT_NEAR(high->y, whole[1].y, 0.2);
  EXPECT_NEAR(low->x, whole[2].x, 0.2);
  EXPECT_NEAR(low->y, whole[2].y, 0.2);
  EXPECT_TRUE(std::is_sorted(line.begin(), line.end(), [](auto& a, auto& b) { return a.x < b.x; }));
}

TEST(Chart, ExtremeValuesStayInsideThePicture) {
  for (const auto& points : std::vector<std::vector<Point>>{{{1, 1e299}, {2, -1e299}, {3, 0}},
                                                            {{1, 1e-300}, {2, 2e-300}},
                                                            {{1, 5}, {2, 5}},
                                                            {{0, 0}, {1, 0}},
                                                            {{1e15, 1}, {2e15, 2}},
                                                            {{1, 1e308}, {2, 1}, {3, 2}}}) {
    const std::string picture = svg(chart_of(points));
    EXPECT_THAT(picture, Not(HasSubstr("nan")));
    for (const auto& point : line_of(picture)) {
      EXPECT_TRUE(point.x >= 0 && point.x <= 520) << picture;
      EXPECT_TRUE(point.y >= 0 && point.y <= 270) << picture;
    }
    EXPECT_LT(count(picture, "class=\"tick\""), 24u);
    EXPECT_GT(count(picture, "class=\"tick\""), 3u);
  }
}

// A loss that falls from 5 to 2, uneven from step to step by 0.1 at most, with `spikes` at some steps.
std::vector<Point> falling_loss(const std::vector<int>& spikes) {
  std::vector<Point> points;
  for (int i = 0; i < 300; ++i)
    points.push_back({double(i + 1), 2 + 3 * std::exp(-i / 40.0) + 0.1 * std::sin(i * 2.7)});
  for (const int i : spikes) points[static_cast<std::size_t>(i)].y = 1e6;
  return points;
}

TEST(Chart, SpikesDoNotSqueezeASmoothedLoss) {
  for (const auto& spikes : std::vector<std::vector<int>>{{}, {150}, {0}, {299}, {0, 1, 77, 78, 200, 299}}) {
    Chart chart = chart_of(falling_loss(spikes));
    chart.smooth = true;
    const auto line = line_of(svg(chart));  // of the median: the values themselves have another class
    ASSERT_EQ(line.size(), 300u);
    const auto [low, high] =
        std::minmax_element(line.begin(), line.end(), [](auto& a, auto& b) { return a.y < b.y; });
    EXPECT_GT(high->y - low->y, 100) << spikes.size() << " spikes";  // of a picture 260 high
    EXPECT_EQ(off_scale(chart).count, spikes.size());
    EXPECT_EQ(count(svg(chart), "class=\"off c0\""), spikes.size());
    Report report("run");
    report.chart(chart);
    if (spikes.size() > 1) {
      EXPECT_THAT(report.html(), HasSubstr("6 values off the scale, furthest <b>1M</b>"));
    }
    EXPECT_THAT(report.html(), HasSubstr("median of 11 steps"));
  }
}

TEST(Chart, ALossWithoutSpikesIsAllOnTheScale) {
  Chart chart = chart_of(falling_loss({}));
  chart.smooth = true;
  EXPECT_EQ(off_scale(chart).count, 0u);
  chart.series[0].points.resize(4);
  EXPECT_EQ(off_scale(chart).count, 0u);
  EXPECT_FALSE(draws_median(chart));  // a median of a few points would mean nothing
}

TEST(Chart, RunningMedianIsTheMedianOfTheNeighbours) {
  std::vector<Point> points;
  for (int i = 0; i < 10; ++i) points.push_back({double(i), double(i * i % 7)});  // 0 1 4 2 2 4 1 0 1 4
  points[5].y = kNaN;
  const auto median = running_median(points);  // two on either side
  EXPECT_EQ(median[3].y, 2);                   // of 1 4 2 2
  EXPECT_EQ(median[8].y, 1);                   // of 1 0 1 4
  EXPECT_TRUE(std::isnan(median[5].y));
}

TEST(Chart, LabelsOfMarksDoNotOverlap) {
  Chart chart = chart_of({{0, 1}, {10, 5}});
  chart.marks = {{"a", 4.9}, {"b", 5}, {"c", 4.95}, {"d", 1}};
  const std::string picture = svg(chart);
  const std::regex label("class=\"label over\" x=\"[0-9.]+\" y=\"([0-9.]+)\"");
  std::vector<double> places;
  for (std::sregex_iterator at(picture.begin(), picture.end(), label), end; at != end; ++at)
    places.push_back(std::stod((*at)[1]));
  ASSERT_EQ(places.size(), 4u);
  for (std::size_t i = 1; i < places.size(); ++i) EXPECT_GE(places[i] - places[i - 1], 15.9);
  EXPECT_GE(places[0], 12);  // a line's height below the edge
}

TEST(Chart, VerticalMarksAndGuidesFollowTheAxes) {
  Chart chart = chart_of({{1, 10}, {10, 100}, {100, 1000}});
  chart.log_x = chart.log_y = true;
  chart.x_marks = {{"law & order", 10}, {"beyond", 1e6}, {"next", 100}};
  chart.guides = {{{1, 10}, {100, 1000}}};
  const std::string picture = svg(chart);
  const auto line = line_of(picture);
  ASSERT_EQ(line.size(), 3u);
  // A guide through the first and the last point, and a mark at the second.
  EXPECT_THAT(picture, HasSubstr("class=\"mark\" d=\"M" + fixed(line[0].x) + " " + fixed(line[0].y) + "L" +
                                 fixed(line[2].x) + " " + fixed(line[2].y) + "\""));
  EXPECT_THAT(picture, HasSubstr("class=\"mark\" d=\"M" + fixed(line[1].x) + " 14.0v"));
  EXPECT_THAT(picture, HasSubstr("law &amp; order"));
  EXPECT_THAT(picture, Not(HasSubstr("beyond")));
  EXPECT_EQ(count(picture, "class=\"mark\""), 3u);
  chart.guides.clear(), chart.x_marks.clear();
  EXPECT_EQ(line_of(svg(chart))[1].x, line[1].x) << "neither widens the axes";
}

TEST(BarsOf, AreAsWideAsTheirValuesAndEndAtTheLimit) {
  Bars bars{.title = "memory", .unit = "GiB", .parts = {"a", "b", "<c>"}, .bars = {}};
  bars.bars = {{"first", "10 GiB", {2, 3, 5}}, {"second <one>", "", {4, 0, 0}}};
  bars.limits = {{"the device", 20}};
  const std::string picture = svg(bars);
  EXPECT_THAT(open_tags(picture), ::testing::IsEmpty());
  const std::regex rect(
      "<rect class=\"part c([0-7])\" x=\"([0-9.]+)\" y=\"[0-9.]+\" width=\"([0-9.]+)\"[^<]*<title>([^<]*)");
  std::vector<std::smatch> found;
  for (std::sregex_iterator at(picture.begin(), picture.end(), rect), end; at != end; ++at)
    found.push_back(*at);
  ASSERT_EQ(found.size(), 4u);  // none for 0
  const auto number = [&](std::size_t i, int of) {
    return std::stod(found[i][static_cast<std::size_t>(of)]);
  };
  const double unit = number(3, 3) / 4;
  for (const auto& [i, value] : {std::pair<std::size_t, double>{0, 2}, {1, 3}, {2, 5}})
    EXPECT_NEAR(number(i, 3), unit * value, 0.1);
  EXPECT_NEAR(number(1, 2), number(0, 2) + number(0, 3), 0.11);
  EXPECT_EQ(found[2][4], "&lt;c&gt;: 5 GiB");
  std::smatch mark;
  ASSERT_TRUE(std::regex_search(picture, mark, std::regex("class=\"mark\" d=\"M([0-9.]+)")));
  EXPECT_NEAR(std::stod(mark[1]), number(0, 2) + 20 * unit, 0.5);
  EXPECT_THAT(svg(Bars{.title = "t", .unit = "", .parts = {"a"}, .bars = {}}),
              HasSubstr("no value that could be drawn"));
  const std::string file = svg_file(picture);
  EXPECT_THAT(open_tags(file), ::testing::IsEmpty());
  EXPECT_THAT(file, ::testing::StartsWith("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_THAT(file, HasSubstr("aria-label=\"memory\""));
  EXPECT_THAT(file, HasSubstr("prefers-color-scheme:dark"));
}

Lanes two_stages() {
  return {.title = "<one>",
          .spans = {{"rank 0", "F0", 0, 1}, {"rank 1", "B0", 1, 3}, {"rank 0", "F1", 1, 2}},
          .end = 0,
          .unit = "seconds",
          .time_text = [](double time) { return fixed(time) + " s"; },
          .colour = [](const Lanes::Span& span) { return span.name[0] == 'F' ? "c0" : "c2"; },
          .legend = {{"c0", "F: forward"}, {"c2", "B: backward"}, {"c4", "W: weights"}, {"lane", "waiting"}}};
}

TEST(LanesOf, HaveALegendAnAxisWithItsUnitAndColoursOfThePage) {
  const std::string picture = svg(two_stages());
  EXPECT_THAT(open_tags(picture), ::testing::IsEmpty());
  for (const char* said :
       {">F: forward<", ">B: backward<", ">waiting<", ">seconds<", "<title>F1: 1.0 s to 2.0 s<"})
    EXPECT_THAT(picture, HasSubstr(said));
  EXPECT_THAT(picture, Not(HasSubstr("W: weights"))) << "no span has it";
  EXPECT_GE(count(picture, "class=\"tick\""), 4u);
  for (const char* fixed_look : {"#", "fill=", "stroke=", "font"})
    EXPECT_THAT(picture, Not(HasSubstr(fixed_look)));
  Lanes file = two_stages();
  EXPECT_THAT(picture, Not(HasSubstr(">&lt;one&gt;<")));
  file.titled = true;
  EXPECT_THAT(svg(file), HasSubstr(">&lt;one&gt;<"));
}

// Pictures below one another can be compared only on one axis.
TEST(LanesOf, KeepToTheEndThatIsGiven) {
  const auto width = [](double end) {
    Lanes lanes = two_stages();
    lanes.end = end;
    const std::string picture = svg(lanes);
    std::smatch found;
    EXPECT_TRUE(std::regex_search(picture, found,
                                  std::regex("\"part c2\" x=\"[0-9.]+\" y=\"[0-9.]+\" width=\"([0-9.]+)")));
    return std::stod(found[1]);
  };
  EXPECT_NEAR(width(3), 2 * width(6), 0.02);
  EXPECT_EQ(width(0), width(3)) << "no later than the last span";
}

TEST(LanesOf, ManyAreDrawnInProportion) {
  Lanes lanes = two_stages();
  for (int i = 0; i < 80'000; ++i) lanes.spans.push_back({"stage " + std::to_string(i % 40'000), "F0", 0, 1});
  EXPECT_THAT(svg(lanes), HasSubstr("stage 39999"));
}

TEST(Chart, ALongLineNamesItsValuesUnderThePointer) {
  Chart chart = chart_of({});
  for (int i = 0; i <= 300; ++i) chart.series[0].points.push_back({double(i), i == 200 ? 7.25 : 1.0});
  chart.series.push_back({"rare & dear", {{0, 5}, {100, 2.5}}});
  const std::string picture = svg(chart);
  EXPECT_EQ(count(picture, "class=\"strip\""), 100u);
  EXPECT_THAT(picture, HasSubstr("<title>step 300: s 1</title>"));
  EXPECT_THAT(picture, HasSubstr(": s 1, rare &amp; dear 2.5</title>"));
  EXPECT_EQ(count(svg(chart_of({{0, 1}, {1, 2}})), "class=\"strip\""), 0u) << "its points have markers";
}

TEST(Chart, TheLabelOfAMarkKeepsClearOfTheLine) {
  Chart chart = chart_of({});
  for (int i = 0; i <= 100; ++i) chart.series[0].points.push_back({double(i), 5 - 0.04 * i});
  const auto anchor = [&](double mark) {
    chart.marks = {{"entropy", mark}};
    std::smatch found;
    const std::string picture = svg(chart);
    EXPECT_TRUE(std::regex_search(picture, found, std::regex("label over[^>]*anchor=\"(start|end)")));
    return std::string(found[1]);
  };
  EXPECT_EQ(anchor(1.2), "start") << "the line ends there";
  EXPECT_EQ(anchor(4.9), "end") << "it begins there";
  chart.series = {{"validation", {{0, 5}, {50, 4}, {100, 3}}}};
  EXPECT_EQ(anchor(2.9), "start") << "the last point is next to the label's end";
}

TEST(Report, FoldedSectionsAreOpenOnPaper) {
  Report report("run");
  report.fold("All <of> them");
  report.chart(chart_of({{1, 1}}));
  report.table("T", "", {"a"}, {{"1"}});
  report.unfold();
  report.text("after", "it");
  const std::string html = report.html();
  EXPECT_THAT(open_tags(html), ::testing::IsEmpty());
  EXPECT_THAT(html, HasSubstr("<details><summary>All &lt;of&gt; them</summary>"));
  EXPECT_LT(html.find("<figure>"), html.find("</details>"));
  EXPECT_LT(html.find("</details>"), html.find("<h2>after</h2>"));
  const std::string paper = html.substr(html.find("@media print"));
  EXPECT_THAT(paper, HasSubstr("details::details-content{content-visibility:visible"));
  EXPECT_THAT(paper, HasSubstr(".hint{display:none}"));
}

TEST(Report, ATableThatMayBeTooWideSaysSo) {
  const auto page = [](std::size_t columns) {
    Report report("run");
    report.table("T", "", std::vector<std::string>(columns, "error fp64"),
                 {std::vector<std::string>(columns, "1.23e-12")});
    return report.html();
  };
  EXPECT_THAT(page(2), Not(HasSubstr("<p class=\"hint")));
  EXPECT_THAT(
      page(6),
      HasSubstr("<p class=\"hint cards-hint\" style=\"max-height:clamp(0px,(644px - 100vw)*99,3em)\">"));
  EXPECT_THAT(page(6), HasSubstr("<table class=\"roomy\">")) << "headings in one line";
  EXPECT_THAT(page(30), HasSubstr("<table>"));
  EXPECT_THAT(page(30), HasSubstr("<p class=\"hint cards-hint\" style=\"max-height:none\">"));
  Report text("run");  // of words, which take more lines where there is less room
  text.table("T", "", {"a", "b", "c"}, {{"one of them", "two", std::string(20, 'x') + " y"}});
  EXPECT_THAT(text.html(), Not(HasSubstr("is wider than the screen")));
}

TEST(Report, RowsOfAWideTableHaveTheirHeadingsWithThemOnATelephone) {
  Report report("run");
  const std::string long_name(23, 'x');
  report.table("narrow", "", {"a", "b", "c"}, {{"1", "2", "3"}});
  EXPECT_THAT(report.html(), Not(HasSubstr("data-h=")));
  report.table("wide", "", {"verdict", "\"parameter\"", "error"}, {{long_name, long_name, "1.5 GiB"}});
  const std::string html = report.html();
  EXPECT_THAT(html, HasSubstr("<div class=\"wide whole cards"));
  EXPECT_THAT(html, HasSubstr("<td data-h=\"verdict\">" + long_name + "</td>"));
  EXPECT_THAT(html, HasSubstr("<td data-h=\"&quot;parameter&quot;\">"));
  EXPECT_THAT(html, HasSubstr("<td data-h=\"error\" class=\"number\">1.5 GiB</td>"));
  EXPECT_THAT(html, HasSubstr(".cards td::before{content:attr(data-h)"));
  EXPECT_THAT(html, HasSubstr(".cards thead,.cards-hint{display:none}"));
  EXPECT_THAT(html, Not(HasSubstr("<th data-h")));
}

TEST(Report, CodeInSentencesIsMarkedAndEscaped) {
  Report report("run");
  report.list("L", {{"call `f<int>(x)` once", {"not `twice"}}});
  report.prose("P", {"`isograd plan` and `--try`"});
  const std::string html = report.html();
  EXPECT_THAT(html, HasSubstr("<p>call <code>f&lt;int&gt;(x)</code> once</p>"));
  EXPECT_THAT(html, HasSubstr("<li>not `twice</li>")) << "one that is not closed stays";
  EXPECT_THAT(html, HasSubstr("<code>isograd plan</code> and <code>--try</code>"));
  EXPECT_THAT(open_tags(html), ::testing::IsEmpty());
}

// WCAG 2.1, "relative luminance" and "contrast ratio".
double luminance(const std::string& colour) {
  double light = 0;
  const double weights[] = {0.2126, 0.7152, 0.0722};
  const bool brief = colour.size() == 4;  // "#abc"
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string digits = brief ? std::string(2, colour[1 + i]) : colour.substr(1 + 2 * i, 2);
    const double part = std::stoi(digits, nullptr, 16) / 255.0;
    light += weights[i] * (part <= 0.03928 ? part / 12.92 : std::pow((part + 0.055) / 1.055, 2.4));
  }
  return light;
}

TEST(Report, TextCanBeReadOnItsBackgroundLightAndDark) {
  const std::string html = Report("run").html();
  const auto colours = [](const std::string& css) {
    std::map<std::string, std::string> found;
    const std::regex variable("--([a-z0-9-]+):(#[0-9a-f]{3}(?:[0-9a-f]{3})?)[;}]");
    for (std::sregex_iterator each(css.begin(), css.end(), variable), end; each != end; ++each)
      found[(*each)[1]] = (*each)[2];
    return found;
  };
  const std::size_t light = html.find(":root{"), dark = html.find(":root{", light + 1);
  for (const std::size_t at : {light, dark}) {
    auto of = colours(html.substr(at, html.find('}', at) + 1 - at));
    // As in .inside: which text is on which of the colours.
    of["c1-text"] = of["c2-text"] = of["c4-text"] = "#111";
    of["c6-text"] = of["c7-text"] = of["on-light"];
    of["c0-text"] = of["c3-text"] = of["c5-text"] = of["on-dark"];
    std::vector<std::pair<std::string, std::string>> pairs = {{"ink", "page"},       {"ink", "card"},
                                                              {"soft", "page"},      {"soft", "card"},
                                                              {"good", "good-back"}, {"bad", "bad-back"}};
    for (const char* colour : {"c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"})
      pairs.emplace_back(colour + std::string("-text"), colour);
    for (const auto& [text, back] : pairs) {
      ASSERT_TRUE(of.contains(text) && of.contains(back)) << text << " on " << back;
      const double a = luminance(of[text]), b = luminance(of[back]);
      EXPECT_GE((std::max(a, b) + 0.05) / (std::min(a, b) + 0.05), 4.5)
          << of[text] << " (" << text << ") on " << of[back] << " (" << back << ")"
          << (at == dark ? ", dark" : ", light");
    }
  }
  EXPECT_THAT(html, HasSubstr(".c1+.inside,.c2+.inside,.c4+.inside{fill:#111}"));
}

TEST(Chart, LargeNumbersHaveTheUnitsOfAnAxis) {
  EXPECT_EQ(short_number(0.00030067), "0.00030067");
  EXPECT_EQ(short_number(9938.7), "9938.7");
  EXPECT_EQ(short_number(48161), "48.16k");
  EXPECT_EQ(short_number(-3.8818e6), "-3.882M");
  EXPECT_EQ(short_number(1e9), "1G");
  EXPECT_EQ(short_number(kNaN), "nan");
}

TEST(Report, LongNamesBreakAndTilesKeepToOneLine) {
  Report report("run");
  report.verdict(true, "1.5e-13 of 1e-10 (layers.0.weight)");
  EXPECT_THAT(report.html(), HasSubstr("1.5e-13 of 1e-10 (layers.<wbr>0.<wbr>weight)"));
  report.fact("communication", "12.3 % of the time, not hidden behind computation");
  report.table("T", "", {"parameter"}, {{"model.layers.0.self_attn.q_proj.weight"}});
  EXPECT_THAT(report.html(), HasSubstr("<td class=\"long\">model.<wbr>layers.<wbr>0.<wbr>self_<wbr>attn."));
  report.table("Two", "", {"what", "value"}, {{"a path", std::string(200, 'x')}});
  EXPECT_THAT(report.html(), HasSubstr("<td class=\"long\">xxx")) << "no wider than the screen needs";
  EXPECT_THAT(report.html(), HasSubstr("dt,dd{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}"));
  EXPECT_THAT(report.html(), HasSubstr("title=\"communication: 12.3 % of the time"));
}

class EventFiles : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(root_); }
  std::filesystem::path root_ =
      std::filesystem::path(::testing::TempDir()) / ("event-files-" + std::to_string(getpid()));
};

// RFC 3720, appendix B.4.
TEST(Crc32c, AgreesWithTheStandard) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
}

TEST_F(EventFiles, FilesOfOneFolderSortByTheirStart) {
  std::vector<std::string> names;
  for (int i = 0; i < 4; ++i) names.push_back(EventFile(root_ / "events", 1).path().string());
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace isograd
