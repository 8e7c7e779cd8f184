// `isograd bench tensor`, `expert` and `pipeline`: one model that ranks hold together.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/cases/step_products.hpp"
#include "bench/cases/strategy.hpp"
#include "bench/exchange.hpp"
#include "bench/side_table.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

struct BenchCase {
  std::string name, step_case, text;
};
const std::string kTinyText = "to see that the comparison works";  // such cases run where they are asked for

struct Compared {
  std::string bench;
  std::vector<BenchCase> cases;
  std::vector<int> ranks;
  bool own_batches;  // of each rank; otherwise all see one
  std::function<std::vector<Side>(const std::filesystem::path& exchange, int ranks)> sides;
  std::size_t ours = 0, peers = 0;  // as SideTable's; `ours` 0: isograd's, but not the last
};

std::vector<std::string> names_of(const std::vector<BenchCase>& cases) {
  std::vector<std::string> names;
  for (const BenchCase& one : cases) names.push_back(one.name);
  return names;
}

std::vector<BenchCase> asked_of(const Compared& compared, const BenchTogetherOptions& options) {
  std::vector<BenchCase> cases;
  for (const BenchCase& one : compared.cases) {
    const bool asked = std::find(options.cases.begin(), options.cases.end(), one.name) != options.cases.end();
    if (asked || (options.cases.empty() && one.text != kTinyText)) cases.push_back(one);
  }
  return cases;
}

bool compare_sides(const Compared& compared, const BenchTogetherOptions& options, Waiting& waiting,
                   nlohmann::ordered_json& records) {
  bool comparable = true;
  for (const BenchCase& one : asked_of(compared, options)) {
    const StepCase& step_case = find_step_case(one.step_case);
    for (const int ranks : compared.ranks) {
      const std::string name = fmt::format("{}, {} rank{}", one.name, ranks, ranks == 1 ? "" : "s");
      waiting.begin(name);
      const ExchangeFolder exchange;
      write_exchange(exchange.path(), step_case, compared.own_batches ? ranks : 1);
      const auto results =
          take_turns(compared.sides(exchange.path(), ranks), exchange.path(), options.seconds);
      const auto of_isograd = std::count_if(results.begin(), results.end(), [](const SideResult& result) {
        return result.side.command.front() == bench_self();
      });
      waiting.end();
      fmt::print("{}, {}: {}\n", name,
                 step_case.micro_batches == 1 ? fmt::format("{} tokens", step_case.tokens())
                                              : fmt::format("{} micro-batches of {} tokens",
                                                            step_case.micro_batches, step_case.tokens()),
                 one.text);
      comparable =
          print_sides(
              {.bench = compared.bench,
               .name = name,
               .ours = compared.ours > 0 ? compared.ours
                                         : std::min(static_cast<std::size_t>(of_isograd), results.size() - 1),
               .peers = compared.peers,
               .products = compared.own_batches ? fastest_products(step_case, ranks) : 0},
              results, records) &&
          comparable;
    }
  }
  return comparable;
}

int compare_all(const std::vector<Compared>& all, const BenchTogetherOptions& options) {
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  std::ptrdiff_t cases = 0;
  for (const Compared& compared : all)
    cases += std::ssize(asked_of(compared, options)) * std::ssize(compared.ranks);
  Waiting waiting("case", cases, options.seconds);
  for (const Compared& compared : all)
    comparable = compare_sides(compared, options, waiting, records) && comparable;
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}
int compare_sides(const Compared& compared, const BenchTogetherOptions& options) {
  return compare_all({compared}, options);
}

void print_heading(const std::string& what) {
  fmt::print(
      "whole training steps of {}, fp32, one thread a rank: median, quartile spread, and how much\nfaster "
      "than each other side (lowest .. highest of single rounds)\n",
      what);
  std::fflush(stdout);
}

Side ours(const std::filesystem::path& exchange, const std::string& strategy, int ranks) {
  return our_side(exchange, strategy, find_strategy(strategy).title, ranks);
}
Side alone(const std::filesystem::path& exchange) {
  return our_side(exchange, "stage-0", "isograd, one rank", 1);
}

const std::string kOneBatch = "one batch for all ranks";
const std::vector<BenchCase> kTensorCases = {{"communication", "tensor-64", kOneBatch},
                                             {"middle", "tensor-512", kOneBatch},
                                             {"compute", "tensor-2048", kOneBatch},
                                             {"tiny", "tensor-tiny", kTinyText}};
const std::vector<BenchCase> kTensorOverlapCases = {{"overlap-communication", "tensor-64", kOneBatch},
                                                    {"overlap-middle", "tensor-512", kOneBatch},
                                                    {"overlap-compute", "tensor-2048", kOneBatch}};
const std::vector<BenchCase> kExpertCases = {
    {"even", "expert-even", "each rank's; they go where an untrained router sends them"},
    {"uneven", "expert-uneven", "each rank's; a quarter of the experts computes all"},
    {"tiny", "expert-tiny", kTinyText}};
const std::vector<BenchCase> kOverlapCases = {
    {"shared", "expert-shared", "each rank's; beside the others an expert computes all"},
    {"shared-tiny", "expert-shared-tiny", kTinyText}};
const std::vector<BenchCase> kPipelineCases = {{"communication", "pipeline-64", kOneBatch},
                                               {"middle", "pipeline-512", kOneBatch},
                                               {"compute", "pipeline-2048", kOneBatch},
                                               {"tiny", "pipeline-tiny", kTinyText}};

}  // namespace

std::vector<std::string> bench_tensor_cases() {
  std::vector<std::string> names = names_of(kTensorCases);
  for (const std::string& name : names_of(kTensorOverlapCases)) names.push_back(name);
  return names;
}
std::vector<std::string> bench_expert_cases() {
  std::vector<std::string> names = names_of(kExpertCases);
  for (const std::string& name : names_of(kOverlapCases)) names.push_back(name);
  return names;
}
std::vector<std::string> bench_pipeline_cases() {
  return names_of(kPipelineCases);
}

int bench_tensor(const BenchTogetherOptions& options) {
  require_packages("tensor", options.python, {"torch"});
  print_heading("one model on one batch");
  return compare_all(
      {{.bench = "tensor",
        .cases = kTensorCases,
        .ranks = {options.ranks},
        .own_batches = false,
        .sides =
            [&](const std::filesystem::path& exchange, int ranks) {
              const auto theirs = [&](const std::string& mode, const std::string& title, int processes) {
                return peer_side(exchange, options.python, "llama_step.py", mode, title, processes);
              };
              return std::vector<Side>{ours(exchange, "tensor", ranks), ours(exchange, "tensor-whole", ranks),
                                       alone(exchange),
                                       theirs("tp", "PyTorch tensor parallel over Gloo", ranks),
                                       theirs("eager", "one PyTorch process", 1)};
            },
        .ours = 3,
        .peers = 2},
       // Beside one another alone: what an overlap gains, or costs.
       {.bench = "tensor",
        .cases = kTensorOverlapCases,
        .ranks = {options.ranks},
        .own_batches = false,
        .sides =
            [](const std::filesystem::path& exchange, int ranks) {
              std::vector<Side> sides;
              for (const char* strategy :
                   {"tensor-weights", "tensor-tokens", "tensor-whole-weights", "tensor", "tensor-whole"})
                sides.push_back(ours(exchange, strategy, ranks));
              return sides;
            },
        .ours = 5,
        .peers = 3}},
      options);
}

int bench_expert(const BenchTogetherOptions& options) {
  if (find_step_case(kExpertCases[0].step_case).shape.experts.count % options.ranks != 0)
    throw ConfigError({.where = "isograd bench expert --ranks",
                       .found = std::to_string(options.ranks),
                       .expected = "2, 4 or 8: the PyTorch peer deals its 8 experts evenly",
                       .action = "Choose one of them"});
  require_packages("expert", options.python, {"torch", "transformers"});
  print_heading("a mixture of 8 experts, 2 to a token");
  return compare_all(
      {{.bench = "expert",
        .cases = kExpertCases,
        .ranks = {1, options.ranks},
        .own_batches = true,
        .sides =
            [&](const std::filesystem::path& exchange, int ranks) {
              const auto theirs = [&](const std::string& mode, const std::string& title) {
                return peer_side(exchange, options.python, "experts_step.py", mode, title, ranks);
              };
              if (ranks == 1)
                return std::vector<Side>{alone(exchange),
                                         theirs("transformers-loop", "transformers' Mixtral, looping"),
                                         theirs("transformers", "transformers' Mixtral")};
              return std::vector<Side>{
                  ours(exchange, "expert", ranks), ours(exchange, "expert-halves", ranks),
                  our_side(exchange, "stage-0", "isograd, all experts on each rank", ranks),
                  theirs("ep", "PyTorch, all-to-all over Gloo, FSDP2")};
            },
        .peers = 1},
       // Beside one another alone: what an overlap gains, or costs.
       {.bench = "expert",
        .cases = kOverlapCases,
        .ranks = {options.ranks},
        .own_batches = true,
        .sides = [](const std::filesystem::path& exchange, int ranks) -> std::vector<Side> {
          return {ours(exchange, "expert-shared", ranks), ours(exchange, "expert-halves", ranks),
                  ours(exchange, "expert", ranks)};
        }}},
      options);
}

int bench_pipeline(const BenchTogetherOptions& options) {
  require_packages("pipeline", options.python,
                   {"torch", "numpy"});  // which torch.distributed.pipelining imports
  print_heading("one model in stages");
  return compare_sides(
      {.bench = "pipeline",
       .cases = kPipelineCases,
       .ranks = {options.ranks},
       .own_batches = false,
       .sides =
           [&](const std::filesystem::path& exchange, int ranks) {
             const auto theirs = [&](const std::string& mode, const std::string& title, int processes) {
               return peer_side(exchange, options.python, "pipeline_step.py", mode, title, processes);
             };
             return std::vector<Side>{ours(exchange, "pipeline-1f1b", ranks),
                                      ours(exchange, "pipeline-zb-h1", ranks), alone(exchange),
                                      theirs("1f1b", "PyTorch pipelining, 1F1B over Gloo", ranks),
                                      theirs("eager", "one PyTorch process", 1)};
           },
       .ours = 3,
       .peers = 2},
      options);
}

}  // namespace isograd
