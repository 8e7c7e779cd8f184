#include "isograd/optimizer.hpp"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "base/pattern.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

void check_limit(const std::string& pattern, double limit) {
  if (std::isfinite(limit) && limit >= 0) return;
  refuse("clip groups", fmt::format("the limit {} of {}", limit, pattern), "a number, 0 for no clip",
         "Give it a limit of 0 or more");
}

// The slot's range in the held part of the bucket, possibly empty.
Range held_part(const Bucket& bucket, const Slot& slot) {
  const auto place = [&](std::int64_t at) {
    return std::clamp(at, bucket.held.begin, bucket.held.end) - bucket.held.begin;
  };
  return {place(slot.offset), place(slot.offset + slot.numel)};
}

}  // namespace

ClipsGroups::ClipsGroups(std::unique_ptr<Optimizer> inner, std::vector<ClipGroup> groups, double others,
                         Group all)
    : inner_(std::move(inner)), groups_(std::move(groups)), all_(std::move(all)) {
  check_limit("other parameters", others);
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const std::string& pattern = groups_[i].pattern;
    if (pattern.size() > kMostPattern)
      refuse("clip groups", fmt::format("a pattern of {} characters", pattern.size()),
             fmt::format("at most {}", kMostPattern), "Shorten it");
    check_limit(pattern, groups_[i].max_norm);
    const auto same = [&](const ClipGroup& group) { return group.pattern == pattern; };
    if (pattern.empty() ||
        std::any_of(groups_.begin(), groups_.begin() + static_cast<std::ptrdiff_t>(i), same))
      refuse("clip groups",
             pattern.empty() ? std::string("an empty pattern") : fmt::format("{}, given twice", pattern),
             "patterns of parameters' names, each once", "Leave it out");
  }
  groups_.push_back({.pattern = "others", .max_norm = others});
}

int ClipsGroups::group_of(const std::string& name) const {
  const auto last = groups_.end() - 1;
  const auto own = std::find_if(groups_.begin(), last,
                                [&](const ClipGroup& group) { return matches(group.pattern, name); });
  return static_cast<int>(own - groups_.begin());
}

// A pipeline stage or a rank of experts may have no parameter of a group, so the check sums over all ranks.
void ClipsGroups::check_patterns(const std::vector<Bucket>& buckets) {
  at::Tensor held = at::zeros({static_cast<std::int64_t>(groups_.size())}, at::kLong);
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots) held[group_of(slot.name)] += 1;
  if (all_.size() > 1) all_.all_reduce(held);
  for (std::size_t i = 0; i + 1 < groups_.size(); ++i)
    if (held[static_cast<std::int64_t>(i)].item<std::int64_t>() == 0)
      refuse("clip groups",
             fmt::format("{}, which fits no parameter that an earlier pattern does not have",
                         groups_[i].pattern),
             "patterns of names such as model.layers.0.mlp.up_proj.weight", "Change it, or leave it out");
  checked_ = true;
}

void ClipsGroups::update(std::vector<Bucket>& buckets, double gradient_scale) {
  if (!checked_) check_patterns(buckets);
  const auto norms = part_norms(
      buckets, [this](const Slot& slot) { return group_of(slot.name); }, static_cast<int>(groups_.size()),
      NormOrder::kTwo, all_);
  last_.clear();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    // Buckets hold the gradient before a deferred mean's scale.
    const double norm = norms[i] * std::abs(gradient_scale);
    last_.push_back({groups_[i].pattern, norm, clip_coefficient(norm, groups_[i].max_norm)});
  }
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots) {
      const double coefficient = last_[static_cast<std::size_t>(group_of(slot.name))].coefficient;
      const Range part = held_part(bucket, slot);
      if (coefficient != 1 && part.size() > 0)
        bucket.gradients.narrow(0, part.begin, part.size()).mul_(coefficient);
    }
  inner_->update(buckets, gradient_scale);
}

}  // namespace isograd
