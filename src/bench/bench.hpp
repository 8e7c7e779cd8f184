// The verbs of `isograd bench`, as data: our speed against a peer's, in the same run, taking turns.
#pragma once

#include <filesystem>
#include <string>
#include <variant>
#include <vector>

namespace isograd {

// The options of all verbs; each verb has some of them (bench_table()) and its own defaults.
struct BenchOptions {
  std::vector<std::string> cases{}, operations{}, strategies{}, peers{};  // empty: the standard ones
  std::vector<int> rank_counts{1, 2};                                     // compared one after the other
  int ranks = 2, ulysses = 1, threads = 1;
  double seconds = 60, patience = 1;
  bool compiled = false, quick = false, mpi = true, peer = false;
  std::string size = "communication", device = "cpu", dtype = "float32";
  std::string python{}, json{}, svg{};  // empty: as find_python() says; no file
};

struct BenchOption {
  std::string name;
  std::variant<bool BenchOptions::*, int BenchOptions::*, double BenchOptions::*, std::string BenchOptions::*,
               std::vector<int> BenchOptions::*, std::vector<std::string> BenchOptions::*>
      value;
  std::string about, type{};
  std::vector<std::string> choices{};
  double least = 0, most = 0;  // equal: any number
  bool lists_choices = true;   // in its help
};

struct Bench;
struct BenchVerb {
  std::string name, about, footer;
  BenchOptions defaults{};
  std::vector<std::string> packages{};  // that every run needs in the peers' Python
  std::vector<BenchOption> options{};
  void (*run)(Bench&) = nullptr;
};
const std::vector<BenchVerb>& bench_table();

// 0: compared, whatever the ratios are; 1: the sides computed different things, so that the ratios mean
// nothing.
int run_bench(const BenchVerb& verb, const BenchOptions& options);

// Hidden verbs, which run_bench() starts: this program's side of a comparison. They start their ranks
// themselves.
std::vector<std::string> bench_sides();
int run_bench_side(const std::string& verb, const std::filesystem::path& exchange, int ranks,
                   const std::string& name);

// One line: the processor's name as the system has it, the cores that this process may run on, the level of
// isograd's and of LibTorch's kernels, and the levels that variables hold oneDNN and MKL to. In every record.
std::string processor_text();

// "avx2" and "scalar" hold isograd, LibTorch, oneDNN and MKL, and so every side of a comparison, to
// processors that have no more: sets their variables and starts this program again with `arguments` (without
// its name), unless they are set. `level` is one of processor_levels(). ConfigError: the processor lacks it.
void run_as(const std::string& level, const std::vector<std::string>& arguments);
std::vector<std::string> processor_levels();

}  // namespace isograd
