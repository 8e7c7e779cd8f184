// Steps of packs, the same for every layout, prefetched on a thread.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/refuse.hpp"
#include "data/options.hpp"
#include "isograd/data.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // so that their product fits

struct Range {
  std::int64_t begin = 0, end = 0;
};

// Rank r of n takes consecutive packs. The ranks' numbers differ by at most one.
Range part(Range packs, int rank, int size) {
  const std::int64_t count = packs.end - packs.begin;
  return {packs.begin + count * rank / size, packs.begin + count * (rank + 1) / size};
}

// The documents of one epoch, in packs.
class Epoch {
 public:
  // The order depends only on (seed, epoch) and `documents`; without `shuffle`, only on `documents`.
  Epoch(const TokenStore& store, std::span<const std::int64_t> documents, const LoaderOptions& options,
        std::int64_t number);
  std::int64_t number() const { return number_; }
  std::int64_t packs() const;
  // The i-th pack of the epoch's order, one part per document.
  std::vector<PackContents::Part> pack(std::int64_t i) const;

 private:
  static constexpr std::int64_t kStride = 64;

  void fit(std::span<const std::int64_t> documents);
  std::vector<PackContents::Part> split_pack(std::int64_t i) const;

  const TokenStore& store_;
  std::int64_t number_, pack_length_;
  LoaderOptions::Packing packing_;
  std::vector<std::int64_t> pack_order_;  // empty: as they come
  // kSplit. It takes 8 bytes per document.
  std::vector<std::int64_t> order_;   // documents
  std::vector<std::int64_t> starts_;  // token of the epoch at which every kStride-th document starts
  std::int64_t num_tokens_ = 0;
  // kBestFit. It takes 24 bytes per document, and 8 per pack.
  struct Chunk {
    std::int64_t document, begin, end;
  };
  std::vector<Chunk> chunks_;           // pack by pack
  std::vector<std::size_t> pack_ends_;  // in chunks_
};

Epoch::Epoch(const TokenStore& store, std::span<const std::int64_t> documents, const LoaderOptions& options,
             std::int64_t number)
    : store_(store), number_(number), pack_length_(options.pack_length), packing_(options.packing) {
  const auto shuffled = [&](std::int64_t count, const char* purpose) {
    return random_permutation(
        count, {.seed = options.seed,
                .step = static_cast<std::uint64_t>(options.shuffle || options.shuffle_packs ? number : 0),
                .layer = hash_name(purpose)});
  };
  if (options.shuffle) {
    order_ = shuffled(static_cast<std::int64_t>(documents.size()), "data.shuffle");
    for (auto& place : order_) place = documents[static_cast<std::size_t>(place)];
  } else {
    order_.assign(documents.begin(), documents.end());
  }
  if (packing_ == LoaderOptions::Packing::kBestFit) {
    fit(order_);
    order_ = {};
  } else {
    starts_.reserve(order_.size() / kStride + 1);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (i % kStride == 0) starts_.push_back(num_tokens_);
      num_tokens_ += store_.document_length(order_[i]);
    }
  }
  // Best fit makes the packs of the longest documents first; whoever takes the first packs alone, as a
  // validation may, would have these.
  if (options.shuffle_packs || packing_ == LoaderOptions::Packing::kBestFit)
    pack_order_ = shuffled(packs(), "data.shuffle_packs");
}

std::int64_t Epoch::packs() const {
  return packing_ == LoaderOptions::Packing::kBestFit ? static_cast<std::int64_t>(pack_ends_.size())
                                                      : (num_tokens_ + pack_length_ - 1) / pack_length_;
}

// Best fit decreasing (Johnson 1973; for packing, Ding et al. 2024, arXiv 2404.10830): the longest chunk
// first, each into the pack with the least room that holds it, of equal ones the oldest. The number of packs
// depends only on the lengths, so it is the same in every epoch.
void Epoch::fit(std::span<const std::int64_t> documents) {
  std::vector<Chunk> chunks;
  for (const std::int64_t document : documents) {
    const std::int64_t length = store_.document_length(document);
    for (std::int64_t begin = 0; begin < length; begin += pack_length_)
      chunks.push_back({document, begin, std::min(begin + pack_length_, length)});
  }
  std::ranges::stable_sort(chunks, std::greater(), [](const Chunk& c) { return c.end - c.begin; });
  std::map<std::int64_t, std::deque<std::size_t>> by_room;  // packs
  std::vector<std::size_t> pack_of;
  std::vector<std::size_t> counts;  // chunks of each pack
  for (const Chunk& chunk : chunks) {
    const std::int64_t length = chunk.end - chunk.begin;
    std::int64_t room = pack_length_;
    std::size_t pack = counts.size();
    if (const auto fits = by_room.lower_bound(length); fits != by_room.end()) {
      room = fits->first, pack = fits->second.front();
      fits->second.pop_front();
      if (fits->second.empty()) by_room.erase(fits);
    } else {
      counts.push_back(0);
    }
    ++counts[pack];
    pack_of.push_back(pack);
    if (room > length) by_room[room - length].push_back(pack);
  }
  pack_ends_.resize(counts.size());
  std::inclusive_scan(counts.begin(), counts.end(), pack_ends_.begin());
  std::vector<std::size_t> next(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), next.begin(), std::size_t{0});
  chunks_.resize(chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks_[next[pack_of[i]]++] = chunks[i];
}

std::vector<PackContents::Part> Epoch::pack(std::int64_t i) const {
  ISOGRAD_INVARIANT(0 <= i && i < packs(), fmt::format("pack {} of {}", i, packs()));
  if (!pack_order_.empty()) i = pack_order_[static_cast<std::size_t>(i)];
  std::vector<PackContents::Part> parts;
  if (packing_ == LoaderOptions::Packing::kBestFit) {
    const auto place = static_cast<std::size_t>(i);
    for (std::size_t c = i == 0 ? 0 : pack_ends_[place - 1]; c < pack_ends_[place]; ++c)
      parts.push_back({chunks_[c].document, chunks_[c].begin, chunks_[c].end,
                       store_.document_length(chunks_[c].document)});
  } else {
    parts = split_pack(i);
  }
  if (store_.weights() == TokenStore::Weights::kOnes) return parts;
  std::vector<float> weights;
  for (auto& part : parts) {  // a target is the next token, with that token's weight
    weights.resize(static_cast<std::size_t>(std::min(part.end + 1, part.length) - part.begin - 1));
    store_.read_weights(part.document, part.begin + 1, weights);
    part.ignored = std::ranges::count(weights, 0.0F);
  }
  return parts;
}

std::vector<PackContents::Part> Epoch::split_pack(std::int64_t i) const {
  const std::int64_t begin = i * pack_length_, end = std::min(begin + pack_length_, num_tokens_);
  std::vector<PackContents::Part> parts;
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  auto document = static_cast<std::size_t>(after - starts_.begin() - 1) * kStride;
  for (std::int64_t start = *(after - 1); start < end; ++document) {
    const std::int64_t length = store_.document_length(order_[document]);
    const std::int64_t from = std::max(begin, start), to = std::min(end, start + length);
    if (from < to) parts.push_back({order_[document], from - start, to - start, length});
    start += length;
  }
  return parts;
}

using Counts = std::unordered_map<std::int64_t, std::int64_t>;  // by sample id

// Valid targets of each sample in these packs of the order.
Counts count_targets(const Epoch& epoch, Range packs) {
  Counts counts;
  for (std::int64_t i = packs.begin; i < packs.end; ++i)
    for (const auto& part : epoch.pack(i)) counts[part.document] += part.num_targets();
  return counts;
}

// These packs of the order as one batch. `sample_targets`: of each sample in the step, on all ranks.
Batch make_batch(const TokenStore& store, const Epoch& epoch, Range packs, const Counts& sample_targets) {
  std::vector<PackContents::Part> fragments;
  for (std::int64_t i = packs.begin; i < packs.end; ++i)
    for (const auto& fragment : epoch.pack(i)) fragments.push_back(fragment);
  std::int64_t total = 0;
  for (const auto& fragment : fragments) total += fragment.end - fragment.begin;

  Batch batch;
  batch.tokens = at::empty({total}, at::kLong);
  batch.targets = at::empty({total}, at::kLong);
  batch.positions = at::empty({total}, at::kLong);
  auto* tokens = batch.tokens.data_ptr<std::int64_t>();
  auto* targets = batch.targets.data_ptr<std::int64_t>();
  auto* positions = batch.positions.data_ptr<std::int64_t>();
  const at::Tensor all_weights =
      at::ones({store.weights() == TokenStore::Weights::kOnes ? 0 : total}, at::kFloat);
  auto* weights = all_weights.data_ptr<float>();
  if (store.weights() == TokenStore::Weights::kNumbers) batch.weights = all_weights;
  for (const auto& fragment : fragments) {
    const std::int64_t length = fragment.end - fragment.begin;
    store.read(fragment.document, fragment.begin, {tokens, static_cast<std::size_t>(length)});
    // Targets are shifted on the whole sample: a fragment's last token predicts the next fragment's first.
    std::copy(tokens + 1, tokens + length, targets);
    if (fragment.end < fragment.length)
      store.read(fragment.document, fragment.end, {targets + length - 1, 1});
    else
      targets[length - 1] = kIgnoreIndex;
    for (std::int64_t i = 0; i < length; ++i) positions[i] = i;
    if (store.weights() != TokenStore::Weights::kOnes) {
      const std::int64_t known = std::min(fragment.end + 1, fragment.length) - fragment.begin - 1;
      store.read_weights(fragment.document, fragment.begin + 1, {weights, static_cast<std::size_t>(known)});
      for (std::int64_t i = 0; i < known; ++i)
        if (weights[i] == 0) targets[i] = kIgnoreIndex;
      weights += length;
    }
    tokens += length, targets += length, positions += length;

    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
    batch.sample_ids.push_back(fragment.document);
    batch.sample_targets.push_back(sample_targets.at(fragment.document));
  }
  return batch;
}

}  // namespace

struct TextLoader::Impl {
  std::shared_ptr<TokenStore> store;
  std::vector<std::int64_t> documents;
  LoaderOptions options;
  std::int64_t packs = 0, steps = 0;  // of an epoch
  LoaderPosition position;            // of the step that next() returns

  mutable std::mutex mutex;  // guards `current`, which the reading thread and whole_step() share
  mutable std::shared_ptr<const Epoch> current;

  // The step at `position`. Last member: its destructor waits for the thread.
  std::future<MicroBatches> ahead;

  std::shared_ptr<const Epoch> epoch(std::int64_t number) const {
    const std::lock_guard lock(mutex);
    if (!current || current->number() != number) {
      current.reset();  // one epoch at a time in memory
      current = std::make_shared<Epoch>(*store, documents, options, number);
    }
    return current;
  }

  Range step_packs(LoaderPosition at) const {
    return {at.step * options.packs_per_step, std::min((at.step + 1) * options.packs_per_step, packs)};
  }

  // The part of a step for rank `rank` of `size`, in micro-batches of `group` packs.
  MicroBatches make(LoaderPosition at, int rank, int size, std::int64_t group) const {
    const auto order = epoch(at.epoch);
    const Range all = step_packs(at);
    const Counts sample_targets = count_targets(*order, all);
    const Range own = part(all, rank, size);
    MicroBatches batches;
    for (std::int64_t pack = own.begin; pack < own.end; pack += group) {
      batches.push_back(make_batch(*store, *order, {pack, std::min(pack + group, own.end)}, sample_targets));
      batches.back().draw = at.epoch * steps + at.step;
    }
    return batches;
  }

  MicroBatches make(LoaderPosition at) const {
    return make(at, options.rank, options.size, options.packs_per_micro_batch);
  }

  std::vector<PackContents> contents(LoaderPosition at) const {
    const auto order = epoch(at.epoch);
    const Range all = step_packs(at);
    std::vector<PackContents> result;
    for (int rank = 0; rank < options.size; ++rank) {
      const Range own = part(all, rank, options.size);
      for (std::int64_t i = own.begin; i < own.end; ++i)
        result.push_back({rank, (i - own.begin) / options.packs_per_micro_batch, order->pack(i)});
    }
    return result;
  }

  void check(LoaderPosition at) const { check_position(at, steps, "the data, pack length and batch"); }
};

TextLoader::TextLoader(std::shared_ptr<TokenStore> store, std::vector<std::int64_t> documents,
                       LoaderOptions options)
    : impl_(std::make_unique<Impl>()) {
  in_range<std::int64_t>("data.pack_length", options.pack_length, 1, kMostTokens);
  in_range<std::int64_t>("batch.packs_per_step", options.packs_per_step, 1, kMostTokens);
  in_range<std::int64_t>("batch.packs_per_micro_batch", options.packs_per_micro_batch, 1, kMostTokens);
  check_samples("document", "text", documents, store->num_documents(), options.rank, options.size);
  std::int64_t tokens = 0;
  for (const std::int64_t document : documents) tokens += store->document_length(document);
  impl_->packs = (tokens + options.pack_length - 1) / options.pack_length;
  impl_->store = std::move(store);
  impl_->documents = std::move(documents);
  impl_->options = options;
  if (options.packing == LoaderOptions::Packing::kBestFit) impl_->packs = impl_->epoch(0)->packs();
  impl_->steps = (impl_->packs + options.packs_per_step - 1) / options.packs_per_step;
}

TextLoader::~TextLoader() = default;

std::int64_t TextLoader::steps_per_epoch() const { return impl_->steps; }

MicroBatches TextLoader::next() {
  // get() rethrows the thread's exception. The position then stays, and a retry makes the step again.
  MicroBatches batches = impl_->ahead.valid() ? impl_->ahead.get() : impl_->make(impl_->position);
  impl_->position = position_after(impl_->position, impl_->steps);
  if (impl_->options.read_ahead)
    impl_->ahead =
        std::async(std::launch::async, [impl = impl_.get(), at = impl_->position] { return impl->make(at); });
  return batches;
}

MicroBatches TextLoader::whole_step(LoaderPosition position) const {
  impl_->check(position);
  return impl_->make(position, 0, 1, 1);
}

std::vector<PackContents> TextLoader::packs(LoaderPosition position) const {
  impl_->check(position);
  return impl_->contents(position);
}

LoaderPosition TextLoader::position() const { return impl_->position; }

void TextLoader::seek(LoaderPosition position) {
  impl_->check(position);
  impl_->ahead = {};  // waits for the thread and drops its step
  impl_->position = position;
}

// ---- samples of other data, by index ----

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
    const Range own = part({begin, end}, options_.rank, options_.size);
    mine.assign(order_.begin() + own.begin, order_.begin() + own.end);
  } else {
    for (std::int64_t i = begin + options_.rank; i < end; i += options_.size)
      mine.push_back(order_[static_cast<std::size_t>(i)]);
  }
  position_ = position_after(position_, steps_per_epoch());
  return mine;
}

std::optional<LoaderSampler::BatchRequestType> LoaderSampler::next(std::size_t /*batch_size*/) {
  const Sampler::Position at = sampler_.position();
  const std::vector<std::int64_t> own = sampler_.next();
  if (own.empty())
    isograd::refuse("LoaderSampler", fmt::format("no samples of step {} of epoch {}", at.step, at.epoch),
                    "at least one, of which torch::data makes a batch",
                    "Set drop_last, and samples_per_step to at least the number of ranks");
  return BatchRequestType(own.begin(), own.end());
}

void Sampler::seek(Position position) {
  if (position.epoch < 0 || position.step < 0 || position.step >= steps_per_epoch())
    isograd::refuse("Sampler position", fmt::format("epoch {}, step {}", position.epoch, position.step),
                    fmt::format("steps 0 to {}", steps_per_epoch() - 1),
                    "Seek to what position() gave, with the same number of samples and batch");
  position_ = position;
}

}  // namespace isograd
