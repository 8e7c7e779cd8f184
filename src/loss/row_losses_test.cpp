#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "full_tests.hpp"
#include "isograd/loss.hpp"
#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

constexpr RowLoss kRowLosses[] = {RowLoss::kCrossEntropy, RowLoss::kImportanceSampling,
                                  RowLoss::kPpo,          RowLoss::kCispo,
                                  RowLoss::kDro,          RowLoss::kGspo};

struct RowCase {
  RowLoss loss;
  at::Tensor hidden{}, weight{}, a{}, b{};
  double scale = 0.7;
  RowLossInputs inputs{};
  RowLossOptions options{.clip_low = 0.8, .clip_high = 1.3, .beta = 0.4};
  bool updates = false;
};

// log p [T, K] by LibTorch's own operations.
at::Tensor plain_log_p(const RowCase& c, const at::Tensor& hidden, const at::Tensor& weight,
                       const at::Tensor& a, const at::Tensor& b) {
  at::Tensor logits = at::linear(hidden, weight);
  if (c.updates) logits = logits + c.scale * at::linear(at::linear(hidden, a), b);
  const at::Tensor& targets = c.inputs.targets;
  return at::log_softmax(logits, 1)
      .gather(1, targets.dim() == 2 ? targets : targets.unsqueeze(1))
      .view(targets.sizes());
}

// Every second row has weight 0 or advantage 0; q of some of these is what clients send for "none".
RowCase row_case(RowLoss loss, std::int64_t rows, std::int64_t vocabulary, at::ScalarType type, bool updates,
                 std::int64_t wide_targets = 0) {
  constexpr std::int64_t kHidden = 24, kRankOfUpdate = 5;
  RowCase c{.loss = loss};
  c.updates = updates;
  c.hidden = leaf(at::randn({rows, kHidden}, at::kDouble).to(type));
  c.weight = leaf((at::randn({vocabulary, kHidden}, at::kDouble) * 0.3).to(type));
  c.a = leaf((at::randn({kRankOfUpdate, kHidden}, at::kDouble) * 0.3).to(type));
  c.b = leaf((at::randn({vocabulary, kRankOfUpdate}, at::kDouble) * 0.3).to(type));
  c.inputs.targets = at::randint(vocabulary, {rows}, at::kLong);
  if (wide_targets > 0) {
    c.inputs.targets = at::randint(vocabulary, {rows, wide_targets}, at::kLong);
    if (wide_targets > 1) c.inputs.targets.select(1, 1).copy_(c.inputs.targets.select(1, 0));  // repeated
  }
  const at::Tensor odd = at::arange(rows).remainder(2).ne(0);
  if (loss == RowLoss::kCrossEntropy) {
    c.inputs.weights = at::randn(c.inputs.targets.sizes(), at::kDouble);
    c.inputs.weights.masked_fill_(wide_targets > 0 ? odd.unsqueeze(1) : odd, 0);
    return c;
  }
  const at::NoGradGuard none;
  const at::Tensor log_p = plain_log_p(c, c.hidden.to(at::kDouble), c.weight.to(at::kDouble),
                                       c.a.to(at::kDouble), c.b.to(at::kDouble));
  at::Tensor old = log_p + at::randn({rows}, at::kDouble) * 0.4;
  c.inputs.advantages = at::randn({rows}, at::kDouble).masked_fill_(odd, 0);
  const at::Tensor unknown = at::arange(rows).remainder(6).eq(1);
  if (loss != RowLoss::kDro) old = at::where(unknown, -1e30, old);
  c.inputs.old_log_probabilities = old;
  if (loss == RowLoss::kGspo) {
    c.inputs.cu_seqlens = {0, rows / 4, rows / 4, rows / 2 + 1, rows};
    c.inputs.ratio_mask = at::where(unknown, 0.0, at::rand({rows}, at::kDouble));
    // So that sequences are clipped above, below and not at all.
    const double moved[] = {-0.4, 0, 0.4, 0.1};
    for (std::size_t f = 0; f < 4; ++f)
      old.narrow(0, c.inputs.cu_seqlens[f], c.inputs.cu_seqlens[f + 1] - c.inputs.cu_seqlens[f]) -= moved[f];
  }
  return c;
}

// The formulas in fp64, with autograd's gradients. Rows of advantage 0 are left out beforehand.
at::Tensor plain_loss(const RowCase& c, const at::Tensor& log_p) {
  if (c.loss == RowLoss::kCrossEntropy) return -(log_p * c.inputs.weights).sum();
  const at::Tensor advantages = c.inputs.advantages, old = c.inputs.old_log_probabilities;
  if (c.loss == RowLoss::kDro)
    return -(log_p * advantages - 0.5 * c.options.beta * (log_p - old).pow(2)).sum();
  at::Tensor log_ratio = log_p - old;
  if (c.loss == RowLoss::kGspo) {
    std::vector<at::Tensor> parts;
    for (std::size_t f = 0; f + 1 < c.inputs.cu_seqlens.size(); ++f) {
      const std::int64_t begin = c.inputs.cu_seqlens[f], length = c.inputs.cu_seqlens[f + 1] - begin;
      if (length == 0) continue;
      const at::Tensor own = log_p.narrow(0, begin, length),
                       in = c.inputs.ratio_mask.narrow(0, begin, length).ne(0).nonzero().squeeze(1);
      const at::Tensor mean = log_ratio.narrow(0, begin, length).detach().index_select(0, in).mean();
      parts.push_back(mean + own - own.detach());
    }
    log_ratio = at::cat(parts);
  }
  const at::Tensor counts = advantages.nonzero().squeeze(1), of = advantages.index_select(0, counts),
                   ratio = log_ratio.index_select(0, counts).exp(),
                   clipped = ratio.clamp(c.options.clip_low, c.options.clip_high);
  switch (c.loss) {
    case RowLoss::kImportanceSampling: return -(ratio * of).sum();
    case RowLoss::kCispo: return -(clipped.detach() * log_p.index_select(0, counts) * of).sum();
    default: return -at::minimum(ratio * of, clipped * of).sum();
  }
}

struct RowFound {
  at::Tensor sum, log_p, hidden, weight, a, b;
};
using PlainRowLoss = std::function<at::Tensor(const RowCase&, const at::Tensor& log_p)>;

RowFound by_autograd(const RowCase& c, double upstream, const PlainRowLoss& loss = plain_loss) {
  const auto wide = [](const at::Tensor& t) { return leaf(t.to(at::kDouble)); };
  const at::Tensor hidden = wide(c.hidden), weight = wide(c.weight), a = wide(c.a), b = wide(c.b),
                   log_p = plain_log_p(c, hidden, weight, a, b), sum = loss(c, log_p);
  (sum * upstream).backward();
  return {sum.detach(), log_p.detach(), hidden.grad(), weight.grad(), a.grad(), b.grad()};
}

RowLossResult row_loss_of(const RowCase& c) {
  const LowRankUpdate update{.a = c.a, .b = c.b, .scale = c.scale};
  return linear_row_loss(c.hidden, c.weight, c.inputs, c.loss, c.options, c.updates ? &update : nullptr);
}

RowFound by_ours(const RowCase& c, double upstream) {
  for (const at::Tensor& t : {c.hidden, c.weight, c.a, c.b}) t.mutable_grad() = at::Tensor();
  const RowLossResult result = row_loss_of(c);
  if (result.sum.requires_grad()) (result.sum * upstream).backward();
  return {result.sum.detach(), result.log_probabilities, c.hidden.grad(), c.weight.grad(), c.a.grad(),
          c.b.grad()};
}

// The largest relative distance; the sum's relative to the sum of magnitudes, about one for each row.
double worst_of_rows(const RowFound& found, const RowFound& wanted) {
  double most = std::abs(found.sum.to(at::kDouble).item<double>() - wanted.sum.item<double>()) /
                (1 + static_cast<double>(wanted.log_p.numel()));
  for (const auto of : {&RowFound::log_p, &RowFound::hidden, &RowFound::weight, &RowFound::a, &RowFound::b}) {
    const at::Tensor &x = found.*of, &y = wanted.*of;
    if (!x.defined() && !y.defined()) continue;
    if (!x.defined() || !y.defined() || x.sizes() != y.sizes()) return INFINITY;
    if (x.numel() > 0) most = std::max(most, relative(x, y));
    if (x.isnan().any().item<bool>()) return INFINITY;
  }
  return most;
}

// 3001 columns: tiles of 87 rows in fp64, and of slices; the sizes are odd. With updates or without them by
// turns; ISOGRAD_FULL_TESTS=1: both.
TEST(LinearRowLoss, EqualsAutogradInSeveralTiles) {
  at::manual_seed(41);
  std::size_t turn = 0;
  // bf16: logits of size 2 are rounded to 2^-8 of that, and the ratio with them.
  for (const auto& [type, bound] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 2e-5}, {at::kBFloat16, 0.05}})
    for (const RowLoss loss : kRowLosses)
      for (const bool updates : {false, true}) {
        if (type == at::kBFloat16 && loss != RowLoss::kCrossEntropy && loss != RowLoss::kCispo) continue;
        if (updates == takes_first(turn++ / 2) && !full_tests()) continue;
        const RowCase c = row_case(loss, 391, 3001, type, updates);
        const RowFound found = by_ours(c, 0.3);
        EXPECT_LT(worst_of_rows(found, by_autograd(c, 0.3)), bound)
            << static_cast<int>(loss) << " " << updates;
        EXPECT_EQ(found.sum.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
      }
}

TEST(LinearRowLoss, EqualsAutogradOnSmallSizes) {
  at::manual_seed(42);
  for (const RowLoss loss : kRowLosses)
    for (const std::int64_t rows : {4, 5, 33})
      for (const std::int64_t vocabulary : {2, 7, 101}) {
        const RowCase c = row_case(loss, rows, vocabulary, at::kDouble, rows == 5);
        EXPECT_LT(worst_of_rows(by_ours(c, -2), by_autograd(c, -2)), 1e-12)
            << static_cast<int>(loss) << " " << rows;
      }
}

TEST(LinearRowLoss, TakesSeveralTargetsForARow) {
  at::manual_seed(43);
  std::size_t turn = 0;
  for (const auto& [type, bound] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}, {at::kBFloat16, 0.05}})
    for (const std::int64_t targets : {1, 2, 9})
      for (const bool updates : {false, true}) {
        if (updates == takes_first(turn++ / 2) && !full_tests()) continue;
        const RowCase c = row_case(RowLoss::kCrossEntropy, 205, 3001, type, updates, targets);
        const RowFound wanted = by_autograd(c, 0.3);
        EXPECT_LT(worst_of_rows(by_ours(c, 0.3), wanted), bound) << targets;
        if (targets < 2) continue;
        RowCase once = c;  // planted: a repeated id counts once
        once.inputs.weights = c.inputs.weights.clone();
        once.inputs.weights.select(1, 1).zero_();
        EXPECT_GT(worst_of_rows(by_ours(once, 0.3), wanted), 2 * bound);
      }
  const RowCase none = row_case(RowLoss::kCrossEntropy, 3, 7, at::kDouble, false, 0);
  RowCase c = none;
  c.inputs.targets = at::zeros({3, 0}, at::kLong), c.inputs.weights = at::zeros({3, 0}, at::kDouble);
  EXPECT_EQ(by_ours(c, 1).sum.item<double>(), 0);
  EXPECT_EQ(c.hidden.grad().abs().sum().item<double>(), 0);
}

// The comparisons above must refuse these.
TEST(LinearRowLoss, PlantedMistakesAreFound) {
  at::manual_seed(44);
  const auto found_by = [](const RowCase& c, const PlainRowLoss& mistake) {
    EXPECT_LT(worst_of_rows(by_ours(c, 0.3), by_autograd(c, 0.3)), 1e-12);
    return worst_of_rows(by_ours(c, 0.3), by_autograd(c, 0.3, mistake));
  };
  const auto with = [](const auto& change) {
    return [change](const RowCase& c, const at::Tensor& log_p) {
      RowCase wrong = c;
      change(wrong);
      return plain_loss(wrong, log_p);
    };
  };
  for (const RowLoss loss : kRowLosses) {
    const RowCase c = row_case(loss, 95, 101, at::kDouble, true);
    EXPECT_GT(found_by(c,
                       [](const RowCase& of, const at::Tensor& log_p) {
                         return plain_loss(of, log_p) / static_cast<double>(log_p.numel());
                       }),
              1e-2);
    RowCase unscaled = c;  // planted: the update's scale forgotten
    unscaled.scale = 1;
    EXPECT_GT(worst_of_rows(by_ours(unscaled, 0.3), by_autograd(c, 0.3)), 1e-2);
  }
  EXPECT_GT(found_by(row_case(RowLoss::kCrossEntropy, 95, 101, at::kDouble, false),
                     with([](RowCase& c) { c.inputs.weights = c.inputs.weights.clamp_min(0); })),
            1e-2);
  for (const RowLoss loss : {RowLoss::kPpo, RowLoss::kCispo, RowLoss::kGspo})
    EXPECT_GT(found_by(row_case(loss, 95, 101, at::kDouble, false),
                       with([](RowCase& c) { c.options.clip_low = 0, c.options.clip_high = 1e9; })),
              1e-2);
  EXPECT_GT(found_by(row_case(RowLoss::kCispo, 95, 101, at::kDouble, false),  // the ratio differentiated
                     with([](RowCase& c) { c.loss = RowLoss::kPpo; })),
            1e-2);
  EXPECT_GT(found_by(row_case(RowLoss::kGspo, 95, 101, at::kDouble, false),  // each token by its own ratio
                     with([](RowCase& c) { c.loss = RowLoss::kPpo; })),
            1e-2);
  EXPECT_GT(found_by(row_case(RowLoss::kDro, 95, 101, at::kDouble, false),
                     with([](RowCase& c) { c.options.beta = 0; })),
            1e-2);
}

TEST(LinearRowLoss, HasTheGradientOfFiniteDifferences) {
  at::manual_seed(45);
  RowCase c = row_case(RowLoss::kPpo, 12, 9, at::kDouble, true);
  const at::Tensor hidden = c.hidden, b = c.b;
  const auto of_hidden = [&](const at::Tensor& x) {
    c.hidden = x;
    return row_loss_of(c).sum;
  };
  EXPECT_LT(off_from_differences(of_hidden, hidden, gradient_of(of_hidden(hidden), hidden)), 1e-7);
  c.hidden = hidden;
  const auto of_b = [&](const at::Tensor& x) {
    c.b = x;
    return row_loss_of(c).sum;
  };
  EXPECT_LT(off_from_differences(of_b, b, gradient_of(of_b(b), b)), 1e-7);
}

// Ratios 2, 2, 1/2, 1/2 and 1 with advantages 1, -1, 1, -1 and 3 over a vocabulary of two equal logits.
TEST(LinearRowLoss, ByHand) {
  const at::Tensor hidden = at::zeros({5, 1}, at::kDouble), weight = at::ones({2, 1}, at::kDouble);
  const RowLossInputs inputs{
      .targets = at::zeros({5}, at::kLong),
      .old_log_probabilities = -at::tensor({4.0, 4.0, 1.0, 1.0, 2.0}, at::kDouble).log(),
      .advantages = at::tensor({1.0, -1.0, 1.0, -1.0, 3.0}, at::kDouble),
      .ratio_mask = at::tensor({1, 1, 1, 1, 0}, at::kLong).to(at::kBool),
      .cu_seqlens = {0, 2, 5}};
  const double half = std::log(0.5);
  const std::vector<std::pair<RowLoss, double>> wanted = {
      {RowLoss::kImportanceSampling, -(2 - 2 + 0.5 - 0.5 + 3)},
      {RowLoss::kPpo, -(1.2 - 2 + 0.5 - 0.8 + 3)},
      {RowLoss::kCispo, -half * (1.2 - 1.2 + 0.8 - 0.8 + 3)},
      {RowLoss::kDro, -(half * 3 - 0.5 * 0.1 * 4 * half * half)},
      {RowLoss::kGspo, -(1.2 - 2 + 0.5 - 0.8 + 1.5)}};
  for (const auto& [loss, sum] : wanted)
    EXPECT_NEAR(linear_row_loss(hidden, weight, inputs, loss, {.beta = 0.1}).sum.item<double>(), sum, 1e-14)
        << static_cast<int>(loss);
}

// Frozen weight, frozen body, adapters alone, no gradient at all.
TEST(LinearRowLoss, MakesTheGradientsThatAreWanted) {
  at::manual_seed(46);
  for (const RowLoss loss : kRowLosses) {
    const RowCase c = row_case(loss, 205, 3001, at::kDouble, true);
    const RowFound wanted = by_autograd(c, 1);
    const auto check = [&](const std::vector<at::Tensor RowCase::*>& frozen) {
      RowCase part = c;
      RowFound of = wanted;
      for (const auto field : frozen) {
        part.*field = (c.*field).detach();
        if (field == &RowCase::hidden) of.hidden = at::Tensor();
        if (field == &RowCase::weight) of.weight = at::Tensor();
        if (field == &RowCase::a) of.a = at::Tensor();
        if (field == &RowCase::b) of.b = at::Tensor();
      }
      EXPECT_LT(worst_of_rows(by_ours(part, 1), of), 1e-12) << static_cast<int>(loss) << " " << frozen.size();
    };
    check({&RowCase::weight});
    check({&RowCase::hidden, &RowCase::weight});
    check({&RowCase::weight, &RowCase::a, &RowCase::b});
    check({&RowCase::hidden, &RowCase::a, &RowCase::b});
    check({&RowCase::weight, &RowCase::b});
    check({&RowCase::weight, &RowCase::a});
    check({&RowCase::hidden, &RowCase::weight, &RowCase::a, &RowCase::b});
    const at::NoGradGuard none;
    const RowLossResult result = row_loss_of(c);
    EXPECT_FALSE(result.sum.requires_grad());
    EXPECT_LT(relative(result.sum, wanted.sum), 1e-11);
    EXPECT_LT(relative(result.log_probabilities, wanted.log_p), 1e-13);
  }
}

TEST(LinearRowLoss, AddsUpWithATiedEmbeddingAndWithAGraphThatIsKept) {
  at::manual_seed(47);
  const RowCase c = row_case(RowLoss::kCrossEntropy, 40, 50, at::kDouble, false);
  const at::Tensor ids = at::randint(50, {40}, at::kLong), tied = leaf(c.weight), twin = leaf(c.weight);
  const at::Tensor sum =
      linear_row_loss(at::embedding(tied, ids).tanh(), tied, c.inputs, RowLoss::kCrossEntropy).sum;
  sum.backward({}, /*keep_graph=*/true);
  sum.backward();
  (plain_loss(c, plain_log_p(c, at::embedding(twin, ids).tanh(), twin, {}, {})) * 2).backward();
  EXPECT_LT(relative(tied.grad(), twin.grad()), 1e-12);
}

TEST(LinearRowLoss, GivesRowsOfWeight0NothingEvenWhereTheyAreNaN) {
  at::manual_seed(48);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const RowLoss loss : kRowLosses) {
      RowCase c = row_case(loss, 205, 3001, type, true);
      if (loss == RowLoss::kDro) c.options.beta = 0;
      if (loss == RowLoss::kGspo) c.inputs.ratio_mask[7] = 0;
      const RowFound wanted = by_ours(c, 1);
      {
        const at::NoGradGuard none;
        c.hidden[7].fill_(std::nan(""));
      }
      const RowFound found = by_ours(c, 1);
      EXPECT_EQ(found.hidden.slice(0, 1, 205, 2).abs().sum().item<double>(), 0);
      EXPECT_TRUE(std::isnan(found.log_p[7].item<double>()));
      for (const auto of : {&RowFound::sum, &RowFound::hidden, &RowFound::weight, &RowFound::a, &RowFound::b})
        EXPECT_TRUE(at::equal(found.*of, wanted.*of)) << static_cast<int>(loss);
      EXPECT_TRUE(found.log_p[9].lt(0).item<bool>()) << "a row of weight 0 is answered";
    }
}

// An answer that comes back as q is a ratio of exactly 1, in fp32 too.
TEST(LinearRowLoss, IsOnPolicyWithItsOwnAnswers) {
  at::manual_seed(49);
  RowCase c = row_case(RowLoss::kImportanceSampling, 95, 101, at::kFloat, true);
  c.inputs.old_log_probabilities = row_loss_of(c).log_probabilities;
  EXPECT_EQ(row_loss_of(c).sum.item<float>(), static_cast<float>(-c.inputs.advantages.sum().item<double>()));
}

// Each rank holds 34, 34 and 33 columns of 101; gradients of what all ranks hold are parts of a sum.
TEST(LinearRowLoss, IsTheWholeOneOverAShardedVocabulary) {
  at::manual_seed(50);
  for (const std::int64_t targets : {0, 3})
    for (const RowLoss loss : kRowLosses) {
      if (targets > 0 && loss != RowLoss::kCrossEntropy) continue;
      const RowCase c = row_case(loss, 45, 101, at::kDouble, true, targets);
      const RowFound wanted = by_autograd(c, 0.3);
      run_ranks(3, [&](World& world) {
        const std::int64_t first = 34 * world.rank, columns = world.rank == 2 ? 33 : 34;
        RowCase part = c;
        part.hidden = leaf(c.hidden), part.a = leaf(c.a);
        part.weight = leaf(c.weight.narrow(0, first, columns)), part.b = leaf(c.b.narrow(0, first, columns));
        part.options.shard = {.group = world.group, .first = first, .vocabulary = 101};
        RowFound found = by_ours(part, 0.3), own = wanted;
        own.weight = wanted.weight.narrow(0, first, columns), own.b = wanted.b.narrow(0, first, columns);
        EXPECT_GT(worst_of_rows(found, own), 1e-2) << "planted: a part for the whole";
        world.group.all_reduce(found.hidden);
        world.group.all_reduce(found.a);
        EXPECT_LT(worst_of_rows(found, own), 1e-12) << static_cast<int>(loss);
      });
    }
}

TEST(LinearRowLoss, HasNothingToSayWithoutRows) {
  for (const RowLoss loss : kRowLosses) {
    const RowCase some = row_case(loss, 4, 7, at::kDouble, true);
    RowCase c = some;
    c.hidden = leaf(at::zeros({0, 24}, at::kDouble));
    for (const auto field :
         {&RowLossInputs::targets, &RowLossInputs::weights, &RowLossInputs::old_log_probabilities,
          &RowLossInputs::advantages, &RowLossInputs::ratio_mask})
      if ((c.inputs.*field).defined()) c.inputs.*field = (c.inputs.*field).narrow(0, 0, 0);
    if (loss == RowLoss::kGspo) c.inputs.cu_seqlens = {0};
    const RowFound found = by_ours(c, 1);
    EXPECT_EQ(found.sum.item<double>(), 0);
    EXPECT_EQ(found.log_p.numel(), 0);
    for (const at::Tensor& gradient : {found.weight, found.a, found.b})
      EXPECT_EQ(gradient.abs().sum().item<double>(), 0);
  }
}

TEST(LinearRowLoss, ShowsARatioThatOverflowsUnlessItIsClipped) {
  RowCase c = row_case(RowLoss::kPpo, 2, 5, at::kDouble, false);
  c.inputs.old_log_probabilities = at::full({2}, -1e30, at::kDouble);
  c.inputs.advantages = at::tensor({1.0, 2.0}, at::kDouble);
  const RowFound clipped = by_ours(c, 1);
  EXPECT_DOUBLE_EQ(clipped.sum.item<double>(), -1.3 * 3);
  EXPECT_EQ(clipped.hidden.abs().sum().item<double>(), 0);
  c.loss = RowLoss::kImportanceSampling;
  EXPECT_TRUE(std::isinf(row_loss_of(c).sum.item<double>()));
}

TEST(LinearRowLoss, RefusesBadArguments) {
  const auto message = [](RowLoss loss, const std::function<void(RowCase&)>& change) {
    RowCase c = row_case(loss, 4, 7, at::kFloat, true);
    change(c);
    return error_of([&] { row_loss_of(c); });
  };
  const auto entropy = RowLoss::kCrossEntropy, ppo = RowLoss::kPpo, gspo = RowLoss::kGspo;
  for (const RowLoss loss : kRowLosses) EXPECT_EQ(message(loss, [](RowCase&) {}), "no error");
  const double nan = std::nan("");
  const auto refused = [&](RowLoss loss, const char* words, const std::function<void(RowCase&)>& change) {
    EXPECT_THAT(message(loss, change), HasSubstr(words));
  };
  refused(entropy, "weight [24, 7]", [](RowCase& c) { c.weight = c.weight.t(); });
  refused(entropy, "one type", [](RowCase& c) { c.weight = c.weight.to(at::kDouble); });
  refused(entropy, "targets undefined", [](RowCase& c) { c.inputs.targets = at::Tensor(); });
  refused(entropy, "targets [3]", [](RowCase& c) { c.inputs.targets = c.inputs.targets.narrow(0, 0, 3); });
  refused(entropy, "targets[2] = 7", [](RowCase& c) { c.inputs.targets[2] = 7; });
  refused(entropy, "targets[2] = -100", [](RowCase& c) { c.inputs.targets[2] = -100; });
  refused(ppo, "targets [4, 1]", [](RowCase& c) { c.inputs.targets = c.inputs.targets.unsqueeze(1); });
  refused(entropy, "weights undefined", [](RowCase& c) { c.inputs.weights = at::Tensor(); });
  refused(entropy, "weights [5]", [](RowCase& c) { c.inputs.weights = at::ones({5}); });
  refused(entropy, "weights[1] = nan", [&](RowCase& c) { c.inputs.weights[1] = nan; });
  refused(entropy, "weights[3] = -inf", [](RowCase& c) { c.inputs.weights[3] = -INFINITY; });
  refused(entropy, "that require a gradient", [](RowCase& c) { c.inputs.weights.requires_grad_(true); });
  refused(entropy, "weights[2, 1] = nan", [&](RowCase& c) {
    c.inputs.targets = at::zeros({4, 3}, at::kLong), c.inputs.weights = at::ones({4, 3});
    c.inputs.weights[2][1] = nan;
  });
  refused(ppo, "advantages undefined", [](RowCase& c) { c.inputs.advantages = at::Tensor(); });
  refused(ppo, "advantages[1] = inf", [&](RowCase& c) { c.inputs.advantages[1] = INFINITY; });
  refused(ppo, "old_log_probabilities[1] = nan",
          [&](RowCase& c) { c.inputs.old_log_probabilities[1] = nan; });
  refused(ppo, "probabilities [3]", [](RowCase& c) { c.inputs.old_log_probabilities = at::ones({3}); });
  refused(ppo, "clip_low = 2", [](RowCase& c) { c.options.clip_low = 2; });
  refused(ppo, "clip_low = -0.1", [](RowCase& c) { c.options.clip_low = -0.1; });
  refused(gspo, "clip_high = nan", [&](RowCase& c) { c.options.clip_high = nan; });
  refused(RowLoss::kDro, "beta = -1", [](RowCase& c) { c.options.beta = -1; });
  refused(RowLoss::kDro, "beta = inf", [](RowCase& c) { c.options.beta = INFINITY; });
  refused(gspo, "cu_seqlens [0, 3] over 4 rows", [](RowCase& c) { c.inputs.cu_seqlens = {0, 3}; });
  refused(gspo, "ascending", [](RowCase& c) { c.inputs.cu_seqlens = {0, 3, 2, 4}; });
  refused(gspo, "ratio_mask undefined", [](RowCase& c) { c.inputs.ratio_mask = at::Tensor(); });
  refused(gspo, "empty ratio_mask", [](RowCase& c) { c.inputs.ratio_mask.zero_(); });
  refused(entropy, "b [6, 5]", [](RowCase& c) { c.b = c.b.narrow(0, 0, 6); });
  refused(entropy, "low-rank update", [](RowCase& c) { c.a = c.a.to(at::kDouble); });
  refused(entropy, "scale inf", [](RowCase& c) { c.scale = INFINITY; });
  EXPECT_EQ(message(ppo, [](RowCase& c) { c.options.beta = -1; }), "no error") << "not its option";
  const RowCase c = row_case(entropy, 4, 7, at::kFloat, false);
  const at::Tensor sum = row_loss_of(c).sum;
  EXPECT_THAT(error_of([&] { torch::autograd::grad({sum}, {c.hidden}, {}, true, true); }),
              HasSubstr("create_graph"));
}

}  // namespace
}  // namespace isograd
