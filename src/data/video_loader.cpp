// Steps of whole videos, the same for every layout.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/refuse.hpp"
#include "data/options.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {

VideoLoader::VideoLoader(std::shared_ptr<const VideoStore> store, std::vector<std::int64_t> videos,
                         VideoLoaderOptions options)
    : store_(std::move(store)), videos_(std::move(videos)), options_(options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  in_range<std::int64_t>("batch.videos_per_step", options.videos_per_step, 1, kMost);
  in_range<std::int64_t>("batch.tokens_per_micro_batch", options.tokens_per_micro_batch, 1, kMost);
  in_range<std::int64_t>("ranks", options.size, 1, 1 << 20);
  in_range<std::int64_t>("rank", options.rank, 0, options.size - 1);
  if (videos_.empty())
    refuse("data", "no videos", "at least one", "Name more videos, or lower data.validation_fraction");
  std::set<std::int64_t> seen;
  for (const std::int64_t video : videos_) {
    in_range<std::int64_t>("video", video, 0, store_->num_videos() - 1);
    // Sample ids are video numbers. A repeated video would be one sample of twice the length.
    if (!seen.insert(video).second)
      refuse("videos", fmt::format("video {} twice", video), "each video once", "Remove the repetition");
  }
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
  if (++position_.step == steps_per_epoch()) position_ = {position_.epoch + 1, 0};
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
  if (at.epoch < 0 || at.step < 0 || at.step >= steps_per_epoch())
    refuse("position of the data", fmt::format("step {} of epoch {}", at.step, at.epoch),
           fmt::format("a step below {}, those of an epoch", steps_per_epoch()),
           "Resume with the videos and the batch that the run began with");
}

}  // namespace isograd
