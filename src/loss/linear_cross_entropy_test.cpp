#include <c10/core/Allocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "full_tests.hpp"
#include "isograd/loss.hpp"
#include "kernels/matmul/product.hpp"
#include "loss/loss_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

// Stands in for LibTorch's CPU allocator and remembers the most bytes that were alive at once.
// From construction to destruction; memory may be freed later. One at a time.
class CountingAllocator : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) {
    Account& a = account();
    a.alive = a.peak = 0;
    c10::SetAllocator(c10::kCPU, this, kPriority);
  }
  ~CountingAllocator() override { c10::SetAllocator(c10::kCPU, inner_, kPriority); }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  static std::int64_t peak() { return account().peak; }

  // The pointer is its own context: oneDNN's scratch memory asks for that.
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free, c10::Device(c10::kCPU)};
    constexpr std::size_t kAlignment = 64;
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    Account& a = account();
    const std::lock_guard lock(a.mutex);
    a.sizes[memory] = static_cast<std::int64_t>(bytes);
    a.alive += static_cast<std::int64_t>(bytes);
    a.peak = std::max(a.peak, a.alive);
    return {memory, memory, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static constexpr std::uint8_t kPriority = 255;
  struct Account {
    std::mutex mutex;
    std::unordered_map<void*, std::int64_t> sizes;
    std::int64_t alive = 0, peak = 0;
  };
  static Account& account() {
    static Account one;
    return one;
  }
  static void free(void* memory) {
    if (!memory) return;
    Account& a = account();
    {
      const std::lock_guard lock(a.mutex);
      const auto found = a.sizes.find(memory);
      a.alive -= found->second;
      a.sizes.erase(found);
    }
    std::free(memory);
  }

  c10::Allocator* inner_;
};

struct Problem {
  at::Tensor hidden, weight, bias, targets, weights;
};

Problem problem(std::int64_t tokens, std::int64_t width, std::int64_t vocabulary, at::ScalarType type) {
  return {.hidden = leaf(at::randn({tokens, width}, at::kDouble).to(type)),
          .weight = leaf((at::randn({vocabulary, width}, at::kDouble) * 0.7).to(type)),
          .bias = leaf(at::randn({vocabulary}, at::kDouble).to(type)),
          .targets = some_targets(tokens, vocabulary),
          .weights = some_weights(tokens)};
}

struct Gradients {
  at::Tensor sum, hidden, weight, bias;
};

// The unfused twin in fp64, from the same (possibly rounded) numbers.
Gradients unfused(const Problem& p, const LinearCrossEntropyOptions& options, double upstream) {
  const at::Tensor hidden = leaf(p.hidden.to(at::kDouble)), weight = leaf(p.weight.to(at::kDouble)),
                   bias = leaf(p.bias.to(at::kDouble));
  const at::Tensor logits = at::linear(hidden, weight, options.bias.defined() ? bias : at::zeros_like(bias));
  const at::Tensor log_p = at::log_softmax(logits, 1), lse = at::logsumexp(logits, 1);
  const at::Tensor picked = log_p.gather(1, p.targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  const at::Tensor each = -(1 - options.label_smoothing) * picked - options.label_smoothing * log_p.mean(1) +
                          options.z_loss * lse.square();
  const at::Tensor weights =
      options.weights.defined() ? options.weights.to(at::kDouble) : at::ones_like(each);
  const at::Tensor sum = at::where(p.targets.ne(kIgnoreIndex), each * weights, 0.0).sum();
  (sum * upstream).backward();
  // Without a bias the twin adds zeros that hang on nothing.
  return {sum, hidden.grad(), weight.grad(), options.bias.defined() ? bias.grad() : at::Tensor()};
}

using Fused = std::function<at::Tensor(const Problem&, const LinearCrossEntropyOptions&)>;
at::Tensor ours(const Problem& p, const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy_sum(p.hidden, p.weight, p.targets, options);
}

Gradients run(const Fused& fused, const Problem& p, const LinearCrossEntropyOptions& options,
              double upstream) {
  for (const at::Tensor& t : {p.hidden, p.weight, p.bias}) t.mutable_grad() = at::Tensor();
  const at::Tensor sum = fused(p, options);
  (sum * upstream).backward();
  return {sum, p.hidden.grad(), p.weight.grad(), p.bias.grad()};
}

double worst(const Gradients& a, const Gradients& b) {
  double result =
      std::abs(a.sum.item<double>() - b.sum.item<double>()) / (1 + std::abs(b.sum.item<double>()));
  const at::Tensor of_a[] = {a.hidden, a.weight, a.bias}, of_b[] = {b.hidden, b.weight, b.bias};
  for (int i = 0; i < 3; ++i)
    if (of_b[i].defined()) {
      // A gradient that is nothing but rounding is held against 1.
      const double norm = of_b[i].norm().item<double>();
      const double off = (of_a[i].to(at::kDouble) - of_b[i]).norm().item<double>();
      result = std::max(result, off / std::max(norm, 1e-3));
    }
  return std::isnan(result) ? INFINITY : result;
}

struct Precision {
  at::ScalarType type;
  double bound;
};
// fp32: logits are sums of up to 24 products of size up to 9, off by 24 · 9 · 2^-24 = 1.3e-5 at the very most
// and a tenth of that usually; probabilities are off by as much, relatively. bf16: logits of size up to 16
// are rounded by 2^-9 · 16 = 0.03, half of that usually; so are probabilities and gradients.
const Precision kPrecisions[] = {{at::kDouble, 1e-12}, {at::kFloat, 1.3e-5}, {at::kBFloat16, 0.03}};

std::vector<LinearCrossEntropyOptions> all_options(const Problem& p) {
  return {{},
          {.weights = p.weights},
          {.z_loss = 1e-2},
          {.label_smoothing = 0.1, .bias = p.bias},
          {.weights = p.weights, .label_smoothing = 0.1, .z_loss = 0.02, .bias = p.bias}};
}

// Half of the options by turns; ISOGRAD_FULL_TESTS=1: all.
TEST(LinearCrossEntropy, EqualsTheUnfusedTwinHoweverItIsTiled) {
  at::manual_seed(21);
  std::size_t turn = 0;
  for (const Precision& c : kPrecisions)
    for (auto [tokens, width, vocabulary] :
         {std::array<std::int64_t, 3>{37, 24, 101}, {1, 3, 2}, {64, 16, 1}})
      for (auto [tile_tokens, tile_vocabulary] :
           {std::pair<std::int64_t, std::int64_t>{0, 0}, {8, 0}, {7, 101}, {10, 33}, {1, 1}, {1000, 50}}) {
        const Problem p = problem(tokens, width, vocabulary, c.type);
        for (LinearCrossEntropyOptions options : all_options(p)) {
          if (!takes_first(turn++) && !full_tests()) continue;
          options.tile_tokens = tile_tokens, options.tile_vocabulary = tile_vocabulary;
          const Gradients found = run(ours, p, options, 0.3), wanted = unfused(p, options, 0.3);
          EXPECT_LT(worst(found, wanted), c.bound)
              << c10::toString(c.type) << " " << tokens << " x " << vocabulary << " in " << tile_tokens
              << " x " << tile_vocabulary;
          EXPECT_EQ(found.hidden.scalar_type(), c.type);
          EXPECT_EQ(found.weight.scalar_type(), c.type);
          EXPECT_EQ(found.sum.scalar_type(), c.type == at::kDouble ? at::kDouble : at::kFloat);
          if (tokens > 1) {
            EXPECT_EQ(found.hidden[1].to(at::kDouble).abs().sum().item<double>(), 0) << "ignored";
          }
          EXPECT_EQ(
              run(ours, p, options, 0.3).weight.to(at::kDouble).sub(found.weight).abs().max().item<double>(),
              0)
              << "the same bits again";
        }
      }
}

// Tiles of 512 KiB and more, which products fill in slices.
TEST(LinearCrossEntropy, EqualsTheUnfusedTwinInSlicesOfATile) {
  at::manual_seed(31);
  std::size_t turn = 0;
  for (const Precision& c : kPrecisions)
    for (const std::int64_t tile_vocabulary : {0, 2777}) {
      const Problem p = problem(190, 24, 3001, c.type);
      for (LinearCrossEntropyOptions options : all_options(p)) {
        if (!takes_first(turn++) && !full_tests()) continue;
        options.tile_tokens = 110, options.tile_vocabulary = tile_vocabulary;
        const Gradients wanted = unfused(p, options, 0.3);
        EXPECT_LT(worst(run(ours, p, options, 0.3), wanted), c.bound) << c10::toString(c.type);
        const Fused loses_a_slice = [](const Problem& of, const LinearCrossEntropyOptions& given) {
          at::Tensor weight = of.weight.clone();  // planted: columns whose logits nobody wrote
          weight.narrow(0, 2400, 200).zero_();
          return linear_cross_entropy_sum(of.hidden, weight, of.targets, given);
        };
        EXPECT_GT(worst(run(loses_a_slice, p, options, 0.3), wanted), 2 * c.bound);
      }
    }
}

TEST(LinearCrossEntropy, GivesTheTermsAndLogProbabilitiesByTheWay) {
  at::manual_seed(22);
  const Problem p = problem(20, 8, 50, at::kDouble);
  const LinearCrossEntropy found =
      linear_cross_entropy(p.hidden, p.weight, p.targets,
                           {.weights = p.weights, .label_smoothing = 0.1, .z_loss = 0.25, .tile_tokens = 6});
  const at::Tensor logits = at::linear(p.hidden, p.weight).detach();
  const auto near = [](const at::Tensor& a, const at::Tensor& b) { EXPECT_LT(relative(a, b), 1e-13); };
  near(found.cross_entropy,
       cross_entropy_sum(logits, p.targets, {.weights = p.weights, .label_smoothing = 0.1}));
  near(found.z_loss, z_loss_sum(logits, p.targets, p.weights));
  near(found.sum, found.cross_entropy + 0.25 * found.z_loss);
  near(found.log_probabilities, token_log_probabilities(logits, p.targets) * p.weights.gt(0));
  EXPECT_TRUE(found.sum.requires_grad());
  EXPECT_FALSE(found.cross_entropy.requires_grad() || found.z_loss.requires_grad() ||
               found.log_probabilities.requires_grad());
}

// A frozen head, a frozen body, no gradient at all, one graph used twice.
TEST(LinearCrossEntropy, MakesTheGradientsThatAreWanted) {
  at::manual_seed(23);
  const Problem p = problem(20, 8, 50, at::kDouble);
  const Gradients wanted = unfused(p, {}, 1);
  at::Tensor sum = linear_cross_entropy_sum(p.hidden, p.weight.detach(), p.targets);
  EXPECT_LT(relative(gradient_of(sum, p.hidden), wanted.hidden), 1e-12);
  sum = linear_cross_entropy_sum(p.hidden.detach(), p.weight, p.targets);
  EXPECT_LT(relative(gradient_of(sum, p.weight), wanted.weight), 1e-12);
  {
    const at::NoGradGuard none;
    sum = linear_cross_entropy_sum(p.hidden, p.weight, p.targets, {.tile_vocabulary = 7});
    EXPECT_FALSE(sum.requires_grad());
    EXPECT_LT(relative(sum, wanted.sum), 1e-13);
  }
  EXPECT_FALSE(linear_cross_entropy_sum(p.hidden.detach(), p.weight.detach(), p.targets).requires_grad());
  sum = linear_cross_entropy_sum(p.hidden, p.weight, p.targets) * 3;
  sum.backward({}, /*keep_graph=*/true);
  sum.backward();
  EXPECT_LT(relative(p.weight.grad(), 6 * wanted.weight), 1e-12);
  EXPECT_LT(relative(p.hidden.grad(), 6 * wanted.hidden), 1e-12);
}

// The weight is also the embedding; two micro-batches accumulate.
TEST(LinearCrossEntropy, AddsUpWithATiedEmbeddingAndWithOtherMicroBatches) {
  at::manual_seed(24);
  const at::Tensor embedding = leaf(at::randn({50, 8}, at::kDouble)), twin = leaf(embedding);
  for (const std::int64_t tokens : {20, 13}) {
    const at::Tensor ids = at::randint(50, {tokens}, at::kLong), targets = some_targets(tokens, 50);
    (linear_cross_entropy_sum(at::embedding(embedding, ids).tanh(), embedding, targets, {.tile_tokens = 6}) *
     0.1)
        .backward();
    const at::Tensor logits = at::linear(at::embedding(twin, ids).tanh(), twin);
    (at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum, kIgnoreIndex) * 0.1).backward();
  }
  EXPECT_LT(relative(embedding.grad(), twin.grad()), 1e-12);
}

TEST(LinearCrossEntropy, HasTheGradientOfFiniteDifferences) {
  at::manual_seed(25);
  const Problem p = problem(6, 4, 9, at::kDouble);
  LinearCrossEntropyOptions options = all_options(p).back();
  options.tile_tokens = 2, options.tile_vocabulary = 4;
  const auto of_hidden = [&](const at::Tensor& x) {
    return linear_cross_entropy_sum(x, p.weight, p.targets, options);
  };
  const auto of_weight = [&](const at::Tensor& x) {
    return linear_cross_entropy_sum(p.hidden, x, p.targets, options);
  };
  EXPECT_LT(off_from_differences(of_hidden, p.hidden, gradient_of(of_hidden(p.hidden), p.hidden)), 1e-7);
  EXPECT_LT(off_from_differences(of_weight, p.weight, gradient_of(of_weight(p.weight), p.weight)), 1e-7);
}

TEST(LinearCrossEntropy, LeavesOutWhatIsInvalidEvenWhereItIsNaN) {
  for (const Precision& c : kPrecisions) {
    at::manual_seed(26);
    Problem p = problem(10, 8, 50, c.type);
    const Gradients wanted = unfused(p, {.weights = p.weights}, 1);
    {
      const at::NoGradGuard none;
      p.hidden[1].fill_(std::nan(""));  // ignored
      p.hidden[2].fill_(INFINITY);      // weight 0
    }
    const LinearCrossEntropyOptions options{.weights = p.weights, .tile_tokens = 3};
    EXPECT_LT(worst(run(ours, p, options, 1), wanted), c.bound);
    EXPECT_TRUE(std::isnan(ours(p, {}).item<double>())) << "one that counts shows";
    // Nothing valid, no tokens.
    p.targets = at::full({10}, kIgnoreIndex, at::kLong);
    Gradients nothing = run(ours, p, options, 1);
    for (const at::Tensor& t : {nothing.sum, nothing.hidden, nothing.weight})
      EXPECT_EQ(t.to(at::kDouble).abs().sum().item<double>(), 0);
    const Problem empty = problem(0, 8, 50, c.type);
    nothing = run(ours, empty, {.bias = empty.bias}, 1);
    EXPECT_EQ(nothing.hidden.sizes(), at::IntArrayRef({0, 8}));
    for (const at::Tensor& t : {nothing.sum, nothing.weight, nothing.bias})
      EXPECT_EQ(t.to(at::kDouble).abs().sum().item<double>(), 0);
  }
}

// bf16: 600 tiles each add as much to the same elements. Their sum in bf16 stops growing at 256 additions.
TEST(LinearCrossEntropy, AccumulatesTheWeightsGradientInFp32) {
  const std::int64_t tokens = 600;
  Problem p{.hidden = leaf(at::ones({tokens, 2}, at::kBFloat16)),
            .weight = leaf(at::zeros({4, 2}, at::kBFloat16)),
            .bias = leaf(at::zeros({4}, at::kBFloat16)),
            .targets = at::zeros({tokens}, at::kLong),
            .weights = {}};
  const Gradients wanted = unfused(p, {}, 1);
  EXPECT_LT(worst(run(ours, p, {.tile_tokens = 1}, 1), wanted), 0x1p-8);
  const Fused in_bfloat16 = [](const Problem& of, const LinearCrossEntropyOptions&) {
    const std::int64_t last = of.targets.size(0) - 1;
    const auto part = [&](std::int64_t t) {
      return linear_cross_entropy_sum(of.hidden.narrow(0, t, 1), of.weight, of.targets.narrow(0, t, 1));
    };
    at::Tensor sum = part(last);
    for (std::int64_t t = 0; t < last; ++t) {  // planted: .grad, in bf16, is the accumulator
      const at::Tensor one = part(t);
      one.backward();
      sum = sum + one.detach();
    }
    return sum;
  };
  EXPECT_GT(worst(run(in_bfloat16, p, {}, 1), wanted), 0.2);
}

// The most that is alive at once, in logits: one tile and change, where two operations need all and more.
TEST(LinearCrossEntropy, NeverHoldsTheLogits) {
  at::manual_seed(28);
  const Problem p = problem(2048, 8, 2048, at::kFloat);
  const auto in_logits = [&](const std::function<at::Tensor()>& loss) {
    for (const at::Tensor& t : {p.hidden, p.weight}) t.mutable_grad() = at::Tensor();
    const CountingAllocator counting;
    loss().backward();
    return static_cast<double>(CountingAllocator::peak()) / (2048 * 2048 * sizeof(float));
  };
  const auto fused = [&](std::int64_t tile_tokens, std::int64_t tile_vocabulary) {
    return in_logits([&] {
      return linear_cross_entropy_sum(p.hidden, p.weight, p.targets,
                                      {.tile_tokens = tile_tokens, .tile_vocabulary = tile_vocabulary});
    });
  };
  EXPECT_LT(fused(64, 0), 1.0 / 32 + 0.05);
  EXPECT_LT(fused(512, 64), 1.0 / 128 + 0.05);
  // A tile of all tokens that count is seen whole.
  EXPECT_GE(fused(2048, 0), p.targets.ne(kIgnoreIndex).sum().item<double>() / 2048);
  EXPECT_GT(in_logits([&] {
              return at::cross_entropy_loss(at::linear(p.hidden, p.weight), p.targets, {}, at::Reduction::Sum,
                                            kIgnoreIndex);
            }),
            2);
}

// By default: the gradient, the tile of half of it, and what rows take. oneDNN alone, forced, makes the
// product of each tile apart, from a copy of the tile that it has transposed.
TEST(LinearCrossEntropy, TakesNoLargerATileThanTheWeightsGradient) {
  const std::int64_t vocabulary = 1 << 15;
  for (const std::int64_t hidden : {64, 128, 192}) {  // 8, 16 and 24 MiB, of 128 of logits
    at::manual_seed(29);
    const Problem p = problem(1024, hidden, vocabulary, at::kFloat);
    const double gradient = static_cast<double>(p.weight.nbytes());
    const CountingAllocator counting;
    linear_cross_entropy_sum(p.hidden, p.weight, p.targets).backward();
    const auto peak = static_cast<double>(CountingAllocator::peak());
    EXPECT_GT(peak, 1.4 * gradient) << hidden;
    const double apart = multiplier() == Multiplier::kOneDnn ? 1 + 0.5 : 0;
    EXPECT_LT(peak, (1.75 + apart) * gradient) << hidden;
  }
}

// The comparison above must refuse these.
TEST(LinearCrossEntropy, PlantedMistakesAreFound) {
  at::manual_seed(27);
  const Problem p = problem(37, 24, 101, at::kDouble);
  const Gradients wanted = unfused(p, {}, 0.3);
  const Fused drops_a_tile = [](const Problem& of, const LinearCrossEntropyOptions&) {
    const at::Tensor kept = of.targets.lt(100);  // the last vocabulary tile, of one column
    return linear_cross_entropy_sum(of.hidden, of.weight.narrow(0, 0, 100),
                                    at::where(kept, of.targets, kIgnoreIndex));
  };
  const Fused forgets_the_upstream = [](const Problem& of, const LinearCrossEntropyOptions& options) {
    const at::Tensor sum = ours(of, options);
    return sum.detach() + (sum - sum.detach()) / 0.3;
  };
  const Fused drops_the_last_token_tile = [](const Problem& of, const LinearCrossEntropyOptions& options) {
    return linear_cross_entropy_sum(of.hidden.narrow(0, 0, 32), of.weight, of.targets.narrow(0, 0, 32),
                                    options);
  };
  EXPECT_LT(worst(run(ours, p, {}, 0.3), wanted), 1e-12);
  for (const Fused& mistake : {drops_a_tile, forgets_the_upstream, drops_the_last_token_tile})
    EXPECT_GT(worst(run(mistake, p, {}, 0.3), wanted), 1e-3);
}

TEST(LinearCrossEntropy, RefusesBadArguments) {
  const Problem p = problem(4, 3, 5, at::kFloat);
  const auto message = [&](const LinearCrossEntropyOptions& options) {
    return error_of([&] { linear_cross_entropy_sum(p.hidden, p.weight, p.targets, options); });
  };
  EXPECT_EQ(message({}), "no error");
  EXPECT_THAT(message({.weights = at::tensor({1.0, -2.0, 1.0, 1.0})}), HasSubstr("weights[1] = -2"));
  EXPECT_THAT(message({.label_smoothing = -0.1}), HasSubstr("label_smoothing = -0.1"));
  EXPECT_THAT(message({.z_loss = INFINITY}), HasSubstr("z_loss = inf"));
  EXPECT_THAT(message({.bias = at::zeros({4})}), HasSubstr("bias [4]"));
  EXPECT_THAT(message({.tile_tokens = -1}), HasSubstr("tile_tokens = -1"));
  EXPECT_THAT(error_of([&] { linear_cross_entropy_sum(p.hidden, p.weight.t(), p.targets); }),
              HasSubstr("[3, 5]"));
  EXPECT_THAT(error_of([&] { linear_cross_entropy_sum(p.hidden, p.weight.to(at::kBFloat16), p.targets); }),
              HasSubstr("one type"));
  EXPECT_THAT(error_of([&] {
                linear_cross_entropy_sum(p.hidden, p.weight, at::tensor({0, 1, 5, 0}, at::kLong));
              }),
              HasSubstr("targets[2] = 5"));
  EXPECT_THAT(error_of([&] { linear_cross_entropy_sum(p.hidden, p.weight, p.targets.narrow(0, 0, 3)); }),
              HasSubstr("targets [3]"));
  const at::Tensor sum = linear_cross_entropy_sum(p.hidden, p.weight, p.targets);
  EXPECT_THAT(error_of([&] { torch::autograd::grad({sum}, {p.hidden}, {}, true, true); }),
              HasSubstr("create_graph"));
}

}  // namespace
}  // namespace isograd
