// isograd bench: our speed against a peer's, in the same run, taking turns.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace isograd {

struct BenchStepOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  std::vector<int> ranks{1, 2};    // 1: PyTorch eager; more: DDP and FSDP2 over Gloo, and one process alone
  std::vector<std::string> strategies;  // of several ranks; empty: the standard ones
  bool compiled = false;  // PyTorch with torch.compile takes part: alone, and DDP over compiled blocks
  std::vector<std::string> peers;  // of one rank, by name, instead of those: bench_step_peers()
  std::filesystem::path json;      // where the records go; empty: nowhere
  double seconds = 60;             // of taking turns, for each case and number of ranks
  std::string python;              // empty: as find_python() says
  std::string device = "cpu";      // or "cuda": a GPU for each rank, over NCCL, for both sides
  std::string dtype = "float32";   // or "bfloat16": parameters in it with fp32 masters, on both sides
  int threads = 1;                 // of each rank, on both sides
};

// "small", "medium", "communication", "compute"; for a GPU "large" and "8B-layer"; and "tiny", which only
// shows that the comparison works.
std::vector<std::string> bench_step_cases();
// "eager", "compiled", "autocast", "autocast-compiled".
std::vector<std::string> bench_step_peers();
// "stage-0", "zero-1", ...
std::vector<std::string> bench_strategies();

// `isograd bench step`: whole training steps (forward, backward, clip, AdamW) of one Llama, ours and
// PyTorch's, by strategy, from the same weights on the same tokens with one thread a rank. Prints tables,
// with the time that our ranks waited for communication, and writes records
// {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio"}; a ratio above 1 means that ours is faster.
// On a GPU a record also has "dtype", the model's "flops" of a step, and "ours_device" and "peer_device",
// what the device did in a step (device_profile.hpp). Returns 0 whatever the ratios are; 1 when losses or
// norms differ, for then the comparison is void.
int bench_step(const BenchStepOptions& options);

struct BenchProductOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  std::filesystem::path json;
};

// Those of bench_step, and "expert-even".
std::vector<std::string> bench_product_cases();

// `isograd bench product`: each matrix product of a step by BLAS, oneDNN and brgemm, which isograd takes,
// and what a step's products take by that rule and by the fastest of each. Records as bench_step's, in
// milliseconds.
int bench_product(const BenchProductOptions& options);

// Of ranks that hold one model together.
struct BenchTogetherOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  int ranks = 2;
  std::filesystem::path json;
  double seconds = 60;  // of taking turns, for each case
  std::string python;
};

// "communication", "middle", "compute", and "tiny".
std::vector<std::string> bench_tensor_cases();

// `isograd bench tensor`: a step of one Llama that ranks hold together, on one batch, with and without cut
// tokens between the products, beside PyTorch's parallelize_module over Gloo, one PyTorch process and one
// rank of ours. Records as those of bench_step, in milliseconds. Returns as bench_step.
int bench_tensor(const BenchTogetherOptions& options);

// "even", "uneven" (a quarter of the experts computes all tokens), "tiny", and "shared", which compares what
// is computed while tokens travel, on several ranks alone.
std::vector<std::string> bench_expert_cases();

// `isograd bench expert`: a step of one mixture of experts, on one rank beside transformers' Mixtral, on
// several, which each have tokens of their own and a part of the experts, beside PyTorch's all-to-all over
// Gloo with FSDP2 for the rest, and beside ours with all experts on each rank. As bench_tensor.
int bench_expert(const BenchTogetherOptions& options);

// "communication", "middle", "compute", and "tiny".
std::vector<std::string> bench_pipeline_cases();

// `isograd bench pipeline`: a step of one Llama in stages, one on a rank, with eight micro-batches, beside
// torch.distributed.pipelining over Gloo with the same schedule and stages, one PyTorch process and one rank
// of ours. As bench_tensor.
int bench_pipeline(const BenchTogetherOptions& options);

struct BenchOptimOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  std::vector<int> ranks{1, 2};
  std::filesystem::path json;
  double seconds = 30;  // of taking turns, for each case and number of ranks
  std::string python;
};

// "communication" (43 M parameters) and "tiny".
std::vector<std::string> bench_optim_cases();

// `isograd bench optim`: from each rank's gradients to updated parameters (sum over ranks, norm, clip, AdamW,
// publication), by strategy, beside as many PyTorch processes that clip and update alone: their gradients
// need no sum. Bandwidth beside a triad on the same cores. Records with unit "ms" and, for bandwidth, "GB/s".
// Returns 1 when the parameters of the two differ by more than rounding explains.
int bench_optim(const BenchOptimOptions& options);

struct BenchCommOptions {
  std::vector<int> ranks{2};
  std::vector<std::string> operations;    // empty: all
  std::filesystem::path json, svg, html;  // where these go; empty: nowhere
  bool quick = false;                     // fewer sizes, less time: under 40 s
  bool mpi = true;                        // among the peers, where this build has it: mpirun starts the ranks
  double patience = 1;                    // the time for each case is multiplied by this
  std::string python;                     // empty: as find_python() says
};

// `isograd bench comm`: each collective by isograd, Gloo, MPI and, as the limit, memcpy, taking turns in the
// same processes. Prints times (percentiles) and ratios; records as those of bench_step, in microseconds.
int bench_comm(const BenchCommOptions& options);

struct BenchWrappedOptions {
  std::vector<std::string> cases;  // "ddp", "fsdp2"; empty: both
  int ranks = 2;
  std::string size = "communication";
  std::filesystem::path json;
  double seconds = 24;
  std::string python;
};

// `isograd bench wrapped`: steps of PyTorch's DDP and FSDP2 over isograd and over Gloo: the same script, with
// another backend's name. Returns as bench_step.
int bench_wrapped(const BenchWrappedOptions& options);
struct BenchLossOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  std::filesystem::path json;      // where the records go; empty: nowhere
  double seconds = 24;             // of taking turns, for each case
};

// "projection" (vocabulary 32,768), "large vocabulary" (128,256; one run each), and "tiny".
std::vector<std::string> bench_loss_cases();

// `isograd bench loss`: output projection and cross entropy, forward and backward, one thread: our fused one
// beside LibTorch's at::linear + at::cross_entropy_loss and beside our own two operations. Time by turns in
// one process; memory as the growth of the resident set at its peak, each in a process of its own. Records as
// above with unit "tokens/s" and "MiB" (the ratio is above 1 where ours is better in both). Returns 1 when
// losses or gradients differ. Forks: call it before any backward.
int bench_loss(const BenchLossOptions& options);

struct BenchContextOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  int ranks = 2, ulysses = 1;      // the rest of the ranks are a ring
  std::filesystem::path json;      // where the records go; empty: nowhere
  double seconds = 20;             // of taking turns, for each case
  bool peer = false;  // of one causal document: PyTorch's ring attention over Gloo takes turns too
  std::string python;
};

// "attention 8k", "model 8k", "packed 16k", "memory 4k" to "memory 64k", "tiny" and "tiny one".
std::vector<std::string> bench_context_cases();

// `isograd bench context`: a training step (or one layer's attention) of one batch on context ranks, beside
// one rank on the whole batch, by turns in one process, a thread a rank; memory beyond the model's. Medians,
// the least of all turns, and the median of the ratios of turns that followed each other. Records as above,
// with units "ms" and "MiB". Returns 1 when losses or gradient norms differ.
int bench_context(const BenchContextOptions& options);

struct BenchRankingOptions {
  std::vector<std::string> cases;  // empty: all but "tiny"
  std::filesystem::path json;
  double seconds = 24;  // of taking turns
  std::string python;   // has the package imbalanced-losses
};

// "smooth_ap", "thresholds", "large", and "tiny".
std::vector<std::string> bench_ranking_cases();

// `isograd bench ranking`: SmoothAP beside the package imbalanced-losses (time, peak memory), recall and
// partial AUC beside one sort of their scores, a large pool on two ranks, and what a forward moves. Returns 1
// when losses or gradient norms differ by more than 1e-4.
int bench_ranking(const BenchRankingOptions& options);

// Hidden verbs `isograd bench step-ours|optim-ours EXCHANGE RANKS STRATEGY`: our sides, started by the above.
// They start their ranks themselves.
int bench_step_ours(const std::filesystem::path& exchange, int ranks, const std::string& strategy);
int bench_optim_ours(const std::filesystem::path& exchange, int ranks, const std::string& strategy);

}  // namespace isograd
