#include "isograd/data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {

Sampler::Sampler(const SamplerOptions& options) : options_(options) {
  const auto refuse = [](const char* where, std::string found, const char* expected) {
    isograd::refuse(where, std::move(found), expected, "Correct it");
  };
  if (options.samples < 1) refuse("Sampler samples", std::to_string(options.samples), "1 or more");
  if (options.samples_per_step < 1)
    refuse("Sampler samples_per_step", std::to_string(options.samples_per_step), "1 or more");
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    refuse("Sampler rank", fmt::format("rank {} of {}", options.rank, options.size), "0 <= rank < size");
  if (options.drop_last && options.samples < options.samples_per_step)
    refuse("Sampler drop_last",
           fmt::format("{} samples for steps of {}", options.samples, options.samples_per_step),
           "a whole step in an epoch, or drop_last off");
}

std::int64_t Sampler::steps_per_epoch() const {
  const std::int64_t more = options_.drop_last ? 0 : options_.samples_per_step - 1;
  return (options_.samples + more) / options_.samples_per_step;
}

void Sampler::shuffle() {
  if (shuffled_epoch_ == position_.epoch) return;
  shuffled_epoch_ = position_.epoch;
  if (options_.shuffle) {
    order_ = random_permutation(options_.samples, {.seed = options_.seed,
                                                   .step = static_cast<std::uint64_t>(position_.epoch),
                                                   .layer = hash_name("sampler")});
  } else {
    order_.resize(static_cast<std::size_t>(options_.samples));
    std::iota(order_.begin(), order_.end(), 0);
  }
}

std::vector<std::int64_t> Sampler::next() {
  shuffle();
  const std::int64_t begin = position_.step * options_.samples_per_step;
  const std::int64_t end = std::min(begin + options_.samples_per_step, options_.samples);
  std::vector<std::int64_t> mine;
  if (options_.assign == SamplerOptions::Assign::kBlock) {
    const std::int64_t length = end - begin;
    const std::int64_t first = begin + length * options_.rank / options_.size;
    const std::int64_t last = begin + length * (options_.rank + 1) / options_.size;
    mine.assign(order_.begin() + first, order_.begin() + last);
  } else {
    for (std::int64_t i = begin + options_.rank; i < end; i += options_.size)
      mine.push_back(order_[static_cast<std::size_t>(i)]);
  }
  if (++position_.step == steps_per_epoch()) position_ = {.epoch = position_.epoch + 1, .step = 0};
  return mine;
}

void Sampler::seek(Position position) {
  if (position.epoch < 0 || position.step < 0 || position.step >= steps_per_epoch())
    isograd::refuse("Sampler position", fmt::format("epoch {}, step {}", position.epoch, position.step),
                    fmt::format("steps 0 to {}", steps_per_epoch() - 1),
                    "Seek to what position() gave, with the same number of samples and batch");
  position_ = position;
}

}  // namespace isograd
