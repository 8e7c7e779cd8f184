// The corpus's own lengths: how many pairs attention computes, and by how much the ranks' work differs.
#include <algorithm>
#include <numeric>

#include "plan/time.hpp"

namespace isograd::planner {
namespace {

double pairs_of(std::int64_t tokens) { return double(tokens) * (double(tokens) + 1) / 2; }
}  // namespace

std::vector<double> pairs_by_sequence(const Work& work) {
  if (work.documents.empty()) return {pairs_of(work.sequence)};
  std::vector<double> pairs(1, 0);
  std::int64_t room = work.sequence;
  for (std::int64_t document : work.documents)
    while (document > 0) {
      const std::int64_t part = std::min(document, room);
      pairs.back() += pairs_of(part);
      document -= part, room -= part;
      if (room == 0) pairs.push_back(0), room = work.sequence;
    }
  if (pairs.size() > 1) pairs.pop_back();  // not full: its rest is the next documents'
  return pairs;
}

Packs packs_of(const std::vector<double>& pairs, std::int64_t ranks, std::int64_t sequences_of_rank) {
  const double mean = std::accumulate(pairs.begin(), pairs.end(), 0.0) / double(pairs.size());
  if (pairs.size() == 1) return {.pairs = mean};
  // Steps of the corpus, from its beginning again where it ends: the mean of their slowest ranks.
  constexpr std::int64_t kMostSequences = 1 << 20, kMostSteps = 16;
  const std::int64_t of_step = std::max<std::int64_t>(1, ranks * sequences_of_rank);
  const std::int64_t steps = std::clamp<std::int64_t>(kMostSequences / of_step, 1, kMostSteps);
  double slowest = 0;
  std::size_t next = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    double most = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      double of_rank = 0;
      for (std::int64_t i = 0; i < sequences_of_rank; ++i) of_rank += pairs[next++ % pairs.size()];
      most = std::max(most, of_rank);
    }
    slowest += most / (mean * double(sequences_of_rank));
  }
  return {.pairs = mean, .slowest = slowest / double(steps)};
}

}  // namespace isograd::planner
