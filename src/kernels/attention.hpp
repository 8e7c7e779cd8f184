// The passes of attention over one block of scores, between its matrix products.
#pragma once

#include <cstdint>

namespace isograd::kernels {

// Weights exp(scale · score − max) of `rows` queries to a block of `keys` keys, in place of their scores
// (row r at scores + r · stride): row r sees the first min(keys, visible + r) of them, what follows up to
// `padded` becomes 0. `max` and `sum` [rows] are those of the blocks so far (−∞ and 0 before the first) and
// afterwards of these too; factor [rows] = exp(max before − max after), by which what was added up before
// shrinks. A NaN among the visible scores makes its row's weights NaN.
void attention_weights(float* scores, std::int64_t stride, std::int64_t rows, std::int64_t keys,
                       std::int64_t padded, std::int64_t visible, float scale, float* max, float* sum,
                       float* factor);

// Backward, with keys in rows: weights [keys, queries] become p = exp(scale · score − log_sums[query]),
// and dweights, given dp, ds = scale · p · (dp − mean[query]); row stride `queries`, a multiple of 32. Key r
// is seen by the queries from r − `ahead` on; the others' p and ds are 0.
void attention_weights_backward(float* weights, float* dweights, std::int64_t keys, std::int64_t queries,
                                std::int64_t ahead, float scale, const float* log_sums, const float* mean);

}  // namespace isograd::kernels
