// Changes a sound file at random: what disks, networks and enemies do, and what counts and offsets are prone
// to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace isograd::fuzz {

// Numbers by (seed, count): the same on every machine, unlike the standard's distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits();
  std::size_t below(std::size_t end) { return end == 0 ? 0 : bits() % end; }
  bool one_in(std::size_t many) { return below(many) == 0; }

 private:
  std::uint64_t state_;
};

inline constexpr std::size_t kLargestInput = std::size_t{1} << 20;

// One to eight changes of `sound`; `other` is another sound file of the kind, `words` are what its format is
// made of.
std::string mutated(const std::string& sound, const std::string& other, const std::vector<std::string>& words,
                    Random& random);

}  // namespace isograd::fuzz
