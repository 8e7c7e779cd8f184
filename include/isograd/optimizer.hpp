// Optimizers over flat buckets. They know nothing of ranks; scaling by the clip coefficient is part of their
// pass.
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

// By name ("exp_avg", "exp_avg_sq", ...) one flat tensor for each bucket, [held.size()]: the state itself, to
// be read or overwritten.
using OptimizerState = std::map<std::string, std::vector<at::Tensor>>;

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string kind() const { return {}; }  // "adamw", "sgd", as checkpoints name it
  // One fused pass per bucket over what it holds: parameters ← update(parameters, gradient_scale ·
  // gradients), but for slots that are not trained. Always with the buckets of one layout: its state is
  // theirs. ConfigError on others.
  virtual void update(std::vector<Bucket>& buckets, double gradient_scale) = 0;
  virtual void set_learning_rate(double learning_rate) = 0;
  virtual double learning_rate() const = 0;
  // Number of updates made so far (AdamW's t).
  virtual std::int64_t updates() const = 0;
  // Empty where there is none (SGD without momentum).
  virtual OptimizerState state(const std::vector<Bucket>& buckets) = 0;
  virtual void set_updates(std::int64_t updates) = 0;
  // By parameter, how many of the updates it missed because it was frozen (Slot::trained) or had not joined
  // its layout: the time of its moments runs without them, as a PyTorch optimizer's.
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

// The exact global norm: every element counted once, by its owner (source of the rule: docs/losses.md §7).

class Layout;
class Readings;

struct GlobalNorm {
  double norm = 0;      // ‖G‖₂ in fp64
  double loss_sum = 0;  // Σ over ranks of the value given
  bool finite = true;   // norm and loss of every rank; the same answer on all ranks
};

// Local fp64 sum of squares over owned elements, then one all-reduce, which carries the logged loss along.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group group);
// The same with more numbers to be summed over the ranks on the way, the loss first. `local_sums` (equally
// many on every rank) becomes their sums. The others may be anything: what is only logged stops no step.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, std::vector<double>& local_sums, Group group);

// The same in two halves: Σ g² in fp64 of the elements that this rank owns, bucket by bucket in their order,
// and the rest from their sum. Gradients on a GPU are read when the sum is asked for, all in one pass: they
// must stay as they are until then.
class OwnedSquares {
 public:
  void add(const Bucket& bucket);
  void add(const Bucket& bucket, const Slot& slot);  // of one parameter
  void add(double squares) { sum_ += squares; }      // that a reduction has taken on its way
  // What is on a device comes when `readings` are read; this must stay in its place until then.
  void complete(Readings& readings);
  double value();  // waits for what is not complete

 private:
  void add(const at::Tensor& flat, Range range);

  double sum_ = 0;
  std::vector<at::Tensor> waiting_;
};
double owned_squares(const Bucket& bucket);
GlobalNorm global_norm(double squares, std::vector<double>& local_sums, Group group);

// The same of gradients by a Layout, in its order, summed: owned elements alone, then one all-reduce over all
// ranks of the mesh. Of numbers that several ranks hold alike one of them gives `local_sums`, the others 0.
double owned_squares(const Layout& layout, const std::vector<at::Tensor>& gradients);
GlobalNorm global_norm(const Layout& layout, const std::vector<at::Tensor>& gradients,
                       std::vector<double>& local_sums);

// What a norm measures: the root of the sum of squares (in fp64), or the largest magnitude.
enum class NormOrder { kTwo, kInfinity };

// Norms of parts of the gradient, e.g. of each layer: `part_of` puts a parameter into a part, 0 to parts - 1,
// or into none (any other number). NaN where the part holds one, 0 of an empty part. One all-reduce for all
// of them; the same bits on every rank.
std::vector<double> part_norms(const std::vector<Bucket>& buckets,
                               const std::function<int(const Slot&)>& part_of, int parts, NormOrder order,
                               Group group);

// Parts of the gradient whose norms are logged beside its own: `of` gives a parameter's part, by its name and
// as a place in `names`, or any other number for none. The same on every rank.
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

// Clipping of groups of parameters, each by its own norm and a limit of its own, on any mesh.

struct ClipGroup {
  std::string pattern;  // of parameters' names; * stands for any text
  double max_norm = 1;  // 0: not clipped
};

// What the last update did to a group.
struct ClippedGroup {
  std::string pattern;
  double norm = 0;         // of the whole group's gradient, over all ranks, before the clip
  double coefficient = 1;  // min(1, max_norm / (norm + 1e-6)); the same bits on every rank
};

// An optimizer that clips groups before `inner` updates. A parameter belongs to the first group whose pattern
// fits its name; those that none fits are the last group, "others", with the limit `others`. Norms come from
// owners, as that of the whole gradient does (part_norms()): one all-reduce for all groups.
//
// It stands in the place of the step's own clip, so the step has StepOptions::max_norm = 0 and still reports
// the norm of the whole gradient. Gradients are multiplied in place: what DataParallel::views() has after the
// step is what was applied; of bf16 gradients it is rounded once more.
class ClipsGroups : public Optimizer {
 public:
  // `all`: every rank that holds a part of the model or a copy, DataParallel::mesh().all(). ConfigError: a
  // limit that is negative or no number, a pattern given twice or empty.
  ClipsGroups(std::unique_ptr<Optimizer> inner, std::vector<ClipGroup> groups, double others, Group all);

  // Collective over `all`. ConfigError, in the first update and on every rank, on a pattern that fits no
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
