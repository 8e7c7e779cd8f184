// Groups clipped by limits of their own, on meshes: each coefficient is that of one process, from the norms
// of gradients that plain code has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hybrid_testing.hpp"
#include "isograd/optimizer.hpp"

namespace isograd::hybrid {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<ClipGroup> kGroups = {{"*.experts.*", 0.05}, {"*norm.weight", 0}, {"*.mlp.*", 0.02}};
constexpr double kOthers = 0.1;

// By the definition, for the parameters' names alone.
std::size_t plain_group_of(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has(".experts.")) return 0;
  if (name.ends_with("norm.weight")) return 1;
  return has(".mlp.") ? 2 : 3;
}

struct Clipped {
  double off = 0;          // of any parameter's clipped gradient, by its norm
  double coefficient = 0;  // the largest difference of one
  std::vector<double> coefficients{};
};

class HybridClip : public HybridCells {
 protected:
  // `narrow`: the ranks whose norms are added up, where that is not all of them.
  Clipped clipped(const Cell& cell, const std::function<Group(const World&)>& narrow = {}) {
    const RunConfig config = config_for(cell);
    const Wanted& exact = wanted(cell);
    const double limits[] = {kGroups[0].max_norm, kGroups[1].max_norm, kGroups[2].max_norm, kOthers};
    double squares[4] = {}, factors[4];
    for (const auto& [name, gradient] : exact.gradients)
      squares[plain_group_of(name)] += gradient.square().sum().item<double>();
    for (int i = 0; i < 4; ++i)
      factors[i] = limits[i] > 0 ? std::min(1.0, limits[i] / (std::sqrt(squares[i]) + 1e-6)) : 1;
    std::vector<ClipGroup> groups = kGroups;
    if (!cell.has_experts()) groups.erase(groups.begin());
    Clipped result;
    std::mutex mutex;
    run_ranks(cell.ranks(), [&](World& world) {
      VerifyProblem problem = configured_problem(config, world, {config.parallel.strategy}, one_mesh_each());
      problem.step.max_norm = 0;
      auto clip = std::make_unique<ClipsGroups>(sgd({.learning_rate = 1e-3}), groups, kOthers,
                                                narrow ? narrow(world) : world.group);
      const ClipsGroups& asked = *clip;
      Initial initial(problem.make_model(problem.dtype));
      LayoutRun run(problem, problem.layouts[0], initial.model(problem, problem.dtype), world.group,
                    std::move(clip));
      const LayoutRun::RecordedStep made = run.step(problem.local);
      const std::lock_guard lock(mutex);
      const std::size_t absent = kGroups.size() - groups.size();
      for (std::size_t i = 0; i < asked.last().size(); ++i)
        result.coefficient =
            std::max(result.coefficient, off(asked.last()[i].coefficient, factors[i + absent]));
      for (std::size_t i = 0; i < made.names.size(); ++i) {
        const at::Tensor right = exact.gradients.at(made.names[i]) * factors[plain_group_of(made.names[i])];
        const double norm = right.norm().item<double>();
        if (norm > 0)
          result.off =
              std::max(result.off, (made.gradients[i].to(at::kDouble) - right).norm().item<double>() / norm);
      }
      result.coefficients.assign(factors, factors + 4);
    });
    return result;
  }
};

TEST_F(HybridClip, EachGroupHasTheCoefficientOfOneProcess) {
  const Cell text = Cell{}.with(kPacks, "1");
  const Cell moe = text.with(kModel, "experts");
  for (const Cell& cell :
       {text, text.with(kShard, "3").with(kStrategy, "zero3"),
        text.with(kModel, "tied")
            .with(kPp, "2")
            .with(kSchedule, "1f1b")
            .with(kTp, "2")
            .with(kShard, "2")
            .with(kStrategy, "zero1"),
        text.with(kReplicate, "2").with(kRing, "2").with(kTp, "2").with(kStrategy, "zero2"),
        moe.with(kPp, "2")
            .with(kSchedule, "1f1b")
            .with(kTp, "2")
            .with(kShard, "2")
            .with(kEp, "2")
            .with(kStrategy, "zero2"),
        moe.with(kReplicate, "4").with(kEp, "4"),
        moe.with(kShard, "4").with(kEp, "2").with(kStrategy, "zero3")}) {
    const Clipped found = clipped(cell);
    EXPECT_LT(found.off, 1e-10) << cell.name();
    EXPECT_LT(found.coefficient, 1e-10) << cell.name();
    // Each of the limits is one: a common coefficient would not do.
    EXPECT_EQ(found.coefficients[1], 1);
    for (const int group : {2, 3}) EXPECT_LT(found.coefficients[static_cast<std::size_t>(group)], 0.9);
    EXPECT_GT(off(found.coefficients[2], found.coefficients[3]), 0.01);
  }
}

// Norms over the own rank, or the own stage, are seen on every mesh that has others.
TEST_F(HybridClip, ANormOfTheOwnPartIsSeen) {
  const auto own = [](const World&) { return Group::solo(); };
  const Cell text = Cell{}.with(kPacks, "1");
  for (const Cell& cell : {text.with(kTp, "2"), text.with(kShard, "3").with(kStrategy, "zero3"),
                           text.with(kPp, "2").with(kSchedule, "1f1b")}) {
    std::string said;
    double seen = 0;
    try {
      seen = clipped(cell, own).coefficient;
    } catch (const ConfigError& error) {  // a stage that holds nothing of a group
      said = error.what();
    }
    EXPECT_TRUE(seen > 1e-3 || said.find("clip groups") != std::string::npos) << cell.name() << " " << seen;
  }
}

TEST_F(HybridClip, WhatCannotBeIsRefused) {
  const auto made = [](const std::vector<ClipGroup>& groups, double others) {
    return testing_runs::config_error_of(
        [&] { ClipsGroups(sgd({.learning_rate = 1}), groups, others, Group::solo()); });
  };
  EXPECT_EQ(made({{"*", 1}}, 0), "no error");
  EXPECT_THAT(made({{"*.mlp.*", -1}}, 0), AllOf(HasSubstr("limit -1 of *.mlp.*"), HasSubstr("0 or more")));
  EXPECT_THAT(made({}, std::nan("")), HasSubstr("limit nan of other parameters"));
  EXPECT_THAT(made({{"", 1}}, 0), HasSubstr("an empty pattern"));
  EXPECT_THAT(made({{"*.mlp.*", 1}, {"*.mlp.*", 2}}, 0), HasSubstr("*.mlp.*, given twice"));
  at::Tensor weight = at::ones({4}, at::kDouble).requires_grad_();
  const auto layout = bucketed(trainable_parameters({{"weight", weight}}), Group::solo(), {});
  ClipsGroups none(sgd({.learning_rate = 1}), {{"*.bias", 1}}, 0, Group::solo());
  EXPECT_THAT(testing_runs::config_error_of([&] { none.update(layout->buckets(), 1); }),
              AllOf(HasSubstr("*.bias, which fits no parameter"), HasSubstr("leave it out")));
}

}  // namespace
}  // namespace isograd::hybrid
