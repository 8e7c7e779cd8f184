// Plans against reality: --try on this machine, --validate on published rows.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/search.hpp"

namespace isograd::planner {

// A run in a child of its own, which may run out of memory.
struct ProgramRun {
  int status = 0;              // 128 + n: ended by signal n
  bool out_of_memory = false;  // killed for it, or refused an allocation
  bool late = false;           // killed after `most_seconds`
  double seconds_of_step = 0, peak_bytes = 0;
  std::string output{};  // the end of both streams
};
// `arguments` of this program. Its private memory may grow to `most_bytes`. The command line gives
// run_program() with its own path; tests give another.
using RunProgram = std::function<ProgramRun(const std::vector<std::string>& arguments, double most_seconds,
                                            double most_bytes)>;
// Fills in all but the figures of the step.
ProgramRun run_program(const std::vector<std::string>& command, double most_seconds, double most_bytes);

struct Tried {
  Planned planned{};
  std::optional<ProgramRun> run{};  // median of its steps, the most of its ranks
  std::string why_not{};            // there is no run, or it failed
};
// The best `count` layouts that this machine has cores, devices and memory for, a few steps each, in turns.
std::vector<Tried> try_layouts(const Plan& plan, std::size_t count, const RunProgram& run,
                               const std::filesystem::path& folder);

// The largest micro-batch of the first layout that this machine can run, by doubling and bisection: with the
// cluster's reserve it fits into a device's memory. And the predicted one.
struct LargestMicroBatch {
  std::string layout{};  // empty: this machine can run none
  std::int64_t measured = 0, predicted = 0;
  std::vector<std::pair<std::int64_t, bool>> tried{};
  std::string ended_early{};  // why `measured` is not the largest
};
LargestMicroBatch largest_micro_batch(const Plan& plan, const RunProgram& run,
                                      const std::filesystem::path& folder);

struct Trials {
  std::vector<Tried> layouts{};
  LargestMicroBatch largest{};
};
std::string to_text(const Trials& trials);                    // lines of at most 100 columns
std::string to_json(const Plan& plan, const Trials* trials);  // null: not tried

// ---- published rows ----

struct PublishedRow {
  std::string id{}, tier{}, source{}, hardware{}, framework{}, recompute{}, flags{}, precision{};
  ModelShape model{};
  Candidate candidate{};
  Work work{};
  double seconds = 0, memory = 0;  // of a step, bytes of a rank; 0: not said
  double twin_ratio = 0;
  bool failed = false;
};
// The columns of published_runs.csv, by name. ConfigError with the line: a column that is missing, a number
// that is none.
std::vector<PublishedRow> read_rows(const std::filesystem::path& file);

// Rows whose step was published and can be predicted, in their order. `program`: whose it is; nanotron's
// twice, as runs that a twin confirms within 10 % and all others.
struct TimedRow {
  const PublishedRow* row = nullptr;
  std::string program{};
  double published = 0, predicted = 0;  // seconds
};
std::vector<TimedRow> timed_rows(const std::vector<PublishedRow>& rows);

struct Errors {
  std::string source{}, what{};  // "seconds", "memory", "fits"
  std::size_t rows = 0;
  double median = 0, p75 = 0, p90 = 0,
         worst = 0;  // |predicted / published - 1|; of "fits": parts of the rows
};
// The law step = t * accumulation + c of one inner layout: t and c from the two smallest worlds of a family,
// and the errors of the larger ones.
std::vector<Errors> validate_scaling(const std::vector<PublishedRow>& rows);
std::vector<Errors> validate(const std::vector<PublishedRow>& rows);
// Both as the table of docs/planning_reference.md: the heading alone where no row can be predicted.
std::vector<std::vector<std::string>> errors_table(const std::vector<PublishedRow>& rows);

}  // namespace isograd::planner
