// Mistakes planted in cells of the sweep through public seams: the mean, the layout, placements, the norm,
// the schedule, the data, and the groups that operators communicate over.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hybrid_run.hpp"

namespace isograd::hybrid {

struct Mutant {
  std::string kind, what;
  std::function<bool(const Cell&)> exists;  // whether it is another gradient or norm in this cell
  Planted planted{};
};

// Of the kinds "mean", "sum" and "norm"; and "placement", "schedule", "data" and "operator".
void add_mutants_of_sums(std::vector<Mutant>& all);
void add_mutants_of_axes(std::vector<Mutant>& all);
inline std::vector<Mutant> mutants() {
  std::vector<Mutant> all;
  add_mutants_of_sums(all);
  add_mutants_of_axes(all);
  return all;
}

using Change = std::function<void(VerifyProblem&, World&)>;

// Around the layout under test; `grid`: its mesh's.
using Around = std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)>;
inline Change around_layout(const Around& around) {
  return [around](VerifyProblem& problem, World&) {
    wrap(problem.layouts[0], [around](auto right, const VerifyModel&) { return around(std::move(right)); });
  };
}

// After the sum over ranks.
using ChangeBuckets = std::function<void(std::vector<Bucket>& buckets, const Mesh& mesh)>;
struct AfterSum : planted::Wrapped {
  ChangeBuckets change;
  AfterSum(std::unique_ptr<DataParallel> inner_, ChangeBuckets change_)
      : Wrapped(std::move(inner_)), change(std::move(change_)) {}
  void finish_reduction() override {
    inner->finish_reduction();
    change(buckets(), mesh());
  }
};
inline Change after_sum(const ChangeBuckets& change) {
  return around_layout([change](auto right) -> std::unique_ptr<DataParallel> {
    return std::make_unique<AfterSum>(std::move(right), change);
  });
}

inline bool above(const Cell& cell, Which axis) {
  return cell.number(axis) > 1;
}
// Gradients lie whole in buckets that nothing reduces before the end.
inline bool plain(const Cell& cell) {
  return cell.is(kStrategy, "naive");
}
// Whole on every rank once they are summed.
inline bool whole(const Cell& cell) {
  return cell.is(kStrategy, "bucketed") || plain(cell) || cell.is(kStrategy, "overlapped");
}

// What of a slot this rank holds, in the bucket's gradients.
inline at::Tensor held_of(const Bucket& bucket, const Slot& slot) {
  const std::int64_t begin = std::max(slot.offset, bucket.held.begin),
                     end = std::min(slot.offset + slot.numel, bucket.held.end);
  return bucket.gradients.narrow(0, begin < end ? begin - bucket.held.begin : 0,
                                 std::max<std::int64_t>(0, end - begin));
}
inline bool named(const std::string& name, const std::string& part) {
  return name.find(part) != std::string::npos;
}
inline int size_of(const Mesh& mesh, const std::string& axis) {
  return mesh.grid().has(axis) ? mesh.size({axis}) : 1;
}

}  // namespace isograd::hybrid
