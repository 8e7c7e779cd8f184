// What is computed while tokens travel to experts: gradients are those of one process, no rank waits for one
// that does not come, and a rank that fails ends the others.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>

#include "experts_step.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using namespace experts;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr ExpertOverlap kOverlaps[] = {ExpertOverlap::kNone, ExpertOverlap::kShared, ExpertOverlap::kHalves};

// What is computed when does not change what is computed: the expert that every token goes through, while
// tokens travel or afterwards.
TEST(ExpertParallelOverlap, OfTheSharedExpertChangesNoBit) {
  for (const char* strategy : {"bucketed", "zero3"})
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      Cell cell{.ranks = 3, .ep = 3, .strategy = strategy, .checkpointed = true, .shared = true};
      const Found with = train(cell, type);
      cell.overlap = ExpertOverlap::kNone;
      const Found without = train(cell, type);
      EXPECT_EQ(with.gradient.loss, without.gradient.loss);
      for (const auto& [name, gradient] : with.gradient.of)
        EXPECT_TRUE(gradient.equal(without.gradient.of.at(name))) << strategy << ", " << name;
    }
}

// Halves of the tokens that come back in each other's place, and a half whose copies are computed as the
// other's: the gradient is another one.
TEST(ExpertParallelOverlap, HalvesMistakenForOneAnotherAreSeen) {
  for (const bool on_the_way_back : {true, false}) {
    Cell cell{.ranks = 2, .ep = 2, .overlap = ExpertOverlap::kHalves};
    const Gradient wanted = one_process(cell, at::kDouble, {});
    ASSERT_LT(tensor::largest_error(train(cell, at::kDouble).gradient, wanted), 1e-10);
    cell.change_hooks = [&](ExpertHooks& hooks) {
      hooks.dispatch = [right = hooks.dispatch, on_the_way_back](std::vector<ExpertHooks::Copies> parts,
                                                                 const ExpertHooks::Compute& compute,
                                                                 const std::function<void()>& besides) {
        const bool alike = parts[0].rows.size(0) == parts[1].rows.size(0);
        if (alike && !on_the_way_back) std::swap(parts[0].rows, parts[1].rows);
        auto made = right(parts, compute, besides);
        if (alike && on_the_way_back) std::swap(made[0], made[1]);
        return made;
      };
    };
    EXPECT_GT(tensor::largest_error(train(cell, at::kDouble).gradient, wanted), 1e-3) << on_the_way_back;
  }
}

// Halves have products of half as many rows, and an expert's gradient is a sum of two: other bits than those
// of all tokens at once, and the same ones in every run.
TEST(ExpertParallelOverlap, RunsOfEachRepeatTheirBits) {
  for (const ExpertOverlap overlap : kOverlaps) {
    const Cell cell{.ranks = 4, .ep = 2, .strategy = "zero3", .shared = true, .overlap = overlap};
    const Found once = train(cell, at::kBFloat16), again = train(cell, at::kBFloat16);
    EXPECT_EQ(once.gradient.loss, again.gradient.loss);
    for (const auto& [name, gradient] : once.gradient.of)
      EXPECT_TRUE(gradient.equal(again.gradient.of.at(name))) << static_cast<int>(overlap) << ", " << name;
  }
}

// Documents of each round, by rank.
using Rounds = std::vector<std::vector<std::vector<std::int64_t>>>;

struct Uneven {
  const char* name;
  Rounds rounds;
};
const Uneven kUneven[] = {
    {"no token on the first rank", {{{}, {5, 2}, {4}}, {{}, {3}, {1, 1}}}},
    {"one token, and none elsewhere", {{{1}, {}, {}}}},
    {"a round without tokens", {{{}, {}, {}}, {{2}, {7}, {}}, {{}, {}, {}}}},
    {"turns", {{{6}, {}, {}}, {{}, {6}, {}}, {{}, {}, {6}}}},
};

std::uint64_t seed_of(std::size_t round, std::size_t rank) {
  return 10 * round + rank + 1;
}

// Every rank makes forward and backward of every round, with tokens or without. Each wait ends after a
// minute.
TEST(ExpertParallelOverlap, RanksWithoutTokensComeToEveryExchange) {
  constexpr std::size_t kRanks = 3;
  for (const bool sigmoid : {false, true})
    for (const bool ties : {false, true})
      for (const Uneven& uneven : kUneven) {
        const Cell shape{.ranks = kRanks, .ep = kRanks, .ties = ties, .shared = true, .sigmoid = sigmoid};
        const auto loss_of = [](DecoderLM& model, const Batch& batch) {
          return model.hidden(batch).square().sum();
        };
        const auto alone = whole_model(shape, at::kDouble);
        for (std::size_t round = 0; round < uneven.rounds.size(); ++round)
          for (std::size_t rank = 0; rank < kRanks; ++rank)
            if (const auto& lengths = uneven.rounds[round][rank]; !lengths.empty())
              loss_of(*alone, make_batch(lengths, 31, seed_of(round, rank))).backward();
        std::map<std::string, at::Tensor> wanted;
        for (const auto& [name, tensor] : alone->named()) wanted[name] = tensor.grad();

        for (const ExpertOverlap overlap : kOverlaps) {
          const std::string where = fmt::format("{}, overlap {}, sigmoid {}, ties {}", uneven.name,
                                                static_cast<int>(overlap), sigmoid, ties);
          const auto on_rank = [&](World& world) {
            const auto rank = static_cast<std::size_t>(world.rank);
            const Mesh mesh(world, shape.grid());
            const auto model = whole_model(shape, at::kDouble);
            const Layout placed = deal_experts(*model, mesh, {}, {.overlap = overlap});
            for (std::size_t round = 0; round < uneven.rounds.size(); ++round)
              loss_of(*model, make_batch(uneven.rounds[round][rank], 31, seed_of(round, rank))).backward();
            for (auto& [name, tensor] : model->named()) {
              if (!tensor.requires_grad()) continue;
              at::Tensor gradient = tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor);
              const bool expert = name.find(".experts.") != std::string::npos;
              // Five experts on three ranks: two, two, one.
              at::Tensor whole = wanted.at(name);
              if (!whole.defined()) whole = at::zeros_like(tensor);
              if (!expert) world.group.all_reduce(gradient);
              const at::Tensor own = expert ? whole.narrow(0, 2 * world.rank, gradient.size(0)) : whole;
              EXPECT_LT((gradient - own).norm().item<double>(), 1e-10 * (1 + whole.norm().item<double>()))
                  << where << ", " << name;
            }
          };
          EXPECT_NO_THROW(run_ranks(kRanks, on_rank, {.timeout = 1min})) << where;
        }
      }
}

// In forward, in backward, and while other tokens are on their way: the others learn of it at once.
TEST(ExpertParallelOverlap, ARankThatFailsEndsTheOthers) {
  enum class Where { kMeanwhile, kForward, kBackward };
  for (const ExpertOverlap overlap : kOverlaps)
    for (const Where where : {Where::kMeanwhile, Where::kForward, Where::kBackward}) {
      Cell cell{.ranks = 3, .ep = 3, .shared = true, .overlap = overlap};
      std::atomic<int> calls = 0;
      std::atomic<int> ranks_seen = 0;
      cell.change_hooks = [&](ExpertHooks& hooks) {
        if (ranks_seen++ != 1) return;  // one of them
        hooks.dispatch = [&, right = hooks.dispatch, where](const std::vector<ExpertHooks::Copies>& parts,
                                                            const ExpertHooks::Compute& compute,
                                                            const std::function<void()>& besides) {
          const bool now = ++calls == 3;  // in the second micro-batch
          const auto fail = [] { throw std::runtime_error("a rank in flames"); };
          const auto computed = [&](const at::Tensor& rows, const std::vector<std::int64_t>& begin) {
            if (now && where == Where::kForward) fail();
            at::Tensor made = compute(rows, begin);
            if (now && where == Where::kBackward)
              made.register_hook([fail](const at::Tensor& gradient) {
                fail();
                return gradient;
              });
            return made;
          };
          return right(parts, computed, [&] {
            if (now && where == Where::kMeanwhile) fail();
            besides();
          });
        };
      };
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_THAT(error_testing::error_of<std::exception>([&] { train(cell, at::kFloat); }),
                  HasSubstr("a rank in flames"));
      // Waits have five minutes.
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 1min);
    }
}

TEST(ExpertParallelOverlap, ASharedExpertLeftOutIsRefused) {
  Cell cell{.ranks = 2, .ep = 2, .shared = true};
  cell.change_hooks = [](ExpertHooks& hooks) {
    hooks.dispatch = [right = hooks.dispatch](
                         const std::vector<ExpertHooks::Copies>& parts, const ExpertHooks::Compute& compute,
                         const std::function<void()>&) { return right(parts, compute, [] {}); };
  };
  EXPECT_THAT(error_testing::error_of<BrokenInvariant>([&] { train(cell, at::kFloat); }),
              HasSubstr("shared expert computed: false"));
}

TEST(ExpertParallelOverlap, AnotherNameIsRefused) {
  EXPECT_EQ(expert_overlap_named("none"), ExpertOverlap::kNone);
  EXPECT_EQ(expert_overlap_named("shared"), ExpertOverlap::kShared);
  EXPECT_EQ(expert_overlap_named("halves"), ExpertOverlap::kHalves);
  EXPECT_THAT(error_testing::error_of([] { expert_overlap_named("both"); }),
              HasSubstr("none, shared, halves"));
}

}  // namespace
}  // namespace isograd
