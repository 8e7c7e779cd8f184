// A decoder cut over tp: its gradient, norm and updates are one process's, whatever tp, whether tokens are
// cut between the products, and whoever else is there.
#include "tensor_step.hpp"

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

#include "full_tests.hpp"
#include "model/fused.hpp"

namespace isograd::tensor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TensorParallel : public ::testing::TestWithParam<Cell> {};

constexpr TensorOverlap kOverlaps[] = {TensorOverlap::kNone, TensorOverlap::kWeights, TensorOverlap::kTokens};

// Each overlap in turn.
std::vector<Cell> with_overlaps(std::vector<Cell> cells) {
  for (std::size_t i = 0; i < cells.size(); ++i)
    cells[i].overlap = kOverlaps[(i / 3) % (cells[i].sequence_parallel ? 3 : 2)];
  return cells;
}

// With ISOGRAD_FULL_TESTS=1 every tp beside every neighbouring axis, with every mean, strategy, kind of heads
// and number of micro-batches, fused and unfused and overlaps by turns; otherwise each of these with some of
// the others.
std::vector<Cell> cells() {
  std::vector<Cell> all;
  if (std::getenv("ISOGRAD_FULL_TESTS")) {
    for (const bool sequence_parallel : {true, false})
      for (const Mean mean : {Mean::kTargets, Mean::kSamples})
        for (const int accumulation : {1, 3})
          for (const char* strategy : {"bucketed", "zero1", "zero3", "shared"})
            for (const bool tied : {true, false})
              for (const auto& [heads, key_heads] : {std::pair{8, 8}, {8, 2}, {6, 3}, {5, 1}, {10, 5}})
                for (const auto& [tp, data, ring] : {std::tuple{1, 1, 1},
                                                     {2, 1, 1},
                                                     {3, 1, 1},
                                                     {4, 1, 1},
                                                     {5, 1, 1},
                                                     {8, 1, 1},
                                                     {2, 2, 1},
                                                     {2, 1, 2},
                                                     {2, 2, 2}})
                  if (tp <= heads)
                    all.push_back({.heads = heads,
                                   .key_heads = key_heads,
                                   .tied = tied,
                                   .tp = tp,
                                   .data = data,
                                   .ring = ring,
                                   .accumulation = accumulation,
                                   .sequence_parallel = sequence_parallel,
                                   .fused = all.size() % 3 == 0,
                                   .mean = mean,
                                   .strategy = strategy});
    return with_overlaps(all);
  }
  for (const bool sequence_parallel : {true, false}) {
    for (const int tp : {1, 2, 3, 4, 5, 8}) {
      all.push_back({.tp = tp, .sequence_parallel = sequence_parallel, .fused = tp % 2 == 1});
      all.push_back({.heads = 8,
                     .key_heads = 8,
                     .tied = true,
                     .tp = tp,
                     .sequence_parallel = sequence_parallel,
                     .mean = Mean::kSamples});
    }
    all.push_back({.heads = 6,
                   .key_heads = 3,
                   .tp = 2,
                   .sequence_parallel = sequence_parallel,
                   .fused = true});  // keys 0,1 and 1,2
    all.push_back(
        {.heads = 5, .key_heads = 1, .tied = true, .tp = 2, .sequence_parallel = sequence_parallel});
    all.push_back(
        {.heads = 8, .key_heads = 2, .tp = 4, .sequence_parallel = sequence_parallel, .view = true});
    all.push_back(
        {.heads = 8, .key_heads = 2, .tp = 4, .sequence_parallel = sequence_parallel, .view_turned = true});
    all.push_back(
        {.tp = 3, .sequence_parallel = sequence_parallel, .strategy = "naive", .with_biases = true});
    all.push_back({.tp = 2, .data = 2, .sequence_parallel = sequence_parallel, .mean = Mean::kSamples});
    all.push_back({.tied = true, .tp = 2, .data = 3, .sequence_parallel = sequence_parallel, .fused = true});
    all.push_back({.tp = 2, .ring = 2, .sequence_parallel = sequence_parallel});
    all.push_back({.tp = 3,
                   .data = 2,
                   .sequence_parallel = sequence_parallel,
                   .checkpointed = true,
                   .strategy = "zero3"});
    all.push_back(
        {.heads = 5, .key_heads = 1, .tp = 2, .sequence_parallel = sequence_parallel, .strategy = "zero3"});
    for (const char* strategy : {"zero1", "zero2", "zero2 once", "shared", "shared zero2", "zero3"})
      for (const int replicas : {1, 2})
        all.push_back({.heads = 6,
                       .key_heads = 3,
                       .tp = 2,
                       .data = 2,
                       .replicas = replicas,
                       .sequence_parallel = sequence_parallel,
                       .strategy = strategy});
    all.push_back({.tied = true,
                   .tp = 2,
                   .data = 2,
                   .ring = 2,
                   .sequence_parallel = sequence_parallel,
                   .mean = Mean::kSamples});
  }
  return with_overlaps(all);
}
INSTANTIATE_TEST_SUITE_P(Cells, TensorParallel, ::testing::ValuesIn(cells()));

TEST_P(TensorParallel, GradientLossAndNormAreOneProcesss) {
  const Cell cell = GetParam();
  const Gradient wanted = one_process(cell, at::kDouble);
  const Found found = train(cell);
  EXPECT_LT(largest_error(found.gradient, wanted), 1e-10);
  for (const StepReport& report : found.reports) {
    EXPECT_NEAR(report.loss, wanted.loss, 1e-10 * wanted.loss);
    EXPECT_NEAR(report.norm, wanted.norm(), 1e-10 * wanted.norm());
  }
}

// fp32 or bf16: cells take turns, and each takes both with ISOGRAD_FULL_TESTS=1.
std::vector<Cell> lower_cells() {
  std::vector<Cell> all;
  const auto every = cells();
  for (std::size_t i = 0; i < every.size(); ++i)
    for (const auto type : {at::kFloat, at::kBFloat16})
      if (full_tests() || takes_first(i) == (type == at::kFloat)) {
        all.push_back(every[i]);
        all.back().type = type;
      }
  return all;
}
class TensorParallelLower : public ::testing::TestWithParam<Cell> {};
INSTANTIATE_TEST_SUITE_P(Cells, TensorParallelLower, ::testing::ValuesIn(lower_cells()));

TEST_P(TensorParallelLower, NoWorseThanOneProcess) {
  const Cell cell = GetParam();
  const Gradient exact = one_process(cell, at::kDouble);
  const Errors found = errors(train(cell).gradient, exact);
  // E2: four times what one process has. One step measures that poorly where a parameter has few elements
  // (a norm of 4), so that it is the most of up to 16, each at other values; verify's own way
  // (compare.hpp).
  Errors alone;
  std::vector<std::string> outside;
  for (std::uint64_t draw = 0; draw < 16 && (draw == 0 || !outside.empty()); ++draw) {
    outside.clear();
    for (const auto& [name, error] :
         errors(one_process(cell, cell.type, draw), draw == 0 ? exact : one_process(cell, at::kDouble, draw)))
      alone[name] = std::max(alone[name], error);
    for (const auto& [name, error] : found)
      if (!(error <= 4 * alone.at(name))) outside.push_back(name);
  }
  EXPECT_THAT(outside, ::testing::IsEmpty()) << c10::toString(cell.type);
}

// Ranks with unequal parts fill their buckets differently: reductions launched within backward are in no
// order with the seams' own collectives.
TEST(TensorParallelBuckets, OfAnySizeOnUnequalParts) {
  for (const auto& [heads, tp] : {std::pair{5, 2}, {8, 3}, {8, 5}})
    for (const std::int64_t bytes : {1, 300, 700, 1500, 5000, 1 << 20})
      for (const bool sequence_parallel : {true, false}) {
        const Cell cell{.heads = heads,
                        .key_heads = 1,
                        .tp = tp,
                        .sequence_parallel = sequence_parallel,
                        .bucket_bytes = bytes};
        const Gradient wanted = one_process(cell, at::kDouble);
        EXPECT_LT(largest_error(train(cell, 3).gradient, wanted), 1e300);  // that it ends
        EXPECT_LT(largest_error(train(cell).gradient, wanted), 1e-10)
            << ::testing::PrintToString(cell) << bytes;
      }
}

TEST(TensorParallelUpdates, CopiesStayTheSameBits) {
  for (const bool sequence_parallel : {true, false})
    for (const Cell& cell :
         {Cell{.tp = 2, .sequence_parallel = sequence_parallel, .type = at::kFloat},
          Cell{.heads = 6,
          .key_heads = 3,
          .tp = 4,
          .sequence_parallel = sequence_parallel,
          .type = at::kFloat},
          Cell{.tied = true, .tp = 2, .data = 2, .sequence_parallel = sequence_parallel, .type = at::kFloat}})
      EXPECT_EQ(train(cell, 50).torn, "no error") << ::testing::PrintToString(cell);
}

// The mistakes that trainers have shipped, each by a public seam; the wrong parameters are those it is about.
TEST(TensorParallelPlanted, AreSeen) {
  const Cell right{.heads = 6, .key_heads = 3, .tp = 2};
  const Gradient wanted = one_process(right, at::kDouble);
  ASSERT_LT(largest_error(train(right).gradient, wanted), 1e-10);
  const auto unsummed = [&](const std::string& part) {
    Cell cell = right;
    cell.change_placements = [part](TrainableParameters& parameters) {
      for (auto& [name, placement] : parameters.placements)
        if (name.find(part) != std::string::npos) placement.summed.erase("tp");
    };
    const Found found = train(cell);
    for (const auto& [name, gradient] : wanted.of) {
      const double error = ((found.gradient.of.at(name) - gradient).norm() / gradient.norm()).item<double>();
      if (name.find(part) != std::string::npos)
        EXPECT_GT(error, 1e-3) << name;
      else
        EXPECT_LT(error, 1e-10) << name;
    }
  };
  unsummed("layernorm");  // norm weights under cut tokens
  unsummed("k_proj");     // key heads that ranks hold copies of
  unsummed("q_norm");     // norms of this rank's heads
}

// What is computed while the gradient of a product's input is summed does not depend on it.
TEST(TensorParallelOverlap, OfWeightsChangesNoBit) {
  for (const bool sequence_parallel : {true, false})
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      Cell cell{
          .tp = 3, .sequence_parallel = sequence_parallel, .fused = type == at::kFloat, .with_biases = true};
      cell.type = type;
      const Found without = train(cell);
      cell.overlap = TensorOverlap::kWeights;
      const Found with = train(cell);
      EXPECT_EQ(with.gradient.loss, without.gradient.loss);
      for (const auto& [name, gradient] : with.gradient.of)
        EXPECT_TRUE(gradient.equal(without.gradient.of.at(name))) << sequence_parallel << ", " << name;
    }
}

TEST(TensorParallelOverlap, OfTokensRepeatsItsBits) {
  const Cell cell{.tp = 3, .overlap = TensorOverlap::kTokens, .strategy = "zero3", .type = at::kBFloat16};
  const Found once = train(cell), again = train(cell);
  EXPECT_EQ(once.gradient.loss, again.gradient.loss);
  for (const auto& [name, gradient] : once.gradient.of)
    EXPECT_TRUE(gradient.equal(again.gradient.of.at(name))) << name;
}

// A gradient that is not summed while those of weights are computed, and a product of which own tokens get
// this rank's part alone.
TEST(TensorParallelOverlap, PlantedMistakesAreSeen) {
  Cell cell{.tp = 2, .overlap = TensorOverlap::kTokens};
  const Gradient wanted = one_process(cell, at::kDouble);
  ASSERT_LT(largest_error(train(cell).gradient, wanted), 1e-10);
  cell.change_hooks = [](TensorHooks& hooks, const Mesh&) {
    hooks.column_parallel = [all = hooks.gather_tokens](const at::Tensor& x, std::int64_t tokens,
                                                        const std::vector<at::Tensor>& weights,
                                                        const std::vector<at::Tensor>& biases) {
      return linears(all(x, tokens), weights, biases);
    };
  };
  EXPECT_GT(largest_error(train(cell).gradient, wanted), 1e-2);
  cell.change_hooks = [](TensorHooks& hooks, const Mesh& mesh) {
    hooks.row_parallel = [tp = tensor_group(mesh)](const at::Tensor& x, const at::Tensor& weight) {
      return split_tokens(tp, linears(x, {weight}, {at::Tensor()})[0]);
    };
  };
  EXPECT_GT(largest_error(train(cell).gradient, wanted), 1e-2);
}

// In backward, while the others' gradients are on their way: they learn of it at once.
TEST(TensorParallelOverlap, ARankThatFailsEndsTheOthers) {
  for (const TensorOverlap overlap : {TensorOverlap::kWeights, TensorOverlap::kTokens}) {
    Cell cell{.tp = 3, .overlap = overlap};
    std::atomic<int> ranks_seen = 0;
    cell.change_hooks = [&](TensorHooks& hooks, const Mesh&) {
      if (ranks_seen++ != 1) return;  // one of them
      hooks.column_parallel = [right = hooks.column_parallel](const at::Tensor& x, std::int64_t tokens,
                                                              const std::vector<at::Tensor>& weights,
                                                              const std::vector<at::Tensor>& biases) {
        auto made = right(x, tokens, weights, biases);
        made.back().register_hook([](const at::Tensor& gradient) {
          if (gradient.defined()) throw std::runtime_error("a rank in flames");
          return gradient;
        });
        return made;
      };
    };
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(error_testing::error_of<std::exception>([&] { train(cell); }), HasSubstr("a rank in flames"));
    // Waits have five minutes.
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
  }
}

TEST(TensorParallelOverlap, WhatDoesNotFitIsRefused) {
  EXPECT_EQ(tensor_overlap_named("none"), TensorOverlap::kNone);
  EXPECT_EQ(tensor_overlap_named("weights"), TensorOverlap::kWeights);
  EXPECT_EQ(tensor_overlap_named("tokens"), TensorOverlap::kTokens);
  EXPECT_THAT(error_testing::error_of([] { tensor_overlap_named("halves"); }),
              AllOf(HasSubstr("halves"), HasSubstr("none, weights, tokens")));
  const Cell whole{.sequence_parallel = false, .overlap = TensorOverlap::kTokens};
  EXPECT_THAT(error_testing::error_of<ConfigError>([&] { train(whole); }),
              AllOf(HasSubstr("parallel.tensor_overlap"), HasSubstr("parallel.sequence_parallel off")));
  Cell other{.tp = 2, .overlap = TensorOverlap::kTokens};
  other.change_hooks = [](TensorHooks& hooks, const Mesh& mesh) {
    if (mesh.place({"tp"}) != 1) return;  // products without an overlap on this rank
    hooks.row_parallel = [tp = tensor_group(mesh)](const at::Tensor& x, const at::Tensor& weight) {
      return reduce_scatter_to_sequence(tp, linears(x, {weight}, {at::Tensor()})[0]);
    };
  };
  EXPECT_THAT(error_testing::error_of<PeerError>([&] { train(other); }), HasSubstr("the ranks disagreed"));
}

// Bytes that all ranks along tp send for a micro-batch (docs/tensor-parallelism.md). An all-reduce and its
// dual, or a reduce-scatter and an all-gather each way, send 2 (ranks - 1) of the buffer in forward and
// backward: at the ends of the regions of the embedding, of two a block, and of the head. Three numbers a
// token make the loss.
std::int64_t traffic_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks, std::int64_t bytes) {
  const std::int64_t ends = 2 * (2 * config.layers + 1);
  return ends * 2 * (ranks - 1) * tokens * config.hidden * bytes + ranks * (ranks - 1) * tokens * 24;
}

TEST(TensorParallelTraffic, IsTheFormulas) {
  int turn = 0;
  for (const int tp : {2, 3, 4, 5})
    for (const bool sequence_parallel : {true, false})
      for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
        const TensorOverlap overlap = kOverlaps[turn++ % (sequence_parallel ? 3 : 2)];
        run_ranks(tp, [&](World& world) {
          const Mesh mesh(world, Grid({{"tp", world.size}}));
          DecoderConfig config = shape(8, 2, false);
          config.hidden = 60;  // the ring's share (tp - 1) / tp of every buffer is whole bytes
          auto model = whole_model(config, type);
          cut_decoder(*model, mesh, {.sequence_parallel = sequence_parallel, .overlap = overlap});
          const std::int64_t before = tensor_group(mesh).traffic().bytes();
          std::int64_t tokens = 0;
          for (const Batch& batch : step_of(0, 1, config.vocabulary)) {
            if (batch.targets.ne(kIgnoreIndex).sum().item<std::int64_t>() == 0)
              continue;  // nothing to differentiate
            tokens += batch.num_tokens();
            cross_entropy_sum(model->logits(batch), batch.targets, {.shard = model->vocabulary()}).backward();
          }
          at::Tensor sent = at::full({1}, tensor_group(mesh).traffic().bytes() - before, at::kLong);
          world.group.all_reduce(sent);
          EXPECT_EQ(sent.item<std::int64_t>(),
                    traffic_bytes(config, tokens, tp, static_cast<std::int64_t>(c10::elementSize(type))))
              << tp << " ranks, sequence parallel " << sequence_parallel << ", overlap "
              << static_cast<int>(overlap) << ", " << c10::toString(type);
        });
      }
}

TEST(TensorParallelRefused, MoreRanksThanHeads) {
  run_ranks(3, [](World& world) {
    DecoderLM model(shape(2, 1, false), at::kDouble, 1);
    EXPECT_THAT(
        testing::error_of([&] {
          cut_decoder(model, Mesh(world, Grid({{"tp", 3}})));
        }),
        AllOf(HasSubstr("2 pieces of 4 rows"), HasSubstr("q_proj"), HasSubstr("at most 2 ranks along tp")));
  });
}

TEST(TensorParallelGenerates, TheTextOfOneProcess) {
  const DecoderConfig config = shape(6, 3, true);
  const auto text = generate(*whole_model(config, at::kDouble), {5, 9, 11}, {.max_tokens = 12});
  for (const int tp : {2, 3})
    for (const bool sequence_parallel : {true, false})
      run_ranks(tp, [&](World& world) {
        auto model = whole_model(config, at::kDouble);
        cut_decoder(*model, Mesh(world, Grid({{"tp", world.size}})),
                    {.sequence_parallel = sequence_parallel});
        EXPECT_EQ(generate(*model, {5, 9, 11}, {.max_tokens = 12}), text);
      });
}

}  // namespace
}  // namespace isograd::tensor
