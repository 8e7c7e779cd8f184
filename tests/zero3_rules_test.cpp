// ZeRO-3: memory, gathers and traffic, in which precision, what it asks of a model, and what it says when
// that is missing.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "layout/cost/meter.hpp"
#include "zero3_model.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using zero3::Model;
using zero3::Reference;

Sharded<Model> make(at::ScalarType type = at::kDouble, std::vector<std::size_t> order = {0, 1, 2},
                    at::Device device = at::kCPU) {
  return std::make_shared<Model>(type, std::move(order), device);
}

constexpr auto message = [](auto&& action) { return error_testing::error_of<std::exception>(action); };

std::int64_t padded(std::int64_t numel, std::int64_t to) { return (numel + to - 1) / to * to; }

// Elements of a unit's flats as they are laid out: slots at multiples of 32, shards at multiples of 16.
std::int64_t flat_numel(const std::vector<std::int64_t>& sizes, int shards) {
  std::int64_t sum = 0;
  for (std::int64_t size : sizes) sum += padded(size, 32);
  return padded(sum, 16 * shards);
}
const std::vector<std::int64_t> kBlock = {49, 7, 1, 7, 6}, kRoot = {91, 1, 15}, kFrozen = {7};

TEST(Zero3Memory, WhatIsWholeStaysWithinTheLimit) {
  const int ranks = 3;
  const std::int64_t frozen = 8 * flat_numel(kFrozen, ranks);
  const std::int64_t block = 8 * flat_numel(kBlock, ranks) + frozen;
  const std::int64_t root = 8 * flat_numel(kRoot, ranks) + frozen;
  struct Case {
    std::int64_t limit, most;
    FullyShardOptions options{};
  };
  const std::vector<Case> cases = {
      {0, root + 2 * block},
      {root + 2 * block, root + 2 * block},
      {root + 2 * block - 1, root + block},  // no room for what comes next
      {root + block, root + block},
      {0, root + block, {.prefetch = false}},
      {root + 3 * block, root + 3 * block, {.reshard_after_forward = false}},
      {0, 0, {.share_parameters = true}},
  };
  for (Case each : cases)
    run_ranks(ranks, [&](World& world) {
      auto model = make();
      FullyShardOptions options = each.options;
      options.gather_limit_bytes = each.limit;
      const auto layout = fully_shard(model, model->uses(), world.group, options);
      zero3::accumulate(*layout, model, world.rank, ranks, 0, 3);
      EXPECT_EQ(layout->most_gathered_bytes(), each.most) << each.limit;
      EXPECT_GE(layout->gather_bound_bytes(), each.most) << each.limit;
      if (each.limit == 0) {
        EXPECT_EQ(layout->gather_bound_bytes(), each.most);
      }
      EXPECT_EQ(layout->gathered_bytes(), 0);
    });
  for (const auto& [limit, options] : std::vector<std::pair<std::int64_t, FullyShardOptions>>{
           {root + block - 1, {}}, {root + 3 * block - 1, {.reshard_after_forward = false}}, {8, {}}})
    run_ranks(ranks, [&](World& world) {
      auto model = make();
      FullyShardOptions limited = options;
      limited.gather_limit_bytes = limit;
      const std::string error = message([&] { fully_shard(model, model->uses(), world.group, limited); });
      EXPECT_THAT(error,
                  HasSubstr(limit == root + block - 1 ? "sharded unit 'block0'" : "sharded unit 'root'"));
      EXPECT_THAT(error, HasSubstr("gather_limit_bytes"));
    });
}

TEST(Zero3Memory, NothingIsWholeBetweenForwardAndBackward) {
  run_ranks(3, [](World& world) {
    for (bool reshard_root : {true, false}) {
      auto model = make();
      const auto layout = fully_shard(model, model->uses(), world.group, {.reshard_root = reshard_root});
      const auto from = zero3::batch(world.rank, 0, 0);
      const at::Tensor loss = model(from.tokens, from.odd).sum();
      const std::int64_t root = 8 * (flat_numel(kRoot, 3) + flat_numel(kFrozen, 3));
      EXPECT_EQ(layout->gathered_bytes(), reshard_root ? 0 : root);
      layout->begin_backward(true);
      loss.backward();
      EXPECT_EQ(layout->gathered_bytes(), 0);
      {
        const at::NoGradGuard no_grad;
        (void)model(from.tokens, from.odd);
        EXPECT_EQ(layout->gathered_bytes(), 0);
      }
      (void)model(from.tokens, from.odd);  // and no backward: the step's end frees it
      layout->finish_reduction();
      EXPECT_EQ(layout->gathered_bytes(), 0);
    }
  });
}

// By the allocator: besides the shards, two buffers of the largest block's gradients and one of the root's;
// after a step what was gathered at a time. Whole parameters are given back when they are let go.
TEST(Zero3Memory, KeepsTheBuffersOfOneStepAndNoMore) {
  MemoryMeter::install();
  for (const int ranks : {2, 3, 4})
    run_ranks(ranks, [&](World& world) {
      MemoryMeter meter;
      const auto kept = [&] { return meter.alive() + meter.shared(); };
      const std::int64_t start = kept();
      auto model = make();
      const auto layout = fully_shard(model, model->uses(), world.group);
      const std::int64_t block = 8 * flat_numel(kBlock, ranks), root = 8 * flat_numel(kRoot, ranks);
      const std::int64_t frozen = 8 * 4 * flat_numel(kFrozen, ranks);
      const std::int64_t shards = (2 * (3 * block + root) + frozen) / ranks;  // parameters and gradients
      EXPECT_EQ(kept() - start, shards + 2 * block + root);
      (void)layout->whole_parameters();  // before any step
      EXPECT_EQ(kept() - start, shards + 2 * block + root);
      zero3::accumulate(*layout, model, world.rank, ranks, 0, 2);
      const std::int64_t after_a_step = kept();
      EXPECT_LE(after_a_step - start, shards + 2 * block + root + (root + 2 * block + frozen * 3 / 4));
      for (int step = 1; step < 3; ++step) {
        const auto whole = layout->whole_parameters();
        EXPECT_GE(kept() - start, shards + 2 * block + root + (root + 3 * block + frozen));
      }
      EXPECT_LE(kept(), after_a_step);
      zero3::accumulate(*layout, model, world.rank, ranks, 1, 2);
      EXPECT_LE(kept(), after_a_step);
    });
}

// Bytes on padded sizes, with the factor (N - 1) / N: 3 G Psi; (2 G + 1) Psi with one reduction a step; the
// root is gathered once a micro-batch where it stays whole.
TEST(Zero3Traffic, IsWhatTheFormulasSay) {
  for (int ranks : {2, 3, 4, 8})
    for (int replicas : {1, 2})
      for (int micros : {1, 3})
        for (bool once : {false, true})
          for (bool reshard_root : {false, true})
            for (bool share : {false, true}) {
              if (ranks % replicas != 0) continue;
              run_ranks(ranks, [&](World& world) {
                auto model = make(at::kFloat);
                const Mesh mesh(world, data_grid(world.size, {.dp_replicate = replicas}));
                const Group in_shard_group = mesh.along({"dp_shard"}),
                            in_replicas = mesh.along({"dp_replicate"});
                const auto layout = fully_shard(
                    model, model->uses(), mesh,
                    {.reshard_root = reshard_root, .reduce_once = once, .share_parameters = share});
                const auto before = [&](Group group) { return group.traffic().bytes(); };
                const std::int64_t shard0 = before(in_shard_group), replica0 = before(in_replicas);
                zero3::accumulate(*layout, model, world.rank, ranks, 0, micros);
                const int shards = ranks / replicas;
                const std::int64_t blocks = 4 * 3 * flat_numel(kBlock, shards);
                const std::int64_t root = 4 * flat_numel(kRoot, shards);
                const std::int64_t frozen = 4 * flat_numel(kFrozen, shards);  // of each unit: gathered only
                const std::int64_t gathers = micros, reductions = once ? 1 : micros;
                std::int64_t whole = reductions * (blocks + root);
                if (!share)
                  whole += gathers * (2 * (blocks + 3 * frozen) + (reshard_root ? 2 : 1) * (root + frozen));
                EXPECT_EQ(before(in_shard_group) - shard0, shards == 1 ? 0 : whole * (shards - 1) / shards);
                EXPECT_EQ(before(in_replicas) - replica0,
                          2 * ((blocks + root) / shards) * (replicas - 1) / replicas);
              });
            }
}

// A rank that leaves blocks out, or whose model gives a constant, keeps up with the others.
TEST(Zero3Rules, RanksMayLeaveBlocksOut) {
  const std::vector<std::vector<std::size_t>> skips = {{}, {0, 1, 2, 3, 4}, {4}, {0, 2}};
  for (bool prefetch : {true, false})
    for (bool checkpoint : {true, false})
      run_ranks(5, [&](World& world) {
        auto model = make(at::kDouble, {0, 1, 0, 2, 2});
        const Reference reference(*model);
        const auto layout =
            fully_shard(model, model->uses(), world.group, {.checkpoint = checkpoint, .prefetch = prefetch});
        const auto from = [](int rank, int micro) { return zero3::batch(2 * rank, 0, micro); };
        layout->zero_gradients();
        for (int micro : {0, 1}) {
          // Each rank leaves other blocks out, and others in the next micro-batch; one gives a constant.
          const int role = (world.rank + micro) % 5;
          model->constant = role == 4;
          if (role < 4) model->skip = skips[static_cast<std::size_t>(role)];
          const auto mine = from(world.rank, micro);
          const at::Tensor logits = model(mine.tokens, mine.odd);
          layout->begin_backward(micro == 1);
          (role == 4 ? logits.sum() : zero3::loss(logits, mine, 1)).backward();
        }
        layout->finish_reduction();
        at::Tensor sum = at::zeros({}, at::kDouble);
        for (int rank = 0; rank < 5; ++rank)
          for (int micro : {0, 1})
            if (const int role = (rank + micro) % 5; role < 4) {
              const auto theirs = from(rank, micro);
              sum = sum +
                    zero3::loss(reference.forward(theirs, skips[static_cast<std::size_t>(role)]), theirs, 1);
            }
        EXPECT_LE(zero3::worst_error(*layout, reference.gradients_of(sum)), 1e-10);
      });
}

TEST(Zero3Rules, WhatBreaksThemIsNamed) {
  run_ranks(2, [](World& world) {
    const auto error = [&](const std::function<void(Sharded<Model>&)>& act,
                           std::vector<UnitHandle> uses = {}) {
      auto model = make();
      const auto layout = fully_shard(model, uses.empty() ? model->uses() : uses, world.group);
      return message([&] { act(model); });
    };
    const auto x = [] { return at::ones({2, zero3::kHidden}, at::kDouble); };
    EXPECT_THAT(error([&](auto& model) { model->blocks[1](x(), false); }),
                HasSubstr("sharded unit 'block1': found a call outside of the model's own"));
    EXPECT_THAT(error([&](auto& model) {
                  model->order = {1, 0};
                  model(at::zeros({2}, at::kLong), false);
                }),
                HasSubstr("sharded unit 'block0': found a call after that of 'block1'"));
    EXPECT_THAT(error([&](auto& model) {
                  model->order = {0, 0};
                  model(at::zeros({2}, at::kLong), false);
                }),
                HasSubstr("a block used twice twice"));
    EXPECT_THAT(error([&](auto& model) { model->blocks[1]->weight.sum(); }),
                HasSubstr("parameter read while sharded: those of unit 'block1'"));
    EXPECT_THAT(error([&](auto& model) { model->embedding.sum(); }),
                HasSubstr("parameter read while sharded: those of unit 'root'"));
    auto model = make();
    EXPECT_THAT(message([&] {
                  fully_shard(model, {model, model->blocks[0]}, world.group);
                }),
                HasSubstr("the root among its own blocks"));
    Sharded<zero3::Block> stranger(std::make_shared<zero3::Block>(7, at::kDouble));
    EXPECT_THAT(message([&] { fully_shard(model, {stranger}, world.group); }),
                HasSubstr("Register the block's module in the model"));
    auto layout = fully_shard(model, model->uses(), world.group);
    EXPECT_THAT(message([&] { fully_shard(model, model->uses(), world.group); }),
                HasSubstr("one layout at a time"));
    const at::Tensor late = model(at::zeros({2}, at::kLong), false);
    layout.reset();
    EXPECT_THAT(message([&] { late.sum().backward(); }), HasSubstr("after the layout was destroyed"));
    EXPECT_THAT(message([&] { model(at::zeros({2}, at::kLong), false); }), HasSubstr("while sharded"));
  });
}

// On every rank, by the first parameter that differs.
TEST(Zero3Rules, RanksWithDifferentModelsAreToldApart) {
  run_ranks(2, [](World& world) {
    auto model = make();
    {
      const at::NoGradGuard no_grad;
      if (world.rank == 1) model->blocks[2]->frozen[3] += 1;
    }
    EXPECT_THAT(message([&] { fully_shard(model, model->uses(), world.group); }),
                HasSubstr("'block2.frozen'"));
  });
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  const auto told = [](const std::function<void(Named&)>& differs, const std::string& what,
                       const std::string& name_here, const std::string& name_there) {
    run_ranks(3, [&](World& world) {
      const auto leaf = [](at::IntArrayRef shape) { return at::ones(shape, at::kDouble).requires_grad_(); };
      Named named = {{"a", leaf({3})}, {"b", leaf({2, 2})}, {"c", leaf({5})}, {"frozen", at::ones({4})}};
      if (world.rank == 2) differs(named);
      const UnitHandle root([&] {
        std::vector<at::Tensor> tensors;
        for (const auto& [name, tensor] : named) tensors.push_back(tensor);
        return tensors;
      });
      const std::string error = message([&] { fully_shard(root, named, {}, world.group); });
      EXPECT_THAT(error, HasSubstr("rank 2 and rank 0 differ in the " + what));
      EXPECT_THAT(error, HasSubstr("'" + (world.rank == 2 ? name_there : name_here) + "'"));
    });
  };
  const std::string identity = "name, shape or dtype of parameter ";
  const auto with = [](std::size_t i, const at::Tensor& tensor) {
    return [=](Named& named) { named[i].second = tensor.requires_grad_(named[i].second.requires_grad()); };
  };
  told([](Named& named) { named[1].first = "z"; }, identity + "1", "b", "z");
  told([](Named& named) { std::swap(named[1], named[2]); }, identity + "1", "b", "c");
  told([](Named& named) { named[1].second.requires_grad_(false); }, identity + "1", "b", "c");
  told(with(2, at::ones({6}, at::kDouble)), identity + "2", "c", "c");
  told(with(1, at::ones({4}, at::kDouble)), identity + "1", "b", "b");
  told(with(1, at::ones({2, 2})), identity + "1", "b", "b");
  told(with(3, at::ones({4}, at::kDouble)), identity + "3", "frozen", "frozen");
  told(with(2, at::full({5}, 1 + 1e-15, at::kDouble)), "values of parameter 2", "c", "c");
  told(with(3, at::zeros({4})), "values of parameter 3", "frozen", "frozen");
}

TEST(Zero3Rules, AfterAnExceptionOnAllRanksTheNextStepIsRight) {
  for (const char* where : {"forward", "backward"})
    for (const auto& [checkpoint, finishes] : {std::pair{false, true}, {true, true}, {true, false}})
      run_ranks(3, [&](World& world) {
        auto model = make();
        const Reference reference(*model);
        const auto layout = fully_shard(model, model->uses(), world.group, {.checkpoint = checkpoint});
        int calls = 0;
        zero3::at_place = [&](const char* place) {
          if (std::string(place) != "block") return;
          // The second block in forward; with checkpointing also the second one that backward computes again.
          if (++calls == (std::string(where) == "forward" ? 2 : 5)) throw std::runtime_error("broke");
        };
        const std::string error = message([&] { zero3::accumulate(*layout, model, world.rank, 3, 0, 1); });
        zero3::at_place = nullptr;
        const bool throws = std::string(where) == "forward" || checkpoint;
        EXPECT_THAT(error, HasSubstr(throws ? "broke" : "no error"));
        EXPECT_EQ(layout->gathered_bytes(), 0);
        if (finishes) layout->finish_reduction();
        zero3::accumulate(*layout, model, world.rank, 3, 1, 2);
        EXPECT_LE(zero3::worst_error(*layout, reference.gradients(3, 1, 2)), 1e-10);
      });
}

TEST(Zero3Rules, WholeParametersAreTheModels) {
  for (bool share : {false, true})
    run_ranks(3, [&](World& world) {
      auto model = make();
      const Reference reference(*model);
      const auto layout = fully_shard(model, model->uses(), world.group, {.share_parameters = share});
      const auto from = zero3::batch(2, 0, 0);
      {
        const auto whole = layout->whole_parameters();
        for (auto& item : model->named_parameters())
          EXPECT_TRUE(at::equal(item.value(), reference.p.at(item.key()))) << item.key();
        if (world.rank == 0) {  // one rank alone may compute: nothing is exchanged
          const at::NoGradGuard no_grad;
          EXPECT_TRUE(at::equal(model(from.tokens, from.odd), reference.forward(from)));
        }
        EXPECT_THAT(message([&] { layout->whole_parameters(); }), HasSubstr("one at a time"));
        if (!share) {
          EXPECT_THAT(message([&] { layout->publish_parameters(); }), HasSubstr("whole_parameters()"));
        }
        world.group.barrier();
      }
      EXPECT_EQ(layout->gathered_bytes(), 0);
      zero3::accumulate(*layout, model, world.rank, 3, 0, 1);
      EXPECT_LE(zero3::worst_error(*layout, reference.gradients(3, 0, 1)), 1e-10);
    });
}

// A model without values: each rank fills one parameter at a time and keeps its shard.
TEST(Zero3Rules, StartsFromTheMetaDevice) {
  for (bool share : {false, true})
    for (int ranks : {1, 3})
      run_ranks(ranks, [&](World& world) {
        auto whole = make();
        const Reference reference(*whole);
        auto model = make(at::kDouble, {0, 1, 2}, at::kMeta);
        EXPECT_TRUE(model->embedding.is_meta());
        if (!share) {
          EXPECT_THAT(message([&] { fully_shard(model, model->uses(), world.group); }),
                      HasSubstr("FullyShardOptions::initialize"));
          model = make(at::kDouble, {0, 1, 2}, at::kMeta);
        }
        const auto layout = fully_shard(
            model, model->uses(), world.group,
            {.share_parameters = share, .initialize = [&](const std::string& name, at::Tensor& values) {
               values.copy_(reference.p.at(name));
             }});
        EXPECT_FALSE(model->embedding.is_meta());
        zero3::accumulate(*layout, model, world.rank, ranks, 0, 2);
        EXPECT_LE(zero3::worst_error(*layout, reference.gradients(ranks, 0, 2)), 1e-10);
      });
}

// A parameter without values that is all that its unit has: it fills the storage that the unit keeps.
TEST(Zero3Rules, AUnitOfOneParameterStartsFromTheMetaDevice) {
  for (int ranks : {1, 2})
    run_ranks(ranks, [&](World& world) {
      at::Tensor weight = at::empty({16, 16}, at::TensorOptions(at::kDouble).device(at::kMeta));
      weight.requires_grad_();
      const UnitHandle root([&] { return std::vector<at::Tensor>{weight}; });
      const auto layout =
          fully_shard(root, {{"weight", weight}}, {}, Mesh(world, Grid({{"dp_shard", world.size}})),
                      {.initialize = [](const std::string&, at::Tensor& values) { values.fill_(3); }});
      const at::Tensor other =
          at::full({256}, 7, at::kDouble);  // where memory given back would be found again
      const auto whole = layout->whole_parameters();
      EXPECT_TRUE(at::equal(weight.detach(), at::full({16, 16}, 3, at::kDouble))) << ranks;
    });
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

// The output of a unit is cast, sharded or not; its gradient comes back in the unit's own type.
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
