// `isograd bench product`
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/cases/step_products.hpp"
#include "bench/rounds.hpp"

namespace isograd {
namespace {

constexpr const char* kTiny = "tiny";

std::vector<StepCase> cases_with_products() {
  std::vector<StepCase> cases = step_cases();
  for (const StepCase& together : cases_held_together())
    if (together.name == "expert-even") cases.push_back(together);
  return cases;
}

nlohmann::ordered_json compare_products(const StepCase& step_case, Waiting& waiting) {
  waiting.begin(step_case.name);
  std::vector<StepProduct> products = step_products(step_case);
  time_products(products);
  waiting.end();
  fmt::print("{}, {} tokens a step\n  {:<10} {:>5} {:>6} {:>6} {:>7}  {:>8} {:>8} {:>8}  {}\n",
             step_case.name, step_case.tokens(), "", "m", "n", "k", "times", "BLAS", "oneDNN", "brgemm",
             "by the rule");
  double rule = 0, fastest = 0, blas = 0, one_dnn = 0, brgemm = 0;
  for (const StepProduct& one : products) {
    const auto times = static_cast<double>(one.times);
    rule += times * one.by_rule(), fastest += times * one.fastest();
    blas += times * one.blas, one_dnn += times * one.one_dnn, brgemm += times * one.brgemm;
    const double loss = one.by_rule() / one.fastest() - 1;
    fmt::print("  {:<10} {:>5} {:>6} {:>6} {:>7}  {:>8.1f} {:>8.1f} {:>8.1f}  {}{}\n", one.name, one.m, one.n,
               one.k, one.times, one.flops() / one.blas / 1e9, one.flops() / one.one_dnn / 1e9,
               one.flops() / one.brgemm / 1e9, name_of(one.rule),
               loss > 0.05 ? fmt::format(", {:.0f} % slower", 100 * loss) : "");
  }
  fmt::print(
      "  all of a step: {:.1f} ms by the rule, {:.1f} ms by the fastest of each, {:.1f} ms by BLAS, "
      "{:.1f} ms by oneDNN, {:.1f} ms by brgemm\n",
      rule * 1e3, fastest * 1e3, blas * 1e3, one_dnn * 1e3, brgemm * 1e3);
  const std::pair<double, const char*> others[] = {{blas, "blas"}, {one_dnn, "onednn"}, {brgemm, "brgemm"}};
  if (const auto& [other, name] = *std::ranges::min_element(others); other < 0.97 * rule)
    fmt::print("  ISOGRAD_PRODUCTS={} is faster on this processor\n", name);
  std::fflush(stdout);
  return bench_record("product", step_case.name, rule * 1e3, fastest * 1e3, "the fastest of each", "ms",
                      fastest / rule);
}

}  // namespace

std::vector<std::string> bench_product_cases() {
  std::vector<std::string> names;
  for (const StepCase& step_case : cases_with_products()) names.push_back(step_case.name);
  return names;
}

int bench_product(const BenchProductOptions& options) {
  fmt::print(
      "matrix products of a step, fp32, one thread: GFLOP/s of each library, operands out of the cache. "
      "Those of\n"
      "attention (scores, scoresT, outputs, of keys) are its kernel's blocks, in the cache.\n");
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  std::vector<StepCase> cases;
  for (const StepCase& step_case : cases_with_products()) {
    const bool asked =
        std::find(options.cases.begin(), options.cases.end(), step_case.name) != options.cases.end();
    if (asked || (options.cases.empty() && step_case.name != kTiny)) cases.push_back(step_case);
  }
  Waiting waiting("case", std::ssize(cases));
  for (const StepCase& step_case : cases) records.push_back(compare_products(step_case, waiting));
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return 0;
}

}  // namespace isograd
