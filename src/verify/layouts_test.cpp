// Which layouts and accumulations a run is verified on.
#include "verify/layouts.hpp"

#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

TEST(Layouts, AreReadAsTheyAreWritten) {
  for (const char* text : {"naive", "zero2:replicas=2", "zero3:replicas=4:share=on", "bucketed:share=off"})
    EXPECT_EQ(parse_layout(text).text(), text);
  for (const char* text :
       {"", "magic", "zero2:", "zero2:replicas=0", "zero2:replicas=two", "naive:replicas=2",
        "zero2:share=maybe", "zero2 ", "zero2:replicas=99999999999999999999"})
    EXPECT_THROW(parse_layout(text), ConfigError) << text;
}

TEST(Layouts, AMeanOfReplicasKeepsItsReplicas) {
  RunConfig config;
  config.loss.normalise_over = {"dp_shard"};
  config.parallel.strategy = "zero2";
  config.parallel.replicas = 2;
  for (const auto& choice : layout_matrix(config, 4, true)) EXPECT_EQ(choice.replicas, 2) << choice.text();
  config.loss.normalise_over = RunConfig().loss.normalise_over;
  EXPECT_GT(layout_matrix(config, 4, true).size(), layout_matrix(config, 4, false).size());
}

// Four packs for four ranks are four to the one cp group that all of them are in.
TEST(Layouts, AccumulationIsCutOtherwiseWhereRanksShareSamples) {
  RunConfig config;
  config.batch.packs_per_step = 4;
  config.batch.packs_per_micro_batch = 4;
  const TaskKind& text = kind_of(config);
  EXPECT_EQ(text.accumulations(config, 4).size(), 1u);  // a pack for each
  for (const bool ring : {true, false}) {
    (ring ? config.parallel.cp_ring : config.parallel.cp_ulysses) = 2;
    const auto cuts = text.accumulations(config, 4);
    ASSERT_EQ(cuts.size(), 2u);
    EXPECT_EQ(text.accumulation_text(cuts[0]), "4 to a micro-batch");
    EXPECT_EQ(text.accumulation_text(cuts[1]), "1 to a micro-batch");
  }
  config.batch.packs_per_micro_batch = 1;
  EXPECT_EQ(text.accumulation_text(text.accumulations(config, 4).at(1)), "4 to a micro-batch");
}

}  // namespace
}  // namespace isograd
