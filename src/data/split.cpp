// Training and validation documents.
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
  std::int64_t wanted = std::llround(validation_fraction * static_cast<double>(documents));
  if (validation_fraction > 0 && documents > 1) wanted = std::clamp<std::int64_t>(wanted, 1, documents - 1);
  if (documents == 1) wanted = 0;

  // The `wanted` documents with the smallest random numbers of their own.
  std::vector<std::pair<std::uint64_t, std::int64_t>> drawn(static_cast<std::size_t>(documents));
  const std::uint64_t purpose = hash_name("data.split");
  for (std::int64_t d = 0; d < documents; ++d)
    drawn[static_cast<std::size_t>(d)] = {
        random_bits({.seed = seed, .sample = static_cast<std::uint64_t>(d), .layer = purpose}, 0), d};
  if (wanted > 0 && wanted < documents) std::nth_element(drawn.begin(), drawn.begin() + wanted, drawn.end());
  Split split;
  split.validation.reserve(static_cast<std::size_t>(wanted));
  split.train.reserve(static_cast<std::size_t>(documents - wanted));
  for (std::int64_t i = 0; i < documents; ++i)
    (i < wanted ? split.validation : split.train).push_back(drawn[static_cast<std::size_t>(i)].second);
  std::sort(split.validation.begin(), split.validation.end());
  std::sort(split.train.begin(), split.train.end());
  return split;
}

}  // namespace isograd
