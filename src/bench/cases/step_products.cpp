#include "bench/cases/step_products.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <utility>

#include "bench/exchange.hpp"
#include "kernels/matmul/product.hpp"

namespace isograd {
namespace {

at::Tensor operand(std::int64_t rows, std::int64_t columns, bool turned) {
  return turned ? at::randn({columns, rows}).t() : at::randn({rows, columns});
}

// Equal ones count together.
void add(std::vector<StepProduct>& products, const StepProduct& another) {
  for (StepProduct& one : products)
    if (one.name == another.name && one.m == another.m && one.n == another.n && one.k == another.k) {
      one.times += another.times;
      return;
    }
  products.push_back(another);
}

// Of a layer [out, in] over so many tokens.
void add_linear(std::vector<StepProduct>& products, std::int64_t tokens, std::int64_t out, std::int64_t in,
                std::int64_t times) {
  add(products, {.name = "forward", .m = tokens, .n = out, .k = in, .times = times});
  add(products, {.name = "of inputs", .m = tokens, .n = in, .k = out, .b_turned = true, .times = times});
  add(products, {.name = "of weights",
                 .m = out,
                 .n = in,
                 .k = tokens,
                 .a_turned = true,
                 .b_turned = true,
                 .times = times});
}

// Those of attention/blocks.cpp: blocks of 64 queries and 512 keys, of which each sees the keys up to its
// end.
void add_attention(std::vector<StepProduct>& products, std::int64_t length, std::int64_t dim,
                   std::int64_t times) {
  constexpr std::int64_t kQueries = 64, kKeys = 512;
  const auto add_block = [&](const char* name, std::int64_t m, std::int64_t n, std::int64_t k,
                             std::int64_t in_each) {
    add(products, {.name = name,
                   .m = m,
                   .n = n,
                   .k = k,
                   .b_turned = true,
                   .times = in_each * times,
                   .in_attention = true});
  };
  for (std::int64_t begin = 0; begin < length; begin += kQueries) {
    const std::int64_t rows = std::min(kQueries, length - begin);
    for (std::int64_t key = 0; key < begin + rows; key += kKeys) {
      const std::int64_t keys = std::min(kKeys, begin + rows - key);
      add_block("scores", rows, keys, dim, 1);
      add_block("outputs", rows, dim, keys, 2);  // and the queries' gradient
      add_block("scoresT", keys, rows, dim, 2);  // again in backward, and the gradient of the probabilities
      add_block("of keys", keys, dim, rows, 2);  // and of values
    }
  }
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void time_product(StepProduct& product_of) {
  constexpr double kCache = 48e6;  // bytes; more than a core's share of any
  constexpr double kSeconds = 0.02;
  constexpr std::size_t kFewest = 5;
  const auto bytes = 4.0 * static_cast<double>((product_of.m + product_of.n) * product_of.k);
  // Attention's blocks are in the cache when they are multiplied.
  const int copies = product_of.in_attention ? 1 : std::clamp(static_cast<int>(kCache / bytes), 2, 24);
  std::vector<std::pair<at::Tensor, at::Tensor>> operands;
  for (int i = 0; i < copies; ++i)
    operands.emplace_back(operand(product_of.m, product_of.k, product_of.a_turned),
                          operand(product_of.n, product_of.k, product_of.b_turned));
  // A weight's gradient goes to memory, other results to what was in use a moment ago.
  std::vector<at::Tensor> places;
  for (int i = 0; i < (product_of.a_turned ? copies : 1); ++i)
    places.push_back(at::zeros({product_of.m, product_of.n}));
  constexpr Multiplier kAll[] = {Multiplier::kBlas, Multiplier::kOneDnn, Multiplier::kBrgemm};
  const auto sweep = [&](Multiplier by) {
    multiplier() = by;
    return seconds_of([&] {
             for (std::size_t i = 0; i < operands.size(); ++i) {
               const auto& [a, b] = operands[i];
               at::Tensor& into = places[i % places.size()];
               if (by == Multiplier::kOneDnn)
                 into = product(a, b);
               else
                 multiply_into(into, a, b);
             }
           }) /
           copies;
  };
  std::vector<double> times[std::size(kAll)];
  for (const Multiplier by : kAll) sweep(by);  // prepare themselves
  std::size_t turn = 0;
  for (double spent = 0; spent < std::size(kAll) * kSeconds || turn < kFewest; ++turn)
    for (std::size_t i = 0; i < std::size(kAll); ++i) {
      const std::size_t one = turn % 2 == 0 ? i : std::size(kAll) - 1 - i;
      times[one].push_back(sweep(kAll[one]));
      spent += copies * times[one].back();
    }
  product_of.blas = quantile(times[0], 0.5), product_of.one_dnn = quantile(times[1], 0.5);
  product_of.brgemm = quantile(times[2], 0.5);
  multiplier() = Multiplier::kByRule;
  product_of.rule = product_of.in_attention && !products_by_brgemm() ? Multiplier::kBlas
                                                                     : multiplier_of(operands.front().first);
}

}  // namespace

std::vector<StepProduct> step_products(const StepCase& step_case, int expert_ranks) {
  const DecoderConfig& c = step_case.shape;
  std::vector<StepProduct> products;
  const std::int64_t tokens = step_case.tokens(), batches = step_case.micro_batches;
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    add_linear(products, tokens, c.heads * c.head_dim, c.hidden, batches);
    add_linear(products, tokens, c.key_value_heads * c.head_dim, c.hidden, 2 * batches);
    add_linear(products, tokens, c.hidden, c.heads * c.head_dim, batches);
    add_attention(products, step_case.length, c.head_dim, step_case.sequences * c.heads * batches);
    if (!c.has_experts(layer)) {
      add_linear(products, tokens, c.feed_forward, c.hidden, 2 * batches);
      add_linear(products, tokens, c.hidden, c.feed_forward, batches);
      continue;
    }
    // A quarter of the experts may lie on one rank: of the mean rank, as all of them have.
    const std::int64_t busy = step_case.one_quarter ? c.experts.count / 4 : c.experts.count,
                       places = std::min<std::int64_t>(expert_ranks, busy), own = busy / places,
                       rows = tokens * c.experts.per_token / own;
    add_linear(products, tokens, c.experts.count, c.hidden, batches);
    add_linear(products, rows, c.experts.feed_forward, c.hidden, 2 * batches * own);
    add_linear(products, rows, c.hidden, c.experts.feed_forward, batches * own);
    if (const std::int64_t shared = c.experts.shared_feed_forward; shared > 0) {
      add_linear(products, tokens, shared, c.hidden, 2 * batches);
      add_linear(products, tokens, c.hidden, shared, batches);
    }
  }
  add_linear(products, tokens, c.vocabulary, c.hidden, batches);
  return products;
}

void time_products(std::vector<StepProduct>& products) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  const Multiplier before = multiplier();
  for (StepProduct& one : products) time_product(one);
  multiplier() = before;
}

double fastest_products(const StepCase& step_case, int expert_ranks) {
  std::vector<StepProduct> products = step_products(step_case, expert_ranks);
  time_products(products);
  double seconds = 0;
  for (const StepProduct& one : products) seconds += one.fastest() * static_cast<double>(one.times);
  return seconds;
}

}  // namespace isograd
