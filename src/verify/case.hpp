// Two dumps of one step, aligned by parameter, and what each micro-batch alone adds to the right gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {

inline const std::string kAllRanks = "all ranks", kContextRanks = "cp_ring x cp_ulysses";

class Case {
 public:
  Case(RunPair pair, Experiment setting, const RunAgain& again);

  struct Parameter {
    std::string name;
    at::Tensor found, expected;  // fp64
    double scale = 0;            // s
    Comparison comparison;       // E1's, with limit()
  };
  struct Cell {  // a micro-batch with targets
    int rank = 0, micro_batch = 0;
    double targets = 0;
    std::vector<at::Tensor> part;  // by parameters(): what it adds to the right gradient
  };

  const StepDump& found() const { return pair_.found; }
  const StepDump& expected() const { return pair_.expected; }
  const Experiment& setting() const { return setting_; }

  // Of the same name and shape on both sides.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  std::vector<std::string> off() const;  // names of those that are not the same
  bool same() const { return off().empty(); }
  bool finite() const;       // the gradient found
  bool finite_loss() const;  // the loss found; one that was not recorded is
  // The share of its scale by which a parameter may be off: E1's 1e-10 in fp64, the limit of E2's ratio below
  // that.
  double limit() const { return limit_; }

  // What the declared mean counts; without counts: 0, and no cells.
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
  // Ranks along an axis, 1 where there is none of that name; kAllRanks and kContextRanks are products.
  double size_of(const std::string& axis) const;
  int micro_batches(int rank) const;
  int micro_batches() const;  // of all ranks
  int rounds() const;         // most of any rank
  bool can_run() const { return static_cast<bool>(again_); }
  bool silent() const;  // some micro-batch has no target
  const std::vector<Cell>& cells() const { return cells_; }
  // Fills in the parts by running each micro-batch alone. False: they cannot be had, or do not add up to the
  // right gradient.
  bool find_parts();

 private:
  RunPair pair_;
  Experiment setting_;
  const RunAgain& again_;
  double limit_ = 0;
  std::vector<Parameter> parameters_;
  std::vector<std::vector<double>> counts_;
  std::string counted_ = "targets";
  std::vector<double> by_rank_;
  double targets_ = 0;
  std::vector<Cell> cells_;
  enum class Parts { kNotAsked, kNone, kFound } parts_ = Parts::kNotAsked;
};

// What tells the parts of the gradient apart in weight: relative to the right weight, 1 everywhere.
struct Cause {
  std::string id;
  std::function<double(const Case&, const Case::Cell&)> weight;
  std::function<std::string(const Case&)> sentence;
  // What is logged beside the gradient.
  enum class Loss { kAny, kRight, kScaled, kNotScaled } loss = Loss::kAny;
  std::string axis{};  // whose size it is, if of one
  int rank = -1;       // whose part it is, if of one
};
std::vector<Cause> causes_of(const Case& one);
// Where ranks hold different gradients: rank 0's is the sum over those ranks alone that share its place along
// an axis.
std::vector<Cause> unsummed_causes(const Case& one);

// The largest ‖found − Σ weight · part‖ of the named parameters, as a share of the scale; nothing if the
// parts would be needed and cannot be had.
std::optional<double> misfit(Case& one, const Cause& cause, const std::vector<std::string>& names);

// The parameters that are off: what explains them.
std::vector<Finding> diagnose_gradient(Case& one, const RunAgain& again);
// What fits no cause: does a document reach another one's gradient, or is each feature right alone? The
// second says what it found out in `evidence`, too. (diagnose_unknown.cpp)
std::optional<Finding> diagnose_leak(const Case& one, const RunAgain& again);
std::optional<Finding> diagnose_composition(const Case& one, const RunAgain& again,
                                            const std::string& subject, std::vector<std::string>& evidence);

// Ranks hold different gradients: the axis over which these parameters are not summed.
std::optional<Finding> diagnose_unsummed(Case& one);
// The gradient is right: loss, norm, clip, traffic.
std::vector<Finding> diagnose_figures(const Case& one);

// "dp_shard (4)", "accumulation (3)": whatever in the run has this size.
std::string factors_of(const Case& one, double value);
// Experiment::text() with the axis by name.
std::string text_of(const Case& one, const Experiment& experiment);
std::string list_names(const std::vector<std::string>& names);

}  // namespace isograd
