// Progress of a long command on a terminal or in a log.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace isograd {

struct StatusOptions {
  std::FILE* out = stderr;
  std::optional<bool> terminal = {};              // not given: whether `out` is one
  std::optional<int> columns = {};                // not given: read from the terminal for each line
  double redraw_seconds = 1, plain_seconds = 30;  // at most this often, on a terminal and elsewhere
  bool in_a_log = true;  // false: where it is not redrawn there are lines under Printing::verbose alone
};

// One line that is redrawn in place on a terminal, plain lines elsewhere (files, CI).
class StatusLine {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StatusLine(const StatusOptions& options);
  bool terminal() const { return terminal_; }
  bool shows() const;             // anything at all: not where it is quiet
  int columns() const;            // of the terminal; 160 elsewhere
  Clock::time_point due() const;  // when the next line may be drawn
  void draw(const std::string& text);
  void line(const std::string& text);  // stays above the redrawn line
  void clear();                        // removes the redrawn line
  void finish();                       // leaves it there, and the cursor on the next line

 private:
  StatusOptions options_;
  bool terminal_, drawn_ = false;
  std::string text_;
  std::optional<Clock::time_point> drawn_at_{};
};

// How many parts of a command are done, and the estimated rest; renewed by a thread.
class Waiting {
 public:
  // "layout", 7: "layout 3 of 7"; total 0: unknown. `expected_seconds` of a part is used for the estimate
  // while none is done; 0: unknown.
  Waiting(std::string part, std::int64_t total, double expected_seconds = 0, StatusOptions options = {});
  ~Waiting();  // removes the redrawn line
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // Starts the next part and completes the previous one. `what` goes through printable().
  void begin(const std::string& what) { begin(number_ + 1, what); }
  // 0: before the first part, "7 layouts: ..."
  void begin(std::int64_t number, const std::string& what);
  // Completes the part. Other lines may be printed until the next one begins.
  void end();

 private:
  using Clock = StatusLine::Clock;
  void draw();
  void keep_drawing();
  std::string line() const;

  std::string part_, what_;
  std::int64_t total_, number_ = 0;
  double expected_;
  StatusLine status_;
  bool under_way_ = false, over_ = false;
  Clock::time_point start_ = Clock::now(), begun_ = start_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_{};
};

// Seconds for the parts from `number` on: based on the mean of the parts before it, or `expected` if there is
// none; empty: neither is known. `elapsed`: since the first part began. `of_this`: since this part began.
std::optional<double> seconds_left(std::int64_t number, std::int64_t total, double elapsed, double of_this,
                                   double expected);

std::string human_seconds(double seconds);  // 0.4s, 12s, 3m 05s, 2h 07m, 3d 04h

}  // namespace isograd
