// Clipping of groups of parameters, each by its own norm and a limit of its own, on any mesh.
#pragma once

#include "isograd/cxx20.hpp"

#include <memory>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

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
