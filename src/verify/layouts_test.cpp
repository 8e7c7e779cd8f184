// Which layouts, accumulations and meshes a run is verified on, which axes are blamed, and a fault that only
// two axes together have.
#include "verify/run.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "train/config_table.hpp"
#include "train/trainer_testing.hpp"
#include "verify/present.hpp"
#include "verify/test_problem.hpp"

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

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using One = MeshesTried::One;

std::vector<std::string> names_of(const ProposedMeshes& proposed) {
  std::vector<std::string> names;
  for (const MeshChoice& mesh : proposed.run) names.push_back(mesh.name);
  return names;
}

// Four heads over two key heads, four layers.
const Heads kHeads = {4, 2};

RunConfig config_of(const std::string& strategy) {
  RunConfig config;
  config.parallel.strategy = strategy;
  auto& shape = config.model.shape;
  shape.layers = 4, shape.hidden = 16, shape.heads = 4, shape.key_value_heads = 2, shape.head_dim = 4;
  return config;
}

TEST(Meshes, AllThatARunAllowsAreProposed) {
  EXPECT_THAT(names_of(propose_meshes(config_of("bucketed"), 1, kHeads)), ElementsAre("one rank"));
  const ProposedMeshes two = propose_meshes(config_of("zero2"), 2, kHeads);
  EXPECT_THAT(names_of(two), ElementsAre("dp_shard 2", "dp_replicate 2", "cp_ulysses 2", "cp_ring 2", "tp 2",
                                         "pp 2"));  // the configured one first
  EXPECT_THAT(two.left, IsEmpty());
  // Strategies without shards have one axis of data, and a mean of replicas' means keeps its replicas.
  EXPECT_THAT(names_of(propose_meshes(config_of("bucketed"), 2, kHeads)),
              ElementsAre("dp_replicate 2", "cp_ulysses 2", "cp_ring 2", "tp 2", "pp 2"));
  RunConfig by_replica = config_of("zero2");
  by_replica.loss.normalise_over = {"dp_shard", "cp_ring", "cp_ulysses"};
  by_replica.parallel.replicas = 2;
  EXPECT_THAT(names_of(propose_meshes(by_replica, 4, kHeads)), Each(HasSubstr("dp_replicate 2")));
}

TEST(Meshes, WhatAModelDoesNotAllowIsSaidOnce) {
  const ProposedMeshes five = propose_meshes(config_of("bucketed"), 5, kHeads);
  EXPECT_THAT(names_of(five), ElementsAre("dp_replicate 5", "cp_ring 5"));
  EXPECT_THAT(five.refused, Contains("parallel.tp: 5 ranks for 4 query heads"));
  EXPECT_THAT(five.refused, Contains("parallel.cp_ulysses: 5 ranks for 4 heads and 2 key heads"));
  EXPECT_THAT(five.refused, Contains("parallel.pp: 5 stages for 4 layers"));
  EXPECT_EQ(std::set<std::string>(five.refused.begin(), five.refused.end()).size(), five.refused.size());
  RunConfig experts = config_of("zero3");
  EXPECT_THAT(names_of(propose_meshes(experts, 4, kHeads, 1000)), Not(Contains(HasSubstr("ep "))));
  experts.model.shape.family = "qwen3_moe";
  experts.model.shape.query_key_norm = true;
  experts.model.shape.experts = {.count = 6, .per_token = 2, .feed_forward = 12};
  EXPECT_THAT(names_of(propose_meshes(experts, 4, kHeads, 1000)),
              AllOf(Contains("dp_shard 4 x ep 2"), Contains("pp 2 x cp_ring 2 x ep 2")));
}

TEST(Meshes, ASubsetCoversAxesPairsAndSizes) {
  const auto shown = [](const std::vector<std::string>& names) {
    std::set<std::string> all;
    for (const std::string& name : names) {
      std::vector<std::string> axes;
      for (std::size_t at = 0; at < name.size();
           at = name.find(" x ", at) == std::string::npos ? name.size() : name.find(" x ", at) + 3)
        axes.push_back(name.substr(at, name.find(" x ", at) - at));
      for (const std::string& one : axes) {
        all.insert(one);
        if (axes.size() == 1) all.insert("alone " + one.substr(0, one.find(' ')));
        for (const std::string& other : axes)
          all.insert(one.substr(0, one.find(' ')) + "&" + other.substr(0, other.find(' ')));
      }
    }
    return all;
  };
  for (const int ranks : {8, 12}) {
    const ProposedMeshes whole = propose_meshes(config_of("zero2"), ranks, kHeads, 1000),
                         part = propose_meshes(config_of("zero2"), ranks, kHeads);
    EXPECT_THAT(whole.left, IsEmpty());
    EXPECT_GT(whole.run.size(), kMostMeshes);
    EXPECT_EQ(part.run.size() + part.left.size(), whole.run.size());
    EXPECT_LT(part.run.size(), whole.run.size());
    EXPECT_EQ(shown(names_of(part)), shown(names_of(whole)));
    std::printf("%d ranks: %zu of %zu meshes cover all\n", ranks, part.run.size(), whole.run.size());
  }
}

One mesh(const std::vector<Axis>& axes, bool failed = false) {
  One one{.name = {}, .axes = axes, .layouts = 1, .failed = failed};
  for (const Axis& axis : axes)
    one.name += fmt::format("{}{} {}", one.name.empty() ? "" : " x ", axis.name, axis.size);
  return one;
}

TEST(GuiltyAxes, AreTheFewestThatTellFailuresApart) {
  EXPECT_THAT(guilty_axes({mesh({{"tp", 4}}), mesh({{"dp_shard", 4}})}), IsEmpty());
  EXPECT_THAT(guilty_axes({mesh({{"dp_shard", 4}}), mesh({{"tp", 4}}, true),
                           mesh({{"dp_shard", 2}, {"tp", 2}}, true), mesh({{"cp_ring", 4}})}),
              ElementsAre("wrong along tp: on every mesh with it (tp 4, dp_shard 2 x tp 2), right without "
                          "(dp_shard 4)"));
  EXPECT_THAT(guilty_axes({mesh({{"tp", 4}}), mesh({{"cp_ring", 4}}), mesh({{"dp_shard", 2}, {"tp", 2}}),
                           mesh({{"tp", 2}, {"cp_ring", 2}}, true)}),
              ElementsAre("right with tp alone (tp 4) and with cp_ring alone (cp_ring 4), wrong together "
                          "(tp 2 x cp_ring 2)"));
  // No mesh has cp_ring alone.
  EXPECT_THAT(guilty_axes({mesh({{"tp", 4}}), mesh({{"dp_shard", 2}, {"cp_ring", 2}}),
                           mesh({{"tp", 2}, {"cp_ring", 2}}, true)}),
              ElementsAre("right with tp alone (tp 4) and with cp_ring without tp (dp_shard 2 x cp_ring 2), "
                          "wrong together (tp 2 x cp_ring 2)"));
  const std::vector<std::string> three =
      guilty_axes({mesh({{"pp", 2}, {"tp", 4}}), mesh({{"pp", 2}, {"ep", 4}}), mesh({{"tp", 2}, {"ep", 4}}),
                   mesh({{"pp", 2}, {"tp", 2}, {"ep", 2}}, true)});
  EXPECT_THAT(three,
              ElementsAre(AllOf(StartsWith("right with pp and tp alone (pp 2 x tp 4) and with pp and ep"),
                                HasSubstr("wrong together (pp 2 x tp 2 x ep 2)"))));
  EXPECT_THAT(guilty_axes({mesh({{"tp", 4}}, true), mesh({{"dp_shard", 4}}, true)}),
              ElementsAre(HasSubstr("wrong on each of the 2 meshes")));
  // A matter of size: tp 4 is wrong, tp 2 is not.
  EXPECT_THAT(guilty_axes({mesh({{"tp", 4}}, true), mesh({{"dp_shard", 2}, {"tp", 2}})}),
              ElementsAre(StartsWith("wrong on tp 4, though")));
}

// B23: each of the two sums is right by itself. What is summed over the ring is no longer summed along tp.
const ChangeProblem kOneSumForTwo = [](VerifyProblem& problem, World&) {
  for (LayoutUnderTest& layout : problem.layouts)
    layout.make_from_model = [right = layout.make_from_model](const VerifyModel& model, const Group& group) {
      VerifyModel wrong = model;
      if (model.placed && model.placed->mesh().size({"cp_ring"}) > 1) {
        Layout::Named placements = model.placed->placements();
        for (auto& [name, placement] : placements) placement.summed.erase("tp");
        wrong.placed = std::make_shared<Layout>(model.placed->mesh(), placements);
      }
      return right(wrong, group);
    };
};

class MeshesVerified : public testing_runs::TinyRuns {
 protected:
  Verdict on(int ranks, const ChangeProblem& change) const {
    RunConfig config = tiny("meshes");
    config.model.shape.layers = 2;
    return verify_test::verify_on(ranks, config, {kAllMeshes}, change);
  }
};

TEST_F(MeshesVerified, TheRightOnesAreProved) {
  const Verdict verdict = on(2, {});
  EXPECT_TRUE(verdict.passed) << to_text(verdict);
  EXPECT_EQ(verdict.meshes.tried.size(), 5u);  // dp, ring, Ulysses, tp, pp
  EXPECT_EQ(verdict.layouts.size(), 5u);
  EXPECT_THAT(verdict.meshes.guilty, IsEmpty());
  EXPECT_THAT(to_text(verdict), HasSubstr("5 of 5 that are possible were run, 5 of these are proved"));
}

// A mesh that cannot be made of this model is no failure; one that was made and then cannot make its step is.
TEST_F(MeshesVerified, AnErrorInAStepIsNoRefusal) {
  for (const bool made : {false, true}) {
    const Verdict verdict = on(2, [made](VerifyProblem& problem, World&) {
      verify_test::change_model(problem, [made](VerifyModel& model) {
        if (!model.cut || !model.loss_terms) return;  // not cut, or a stage of a pipeline
        const auto along_tp = std::make_shared<bool>(false);
        model.cut = [cut = model.cut, along_tp, made](const Mesh& mesh) {
          *along_tp = mesh.grid().has("tp") && mesh.size({"tp"}) > 1;
          if (*along_tp && !made) refuse("the planted model", "tp 2", "no tp", "Take it off");
          return cut(mesh);
        };
        model.loss_terms = [loss = model.loss_terms, along_tp](const Batch& batch) {
          if (*along_tp) refuse("the planted step", "tp 2", "no tp", "Take it off");
          return loss(batch);
        };
      });
    });
    EXPECT_EQ(verdict.passed, !made) << to_text(verdict);
    EXPECT_EQ(verdict.meshes.tried.size(), made ? 5u : 4u)
        << ::testing::PrintToString(verdict.meshes.refused);
    EXPECT_EQ(std::ranges::count_if(verdict.meshes.tried, [](const One& one) { return one.failed > 0; }),
              made);
    EXPECT_THAT(to_text(verdict), HasSubstr(made ? "its step ended in an error" : "the planted model: tp 2"));
    EXPECT_EQ(verdict.meshes.guilty.size(), made ? 1u : 0u);
    EXPECT_THAT(to_text(verdict),
                ::testing::Conditional(made, HasSubstr("wrong along tp"), Not(HasSubstr("wrong along"))));
  }
}

TEST_F(MeshesVerified, TwoAxesThatAreWrongTogetherAreNamed) {
  const Verdict verdict = on(4, kOneSumForTwo);
  EXPECT_FALSE(verdict.passed);
  for (const One& one : verdict.meshes.tried) {
    const auto has = [&](const char* axis) { return one.name.find(axis) != std::string::npos; };
    EXPECT_EQ(one.failed > 0, has("cp_ring") && has("tp")) << one.name << ": " << one.finding;
  }
  ASSERT_EQ(verdict.meshes.guilty.size(), 1u) << to_text(verdict);
  const std::string sentence = verdict.meshes.guilty[0];
  EXPECT_THAT(
      sentence,
      AllOf(HasSubstr(
                "right with cp_ring alone (cp_ring 4) and with tp without cp_ring (dp_replicate 2 x tp 2)"),
            HasSubstr("wrong together (cp_ring 2 x tp 2)")));
  EXPECT_THAT(to_text(verdict), AllOf(HasSubstr("axes: " + sentence), HasSubstr("not_summed_over_axis")));
  const auto json = nlohmann::json::parse(to_json(verdict));
  EXPECT_EQ(json["meshes"]["guilty"][0], sentence);
  EXPECT_EQ(json["meshes"]["tried"].size(), verdict.meshes.tried.size());
  const auto page = root_ / "verdict.html";
  write_verify_page(verdict, verify_wording(verdict), page);
  EXPECT_THAT(read_file(page), AllOf(HasSubstr(sentence), HasSubstr("Meshes of 4 ranks")));
}

}  // namespace

}  // namespace isograd
