// The steps that `isograd bench step`, `tensor`, `expert`, `pipeline` and `product` are about: shapes,
// layouts, and the weights and tokens that all sides start from, exchanged as files.
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
  std::string text{};               // printed after it
  std::int64_t micro_batches = 1;   // of a step
  bool one_quarter = false;         // of the experts of each layer computes all tokens

  std::int64_t tokens() const { return sequences * length; }  // of a micro-batch
};
const std::vector<StepCase>& step_cases(const std::string& verb);  // "step", "tensor", "expert", "pipeline"
StepCase find_step_case(const std::string& verb, const std::string& name);

// How ranks of ours divide the work.
struct Strategy {
  enum class Parallel { kData, kWholeTokens, kSequence, kExperts, kStages };
  std::string name;   // --strategy
  std::string title;  // human-readable
  Parallel parallel = Parallel::kData;
  // A configuration's parallel.strategy, .tensor_overlap (kWholeTokens, kSequence), .expert_overlap,
  // .schedule.
  std::string setting{};
  bool share_parameters = false, overlap = true;
  bool standard = true;  // part of a run without --strategy

  // All ranks see one batch.
  bool one_batch() const { return parallel != Parallel::kData && parallel != Parallel::kExperts; }
};
const std::vector<Strategy>& strategies();
const Strategy& find_strategy(const std::string& name);

AdamWOptions bench_adamw();
inline constexpr double kBenchMaxNorm = 1.0;
// For case.json: both of these, and a model's shapes.
nlohmann::ordered_json update_description();
nlohmann::ordered_json model_description(const DecoderConfig& config);

struct StepSetting {
  std::string device = "cpu";     // or "cuda"
  std::string dtype = "float32";  // or "bfloat16", with fp32 masters
  int threads = 1;                // of each rank
};
// Fills `exchange` with case.json, model/ and tokens.bin for that many ranks.
void write_step(const std::filesystem::path& exchange, const std::string& verb, const StepCase& step_case,
                int ranks, const StepSetting& setting);
// This rank's steps, in order, from tokens.bin.
std::vector<MicroBatches> read_steps(const std::filesystem::path& exchange, const StepCase& step_case,
                                     int rank, int ranks);

// Seconds of a rank's matrix products alone, each by the fastest library for it (product.cpp).
double fastest_products(const StepCase& step_case, int expert_ranks = 1);

// Our sides, on each rank: turns until there are none (step_side.cpp, optim.cpp, context.cpp).
void run_step_rank(const std::filesystem::path& exchange, const std::string& strategy);
void run_optim_rank(const std::filesystem::path& exchange, const std::string& name);
void run_context_rank(const std::filesystem::path& exchange, const std::string& name);

}  // namespace isograd
