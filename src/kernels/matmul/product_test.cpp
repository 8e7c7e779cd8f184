// The product and its plain twin against fp64, in every form. Also run at each level of instruction sets.
#include "kernels/matmul/product.hpp"
#include "kernels/matmul/row_invariant.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>
#include <utility>

#include "base/error_testing.hpp"
#include "full_tests.hpp"
#include "kernels/matmul/brgemm.hpp"

namespace isograd {
namespace {

// The default multiplier, the rule, and each library.
class Product : public ::testing::TestWithParam<Multiplier> {
 protected:
  void SetUp() override { multiplier() = GetParam(); }
  void TearDown() override { multiplier() = before_; }

 private:
  const Multiplier before_ = multiplier();
};
INSTANTIATE_TEST_SUITE_P(By, Product,
                         ::testing::Values(Multiplier::kByRule, Multiplier::kBlas, Multiplier::kOneDnn,
                                           Multiplier::kBrgemm));
std::vector<at::Tensor> draw(const std::vector<std::vector<std::int64_t>>& shapes, at::ScalarType type,
                             std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<at::Tensor> drawn;
  for (const auto& shape : shapes) drawn.push_back(at::randn(shape, generator, at::kDouble).to(type));
  return drawn;
}

// The exact result of the stored values, in fp64 and without a matrix product; or the sum of magnitudes.
at::Tensor summed(const std::vector<at::Tensor>& x, bool adds, bool has_bias, bool of_magnitudes) {
  const auto wide = [&](const at::Tensor& t) {
    return of_magnitudes ? t.to(at::kDouble).abs() : t.to(at::kDouble);
  };
  at::Tensor result = (wide(x[0]).unsqueeze(1) * wide(x[1]).unsqueeze(0)).sum(2);
  if (adds) result = result + wide(x[2]);
  return has_bias ? result + wide(x[3]) : result;
}

double unit(at::ScalarType type) {  // half the distance from 1 to the next number
  return std::ldexp(1.0, type == at::kDouble ? -53 : type == at::kFloat ? -24 : -8);
}

// An accumulator of `wide` makes an error of at most u(wide) at each of the k products and their sums, addend
// and bias, relative to the sum of magnitudes. Then the result is rounded: twice if the plain twin adds to a
// stored product.
double worst_error(const at::Tensor& found, const std::vector<at::Tensor>& x, bool adds, bool has_bias) {
  const at::ScalarType type = x[0].scalar_type(), wide = type == at::kDouble ? type : at::kFloat;
  const at::Tensor magnitudes = summed(x, adds, has_bias, true);
  const double allowed = 2 * (static_cast<double>(x[0].size(1)) + 3) * unit(wide) + 2 * unit(type);
  if (magnitudes.numel() == 0) return 0;
  return ((found.to(at::kDouble) - summed(x, adds, has_bias, false)).abs() / (magnitudes * allowed))
      .max()
      .item<double>();
}

TEST_P(Product, EveryFormIsExactToRounding) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t m : {0, 1, 7, 8, 65})
      for (const bool turned : {false, true}) {
        const auto x = draw({{m, 33}, {50, 33}, {m, 50}, {50}}, type, 7);
        const at::Tensor a = turned ? x[0].t().contiguous().t() : x[0];
        const at::Tensor b = turned ? x[1].t().contiguous().t() : x[1];
        for (const bool adds : {false, true})
          for (const bool has_bias : {false, true}) {
            const at::Tensor addend = adds ? x[2] : at::Tensor(), bias = has_bias ? x[3] : at::Tensor();
            for (const at::Tensor& found :
                 {product(a, b, addend, bias), naive_twin::product(a, b, addend, bias)}) {
              ASSERT_EQ(found.scalar_type(), type);
              EXPECT_LE(worst_error(found, x, adds, has_bias), 1)
                  << c10::toString(type) << ", rows " << m << ", turned " << turned << ", seed 7";
            }
          }
      }
}

// Writes a part of a larger tensor and leaves its other rows. The old values count only if they are added to.
TEST_P(Product, GoesIntoAPartOfATensor) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t m : {0, 1, 7, 8, 65})
      for (const bool turned : {false, true})
        for (const bool adds : {false, true}) {
          const auto x = draw({{m, 33}, {50, 33}, {m, 50}}, type, 13);
          const at::Tensor a = turned ? x[0].t().contiguous().t() : x[0];
          const at::Tensor b = turned ? x[1].t().contiguous().t() : x[1];
          at::Tensor around = at::full({m + 2, 50}, adds ? 3 : NAN, x[0].options());
          const at::Tensor into = around.narrow(0, 1, m);
          if (adds) into.copy_(x[2]);
          around[0].fill_(3), around[m + 1].fill_(3);
          multiply_into(into, a, b, adds);
          EXPECT_TRUE(around[0].eq(3).all().item<bool>() && around[m + 1].eq(3).all().item<bool>());
          EXPECT_LE(worst_error(into, {x[0], x[1], x[2]}, adds, false), 1)
              << c10::toString(type) << ", rows " << m << ", turned " << turned << ", adds " << adds
              << ", seed 13";
        }
}

// The memory between the elements of the bias holds NaN.
TEST_P(Product, ReadsABiasWhereverItsElementsLie) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t stride : {0, 2, 3}) {
      auto x = draw({{65, 33}, {50, 33}, {65, 50}, {50}}, type, 11);
      if (stride == 0) x[3] = x[3].narrow(0, 0, 1).expand({50}).contiguous();
      at::Tensor apart = at::full({50, std::max<std::int64_t>(stride, 1)}, NAN, x[3].options());
      apart.select(1, 0).copy_(x[3]);
      const at::Tensor bias = stride == 0 ? x[3].narrow(0, 0, 1).expand({50}) : apart.select(1, 0);
      for (const bool adds : {false, true})
        EXPECT_LE(worst_error(product(x[0], x[1], adds ? x[2] : at::Tensor(), bias), x, adds, true), 1)
            << c10::toString(type) << ", stride " << stride << ", seed 11";
    }
}

// Sizes around a block's in every dimension, with any operand transposed, into a part of a larger tensor. The
// rule takes one of the multipliers, which have one reference. The libraries' with one of the four ways to
// lie, by turns, as the blocks are Brgemm's; ISOGRAD_FULL_TESTS=1: with all.
TEST(EachMultiplier, MeetsTheEdgesOfBlocks) {
  struct Sizes {
    std::vector<std::int64_t> m, n, k;
  };
  const Multiplier before = multiplier();
  int turn = 0;
  // Blocks of the usual shape, wide ones with few rows of a, and wide ones with a small summed dimension.
  for (const Sizes& sizes :
       {Sizes{{1, 15, 127, 128, 131, 300}, {1, 16, 63, 64, 65, 130}, {1, 64, 511, 512, 513, 1100}},
        Sizes{{1, 17, 128, 129}, {255, 256, 769, 1000}, {1, 15, 33, 64, 130}},
        Sizes{{129, 700}, {255, 513, 1100}, {1, 64, 65, 128, 257}}})
    for (const std::int64_t m : sizes.m)
      for (const std::int64_t n : sizes.n)
        for (const std::int64_t k : sizes.k) {
          const auto x = draw({{m, k}, {n, k}, {m, n}}, at::kFloat, 17);
          const at::Tensor wide = x[0].to(at::kDouble).mm(x[1].to(at::kDouble).t());
          const at::Tensor magnitudes = x[0].to(at::kDouble).abs().mm(x[1].to(at::kDouble).abs().t());
          const at::Tensor columns[] = {x[0].t().contiguous().t(), x[1].t().contiguous().t()};
          for (const bool adds : {false, true}) {
            const at::Tensor expected = adds ? wide + x[2].to(at::kDouble) : wide,
                             reach = adds ? magnitudes + x[2].to(at::kDouble).abs() : magnitudes,
                             allowed = reach * (2 * (static_cast<double>(k) + 3) * unit(at::kFloat));
            ++turn;
            for (const Multiplier by : {Multiplier::kBlas, Multiplier::kOneDnn, Multiplier::kBrgemm})
              for (const bool a_turned : {false, true})
                for (const bool b_turned : {false, true}) {
                  if (!full_tests() && by != Multiplier::kBrgemm && turn % 4 != 2 * a_turned + b_turned)
                    continue;
                  multiplier() = by;
                  at::Tensor around = at::full({m, n + 3}, NAN, x[0].options());
                  const at::Tensor into = around.narrow(1, 1, n);
                  if (adds) into.copy_(x[2]);
                  multiply_into(into, a_turned ? columns[0] : x[0], b_turned ? columns[1] : x[1], adds);
                  EXPECT_TRUE(into.to(at::kDouble).sub_(expected).abs_().le(allowed).all().item<bool>())
                      << m << ", " << n << ", " << k << ", turned " << a_turned << b_turned << ", adds "
                      << adds << ", by " << name_of(by) << ", seed 17";
                  EXPECT_TRUE(around.select(1, 0).isnan().all().item<bool>());
                  EXPECT_TRUE(around.narrow(1, n + 1, 2).isnan().all().item<bool>());
                }
          }
        }
  multiplier() = before;
}

// Rows that share memory, separate rows, and a single row with any stride.
TEST_P(Product, ReadsAnyStrides) {
  const auto x = draw({{70, 200}, {40, 200}}, at::kFloat, 19);
  const auto check = [&](const at::Tensor& a, const at::Tensor& b) {
    EXPECT_LE(worst_error(product(a, b), {a, b}, false, false), 1)
        << a.strides() << " and " << b.strides() << ", seed 19";
  };
  check(x[0].narrow(0, 0, 1).expand({70, 200}), x[1]);
  check(x[0].narrow(1, 0, 1).expand({70, 200}), x[1]);
  check(x[0].narrow(1, 3, 150), x[1].narrow(1, 50, 150));
  check(x[0].slice(1, 0, 200, 2), x[1].slice(1, 0, 200, 2));
  check(x[0].as_strided({1, 200}, {7, 1}), x[1]);
  check(x[0], x[1].as_strided({1, 200}, {3, 1}));
  check(x[0].as_strided({70, 180}, {2, 1}), x[1].narrow(1, 0, 180));
  // Columns 4 KiB apart.
  const at::Tensor apart = draw({{200, 1024}}, at::kFloat, 20)[0];
  check(x[0], apart.narrow(1, 5, 70).t());
  check(apart.narrow(1, 5, 70).t(), apart.narrow(1, 300, 70).t());
  check(apart.narrow(0, 0, 60).t(), apart.narrow(0, 70, 60).t());  // enough columns for wide parts
  check(x[0], apart.t());
}

// The number of threads does not matter.
TEST(Brgemm, SameBitsByAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  const Multiplier chosen = std::exchange(multiplier(), Multiplier::kBrgemm);
  // Blocks of the usual shape, few rows, and a small summed dimension.
  for (const auto& [m, n, k] : {std::tuple{300, 130, 600}, {100, 800, 600}, {300, 800, 64}}) {
    const auto x = draw({{m, k}, {n, k}}, at::kFloat, 23);
    for (const bool a_turned : {false, true})
      for (const bool b_turned : {false, true}) {
        const at::Tensor a = a_turned ? x[0].t().contiguous().t() : x[0],
                         b = b_turned ? x[1].t().contiguous().t() : x[1];
        at::set_num_threads(1);
        const at::Tensor expected = product(a, b);
        for (const int threads : {2, 3, 8}) {
          at::set_num_threads(threads);
          EXPECT_TRUE(product(a, b).equal(expected)) << m << ", " << n << ", " << k << ", " << threads
                                                     << " threads, turned " << a_turned << b_turned;
        }
      }
  }
  at::set_num_threads(before), multiplier() = chosen;
}

TEST_P(Product, TheComparisonSeesALostProduct) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    auto x = draw({{65, 33}, {50, 33}}, type, 7);
    const at::Tensor whole = product(x[0], x[1]);
    x[0] = x[0].clone();
    x[0].select(1, 32).zero_();
    EXPECT_GT(worst_error(whole, x, false, false), 1) << c10::toString(type);
  }
}

TEST_P(Product, LeavesItsOperandsAlone) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto x = draw({{9, 33}, {50, 33}, {9, 50}, {50}}, type, 9),
               before = draw({{9, 33}, {50, 33}, {9, 50}, {50}}, type, 9);
    product(x[0], x[1], x[2], x[3]);
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(x[i].equal(before[i])) << i;
  }
}

// x at another address with the same offset from 64 bytes as LibTorch's own tensors, because MKL's rounding
// depends on it.
at::Tensor moved(const at::Tensor& x, std::int64_t lines) {
  const std::int64_t begin = lines * 64 / x.element_size();
  const at::Tensor there = at::empty({begin + x.numel()}, x.options()).narrow(0, begin, x.numel());
  return there.view(x.sizes()).copy_(x);
}

// A row of weight 0 may be anything.
TEST_P(Product, KeepsANaNInItsRow) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t summed : {1, 5, 24, 33, 36, 70, 1032})
      for (const std::int64_t rows : {3, 9, 70, 103}) {
        const std::vector<at::Tensor> x = draw({{rows, summed}, {41, summed}, {rows, 41}}, type, 21);
        x[0].select(0, 2).fill_(std::nan(""));
        for (const bool turned : {false, true}) {
          const at::Tensor a = turned ? x[0].t().contiguous().t() : x[0];
          at::Tensor into = x[2].clone();
          multiply_into(into, a, x[1], /*adds=*/true);
          for (const at::Tensor& made : {product(a, x[1]), product(a, x[1], x[2]), into}) {
            const at::Tensor nan = made.isnan().to(at::kLong).sum(1);
            EXPECT_EQ(nan[2].item<std::int64_t>(), 41);
            EXPECT_EQ(nan.sum().item<std::int64_t>(), 41) << type << " " << rows << " rows of " << summed;
          }
        }
      }
}

TEST_P(Product, SameBitsRunToRunWithAsManyThreads) {
  const int before = at::get_num_threads();
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const auto& [m, n, k] : {std::tuple{65, 50, 130}, {20, 24, 16}, {64, 48, 2100}})
      for (const int threads : {1, 3}) {
        at::set_num_threads(threads);
        const auto x = draw({{m, k}, {n, k}}, type, 8);
        const at::Tensor first = product(x[0], x[1]);
        for (int i = 0; i < 7; ++i)
          EXPECT_TRUE(product(moved(x[0], i % 7), moved(x[1], i % 5)).equal(first))
              << c10::toString(type) << ", " << m << ", " << n << ", " << k << ", " << threads << " threads";
      }
  at::set_num_threads(before);
}

// So a token sampled alone and one in a large batch have the same logits.
TEST(Multipliers, ByBrgemmARowsBitsDoNotDependOnTheOtherRows) {
  if (!has_brgemm())
    GTEST_SKIP() << "missing: brgemm, which oneDNN does not have at this level of the processor";
  const Multiplier before = std::exchange(multiplier(), Multiplier::kBrgemm);
  const RowInvariantProducts scope;
  for (const auto& [n, k] : {std::pair{512, 700}, {96, 1300}, {700, 64}, {64, 32}, {1024, 1}, {8, 32}})
    for (const bool adds : {false, true}) {
      const auto x = draw({{300, k}, {n, k}, {300, n}}, at::kFloat, 17);
      const auto rows = [&](std::int64_t begin, std::int64_t count) {
        return product(x[0].narrow(0, begin, count), x[1],
                       adds ? x[2].narrow(0, begin, count) : at::Tensor());
      };
      const at::Tensor all = rows(0, 300);
      for (const std::int64_t count : {1, 2, 7, 16, 31, 64, 128, 129, 200})
        for (const std::int64_t begin : {0, 1, 90})
          EXPECT_TRUE(rows(begin, count).equal(all.narrow(0, begin, count)))
              << n << " " << k << " adds " << adds << ", rows " << begin << " + " << count << ", seed 17";
    }
  multiplier() = before;
}

// Records LibTorch's products by name; brgemm has none.
class NamedProducts {
 public:
  NamedProducts() {
    names.clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& called)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::string_view name = called.name();
          if (name == "aten::mm" || name == "aten::addmm" || name == "aten::addmm_") names.insert("blas");
          if (name == "mkldnn::_linear_pointwise") names.insert("onednn");
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~NamedProducts() { at::removeCallback(handle_); }
  NamedProducts(const NamedProducts&) = delete;
  NamedProducts& operator=(const NamedProducts&) = delete;
  static inline std::set<std::string> names;

 private:
  at::CallbackHandle handle_;
};

// The chosen multiplier multiplies, and no other. Bits do not show it, because libraries may round alike.
TEST(Multipliers, AreThoseThatAreChosen) {
  const Multiplier before = multiplier();
  const auto x = draw({{96, 1030}, {80, 1030}}, at::kFloat, 5);
  const auto by = [&](Multiplier chosen, bool sums_over_tokens) {
    multiplier() = chosen;
    const auto turned = [&](const at::Tensor& of) { return sums_over_tokens ? of.t().contiguous().t() : of; };
    at::Tensor into = at::empty({96, 80});
    multiply_into(into, turned(x[0]), turned(x[1]));
    const NamedProducts made;
    const at::Tensor found = product(turned(x[0]), turned(x[1]));
    const std::string asked(name_of(chosen != Multiplier::kByRule ? chosen : multiplier_of(turned(x[0]))));
    EXPECT_EQ(made.names, asked == "brgemm" ? std::set<std::string>{} : std::set{asked});
    EXPECT_TRUE(chosen == Multiplier::kByRule || into.equal(found));  // in place is rounded in the same way
    return found;
  };
  for (const bool sums : {false, true}) {
    const at::Tensor blas = by(Multiplier::kBlas, sums), one_dnn = by(Multiplier::kOneDnn, sums),
                     brgemm = by(Multiplier::kBrgemm, sums), rule = by(Multiplier::kByRule, sums);
    EXPECT_TRUE(rule.equal(has_brgemm() ? brgemm : sums ? blas : one_dnn));
    multiplier() = Multiplier::kByRule;
    EXPECT_EQ(multiplier_of(sums ? x[0].t().contiguous().t() : x[0]), has_brgemm() ? Multiplier::kBrgemm
                                                                      : sums       ? Multiplier::kBlas
                                                                                   : Multiplier::kOneDnn);
  }
  multiplier() = before;
}

TEST(Multipliers, AVariableNamesThemOrIsRefused) {
  const char* const variable = "ISOGRAD_PRODUCTS";
  const std::string before = std::getenv(variable) ? std::getenv(variable) : "";
  const auto named = [&](const char* text) {
    setenv(variable, text, 1);
    return multiplier_of_variable();
  };
  EXPECT_EQ(named(""), Multiplier::kByRule);
  EXPECT_EQ(named("rule"), Multiplier::kByRule);
  EXPECT_EQ(named("blas"), Multiplier::kBlas);
  EXPECT_EQ(named("onednn"), Multiplier::kOneDnn);
  EXPECT_EQ(named("brgemm"), Multiplier::kBrgemm);
  EXPECT_THAT(error_testing::error_of([&] { named("mkl"); }),
              ::testing::HasSubstr("rule, blas, onednn or brgemm"));
  setenv(variable, before.c_str(), 1);
}

}  // namespace
}  // namespace isograd
