// Counter-based random numbers. They have no state that could differ between ranks.
#include "isograd/random.hpp"

#include <Random123/philox.h>

#include <cmath>
#include <numbers>
#include <utility>

namespace isograd {
namespace {

// One Philox block for (key, position): 256 bits. The key words are (seed, layer) and the counter is
// (position, step, sample, draw), so two uses of a stream never overlap.
r123::Philox4x64::ctr_type block(const RandomKey& key, std::uint64_t position, std::uint64_t draw) {
  return r123::Philox4x64()({{position, key.step, key.sample, draw}}, {{key.seed, key.layer}});
}

double to_unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace

std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a offset basis and prime
  for (unsigned char byte : name) hash = (hash ^ byte) * 1099511628211ull;
  return hash;
}

std::uint64_t random_bits(const RandomKey& key, std::uint64_t position) { return block(key, position, 0)[0]; }

double random_uniform(const RandomKey& key, std::uint64_t position) {
  return to_unit(random_bits(key, position));
}

double random_normal(const RandomKey& key, std::uint64_t position) {
  const auto bits = block(key, position, 1);
  const double radius = std::sqrt(-2.0 * std::log(1.0 - to_unit(bits[0])));  // 1 - u is in (0, 1]
  return radius * std::cos(2.0 * std::numbers::pi * to_unit(bits[1]));
}

std::vector<std::int64_t> random_permutation(std::int64_t n, const RandomKey& key) {
  std::vector<std::int64_t> order(n);
  for (std::int64_t i = 0; i < n; ++i) order[i] = i;
  for (std::int64_t i = n - 1; i > 0; --i) {
    // Lemire 2019: multiply and reject, so that every value below `bound` is equally likely.
    const auto bound = static_cast<std::uint64_t>(i) + 1;
    const std::uint64_t threshold = (0 - bound) % bound;
    __extension__ typedef unsigned __int128 Wide;
    Wide product = 0;
    std::uint64_t draw = 2;
    do {
      product = static_cast<Wide>(block(key, static_cast<std::uint64_t>(i), draw++)[0]) * bound;
    } while (static_cast<std::uint64_t>(product) < threshold);
    std::swap(order[i], order[static_cast<std::int64_t>(product >> 64)]);
  }
  return order;
}

}  // namespace isograd
