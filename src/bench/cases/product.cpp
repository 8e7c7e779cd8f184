// `isograd bench product`: the matrix products of a step, timed alone: what is left of it when nothing else
// takes time.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <array>

#include "bench/cases/step_case.hpp"
#include "bench/runner.hpp"
#include "kernels/matmul/product.hpp"

namespace isograd {
namespace {

constexpr Multiplier kLibraries[] = {Multiplier::kBlas, Multiplier::kOneDnn, Multiplier::kBrgemm};

// a bᵀ of a [m, k] and b [n, k], each in rows or (turned) in columns.
struct StepProduct {
  std::string name;
  std::int64_t m = 0, n = 0, k = 0;
  bool a_turned = false, b_turned = false;
  double times = 0;           // in a step
  bool in_attention = false;  // a block that its kernel has in the cache
  // Results: seconds of one by each of kLibraries, medians, and the library that isograd's rule takes.
  std::array<double, std::size(kLibraries)> seconds{};
  Multiplier rule = Multiplier::kBlas;

  double fastest() const { return std::ranges::min(seconds); }
  double by_rule() const {
    return seconds[rule == Multiplier::kBrgemm ? 2 : rule == Multiplier::kOneDnn ? 1 : 0];
  }
  double gflops(std::size_t library) const {
    return 2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / seconds[library];
  }
};
using StepProducts = std::vector<StepProduct>;

void add(StepProducts& products, const StepProduct& another) {
  for (StepProduct& one : products)
    if (one.name == another.name && one.m == another.m && one.n == another.n && one.k == another.k) {
      one.times += another.times;
      return;
    }
  products.push_back(another);
}

// A layer [out, in] over that many tokens, forward and backward.
void add_linear(StepProducts& products, std::int64_t tokens, std::int64_t out, std::int64_t in,
                std::int64_t count) {
  const auto times = static_cast<double>(count);
  add(products, {"forward", tokens, out, in, false, false, times});
  add(products, {"of inputs", tokens, in, out, false, true, times});
  add(products, {"of weights", out, in, tokens, true, true, times});
}

// The blocks of attention/blocks.cpp, causal: 64 queries and 512 keys; queries see the keys up to their end.
void add_attention(StepProducts& products, std::int64_t length, std::int64_t dim, std::int64_t count) {
  constexpr std::int64_t kQueries = 64, kKeys = 512;
  const auto times = static_cast<double>(count);
  for (std::int64_t begin = 0; begin < length; begin += kQueries) {
    const std::int64_t rows = std::min(kQueries, length - begin);
    for (std::int64_t key = 0; key < begin + rows; key += kKeys) {
      const std::int64_t keys = std::min(kKeys, begin + rows - key);
      add(products, {"scores", rows, keys, dim, false, true, times, true});
      add(products, {"outputs", rows, dim, keys, false, true, 2 * times, true});  // and the queries' gradient
      // Again in backward, and the gradient of the probabilities.
      add(products, {"scoresT", keys, rows, dim, false, true, 2 * times, true});
      add(products, {"of keys", keys, dim, rows, false, true, 2 * times, true});  // and of values
    }
  }
}

// The products of one rank in fp32: forward, gradients of inputs and of weights, and attention by our kernel.
// Each of `expert_ranks` has a part of the experts, whose tokens are even or, in a case for one quarter of
// them, that quarter's.
StepProducts step_products(const StepCase& step_case, int expert_ranks) {
  const DecoderConfig& c = step_case.shape;
  StepProducts products;
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
    // One rank may have all experts of a quarter: these are the mean rank's products, as all ranks have them.
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

void time_product(StepProduct& of) {
  constexpr double kCache = 48e6;  // bytes; more than a core's share of any
  constexpr double kSeconds = 0.06;
  constexpr std::size_t kFewest = 5;
  const auto operand = [](std::int64_t rows, std::int64_t columns, bool turned) {
    return turned ? at::randn({columns, rows}).t() : at::randn({rows, columns});
  };
  const auto bytes = 4.0 * static_cast<double>((of.m + of.n) * of.k);
  // Attention's blocks are in the cache when they are multiplied.
  const int copies = of.in_attention ? 1 : std::clamp(static_cast<int>(kCache / bytes), 2, 24);
  std::vector<std::pair<at::Tensor, at::Tensor>> operands;
  for (int i = 0; i < copies; ++i)
    operands.emplace_back(operand(of.m, of.k, of.a_turned), operand(of.n, of.k, of.b_turned));
  // A weight's gradient goes to memory, other results to what was in use a moment ago.
  std::vector<at::Tensor> places;
  for (int i = 0; i < (of.a_turned ? copies : 1); ++i) places.push_back(at::zeros({of.m, of.n}));
  double spent = 0;
  std::vector<std::function<double()>> sweeps;
  for (const Multiplier library : kLibraries)
    sweeps.push_back([&, library] {
      multiplier() = library;
      const double seconds = seconds_of([&] {
        for (std::size_t i = 0; i < operands.size(); ++i) {
          const auto& [a, b] = operands[i];
          at::Tensor& into = places[i % places.size()];
          if (library == Multiplier::kOneDnn)
            into = product(a, b);
          else
            multiply_into(into, a, b);
        }
      });
      spent += seconds;
      return seconds / copies;
    });
  race(sweeps, [](std::size_t round) { return round == 0; });  // prepare themselves
  spent = 0;
  const auto times = race(sweeps, [&](std::size_t round) { return spent < kSeconds || round < kFewest; });
  for (std::size_t i = 0; i < times.size(); ++i) of.seconds[i] = median(times[i]);
  multiplier() = Multiplier::kByRule;
  of.rule =
      of.in_attention && !products_by_brgemm() ? Multiplier::kBlas : multiplier_of(operands.front().first);
}

// Times each by all three, by turns, on this thread, with operands that are not in the cache.
StepProducts timed_products(const StepCase& step_case, int expert_ranks) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  StepProducts products = step_products(step_case, expert_ranks);
  const Multiplier before = multiplier();
  for (StepProduct& one : products) time_product(one);
  multiplier() = before;
  return products;
}

std::vector<StepCase> cases_with_products() {
  std::vector<StepCase> cases = step_cases("step");
  for (StepCase& one : cases) one.standard = one.name != "tiny";
  cases.push_back(find_step_case("expert", "even"));
  cases.back().name = "expert-even";
  return cases;
}

void compare_products(Bench& bench, const StepCase& step_case) {
  bench.begin(step_case.name);
  const StepProducts products = timed_products(step_case, 1);
  bench.end();
  TextRows rows{{fmt::format("{}, {} tokens a step", step_case.name, step_case.tokens()), "m", "n", "k",
                 "times", "BLAS", "oneDNN", "brgemm", "by the rule"}};
  double rule = 0, fastest = 0, by[std::size(kLibraries)] = {};
  for (const StepProduct& one : products) {
    rule += one.times * one.by_rule(), fastest += one.times * one.fastest();
    rows.push_back({one.name});
    for (const auto number : {one.m, one.n, one.k, static_cast<std::int64_t>(one.times)})
      rows.back().push_back(std::to_string(number));
    for (std::size_t i = 0; i < std::size(by); ++i) {
      by[i] += one.times * one.seconds[i];
      rows.back().push_back(fixed(one.gflops(i), 1));
    }
    const double loss = one.by_rule() / one.fastest() - 1;
    rows.back().push_back(fmt::format("{}{}", name_of(one.rule),
                                      loss > 0.05 ? fmt::format(", {:.0f} % slower", 100 * loss) : ""));
  }
  bench.say(rows);
  bench.say(fmt::format(
      "  all of a step: {:.1f} ms by the rule, {:.1f} ms by the fastest of each, {:.1f} ms by BLAS, {:.1f} "
      "ms by oneDNN, {:.1f} ms by brgemm\n",
      rule * 1e3, fastest * 1e3, by[0] * 1e3, by[1] * 1e3, by[2] * 1e3));
  const auto* best = std::ranges::min_element(by);
  if (*best < 0.97 * rule)
    bench.say(
        fmt::format("  ISOGRAD_PRODUCTS={} is faster on this processor\n", name_of(kLibraries[best - by])));
  bench.record_less(step_case.name, rule * 1e3, fastest * 1e3, "the fastest of each", "ms");
}

void bench_product(Bench& bench) {
  bench.say(
      "matrix products of a step, fp32, one thread: GFLOP/s of each library, operands out of the cache. Those of\n"
      "attention (scores, scoresT, outputs, of keys) are its kernel's blocks, in the cache.\n");
  const auto cases = chosen(cases_with_products(), bench.options.cases);
  bench.expect(std::ssize(cases), 0);
  for (const StepCase& step_case : cases) compare_products(bench, step_case);
}

}  // namespace

double fastest_products(const StepCase& step_case, int expert_ranks) {
  double seconds = 0;
  for (const StepProduct& one : timed_products(step_case, expert_ranks)) seconds += one.fastest() * one.times;
  return seconds;
}

BenchVerb product_verb() {
  return verb(
      "product", "Every matrix product of a step by BLAS, oneDNN and brgemm, with the one that isograd uses",
      "With ISOGRAD_PRODUCTS=blas, onednn or brgemm in the environment, all verbs use that library in fp32.\n"
      "Exit status: 0 measured; 2 bad input.",
      {}, {}, bench_product, {cases("model whose step is measured", names_of(cases_with_products()))},
      nullptr, nullptr);
}

}  // namespace isograd
