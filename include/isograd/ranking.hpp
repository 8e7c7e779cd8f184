// Ranking and imbalance losses over the global batch (docs/ranking.md), and the gathers that they use.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/group.hpp"

// Three ways to gather rows of all ranks: [N_r, ...] -> [Σ N_r, ...], in the order of ranks; N_r may be 0 and
// may differ. Further dims and the type must agree (ConfigError on every rank). For a loss L of the gathered
// rows, computed equally on every rank, with G = ∂L/∂θ of one process:
//
//  helper               | backward on rank r             | parameter gradients summed | averaged
//  ---------------------+--------------------------------+----------------------------+----------
//  all_gather_with_grad | its own rows' part of ∂L       | G                          | G / W
//  all_gather_sum_grad  | Σ over ranks of their ∂L there | W · G                      | G
//  all_gather_no_grad   | none                           | 0                          | 0
//
// Where every rank computes only its share L_r of L = Σ L_r, only all_gather_sum_grad is right (under a sum).
// One collective when `rows` gives the ranks' numbers of rows, two otherwise.
namespace isograd {

// The local slice keeps its graph; other ranks' rows are constants. No collective in backward.
at::Tensor all_gather_with_grad(Group group, const at::Tensor& input, const Group::Rows& rows = {});

// Backward is a reduce-scatter (sum): a collective that every rank must reach (group.hpp).
at::Tensor all_gather_sum_grad(Group group, const at::Tensor& input, const Group::Rows& rows = {});

at::Tensor all_gather_no_grad(Group group, const at::Tensor& input, const Group::Rows& rows = {});

// ---- losses: none is a sum over samples; each ranks or counts the rows of all ranks of its group ----

// Reduction over the valid classes (ranking losses) or the elements (focal losses).
enum class LossReduction {
  kMean,
  kSum,
  kNone,          // [C], NaN where a class is invalid; focal losses: this rank's elements
  kMeanPositive,  // softmax focal: divided by the number of foreground elements
};

// How the trainer combines the ranks' gradients. kMean, for one that averages, multiplies the gradient by W.
enum class GradReduction { kSum, kMean };

// As in torch.quantile, between the two order statistics around the rank q (n − 1).
enum class Interpolation { kLinear, kLower, kHigher, kNearest, kMidpoint };

// How ranks compute the thresholds of recall and of the trapezoid. Both ways give the same bits.
enum class Thresholds {
  kAuto,    // the cheaper way, by row counts that all ranks know (docs/ranking.md, "What a forward costs")
  kGather,  // gathers the rows of all ranks
  kSelect,  // exchanges counts of digits, as distributed_quantiles() does, and only the rows for the queue
};

struct RankingOptions {
  std::int64_t num_classes = 1;    // 1: binary, targets 0 and 1; more: one-vs-rest
  std::int64_t queue_size = 1024;  // rows of earlier batches that take part in the ranking; 0: none
  // In units of the scores for SmoothAP and recall, in its own scale for PAUC; at least 1.2e-38 (fp32).
  double temperature = 0.01;
  LossReduction reduction = LossReduction::kMean;
  std::int64_t ignore_index = -100;
  bool update_queue_in_eval = false;
  std::int64_t max_pool_size = 0;  // limit of rows, by minimum-quota subsampling; 0: all
  GradReduction grad_reduction = GradReduction::kSum;
  std::uint64_t seed = 0;                     // for subsampling, shared by all ranks
  bool check_queue = false;                   // compares a checksum of the queue over ranks, in the header
  Thresholds thresholds = Thresholds::kAuto;  // kSelect: only recall and the trapezoid, without max_pool_size
};

// Optional inputs of a forward; given on all ranks that have rows, or on none.
struct RankingExtras {
  at::Tensor iid_mask{};       // [N] bool: rows that PAUC may estimate thresholds from; undefined: all
  at::Tensor sample_weight{};  // [N] finite, >= 0: weights of the positives in the numerator; undefined: 1
};

struct RankingDiagnostics {             // for PAUC, each [C]
  at::Tensor t_alpha, t_beta, tau_eff;  // fp64; NaN where invalid
  at::Tensor pauc_var;        // population variance over the numerator's positives of their contributions
  at::Tensor band_neg_count;  // int64, iid negatives in [t_beta, t_alpha]; 0 where invalid
  at::Tensor grad_pos_count;  // int64, positives of this rank
};

struct RankingResult {
  at::Tensor loss;       // scalar, or [C] under kNone; differentiable
  at::Tensor per_class;  // [C], NaN where invalid; detached
  at::Tensor valid;      // [C] bool
  RankingDiagnostics diagnostics{};
};

struct RankingPool;  // src/loss/ranking/pool.hpp
struct RankingCore;  // src/loss/ranking/cores.hpp
struct ClassResult;

// Base of the ranking losses. The pool is the rows of all ranks, in the order of ranks, then the queue; rows
// whose target is ignore_index take no part. The value is the whole loss on every rank ("replicated" in
// LossTerm) and this rank's scores get their own derivative, so parameter gradients *summed* over ranks are
// those of one process.
//
// Collective (on W > 1 ranks: a header, rows, a reduction; docs/ranking.md, "What a forward costs"); errors
// are thrown on every rank and name the rank at fault. CPU groups; scores on other devices are copied. No
// second derivatives (ConfigError). Scores that are not finite make loss and gradient NaN on every rank, and
// the queue does not take them. A class without a value (RankingResult::valid) takes no part; rank 0 warns
// once if it has none in its first 20 training forwards. Buffers are the queue, the number of forwards and
// the temperature, the same on all ranks.
class RankingLoss : public torch::nn::Module {
 public:
  // scores [N, C] floating, targets [N] or [N, 1]. N may be 0, and differ over ranks.
  at::Tensor forward(const at::Tensor& scores, const at::Tensor& targets, const RankingExtras& extras = {});
  RankingResult evaluate(const at::Tensor& scores, const at::Tensor& targets,
                         const RankingExtras& extras = {});

  void reset_queue();
  std::int64_t queue_rows() const;  // number of filled rows
  double temperature() const;
  void set_temperature(double temperature);  // ConfigError: out of range

  using State = std::vector<std::pair<std::string, at::Tensor>>;
  State state() const;                  // copies of the buffers
  void load_state(const State& state);  // ConfigError: another queue size, other classes, a missing buffer

  const RankingOptions& options() const { return options_; }
  Group& group() { return group_; }

 protected:
  RankingLoss(std::string name, RankingOptions options, Group group, RankingCore core);
  void check(bool holds, const std::string& key, const std::string& found, const std::string& expected) const;

 private:
  std::vector<std::int64_t> rows_for_queue(std::int64_t live) const;
  void push(const RankingPool& rows);
  void append_queue(RankingPool& pool) const;
  std::vector<std::int64_t> subsample(const RankingPool& pool) const;
  void warn_of_classes_without_value(const std::vector<ClassResult>& classes);

  std::string name_;
  RankingOptions options_;
  Group group_;
  std::shared_ptr<const RankingCore> core_;
  at::Tensor queue_scores_;         // [Q, C] fp64
  at::Tensor queue_labels_;         // [Q] int64; -1: not filled
  at::Tensor queue_iid_;            // [Q] bool
  at::Tensor queue_weights_;        // [Q] fp64
  at::Tensor position_;             // [2] int64: index of the next row, number of forwards
  at::Tensor temperature_;          // [1] fp64
  std::vector<int> without_value_;  // [C] number of forwards, while there was none with a value
};

// 1 − AP with sigmoids as soft ranks (Brown et al., "Smooth-AP", ECCV 2020, eq. 6-7): a_k = 1 + Σ_{j≠k}
// σ((s_j − s_k)/τ), p_k the same over positives, AP = Σ w_k p_k/a_k / Σ w_k. Invalid without positives or
// negatives. O(P M) time, sharded over the ranks; O(P + M) memory.
class SmoothAPLoss final : public RankingLoss {
 public:
  explicit SmoothAPLoss(RankingOptions options = {}, Group group = Group::solo());
};

struct RecallOptions : RankingOptions {
  double quantile = 0.005;  // in (0, 1): the fraction of rows above the threshold
  Interpolation interpolation = Interpolation::kHigher;
};

// 1 − mean over positives of σ((s − θ)/τ), θ the (1 − quantile) quantile of all scores, without gradient.
class RecallAtQuantileLoss final : public RankingLoss {
 public:
  explicit RecallAtQuantileLoss(RecallOptions options = {}, Group group = Group::solo());
};

struct PAUCOptions : RankingOptions {
  PAUCOptions() { temperature = 0.1; }
  double alpha = 0, beta = 0.005;  // band of false-positive rates, 0 <= alpha < beta <= 1
  enum class Surrogate { kTrapezoid, kPairwise } surrogate = Surrogate::kTrapezoid;
  std::int64_t n_knots = 2;  // of the trapezoid
  enum class Scale { kIqr, kBand } tau_scale = Scale::kIqr;
  enum class Numerator { kPool, kLive } pos_numerator = Numerator::kPool;
  enum class Basis { kFpr, kPopulation } budget_basis = Basis::kFpr;
  Interpolation interpolation = Interpolation::kHigher;
};

// 1 − partial AUC over a band of false-positive rates (formulas: docs/ranking.md). Invalid without positives,
// without iid negatives, or where the scores' dispersion is at most 1e-12.
class PAUCAtBudgetLoss final : public RankingLoss {
 public:
  explicit PAUCAtBudgetLoss(PAUCOptions options = {}, Group group = Group::solo());
};

struct SigmoidFocalOptions {
  double alpha = 0.25;  // in [0, 1], or -1: no class weight
  double gamma = 2;     // >= 0
  LossReduction reduction = LossReduction::kMean;
  GradReduction grad_reduction = GradReduction::kSum;
};

// a_t (1 − p_t)^γ · binary cross entropy (Lin et al., "Focal loss", ICCV 2017, eq. 5), any shape, targets in
// [0, 1]. kMean divides by the elements (or weights) of all ranks. kMean and kSum give the whole value on
// every rank, with a gradient that is exact under a sum; kNone this rank's elements. One collective per
// forward.
class SigmoidFocalLoss final : public torch::nn::Module {
 public:
  explicit SigmoidFocalLoss(SigmoidFocalOptions options = {}, Group group = Group::solo());
  // sample_weight: dim 0 as in scores, further dims broadcast.
  at::Tensor forward(const at::Tensor& scores, const at::Tensor& targets,
                     const at::Tensor& sample_weight = {});

 private:
  SigmoidFocalOptions options_;
  Group group_;
};

struct SoftmaxFocalOptions {
  std::vector<double> alpha{};  // a weight per class; empty: none
  double gamma = 2;             // >= 0
  LossReduction reduction = LossReduction::kMean;
  double label_smoothing = 0;  // in [0, 1)
  std::int64_t ignore_index = -100;
  std::int64_t background_class = 0;  // for kMeanPositive
  GradReduction grad_reduction = GradReduction::kSum;
};

// α_y (1 − p_y)^γ · cross entropy. kMean divides by the valid elements (or their weights) of all ranks,
// kMeanPositive by those that are not background. Otherwise as SigmoidFocalLoss.
class SoftmaxFocalLoss final : public torch::nn::Module {
 public:
  explicit SoftmaxFocalLoss(SoftmaxFocalOptions options = {}, Group group = Group::solo());
  // scores [N, C] or [N, C, ...]; targets, and weights if any, [N] or [N, ...] int64
  at::Tensor forward(const at::Tensor& scores, const at::Tensor& targets,
                     const at::Tensor& sample_weight = {});

 private:
  SoftmaxFocalOptions options_;
  Group group_;
};

struct WarmupOptions {
  std::int64_t warmup_epochs = 0, blend_epochs = 0;
  std::optional<std::int64_t> warmup_steps{}, blend_steps{};  // instead of epochs
  double temp_start = 0.05, temp_end = 0.005;
  std::int64_t temp_decay_steps = 10000;
  double final_main_weight = 1;  // in (0, 1]
  bool reset_queue_each_epoch = false;
};

// Trains with `warmup`, then blends to `main`, whose temperature then decays. Both give the whole value on
// every rank, exact under a sum. Extras reach `main` in every phase. ConfigError on a training forward before
// the hooks were called: the warm-up would never end.
class LossWarmup final : public torch::nn::Module {
 public:
  using Warmup = std::function<at::Tensor(const at::Tensor& scores, const at::Tensor& targets,
                                          const at::Tensor& sample_weight)>;
  LossWarmup(Warmup warmup, std::shared_ptr<RankingLoss> main, WarmupOptions options = {});

  void on_train_epoch_start(std::int64_t epoch);
  void on_train_batch_start(std::int64_t global_step);
  double main_weight() const;  // 0 in the warm-up, final_main_weight after the blend
  at::Tensor forward(const at::Tensor& scores, const at::Tensor& targets, const RankingExtras& extras = {});
  RankingLoss& main() { return *main_; }

  RankingLoss::State state() const;
  void load_state(const RankingLoss::State& state);

 private:
  std::int64_t steps_past_warmup() const;  // < 0: in the warm-up

  Warmup warmup_;
  std::shared_ptr<RankingLoss> main_;
  WarmupOptions options_;
  at::Tensor progress_;  // [3] int64: epoch, step, step of the switch; -1: not set yet
};

// Quantiles of `values` (floating, 1-D, not empty) by torch.quantile's arithmetic: q and rank = q (n − 1) are in the
// values' type (fp64 above 2^24 values), fp16 and bf16 in fp32. NaN gives NaN. ConfigError: q outside [0, 1].
std::vector<double> quantiles(const at::Tensor& values, const std::vector<double>& q,
                              Interpolation interpolation = Interpolation::kLinear);

// Over the values of all ranks, 0 or more on each, with the bits of one process. Nothing is gathered: one
// all-reduce of 2^11 counts per order statistic and digit of 11 bits (3 rounds in fp32, 6 in fp64).
std::vector<double> distributed_quantiles(Group& group, const at::Tensor& values,
                                          const std::vector<double>& q,
                                          Interpolation interpolation = Interpolation::kLinear);

// Metrics of one set of scores [N] with targets [N] in {0, 1}, without smoothing.
struct RankingMetrics {
  std::int64_t rows = 0, positives = 0;
  double average_precision = 0;   // Σ (R_n − R_{n-1}) P_n over distinct scores: ties enter together
  double recall_at_quantile = 0;  // positives in the ⌈quantile · N⌉ highest scores, ties split evenly
  double partial_auc = 0;         // ROC area over false-positive rates [0, budget] / budget, in [0, 1]
};
RankingMetrics ranking_metrics(const at::Tensor& scores, const at::Tensor& targets, double quantile,
                               double budget);
// As above over the rows of all ranks, gathered with one header and one buffer.
RankingMetrics ranking_metrics(Group& group, const at::Tensor& scores, const at::Tensor& targets,
                               double quantile, double budget);

}  // namespace isograd
