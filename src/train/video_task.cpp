// The diffusion transformer on videos: its configuration keys, files, model, task and rules.
#include "train/evaluate.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/group.hpp"
#include "isograd/random.hpp"
#include "isograd/tensor_parallel.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/rank_zero.hpp"
#include "train/rules.hpp"
#include "train/task.hpp"

namespace isograd {
namespace key_table {
namespace {

std::vector<ConfigKey> video_keys() {
  return {
      KEY(batch.videos_per_step, "videos", at_least(1, kManyTokens), R"(The global batch of a `video` run:
          whole videos, over all ranks and micro-batches; the last step of an epoch may be shorter. Each rank
          gets about the same Σ length².)"),
      KEY(batch.tokens_per_micro_batch, "patches", at_least(1, kManyTokens), R"(For videos: maximum number of
          patches that one forward and backward computes on one rank; a longer video is a micro-batch by
          itself. A speed and memory option: the gradient does not depend on it.)"),

      KEY(video.files, "Files, directories or globs of videos in any format that FFmpeg decodes."),
      KEY(video.height, "pixels", at_least(1, 8192),
          "Maximum rows of pixels of a frame: larger frames are scaled down, to whole patches."),
      KEY(video.frames_per_second, at_least(0, 1000),
          "Maximum frames per second that are taken. 0: every frame."),
      KEY(video.max_frames, "frames", at_least(0, kManyTokens),
          "Maximum number of a video's frames that are taken, from its first. 0: all."),
      KEY(video.patch_frames, "frames", at_least(1, 256), "Frames of a patch, which is a token."),
      KEY(video.patch_height, "pixels", at_least(1, 1024), "Rows of a patch."),
      KEY(video.patch_width, "pixels", at_least(1, 1024), "Columns of a patch."),
      KEY(video.timestep_features, at_least(2, kWide),
          "Sines and cosines that tell the model the timestep; even."),
      KEY(video.gate_init, at_least(-1, 1), R"(Initial value of the gates of the blocks. 0: each block begins
          as the identity (adaLN-Zero) and has no gradient in the first step. Otherwise the modulating
          projections begin like all others.)"),
  };
}

}  // namespace
}  // namespace key_table

namespace {

using Store = std::shared_ptr<const VideoStore>;

// ---- the files of a model ----

constexpr OwnFamily kVideoFamily{.type = "isograd_video_dit", .run = "a video run"};

ShapeFields fields(VideoDiTConfig& shape) {
  return {{"patch_elements", &shape.patch_elements},
          {"hidden", &shape.hidden},
          {"layers", &shape.layers},
          {"heads", &shape.heads},
          {"head_dim", &shape.head_dim},
          {"feed_forward", &shape.feed_forward},
          {"max_frames", &shape.max_frames},
          {"max_height", &shape.max_height},
          {"max_width", &shape.max_width},
          {"timestep_features", &shape.timestep_features},
          {"norm_epsilon", &shape.norm_epsilon}};
}

VideoDiTConfig read_video_shape(const fs::path& directory) {
  VideoDiTConfig shape;
  read_own_shape(directory, kVideoFamily, fields(shape));
  check(shape);
  return shape;
}

// Gates and the initial range follow from other keys.
ShapeKeys shape_keys(VideoDiTConfig shape) {
  ShapeKeys keys;
  for (const auto& [key, value] : fields(shape))
    keys.emplace_back((key == "timestep_features" ? "video." : "model.") + key,
                      std::visit([](const auto* number) { return fmt::format("{}", *number); }, value));
  return keys;
}

FillValues open_video_weights(const fs::path& directory) {
  const VideoDiTConfig shape = read_video_shape(directory);
  return open_own_weights(directory, shape.layers,
                          [&] { return VideoDiT::without_values(shape, at::kFloat)->named(); });
}

// ---- the model ----

class VideoModel : public TaskModel {
 public:
  VideoModel(std::shared_ptr<VideoDiT> model, Store store, const RunConfig& config)
      : model_(std::move(model)),
        store_(std::move(store)),
        seed_(static_cast<std::uint64_t>(config.run.seed)),
        cut_options_{.sequence_parallel = config.parallel.sequence_parallel,
                     .overlap = tensor_overlap_named(config.parallel.tensor_overlap)} {}

  VideoDiT& transformer() { return *model_; }
  NamedTensors named() override { return model_->named(); }
  void initialize(const std::string& name, at::Tensor& values) const override {
    model_->initialize(name, values, seed_);
  }
  ForwardLossTerms loss() override { return flow_matching_loss(*model_, store_, seed_); }
  void write(const fs::path& directory, const TensorStream& weights) override {
    write_video_model(directory, model_->config(), weights);
  }
  void to(at::Device device) override {
    if (!model_->device().is_meta()) model_->to(device);
  }

  ModelUnits make_units() override {
    VideoDiT& model = *model_;
    ModelUnits units = units_by_block(model);
    model.set_around_block([blocks = units.blocks](std::int64_t layer, const at::Tensor& stream,
                                                   const at::Tensor& condition,
                                                   const VideoDiT::BlockForward& block) {
      const UnitHandle& unit = blocks[static_cast<std::size_t>(layer)];
      return unit.run({stream, condition}, [block](const std::vector<at::Tensor>& in) {
        return std::vector<at::Tensor>{block(in[0], in[1])};
      })[0];
    });
    return units;
  }

  // The velocity. The input is made here by plain code for the oracle; the loss makes its own.
  at::Tensor outputs(const Batch& batch) override {
    const at::Tensor data = store_->patches(batch.tokens, at::kDouble);
    const FlowNoise drawn = flow_noise(batch, store_->patch_elements(), seed_);
    const at::Tensor lengths = at::tensor(batch.cu_seqlens, at::kLong).diff();
    const at::Tensor t = at::repeat_interleave(drawn.times, lengths).unsqueeze(1);
    return model_->velocity(batch, (data * (1 - t) + drawn.noise * t).to(model_->device(), model_->dtype()),
                            store_->coordinates(batch.tokens), drawn.times);
  }

  Layout::Named placements(const Grid& grid) override {
    return video_placements(*model_, grid, cut_options_);
  }
  Layout cut(const Mesh& mesh) override { return cut_video(*model_, mesh, cut_options_); }

  void attend_over(const Mesh& mesh) override { isograd::attend_over(*model_, mesh, /*causal=*/false); }

 private:
  std::shared_ptr<VideoDiT> model_;
  Store store_;
  std::uint64_t seed_;
  TensorParallelOptions cut_options_;
};

// ---- the data ----

Store open_store(const RunConfig& config) {
  const auto& video = config.video;
  return VideoStore::open({.patterns = video.files,
                           .height = video.height,
                           .frames_per_second = video.frames_per_second,
                           .max_frames = video.max_frames,
                           .patch = {video.patch_frames, video.patch_height, video.patch_width}});
}

Split split_videos(std::int64_t videos, double fraction, std::uint64_t seed) {
  std::int64_t held_out = std::llround(fraction * static_cast<double>(videos));
  if (fraction > 0) held_out = std::max<std::int64_t>(held_out, 1);
  held_out = std::clamp<std::int64_t>(held_out, 0, videos - 1);  // one is left to train on
  Split split;
  const auto order = random_permutation(videos, {.seed = seed, .layer = hash_name("held-out videos")});
  split.validation.assign(order.begin(), order.begin() + held_out);
  split.train.assign(order.begin() + held_out, order.end());
  std::sort(split.train.begin(), split.train.end());
  std::sort(split.validation.begin(), split.validation.end());
  return split;
}

// ---- results: frames of some videos, and the loss of each by length ----

constexpr std::size_t kShown = 4;      // videos whose frames are shown
constexpr std::size_t kMeasured = 32;  // training videos whose losses are, at most
constexpr std::int64_t kFrames = 6;    // frames of a video, side by side
constexpr std::int64_t kGap = 2;       // pixels between them
constexpr std::int64_t kDraws = 8;     // draws of time and noise per video; its loss is their mean
// Times to which the shown frames are noised; 0 is data, 1 is noise.
constexpr double kTimes[] = {0.3, 0.7, 0.9};

// Indices spread evenly over 0 .. n - 1, including both ends.
std::vector<std::int64_t> spread(std::int64_t n, std::int64_t most) {
  std::vector<std::int64_t> picked;
  const std::int64_t parts = std::min(n, most);
  for (std::int64_t i = 0; i < parts; ++i) picked.push_back(parts == 1 ? 0 : i * (n - 1) / (parts - 1));
  return picked;
}
std::vector<std::int64_t> spread(const std::vector<std::int64_t>& videos, std::size_t most) {
  auto picked = spread(static_cast<std::int64_t>(videos.size()), static_cast<std::int64_t>(most));
  for (auto& i : picked) i = videos[static_cast<std::size_t>(i)];
  return picked;
}

std::string sizes_text(const VideoGrid& grid) { return fmt::format("{} x {} x {}", grid.t, grid.h, grid.w); }

// A row of some frames of uint8 [F, H, W, 3], side by side.
std::string row_of_frames(const std::string& label, const at::Tensor& frames, const std::string& name) {
  std::vector<at::Tensor> columns;
  for (const std::int64_t f : spread(frames.size(0), kFrames)) {
    if (!columns.empty()) columns.push_back(at::full({frames.size(1), kGap, 3}, 255, at::kByte));
    columns.push_back(frames[f]);
  }
  return fmt::format("<span>{}</span><img alt=\"{}\" src=\"data:image/png;base64,{}\"/>", escape_html(label),
                     escape_html(label + " frames of " + name),
                     base64(encode_png(at::cat(columns, 1).contiguous())));
}

std::string frames_html(VideoDiT& model, const VideoStore& store, const std::vector<std::int64_t>& videos,
                        std::uint64_t seed) {
  std::string html;
  for (const std::int64_t video : spread(videos, kShown)) {
    const std::string name = store.name(video);
    html += fmt::format("<h3>{}<span>{} patches, {}</span></h3><div class=\"frames\">", escape_html(name),
                        store.num_tokens(video), sizes_text(store.grid(video)));
    for (const double time : kTimes) {
      const PredictedVideo shown = predict_frames(model, store, video, time, seed);
      if (time == kTimes[0]) html += row_of_frames("original", shown.original, name);
      html += row_of_frames(fmt::format("noised, t = {:g}", time), shown.noised, name);
      html += row_of_frames("prediction", shown.predicted, name);
    }
    html += "</div>";
  }
  return html;
}

// Runs on one rank that has the whole model.
Showing show_videos(VideoDiT& model, const VideoStore& store, const Split& split, std::uint64_t seed) {
  const std::vector<std::int64_t>&trained = split.train, &held_out = split.validation;
  struct VideoLoss {
    std::int64_t video, patches;
    bool held_out;
    double loss;
  };
  std::vector<VideoLoss> losses;
  const auto measure = [&](const std::vector<std::int64_t>& videos, bool are_held_out) {
    for (const std::int64_t video : videos) {
      double sum = 0;
      for (std::int64_t draw = 0; draw < kDraws; ++draw)
        sum += flow_matching_token_losses(model, store, video_batch(store, video, draw), seed)
                   .sum()
                   .item<double>();
      const std::int64_t patches = store.num_tokens(video);
      losses.push_back({video, patches, are_held_out, sum / static_cast<double>(kDraws * patches)});
    }
  };
  measure(held_out, true);
  measure(spread(trained, kMeasured), false);
  std::ranges::stable_sort(losses, {}, &VideoLoss::patches);

  Chart chart{.title = "Loss by length",
              .x_label = "patches of the video",
              .y_label = fmt::format("squared error, mean of {} draws", kDraws),
              .series = {{.name = "held out", .points = {}}, {.name = "trained on", .points = {}}},
              .lines = false};
  ReportTable table{
      .title = "Loss of each video",
      .summary = fmt::format("the mean over a video's patches and {} draws of time and noise", kDraws),
      .columns = {"video", "", "patches", "frames x rows x columns", "loss"},
      .rows = {}};
  for (const VideoLoss& one : losses) {
    Series& series = chart.series[one.held_out ? 0 : 1];
    series.points.push_back({static_cast<double>(one.patches), one.loss});
    table.rows.push_back({store.name(one.video), series.name, std::to_string(one.patches),
                          sizes_text(store.grid(one.video)), fmt::format("{:.4f}", one.loss)});
  }
  std::erase_if(chart.series, [](const Series& series) { return series.points.empty(); });
  return {.pictures = {{.title = held_out.empty() ? "Frames" : "Frames of held-out videos",
                        .caption = "Each video as it is; noised to a time t, where 0 is the video and 1 is "
                                   "noise; and what the model takes the video to be when it sees that, in "
                                   "one step.",
                        .html = frames_html(model, store, held_out.empty() ? trained : held_out, seed)}},
          .charts = {std::move(chart)},
          .tables = {std::move(table)}};
}

class VideoTask : public Task {
 public:
  VideoTask(const RunConfig& config, Store store, Split split)
      : Task(config), store_(std::move(store)), split_(std::move(split)) {}

  std::unique_ptr<Task> under(const RunConfig& config) const override {
    return std::make_unique<VideoTask>(config, store_, split_);
  }

  CutOptions cut_options() const override {
    return {.causal = false, .token_cost = 6 * shape_of_model().hidden};
  }
  std::pair<std::int64_t, std::int64_t> heads() const override {
    return {shape_of_model().heads, shape_of_model().heads};
  }

  TaskFacts facts() const override {
    const ShapeKeys keys =
        values_of(config(),
                  "batch.videos_per_step video.height video.frames_per_second video.max_frames "
                  "video.patch_frames video.patch_height video.patch_width");
    std::map<std::string, std::string> order(keys.begin(), keys.end());
    order["videos (a checksum of their pixels)"] = fmt::format("{:016x}", store_->fingerprint());
    const auto& batch = config().batch;
    return {.documents = "videos",
            .tokens = "patches",
            .unit = "squared error",
            .batch = fmt::format("{} videos", batch.videos_per_step),
            .micro_batch = fmt::format("at most {} patches, or one video", batch.tokens_per_micro_batch),
            .train_documents = static_cast<std::int64_t>(split_.train.size()),
            .validation_documents = static_cast<std::int64_t>(split_.validation.size()),
            .num_tokens = store_->num_tokens(),
            .order = std::move(order)};
  }

  // E‖ε − x0‖² per element for standard normal ε: 1 + the mean square of what is to be predicted.
  Baseline baseline(Group& group) const override {
    at::Tensor sums = at::zeros({2}, at::kDouble);
    for (std::size_t i = 0; i < split_.train.size(); ++i) {
      if (static_cast<int>(i) % group.size() != group.rank()) continue;
      const Batch batch = video_batch(*store_, split_.train[i]);
      sums[0] += store_->patches(batch.tokens, at::kFloat).square().sum(at::kDouble);
      sums[1] += batch.num_tokens() * store_->patch_elements();
    }
    group.all_reduce(sums);
    return {.name = "zero velocity",
            .of = "of a model that always predicts 0",
            .value = 1 + (sums[0] / sums[1]).item<double>()};
  }

  std::shared_ptr<TaskModel> shape_model(const fs::path& directory, at::ScalarType dtype) const override {
    const VideoDiTConfig shape = directory.empty() ? shape_of_model() : read_video_shape(directory);
    return std::make_shared<VideoModel>(VideoDiT::without_values(shape, dtype), store_, config());
  }
  ShapeKeys shape(const fs::path& directory) const override {
    return shape_keys(directory.empty() ? shape_of_model() : read_video_shape(directory));
  }

  Showing show(TaskModel& model, const Outcome&, const Outcome*) const override {
    return show_videos(static_cast<VideoModel&>(model).transformer(), *store_, split_, seed());
  }

  // The mean over a patch of (v − (ε − x0))², from its definition.
  PlainLoss plain_loss() const override {
    return {.name = "flow_matching",
            .per_token = [store = store_, seed = seed()](const Batch& batch, const at::Tensor& velocity) {
              const FlowNoise drawn = flow_noise(batch, store->patch_elements(), seed);
              const at::Tensor target = drawn.noise - store->patches(batch.tokens, at::kDouble);
              return (velocity - target.to(velocity.scalar_type())).pow(2).mean(1);
            }};
  }

 private:
  std::unique_ptr<BatchLoader> loader_of(bool training, int rank, int size) const override {
    const auto& videos = training ? split_.train : split_.validation;
    if (!training && videos.empty()) return nullptr;
    const auto& batch = config().batch;
    return std::make_unique<VideoLoader>(
        store_, videos,
        VideoLoaderOptions{
            .videos_per_step = training ? batch.videos_per_step : config().train.evaluate_packs,
            .tokens_per_micro_batch = batch.tokens_per_micro_batch,
            .seed = seed(),
            .shuffle = training,
            .rank = rank,
            .size = size});
  }
  std::string describe_rank(MicroBatches own, int rank) const override {
    std::string text;
    int number = 0;
    for (const Batch& batch : own) {
      text += fmt::format("rank {}, micro-batch {}, {} patches\n", rank, ++number, batch.num_tokens());
      for (const std::int64_t video : batch.sample_ids)
        text += fmt::format("  {}: {} patches\n", store_->name(video), sizes_text(store_->grid(video)));
    }
    return text;
  }
  FillValues open_weights(const fs::path& directory, at::ScalarType) const override {
    return open_video_weights(directory);
  }

  // The model has positions up to the largest video of this data.
  VideoDiTConfig shape_of_model() const {
    const VideoGrid largest = store_->largest();
    const auto& fresh = config().model.shape;
    const std::string& load = config().model.load;
    const std::int64_t elements = store_->patch_elements();
    if (load.empty()) {
      const VideoDiTConfig shape{.patch_elements = elements,
                                 .hidden = fresh.hidden,
                                 .layers = fresh.layers,
                                 .heads = fresh.heads,
                                 .head_dim = fresh.head_dim,
                                 .feed_forward = fresh.feed_forward,
                                 .max_frames = largest.t,
                                 .max_height = largest.h,
                                 .max_width = largest.w,
                                 .timestep_features = config().video.timestep_features,
                                 .initializer_range = fresh.initializer_range,
                                 .gate_init = config().video.gate_init};
      check(shape);
      return shape;
    }
    const VideoDiTConfig shape = read_video_shape(load);
    if (shape.patch_elements != elements || largest.t > shape.max_frames || largest.h > shape.max_height ||
        largest.w > shape.max_width)
      refuse(load + " (model.load)",
             fmt::format("videos of up to {} patches of {} numbers", sizes_text(largest), elements),
             fmt::format("at most {} patches of {}, as this model was trained on",
                         sizes_text({shape.max_frames, shape.max_height, shape.max_width}),
                         shape.patch_elements),
             "Shrink them by video.height and video.max_frames, with the patches of that run");
    return shape;
  }

  Store store_;
  Split split_;
};

std::unique_ptr<Task> make_video_task(const RunConfig& config, Group& group) {
  if (config.video.files.empty())
    refuse("video.files", "nothing", "videos for model.kind = \"video\"",
           "Name files, folders or globs; examples/video_clips.py fetches some");
  Store store;
  // Rank 0 opens the files first, so that an error in them is reported once.
  on_rank_zero(group, [&] {
    for (const std::string& file : config.video.files)
      if (file.find_first_of("*?[") == std::string::npos && !fs::exists(file))
        refuse("video.files", "no " + file, "a file, a folder or a glob of videos",
               "Check the path; python3 examples/video_clips.py fetches the clips of examples/video.toml");
    store = open_store(config);
  });
  if (!store) store = open_store(config);
  Split split = split_videos(store->num_videos(), config.data.validation_fraction,
                             static_cast<std::uint64_t>(config.run.seed));
  return std::make_unique<VideoTask>(config, std::move(store), std::move(split));
}

// ---- rules ----

constexpr const char* kNotOfVideos = "model.kind is \"video\", which learns from video.files";
constexpr const char* kOnlyOfVideos = "model.kind is not \"video\"";

// One video per micro-batch, or all of a rank's at once.
std::vector<RunConfig> video_accumulations(const RunConfig& config, int) {
  std::vector<RunConfig> all{config, config};
  std::int64_t& most_tokens = all[1].batch.tokens_per_micro_batch;
  most_tokens = most_tokens > 1 ? 1 : kAllTokens;
  return all;
}

void check_video_cut(const RunConfig& config, int ranks) {
  if (config.parallel.tp == 1 && config.parallel.cp_ulysses == 1) return;
  const auto& fresh = config.model.shape;
  const std::string& load = config.model.load;
  const VideoDiTConfig shape = load.empty()
                                   ? VideoDiTConfig{.heads = fresh.heads, .feed_forward = fresh.feed_forward}
                                   : read_video_shape(load);
  check(layout_numbers(config, ranks),
        {.heads = shape.heads,
         .key_heads = shape.heads,
         .split_over_tp = {{"features of the feed-forward network", shape.feed_forward}}},
        LayoutRule::kTensorRanks, LayoutRule::kTokenOverlap);
}

// Converts frames, rows or columns to patches; 0: the most that the model supports.
std::int64_t in_patches(const char* flag, std::int64_t length, std::int64_t patch, std::int64_t most) {
  if (length == 0) return most;
  if (length % patch == 0 && length >= patch && length <= most * patch) return length / patch;
  refuse(fmt::format("{} {}", flag, length),
         fmt::format("{}, where this model has patches of {}", length, patch),
         fmt::format("a multiple of {} up to {}", patch, most * patch),
         fmt::format("Ask for {}", std::clamp((length + patch - 1) / patch * patch, patch, most * patch)));
}

}  // namespace

const TaskKind& video_kind() {
  static const TaskKind kind{
      .name = "video",
      .samples = "videos",
      .tokens = "patches",
      .smaller = "batch.tokens_per_micro_batch, video.height or video.max_frames",
      .per_step = &decltype(RunConfig::batch)::videos_per_step,
      .per_micro_batch = &decltype(RunConfig::batch)::tokens_per_micro_batch,
      .keys = key_table::video_keys,
      .unused = {{"model.",
                  kNotOfVideos,
                  {"model.kind", "model.load", "model.hidden", "model.layers", "model.heads",
                   "model.head_dim", "model.feed_forward", "model.initializer_range"}},
                 {"data.", kNotOfVideos, {"data.validation_fraction"}},
                 {"batch.",
                  kNotOfVideos,
                  {"batch.videos_per_step", "batch.tokens_per_micro_batch", "batch.max_tokens_per_rank"}},
                 {"ranking.", kNotOfVideos},
                 {"sample.", kNotOfVideos},
                 {"loss.fused", kNotOfVideos}},
      .of_no_other = {{"video.", kOnlyOfVideos},
                      {"batch.videos_per_step", kOnlyOfVideos},
                      {"batch.tokens_per_micro_batch", kOnlyOfVideos}},
      .check_ranks = check_video_cut,
      .accumulations = video_accumulations,
      .accumulation_text = [](const RunConfig& config) -> std::string {
        return config.batch.tokens_per_micro_batch == 1 ? "a video to a micro-batch" : "one micro-batch";
      },
      .make = make_video_task};
  return kind;
}

// ---- a finished run's model ----

bool is_video_model(const fs::path& directory) { return is_own_model(directory, kVideoFamily); }

void write_video_model(const fs::path& directory, VideoDiTConfig shape, const TensorStream& weights) {
  write_own_model(directory, kVideoFamily, fields(shape), weights);
}

std::shared_ptr<VideoDiT> read_video_model(const fs::path& directory, at::ScalarType dtype) {
  const FillValues fill = open_video_weights(directory);
  auto model = VideoDiT::without_values(read_video_shape(directory), dtype);
  give_values(model->named(), fill, nullptr, at::kCPU);
  return model;
}

std::vector<fs::path> sample_videos(const fs::path& directory, const VideoSampleOptions& options) {
  if (!fs::exists(directory / "state.json"))
    refuse(directory.string(), "a video model without a checkpoint's state.json, which says what a patch is",
           "a checkpoint of a video run", "Name a folder of checkpoints/ as isograd train leaves it");
  const TrainingState state = open_checkpoint(directory);
  const auto number = [&](const std::string& key) {
    const auto found = state.order.find("video." + key);
    const std::string text = found == state.order.end() ? "nothing" : found->second;
    double value = -1;
    std::from_chars(text.data(), text.data() + text.size(), value);
    if (value >= 0 && value <= 8192) return value;
    refuse((directory / "state.json").string() + ": video." + key, text, "a number, as a video run leaves it",
           "Name a checkpoint of a video run");
  };
  const auto of_patch = [&](const char* axis) {
    return std::max<std::int64_t>(1, std::llround(number(axis)));
  };
  const auto model = read_video_model(directory, scalar_type(state.dtype));
  const VideoGrid patch{of_patch("patch_frames"), of_patch("patch_height"), of_patch("patch_width")};
  const VideoDiTConfig& shape = model->config();
  if (3 * patch.count() != shape.patch_elements)
    refuse(directory.string(), fmt::format("patches of {} pixels in state.json", sizes_text(patch)),
           fmt::format("{} numbers to a patch, as the model has it", shape.patch_elements),
           "Name a checkpoint as isograd train leaves it");
  const VideoGrid grid{in_patches("--frames", options.frames, patch.t, shape.max_frames),
                       in_patches("--height", options.height, patch.h, shape.max_height),
                       in_patches("--width", options.width, patch.w, shape.max_width)};
  constexpr double kEveryFrame = 24;  // per second, of a run that took every frame
  const double taken = number("frames_per_second"), speed = taken > 0 ? taken : kEveryFrame;
  std::error_code problem;
  fs::create_directories(options.folder, problem);
  if (problem)
    refuse("--out " + options.folder.string(), problem.message(), "a folder that can be made",
           "Choose another one");
  std::vector<fs::path> files;
  for (std::int64_t i = 0; i < options.videos; ++i) {
    FlowSampleOptions flow{.steps = options.steps, .seed = options.seed, .number = i};
    if (options.begins) flow.begins = [&](std::int64_t step) { options.begins(i, step); };
    const at::Tensor patches = sample_flow(*model, grid, flow);
    files.push_back(options.folder / fmt::format("sample-{}.png", i));
    write_apng(files.back(), unpatchify(to_bytes(patches), grid, patch), speed);
  }
  return files;
}

}  // namespace isograd
