#include "train/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/print.hpp"
#include "base/waiting.hpp"

namespace isograd {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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
    const auto wide = static_cast<int>(std::count_if(part.begin(), part.end(), [](char c) {
      return (static_cast<unsigned char>(c) & 0xc0) != 0x80;  // bytes that begin a character
    }));
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

Progress::Progress(ProgressOptions options)
    : options_(options), terminal_(options.terminal.value_or(isatty(fileno(options.out)) != 0)) {}

Progress::~Progress() {
  finish();
}

void Progress::clear() {
  if (drawn_) std::fputs("\r\033[K", options_.out);
  drawn_ = false;
}

void Progress::draw() {
  if (!last_) return;
  drawn_at_ = now();
  const double left = static_cast<double>(last_->total - last_->step) * smooth_seconds_;
  const int columns = options_.columns.value_or(terminal_ ? terminal_columns(options_.out) : 160);
  const std::string text = progress_line(*last_, validation_loss_, left, terminal_ ? columns - 1 : columns,
                                         terminal_, options_.tokens, options_.perplexity);
  if (terminal_) {
    clear();
    print(options_.out, text);
    drawn_ = true;
  } else {
    print(options_.out, text + "\n");
  }
  std::fflush(options_.out);
}

void Progress::step(const StepEvent& event) {
  const bool first = averaged_ == 0, last = event.step >= event.total;
  ++averaged_;
  // A plain mean at first, an exponential one later. The first step warms caches up: the second replaces it.
  const double weight =
      std::max(kSmoothing, 1.0 / static_cast<double>(std::max<std::int64_t>(averaged_ - 1, 1)));
  smooth_seconds_ += weight * (event.seconds - smooth_seconds_);
  last_ = event;
  const double pause = terminal_ ? options_.redraw_seconds : options_.plain_seconds;
  if (first || last || !event.report.finite || now() - drawn_at_ >= pause) draw();
}

void Progress::evaluation(const Evaluation& evaluation) {
  if (evaluation.targets > 0) validation_loss_ = evaluation.loss;
  if (terminal_) return draw();
  std::string text = fmt::format("step {}", evaluation.step);
  if (evaluation.targets > 0)
    text += fmt::format("  validation loss {:.4f} over {} targets", evaluation.loss, evaluation.targets);
  if (evaluation.targets > 0 && options_.perplexity)
    text += fmt::format("  perplexity {:.4g}", std::exp(evaluation.loss));
  for (const TermValue& figure : evaluation.figures)
    text += fmt::format("  {} {:.4f}", figure.name, figure.value);
  line(text);
}

void Progress::line(const std::string& text) {
  const bool moving = drawn_;
  clear();
  print(options_.out, text + "\n");
  if (moving) draw();
  std::fflush(options_.out);
}

void Progress::finish() {
  if (terminal_ && last_) draw();
  if (drawn_) print(options_.out, "\n");
  drawn_ = false;
  last_.reset();
  std::fflush(options_.out);
}

}  // namespace isograd
