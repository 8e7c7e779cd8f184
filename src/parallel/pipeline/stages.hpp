// Schedules and stages as facts, for who asks often: no table is made.
#pragma once

#include <string_view>
#include <vector>

#include "isograd/pipeline_parallel.hpp"

namespace isograd {

struct DecoderConfig;

struct ScheduleFacts {
  const char* name;
  int least_stages, most_stages;  // on a rank; 0: any number
  bool whole_rounds;              // a multiple of the ranks as micro-batches
  bool halves;                    // has_halves() of its tables
};
const ScheduleFacts* find_schedule(std::string_view name);   // null: no such schedule
const ScheduleFacts& schedule_named(std::string_view name);  // ConfigError: no such schedule

inline constexpr int kMostForwards = 4'000'000;  // of a table: about 0.5 GB with its timeline

// The layers of each stage of a decoder, by the cost of their products: what split_decoder() gives them.
std::vector<StageLayers> stage_layers(const DecoderConfig& config, int stages);

}  // namespace isograd
