#include "loss/checks.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>

#include "isograd/batch.hpp"

namespace isograd {
namespace {

// The first index where `bad` [T] holds, or -1.
std::int64_t first(const at::Tensor& bad) {
  if (!bad.any().item<bool>()) return -1;
  return bad.nonzero()[0].item<std::int64_t>();
}

// Looking at it would wait for a GPU in a forward that must not.
bool unseen(const at::Tensor& values) { return !values.is_cpu() && FixedShapes::wanted(); }
at::Tensor outside(const at::Tensor& targets, std::int64_t vocabulary) {
  return targets.ne(kIgnoreIndex).logical_and(targets.lt(0).logical_or(targets.ge(vocabulary)));
}

}  // namespace

at::ScalarType computing_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

void check_type(const std::string& where, const std::string& name, const at::Tensor& values) {
  if (!values.defined()) refuse(where, name + " undefined", "a tensor", "Pass it");
  const auto type = values.scalar_type();
  if (type != at::kDouble && type != at::kFloat && type != at::kBFloat16)
    refuse(where, fmt::format("{} of {}", name, c10::toString(type)), "float64, float32 or bfloat16",
           "Convert the " + name);
}

void check_coefficients(const std::string& where, double label_smoothing, double z_loss) {
  if (!(label_smoothing >= 0 && label_smoothing <= 1))
    refuse(where, fmt::format("label_smoothing = {}", label_smoothing), "0 to 1", "Set label_smoothing");
  if (!(z_loss >= 0 && z_loss < std::numeric_limits<double>::infinity()))
    refuse(where, fmt::format("z_loss = {}", z_loss), "a finite number, 0 or more", "Set z_loss");
}

VocabularyShard checked_shard(const std::string& where, VocabularyShard shard, std::int64_t columns) {
  if (shard.vocabulary == 0 && shard.first == 0 && shard.group.size() == 1) shard.vocabulary = columns;
  if (shard.first < 0 || shard.first + columns > shard.vocabulary)
    refuse(where,
           fmt::format("{} columns from {} on of a vocabulary of {}", columns, shard.first, shard.vocabulary),
           "a shard that lies within its vocabulary",
           "Take `first` and `vocabulary` from the weight's placement (vocabulary_shard())");
  return shard;
}

void check_targets(const std::string& where, const at::Tensor& targets, std::int64_t tokens,
                   std::int64_t vocabulary) {
  if (targets.dim() != 1 || targets.size(0) != tokens || targets.scalar_type() != at::kLong)
    refuse(where,
           fmt::format("targets {} of {}", c10::str(targets.sizes()), c10::toString(targets.scalar_type())),
           fmt::format("targets [{}] of int64, one for each token", tokens),
           "Flatten the leading dims of both");
  if (unseen(targets)) return;
  std::int64_t t = -1;
  if (targets.is_cpu() && targets.is_contiguous()) {  // one pass
    const auto* target = targets.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < tokens && t < 0; ++i)
      if (target[i] != kIgnoreIndex && (target[i] < 0 || target[i] >= vocabulary)) t = i;
  } else {
    t = first(outside(targets, vocabulary));
  }
  if (t >= 0)
    refuse(where, fmt::format("targets[{}] = {}", t, targets[t].item<std::int64_t>()),
           fmt::format("0 to {} (the vocabulary), or {} for no loss", vocabulary - 1, kIgnoreIndex),
           "Check that the data were tokenized for this model");
}

TokenWeights token_weights(const std::string& where, const at::Tensor& weights, const at::Tensor& targets,
                           std::int64_t tokens, const at::Device& device, std::int64_t vocabulary) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  TokenWeights result;
  const auto checked = [&](at::Tensor of_valid) {
    return targets.defined() && vocabulary > 0 && unseen(targets)
               ? at::where(outside(targets, vocabulary), kNan, of_valid)
               : of_valid;
  };
  const auto options = at::TensorOptions().device(device);
  result.mask =
      targets.defined() ? targets.to(device).ne(kIgnoreIndex) : at::ones({tokens}, options.dtype(at::kBool));
  if (!weights.defined()) {
    result.weights = checked(result.mask.to(at::kDouble));
    return result;
  }
  if (weights.dim() != 1 || weights.size(0) != tokens ||
      !(weights.is_floating_point() || weights.scalar_type() == at::kBool))
    refuse(where,
           fmt::format("weights {} of {}", c10::str(weights.sizes()), c10::toString(weights.scalar_type())),
           fmt::format("weights [{}], floating or bool, one for each token", tokens),
           "Pass one weight for each token");
  if (weights.requires_grad()) refuse(where, "weights that require a gradient", "constants", "Detach them");
  const at::Tensor wide = weights.to(device, at::kDouble);
  const at::Tensor wrong =
      wide.ge(0).logical_and(wide.lt(std::numeric_limits<double>::infinity())).logical_not();
  if (unseen(wide)) {
    result.mask = result.mask.logical_and(wide.ne(0));
    result.weights = checked(at::where(result.mask, at::where(wrong, kNan, wide), 0.0));
    return result;
  }
  const std::int64_t t = first(wrong);
  if (t >= 0)
    refuse(where, fmt::format("weights[{}] = {}", t, wide[t].item<double>()), "a finite number, 0 or more",
           "Leave a token out by weight 0 or the target -100");
  result.mask = result.mask.logical_and(wide.ne(0));
  result.weights = at::where(result.mask, wide, 0.0);
  return result;
}

}  // namespace isograd
