#include "train/other_names.hpp"

#include <algorithm>

namespace isograd {
namespace {

std::optional<std::string> find(const OtherNames& names, std::string_view theirs) {
  const auto found = std::ranges::find(names, theirs, &OtherNames::value_type::first);
  return found == names.end() ? std::nullopt : std::optional(std::string(found->second));
}

}  // namespace

const OtherNames& other_keys() {
  static const OtherNames names = {
      // the rate and its schedule
      {"lr", "schedule.peak"},
      {"learning_rate", "schedule.peak"},
      {"max_lr", "schedule.peak"},
      {"min_lr", "schedule.floor"},
      {"lr_min", "schedule.floor"},
      {"min_lr_factor", "schedule.floor"},
      {"warmup_steps", "schedule.warmup"},
      {"decay_type", "schedule.decay_shape"},
      {"lr_decay_type", "schedule.decay_shape"},
      {"lr_scheduler_type", "schedule.kind"},
      {"lr_scheduler", "schedule.kind"},
      {"decay_ratio", "schedule.decay"},
      {"decay_steps", "schedule.decay"},
      {"num_decay_steps", "schedule.decay"},
      // the optimizer
      {"optimizer.name", "optimizer.kind"},
      {"optimizer", "optimizer.kind"},
      {"optim", "optimizer.kind"},
      {"eps", "optimizer.epsilon"},
      {"adam_epsilon", "optimizer.epsilon"},
      {"adam_beta1", "optimizer.beta1"},
      {"adam_beta2", "optimizer.beta2"},
      {"param_groups", "optimizer.groups"},
      {"label_smoothing_factor", "loss.label_smoothing"},
      {"z_loss_coefficient", "loss.z_loss"},
      {"z_loss_weight", "loss.z_loss"},
      // the loop
      {"max_steps", "train.steps"},
      {"num_steps", "train.steps"},
      {"max_grad_norm", "train.max_norm"},
      {"grad_clip", "train.max_norm"},
      {"gradient_clip_val", "train.max_norm"},
      {"precision", "train.dtype"},
      {"torch_dtype", "train.dtype"},
      {"mixed_precision_param", "train.dtype"},
      {"bf16", "train.dtype"},
      {"eval_steps", "train.evaluate_every"},
      {"val_check_interval", "train.evaluate_every"},
      {"validation.freq", "train.evaluate_every"},
      // batches
      {"batch_size", "batch.packs_per_step"},
      {"global_batch_size", "batch.packs_per_step"},
      {"gradient_accumulation_steps", "batch.packs_per_step"},
      {"accumulate_grad_batches", "batch.packs_per_step"},
      {"local_batch_size", "batch.packs_per_micro_batch"},
      {"micro_batch_size", "batch.packs_per_micro_batch"},
      {"per_device_train_batch_size", "batch.packs_per_micro_batch"},
      {"seq_len", "data.pack_length"},
      {"seq_length", "data.pack_length"},
      {"sequence_length", "data.pack_length"},
      {"max_length", "data.pack_length"},
      {"dataset", "data.text"},
      {"dataset_path", "data.text"},
      {"tokenizer_path", "data.tokenizer"},
      // files
      {"output_dir", "run.directory"},
      {"dump_folder", "run.directory"},
      {"default_root_dir", "run.directory"},
      {"interval", "checkpoint.every"},
      {"save_steps", "checkpoint.every"},
      {"every_n_train_steps", "checkpoint.every"},
      {"keep_latest_k", "checkpoint.keep"},
      {"save_total_limit", "checkpoint.keep"},
      {"save_top_k", "checkpoint.keep_best"},
      {"train_time_interval", "checkpoint.every_seconds"},
      {"resume_from_checkpoint", "checkpoint.resume"},
      {"ckpt_path", "checkpoint.resume"},
      {"initial_load_path", "model.load"},
      {"model_name_or_path", "model.load"},
      // ranks
      {"accelerator", "parallel.device"},
      {"data_parallel_replicate_degree", "parallel.replicas"},
      {"data_parallel_shard_degree", "parallel.strategy"},
      {"fsdp_reshard_after_forward", "parallel.reshard_after_forward"},
      {"tensor_parallel_degree", "parallel.tp"},
      {"pipeline_parallel_degree", "parallel.pp"},
      {"pipeline_parallel_schedule", "parallel.schedule"},
      {"context_parallel_degree", "parallel.cp_ring"},
      {"expert_parallel_degree", "parallel.ep"},
      {"enable_cpu_offload", "parallel.offload"},
      {"gradient_checkpointing", "parallel.checkpoint_activations"},
      {"activation_checkpointing", "parallel.checkpoint_activations"},
      // the model
      {"hidden_size", "model.hidden"},
      {"num_hidden_layers", "model.layers"},
      {"n_layers", "model.layers"},
      {"num_attention_heads", "model.heads"},
      {"n_heads", "model.heads"},
      {"num_key_value_heads", "model.key_value_heads"},
      {"n_kv_heads", "model.key_value_heads"},
      {"key_heads",
       "model.key_value_heads"},  // of the planner's sizes before they had the configuration's name
      {"intermediate_size", "model.feed_forward"},
      {"vocab_size", "model.vocabulary"},
      {"max_position_embeddings", "model.max_positions"},
      {"rms_norm_eps", "model.norm_epsilon"},
      {"tie_word_embeddings", "model.tied_output"},
      {"num_experts_per_tok", "model.experts_per_token"},
      {"num_experts", "model.experts"},
  };
  return names;
}

const OtherNames& other_sections() {
  static const OtherNames names = {
      {"training", "train"},
      {"trainer", "train"},
      {"validation", "train"},
      {"parallelism", "parallel"},
      {"lr_scheduler", "schedule"},
      {"scheduler", "schedule"},
      {"optim", "optimizer"},
      {"dataset", "data"},
      {"job", "run"},
      {"lora", "model.lora"},
      {"activation_checkpoint", "parallel"},
  };
  return names;
}

const OtherNames& other_values() {
  static const OtherNames names = {
      {"gpu", "cuda"},
      {"gpus", "cuda"},
      {"bf16", "bfloat16"},
      {"fp32", "float32"},
      {"fp64", "float64"},
      {"float", "float32"},
      {"double", "float64"},
      {"32", "float32"},
      {"adam", "adamw"},
      {"gloo", "shm"},
      {"fsdp2", "zero3"},
      {"dp", "bucketed"},
      {"full_shard", "zero3"},
      {"bf16-mixed", "bfloat16"},
      {"warmup_stable_decay", "wsd"},
      {"constant_with_warmup", "constant"},
  };
  return names;
}

std::optional<std::string> our_key(std::string_view theirs) {
  if (auto whole = find(other_keys(), theirs)) return whole;
  return find(other_keys(), theirs.substr(theirs.rfind('.') + 1));
}

std::optional<std::string> our_section(std::string_view theirs) { return find(other_sections(), theirs); }

std::optional<std::string> our_value(std::string_view theirs) { return find(other_values(), theirs); }

}  // namespace isograd
