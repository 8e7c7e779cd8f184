// Whether a test goes through its whole matrix.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace isograd {

inline bool full_tests() {
  const char* value = std::getenv("ISOGRAD_FULL_TESTS");
  return value && *value && *value != '0';
}

// Whether number `place` of a list takes the first of two values by turns. Not every other one, which would
// keep step with the loop that made the list: any two values of other loops come with both (Thue and Morse's
// sequence).
inline bool takes_first(std::size_t place) { return std::popcount(place) % 2 == 0; }

// Whether the default run makes a case: one that has a word which no earlier case of the list has ("tp=3",
// "strategy=zero2"), and each `stride`-th of the others. ISOGRAD_FULL_TESTS=1: every case.
class DefaultCases {
 public:
  explicit DefaultCases(std::size_t stride) : stride_(stride) {}
  bool has(const std::string& words) {
    std::istringstream text(words);
    const std::size_t before = seen_.size();
    seen_.insert(std::istream_iterator<std::string>(text), {});
    return full_tests() || seen_.size() > before || ++others_ % stride_ == 0;
  }

 private:
  std::size_t stride_, others_ = 0;
  std::set<std::string> seen_{};
};

}  // namespace isograd
