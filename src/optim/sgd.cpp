#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "kernels/flat.hpp"
#include "layout/flat.hpp"
#include "optim/by_libtorch.hpp"
#include "optim/runs.hpp"

namespace isograd {
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
                          velocity ? velocity->mutable_data_ptr<double>() + at : nullptr, range.size());
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

}  // namespace isograd
