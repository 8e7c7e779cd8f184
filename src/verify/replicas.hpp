// Ranks that keep the same weights must keep the same bits.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

struct Divergence {
  std::string parameter;                // or buffer: the first in the model's order
  std::size_t differing = 0;            // parameters and buffers
  std::vector<std::vector<int>> camps;  // ranks that agree with one another about it; the largest camp first

  std::string text() const;
};

// Collective: an XXH3 of each parameter that this rank keeps (the whole where ranks keep the whole, otherwise
// its part of a shard, with the fp32 master of bf16 ones) against those of the ranks that keep the same part.
// `named` is the rank's model, readable unless the layout shards parameters; `placed` says which part of the
// whole one it is, null: all of it; `buffers` are whole on every rank. The same answer on every rank.
std::optional<Divergence> find_divergence(const std::vector<std::pair<std::string, at::Tensor>>& named,
                                          const std::vector<std::pair<std::string, at::Tensor>>& buffers,
                                          DataParallel& layout, const Layout* placed = nullptr);

}  // namespace isograd
