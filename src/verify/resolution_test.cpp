// What a comparison can see: just above what it claims it finds, just below it does not.
#include "verify/compare.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

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

TEST(Resolution, AnErrorOfScaleOfASingleParameterShowsFromWhereItIsSaidOn) {
  for (const double noise : {1e-6, 1e-2})
    for (std::uint64_t seed : {1, 2, 3}) {
      const Gradients made = gradients(noise, 1000 * seed);
      const auto scales = error_scales(made.right);
      const Bounds bounds = bounds_for(at::kBFloat16, 4, 2);
      for (std::size_t i = 0; i < made.right.size(); ++i) {
        const auto judge = [&](double factor) {
          return compare_rounded(made.found[i] * factor, made.right[i], scales[i], 2 * noise, bounds);
        };
        const Comparison as_is = judge(1);
        if (!as_is.passed) continue;
        const double from = as_is.scale_found;
        EXPECT_TRUE(judge(1 + 0.99 * from).passed || judge(1 - 0.99 * from).passed) << i;
        EXPECT_FALSE(judge(1 + 1.001 * from).passed || judge(1 - 1.001 * from).passed) << i;
      }
    }
}

// In bf16, by its own pieces: also beside a reference that is off in no particular direction.
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
  const Comparison flipped = compare_exact(-small, small, scales[1], Bounds{});
  EXPECT_TRUE(flipped.passed);
  EXPECT_GE(compare_exact(small, small, scales[1], Bounds{}).scale_found, 2);
  EXPECT_LT(compare_exact(large, large, scales[0], Bounds{}).scale_found, 1.1e-10);
  ParameterVerdict big, little;
  big.name = "big";
  big.norm = norm_of(large);
  big.exact = compare_exact(large, large, scales[0], {});
  little.name = "little";
  little.norm = norm_of(small);
  little.by_floor = true;
  little.exact = compare_exact(small, small, scales[1], {});
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

// One matrix whose gradient is a tenth of the others', beside a reference in bf16: too small to show in the
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

}  // namespace
}  // namespace isograd
