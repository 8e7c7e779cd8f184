// Plans as configurations that `train` runs, and configurations as work.
#include <fmt/format.h>

#include <algorithm>

#include "base/files.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "model/hf.hpp"
#include "plan/problem.hpp"
#include "train/build.hpp"

namespace isograd::planner {
namespace {

// fp32 numbers of the optimizer for each parameter.
int states_of(const RunConfig& config) {
  if (config.optimizer.kind == "adamw") return 2;
  return config.optimizer.momentum > 0 ? 1 : 0;
}

void set_optimizer(RunConfig& config, int states) {
  if (states_of(config) == states) return;
  if (states > 2)
    refuse("states", fmt::format("{} numbers of the optimizer for each parameter", states),
           "0 to 2: isograd trains by SGD, SGD with momentum or AdamW", "Plan with one of them");
  constexpr double kMomentum = 0.9;
  config.optimizer.kind = states == 2 ? "adamw" : "sgd";
  config.optimizer.momentum = states == 1 ? kMomentum : 0;
}

// The keys from which configured_shape() gets the layers without experts.
void set_dense_layers(RunConfig& config) {
  std::vector<std::int64_t> dense;
  dense.swap(config.model.shape.experts.dense_layers);
  std::int64_t leading = 0;
  while (leading < std::ssize(dense) && dense[std::size_t(leading)] == leading) ++leading;
  for (const std::int64_t first : {std::int64_t{0}, leading})
    for (std::int64_t every = 1; every <= config.model.shape.layers; ++every) {
      config.model.dense_layers = first, config.model.experts_every = every;
      if (configured_shape(config).experts.dense_layers == dense) return;
    }
  refuse("the model", "experts in layers that no keys of a configuration describe",
         "experts in every n-th layer, behind leading layers without (model.experts_every, "
         "model.dense_layers)",
         "Train it from its Hugging Face directory, with its weights");
}

void set_shape(RunConfig& config, const DecoderConfig& shape) {
  config.model.shape = shape;
  if (shape.experts.count > 0)
    set_dense_layers(config);
  else
    config.model.shape.experts = {};
}

// The configuration that the plan's is made from.
RunConfig without_layout(const ModelShape& model, std::int64_t sequence) {
  RunConfig config;
  if (model.file.extension() == ".toml") {
    config = load_config(model.file);
  } else if (model.file.empty()) {
    set_shape(config, decoder_of(model));
  } else {
    const bool folder = fs::is_directory(model.file);
    const fs::path directory = folder ? model.file : model.file.parent_path(),
                   file = folder ? model.file / "config.json" : model.file;
    if (fs::exists(directory / "model.safetensors") || fs::exists(directory / "model.safetensors.index.json"))
      config.model.load = directory.string();
    else
      set_shape(config, parse_hf_config(read_file(file), file));
  }
  DecoderConfig& shape = config.model.shape;
  if (config.model.load.empty() && shape.rope_scaling.kind != "dynamic")
    shape.max_positions = std::max(shape.max_positions, sequence);
  return config;
}

}  // namespace

Work work_of(const RunConfig& config) {
  if (config.model.lora.rank > 0)
    refuse("model.lora.rank", std::to_string(config.model.lora.rank), "0: the planner trains all parameters",
           "Set model.lora.rank = 0");
  const auto precision = std::ranges::find(kPrecisionNames, config.train.dtype);
  return {.tokens = double(config.batch.packs_per_step) * double(config.data.pack_length),
          .sequence = config.data.pack_length,
          .precision = static_cast<Precision>(precision - std::begin(kPrecisionNames)),
          .fp32_gradients = config.train.fp32_gradients,
          .states = states_of(config)};
}

void set_layout(RunConfig& config, const Cluster& cluster, const Work& work, const Candidate& candidate) {
  const RunConfig usual;
  config.data.pack_length = work.sequence;
  config.batch = usual.batch;
  config.batch.packs_per_step = work.samples();
  config.batch.packs_per_micro_batch = candidate.micro_batch;
  config.loss.fused = usual.loss.fused;
  config.train.dtype = name_of(work.precision);
  config.train.fp32_gradients = work.fp32_gradients;
  auto& parallel = config.parallel;
  const double timeout = parallel.timeout_seconds;
  parallel = usual.parallel;
  parallel.timeout_seconds = timeout;
  parallel.strategy = name_of(candidate.strategy);
  if (candidate.strategy != Strategy::kBucketed) parallel.replicas = candidate.replicas;
  parallel.cp_ring = candidate.cp_ring, parallel.cp_ulysses = candidate.cp_ulysses;
  parallel.tp = candidate.tp, parallel.ep = candidate.ep, parallel.pp = candidate.pp;
  parallel.stages_per_rank = candidate.stages_per_rank;
  if (candidate.schedule != Schedule::kNone) parallel.schedule = name_of(candidate.schedule);
  parallel.sequence_parallel = candidate.sequence_parallel;
  parallel.reduce_once = candidate.reduce_once;
  parallel.checkpoint_activations = candidate.checkpoint;
  parallel.reshard_after_forward = candidate.reshard;
  parallel.share_parameters = candidate.share_parameters ? "on" : "off";
  parallel.bucket_bytes = candidate.bucket_bytes;
  parallel.device = cluster.host_memory ? "cpu" : "cuda";
  // Between hosts MPI alone is there; inside one `auto` is NCCL for GPUs, else shared memory.
  if (candidate.ranks > cluster.per_host) parallel.backend = "shm+mpi";
}

std::string to_toml(const Plan& plan, const Planned& planned) {
  const Candidate& candidate = planned.candidate;
  if (!plan.model.gated)
    refuse("the model", "a feed-forward network of two matrices", "three (SwiGLU), which isograd trains",
           "Plan with gated = true");
  RunConfig config = without_layout(plan.model, plan.work.sequence);
  set_optimizer(config, plan.work.states);
  set_layout(config, plan.cluster, plan.work, candidate);
  const RunConfig usual;
  if (config.run.directory == usual.run.directory) config.run.directory = "runs/plan";
  const std::string text = fmt::format(
      "# {}, on {} ranks of {}, by isograd plan: {:.4g} s a step, {:.2f} GiB a rank.\n"
      "# isograd train THIS.toml --ranks {}; isograd verify THIS.toml --ranks {} proves its gradient.\n\n{}",
      to_text(candidate), candidate.ranks, printable(plan.cluster.name), planned.seconds.value,
      planned.bytes.value / (1 << 30), candidate.ranks, candidate.ranks, isograd::to_toml(config));
  check_but_devices(parse_config(text, "the plan's configuration"), candidate.ranks);
  return text;
}

}  // namespace isograd::planner
