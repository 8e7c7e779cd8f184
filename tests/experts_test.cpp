// A decoder whose experts are dealt to ranks: its gradient, loss and norm are those of one process with all
// tokens and all experts, under every strategy and beside every other data axis.
#include <gmock/gmock.h>

#include <atomic>

#include "experts_step.hpp"
#include "full_tests.hpp"

namespace isograd {
namespace {

using namespace experts;
using tensor::Errors;

class ExpertParallel : public ::testing::TestWithParam<Cell> {};

const char* const kStrategies[] = {"naive",  "bucketed",     "zero1", "zero2",      "zero2 once",
                                   "shared", "shared zero2", "zero3", "zero3 once", "zero3 shared"};

// With ISOGRAD_FULL_TESTS=1 every ep with every number of experts, strategy, mean and accumulation, alone and
// beside copies, replicas and a ring; otherwise each of these with some of the others.
std::vector<Cell> cells() {
  std::vector<Cell> all;
  if (std::getenv("ISOGRAD_FULL_TESTS")) {
    struct Ranks {
      int ranks, ep, ring = 1, replicas = 1, tp = 1;
    };
    for (const Mean mean : {Mean::kTargets, Mean::kSamples})
      for (const int accumulation : {1, 3})
        for (const char* strategy : kStrategies)
          for (const auto& [experts, each] : {std::pair{4, 2}, {5, 2}, {8, 2}, {60, 4}})
            for (const Ranks& on : {Ranks{2, 1},
                                    {2, 2},
                                    {3, 3},
                                    {4, 4},
                                    {8, 8},
                                    {4, 2},
                                    {6, 3},
                                    {4, 2, 2},
                                    {4, 4, 2},
                                    {4, 2, 1, 2},
                                    {8, 2, 2, 2},
                                    {1, 1, 1, 1, 2},
                                    {2, 2, 1, 1, 2},
                                    {4, 2, 1, 1, 2},
                                    {2, 2, 2, 1, 2}})
              if (on.ep <= experts)
                all.push_back({.ranks = on.ranks,
                               .ep = on.ep,
                               .ring = on.ring,
                               .replicas = on.replicas,
                               .tp = on.tp,
                               .experts = experts,
                               .each = each,
                               .strategy = strategy,
                               .mean = mean,
                               .accumulation = accumulation,
                               .checkpointed = all.size() % 3 == 0,
                               .ties = all.size() % 5 == 0,
                               .shared = all.size() % 4 == 0,
                               .sigmoid = all.size() % 7 == 0,
                               .sequence_parallel = all.size() % 2 == 0,
                               .overlap = static_cast<ExpertOverlap>(all.size() / 3 % 3)});
    return all;
  }
  for (const char* strategy : kStrategies) {
    all.push_back({.ranks = 4, .ep = 2, .strategy = strategy, .checkpointed = true});
    all.push_back(
        {.ranks = 2, .experts = 4, .strategy = strategy, .mean = Mean::kSamples, .accumulation = 1});
  }
  for (const char* strategy : {"zero1", "shared", "zero3"}) {
    all.push_back({.ranks = 4, .ep = 2, .replicas = 2, .strategy = strategy, .mean = Mean::kSamples});
    all.push_back({.ranks = 4, .ep = 4, .replicas = 2, .strategy = strategy});
    all.push_back({.ranks = 4, .ep = 4, .ring = 2, .strategy = strategy});
    all.push_back({.ranks = 3, .ep = 3, .experts = 60, .each = 4, .strategy = strategy});
    all.push_back({.ranks = 6, .ep = 3, .experts = 5, .strategy = strategy, .ties = true});
  }
  for (const bool sequence_parallel : {true, false})
    for (const bool shared : {true, false}) {
      all.push_back({.ranks = 1, .ep = 1, .tp = 3, .shared = shared, .sequence_parallel = sequence_parallel});
      all.push_back({.ranks = 2,
                     .ep = 2,
                     .tp = 2,
                     .strategy = shared ? "zero3" : "zero1",
                     .shared = shared,
                     .sequence_parallel = sequence_parallel});
      all.push_back({.ranks = 4,
                     .ep = 2,
                     .ring = shared ? 2 : 1,
                     .tp = 2,
                     .strategy = "shared",
                     .mean = Mean::kSamples,
                     .shared = shared,
                     .sequence_parallel = sequence_parallel});
    }
  all.push_back({.ranks = 2, .ep = 1, .shared = true});
  for (const char* strategy : kStrategies) {
    all.push_back({.ranks = 3, .ep = 3, .experts = 8, .each = 3, .strategy = strategy, .sigmoid = true});
    all.push_back({.ranks = 4,
                   .ep = 2,
                   .ring = 2,
                   .strategy = strategy,
                   .mean = Mean::kSamples,
                   .checkpointed = true,
                   .sigmoid = true});
  }
  for (const bool sequence_parallel : {true, false})
    all.push_back({.ranks = 2,
                   .ep = 2,
                   .tp = 2,
                   .experts = 4,
                   .strategy = "zero1",
                   .sigmoid = true,
                   .sequence_parallel = sequence_parallel});
  for (const ExpertOverlap overlap : {ExpertOverlap::kNone, ExpertOverlap::kHalves})
    for (const auto& [strategy, shared] : {std::pair{"bucketed", true}, {"zero3", true}, {"shared", false}}) {
      all.push_back({.ranks = 4, .ep = 2, .strategy = strategy, .checkpointed = true, .shared = shared});
      all.push_back({.ranks = 4, .ep = 4, .ring = 2, .strategy = strategy, .ties = true, .sigmoid = shared});
      all.push_back({.ranks = 2, .tp = 2, .strategy = strategy, .shared = shared});
      for (std::size_t last = all.size() - 3; last < all.size(); ++last) all[last].overlap = overlap;
    }
  // All tokens to one expert.
  for (const ExpertOverlap overlap : {ExpertOverlap::kShared, ExpertOverlap::kHalves})
    all.push_back({.ranks = 4, .ep = 4, .each = 1, .strategy = "zero1", .ties = true, .overlap = overlap});
  all.push_back({.ranks = 8, .ep = 8, .experts = 8, .accumulation = 1});
  all.push_back({.ranks = 5, .ep = 5, .strategy = "zero2"});
  all.push_back({.ranks = 8, .ep = 2, .ring = 2, .replicas = 2, .strategy = "zero3", .mean = Mean::kSamples});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cells, ExpertParallel, ::testing::ValuesIn(cells()));

TEST_P(ExpertParallel, GradientLossAndNormAreOneProcesss) {
  const Cell cell = GetParam();
  const Gradient wanted = one_process(cell, at::kDouble, {});
  const Found found = train(cell, at::kDouble);
  EXPECT_LT(tensor::largest_error(found.gradient, wanted), 1e-10);
  for (const StepReport& report : found.reports) {
    EXPECT_NEAR(report.loss, wanted.loss, 1e-10 * wanted.loss);
    EXPECT_NEAR(report.norm, wanted.norm(), 1e-10 * wanted.norm());
  }
}

// fp32 or bf16: cells take turns, and each takes both with ISOGRAD_FULL_TESTS=1.
struct Lower {
  Cell cell;
  at::ScalarType type;
  friend void PrintTo(const Lower& lower, std::ostream* out) {
    PrintTo(lower.cell, out);
    *out << ", " << c10::toString(lower.type);
  }
};
std::vector<Lower> lower_cells() {
  std::vector<Lower> all;
  const auto every = cells();
  for (std::size_t i = 0; i < every.size(); ++i)
    for (const auto type : {at::kFloat, at::kBFloat16})
      if (full_tests() || takes_first(i) == (type == at::kFloat)) all.push_back({every[i], type});
  return all;
}
class ExpertParallelLower : public ::testing::TestWithParam<Lower> {};
INSTANTIATE_TEST_SUITE_P(Cells, ExpertParallelLower, ::testing::ValuesIn(lower_cells()));

TEST_P(ExpertParallelLower, NoWorseThanOneProcess) {
  const auto& [cell, type] = GetParam();
  Choices choices;
  const Gradient exact = one_process(cell, at::kDouble, recorded(choices));
  const Errors found = tensor::errors(train(cell, type, replayed(choices)).gradient, exact);
  // E2: four times what one process has, the most of up to 16 at other values (tensor_test.cpp).
  Errors alone;
  std::vector<std::string> outside;
  for (std::uint64_t draw = 0; draw < 16 && (draw == 0 || !outside.empty()); ++draw) {
    outside.clear();
    Choices of_draw;
    const Gradient exact_here = draw == 0 ? exact : one_process(cell, at::kDouble, recorded(of_draw), draw);
    const Choices& here = draw == 0 ? choices : of_draw;
    for (const auto& [name, error] :
         tensor::errors(one_process(cell, type, replayed(here), draw), exact_here))
      alone[name] = std::max(alone[name], error);
    for (const auto& [name, error] : found)
      if (!(error <= 4 * alone.at(name))) outside.push_back(name);
  }
  EXPECT_THAT(outside, ::testing::IsEmpty()) << c10::toString(type);
}

// What works on this rank's part alone is summed along tp: routers where the tokens are cut, and nothing of
// them where every rank has the same tokens.
TEST(ExpertParallelPlanted, ARouterSummedWronglyAlongTpIsSeen) {
  for (const bool sequence_parallel : {true, false}) {
    Cell cell{.ranks = 2, .ep = 2, .tp = 2, .sequence_parallel = sequence_parallel};
    const Gradient wanted = one_process(cell, at::kDouble, {});
    cell.change_placements = [&](TrainableParameters& parameters) {
      for (auto& [name, placement] : parameters.placements) {
        if (name.find("mlp.gate.weight") == std::string::npos) continue;
        if (sequence_parallel)
          placement.summed.erase("tp");
        else
          placement.summed.insert("tp");
      }
    };
    for (const auto& [name, error] : tensor::errors(train(cell, at::kDouble).gradient, wanted)) {
      if (name.find("mlp.gate.weight") != std::string::npos)
        EXPECT_GT(error, 1e-2) << sequence_parallel << ", " << name;
      else
        EXPECT_LT(error, 1e-10) << sequence_parallel << ", " << name;
    }
  }
}

// Copies of experts that ranks do not add up: the experts are wrong, and nothing else. Without the sum a
// rank's gradient is another one, so that the right cells have something to show.
TEST(ExpertParallelPlanted, AreSeen) {
  for (const char* strategy : {"bucketed", "zero1", "zero3"}) {
    Cell cell{.ranks = 4, .ep = 2, .strategy = strategy};
    const Gradient wanted = one_process(cell, at::kDouble, {});
    ASSERT_LT(tensor::largest_error(train(cell, at::kDouble).gradient, wanted), 1e-10);
    cell.change_placements = [](TrainableParameters& parameters) {
      for (auto& [name, placement] : parameters.placements)
        if (name.find(".experts.") != std::string::npos) placement.summed.erase("edp");
    };
    for (const auto& [name, error] : tensor::errors(train(cell, at::kDouble).gradient, wanted)) {
      if (name.find(".experts.") != std::string::npos)
        EXPECT_GT(error, 1e-2) << strategy << ", " << name;
      else
        EXPECT_LT(error, 1e-10) << strategy << ", " << name;
    }
  }
}

TEST(ExpertParallelAgreement, RanksThatRouteByOtherRulesAreRefused) {
  struct Other {
    const char* name;
    void (*change)(DecoderConfig&, ExpertParallelOptions&);
  };
  const Other others[] = {
      {"model.experts 8 on rank 2, 4 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.count = 8; }},
      {"model.experts_per_token 1 on rank 2, 2 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.per_token = 1; }},
      {"model.normalise_experts 0 on rank 2",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.normalise = false; }},
      {"model.expert_groups 1 on rank 2, 2 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.groups = c.experts.groups_per_token = 1; }},
      {"model.expert_scale 1 on rank 2, 2.5 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.scale = 1; }},
      {"dense layers, their number 0 on rank 2, 1 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.dense_layers = {}; }},
      {"parallel.expert_overlap",
       [](DecoderConfig&, ExpertParallelOptions& o) { o.overlap = ExpertOverlap::kHalves; }},
  };
  for (const int ep : {1, 3})
    for (const Other& other : others) {
      const Cell cell{.ranks = 3, .ep = ep, .experts = 4, .sigmoid = true, .overlap = ExpertOverlap::kNone};
      std::atomic<int> refused = 0;
      run_ranks(cell.ranks, [&](World& world) {
        DecoderConfig config = cell.config();
        ExpertParallelOptions options{.overlap = cell.overlap};
        if (world.rank == 2) other.change(config, options);
        DecoderLM model(config, at::kFloat, 1);
        const Mesh mesh(world, cell.grid());
        const std::string error = error_testing::error_of([&] { deal_experts(model, mesh, {}, options); });
        if (error.find(other.name) != std::string::npos)
          ++refused;
        else
          ADD_FAILURE() << other.name << ": " << error;
      });
      EXPECT_EQ(refused, cell.ranks) << other.name;
    }
}

}  // namespace
}  // namespace isograd
