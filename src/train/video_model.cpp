#include "train/video_model.hpp"

#include "isograd/error.hpp"
#include "train/own_model.hpp"

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

// Gates and the largest grid follow from the keys that people set, and from the data.
ShapeKeys video_shape_keys(VideoDiTConfig shape) {
  ShapeKeys keys;
  for (const ShapeField& field : fields(shape))
    keys.emplace_back((field.key == "timestep_features" ? "video." : "model.") + field.key, field.text());
  return keys;
}

}  // namespace isograd
