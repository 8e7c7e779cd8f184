// The table of the verbs.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "bench/cases/step_case.hpp"
#include "bench/cases/verbs.hpp"

namespace isograd {
namespace {

using Options = BenchOptions;
using Names = std::vector<std::string>;
using Value = decltype(BenchOption::value);

BenchOption flag(const std::string& name, Value value, const std::string& about) {
  return {.name = name, .value = value, .about = about};
}
BenchOption file(const std::string& name, Value value, const std::string& about) {
  return {.name = name, .value = value, .about = about, .type = "FILE"};
}
BenchOption choice(const std::string& name, Value value, const std::string& about, Names choices,
                   const char* type = "NAME") {
  return {.name = name, .value = value, .about = about, .type = type, .choices = std::move(choices)};
}
BenchOption number(const std::string& name, Value value, const std::string& about, double least, double most,
                   const char* type = "N") {
  return {.name = name, .value = value, .about = about, .type = type, .least = least, .most = most};
}

BenchOption cases(const std::string& which, Names names) {
  return choice("--case", &Options::cases, which + "; all unless given, may be repeated", std::move(names));
}
BenchOption rank_counts(const std::string& which, int least, int most) {
  return number("--ranks", &Options::rank_counts, which + " unless given, may be repeated", least, most);
}
BenchOption ranks(const std::string& which, int least, int most) {
  return number("--ranks", &Options::ranks, which, least, most);
}
BenchOption strategy_option() {
  BenchOption option =
      choice("--strategy", &Options::strategies,
             "of several ranks, may be repeated; unless given stage-0, zero-1, zero-2, zero-3,\n"
             "shared, zero-3-shared and stage-0-late. zero-1-late, zero-2-late, zero-3-late and\n"
             "shared-late are without overlap, too",
             bench_step_strategies());
  option.lists_choices = false;
  return option;
}

constexpr const char* kSpeed = "A ratio above 1 means that isograd is faster.\n";
constexpr const char* kSpeedOrMemory = "A ratio above 1 means that isograd is faster or takes less memory.\n";
std::string status(const std::string& what) {
  return "Status: 0 compared, whatever the ratios; 1 " + what + " differ; 2 bad input.";
}

// A verb with `options`, and those that all have: --json; --seconds, `for_each` of which it takes; --python,
// which has `package`; each unless it is empty.
BenchVerb verb(const std::string& name, const std::string& about, const std::string& footer,
               BenchOptions defaults, Names packages, void (*run)(Bench&), std::vector<BenchOption> options,
               const char* for_each, const char* package = "PyTorch") {
  options.push_back(file("--json", &Options::json,
                         "records go here: {bench, case, ours, peer, peer_name, unit, ratio, processor}"));
  if (for_each)
    options.push_back(
        number("--seconds", &Options::seconds, std::string("of taking turns") + for_each, 0.1, 1e6, "S"));
  if (package)
    options.push_back(file(
        "--python", &Options::python,
        fmt::format("has {}; $PYTHON, the checkout's .venv/bin/python or python3 unless given", package)));
  return {name, about, footer, std::move(defaults), std::move(packages), std::move(options), run};
}

// One model on several ranks.
BenchVerb model_parallel(const std::string& name, const std::string& about, const std::string& axis,
                         Names packages, Names names, void (*run)(Bench&)) {
  return verb(name, about, kSpeed + status("losses or norms"), {}, std::move(packages), run,
              {ranks("along " + axis, 2, 8), cases("which of them", std::move(names))}, ", for each case");
}

}  // namespace

const std::vector<BenchVerb>& bench_table() {
  const Names operations = {"all_reduce", "reduce_scatter", "all_gather", "all_gather_in_place",
                            "broadcast",  "all_to_all",     "round_trip", "barrier"};
  static const std::vector<BenchVerb> table = {
      verb("comm", "Collectives compared with Gloo, MPI and memcpy",
           "A ratio above 1 means that isograd is faster. Status: 0 measured, 2 bad input.",
           {.rank_counts = {2}}, {"torch"}, bench_comm,
           {rank_counts("numbers of ranks; 2", 2, 64),
            choice("--operation", &Options::operations, "which; all unless given, may be repeated",
                   operations, "OP"),
            file("--svg", &Options::svg, "the picture goes here: time over size"),
            flag("--quick", &Options::quick, "fewer sizes, less time: under 40 s"),
            flag("!--no-mpi", &Options::mpi,
                 "do not compare with MPI; else it is among the peers where this build has it"),
            number("--patience", &Options::patience, "multiplies the time for each case", 0.001, 1e3, "X")},
           nullptr),
      verb("wrapped",
           "PyTorch's DDP and FSDP2 over isograd and over Gloo: only the name of the backend differs",
           "Status: 0 compared, 1 the losses of the two differ, 2 bad input.", {.seconds = 24}, {"torch"},
           bench_wrapped,
           {choice("--case", &Options::cases, "ddp or fsdp2; both unless given", {"ddp", "fsdp2"}),
            ranks("processes", 2, 64),
            choice("--size", &Options::size, "of the model and the batch",
                   {"tiny", "communication", "medium", "compute"})},
           ", for each case"),
      verb("step", "Whole training steps: each of our strategies, PyTorch alone, its DDP and its FSDP2",
           kSpeed + status("losses or norms"), {}, {"torch"}, bench_step,
           {rank_counts("numbers of ranks to compare; 1 and 2", 1, 256),
            cases("which sizes", names_of(step_cases())), strategy_option(),
            flag("--compiled", &Options::compiled,
                 "torch.compile takes part: one process, and DDP over compiled blocks"),
            choice("--peer", &Options::peers,
                   "of one rank, in place of eager (and compiled); bfloat16: of autocast too; repeatable",
                   bench_step_peers()),
            choice("--dtype", &Options::dtype, "float32, or bfloat16 with fp32 masters",
                   {"float32", "bfloat16"}),
            number("--threads", &Options::threads, "of each rank, and of PyTorch's", 1, 1024, ""),
            choice("--device", &Options::device, "cpu, or cuda: a GPU for each rank, over NCCL",
                   {"cpu", "cuda"})},
           ", for each case and number of ranks"),
      verb(
          "product",
          "Each matrix product of a step by BLAS, oneDNN and brgemm, and which of them isograd takes",
          "ISOGRAD_PRODUCTS=blas, =onednn or =brgemm has one of them multiply in fp32, in every verb.\nStatus: 0 measured, 2 bad input.",
          {}, {}, bench_product, {cases("whose step", bench_product_cases())}, nullptr, nullptr),
      model_parallel("tensor",
                     "One model on several ranks, compared with PyTorch's parallelize_module and one process",
                     "tp", {"torch"}, bench_tensor_cases(), bench_tensor),
      model_parallel(
          "expert",
          "A mixture of experts, compared with transformers' own and PyTorch's all-to-all over Gloo", "ep",
          {"torch", "transformers"}, bench_expert_cases(), bench_expert),
      // torch.distributed.pipelining imports numpy.
      model_parallel(
          "pipeline",
          "A model in stages, compared with torch.distributed.pipelining over Gloo and one process", "pp",
          {"torch", "numpy"}, bench_pipeline_cases(), bench_pipeline),
      verb("optim", "Sum, norm, clip and AdamW, compared with PyTorch's fused AdamW and a triad",
           "A ratio above 1 means that isograd is faster, or nearer to the memory's limit.\n" +
               status("the parameters of the two"),
           {.seconds = 30}, {"torch"}, bench_optim,
           {rank_counts("numbers of ranks; 1 and 2", 1, 64), cases("which sizes", bench_optim_cases())},
           ", for each case and number of ranks"),
      verb("context", "One batch on context ranks, compared with one rank on all of it: time and memory",
           status("losses or gradients"), {.seconds = 20}, {}, bench_context,
           {cases("which sizes", bench_context_cases()), ranks("threads that share the batch", 1, 64),
            number("--ulysses", &Options::ulysses,
                   "of them, that exchange tokens for heads; the rest is a ring", 1, 64),
            flag("--peer", &Options::peer,
                 "one causal document: PyTorch's ring attention over Gloo takes turns too")},
           ", for each case"),
      verb("ranking", "Ranking losses compared with the package imbalanced-losses, and with one sort",
           kSpeedOrMemory + status("the losses or gradients"), {.seconds = 24}, {}, bench_ranking,
           {cases("which", bench_ranking_cases())}, "", "imbalanced-losses"),
      verb("loss", "The fused linear cross entropy: LibTorch's own two operations, time and memory",
           kSpeedOrMemory + status("the losses or gradients"), {.seconds = 24}, {}, bench_loss,
           {cases("which sizes", bench_loss_cases())}, ", for each case", nullptr)};
  return table;
}

}  // namespace isograd
