// ./dev museum: known mistakes, each caught by name.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>

#include <fmt/ranges.h>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "museum/museum.hpp"
#include "train/config_table.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

using museum::Exhibit;

void list() {
  for (const Exhibit& exhibit : museum::exhibits())
    fmt::print("{:5} {:56} {}\n", exhibit.id, exhibit.title, exhibit.diagnosis);
  fmt::print("\n{} on show. ./dev museum ID runs one and explains it.\n", museum::exhibits().size());
}

int run_one(const std::string& id) {
  const Exhibit* exhibit = museum::find(id);
  if (!exhibit) {
    std::vector<std::string> ids;
    for (const Exhibit& one : museum::exhibits()) ids.push_back(one.id);
    const auto near = nearest(id, ids);
    refuse("./dev museum", id, "the name of an exhibit" + (near ? ", e.g. " + *near : std::string()),
           "Choose one that `./dev museum` lists");
  }
  fmt::print("{}: {}\n\n{}\n", exhibit->id, exhibit->title, exhibit->mistake);
  fmt::print("Who makes it: {}\nWhat you would see: {}\nDiagnosis expected: {}\n", exhibit->who,
             exhibit->number, exhibit->diagnosis);
  for (const auto& shared : museum::shared_classes())
    if (shared.diagnosis == exhibit->diagnosis)
      fmt::print("  shared by {}: {}\n", fmt::join(shared.exhibits, ", "), shared.why);
  bool caught = true;
  for (int ranks : {2, 3, 4, 5}) {
    if (!exhibit->exists(ranks)) continue;
    const Verdict verdict = museum::show(exhibit, ranks);
    const auto found = museum::first_finding(verdict);
    caught = caught && found == exhibit->diagnosis;
    fmt::print("\n{} ranks: {} ({})\n", ranks, found == exhibit->diagnosis ? "caught" : "NOT CAUGHT", found);
    for (const auto& finding : verdict.findings) {
      fmt::print("  {}\n", finding.sentence);
      for (const auto& line : finding.evidence) fmt::print("    {}\n", line);
    }
  }
  return caught ? 0 : 1;
}

// Exhibit by diagnosis: how often each was the answer, over the numbers of ranks at which the exhibit exists.
int table() {
  std::map<std::string, std::map<std::string, int>> cells;
  std::vector<std::string> columns;
  const auto column = [&](const std::string& id) {
    if (std::find(columns.begin(), columns.end(), id) == columns.end()) columns.push_back(id);
  };
  column("pass");
  int runs = 0, right = 0;
  const auto enter = [&](const std::string& row, const std::string& found, const std::string& expected) {
    ++cells[row][found];
    ++runs;
    if (found == expected) ++right;
    column(found);
  };
  for (int ranks : {1, 2, 3, 4, 5, 8})
    enter("right", museum::first_finding(museum::show(nullptr, ranks)), "pass");
  for (const Exhibit& exhibit : museum::exhibits()) {
    column(exhibit.diagnosis);
    for (int ranks : {2, 3, 4, 5})
      if (exhibit.exists(ranks))
        enter(exhibit.id, museum::first_finding(museum::show(&exhibit, ranks)), exhibit.diagnosis);
  }
  const auto row = [&](const std::string& id, const std::string& expected) {
    std::string line = fmt::format("{:6}", id);
    for (const auto& one : columns) {
      const auto cell = cells[id].find(one);
      const int count = cell == cells[id].end() ? 0 : cell->second;
      line += count ? fmt::format("{:>3}{}", count, one == expected ? " " : "!") : fmt::format("{:>3} ", ".");
    }
    const auto own = std::find(columns.begin(), columns.end(), expected) - columns.begin();
    fmt::print("{} {} {}\n", line, own, expected);
  };
  fmt::print(
      "exhibit × diagnosis: number of rank counts (2, 3, 4, 5; right: 1, 2, 3, 4, 5, 8) with "
      "this answer;\n"
      "! marks a wrong one\n{:6}",
      "");
  for (std::size_t i = 0; i < columns.size(); ++i) fmt::print("{:>3} ", i);
  fmt::print("\n");
  row("right", "pass");
  for (const Exhibit& exhibit : museum::exhibits()) row(exhibit.id, exhibit.diagnosis);
  for (const auto& shared : museum::shared_classes())
    fmt::print("one class, declared beforehand: {} -> {}\n", fmt::join(shared.exhibits, ", "),
               shared.diagnosis);
  fmt::print("{} of {} runs on the diagonal; {} exhibits on show\n", right, runs, museum::exhibits().size());
  return right == runs ? 0 : 1;
}

// docs/museum.md
void catalogue() {
  fmt::print(
      "# The museum of biased gradients\n\n"
      "Mistakes that real trainers shipped. Each is put into the component that it concerns\n"
      "(`tests/museum/`), and `isograd verify` has to name it. `./dev museum ID` runs one, "
      "`./dev museum` all of\n"
      "them. This page is written by `./dev museum --markdown`.\n\n"
      "W ranks, G micro-batches on a rank, M on all, N targets in the step, n_k on rank k, "
      "n_kj in its micro-batch j.\n\n"
      "| exhibit | mistake | what one would see | diagnosis |\n|---|---|---|---|\n");
  for (const Exhibit& exhibit : museum::exhibits())
    fmt::print("| {} | **{}**<br>{} *Who makes it:* {} | {} | `{}` |\n", exhibit.id, exhibit.title,
               exhibit.mistake, exhibit.who, exhibit.number, exhibit.diagnosis);
  fmt::print("\n{} exhibits are on show.\n", museum::exhibits().size());
  fmt::print("\n## One diagnosis for several exhibits, declared beforehand\n\n");
  for (const auto& shared : museum::shared_classes())
    fmt::print("- `{}`: {}. {}.\n", shared.diagnosis, fmt::join(shared.exhibits, ", "), shared.why);
  fmt::print("\n## All diagnoses\n\n| name | meaning |\n|---|---|\n");
  for (const Diagnosis& diagnosis : kDiagnoses)
    fmt::print("| `{}` | {} |\n", diagnosis.id, diagnosis.meaning);
}

int random_runs(int count, std::uint64_t seed) {
  const auto alarms = museum::false_alarms(count, seed);
  for (const auto& alarm : alarms) fmt::print("false alarm: {}\n", alarm);
  fmt::print("{} random correct configurations (seed {}): {} false alarms\n", count, seed, alarms.size());
  return alarms.empty() ? 0 : 1;
}

int run(int argc, char** argv) {
  CLI::App program("Known mistakes of distributed trainers, each caught by name.", "./dev museum");
  std::string id;
  bool all = false, markdown = false;
  int random = 0;
  std::uint64_t seed = 1;
  program.add_option("ID", id, "an exhibit to run and explain, e.g. B7; without one they are listed");
  program.add_flag("--table", all, "run all of them: the table of exhibits and diagnoses");
  program.add_flag("--markdown", markdown, "the catalogue as docs/museum.md has it");
  program.add_option("--random", random, "verify this many random correct configurations")->type_name("N");
  program.add_option("--seed", seed, "seed of the random configurations")->type_name("SEED");
  program.footer(
      "Ranks are threads of this process. docs/museum.md is the catalogue.\n\n"
      "  ./dev museum B7\n  ./dev museum --table --random 200\n\n"
      "Status: 0 all caught, no false alarm; 1 not; 2 bad input.");
  CLI11_PARSE(program, argc, argv);
  int status = 0;
  if (!id.empty()) status = std::max(status, run_one(id));
  if (all) status = std::max(status, table());
  if (random > 0) status = std::max(status, random_runs(random, seed));
  if (markdown) catalogue();
  if (id.empty() && !markdown && !all && random <= 0) list();
  return status;
}

}  // namespace
}  // namespace isograd

int main(int argc, char** argv) {
  try {
    return isograd::run(argc, argv);
  } catch (const std::exception& error) {
    isograd::print(stderr, std::string(error.what()) + "\n");
    return isograd::exit_status(error);
  }
}
