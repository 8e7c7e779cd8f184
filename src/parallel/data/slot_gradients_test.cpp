// Gradients of a step's first micro-batch are written to their slots, later ones are added, and functions may
// compute them there.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "comm/autograd.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor sines(at::IntArrayRef shape, double first) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) + first)
      .sin()
      .view(shape)
      .requires_grad_(true);
}

std::vector<NamedParameter> numbered(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<std::string, at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) list.emplace_back("p" + std::to_string(list.size()), tensor);
  return trainable_parameters(list);
}

// x wᵀ; counts how often the gradient of w was computed where it is kept.
thread_local int in_place = 0;
thread_local double planted = 1;                     // a mistake: such gradients are that many times as large
thread_local std::optional<at::ScalarType> kept_in;  // the type in which a place is asked for
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x.mm(w.t());
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dw = gradients[0].t().mm(saved[0]);
    const at::Tensor dx = ctx->needs_input_grad(0) ? gradients[0].mm(saved[1]) : at::Tensor();
    auto [memory, adds] =
        differentiable::take_gradient_place(saved[1], kept_in ? *kept_in : saved[1].scalar_type());
    if (!memory.defined()) return {dx, dw};
    ++in_place;
    if (adds)
      memory.add_(dw);
    else
      memory.copy_(dw * planted);
    return {dx, differentiable::gradient_in(memory, saved[1])};
  }
};

const std::vector<std::vector<std::int64_t>> kShapes = {{3, 4}, {5}, {3, 4}, {2, 2}};
std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> all;
  for (const auto& shape : kShapes) all.push_back(sines(shape, static_cast<double>(all.size())));
  return all;
}

// Parameters: in a product, plain, in two products and in a sum, in none.
at::Tensor loss_of(const std::vector<at::Tensor>& p, int micro_batch, bool plain) {
  const at::Tensor x = sines({6, 4}, 10 + micro_batch).detach();
  const auto product = [&](const at::Tensor& w) { return plain ? x.mm(w.t()) : Product::apply(x, w); };
  return product(p[0]).square().sum() + p[1].exp().sum() * (micro_batch + 1) + product(p[2]).sin().sum() +
         (product(p[2]) * product(p[2]).detach()).sum() + (p[2] * 3).cos().sum();
}

std::vector<at::Tensor> wanted(int micro_batches) {
  const auto p = parameters();
  for (int i = 0; i < micro_batches; ++i) loss_of(p, i, /*plain=*/true).backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& one : p)
    gradients.push_back(one.grad().defined() ? one.grad() : at::zeros_like(one.detach()));
  return gradients;
}

// Two steps; before each all slots have what nobody should read.
void expect_steps(int ranks, int micro_batches, const DataParallelOptions& options, int computed_in_place,
                  const std::function<void(std::vector<at::Tensor>&)>& change = {}) {
  const auto expected = wanted(micro_batches);
  run_ranks(ranks, [&](World& world) {
    auto p = parameters();
    const auto layout = bucketed(numbered(p), world.group, options);
    std::vector<at::Tensor> slots;
    for (const at::Tensor& one : p) slots.push_back(one.grad());
    if (change) change(p);
    for (int step = 0; step < 2; ++step) {
      layout->zero_gradients();
      for (const at::Tensor& one : p) EXPECT_FALSE(one.grad().defined());
      for (const at::Tensor& slot : slots) slot.detach().fill_(std::nan(""));
      in_place = 0;
      for (int i = 0; i < micro_batches; ++i) {
        layout->begin_backward(i + 1 == micro_batches);
        loss_of(p, i, /*plain=*/false).backward();
      }
      layout->finish_reduction();
      EXPECT_EQ(in_place, computed_in_place);
      for (std::size_t i = 0; i < p.size(); ++i)
        EXPECT_TRUE(layout->views()[i].gradient.allclose(expected[i] * ranks, 1e-12, 1e-12))
            << ranks << " ranks, " << micro_batches << " micro-batches, parameter " << i << "\n"
            << layout->views()[i].gradient << expected[i] * ranks;
    }
  });
}

TEST(SlotGradients, AreThoseOfPlainAutograd) {
  for (const int ranks : {1, 2, 3})
    for (const int micro_batches : {1, 2, 3})
      for (const bool overlap : {true, false})
        // One of the third parameter's two uses.
        expect_steps(ranks, micro_batches, {.bucket_bytes = 64, .overlap = overlap}, 2 * micro_batches);
}

// Whoever looks at a gradient on its way must see it alone, not the sum with earlier ones.
TEST(SlotGradients, AreNotComputedInPlaceWhereAHookLooks) {
  expect_steps(1, 2, {}, 2, [](std::vector<at::Tensor>& p) {
    p[0].register_hook([](const at::Tensor& gradient) { return gradient * 1; });
  });
}

TEST(SlotGradients, AreLeftAloneByGradientsForACaller) {
  const auto p = parameters();
  const auto layout = bucketed(numbered(p), Group::solo(), {});
  layout->zero_gradients();
  layout->begin_backward(true);
  loss_of(p, 0, false).backward();
  in_place = 0;
  const auto asked = torch::autograd::grad({loss_of(p, 1, false)}, {p[0], p[2]});
  EXPECT_EQ(in_place, 0);
  const auto q = parameters();
  const auto plain = torch::autograd::grad({loss_of(q, 1, true)}, {q[0], q[2]});
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(asked[i].allclose(plain[i], 1e-12, 1e-12));
  layout->finish_reduction();
  for (std::size_t i = 0; i < p.size(); ++i)
    EXPECT_TRUE(layout->views()[i].gradient.allclose(wanted(1)[i], 1e-12, 1e-12));
}

// As embeddings give them: the first one sparse, or none.
TEST(SlotGradients, MayBeSparseOrMissing) {
  const at::Tensor table = sines({5, 3}, 0);
  const at::Tensor rows = at::tensor({1, 3, 1}, at::kLong);
  const auto layout = bucketed(numbered({table}), Group::solo(), {});
  for (int step = 0; step < 2; ++step) {
    layout->zero_gradients();
    for (int i = 0; i < 3; ++i) {
      layout->begin_backward(i == 2);
      const at::Tensor values = at::embedding(table, rows, -1, false, /*sparse=*/i != 1);
      if (i > 0 || step == 0) (values.exp().sum() * (i + 1)).backward();
    }
    layout->finish_reduction();
    const at::Tensor plain = sines({5, 3}, 0);
    (at::embedding(plain, rows).exp().sum() * (step == 0 ? 6 : 5)).backward();
    EXPECT_TRUE(layout->views()[0].gradient.allclose(plain.grad(), 1e-12, 1e-12));
  }
}

// Gradients of bf16 parameters are added up in fp32: what is computed in bf16 has no place there.
TEST(SlotGradients, OfAnotherTypeAreNotComputedInPlace) {
  const at::Tensor w = sines({3, 4}, 0).detach().to(at::kBFloat16).requires_grad_(true);
  const at::Tensor x = at::full({6, 4}, 0.5, at::kBFloat16);
  const auto layout = bucketed(numbered({w}), Group::solo(), {});
  in_place = 0;
  layout->zero_gradients();
  for (int i = 0; i < 3; ++i) {
    layout->begin_backward(i == 2);
    Product::apply(x, w).sum().backward();
  }
  layout->finish_reduction();
  EXPECT_EQ(in_place, 0);
  EXPECT_EQ(layout->views()[0].gradient.scalar_type(), at::kFloat);
  EXPECT_TRUE(layout->views()[0].gradient.equal(at::full({3, 4}, 9.f)));
}

// Unless whoever computes them can write fp32: then they are what was written, unrounded, also where another
// use of the parameter adds a bf16 gradient. 1 + 2^-12 has no bf16.
TEST(SlotGradients, OfAnotherTypeAreComputedInPlaceWhereAskedFor) {
  struct Writes : torch::autograd::Function<Writes> {
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& w) {
      ctx->save_for_backward({w});
      return w.sum();
    }
    static variable_list backward(AutogradContext* ctx, const variable_list&) {
      const at::Tensor w = ctx->get_saved_variables()[0];
      EXPECT_FALSE(differentiable::take_gradient_place(w, at::kDouble).memory.defined());
      const auto [memory, adds] = differentiable::take_gradient_place(w, at::kFloat);
      const at::Tensor dw = at::full(w.sizes(), 1 + std::ldexp(1., -12), at::kFloat);
      if (!memory.defined()) return {dw.to(at::kBFloat16)};
      ++in_place;
      const at::Tensor to = memory;
      adds ? to.add_(dw) : to.copy_(dw);
      return {differentiable::gradient_in(memory, w)};
    }
  };
  for (const int uses : {1, 2}) {  // the second finds the place taken
    for (const bool plain : {false, true}) {
      const at::Tensor w = sines({3, 4}, 0).detach().to(at::kBFloat16).requires_grad_(true);
      const auto layout = bucketed(numbered({w}), Group::solo(), {});
      for (int step = 0; step < 2; ++step) {
        const at::Tensor slot = layout->views()[0].gradient;
        layout->zero_gradients();
        slot.fill_(std::nan(""));
        in_place = 0;
        for (int i = 0; i < 3; ++i) {
          layout->begin_backward(i == 2);
          at::Tensor loss = Writes::apply(w);
          if (uses == 2) loss = loss + Writes::apply(w);
          if (plain) loss = loss + (w * 2).sum();
          loss.backward();
        }
        layout->finish_reduction();
        EXPECT_EQ(in_place, 3);
        const double expected = 3 * (1 + std::ldexp(1., -12)) + 3 * (uses - 1) + (plain ? 6 : 0);
        const at::Tensor gradient = layout->views()[0].gradient;
        EXPECT_EQ(gradient.scalar_type(), at::kFloat);
        EXPECT_TRUE(gradient.equal(at::full({3, 4}, expected, at::kFloat))) << gradient << expected;
      }
    }
  }
}

// A planted mistake: the place is taken, and what was there before is not added to.
TEST(SlotGradients, APlaceThatIsOverwrittenIsSeen) {
  struct Overwrites : torch::autograd::Function<Overwrites> {
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& w) {
      ctx->save_for_backward({w});
      return w * 2;
    }
    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
      return {differentiable::take_gradient_place(ctx->get_saved_variables()[0], at::kDouble)
                  .memory.copy_(gradients[0] * 2)};
    }
  };
  const at::Tensor w = sines({3}, 0);
  const auto layout = bucketed(numbered({w}), Group::solo(), {});
  layout->zero_gradients();
  for (int i = 0; i < 2; ++i) {
    layout->begin_backward(i == 1);
    Overwrites::apply(w).sum().backward();
  }
  layout->finish_reduction();
  EXPECT_FALSE(layout->views()[0].gradient.allclose(at::full({3}, 4, at::kDouble)));
}

TEST(SlotGradients, AStepThatIsGivenUpLeavesNothing) {
  const auto p = parameters();
  const auto layout = bucketed(numbered(p), Group::solo(), {});
  for (int step = 0; step < 2; ++step) {
    layout->zero_gradients();
    layout->begin_backward(false);
    loss_of(p, 0, false).backward();
    if (step == 1) break;
    layout->begin_backward(true);
    loss_of(p, 1, false).backward();  // and no finish_reduction()
  }
  layout->begin_backward(true);
  layout->finish_reduction();
  for (std::size_t i = 0; i < p.size(); ++i)
    EXPECT_TRUE(layout->views()[i].gradient.allclose(wanted(1)[i], 1e-12, 1e-12)) << i;
}

// buckets() in mid-step: whoever asks for them reads gradients, and what comes afterwards is added.
TEST(SlotGradients, CanBeReadInMidStep) {
  const auto p = parameters();
  const auto layout = bucketed(numbered(p), Group::solo(), {});
  for (int step = 0; step < 2; ++step) {
    layout->zero_gradients();
    if (step == 1) {
      for (const Bucket& bucket : layout->buckets())
        EXPECT_EQ(bucket.gradients.abs().sum().item<double>(), 0);
    }
    layout->begin_backward(true);
    loss_of(p, 0, false).backward();
    for (const Bucket& bucket : layout->buckets())
      EXPECT_TRUE(bucket.gradients.isfinite().all().item<bool>());
    layout->finish_reduction();
    for (std::size_t i = 0; i < p.size(); ++i)
      EXPECT_TRUE(layout->views()[i].gradient.allclose(wanted(1)[i], 1e-12, 1e-12));
  }
}

// Adds 0 and gives `other` the gradient that `w` has in a product, recomputed in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w,
                            const at::Tensor& other) {
    ctx->save_for_backward({x, w, other});
    return at::zeros({}, x.options());
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::AutoGradMode with_gradient(true);
    const at::Tensor product = Product::apply(saved[0].detach(), saved[1]);
    return {at::Tensor(), at::Tensor(),
            torch::autograd::grad({product.sum() * gradients[0].detach()}, {saved[1]})[0]};
  }
};

// Under ZeRO-3 they are computed in the buffer that ranks add up. The root's parameter is in two products, of
// which one is in a block; the first block may be used twice; the second has its own in two, and one in none.
struct Units {
  std::vector<at::Tensor> p;
  UnitHandle root{[this] { return p; }}, first{[this] { return std::vector{p[1]}; }}, second{[this] {
    return std::vector{p[2], p[3]};
  }};

  Units() {
    for (int i = 0; i < 4; ++i) p.push_back(sines({4, 4}, i));
  }
  at::Tensor loss(int micro_batch, bool twice, bool recomputes = false, int rows = 6) const {
    const auto by_first = [this](const at::Tensor& x) {
      return first.run({x},
                       [&](const auto& in) { return std::vector{Product::apply(in[0], p[1]).sin()}; })[0];
    };
    return root.run({sines({rows, 4}, 10 + micro_batch).detach()}, [&](const auto& in) {
      const at::Tensor x = by_first(in[0]);
      const at::Tensor y = second.run({x}, [&](const auto& of) {
        const at::Tensor& own = p[recomputes ? 3 : 2];  // places are in the reverse of the model's order
        at::Tensor sum =
            Product::apply(of[0], own).tanh() + Product::apply(of[0] * 2, own) + Product::apply(of[0], p[0]);
        if (recomputes) sum = sum + Recomputed::apply(of[0], own, p[2]);
        return std::vector{sum};
      })[0];
      return std::vector{Product::apply(twice ? by_first(y) : y, p[0]).square().sum()};
    })[0];
  }
};

// Ranks have data of their own, uneven; of three and more, one has an empty first micro-batch.
at::Tensor loss_of(const Units& units, int ranks, int rank, int micro_batch, bool twice) {
  const bool empty = ranks > 2 && rank == 1 && micro_batch == 0;
  return units.loss(3 * rank + micro_batch, twice, false, empty ? 0 : 3 + (rank + micro_batch) % 4);
}

void expect_sharded_steps(int ranks, int micro_batches, bool twice, const FullyShardOptions& options,
                          int computed_in_place, bool right = true) {
  const Units alone;
  for (int rank = 0; rank < ranks; ++rank)
    for (int i = 0; i < micro_batches; ++i) loss_of(alone, ranks, rank, i, twice).backward();
  run_ranks(ranks, [&](World& world) {
    planted = right ? 1 : 2;
    Units units;
    std::vector<std::pair<std::string, at::Tensor>> list;
    for (const at::Tensor& one : units.p) list.emplace_back("p" + std::to_string(list.size()), one);
    std::vector<UnitHandle> blocks{units.first, units.second};
    if (twice) blocks.push_back(units.first);
    const auto layout = fully_shard(units.root, list, blocks, world.group, options);
    const auto all_are = [&](double factor) {
      const auto views = layout->views();
      for (std::size_t i = 0; i < views.size(); ++i) {
        const at::Tensor& gradient = alone.p[i].grad();
        const at::Tensor expected = gradient.defined() ? gradient * factor : at::zeros({4, 4}, at::kDouble);
        if (!views[i].gradient.allclose(expected, 1e-12, 1e-12)) return false;
      }
      return true;
    };
    for (int step = 0; step < 2; ++step) {
      layout->zero_gradients();
      in_place = 0;
      for (int i = 0; i < micro_batches; ++i) {
        layout->begin_backward(i + 1 == micro_batches);
        loss_of(units, ranks, world.rank, i, twice).backward();
      }
      layout->finish_reduction();
      EXPECT_EQ(in_place, micro_batches * computed_in_place);
      EXPECT_EQ(all_are(1), right) << ranks << " ranks, " << micro_batches << " micro-batches";
    }
    layout->zero_gradients();  // a step without micro-batches, of which somebody looks before its end
    EXPECT_TRUE(all_are(0));
    layout->finish_reduction();
    EXPECT_TRUE(all_are(0));
    planted = 1;
  });
}

TEST(ShardedGradients, AreComputedWhereTheyAreReduced) {
  for (const int ranks : {1, 2, 3, 4, 5, 8})
    for (const int micro_batches : {1, 2, 3})
      for (const bool shared : {false, true}) {
        const FullyShardOptions options{.share_parameters = shared};
        // One of the root's; one of the second block's; the first block's, unless it has been used before.
        expect_sharded_steps(ranks, micro_batches, /*twice=*/false, options, ranks > 1 ? 3 : 0);
        expect_sharded_steps(ranks, micro_batches, /*twice=*/true, options, ranks > 1 ? 2 : 0);
      }
  expect_sharded_steps(2, 2, /*twice=*/true, {.reduce_once = true}, 0);
}

// A function of the user's may call autograd::grad() itself, and give the result to another parameter.
TEST(ShardedGradients, ThatAreRecomputedForAnotherParameterStayWhatTheyAre) {
  const Units alone;
  alone.loss(0, false, true).backward();
  for (const int ranks : {2, 3, 5})
    run_ranks(ranks, [&](World& world) {
      Units units;
      std::vector<std::pair<std::string, at::Tensor>> list;
      for (const at::Tensor& one : units.p) list.emplace_back("p" + std::to_string(list.size()), one);
      const auto layout = fully_shard(units.root, list, {units.first, units.second}, world.group, {});
      for (const int micro_batches : {1, 3}) {
        layout->zero_gradients();
        for (int i = 0; i < micro_batches; ++i) {
          layout->begin_backward(i + 1 == micro_batches);
          units.loss(0, false, true).backward();
          if (i + 1 < micro_batches) layout->buckets();  // may be read in mid-step
        }
        layout->finish_reduction();
        const auto views = layout->views();
        for (std::size_t i = 0; i < views.size(); ++i)
          EXPECT_TRUE(views[i].gradient.allclose(alone.p[i].grad() * ranks * micro_batches, 1e-12, 1e-12))
              << i;
      }
    });
}

// Whoever looks between micro-batches sees the sum of those before.
TEST(ShardedGradients, AreThoseOfTheMicroBatchesBeforeInMidStep) {
  for (const int ranks : {2, 3, 5})
    run_ranks(ranks, [&](World& world) {
      Units units;
      std::vector<std::pair<std::string, at::Tensor>> list;
      for (const at::Tensor& one : units.p) list.emplace_back("p" + std::to_string(list.size()), one);
      const auto layout = fully_shard(units.root, list, {units.first, units.second}, world.group, {});
      std::vector<at::Tensor> first;  // of one micro-batch
      for (int step = 0; step < 3; ++step) {
        layout->zero_gradients();
        for (int i = 0; i < 2; ++i) {
          layout->begin_backward(i == 1);
          units.loss(step == 0 ? 0 : 3 * step + i, false).backward();
          if (step != 0 || i != 0) continue;
          for (const Bucket& bucket : layout->buckets()) first.push_back(bucket.gradients.clone());
        }
        layout->finish_reduction();
      }
      layout->zero_gradients();
      layout->begin_backward(false);
      units.loss(0, false).backward();
      const auto& buckets = layout->buckets();
      for (std::size_t i = 0; i < buckets.size(); ++i) EXPECT_TRUE(buckets[i].gradients.equal(first[i])) << i;
      layout->begin_backward(true);
      units.loss(1, false).backward();
      layout->finish_reduction();
    });
}

TEST(ShardedGradients, AMistakeInTheirPlaceIsSeen) {
  expect_sharded_steps(2, 1, /*twice=*/false, {}, 3, /*right=*/false);
}

}  // namespace
}  // namespace isograd
