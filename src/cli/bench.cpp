// isograd bench: our speed against a peer's, in the same run.
#include <fmt/format.h>

#include <cstdio>

#include "base/print.hpp"
#include "bench/bench.hpp"
#include "bench/processor.hpp"
#include "cli/verbs.hpp"

namespace isograd {

namespace {

// What most comparisons ask for. `what`: which cases these are.
void add_cases(CLI::App& verb, std::vector<std::string>& cases, const std::string& what,
               const std::vector<std::string>& all) {
  verb.add_option("--case", cases, what + "; all unless given, may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->check(CLI::IsMember(all));
}
void add_json(CLI::App& verb, auto& file) {
  verb.add_option("--json", file,
                  "records go here: {bench, case, ours, peer, peer_name, unit, ratio, processor}")
      ->type_name("FILE");
}
void add_seconds(CLI::App& verb, double& seconds, const std::string& of_each) {
  verb.add_option("--seconds", seconds, "of taking turns" + of_each)
      ->type_name("S")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
}
void add_python(CLI::App& verb, auto& python, const std::string& package) {
  verb.add_option("--python", python,
                  "has " + package + "; $PYTHON, the checkout's .venv/bin/python or python3 unless given")
      ->type_name("FILE");
}

Verb comm_verb(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand("comm", "Collectives beside Gloo, MPI and memcpy");
  auto options = std::make_shared<BenchCommOptions>();
  verb->add_option("--ranks", options->ranks, "numbers of ranks; 2 unless given, may be repeated")
      ->type_name("N")
      ->allow_extra_args(false)
      ->check(CLI::Range(2, 64));
  verb->add_option("--operation", options->operations, "which; all unless given, may be repeated")
      ->type_name("OP")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"all_reduce", "reduce_scatter", "all_gather", "all_gather_in_place", "broadcast",
                             "all_to_all", "round_trip", "barrier"}));
  add_json(*verb, options->json);
  verb->add_option("--svg", options->svg, "the picture goes here: time over size")->type_name("FILE");
  verb->add_option("--html", options->html, "the picture and all percentiles go here")->type_name("FILE");
  verb->add_flag("--quick", options->quick, "fewer sizes, less time: under 40 s");
  verb->add_flag("!--no-mpi", options->mpi,
                 "leave MPI out; else it is among the peers where this build has it");
  verb->add_option("--patience", options->patience, "multiplies the time for each case")
      ->type_name("X")
      ->check(CLI::Range(0.001, 1e3))
      ->capture_default_str();
  add_python(*verb, options->python, "PyTorch");
  verb->footer("A ratio above 1 means that isograd is faster. Status: 0 measured, 2 bad input.");
  return {verb, [options] { return bench_comm(*options); }};
}

Verb wrapped_verb(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand(
      "wrapped", "PyTorch's DDP and FSDP2 over isograd and over Gloo: only the name of the backend differs");
  auto options = std::make_shared<BenchWrappedOptions>();
  verb->add_option("--case", options->cases, "ddp or fsdp2; both unless given")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"ddp", "fsdp2"}));
  verb->add_option("--ranks", options->ranks, "processes")
      ->type_name("N")
      ->check(CLI::Range(2, 64))
      ->capture_default_str();
  verb->add_option("--size", options->size, "of the model and the batch")
      ->type_name("NAME")
      ->check(CLI::IsMember({"tiny", "communication", "medium", "compute"}))
      ->capture_default_str();
  add_json(*verb, options->json);
  add_seconds(*verb, options->seconds, ", for each case");
  add_python(*verb, options->python, "PyTorch");
  verb->footer("Status: 0 compared, 1 the losses of the two differ, 2 bad input.");
  return {verb, [options] { return bench_wrapped(*options); }};
}

Verb step_verb(CLI::App& bench) {
  CLI::App* step = bench.add_subcommand(
      "step", "Whole training steps: PyTorch alone, its DDP and its FSDP2, beside each of our strategies");
  auto options = std::make_shared<BenchStepOptions>();
  step->add_option("--ranks", options->ranks,
                   "numbers of ranks to compare; 1 and 2 unless given, may be repeated")
      ->type_name("N")
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 256));
  add_cases(*step, options->cases, "which sizes", bench_step_cases());
  step->add_option("--strategy", options->strategies,
                   "of several ranks, may be repeated; unless given stage-0, zero-1, zero-2, zero-3,\n"
                   "shared, zero-3-shared and stage-0-late. zero-1-late, zero-2-late, zero-3-late and\n"
                   "shared-late are without overlap, too")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->check(CLI::IsMember(bench_strategies()).description(""));
  step->add_flag("--compiled", options->compiled,
                 "torch.compile takes part: one process, and DDP over compiled blocks");
  step->add_option(
          "--peer", options->peers,
          "of one rank, in place of eager (and compiled); bfloat16: of autocast too; repeatable")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->check(CLI::IsMember(bench_step_peers()));
  step->add_option("--dtype", options->dtype, "float32, or bfloat16 with fp32 masters")
      ->type_name("NAME")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->capture_default_str();
  step->add_option("--threads", options->threads, "of each rank, and of PyTorch's")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  step->add_option("--device", options->device, "cpu, or cuda: a GPU for each rank, over NCCL")
      ->type_name("NAME")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  add_json(*step, options->json);
  add_seconds(*step, options->seconds, ", for each case and number of ranks");
  add_python(*step, options->python, "PyTorch");
  step->footer(
      "A ratio above 1 means that isograd is faster.\n"
      "Status: 0 compared, whatever the ratios; 1 losses or norms differ; 2 bad input.");
  return {step, [options] { return bench_step(*options); }};
}

Verb product_verb(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand(
      "product", "Each matrix product of a step by BLAS, oneDNN and brgemm, and which of them isograd takes");
  auto options = std::make_shared<BenchProductOptions>();
  add_cases(*verb, options->cases, "whose step", bench_product_cases());
  add_json(*verb, options->json);
  verb->footer(
      "ISOGRAD_PRODUCTS=blas, =onednn or =brgemm has one of them multiply in fp32, in every verb.\n"
      "Status: 0 measured, 2 bad input.");
  return {verb, [options] { return bench_product(*options); }};
}

Verb together_verb(CLI::App& bench, const std::string& name, const std::string& about,
                   const std::string& axis, const std::vector<std::string>& cases,
                   int (*run)(const BenchTogetherOptions&)) {
  CLI::App* verb = bench.add_subcommand(name, about);
  auto options = std::make_shared<BenchTogetherOptions>();
  verb->add_option("--ranks", options->ranks, "along " + axis)
      ->type_name("N")
      ->check(CLI::Range(2, 8))
      ->capture_default_str();
  add_cases(*verb, options->cases, "which of them", cases);
  add_json(*verb, options->json);
  add_seconds(*verb, options->seconds, ", for each case");
  add_python(*verb, options->python, "PyTorch");
  verb->footer(
      "A ratio above 1 means that isograd is faster.\n"
      "Status: 0 compared, whatever the ratios; 1 losses or norms differ; 2 bad input.");
  return {verb, [options, run] { return run(*options); }};
}

Verb optim_verb(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand(
      "optim", "Sum, norm, clip and AdamW, beside PyTorch's clip_grad_norm_ and fused AdamW, and a triad");
  auto options = std::make_shared<BenchOptimOptions>();
  verb->add_option("--ranks", options->ranks, "numbers of ranks; 1 and 2 unless given, may be repeated")
      ->type_name("N")
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 64));
  add_cases(*verb, options->cases, "which sizes", bench_optim_cases());
  add_json(*verb, options->json);
  add_seconds(*verb, options->seconds, ", for each case and number of ranks");
  add_python(*verb, options->python, "PyTorch");
  verb->footer(
      "A ratio above 1 means that isograd is faster, or nearer to the memory's limit.\n"
      "Status: 0 compared, whatever the ratios; 1 the parameters of the two differ; 2 bad input.");
  return {verb, [options] { return bench_optim(*options); }};
}

Verb context_verb(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand(
      "context", "One batch on context ranks, beside one rank on all of it: time and memory");
  auto options = std::make_shared<BenchContextOptions>();
  add_cases(*verb, options->cases, "which sizes", bench_context_cases());
  verb->add_option("--ranks", options->ranks, "threads that share the batch")
      ->type_name("N")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  verb->add_option("--ulysses", options->ulysses,
                   "of them, that exchange tokens for heads; the rest is a ring")
      ->type_name("N")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  add_json(*verb, options->json);
  add_seconds(*verb, options->seconds, ", for each case");
  verb->add_flag("--peer", options->peer,
                 "one causal document: PyTorch's ring attention over Gloo takes turns too");
  add_python(*verb, options->python, "PyTorch");
  verb->footer("Status: 0 compared, whatever the ratios; 1 losses or gradients differ; 2 bad input.");
  return {verb, [options] { return bench_context(*options); }};
}

Verb ranking_verb(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand(
      "ranking", "Ranking losses beside the package imbalanced-losses, and beside one sort");
  auto options = std::make_shared<BenchRankingOptions>();
  add_cases(*verb, options->cases, "which", bench_ranking_cases());
  add_json(*verb, options->json);
  add_seconds(*verb, options->seconds, "");
  add_python(*verb, options->python, "imbalanced-losses");
  verb->footer(
      "A ratio above 1 means that isograd is faster or takes less memory.\n"
      "Status: 0 compared, whatever the ratios; 1 the losses or gradients differ; 2 bad input.");
  return {verb, [options] { return bench_ranking(*options); }};
}

// Hidden: our side of a comparison, started by the above.
Verb ours_verb(CLI::App& bench, const char* name,
               int (*run)(const std::filesystem::path&, int, const std::string&)) {
  struct Ours {
    std::string exchange, strategy;
    int ranks = 1;
  };
  CLI::App* verb = bench.add_subcommand(name, "")->group("");
  auto mine = std::make_shared<Ours>();
  verb->add_option("EXCHANGE", mine->exchange)->required();
  verb->add_option("RANKS", mine->ranks)->required();
  verb->add_option("STRATEGY", mine->strategy)->required();
  return {verb, [mine, run] { return run(mine->exchange, mine->ranks, mine->strategy); }};
}

}  // namespace

std::vector<Verb> bench_verbs(CLI::App& program, const Invocation& invocation) {
  CLI::App* bench = program.add_subcommand("bench", "Compare speeds with PyTorch on this machine");
  bench->require_subcommand(1);
  const auto level = std::make_shared<std::string>();
  bench->add_option("--as", *level, "hold all sides to these instructions; may follow the verb")
      ->type_name("LEVEL")
      ->check(CLI::IsMember(processor_levels()));

  CLI::App* loss = bench->add_subcommand(
      "loss", "The fused linear cross entropy: LibTorch's own two operations, time and memory");
  auto of_loss = std::make_shared<BenchLossOptions>();
  add_cases(*loss, of_loss->cases, "which sizes", bench_loss_cases());
  add_json(*loss, of_loss->json);
  add_seconds(*loss, of_loss->seconds, ", for each case");
  loss->footer(
      "A ratio above 1 means that isograd is faster or takes less memory.\n"
      "Status: 0 compared, whatever the ratios; 1 the losses or gradients differ; 2 bad input.");

  std::vector<Verb> verbs = {
      comm_verb(*bench),
      wrapped_verb(*bench),
      step_verb(*bench),
      product_verb(*bench),
      together_verb(*bench, "tensor",
                    "Ranks that hold one model together, beside PyTorch's parallelize_module and one process",
                    "tp", bench_tensor_cases(), bench_tensor),
      together_verb(*bench, "expert",
                    "A mixture of experts, beside transformers' own and PyTorch's all-to-all over Gloo", "ep",
                    bench_expert_cases(), bench_expert),
      together_verb(*bench, "pipeline",
                    "A model in stages, beside torch.distributed.pipelining over Gloo and one process", "pp",
                    bench_pipeline_cases(), bench_pipeline),
      optim_verb(*bench),
      context_verb(*bench),
      ranking_verb(*bench),
      {loss, [of_loss] { return bench_loss(*of_loss); }}};
  for (Verb& verb : verbs) {
    verb.app->fallthrough();
    verb.run = [run = verb.run, level, arguments = invocation.arguments] {
      if (!level->empty()) run_as(*level, arguments);
      print(stdout, fmt::format("on {}\n", printable(processor_text())));
      std::fflush(stdout);
      return run();
    };
  }
  verbs.push_back(ours_verb(*bench, "step-ours", bench_step_ours));
  verbs.push_back(ours_verb(*bench, "optim-ours", bench_optim_ours));
  return verbs;
}

}  // namespace isograd
