// For tests of the normaliser: batches made of fragments, and what a call throws.
#pragma once

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "isograd/world.hpp"

namespace isograd::normalizer_testing {

using error_testing::error_of;

struct Fragment {
  std::int64_t id, length, declared;
  double loss = 1;  // of each token
};

// All tokens valid; the token's loss is its target, so that a test can compute it from the batch.
inline Batch batch_of(const std::vector<Fragment>& fragments, std::vector<double> weights = {}) {
  Batch batch = empty_batch();
  std::vector<at::Tensor> targets = {batch.targets};
  for (const Fragment& fragment : fragments) {
    targets.push_back(at::full({fragment.length}, static_cast<std::int64_t>(fragment.loss), at::kLong));
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + fragment.length);
    batch.sample_ids.push_back(fragment.id);
    batch.sample_targets.push_back(fragment.declared);
  }
  batch.targets = at::cat(targets);
  batch.tokens = batch.positions = at::zeros_like(batch.targets);
  if (!weights.empty()) batch.weights = at::tensor(weights, at::kDouble);
  return batch;
}

}  // namespace isograd::normalizer_testing
