#include "verify/compare.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>


namespace isograd {
namespace {

using ::testing::HasSubstr;

at::Tensor random_gradient(std::int64_t n, std::int64_t seed) {
  return at::randn({n}, at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed)),
                   at::kDouble);
}

TEST(Compare, TheScaleOfASmallParameterHasAFloor) {
  // Whole gradient: 4 elements of 3 and 12 of 0; RMS = sqrt(36/16) = 1.5.
  const auto scales = error_scales({at::full({4}, 3.0, at::kDouble), at::zeros({12}, at::kDouble)});
  EXPECT_DOUBLE_EQ(scales[0], 6.0);
  EXPECT_DOUBLE_EQ(scales[1], 1e-3 * 1.5 * std::sqrt(12.0));
}

TEST(Compare, AScaleErrorHasItsRatioAndNoResidual) {
  const at::Tensor reference = random_gradient(1000, 1);
  const double scale = error_scales({reference})[0];
  const Comparison half = compare_exact(reference * 0.5, reference, scale, Bounds{});
  EXPECT_NEAR(half.ratio, 0.5, 1e-14);
  EXPECT_NEAR(half.cosine, 1, 1e-14);
  EXPECT_NEAR(half.error, 0.5, 1e-14);
  EXPECT_LT(half.residual, 1e-14);
  EXPECT_FALSE(half.passed);
}

TEST(Compare, ExactMeans1e10) {
  const at::Tensor reference = random_gradient(1000, 1);
  const double scale = error_scales({reference})[0];
  EXPECT_TRUE(compare_exact(reference * (1 + 0.9e-10), reference, scale, Bounds{}).passed);
  EXPECT_FALSE(compare_exact(reference * (1 + 1.1e-10), reference, scale, Bounds{}).passed);
}

TEST(Compare, ZeroAgainstZeroPassesAndHasNoRatio) {
  const at::Tensor zero = at::zeros({5}, at::kDouble);
  const Comparison nothing = compare_exact(zero, zero, 0.0, Bounds{});
  EXPECT_TRUE(nothing.passed);
  EXPECT_TRUE(std::isnan(nothing.ratio));
  EXPECT_FALSE(compare_exact(at::full({5}, 1e-8, at::kDouble), zero, 1.0, Bounds{}).passed);
  EXPECT_FALSE(compare_exact(at::full({5}, 1e-100, at::kDouble), zero, 0.0, Bounds{}).passed);
}

TEST(Compare, NotFiniteNeverPasses) {
  const at::Tensor reference = random_gradient(10, 1);
  at::Tensor gradient = reference.clone();
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    gradient[3] = bad;
    EXPECT_FALSE(compare_exact(gradient, reference, 1.0, Bounds{}).passed);
    EXPECT_FALSE(compare_rounded(gradient, reference, 1.0, 1e-6, bounds_for(at::kFloat, 2, 1)).passed);
  }
}

// What is in all elements alike shows below the noise of each: 1.0002 with rounding of 1e-5 on every run.
TEST(Compare, RoundingDoesNotHideAScaleOf10002) {
  const at::Tensor reference = random_gradient(10000, 1);
  const double scale = error_scales({reference})[0];
  const at::Tensor found = reference + random_gradient(10000, 2) * 1e-3;
  const double alone = relative_error(reference + random_gradient(10000, 3) * 1e-3, reference, scale);
  const Bounds bounds = bounds_for(at::kFloat, 2, 4);
  EXPECT_TRUE(compare_rounded(found, reference, scale, alone, bounds).passed);
  EXPECT_TRUE(compare_rounded(found * 1.0002, reference, scale, alone, bounds).passed);
  EXPECT_TRUE(test_scale({found}, {reference}, bounds.unit).passed);
  EXPECT_FALSE(test_scale({found * 1.0002}, {reference}, bounds.unit).passed);
}

// Draws of one distribution, a single number's rounding among them: a layout's error against the largest of
// so many runs of one process. One run alone does not measure it.
TEST(Compare, TheLargestOfThoseRunsCallsNoEqualWrong) {
  constexpr int kDraws = 20000;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto norms = [&](std::int64_t elements) {
    return at::randn({kDraws, elements}, generator, at::kDouble).norm(2, 1);
  };
  for (const std::int64_t elements : {1, 2, 3, 5, 8, 15}) {
    const at::Tensor layout = norms(elements), first = norms(elements);
    at::Tensor largest = first;
    for (int draw = 1; draw < kMostDraws; ++draw) largest = largest.maximum(norms(elements));
    EXPECT_LE((layout > 4 * largest).sum().item<int>(), 1) << elements;
    if (elements > 1) continue;
    EXPECT_GT((layout > 4 * first).sum().item<int>(), kDraws / 10);
  }
}

TEST(Compare, BoundsAreThoseOfTheFourGrades) {
  const Bounds bounds = bounds_for(at::kBFloat16, 4, 9);
  EXPECT_EQ(bounds.exact, 1e-10);
  EXPECT_EQ(bounds.unit_roundoff, std::ldexp(1, -24));  // bf16 parameters, fp32 gradients
  EXPECT_EQ(bounds.sum_length, 36);
  EXPECT_EQ(bounds.unit, std::ldexp(1, -9));
  EXPECT_EQ(bounds.figures, 1e-2);
  const at::Tensor reference = random_gradient(100, 1);
  EXPECT_DOUBLE_EQ(compare_rounded(reference, reference, 1, 1e-3, bounds).allowed, 4e-3 + std::ldexp(6, -24));
}

TEST(Compare, WhatIsNotFiniteFailsWhateverIsAllowed) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Bounds bounds = bounds_for(at::kHalf, 1, 1);
  at::Tensor found = random_gradient(100, 1);
  found[3] = infinity;
  EXPECT_FALSE(compare_rounded(found, random_gradient(100, 1), 1, infinity, bounds).passed);
  const StepFigures oracle{.loss = 2, .targets = 10, .tokens = 12, .norm = 3, .clip_coefficient = 1};
  StepFigures broken = oracle;
  broken.loss = infinity;
  ASSERT_EQ(figures_off(broken, oracle, broken, bounds).size(), 1u);
  EXPECT_EQ(figures_off(broken, oracle, broken, bounds)[0].name, "loss");
}

// A gradient whose rounding one process gets as wrong as the gradient is large: nothing shows in it.
TEST(Compare, ABoundThatIsWiderThanTheLimitIsNoPass) {
  const Bounds bounds = bounds_for(at::kFloat, 1, 1);
  const auto judged = [&](double alone_error, bool floor) {
    const at::Tensor one = random_gradient(100, 1), other = random_gradient(100, 2);
    std::vector<ParameterVerdict> parameters(2);
    parameters[0].name = "sharp", parameters[1].name = "wide";
    parameters[0].rounded = compare_rounded(one, one, norm_of(one), 1e-7, bounds);
    parameters[1].rounded = compare_rounded(other, other, norm_of(other), alone_error, bounds);
    parameters[1].by_floor = floor;
    Grade grade;
    note_resolution(grade, parameters, false);
    return diagnose_resolution(parameters, grade, false, "Do this");
  };
  for (const bool floor : {false, true}) {
    EXPECT_FALSE(judged(0.024, floor));
    const auto wide = judged(0.026, floor);
    ASSERT_TRUE(wide);
    EXPECT_EQ(wide->id, "unresolved");
    EXPECT_THAT(wide->sentence,
                ::testing::HasSubstr("10 % would not show in 1 of 2 parameters: wide. Do this"));
  }
}

TEST(Compare, FiguresMustAgree) {
  const StepFigures oracle{.loss = 2, .targets = 10, .tokens = 12, .norm = 3, .clip_coefficient = 1.0 / 3};
  EXPECT_TRUE(figures_agree(oracle, oracle, Bounds{}));
  for (auto change : {+[](StepFigures& f) { f.loss *= 1 + 1e-9; }, +[](StepFigures& f) { f.targets += 1; },
                      +[](StepFigures& f) { f.tokens -= 1; }, +[](StepFigures& f) { f.norm = NAN; },
                      +[](StepFigures& f) { f.clip_coefficient = 1; }}) {
    StepFigures other = oracle;
    change(other);
    EXPECT_FALSE(figures_agree(other, oracle, Bounds{}));
  }
}

TEST(Present, JsonHasTheAgreedKeysAndNoNaN) {
  std::vector<at::Tensor> reference = {random_gradient(50, 1), random_gradient(50, 2),
                                       random_gradient(50, 3)};
  const auto scales = error_scales(reference);
  LayoutVerdict layout;
  for (std::size_t i = 0; i < 3; ++i) {
    ParameterVerdict parameter;
    parameter.name = std::string(1, static_cast<char>('a' + i));
    at::Tensor found = reference[i].clone();
    if (i == 0) found[7] = NAN;
    parameter.exact = compare_exact(found, reference[i], scales[i], Bounds{});
    layout.parameters.push_back(parameter);
  }
  grade(layout, {}, "fp64", true, Bounds{});
  Verdict verdict;
  verdict.precision = "fp64";
  verdict.ranks = 2;
  verdict.layouts = {layout};
  verdict.diagnosis = {"not finite: 1 parameters (a)"};
  const auto document = nlohmann::json::parse(to_json(verdict));
  EXPECT_EQ(document["verdict"], "fail");
  EXPECT_EQ(document["grades"]["E1"]["state"], "fail");
  EXPECT_EQ(document["diagnosis"].size(), 1u);
  ASSERT_EQ(document["parameters"].size(), 3u);
  const auto& worst = document["parameters"][0];  // worst first
  EXPECT_EQ(worst["name"], "a");
  for (const char* key : {"ratio", "cosine", "error"}) EXPECT_TRUE(worst[key].is_null()) << key;
  EXPECT_EQ(worst["allowed"], 1e-10);
  EXPECT_THAT(parity_line(verdict), HasSubstr("parity FAIL: 2 ranks != 1 device"));
  EXPECT_THAT(to_text(verdict, 1), HasSubstr("and 2 more, all passed"));
  EXPECT_EQ(to_table(verdict).rows.size(), 3u);
  EXPECT_EQ(to_table(verdict).columns.front(), "verdict");  // what a narrow screen shows without scrolling
  EXPECT_FALSE(to_table(verdict).passed);
}

}  // namespace
}  // namespace isograd
