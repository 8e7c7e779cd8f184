// Output of a run, on rank 0: progress, metrics, TensorBoard events, the report and the summary.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/waiting.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/trainer.hpp"
#include "isograd/world.hpp"
#include "train/memory.hpp"
#include "train/task.hpp"

namespace isograd {

// The moving line.
class Progress {
 public:
  // `tokens`: what samples consist of. `perplexity`: exp(loss) is shown too.
  explicit Progress(std::string tokens = "tokens", bool perplexity = false,
                    const StatusOptions& options = {.redraw_seconds = 0.1, .plain_seconds = 5});
  ~Progress();  // leaves the cursor on a fresh line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepEvent& event);
  void evaluation(const Evaluation& evaluation);
  void line(const std::string& text) { status_.line(text); }  // stays above the moving line
  void finish();  // the last state of the moving line stays; further lines follow it

 private:
  void draw();

  StatusLine status_;
  std::string tokens_;
  bool perplexity_;
  std::optional<StepEvent> last_;
  std::optional<double> validation_loss_;
  double smooth_seconds_ = 0;  // of a step, exponentially averaged
  std::int64_t averaged_ = 0;
};

// "step 40/200  loss 2.3456  norm 0.81  12.3k tokens/s  MFU 31 %  1m 05s left  perplexity 10.4"; with a bar
// of `columns` in all where there is room for one. `tokens`: what they are called. No control characters.
std::string progress_line(const StepEvent& event, std::optional<double> validation_loss, double seconds_left,
                          int columns, bool bar, const std::string& tokens = "tokens",
                          bool perplexity = false);

std::string human_count(double count);  // 12.3k, 4.56M

// Facts that do not change during a run.
struct RunFacts {
  int ranks = 1;
  std::string layout{};  // describe_layout()
  std::string device = "cpu";
  std::int64_t parameters = 0;
  std::string parameter_map{};  // to_text() of rank 0's RunLayout
  TaskFacts task{};
  Baseline baseline{};
  Peak peak{};  // of all ranks
  std::int64_t steps_per_epoch = 0;
  std::int64_t first_step = 0;  // after a resume; metrics of later steps are dropped
  std::string hosts{};          // first of HostTraffic::said(); empty: one host
};

// The notice of a run without validation data.
std::string nothing_held_out(const TaskFacts& facts);
// For a run with checkpoint.resume = "auto" that a signal has ended.
inline constexpr const char* kRunAgain = "to continue, run the same command again";
// Why a run ended before its last step, and how to continue. `failed_check`: of the check that failed.
std::string early_end(const Outcome& outcome, const RunConfig& config, int ranks,
                      const std::string& failed_check);

class Presenter {
 public:
  Presenter(const RunConfig& config, const RunFacts& facts);
  ~Presenter();
  void notice(const std::string& text);  // into the report too
  void line(const std::string& text);
  void step(const StepEvent& event);
  void evaluation(const Evaluation& evaluation);
  void saved(const std::filesystem::path& checkpoint);
  void memory(MemoryShown shown);  // printed at once; the report shows it above the sample
  // Writes the report, prints the summary; returns the report's path.
  std::filesystem::path finish(const Outcome& outcome, const Showing& showing);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Times of a pipeline's computations, a lane for each stage. `end`: of the axis, at least.
Lanes stage_lanes(const PipelineTable& table, const PipelineTimeline& timeline, double end = 0,
                  std::string unit = "seconds");
// "c0", "c2", "c6" and "c4" of F, B, I and W; "c5" of spans that are joined.
const char* colour_of_stages(const Lanes::Span& span);

// Writes a trace of the last step's stages into the run's folder and returns pictures of it. Collective.
std::vector<Showing::Picture> show_stages(const Pipeline& pipeline, const Mesh& mesh,
                                          const std::filesystem::path& directory);

}  // namespace isograd
