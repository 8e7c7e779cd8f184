// One pass over the documents: their order, and the pieces between two tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "isograd/data.hpp"

namespace isograd {

// The documents are concatenated; "token t of the epoch" counts along them. It takes 8 bytes per document.
class Epoch {
 public:
  // Tokens [begin, end) of a document of `length` tokens that starts at token `start` of the epoch.
  struct Span {
    std::int64_t document, begin, end, start, length;
  };

  // The order depends only on (seed, epoch) and `documents`; without `shuffle`, only on `documents`.
  Epoch(const TokenStore& store, std::span<const std::int64_t> documents, std::uint64_t seed,
        std::int64_t epoch, bool shuffle);
  std::int64_t number() const { return number_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  // The pieces of [begin, end), one per document. REQUIRES: 0 <= begin <= end <= num_tokens().
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
