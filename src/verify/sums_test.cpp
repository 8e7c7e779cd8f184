// Sums in one pass beside LibTorch's own, in another order.
#include "verify/compare.hpp"

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>

#include "isograd/testing.hpp"

namespace isograd {
namespace {

at::Tensor numbers(std::int64_t count, double scale = 1) {
  return at::randn({count}, at::TensorOptions().dtype(at::kDouble)) * scale;
}

double plain(const at::Tensor& a, const at::Tensor& b) {
  return (a * b).sum().item<double>();
}

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
    expect_near(squares_missing(a, {c, a - c * 2, c}), 0, size);
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
