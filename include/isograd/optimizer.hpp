// Optimizers over flat buckets. They know nothing of ranks; scaling by the clip coefficient is part of their
// pass.
#pragma once

#include "isograd/cxx20.hpp"

#include <map>
#include <memory>
#include <string>
#include <vector>

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

}  // namespace isograd
