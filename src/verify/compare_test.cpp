// Sums, bounds and what a comparison can see: just above what it claims it finds, just below it does not.
#include "verify/compare.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

#include "isograd/testing.hpp"
#include "verify/diagnosis.hpp"

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
  const Comparison half = compare(reference * 0.5, reference, scale, Bounds{}.exact);
  EXPECT_NEAR(half.ratio, 0.5, 1e-14);
  EXPECT_NEAR(half.cosine, 1, 1e-14);
  EXPECT_NEAR(half.error, 0.5, 1e-14);
  EXPECT_LT(half.residual, 1e-14);
  EXPECT_FALSE(half.passed);
}

TEST(Compare, ExactMeans1e10) {
  const at::Tensor reference = random_gradient(1000, 1);
  const double scale = error_scales({reference})[0];
  EXPECT_TRUE(compare(reference * (1 + 0.9e-10), reference, scale, Bounds{}.exact).passed);
  EXPECT_FALSE(compare(reference * (1 + 1.1e-10), reference, scale, Bounds{}.exact).passed);
}

TEST(Compare, ZeroAgainstZeroPassesAndHasNoRatio) {
  const at::Tensor zero = at::zeros({5}, at::kDouble);
  const Comparison nothing = compare(zero, zero, 0.0, Bounds{}.exact);
  EXPECT_TRUE(nothing.passed);
  EXPECT_TRUE(std::isnan(nothing.ratio));
  EXPECT_FALSE(compare(at::full({5}, 1e-8, at::kDouble), zero, 1.0, Bounds{}.exact).passed);
  EXPECT_FALSE(compare(at::full({5}, 1e-100, at::kDouble), zero, 0.0, Bounds{}.exact).passed);
}

TEST(Compare, NotFiniteNeverPasses) {
  const at::Tensor reference = random_gradient(10, 1);
  at::Tensor gradient = reference.clone();
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    gradient[3] = bad;
    EXPECT_FALSE(compare(gradient, reference, 1.0, Bounds{}.exact).passed);
    EXPECT_FALSE(compare(gradient, reference, 1.0, bounds_for(at::kFloat, 2, 1).rounded(1e-6)).passed);
  }
}

// An error of all elements alike shows below the noise of each: 1.0002 with rounding of 1e-5 on every run.
TEST(Compare, RoundingDoesNotHideAScaleOf10002) {
  const at::Tensor reference = random_gradient(10000, 1);
  const double scale = error_scales({reference})[0];
  const at::Tensor found = reference + random_gradient(10000, 2) * 1e-3;
  const double alone = distance(reference + random_gradient(10000, 3) * 1e-3, reference) / scale;
  const Bounds bounds = bounds_for(at::kFloat, 2, 4);
  EXPECT_TRUE(compare(found, reference, scale, bounds.rounded(alone)).passed);
  EXPECT_TRUE(compare(found * 1.0002, reference, scale, bounds.rounded(alone)).passed);
  EXPECT_TRUE(test_scale({found}, {reference}, bounds.unit).passed);
  EXPECT_FALSE(test_scale({found * 1.0002}, {reference}, bounds.unit).passed);
}

// Draws of one distribution, a single number's rounding among them: a layout's error against the largest of
// this many runs of one process. One run alone does not measure it.
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
  EXPECT_DOUBLE_EQ(compare(reference, reference, 1, bounds.rounded(1e-3)).allowed, 4e-3 + std::ldexp(6, -24));
}

TEST(Compare, WhatIsNotFiniteFailsWhateverIsAllowed) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Bounds bounds = bounds_for(at::kHalf, 1, 1);
  at::Tensor found = random_gradient(100, 1);
  found[3] = infinity;
  EXPECT_FALSE(compare(found, random_gradient(100, 1), 1, bounds.rounded(infinity)).passed);
  const StepFigures oracle{.loss = 2, .targets = 10, .tokens = 12, .norm = 3, .clip_coefficient = 1};
  StepFigures broken = oracle;
  broken.loss = infinity;
  ASSERT_EQ(figures_off(broken, oracle, bounds, &broken).size(), 1u);
  EXPECT_EQ(figures_off(broken, oracle, bounds, &broken)[0].name, "loss");
}

// A gradient whose rounding one process gets as wrong as the gradient is large: nothing shows in it.
TEST(Compare, ABoundThatIsWiderThanTheLimitIsNoPass) {
  const Bounds bounds = bounds_for(at::kFloat, 1, 1);
  const auto judged = [&](double alone_error, bool floor) {
    const at::Tensor one = random_gradient(100, 1), other = random_gradient(100, 2);
    std::vector<ParameterVerdict> parameters(2);
    parameters[0].name = "sharp", parameters[1].name = "wide";
    parameters[0].rounded = compare(one, one, norm_of(one), bounds.rounded(1e-7));
    parameters[1].rounded = compare(other, other, norm_of(other), bounds.rounded(alone_error));
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
  EXPECT_TRUE(figures_off(oracle, oracle, Bounds{}).empty());
  for (auto change : {+[](StepFigures& f) { f.loss *= 1 + 1e-9; }, +[](StepFigures& f) { f.targets += 1; },
                      +[](StepFigures& f) { f.tokens -= 1; }, +[](StepFigures& f) { f.norm = NAN; },
                      +[](StepFigures& f) { f.clip_coefficient = 1; }}) {
    StepFigures other = oracle;
    change(other);
    EXPECT_FALSE(figures_off(other, oracle, Bounds{}).empty());
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
    parameter.exact = compare(found, reference[i], scales[i], Bounds{}.exact);
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

TEST(Present, TheParityLineNamesTheLayoutsThatItIsAbout) {
  Verdict verdict;
  verdict.ranks = 3;
  const auto line_of = [&](const std::vector<std::pair<std::string, bool>>& layouts) {
    verdict.layouts.clear();
    verdict.passed = true;
    for (const auto& [name, passed] : layouts) {
      LayoutVerdict& layout = verdict.layouts.emplace_back();
      layout.name = name, layout.passed = passed;
      verdict.passed = verdict.passed && passed;
    }
    return parity_line(verdict);
  };
  EXPECT_EQ(line_of({{"bucketed", true}, {"zero3", true}}),
            "parity PASS: 3 ranks = 1 device under bucketed, zero3");
  EXPECT_EQ(line_of({{"bucketed", true}, {"zero2", false}, {"zero3", false}}),
            "parity FAIL: 3 ranks != 1 device under zero2, zero3 (of 3 layouts)");
  EXPECT_EQ(line_of(std::vector<std::pair<std::string, bool>>(9, {"zero1", true})),
            "parity PASS: 3 ranks = 1 device under 9 layouts");
  EXPECT_EQ(line_of({}), "parity PASS: 3 ranks = 1 device");
}

at::Tensor drawn(std::vector<std::int64_t> shape, std::uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}

// Parameters of very different sizes, and the same with rounding of relative size `noise`, larger in some.
struct Gradients {
  Tensors right, found;
};
Gradients gradients(double noise, std::uint64_t seed) {
  Gradients made;
  const std::vector<std::vector<std::int64_t>> shapes = {{61, 24}, {24}, {24, 72}, {72}, {5}, {1}, {72, 24}};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    made.right.push_back(drawn(shapes[i], 10 * i + seed) * std::pow(3.0, static_cast<double>(i) - 3));
    const double own = noise * (i == 3 ? 10 : 1);
    made.found.push_back(made.right.back() * (1 + own * drawn(shapes[i], 10 * i + seed + 100)));
  }
  return made;
}
Tensors times(const Tensors& gradient, double factor) {
  Tensors scaled;
  for (const auto& tensor : gradient) scaled.push_back(tensor * factor);
  return scaled;
}

TEST(Resolution, AnErrorOfScaleOfTheWholeShowsFromWhereItIsSaidOn) {
  for (const auto& [type, noise, most] : {std::tuple{at::kFloat, 3e-7, 1e-6}, {at::kBFloat16, 1e-2, 2e-2}}) {
    const double unit = bounds_for(type, 4, 2).unit;
    for (std::uint64_t seed : {1, 2, 3, 4, 5}) {
      const Gradients made = gradients(noise, 1000 * seed);
      const WholeScale right = test_scale(made.found, made.right, unit);
      EXPECT_TRUE(right.passed) << c10::toString(type) << " seed " << seed << " " << right.error;
      EXPECT_LT(right.found_from, most) << "no better than what a single parameter shows";
      EXPECT_GT(right.found_from, 2 * unit);
      for (const double sign : {1.0, -1.0})
        EXPECT_FALSE(scale_agrees(times(made.found, 1 + sign * 1.001 * right.found_from), made.right, unit))
            << c10::toString(type) << " seed " << seed << " from " << right.found_from;
      // Just below, one of the signs still passes: the number is not larger than it has to be.
      EXPECT_TRUE(scale_agrees(times(made.found, 1 + 0.9 * right.found_from), made.right, unit) ||
                  scale_agrees(times(made.found, 1 - 0.9 * right.found_from), made.right, unit));
    }
  }
}

// The error of one process counts, as far as the right gradient's own scale moves; four times, and no less
// than four roundings.
TEST(Resolution, TheScaleIsAllowedWhatOneProcessIsOffAndTheRightGradientMoves) {
  const double unit = bounds_for(at::kFloat, 4, 2).unit, inf = std::numeric_limits<double>::infinity();
  const Gradients made = gradients(3e-7, 1);
  const auto allowed = [&](const ScaleRounding& rounding) {
    const WholeScale scale = test_scale(made.found, made.right, unit, rounding);
    for (const double error : {1e-4, 1e-5, 1e-6, 1e-7})
      for (const double sign : {1.0, -1.0}) {
        const Tensors off = times(made.found, 1 + sign * error);
        EXPECT_EQ(scale_agrees(off, made.right, unit, rounding),
                  test_scale(off, made.right, unit, rounding).passed)
            << error;
        if (scale.found_from <= error) {
          EXPECT_FALSE(scale_agrees(off, made.right, unit, rounding)) << error;
        }
      }
    return scale.allowed;
  };
  const double least = allowed({});
  EXPECT_EQ(allowed({.alone = 1e-5, .most = 0}), least) << "of a gradient whose scale does not move";
  EXPECT_EQ(allowed({.alone = inf, .most = 1e-8}), least) << "that moves by less than rounding";
  EXPECT_EQ(allowed({.alone = 0, .most = 1e-5}), least) << "one process is right";
  EXPECT_EQ(allowed({.alone = NAN, .most = 1e-5}), least);
  EXPECT_DOUBLE_EQ(allowed({.alone = inf, .most = 1e-5}), 4e-5);
  EXPECT_DOUBLE_EQ(allowed({.alone = 1e-4, .most = 1e-5}), 4e-5);
  EXPECT_DOUBLE_EQ(allowed({.alone = -1e-6, .most = 1e-5}), least + 4e-6);
  EXPECT_DOUBLE_EQ(allowed({.alone = 1e-5, .most = inf}), least + 4e-5);
}

TEST(Resolution, AnErrorOfScaleOfASingleParameterShowsFromWhereItIsSaidOn) {
  for (const double noise : {1e-6, 1e-2})
    for (std::uint64_t seed : {1, 2, 3}) {
      const Gradients made = gradients(noise, 1000 * seed);
      const auto scales = error_scales(made.right);
      const Bounds bounds = bounds_for(at::kBFloat16, 4, 2);
      for (std::size_t i = 0; i < made.right.size(); ++i) {
        const auto judge = [&](double factor) {
          return compare(made.found[i] * factor, made.right[i], scales[i], bounds.rounded(2 * noise));
        };
        const Comparison as_is = judge(1);
        if (!as_is.passed) continue;
        const double from = as_is.scale_found;
        EXPECT_TRUE(judge(1 + 0.99 * from).passed || judge(1 - 0.99 * from).passed) << i;
        EXPECT_FALSE(judge(1 + 1.001 * from).passed || judge(1 - 1.001 * from).passed) << i;
      }
    }
}

// In bf16, by its own pieces: also against a reference that is off in no particular direction.
TEST(Resolution, AnErrorOfScaleOfOneMatrixShowsFromWhereItIsSaidOn) {
  constexpr double kUnit = 0x1p-9, kAllowed = 32 * kUnit;
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{8, 8}, {24, 72}, {61, 24}, {300, 200}})
    for (std::uint64_t seed : {1, 2, 3}) {
      const at::Tensor right = drawn(shape, seed), found = right * (1 + 1e-2 * drawn(shape, seed + 10));
      const WholeScale as_is = test_scale_of_one(found, right, kUnit, kAllowed);
      EXPECT_TRUE(as_is.passed);
      EXPECT_GT(as_is.found_from, kAllowed);
      EXPECT_LT(as_is.found_from, right.numel() < 100 ? 0.2 : 0.11);
      const auto passes = [&](double factor) {
        return scale_of_one_agrees(found * factor, right, kUnit, kAllowed);
      };
      const double from = as_is.found_from;
      EXPECT_FALSE(passes(1 + 1.001 * from) || passes(1 - 1.001 * from)) << from;
      EXPECT_TRUE(passes(1 + 0.9 * from) || passes(1 - 0.9 * from)) << from;
      const at::Tensor rough = right + 0.4 * drawn(shape, seed + 20);  // too long by 0.08 of itself
      EXPECT_TRUE(scale_of_one_agrees(found, rough, kUnit, kAllowed));
      EXPECT_FALSE(scale_of_one_agrees(found * NAN, right, kUnit, kAllowed));
    }
}

TEST(Resolution, ASmallParametersSignFlippedIsSaidNotToShow) {
  const at::Tensor large = drawn({100000}, 1), small = drawn({64}, 2) * 1e-14;
  const auto scales = error_scales({large, small});
  EXPECT_FALSE(held_to_floor(norm_of(large), scales[0]));
  EXPECT_FALSE(held_to_floor(norm_of(large) * (1 - 0x1p-50), scales[0])) << "added up in another order";
  EXPECT_TRUE(held_to_floor(norm_of(small), scales[1]));
  const Comparison flipped = compare(-small, small, scales[1], Bounds{}.exact);
  EXPECT_TRUE(flipped.passed);
  EXPECT_GE(compare(small, small, scales[1], Bounds{}.exact).scale_found, 2);
  EXPECT_LT(compare(large, large, scales[0], Bounds{}.exact).scale_found, 1.1e-10);
  ParameterVerdict big, little;
  big.name = "big";
  big.norm = norm_of(large);
  big.exact = compare(large, large, scales[0], Bounds{}.exact);
  little.name = "little";
  little.norm = norm_of(small);
  little.by_floor = true;
  little.exact = compare(small, small, scales[1], Bounds{}.exact);
  Grade grade;
  note_resolution(grade, {big, little}, true);
  EXPECT_EQ(grade.by_floor, std::vector<std::string>{"little"});
  EXPECT_EQ(grade.unseen, std::vector<std::string>{"little"});
  EXPECT_EQ(grade.single_least, "big");
  EXPECT_LT(grade.uniform_found, 1.1e-10);
}

TEST(Resolution, WhatIsNotFiniteIsNotWithin) {
  Gradients made = gradients(1e-6, 1);
  made.found[0][0][0] = NAN;
  EXPECT_FALSE(test_scale(made.found, made.right, 0x1p-24).passed);
}

// Towards a direction: a share of it is found as that, whatever else rounding does; nothing is called sure
// that scatters more.
TEST(Resolution, ADirectionIsFoundBelowTheSizeOfRounding) {
  const Gradients made = gradients(1e-2, 1);
  Tensors direction, errors;
  for (std::size_t i = 0; i < made.right.size(); ++i) {
    direction.push_back(drawn(made.right[i].sizes().vec(), 70 + i) * made.right[i].norm() /
                        std::sqrt(static_cast<double>(made.right[i].numel())) * 3e-3);
    errors.push_back(made.found[i] - made.right[i]);
  }
  const Along none = along(errors, direction, made.right, 0x1p-9);
  EXPECT_LT(std::abs(none.share), 5 * none.scatter);
  EXPECT_LT(none.scatter, 0.2);
  for (std::size_t i = 0; i < errors.size(); ++i) errors[i] = errors[i] + direction[i];
  const Along there = along(errors, direction, made.right, 0x1p-9);
  EXPECT_LT(std::abs(there.share - 1), 5 * there.scatter);
  EXPECT_TRUE(std::isinf(along(errors, times(direction, 0), made.right, 0x1p-9).scatter));
}

// One matrix whose gradient is a tenth of the others', against a reference in bf16: too small to show in the
// whole. Of a vector the precision tells no more than half, which the verdict says: that is no pass.
TEST(Resolution, AMatrixThatIsThirtyPercentOffShowsBesideAReferenceInBf16) {
  const auto step = [](std::uint64_t seed, const char* precision, double matrix, double vector) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});
    auto rounding = at::make_generator<at::CPUGeneratorImpl>(seed);
    StepDump dump;
    dump.precision = precision;
    dump.figures = {.loss = 2, .targets = 20, .tokens = 23, .norm = std::nan(""), .clip_coefficient = 1};
    for (const auto& [name, shape, size] : {std::tuple{"embedding", std::vector<std::int64_t>{61, 24}, 1.0},
                                            {"up", {24, 72}, 0.1 * matrix},
                                            {"norm", {24}, 0.1 * vector}}) {
      const at::Tensor right = at::randn(shape, generator, at::kDouble);
      dump.gradients.emplace_back(name, size * right * (1 + 1e-2 * at::randn(shape, rounding, at::kDouble)));
    }
    return dump;
  };
  for (const char* own : {"bf16", "fp32"}) {
    const auto compared = [&](double matrix, double vector) {
      return compare_dumps(step(2, own, matrix, vector), step(3, "bf16", 1, 1), {"A", "B"});
    };
    const auto right = compared(1, 1);
    EXPECT_FALSE(right.verdict.passed);
    ASSERT_EQ(right.findings.at(0).id, "unresolved");
    EXPECT_THAT(right.findings[0].sentence,
                ::testing::HasSubstr("of 10 % would not show in 3 of 3 parameters"));
    EXPECT_THAT(right.findings[0].sentence, ::testing::HasSubstr("Make the reference in fp64. Give"));
    EXPECT_THAT(parity_line(right.verdict),
                ::testing::HasSubstr("parity FAIL: 1 rank not shown to be 1 device"));
    EXPECT_THAT(right.verdict.layouts[0].e2.bound, ::testing::HasSubstr("scale of each matrix"));
    EXPECT_EQ(right.verdict.layouts[0].e2.single_least, "norm");
    EXPECT_THAT(parity_line(right.verdict), ::testing::HasSubstr("% in a single one (norm)"));
    if (*own == 'f') {
      EXPECT_THAT(right.notices[0], ::testing::HasSubstr("in norm not even a gradient that is"));
    }
    for (const double factor : {1.3, 0.7, 1.15, 0.85}) {
      EXPECT_EQ(compared(factor, 1).findings.at(0).id, "some_parameters_scaled") << factor;
      EXPECT_GT(right.verdict.layouts[0].e2.single_found, std::abs(factor - 1));
    }
    EXPECT_EQ(compared(1, 1.3).findings.at(0).id, "unresolved");  // below what is said to be found
  }
}

at::Tensor numbers(std::int64_t count, double scale = 1) {
  return at::randn({count}, at::TensorOptions().dtype(at::kDouble)) * scale;
}

double plain(const at::Tensor& a, const at::Tensor& b) { return (a * b).sum().item<double>(); }

void expect_near(double found, double wanted, double of) {
  EXPECT_NEAR(found, wanted, 1e-13 * of);  // n u of what is added up, over up to 50,000 numbers
}

}  // namespace

TEST(SumsInOnePass, AreThoseOfAnyOrder) {
  at::manual_seed(1);
  for (const std::int64_t count : {0, 1, 7, 8, 9, 16383, 16384, 16385, 50001}) {
    const at::Tensor a = numbers(count), b = a + numbers(count, 1e-6), c = numbers(count);
    const PairSums found = pair_sums(a, b);
    const double size = plain(a, a) + plain(b, b), small = 1e-6 * size;
    expect_near(found.own, plain(a, a), size);
    expect_near(found.other, plain(b, b), size);
    expect_near(found.product, plain(a, b), size);
    expect_near(found.apart, plain(a - b, a - b), small * 1e-6);
    expect_near(found.along_own, plain(a - b, a), small);
    expect_near(found.along_other, plain(a - b, b), small);
    const FitSums fit = fit_sums(a, b, c, 0, count);
    expect_near(fit.error_direction, plain(a, b), size);
    expect_near(fit.value, plain(c, c), plain(c, c));
    expect_near(squares_apart(a, c, 0.3), plain(a - 0.3 * c, a - 0.3 * c), size);
    expect_near(missing_in({c, a - c * 2, c}, a), 0, std::sqrt(size));
    expect_near(squares(c), plain(c, c), plain(c, c));
  }
}

TEST(SumsInOnePass, CutAsTensorSplitDoes) {
  const at::Tensor a = numbers(1000), b = numbers(1000);
  double found = 0;
  for (const auto& [begin, end] : {std::pair{0, 334}, {334, 667}, {667, 1000}}) {
    const double part = pair_sums(a, b, begin, end).product;
    expect_near(part, plain(a.narrow(0, begin, end - begin), b.narrow(0, begin, end - begin)), 1000);
    found += part;
  }
  expect_near(found, plain(a, b), 1000);
}

TEST(SumsInOnePass, HaveTheSameBitsOnAnyNumberOfThreads) {
  const at::Tensor a = numbers(100001), b = numbers(100001);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const PairSums one = pair_sums(a, b);
  at::set_num_threads(3);
  const PairSums three = pair_sums(a, b);
  at::set_num_threads(before);
  EXPECT_EQ(one.product, three.product);
  EXPECT_EQ(one.apart, three.apart);
}

TEST(SumsInOnePass, KeepWhatASquareLoses) {
  const at::Tensor huge = numbers(100, 1e200), tiny = numbers(100, 1e-200);
  EXPECT_NEAR(norm_of(huge) / (norm_of(huge * 1e-200) * 1e200), 1, 1e-12);
  EXPECT_NEAR(norm_of(tiny) / (norm_of(tiny * 1e200) * 1e-200), 1, 1e-12);
  EXPECT_NEAR(distance(huge, huge * 0.5, 1) / (0.5 * norm_of(huge)), 1, 1e-12);
  EXPECT_NEAR(missing_in({tiny, tiny}, tiny) / norm_of(tiny), 1, 1e-12);
  EXPECT_EQ(distance(tiny, tiny), 0);
  EXPECT_EQ(norm_of(at::empty({0}, at::kDouble)), 0);
  EXPECT_TRUE(std::isnan(norm_of(huge * std::numeric_limits<double>::quiet_NaN())));
  EXPECT_TRUE(all_finite(huge));
  EXPECT_FALSE(all_finite(huge * 1e200));
}

}  // namespace isograd
