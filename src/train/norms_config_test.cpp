// train.clip_groups and train.part_norms: what is read of them, and what is refused.
#include <ATen/ATen.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "train/build.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

NormParts parts_by(const char* by, const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const std::string& name : names)
    named.emplace_back(name, at::zeros({1}).requires_grad_(name.find("frozen") == std::string::npos));
  RunConfig config;
  config.train.part_norms = by;
  return norm_parts_of(config, named);
}

TEST(NormParts, AreGroupsLayersOrParameters) {
  const std::vector<std::string> names = {"model.embed_tokens.weight",
                                          "model.layers.0.mlp.up_proj.weight",
                                          "model.layers.0.mlp.experts.3.up_proj.weight",
                                          "model.layers.10.mlp.gate.weight",
                                          "model.layers.10.frozen.weight",
                                          "model.norm.weight",
                                          "scale"};
  EXPECT_THAT(parts_by("off", names).names, IsEmpty());
  EXPECT_THAT(parts_by("groups", names).names, ElementsAre("dense", "experts"));
  EXPECT_THAT(parts_by("groups", {names[0], names[1]}).names, ElementsAre("dense"));
  const NormParts layers = parts_by("layers", names);
  EXPECT_THAT(layers.names,
              ElementsAre("model.embed_tokens", "model.layers.0", "model.layers.10", "model.norm", "scale"));
  EXPECT_EQ(layers.of(names[2]), 1);
  EXPECT_EQ(layers.of(names[3]), 2);
  EXPECT_EQ(layers.of("model.layers.10.frozen.weight"), -1);
  EXPECT_EQ(layers.of("unknown"), -1);
  const NormParts each = parts_by("parameters", names);
  EXPECT_EQ(each.names.size(), names.size() - 1);
  EXPECT_EQ(each.names[static_cast<std::size_t>(each.of("scale"))], "scale");
}

TEST(NormParts, AModelThatIsAListHasItsPlacesAsLayers) {
  EXPECT_THAT(parts_by("layers", {"0.weight", "0.fc.1.bias", "2.weight"}).names, ElementsAre("0", "2"));
}

}  // namespace
}  // namespace isograd
