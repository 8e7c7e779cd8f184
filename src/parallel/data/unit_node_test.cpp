#include "parallel/data/unit_node.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "parallel/data/unit_testing.hpp"

namespace isograd {
namespace {

using isograd::testing::FakeHost;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t kHidden = 5;

constexpr auto message = [](auto&& action) { return error_testing::error_of<std::exception>(action); };

struct Block : torch::nn::Module {
  at::Tensor weight, bias, unused;
  explicit Block(std::int64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto options = at::TensorOptions(at::kDouble);
    weight = register_parameter("weight", at::randn({kHidden, kHidden}, generator, options) * 0.5);
    bias = register_parameter("bias", at::randn({kHidden}, generator, options));
    unused = register_parameter("unused", at::ones({2}, options));
  }
  virtual at::Tensor forward(at::Tensor x) { return at::tanh(at::linear(x, weight, bias)) + x; }
};

// An embedding tied with the output, blocks in between.
template <typename B = Block>
struct Model : torch::nn::Module {
  at::Tensor embedding, gain;
  std::vector<Sharded<B>> blocks;
  std::vector<std::size_t> order;
  explicit Model(std::size_t num_blocks, std::vector<std::size_t> order_ = {}) : order(std::move(order_)) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(99);
    embedding = register_parameter("embedding", at::randn({7, kHidden}, generator, at::kDouble));
    gain = register_parameter("gain", at::ones({1}, at::kDouble));
    for (std::size_t i = 0; i < num_blocks; ++i)
      blocks.emplace_back(register_module("block" + std::to_string(i), std::make_shared<B>(i)));
    if (order.empty())
      for (std::size_t i = 0; i < num_blocks; ++i) order.push_back(i);
  }
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor x = at::embedding(embedding, tokens);
    for (std::size_t i : order) x = blocks[i](x);
    return at::linear(x, embedding) * gain;
  }
};

template <typename M>
std::shared_ptr<FakeHost> shard(const Sharded<M>& model, bool checkpoint = false) {
  auto host = std::make_shared<FakeHost>();
  for (std::size_t i = 0; i < model->blocks.size(); ++i)
    host->add(i + 1, "block" + std::to_string(i), model->blocks[i], checkpoint, host);
  host->add(kRootUnit, "root", model, false, host);
  return host;
}

at::Tensor tokens() { return at::arange(9) % 7; }
at::Tensor loss_of(const at::Tensor& logits) { return at::cross_entropy_loss(logits, (tokens() + 1) % 7); }

// Gradients of a plain run, by name; undefined where unused.
template <typename M>
std::map<std::string, at::Tensor> plain(const Sharded<M>& model) {
  loss_of(model(tokens())).backward();
  std::map<std::string, at::Tensor> gradients;
  for (auto& item : model->named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

template <typename M>
void expect_gradients(FakeHost& host, const Sharded<M>& model,
                      const std::map<std::string, at::Tensor>& wanted, double times = 1) {
  for (auto& item : model->named_parameters()) {
    const at::Tensor& expected = wanted.at(item.key());
    const auto found = host.gradients.find(item.value().unsafeGetTensorImpl());
    ASSERT_EQ(found != host.gradients.end(), expected.defined()) << item.key();
    if (expected.defined()) {
      EXPECT_TRUE(at::equal(found->second, expected * times)) << item.key();
    }
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
  }
}

template <typename M>
Sharded<M> make(std::size_t blocks, std::vector<std::size_t> order = {}) {
  return Sharded<M>(std::make_shared<M>(blocks, order));
}

TEST(UnitNode, GradientsAreThoseOfThePlainRunBitByBit) {
  for (const auto& order : std::vector<std::vector<std::size_t>>{{}, {0, 1, 0, 2}, {2, 2, 1}, {1}})
    for (bool checkpoint : {false, true}) {
      const auto wanted = plain(make<Model<>>(3, order));
      auto model = make<Model<>>(3, order);
      auto host = shard(model, checkpoint);
      const at::Tensor logits = model(tokens());
      EXPECT_EQ(host->whole(), 1u);  // the root; nothing else between forward and backward
      loss_of(logits).backward();
      EXPECT_EQ(host->whole(), 0u);
      EXPECT_EQ(host->most_whole, 2u);
      expect_gradients(*host, model, wanted);
    }
}

TEST(UnitNode, BackwardRunsThroughTheUnitsInReverse) {
  auto model = make<Model<>>(2);
  auto host = shard(model);
  loss_of(model(tokens())).backward();
  EXPECT_THAT(host->log, ElementsAre("forward root", "forward block0", "forward block1", "backward block1",
                                     "backward block0"));
}

TEST(UnitNode, NamesStayThoseOfTheModel) {
  auto model = make<Model<>>(2);
  const auto before = model->named_parameters().keys();
  auto host = shard(model);
  EXPECT_EQ(model->named_parameters().keys(), before);
  EXPECT_THAT(before, ::testing::Contains("block1.weight"));
}

TEST(UnitNode, WithoutGradientsEverythingIsFreedAtOnce) {
  auto reference = make<Model<>>(3);
  auto model = make<Model<>>(3);
  auto host = shard(model);
  const at::NoGradGuard no_grad;
  const at::Tensor logits = model(tokens());
  EXPECT_TRUE(at::equal(logits, reference(tokens())));
  EXPECT_FALSE(logits.requires_grad());
  EXPECT_EQ(host->whole(), 0u);
}

TEST(UnitNode, AGraphThatIsKeptGivesItsGradientsAgain) {
  for (bool checkpoint : {false, true}) {
    const auto wanted = plain(make<Model<>>(3));
    auto model = make<Model<>>(3);
    auto host = shard(model, checkpoint);
    const at::Tensor loss = loss_of(model(tokens()));
    loss.backward({}, /*keep_graph=*/true);
    expect_gradients(*host, model, wanted);
    EXPECT_EQ(host->whole(), 0u);
    loss.backward();
    expect_gradients(*host, model, wanted, 2);
    const at::Tensor sum = model(tokens()).sum();  // its own backward needs nothing
    sum.backward();
    EXPECT_THAT(message([&] { sum.backward(); }), HasSubstr("keep_graph = true"));
    EXPECT_EQ(host->whole(), 0u);
  }
}

TEST(UnitNode, SecondDerivativesAreRefused) {
  auto model = make<Model<>>(1);
  auto host = shard(model);
  EXPECT_THAT(message([&] { loss_of(model(tokens())).backward({}, true, /*create_graph=*/true); }),
              HasSubstr("sharded unit 'root': found a backward with create_graph"));
  EXPECT_EQ(host->whole(), 1u);  // refused before anything was touched
}

TEST(UnitNode, ReadingASharedParameterOutsideItsUnitSaysSo) {
  auto model = make<Model<>>(2);
  auto host = shard(model);
  EXPECT_THAT(message([&] { model->blocks[1]->weight.sum(); }),
              HasSubstr("parameter read while sharded: block1"));
}

TEST(UnitNode, ABlockMayUseTheRootsParameters) {
  struct Tied : Block {
    using Block::Block;
    at::Tensor shared;
    at::Tensor forward(at::Tensor x) override { return Block::forward(x) * at::sum(shared * shared); }
  };
  const auto tie = [](const Sharded<Model<Tied>>& model) {
    for (auto& block : model->blocks) block->shared = model->embedding;
    return model;
  };
  for (bool checkpoint : {false, true}) {
    const auto wanted = plain(tie(make<Model<Tied>>(3)));
    auto model = tie(make<Model<Tied>>(3));
    auto host = shard(model, checkpoint);
    loss_of(model(tokens())).backward();
    for (auto& item : model->named_parameters())  // three sums in another order: equal to rounding
      if (wanted.at(item.key()).defined()) {
        EXPECT_LE((host->gradients.at(item.value().unsafeGetTensorImpl()) - wanted.at(item.key()))
                      .norm()
                      .item<double>(),
                  1e-12 * wanted.at(item.key()).norm().item<double>())
            << item.key();
      }
  }
}

TEST(UnitNode, BlocksAreReachedThoughNoInputNeedsAGradient) {
  const auto freeze = [](const Sharded<Model<>>& model) {
    model->embedding.requires_grad_(false);
    model->gain.requires_grad_(false);
    model->blocks[1]->weight.requires_grad_(false);
    return model;
  };
  for (bool checkpoint : {false, true}) {
    const auto wanted = plain(freeze(make<Model<>>(3)));
    auto model = freeze(make<Model<>>(3));
    auto host = shard(model, checkpoint);
    loss_of(model(tokens())).backward();
    expect_gradients(*host, model, wanted);
  }
}

TEST(UnitNode, WhatIsUsedBehindItsBackIsRefused) {
  struct Captures : Block {
    using Block::Block;
    at::Tensor other = at::ones({kHidden}, at::kDouble);
    at::Tensor forward(at::Tensor x) override { return Block::forward(x) * other; }
  };
  for (bool checkpoint : {false, true})
    for (bool leaf : {false, true}) {
      auto model = make<Model<Captures>>(2);
      const at::Tensor outside = at::ones({kHidden}, at::kDouble).requires_grad_();
      model->blocks[1]->other = leaf ? outside : outside * 3;
      auto host = shard(model, checkpoint);
      const std::string error = message([&] { loss_of(model(tokens())).backward(); });
      EXPECT_THAT(error,
                  HasSubstr(leaf ? "a leaf [5] that needs a gradient" : "computed outside (MulBackward"));
      EXPECT_THAT(error, HasSubstr("sharded unit 'block1'"));
      EXPECT_EQ(host->whole(), 0u);
    }
}

// Throws when asked: in forward, or from a hook in backward.
struct Faulty : Block {
  using Block::Block;
  enum class When { kNever, kForward, kBackward } when = When::kNever;
  at::Tensor forward(at::Tensor x) override {
    if (when == When::kForward) throw std::runtime_error("forward broke");
    at::Tensor y = Block::forward(x);
    if (when == When::kBackward && y.requires_grad())
      y.register_hook([](const at::Tensor&) { throw std::runtime_error("backward broke"); });
    return y;
  }
};

TEST(UnitNode, NothingStaysWholeAfterAnException) {
  for (bool checkpoint : {false, true})
    for (auto when : {Faulty::When::kForward, Faulty::When::kBackward}) {
      const auto wanted = plain(make<Model<Faulty>>(3));
      auto model = make<Model<Faulty>>(3);
      auto host = shard(model, checkpoint);
      model->blocks[1]->when = when;
      EXPECT_THAT(message([&] { loss_of(model(tokens())).backward(); }), HasSubstr("broke"));
      EXPECT_EQ(host->whole(), 0u);
      host->gradients.clear();
      model->blocks[1]->when = Faulty::When::kNever;  // and the next step is as if nothing had been
      loss_of(model(tokens())).backward();
      expect_gradients(*host, model, wanted);
      EXPECT_EQ(host->whole(), 0u);
    }
}

TEST(UnitNode, RecomputationDrawsTheSameRandomNumbers) {
  struct Dropout : Block {
    using Block::Block;
    at::Tensor forward(at::Tensor x) override { return at::dropout(Block::forward(x), 0.5, /*train=*/true); }
  };
  const auto seeded = [](const auto& run) {
    at::manual_seed(5);
    return run();
  };
  const auto wanted = seeded([] { return plain(make<Model<Dropout>>(3)); });
  const double next = at::rand({1}, at::kDouble).item<double>();
  auto model = make<Model<Dropout>>(3);
  auto host = shard(model, /*checkpoint=*/true);
  seeded([&] {
    loss_of(model(tokens())).backward();
    return 0;
  });
  expect_gradients(*host, model, wanted);
  EXPECT_EQ(at::rand({1}, at::kDouble).item<double>(), next);  // recomputation leaves the generator alone
}

// Ranks that are threads share the generator: a block that draws nothing must not turn it back under others.
TEST(UnitNode, RecomputationWithoutRandomNumbersLeavesTheGeneratorAlone) {
  static std::vector<at::Tensor> states;
  struct Watched : Block {
    using Block::Block;
    at::Tensor forward(at::Tensor x) override {
      states.push_back(at::detail::getDefaultCPUGenerator().get_state());
      return Block::forward(x);
    }
  };
  auto model = make<Model<Watched>>(1);
  auto host = shard(model, /*checkpoint=*/true);
  const at::Tensor loss = loss_of(model(tokens()));
  (void)at::rand({1});
  loss.backward();
  ASSERT_EQ(states.size(), 2u);
  EXPECT_FALSE(at::equal(states[0], states[1]));
  EXPECT_TRUE(at::equal(states[1], at::detail::getDefaultCPUGenerator().get_state()));
}

TEST(UnitNode, ARootWhoseOutputIsAConstantStillComesByInBackward) {
  struct Constant : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", at::ones({2}, at::kDouble));
    at::Tensor forward() { return at::zeros({1}, at::kDouble); }
  };
  Sharded<Constant> constant(std::make_shared<Constant>());
  auto host = std::make_shared<FakeHost>();
  host->add(kRootUnit, "root", constant, false, host);
  const at::Tensor loss = constant();
  ASSERT_TRUE(loss.requires_grad());
  loss.sum().backward();
  EXPECT_EQ(host->whole(), 0u);
  EXPECT_TRUE(host->gradients.empty());
}

TEST(UnitNode, AHundredBlocksDeep) {
  for (bool checkpoint : {false, true}) {
    const auto wanted = plain(make<Model<>>(100));
    auto model = make<Model<>>(100);
    auto host = shard(model, checkpoint);
    loss_of(model(tokens())).backward();
    EXPECT_EQ(host->most_whole, 2u);
    expect_gradients(*host, model, wanted);
  }
}

TEST(UnitNode, OnlyTheInputsGradient) {
  auto reference = make<Model<>>(2), model = make<Model<>>(2);
  auto host = shard(model);
  struct Head {
    static at::Tensor of(const Sharded<Model<>>& m, const at::Tensor& x) {
      return m.run({x}, [&](const std::vector<at::Tensor>& in) {
        return std::vector<at::Tensor>{m->blocks[1](m->blocks[0](in[0]))};
      })[0];
    }
  };
  at::Tensor x = at::ones({3, kHidden}, at::kDouble).requires_grad_();
  const auto gradient = [&](const auto& m) { return torch::autograd::grad({Head::of(m, x).sum()}, {x})[0]; };
  EXPECT_TRUE(at::equal(gradient(model), gradient(reference)));
  EXPECT_TRUE(host->gradients.empty());  // nobody asked for them
  EXPECT_EQ(host->whole(), 0u);
}

TEST(UnitNode, RanksAsThreads) {
  const auto wanted = plain(make<Model<>>(4));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.emplace_back([&, rank] {
      at::set_num_threads(1);
      auto model = make<Model<>>(4);
      auto host = shard(model, /*checkpoint=*/rank % 2 == 1);
      for (int step = 0; step < 50; ++step) {
        host->gradients.clear();
        loss_of(model(tokens())).backward();
        expect_gradients(*host, model, wanted);
      }
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace
}  // namespace isograd
