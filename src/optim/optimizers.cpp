#include "optim/optimizers.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "kernels/flat.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "layout/flat.hpp"
#include "optim/by_libtorch.hpp"

namespace isograd {
namespace {

void check(const AdamWOptions& options) {
  const auto refuse = [](const char* key, double found, const char* expected) {
    isograd::refuse(fmt::format("AdamW {}", key), fmt::format("{}", found), expected, "Change it");
  };
  if (!(options.beta1 >= 0 && options.beta1 < 1)) refuse("beta1", options.beta1, "0 <= beta1 < 1");
  if (!(options.beta2 >= 0 && options.beta2 < 1)) refuse("beta2", options.beta2, "0 <= beta2 < 1");
  if (!(options.epsilon > 0)) refuse("epsilon", options.epsilon, "more than 0");
  if (!(options.weight_decay >= 0)) refuse("weight_decay", options.weight_decay, "0 or more");
  if (!(options.learning_rate >= 0)) refuse("learning_rate", options.learning_rate, "0 or more");
}

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) { check(options); }
  std::string kind() const override { return "adamw"; }

  void update(std::vector<Bucket>& buckets, double gradient_scale) override {
    make_state(buckets);
    pass(buckets, gradient_scale, {});
    count_update(buckets);
  }

  bool update_unless(std::vector<Bucket>& buckets, const at::Tensor& stop,
                     const at::Tensor& gradient_scale) override {
    make_state(buckets);
    if (std::ranges::any_of(buckets, [](const Bucket& bucket) { return bucket.master.is_cpu(); }))
      return false;
    pass(buckets, 1, {.scale = gradient_scale, .stop = stop});
    return true;
  }

  void count_update(const std::vector<Bucket>& buckets) override {
    ++updates_;
    counter_.count_update(buckets);
  }

  void set_learning_rate(double learning_rate) override { options_.learning_rate = learning_rate; }
  double learning_rate() const override { return options_.learning_rate; }
  std::int64_t updates() const override { return updates_; }
  void set_updates(std::int64_t updates) override { updates_ = updates; }

  Missed missed_updates() const override { return counter_.missed(); }
  void set_missed_updates(Missed missed) override { counter_.set_missed(std::move(missed)); }

  OptimizerState state(const std::vector<Bucket>& buckets) override {
    make_state(buckets);
    return {{"exp_avg", first_}, {"exp_avg_sq", second_}};
  }

 private:
  // The next update.
  void pass(std::vector<Bucket>& buckets, double gradient_scale, const by_libtorch::OnDevice& on_device) {
    const std::int64_t count = updates_ + 1;
    const auto after = [&](std::int64_t updates) {  // of the parameters' own
      const double t = static_cast<double>(updates);
      return kernels::AdamW{
          .gradient_scale = gradient_scale,
          .keep = 1,
          .beta1 = options_.beta1,
          .beta2 = options_.beta2,
          .step_size = options_.learning_rate / (1 - std::pow(options_.beta1, t)),
          .inverse_root_correction = 1 / std::sqrt(1 - std::pow(options_.beta2, t)),
          .epsilon = options_.epsilon,
      };
    };
    const kernels::AdamW common = after(count);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const auto scalars_of = [&](std::int64_t missed, bool decays) {
        kernels::AdamW scalars = missed == 0 ? common : after(count - missed);
        if (decays) scalars.keep = 1 - options_.learning_rate * options_.weight_decay;
        return scalars;
      };
      if (!buckets[i].master.is_cpu()) {
        for (const LongRun& run : long_runs_of(buckets[i], counter_.missed()))
          by_libtorch::adamw(scalars_of(run.missed, true), buckets[i], first_[i], second_[i], run, on_device);
        continue;
      }
      for_each_run(buckets[i], counter_.missed(), [&](const Run& run) {
        update_run(buckets[i], first_[i], second_[i], scalars_of(run.missed, run.decays), run.range);
      });
    }
  }

  void make_state(const std::vector<Bucket>& buckets) {
    counter_.look(buckets, updates_);
    ensure_state(first_, buckets);
    ensure_state(second_, buckets);
  }

  static void update_run(Bucket& bucket, at::Tensor& first, at::Tensor& second, const kernels::AdamW& scalars,
                         Range range) {
    const auto at = range.begin;
    if (bucket.master.scalar_type() == at::kDouble)
      return kernels::adamw(scalars, bucket.gradients.const_data_ptr<double>() + at,
                            bucket.master.mutable_data_ptr<double>() + at,
                            first.mutable_data_ptr<double>() + at, second.mutable_data_ptr<double>() + at,
                            nullptr, range.size());
    float* master = bucket.master.mutable_data_ptr<float>() + at;
    float* m = first.mutable_data_ptr<float>() + at;
    float* v = second.mutable_data_ptr<float>() + at;
    kernels::Bfloat16* rounded = nullptr;
    if (bucket.plan.dtype == at::kBFloat16)
      rounded = static_cast<kernels::Bfloat16*>(bucket.parameters.mutable_data_ptr()) + at;
    if (bucket.gradients.scalar_type() == at::kBFloat16)
      return kernels::adamw(scalars,
                            static_cast<const kernels::Bfloat16*>(bucket.gradients.const_data_ptr()) + at,
                            master, m, v, rounded, range.size());
    kernels::adamw(scalars, bucket.gradients.const_data_ptr<float>() + at, master, m, v, rounded,
                   range.size());
  }

  AdamWOptions options_;
  std::vector<at::Tensor> first_, second_;  // per bucket: [numel], the moments m and v
  std::int64_t updates_ = 0;
  UpdateCounter counter_;
};

}  // namespace

std::unique_ptr<Optimizer> adamw(const AdamWOptions& options) { return std::make_unique<AdamW>(options); }

namespace {

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const SgdOptions& options) : options_(options) {
    if (!(options.momentum >= 0 && options.momentum < 1) || !(options.weight_decay >= 0) ||
        !(options.learning_rate >= 0))
      refuse("SGD",
             fmt::format("learning_rate {}, momentum {}, weight_decay {}", options.learning_rate,
                         options.momentum, options.weight_decay),
             "learning_rate >= 0, 0 <= momentum < 1, weight_decay >= 0", "Change the one outside its range");
  }
  std::string kind() const override { return "sgd"; }

  void update(std::vector<Bucket>& buckets, double gradient_scale) override {
    make_state(buckets);
    ++updates_;
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const kernels::Sgd scalars{.gradient_scale = gradient_scale,
                                 .learning_rate = options_.learning_rate,
                                 .momentum = options_.momentum,
                                 .weight_decay = options_.weight_decay};
      at::Tensor* velocity = options_.momentum > 0 ? &velocity_[i] : nullptr;
      if (!buckets[i].master.is_cpu()) {
        for (const LongRun& run : long_runs_of(buckets[i], counter_.missed()))
          by_libtorch::sgd(scalars, buckets[i], velocity, run);
        continue;
      }
      for_each_run(buckets[i], counter_.missed(), [&](const Run& run) {
        kernels::Sgd of_run = scalars;
        if (!run.decays) of_run.weight_decay = 0;
        update_run(buckets[i], velocity, of_run, run.range);
      });
    }
    counter_.count_update(buckets);
  }

  void set_learning_rate(double learning_rate) override { options_.learning_rate = learning_rate; }
  double learning_rate() const override { return options_.learning_rate; }
  std::int64_t updates() const override { return updates_; }
  void set_updates(std::int64_t updates) override { updates_ = updates; }

  OptimizerState state(const std::vector<Bucket>& buckets) override {
    make_state(buckets);
    if (!(options_.momentum > 0)) return {};
    return {{"momentum_buffer", velocity_}};
  }
  Missed missed_updates() const override { return counter_.missed(); }
  void set_missed_updates(Missed missed) override { counter_.set_missed(std::move(missed)); }

 private:
  void make_state(const std::vector<Bucket>& buckets) {
    counter_.look(buckets, updates_);
    if (options_.momentum > 0) ensure_state(velocity_, buckets);
  }

  static void update_run(Bucket& bucket, at::Tensor* velocity, const kernels::Sgd& scalars, Range range) {
    const auto at = range.begin;
    if (bucket.master.scalar_type() == at::kDouble)
      return kernels::sgd(scalars, bucket.gradients.const_data_ptr<double>() + at,
                          bucket.master.mutable_data_ptr<double>() + at,
                          velocity ? velocity->mutable_data_ptr<double>() + at : nullptr, nullptr,
                          range.size());
    kernels::Bfloat16* rounded = nullptr;
    if (bucket.plan.dtype == at::kBFloat16)
      rounded = static_cast<kernels::Bfloat16*>(bucket.parameters.mutable_data_ptr()) + at;
    float* master = bucket.master.mutable_data_ptr<float>() + at;
    float* moving = velocity ? velocity->mutable_data_ptr<float>() + at : nullptr;
    if (bucket.gradients.scalar_type() == at::kBFloat16)
      return kernels::sgd(scalars,
                          static_cast<const kernels::Bfloat16*>(bucket.gradients.const_data_ptr()) + at,
                          master, moving, rounded, range.size());
    kernels::sgd(scalars, bucket.gradients.const_data_ptr<float>() + at, master, moving, rounded,
                 range.size());
  }

  SgdOptions options_;
  std::vector<at::Tensor> velocity_;  // per bucket: [numel]; none without momentum
  std::int64_t updates_ = 0;
  UpdateCounter counter_;
};

}  // namespace

std::unique_ptr<Optimizer> sgd(const SgdOptions& options) { return std::make_unique<Sgd>(options); }

void UpdateCounter::look(const std::vector<Bucket>& buckets, std::int64_t updates) {
  const bool first = known_.empty();
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto& slots = buckets[b].plan.slots;
    if (b == known_.size()) {
      auto& places = known_.emplace_back();
      for (const Slot& slot : slots) {
        places.push_back({slot.name, slot.offset});
        if (!first && updates > 0) missed_[slot.name] = updates;
      }
      continue;
    }
    for (std::size_t s = 0; s < std::max(slots.size(), known_[b].size()); ++s)
      if (s >= slots.size() || s >= known_[b].size() || slots[s].name != known_[b][s].name ||
          slots[s].offset != known_[b][s].offset)
        refuse("an optimizer's state",
               fmt::format("bucket {} with {} where the state is that of {}", b,
                           s < slots.size() ? "'" + slots[s].name + "'" : "no further parameter",
                           s < known_[b].size() ? "'" + known_[b][s].name + "'" : "none"),
               "the buckets of the layout that it was made for",
               "Make an optimizer for each layout; copy state() by parameter from one to the other");
  }
}

void UpdateCounter::count_update(const std::vector<Bucket>& buckets) {
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots)
      if (!slot.trained) ++missed_[slot.name];
}

std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements, const Optimizer::Missed& missed) {
  const BucketPlan& plan = bucket.plan;
  const Range held = bucket.held;
  const auto missed_by = [&](const Slot& slot) {
    const auto found = missed.find(slot.name);
    return found == missed.end() ? 0 : found->second;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < plan.slots.size();) {
    const Slot& head = plan.slots[i];
    const std::int64_t late = missed.empty() ? 0 : missed_by(head);
    const auto goes_along = [&](const Slot& slot) {
      return slot.decays == head.decays && slot.trained == head.trained &&
             (missed.empty() || missed_by(slot) == late);
    };
    while (i < plan.slots.size() && goes_along(plan.slots[i])) ++i;
    if (!head.trained) continue;
    const std::int64_t last = i < plan.slots.size() ? plan.slots[i].offset : plan.numel;
    const std::int64_t end = std::min(last, held.end);
    for (std::int64_t begin = std::max(head.offset, held.begin); begin < end; begin += most_elements)
      runs.push_back(
          {{begin - held.begin, std::min(end, begin + most_elements) - held.begin}, head.decays, late});
  }
  return runs;
}

void for_each_run(const Bucket& bucket, const Optimizer::Missed& missed,
                  const std::function<void(const Run&)>& pass) {
  const auto runs = runs_of(bucket, 1 << 16, missed);
  parallel_for(0, static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) pass(runs[i]);
  });
}

std::vector<LongRun> long_runs_of(const Bucket& bucket, const Optimizer::Missed& missed) {
  std::vector<LongRun> joined;
  for (const Run& run : runs_of(bucket, std::max<std::int64_t>(1, bucket.held.size()), missed)) {
    const bool goes_on =
        !joined.empty() && joined.back().range.end == run.range.begin && joined.back().missed == run.missed;
    if (!goes_on) joined.push_back({.range = {run.range.begin, run.range.begin}, .missed = run.missed});
    joined.back().range.end = run.range.end;
    if (run.decays) joined.back().decaying.push_back(run.range);
  }
  return joined;
}

void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets) {
  for (std::size_t i = state.size(); i < buckets.size(); ++i)
    state.push_back(at::zeros_like(buckets[i].master));
  ISOGRAD_INVARIANT(state.size() == buckets.size(),
                    fmt::format("state of {} buckets, {} buckets", state.size(), buckets.size()));
  for (std::size_t i = 0; i < buckets.size(); ++i)
    ISOGRAD_INVARIANT(state[i].numel() == buckets[i].held.size(),
                      fmt::format("state of {} elements for {} held of bucket {}", state[i].numel(),
                                  buckets[i].held.size(), i));
}

}  // namespace isograd
