// The keys of every kind of run; values checked alone, together and against the ranks; reading and writing.
#include "train/config_table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <utf8.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "train/build.hpp"
#include "train/device.hpp"
#include "train/other_names.hpp"
#include "train/rules.hpp"
#include "train/toml_file.hpp"

namespace isograd {
namespace key_table {
namespace {

// Keys that every kind of run has.
std::vector<ConfigKey> common_keys() {
  return {
      KEY(run.directory, not_empty(), R"(Folder of this run: report, metrics, TensorBoard events and
          checkpoints. Relative paths start at the working directory.)",
          Ranks::kMayDiffer),
      KEY(run.json_log, R"(File for the metrics as JSON lines. Empty: `metrics.jsonl` in
          `run.directory`.)",
          Ranks::kMayDiffer),
      KEY(run.seed, at_least(0), R"(Initial weights, the order of the data, the choice of validation documents
          and generated text follow from it, whatever the number of ranks.)"),
      KEY(run.memory,
          "Measure what each rank keeps and sends, and print it next to the formulas (docs/memory.md)."),
      KEY(run.peak_tflops, "TFLOP/s", at_least(0), R"(Peak of a rank's device in `train.dtype`, from its data
          sheet: the model FLOPs utilisation (MFU) is relative to it. 0: the peak is measured with matrix
          products on all ranks at once when the run starts; if three rounds of them differ by more than a
          factor of 1.5 there is no MFU.)"),
      KEY(run.on_signal.usr1, one_of({"stop", "save", "ignore"}), R"(On SIGUSR1, which batch systems send
          ahead of a job's end, all ranks save after the same step and `stop`, or go on (`save`).)"),
      KEY(run.on_signal.usr2, one_of({"stop", "save", "ignore"}), "The same on SIGUSR2."),

      KEY(data.validation_fraction, fraction(),
          "Fraction of the documents that is held out for the validation loss. 0: none."),

      KEY(batch.max_tokens_per_rank, "tokens", at_least(0, kManyTokens), R"(Tokens of one micro-batch (for
          videos: patches) that fit into the memory of a rank, after splitting over context-parallel ranks. A
          step with more on any rank is refused on all ranks before it is made. 0: no limit.)"),

      KEY(model.load, R"(Hugging Face directory to start from (`config.json`, `model.safetensors` or its
          sharded index); a checkpoint is one too. Its `config.json` then describes the model, and the other
          keys of this section are refused. Empty: fresh weights by `run.seed`.)"),
      KEY(model.kind, one_of({"decoder", "scorer", "video"}), R"(`decoder`: a language model on text.
          `scorer`: a multilayer perceptron that ranks the rows of `data.table` (`docs/ranking.md`); it uses
          none of the keys of text. `video`: a diffusion transformer on `video.files` (`docs/video.md`),
          described by `hidden`, `layers`, `heads`, `head_dim`, `feed_forward` and `initializer_range`.)"),

      KEY(loss.kind, one_of({"token_mean", "sample_mean", "weighted_mean", "fixed", "none"}), R"(Denominator
          of the sum over tokens: the targets of the whole step, each sample's own tokens and then the
          samples, the weights, `loss.denominator`, or nothing. It is counted over all ranks and micro-batches
          before any backward, so that the loss does not depend on how the batch is split
          (`docs/losses.md`).)"),
      KEY(loss.denominator, at_least(0), "Denominator for `fixed`. 0: not given."),
      KEY(loss.fused, one_of({"auto", "on", "off"}), R"(Whether the output projection and the loss are
          computed together, tile by tile, so that the logits of a micro-batch never exist as a whole. `auto`:
          if they would take more than 256 MiB. A speed and memory option.)"),
      KEY(loss.normalise_over, R"(Data axes inside which the mean is taken. Without `dp_replicate` the loss is
          the mean of per-replica means: another loss, which depends on how samples are assigned to the
          replicas. In `bucketed` and `naive` every rank is a replica.)"),
      KEY(loss.dp_replicate_reduction, one_of({"derived", "sum", "mean"}), R"(`derived` (default): follows
          from `normalise_over`. An explicit value must agree with it: `sum` with one mean over all replicas,
          `mean` with a mean of per-replica means.)"),

      KEY(train.steps, "steps", at_least(1, kManySteps), "Optimizer steps of the whole run."),
      KEY(train.dtype, one_of({"float32", "bfloat16", "float64"}),
          "Number type of parameters and gradients. With `bfloat16` the optimizer keeps `float32` masters."),
      KEY(train.fp32_gradients, R"(Whether gradients of `bfloat16` parameters are kept, added up and reduced
          in `float32`. Off: half the memory and traffic, more rounding.)"),
      KEY(train.max_norm, at_least(0),
          "The gradient is scaled down to this norm where it is larger. 0: no clipping."),
      KEY(train.clip_groups, R"(Groups of parameters that are clipped separately, each by its own norm:
          `PATTERN: LIMIT`, a pattern of names in which `*` stands for any text and a norm above 0. A
          parameter may be in one of them; `train.max_norm` is then the limit of all others together
          (`docs/norm.md`).)"),
      KEY(train.part_norms, one_of({"off", "groups", "layers", "parameters"}), R"(Norms that each step logs in
          addition to the norm of the whole gradient, all before clipping: `groups`, experts and the rest;
          `layers`; or each parameter's. They travel with the norm and cost a pass over the gradients
          (`docs/norm.md`).)"),
      KEY(train.evaluate_every, "steps", at_least(0, kManySteps),
          "How often the validation loss is measured. 0: only at the end."),
      KEY(train.evaluate_packs, "packs", at_least(1, kManyTokens),
          "Maximum number of packs of the validation documents that are measured; for videos, of videos."),
      KEY(train.on_non_finite, one_of({"stop", "skip"}), R"(If a loss or gradient is not finite, nothing is
          updated on any rank; then the run stops (exit status 1) or skips that step.)"),

      KEY(optimizer.kind, one_of({"adamw", "sgd"}),
          "AdamW (Loshchilov and Hutter 2019) or stochastic gradient descent."),
      NAMED_KEY("optimizer.beta1", optimizer.adamw.beta1, fraction(), "Decay of AdamW's first moment."),
      NAMED_KEY("optimizer.beta2", optimizer.adamw.beta2, fraction(), "Decay of AdamW's second moment."),
      NAMED_KEY("optimizer.epsilon", optimizer.adamw.epsilon, above(0), "Epsilon in AdamW's denominator."),
      NAMED_KEY("optimizer.weight_decay", optimizer.adamw.weight_decay, at_least(0),
                "Weight decay of matrices; norms and biases do not decay. Decoupled with AdamW."),
      KEY(optimizer.groups, R"(Groups of parameters with a learning rate and a weight decay of their own:
          `PATTERN: rate=FACTOR weight_decay=NUMBER`, one of the two or both. In a pattern of names `*` stands
          for any text. The rate of the schedule is multiplied by the factor; a weight decay that is named
          applies to all of the group, norms and biases too. A parameter may be in one group
          (`docs/cli.md`).)"),
      KEY(optimizer.momentum, fraction(), "SGD momentum."),

      KEY(schedule.kind, one_of(kScheduleKinds), R"(Learning rate after the warm-up: `cosine` and `linear` go
          down to `schedule.floor` until the end of the run; `constant`, and in the end down over
          `schedule.decay` steps if there are any; `wsd` (warm-up, stable, decay), the same with a decay
          that must be given.)"),
      KEY(schedule.peak, above(0), "The highest learning rate."),
      KEY(schedule.warmup, "steps", at_least(0, kManySteps),
          "Steps over which the learning rate rises linearly from 0 to its peak."),
      KEY(schedule.floor, at_least(0, 1), R"(Where the learning rate ends, as a fraction of the peak; not of
          a constant one without a decay.)"),
      KEY(schedule.decay, "steps", at_least(0, kManySteps), R"(With `constant` and `wsd`: the last steps of
          the run, over which the learning rate goes down to `schedule.floor`. With the warm-up no more than
          `train.steps`.)"),
      NAMED_KEY("schedule.decay_shape", schedule.shape,
                {.choices = kDecayShapes, .aliases = {{"sqrt", "1-sqrt"}}},
                R"(How it goes down over `schedule.decay` steps: by the part p of them that has passed, as
          1 - p, (1 + cos(pi p)) / 2 or 1 - sqrt(p) (`docs/cli.md`).)"),

      KEY(parallel.strategy,
          {.choices = strategy_names(),
           .aliases = {std::begin(kStrategyAliases), std::end(kStrategyAliases)}},
          R"(What each rank keeps, and how gradients are summed:
          `naive`, one by one after backward, for comparison; `overlapped`, one by one during backward;
          `bucketed`, in buckets during backward; `zero1`, each rank keeps a shard of the optimizer's state;
          `zero2`, of the gradients too; `zero3`, of the parameters too, each block gathered while it is
          used. `ddp` is another name of `bucketed`, `fsdp` of `zero3`.)"),
      KEY(parallel.replicas, at_least(1, 1e6), R"(Copies of the model among the ranks of a sharded strategy
          (`zero1`, `zero2`, `zero3`); each is sharded over ranks / replicas of them. Must divide the
          ranks.)"),
      KEY(parallel.cp_ring, at_least(1, 1e6), R"(Ranks that share each micro-batch and pass keys and values
          round a ring: documents are split over them by cost. Times `parallel.cp_ulysses` and
          `parallel.replicas` it must divide the ranks; packs are assigned to the remaining axis.)"),
      KEY(parallel.cp_ulysses, at_least(1, 1e6), R"(Ranks that share each micro-batch and exchange tokens for
          heads. Must divide `model.heads`, and `model.key_value_heads` or be a multiple of it.)"),
      KEY(parallel.tp, at_least(1, 1e6), R"(Tensor parallelism: ranks that share the matrices of one model and
          see the same packs. Heads, features and the vocabulary are sharded over them. At most `model.heads`;
          times the other axes it must divide the ranks (`docs/tensor-parallelism.md`).)"),
      KEY(parallel.sequence_parallel, R"(Sequence parallelism with `parallel.tp`: between the matrix products
          each of these ranks has some of the tokens, so that norms and residuals are computed once and kept
          once. Off: each rank has all of them.)"),
      KEY(parallel.tensor_overlap, one_of({"none", "weights", "tokens"}), R"(With `parallel.tp`, what is
          computed while tokens travel between these ranks: `weights`, in backward the gradients of weights;
          `tokens`, these and products of the local tokens. A speed option (`docs/tensor-parallelism.md`).)"),
      KEY(parallel.ep, at_least(1, 1e6), R"(Expert parallelism: ranks over which experts are sharded, among
          those that see different tokens. Tokens travel to their experts and back (`docs/experts.md`). At
          most `model.experts`; must divide the ranks.)"),
      KEY(parallel.expert_overlap, one_of({"none", "shared", "halves"}), R"(With `parallel.ep`, what is
          computed while tokens travel to experts: `shared`, the shared expert; `halves`, that and one half of
          the tokens while the other half travels. A speed option (`docs/experts.md`).)"),
      KEY(parallel.pp, at_least(1, 1e6), R"(Pipeline parallelism: ranks that hold consecutive stages of layers
          of one model and see the same packs (`docs/pipeline-parallelism.md`). At most `model.layers`; times
          the other axes it must divide the ranks.)"),
      KEY(parallel.schedule, one_of({"one-after-another", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}),
          R"(With `parallel.pp`: the order of forwards and backwards of micro-batches on a rank (`isograd
          schedule` draws it). A speed and memory option.)"),
      KEY(parallel.stages_per_rank, at_least(1, 1e6),
          "With `parallel.pp`: stages on each rank; 1, but 2 or more with `interleaved`, and 2 with `zb-v`."),
      KEY(parallel.cp_fsdp_mode, one_of({"all", "ulysses_only", "ring_only", "none"}), R"(Context-parallel
          axes over which a sharded strategy shards, in addition to the ranks with other packs; over the other
          axes it keeps copies. The gradient is the same.)"),
      KEY(parallel.share_parameters, one_of({"auto", "on", "off"}), R"(Whether ranks of one host share one
          copy of the parameters, each updating its shard in place. `auto`: if the backend has memory that all
          ranks reach (`shm`), except for `naive` and `overlapped`, and not on GPUs.)"),
      KEY(parallel.reduce_once, R"(With `zero2` and `zero3`: keep whole gradients until the last micro-batch
          instead of reducing each one's.)"),
      KEY(parallel.bucket_bytes, "bytes", at_least(1, 1e12),
          "Gradients that are communicated together. A speed option."),
      KEY(parallel.first_bucket_bytes, "bytes", at_least(0, 1e12), R"(Size of the first bucket of a backward,
          small so that communication begins early. 0: like the others. A speed option.)"),
      KEY(parallel.overlap, "Whether buckets are reduced inside backward. A speed option."),
      KEY(parallel.prefetch, "With `zero3`: gather the next block while this one computes. A speed option."),
      KEY(parallel.reshard_after_forward, R"(With `zero3`: free blocks after forward and gather them again for
          backward. `false` trades memory for communication.)"),
      KEY(parallel.checkpoint_activations,
          "With `zero3`: keep only the blocks' inputs and compute their forward again in backward."),
      KEY(parallel.gather_limit_bytes, "bytes", at_least(0, 1e15), R"(With `zero3`: limit for parameters that
          are whole at the same time; a block that does not fit is named before training. 0: no limit.)"),
      KEY(parallel.timeout_seconds, "seconds", {.least = 0, .most = 1e6, .above_least = true},
          "The longest wait for another rank, after which it counts as lost (exit status 3)."),
      KEY(parallel.device, one_of({"cpu", "cuda", "auto"}), R"(Device of models, gradients and the optimizer's
          state (`docs/gpu.md`): `cpu`; `cuda`, a GPU for each rank of a host; `auto`, `cuda` if LibTorch
          finds a GPU.)"),
      KEY(parallel.backend, one_of({"auto", "shm", "mpi", "shm+mpi", "nccl"}), R"(Backend of communication
          between ranks: `shm`, the shared memory of one host; `mpi`, over several hosts as well, in a build
          that found an MPI; `shm+mpi`, shared memory within each host and MPI between them (`docs/hosts.md`);
          `nccl`, between the GPUs of one host. `auto`: `nccl` if ranks are on GPUs, otherwise `shm`.)"),
      KEY(parallel.cuda_graphs, R"(On one GPU: forward and backward of a decoder without experts are recorded
          as CUDA graphs and replayed (`docs/gpu.md`).)"),
      KEY(parallel.offload, R"(On a GPU: a rank's summed gradients, masters and optimizer state are kept in
          host memory, and the CPU computes norms and updates (`docs/gpu.md`). Refused on the CPU.)"),

      KEY(checkpoint.every, "steps", at_least(0, kManySteps),
          "How often a checkpoint is saved. 0: only at the end."),
      KEY(checkpoint.every_seconds, "seconds", at_least(0, 1e9), R"(Save as well once so much time
          has passed since the last checkpoint, after the step that is then under way. Rank 0's clock decides.
          0: never.)"),
      KEY(checkpoint.keep, at_least(1, 1e9), "Number of the newest checkpoints that are kept."),
      KEY(checkpoint.keep_best, at_least(0, 1e9), R"(Number of checkpoints with the lowest validation
          loss that are kept in addition. A step whose validation loss is among these is saved.)"),
      KEY(checkpoint.resume, R"(Checkpoint to continue from, bit for bit on as many ranks with as many
          threads: its folder, or in `run.directory` the `latest` or the `best` by validation loss. `auto`:
          the latest, or a new run where none is complete, so that one command starts and continues
          (`docs/preemption.md`). Empty: a new run.)"),

      KEY(verify.at_end, R"(Whether a finished run proves that its gradient is the one that a single process
          has on the whole batch. It then ends with the parity line and, if parity is broken, exit status 1.
          Ctrl-C skips the proof; the last checkpoint is saved before it.)"),
      KEY(verify.every, "steps", at_least(0, kManySteps), R"(How often a micro-sized step with the weights of
          that moment is proven the same way while training (`train --verify-every`). Parity broken stops the
          run, exit status 1. 0: never.)"),
      KEY(verify.checksums_every, "steps", at_least(0, kManySteps), R"(How often ranks that keep the same
          weights compare checksums of them. A difference names the first parameter and the ranks and stops
          the run, exit status 1. 0: never.)"),
  };
}

}  // namespace
}  // namespace key_table

namespace {

// Keys by section. Within a section: keys of text, of all kinds, of the other kinds.
std::vector<ConfigKey> make_keys() {
  std::vector<ConfigKey> keys = text_kind().keys();
  const auto add = [&](std::vector<ConfigKey> more) { std::ranges::move(more, std::back_inserter(keys)); };
  add(key_table::common_keys());
  for (const TaskKind* kind : task_kinds())
    if (kind != &text_kind()) add(kind->keys());
  std::ranges::stable_sort(keys, {}, [](const ConfigKey& key) {
    return std::ranges::find(config_sections(), key.section(), &ConfigSection::name);
  });
  return keys;
}

bool decays_at_end(const Schedule& schedule) {
  return schedule.kind == Schedule::Kind::kConstant || schedule.kind == Schedule::Kind::kWsd;
}

// Keys that have a value but no effect with the values of other keys.
std::vector<UnusedKeys> unused_in(const RunConfig& config) {
  std::vector<UnusedKeys> rules;
  const auto add = [&](bool unused, std::initializer_list<const char*> prefixes, const std::string& reason,
                       const std::vector<std::string>& exceptions = {}) {
    if (!unused) return;
    for (const char* prefix : prefixes) rules.push_back({prefix, reason, exceptions});
  };
  const auto& parallel = config.parallel;
  add(config.data.shards.empty(), {"data.end_of_text"}, "data.shards is empty, and text has its own marks");
  add(!config.model.load.empty(), {"model."}, "model.load is given, and its config.json describes the model",
      {"model.load", "model.kind", "model.lora.rank", "model.lora.alpha", "model.lora.targets",
       "model.lora.dropout", "model.lora.b_range"});
  add(config.model.lora.rank == 0, {"model.lora."}, "model.lora.rank is 0: no adapter", {"model.lora.rank"});
  add(config.model.shape.rope_scaling.kind == "default", {"model.rope_scaling."},
      "model.rope_scaling.kind is \"default\": no scaling", {"model.rope_scaling.kind"});
  add(parallel.tp == 1, {"parallel.sequence_parallel", "parallel.tensor_overlap"}, "parallel.tp is 1");
  add(stage_of(parallel.strategy) == 0, {"parallel.replicas", "parallel.cp_fsdp_mode"},
      fmt::format("parallel.strategy is \"{}\", which does not shard", parallel.strategy));
  add(parallel.ep == 1, {"parallel.expert_overlap"}, "parallel.ep is 1");
  add(parallel.pp == 1, {"parallel.schedule", "parallel.stages_per_rank"}, "parallel.pp is 1");
  const bool at_end = decays_at_end(config.schedule);
  add(!at_end, {"schedule.decay"},
      fmt::format("schedule.kind is {}, which goes down over all steps after the warm-up",
                  toml_text(key_table::to_value(config.schedule.kind))));
  add(at_end && config.schedule.decay == 0, {"schedule.decay_shape"}, "schedule.decay is 0: no decay");
  add(config.loss.balance == 0, {"loss.balance_"}, "loss.balance is 0: no balance loss");
  const TaskKind& own = kind_of(config);
  rules.insert(rules.end(), own.unused.begin(), own.unused.end());
  for (const TaskKind* kind : task_kinds())
    if (kind != &own) rules.insert(rules.end(), kind->of_no_other.begin(), kind->of_no_other.end());
  add(config.optimizer.kind != "sgd", {"optimizer.momentum"}, "optimizer.kind is not \"sgd\"");
  add(config.optimizer.kind != "adamw", {"optimizer.beta", "optimizer.epsilon"},
      "optimizer.kind is not \"adamw\"");
  return rules;
}

bool contains(const std::vector<std::string>& list, const std::string& text) {
  return std::ranges::find(list, text) != list.end();
}

std::string type_name(const ConfigValue& value) {
  static const char* const names[] = {"true or false", "integer", "number", "text", "list of texts"};
  return names[value.index()];
}

// "integer, at least 1"; with what it may be.
std::string allowed_text(const ConfigKey& key) {
  const Allowed& allowed = key.allowed;
  std::string text = type_name(key.get(RunConfig{}));
  if (!allowed.choices.empty()) {
    std::vector<std::string> choices;
    for (const auto& choice : allowed.choices) choices.push_back(toml_text(choice));
    return fmt::format("{}{}", choices.size() == 1 ? "" : "one of ", fmt::join(choices, ", "));
  }
  if (allowed.not_empty) text += ", not empty";
  const bool below = allowed.most < key_table::kNoLimit;
  if (allowed.least != -key_table::kUnbounded)
    text += fmt::format(", {} {}",
                        allowed.above_least ? "above"
                        : below             ? "from"
                                            : "at least",
                        allowed.least);
  if (below)
    text += fmt::format("{} {:.15g}",
                        allowed.below_most    ? " to below"
                        : allowed.above_least ? " and at most"
                                              : " to",
                        allowed.most);
  return key.unit.empty() ? text : text + " (" + key.unit + ")";
}

// "an integer, at least 1": for a sentence.
std::string with_article(const std::string& text) {
  if (text.starts_with("integer")) return "an " + text;
  const bool is_noun = text.starts_with("number") || text.starts_with("text") || text.starts_with("list");
  return is_noun ? "a " + text : text;
}

// [loss] must declare one loss. For a contradiction the message explains both readings.
void check_loss(const RunConfig& config, const std::string& where) {
  const auto& loss = config.loss;
  const auto refuse_if = [&](bool wrong, std::string found, std::string expected, std::string action) {
    if (wrong) refuse(where, std::move(found), std::move(expected), std::move(action));
  };
  const bool fixed = loss.kind == "fixed", counted = !fixed && loss.kind != "none";
  refuse_if(fixed && loss.denominator == 0, "loss.kind = \"fixed\" without loss.denominator",
            "the number to divide by", "Set loss.denominator");
  refuse_if(!fixed && loss.denominator != 0,
            fmt::format("loss.kind = \"{}\" with loss.denominator = {:g}", loss.kind, loss.denominator),
            fmt::format("one of two readings: {}, or the sum divided by {:g}",
                        counted ? "a mean whose denominator is counted" : "a pure sum", loss.denominator),
            "Leave loss.denominator out for the first, or set loss.kind = \"fixed\" for the second");
  const std::vector<std::string> axes = {"dp_replicate", "dp_shard", "cp_ring", "cp_ulysses"};
  std::vector<std::string> seen;
  for (const auto& axis : loss.normalise_over) {
    refuse_if(axis == "tp" || axis == "pp" || axis == "ep", fmt::format("loss.normalise_over with {}", axis),
              "data axes only: dp_replicate, dp_shard, cp_ring, cp_ulysses",
              fmt::format("Leave {} out: its ranks see the same tokens, which would be counted twice", axis));
    refuse_if(!contains(axes, axis), fmt::format("loss.normalise_over with \"{}\"", axis),
              "dp_replicate, dp_shard, cp_ring, cp_ulysses", "Correct the axis");
    refuse_if(contains(seen, axis), fmt::format("loss.normalise_over with {} twice", axis), "each axis once",
              "Remove the repetition");
    seen.push_back(axis);
  }
  for (const auto& axis : axes)
    refuse_if(axis != "dp_replicate" && !contains(seen, axis),
              fmt::format("loss.normalise_over without {}", axis),
              "at least dp_shard, cp_ring and cp_ulysses",
              fmt::format("Add {}: a mean of means over it depends on how one batch was split; only replicas "
                          "(dp_replicate) may be normalised by themselves",
                          axis));
  const bool by_replica = normalises_by_replica(config);
  refuse_if(
      by_replica && !counted,
      fmt::format("loss.kind = \"{}\" with loss.normalise_over without dp_replicate", loss.kind),
      fmt::format(
          "one of two readings: the sum over all ranks divided by {}, or the mean of per-replica means",
          fixed ? fmt::format("{:g}", loss.denominator) : "nothing"),
      "Add dp_replicate for the first, or choose token_mean, sample_mean or weighted_mean for the second");
  refuse_if(loss.dp_replicate_reduction == (by_replica ? "sum" : "mean"),
            fmt::format("loss.dp_replicate_reduction = \"{}\" with {}", loss.dp_replicate_reduction,
                        by_replica ? "loss.normalise_over without dp_replicate"
                                   : "dp_replicate in loss.normalise_over"),
            "one of two readings: one mean over every token of the batch, with gradients summed over "
            "replicas; or the mean of per-replica means, which depends on how samples are assigned to "
            "the replicas",
            "Set loss.dp_replicate_reduction = \"sum\" and name dp_replicate in loss.normalise_over "
            "for the first; \"mean\" and leave it out for the second");
}

// The decay at the end of the run must be there for wsd, and fit between the warm-up and the end.
void check_schedule(const RunConfig& config, const std::string& where) {
  const Schedule& schedule = config.schedule;
  if (schedule.kind == Schedule::Kind::kWsd && schedule.decay == 0)
    refuse(where, "schedule.kind = \"wsd\" without schedule.decay", "the number of its last steps that decay",
           "Set schedule.decay, or schedule.kind = \"constant\"");
  const std::int64_t left = std::max<std::int64_t>(0, config.train.steps - schedule.warmup);
  if (decays_at_end(schedule) && schedule.decay > left)
    refuse(where, fmt::format("schedule.decay = {}", schedule.decay),
           fmt::format("at most {}: train.steps = {} without schedule.warmup = {}", left, config.train.steps,
                       schedule.warmup),
           "Shorten the decay or the warm-up, or raise train.steps");
}

// "organisation/name" of a repository on the Hugging Face Hub, unless it is a local folder.
std::optional<std::string> hub_id(const std::string& text) {
  std::string_view id = text;
  bool address = false;
  for (const std::string_view begin : {"https://huggingface.co/", "https://hf.co/", "hf://"})
    if (id.starts_with(begin)) id.remove_prefix(begin.size()), address = true;
  while (!id.empty() && id.back() == '/') id.remove_suffix(1);
  const auto slash = id.find('/');
  const auto names = [](std::string_view part) {
    const auto may_be_in = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
    };
    return !part.empty() && part.front() != '.' && std::all_of(part.begin(), part.end(), may_be_in);
  };
  if (slash == std::string_view::npos || !names(id.substr(0, slash)) || !names(id.substr(slash + 1)))
    return std::nullopt;
  std::error_code error;
  if (!address && fs::exists(fs::path(id.substr(0, slash)), error))
    return std::nullopt;  // a path that is wrong
  return std::string(id);
}

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

const std::vector<ConfigSection>& config_sections() {
  static const std::vector<ConfigSection> sections = {
      {"run", "The run as a whole."},
      {"run.on_signal", "Signals by which a user or a batch system tells a run to save."},
      {"data", "Data that the model learns from."},
      {"batch", "Size of a step and of its parts."},
      {"model", "The decoder language model: Llama to the letter, and its near relatives."},
      {"model.rope_scaling", "Rotary embedding for long contexts, as Hugging Face's `rope_scaling`."},
      {"model.lora", "A low-rank adapter of the decoder, which alone is trained."},
      {"video",
       "Videos and the diffusion transformer that learns from them (`model.kind = \"video\"`, "
       "`docs/video.md`)."},
      {"loss", "Who divides what (`docs/losses.md`)."},
      {"ranking", "The loss of a `scorer`, and what is measured of it."},
      {"train", "The loop around the step."},
      {"optimizer", "How a gradient becomes an update. The learning rate is `schedule`'s."},
      {"schedule", "The learning rate over the steps."},
      {"parallel", "How and where ranks work together. No key of this section changes the gradient."},
      {"checkpoint", "Saving and continuing."},
      {"verify", "The proof while training and at the end."},
      {"sample", "Text generated at the end."},
  };
  return sections;
}

std::string on_one_line(std::string_view description) {
  std::string text(description);
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos;)
    text.replace(at, text.find_first_not_of(" \n", at) - at, " ");
  return text;
}

std::optional<std::string> refusal(const ConfigKey& key, const ConfigValue& value) {
  const Allowed& allowed = key.allowed;
  if (auto text = std::get_if<std::string>(&value)) {
    if (allowed.not_empty && text->empty()) return "an empty text";
    if (!allowed.choices.empty() && !contains(allowed.choices, *text)) return toml_text(value);
    return std::nullopt;
  }
  double number = 0;
  if (auto integer = std::get_if<std::int64_t>(&value)) {
    number = static_cast<double>(*integer);
  } else if (auto real = std::get_if<double>(&value)) {
    if (!std::isfinite(*real)) return toml_text(value);
    number = *real;
  } else {
    return std::nullopt;
  }
  const bool low = allowed.above_least ? number <= allowed.least : number < allowed.least;
  const bool high = allowed.below_most ? number >= allowed.most : number > allowed.most;
  if (high && allowed.most >= key_table::kNoLimit)
    return fmt::format("{}, more than {:.16g}", toml_text(value), allowed.most);
  return low || high ? std::optional(toml_text(value)) : std::nullopt;
}

bool normalises_by_replica(const RunConfig& config) {
  return !contains(config.loss.normalise_over, "dp_replicate");
}

void check_together(const RunConfig& config, const std::string& where) {
  check_loss(config, where);
  check_schedule(config, where);
  clip_groups_of(config, where);
  parameter_groups_of(config, where);
  if (!config.data.text.empty() && !config.data.shards.empty())
    refuse(where, "both data.text and data.shards", "one of them",
           "Pack the text with `isograd data pack` and add the shards it writes, or leave one of "
           "the two empty");
  if (config.parallel.strategy == "naive" && config.parallel.share_parameters == "on")
    refuse(where, "parallel.share_parameters = \"on\" with parallel.strategy = \"naive\"",
           "a strategy whose ranks may keep one copy of the parameters",
           "Set parallel.strategy = \"bucketed\", \"zero1\", \"zero2\" or \"zero3\", or leave "
           "parallel.share_parameters out");
  if (config.parallel.backend == "nccl" && config.parallel.device == "cpu")
    refuse(where, "parallel.backend = \"nccl\" with parallel.device = \"cpu\"",
           "ranks on GPUs, which alone NCCL joins",
           "Set parallel.device = \"cuda\", or leave parallel.backend out");
  const std::vector<UnusedKeys> unused = unused_in(config);
  for (const UnusedKeys& rule : unused) {
    std::vector<std::string> names, values;
    for (const auto& key : config_keys()) {
      const ConfigValue value = key.get(config);
      if (value == key.get(RunConfig{}) || !key.name.starts_with(rule.prefix) ||
          contains(rule.exceptions, key.name))
        continue;
      names.push_back(key.name);
      values.push_back(fmt::format("{} = {}", key.name, toml_text(value)));
    }
    if (names.empty()) continue;
    const bool one = names.size() == 1;
    refuse(
        where,
        fmt::format("{}, which {} no effect: {}", fmt::join(values, ", "), one ? "has" : "have", rule.reason),
        "only keys that have an effect",
        fmt::format("Leave {} out", one ? names[0] : "these " + std::to_string(names.size())));
  }
}

void require_model_folder(const std::string& text, const std::string& where) {
  std::error_code error;
  if (fs::is_directory(text, error)) return;
  if (const auto id = hub_id(text)) {
    const std::string folder = "models/" + id->substr(id->find('/') + 1);
    refuse(
        where, fmt::format("\"{}\", no such folder", text),
        "a folder of a run, or with config.json and weights",
        fmt::format("Correct the path; if it is the name of a model on the Hugging Face Hub, fetch it with "
                    "`hf download {} --local-dir {}` and name {}",
                    *id, folder, folder));
  }
  refuse(where,
         fmt::format("\"{}\", {}", text, fs::exists(text, error) ? "which is no folder" : "no such folder"),
         "a Hugging Face directory (config.json and weights) or a checkpoint",
         fs::exists(text, error) ? "Name the folder that the file is in" : missing_path_action(text));
}

void check(const RunConfig& config, int ranks) {
  check_device(config, ranks);
  check_but_devices(config, ranks);
}

void check_but_devices(const RunConfig& config, int ranks) {
  if (!config.model.load.empty()) require_model_folder(config.model.load, "model.load");
  const LayoutNumbers layout = layout_numbers(config, ranks);
  check_axes(layout);
  const TaskKind& kind = kind_of(config);
  if (kind.check_ranks) kind.check_ranks(config, ranks);
  check(layout, {}, LayoutRule::kNobodyToShare, LayoutRule::kSamples);
}

// ---- reading and writing ----

namespace {

constexpr const char* kReference = "docs/configuration.md lists every key (isograd config --markdown)";
constexpr std::size_t kLongestFile = 1 << 20;

// Quotes a text for TOML: unprintable characters by number; bytes that are not UTF-8 stay.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  auto bad = utf8::find_invalid(text.begin(), text.end());
  for (auto at = text.begin(); at != text.end();) {
    if (at == bad) {
      result += *at++;
      bad = utf8::find_invalid(at, text.end());
      continue;
    }
    const auto begin = at;
    const std::uint32_t character = utf8::next(at, text.end());
    const std::string bytes(begin, at);
    if (bytes == "\"" || bytes == "\\")
      result += '\\' + bytes;
    else if (bytes == "\n" || bytes == "\t")
      result += bytes == "\n" ? "\\n" : "\\t";
    else
      result += printable(bytes) == bytes ? bytes : fmt::format("\\u{:04X}", character);
  }
  return result + '"';
}

std::string_view last_name(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// toml++ limits the depth of nested values but not of dotted keys, and frees what it has read by recursion.
void check_keys(std::string_view text, const std::string& file) {
  constexpr int kLongestKey = 100;  // dots; no key has more than one
  int dots = 0;
  std::size_t line = 1;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"' || c == '\'') {  // a string: one of several lines, or of one
      const std::string_view three = text.substr(i, 3);
      const bool several = three == "\"\"\"" || three == "\'\'\'";
      for (i += several ? 3 : 1; i < text.size(); ++i) {
        if (text[i] == '\n') ++line;
        if (text[i] == '\\' && c == '"')
          ++i;
        else if (several ? text.substr(i, 3) == three : text[i] == c || text[i] == '\n')
          break;
      }
      if (several) i += 2;
    } else if (c == '#') {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '.') {
      if (++dots > kLongestKey)
        refuse(fmt::format("{}:{}", file, line), fmt::format("a key of more than {} parts", kLongestKey),
               "a key as docs/configuration.md lists them", "Fix that line");
    } else if (c != ' ' && c != '\t' && c != '_' && c != '-' &&
               !std::isalnum(static_cast<unsigned char>(c))) {
      dots = 0;
    }
    if (c == '\n') ++line;
  }
}

void check_length(std::size_t bytes, const std::string& file) {
  if (bytes > kLongestFile)
    refuse(file, fmt::format("{} bytes", bytes), fmt::format("a configuration of at most {}", kLongestFile),
           "Name a TOML file, such as examples/first_light.toml");
}

const ConfigKey* find_key(std::string_view name) {
  const auto found = std::ranges::find(config_keys(), name, &ConfigKey::name);
  return found == config_keys().end() ? nullptr : &*found;
}

bool is_section(std::string_view name) {
  return std::ranges::find(config_sections(), name, &ConfigSection::name) != config_sections().end();
}

[[noreturn]] void unknown(const std::string& where, const std::string& name, bool table) {
  const std::string section = table ? "" : name.substr(0, name.rfind('.') + 1);
  std::vector<std::string> candidates, known;  // known: in this section
  if (table)
    for (const auto& each : config_sections()) candidates.push_back(each.name);
  else
    for (const auto& each : config_keys()) candidates.push_back(each.name);
  for (const auto& each : candidates)
    if (table || (!section.empty() && each.starts_with(section) &&
                  each.find('.', section.size()) == std::string::npos))
      known.push_back(each.substr(section.size()));
  const std::string expected = table           ? "one of the sections {0}"
                               : known.empty() ? "section.key"
                                               : "a key of [{1}]: {0}";
  const auto theirs = table ? our_section(name) : our_key(name);
  const auto near = theirs ? theirs : nearest(name, candidates);
  refuse(where, fmt::format("an unknown {} \"{}\"", table ? "section" : "key", name),
         fmt::format(fmt::runtime(expected), fmt::join(known, ", "),
                     section.substr(0, section.empty() ? 0 : section.size() - 1)),
         near ? fmt::format("Did you mean \"{}\"? {}", *near, kReference) : kReference);
}

[[noreturn]] void wrong_value(const std::string& where, const ConfigKey& key, const std::string& found,
                              const std::string& text = {}) {
  auto near = our_value(text);
  if (!near || !contains(key.allowed.choices, *near)) near = nearest(text, key.allowed.choices);
  const char* several = text == "gloo" ? " (on one host; docs/hosts.md has several)" : "";
  refuse(where, found, with_article(allowed_text(key)),
         near ? fmt::format("Did you mean \"{}\"{}? Change {}", *near, several, key.name)
              : fmt::format("Change {}; its default is {}", key.name, toml_text(key.get(RunConfig{}))));
}

// The node as the alternative that `like` has, if it is one. An integer is a number too.
std::optional<ConfigValue> convert(const toml::node& node, const ConfigValue& like) {
  return std::visit(
      [&]<class T>(const T&) -> std::optional<ConfigValue> {
        if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          if (!node.is_array()) return std::nullopt;
          std::vector<std::string> texts;
          for (const auto& entry : *node.as_array()) {
            if (!entry.is_string()) return std::nullopt;
            texts.push_back(entry.as_string()->get());
          }
          return texts;
        } else {
          if (const auto* value = node.as<T>()) return ConfigValue(value->get());
          if (std::is_same_v<T, double> && node.is_integer())
            return ConfigValue(static_cast<double>(node.as_integer()->get()));
          return std::nullopt;
        }
      },
      like);
}

// File names end at a NUL, so a file other than the checked one would be opened.
bool has_nul(const ConfigValue& value) {
  const auto in = [](const std::string& text) { return text.find('\0') != std::string::npos; };
  if (const auto* text = std::get_if<std::string>(&value)) return in(*text);
  const auto* texts = std::get_if<std::vector<std::string>>(&value);
  return texts && std::any_of(texts->begin(), texts->end(), in);
}

void assign(RunConfig& config, const ConfigKey& key, ConfigValue value, const std::string& where) {
  for (const auto& [alias, name] : key.allowed.aliases)
    if (std::get<std::string>(value) == alias) value = name;
  if (has_nul(value)) wrong_value(where, key, "a text with a NUL (\\u0000) in it", "");
  if (auto found = refusal(key, value)) {
    auto text = std::get_if<std::string>(&value);
    wrong_value(where, key, *found, text ? *text : "");
  }
  key.set(config, value);
}

void read_table(RunConfig& config, const toml::table& table, const std::string& prefix,
                const std::string& file) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix.empty() ? std::string(key.str()) : prefix + "." + std::string(key.str());
    const std::string where = fmt::format("{}:{}", file, key.source().begin.line);
    const bool dotted = key.str().find('.') != std::string_view::npos;  // a quoted key, not a path
    if (const ConfigKey* known = dotted ? nullptr : find_key(name)) {
      const auto value = convert(node, known->get(config));
      if (!value) wrong_value(where, *known, describe(node));
      assign(config, *known, *value, where + ": " + name);
    } else if (!dotted && is_section(name)) {
      if (!node.is_table())
        refuse(where, fmt::format("{} for \"{}\"", describe(node), name), "a section",
               fmt::format("Write [{}] on a line of its own, its keys below it", name));
      read_table(config, *node.as_table(), name, file);
    } else {
      unknown(where, name, node.is_table());
    }
  }
}

// One value in TOML; nothing if `text` is not exactly one.
std::optional<toml::table> parse_value(std::string_view text) {
  try {
    toml::table table = toml::parse(fmt::format("value = {}", text));
    if (table.size() == 1 && table.contains("value")) return table;
  } catch (const toml::parse_error&) {
  }
  return std::nullopt;
}

void apply_override(RunConfig& config, const std::string& text) {
  const std::string where = "--set " + text;
  const auto equals = text.find('=');
  if (equals == std::string::npos)
    refuse(where, "no \"=\"", "section.key=value", "Write it as in --set train.steps=100");
  const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
  const ConfigKey* key = find_key(name);
  if (!key) unknown(where, name, false);
  if (!utf8::is_valid(value.begin(), value.end())) wrong_value(where, *key, "bytes that are not UTF-8");
  const ConfigValue like = key->get(config);
  const bool texts = std::holds_alternative<std::vector<std::string>>(like);
  const bool quoted = !value.empty() && (value.front() == '"' || value.front() == '\'');
  if (texts || std::holds_alternative<std::string>(like)) {
    // Shells take quotes away, so texts go without; a list goes as TOML or as its only entry.
    std::optional<ConfigValue> converted;
    const bool list = texts && !value.empty() && value.front() == '[';
    if (list || quoted)
      if (auto table = parse_value(value))
        converted = convert(*table->get("value"), list ? like : ConfigValue(""));
    if (list && !converted) wrong_value(where, *key, value);
    if (!converted) converted = value;
    if (texts && !list) {
      const auto& only = std::get<std::string>(*converted);
      converted = only.empty() ? std::vector<std::string>{} : std::vector<std::string>{only};
    }
    return assign(config, *key, *converted, where);
  }
  const auto table = parse_value(value);
  const auto converted = table ? convert(*table->get("value"), like) : std::nullopt;
  if (!converted) wrong_value(where, *key, table ? describe(*table->get("value")) : toml_text(value));
  assign(config, *key, *converted, where);
}

}  // namespace

toml::table parse_toml(std::string_view text, const std::string& file) {
  check_length(text.size(), file);
  check_keys(text, file);
  try {
    return toml::parse(text, file);
  } catch (const toml::parse_error& error) {
    const auto at = error.source().begin;
    const std::string kind = fs::path(file).extension();
    if (kind == ".yaml" || kind == ".yml" || kind == ".json")
      refuse(file, fmt::format("a {} file", kind == ".json" ? "JSON" : "YAML"), "TOML (https://toml.io)",
             "Write it as [section] and key = value; `isograd config` prints every key so");
    std::string problem(error.description());
    if (problem.starts_with("Error ")) problem.erase(0, 6);
    problem = "an error " + (problem.starts_with("while") ? problem : "in it: " + problem);
    refuse(fmt::format("{}:{}:{}", file, at.line, at.column), problem, "TOML (https://toml.io)",
           "Fix that line");
  }
}

std::string describe(const toml::node& node) {
  std::ostringstream text;
  if (auto value = node.as_string()) return "the text " + toml_text(value->get());
  if (auto value = node.as_integer()) return fmt::format("the integer {}", value->get());
  if (auto value = node.as_floating_point()) return "the number " + toml_text(value->get());
  if (auto value = node.as_boolean()) return value->get() ? "true" : "false";
  if (node.is_table()) return "a table";
  if (auto list = node.as_array()) {
    for (const auto& entry : *list)
      if (!entry.is_string()) return "a list that holds " + describe(entry);
    return "a list of texts";
  }
  return "a date or time";
}

RunConfig parse_config(std::string_view text, const std::string& file,
                       const std::vector<std::string>& overrides) {
  RunConfig config;
  read_table(config, parse_toml(text, file), "", file);
  for (const auto& override_text : overrides) apply_override(config, override_text);
  const std::string where = file.empty() ? "configuration" : file;
  check_together(config, where);
  try {
    if (const TaskKind& kind = kind_of(config); kind.check) kind.check(config);
  } catch (const ConfigError& error) {
    ErrorText text_of_shape = error.text();
    text_of_shape.where = where + ": " + text_of_shape.where;
    throw ConfigError(text_of_shape);
  }
  return config;
}

RunConfig load_config(const fs::path& file, const std::vector<std::string>& overrides) {
  std::string text;
  if (!file.empty()) {
    std::error_code failed;
    const auto size = fs::file_size(file, failed);
    if (!failed) check_length(size, file.string());
    text = read_file(file);
  }
  RunConfig config = parse_config(text, file.string(), overrides);
  config.source = file;
  return config;
}

std::string toml_text(const ConfigValue& value) {
  if (auto flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (auto integer = std::get_if<std::int64_t>(&value)) return std::to_string(*integer);
  if (auto text = std::get_if<std::string>(&value)) return quoted(*text);
  if (auto texts = std::get_if<std::vector<std::string>>(&value)) {
    std::vector<std::string> list(texts->size());
    std::ranges::transform(*texts, list.begin(), quoted);
    return fmt::format("[{}]", fmt::join(list, ", "));
  }
  const double number = std::get<double>(value);
  const std::string text = fmt::format("{}", number);  // the shortest that reads back to the same bits
  const bool integral = std::isfinite(number) && text.find_first_of(".e") == std::string::npos;
  return integral ? text + ".0" : text;
}

std::optional<std::string> nearest(std::string_view text, const std::vector<std::string>& candidates) {
  std::optional<std::string> best;
  std::size_t least = near_enough(text) + 1;
  for (const auto& candidate : candidates) {
    // A right key in a wrong section is near. A longer difference cannot be within `least` edits.
    const bool same_key = last_name(candidate) == last_name(text) && candidate.find('.') != std::string::npos;
    const std::size_t longer = std::max(candidate.size(), text.size()),
                      shorter = candidate.size() + text.size() - longer;
    if (!same_key && longer - shorter >= least) continue;
    const std::size_t distance = same_key ? candidate != text : edit_distance(candidate, text);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

std::string strategy_of(const std::string& name) {
  for (const auto& [alias, strategy] : kStrategyAliases)
    if (name == alias) return strategy;
  return name;
}

std::string to_toml(const RunConfig& config) {
  std::string text, section;
  for (const auto& key : config_keys()) {
    if (key.section() != section) {
      text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section());
      section = key.section();
    }
    text += fmt::format("{} = {}\n", key.last_name(), toml_text(key.get(config)));
  }
  return text;
}

std::string configuration_schema() {
  using Object = nlohmann::ordered_json;
  const auto table_of = [](const std::string& description) {
    return Object{{"type", "object"}, {"description", description}, {"additionalProperties", false}};
  };
  Object schema = table_of("A run of isograd, as `isograd config` checks it.");
  schema["$schema"] = "http://json-schema.org/draft-07/schema#";
  schema["title"] = "isograd";
  const auto place_of = [&](const std::string& section) -> Object& {
    Object* place = &schema;
    for (std::size_t at = 0; at <= section.size();) {
      const auto end = std::min(section.find('.', at), section.size());
      place = &(*place)["properties"][section.substr(at, end - at)];
      at = end + 1;
    }
    return *place;
  };
  for (const auto& section : config_sections()) place_of(section.name) = table_of(section.description);
  for (const auto& key : config_keys()) {
    const ConfigValue usual = key.get(RunConfig{});
    const Allowed& allowed = key.allowed;
    static const char* const types[] = {"boolean", "integer", "number", "string", "array"};
    Object one = {{"type", types[usual.index()]}, {"description", key.description}};
    if (!key.unit.empty()) one["description"] = key.description + " (" + key.unit + ")";
    std::visit([&](const auto& value) { one["default"] = value; }, usual);
    if (std::holds_alternative<std::vector<std::string>>(usual)) one["items"] = {{"type", "string"}};
    if (allowed.not_empty) one["minLength"] = 1;
    for (const std::string& choice : allowed.choices) one["enum"].push_back(choice);
    for (const auto& [alias, name] : allowed.aliases) one["enum"].push_back(alias);
    const char* least = allowed.above_least ? "exclusiveMinimum" : "minimum";
    const char* most = allowed.below_most ? "exclusiveMaximum" : "maximum";
    if (std::isfinite(allowed.least)) one[least] = allowed.least;
    if (std::isfinite(allowed.most)) one[most] = allowed.most;
    place_of(key.name) = one;
  }
  return schema.dump(2) + "\n";
}

std::string configuration_markdown() {
  std::string text =
      "# Configuration\n\n"
      "A run is described by a TOML file; every key has a default, so the file holds only what "
      "differs. `--set section.key=value` on the command line overrides the file. Unknown "
      "keys, wrong types and impossible values are errors that name file, line, what is "
      "allowed and the nearest key.\n\n"
      "This page is generated from the table that parses the file: `isograd config --markdown "
      "> docs/configuration.md`. `isograd config CONFIG.toml` prints a file with every key "
      "written out. Editors that know schemas of TOML (Taplo, Even Better TOML) complete and check "
      "a file whose first line is `#:schema ./isograd.schema.json`, after `isograd config --schema > "
      "isograd.schema.json`.\n\n"
      "The ranks of a run must have the same configuration. Only keys marked *may differ* may "
      "have other values on other hosts: they name files, and what is in the files must still "
      "be the same.\n";
  for (const auto& section : config_sections()) {
    text += fmt::format("\n## [{}]\n\n{}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n",
                        section.name, section.description);
    for (const auto& key : config_keys()) {
      if (key.section() != section.name) continue;
      text += fmt::format("| `{}` | `{}` | {} | {} |\n", key.last_name(), toml_text(key.get(RunConfig{})),
                          allowed_text(key),
                          key.description + (key.ranks == Ranks::kMayDiffer ? " *May differ.*" : ""));
    }
  }
  return text;
}

}  // namespace isograd
