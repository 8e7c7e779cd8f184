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

// A tensor of each parameter, by parameter in the model's order (of larger elements first) and then by key;
// nothing where a bucket has none. A bucket is whole from its first tensor to its last, a parameter that is
// cut over ranks for as long as it is taken.
class WholeTensors {
 public:
  // `parts`: what this rank holds of each bucket, as an optimizer's state is given, by key. The tensor of
  // parameter "a" and key "b" is called "a.b", and "a" of an empty key. `placed`: of a model whose parameters
  // are cut over ranks, or null. `layout` and `placed` outlive it.
  WholeTensors(DataParallel& layout, OptimizerState parts, const Layout* placed);

  // On rank 0, for one that writes them. Once: drain() on the others at the same time.
  TensorStream stream();
  // Collective. What has not been taken is gathered and let go, so that ranks stay together.
  void drain() { each({}); }

 private:
  struct Place {
    std::string key;
    std::size_t bucket;
    const Slot* slot;
    TensorStream::Entry entry;
  };
  using Part = std::pair<std::string, std::size_t>;  // key and bucket

  void each(const TensorStream::Take& take);
  at::Tensor whole(const Place& place);

  DataParallel& layout_;
  OptimizerState parts_;
  const Layout* placed_;
  std::vector<Place> places_;
  std::size_t next_ = 0;
  std::map<Part, at::Tensor> gathered_;
  std::map<Part, std::size_t> left_;  // tensors of it that are still to come
};

}  // namespace isograd
