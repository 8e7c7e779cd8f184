// Progress of a run on stderr: one line that is redrawn on a terminal, plain lines elsewhere (files, CI).
// Only rank 0 has one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "isograd/trainer.hpp"

namespace isograd {

struct ProgressOptions {
  std::FILE* out = stderr;
  std::optional<bool> terminal = {};  // not given: whether `out` is one
  std::optional<int> columns = {};    // not given: asked of the terminal at each line
  std::string tokens = "tokens";      // what samples consist of
  bool perplexity = false;            // exp(loss) is shown too
  double redraw_seconds = 0.1;        // a terminal's line is drawn at most this often
  double plain_seconds = 5;  // a plain line is written at most this often, and for the first and last step
};

class Progress {
 public:
  explicit Progress(ProgressOptions options = {});
  ~Progress();  // leaves the cursor on a fresh line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepEvent& event);
  void evaluation(const Evaluation& evaluation);
  void line(const std::string& text);  // stays above the moving line
  void finish();                       // the last state of the moving line stays; further lines follow it

 private:
  void clear();
  void draw();

  ProgressOptions options_;
  bool terminal_ = false;
  bool drawn_ = false;
  std::optional<StepEvent> last_;
  std::optional<double> validation_loss_;
  double smooth_seconds_ = 0;  // of a step, exponentially averaged
  std::int64_t averaged_ = 0;
  double drawn_at_ = 0;
};

// "step 40/200  loss 2.3456  norm 0.81  12.3k tokens/s  MFU 31 %  1m 05s left  perplexity 10.4"; with a bar
// of `columns` in all where there is room for one. `tokens`: what they are called. No control characters.
std::string progress_line(const StepEvent& event, std::optional<double> validation_loss, double seconds_left,
                          int columns, bool bar, const std::string& tokens = "tokens",
                          bool perplexity = false);

std::string human_count(double count);  // 12.3k, 4.56M

}  // namespace isograd
