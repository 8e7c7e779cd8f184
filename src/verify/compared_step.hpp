// Two dumps of one step, aligned by parameter, and what each micro-batch alone adds to the right gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "isograd/grid.hpp"
#include "isograd/verify.hpp"
#include "verify/compare.hpp"
#include "verify/diagnosis.hpp"
#include "verify/resolution.hpp"

namespace isograd {

inline const std::string kAllRanks = "all ranks", kContextRanks = "cp_ring x cp_ulysses";

// The error that rounding may cause in a gradient, as norms. In fp64 E1's 1e-10 of s. Below that, with the
// gradient of one process in the same precision, four times what it is off by and what sums round; without
// it, and at most with it, what was measured on right steps of several models and doubled: 256 u of a
// parameter's norm (or of the floor: 1/32 · RMS · √numel), and 32 u of the norm of all.
struct Allowance {
  bool exact = true;
  std::vector<double> parameter;  // ‖found − expected‖, by ComparedStep::parameters()
  double whole = 0;               // of all together; unless exact
  bool moved = false;             // some are wider, for the reference itself moves (StepDump::moves)
  // The error of a matrix's scale that is allowed, in addition to what its own pieces say
  // (test_scale_of_one); 0: not told.
  double matrix = 0;
  Bounds bounds;  // of the coarser precision
};

// A gradient that a mistake would make, and how much larger its rounding is than the right one's.
struct Prediction {
  Tensors gradient;
  std::vector<double> growth;
};

// The precision of that one of two dumps that rounds more.
const std::string& coarser_precision(const StepDump& one, const StepDump& other);

class ComparedStep {
 public:
  ComparedStep(RunPair pair, Experiment setting, const RunAgain& again);

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
  const Experiment& setting() const { return setting_; }
  // The coarser precision of the two; the bounds are for it.
  const std::string& precision() const { return coarser_precision(found(), expected()); }

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
  // Whether the gradient found is this one, within what rounding may do.
  bool is(const Prediction& prediction) const;
  // As is(weighted(weights, names)), but stops at the first parameter that differs. `made`: the whole
  // prediction where it is the gradient found.
  std::optional<bool> is(const std::vector<double>& weights, const std::vector<std::string>& names,
                         Prediction* made = nullptr);
  // How far the gradient found lies from one prediction towards another one. Against a run of one process in
  // the same precision, where that is known and tells more.
  Along between(const Prediction& from, const Prediction& to) const;
  Prediction right() const;
  // Weights by cells(), on the named parameters; the others are right. Nothing: the parts would be needed and
  // cannot be had.
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
  int holders() const;  // ranks that have targets
  // The rank that has this one's data as given.
  int home_of(int rank) const;
  // The axes that the run names; none: of one rank.
  const Grid& grid() const { return grid_; }
  // The axes that a subject's axis stands for: kAllRanks and kContextRanks are several; none where there is
  // none of that name.
  AxisSet axis_set(const std::string& axis) const;
  double size_of(const std::string& axis) const;  // ranks along it
  int micro_batches(int rank) const;
  int micro_batches() const;       // of all ranks
  int most_micro_batches() const;  // most of any rank
  bool can_run() const { return static_cast<bool>(again_); }
  bool assigned_otherwise() const { return pair_.assigned_otherwise; }
  bool silent() const;  // some micro-batch has no target
  // Whether a gradient of this one of parameters() that is lost would show: of next to none it does not, and
  // neither would a factor.
  bool shows(std::size_t parameter) const;
  const std::vector<Cell>& cells() const { return cells_; }
  // Fills in the parts by running each micro-batch alone. False: they cannot be had, or do not add up to the
  // right gradient.
  bool find_parts();

 private:
  void allow(double most_alone);
  bool scale_told(const Parameter& parameter) const;
  // Where the parts are known, if they are needed.
  bool can_weight(const std::vector<double>& weights);
  void weight_one(std::size_t parameter, const std::vector<double>& weights, Prediction& prediction) const;
  // Compares one parameter; adds its error and its bound in the whole, both squared.
  bool is_one(std::size_t parameter, const Prediction& prediction, double& off, double& grown) const;
  bool is_whole(const Prediction& prediction, double off, double grown) const;

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
// Where ranks hold different gradients: rank 0's is the sum over those ranks alone that share its place along
// an axis.
std::vector<Cause> unsummed_causes(const ComparedStep& one);

// The weight of each of cells(); where nothing is known of counts, one weight.
std::vector<double> weights_of(const ComparedStep& one, const Cause& cause);

// The gradient that the cause would make of the named parameters, the others being right.
std::optional<Prediction> prediction_of(ComparedStep& one, const Cause& cause,
                                        const std::vector<std::string>& names);
// Where the gradient found is the right one within rounding, but may as well be a known mistake's that moves
// it by less: findings where it lies nearer to the mistake; `ambiguous` receives those that cannot be told
// apart.
std::vector<Finding> diagnose_rivals(ComparedStep& one, std::vector<std::string>* ambiguous);

// The same samples, but as many targets as if each were counted once on every rank of some axes.
bool counted_several_times(const StepDump& found, const StepDump& expected);
// A dump whose counts do not add up to its targets, or which has a gradient without any; `side`: " of the
// reference".
std::vector<Finding> diagnose_counts(const StepDump& dump, const char* side);

// The parameters that are off: what explains them.
std::vector<Finding> diagnose_gradient(ComparedStep& one, const RunAgain& again);
// Ranks hold different gradients: the axis over which these parameters are not summed.
std::optional<Finding> diagnose_unsummed(ComparedStep& one);
// The gradient is right: loss, norm, clip, traffic.
std::vector<Finding> diagnose_figures(const ComparedStep& one, std::vector<std::string>* notices);
// The terms of the loss that both sides recorded and that are not alike, with their values.
std::vector<std::string> other_terms(const ComparedStep& one);
// The error allowed in figures that come from sums of many numbers.
double tolerance(const ComparedStep& one);

// Contradictions inside each dump: norms, owners, counts, shares. `notices` reports the checks that missing
// shares do not allow. (diagnose_contradictions.cpp)
std::vector<Finding> diagnose_contradictions(const ComparedStep& one, double limit,
                                             std::vector<std::string>* notices);
// The amount that an update takes away by one dump, against the gradient and the clip coefficient of the same
// dump.
struct OwnUpdate {
  std::vector<std::string> wrong;  // parameters
  std::vector<Finding> findings;   // one, where there are any
};
// `notices` reports a part that is no multiple of the gradient, as weight decay makes it.
OwnUpdate diagnose_own_update(const ComparedStep& one, bool of_found, std::vector<std::string>* notices);
// Owners of elements, and the norms of what ranks own, against the norm of all.
std::vector<Finding> diagnose_parts_of_norm(const StepDump& dump, const char* side, double norm,
                                            double limit);
// The norm that the reference recorded, or its gradient's where it is another one.
double norm_to_expect(const ComparedStep& one, double limit);

// The axes of more than one rank, then kContextRanks and kAllRanks where several make them up: along which
// something may be multiplied, divided or left out. And one of them in words: "dp_shard (4)".
std::vector<std::string> long_axes(const ComparedStep& one);
std::string name_of(const ComparedStep& one, const std::string& axis);
// "dp_shard (4)", "accumulation (3)": whatever in the run has this size.
std::string factors_of(const ComparedStep& one, double value);
// Experiment::text() with the axis by name.
std::string text_of(const ComparedStep& one, const Experiment& experiment);
std::string list_names(const std::vector<std::string>& names);
bool contains(const std::vector<std::string>& names, const std::string& name);
// By `limit` of the larger one; not for NaN.
bool close_together(double a, double b, double limit);

}  // namespace isograd
