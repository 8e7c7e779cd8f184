// What ranks keep in parts, as whole tensors one after another.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// A tensor of each parameter, by parameter in the model's order (of larger elements first, frozen ones last)
// and then by key; nothing where a bucket has none. No more than one of them is whole at a time: shards are
// gathered parameter by parameter, as is what is cut over ranks or lies in another stage.
class WholeTensors {
 public:
  // `parts`: what this rank holds of each bucket, as an optimizer's state is given, by key. The tensor of
  // parameter "a" and key "b" is called "a.b", and "a" of an empty key. `placed`: of a model whose parameters
  // are cut over ranks, or null. `layout` and `placed` outlive it. Collective.
  WholeTensors(DataParallel& layout, OptimizerState parts, const Layout* placed);
  // The parameters themselves.
  static WholeTensors parameters(DataParallel& layout, const Layout* placed);

  // On rank 0, for one that writes them. Once: drain() on the others at the same time.
  TensorStream stream();
  // Collective. What has not been taken is gathered and let go, so that ranks stay together.
  void drain() { each({}); }

 private:
  struct Place {
    bool frozen = false;
    std::size_t index = 0;  // of the parameter
    std::string parameter, key;
    const Bucket* bucket = nullptr;  // null: it lies by itself; an empty tensor where other stages have it
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

}  // namespace isograd
