// Optimizers over flat buckets, the exact global norm, and clipping. Optimizers know nothing of ranks.
#pragma once

#include "isograd/error.hpp"

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// By name ("exp_avg", ...), a flat tensor per bucket, [held.size()]: the state itself, to read and overwrite.
using OptimizerState = std::map<std::string, std::vector<at::Tensor>>;

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string kind() const { return {}; }  // "adamw", "sgd", as checkpoints name it
  // One fused pass per bucket: parameters ← update(parameters, gradient_scale · gradients), except slots that
  // are not trained. Always with the buckets of the same layout (ConfigError).
  virtual void update(std::vector<Bucket>& buckets, double gradient_scale) = 0;
  // On GPUs, by numbers that the host does not know yet: fp64 `gradient_scale`; no parameter moves unless
  // fp32 `stop` is 0; not counted before count_update(). False, with nothing done: not supported here.
  virtual bool update_unless(std::vector<Bucket>& /*buckets*/, const at::Tensor& /*stop*/,
                             const at::Tensor& /*gradient_scale*/) {
    return false;
  }
  virtual void count_update(const std::vector<Bucket>& /*buckets*/) {}
  virtual void set_learning_rate(double learning_rate) = 0;
  virtual double learning_rate() const = 0;
  virtual std::int64_t updates() const = 0;                              // made so far (AdamW's t)
  virtual OptimizerState state(const std::vector<Bucket>& buckets) = 0;  // empty: SGD without momentum
  virtual void set_updates(std::int64_t updates) = 0;
  // By parameter: updates missed while frozen or not joined; they do not count for the bias correction.
  using Missed = std::map<std::string, std::int64_t>;
  virtual Missed missed_updates() const { return {}; }
  virtual void set_missed_updates(Missed /*missed*/) {}
};

// Parameters with a learning rate and a weight decay of their own, as a parameter group of torch.optim.
struct ParameterGroup {
  std::string pattern;  // matches parameters' names; * stands for any text
  double rate = 1;      // times the optimizer's learning rate
  // Every parameter of the group has it, vectors too. Not given: the optimizer's, where Slot::decays.
  std::optional<double> weight_decay{};
};
// ConfigError: a pattern that fits no trained parameter of `named`, a parameter that two patterns fit. Call
// it with the whole model's parameters; an optimizer refuses only what is in two groups.
void check_groups(const std::vector<ParameterGroup>& groups,
                  const std::vector<std::pair<std::string, at::Tensor>>& named);

struct AdamWOptions {
  double learning_rate = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;             // decoupled (Loshchilov & Hutter 2019); only where Slot::decays
  std::vector<ParameterGroup> groups{};  // all other parameters are updated by the options above
};
// Its options may change before each update.
class AdamW : public Optimizer {
 public:
  virtual void set_options(const AdamWOptions& options) = 0;  // ConfigError: as adamw()
};
std::unique_ptr<AdamW> adamw(const AdamWOptions& options);
template <typename Options>
requires(!std::convertible_to<Options, AdamWOptions>) std::unique_ptr<AdamW> adamw(const Options&) {
  static_assert(misused<Options>,
                "adamw() takes isograd::AdamWOptions, as in adamw({.learning_rate = 1e-3}), and no "
                "parameters: each update gets them from the layout");
  return nullptr;
}

struct SgdOptions {
  double learning_rate = 0.1;
  double momentum = 0;
  double weight_decay = 0;
  std::vector<ParameterGroup> groups{};
};
std::unique_ptr<Optimizer> sgd(const SgdOptions& options);

// The learning rate of step i, from 0. In the warm-up it is (i + 1) / (warmup + 1) of the peak. From step
// `start` on it goes down to `floor` times the peak, which step `total` and later ones have:
//   peak · (floor + (1 − floor) · s(p)),  p = (i − start) / (total − start)
// p is that of transformers (get_wsd_schedule) and torchtitan (linear_warmup_stable_decay). kCosine and
// kLinear start after the warm-up; kConstant and kWsd (warm-up, stable, decay: Hu et al. 2024, arXiv
// 2404.06395) `decay` steps before the end, and have the peak until then.
struct Schedule {
  enum class Kind { kConstant, kCosine, kLinear, kWsd } kind = Kind::kCosine;
  double peak = 3e-4;
  std::int64_t warmup = 0;
  std::int64_t total = 1;
  double floor = 0.1;
  std::int64_t decay = 0;  // steps; kConstant and kWsd only. kConstant without: the peak for ever
  // s of kConstant and kWsd: 1 − p, (1 + cos πp) / 2 or 1 − √p (Hägele et al. 2024, arXiv 2405.18392).
  enum class Shape { kLinear, kCosine, kOneMinusSqrt } shape = Shape::kLinear;
  // ConfigError: kWsd without `decay`, a decay that is negative or longer than total − warmup.
  double at(std::int64_t step) const;
};

// ---- the exact global norm: every element counted once, by its owner (docs/norm.md) ----

class Readings;

struct GlobalNorm {
  double norm = 0;      // ‖G‖₂ in fp64
  double loss_sum = 0;  // Σ over ranks of the given value
  bool finite = true;   // norm and loss of every rank are finite; the same on all ranks
};

// Local fp64 sum of squares over owned elements, then one all-reduce, which also sums the logged loss.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group group);
// Also sums `local_sums` (equally many on every rank, the loss first) in the same message.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, std::vector<double>& local_sums, Group group);

// The norm in two halves: Σ g² in fp64 of owned elements, then global_norm() from that sum. Gradients on a
// GPU are read when the sum is asked for and must not change until then.
class OwnedSquares {
 public:
  void add(const Bucket& bucket);
  void add(const Bucket& bucket, const Slot& slot);  // one parameter only
  void add(double squares) { sum_ += squares; }      // computed by a reduction
  // The sum, fp64 on the device (undefined: none there), once `readings` are read. Must not move until then.
  at::Tensor complete(Readings& readings);
  double value();  // waits for squares that have not arrived

 private:
  void add(const at::Tensor& flat, Range range);

  double sum_ = 0;
  std::vector<at::Tensor> waiting_;
};
double owned_squares(const Bucket& bucket);
GlobalNorm global_norm(double squares, std::vector<double>& local_sums, Group group);

// Order of a norm: the root of the sum of squares (in fp64), or the largest magnitude.
enum class NormOrder { kTwo, kInfinity };

// Norms of parts of the gradient: `part_of` gives 0 to parts - 1, or any other number for none. NaN where the
// part has one, 0 where it is empty. One all-reduce; the same bits on every rank.
std::vector<double> part_norms(const std::vector<Bucket>& buckets,
                               const std::function<int(const Slot&)>& part_of, int parts, NormOrder order,
                               Group group);

// Parts whose norms are logged: `of` gives an index into `names`, or any other number for none.
struct NormParts {
  std::vector<std::string> names{};
  std::function<int(const std::string& name)> of{};
};
// Adds the squares of what this rank owns in the bucket to those of their parts, [names.size()].
void add_owned_squares(const Bucket& bucket, const NormParts& parts, std::vector<OwnedSquares>& squares);

// max |g| over the whole gradient; NaN if any element is one.
double infinity_norm(const std::vector<Bucket>& buckets, Group group);

// min(1, max_norm / (norm + 1e-6)); 1 when max_norm <= 0. Same bits on every rank. ConfigError: a NaN limit.
double clip_coefficient(double norm, double max_norm);

// ---- clipping groups of parameters, each by its own norm and limit, on any mesh ----

struct ClipGroup {
  std::string pattern;  // matches parameters' names; * stands for any text
  double max_norm = 1;  // 0: not clipped
};

// Result of the last update for a group.
struct ClippedGroup {
  std::string pattern;
  double norm = 0;         // of the whole group's gradient, over all ranks, before the clip
  double coefficient = 1;  // min(1, max_norm / (norm + 1e-6)); the same bits on every rank
};

// Clips groups before `inner` updates. A parameter belongs to the first group whose pattern matches its name;
// the rest to the last group, "others". One all-reduce for all groups. It replaces the step's own clip: set
// StepOptions::max_norm = 0. Gradients are multiplied in place; bf16 ones are rounded once more.
class ClipsGroups : public Optimizer {
 public:
  // `all`: DataParallel::mesh().all(). ConfigError: a negative or NaN limit, an empty or doubled pattern.
  ClipsGroups(std::unique_ptr<Optimizer> inner, std::vector<ClipGroup> groups, double others, Group all);

  // Collective. ConfigError on every rank in the first update: a pattern that matches no rank's parameters.
  void update(std::vector<Bucket>& buckets, double gradient_scale) override;
  const std::vector<ClippedGroup>& last() const { return last_; }  // the groups, then "others"

  std::string kind() const override { return inner_->kind(); }
  void set_learning_rate(double learning_rate) override { inner_->set_learning_rate(learning_rate); }
  double learning_rate() const override { return inner_->learning_rate(); }
  std::int64_t updates() const override { return inner_->updates(); }
  OptimizerState state(const std::vector<Bucket>& buckets) override { return inner_->state(buckets); }
  void set_updates(std::int64_t updates) override { inner_->set_updates(updates); }
  Missed missed_updates() const override { return inner_->missed_updates(); }
  void set_missed_updates(Missed missed) override { inner_->set_missed_updates(std::move(missed)); }

 private:
  int group_of(const std::string& name) const;
  void check_patterns(const std::vector<Bucket>& buckets);

  std::unique_ptr<Optimizer> inner_;
  std::vector<ClipGroup> groups_;
  Group all_;
  bool checked_ = false;
  std::vector<ClippedGroup> last_;
};

}  // namespace isograd
