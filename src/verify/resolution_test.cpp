// What a comparison can see: just above what it claims it finds, just below it does not.
#include "verify/resolution.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "verify/compare.hpp"

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

TEST(Resolution, ASmallParametersSignFlippedIsSaidNotToShow) {
  const at::Tensor large = drawn({100000}, 1), small = drawn({64}, 2) * 1e-14;
  const auto scales = error_scales({large, small});
  EXPECT_FALSE(held_to_floor(norm_of(large), scales[0]));
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

}  // namespace
}  // namespace isograd
