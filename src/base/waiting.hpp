// Progress of a long command: how many parts are done, and the estimated rest. On a terminal one line is
// updated; elsewhere it prints one line at once and one every half minute.
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
  std::optional<int> columns = {};    // not given: read from the terminal for each line
  double plain_seconds = 30, redraw_seconds = 1;
};

class Waiting {
 public:
  // "layout", 7: "layout 3 of 7"; total 0: unknown. `expected_seconds` of a part is used for the estimate
  // while none is done; 0: unknown.
  Waiting(std::string part, std::int64_t total, double expected_seconds = 0, WaitingOptions options = {});
  ~Waiting();  // removes the updated line
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // Starts the next part and completes the previous one. `what` goes through printable().
  void begin(const std::string& what) { begin(number_ + 1, what); }
  void begin(std::int64_t number,
             const std::string& what);  // 0: before the first part, "7 layouts: ..."
  // Completes the part. Other lines may be printed until the next one begins.
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

// Seconds for the parts from `number` on: based on the mean of the parts before it, or `expected` if there is
// none; empty: neither is known. `elapsed`: since the first part began. `of_this`: since this part began.
std::optional<double> seconds_left(std::int64_t number, std::int64_t total, double elapsed, double of_this,
                                   double expected);

std::string human_seconds(double seconds);  // 0.4s, 12s, 3m 05s, 2h 07m, 3d 04h
int terminal_columns(std::FILE* out);       // 80 if unknown

}  // namespace isograd
