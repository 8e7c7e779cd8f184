// Data parallelism: every rank holds all parameters, gradients are summed over the ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

struct DataParallelOptions {
  // Behaviour
  bool check_parameters =
      true;  // refuse ranks whose models differ (names, shapes, dtypes, values), naming the first
  // Speed
  std::int64_t bucket_bytes = 25 << 20;  // of gradients
  bool overlap = true;  // reduce a bucket as soon as its gradients are complete, inside backward
};

// A strategy for getting Σ_r g_r into every rank's gradient buffers. Two verbs in a step:
//   begin_backward(last)   before each micro-batch's backward; after the `last` one gradients may be reduced
//   finish_reduction()     afterwards every bucket's gradients hold the sum over all ranks
// A rank without micro-batches calls only finish_reduction() and takes part with zeros.
class DataParallel {
 public:
  virtual ~DataParallel() = default;
  virtual void zero_gradients() = 0;
  virtual void begin_backward(bool last) = 0;
  virtual void finish_reduction() = 0;
  virtual std::vector<Bucket>& buckets() = 0;
  virtual Group& group() = 0;

  // Views by parameter name, in the model's order; gradients as the flat buffers hold them.
  struct View {
    std::string name;
    at::Tensor parameter;  // model dtype
    at::Tensor master;
    at::Tensor gradient;
  };
  std::vector<View> views();
};

// Bucketed and overlapped: gradients are views of buckets in shared memory, a bucket is reduced when its last
// gradient arrives in the last micro-batch's backward, progress is made inside later hooks.
std::unique_ptr<DataParallel> bucketed(std::vector<NamedParameter> parameters, Group group,
                                       DataParallelOptions options = {});

// The naive twin: one all-reduce per parameter after backward. Obviously right; the other is tested against
// it.
std::unique_ptr<DataParallel> naive(std::vector<NamedParameter> parameters, Group group,
                                    DataParallelOptions options = {});

}  // namespace isograd
