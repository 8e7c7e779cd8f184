// Random numbers keyed by their purpose, never by a rank: the same in every layout.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <string_view>
#include <vector>

namespace isograd {

// Names one stream of random numbers. Two different keys give independent streams.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;    // optimizer step or epoch
  std::uint64_t sample = 0;  // sample id
  std::uint64_t layer = 0;   // layer index, or hash_name() of a purpose or parameter
};

// 64-bit hash of a name, for RandomKey::layer. Stable across runs and platforms (FNV-1a).
std::uint64_t hash_name(std::string_view name);

// The 64 random bits at `position` of the stream (Philox4x64-10; Salmon et al., SC 2011).
std::uint64_t random_bits(const RandomKey& key, std::uint64_t position);

// Uniform in [0, 1), 53 bits.
double random_uniform(const RandomKey& key, std::uint64_t position);

// Standard normal (Box-Muller on two uniforms of the same position).
double random_normal(const RandomKey& key, std::uint64_t position);

// A permutation of 0 .. n-1 (Fisher-Yates; bounded draws without modulo bias).
std::vector<std::int64_t> random_permutation(std::int64_t n, const RandomKey& key);

}  // namespace isograd
