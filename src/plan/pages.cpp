// A plan as pictures and as a page.
#include "plan/pages.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "base/json.hpp"
#include "base/print.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "plan/memory.hpp"
#include "train/presenter.hpp"

namespace isograd::planner {
namespace {

constexpr double kGiB = 1 << 30;

std::string shown_part(double part) { return fmt::format("{:.1f} %", 100 * part); }

// ---- pictures ----

const std::vector<std::string> kMemoryParts = {"parameters",          "gradients", "masters, states",
                                               "activations",         "logits",    "gathered",
                                               "buffers, in passing", "reserve"},
                               kStepParts = {"products",        "attention",  "memory-bound",
                                             "overhead",        "tp, cp, ep", "gradients, gathers",
                                             "norm, optimizer", "waiting"};
std::vector<double> times(double factor, std::vector<double> values) {
  for (double& value : values) value *= factor;
  return values;
}
std::vector<double> values_of(const MemoryParts& of) {
  return times(1 / kGiB, {of.parameters, of.gradients, of.masters + of.states, of.activations, of.logits,
                          of.gathered, of.buffers + of.passing, of.reserve});
}
std::vector<double> values_of(const StepParts& of) {  // in per cent
  return times(100 / of.total(),
               {of.products, of.attention, of.memory_bound, of.overhead, of.tp + of.cp + of.ep,
                of.gather + of.reduce + of.publish, of.norm + of.optimizer, of.bubble + of.uneven});
}

// A chart has six series at most: the points of further ones are in its last.
void add_series(Chart& chart, const std::string& name, std::vector<Point> points, const char* others) {
  constexpr std::size_t kMostSeries = 6;
  if (chart.series.size() == kMostSeries)
    chart.series.back().name = others;
  else
    chart.series.push_back({name, {}});
  std::vector<Point>& all = chart.series.back().points;
  std::ranges::move(points, std::back_inserter(all));
  std::ranges::sort(all, {}, &Point::x);
}

// Whatever is no stage of the pipeline communicates or updates.
const char* colour_of(const Lanes::Span& span) {
  if (span.lane.ends_with("compute")) return colour_of_stages(span);
  return span.lane == "optimizer" ? "c1" : "c3";
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
  Lanes lanes = stage_lanes({}, {}, step);
  lanes.title = "Timeline of a step";
  lanes.unit = "time";
  lanes.time_text = seconds_text;
  lanes.colour = colour_of;
  lanes.legend.back().second = "waiting (bubble)";
  lanes.legend.emplace_back("c3", "exchange");
  lanes.legend.emplace_back("c1", "norm, update");
  for (const Span& span : spans) lanes.spans.push_back({span.lane, span.name, span.begin, span.end});
  return svg(lanes);
}

std::string chrome_trace(const std::vector<Span>& spans) {
  std::vector<std::string> lanes;
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  for (const Span& span : spans) {
    const auto found = std::ranges::find(lanes, span.lane);
    const auto lane = found - lanes.begin();
    if (found == lanes.end()) {
      lanes.push_back(span.lane);
      events.push_back(
          {{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", lane}, {"args", {{"name", span.lane}}}});
    }
    events.push_back({{"name", span.name},
                      {"ph", "X"},
                      {"ts", span.begin * 1e6},
                      {"dur", (span.end - span.begin) * 1e6},
                      {"pid", 0},
                      {"tid", lane}});
  }
  return json_text(events, 1) + "\n";
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
  Chart chart{.title = "Layouts that no other beats",
              .x_label = "free memory of a device, GiB",
              .y_label = "tokens/s",
              .series = {},
              .from_zero = true};
  std::map<std::int32_t, std::vector<Point>, std::greater<>> by_devices;
  for (const Planned& one : plan.front)
    by_devices[one.candidate.ranks].push_back(
        {one.head_room / kGiB, one.tokens_per_second.value,
         fmt::format("{}: {} tokens/s, {} free", to_text(one.candidate),
                     human_count(one.tokens_per_second.value), bytes_text(one.head_room))});
  for (auto& [devices, points] : by_devices)
    add_series(chart, fmt::format("{} devices", devices), std::move(points), "fewer devices");
  return chart;
}

Chart published_chart(const std::vector<PublishedRow>& rows) {
  Chart chart{.title = "Published steps, and what the models say of them",
              .x_label = "published, seconds of a step",
              .y_label = "predicted, seconds of a step",
              .series = {},
              .lines = false,
              .log_x = true,
              .log_y = true};
  std::map<std::string, std::vector<Point>> by_program;
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const TimedRow& one : timed_rows(rows)) {
    by_program[one.program].push_back(
        {one.published, one.predicted,
         fmt::format("{}: published {}, predicted {}", one.row->id, seconds_text(one.published),
                     seconds_text(one.predicted))});
    least = std::min({least, one.published, one.predicted}),
    most = std::max({most, one.published, one.predicted});
  }
  std::vector<Series> all;
  for (auto& [program, points] : by_program) all.push_back({program, std::move(points)});
  std::ranges::stable_sort(all, std::greater<>(), [](const Series& one) { return one.points.size(); });
  for (Series& series : all) add_series(chart, series.name, std::move(series.points), "others");
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
      fmt::format("{} on {} x {}", plan.model.name.empty() ? plan.model.family : plan.model.name,
                  plan.cluster.devices, plan.cluster.name),
      fmt::format(
          "{} parameters; {} tokens a step in sequences of {}. {} of {} layouts fit. Nothing was run: "
          "every number says where it is from.",
          human_count(plan.model.parameters()), human_count(plan.work.tokens), plan.work.sequence,
          human_count(double(plan.fitting)), human_count(double(plan.candidates))));
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
          {"free memory", bytes_text(best->head_room)}})
      report.fact(label, value);
    if (best->candidate.ranks < plan.cluster.devices)
      report.fact("devices used", fmt::format("{} of {}", best->candidate.ranks, plan.cluster.devices));
  }
  if (!plan.warnings.empty()) report.prose("Warnings", plan.warnings);
  if (!best) return report;
  report.figure(
      "Memory of a rank",
      "The fullest rank of each layout; of the first also the first, middle and last rank of its pipeline.",
      memory_bars(plan));
  if (!timeline.empty())
    report.figure("A step",
                  "With the numbers of micro-batches. Below: what is exchanged in addition, and the update.",
                  timeline_svg(timeline, best->step.total()), kLanesWidth);
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
  add_table(report, "Where each law begins to cost", "docs/planning_reference.md has the laws.",
            {"law", "begins at", "this layout", "costs", "statement", "moved by"}, plan.laws,
            [](const Law& law) -> std::vector<std::string> {
              return {law.name,
                      human_count(law.at.value) + " " + unit_of(law.at.value, law.unit),
                      human_count(law.now),
                      law.reached ? "yes" : "no",
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
  TextRows errors = errors_table(rows);
  const std::vector<std::string> columns = std::move(errors.front());
  errors.erase(errors.begin());
  report.table("Errors",
               "|predicted / published - 1|; \"fits\" and \"cells\": the part of the rows "
               "(docs/planning_reference.md).",
               columns, errors);
  return report;
}

}  // namespace isograd::planner
