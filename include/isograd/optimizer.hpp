// Optimizers over flat buckets, the exact global norm, and clipping. Optimizers know nothing of ranks;
// scaling by the clip coefficient is part of their pass.
#pragma once

#include "isograd/error.hpp"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// By name ("exp_avg", "exp_avg_sq", ...), one flat tensor per bucket, [held.size()]: the state itself, which
// may be read and overwritten.
using OptimizerState = std::map<std::string, std::vector<at::Tensor>>;

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string kind() const { return {}; }  // "adamw", "sgd", as checkpoints name it
  // One fused pass per bucket: parameters ← update(parameters, gradient_scale · gradients), except slots that
  // are not trained. Always call it with the buckets of the same layout, since the state belongs to them
  // (ConfigError otherwise).
  virtual void update(std::vector<Bucket>& buckets, double gradient_scale) = 0;
  // The same on GPUs, by numbers that the host does not know yet: `gradient_scale` is one fp64 number there,
  // `stop` one in fp32, and no parameter moves unless it is 0. The update is not counted before
  // count_update(). Returns false, with nothing done, where the optimizer or the buckets do not allow it.
  virtual bool update_unless(std::vector<Bucket>& /*buckets*/, const at::Tensor& /*stop*/,
                             const at::Tensor& /*gradient_scale*/) {
    return false;
  }
  virtual void count_update(const std::vector<Bucket>& /*buckets*/) {}
  virtual void set_learning_rate(double learning_rate) = 0;
  virtual double learning_rate() const = 0;
  // Number of updates made so far (AdamW's t).
  virtual std::int64_t updates() const = 0;
  // Empty where the optimizer has none (SGD without momentum).
  virtual OptimizerState state(const std::vector<Bucket>& buckets) = 0;
  virtual void set_updates(std::int64_t updates) = 0;
  // By parameter, how many updates it missed because it was frozen (Slot::trained) or had not joined its
  // layout. They do not count for the bias correction of its moments, as in PyTorch's optimizers.
  using Missed = std::map<std::string, std::int64_t>;
  virtual Missed missed_updates() const { return {}; }
  virtual void set_missed_updates(Missed /*missed*/) {}
};

struct AdamWOptions {
  double learning_rate = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // decoupled (Loshchilov & Hutter 2019); only where Slot::decays
};
std::unique_ptr<Optimizer> adamw(const AdamWOptions& options);

struct SgdOptions {
  double learning_rate = 0.1;
  double momentum = 0;
  double weight_decay = 0;
};
std::unique_ptr<Optimizer> sgd(const SgdOptions& options);

// Linear warm-up: (step + 1) / (warmup + 1) of the peak in the first `warmup` steps, the peak at step
// `warmup`; then constant, or cosine down to `floor` × peak at step `total`.
struct Schedule {
  enum class Kind { kConstant, kCosine } kind = Kind::kCosine;
  double peak = 3e-4;
  std::int64_t warmup = 0;
  std::int64_t total = 1;
  double floor = 0.1;
  double at(std::int64_t step) const;  // step counts from 0
};

// ---- the exact global norm: every element counted once, by its owner (docs/losses.md §7) ----

class Layout;
class Readings;

struct GlobalNorm {
  double norm = 0;      // ‖G‖₂ in fp64
  double loss_sum = 0;  // Σ over ranks of the given value
  bool finite = true;   // norm and loss of every rank are finite; the same on all ranks
};

// Local fp64 sum of squares over owned elements, then one all-reduce, which also sums the logged loss.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group group);
// As above, with more numbers to sum over the ranks in the same message, the loss first. `local_sums`
// (equally many on every rank) becomes their sums. Only the loss is checked for finiteness.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, std::vector<double>& local_sums, Group group);

// The norm in two halves: first Σ g² in fp64 of the elements that this rank owns, bucket by bucket in order;
// then global_norm() from that sum. Gradients on a GPU are read in one pass when the sum is asked for, and
// must not change until then.
class OwnedSquares {
 public:
  void add(const Bucket& bucket);
  void add(const Bucket& bucket, const Slot& slot);  // one parameter only
  void add(double squares) { sum_ += squares; }      // computed by a reduction
  // Squares on a device arrive when `readings` are read; this object must not move until then. Returns the
  // sum as one fp64 number on the device, undefined where there is none.
  at::Tensor complete(Readings& readings);
  double value();  // waits for squares that have not arrived

 private:
  void add(const at::Tensor& flat, Range range);

  double sum_ = 0;
  std::vector<at::Tensor> waiting_;
};
double owned_squares(const Bucket& bucket);
GlobalNorm global_norm(double squares, std::vector<double>& local_sums, Group group);

// The same for gradients by a Layout, in its order, already summed: owned elements only, then one all-reduce
// over all ranks of the mesh. Where several ranks hold the same numbers, one of them passes `local_sums` and
// the others 0.
double owned_squares(const Layout& layout, const std::vector<at::Tensor>& gradients);
GlobalNorm global_norm(const Layout& layout, const std::vector<at::Tensor>& gradients,
                       std::vector<double>& local_sums);

// Order of a norm: the root of the sum of squares (in fp64), or the largest magnitude.
enum class NormOrder { kTwo, kInfinity };

// Norms of parts of the gradient, e.g. of each layer: `part_of` returns a parameter's part, 0 to parts - 1,
// or any other number for none. NaN where the part has one, 0 for an empty part. One all-reduce for all
// parts; the same bits on every rank.
std::vector<double> part_norms(const std::vector<Bucket>& buckets,
                               const std::function<int(const Slot&)>& part_of, int parts, NormOrder order,
                               Group group);

// Parts of the gradient whose norms are logged in addition to the global norm: `of` returns a parameter's
// part as an index into `names`, or any other number for none. The same on every rank.
struct NormParts {
  std::vector<std::string> names{};
  std::function<int(const std::string& name)> of{};
};
// Adds the squares of what this rank owns in the bucket to those of their parts, [names.size()].
void add_owned_squares(const Bucket& bucket, const NormParts& parts, std::vector<OwnedSquares>& squares);

// max |g| over the whole gradient; NaN if any element is one.
double infinity_norm(const std::vector<Bucket>& buckets, Group group);

// min(1, max_norm / (norm + 1e-6)); 1 when max_norm <= 0 (no clipping). Same bits on every rank. ConfigError:
// max_norm is NaN.
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

// An optimizer that clips groups before `inner` updates. A parameter belongs to the first group whose pattern
// matches its name; all others form the last group, "others", with the limit `others`. Norms are computed by
// owners, as for the whole gradient (part_norms()): one all-reduce for all groups.
//
// It replaces the step's own clip: set StepOptions::max_norm = 0; the step still reports the norm of the
// whole gradient. Gradients are multiplied in place, so DataParallel::views() has the applied ones after the
// step; bf16 gradients are rounded once more.
class ClipsGroups : public Optimizer {
 public:
  // `all`: every rank that holds a part of the model or a copy, DataParallel::mesh().all(). ConfigError: a
  // limit that is negative or not a number, a pattern that is empty or given twice.
  ClipsGroups(std::unique_ptr<Optimizer> inner, std::vector<ClipGroup> groups, double others, Group all);

  // Collective over `all`. ConfigError on every rank, in the first update, for a pattern that matches no
  // parameter of any rank.
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
