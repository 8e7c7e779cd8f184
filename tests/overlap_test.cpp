// Products that are computed while tokens travel along tp or to experts: mistakes in what belongs together
// are seen, no rank waits for one that does not come, and a rank that fails ends the others.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>

#include "decoder_step.hpp"
#include "isograd/error.hpp"
#include "isograd/expert_parallel.hpp"
#include "model/fused.hpp"
#include "model/hooks.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using tensor::Gradient;
using ::testing::HasSubstr;

constexpr ExpertOverlap kExpertOverlaps[] = {ExpertOverlap::kNone, ExpertOverlap::kShared,
                                             ExpertOverlap::kHalves};

// A decoder over tp, or with its experts over all ranks.
struct Cut {
  DecoderConfig config;
  int tp = 1, ep = 1;
  TensorOverlap tensor_overlap = TensorOverlap::kTokens;
  ExpertOverlap expert_overlap = ExpertOverlap::kShared;
  std::function<void(ModelHooks&, const Mesh&)> change = [](ModelHooks&, const Mesh&) {};

  Grid grid() const {
    const Grid plain({{"dp_replicate", 1}, {"dp_shard", ep}, {"cp_ring", 1}, {"cp_ulysses", 1}, {"tp", tp}});
    return plain.viewed(data_axes(plain), {{"edp", 1}, {kExpertAxis, ep}});
  }
};

Gradient one_process(const Cut& cut) {
  return tensor::one_process(*tensor::whole_model(cut.config, at::kDouble), cut.ep, 3, Mean::kTargets);
}

// Three micro-batches, the gradients whole.
Gradient train(const Cut& cut) {
  Gradient found;
  run_ranks(cut.tp * cut.ep, [&](World& world) {
    const Mesh mesh(world, cut.grid());
    const auto model = tensor::whole_model(cut.config, at::kDouble);
    Layout placed = cut_decoder(*model, mesh, {.overlap = cut.tensor_overlap});
    if (cut.ep > 1)
      placed = shard_experts(*model, mesh, placed.placements(), {.overlap = cut.expert_overlap});
    cut.change(model->hooks(), mesh);
    TrainableParameters parameters = trainable_parameters(model->named());
    parameters.placements = placed.placements();
    const auto layout = bucketed(parameters, mesh, {.bucket_bytes = 3000});
    TokenMean mean;
    const auto optimizer = sgd({.learning_rate = 0});
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      const at::Tensor hidden = model->hidden(batch);
      at::Tensor sum =
          cross_entropy_sum(model->logits_of(hidden), batch.targets, {.shard = model->vocabulary()});
      if (!sum.requires_grad()) sum = sum + hidden.narrow(0, 0, 0).sum();  // every rank makes every backward
      return {{"cross_entropy", sum}};
    };
    Step step(forward, *layout, mean, *optimizer, {});
    step(tensor::step_of(mesh.place(kSampleAxes), mesh.size(kSampleAxes), cut.config.vocabulary));
    std::map<std::string, at::Tensor> local, whole;
    for (const auto& view : layout->views()) local[view.name] = view.gradient;
    for (const PlacedParameter& each : placed.parameters())
      whole[each.name] = placed.whole(each.name, local.at(each.name));
    if (world.rank == 0) found.of = whole;
  });
  return found;
}

double error_of(const Cut& cut) { return tensor::largest_error(train(cut), one_process(cut)); }

// A gradient that is not summed while those of weights are computed, and a product of which own tokens get
// this rank's part alone.
TEST(OverlapAlongTp, PlantedMistakesAreSeen) {
  Cut cut{.config = tensor::shape(8, 2, false), .tp = 2};
  ASSERT_LT(error_of(cut), 1e-10);
  cut.change = [](ModelHooks& hooks, const Mesh&) {
    hooks.tensor.column_parallel =
        [all = hooks.tensor.gather_tokens](
            const at::Tensor& x, std::int64_t tokens, const std::vector<at::Tensor>& weights,
            const std::vector<at::Tensor>& biases) { return linears(all(x, tokens), weights, biases); };
  };
  EXPECT_GT(error_of(cut), 1e-2);
  cut.change = [](ModelHooks& hooks, const Mesh& mesh) {
    hooks.tensor.row_parallel = [tp = tensor_group(mesh)](const at::Tensor& x, const at::Tensor& weight) {
      return split_tokens(tp, linears(x, {weight}, {at::Tensor()})[0]);
    };
  };
  EXPECT_GT(error_of(cut), 1e-2);
  cut.change = [](ModelHooks& hooks, const Mesh& mesh) {
    if (mesh.place({"tp"}) != 1) return;  // products without an overlap on this rank
    hooks.tensor.row_parallel = [tp = tensor_group(mesh)](const at::Tensor& x, const at::Tensor& weight) {
      return reduce_scatter_to_sequence(tp, linears(x, {weight}, {at::Tensor()})[0]);
    };
  };
  EXPECT_THAT(error_testing::error_of<PeerError>([&] { train(cut); }), HasSubstr("the ranks disagreed"));
}

// Halves of the tokens that come back in each other's place, and a half whose copies are computed as the
// other's: the gradient is another one.
TEST(OverlapWithExperts, HalvesMistakenForOneAnotherAreSeen) {
  for (const bool on_the_way_back : {true, false}) {
    Cut cut{.config = tensor::shape_with_experts(5), .ep = 2, .expert_overlap = ExpertOverlap::kHalves};
    ASSERT_LT(error_of(cut), 1e-10);
    cut.change = [&](ModelHooks& hooks, const Mesh&) {
      hooks.experts.dispatch = [right = hooks.experts.dispatch, on_the_way_back](
                                   std::vector<ExpertHooks::Copies> parts,
                                   const ExpertHooks::Compute& compute,
                                   const std::function<void()>& besides) {
        const bool alike = parts[0].rows.size(0) == parts[1].rows.size(0);
        if (alike && !on_the_way_back) std::swap(parts[0].rows, parts[1].rows);
        auto made = right(parts, compute, besides);
        if (alike && on_the_way_back) std::swap(made[0], made[1]);
        return made;
      };
    };
    EXPECT_GT(error_of(cut), 1e-3) << on_the_way_back;
  }
}

// Documents of each round, by rank.
struct Uneven {
  const char* name;
  std::vector<std::vector<std::vector<std::int64_t>>> rounds;
};
const Uneven kUneven[] = {
    {"no token on the first rank", {{{}, {5, 2}, {4}}, {{}, {3}, {1, 1}}}},
    {"one token, and none elsewhere", {{{1}, {}, {}}}},
    {"a round without tokens", {{{}, {}, {}}, {{2}, {7}, {}}, {{}, {}, {}}}},
    {"turns", {{{6}, {}, {}}, {{}, {6}, {}}, {{}, {}, {6}}}},
};

// Every rank makes forward and backward of every round, with tokens or without. Each wait ends after a
// minute.
TEST(OverlapWithExperts, RanksWithoutTokensComeToEveryExchange) {
  constexpr std::size_t kRanks = 3;
  for (const bool sigmoid : {false, true})
    for (const bool ties : {false, true})
      for (const Uneven& uneven : kUneven) {
        Cut cut{.config = tensor::shape_with_experts(5, 5), .ep = kRanks};
        if (sigmoid) {
          auto& experts = cut.config.experts;
          cut.config.family = "dots1", cut.config.query_key_norm = true, cut.config.attention_bias = false;
          experts.shared_feed_forward = 14, experts.sigmoid = true, experts.scale = 2.5;
          experts.dense_layers = {0};
        }
        const auto make = [&] {
          const auto model = tensor::whole_model(cut.config, at::kDouble);
          const at::NoGradGuard no_grad;
          for (auto [name, values] : model->named()) {
            if (ties && name.find("mlp.gate.weight") != std::string::npos) values.zero_();
            if (name.ends_with("e_score_correction_bias"))
              values.copy_(at::arange(values.numel(), at::kDouble).mul(7).sin().mul(0.2));
          }
          return model;
        };
        const auto loss_of = [&](DecoderLM& model, std::size_t round, std::size_t rank) {
          const Batch batch = make_batch(uneven.rounds[round][rank], 31, 10 * round + rank + 1);
          return model.hidden(batch).square().sum();
        };
        const auto alone = make();
        for (std::size_t round = 0; round < uneven.rounds.size(); ++round)
          for (std::size_t rank = 0; rank < kRanks; ++rank)
            if (!uneven.rounds[round][rank].empty()) loss_of(*alone, round, rank).backward();
        std::map<std::string, at::Tensor> wanted;
        for (const auto& [name, tensor] : alone->named()) wanted[name] = tensor.grad();

        for (const ExpertOverlap overlap : kExpertOverlaps) {
          const std::string where = fmt::format("{}, overlap {}, sigmoid {}, ties {}", uneven.name,
                                                static_cast<int>(overlap), sigmoid, ties);
          const auto on_rank = [&](World& world) {
            const auto model = make();
            shard_experts(*model, Mesh(world, cut.grid()), {}, {.overlap = overlap});
            for (std::size_t round = 0; round < uneven.rounds.size(); ++round)
              loss_of(*model, round, static_cast<std::size_t>(world.rank)).backward();
            for (auto& [name, tensor] : model->named()) {
              if (!tensor.requires_grad()) continue;
              at::Tensor gradient = tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor);
              const bool expert = name.find(".experts.") != std::string::npos;
              at::Tensor whole = wanted.at(name);
              if (!whole.defined()) whole = at::zeros_like(tensor);
              if (!expert) world.group.all_reduce(gradient);
              // Five experts on three ranks: two, two, one.
              const at::Tensor own = expert ? whole.narrow(0, 2 * world.rank, gradient.size(0)) : whole;
              EXPECT_LT((gradient - own).norm().item<double>(), 1e-10 * (1 + whole.norm().item<double>()))
                  << where << ", " << name;
            }
          };
          EXPECT_NO_THROW(run_ranks(kRanks, on_rank, {.timeout = 1min})) << where;
        }
      }
}

// Waits have five minutes.
void expect_all_end(const Cut& cut) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_testing::error_of<std::exception>([&] { train(cut); }), HasSubstr("a rank in flames"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 1min);
}

// In forward, in backward, and while other tokens are on their way: the others learn of it at once.
TEST(OverlapWithExperts, ARankThatFailsEndsTheOthers) {
  enum class Where { kMeanwhile, kForward, kBackward };
  for (const ExpertOverlap overlap : kExpertOverlaps)
    for (const Where where : {Where::kMeanwhile, Where::kForward, Where::kBackward}) {
      Cut cut{.config = tensor::shape_with_experts(5, 5), .ep = 3, .expert_overlap = overlap};
      std::atomic<int> calls = 0, ranks_seen = 0;
      cut.change = [&](ModelHooks& hooks, const Mesh&) {
        if (ranks_seen++ != 1) return;  // one of them
        hooks.experts.dispatch = [&, right = hooks.experts.dispatch, where](
                                     const std::vector<ExpertHooks::Copies>& parts,
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
      expect_all_end(cut);
    }
}

// In backward, while the others' gradients are on their way.
TEST(OverlapAlongTp, ARankThatFailsEndsTheOthers) {
  for (const TensorOverlap overlap : {TensorOverlap::kWeights, TensorOverlap::kTokens}) {
    Cut cut{.config = tensor::shape(8, 2, false), .tp = 3, .tensor_overlap = overlap};
    std::atomic<int> ranks_seen = 0;
    cut.change = [&](ModelHooks& hooks, const Mesh&) {
      if (ranks_seen++ != 1) return;
      hooks.tensor.column_parallel = [right = hooks.tensor.column_parallel](
                                         const at::Tensor& x, std::int64_t tokens,
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
    expect_all_end(cut);
  }
}

TEST(OverlapWithExperts, ASharedExpertLeftOutIsRefused) {
  Cut cut{.config = tensor::shape_with_experts(5, 5), .ep = 2};
  cut.change = [](ModelHooks& hooks, const Mesh&) {
    hooks.experts.dispatch = [right = hooks.experts.dispatch](const std::vector<ExpertHooks::Copies>& parts,
                                                              const ExpertHooks::Compute& compute,
                                                              const std::function<void()>&) {
      return right(parts, compute, [] {});
    };
  };
  EXPECT_THAT(error_testing::error_of<BrokenInvariant>([&] { train(cut); }),
              HasSubstr("shared expert computed: false"));
}

TEST(Overlaps, OtherNamesAreRefused) {
  EXPECT_EQ(tensor_overlap_named("weights"), TensorOverlap::kWeights);
  EXPECT_EQ(expert_overlap_named("halves"), ExpertOverlap::kHalves);
  EXPECT_THAT(error_testing::error_of([] { tensor_overlap_named("halves"); }),
              HasSubstr("none, weights, tokens"));
  EXPECT_THAT(error_testing::error_of([] { expert_overlap_named("both"); }),
              HasSubstr("none, shared, halves"));
}

}  // namespace
}  // namespace isograd
