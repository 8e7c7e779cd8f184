#include "parallel/pipeline/split_backward.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>

#include "comm/autograd.hpp"
#include "isograd/loss.hpp"
#include "model/experts.hpp"
#include "model/fused.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Weights = std::vector<at::Tensor>;

constexpr std::int64_t kRows = 9, kWide = 6;

at::Tensor numbers(at::IntArrayRef sizes, double phase) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).mul(0.37).add(phase).sin().view(sizes);
}

// Four matrices and a row.
Weights weights() {
  Weights all;
  for (int i = 0; i < 4; ++i) all.push_back(numbers({kWide, kWide}, i).requires_grad_());
  all.push_back(numbers({kWide}, 4).requires_grad_());
  return all;
}

// Inputs of a stage, and the gradients that come back, in order.
struct Source {
  std::vector<at::Tensor> back{};
  at::Tensor give(double phase = 0.5) {
    return apply_map(
        at::empty({0}, at::kDouble),
        [phase](const at::Tensor&) {
          return numbers({kRows, kWide}, phase);
        },
        [this](const at::Tensor& gradient) {
          back.push_back(gradient.clone());
          return at::zeros({0}, at::kDouble);
        });
  }
};

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

struct Graph {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x, Weights& w)> loss;
};

// A matrix product that does not say which gradients it need not compute.
struct Whole : torch::autograd::Function<Whole> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x.mm(w);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& dy) {
    ++calls;
    const auto saved = ctx->get_saved_variables();
    return {dy[0].mm(saved[1].t()), saved[0].t().mm(dy[0])};
  }
  inline static int calls = 0;
};

std::vector<Graph> graphs() {
  const auto layer = [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w).tanh(); };
  return {
      {"a chain", [=](const at::Tensor& x, Weights& w) { return layer(layer(x, w[0]), w[1]).sum(); }},
      {"one layer", [](const at::Tensor& x, Weights& w) { return x.mm(w[0]).sum(); }},
      {"a weight used twice side by side",
       [=](const at::Tensor& x, Weights& w) { return (layer(x, w[0]) + layer(x.sin(), w[0]) * w[4]).sum(); }},
      {"a weight used three times in a row",
       [=](const at::Tensor& x, Weights& w) {
         return layer(layer(layer(x, w[0]), w[0]), w[0]).square().sum();
       }},
      {"a weight used in a row, through another weight",
       [=](const at::Tensor& x, Weights& w) {
         return layer(layer(x, w[0]), w[0].mm(w[1]).tanh()).square().sum();
       }},
      {"branches off the path",
       [=](const at::Tensor& x, Weights& w) {
         const at::Tensor gate = w[1].mm(w[2]).sum(0).sigmoid();
         return (layer(x, w[0]) * gate + w[4]).square().sum() + w[3].square().sum() * w[0].sum();
       }},
      {"a cast for two",
       [](const at::Tensor& x, Weights& w) {
         const at::Tensor narrow = w[0].to(at::kFloat), y = x.to(at::kFloat);
         return (y.mm(narrow).tanh().mm(narrow)).sum().to(at::kDouble);
       }},
      {"frozen parameters",
       [=](const at::Tensor& x, Weights& w) {
         w[1].requires_grad_(false), w[4].requires_grad_(false);
         return (layer(layer(x, w[1]), w[0]) * w[4]).mm(w[1]).sum();
       }},
      {"a parameter without a part",
       [=](const at::Tensor& x, Weights& w) { return layer(x, w[0]).sum() + w[1].detach().sum(); }},
      {"weights before all else",
       [=](const at::Tensor&, Weights& w) {
         const at::Tensor early = w[1].mm(w[2]);
         static Source late;  // outlives the graph
         return layer(layer(late.give(), w[0]), early).sum();
       }},
      {"weights alone", [](const at::Tensor&, Weights& w) { return w[0].mm(w[1]).sum(); }},
      {"one leaf", [](const at::Tensor&, Weights& w) { return w[0].sum(); }},
      {"what is written in place",
       [=](const at::Tensor& x, Weights& w) {
         at::Tensor y = layer(x, w[0]) * 2;
         y.narrow(0, 0, 3).mul_(w[4]);
         y.narrow(1, 1, 2).copy_(w[1].narrow(0, 0, 2).sum(0).narrow(0, 0, 2));
         return y.square().sum();
       }},
      {"a gradient in the loss",
       [=](const at::Tensor& x, Weights& w) {
         const at::Tensor energy = layer(layer(x, w[0]), w[1]).sum();
         const auto slopes = torch::autograd::grad({energy}, {w[0]}, {}, true, /*create_graph=*/true);
         return energy + slopes[0].square().sum();
       }},
      {"a function of one's own",
       [=](const at::Tensor& x, Weights& w) {
         return Whole::apply(layer(Whole::apply(x, w[0]), w[1]), w[0]).mm(w[2]).sum();
       }},
      {"a function of one's own above a weight's own path",
       [=](const at::Tensor& x, Weights& w) {
         return Whole::apply(layer(x, w[0]), w[1].mm(w[2]).tanh()).sum();
       }},
      {"a block of the model",
       [=](const at::Tensor& x, Weights& w) {
         const auto [normed, residual] = rms_norm_and_residual(x, w[4], 1e-6);
         const auto inner = linears(normed, {w[0], w[1]}, {w[4], at::Tensor()});
         return rms_norm(linear_onto(residual, swiglu(inner[0], inner[1]), w[2], w[4]), w[4], 1e-6)
             .square()
             .sum();
       }},
      {"experts",
       [=](const at::Tensor& x, Weights& w) {
         const at::Tensor both = at::stack({w[0], w[1]});
         return compute_experts(x, both, both.tanh(), w[2].expand({2, kWide, kWide}), {0, 4, kRows}).sum();
       }},
      {"the output with its cross entropy",
       [=](const at::Tensor& x, Weights& w) {
         const at::Tensor targets = at::arange(kRows, at::kLong).remainder(kWide);
         return linear_cross_entropy_sum(layer(x, w[0]), w[1], targets, {.bias = w[4], .tile_tokens = 4});
       }},
  };
}

struct Outcome {
  std::vector<at::Tensor> weights{}, back{};
};

Outcome whole(const Graph& graph, bool given) {
  Weights w = weights();
  Source source;
  graph.loss(given ? source.give() : numbers({kRows, kWide}, 0.5), w).backward();
  Outcome result{.back = source.back};
  for (const at::Tensor& weight : w) result.weights.push_back(weight.grad());
  return result;
}

TEST(SplitBackward, GivesTheBitsOfAWholeOne) {
  for (const bool given : {true, false})
    for (const Graph& graph : graphs()) {
      SCOPED_TRACE(std::string(graph.name) + (given ? "" : ", of constants"));
      const Outcome wanted = whole(graph, given);
      Weights w = weights();
      Source source;
      const at::Tensor loss = graph.loss(given ? source.give() : numbers({kRows, kWide}, 0.5), w);
      WeightsBackward left = backward_of_inputs(loss);
      // All that comes back has come already.
      ASSERT_EQ(source.back.size(), wanted.back.size());
      for (std::size_t i = 0; i < wanted.back.size(); ++i) EXPECT_TRUE(same(source.back[i], wanted.back[i]));
      for (const at::Tensor& weight : w) EXPECT_FALSE(weight.grad().defined());
      left.run();
      EXPECT_EQ(source.back.size(), wanted.back.size());
      for (std::size_t i = 0; i < w.size(); ++i)
        EXPECT_TRUE(same(w[i].grad(), wanted.weights[i])) << "weight " << i;
      left.run();  // nothing is left
      for (std::size_t i = 0; i < w.size(); ++i) EXPECT_TRUE(same(w[i].grad(), wanted.weights[i]));
    }
}

// Gradients add up to what is there, and the halves of several micro-batches may be mixed.
TEST(SplitBackward, OfSeveralMicroBatchesAddsUp) {
  const auto loss_of = [](const at::Tensor& x, Weights& w) { return x.mm(w[0]).tanh().mm(w[0]).sum(); };
  Weights w = weights(), others = weights();
  Source source, other;
  for (const double phase : {0.1, 0.2, 0.3}) loss_of(other.give(phase), others).backward();
  std::vector<WeightsBackward> left;
  for (const double phase : {0.1, 0.2, 0.3})
    left.push_back(backward_of_inputs(loss_of(source.give(phase), w)));
  for (WeightsBackward& one : left) one.run();
  EXPECT_TRUE(same(w[0].grad(), others[0].grad()));
  EXPECT_EQ(source.back.size(), 3u);
}

// A node that is computed once for all micro-batches and saves nothing, as whole backwards allow it.
TEST(SplitBackward, LeavesWhatMicroBatchesShare) {
  const auto run = [](bool split) {
    Weights w = weights();
    const at::Tensor shared = w[0].t().unsqueeze(0).squeeze(0);
    const auto loss_of = [&](double phase) { return numbers({kRows, kWide}, phase).mm(shared).tanh().sum(); };
    const at::Tensor a = loss_of(0.1), b = loss_of(0.2);
    if (split) {
      WeightsBackward of_a = backward_of_inputs(a), of_b = backward_of_inputs(b);
      of_a.run(), of_b.run();
    } else {
      a.backward(), b.backward();
    }
    return w[0].grad();
  };
  EXPECT_TRUE(same(run(true), run(false)));
}

// How often each gradient of a product is computed, and in which half.
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x.mm(w);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& dy) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(2);
    if (ctx->needs_input_grad(0)) result[0] = dy[0].mm(saved[1].t()), ++of_inputs;
    if (ctx->needs_input_grad(1)) result[1] = saved[0].t().mm(dy[0]), ++of_weights;
    return result;
  }
  inline static int of_inputs = 0, of_weights = 0;
};
const differentiable::Separable<Counted> kCountedIsSeparable;

TEST(SplitBackward, ComputesEachGradientOnce) {
  Weights w = weights();
  Source source;
  const at::Tensor x = source.give();
  const at::Tensor y = Counted::apply(Counted::apply(Counted::apply(x, w[0]).tanh(), w[1]).tanh(), w[0]);
  WeightsBackward left = backward_of_inputs(y.sum());
  EXPECT_EQ(std::pair(Counted::of_inputs, Counted::of_weights), std::pair(3, 0));
  left.run();
  EXPECT_EQ(std::pair(Counted::of_inputs, Counted::of_weights), std::pair(3, 3));

  const at::Tensor z = Whole::apply(Whole::apply(source.give(), w[0]).tanh(), w[1]);
  Whole::calls = 0;
  left = backward_of_inputs(z.sum());
  EXPECT_EQ(Whole::calls, 2);  // with their gradients of weights, which are kept
  left.run();
  EXPECT_EQ(Whole::calls, 2);
}

// Weights of several ranks make their exchanges at once, in the order of a whole backward: a rank in
// whose graph it stands elsewhere must not wait.
TEST(SplitBackward, ExchangesEverythingInTheFirstHalf) {
  const auto order = [](bool split) {
    Weights w = weights();
    Source source;
    std::vector<int> calls;
    const auto exchanged = [&](int which, const at::Tensor& x) {
      return apply_map(
          x, [](const at::Tensor& in) { return in.clone(); },
          [&calls, which](const at::Tensor& dy) {
            calls.push_back(which);
            return dy.clone();
          });
    };
    const at::Tensor constant = exchanged(0, numbers({kWide}, 7));  // no gradient here, on others one
    const at::Tensor gathered = exchanged(1, w[0] * 2), inside = exchanged(2, source.give());
    const at::Tensor loss = (exchanged(3, inside.mm(gathered)) * constant).sum() + exchanged(4, w[1]).sum();
    if (!split) {
      loss.backward();
      return calls;
    }
    WeightsBackward left = backward_of_inputs(loss);
    EXPECT_EQ(calls.size(), 5u);
    EXPECT_EQ(source.back.size(), 1u);
    left.run();
    return calls;
  };
  EXPECT_EQ(order(true), order(false));
}

// Between the halves only what weights need is kept.
TEST(SplitBackward, FreesWhatTheFirstHalfHasUsed) {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
  const auto watch = [](const at::Tensor& x) { return Weak(x.getIntrusivePtr()); };
  Weights w = weights();
  Source source;
  std::optional<Weak> of_product, of_function;
  at::Tensor loss;
  {
    const at::Tensor x = source.give(), hidden = x.mm(w[0]).tanh();  // saved by tanh and by the product below
    const at::Tensor y = hidden.mm(w[1]).exp();                      // saved by exp alone
    of_product = watch(hidden), of_function = watch(y);
    loss = y.square().sum() * 0.5;
  }
  ASSERT_FALSE(of_product->expired() || of_function->expired());
  WeightsBackward left = backward_of_inputs(loss);
  EXPECT_FALSE(of_product->expired());
  EXPECT_TRUE(of_function->expired());
  left.run();
  loss.reset();
  EXPECT_TRUE(of_product->expired());
}

TEST(SplitBackward, CallsHooksAsAWholeOneDoes) {
  const auto run = [](bool split, bool given) {
    Weights w = weights();
    Source source;
    const auto twice = [](const at::Tensor& gradient) { return gradient * 2; };
    const at::Tensor x =
        given ? source.give() : w[3].index_select(0, at::arange(kRows, at::kLong).remainder(5));
    const at::Tensor y = x.mm(w[0]), z = Whole::apply(y.tanh(), w[1]);
    for (const at::Tensor& hooked : {x, y, z, w[0], w[1]}) hooked.register_hook(twice);
    y.retain_grad();
    const at::Tensor loss = z.mm(w[2]).sum();
    if (split)
      backward_of_inputs(loss).run();
    else
      loss.backward();
    std::vector<at::Tensor> found = source.back;
    for (const at::Tensor& weight : w) found.push_back(weight.grad());
    found.push_back(y.grad());
    return found;
  };
  for (const bool given : {true, false}) {
    const auto found = run(true, given), wanted = run(false, given);
    ASSERT_EQ(found.size(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(same(found[i], wanted[i])) << i << given;
  }
}

// A gradient that is none goes on as none, and nodes below are called all the same.
TEST(SplitBackward, PassesOnThatThereIsNoGradient) {
  struct None : torch::autograd::Function<None> {
    static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.sum(); }
    static variable_list backward(AutogradContext*, const variable_list&) { return {at::Tensor()}; }
  };
  Weights w = weights();
  Source source;
  WeightsBackward left = backward_of_inputs(None::apply(source.give().mm(w[0]).tanh()));
  ASSERT_EQ(source.back.size(), 1u);
  EXPECT_EQ(source.back[0].count_nonzero().item<std::int64_t>(), 0);
  left.run();
  EXPECT_FALSE(w[0].grad().defined());
}

TEST(SplitBackward, AnErrorLeavesTheGraphAsItWas) {
  Weights w = weights();
  Source source;
  const at::Tensor x = source.give();
  bool broken = true;
  x.register_hook([&](const at::Tensor&) {
    if (broken) throw std::runtime_error("backward broke");
  });
  const at::Tensor y = x.mm(w[0]);
  EXPECT_THROW(backward_of_inputs(y.sum()), std::runtime_error);
  broken = false;
  backward_of_inputs(y.sum()).run();
  EXPECT_EQ(source.back.size(), 1u);
  EXPECT_TRUE(w[0].grad().defined());
}

}  // namespace
}  // namespace isograd
