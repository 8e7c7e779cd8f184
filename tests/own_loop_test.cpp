// Someone's own loop under every strategy: a loss that is a mean over the micro-batch, and micro-batches and
// ranks that have nothing to take a mean of.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/group.hpp"
#include "isograd/loss.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

struct Net : torch::nn::Module {
  at::Tensor table, output;
  Net() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const auto make = [&](const char* name, at::IntArrayRef shape) {
      return register_parameter(name, at::randn(shape, generator, at::TensorOptions(at::kDouble)));
    };
    table = make("table", {toy::kVocabulary, toy::kHidden});
    output = make("output", {toy::kVocabulary, toy::kHidden});
  }
  at::Tensor forward(at::Tensor tokens) { return at::linear(at::tanh(at::embedding(table, tokens)), output); }
};

// Its derivative over nothing is 0 / 0.
at::Tensor mean_of(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor mask = targets.ne(kIgnoreIndex);
  const at::Tensor nll = -at::log_softmax(logits, 1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  return (nll * mask).sum() / mask.sum();
}

// Rank 1 has no target at all, the others none in their second micro-batch.
Batch micro_batch(int rank, int round) {
  return toy::make_batch({5 + 3 * rank, 4 + round}, 10 * rank + 2 * round, rank == 1 || round == 1);
}

TEST(OwnLoop, AMeanOverNothingLeavesNoNaNUnderAnyStrategy) {
  constexpr int kRanks = 3, kRounds = 3;
  std::vector<MicroBatches> all(kRanks);
  for (int rank = 0; rank < kRanks; ++rank)
    for (int round = 0; round < kRounds; ++round) all[rank].push_back(micro_batch(rank, round));
  const Batch whole = toy::concatenate(all);
  Net alone;
  at::cross_entropy_loss(alone.forward(whole.tokens), whole.targets).backward();
  const std::vector<at::Tensor> wanted = {alone.table.grad(), alone.output.grad()};

  constexpr int kNaive = -1, kZero3 = 3;
  for (int stage = kNaive; stage <= kZero3; ++stage)
    run_ranks(kRanks, [&](World& world) {
      const Sharded<Net> model(std::make_shared<Net>());
      std::unique_ptr<DataParallel> layout;
      if (stage == kZero3)
        layout = fully_shard(model, {}, world.group);
      else if (stage == kNaive)
        layout = naive(trainable_parameters(*model), world.group);
      else
        layout = bucketed(trainable_parameters(*model), world.group, {.stage = stage, .bucket_bytes = 300});
      const MicroBatches& own = all[static_cast<std::size_t>(world.rank)];
      const std::int64_t valid = count_valid_tokens(own, world.group);
      EXPECT_EQ(valid, whole.num_targets());
      for (int step = 0; step < 2; ++step) {
        layout->zero_gradients();
        for (int round = 0; round < kRounds; ++round) {
          const Batch& batch = own[static_cast<std::size_t>(round)];
          const at::Tensor mean = mean_of(model(batch.tokens), batch.targets);
          layout->begin_backward(round + 1 == kRounds);
          gradient_accumulate_loss(mean, batch.num_targets(), valid, world.group).backward();
        }
        layout->finish_reduction();
        const auto views = layout->views();
        for (std::size_t i = 0; i < wanted.size(); ++i)
          EXPECT_LT((views[i].gradient - wanted[i]).norm().item<double>(), 1e-13)
              << "stage " << stage << ", " << views[i].name;
      }
    });
}

// A block that adds up something over all ranks, as synchronised batch normalisation does.
struct Exchanging : torch::nn::Module {
  Group group;
  at::Tensor weight;
  explicit Exchanging(Group group_) : group(std::move(group_)) {
    weight = register_parameter("weight", at::sin(at::arange(9, at::kDouble)).view({3, 3}));
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor hidden = at::tanh(at::linear(x, weight));
    return hidden * differentiable::all_reduce(group, hidden.sum(0));
  }
};
struct Exchange : torch::nn::Module {
  Sharded<Exchanging> block;
  at::Tensor output;
  explicit Exchange(Group group) : block(std::make_shared<Exchanging>(std::move(group))) {
    register_module("block", block.ptr());
    output = register_parameter("output", at::cos(at::arange(9, at::kDouble)).view({3, 3}));
  }
  at::Tensor forward(at::Tensor x) { return at::linear(block(x), output); }
};

// Rank 1 takes its mean over nothing, and the others wait for what its block exchanges in backward.
TEST(OwnLoop, AMeanOverNothingKeepsUpWithWhatAUnitExchanges) {
  constexpr int kRanks = 3;
  const auto rows = [](int rank) { return at::sin(at::arange(12, at::kDouble)).view({4, 3}) + rank; };
  // One process: the losses of ranks 0 and 2, over what all three add up.
  const at::Tensor weight = at::sin(at::arange(9, at::kDouble)).view({3, 3}).requires_grad_(true),
                   output = at::cos(at::arange(9, at::kDouble)).view({3, 3}).requires_grad_(true);
  std::vector<at::Tensor> hidden;
  for (int rank = 0; rank < kRanks; ++rank) hidden.push_back(at::tanh(at::linear(rows(rank), weight)));
  const at::Tensor all = at::cat(hidden).sum(0);
  const at::Tensor losses = at::linear(at::cat({hidden[0], hidden[2]}) * all, output).square().sum(1);  // [8]
  losses.mean().backward();

  for (const bool zero3 : {false, true})
    for (const bool checkpoint : {false, true}) {
      if (checkpoint && !zero3) continue;
      run_ranks(kRanks, [&](World& world) {
        const Sharded<Exchange> model(std::make_shared<Exchange>(world.subgroup({0, 1, 2}, "exchange")));
        model->block.set_checkpoint(checkpoint);
        const auto layout = zero3 ? fully_shard(model, {model->block}, world.group)
                                  : bucketed(trainable_parameters(*model), world.group);
        layout->zero_gradients();
        const bool empty = world.rank == 1;
        const at::Tensor mask = at::full({4}, empty ? 0.0 : 1.0, at::kDouble);
        const at::Tensor mean = (model(rows(world.rank)).square().sum(1) * mask).sum() / mask.sum();
        layout->begin_backward(true);
        gradient_accumulate_loss(mean, empty ? 0 : 4, 8, world.group).backward();
        layout->finish_reduction();
        for (const auto& view : layout->views()) {
          const at::Tensor& wanted = view.name == "output" ? output.grad() : weight.grad();
          EXPECT_LT((view.gradient - wanted).norm().item<double>(), 1e-13 * wanted.norm().item<double>())
              << view.name << (zero3 ? ", sharded" : "") << (checkpoint ? ", checkpointed" : "");
        }
      });
    }
}

// An exchange that a unit makes in backward cannot be made later: the rank with the constant says so.
TEST(OwnLoop, AConstantIsNamedWhereAUnitExchanges) {
  constexpr int kRanks = 3;
  std::vector<std::string> said(kRanks);
  try {
    run_ranks(
        kRanks,
        [&](World& world) {
          const Sharded<Exchange> model(std::make_shared<Exchange>(world.subgroup({0, 1, 2}, "exchange")));
          const auto layout = fully_shard(model, {model->block}, world.group);
          layout->zero_gradients();
          const at::Tensor loss = model(at::ones({4, 3}, at::kDouble)).square().sum();
          layout->begin_backward(true);
          try {
            if (world.rank != 1) loss.backward();
            layout->finish_reduction();
          } catch (const Error& error) {
            said[static_cast<std::size_t>(world.rank)] = error.what();
            throw;
          }
        },
        {.timeout = std::chrono::seconds(10)});
  } catch (const Error&) {
  }
  EXPECT_NE(said[1].find("sharded unit 'block': found no backward after begin_backward()"), std::string::npos)
      << said[1];
  EXPECT_FALSE(said[0].empty());
}

}  // namespace
}  // namespace isograd
