#include "train/video_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "train/build.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

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

constexpr double kFramesPerSecond = 24;  // for a run that took every frame, whatever the rate of its files

// Converts frames, rows or columns to patches; 0: the most that the model supports.
std::int64_t in_patches(const char* flag, std::int64_t asked, std::int64_t patch, std::int64_t most) {
  if (asked == 0) return most;
  if (asked % patch == 0 && asked >= patch && asked <= most * patch) return asked / patch;
  refuse(fmt::format("{} {}", flag, asked),
         fmt::format("{}, where this model has patches of {}", asked, patch),
         fmt::format("a multiple of {} up to {}", patch, most * patch),
         fmt::format("Ask for {}", std::clamp((asked + patch - 1) / patch * patch, patch, most * patch)));
}

}  // namespace

bool is_video_model(const fs::path& directory) {
  return is_own_model(directory, kVideoFamily);
}

VideoDiTConfig read_video_shape(const fs::path& directory) {
  VideoDiTConfig shape;
  read_own_shape(directory, kVideoFamily, fields(shape));
  check(shape);
  return shape;
}

void write_video_model(const fs::path& directory, VideoDiTConfig shape, const TensorStream& weights) {
  write_own_model(directory, kVideoFamily, fields(shape), weights);
}

OwnWeights open_video_weights(const fs::path& directory) {
  const VideoDiTConfig shape = read_video_shape(directory);
  OwnWeights weights(directory);
  weights.check_layers(shape.layers);
  weights.check_shapes(VideoDiT::without_values(shape, at::kFloat)->named());
  return weights;
}

std::shared_ptr<VideoDiT> read_video_model(const fs::path& directory, at::ScalarType dtype) {
  const OwnWeights weights = open_video_weights(directory);
  auto model = std::make_shared<VideoDiT>(read_video_shape(directory), dtype, 0);
  weights.copy_into(model->named());
  return model;
}

// Keys of the shape, except gates and the largest grid, which follow from other keys and the data.
ShapeKeys video_shape_keys(VideoDiTConfig shape) {
  ShapeKeys keys;
  for (const ShapeField& field : fields(shape))
    keys.emplace_back((field.key == "timestep_features" ? "video." : "model.") + field.key, field.text());
  return keys;
}

std::vector<fs::path> sample_videos(const fs::path& directory, const VideoSampleOptions& options) {
  if (!fs::exists(directory / "state.json"))
    refuse(directory.string(), "a video model without a checkpoint's state.json, which says what a patch is",
           "a checkpoint of a video run", "Name a folder of checkpoints/ as isograd train leaves it");
  const TrainingState state = open_checkpoint(directory);
  const auto number = [&](const std::string& key) {
    const auto found = state.order.find(key);
    double value = 0;
    if (found != state.order.end()) value = std::strtod(found->second.c_str(), nullptr);
    if (found != state.order.end() && value >= 0 && value <= 8192) return value;
    refuse((directory / "state.json").string() + ": " + key,
           found != state.order.end() ? found->second : "nothing", "a number, as a video run leaves it",
           "Name a checkpoint of a video run");
  };
  const auto of_patch = [&](const std::string& axis) {
    return std::max<std::int64_t>(1, std::llround(number("video.patch_" + axis)));
  };
  const auto model = read_video_model(directory, scalar_type(state.dtype));
  const VideoGrid patch{of_patch("frames"), of_patch("height"), of_patch("width")};
  const VideoDiTConfig& shape = model->config();
  if (3 * patch.count() != shape.patch_elements)
    refuse(directory.string(),
           fmt::format("patches of {} x {} x {} pixels in state.json", patch.t, patch.h, patch.w),
           fmt::format("{} numbers to a patch, as the model has it", shape.patch_elements),
           "Name a checkpoint as isograd train leaves it");
  const VideoGrid grid{in_patches("--frames", options.frames, patch.t, shape.max_frames),
                       in_patches("--height", options.height, patch.h, shape.max_height),
                       in_patches("--width", options.width, patch.w, shape.max_width)};
  const double taken = number("video.frames_per_second"), speed = taken > 0 ? taken : kFramesPerSecond;
  std::error_code problem;
  fs::create_directories(options.folder, problem);
  if (problem)
    refuse("--out " + options.folder.string(), problem.message(), "a folder that can be made",
           "Choose another one");
  std::vector<fs::path> files;
  for (std::int64_t i = 0; i < options.videos; ++i) {
    const at::Tensor patches =
        sample_flow(*model, grid, {.steps = options.steps, .seed = options.seed, .number = i});
    files.push_back(options.folder / fmt::format("sample-{}.png", i));
    write_apng(files.back(), unpatchify(to_bytes(patches), grid, patch), speed);
  }
  return files;
}

}  // namespace isograd
