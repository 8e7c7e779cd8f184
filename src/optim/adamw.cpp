#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "kernels/flat.hpp"
#include "layout/flat.hpp"
#include "optim/by_libtorch.hpp"
#include "optim/runs.hpp"

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
                            range.size());
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
    const float* gradients = bucket.gradients.const_data_ptr<float>() + at;
    if (!rounded) return kernels::adamw(scalars, gradients, master, m, v, range.size());
    kernels::adamw(scalars, gradients, master, m, v, rounded, range.size());
  }

  AdamWOptions options_;
  std::vector<at::Tensor> first_, second_;  // per bucket: [numel], the moments m and v
  std::int64_t updates_ = 0;
  UpdateCounter counter_;
};

}  // namespace

std::unique_ptr<Optimizer> adamw(const AdamWOptions& options) { return std::make_unique<AdamW>(options); }

}  // namespace isograd
