// The configuration of a run as plain data; config_table.cpp parses, checks and documents each key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "isograd/grid.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

inline constexpr double kSelectionBiasRate = 1e-3;  // of DeepSeek-V3 (arXiv 2412.19437, 4.2)

struct RunConfig {
  std::filesystem::path source;  // the TOML file, for messages; empty when none
  // Whether the run may replace an earlier one in run.directory: of the command, neither read nor saved.
  bool overwrite = false;

  struct {
    std::string directory = "runs/default";  // report, metrics, checkpoints
    std::string json_log;                    // metrics as JSON lines; empty: metrics.jsonl in `directory`
    std::int64_t seed = 0;
    bool memory = false;     // report what each rank keeps and sends
    double peak_tflops = 0;  // peak of a rank's device for the MFU; 0: measured
    struct {
      std::string usr1 = "stop", usr2 = "save";  // save | stop | ignore
    } on_signal;
  } run;
  struct {
    std::vector<std::string> text, shards;  // both empty: the headers of LibTorch
    std::string tokenizer = "bytes";        // "bytes" or a SentencePiece model file
    std::int64_t end_of_text = -1;          // token that delimits documents in foreign shards
    std::string cache = ".cache/isograd";
    std::string on_bad_line = "stop";
    std::string train_on = "assistant";
    bool drop_doubled_mark = false;
    std::string packing = "split";
    std::int64_t pack_length = 512;
    bool shuffle_packs = true;
    double validation_fraction = 0.02;
    std::string table;   // CSV or NPZ, of a scorer
    std::string target;  // its column or array; empty: the last, or "y"
  } data;
  struct {
    std::int64_t packs_per_step = 8, packs_per_micro_batch = 4;
    std::int64_t rows_per_step = 256;                                 // of a scorer's table
    std::int64_t videos_per_step = 8, tokens_per_micro_batch = 4096;  // of videos
    std::int64_t max_tokens_per_rank = 0;                             // of a micro-batch; 0: no limit
  } batch;
  struct {
    std::string load;  // Hugging Face directory to start from; its config.json then describes the model
    DecoderConfig shape;
    std::string kind = "decoder";  // decoder | scorer | video
    std::int64_t scorer_units = 64, scorer_layers = 1;
    std::int64_t experts_every = 1;  // n-th layer has experts
    std::int64_t dense_layers = 0;   // number of leading layers without experts
    struct {
      std::int64_t rank = 0;  // 0: no adapter, all parameters are trained
      double alpha = 32;
      std::vector<std::string> targets = {"attention", "mlp"};  // and "unembed", or PEFT's names of matrices
      double dropout = 0;
      double b_range = 0;  // standard deviation of fresh b
    } lora;
  } model;
  struct {
    std::vector<std::string> files;  // files, directories, globs
    std::int64_t height = 64;        // the most rows of pixels
    double frames_per_second = 8;    // 0: every frame
    std::int64_t max_frames = 0;     // of a video; 0: all
    std::int64_t patch_frames = 2, patch_height = 8, patch_width = 8;
    std::int64_t timestep_features = 128;
    double gate_init = 0;  // 0: adaLN-Zero
  } video;
  struct {
    std::string kind = "token_mean";  // token_mean | sample_mean | weighted_mean | fixed | none
    double denominator = 0;           // fixed
    std::string fused = "auto";  // auto | on | off: loss and output projection in one, without the logits
    // Axes inside which the mean is taken.
    std::vector<std::string> normalise_over = {"dp_replicate", "dp_shard", "cp_ring", "cp_ulysses"};
    std::string dp_replicate_reduction = "derived";  // derived | sum | mean
    // Weights of a decoder's router losses, added to the cross entropy; 0: not added.
    double balance = 0, router_z = 0;
    double label_smoothing = 0, z_loss = 0;           // of the cross entropy of text
    std::string balance_over = "layers";              // layers | model
    std::string balance_scope = "step";               // step | micro_batch
    double selection_bias_rate = kSelectionBiasRate;  // of sigmoid routers
  } loss;
  struct {
    // cross_entropy | smooth_ap | recall_at_quantile | pauc | pauc_pairwise | sigmoid_focal
    std::string loss = "smooth_ap";
    double temperature = 0;  // 0: the loss's own default
    std::int64_t queue_size = 1024;
    double quantile = 0.05;           // of the recall that is trained, and of the one that is measured
    double alpha = 0, budget = 0.05;  // band of false-positive rates, trained and measured
    bool compare = true;              // train once more by cross entropy, for the report
  } ranking;
  struct {
    std::int64_t steps = 200;
    std::string dtype = "float32";  // float64 | float32 | bfloat16
    bool fp32_gradients = true;     // of bfloat16 parameters
    double max_norm = 1.0;
    std::vector<std::string> clip_groups;  // "PATTERN: LIMIT"; max_norm is then that of the others
    std::string part_norms = "off";        // off | groups | layers | parameters
    std::int64_t evaluate_every = 50;      // 0: only at the end
    std::int64_t evaluate_packs = 16;      // at most, of the validation documents
    std::string on_non_finite = "stop";    // stop | skip
  } train;
  struct {
    std::string kind = "adamw";       // adamw | sgd
    AdamWOptions adamw;               // learning_rate is schedule.peak
    double momentum = 0;              // sgd
    std::vector<std::string> groups;  // "PATTERN: rate=FACTOR weight_decay=NUMBER"
  } optimizer;
  Schedule schedule;  // total is train.steps
  struct {
    std::string strategy = "bucketed";  // one of strategy_names()
    std::int64_t replicas = 1;          // of a sharded strategy
    std::int64_t cp_ring = 1, cp_ulysses = 1;
    std::int64_t tp = 1, ep = 1, pp = 1, stages_per_rank = 1;
    bool sequence_parallel = true;
    std::string tensor_overlap = "none";    // none | weights | tokens
    std::string expert_overlap = "none";    // none | shared | halves
    std::string schedule = "1f1b";          // one of pipeline_schedules()
    std::string cp_fsdp_mode = "all";       // all | ulysses_only | ring_only | none
    std::string share_parameters = "auto";  // auto | on | off
    bool reduce_once = false, overlap = true, prefetch = true;
    bool reshard_after_forward = true, checkpoint_activations = false;
    std::int64_t bucket_bytes = 25 << 20, first_bucket_bytes = 1 << 20, gather_limit_bytes = 0;
    double timeout_seconds = 300;
    std::string device = "cpu";    // cpu | cuda | auto
    std::string backend = "auto";  // auto | shm | mpi | shm+mpi | nccl
    bool cuda_graphs = true;
    bool offload = false;  // gradients, masters and state in host memory
  } parallel;
  struct {
    std::int64_t every = 100;  // 0: only at the end
    double every_seconds = 0;  // since the last one, by rank 0's clock; 0: never
    std::int64_t keep = 2;
    std::int64_t keep_best = 0;  // by validation loss, in addition
    std::string resume;          // checkpoint directory, "latest", "best", "auto" or empty
  } checkpoint;
  struct {
    bool at_end = true;                 // prove the gradient of this very run against one process
    std::int64_t every = 0;             // the same of a micro-sized step, while training
    std::int64_t checksums_every = 50;  // compare what replicas hold, bit for bit
  } verify;
  struct {
    std::string prompt;
    std::int64_t tokens = 200;
    double temperature = 0.8;
  } sample;
};

std::vector<std::string> strategy_names();  // values of parallel.strategy, simplest first
// PyTorch's names of two of them.
inline constexpr std::pair<const char*, const char*> kStrategyAliases[] = {{"ddp", "bucketed"},
                                                                           {"fsdp", "zero3"}};
std::string strategy_of(const std::string& name);  // of an alias; other texts are as they are

// ConfigError with file, line and the nearest valid key. `overrides`: as given to --set; texts may go without
// quotes, a list as TOML or as its only entry. An empty `file` gives the defaults.
RunConfig load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides = {});
// As load_config(), from a text; `file` appears in messages.
RunConfig parse_config(std::string_view text, const std::string& file,
                       const std::vector<std::string>& overrides = {});
// ConfigError: no such strategy.
int stage_of(const std::string& strategy);               // of ZeRO; 0: no sharding
bool may_share_parameters(const std::string& strategy);  // whether share_parameters = "auto" may
// The axes dp_replicate x dp_shard x cp_ring x cp_ulysses, and tp or pp if they have several ranks; with
// parallel.ep the view edp x ep. Without sharding, ranks with different samples are replicas. ConfigError:
// sizes that do not divide the ranks.
Grid grid_of(const RunConfig& config, int ranks);
// Axes along which parameters are sharded, or gradients summed at once; the other data axes have replicas.
AxisSet sharded_axes(const RunConfig& config);
// Whether the run is model-parallel (tp, ep or pp above 1): TaskModel::cut() gives each rank its part.
bool model_parallel(const RunConfig& config);
// Whether parallel.schedule splits backward in two, which zero3's units cannot follow.
bool cuts_backwards(const RunConfig& config);
// Whether the loss is the mean of per-replica means: loss.normalise_over without dp_replicate.
bool normalises_by_replica(const RunConfig& config);
// Checks that need the number of ranks (more ranks than packs in the batch).
void check(const RunConfig& config, int ranks);
// As check(), for ranks on other machines: this machine's devices are not checked.
void check_but_devices(const RunConfig& config, int ranks);
// ConfigError unless `text` is a folder; names the nearest one, or how to download a Hub id. `where`: its key
// or flag.
void require_model_folder(const std::string& text, const std::string& where);
// The text of docs/configuration.md, generated from the same table.
std::string configuration_markdown();
// The JSON schema (draft 7) of a configuration, for editors, generated from the same table.
std::string configuration_schema();
// Every key as TOML, which parse_config() reads back.
std::string to_toml(const RunConfig& config);

}  // namespace isograd
