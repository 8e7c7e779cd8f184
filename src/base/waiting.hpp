// What somebody who waits for a long command is told: how many of its parts are done, and about how long the
// rest takes. On a terminal one line that renews itself; elsewhere a line at once, and one every half minute.
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

struct WaitingOptions {
  std::FILE* out = stderr;
  std::optional<bool> terminal = {};  // not given: whether `out` is one
  std::optional<int> columns = {};    // not given: asked of the terminal at each line
  double plain_seconds = 30, redraw_seconds = 1;
};

class Waiting {
 public:
  // "layout", 7: "layout 3 of 7"; total 0: how many there will be is not known. `expected_seconds` of a part,
  // for the estimate while none is done; 0: not known.
  Waiting(std::string part, std::int64_t total, double expected_seconds = 0, WaitingOptions options = {});
  ~Waiting();  // a line that renews itself goes away
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // The next part begins; the one before it is done. `what` goes through printable().
  void begin(const std::string& what) { begin(number_ + 1, what); }
  void begin(std::int64_t number,
             const std::string& what);  // 0: what comes before the first, "7 layouts: ..."
  // The part is done; other lines may be printed until the next one begins.
  void end();

 private:
  using Clock = std::chrono::steady_clock;
  void draw();
  void keep_drawing();
  std::string line() const;

  std::string part_, what_;
  std::int64_t total_, number_ = 0;
  double expected_;
  WaitingOptions options_;
  bool terminal_, drawn_ = false, under_way_ = false, over_ = false;
  Clock::time_point start_ = Clock::now(), begun_ = start_;
  std::optional<Clock::time_point> shown_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_{};
};

// Seconds that the parts from `number` on still take: the mean of those before it, or `expected` where there
// is none; nothing where that is not known either. `elapsed` and `of_this`: since the first and since this
// one began.
std::optional<double> seconds_left(std::int64_t number, std::int64_t total, double elapsed, double of_this,
                                   double expected);

std::string human_seconds(double seconds);  // 0.4s, 12s, 3m 05s, 2h 07m, 3d 04h
int terminal_columns(std::FILE* out);       // 80 where it does not say

}  // namespace isograd
