// train.part_norms: which parts there are, by names alone.
#include "train/norm_parts.hpp"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace isograd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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
