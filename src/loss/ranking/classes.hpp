// All classes of one forward, over all ranks: from a pool of gathered rows, or by selection of thresholds.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "isograd/ranking.hpp"
#include "loss/ranking/cores.hpp"
#include "loss/ranking/pool.hpp"

namespace isograd {

// Results of the classes' cores, over all ranks.
struct Computed {
  std::vector<ClassResult> classes;
  at::Tensor gradient;    // [rows, C] of each class's loss
  bool own_only = false;  // rows: this rank's; else those of all ranks, of which only this rank's are whole
};

template <typename T>
using ClassCore = std::function<ClassResult(const ClassPool<T>& pool, T* gradient)>;

// Every class's core on the rows `chosen` of the pool, all of them where it is empty; then, where the work
// was split, one collective that adds the shares up: a reduce-scatter of gradients and sums, or without
// gradient an all-reduce.
template <typename T>
Computed compute_classes(const RankingPool& pool, const std::vector<std::int64_t>& chosen, double temperature,
                         bool wants_gradient, bool split, Group& group, const ClassCore<T>& compute);

// `own`: this rank's rows, on rank 0 the queue's too; nothing but counts and sums leaves a rank. `rows`: of
// all ranks and the queue. Collectives: selection_rounds(), then one all-reduce of RateSums.
template <typename T>
Computed compute_by_selection(const RankingPool& own, std::int64_t rows, double temperature,
                              bool wants_gradient, const RateRule& rule, Group& group);

// Whether a forward of such a loss selects: as asked for, else where it is cheaper in bytes that a rank
// sends, a collective counted as kCollectiveBytes. `queued`: rows that go to the queue, which are gathered
// all the same.
bool selects_thresholds(const RankingOptions& options, const RateRule& rule, const RowCounts& counts,
                        at::ScalarType type, std::size_t queued, int ranks);

// About what two ranks exchange through shared memory in the time of a collective of a few numbers.
inline constexpr std::int64_t kCollectiveBytes = 32 << 10;

}  // namespace isograd
