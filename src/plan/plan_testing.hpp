// For tests: the configuration of a run that a candidate stands for.
#pragma once

#include "plan/problem.hpp"
#include "train/config.hpp"

namespace isograd::planner {

inline RunConfig config_of(const DecoderConfig& shape, const Work& work, const Candidate& candidate) {
  RunConfig config;
  config.model.shape = shape;
  config.data.pack_length = work.sequence;
  config.batch.packs_per_step = work.samples();
  config.batch.packs_per_micro_batch = candidate.micro_batch;
  config.train.dtype = work.precision == Precision::kBFloat16 ? "bfloat16" : "float32";
  auto& parallel = config.parallel;
  parallel.strategy = name_of(candidate.strategy);
  if (candidate.strategy != Strategy::kBucketed) parallel.replicas = candidate.replicas;
  parallel.cp_ring = candidate.cp_ring, parallel.cp_ulysses = candidate.cp_ulysses;
  parallel.tp = candidate.tp, parallel.ep = candidate.ep, parallel.pp = candidate.pp;
  parallel.stages_per_rank = candidate.stages_per_rank;
  if (candidate.pp > 1) parallel.schedule = name_of(candidate.schedule);
  parallel.sequence_parallel = candidate.sequence_parallel, parallel.reduce_once = candidate.reduce_once;
  parallel.checkpoint_activations = candidate.checkpoint;
  parallel.reshard_after_forward = candidate.reshard;
  parallel.share_parameters = candidate.share_parameters ? "on" : "off";
  parallel.bucket_bytes = candidate.bucket_bytes;
  return config;
}

}  // namespace isograd::planner
