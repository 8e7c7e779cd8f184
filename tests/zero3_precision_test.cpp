// ZeRO-3 in bf16: what gradients are kept and reduced in, and what units return.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "zero3_model.hpp"

namespace isograd {
namespace {

Sharded<zero3::Model> make(at::ScalarType type) {
  return std::make_shared<zero3::Model>(type, std::vector<std::size_t>{0, 1, 2});
}

// bf16 gradients are packed and summed in fp32, as the other strategies do: the same bits.
TEST(Zero3Precision, Bf16IsReducedInFp32) {
  run_ranks(3, [](World& world) {
    auto plain = make(at::kBFloat16), model = make(at::kBFloat16);
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (auto& item : plain->named_parameters()) named.emplace_back(item.key(), item.value());
    const auto wanted = bucketed(trainable_parameters(named), world.group);
    const auto layout = fully_shard(model, model->uses(), world.group);
    zero3::accumulate(*wanted, plain, world.rank, 3, 0, 1);
    zero3::accumulate(*layout, model, world.rank, 3, 0, 1);
    const auto expected = wanted->views(), found = layout->views();
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].name, expected[i].name);
      EXPECT_EQ(found[i].gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(found[i].gradient, expected[i].gradient)) << found[i].name;
    }
  });
}

// In bf16 where asked, for one unit or for all: half the bytes, and each sum is rounded once from fp32.
// Without accumulation that is the fp32 run's gradient of every rank rounded, added up and rounded again.
TEST(Zero3Precision, Bf16GradientsIfAsked) {
  for (bool once : {false, true})
    run_ranks(3, [&](World& world) {
      auto wide = make(at::kBFloat16), narrow = make(at::kBFloat16), mixed = make(at::kBFloat16);
      mixed->blocks[1].set_fp32_gradients(true);
      const auto reference = fully_shard(wide, wide->uses(), world.group, {.reduce_once = once});
      const auto layout =
          fully_shard(narrow, narrow->uses(), world.group, {.reduce_once = once, .fp32_gradients = false});
      const auto both =
          fully_shard(mixed, mixed->uses(), world.group, {.reduce_once = once, .fp32_gradients = false});
      for (auto* each : {&layout, &both})
        zero3::accumulate(**each, each == &layout ? narrow : mixed, world.rank, 3, 0, 1);
      zero3::accumulate(*reference, wide, world.rank, 3, 0, 1);
      const auto found = layout->views(), partly = both->views(), wanted = reference->views();
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(found[i].gradient.scalar_type(), at::kBFloat16);
        const bool in_fp32 = found[i].name.starts_with("block1.");
        EXPECT_EQ(partly[i].gradient.scalar_type(), in_fp32 ? at::kFloat : at::kBFloat16) << found[i].name;
        if (in_fp32) {
          EXPECT_TRUE(at::equal(partly[i].gradient, wanted[i].gradient)) << found[i].name;
        }
        // bf16 has 8 bits: at most 5 roundings (a rank's uses of a parameter, and the sum), each 2^-9 of what
        // is rounded, which no rank's part exceeds by more than the sum of magnitudes.
        const at::Tensor off = (found[i].gradient.to(at::kFloat) - wanted[i].gradient).abs();
        at::Tensor magnitudes = wanted[i].gradient.abs().max() * 3;
        EXPECT_LE(off.max().item<double>(), 5 * 0x1p-9 * magnitudes.item<double>()) << found[i].name;
      }
    });
}

// What a unit returns is cast, sharded or not; its gradient comes back in the unit's own type.
TEST(Zero3Precision, OutputsAreCastIfAsked) {
  run_ranks(2, [](World& world) {
    auto model = make(at::kBFloat16);
    model->blocks[0].set_output_dtype(at::kFloat);
    const at::Tensor x = at::ones({2, zero3::kHidden}, at::kBFloat16).requires_grad_();
    const at::Tensor alone = model->blocks[0](x, false);
    EXPECT_EQ(alone.scalar_type(), at::kFloat);
    EXPECT_EQ(model->blocks[1](x, false).scalar_type(), at::kBFloat16);
    model->blocks[0].set_output_dtype(std::nullopt);
    model.set_output_dtype(at::kDouble);
    const auto layout = fully_shard(model, model->uses(), world.group);
    layout->zero_gradients();
    const zero3::Batch from = zero3::batch(0, 0, 0);
    const at::Tensor logits = model(from.tokens, from.odd);
    EXPECT_EQ(logits.scalar_type(), at::kDouble);
    layout->begin_backward(true);
    zero3::loss(logits, from, 1).backward();
    layout->finish_reduction();
    EXPECT_GT(global_norm(layout->buckets(), 0, world.group).norm, 0);
  });
}

}  // namespace
}  // namespace isograd
