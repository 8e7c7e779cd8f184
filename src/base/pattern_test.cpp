#include "base/pattern.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace isograd {
namespace {

// An independent matcher: it follows all positions of the name that a part of the pattern can reach.
bool fits(const std::string& pattern, const std::string& name) {
  std::vector<bool> may(name.size() + 1, false);
  may[0] = true;
  for (const char c : pattern) {
    std::vector<bool> next(name.size() + 1, false);
    bool before = false;
    for (std::size_t at = 0; at <= name.size(); ++at) {
      before = before || may[at];
      if (c == '*') next[at] = before;
      if (c != '*' && at > 0) next[at] = may[at - 1] && name[at - 1] == c;
    }
    may = next;
  }
  return may[name.size()];
}

// Every text of at most `most` of these characters.
std::vector<std::string> all_of(const std::string& characters, std::size_t most) {
  std::vector<std::string> all{""};
  for (std::size_t at = 0; at < all.size(); ++at)
    if (all[at].size() < most)
      for (const char c : characters) all.push_back(all[at] + c);
  return all;
}

TEST(Patterns, AreTheWholeNameWithAnyTextForStars) {
  for (const std::string& pattern : all_of("ab*", 5))
    for (const std::string& name : all_of("ab", 5))
      EXPECT_EQ(matches(pattern, name), fits(pattern, name)) << pattern << " of " << name;
  EXPECT_TRUE(matches("a*c", "a*c"));
  EXPECT_TRUE(matches("*.experts.*", "layers.0.experts.1.weight"));
}

TEST(Patterns, OfManyStarsTakeNoLongerAndNoStack) {
  const std::string name(5000, 'a');
  EXPECT_FALSE(matches(std::string(1'000'000, '*') + "b", name));
  EXPECT_TRUE(matches(std::string(1'000'000, '*'), name));
  std::string pattern;
  for (int star = 0; star < 300; ++star) pattern += "*a";
  EXPECT_FALSE(matches(pattern + "b", name));
  EXPECT_TRUE(matches(pattern, name));
}

}  // namespace
}  // namespace isograd
