// Videos as tokens: patches in token order, as bytes.
#include <ATen/ATen.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <numeric>

#include "base/refuse.hpp"
#include "data/corpus.hpp"
#include "data/options.hpp"
#include "isograd/data.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

VideoGrid grid_of(const at::Tensor& frames, VideoGrid patch) {
  const bool fits = frames.dim() == 4 && frames.size(3) == 3 && frames.scalar_type() == at::kByte &&
                    frames.numel() > 0 && frames.size(0) % patch.t == 0 && frames.size(1) % patch.h == 0 &&
                    frames.size(2) % patch.w == 0;
  if (!fits)
    refuse("frames of a video", c10::str(c10::toString(frames.scalar_type()), " ", frames.sizes()),
           fmt::format("uint8 [F, H, W, 3] in whole patches of {} x {} x {}", patch.t, patch.h, patch.w),
           "Crop the frames");
  return {frames.size(0) / patch.t, frames.size(1) / patch.h, frames.size(2) / patch.w};
}

}  // namespace

void check(const VideoOptions& options) {
  constexpr std::int64_t kMostPixels = 1 << 14, kMostFrames = 1 << 30;
  in_range<std::int64_t>("video.patch_frames", options.patch.t, 1, 256);
  in_range<std::int64_t>("video.patch_height", options.patch.h, 1, 1024);
  in_range<std::int64_t>("video.patch_width", options.patch.w, 1, 1024);
  in_range<std::int64_t>("video.height", options.height, options.patch.h, kMostPixels);
  in_range<double>("video.frames_per_second", options.frames_per_second, 0, 1000);
  if (options.max_frames != 0)
    in_range<std::int64_t>("video.max_frames", options.max_frames, options.patch.t, kMostFrames);
}

at::Tensor patchify(const at::Tensor& frames, VideoGrid patch) {
  const VideoGrid grid = grid_of(frames, patch);
  return frames.reshape({grid.t, patch.t, grid.h, patch.h, grid.w, patch.w, 3})
      .permute({0, 2, 4, 1, 3, 5, 6})
      .reshape({grid.count(), 3 * patch.count()});
}

at::Tensor unpatchify(const at::Tensor& patches, VideoGrid grid, VideoGrid patch) {
  if (patches.dim() != 2 || patches.size(0) != grid.count() || patches.size(1) != 3 * patch.count())
    refuse("patches of a video", c10::str(patches.sizes()),
           fmt::format("[{}, {}]", grid.count(), 3 * patch.count()), "Pass all patches of one video");
  return patches.reshape({grid.t, grid.h, grid.w, patch.t, patch.h, patch.w, 3})
      .permute({0, 3, 1, 4, 2, 5, 6})
      .reshape({grid.t * patch.t, grid.h * patch.h, grid.w * patch.w, 3});
}

at::Tensor to_bytes(const at::Tensor& patches) {
  return patches.to(at::kDouble).add(1).mul(127.5).round().clamp(0, 255).to(at::kByte);
}

VideoStore::VideoStore(const std::vector<at::Tensor>& videos, std::vector<std::string> names, VideoGrid patch)
    : patch_(patch), names_(std::move(names)) {
  if (videos.empty())
    refuse("videos", "none", "at least one", "Name a file, a folder or a glob such as clips/*.mp4");
  std::vector<at::Tensor> patches;
  std::vector<std::int64_t> shape{patch.t, patch.h, patch.w};
  for (const at::Tensor& frames : videos) {
    const VideoGrid grid = grid_of(frames, patch);
    grids_.push_back(grid);
    first_.push_back(first_.back() + grid.count());
    shape.insert(shape.end(), {grid.t, grid.h, grid.w});
    patches.push_back(patchify(frames, patch));
  }
  bytes_ = at::cat(patches).contiguous();
  const auto seed = XXH3_64bits(shape.data(), shape.size() * sizeof(shape[0]));
  fingerprint_ =
      XXH3_64bits_withSeed(bytes_.const_data_ptr(), static_cast<std::size_t>(bytes_.numel()), seed);
}

std::shared_ptr<const VideoStore> VideoStore::open(const VideoOptions& options) {
  check(options);
  std::vector<at::Tensor> videos;
  std::vector<std::string> names;
  for (const InputFile& file : resolve(options.patterns)) {
    videos.push_back(decode_video(file.path, options));
    names.push_back(file.path.filename().string());
  }
  return std::shared_ptr<const VideoStore>(new VideoStore(videos, std::move(names), options.patch));
}

std::shared_ptr<const VideoStore> VideoStore::from_frames(const std::vector<at::Tensor>& videos,
                                                          VideoGrid patch) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < videos.size(); ++i) names.push_back(fmt::format("video {}", i));
  return std::shared_ptr<const VideoStore>(new VideoStore(videos, std::move(names), patch));
}

std::size_t VideoStore::index(std::int64_t video) const {
  if (video < 0 || video >= num_videos())
    refuse("video", std::to_string(video), fmt::format("0 to {}", num_videos() - 1),
           "Give the number of a video of this store");
  return static_cast<std::size_t>(video);
}

at::Tensor VideoStore::checked(const at::Tensor& tokens) const {
  if (tokens.dim() != 1 || tokens.scalar_type() != at::kLong)
    refuse("tokens of videos", c10::str(c10::toString(tokens.scalar_type()), " ", tokens.sizes()),
           "[T] int64", "Pass a batch of a video loader");
  const at::Tensor numbers = tokens.cpu().contiguous();
  if (numbers.numel() == 0) return numbers;
  const auto [least, most] = at::aminmax(numbers);
  if (least.item<std::int64_t>() < 0 || most.item<std::int64_t>() >= first_.back())
    refuse("tokens of videos", fmt::format("{} to {}", least.item<std::int64_t>(), most.item<std::int64_t>()),
           fmt::format("0 to {}, those of the store's videos", first_.back() - 1),
           "Pass batches that a loader made of this store");
  return numbers;
}

VideoGrid VideoStore::largest() const {
  VideoGrid most;
  for (const VideoGrid& grid : grids_)
    most = {std::max(most.t, grid.t), std::max(most.h, grid.h), std::max(most.w, grid.w)};
  return most;
}

at::Tensor VideoStore::patches(const at::Tensor& tokens, at::ScalarType dtype) const {
  const at::Tensor bytes = bytes_.index_select(0, checked(tokens));
  return bytes.to(dtype == at::kDouble ? at::kDouble : at::kFloat).mul_(2.0 / 255).sub_(1).to(dtype);
}

at::Tensor VideoStore::coordinates(const at::Tensor& tokens) const {
  const at::Tensor numbers = checked(tokens);
  at::Tensor result = at::empty({numbers.numel(), 3}, at::kLong);
  const auto* token = numbers.const_data_ptr<std::int64_t>();
  auto* to = result.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i, to += 3) {
    const auto video = std::upper_bound(first_.begin(), first_.end(), token[i]) - first_.begin() - 1;
    const VideoGrid& grid = grids_[static_cast<std::size_t>(video)];
    std::ranges::copy(grid.place_of(token[i] - first_[static_cast<std::size_t>(video)]), to);
  }
  return result;
}

// ---- steps of whole videos, the same for every layout ----

VideoLoader::VideoLoader(std::shared_ptr<const VideoStore> store, std::vector<std::int64_t> videos,
                         VideoLoaderOptions options)
    : store_(std::move(store)), videos_(std::move(videos)), options_(options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  in_range<std::int64_t>("batch.videos_per_step", options.videos_per_step, 1, kMost);
  in_range<std::int64_t>("batch.tokens_per_micro_batch", options.tokens_per_micro_batch, 1, kMost);
  check_samples("video", "videos", videos_, store_->num_videos(), options.rank, options.size);
}

std::int64_t VideoLoader::steps_per_epoch() const {
  return (static_cast<std::int64_t>(videos_.size()) + options_.videos_per_step - 1) /
         options_.videos_per_step;
}

std::vector<std::vector<std::int64_t>> VideoLoader::assign(LoaderPosition at, int ranks) const {
  const auto all = static_cast<std::int64_t>(videos_.size());
  std::vector<std::int64_t> order(videos_.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  if (options_.shuffle)
    order = random_permutation(all, {.seed = options_.seed,
                                     .step = static_cast<std::uint64_t>(at.epoch),
                                     .layer = hash_name("data.videos")});
  const std::int64_t begin = at.step * options_.videos_per_step,
                     end = std::min(begin + options_.videos_per_step, all);
  std::vector<std::int64_t> step;  // videos, in the step's order
  for (std::int64_t i = begin; i < end; ++i)
    step.push_back(videos_[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])]);

  std::vector<std::size_t> longest_first(step.size());
  std::iota(longest_first.begin(), longest_first.end(), std::size_t{0});
  std::stable_sort(longest_first.begin(), longest_first.end(), [&](std::size_t a, std::size_t b) {
    return store_->num_tokens(step[a]) > store_->num_tokens(step[b]);
  });
  std::vector<double> costs(static_cast<std::size_t>(ranks));  // exact below 2^53
  std::vector<std::size_t> owner(step.size());
  for (const std::size_t i : longest_first) {
    const auto least = std::min_element(costs.begin(), costs.end());
    const auto length = static_cast<double>(store_->num_tokens(step[i]));
    *least += length * length;
    owner[i] = static_cast<std::size_t>(least - costs.begin());
  }
  std::vector<std::vector<std::int64_t>> by_rank(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < step.size(); ++i) by_rank[owner[i]].push_back(step[i]);
  return by_rank;
}

MicroBatches VideoLoader::batches(const std::vector<std::int64_t>& videos, LoaderPosition at,
                                  std::int64_t most) const {
  MicroBatches result;
  std::vector<at::Tensor> tokens, positions;
  const auto close = [&] {
    if (tokens.empty()) return;
    result.back().tokens = result.back().targets = at::cat(tokens);
    result.back().positions = at::cat(positions);
    tokens.clear(), positions.clear();
  };
  for (const std::int64_t video : videos) {
    const std::int64_t length = store_->num_tokens(video), first = store_->first_token(video);
    if (tokens.empty() || result.back().num_tokens() + length > most) {
      close();
      result.emplace_back().draw = at.epoch * steps_per_epoch() + at.step;
    }
    Batch& batch = result.back();
    tokens.push_back(at::arange(first, first + length, at::kLong));
    positions.push_back(at::arange(length, at::kLong));
    batch.cu_seqlens.push_back(batch.num_tokens() + length);
    batch.sample_ids.push_back(video);
    batch.sample_targets.push_back(length);
  }
  close();
  return result;
}

MicroBatches VideoLoader::next() {
  const auto own = assign(position_, options_.size)[static_cast<std::size_t>(options_.rank)];
  MicroBatches result = batches(own, position_, options_.tokens_per_micro_batch);
  position_ = position_after(position_, steps_per_epoch());
  return result;
}

MicroBatches VideoLoader::whole_step(LoaderPosition position) const {
  check(position);
  return batches(assign(position, 1)[0], position, 1);
}

LoaderPosition VideoLoader::position() const { return position_; }

void VideoLoader::seek(LoaderPosition position) {
  check(position);
  position_ = position;
}

void VideoLoader::check(LoaderPosition at) const {
  check_position(at, steps_per_epoch(), "the videos and the batch");
}

}  // namespace isograd
