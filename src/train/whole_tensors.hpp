// What ranks keep in parts, as whole tensors one after another.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/layout.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/tensor_stream.hpp"

namespace isograd {

// A tensor of each parameter, by parameter in the model's order (of larger elements first, frozen ones last)
// and then by key; nothing where a bucket has none. A bucket is whole from its first tensor to its last, a
// parameter that is cut over ranks, or lies in another stage, for as long as it is taken.
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
  using Part = std::pair<std::string, const Bucket*>;  // key and bucket
  struct Place {
    bool frozen = false;
    std::size_t index = 0;  // of the parameter
    std::string parameter, key;
    const Bucket* bucket = nullptr;  // null: the tensor itself, an empty one where other stages have it
    const Slot* slot = nullptr;
    at::Tensor tensor{};
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
  std::map<Part, at::Tensor> parts_{};  // what this rank holds
  std::vector<Place> places_{};
  std::size_t next_ = 0;
  std::map<Part, at::Tensor> gathered_{};
  std::map<Part, std::size_t> left_{};  // tensors of it that are still to come
};

}  // namespace isograd
