// isograd bench: our speed against a peer's, in the same run. The verbs are rows of the table in
// bench/runner.cpp.
#include "bench/bench.hpp"

#include <fmt/format.h>

#include <cstdio>

#include "base/print.hpp"
#include "cli/verbs.hpp"

namespace isograd {
namespace {

Verb add_verb(CLI::App& bench, const BenchVerb& row) {
  CLI::App* verb = bench.add_subcommand(row.name, row.about)->footer(row.footer);
  auto options = std::make_shared<BenchOptions>(row.defaults);
  for (const BenchOption& option : row.options)
    std::visit(
        [&](auto member) {
          auto& value = (*options).*member;
          if constexpr (std::is_same_v<decltype(value), bool&>) {
            verb->add_flag(option.name, value, option.about);
          } else {
            auto* added =
                add_option(*verb, option.name, value, option.about, option.type, option.least, option.most);
            if (option.name == "--json") takes_json(added);
            if (option.name == "--strategy") names_strategy(added);
            if (!option.choices.empty()) is_one_of(added, option.choices, option.lists_choices);
          }
        },
        option.value);
  return {verb, [options, &row] { return run_bench(row, *options); }};
}

// Hidden: our side of a comparison, started by the above.
Verb add_side(CLI::App& bench, const std::string& name) {
  struct Ours {
    std::string exchange, strategy;
    int ranks = 1;
  };
  CLI::App* verb = bench.add_subcommand(name, "")->group("");
  auto mine = std::make_shared<Ours>();
  verb->add_option("EXCHANGE", mine->exchange)->required();
  verb->add_option("RANKS", mine->ranks)->required();
  verb->add_option("STRATEGY", mine->strategy)->required();
  return {verb, [mine, name] { return run_bench_side(name, mine->exchange, mine->ranks, mine->strategy); }};
}

}  // namespace

std::vector<Verb> bench_verbs(CLI::App& program, const Invocation& invocation) {
  CLI::App* bench = program.add_subcommand("bench", "Compare speeds with PyTorch on this machine");
  bench->require_subcommand(1);
  const auto level = std::make_shared<std::string>();
  is_one_of(bench
                ->add_option("--as", *level,
                             "let all sides use these instructions only; may also stand after the verb")
                ->type_name("LEVEL"),
            processor_levels());
  std::vector<Verb> verbs;
  for (const BenchVerb& row : bench_table()) {
    verbs.push_back(add_verb(*bench, row));
    verbs.back().app->fallthrough();
    verbs.back().run = [run = verbs.back().run, level, arguments = invocation.arguments] {
      if (!level->empty()) run_as(*level, arguments);
      return run();
    };
  }
  for (const std::string& side : bench_sides()) verbs.push_back(add_side(*bench, side));
  return verbs;
}

}  // namespace isograd
