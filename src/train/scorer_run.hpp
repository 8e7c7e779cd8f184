// A run of the second model family: a scorer trained on a table by a loss over the rows of all ranks. Its
// batches are batches like others: a token is a row's number, its target the row's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/table.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/ranking.hpp"
#include "isograd/sampler.hpp"
#include "isograd/step.hpp"
#include "isograd/trainer.hpp"
#include "isograd/world.hpp"
#include "model/scorer.hpp"
#include "train/config.hpp"

namespace isograd {

struct ScorerData {
  at::Tensor features;  // [N, F] fp64, each column with mean 0 and deviation 1 over the training rows
  at::Tensor targets;   // [N] int64
  std::vector<std::int64_t> train, validation;
};
// Validation rows are drawn by run.seed, positives and negatives alike. ConfigError on a table without
// positives.
ScorerData open_table(const RunConfig& config);

struct ScorerModel {
  std::shared_ptr<Scorer> scorer;
  ModelUnits units;
};
// To be trained by `loss` (ranking.loss, or cross entropy to compare with).
ScorerModel make_scorer(const RunConfig& config, const ScorerData& data, const std::string& loss,
                        at::ScalarType dtype);

// What a sampler of the training rows gave, as one micro-batch.
Batch rows_batch(const ScorerData& data, const std::vector<std::int64_t>& of_train);
// This rank's part of each step, possibly no row.
Sampler make_row_sampler(const RunConfig& config, const ScorerData& data, int rank, int size);

// The modules that ranking.loss names; null for cross entropy and focal loss.
std::shared_ptr<RankingLoss> make_ranking_loss(const RunConfig& config, const std::string& name, Group group);
// One term: "cross_entropy", a sum, or the whole of a loss over all ranks (`replicated`).
ForwardLossTerms scorer_loss(const ScorerModel& model, const ScorerData& data, const std::string& name,
                             std::shared_ptr<RankingLoss> loss, Group group);

// What the metrics of a trained scorer are over all validation rows.
struct ScorerOutcome {
  std::string loss;
  double last_loss = 0;
  std::int64_t steps = 0, skipped = 0;  // made; of these, without an update because something was not finite
  RankingMetrics metrics;
  std::shared_ptr<Scorer> scorer;
};

// Trains by ranking.loss, and by cross entropy too if ranking.compare says so; writes metrics.jsonl,
// config.toml and report.html, with `verify_table` in it unless null, into run.directory and prints a table.
// Every rank calls it. Returns 0, or 1 when a step was not finite or the table of verify did not pass. No
// checkpoints yet.
using VerifyTrainedScorer = std::function<ReportTable(const Scorer& trained)>;
int train_scorer(const RunConfig& config, World& world, const VerifyTrainedScorer& verify_table);

}  // namespace isograd
