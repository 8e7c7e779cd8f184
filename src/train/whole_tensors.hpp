// Gathers tensors that ranks keep in parts, one whole tensor after another.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// One tensor per parameter, in the model's order (of larger elements first, frozen ones last) and then by
// key; none where a bucket has none. Only one tensor is whole at a time: shards are gathered parameter by
// parameter, over model-parallel ranks and pipeline stages too.
class WholeTensors {
 public:
  // `parts`: this rank's part of each bucket by key, as an optimizer's state. The tensor of parameter "a"
  // and key "b" is named "a.b"; with an empty key "a". `placed`: layout of a model-parallel model, or null.
  // `layout` and `placed` must outlive it. Collective.
  WholeTensors(DataParallel& layout, OptimizerState parts, const Layout* placed);
  // The parameters themselves.
  static WholeTensors parameters(DataParallel& layout, const Layout* placed);

  // On rank 0, for one that writes them. Once: drain() on the others at the same time.
  TensorStream stream();
  // Gathers and drops the tensors that were not taken, so that ranks stay in step. Collective.
  void drain() { each({}); }

 private:
  struct Place {
    bool frozen = false;
    std::size_t index = 0;  // of the parameter
    std::string parameter, key;
    const Bucket* bucket = nullptr;  // null: not in a bucket; an empty tensor: other stages have it
    const Slot* slot = nullptr;
    at::Tensor tensor{};  // what this rank holds: of the bucket, or of the parameter
    TensorStream::Entry entry{};
  };

  WholeTensors(DataParallel& layout, const Layout* placed) : layout_(layout), placed_(placed) {}
  void add(const std::string& key, const Bucket& bucket, const at::Tensor& flat, bool frozen = false);
  void add(Place place, at::ScalarType type, at::IntArrayRef own);
  void add_other_stages();
  void sort();
  void each(const TensorStream::Take& take);
  at::Tensor whole(const Place& place);

  DataParallel& layout_;
  const Layout* placed_;
  std::vector<Place> places_{};
  std::size_t next_ = 0;
};

// Collective: rank 0 runs `work`, which may take these streams; the other ranks give it their parts. Every
// rank throws what it throws, as of on_rank_zero().
void on_rank_zero_with(Group& group, const std::vector<WholeTensors*>& tensors,
                       const std::function<void()>& work);

}  // namespace isograd
