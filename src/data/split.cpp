// Splits documents into training and validation.
#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {

Split split_documents(const TokenStore& store, double validation_fraction, std::uint64_t seed) {
  if (!(validation_fraction >= 0 && validation_fraction < 1))
    refuse("data.validation_fraction", std::to_string(validation_fraction), "0 or more, below 1",
           "Choose a share of the documents, such as 0.02");
  const std::int64_t documents = store.num_documents();
  std::int64_t held_out = std::llround(validation_fraction * static_cast<double>(documents));
  if (validation_fraction > 0 && documents > 1)
    held_out = std::clamp<std::int64_t>(held_out, 1, documents - 1);
  if (documents == 1) held_out = 0;

  // The `held_out` documents with the smallest random numbers.
  std::vector<std::pair<std::uint64_t, std::int64_t>> drawn(static_cast<std::size_t>(documents));
  const std::uint64_t purpose = hash_name("data.split");
  for (std::int64_t d = 0; d < documents; ++d)
    drawn[static_cast<std::size_t>(d)] = {
        random_bits({.seed = seed, .sample = static_cast<std::uint64_t>(d), .layer = purpose}, 0), d};
  if (held_out > 0 && held_out < documents)
    std::nth_element(drawn.begin(), drawn.begin() + held_out, drawn.end());
  Split split;
  split.validation.reserve(static_cast<std::size_t>(held_out));
  split.train.reserve(static_cast<std::size_t>(documents - held_out));
  for (std::int64_t i = 0; i < documents; ++i)
    (i < held_out ? split.validation : split.train).push_back(drawn[static_cast<std::size_t>(i)].second);
  std::sort(split.validation.begin(), split.validation.end());
  std::sort(split.train.begin(), split.train.end());
  return split;
}

}  // namespace isograd
