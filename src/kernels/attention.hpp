// Passes of attention over one block of scores, between its matrix products.
#pragma once

#include <cstdint>

namespace isograd::kernels {

// Replaces the scores of `rows` queries and a block of `keys` keys by weights exp(scale · score − max). Row r
// starts at scores + r · stride and sees the first min(keys, visible + r) keys; later ones up to `padded`
// become 0. `max` and `sum` [rows] are those of earlier blocks (−∞ and 0 before the first) and then include
// this one. factor [rows] = exp(old max − new max) scales the earlier sums. A NaN among a row's visible
// scores makes its weights NaN.
void attention_weights(float* scores, std::int64_t stride, std::int64_t rows, std::int64_t keys,
                       std::int64_t padded, std::int64_t visible, float scale, float* max, float* sum,
                       float* factor);

// Backward, with keys in rows: weights [keys, queries] become p = exp(scale · score − log_sums[query]), and
// dweights, given dp, become ds = scale · p · (dp − mean[query]). The row stride is `queries`, a multiple of
// 32. Queries from r − `ahead` on see key r; for the others p and ds are 0.
void attention_weights_backward(float* weights, float* dweights, std::int64_t keys, std::int64_t queries,
                                std::int64_t ahead, float scale, const float* log_sums, const float* mean);

}  // namespace isograd::kernels
