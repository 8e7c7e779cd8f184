#include "base/waiting.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "base/output.hpp"
#include "base/print.hpp"

namespace isograd {

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "–";
  if (seconds < 9.95) return fmt::format("{:.1f}s", seconds);
  if (seconds > 1e11) return "ages";
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  if (whole < 86400) return fmt::format("{}h {:02}m", whole / 3600, whole / 60 % 60);
  return fmt::format("{}d {:02}h", whole / 86400, whole / 3600 % 24);
}

std::optional<double> seconds_left(std::int64_t number, std::int64_t total, double elapsed, double of_this,
                                   double expected) {
  const auto done = static_cast<double>(number - 1);
  const double each = done >= 1 ? (elapsed - of_this) / done : expected;
  if (each <= 0) return std::nullopt;
  return std::max(0.0, each - of_this) +
         each * static_cast<double>(std::max<std::int64_t>(total - number, 0));
}

StatusLine::StatusLine(const StatusOptions& options)
    : options_(options),
      terminal_(options.terminal.value_or(is_terminal(options.out) && !printing().verbose)) {}

int StatusLine::columns() const {
  winsize size{};
  if (options_.columns) return *options_.columns;
  if (!terminal_) return 160;
  return ioctl(fileno(options_.out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

StatusLine::Clock::time_point StatusLine::due() const {
  const std::chrono::duration<double> pause(terminal_ ? options_.redraw_seconds : options_.plain_seconds);
  return drawn_at_ ? *drawn_at_ + std::chrono::duration_cast<Clock::duration>(pause)
                   : Clock::time_point::min();
}

bool StatusLine::shows() const {
  return !printing().quiet && (terminal_ || options_.in_a_log || printing().verbose);
}

void StatusLine::draw(const std::string& text) {
  drawn_at_ = Clock::now();  // also of a line that is left out: due() is when the next may be
  if (!shows()) return;
  if (terminal_) std::fputs("\r\033[K", options_.out);
  print(options_.out, terminal_ ? text : text + "\n");
  std::fflush(options_.out);
  drawn_ = terminal_, text_ = text;
}

void StatusLine::clear() {
  if (drawn_) std::fputs("\r\033[K", options_.out);
  drawn_ = false;
  std::fflush(options_.out);
}

void StatusLine::line(const std::string& text) {
  const bool moving = drawn_;
  clear();
  print(options_.out, text + "\n");
  if (moving) draw(text_);
  std::fflush(options_.out);
}

void StatusLine::finish() {
  if (drawn_) print(options_.out, "\n");
  drawn_ = false;
  std::fflush(options_.out);
}

Waiting::Waiting(std::string part, std::int64_t total, double expected_seconds, StatusOptions options)
    : part_(std::move(part)), total_(total), expected_(expected_seconds), status_(options) {}

Waiting::~Waiting() {
  end();
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Waiting::begin(std::int64_t number, const std::string& what) {
  const std::lock_guard lock(mutex_);
  begun_ = Clock::now();
  if (!thread_.joinable() && status_.shows()) {
    start_ = begun_;
    thread_ = std::thread([this] { keep_drawing(); });
  }
  number_ = number;
  what_ = printable(what);
  under_way_ = true;
  if (status_.terminal() || printing().verbose || begun_ >= status_.due()) draw();
}

void Waiting::end() {
  const std::lock_guard lock(mutex_);
  under_way_ = false;
  status_.clear();
}

std::string Waiting::line() const {
  const auto since = [now = Clock::now()](Clock::time_point then) {
    return std::chrono::duration<double>(now - then).count();
  };
  const std::string where = number_ == 0  ? fmt::format("{} {}{}", total_, part_, total_ == 1 ? "" : "s")
                            : total_ == 0 ? fmt::format("{} {}", part_, number_)
                                          : fmt::format("{} {} of {}", part_, number_, total_);
  std::string text = fmt::format("{}: {}, {}", where, what_, human_seconds(since(start_)));
  if (total_ == 0) return text;
  if (const auto left = seconds_left(number_, total_, since(start_), since(begun_), expected_))
    text += fmt::format(", about {} left", human_seconds(*left));
  return text;
}

void Waiting::draw() {
  const auto most = static_cast<std::size_t>(std::max(10, status_.columns() - 2));
  status_.draw(status_.terminal() ? printable(line(), most) : line());
}

void Waiting::keep_drawing() {
  std::unique_lock lock(mutex_);
  while (!over_) {
    if (under_way_ && Clock::now() >= status_.due()) draw();
    changed_.wait_until(lock, under_way_ ? status_.due() : Clock::now() + std::chrono::seconds(1));
  }
}

}  // namespace isograd
