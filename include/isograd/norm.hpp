// The exact global norm: every element counted once, by its owner (source of the rule: docs/losses.md §7).
#pragma once

#include "isograd/cxx20.hpp"

#include <functional>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

class Layout;
class Readings;

struct GlobalNorm {
  double norm = 0;      // ‖G‖₂ in fp64
  double loss_sum = 0;  // Σ over ranks of the value given
  bool finite = true;   // norm and loss of every rank; the same answer on all ranks
};

// Local fp64 sum of squares over owned elements, then one all-reduce, which carries the logged loss along.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group group);
// The same with more numbers to be summed over the ranks on the way, the loss first. `local_sums` (equally
// many on every rank) becomes their sums. The others may be anything: what is only logged stops no step.
GlobalNorm global_norm(const std::vector<Bucket>& buckets, std::vector<double>& local_sums, Group group);

// The same in two halves: Σ g² in fp64 of the elements that this rank owns, bucket by bucket in their order,
// and the rest from their sum. Gradients on a GPU are read when the sum is asked for, all in one pass: they
// must stay as they are until then.
class OwnedSquares {
 public:
  void add(const Bucket& bucket);
  void add(const Bucket& bucket, const Slot& slot);  // of one parameter
  void add(double squares) { sum_ += squares; }      // that a reduction has taken on its way
  // What is on a device comes when `readings` are read; this must stay in its place until then.
  void complete(Readings& readings);
  double value();  // waits for what is not complete

 private:
  void add(const at::Tensor& flat, Range range);

  double sum_ = 0;
  std::vector<at::Tensor> waiting_;
};
double owned_squares(const Bucket& bucket);
GlobalNorm global_norm(double squares, std::vector<double>& local_sums, Group group);

// The same of gradients by a Layout, in its order, summed: owned elements alone, then one all-reduce over all
// ranks of the mesh. Of numbers that several ranks hold alike one of them gives `local_sums`, the others 0.
double owned_squares(const Layout& layout, const std::vector<at::Tensor>& gradients);
GlobalNorm global_norm(const Layout& layout, const std::vector<at::Tensor>& gradients,
                       std::vector<double>& local_sums);

// What a norm measures: the root of the sum of squares (in fp64), or the largest magnitude.
enum class NormOrder { kTwo, kInfinity };

// Norms of parts of the gradient, e.g. of each layer: `part_of` puts a parameter into a part, 0 to parts - 1,
// or into none (any other number). NaN where the part holds one, 0 of an empty part. One all-reduce for all
// of them; the same bits on every rank.
std::vector<double> part_norms(const std::vector<Bucket>& buckets,
                               const std::function<int(const Slot&)>& part_of, int parts, NormOrder order,
                               Group group);

// Parts of the gradient whose norms are logged beside its own: `of` gives a parameter's part, by its name and
// as a place in `names`, or any other number for none. The same on every rank.
struct NormParts {
  std::vector<std::string> names{};
  std::function<int(const std::string& name)> of{};
};
// Adds the squares of what this rank owns in the bucket to those of their parts, [names.size()].
void add_owned_squares(const Bucket& bucket, const NormParts& parts, std::vector<OwnedSquares>& squares);

// max |g| over the whole gradient; NaN if any element is one.
double infinity_norm(const std::vector<Bucket>& buckets, Group group);

// min(1, max_norm / (norm + 1e-6)); 1 when max_norm <= 0 (no clipping). Same bits on every rank. ConfigError:
// max_norm is NaN.
double clip_coefficient(double norm, double max_norm);

}  // namespace isograd
