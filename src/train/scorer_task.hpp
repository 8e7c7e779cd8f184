// A scorer trained on a table by a loss over the rows of all ranks. It uses ordinary batches: a token is a
// row's number, its target the row's target.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/table.hpp"
#include "isograd/data.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/ranking.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/scorer.hpp"
#include "train/config.hpp"
#include "train/task.hpp"

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
ScorerModel make_scorer(std::shared_ptr<Scorer> scorer);
// Shape of a scorer that `loss` trains (ranking.loss, or cross entropy for the comparison).
ScorerShape scorer_shape(const RunConfig& config, const ScorerData& data, const std::string& loss);
ScorerModel make_scorer(const RunConfig& config, const ScorerData& data, const std::string& loss,
                        at::ScalarType dtype);

// Rows of the table as one micro-batch.
Batch table_batch(const ScorerData& data, const std::vector<std::int64_t>& of_table);
// As table_batch(), from a sampler's places among the training rows.
Batch rows_batch(const ScorerData& data, const std::vector<std::int64_t>& of_train);
// This rank's part of each step, possibly no row.
Sampler make_row_sampler(const RunConfig& config, const ScorerData& data, int rank, int size);

// The modules that ranking.loss names; null for cross entropy and focal loss.
std::shared_ptr<RankingLoss> make_ranking_loss(const RunConfig& config, const std::string& name, Group group);
// One term: "cross_entropy" (a sum), or a loss over the rows of all ranks (`replicated`).
ForwardLossTerms scorer_loss(const ScorerModel& model, const ScorerData& data, const std::string& name,
                             std::shared_ptr<RankingLoss> loss, Group group);
// ranking.loss `name` in plain code of its own, O(positives · rows), straight from the definitions. 0 if a
// class is missing.
at::Tensor plain_ranking_loss(const std::string& name, const RunConfig& config, const at::Tensor& logits,
                              const at::Tensor& targets);

// Rows of earlier steps that a loss ranks against, without differentiating them.
struct QueuedRows {
  at::Tensor scores{}, targets{};  // [q, 1] fp64 that fp32 holds exactly, [q] int64; undefined: none
};

// A scorer and the loss that it is trained by. The loss's queue is a part of its checkpoints.
class RankedTableModel : public TaskModel {
 public:
  RankedTableModel(ScorerModel model, const ScorerShape& shape, const RunConfig& config,
                   std::shared_ptr<const ScorerData> data, Group group);

  const Scorer& scorer() const { return *model_.scorer; }
  std::vector<std::pair<std::string, at::Tensor>> named() override { return model_.scorer->named(); }
  std::vector<std::pair<std::string, at::Tensor>> buffers() const override;  // of the loss
  ModelUnits make_units() override { return model_.units; }
  ForwardLossTerms loss() override;
  void to(at::Device) override {}  // always on the CPU (check_device)
  at::Tensor outputs(const Batch& batch) override;
  void attend_over(const Mesh& mesh) override;  // rows are ranked over the ranks that have some of their own
  Layout::Named placements(const Grid& grid) override;
  Layout cut(const Mesh& mesh) override;
  void write(const std::filesystem::path& directory, const TensorStream& weights) override;
  void read(const std::filesystem::path& directory, bool with_queue);  // what write() left

  // Fixes the queue to these rows, so that a step can be repeated.
  void fix_queue(const QueuedRows& queued);
  RankingLoss* ranking_loss() { return training_.get(); }  // null: the loss is none

 private:
  ScorerModel model_;
  ScorerShape shape_;
  std::string name_;
  std::shared_ptr<const ScorerData> data_;
  Group group_;
  std::shared_ptr<RankingLoss> training_, held_out_;  // null: cross entropy, focal loss
  bool repeatable_ = false;
};

ScorerShape read_scorer_shape(const std::filesystem::path& directory);  // of a checkpoint
ShapeKeys scorer_shape_keys(const ScorerShape& shape);

}  // namespace isograd
