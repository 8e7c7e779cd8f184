// train.clip_groups: what is read of them, and what is refused.
#include "train/clip_config.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RunConfig with_groups(std::vector<std::string> groups) {
  RunConfig config;
  config.train.clip_groups = std::move(groups);
  return config;
}

std::string said_of_groups(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ClipConfig, PatternsAndLimitsAreRead) {
  const auto groups = clip_groups_of(with_groups({"*.experts.*: 0.5", " a:b :2e-3"}), "here");
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].pattern, "*.experts.*");
  EXPECT_EQ(groups[0].max_norm, 0.5);
  EXPECT_EQ(groups[1].pattern, "a:b");  // up to the last colon
  EXPECT_EQ(groups[1].max_norm, 2e-3);
}

TEST(ClipConfig, WhatIsNoGroupIsRefused) {
  for (const auto& [text, said] : {std::pair("*.mlp.*", "names no limit"),
                                   {": 1", "names no parameter"},
                                   {"a: 0", "no number above 0"},
                                   {"a: -1", "no number above 0"},
                                   {"a: nan", "no number above 0"},
                                   {"a: inf", "no number above 0"},
                                   {"a: 1x", "no number above 0"},
                                   {"a:", "no number above 0"}})
    EXPECT_THAT(
        said_of_groups([&, one = std::string(text)] { clip_groups_of(with_groups({one}), "run.toml"); }),
        AllOf(HasSubstr("run.toml"), HasSubstr(said)))
        << text;
  EXPECT_THAT(
      said_of_groups([] { clip_groups_of(with_groups({std::string(1'000'000, '*') + ": 1"}), "run.toml"); }),
      HasSubstr("1000003 characters; expected at most 1000"));
  EXPECT_THAT(said_of_groups([] {
                clip_groups_of(with_groups({"a: 1", "a: 2"}), "run.toml");
              }),
              HasSubstr("there already"));
}

TEST(ClipConfig, EachParameterIsInOneGroupAtMostAndEachGroupHasOne) {
  const auto parameter = [](const char* name, bool trained = true) {
    return std::pair(std::string(name), at::zeros({1}).set_requires_grad(trained));
  };
  const std::vector named = {parameter("a.mlp.weight"), parameter("a.norm.weight"),
                             parameter("frozen.bias", false)};
  check_clip_groups(with_groups({}), named);
  check_clip_groups(with_groups({"*.mlp.*: 1", "*norm.weight: 2"}), named);
  EXPECT_THAT(said_of_groups([&] {
                check_clip_groups(with_groups({"*.mlp.*: 1", "a.*: 2"}), named);
              }),
              HasSubstr("a.mlp.weight in two groups, *.mlp.* and a.*"));
  EXPECT_THAT(said_of_groups([&] { check_clip_groups(with_groups({"*.mlp: 1"}), named); }),
              HasSubstr("*.mlp, which fits no trained parameter"));
  EXPECT_THAT(said_of_groups([&] { check_clip_groups(with_groups({"frozen.*: 1"}), named); }),
              HasSubstr("fits no trained"));
}

}  // namespace
}  // namespace isograd
