// The planner's plain data: sizes of models against models, names against those that `train` knows.
#include "isograd/planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "isograd/model.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "plan/problem.hpp"
#include "train/config.hpp"

namespace isograd::planner {
namespace {

double trained_elements(const DecoderConfig& config) {
  double sum = 0;
  for (const auto& [name, tensor] : DecoderLM::without_values(config, at::kFloat)->named())
    if (tensor.requires_grad()) sum += static_cast<double>(tensor.numel());
  return sum;
}

DecoderConfig mixture(const char* family, std::int64_t shared) {
  DecoderConfig config;
  config.family = family, config.layers = 3;
  const bool mixtral = config.family == "mixtral";  // its files have one width, and experts in every layer
  if (mixtral) config.feed_forward = 96;
  config.query_key_norm = config.family == "qwen3_moe" || config.family == "dots1";
  config.attention_bias = config.family == "qwen2_moe";
  config.experts = {
      .count = 6, .per_token = 2, .feed_forward = 96, .shared_feed_forward = shared, .dense_layers = {0}};
  if (mixtral) config.experts.dense_layers.clear();
  config.experts.sigmoid = config.family == "dots1";
  return config;
}

TEST(PlannerShapes, CountTheParametersOfEveryFamily) {
  DecoderConfig biased;
  biased.key_value_heads = 2, biased.tied_output = true;
  biased.attention_bias = biased.output_bias = biased.mlp_bias = true;
  DecoderConfig normed;
  normed.family = "qwen3";
  normed.query_key_norm = true;
  for (const DecoderConfig& config :
       {DecoderConfig{}, biased, normed, mixture("mixtral", 0), mixture("qwen2_moe", 160),
        mixture("qwen3_moe", 0), mixture("dots1", 192)}) {
    const ModelShape shape = shape_of(config, "test");
    EXPECT_EQ(shape.parameters(), trained_elements(config)) << config.family;
    EXPECT_EQ(shape_of(decoder_of(shape), "test").parameters(), shape.parameters());
  }
}

TEST(PlannerShapes, HaveThePublishedSizes) {
  const ModelShape llama{.layers = 32,
                         .hidden = 4096,
                         .heads = 32,
                         .key_value_heads = 8,
                         .head_dim = 128,
                         .feed_forward = 14336,
                         .vocabulary = 128256};
  EXPECT_EQ(llama.parameters(), 8030261248.0);
  EXPECT_EQ(llama.active_parameters(), llama.parameters());
  const ModelShape mixtral{.family = "mixtral",
                           .layers = 32,
                           .hidden = 4096,
                           .heads = 32,
                           .key_value_heads = 8,
                           .head_dim = 128,
                           .feed_forward = 14336,
                           .vocabulary = 32000,
                           .experts = {.count = 8, .per_token = 2, .feed_forward = 14336}};
  EXPECT_EQ(mixtral.parameters(), 46702792704.0);
  EXPECT_EQ(mixtral.active_parameters(), 12879925248.0);
}

TEST(PlannerNames, AreThoseOfTheConfiguration) {
  const auto strategies = strategy_names(), schedules = pipeline_schedules();
  for (const Strategy strategy : {Strategy::kBucketed, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3})
    EXPECT_NE(std::ranges::find(strategies, name_of(strategy)), strategies.end());
  for (const Schedule schedule : {Schedule::kOneFOneB, Schedule::kGPipe, Schedule::kInterleaved,
                                  Schedule::kZeroBubbleH1, Schedule::kZeroBubbleV})
    EXPECT_NE(std::ranges::find(schedules, name_of(schedule)), schedules.end());
}

TEST(PlannerWork, IsTheWorkedExampleOfTheRecipe) {
  EXPECT_EQ((Work{.tokens = 4194304, .sequence = 4096}).samples(), 1024);
}

}  // namespace
}  // namespace isograd::planner
