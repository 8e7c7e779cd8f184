// One pass over the documents: their order, and which pieces of them lie between two tokens of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "isograd/data.hpp"

namespace isograd {

// Documents are laid end to end; "token t of the epoch" counts along that line. 8 bytes a document.
class Epoch {
 public:
  // Tokens [begin, end) of a document that starts at token `start` of the epoch and is `length` long.
  struct Span {
    std::int64_t document, begin, end, start, length;
  };

  // A function of (seed, epoch) and of `documents` only; without `shuffle`, of `documents`.
  Epoch(const TokenStore& store, std::span<const std::int64_t> documents, std::uint64_t seed,
        std::int64_t epoch, bool shuffle);
  std::int64_t number() const { return number_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  // What lies in [begin, end), one piece a document. REQUIRES: 0 <= begin <= end <= num_tokens().
  std::vector<Span> pieces(std::int64_t begin, std::int64_t end) const;

 private:
  static constexpr std::int64_t kStride = 64;

  const TokenStore& store_;
  std::int64_t number_;
  std::vector<std::int64_t> order_;   // documents
  std::vector<std::int64_t> starts_;  // token at which every kStride-th document starts
  std::int64_t num_tokens_ = 0;
};

}  // namespace isograd
