// Tiny runs of models with experts, and what makes two of them the same run.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "train/trainer_testing.hpp"

namespace isograd::expert_runs {

struct Cell {
  int ranks;
  const char* strategy;
  int ring = 1, replicas = 1;
  std::int64_t packs = 2;  // of a micro-batch
  bool share = true, checkpoint = false;
  std::int64_t ep = 1, tp = 1;
};

inline std::string name_of(const Cell& cell) {
  return fmt::format("{}-{}-ring{}-replicas{}-packs{}{}{}-ep{}-tp{}", cell.ranks, cell.strategy, cell.ring,
                     cell.replicas, cell.packs, cell.share ? "" : "-own-copies",
                     cell.checkpoint ? "-checkpointed" : "", cell.ep, cell.tp);
}

class ExpertRuns : public testing_runs::TinyRuns {
 protected:
  RunConfig plain(const std::string& name, const std::string& dtype = "float64") const {
    RunConfig config = tiny(name, dtype);
    auto& shape = config.model.shape;
    shape.family = "qwen3_moe";
    shape.query_key_norm = true;
    shape.layers = 3;
    shape.experts = {.count = 5, .per_token = 2, .feed_forward = 12, .normalise = false};
    shape.initializer_range = 0.3;  // routers that prefer
    config.loss.balance = 0.1;
    config.loss.router_z = 0.01;
    return config;
  }
  static RunConfig with_sigmoid_routers(RunConfig config) {
    auto& shape = config.model.shape;
    shape.family = "dots1";
    shape.experts.sigmoid = true, shape.experts.normalise = true, shape.experts.scale = 2.5;
    shape.experts.shared_feed_forward = shape.experts.feed_forward;
    config.loss.router_z = 0;
    config.loss.selection_bias_rate = 0.05;  // seen within a few steps
    return config;
  }
  RunConfig cut(RunConfig config, const Cell& cell, const std::string& name) const {
    config.run.directory = (root_ / (name + name_of(cell))).string();
    config.parallel.strategy = cell.strategy;
    config.parallel.cp_ring = cell.ring;
    config.parallel.replicas = cell.replicas;
    config.batch.packs_per_micro_batch = cell.packs;
    config.parallel.checkpoint_activations = cell.checkpoint;
    config.parallel.ep = cell.ep;
    config.parallel.tp = cell.tp;
    if (!cell.share) config.parallel.share_parameters = "off";
    return config;
  }
  static double term(const StepEvent& event, const std::string& name) {
    for (const TermValue& value : event.report.terms)
      if (value.name == name) return value.value;
    return NAN;
  }
  static void expect_same(const Run& found, const Run& wanted, std::size_t skip, const std::string& where) {
    ASSERT_EQ(found.steps.size() + skip, wanted.steps.size()) << where;
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = wanted.steps[i + skip].report;
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, 1e-9 * std::abs(b.norm)) << where << ", step " << i;
      EXPECT_EQ(a.terms.size(), b.terms.size()) << where;
      for (const TermValue& wanted_term : b.terms)
        EXPECT_NEAR(term(found.steps[i], wanted_term.name), wanted_term.value, 1e-9 * wanted_term.value)
            << where << ", " << wanted_term.name;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *wanted.outcomes[0].validation_loss, 1e-9) << where;
  }
};

}  // namespace isograd::expert_runs
