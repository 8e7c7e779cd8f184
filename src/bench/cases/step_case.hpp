// What both sides of `bench step` compute: shapes, weights and tokens, exchanged as files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

struct StepCase {
  std::string name;
  DecoderConfig shape;
  std::int64_t sequences = 1;       // of a rank's micro-batch
  std::int64_t length = 256;        // tokens of a sequence
  std::int64_t steps_per_turn = 1;  // about a second of one core
  bool standard = true;             // part of a run without --case
  bool one_quarter = false;         // of the experts of each layer computes all tokens
  std::int64_t micro_batches = 1;   // of a step

  std::int64_t tokens() const { return sequences * length; }  // of a micro-batch
};

const std::vector<StepCase>& step_cases();                // of `bench step`
const std::vector<StepCase>& cases_held_together();       // of `bench tensor`, `expert` and `pipeline`
const StepCase& find_step_case(const std::string& name);  // in both; ConfigError names the cases

AdamWOptions bench_adamw();
inline constexpr double kBenchMaxNorm = 1.0;

// Fills `directory` with case.json, model/ and tokens.bin for that many ranks.
struct StepSetting {
  std::string device = "cpu";     // or "cuda"
  std::string dtype = "float32";  // or "bfloat16", with fp32 masters
  int threads = 1;                // of each rank
};
void write_exchange(const std::filesystem::path& directory, const StepCase& step_case, int ranks,
                    const StepSetting& setting = {});

// This rank's steps, in order, from tokens.bin.
std::vector<MicroBatches> read_steps(const std::filesystem::path& directory, const StepCase& step_case,
                                     int rank, int ranks);
std::string read_case_name(const std::filesystem::path& directory);
StepSetting read_setting(const std::filesystem::path& directory);
std::int64_t read_steps_per_turn(const std::filesystem::path& directory);

}  // namespace isograd
