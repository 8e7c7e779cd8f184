// What goes to other ranks' experts and back is, to the byte, what the choices of tokens say: with uneven
// routing, ranks without tokens, and everything that makes a forward twice.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "experts_run.hpp"
#include "isograd/expert_parallel.hpp"
#include "tensor_step.hpp"

namespace isograd {
namespace {

using namespace expert_runs;

DecoderConfig shape(std::int64_t experts) {
  DecoderConfig config = small_config("qwen3");
  config.family = "qwen3_moe";
  config.vocabulary = 31, config.hidden = 12, config.heads = 4, config.key_value_heads = 2;
  config.head_dim = 4, config.feed_forward = 20;
  config.experts = {.count = experts, .per_token = 2, .feed_forward = 7};
  return config;
}

enum class Tokens { kUneven, kNoneOnTheFirst, kAllToFew };

// A micro-batch of this rank's own.
Batch batch_of(int rank, Tokens tokens, std::int64_t vocabulary) {
  if (rank == 0 && tokens == Tokens::kNoneOnTheFirst) return make_batch({}, vocabulary, 1);
  return make_batch({std::int64_t{5} + 4 * rank, 3}, vocabulary, static_cast<std::uint64_t>(rank) + 1);
}

// Formula and count of every rank, with choices written down by plain code.
TEST(ExpertParallelTraffic, IsTheFormulas) {
  for (const int ep : {2, 3, 4})
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
      for (const Tokens tokens : {Tokens::kUneven, Tokens::kNoneOnTheFirst, Tokens::kAllToFew}) {
        const DecoderConfig config = shape(5);
        ExpertTrafficPlan plan{
            .choices = std::vector(static_cast<std::size_t>(ep), std::vector<std::int64_t>(5, 0)),
            .hidden = config.hidden,
            .bytes = static_cast<std::int64_t>(c10::elementSize(type)),
            .exchanges = config.layers};
        std::vector<std::int64_t> sent(static_cast<std::size_t>(ep));
        run_ranks(ep, [&](World& world) {
          const auto rank = static_cast<std::size_t>(world.rank);
          const Mesh mesh(world,
                          Grid({{"dp_shard", ep}}).viewed({"dp_shard"}, {{"edp", 1}, {kExpertAxis, ep}}));
          const auto model = tensor::whole_model(config, type);
          deal_experts(*model, mesh);
          model->set_choice_of_experts([&](const Batch&, std::int64_t, const ExpertScores&,
                                           const at::Tensor& likeliest) {
            const at::Tensor chosen =
                tokens == Tokens::kAllToFew ? at::tensor({4, 1}, at::kLong).expand_as(likeliest) : likeliest;
            for (std::int64_t t = 0; t < chosen.size(0); ++t)
              for (std::int64_t j = 0; j < 2; ++j)
                ++plan.choices[rank][static_cast<std::size_t>(chosen[t][j].item<std::int64_t>())];
            return chosen.contiguous();
          });
          Group experts = mesh.along({kExpertAxis}, kExpertGroup);
          const std::int64_t before = experts.traffic().bytes();
          const Batch batch = batch_of(world.rank, tokens, config.vocabulary);
          model->hidden(batch).to(at::kDouble).square().sum().backward();
          sent[rank] = experts.traffic().bytes() - before;
        });
        for (int rank = 0; rank < ep; ++rank)
          EXPECT_EQ(sent[static_cast<std::size_t>(rank)], expert_traffic_bytes(plan, rank))
              << ep << " ranks, " << c10::toString(type) << ", rank " << rank;
        // Of two ranks each sends what the other gets back; of more they differ.
        EXPECT_EQ(sent[0] == sent[1], ep == 2) << ep << " ranks";
      }
}

class ExpertsTraffic : public ExpertRuns {};

TEST_F(ExpertsTraffic, OfRunsIsTheFormulas) {
  struct Way {
    const char* name;
    int ranks;
    void (*set)(RunConfig&);
  };
  const Way ways[] = {
      {"two", 2, [](RunConfig& c) { c.parallel.ep = 2; }},
      {"three", 3, [](RunConfig& c) { c.parallel.ep = 3; }},
      // Five packs one at a time: in the last round some ranks have none.
      {"ranks-out-of-packs", 3, [](RunConfig& c) { c.parallel.ep = 3, c.batch.packs_per_micro_batch = 1; }},
      {"copies", 4, [](RunConfig& c) { c.parallel.ep = 2, c.parallel.strategy = "zero2"; }},
      {"no-pass-ahead", 2, [](RunConfig& c) { c.parallel.ep = 2, c.loss.balance = 0; }},
      {"halves", 3, [](RunConfig& c) { c.parallel.ep = 3, c.parallel.expert_overlap = "halves"; }},
      {"checkpointed", 2,
       [](RunConfig& c) {
         c.parallel.ep = 2, c.parallel.strategy = "zero3", c.parallel.share_parameters = "off";
         c.parallel.checkpoint_activations = true;
       }},
      {"ring", 4, [](RunConfig& c) { c.parallel.ep = 4, c.parallel.cp_ring = 2; }},
      {"tensor", 4, [](RunConfig& c) { c.parallel.ep = 2, c.parallel.tp = 2; }},
      {"stages", 4,
       [](RunConfig& c) { c.parallel.ep = 2, c.parallel.pp = 2, c.batch.packs_per_micro_batch = 1; }},
  };
  for (const char* dtype : {"float32", "bfloat16"})
    for (const Way& way : ways) {
      RunConfig config = plain(fmt::format("{}-{}", way.name, dtype), dtype);
      config.run.memory = true;
      config.verify.at_end = false;
      config.train.steps = 2;
      way.set(config);
      const Run result = run(config, way.ranks);
      for (const Outcome& outcome : result.outcomes) {
        ASSERT_TRUE(outcome.to_experts) << way.name;
        EXPECT_GT(outcome.to_experts->bytes, 0) << way.name << dtype;
        EXPECT_EQ(outcome.to_experts->bytes, outcome.to_experts->by_formula) << way.name << dtype;
      }
    }
  RunConfig without = plain("without");
  without.run.memory = true;
  EXPECT_FALSE(run(without, 2).outcomes[0].to_experts);
}

// By hand.
TEST(ExpertParallelTraffic, FormulaOfAFewChoices) {
  ExpertTrafficPlan plan{.choices = {{3, 1, 4}, {1, 5, 9}}, .hidden = 7, .bytes = 4, .exchanges = 2};
  // Experts 0 and 1 are rank 0's: 4 + 6 rows to and from each of the two, twice 28 bytes; 2 · 3 counts.
  EXPECT_EQ(expert_traffic_bytes(plan, 0), 2 * 10 * 28 + 2 * 3 * 8);
  EXPECT_EQ(expert_traffic_bytes(plan, 1), 2 * 10 * 28 + 2 * 3 * 8);
  plan.forwards = 3;
  EXPECT_EQ(expert_traffic_bytes(plan, 0), 4 * 10 * 28 + 3 * 2 * 3 * 8);
  plan.choices = {{3, 1, 4}, {1, 5, 9}, {2, 6, 5}};  // an expert each
  plan.forwards = 1;
  EXPECT_EQ(expert_traffic_bytes(plan, 2), 2 * (4 + 9 + 2 + 6) * 28 + 2 * 2 * 3 * 8);
}

}  // namespace
}  // namespace isograd
