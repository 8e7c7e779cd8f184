// For tests written with GoogleMock: EXPECT_THAT(isograd::verify(...), isograd::EqualsSingleDevice()).
#pragma once

#include "isograd/error.hpp"

#include <gmock/gmock.h>

#include <ostream>

#include "isograd/verify.hpp"

namespace isograd {

// Matches a verdict that passed; otherwise describes which parameters differ, by how much, and the likely
// cause.
class SingleDeviceMatcher {
 public:
  using is_gtest_matcher = void;
  bool MatchAndExplain(const Verdict& verdict, std::ostream* explanation) const {
    if (!verdict.passed && explanation) *explanation << "\n" << to_text(verdict);
    return verdict.passed;
  }
  void DescribeTo(std::ostream* out) const { *out << "has the gradient of a single device"; }
  void DescribeNegationTo(std::ostream* out) const { *out << "has another gradient than a single device"; }
};

inline testing::Matcher<const Verdict&> EqualsSingleDevice() { return SingleDeviceMatcher(); }

// Found by GoogleTest: the verdict in one line instead of its bytes.
inline void PrintTo(const Verdict& verdict, std::ostream* out) { *out << parity_line(verdict); }

}  // namespace isograd
