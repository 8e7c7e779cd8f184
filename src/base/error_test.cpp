#include "isograd/error.hpp"

#include <gtest/gtest.h>

namespace isograd {
namespace {

TEST(Error, MessageHasFoundExpectedAndAction) {
  ConfigError error(
      {.where = "run.toml:3", .found = "pack_length = 0", .expected = "1 or more", .action = "Raise it"});
  EXPECT_STREQ(error.what(), "ConfigError: run.toml:3: found pack_length = 0; expected 1 or more. Raise it.");
  EXPECT_EQ(error.text().expected, "1 or more");
}

TEST(Error, EachFamilyHasItsExitStatus) {
  EXPECT_EQ(exit_status(ConfigError({})), 2);
  EXPECT_EQ(exit_status(PeerError({})), 3);
  EXPECT_EQ(exit_status(BrokenInvariant({})), 4);
  EXPECT_EQ(exit_status(std::runtime_error("?")), 4);
}

TEST(Error, InvariantNamesConditionAndPlace) {
  try {
    ISOGRAD_INVARIANT(1 + 1 == 3, "2");
    FAIL() << "must throw";
  } catch (const BrokenInvariant& error) {
    EXPECT_EQ(error.text().expected, "1 + 1 == 3");
    EXPECT_NE(error.text().where.find("src/base/error_test.cpp:"), std::string::npos);
  }
}

}  // namespace
}  // namespace isograd
