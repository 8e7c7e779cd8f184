// Runs laid over one another, by the files in their folders (isograd report).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "isograd/trainer.hpp"
#include "report/report.hpp"
#include "train/config.hpp"
#include "train/metrics.hpp"

namespace isograd {

struct RunRecord {
  std::string name;  // of its curves
  RunConfig config;
  std::vector<MetricRow> rows;
};

inline constexpr std::size_t kMostRuns = 6;  // of a Chart

// The runs of these folders, named by the folders, or by their whole paths where two would have one name.
// ConfigError: no folder of a run, no step in its log, one folder twice, or more than kMostRuns.
std::vector<RunRecord> read_runs(const std::vector<std::string>& folders);

// A row a run: its last step, loss and validation loss (nats per token, or whatever the task has), the median
// of tokens per second, and the seconds of all steps.
ReportTable last_figures(const std::vector<RunRecord>& runs);
// The keys in which they differ, except for the places of their files.
ReportTable differing_keys(const std::vector<RunRecord>& runs);
// Loss, validation loss, gradient norm, throughput and learning rate over the steps, a curve a run.
std::vector<Chart> overlaid_charts(const std::vector<RunRecord>& runs);

Report overlaid_page(const std::vector<RunRecord>& runs);
std::string overlaid_text(const std::vector<RunRecord>& runs);
std::string overlaid_json(const std::vector<RunRecord>& runs);

}  // namespace isograd
