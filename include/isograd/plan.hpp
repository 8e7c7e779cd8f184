// Plans: what a strategy costs in bytes, computed from formulas without running anything.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>
#include <string>

namespace isograd {

// Bytes of one parameter, by what they hold.
struct ElementBytes {
  int parameter = 2;  // what the model computes with
  int gradient = 2;   // what is summed over ranks and read by the optimizer
  int master = 4;     // the copy that is updated; 0 where that is the parameter itself
  int state = 8;      // of the optimizer: two moments of AdamW in fp32

  // kΨ of the ZeRO paper: what stage 1 shards.
  int optimizer() const { return master + state; }
  int all() const { return parameter + gradient + optimizer(); }
};

// Data parallelism over `shards` × `replicas` ranks (dp_shard × dp_replicate).
struct DataParallelPlan {
  std::int64_t numel = 0;  // Ψ: elements of all trainable parameters, with the padding of their flat storage
  ElementBytes bytes{};
  int stage = 0;  // ZeRO: 0 to 3
  int shards = 1;
  int replicas = 1;
  bool share_parameters = false;   // one copy between the ranks of a shard group; states sharded at least
  bool reduce_once = false;        // stages 2 and 3 keep whole gradients until the last micro-batch
  std::int64_t micro_batches = 1;  // G, of a step
  // Stage 3: elements (of numel) that stay whole from forward to the end of backward, gathered once for both.
  std::int64_t whole = 0;
  // Experts that are dealt to ranks: elements, of numel and of whole, of which `dealt_copies` ranks have the
  // same. These sum them and, from stage 1 on, keep shards of them, whatever shards and replicas there are of
  // the rest.
  std::int64_t dealt = 0, dealt_whole = 0;
  int dealt_copies = 1;
};

// Bytes that a rank keeps from step to step. Of memory that ranks share each counts its part.
struct PersistentBytes {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t master = 0;
  std::int64_t state = 0;

  std::int64_t total() const { return parameters + gradients + master + state; }
  PersistentBytes& operator+=(const PersistentBytes& more);
};

// Rajbhandari et al. 2020 ("ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"), with Ψ
// elements, N shards and bytes p, g, k = master + state of each:
//   stage 0   (p + g + k)Ψ        16Ψ for bf16 with fp32 masters and moments
//   stage 1   (p + g)Ψ + kΨ/N     4Ψ + 12Ψ/N
//   stage 2   pΨ + (g + k)Ψ/N     2Ψ + 14Ψ/N
//   stage 3   (p + g + k)Ψ/N      16Ψ/N
//   shared    gΨ + (p + k)Ψ/N     one copy of the parameters between N ranks; (p + g + k)Ψ/N with stages 2
//   and 3
// With reduce_once gradients are whole: gΨ. Of dealt elements the same with N = dealt_copies. ConfigError on
// numbers that make no plan.
PersistentBytes persistent_bytes(const DataParallelPlan& plan);

// Bytes that a rank sends in a step, by what for. An algorithm that moves the least is assumed, as the paper
// does: a reduce-scatter or all-gather of n bytes over N ranks sends n(N − 1)/N, an all-reduce twice that.
struct TrafficBytes {
  double reduce = 0;     // gradients, within the shard group (stage 0: to all of it and back)
  double gather = 0;     // parameters, within the shard group
  double replicate = 0;  // sums of a shard's gradients over the replicas, once a step

  double total() const { return reduce + gather + replicate; }
  TrafficBytes& operator+=(const TrafficBytes& more);
};

// With G micro-batches, in elements times (N − 1)/N:
//   stage 0   2Ψ         gradients, once a step
//   stage 1   Ψ + Ψ      gradients there, parameters back
//   stage 2   GΨ + Ψ     each micro-batch's gradients are reduced; reduce_once: Ψ + Ψ
//   stage 3   GΨ + 2GΨ   parameters are gathered for forward and for backward; reduce_once: Ψ + 2GΨ; of what
//                        stays whole in between (`whole`) one gather less in each micro-batch
//   shared    Ψ          parameters need not go anywhere; GΨ with stages 2 and 3
// over R replicas in addition 2Ψ/N · (R − 1)/R, stage 0 over all N·R ranks at once. Of dealt elements the
// same with N = dealt_copies and R = 1; what the exchange of tokens with the experts' ranks sends is not in
// it.
TrafficBytes traffic_bytes(const DataParallelPlan& plan);

// "2Ψ + 14Ψ/N" for the plan's bytes, and for its traffic "(2Ψ + 2Ψ)(N - 1)/N"; Ψw: plan.whole. With dealt
// elements Ψ, Ψw and N are those of the rest, and Ψe, Ψew and Ne those of the dealt ones.
std::string persistent_formula(const DataParallelPlan& plan);
std::string traffic_formula(const DataParallelPlan& plan);

}  // namespace isograd
