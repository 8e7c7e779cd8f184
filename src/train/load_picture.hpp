// The load of experts in a run's report: curves, heat maps, a table.
#pragma once

#include <string>
#include <vector>

#include "report/report.hpp"
#include "train/metrics.hpp"

namespace isograd {

// Selects the rows of a log that are drawn: those with the same layers and experts as the last row that has
// any. Empty: no row has any.
std::vector<const MetricRow*> rows_with_loads(const std::vector<MetricRow>& rows);

// The functions below take rows_with_loads(), at least one.
Chart load_chart(const std::vector<const MetricRow*>& rows);  // max over mean of layers, over time
// Load by expert over time, a strip for each layer (the most uneven ones of many).
std::string load_strips(const std::vector<const MetricRow*>& rows);
// Layers by experts over the last kDeadAfter rows.
std::string load_map(const std::vector<const MetricRow*>& rows);
ReportTable load_table(const std::vector<const MetricRow*>& rows);

// All of them but the chart, in order.
void report_loads(Report& report, const std::vector<const MetricRow*>& rows);

// Human-readable summary at the end of a run: "at most 1.32 of the mean (layer 3)", and "none" or the names
// of experts.
std::string last_load(const std::vector<ExpertLoad>& loads);
std::string dead_in_words(const MetricRow& row);

}  // namespace isograd
