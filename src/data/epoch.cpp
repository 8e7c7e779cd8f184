#include "data/epoch.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {

Epoch::Epoch(const TokenStore& store, std::span<const std::int64_t> documents, std::uint64_t seed,
             std::int64_t epoch, bool shuffle)
    : store_(store), number_(epoch) {
  if (shuffle) {
    order_ = random_permutation(
        static_cast<std::int64_t>(documents.size()),
        {.seed = seed, .step = static_cast<std::uint64_t>(epoch), .layer = hash_name("data.shuffle")});
    for (auto& place : order_) place = documents[static_cast<std::size_t>(place)];
  } else {
    order_.assign(documents.begin(), documents.end());
  }
  starts_.reserve(order_.size() / kStride + 1);
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (i % kStride == 0) starts_.push_back(num_tokens_);
    num_tokens_ += store_.document_length(order_[i]);
  }
}

std::vector<Epoch::Span> Epoch::pieces(std::int64_t begin, std::int64_t end) const {
  ISOGRAD_INVARIANT(0 <= begin && begin <= end && end <= num_tokens_,
                    fmt::format("[{}, {}) of {}", begin, end, num_tokens_));
  std::vector<Span> found;
  if (begin == end) return found;
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  auto i = static_cast<std::size_t>(after - starts_.begin() - 1) * kStride;
  for (std::int64_t start = *(after - 1); start < end; ++i) {
    const std::int64_t length = store_.document_length(order_[i]);
    const std::int64_t from = std::max(begin, start), to = std::min(end, start + length);
    if (from < to) found.push_back({order_[i], from - start, to - start, start, length});
    start += length;
  }
  return found;
}

}  // namespace isograd
