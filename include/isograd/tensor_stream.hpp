// TensorStream: whole tensors one after another, so that a file of all of them can be written where no rank
// ever holds them together.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct TensorStream {
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  using Take = std::function<void(const at::Tensor& whole)>;

  std::vector<Entry> entries;
  // Gives `take` each tensor in the order of `entries`; it may be gone afterwards. Once.
  std::function<void(const Take& take)> each;
};

// Of tensors that are there; those of larger elements first, otherwise in the given order.
TensorStream stream_of(NamedTensors tensors);

}  // namespace isograd
