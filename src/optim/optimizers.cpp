#include "optim/optimizers.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <type_traits>

#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "kernels/gpu/kernels.hpp"
#include "kernels/threads/parallel_for.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_two(const std::string& where, const std::string& name, const std::string& first,
                             const std::string& second) {
  refuse(where, fmt::format("{} in two groups, {} and {}", name, first, second),
         "each parameter in one group at most", "Make the patterns such that they exclude one another");
}

template <typename T>
T* elements(const at::Tensor& flat, Range range) {
  if constexpr (std::is_same_v<T, kernels::Bfloat16>)
    return static_cast<T*>(flat.mutable_data_ptr()) + range.begin;
  else
    return flat.mutable_data_ptr<T>() + range.begin;
}

// The scalars of a long run are made from its parameters that decay.
Individual decaying(const LongRun& run) {
  Individual of = run.parts.front().of;
  of.decays = true;
  return of;
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
    const IndividualOf individual = [this](const Slot& slot) { return individual_of(slot); };
    if (!bucket.master.is_cpu()) {
      for (const LongRun& run : long_runs_of(bucket, individual)) theirs(run);
      return;
    }
    const auto runs = runs_of(bucket, 1 << 16, individual);
    parallel_for(0, static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ours(runs[i]);
    });
  }

  // Before anything is done with `buckets`.
  void make_state(const std::vector<Bucket>& buckets) {
    check_known(buckets);
    for (auto& [name, tensors] : state_) ensure_state(tensors, buckets);
  }

  // Before an option changes. `optimizer`: its name, for messages.
  void set_groups(const char* optimizer, const std::vector<ParameterGroup>& groups) {
    std::set<std::string> patterns;
    for (const ParameterGroup& group : groups) {
      const auto refuse_if = [&](bool wrong, std::string found, const char* expected) {
        if (wrong)
          refuse(fmt::format("{} groups", optimizer), std::move(found), expected,
                 "Change it or leave it out");
      };
      refuse_if(group.pattern.empty() || group.pattern.size() > kMostPattern,
                fmt::format("a pattern of {} characters", group.pattern.size()),
                "a pattern of 1 to 1000 characters");
      refuse_if(!patterns.insert(group.pattern).second, group.pattern + ", given twice", "each pattern once");
      refuse_if(!(group.rate >= 0 && std::isfinite(group.rate)),
                fmt::format("{} with rate {}", group.pattern, group.rate), "a finite factor, 0 or more");
      const double decay = group.weight_decay.value_or(0);
      refuse_if(!(decay >= 0 && std::isfinite(decay)),
                fmt::format("{} with weight_decay {}", group.pattern, decay), "a finite number, 0 or more");
    }
    for (const auto& bucket : known_)
      for (const Place& place : bucket) group_of(groups, place.name);
    groups_ = groups;
  }
  double rate_of(const Individual& of) const {
    return of.group < 0 ? learning_rate_ : learning_rate_ * groups_[static_cast<std::size_t>(of.group)].rate;
  }
  double decay_of(const Individual& of, double others) const {
    if (!of.decays) return 0;
    return of.group < 0 ? others : groups_[static_cast<std::size_t>(of.group)].weight_decay.value_or(others);
  }

  double learning_rate_;
  std::int64_t updates_ = 0;
  OptimizerState state_{};

 private:
  // The place in `groups`, -1: none. ConfigError: in two of them.
  static int group_of(const std::vector<ParameterGroup>& groups, const std::string& name) {
    const auto fits = [&](const ParameterGroup& group) { return matches(group.pattern, name); };
    const auto own = std::ranges::find_if(groups, fits);
    if (own == groups.end()) return -1;
    if (const auto other = std::find_if(own + 1, groups.end(), fits); other != groups.end())
      refuse_two("an optimizer's groups", name, own->pattern, other->pattern);
    return static_cast<int>(own - groups.begin());
  }
  Individual individual_of(const Slot& slot) const {
    Individual of{.decays = slot.decays, .group = group_of(groups_, slot.name)};
    if (const auto late = missed_.find(slot.name); late != missed_.end()) of.missed = late->second;
    if (of.group >= 0)
      if (const auto own = groups_[static_cast<std::size_t>(of.group)].weight_decay) of.decays = *own > 0;
    return of;
  }

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
          group_of(groups_, slot.name);
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
  std::vector<ParameterGroup> groups_{};
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
    set_groups("AdamW", options.groups);
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
    const auto after = [&](std::int64_t updates, double rate) {  // of the parameters' own
      const double t = static_cast<double>(updates);
      return kernels::AdamW{
          .gradient_scale = gradient_scale,
          .keep = 1,
          .beta1 = options_.beta1,
          .beta2 = options_.beta2,
          .step_size = rate / (1 - std::pow(options_.beta1, t)),
          .inverse_root_correction = 1 / std::sqrt(1 - std::pow(options_.beta2, t)),
          .epsilon = options_.epsilon,
      };
    };
    const kernels::AdamW common = after(count, learning_rate_);
    const auto scalars_of = [&](const Individual& of) {
      const double rate = rate_of(of);
      kernels::AdamW scalars = of.missed == 0 && of.group < 0 ? common : after(count - of.missed, rate);
      scalars.keep = 1 - rate * decay_of(of, options_.weight_decay);
      return scalars;
    };
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      Bucket& bucket = buckets[i];
      at::Tensor &first = state_["exp_avg"][i], &second = state_["exp_avg_sq"][i];
      for_each_run(
          bucket, [&](const Run& run) { update_run(bucket, first, second, scalars_of(run.of), run.range); },
          [&](const LongRun& run) {
            by_libtorch::adamw(scalars_of(decaying(run)), bucket, first, second, run, on_device);
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
    set_groups("SGD", options.groups);
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
    const auto scalars_of = [&](const Individual& of) {
      return kernels::Sgd{.gradient_scale = gradient_scale,
                          .learning_rate = rate_of(of),
                          .momentum = options_.momentum,
                          .weight_decay = decay_of(of, options_.weight_decay)};
    };
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      Bucket& bucket = buckets[i];
      at::Tensor* velocity = options_.momentum > 0 ? &state_["momentum_buffer"][i] : nullptr;
      for_each_run(
          bucket, [&](const Run& run) { update_run(bucket, velocity, scalars_of(run.of), run.range); },
          [&](const LongRun& run) { by_libtorch::sgd(scalars_of(decaying(run)), bucket, velocity, run); });
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

void check_patterns(const std::string& where, const std::vector<std::string>& patterns,
                    const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::set<std::string> used;
  for (const auto& [name, tensor] : named) {
    const std::string* first = nullptr;
    for (const std::string& pattern : patterns) {
      if (!tensor.requires_grad() || !matches(pattern, name)) continue;
      if (first) refuse_two(where, name, *first, pattern);
      first = &pattern;
      used.insert(pattern);
    }
  }
  for (const std::string& pattern : patterns)
    if (!used.contains(pattern))
      refuse(where, fmt::format("{}, which fits no trained parameter", pattern),
             "patterns of names such as model.layers.0.mlp.up_proj.weight",
             "Change it or leave it out; isograd layout lists the names");
}

void check_groups(const std::vector<ParameterGroup>& groups,
                  const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::vector<std::string> patterns;
  for (const ParameterGroup& group : groups) patterns.push_back(group.pattern);
  check_patterns("an optimizer's groups", patterns, named);
}

double Schedule::at(std::int64_t step) const {
  const bool at_end = kind == Kind::kConstant || kind == Kind::kWsd;
  if (at_end && (decay < (kind == Kind::kWsd ? 1 : 0) || decay > std::max<std::int64_t>(0, total - warmup)))
    refuse("Schedule", fmt::format("a decay of {} steps in {}, {} of them warm-up", decay, total, warmup),
           kind == Kind::kWsd ? "1 step or more, and no more than follow the warm-up"
                              : "no more steps than follow the warm-up",
           "Change decay, warmup or total");
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  if (kind == Kind::kConstant && decay == 0) return peak;
  const std::int64_t start = at_end ? total - decay : warmup;
  const auto decaying = static_cast<double>(std::max<std::int64_t>(1, total - start));
  const double p = std::clamp(static_cast<double>(step - start) / decaying, 0.0, 1.0);
  const Shape curve = kind == Kind::kCosine ? Shape::kCosine : kind == Kind::kLinear ? Shape::kLinear : shape;
  const double left = curve == Shape::kLinear   ? 1 - p
                      : curve == Shape::kCosine ? 0.5 * (1 + std::cos(std::numbers::pi * p))
                                                : 1 - std::sqrt(p);
  return peak * (floor + (1 - floor) * left);
}

std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements, const IndividualOf& individual) {
  const BucketPlan& plan = bucket.plan;
  const Range held = bucket.held;
  std::vector<Run> runs;
  for (std::size_t i = 0; i < plan.slots.size();) {
    const Slot& head = plan.slots[i];
    const Individual of = individual(head);
    const auto goes_along = [&](const Slot& slot) {
      return slot.trained == head.trained && individual(slot) == of;
    };
    while (i < plan.slots.size() && goes_along(plan.slots[i])) ++i;
    if (!head.trained) continue;
    const std::int64_t last = i < plan.slots.size() ? plan.slots[i].offset : plan.numel;
    const std::int64_t end = std::min(last, held.end);
    for (std::int64_t begin = std::max(head.offset, held.begin); begin < end; begin += most_elements)
      runs.push_back({{begin - held.begin, std::min(end, begin + most_elements) - held.begin}, of});
  }
  return runs;
}

std::vector<LongRun> long_runs_of(const Bucket& bucket, const IndividualOf& individual) {
  std::vector<LongRun> joined;
  for (const Run& run : runs_of(bucket, std::max<std::int64_t>(1, bucket.held.size()), individual)) {
    const auto alike = [&](const Individual& of) {
      return of.missed == run.of.missed && of.group == run.of.group;
    };
    const bool goes_on =
        !joined.empty() && joined.back().range.end == run.range.begin && alike(joined.back().parts.back().of);
    if (!goes_on) joined.push_back({.range = {run.range.begin, run.range.begin}});
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
    if (part.of.decays == decay) ranges.push_back({part.range.begin - from, part.range.end - from});
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
  for (const Run& part : run.parts) ends.push_back({part.range.end, part.of.decays});
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
