#include "optim/optimizers.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "kernels/gpu/kernels.hpp"
#include "kernels/threads/parallel_for.hpp"

namespace isograd {
namespace {

template <typename T>
T* elements(const at::Tensor& flat, Range range) {
  if constexpr (std::is_same_v<T, kernels::Bfloat16>)
    return static_cast<T*>(flat.mutable_data_ptr()) + range.begin;
  else
    return flat.mutable_data_ptr<T>() + range.begin;
}

// Where roundings of fp32 masters go; else null.
kernels::Bfloat16* rounded_elements(const Bucket& bucket, Range range) {
  return bucket.plan.dtype == at::kBFloat16 ? elements<kernels::Bfloat16>(bucket.parameters, range) : nullptr;
}

// State and counts, and the choice between passes of ours and of LibTorch. `Interface`: Optimizer, or what is
// derived from it.
template <typename Interface>
class FlatOptimizer : public Interface {
 public:
  void update(std::vector<Bucket>& buckets, double gradient_scale) override {
    make_state(buckets);
    pass(buckets, gradient_scale, {});
    count_update(buckets);
  }
  void count_update(const std::vector<Bucket>& buckets) override {
    ++updates_;
    for (const Bucket& bucket : buckets)
      for (const Slot& slot : bucket.plan.slots)
        if (!slot.trained) ++missed_[slot.name];
  }
  void set_learning_rate(double learning_rate) override { learning_rate_ = learning_rate; }
  double learning_rate() const override { return learning_rate_; }
  std::int64_t updates() const override { return updates_; }
  void set_updates(std::int64_t updates) override { updates_ = updates; }
  Optimizer::Missed missed_updates() const override { return missed_; }
  void set_missed_updates(Optimizer::Missed missed) override { missed_ = std::move(missed); }
  OptimizerState state(const std::vector<Bucket>& buckets) override {
    make_state(buckets);
    return state_;
  }

 protected:
  // `names`: of the state, a flat tensor per bucket each.
  FlatOptimizer(double learning_rate, const std::vector<std::string>& names) : learning_rate_(learning_rate) {
    for (const std::string& name : names) state_[name];
  }

  // The next update, of all buckets.
  virtual void pass(std::vector<Bucket>& buckets, double gradient_scale,
                    const by_libtorch::OnDevice& on_device) = 0;

  // `ours` for each run, on the threads of this rank; on a device `theirs` for each long run.
  template <typename Ours, typename Theirs>
  void for_each_run(const Bucket& bucket, const Ours& ours, const Theirs& theirs) const {
    if (!bucket.master.is_cpu()) {
      for (const LongRun& run : long_runs_of(bucket, missed_)) theirs(run);
      return;
    }
    const auto runs = runs_of(bucket, 1 << 16, missed_);
    parallel_for(0, static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ours(runs[i]);
    });
  }

  // Before anything is done with `buckets`.
  void make_state(const std::vector<Bucket>& buckets) {
    check_known(buckets);
    for (auto& [name, tensors] : state_) ensure_state(tensors, buckets);
  }

  double learning_rate_;
  std::int64_t updates_ = 0;
  OptimizerState state_{};

 private:
  struct Place {
    std::string name;
    std::int64_t offset;
  };

  // ConfigError unless the buckets are those of the calls before, of which further ones may follow; their
  // parameters have missed all updates so far.
  void check_known(const std::vector<Bucket>& buckets) {
    const bool first = known_.empty();
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      const auto& slots = buckets[b].plan.slots;
      if (b == known_.size()) {
        auto& places = known_.emplace_back();
        for (const Slot& slot : slots) {
          places.push_back({slot.name, slot.offset});
          if (!first && updates_ > 0) missed_[slot.name] = updates_;
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

  std::vector<std::vector<Place>> known_{};  // by bucket and slot
  Optimizer::Missed missed_{};
};

class FlatAdamW final : public FlatOptimizer<AdamW> {
 public:
  explicit FlatAdamW(const AdamWOptions& options)
      : FlatOptimizer(options.learning_rate, {"exp_avg", "exp_avg_sq"}) {
    set_options(options);
  }
  void set_options(const AdamWOptions& options) override {
    const auto check = [](bool sound, const char* key, double found, const char* expected) {
      if (!sound) refuse(fmt::format("AdamW {}", key), fmt::format("{}", found), expected, "Change it");
    };
    check(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "0 <= beta1 < 1");
    check(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "0 <= beta2 < 1");
    check(options.epsilon > 0, "epsilon", options.epsilon, "more than 0");
    check(options.weight_decay >= 0, "weight_decay", options.weight_decay, "0 or more");
    check(options.learning_rate >= 0, "learning_rate", options.learning_rate, "0 or more");
    options_ = options, learning_rate_ = options.learning_rate;
  }
  std::string kind() const override { return "adamw"; }

  bool update_unless(std::vector<Bucket>& buckets, const at::Tensor& stop,
                     const at::Tensor& gradient_scale) override {
    make_state(buckets);
    if (std::ranges::any_of(buckets, [](const Bucket& bucket) { return bucket.master.is_cpu(); }))
      return false;
    pass(buckets, 1, {.scale = gradient_scale, .stop = stop});
    return true;
  }

 private:
  void pass(std::vector<Bucket>& buckets, double gradient_scale,
            const by_libtorch::OnDevice& on_device) override {
    const std::int64_t count = updates_ + 1;
    const auto after = [&](std::int64_t updates) {  // of the parameters' own
      const double t = static_cast<double>(updates);
      return kernels::AdamW{
          .gradient_scale = gradient_scale,
          .keep = 1,
          .beta1 = options_.beta1,
          .beta2 = options_.beta2,
          .step_size = learning_rate_ / (1 - std::pow(options_.beta1, t)),
          .inverse_root_correction = 1 / std::sqrt(1 - std::pow(options_.beta2, t)),
          .epsilon = options_.epsilon,
      };
    };
    const kernels::AdamW common = after(count);
    const auto scalars_of = [&](std::int64_t missed, bool decays) {
      kernels::AdamW scalars = missed == 0 ? common : after(count - missed);
      if (decays) scalars.keep = 1 - learning_rate_ * options_.weight_decay;
      return scalars;
    };
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      Bucket& bucket = buckets[i];
      at::Tensor &first = state_["exp_avg"][i], &second = state_["exp_avg_sq"][i];
      for_each_run(
          bucket,
          [&](const Run& run) {
            update_run(bucket, first, second, scalars_of(run.missed, run.decays), run.range);
          },
          [&](const LongRun& run) {
            by_libtorch::adamw(scalars_of(run.missed, true), bucket, first, second, run, on_device);
          });
    }
  }

  static void update_run(const Bucket& bucket, const at::Tensor& first, const at::Tensor& second,
                         const kernels::AdamW& scalars, Range range) {
    if (bucket.master.scalar_type() == at::kDouble)
      return kernels::adamw(scalars, elements<double>(bucket.gradients, range),
                            elements<double>(bucket.master, range), elements<double>(first, range),
                            elements<double>(second, range), nullptr, range.size());
    float *master = elements<float>(bucket.master, range), *m = elements<float>(first, range),
          *v = elements<float>(second, range);
    kernels::Bfloat16* rounded = rounded_elements(bucket, range);
    if (bucket.gradients.scalar_type() == at::kBFloat16)
      return kernels::adamw(scalars, elements<kernels::Bfloat16>(bucket.gradients, range), master, m, v,
                            rounded, range.size());
    const float* gradients = elements<float>(bucket.gradients, range);
    kernels::adamw(scalars, gradients, master, m, v, rounded, range.size());
  }

  AdamWOptions options_;
};

class Sgd final : public FlatOptimizer<Optimizer> {
 public:
  explicit Sgd(const SgdOptions& options)
      : FlatOptimizer(options.learning_rate, options.momentum > 0
                                                 ? std::vector<std::string>{"momentum_buffer"}
                                                 : std::vector<std::string>{}),
        options_(options) {
    if (!(options.momentum >= 0 && options.momentum < 1) || !(options.weight_decay >= 0) ||
        !(options.learning_rate >= 0))
      refuse("SGD",
             fmt::format("learning_rate {}, momentum {}, weight_decay {}", options.learning_rate,
                         options.momentum, options.weight_decay),
             "learning_rate >= 0, 0 <= momentum < 1, weight_decay >= 0", "Change the one outside its range");
  }
  std::string kind() const override { return "sgd"; }

 private:
  void pass(std::vector<Bucket>& buckets, double gradient_scale, const by_libtorch::OnDevice&) override {
    const kernels::Sgd scalars{.gradient_scale = gradient_scale,
                               .learning_rate = learning_rate_,
                               .momentum = options_.momentum,
                               .weight_decay = options_.weight_decay};
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      Bucket& bucket = buckets[i];
      at::Tensor* velocity = options_.momentum > 0 ? &state_["momentum_buffer"][i] : nullptr;
      for_each_run(
          bucket,
          [&](const Run& run) {
            kernels::Sgd of_run = scalars;
            if (!run.decays) of_run.weight_decay = 0;
            update_run(bucket, velocity, of_run, run.range);
          },
          [&](const LongRun& run) { by_libtorch::sgd(scalars, bucket, velocity, run); });
    }
  }

  static void update_run(const Bucket& bucket, const at::Tensor* velocity, const kernels::Sgd& scalars,
                         Range range) {
    if (bucket.master.scalar_type() == at::kDouble)
      return kernels::sgd(scalars, elements<double>(bucket.gradients, range),
                          elements<double>(bucket.master, range),
                          velocity ? elements<double>(*velocity, range) : nullptr, nullptr, range.size());
    float* master = elements<float>(bucket.master, range);
    float* moving = velocity ? elements<float>(*velocity, range) : nullptr;
    kernels::Bfloat16* rounded = rounded_elements(bucket, range);
    if (bucket.gradients.scalar_type() == at::kBFloat16)
      return kernels::sgd(scalars, elements<kernels::Bfloat16>(bucket.gradients, range), master, moving,
                          rounded, range.size());
    kernels::sgd(scalars, elements<float>(bucket.gradients, range), master, moving, rounded, range.size());
  }

  SgdOptions options_;
};

}  // namespace

std::unique_ptr<AdamW> adamw(const AdamWOptions& options) { return std::make_unique<FlatAdamW>(options); }

std::unique_ptr<Optimizer> sgd(const SgdOptions& options) { return std::make_unique<Sgd>(options); }

double Schedule::at(std::int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  if (kind == Kind::kConstant) return peak;
  const auto decaying = static_cast<double>(std::max<std::int64_t>(1, total - warmup));
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / decaying);
  return peak * (floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
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

std::vector<LongRun> long_runs_of(const Bucket& bucket, const Optimizer::Missed& missed) {
  std::vector<LongRun> joined;
  for (const Run& run : runs_of(bucket, std::max<std::int64_t>(1, bucket.held.size()), missed)) {
    const bool goes_on =
        !joined.empty() && joined.back().range.end == run.range.begin && joined.back().missed == run.missed;
    if (!goes_on) joined.push_back({.range = {run.range.begin, run.range.begin}, .missed = run.missed});
    joined.back().range.end = run.range.end;
    joined.back().parts.push_back(run);
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

namespace by_libtorch {
namespace {

at::Tensor part(const at::Tensor& flat, Range range) { return flat.narrow(0, range.begin, range.size()); }

std::vector<at::Tensor> parts(const at::Tensor& flat, const std::vector<Range>& ranges) {
  std::vector<at::Tensor> result;
  for (const Range& range : ranges) result.push_back(part(flat, range));
  return result;
}

// The parts that decay, or the others, as places of a tensor that begins at `from`.
std::vector<Range> ranges_of(const LongRun& run, bool decay, std::int64_t from = 0) {
  std::vector<Range> ranges;
  for (const Run& part : run.parts)
    if (part.decays == decay) ranges.push_back({part.range.begin - from, part.range.end - from});
  return ranges;
}

// Perhaps the bucket's own memory: to be read alone.
at::Tensor gradient_of(const Bucket& bucket, Range range, double scale) {
  const at::Tensor gradient = part(bucket.gradients, range).to(bucket.master.scalar_type());
  return scale == 1 ? gradient : gradient.mul(scale);
}

void write_back(Bucket& bucket, Range range) {
  if (!bucket.master.is_same(bucket.parameters) && bucket.plan.dtype == at::kBFloat16)
    part(bucket.parameters, range).copy_(part(bucket.master, range));
}

// LibTorch's fused pass takes a count of updates and corrects by it. Ours is in the scalars: at this count
// its own corrections are 1 for every β below 1.
constexpr double kManyUpdates = 1e30;

// One kernel for the whole bucket, in the order of operations of kernels::adamw.
bool update_by_kernel(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
                      const LongRun& run, const OnDevice& on_device) {
  const bool rounds = !bucket.master.is_same(bucket.parameters) && bucket.plan.dtype == at::kBFloat16;
  if (bucket.master.scalar_type() != at::kFloat || !gpu::has_kernels(bucket.master) ||
      !gpu::has_kernels(bucket.gradients) || (rounds && !gpu::has_kernels(bucket.parameters)))
    return false;
  std::vector<gpu::RunEnd> ends;
  for (const Run& part : run.parts) ends.push_back({part.range.end, part.decays});
  gpu::adamw({.scale = static_cast<float>(scalars.gradient_scale),
              .keep = static_cast<float>(scalars.keep),
              .beta2 = static_cast<float>(scalars.beta2),
              .new1 = static_cast<float>(1 - scalars.beta1),
              .new2 = static_cast<float>(1 - scalars.beta2),
              .step = static_cast<float>(scalars.step_size),
              .correction = static_cast<float>(scalars.inverse_root_correction),
              .epsilon = static_cast<float>(scalars.epsilon)},
             run.range.begin, ends, bucket.gradients, bucket.master, first, second,
             rounds ? bucket.parameters : at::Tensor(), on_device.scale, on_device.stop);
  return true;
}

}  // namespace

void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run, const OnDevice& on_device) {
  const at::NoGradGuard no_grad;
  if (update_by_kernel(scalars, bucket, first, second, run, on_device)) return;
  at::Tensor g = gradient_of(bucket, run.range, scalars.gradient_scale);
  std::optional<at::Tensor> stop;
  if (on_device.stop.defined()) g = g.mul(on_device.scale), stop = on_device.stop;
  // s m / (r √v + ε) = (s / r) m / (√v + ε / r)
  const double rate = scalars.step_size / scalars.inverse_root_correction,
               epsilon = scalars.epsilon / scalars.inverse_root_correction;
  const at::Tensor updates = at::full({}, kManyUpdates, g.options().dtype(at::kFloat));
  const auto update = [&](bool decay, double weight_decay) {
    const std::vector<Range> ranges = ranges_of(run, decay);
    if (ranges.empty()) return;
    at::_fused_adamw_(parts(bucket.master, ranges), parts(g, ranges_of(run, decay, run.range.begin)),
                      parts(first, ranges), parts(second, ranges), {},
                      std::vector<at::Tensor>(ranges.size(), updates), rate, scalars.beta1, scalars.beta2,
                      weight_decay, epsilon, /*amsgrad=*/false,
                      /*maximize=*/false, /*grad_scale=*/std::nullopt, stop);
  };
  update(true, rate > 0 ? (1 - scalars.keep) / rate : 0);
  update(false, 0);
  write_back(bucket, run.range);
}

void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run) {
  const at::NoGradGuard no_grad;
  const Range range = run.range;
  at::Tensor g = gradient_of(bucket, range, scalars.gradient_scale);
  const at::Tensor p = part(bucket.master, range);
  if (const auto decaying = ranges_of(run, true); scalars.weight_decay != 0 && !decaying.empty()) {
    g = g.is_alias_of(bucket.gradients) ? g.clone() : g;
    at::_foreach_add_(parts(g, ranges_of(run, true, range.begin)), parts(bucket.master, decaying),
                      scalars.weight_decay);
  }
  if (velocity) {
    const at::Tensor b = part(*velocity, range);
    g = b.mul_(scalars.momentum).add_(g);
  }
  p.sub_(g, scalars.learning_rate);
  write_back(bucket, range);
}

}  // namespace by_libtorch

}  // namespace isograd
