#include "isograd/loss.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "loss/loss_testing.hpp"
#include "loss/rows.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

struct TokenLossCase {
  at::ScalarType type;
  double value_bound, gradient_bound;
};
// fp32: some 50 roundings of logits of size 10 (kernels/softmax_test.cpp); bf16 rounds its gradient once.
const TokenLossCase kTokenLossCases[] = {
    {at::kDouble, 1e-13, 1e-13}, {at::kFloat, 2e-6, 4e-6}, {at::kBFloat16, 2e-6, 0x1p-8}};

// The naive twin in fp64: every term written out of log_softmax.
at::Tensor plain(const at::Tensor& logits, const at::Tensor& targets, const CrossEntropyOptions& options) {
  const at::Tensor x = logits.to(at::kDouble), log_p = at::log_softmax(x, 1), lse = at::logsumexp(x, 1);
  const at::Tensor valid = targets.ne(kIgnoreIndex);
  const at::Tensor picked = log_p.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  const at::Tensor each = -(1 - options.label_smoothing) * picked - options.label_smoothing * log_p.mean(1) +
                          options.z_loss * lse.square();
  const at::Tensor weights =
      options.weights.defined() ? options.weights.to(at::kDouble) : at::ones_like(each);
  return at::where(valid, each * weights, 0.0).sum();
}

std::vector<CrossEntropyOptions> all_options(std::int64_t rows) {
  return {{},
          {.weights = some_weights(rows)},
          {.label_smoothing = 0.1},
          {.z_loss = 1e-2},
          {.weights = some_weights(rows).to(at::kFloat), .label_smoothing = 0.3, .z_loss = 0.05},
          {.weights = some_weights(rows).gt(0), .label_smoothing = 1}};
}

TEST(CrossEntropyOptions, EqualTheTwin) {
  at::manual_seed(1);
  for (const TokenLossCase& c : kTokenLossCases)
    for (auto [rows, vocabulary] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {5, 3}, {64, 258}, {7, 5000}})
      for (const CrossEntropyOptions& options : all_options(rows)) {
        const at::Tensor logits = leaf((at::randn({rows, vocabulary}, at::kDouble) * 3).to(c.type));
        const at::Tensor twin_logits = leaf(logits.to(at::kDouble)), targets = some_targets(rows, vocabulary);
        const at::Tensor loss = cross_entropy_sum(logits, targets, options),
                         twin = plain(twin_logits, targets, options);
        EXPECT_EQ(loss.scalar_type(), c.type == at::kDouble ? at::kDouble : at::kFloat);
        EXPECT_NEAR(loss.item<double>(), twin.item<double>(), c.value_bound * (1 + twin.item<double>()));
        const at::Tensor found = gradient_of(loss * 0.3, logits),
                         wanted = gradient_of(twin * 0.3, twin_logits);
        EXPECT_EQ(found.scalar_type(), c.type);
        EXPECT_LT(relative(found, wanted), c.gradient_bound)
            << rows << " x " << vocabulary << " " << options.label_smoothing;
        // A planted factor is found, but where all gradients are 0: one word, or no valid token.
        EXPECT_EQ(relative(found * 1.01, wanted) > c.gradient_bound, wanted.norm().item<double>() > 1e-9);
        if (rows > 1) {
          EXPECT_EQ(found[1].abs().max().item<double>(), 0) << "ignored";
        }
        if (rows > 2 && options.weights.defined()) {
          EXPECT_EQ(found[2].abs().max().item<double>(), 0) << "weight 0";
        }
      }
}

TEST(CrossEntropyOptions, WithoutOptionsAreTheFastPath) {
  at::manual_seed(2);
  const at::Tensor logits = leaf(at::randn({20, 333})), targets = some_targets(20, 333);
  EXPECT_EQ(cross_entropy_sum(logits, targets, {}).item<float>(),
            cross_entropy_sum(logits, targets).item<float>());
}

TEST(CrossEntropyOptions, HaveTheGradientOfFiniteDifferences) {
  at::manual_seed(3);
  const at::Tensor targets = some_targets(6, 7);
  for (const CrossEntropyOptions& options : all_options(6)) {
    const auto loss = [&](const at::Tensor& x) { return cross_entropy_sum(x, targets, options); };
    const at::Tensor logits = leaf(at::randn({6, 7}, at::kDouble));
    EXPECT_LT(off_from_differences(loss, logits, gradient_of(loss(logits), logits)), 1e-7);
  }
  // A z-loss without the factor 2 of its square is noticed.
  const auto z = [&](const at::Tensor& x) { return z_loss_sum(x, targets); };
  const at::Tensor logits = leaf(at::randn({6, 7}, at::kDouble));
  const at::Tensor gradient = gradient_of(z(logits), logits);
  EXPECT_LT(off_from_differences(z, logits, gradient), 1e-7);
  EXPECT_GT(off_from_differences(z, logits, gradient / 2), 1e-2);
}

TEST(ZLossSum, IsTheTermThatTheOptionAdds) {
  at::manual_seed(4);
  const at::Tensor logits = leaf(at::randn({9, 40}, at::kDouble)), targets = some_targets(9, 40),
                   weights = some_weights(9);
  const at::Tensor together = cross_entropy_sum(logits, targets, {.weights = weights, .z_loss = 0.01});
  const at::Tensor apart =
      cross_entropy_sum(logits, targets, {.weights = weights}) + 0.01 * z_loss_sum(logits, targets, weights);
  EXPECT_NEAR(together.item<double>(), apart.item<double>(), 1e-13 * apart.item<double>());
  EXPECT_LT(relative(gradient_of(together, logits), gradient_of(apart, logits)), 1e-14);
  // lse of a row of zeros is log V.
  EXPECT_NEAR(z_loss_sum(at::zeros({1, 5}, at::kDouble), at::zeros({1}, at::kLong)).item<double>(),
              std::log(5.0) * std::log(5.0), 1e-15);
}

TEST(TokenLogProbabilities, EqualLogSoftmaxAndPassAnyUpstreamBack) {
  at::manual_seed(5);
  for (const TokenLossCase& c : kTokenLossCases) {
    const at::Tensor logits = leaf((at::randn({11, 100}, at::kDouble) * 3).to(c.type));
    const at::Tensor twin = leaf(logits.to(at::kDouble)), targets = some_targets(11, 100);
    const at::Tensor upstream = at::randn({11}, at::kDouble);
    const at::Tensor found = token_log_probabilities(logits, targets);
    const at::Tensor wanted =
        at::where(targets.ne(kIgnoreIndex),
                  at::log_softmax(twin, 1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1), 0.0);
    EXPECT_EQ(found.scalar_type(), c.type == at::kDouble ? at::kDouble : at::kFloat);
    EXPECT_LT(relative(found, wanted), c.value_bound);
    EXPECT_EQ(found[1].item<double>(), 0);
    EXPECT_FALSE(std::signbit(found[1].item<double>()));
    EXPECT_LT(
        relative(gradient_of((found * upstream).sum(), logits), gradient_of((wanted * upstream).sum(), twin)),
        c.gradient_bound);
  }
}

TEST(TokenLosses, LeaveOutWhatIsInvalidEvenWhereItIsNaN) {
  const at::Tensor targets = at::tensor({1, -100, 2, 3}, at::kLong);
  const at::Tensor weights = at::tensor({1.0, 1.0, 0.0, 2.0}, at::kDouble);
  for (auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    at::Tensor values = at::ones({4, 40}, at::kDouble);
    values[1].fill_(std::nan(""));
    values[2].fill_(std::numeric_limits<double>::infinity());
    const at::Tensor logits = leaf(values.to(type));
    const CrossEntropyOptions options{.weights = weights, .label_smoothing = 0.1, .z_loss = 0.1};
    // The squared error has no targets that leave a token out: there the NaN is given weight 0.
    const at::Tensor error_weights = weights * targets.ne(kIgnoreIndex);
    for (const at::Tensor& loss :
         {cross_entropy_sum(logits, targets, options), z_loss_sum(logits, targets, weights),
          squared_error_sum(logits, at::zeros_like(logits), error_weights)}) {
      EXPECT_TRUE(std::isfinite(loss.item<double>()));
      const at::Tensor gradient = gradient_of(loss, logits).to(at::kDouble);
      EXPECT_EQ(gradient[1].abs().sum().item<double>(), 0) << "ignored";
      EXPECT_EQ(gradient[2].abs().sum().item<double>(), 0) << "weight 0";
    }
    // One that counts shows.
    EXPECT_FALSE(std::isfinite(cross_entropy_sum(logits, at::tensor({1, 1, -100, 3}, at::kLong),
                                                 CrossEntropyOptions{.weights = weights})
                                   .item<double>()));
    // Nothing valid at all is exactly 0 with zero gradient, and so is nothing.
    for (const auto& [rows, options_of] :
         {std::pair{std::int64_t{4}, CrossEntropyOptions{.weights = at::zeros({4})}},
          std::pair{std::int64_t{0}, CrossEntropyOptions{.label_smoothing = 0.1, .z_loss = 0.1}}}) {
      const at::Tensor nan = leaf(at::full({rows, 7}, std::nan("")).to(type));
      const at::Tensor loss = cross_entropy_sum(nan, at::ones({rows}, at::kLong), options_of);
      EXPECT_EQ(loss.item<double>(), 0);
      EXPECT_EQ(gradient_of(loss, nan).to(at::kDouble).abs().sum().item<double>(), 0);
    }
  }
}

// The gradient may be written over the logits only if nobody can see it.
TEST(CrossEntropyOptions, WriteOverLogitsOnlyWhenNobodyElseSeesThem) {
  at::manual_seed(6);
  const at::Tensor weight = leaf(at::randn({50, 8}, at::kDouble)), input = at::randn({9, 8}, at::kDouble),
                   targets = some_targets(9, 50);
  const CrossEntropyOptions options{.label_smoothing = 0.1};
  const at::Tensor wanted = gradient_of(plain(at::linear(input, weight), targets, options), weight);
  const void* address = nullptr;
  bool overwritten = false;
  at::Tensor logits = at::linear(input, weight);
  address = logits.const_data_ptr();
  logits.register_hook([&](const at::Tensor& g) { overwritten = g.const_data_ptr() == address; });
  at::Tensor loss = cross_entropy_sum(logits, targets, options);
  logits = at::Tensor();
  EXPECT_LT(relative(gradient_of(loss, weight), wanted), 1e-13);
  EXPECT_TRUE(overwritten);
  const at::Tensor held = at::linear(input, weight), before = held.detach().clone();
  EXPECT_LT(relative(gradient_of(cross_entropy_sum(held, targets, options), weight), wanted), 1e-13);
  EXPECT_TRUE(at::equal(held, before));
}

// Other devices take plain ATen; here it is compared with the kernels, whole and in tiles.
TEST(Rows, OfPlainAtenAreThoseOfTheKernels) {
  at::manual_seed(7);
  const EntropyLoss loss{.cross_entropy = 1, .label_smoothing = 0.2, .z_loss = 0.1};
  for (const TokenLossCase& c : kTokenLossCases)
    for (const std::int64_t tile : {77, 20}) {
      at::Tensor logits = (at::randn({9, 77}, at::kDouble) * 3).to(c.type);
      logits[4].narrow(0, 20, 20).fill_(-std::numeric_limits<double>::infinity());  // one whole tile
      logits[1].fill_(std::nan(""));
      const at::Tensor targets = some_targets(9, 77), mask = targets.ne(kIgnoreIndex);
      targets[4] = 3;
      const at::Tensor upstream = at::randn({9}, at::kDouble);
      at::Tensor found[2], gradients[2], totals[2];
      for (const bool kernels : {false, true}) {
        RowStatistics rows = begin_rows(9, loss, at::kCPU);
        gradients[kernels] = at::full_like(logits, 99);
        const auto each_tile = [&](const auto& visit) {
          for (std::int64_t first = 0; first < 77; first += tile)
            visit(first, logits.narrow(1, first, std::min<std::int64_t>(tile, 77 - first)).contiguous());
        };
        each_tile([&](std::int64_t first, const at::Tensor& columns) {
          (kernels ? take_in : naive_twin::take_in)(columns, first, targets, mask, rows);
        });
        const at::Tensor coefficients = gradient_coefficients(rows, loss, 77, upstream);
        each_tile([&](std::int64_t first, const at::Tensor& columns) {
          at::Tensor gradient = at::empty_like(columns);
          (kernels ? write_gradient : naive_twin::write_gradient)(columns, first, targets, mask, coefficients,
                                                                  gradient);
          gradients[kernels].narrow(1, first, columns.size(1)).copy_(gradient);
        });
        totals[kernels] = rows.total.index_select(0, at::tensor({0, 2, 3, 8}, at::kLong));
        found[kernels] = at::where(mask, losses(rows, {.z_loss = 0.1}, 77), 0.0);
      }
      EXPECT_TRUE(found[1].isfinite().all().item<bool>());
      EXPECT_LT(relative(found[1], found[0]), c.value_bound);
      EXPECT_LT(relative(totals[1], totals[0]), c.value_bound);
      EXPECT_LT(relative(gradients[1], gradients[0]), c.gradient_bound) << tile;
      EXPECT_EQ(gradients[1][1].abs().sum().item<double>(), 0);
      EXPECT_EQ(gradients[0][1].abs().sum().item<double>(), 0);
    }
}

TEST(Rows, ANaNAmongMaskedColumnsShows) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const auto& pass : {take_in, naive_twin::take_in}) {
    RowStatistics rows = begin_rows(2, {}, at::kCPU);
    const at::Tensor targets = at::zeros({2}, at::kLong);
    pass(at::tensor({1.0, 2.0, 1.0, 2.0}, at::kDouble).view({2, 2}), 0, targets, {}, rows);
    pass(at::tensor({-inf, -inf, -inf, std::nan("")}, at::kDouble).view({2, 2}), 2, targets, {}, rows);
    EXPECT_NEAR(log_sum_exp(rows)[0].item<double>(), std::log(std::exp(1) + std::exp(2)), 1e-14);
    EXPECT_TRUE(std::isnan(log_sum_exp(rows)[1].item<double>()));
  }
}

// ---- regression ----

TEST(SquaredErrorSum, EqualsItsTwin) {
  at::manual_seed(8);
  // fp32: each element three roundings; bf16 rounds its gradient once.
  for (const auto& [type, bound, gradient_bound] : {std::tuple{at::kDouble, 1e-14, 1e-15},
                                                    {at::kFloat, 4 * 0x1p-24, 4 * 0x1p-24},
                                                    {at::kBFloat16, 4 * 0x1p-24, 0x1p-8}}) {
    const at::Tensor p = leaf(at::randn({6, 3, 4}, at::kDouble).to(type)), twin = leaf(p.to(at::kDouble));
    const at::Tensor x0 = at::randn({6, 3, 4}, at::kDouble).to(type),
                     x1 = at::randn({6, 3, 4}, at::kDouble).to(type);
    const at::Tensor weights = some_weights(6);
    const auto wanted_of = [&](const at::Tensor& target) {
      return ((twin - target.to(at::kDouble)).square().mean(at::IntArrayRef{1, 2}) * weights).sum();
    };
    const at::Tensor loss = squared_error_sum(p, x0, weights), wanted = wanted_of(x0);
    EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), bound * wanted.item<double>());
    EXPECT_LT(relative(gradient_of(loss, p), gradient_of(wanted, twin)), gradient_bound);
    const at::Tensor flow = flow_matching_sum(p, x0, x1, weights),
                     flow_wanted = wanted_of(x1.to(at::kDouble) - x0.to(at::kDouble));
    EXPECT_NEAR(flow.item<double>(), flow_wanted.item<double>(), 2 * bound * flow_wanted.item<double>());
    const at::Tensor flow_gradient = gradient_of(flow, p);
    EXPECT_LT(relative(flow_gradient, gradient_of(flow_wanted, twin)), 2 * gradient_bound);
    const at::Tensor backwards = wanted_of(x0.to(at::kDouble) - x1.to(at::kDouble));  // planted: the sign
    EXPECT_GT(relative(flow_gradient, gradient_of(backwards, twin)), 0.1);
  }
  const at::Tensor p = leaf(at::randn({4, 5}, at::kDouble)), target = at::randn({4, 5}, at::kDouble);
  const auto loss = [&](const at::Tensor& x) { return squared_error_sum(x, target); };
  EXPECT_LT(off_from_differences(loss, p, gradient_of(loss(p), p)), 1e-8);
  const at::Tensor empty = leaf(at::zeros({0, 5}));
  const at::Tensor of_nothing = squared_error_sum(empty, at::zeros({0, 5}));
  EXPECT_EQ(of_nothing.item<float>(), 0);
  EXPECT_EQ(gradient_of(of_nothing, empty).numel(), 0);
}

// The straight path's derivative is the target of its velocity.
TEST(FlowMatching, PathAndVelocityBelongTogether) {
  at::manual_seed(9);
  const at::Tensor x0 = at::randn({5, 3}, at::kDouble), x1 = at::randn({5, 3}, at::kDouble);
  EXPECT_TRUE(at::equal(flow_matching_input(x0, x1, at::zeros({5})), x0));
  EXPECT_TRUE(at::equal(flow_matching_input(x0, x1, at::ones({5})), x1));
  const at::Tensor t = at::rand({5}, at::kDouble) * 0.5;
  const at::Tensor velocity = (flow_matching_input(x0, x1, t + 0.25) - flow_matching_input(x0, x1, t)) * 4;
  EXPECT_LT(flow_matching_sum(velocity, x0, x1).item<double>(), 1e-28);
}

TEST(TokenLosses, RefuseBadArguments) {
  const at::Tensor logits = at::zeros({3, 5}), targets = at::zeros({3}, at::kLong);
  const auto weighted = [&](std::vector<double> weights) {
    return error_of([&] { cross_entropy_sum(logits, targets, {.weights = at::tensor(weights)}); });
  };
  EXPECT_THAT(weighted({1, -0.5, 1}), HasSubstr("weights[1] = -0.5; expected a finite number, 0 or more"));
  EXPECT_THAT(weighted({1, 1, std::nan("")}), HasSubstr("weights[2] = nan"));
  EXPECT_THAT(weighted({std::numeric_limits<double>::infinity(), 1, 1}), HasSubstr("weights[0] = inf"));
  EXPECT_THAT(weighted({1, 1}), HasSubstr("weights [2]"));
  EXPECT_EQ(weighted({0, 1, 1e300}), "no error");
  EXPECT_THAT(error_of([&] { cross_entropy_sum(logits, targets, {.weights = leaf(at::ones({3}))}); }),
              HasSubstr("Detach"));
  EXPECT_THAT(error_of([&] { cross_entropy_sum(logits, targets, {.weights = targets}); }), HasSubstr("bool"));
  EXPECT_THAT(error_of([&] { cross_entropy_sum(logits, targets, {.label_smoothing = 1.5}); }),
              HasSubstr("label_smoothing = 1.5"));
  EXPECT_THAT(error_of([&] { cross_entropy_sum(logits, targets, {.z_loss = -1}); }),
              HasSubstr("z_loss = -1"));
  const at::Tensor outside = at::tensor({0, 5, 0}, at::kLong);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { cross_entropy_sum(logits, outside, CrossEntropyOptions{}); },
           [&] { z_loss_sum(logits, outside); }, [&] { token_log_probabilities(logits, outside); }})
    EXPECT_THAT(error_of(call), HasSubstr("targets[1] = 5; expected 0 to 4"));
  EXPECT_THAT(error_of([&] { z_loss_sum(logits.to(at::kHalf), targets); }), HasSubstr("bfloat16"));
  EXPECT_THAT(error_of([&] { squared_error_sum(logits, at::zeros({3, 4})); }), HasSubstr("[3, 4]"));
  EXPECT_THAT(error_of([&] {
                squared_error_sum(logits, logits, at::tensor({1.0, -1.0, 1.0}));
              }),
              HasSubstr("weights[1] = -1"));
  EXPECT_THAT(error_of([&] { flow_matching_sum(logits, logits, at::zeros({2, 5})); }), HasSubstr("[2, 5]"));
  EXPECT_THAT(error_of([&] { flow_matching_input(logits, logits, at::full({3}, 2.0)); }),
              HasSubstr("[0, 1]"));
  const at::Tensor x = leaf(logits);
  const at::Tensor loss = cross_entropy_sum(x, targets, CrossEntropyOptions{.z_loss = 1});
  EXPECT_THAT(error_of([&] { torch::autograd::grad({loss}, {x}, {}, true, true); }),
              HasSubstr("create_graph"));
}

}  // namespace
}  // namespace isograd
