// Names the mistake that explains the difference of two dumps of one step, from them and from steps made
// again in other circumstances. A gradient that fits no known mistake is `unknown`; nothing is guessed.
#pragma once

#include "verify/compare.hpp"

namespace isograd {

// Every finding: its id, which JSON, dumps and docs/museum.md show, and what it means.
// clang-format off
#define ISOGRAD_FINDINGS(FINDING) \
  FINDING(averaged_over_axis, "gradients are averaged over ranks whose parts should be summed") \
  FINDING(averaged_over_holders, \
          "gradients are averaged over the ranks that have data, whose parts should be summed") \
  FINDING(counted_on_peers, \
          "targets are counted again on ranks that see the same ones: loss and gradient are too small") \
  FINDING(multiplied_by_axis, "gradients are summed over ranks where the loss expects an average") \
  FINDING(summed_over_micro_batches, "the means of micro-batches are summed, not divided by their number") \
  FINDING(unscaled_sum, "nothing divides the loss: it grows with the batch") \
  FINDING(gradient_scaled_by_count, \
          "the loss in the log is right, the gradient is multiplied by the count") \
  FINDING(loss_scaled, "the gradient is right, the loss in the log is multiplied") \
  FINDING(loss_differs, \
          "the gradient is right, the loss in the log is another one: one rank's own, a mean of rank means") \
  FINDING(count_not_reduced, "the loss is divided by the targets of one rank instead of all") \
  FINDING(mean_of_rank_means, \
          "each rank's mean counts the same, however much it holds; of a loss that compares samples: each " \
          "rank compares its own alone") \
  FINDING(mean_of_micro_batch_means, "each micro-batch's mean counts the same, however much it holds") \
  FINDING(mean_of_micro_batch_means_by_rank, "the same within each rank, then the ranks are averaged") \
  FINDING(accumulation_rescaled, "every micro-batch rescales what was accumulated before it") \
  FINDING(averaged_over_micro_batches, \
          "the gradient is divided by the number of micro-batches, though the count covers the whole step") \
  FINDING(reduced_while_accumulating, \
          "what was accumulated is summed over ranks again with every further micro-batch") \
  FINDING(clipped_before_reduction, \
          "each rank's or micro-batch's part is clipped by itself, then they are added up") \
  FINDING(not_finite_empty_micro_batch, "a micro-batch without a target divides zero by zero") \
  FINDING(not_finite, "the gradient, or what was recorded with it, is not finite") \
  FINDING(replicas_differ, "ranks hold different gradients for the same parameter") \
  FINDING(buffers_differ, "forward changes a buffer by each rank's own rows") \
  FINDING(not_summed_over_axis, \
          "gradients are not summed over an axis: each rank along it keeps its own part") \
  FINDING(micro_batches_not_reduced, \
          "some micro-batches' gradients stay on their ranks, as under no_sync() without a backward after it") \
  FINDING(other_reduction, \
          "gradients are reduced over ranks by another operation than a sum: each element is the largest, " \
          "the smallest or the product of the ranks' ones") \
  FINDING(sum_order_depends_on_rank, \
          "each rank adds the parts up in another order: replicas differ in bits") \
  FINDING(not_repeatable, "the same step made twice gives different bits") \
  FINDING(norm_counts_replicas, "elements count in the norm once for each rank that has a copy") \
  FINDING(norm_of_own_shard, "each rank takes the norm of the part it keeps") \
  FINDING(norm_before_reduction, \
          "each rank takes the norm of its own data's part of the gradient, before the sum over ranks") \
  FINDING(norms_averaged, "norms of parts are averaged instead of their squares summed") \
  FINDING(norm_of_largest_part, \
          "the norm is that of the largest part instead of the root of their squares' sum") \
  FINDING(norm_misses_elements, "some elements count on no rank: the norm is too small, alike everywhere") \
  FINDING(clip_not_applied, "the gradient is applied as if it had not been clipped") \
  FINDING(groups_clipped_apart, "groups of parameters are clipped by coefficients of their own") \
  FINDING(values_clipped, \
          "elements are clipped, each by itself: the direction of the gradient is another one") \
  FINDING(documents_leak, \
          "a document in a pack changes what another one computes, or positions begin at a wrong token") \
  FINDING(padding_seen, "what a sample computes depends on the padding next to it: no mask covers it") \
  FINDING(term_scaled, "one term of the loss is multiplied, the others are right") \
  FINDING(some_parameters_scaled, \
          "some parameters' gradients are multiplied, the others are right: a tied weight counted twice, " \
          "for example") \
  FINDING(cut_parameters_scaled, \
          "the gradients of what is cut along one axis are multiplied by a size of the run, or divided by " \
          "it: that of the axis, over which the sum is whole already, of all ranks, of accumulation") \
  FINDING(scaled_by_factor, \
          "all gradients are multiplied by one factor that no count explains alone: a learning rate, a " \
          "loss scale, a divisor of the loss or of the reduction") \
  FINDING(other_denominator, \
          "the loss is divided by another count than its targets': padding, all tokens, samples") \
  FINDING(other_mean, \
          "the loss is another mean than declared: each sample's own mean counts the same, or each token") \
  FINDING(gradient_lost, "some or all parameters get no gradient where there should be one") \
  FINDING(cut_in_forward, \
          "before one place of the forward all gradients are wrong, after it all are right: a branch passes " \
          "no gradient on, or a wrong one") \
  FINDING(weight_decay_in_gradient, \
          "the gradient is off by one multiple of the parameters: a decay that the loss does not have") \
  FINDING(gradient_of_earlier_step, "what the gradient was before the step is in it, too") \
  FINDING(loss_over_own_samples, \
          "a loss over the whole batch is taken over each rank's or micro-batch's samples alone, in other " \
          "shares than equal ones; or its means and variances are made of the ranks' own") \
  FINDING(samples_weighted_differently, \
          "the same samples or targets count more or less often: some twice, some not at all, each in a share " \
          "of its own") \
  FINDING(micro_batches_lost, "only the last (or first) micro-batch of each rank is in the gradient") \
  FINDING(missing_rank_part, "a rank's part of some gradient is not in the sum") \
  FINDING(missing_data_part, "the part of some data is not in the sum, whichever rank has them") \
  FINDING(composition, "right with each of two features alone, wrong with both") \
  FINDING(sample_twice, "some samples count more than once") \
  FINDING(other_batch, "the runs did not see the same samples") \
  FINDING(other_targets, \
          "the same samples, but other tokens carry loss: padding or the first label counted, labels not " \
          "shifted, shifted twice or smoothed, targets left out") \
  FINDING(other_loss, \
          "the model's outputs are right, and the gradient that arrives at them is not that of the " \
          "declared loss: the step computes another one of them, or passes another gradient on to them") \
  FINDING(other_outputs, \
          "the model gives other outputs for the same samples: other inputs, masks or positions, or " \
          "another forward") \
  FINDING(extra_rows_counted, \
          "rows of the model's outputs that no sample has carry loss: padding, or rows that were made up") \
  FINDING(other_backward, \
          "the model's outputs are right, and so is the gradient that arrives at them; those of the " \
          "parameters are not: a hook, a cut, or the reduction") \
  FINDING(initial_parameters_differ, "parameters differ before the first step") \
  FINDING(noise_depends_on_layout, "random numbers depend on the rank, not on the sample") \
  FINDING(evaluation_mode, \
          "the step runs in evaluation mode, in which the model computes otherwise: dropout is off, or batch " \
          "norm takes the statistics of before") \
  FINDING(resume_changes_step, "a resumed run goes on otherwise than one that was never stopped") \
  FINDING(reduced_every_micro_batch, "gradients are reduced after every micro-batch instead of once") \
  FINDING(traffic_differs, "another number of bytes was moved than the strategy needs") \
  FINDING(elements_not_owned_once, "some element has no owner, or several, in norms and checkpoints") \
  FINDING(norm_differs, "the norm is wrong in a way that fits no known mistake") \
  FINDING(shares_differ, "the recorded shares of ranks and micro-batches do not add up to the gradient") \
  FINDING(clip_differs, \
          "the clip coefficient does not follow from the norm, or the gradient is divided after the clip") \
  FINDING(optimizer_differs, "the gradient is right, the parameters after some updates are not") \
  FINDING(not_in_optimizer, "no group of an optimizer holds a parameter that is trained") \
  FINDING(not_updated, "the optimizer stepped, and a parameter that has a gradient did not move") \
  FINDING(updates_differ, \
          "the gradient is right, but ranks update otherwise: one that does not step, another learning rate") \
  FINDING(frozen_otherwise, "the run trains other parameters than the model that it was made from") \
  FINDING(reduction_not_proven, \
          "all ranks have the same samples: without a reduction the numbers are the same") \
  FINDING(random_model, "the model gives other numbers when it runs again: nothing can be compared") \
  FINDING(no_gradient, "the gradient is zero everywhere: nothing can be compared") \
  FINDING(parameters_missing, "the runs do not have the same parameters") \
  FINDING(parameters_renamed, "parameters have other names") \
  FINDING(parameters_reshaped, "parameters have other shapes") \
  FINDING(living_layout_differs, \
          "a fresh layout has the right gradient, the one of the run under way does not (--verify-every)") \
  FINDING(other_experts, \
          "tokens went to experts that the oracle did not choose, and not because rounding turned a near " \
          "tie") \
  FINDING(rounding, \
          "right but for rounding that the run's precision does not explain: sums in a coarser type") \
  FINDING(unresolved, \
          "nothing is found to be wrong, but too large a mistake would not show: no pass, and it says what " \
          "would tell") \
  FINDING(undecided, \
          "several mistakes fit, and what is there does not tell them apart: it says what would") \
  FINDING(unknown, "fits no known mistake")
// clang-format on

namespace finding_id {
#define ISOGRAD_ID(id, meaning) inline constexpr const char* id = #id;
ISOGRAD_FINDINGS(ISOGRAD_ID)
#undef ISOGRAD_ID
}  // namespace finding_id

// The same step in other circumstances. All defaults: exactly the same again.
struct Experiment {
  // Targets that carry loss: as given; equally many in each micro-batch that has any; uneven numbers.
  enum class Counts { kAsGiven, kEqual, kUneven } counts = Counts::kAsGiven;
  bool split_micro_batches = false;  // those of several fragments in two: accumulation
  bool one_micro_batch = false;      // each rank's data in one: no accumulation
  bool without_silent = false;       // micro-batches without a target left out
  int empty_rank = -1;               // this rank has no data, nor those that share its samples
  int only_rank = -1;                // the others have none
  int only_micro_batch = -1;         // and this rank has this one alone
  int swapped[2] = {-1, -1};         // these ranks have each other's data
  int only_axis = -1;                // index into StepDump::axes: all ranks along it, the others have size 1
  std::int64_t muted_document = -1;  // sample id: its targets carry no loss
  bool perturbed = false;            // and its tokens are others
  int ranks = 0;                     // 0: as many as there are
  bool without_noise = false;        // no dropout
  bool without_resume = false;       // the run went on instead of being resumed
  bool reference_only = false;       // only RunPair::expected is needed

  std::string text() const;  // "accumulation off", ...
  bool operator==(const Experiment&) const = default;
};

// The run under test, and the same step made by one process or by a trainer that is known to be right.
struct RunPair {
  StepDump found, expected;
  // The gradient of one process in the precision of `found`, for what rounding alone does; empty: not known.
  StepDump::Named alone{};
  // The targets lie on other ranks and micro-batches in `expected`, so that its parts are not found's.
  bool assigned_otherwise = false;
  // By `alone`, the largest ‖g − g64‖ of further runs of that process (StepDump::rounding); empty: of none.
  std::vector<double> alone_rounding{};
  // By `alone`, the largest error of the whole gradient's scale in these runs (StepDump::scale_rounding).
  double alone_scale_rounding = 0;
  bool of_whole = false;  // a part that was asked for alone has the weight that it has in the whole step
};

// Makes the step again; nothing: this cannot be run.
using RunAgain = std::function<std::optional<RunPair>(const Experiment&)>;
inline const RunAgain kNeverAgain{};

struct Diagnosis {
  const char* id;
  const char* meaning;
};
extern const std::vector<Diagnosis> kDiagnoses;

// "2", "1/3", "0.70710678": integers and their inverses up to 4096 by name, others as numbers.
std::string ratio_text(double ratio);

AxisSet present(const Grid& grid, AxisSet along);  // those of `along` that the grid has

inline const std::string kAllRanks = "all ranks", kContextRanks = "cp_ring x cp_ulysses";

// The error that rounding may cause in a gradient, as norms: E1's 1e-10 of s in fp64; below that, four times
// what one process is off by and what sums round, at most twice what right steps were seen to be off by: 256
// u of a parameter's norm (or of the floor 1/32 · RMS · √numel) and 32 u of the norm of all.
struct Allowance {
  bool exact = true;
  std::vector<double> parameter;  // ‖found − expected‖, by ComparedStep::parameters()
  double whole = 0;               // of all together; unless exact
  bool moved = false;             // some are wider, for the reference itself moves (StepDump::moves)
  ScaleRounding scale{};          // of the scale of the whole gradient, beyond four roundings
  // Added to what a matrix's own pieces allow its scale to be off by (test_scale_of_one); 0: not tested.
  double matrix = 0;
  Bounds bounds;  // of the coarser precision
};

// A gradient that a mistake would make, and how much larger its rounding is than the right one's.
struct Prediction {
  Tensors gradient;
  std::vector<double> growth;
};

// Two dumps of one step, aligned by parameter, and what each micro-batch alone adds to the right gradient.
class ComparedStep {
 public:
  explicit ComparedStep(RunPair pair, Experiment setting = {}, const RunAgain& again = kNeverAgain);

  struct Parameter {
    std::string name;
    at::Tensor found, expected;   // fp64
    double norm = 0;              // ‖expected‖
    double scale = 0;             // s
    double unmeasured_scale = 0;  // s without a gradient of one process
    bool by_floor = false;        // s is not its own norm
    double alone_error = 0;       // of one process in the precision of `found`, in s; 0: not known
    Comparison comparison;        // held to allowance()
  };
  struct Cell {  // a micro-batch with targets
    int rank = 0, micro_batch = 0;
    double targets = 0;
    std::vector<at::Tensor> part;  // by parameters(): what it adds to the right gradient
    std::vector<double> norm{};    // of these
  };

  const RunPair& pair() const { return pair_; }
  const StepDump& found() const { return pair_.found; }
  const StepDump& expected() const { return pair_.expected; }
  const std::string& precision() const;  // the coarser of the two; the bounds are for it

  // The parameters of the same name and shape on both sides.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // Names of those that are not the same; all of them where only the whole is off.
  std::vector<std::string> off() const;
  bool same() const { return off().empty(); }
  bool finite() const;       // the gradient found
  bool finite_loss() const;  // the loss found; one that was not recorded is
  const Allowance& allowance() const { return allowance_; }
  const WholeScale& scale() const { return scale_; }           // tested unless exact
  double whole_error() const { return whole_error_; }          // ‖found − expected‖ of all parameters
  const std::vector<double>& moves() const { return moves_; }  // StepDump::moves, by parameters()
  double norm() const { return norm_; }                        // ‖expected‖ of all parameters
  // The share by which loss, norm and coefficients may be off: 1e-10 in fp64, 1e-4 in fp32, 1e-2 in bf16.
  double limit() const { return allowance_.exact ? Bounds{}.exact : allowance_.bounds.figures; }
  // How far replicas may be apart, of their norm, where each adds up in its own order.
  double spread_allowed() const { return allowance_.exact ? Bounds{}.exact : 256 * allowance_.bounds.unit; }
  // Whether the gradient found is weighted(weights, names), within what rounding may do. `made`: that, if so.
  std::optional<bool> is(const std::vector<double>& weights, const std::vector<std::string>& names,
                         Prediction* made = nullptr);
  // How far the gradient found lies from one prediction towards another; against `alone` if that tells more.
  Along between(const Prediction& from, const Prediction& to) const;
  Prediction right() const;
  // Weights by cells() on the named parameters; the others are right. Nothing: the parts cannot be had.
  std::optional<Prediction> weighted(const std::vector<double>& weights,
                                     const std::vector<std::string>& names);

  // The unit that the declared mean counts; without counts: 0, and no cells.
  const std::string& counted() const { return counted_; }  // "targets", "samples", "weights"
  std::string unit() const {
    return counted_ == "targets" ? "token" : counted_.substr(0, counted_.size() - 1);
  }
  double targets() const { return targets_; }
  double targets_of(int rank) const { return by_rank_.at(static_cast<std::size_t>(rank)); }
  int ranks() const { return static_cast<int>(by_rank_.size()); }
  int holders() const;                        // ranks that have targets
  int home_of(int rank) const;                // the rank that has this one's data as given
  const Grid& grid() const { return grid_; }  // the axes that the run names; none: of one rank
  // The axes that a name stands for: several for kAllRanks and kContextRanks; none if it is unknown.
  AxisSet axis_set(const std::string& axis) const;
  double size_of(const std::string& axis) const;  // ranks along it
  int micro_batches(int rank) const;
  int micro_batches() const;       // of all ranks
  int most_micro_batches() const;  // most of any rank
  bool can_run() const { return static_cast<bool>(again_); }
  bool assigned_otherwise() const { return pair_.assigned_otherwise; }
  bool silent() const;  // some micro-batch has no target
  // Whether it would show that this parameter's gradient is lost; of next to none it would not.
  bool shows(std::size_t parameter) const;
  const std::vector<Cell>& cells() const { return cells_; }
  // Fills in the parts by running each micro-batch alone. False: they cannot be had, or do not add up.
  bool find_parts();

 private:
  void allow(double most_alone);
  bool scale_told(const Parameter& parameter) const;
  // Where the parts are known, if they are needed.
  bool can_weight(const std::vector<double>& weights);
  void weight_one(std::size_t parameter, const std::vector<double>& weights, Prediction& prediction) const;

  RunPair pair_;
  Grid grid_;
  Experiment setting_;
  const RunAgain& again_;
  Allowance allowance_;
  WholeScale scale_;
  double whole_error_ = 0;
  double norm_ = 0;                          // of the gradient expected
  Tensors alone_;                            // by parameters(); empty: not known
  std::vector<double> alone_apart_, apart_;  // ‖alone − expected‖, ‖found − expected‖, by parameters()
  std::vector<double> moves_;
  std::vector<Parameter> parameters_;
  std::vector<std::vector<double>> counts_;
  std::string counted_ = "targets";
  std::vector<double> by_rank_;
  double targets_ = 0;
  std::vector<Cell> cells_;
  enum class Parts { kNotAsked, kNone, kFound } parts_ = Parts::kNotAsked;
};

// The step made again in other circumstances; nothing: it cannot be made.
std::optional<ComparedStep> made_under(const Experiment& setting, const RunAgain& again);

// A verdict on each compared parameter; both of its comparisons are that of the dumps.
std::vector<ParameterVerdict> verdicts_of(const ComparedStep& one);

// Empty: the pair shows the same step. The first finding names the cause. `ambiguous` receives the mistakes
// that this precision does not tell from the right gradient.
std::vector<Finding> diagnose(ComparedStep& one, const RunAgain& again = kNeverAgain,
                              std::vector<std::string>* ambiguous = nullptr);
std::vector<Finding> diagnose(const RunPair& pair, const RunAgain& again = kNeverAgain,
                              std::vector<std::string>* ambiguous = nullptr);

// A mistake, as the weights of the gradient's parts relative to the right weight, which is 1 everywhere.
struct Cause {
  using Weight = std::function<double(const ComparedStep&, const ComparedStep::Cell&)>;
  std::string id;
  Weight weight;
  std::string sentence;  // with the sizes of the step that it was made for
  // The loss that is logged with the gradient.
  enum class Loss { kAny, kRight, kScaled, kNotScaled } loss = Loss::kAny;
  std::string axis{};  // whose size it is, if of one
  int rank = -1;       // whose part it is, if of one
};
std::vector<Cause> causes_of(const ComparedStep& one);
// Where ranks hold different gradients: rank 0 has the sum over the ranks of its place along an axis alone.
std::vector<Cause> unsummed_causes(const ComparedStep& one);

// A dump whose counts contradict its targets or its gradient; `side`: " of the reference".
std::vector<Finding> diagnose_counts(const StepDump& dump, const char* side);

// The parameters that are off: what explains them.
std::vector<Finding> diagnose_gradient(ComparedStep& one, const RunAgain& again);
// The gradient is finite and right within rounding, not exact: findings where it lies nearer to a known
// mistake's.
std::vector<Finding> diagnose_rivals(ComparedStep& one, std::vector<std::string>* ambiguous);
// Ranks hold different gradients: the axis over which these parameters are not summed.
std::optional<Finding> diagnose_unsummed(ComparedStep& one);
// The gradient is right: loss, norm, clip, traffic.
std::vector<Finding> diagnose_figures(ComparedStep& one, std::vector<std::string>* notices);
// A finding where `found`, in all parameters, is a multiple of `right` of which no element exceeds one value.
std::optional<Finding> diagnose_values(const Tensors& found, const Tensors& right, double near);
// Contradictions inside each dump: norms, owners, counts, shares. `notices`: what missing shares prevent.
std::vector<Finding> diagnose_contradictions(const ComparedStep& one, double limit,
                                             std::vector<std::string>* notices);
// The terms of the loss that both sides recorded and that are not alike, with their values.
std::vector<std::string> other_terms(const ComparedStep& one);
double tolerance(
    const ComparedStep& one);  // the error allowed in figures that come from sums of many numbers

// The axes of more than one rank, and sets of them (kContextRanks, kAllRanks); one in words: "dp_shard (4)".
std::vector<std::string> long_axes(const ComparedStep& one);
std::string name_of(const ComparedStep& one, const std::string& axis);
// "dp_shard (4)", "accumulation (3)": whatever in the run has this size.
std::string factors_of(const ComparedStep& one, double value);
// Experiment::text() with the axis by name.
std::string text_of(const ComparedStep& one, const Experiment& experiment);
std::string list_names(const std::vector<std::string>& names);
bool contains(const std::vector<std::string>& names, const std::string& name);
bool close_together(double a, double b, double limit);  // by `limit` of the larger one; not for NaN

struct DumpNames {
  std::string found, expected;
};
struct DumpComparison {
  Verdict verdict;  // one layout, named after `found`
  std::vector<Finding> findings;
  std::vector<std::string> notices;  // what was done to the dumps before they were compared
  bool peers = false;                // some ranks of `found` see the same samples
};

// The table, grade and diagnosis of `found` against `expected`, the step of one process or of a right
// trainer: E1 in fp64, else E2, sharper with `alone`, one process in the precision of `found` (Allowance).
// Nothing is claimed of what is not recorded; each finding fails the verdict. ConfigError on an `alone` of
// another step.
DumpComparison compare_dumps(StepDump found, StepDump expected, const DumpNames& names,
                             std::optional<StepDump> alone = {});

}  // namespace isograd
