#include "train/presenter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "isograd/error.hpp"
#include "report/report.hpp"
#include "train/device.hpp"
#include "train/metrics.hpp"
#include "train/rank_zero.hpp"
#include "train/run_folder.hpp"

namespace isograd {
namespace {

// "━━━━━━──────": as many columns, two bytes of UTF-8 more each.
std::string drawn_bar(double part, int columns) {
  const int full = static_cast<int>(std::lround(std::clamp(part, 0.0, 1.0) * columns));
  std::string text;
  for (int i = 0; i < columns; ++i) text += i < full ? "━" : "─";
  return text;
}

// Moves slowly enough to be read, fast enough to follow a change of speed.
constexpr double kSmoothing = 0.1;
constexpr int kShortestBar = 10, kLongestBar = 30;

std::string number_text(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "not finite";
}
std::string nats(double value) { return number_text(value, "{:.4f}"); }

std::string below(double loss, double entropy) {
  const double percent = 100 * (1 - loss / entropy);
  return fmt::format("{:.1f} % {}", std::abs(percent), percent >= 0 ? "below" : "above");
}

std::string percent(double part) { return fmt::format("{:.1f} %", 100 * part); }

std::string how_it_ended(const Outcome& outcome, std::int64_t total) {
  switch (outcome.end) {
    case Outcome::End::kFinished: return fmt::format("all {} steps made", outcome.steps);
    case Outcome::End::kStopped:
      return fmt::format("stopped on request after step {} of {}", outcome.steps, total);
    case Outcome::End::kDiverged:
      return fmt::format("stopped in step {} of {}: not finite; nothing was updated", outcome.steps + 1,
                         total);
    case Outcome::End::kRefuted:
      return fmt::format("stopped after step {} of {}: a check found the run to be wrong", outcome.steps,
                         total);
  }
  return "";
}

// ---- when the ranks of a pipeline computed what ----

using ActionKind = PipelineAction::Kind;

// Average times of each stage's forward and backward, or of the two halves of backward.
PipelineTimes times_of(const Pipeline::Measured& measured) {
  PipelineTimes times = uniform_times(measured.table.stages, 0, 0, 0);
  std::map<const double*, double> often;  // how often each was computed
  for (std::size_t rank = 0; rank < measured.table.ranks.size(); ++rank)
    for (std::size_t i = 0; i < measured.table.ranks[rank].size(); ++i) {
      const PipelineAction& action = measured.table.ranks[rank][i];
      if (action.is_transfer()) continue;
      auto& of_kind = action.kind == ActionKind::kForward           ? times.forward
                      : action.kind == ActionKind::kBackwardWeights ? times.backward_weights
                                                                    : times.backward_inputs;
      double& mean = of_kind[static_cast<std::size_t>(action.stage)];
      const PipelineTimeline::Span span = measured.timeline.spans[rank][i];
      mean += (span.end - span.begin - mean) / ++often[&mean];
    }
  return times;
}

// The last step of rank 0's pipeline, as measured and as planned with the measured times of its stages, on
// one axis.
std::vector<Showing::Picture> stage_pictures(const Pipeline::Measured& measured) {
  const PipelineTimeline planned = simulate(measured.table, times_of(measured));
  const double end = std::max(measured.timeline.length, planned.length);
  const bool short_step = end < 1;
  const auto picture = [&](const char* title, const PipelineTimeline& timeline, const char* told) {
    Lanes lanes = stage_lanes(measured.table, timeline, end);
    if (short_step) {
      lanes.unit = "milliseconds";
      lanes.time_text = [](double time) { return fmt::format("{:.4g}", 1e3 * time); };
    }
    return Showing::Picture{.title = title,
                            .caption = fmt::format("{} {:.3g} {}, of which ranks wait {:.1f} %.", told,
                                                   (short_step ? 1e3 : 1) * timeline.length,
                                                   short_step ? "ms" : "s", 100 * timeline.bubble()),
                            .html = svg(lanes),
                            .width = kLanesWidth};
  };
  return {picture("Stages in the last step, as measured", measured.timeline,
                  "A line for each stage, with the numbers of micro-batches. The step's micro-batches took"),
          picture("The same, as planned", planned,
                  "By the schedule, with what forwards and backwards of each stage took on average:")};
}

// The last step of all ranks in Chrome's trace format: a process for each rank, an event for each action, in
// microseconds. Collective over mesh.all(); only rank 0 gets the text.
std::string stage_trace(const std::optional<Pipeline::Measured>& measured, const Mesh& mesh) {
  nlohmann::ordered_json own = nlohmann::ordered_json::array();
  const auto place = static_cast<std::size_t>(mesh.grid().has(kStageAxis) ? mesh.place({kStageAxis}) : 0);
  if (measured) {
    for (std::size_t i = 0; i < measured->table.ranks[place].size(); ++i) {
      const PipelineAction& action = measured->table.ranks[place][i];
      const PipelineTimeline::Span span = measured->timeline.spans[place][i];
      if (action.is_transfer()) continue;
      own.push_back({{"name", to_text(action)},
                     {"cat", action.kind == ActionKind::kForward ? "forward" : "backward"},
                     {"ph", "X"},
                     {"ts", span.begin * 1e6},
                     {"dur", (span.end - span.begin) * 1e6},
                     {"pid", mesh.rank()},
                     {"tid", action.stage}});
    }
    own.push_back({{"name", "process_name"},
                   {"ph", "M"},
                   {"pid", mesh.rank()},
                   {"args", {{"name", fmt::format("rank {}", mesh.rank())}}}});
  }
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  Group everyone = mesh.all();
  for (int rank = 0; rank < everyone.size(); ++rank)
    for (auto& event : nlohmann::ordered_json::parse(broadcast_text(everyone, own.dump(), rank)))
      all.push_back(std::move(event));
  return nlohmann::ordered_json{{"traceEvents", all}, {"displayTimeUnit", "ms"}}.dump() + "\n";
}

}  // namespace

std::string human_count(double count) {
  if (!std::isfinite(count)) return "–";
  const char* const units[] = {"", "k", "M", "G", "T", "P", "E"};
  std::size_t unit = 0;
  while (std::abs(count) >= 999.5 && unit + 1 < std::size(units)) {
    count /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f}", count);
  const int decimals = std::abs(count) < 9.995 ? 2 : std::abs(count) < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", count, decimals, units[unit]);
}

std::string progress_line(const StepEvent& event, std::optional<double> validation_loss, double seconds_left,
                          int columns, bool bar, const std::string& tokens, bool perplexity) {
  const std::string step = fmt::format("step {}/{}", event.step, event.total);
  // In the order in which a narrow terminal may do without them, the last first.
  std::vector<std::string> parts = {fmt::format("loss {:.4f}", event.report.loss),
                                    fmt::format("norm {:.3g}", event.report.norm),
                                    fmt::format("{} {}/s", human_count(event.tokens_per_second), tokens)};
  if (event.mfu) parts.push_back(fmt::format("MFU {:.0f} %", 100 * *event.mfu));
  parts.push_back(human_seconds(seconds_left) + " left");
  if (perplexity) parts.push_back(fmt::format("perplexity {:.4g}", std::exp(event.report.loss)));
  if (!event.report.finite) parts.insert(parts.begin(), "not finite: nothing updated");
  if (validation_loss) parts.push_back(fmt::format("validation {:.4f}", *validation_loss));
  std::string text = step;
  auto width = static_cast<int>(step.size());
  for (const auto& part : parts) {
    const auto wide = static_cast<int>(characters(part));
    if (width + 2 + wide > columns) break;
    text += "  " + part;
    width += 2 + wide;
  }
  // Tens of columns, so that the bar keeps its length while numbers change theirs.
  const int room = std::min(kLongestBar, (columns - width - 2) / 10 * 10);
  if (!bar || room < kShortestBar) return text;
  const double done =
      event.total > 0 ? static_cast<double>(event.step) / static_cast<double>(event.total) : 1.0;
  return drawn_bar(done, room) + "  " + text;
}

Progress::Progress(std::string tokens, bool perplexity, const StatusOptions& options)
    : status_(options), tokens_(std::move(tokens)), perplexity_(perplexity) {}

Progress::~Progress() { finish(); }

void Progress::draw() {
  if (!last_) return;
  const bool bar = status_.terminal();
  const double left = static_cast<double>(last_->total - last_->step) * smooth_seconds_;
  status_.draw(progress_line(*last_, validation_loss_, left, status_.columns() - (bar ? 1 : 0), bar, tokens_,
                             perplexity_));
}

void Progress::step(const StepEvent& event) {
  const bool first = averaged_ == 0, last = event.step >= event.total;
  ++averaged_;
  // A plain mean at first, an exponential one later. The first step warms caches up: the second replaces it.
  const double weight =
      std::max(kSmoothing, 1.0 / static_cast<double>(std::max<std::int64_t>(averaged_ - 1, 1)));
  smooth_seconds_ += weight * (event.seconds - smooth_seconds_);
  last_ = event;
  const bool now = first || last || !event.report.finite || printing().verbose;
  if (now || StatusLine::Clock::now() >= status_.due()) draw();
}

void Progress::evaluation(const Evaluation& evaluation) {
  if (evaluation.targets > 0) validation_loss_ = evaluation.loss;
  if (status_.terminal() || printing().quiet) return draw();
  std::string text = fmt::format("step {}", evaluation.step);
  if (evaluation.targets > 0)
    text += fmt::format("  validation loss {:.4f} over {} targets", evaluation.loss, evaluation.targets);
  if (evaluation.targets > 0 && perplexity_)
    text += fmt::format("  perplexity {:.4g}", std::exp(evaluation.loss));
  for (const TermValue& figure : evaluation.figures)
    text += fmt::format("  {} {:.4f}", figure.name, figure.value);
  line(text);
}

void Progress::finish() {
  if (status_.terminal()) draw();
  status_.finish();
  last_.reset();
}

int Outcome::exit_status() const {
  const bool passed =
      std::all_of(tables.begin(), tables.end(), [](const auto& table) { return table.passed; });
  if (end == End::kDiverged || end == End::kRefuted || !passed) return 1;
  return again ? kStatusAgain : 0;
}

struct Presenter::Impl {
  RunConfig config;
  RunFacts facts;
  fs::path directory;
  Progress progress{facts.task.tokens, facts.task.perplexity};
  std::unique_ptr<Metrics> metrics{};
  std::vector<std::string> notices{};
  std::optional<MemoryShown> memory{};

  std::string layout() const {
    return fmt::format("{} rank{}, {}", facts.ranks, facts.ranks == 1 ? "" : "s", facts.layout);
  }

  // ", perplexity 6.27", or nothing.
  std::string and_perplexity(double loss) const {
    return facts.task.perplexity ? ", perplexity " + number_text(std::exp(loss), "{:.4g}") : "";
  }

  // Model FLOPs utilisation: "34.1 % of 62.1 GFLOP/s, measured ...".
  std::string utilisation(double mfu) const {
    std::string peak = human_count(facts.peak.flops_per_second);
    if (std::isalpha(static_cast<unsigned char>(peak.back())) != 0) peak.insert(peak.size() - 1, " ");
    return fmt::format("{} of {}FLOP/s, {}", percent(mfu), peak, facts.peak.source);
  }

  // "; norm 3.1, clipped by 0.16 in step 20", of a group of train.clip_groups; empty before the first step.
  std::string clipped_last(const std::string& text) const {
    for (auto row = metrics->rows().rbegin(); row != metrics->rows().rend(); ++row)
      for (const ClippedGroup& group : row->clipped)
        if (text.starts_with(group.pattern + ":"))
          return fmt::format("; norm {:.4g}, times {:.4g} in step {}", group.norm, group.coefficient,
                             row->step);
    return {};
  }

  // Traffic across hosts in the last step.
  std::string across_hosts() const {
    for (auto row = metrics->rows().rbegin(); row != metrics->rows().rend(); ++row)
      if (row->bytes_across_hosts)
        return fmt::format("{} bytes in step {}, by all ranks together", *row->bytes_across_hosts, row->step);
    return "no step";
  }

  // `text` with how far below and below what; empty without a baseline.
  std::string against_baseline(double loss, const char* text) const {
    if (facts.baseline.value <= 0 || !std::isfinite(loss)) return {};
    return fmt::format(fmt::runtime(text), below(loss, facts.baseline.value), facts.baseline.name);
  }

  // Rows of the summary and of the report.
  TextRows of_ranks(const Outcome& outcome) const {
    TextRows rows;
    if (outcome.mfu) rows.push_back({"MFU", utilisation(*outcome.mfu)});
    if (facts.ranks > 1)
      rows.push_back(
          {"communication", percent(outcome.exposed) + " of the time, not hidden behind computation"});
    if (!facts.hosts.empty()) rows.push_back({"across hosts", across_hosts()});
    if (outcome.balance)
      rows.push_back({"context ranks", fmt::format("highest cost {:.3f} of the mean, {:.3f} at worst",
                                                   outcome.balance->mean, outcome.balance->worst)});
    return rows;
  }

  void print_summary(const Outcome& outcome, const Showing& showing) const {
    std::string text = "\n";
    const auto row = [&](const char* label, const std::string& value) {
      text += fmt::format("{:<18}{}\n", label, printable(value));
    };
    row("run", how_it_ended(outcome, config.train.steps));
    const TaskFacts& task = facts.task;
    row("loss", nats(outcome.loss) + " " + task.unit + and_perplexity(outcome.loss));
    if (outcome.validation_loss)
      row("validation loss", fmt::format("{} {}{}{}", nats(*outcome.validation_loss), task.unit,
                                         and_perplexity(*outcome.validation_loss),
                                         against_baseline(*outcome.validation_loss, ", {} the {}")));
    if (facts.baseline.value > 0)
      row(facts.baseline.name.c_str(),
          fmt::format("{} {} {}", nats(facts.baseline.value), task.unit, facts.baseline.of));
    row("speed", fmt::format("{} {}/s on {}", human_count(outcome.tokens_per_second), task.tokens, layout()));
    for (const auto& each : of_ranks(outcome)) row(each[0].c_str(), each[1]);
    if (const auto loads = rows_with_loads(metrics->rows()); !loads.empty()) {
      row("load of experts",
          fmt::format("{}, in step {}", last_load(loads.back()->expert_loads), loads.back()->step));
      row("dead experts", dead_in_words(*loads.back()));
    }
    if (outcome.skipped > 0) row("skipped", fmt::format("{} steps, not finite", outcome.skipped));
    if (outcome.empty > 0) row("empty", fmt::format("{} steps without a valid target", outcome.empty));
    for (const auto& table : outcome.tables) text += printable(table.summary) + "\n";
    if (!outcome.checkpoint.empty()) row("checkpoint", outcome.checkpoint.string());
    row("report", outcome.report.string());
    if (!outcome.sample.empty()) text += "sample\n" + outcome.sample + "\n";
    if (showing.print_tables)
      for (const auto& table : showing.tables) {
        TextRows rows = table.rows;
        rows.insert(rows.begin(), table.columns);
        text +=
            fmt::format("\n{}: {}\n{}", printable(table.title), printable(table.summary), text_table(rows));
      }
    print_verdict(stdout, text);
    std::fflush(stdout);
  }

  void show_memory(Report& report) const {
    report.figure(
        memory->bars.title,
        "Other: what else stays from step to step, such as buffers. In passing: the most that a step "
        "takes above all that, for activations and gradients on their way.",
        svg(memory->bars));
    ReportTable table = memory->table;
    std::vector<std::string> told;
    std::istringstream lines(std::exchange(table.summary,
                                           "In MB: 10⁶ bytes. Total: what the formula predicts. Sent: "
                                           "by the rank, in the step."));
    for (std::string line; std::getline(lines, line);)
      if (!line.empty()) told.push_back(line);
    report.table(table);
    report.prose("", told);
  }

  void write_report(const Outcome& outcome, const Showing& showing) const {
    const TaskFacts& task = facts.task;
    Report report("isograd: " + directory.filename().string(),
                  fmt::format("{} step{} on {}; {} parameters", outcome.steps, outcome.steps == 1 ? "" : "s",
                              layout(), human_count(static_cast<double>(facts.parameters))));
    report.verdict(outcome.end != Outcome::End::kDiverged && outcome.end != Outcome::End::kRefuted,
                   showing.early_end.empty() ? how_it_ended(outcome, config.train.steps) : showing.early_end);
    for (const auto& table : outcome.tables)
      report.verdict(table.passed, table.headline.empty() ? table.summary : table.headline);
    const double loss = outcome.validation_loss.value_or(outcome.loss);
    report.fact("loss", nats(outcome.loss));
    if (outcome.validation_loss) report.fact("validation loss", nats(loss));
    if (task.perplexity)
      report.fact(outcome.validation_loss ? "validation perplexity" : "perplexity",
                  number_text(std::exp(loss), "{:.4g}"));
    report.fact(task.tokens + "/s", human_count(outcome.tokens_per_second));
    const auto loads = rows_with_loads(metrics->rows());
    for (auto& chart :
         training_charts(metrics->rows(), facts.baseline.value,
                         {.unit = task.unit, .tokens = task.tokens, .baseline = facts.baseline.name}))
      report.chart(std::move(chart));
    if (!loads.empty()) {
      report.chart(load_chart(loads));
      report.table(load_table(loads));
    }
    for (const auto& picture : showing.pictures)
      report.figure(picture.title, picture.caption, picture.html, picture.width);
    for (const auto& chart : showing.charts) report.chart(chart);
    for (const auto& table : showing.tables) report.table(table);
    for (ReportTable table : outcome.tables) {
      if (table.headline.empty()) table.summary.clear();  // the report shows it at the top as a verdict
      report.table(std::move(table));
    }
    if (memory) show_memory(report);
    const std::string tokens_of_all =
        task.tokens == task.documents
            ? std::string()
            : fmt::format("; {} {}", human_count(static_cast<double>(task.num_tokens)), task.tokens);
    ReportTable about{
        .title = "Layout and data",
        .summary = "",
        .columns = {"what", "value"},
        .rows = {{"metrics", json_log_of(config).string()},
                 {"for TensorBoard", (directory / "tensorboard").string()},
                 {"device", facts.device},
                 {"backend", backend_of(config, facts.ranks)},
                 {"type of parameters", config.train.dtype},
                 {"global batch", task.batch},
                 {"micro-batch", task.micro_batch},
                 {task.documents, fmt::format("{} for training, {} for validation{}", task.train_documents,
                                              task.validation_documents, tokens_of_all)},
                 {"steps of an epoch", std::to_string(facts.steps_per_epoch)},
                 {"skipped steps", std::to_string(outcome.skipped)},
                 {"checkpoint", outcome.checkpoint.empty() ? "none" : outcome.checkpoint.string()}}};
    const bool alike = outcome.validation_loss || facts.baseline.of_training;
    const std::string compared = alike ? against_baseline(loss, "; the loss is {} it") : std::string();
    if (facts.baseline.value > 0)
      about.rows.push_back({facts.baseline.name, fmt::format("{} {} {}{}", nats(facts.baseline.value),
                                                             task.unit, facts.baseline.of, compared)});
    if (!facts.hosts.empty()) about.rows.push_back({"hosts", facts.hosts});
    for (auto& row : of_ranks(outcome)) about.rows.push_back(std::move(row));
    if (outcome.mfu)
      about.rows.push_back(
          {"model FLOPs", "6 a token and weight, 12 an attended pair, head and channel (of the MFU)"});
    for (const std::string& text : config.train.clip_groups)
      about.rows.push_back({"clipped separately", text + clipped_last(text)});
    for (const std::string& text : config.optimizer.groups)
      about.rows.push_back({"updated by a group", text});
    report.table(std::move(about));
    if (!outcome.sample.empty()) report.text("Sample", outcome.sample);
    std::string all;
    for (const auto& notice : notices) all += notice + "\n";
    if (!all.empty()) report.text("Notices", all);
    report.folded("Placement of every parameter, seen from rank 0", facts.parameter_map);
    report.folded("Configuration", to_toml(config));
    report.write(outcome.report);
  }
};

std::string nothing_held_out(const TaskFacts& facts) {
  const std::string one = facts.documents.substr(0, facts.documents.size() - 1);  // "documents"
  return "no " + one + " is held out, so there is no validation loss (data.validation_fraction)";
}

std::string early_end(const Outcome& outcome, const RunConfig& config, int ranks,
                      const std::string& failed_check) {
  if (outcome.end == Outcome::End::kStopped)
    return fmt::format("stopped after step {}; {}", outcome.steps,
                       config.checkpoint.resume == "auto"
                           ? kRunAgain
                           : "to continue: " + resume_command(config, ranks, outcome.checkpoint));
  const std::string back = how_to_continue(config, ranks, outcome.checkpoint);
  if (outcome.end == Outcome::End::kRefuted)
    return fmt::format("step {}: {}; stopped, {}", outcome.steps, failed_check, back);
  const std::string& where = outcome.not_finite;
  return fmt::format(
      "step {}: the loss or the gradient is not finite on some rank{}; nothing was updated, on any rank. "
      "Lower schedule.peak or train.max_norm, or set train.on_non_finite = \"skip\"; {}",
      outcome.steps + 1, where.empty() ? std::string() : fmt::format(" (first: {})", where), back);
}

Presenter::Presenter(const RunConfig& config, const RunFacts& facts)
    : impl_(new Impl{.config = config, .facts = facts, .directory = config.run.directory}) {
  write_file(impl_->directory / kRunConfig, to_toml(config));
  impl_->metrics =
      std::make_unique<Metrics>(MetricsOptions{.json_log = json_log_of(config),
                                               .events_directory = impl_->directory / "tensorboard",
                                               .first_step = facts.first_step,
                                               .perplexity = facts.task.perplexity});
  const TaskFacts& task = facts.task;
  const std::string tokens =  // where samples consist of anything
      task.tokens == task.documents
          ? std::string()
          : fmt::format("{} {} in ", human_count(static_cast<double>(task.num_tokens)), task.tokens);
  line(fmt::format("{} parameters on {}; {}{} {}, {} of them held out",
                   human_count(static_cast<double>(facts.parameters)), impl_->layout(), tokens,
                   task.train_documents + task.validation_documents, task.documents,
                   task.validation_documents));
  if (facts.first_step > 0) line(fmt::format("continuing after step {}", facts.first_step));
}
Presenter::~Presenter() = default;

void Presenter::notice(const std::string& text) {
  impl_->notices.push_back(text);
  impl_->progress.line(text);
}

void Presenter::line(const std::string& text) {
  if (!printing().quiet) impl_->progress.line(text);
}

void Presenter::step(const StepEvent& event) {
  impl_->metrics->step(event);
  if (!event.report.finite)
    notice(fmt::format("step {}: the loss or the gradient is not finite on some rank; nothing was updated",
                       event.step));
  if (event.report.finite && !event.report.updated)
    notice(fmt::format("step {}: no valid target in the whole batch; nothing was updated", event.step));
  impl_->progress.step(event);
}

void Presenter::evaluation(const Evaluation& evaluation) {
  impl_->metrics->evaluation(evaluation);
  impl_->progress.evaluation(evaluation);
}

void Presenter::saved(const fs::path& checkpoint) { line("saved " + printable(checkpoint.string())); }

void Presenter::memory(MemoryShown shown) {
  TextRows rows = shown.table.rows;
  rows.insert(rows.begin(), shown.table.columns);
  impl_->progress.line("memory and traffic of the last step\n" + text_table(std::move(rows)) +
                       shown.table.summary);
  impl_->memory = std::move(shown);
}

fs::path Presenter::finish(const Outcome& outcome, const Showing& showing) {
  impl_->progress.finish();
  Outcome shown = outcome;
  shown.report = impl_->directory / "report.html";
  impl_->write_report(shown, showing);
  impl_->print_summary(shown, showing);
  return shown.report;
}

const char* colour_of_stages(const Lanes::Span& span) {
  const std::size_t to = span.name.find(" to ");
  if (to != std::string::npos && span.name[0] != span.name[to + 4]) return "c5";
  return span.name[0] == 'F' ? "c0" : span.name[0] == 'B' ? "c2" : span.name[0] == 'I' ? "c6" : "c4";
}

Lanes stage_lanes(const PipelineTable& table, const PipelineTimeline& timeline, double end,
                  std::string unit) {
  Lanes lanes{.title = fmt::format("{}: {} stages, {} micro-batches, ranks wait {:.1f} % (bubble)",
                                   table.name, table.stages, table.micro_batches, 100 * timeline.bubble()),
              .spans = {},
              .end = std::max(end, timeline.length),
              .unit = std::move(unit),
              .time_text = [](double time) { return fmt::format("{:.4g}", time); },
              .colour = colour_of_stages,
              .legend = {{"c0", "F: forward"},
                         {"c2", "B: backward"},
                         {"c6", "I: backward to inputs"},
                         {"c4", "W: backward to weights"},
                         {"c5", "several"},
                         {"lane", static_cast<std::size_t>(table.stages) > table.ranks.size()
                                      ? "the rank waits (bubble) or computes another stage"
                                      : "the rank waits (bubble)"}}};
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank) {
    std::map<int, std::vector<Lanes::Span>> stages;
    for (std::size_t i = 0; i < table.ranks[rank].size(); ++i) {
      const PipelineAction& action = table.ranks[rank][i];
      if (action.is_transfer()) continue;
      stages[action.stage].push_back({fmt::format("rank {}, stage {}", rank, action.stage),
                                      to_text(action).substr(std::to_string(action.stage).size()),
                                      timeline.spans[rank][i].begin, timeline.spans[rank][i].end});
    }
    for (auto& [stage, spans] : stages) std::ranges::move(spans, std::back_inserter(lanes.spans));
  }
  return lanes;
}

std::vector<Showing::Picture> show_stages(const Pipeline& pipeline, const Mesh& mesh,
                                          const fs::path& directory) {
  const auto measured = pipeline.measured();
  const std::string trace = stage_trace(measured, mesh);
  Group everyone = mesh.all();
  on_rank_zero(everyone, [&] { write_file(directory / kStageTrace, trace); });
  return measured ? stage_pictures(*measured) : std::vector<Showing::Picture>{};
}

}  // namespace isograd
