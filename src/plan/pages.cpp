// A plan as pictures and as a page.
#include "plan/pages.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/print.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "plan/memory.hpp"
#include "train/presenter.hpp"

namespace isograd::planner {
namespace {

constexpr double kGiB = 1 << 30;

std::string shown_part(double part) { return fmt::format("{:.1f} %", 100 * part); }
// The fastest layout, or the one that lacks the least memory.
const Planned* best_of(const Plan& plan) {
  return !plan.top.empty() ? &plan.top.front() : plan.nearest ? &*plan.nearest : nullptr;
}

// ---- pictures ----

const std::vector<std::string> kMemoryParts = {"parameters",          "gradients", "masters, states",
                                               "activations",         "logits",    "gathered",
                                               "buffers, in passing", "reserve"};
std::vector<double> values_of(const MemoryParts& of) {
  std::vector<double> values = {of.parameters, of.gradients, of.masters + of.states,  of.activations,
                                of.logits,     of.gathered,  of.buffers + of.passing, of.reserve};
  for (double& value : values) value /= kGiB;
  return values;
}

const std::vector<std::string> kStepParts = {"products",        "attention",  "memory-bound",
                                             "overhead",        "tp, cp, ep", "gradients, gathers",
                                             "norm, optimizer", "waiting"};
// In per cent.
std::vector<double> values_of(const StepParts& of) {
  std::vector<double> values = {of.products,
                                of.attention,
                                of.memory_bound,
                                of.overhead,
                                of.tp + of.cp + of.ep,
                                of.gather + of.reduce + of.publish,
                                of.norm + of.optimizer,
                                of.bubble + of.uneven};
  for (double& value : values) value *= 100 / of.total();
  return values;
}

// The class of what a span computes, by its name: F, B, I, W of a pipeline; everything else communicates or
// updates.
const char* look_of(const Span& span) {
  const std::size_t to = span.name.find(" to ");  // of joined ones: grey where they differ
  if (to != std::string::npos && span.name[0] != span.name[to + 4]) return "c5";
  if (span.lane.ends_with("compute")) switch (span.name.empty() ? ' ' : span.name[0]) {
      case 'F': return "c0";
      case 'B': return "c2";
      case 'I': return "c6";
      case 'W': return "c4";
      default: break;
    }
  return span.lane == "optimizer" ? "c1" : "c3";
}

std::vector<std::string> lanes_of(const std::vector<Span>& spans) {
  std::vector<std::string> lanes;
  for (const Span& span : spans)
    if (std::ranges::find(lanes, span.lane) == lanes.end()) lanes.push_back(span.lane);
  return lanes;
}

// Spans of a lane that touch and are narrower than a letter are one: a step may have thousands of them.
std::vector<Span> joined(const std::vector<Span>& spans, const std::string& lane, double narrow) {
  std::vector<Span> kept;
  for (const Span& span : spans) {
    if (span.lane != lane) continue;
    const bool joins =
        !kept.empty() && span.end - kept.back().begin < narrow && span.begin - kept.back().end < narrow / 8;
    if (joins)
      kept.back().name = kept.back().name.substr(0, kept.back().name.find(' ')) + " to " + span.name,
      kept.back().end = span.end;
    else
      kept.push_back(span);
  }
  return kept;
}

}  // namespace

std::string memory_bars(const Plan& plan) {
  Bars bars{.title = "Memory of a rank", .unit = "GiB", .parts = kMemoryParts, .bars = {}};
  bars.limits = {{"the device", plan.cluster.device.memory / kGiB}};
  const auto add = [&](const std::string& label, const MemoryParts& parts) {
    bars.bars.push_back({label, bytes_text(parts.total()), values_of(parts)});
  };
  if (const Planned* best = best_of(plan)) {
    const Calibration nothing;
    const Problem problem{plan.model, plan.cluster, nothing, plan.work};
    Pipelines pipelines;
    MemoryModel memory(problem, pipelines);
    const int last = best->candidate.pp - 1;
    for (const int rank : std::set<int>{0, last / 2, last, best->memory.rank_of_pipeline})
      if (rank == best->memory.rank_of_pipeline)
        add(last == 0 ? "1: " + to_text(best->candidate)
                      : fmt::format("1: rank {} of the pipeline, the fullest", rank),
            best->memory);
      else
        add(fmt::format("1: rank {} of the pipeline", rank), memory.of_rank(best->candidate, rank));
  }
  for (std::size_t i = 1; i < plan.top.size(); ++i)
    add(fmt::format("{}: {}", i + 1, to_text(plan.top[i].candidate)), plan.top[i].memory);
  return svg(bars);
}

std::string step_bars(const Plan& plan) {
  Bars bars{.title = "What a step is made of", .unit = "% of the step", .parts = kStepParts, .bars = {}};
  for (const ScalingPoint& point : plan.scaling)
    bars.bars.push_back({fmt::format("{} devices", point.devices), seconds_text(point.best.step.total()),
                         values_of(point.best.step)});
  if (plan.scaling.empty())
    for (const Planned& one : plan.top.empty() && plan.nearest ? std::vector{*plan.nearest} : plan.top)
      bars.bars.push_back({to_text(one.candidate), seconds_text(one.step.total()), values_of(one.step)});
  return svg(bars);
}

std::string timeline_svg(const std::vector<Span>& spans, double step) {
  constexpr double kLeft = 130, kRow = 24, kTop = 10, kWidth = kPictureWidth - kLeft - 12, kLetter = 7;
  const std::vector<std::string> lanes = lanes_of(spans);
  const double height = kTop + kRow * double(lanes.size()) + 26;
  std::string text = fmt::format(
      "<svg width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" aria-label=\"Timeline of "
      "a step\">",
      kPictureWidth, height);
  const auto write = [&](const char* kind, double x, double y, const char* anchor, const std::string& words) {
    text += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", kind, x,
                        y, anchor, escape_html(words));
  };
  for (const Span& span : spans) step = std::max(step, span.end);
  const auto at = [&](double time) { return step > 0 ? time / step * kWidth : 0; };
  double y = kTop;
  for (const std::string& lane : lanes) {
    write("label", kLeft - 8, y + 15, "end", lane);
    text += fmt::format("<rect class=\"lane\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>", kLeft, y,
                        kWidth, kRow - 2);
    for (const Span& span : joined(spans, lane, step * kLetter / kWidth)) {
      const double x = kLeft + at(span.begin), wide = at(span.end - span.begin);
      text += fmt::format(
          "<rect class=\"part {}\" x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\"><title>{}: {} to {}</title></rect>",
          look_of(span), x, y, wide, kRow - 2, escape_html(span.name), seconds_text(span.begin),
          seconds_text(span.end));
      if (wide >= kLetter * double(span.name.size() + 1))
        write("inside", x + wide / 2, y + 15, "middle", span.name);
    }
    y += kRow;
  }
  write("tick", kLeft, y + 16, "start", "0");
  write("tick", kLeft + kWidth, y + 16, "end", seconds_text(step));
  return text + "</svg>";
}

std::string chrome_trace(const std::vector<Span>& spans) {
  const std::vector<std::string> lanes = lanes_of(spans);
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  for (std::size_t lane = 0; lane < lanes.size(); ++lane)
    events.push_back(
        {{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", lane}, {"args", {{"name", lanes[lane]}}}});
  for (const Span& span : spans)
    events.push_back({{"name", span.name},
                      {"ph", "X"},
                      {"ts", span.begin * 1e6},
                      {"dur", (span.end - span.begin) * 1e6},
                      {"pid", 0},
                      {"tid", std::ranges::find(lanes, span.lane) - lanes.begin()}});
  return events.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Chart scaling_chart(const Plan& plan) {
  Chart chart{.title = "How far it scales",
              .x_label = "devices",
              .y_label = "tokens/s a device",
              .series = {{"the best layout", {}}},
              .from_zero = true,
              .log_x = true};
  std::vector<Point>& points = chart.series[0].points;
  for (const ScalingPoint& point : plan.scaling) {
    const double each = point.best.tokens_per_second.value / double(point.devices);
    points.push_back({double(point.devices), each,
                      fmt::format("{} devices: {} tokens/s a device, {}", point.devices, human_count(each),
                                  to_text(point.best.candidate))});
  }
  // Laws of ranks with other samples, as devices: the axes inside of a data rank stay.
  for (const Law& law : plan.laws)
    if (law.now > 0 && !plan.top.empty() &&
        (law.unit == "data ranks" || law.unit == "ranks that share parameters"))
      chart.x_marks.emplace_back(law.name, law.at.value / law.now * plan.top.front().candidate.ranks);
  if (!points.empty())
    chart.guides = {{{points.front().x, points.front().y}, {points.back().x, points.front().y}}};
  return chart;
}

Chart front_chart(const Plan& plan) {
  Chart chart{.title = "What is not worse in anything",
              .x_label = "free memory of a device, GiB",
              .y_label = "tokens/s",
              .series = {},
              .from_zero = true};
  constexpr std::size_t kMostSeries = 6;
  std::map<std::int32_t, std::vector<Point>, std::greater<>> by_devices;
  for (const Planned& one : plan.front)
    by_devices[one.candidate.ranks].push_back(
        {one.head_room / kGiB, one.tokens_per_second.value,
         fmt::format("{}: {} tokens/s, {} free", to_text(one.candidate),
                     human_count(one.tokens_per_second.value), bytes_text(one.head_room))});
  for (auto& [devices, points] : by_devices)
    if (chart.series.size() < kMostSeries)
      chart.series.push_back({fmt::format("{} devices", devices), std::move(points)});
    else
      chart.series.back().name = "fewer devices",
      std::ranges::move(points, std::back_inserter(chart.series.back().points));
  for (Series& series : chart.series) std::ranges::sort(series.points, {}, &Point::x);
  return chart;
}

Chart published_chart(const std::vector<PublishedRow>& rows) {
  Chart chart{.title = "Published steps, and what the models say of them",
              .x_label = "published, seconds of a step",
              .y_label = "foretold, seconds of a step",
              .series = {},
              .lines = false,
              .log_x = true,
              .log_y = true};
  constexpr std::size_t kMostSeries = 6;
  std::map<std::string, std::vector<Point>> by_program;
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const TimedRow& one : timed_rows(rows)) {
    by_program[one.program].push_back({one.published, one.foretold,
                                       fmt::format("{}: published {}, foretold {}", one.row->id,
                                                   seconds_text(one.published), seconds_text(one.foretold))});
    least = std::min({least, one.published, one.foretold}),
    most = std::max({most, one.published, one.foretold});
  }
  std::vector<Series> all;
  for (auto& [program, points] : by_program) all.push_back({program, std::move(points)});
  std::ranges::stable_sort(all, std::greater<>(), [](const Series& one) { return one.points.size(); });
  for (Series& series : all) {
    if (chart.series.size() < kMostSeries) {
      chart.series.push_back(std::move(series));
      continue;
    }
    chart.series.back().name = "others";
    std::ranges::move(series.points, std::back_inserter(chart.series.back().points));
  }
  for (Series& series : chart.series) std::ranges::sort(series.points, {}, &Point::x);
  constexpr double kWithin = 1.1;
  if (most > 0)
    for (const double factor : {1.0, kWithin, 1 / kWithin})
      chart.guides.push_back({{least / std::min(factor, 1.0), least / std::min(factor, 1.0) * factor},
                              {most / std::max(factor, 1.0), most / std::max(factor, 1.0) * factor}});
  return chart;
}

// ---- the page ----

namespace {

// A row of each item; no table of none.
template <class Items, class RowOf>
void add_table(Report& report, const char* title, const std::string& summary,
               const std::vector<std::string>& columns, const Items& items, const RowOf& row_of) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& item : items) rows.push_back(row_of(item));
  if (!rows.empty()) report.table(title, summary, columns, rows);
}

void add_parts(Report& report, const char* title, const std::string& summary,
               const std::vector<Planned::Part>& parts, std::string (*shown)(double)) {
  add_table(report, title, summary, {"part", "value", "nine of ten", "origin", "formula"}, parts,
            [&](const Planned::Part& part) -> std::vector<std::string> {
              const Estimate& of = part.number;
              return {part.name, shown(of.value),
                      of.low == of.high ? "–" : fmt::format("{} to {}", shown(of.low), shown(of.high)),
                      std::string(name_of(of.origin)), part.formula};
            });
}

}  // namespace

Report page(const Plan& plan, const std::vector<Span>& timeline) {
  Report report(
      fmt::format("{} on {} x {}", plan.model.name, plan.cluster.devices, plan.cluster.name),
      fmt::format("{} tokens a step in sequences of {}. Nothing was run: every number says where it is from.",
                  human_count(plan.work.tokens), plan.work.sequence));
  const Planned* best = best_of(plan);
  if (plan.top.empty()) {
    report.verdict(false, "No layout fits: " + plan.missing);
  } else {
    const Estimate& step = best->seconds;
    report.verdict(true, fmt::format("{}: {} a step", to_text(best->candidate), seconds_text(step.value)));
    for (const auto& [label, value] :
         {std::pair("a step", seconds_text(step.value)),
          {"nine of ten", fmt::format("{} to {}", seconds_text(step.low), seconds_text(step.high))},
          {"tokens/s", human_count(best->tokens_per_second.value)},
          {"MFU", shown_part(best->mfu)},
          {"memory of a rank", bytes_text(best->bytes.value)},
          {"free memory", bytes_text(best->head_room)},
          {"devices used", best->candidate.ranks == plan.cluster.devices
                               ? "all"
                               : fmt::format("{} of {}", best->candidate.ranks, plan.cluster.devices)},
          {"parameters", human_count(plan.model.parameters())},
          {"layouts that fit",
           human_count(double(plan.fitting)) + " of " + human_count(double(plan.candidates))}})
      report.fact(label, value);
  }
  if (!plan.warnings.empty()) report.prose("Warnings", plan.warnings);
  if (!best) return report;
  report.figure(
      "Memory of a rank",
      "The fullest rank of each layout; of the first also the first, middle and last rank of its pipeline.",
      memory_bars(plan));
  if (!timeline.empty())
    report.figure(
        "A step",
        "F: a micro-batch's forward, B: its backward, I and W: the halves of that, grey: several of them. "
        "Below: what is exchanged in addition, and the update.",
        timeline_svg(timeline, best->step.total()), kPictureWidth);
  report.figure("What a step is made of",
                "Without what computation hides. Waiting: for other stages, and for ranks with longer packs.",
                step_bars(plan));
  if (!plan.scaling.empty()) report.chart(scaling_chart(plan));
  if (!plan.front.empty()) report.chart(front_chart(plan));

  const auto layout_row = [](const Planned& one) -> std::vector<std::string> {
    return {to_text(one.candidate),
            seconds_text(one.seconds.value),
            human_count(one.tokens_per_second.value),
            shown_part(one.mfu),
            bytes_text(one.bytes.value),
            bytes_text(one.head_room),
            one.proved ? "proved by tests" : "composes, not in the proved table"};
  };
  std::vector<std::string> columns = {"layout", "step",        "tokens/s", "MFU",
                                      "memory", "free memory", "gradient"};
  add_table(report, "The fastest layouts",
            "Differences within the interval are not sure: `isograd plan --try` measures them.", columns,
            plan.top, layout_row);
  add_parts(report, "Memory, part by part",
            fmt::format("Of rank {} of the pipeline, the fullest.", best->memory.rank_of_pipeline),
            best->memory_parts, bytes_text);
  add_parts(report, "A step, part by part", "Of the slowest rank.", best->step_parts, seconds_text);
  add_table(report, "Why not another", "", {"change", "step", "reason"}, plan.neighbours,
            [](const Neighbour& one) {
              return std::vector{one.change, one.seconds ? seconds_text(*one.seconds) : "–", one.reason};
            });
  add_table(report, "Where each law begins to cost", "docs/planning.md has the laws.",
            {"law", "begins at", "this layout", "costs", "statement", "moved by"}, plan.laws,
            [](const Law& law) -> std::vector<std::string> {
              return {law.name,
                      human_count(law.at.value) + " " + law.unit,
                      human_count(law.now),
                      law.bites ? "yes" : "no",
                      law.statement,
                      law.moved_by};
            });
  add_table(report, "By devices", "",
            {"devices", "layout", "step", "tokens/s", "efficiency", "law that costs first"}, plan.scaling,
            [](const ScalingPoint& point) -> std::vector<std::string> {
              return {std::to_string(point.devices),          to_text(point.best.candidate),
                      seconds_text(point.best.seconds.value), human_count(point.best.tokens_per_second.value),
                      shown_part(point.efficiency),           point.law};
            });
  columns.insert(columns.begin(), {"way out", "tokens a step"});
  add_table(report, "More devices than the batch has work for", "", columns, plan.ways_out,
            [&](const WayOut& way) {
              std::vector<std::string> row = layout_row(way.planned);
              row.insert(row.begin(), {way.name, human_count(way.tokens)});
              return row;
            });
  add_table(report, "The recipe", "", {"step", "formula", "result", "origin"}, plan.recipe,
            [](const RecipeStep& step) {
              return std::vector{step.name, step.formula, step.result, step.origin};
            });
  return report;
}

Report page(const std::vector<PublishedRow>& rows) {
  Report report("Published runs and the planner's models", fmt::format("{} rows", rows.size()));
  report.chart(published_chart(rows));
  std::vector<Errors> all = validate(rows);
  std::ranges::move(validate_scaling(rows), std::back_inserter(all));
  add_table(report, "Errors",
            "|foretold / published - 1|; \"fits\" and \"cells\": the part of the rows (docs/planning.md).",
            {"rows of", "what", "rows", "median", "75 %", "90 %", "worst"}, all,
            [](const Errors& one) -> std::vector<std::string> {
              const bool spread = one.what == "seconds" || one.what == "memory";
              const auto shown = [&](double part) { return spread ? shown_part(part) : "–"; };
              return {one.source,     one.what,       std::to_string(one.rows), shown_part(one.median),
                      shown(one.p75), shown(one.p90), shown(one.worst)};
            });
  return report;
}

}  // namespace isograd::planner
