// The diffusion transformer on videos: its configuration keys, rules and task.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "base/markup.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd/model.hpp"
#include "isograd/random.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/attention/attention.hpp"
#include "train/build.hpp"
#include "train/rank_zero.hpp"
#include "train/task.hpp"
#include "train/task_kind.hpp"
#include "train/video_model.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace key_table {
namespace {

std::vector<ConfigKey> video_keys() {
  return {
      KEY("batch.videos_per_step", batch.videos_per_step, "videos", at_least(1, kManyTokens),
          "The global batch of a `video` run: whole videos, over all ranks and micro-batches; the "
          "last step of an epoch may be shorter. Each rank gets about the same Σ length²."),
      KEY("batch.tokens_per_micro_batch", batch.tokens_per_micro_batch, "patches", at_least(1, kManyTokens),
          "For videos: maximum number of patches that one forward and backward computes on one rank; a "
          "longer video is a micro-batch by itself. A speed and memory option: the gradient does not "
          "depend on it."),

      KEY("video.files", video.files, "", any(),
          "Files, directories or globs of videos in any format that FFmpeg decodes."),
      KEY("video.height", video.height, "pixels", at_least(1, 8192),
          "Maximum rows of pixels of a frame: larger frames are scaled down, to whole patches."),
      KEY("video.frames_per_second", video.frames_per_second, "", at_least(0, 1000),
          "Maximum frames per second that are taken. 0: every frame."),
      KEY("video.max_frames", video.max_frames, "frames", at_least(0, kManyTokens),
          "Maximum number of a video's frames that are taken, from its first. 0: all."),
      KEY("video.patch_frames", video.patch_frames, "frames", at_least(1, 256),
          "Frames of a patch, which is a token."),
      KEY("video.patch_height", video.patch_height, "pixels", at_least(1, 1024), "Rows of a patch."),
      KEY("video.patch_width", video.patch_width, "pixels", at_least(1, 1024), "Columns of a patch."),
      KEY("video.timestep_features", video.timestep_features, "", at_least(2, kWide),
          "Sines and cosines that tell the model the timestep; even."),
      KEY("video.gate_init", video.gate_init, "", at_least(-1, 1),
          "Initial value of the gates of the blocks. 0: each block begins as the identity (adaLN-Zero) "
          "and has no gradient in the first step. Otherwise the modulating projections begin like all "
          "others."),
  };
}

}  // namespace
}  // namespace key_table

namespace {

using Store = std::shared_ptr<const VideoStore>;

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
  std::vector<std::pair<std::string, at::Tensor>> named() override { return model_->named(); }
  ForwardLossTerms loss() override { return flow_matching_loss(*model_, store_, seed_); }
  void write(const fs::path& directory, const TensorStream& weights) override {
    write_video_model(directory, model_->config(), weights);
  }
  void to(at::Device device) override {
    if (!model_->device().is_meta()) model_->to(device);
  }

  ModelUnits make_units() override {
    VideoDiT& model = *model_;
    ModelUnits units{.root = UnitHandle([&model] {
                       std::vector<at::Tensor> all;
                       for (auto& [name, tensor] : model.named()) all.push_back(tensor);
                       return all;
                     }),
                     .blocks = {},
                     .initialize = [&model, seed = seed_](const std::string& name, at::Tensor& values) {
                       model.initialize(name, values, seed);
                     }};
    for (std::int64_t layer = 0; layer < model.config().layers; ++layer)
      units.blocks.emplace_back([&model, layer] { return model.block_parameters(layer); });
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
    std::vector<std::int64_t> lengths;
    for (std::size_t f = 1; f < batch.cu_seqlens.size(); ++f)
      lengths.push_back(batch.cu_seqlens[f] - batch.cu_seqlens[f - 1]);
    const at::Tensor t = at::repeat_interleave(drawn.times, at::tensor(lengths, at::kLong)).unsqueeze(1);
    return model_->velocity(batch, (data * (1 - t) + drawn.noise * t).to(model_->device(), model_->dtype()),
                            store_->coordinates(batch.tokens), drawn.times);
  }

  Layout::Named placements(const Grid& grid) override {
    return video_placements(*model_, grid, cut_options_);
  }
  Layout cut(const Mesh& mesh) override { return cut_video(*model_, mesh, cut_options_); }

  void attend_over(const Mesh& mesh) override {
    if (mesh.size(kContextAxes) == 1) return;
    model_->set_attention([over = ContextAttention(mesh, /*causal=*/false)](
                              const Batch& batch, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v) {
      return batch.cut ? over(batch, q, k, v) : variable_length_attention(q, k, v, batch, /*causal=*/false);
    });
  }

 private:
  std::shared_ptr<VideoDiT> model_;
  Store store_;
  std::uint64_t seed_;
  TensorParallelOptions cut_options_;
};

// ---- the data ----

VideoOptions video_options(const RunConfig& config) {
  return {.patterns = config.video.files,
          .height = config.video.height,
          .frames_per_second = config.video.frames_per_second,
          .max_frames = config.video.max_frames,
          .patch = {config.video.patch_frames, config.video.patch_height, config.video.patch_width}};
}

Split split_videos(std::int64_t videos, double fraction, std::uint64_t seed) {
  std::int64_t held_out = std::llround(fraction * static_cast<double>(videos));
  if (fraction > 0) held_out = std::max<std::int64_t>(held_out, 1);
  held_out = std::clamp<std::int64_t>(held_out, 0, videos - 1);  // one is left to train on
  Split split;
  const auto order = random_permutation(videos, {.seed = seed, .layer = hash_name("held-out videos")});
  for (std::size_t i = 0; i < order.size(); ++i)
    (static_cast<std::int64_t>(i) < held_out ? split.validation : split.train).push_back(order[i]);
  std::sort(split.train.begin(), split.train.end());
  std::sort(split.validation.begin(), split.validation.end());
  return split;
}

// ---- what a run shows at its end ----

constexpr std::size_t kShown = 4;      // videos whose frames are shown
constexpr std::size_t kMeasured = 32;  // training videos whose losses are, at most
constexpr std::int64_t kFrames = 6;    // frames of a video, side by side
constexpr std::int64_t kGap = 2;       // pixels between them
constexpr std::int64_t kDraws = 8;     // draws of time and noise per video; its loss is their mean
constexpr double kTimes[] = {0.3, 0.7,
                             0.9};  // times to which the shown frames are noised; 0 is data, 1 is noise

// Indices spread evenly over 0 .. n - 1, including both ends.
std::vector<std::int64_t> spread(std::int64_t n, std::int64_t most) {
  std::vector<std::int64_t> picked;
  const std::int64_t parts = std::min(n, most);
  for (std::int64_t i = 0; i < parts; ++i) picked.push_back(parts == 1 ? 0 : i * (n - 1) / (parts - 1));
  return picked;
}

// One picture of some frames of uint8 [F, H, W, 3].
std::string strip(const at::Tensor& frames, const std::string& alternative) {
  std::vector<at::Tensor> columns;
  for (const std::int64_t f : spread(frames.size(0), kFrames)) {
    if (!columns.empty()) columns.push_back(at::full({frames.size(1), kGap, 3}, 255, at::kByte));
    columns.push_back(frames[f]);
  }
  return fmt::format("<img alt=\"{}\" src=\"data:image/png;base64,{}\"/>", escape_html(alternative),
                     base64(encode_png(at::cat(columns, 1).contiguous())));
}

std::string frames_html(VideoDiT& model, const VideoStore& store, const std::vector<std::int64_t>& videos,
                        std::uint64_t seed) {
  std::string html;
  for (const std::int64_t i : spread(static_cast<std::int64_t>(videos.size()), kShown)) {
    const std::int64_t video = videos[static_cast<std::size_t>(i)];
    const VideoGrid grid = store.grid(video);
    html += fmt::format("<h3>{}<span>{} patches, {} x {} x {}</span></h3><div class=\"frames\">",
                        escape_html(store.name(video)), grid.count(), grid.t, grid.h, grid.w);
    bool first = true;
    for (const double time : kTimes) {
      const PredictedVideo shown = predict_frames(model, store, video, time, seed);
      const auto row = [&](const std::string& label, const at::Tensor& frames) {
        html += fmt::format("<span>{}</span>{}", escape_html(label),
                            strip(frames, label + " frames of " + store.name(video)));
      };
      if (first) row("original", shown.original);
      row(fmt::format("noised, t = {:g}", time), shown.noised);
      row("prediction", shown.predicted);
      first = false;
    }
    html += "</div>";
  }
  return html;
}

struct VideoLoss {
  std::int64_t video = 0;
  bool held_out = false;
  double loss = 0;
};

double mean_loss(VideoDiT& model, const VideoStore& store, std::int64_t video, std::uint64_t seed) {
  double sum = 0;
  for (std::int64_t draw = 0; draw < kDraws; ++draw)
    sum +=
        flow_matching_token_losses(model, store, video_batch(store, video, draw), seed).sum().item<double>();
  return sum / static_cast<double>(kDraws * store.grid(video).count());
}

Chart losses_chart(const VideoStore& store, const std::vector<VideoLoss>& losses) {
  Chart chart{.title = "Loss by length",
              .x_label = "patches of the video",
              .y_label = fmt::format("squared error, mean of {} draws", kDraws),
              .series = {{.name = "held out", .points = {}}, {.name = "trained on", .points = {}}},
              .lines = false};
  for (const VideoLoss& of : losses)
    chart.series[of.held_out ? 0 : 1].points.push_back(
        {static_cast<double>(store.num_tokens(of.video)), of.loss});
  std::erase_if(chart.series, [](const Series& series) { return series.points.empty(); });
  return chart;
}

// Shows frames of some of `videos`: originals, noised, and the model's one-step estimate from that. Shows
// the loss of each of `held_out` and of some of `trained` by length. Runs on one rank that has the whole
// model.
Showing show_videos(VideoDiT& model, const VideoStore& store, const std::vector<std::int64_t>& held_out,
                    const std::vector<std::int64_t>& trained, std::uint64_t seed) {
  Showing showing;
  showing.pictures.push_back(
      {.title = held_out.empty() ? "Frames" : "Frames of held-out videos",
       .caption = "Each video as it is; noised to a time t, where 0 is the video and 1 is noise; and what "
                  "the model takes the video to be when it sees that, in one step.",
       .html = frames_html(model, store, held_out.empty() ? trained : held_out, seed)});
  std::vector<VideoLoss> losses;
  for (const std::int64_t video : held_out)
    losses.push_back({video, true, mean_loss(model, store, video, seed)});
  for (const std::int64_t i : spread(static_cast<std::int64_t>(trained.size()), kMeasured)) {
    const std::int64_t video = trained[static_cast<std::size_t>(i)];
    losses.push_back({video, false, mean_loss(model, store, video, seed)});
  }
  std::stable_sort(losses.begin(), losses.end(), [&](const VideoLoss& a, const VideoLoss& b) {
    return store.num_tokens(a.video) < store.num_tokens(b.video);
  });
  showing.charts.push_back(losses_chart(store, losses));
  ReportTable table{
      .title = "Loss of each video",
      .summary = fmt::format("the mean over a video's patches and {} draws of time and noise", kDraws),
      .columns = {"video", "", "patches", "frames x rows x columns", "loss"},
      .rows = {}};
  for (const VideoLoss& of : losses) {
    const VideoGrid grid = store.grid(of.video);
    table.rows.push_back({store.name(of.video), of.held_out ? "held out" : "trained on",
                          std::to_string(grid.count()), fmt::format("{} x {} x {}", grid.t, grid.h, grid.w),
                          fmt::format("{:.4f}", of.loss)});
  }
  showing.tables.push_back(std::move(table));
  return showing;
}

class VideoTask : public Task {
 public:
  VideoTask(const RunConfig& config, Store store, Split split)
      : Task(config), store_(std::move(store)), split_(std::move(split)) {}

  std::unique_ptr<Task> under(const RunConfig& config) const override {
    return std::make_unique<VideoTask>(config, store_, split_);
  }

  std::unique_ptr<BatchLoader> make_loader(int rank, int size) const override {
    return std::make_unique<VideoLoader>(store_, split_.train,
                                         VideoLoaderOptions{.videos_per_step = config().batch.videos_per_step,
                                                            .tokens_per_micro_batch = most_tokens(),
                                                            .seed = seed(),
                                                            .rank = rank,
                                                            .size = size});
  }

  std::unique_ptr<BatchLoader> make_validation_loader(int rank, int size) const override {
    if (split_.validation.empty()) return nullptr;
    return std::make_unique<VideoLoader>(store_, split_.validation,
                                         VideoLoaderOptions{.videos_per_step = config().train.evaluate_packs,
                                                            .tokens_per_micro_batch = most_tokens(),
                                                            .seed = seed(),
                                                            .shuffle = false,
                                                            .rank = rank,
                                                            .size = size});
  }

  CutOptions cut_options() const override {
    return {.causal = false, .token_cost = 6 * shape_of_model().hidden};
  }

  std::pair<std::int64_t, std::int64_t> heads() const override {
    return {shape_of_model().heads, shape_of_model().heads};
  }

  TaskFacts facts() const override {
    const VideoOptions options = video_options(config());
    std::map<std::string, std::string> order;
    const auto add = [&](const char* key, const auto& value) { order[key] = fmt::format("{}", value); };
    add("batch.videos_per_step", config().batch.videos_per_step);
    add("video.height", options.height);
    add("video.frames_per_second", options.frames_per_second);
    add("video.max_frames", options.max_frames);
    add("video.patch_frames", options.patch.t);
    add("video.patch_height", options.patch.h);
    add("video.patch_width", options.patch.w);
    order["videos (a checksum of their pixels)"] = fmt::format("{:016x}", store_->fingerprint());
    return {.documents = "videos",
            .tokens = "patches",
            .unit = "squared error",
            .batch = fmt::format("{} videos", config().batch.videos_per_step),
            .micro_batch = fmt::format("at most {} patches, or one video", most_tokens()),
            .train_documents = static_cast<std::int64_t>(split_.train.size()),
            .validation_documents = static_cast<std::int64_t>(split_.validation.size()),
            .num_tokens = store_->num_tokens(),
            .order = std::move(order)};
  }

  std::string describe_step(std::int64_t step, int ranks) const override {
    std::string text;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto loader = make_loader(rank, ranks);
      loader->seek(position_of_step(*loader, step));
      if (rank == 0)
        text = fmt::format("step {}: step {} of {} of epoch {}\n", step, loader->position().step + 1,
                           loader->steps_per_epoch(), loader->position().epoch + 1);
      const MicroBatches batches = loader->next();
      for (std::size_t i = 0; i < batches.size(); ++i) {
        text += fmt::format("rank {}, micro-batch {}, {} patches\n", rank, i + 1, batches[i].num_tokens());
        for (const std::int64_t video : batches[i].sample_ids) {
          const VideoGrid grid = store_->grid(video);
          text += fmt::format("  {}: {} x {} x {} patches\n", store_->name(video), grid.t, grid.h, grid.w);
        }
      }
    }
    return text;
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

  std::shared_ptr<TaskModel> make_model(at::ScalarType dtype) const override {
    if (!config().model.load.empty()) return with(read_video_model(config().model.load, dtype));
    return with(std::make_shared<VideoDiT>(shape_of_model(), dtype, seed()));
  }
  std::shared_ptr<TaskModel> make_model_without_values() const override {
    return with(VideoDiT::without_values(shape_of_model(), scalar_type(config().train.dtype)));
  }
  std::shared_ptr<TaskModel> make_blank_model(at::ScalarType dtype) const override {
    return with(std::make_shared<VideoDiT>(shape_of_model(), dtype, 0));
  }
  ModelToLayOut make_model_to_lay_out(const fs::path& directory) const override {
    const fs::path from = directory.empty() ? fs::path(config().model.load) : directory;
    const at::ScalarType dtype = scalar_type(config().train.dtype);
    if (from.empty()) {
      const auto model = VideoDiT::without_values(shape_of_model(), dtype);
      return {.model = with(model),
              .fill = [model, seed = seed()](const std::string& name, at::Tensor& values) {
                model->initialize(name, values, seed);
              }};
    }
    const auto model = VideoDiT::without_values(read_video_shape(from), dtype);
    const auto weights = std::make_shared<const OwnWeights>(open_video_weights(from));
    return {.model = with(model),
            .fill = [weights](const std::string& name, at::Tensor& values) { weights->fill(name, values); },
            .check_values =
                [weights, model, dtype] {
                  for (const auto& [name, parameter] : model->named())
                    weights->fill(name, at::empty(parameter.sizes(), dtype));
                }};
  }

  ShapeKeys shape() const override { return video_shape_keys(shape_of_model()); }
  ShapeKeys saved_shape(const fs::path& directory) const override {
    return video_shape_keys(read_video_shape(directory));
  }

  Showing show(TaskModel& model, const Outcome&, const Outcome*) const override {
    return show_videos(static_cast<VideoModel&>(model).transformer(), *store_, split_.validation,
                       split_.train, seed());
  }

  // The mean over a patch of (v − (ε − x0))², from its definition.
  PlainLosses plain_losses() const override {
    return [store = store_, seed = seed()](const Batch& batch, const at::Tensor& velocity) {
      const FlowNoise drawn = flow_noise(batch, store->patch_elements(), seed);
      const at::Tensor target = drawn.noise - store->patches(batch.tokens, at::kDouble);
      return (velocity - target.to(velocity.scalar_type())).pow(2).mean(1);
    };
  }
  std::string loss_name() const override { return "flow_matching"; }

  RunConfig micro_sized(int ranks, std::int64_t step) const override {
    RunConfig micro = config();
    micro.batch.videos_per_step = ranks + 1;
    micro.batch.tokens_per_micro_batch = 1;
    micro.run.seed += step;
    return micro;
  }

 private:
  std::uint64_t seed() const { return static_cast<std::uint64_t>(config().run.seed); }
  std::int64_t most_tokens() const { return config().batch.tokens_per_micro_batch; }

  // The model has positions up to the largest video of this data.
  VideoDiTConfig shape_of_model() const {
    if (!config().model.load.empty()) return loaded_shape();
    const VideoGrid largest = store_->largest();
    const auto& shape = config().model.shape;
    VideoDiTConfig made{.patch_elements = store_->patch_elements(),
                        .hidden = shape.hidden,
                        .layers = shape.layers,
                        .heads = shape.heads,
                        .head_dim = shape.head_dim,
                        .feed_forward = shape.feed_forward,
                        .max_frames = largest.t,
                        .max_height = largest.h,
                        .max_width = largest.w,
                        .timestep_features = config().video.timestep_features,
                        .initializer_range = shape.initializer_range,
                        .gate_init = config().video.gate_init};
    check(made);
    return made;
  }

  VideoDiTConfig loaded_shape() const {
    const VideoDiTConfig shape = read_video_shape(config().model.load);
    const VideoGrid largest = store_->largest();
    if (shape.patch_elements != store_->patch_elements() || largest.t > shape.max_frames ||
        largest.h > shape.max_height || largest.w > shape.max_width)
      refuse(config().model.load + " (model.load)",
             fmt::format("videos of up to {} x {} x {} patches of {} numbers", largest.t, largest.h,
                         largest.w, store_->patch_elements()),
             fmt::format("at most {} x {} x {} patches of {}, as this model was trained on", shape.max_frames,
                         shape.max_height, shape.max_width, shape.patch_elements),
             "Shrink them by video.height and video.max_frames, with the patches of that run");
    return shape;
  }

  std::shared_ptr<TaskModel> with(std::shared_ptr<VideoDiT> model) const {
    return std::make_shared<VideoModel>(std::move(model), store_, config());
  }

  Store store_;
  Split split_;
};

std::unique_ptr<Task> make_video_task(const RunConfig& config, Group& group) {
  if (config.video.files.empty())
    refuse("video.files", "nothing", "videos for model.kind = \"video\"",
           "Name files, folders or globs; examples/video_clips.py fetches some");
  Store store;
  // Rank 0 opens the files first, so that an error in them is reported once. Then each rank reads the
  // frames itself.
  on_rank_zero(group, [&] {
    for (const std::string& file : config.video.files)
      if (file.find_first_of("*?[") == std::string::npos && !fs::exists(file))
        refuse("video.files", "no " + file, "a file, a folder or a glob of videos",
               "Check the path; python3 examples/video_clips.py fetches the clips of examples/video.toml");
    store = VideoStore::open(video_options(config));
  });
  if (!store) store = VideoStore::open(video_options(config));
  Split split = split_videos(store->num_videos(), config.data.validation_fraction,
                             static_cast<std::uint64_t>(config.run.seed));
  return std::make_unique<VideoTask>(config, std::move(store), std::move(split));
}

// ---- rules ----

constexpr const char* kNotOfVideos = "model.kind is \"video\", which learns from video.files";
constexpr const char* kOnlyOfVideos = "model.kind is not \"video\"";

// One video per micro-batch, or all of a rank's at once.
std::vector<RunConfig> video_accumulations(const RunConfig& config, int) {
  std::vector<RunConfig> all{config};
  std::int64_t& most_tokens = all.emplace_back(config).batch.tokens_per_micro_batch;
  most_tokens = most_tokens > 1 ? 1 : kAllTokens;
  return all;
}

void check_video_cut(const RunConfig& config, int) {
  if (config.parallel.tp == 1) return;
  const auto& fresh = config.model.shape;
  const std::string& load = config.model.load;
  const VideoDiTConfig shape = load.empty()
                                   ? VideoDiTConfig{.heads = fresh.heads, .feed_forward = fresh.feed_forward}
                                   : read_video_shape(load);
  check_tensor_parallel(config, {.heads = shape.heads,
                                 .key_heads = shape.heads,
                                 .others = {{"features of the feed-forward network", shape.feed_forward}}});
}

}  // namespace

const TaskKind& video_kind() {
  static const TaskKind kind{
      .name = "video",
      .samples = "videos",
      .tokens = "patches",
      .smaller = "batch.tokens_per_micro_batch, video.height or video.max_frames",
      .samples_per_step = [](const RunConfig& config) { return config.batch.videos_per_step; },
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

}  // namespace isograd
