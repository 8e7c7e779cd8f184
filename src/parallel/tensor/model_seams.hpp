// What models that ranks along tp hold together have in common: a stream of tokens, entered and left.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "isograd/decoder_lm.hpp"
#include "isograd/tensor_parallel.hpp"

namespace isograd {

inline constexpr const char* kTensorAxis = "tp";

inline int ranks_along_tp(const Grid& grid) {
  return grid.has(kTensorAxis) ? grid.size({kTensorAxis}) : 1;
}

inline bool is_any_of(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return name.find(part) != std::string::npos; });
}

// `enter`, `leave` and `use`; with sequence parallelism the stream of each rank along tp has some of the
// tokens.
inline ModelSeams stream_seams(const Group& tp, const TensorParallelOptions& options) {
  if (!options.sequence_parallel)
    return {.enter = [tp](const at::Tensor& x, std::int64_t) { return isograd::enter(tp, x); },
            .leave = [tp](const at::Tensor& part) { return isograd::leave(tp, part); },
            .use = [tp](const at::Tensor& same) { return isograd::enter(tp, same); }};
  return {.enter = [tp](const at::Tensor& x,
                        std::int64_t tokens) { return enter_cut(tp, x, split_rows(tokens, tp.size())); },
          .leave = [tp](const at::Tensor& part) { return leave_cut(tp, part); },
          .use = [tp](const at::Tensor& same) { return isograd::enter(tp, same); },
          .all_tokens =
              [tp](const at::Tensor& own, std::int64_t tokens) {
                return gather_tokens(tp, own, split_rows(tokens, tp.size()));
              }};
}

}  // namespace isograd
