// Steps of packs, the same for every layout, prefetched on a thread.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/refuse.hpp"
#include "data/options.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

// The documents are concatenated; "token t of the epoch" counts along them. It takes 8 bytes per document.
class Epoch {
 public:
  // Tokens [begin, end) of a document of `length` tokens that starts at token `start` of the epoch.
  struct Span {
    std::int64_t document, begin, end, start, length;
  };

  // The order depends only on (seed, epoch) and `documents`; without `shuffle`, only on `documents`.
  Epoch(const TokenStore& store, std::span<const std::int64_t> documents, std::uint64_t seed,
        std::int64_t epoch, bool shuffle);
  std::int64_t number() const { return number_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  // The pieces of [begin, end), one per document. REQUIRES: 0 <= begin <= end <= num_tokens().
  std::vector<Span> pieces(std::int64_t begin, std::int64_t end) const;

 private:
  static constexpr std::int64_t kStride = 64;

  const TokenStore& store_;
  std::int64_t number_;
  std::vector<std::int64_t> order_;   // documents
  std::vector<std::int64_t> starts_;  // token at which every kStride-th document starts
  std::int64_t num_tokens_ = 0;
};

Epoch::Epoch(const TokenStore& store, std::span<const std::int64_t> documents, std::uint64_t seed,
             std::int64_t epoch, bool shuffle)
    : store_(store), number_(epoch) {
  if (shuffle) {
    order_ = random_permutation(
        static_cast<std::int64_t>(documents.size()),
        {.seed = seed, .step = static_cast<std::uint64_t>(epoch), .layer = hash_name("data.shuffle")});
    for (auto& place : order_) place = documents[static_cast<std::size_t>(place)];
  } else {
    order_.assign(documents.begin(), documents.end());
  }
  starts_.reserve(order_.size() / kStride + 1);
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (i % kStride == 0) starts_.push_back(num_tokens_);
    num_tokens_ += store_.document_length(order_[i]);
  }
}

std::vector<Epoch::Span> Epoch::pieces(std::int64_t begin, std::int64_t end) const {
  ISOGRAD_INVARIANT(0 <= begin && begin <= end && end <= num_tokens_,
                    fmt::format("[{}, {}) of {}", begin, end, num_tokens_));
  std::vector<Span> found;
  if (begin == end) return found;
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  auto i = static_cast<std::size_t>(after - starts_.begin() - 1) * kStride;
  for (std::int64_t start = *(after - 1); start < end; ++i) {
    const std::int64_t length = store_.document_length(order_[i]);
    const std::int64_t from = std::max(begin, start), to = std::min(end, start + length);
    if (from < to) found.push_back({order_[i], from - start, to - start, start, length});
    start += length;
  }
  return found;
}

constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // so that their product fits

struct Range {
  std::int64_t begin = 0, end = 0;
};

// Rank r of n takes consecutive packs. The ranks' numbers differ by at most one.
Range part(Range packs, int rank, int size) {
  const std::int64_t count = packs.end - packs.begin;
  return {packs.begin + count * rank / size, packs.begin + count * (rank + 1) / size};
}

// The concatenated documents of one epoch, and the order of its packs.
struct Pass {
  Epoch epoch;
  std::int64_t pack_length;
  std::vector<std::int64_t> order;  // empty: file order

  // The pieces of the i-th pack of the epoch's order.
  std::vector<Epoch::Span> pack(std::int64_t i) const {
    if (!order.empty()) i = order[static_cast<std::size_t>(i)];
    return epoch.pieces(i * pack_length, std::min((i + 1) * pack_length, epoch.num_tokens()));
  }
};

using Counts = std::unordered_map<std::int64_t, std::int64_t>;  // by sample id

// Valid targets of each sample in packs [packs.begin, packs.end) of the order: all its tokens except the
// last.
Counts count_targets(const Pass& pass, Range packs) {
  Counts counts;
  for (std::int64_t i = packs.begin; i < packs.end; ++i)
    for (const auto& piece : pass.pack(i))
      counts[piece.document] += piece.end - piece.begin - (piece.end == piece.length ? 1 : 0);
  return counts;
}

// Packs [packs.begin, packs.end) of the order, concatenated as one batch. `sample_targets`: the targets of
// each sample in the step, on all ranks.
Batch make_batch(const TokenStore& store, const Pass& pass, Range packs, const Counts& sample_targets) {
  std::vector<Epoch::Span> fragments;
  for (std::int64_t i = packs.begin; i < packs.end; ++i) {
    const auto pieces = pass.pack(i);
    fragments.insert(fragments.end(), pieces.begin(), pieces.end());
  }
  std::int64_t total = 0;
  for (const auto& fragment : fragments) total += fragment.end - fragment.begin;

  Batch batch;
  batch.tokens = at::empty({total}, at::kLong);
  batch.targets = at::empty({total}, at::kLong);
  batch.positions = at::empty({total}, at::kLong);
  auto* tokens = batch.tokens.data_ptr<std::int64_t>();
  auto* targets = batch.targets.data_ptr<std::int64_t>();
  auto* positions = batch.positions.data_ptr<std::int64_t>();
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
  std::int64_t tokens = 0, packs = 0, steps = 0;  // of an epoch
  LoaderPosition position;                        // of the step that next() returns

  mutable std::mutex mutex;  // guards `current`, which the reading thread and whole_step() share
  mutable std::shared_ptr<const Pass> current;

  std::future<MicroBatches>
      ahead;  // the step at `position`. Last member: its destructor waits for the thread

  std::shared_ptr<const Pass> pass(std::int64_t number) const {
    const std::lock_guard lock(mutex);
    if (!current || current->epoch.number() != number) {
      current.reset();  // one epoch at a time in memory
      Pass made{Epoch(*store, documents, options.seed, number, options.shuffle), options.pack_length, {}};
      if (options.shuffle_packs)
        made.order = random_permutation(packs, {.seed = options.seed,
                                                .step = static_cast<std::uint64_t>(number),
                                                .layer = hash_name("data.shuffle_packs")});
      current = std::make_shared<Pass>(std::move(made));
    }
    return current;
  }

  Range step_packs(LoaderPosition at) const {
    return {at.step * options.packs_per_step, std::min((at.step + 1) * options.packs_per_step, packs)};
  }

  // The part of a step for rank `rank` of `size`, in micro-batches of `group` packs.
  MicroBatches make(LoaderPosition at, int rank, int size, std::int64_t group) const {
    const auto order = pass(at.epoch);
    const Range all = step_packs(at);
    const Counts sample_targets = count_targets(*order, all);
    const Range own = part(all, rank, size);
    MicroBatches batches;
    for (std::int64_t pack = own.begin; pack < own.end; pack += group)
      batches.push_back(make_batch(*store, *order, {pack, std::min(pack + group, own.end)}, sample_targets));
    return batches;
  }

  MicroBatches make(LoaderPosition at) const {
    return make(at, options.rank, options.size, options.packs_per_micro_batch);
  }

  LoaderPosition after(LoaderPosition at) const {
    if (++at.step == steps) at = {at.epoch + 1, 0};
    return at;
  }

  std::vector<PackContents> contents(LoaderPosition at) const {
    const auto order = pass(at.epoch);
    const Range all = step_packs(at);
    std::vector<PackContents> result;
    for (int rank = 0; rank < options.size; ++rank) {
      const Range own = part(all, rank, options.size);
      for (std::int64_t i = own.begin; i < own.end; ++i) {
        PackContents pack{rank, (i - own.begin) / options.packs_per_micro_batch, {}};
        for (const auto& piece : order->pack(i))
          pack.parts.push_back({piece.document, piece.begin, piece.end, piece.length});
        result.push_back(std::move(pack));
      }
    }
    return result;
  }

  void check(LoaderPosition at) const {
    if (at.epoch < 0 || at.step < 0 || at.step >= steps)
      refuse("position of the data", fmt::format("step {} of epoch {}", at.step, at.epoch),
             fmt::format("a step below {}, those of an epoch", steps),
             "Resume with the data, pack length and batch that the run began with");
  }
};

TextLoader::TextLoader(std::shared_ptr<TokenStore> store, std::vector<std::int64_t> documents,
                       LoaderOptions options)
    : impl_(std::make_unique<Impl>()) {
  in_range<std::int64_t>("data.pack_length", options.pack_length, 1, kMostTokens);
  in_range<std::int64_t>("batch.packs_per_step", options.packs_per_step, 1, kMostTokens);
  in_range<std::int64_t>("batch.packs_per_micro_batch", options.packs_per_micro_batch, 1, kMostTokens);
  in_range<std::int64_t>("ranks", options.size, 1, 1 << 20);
  in_range<std::int64_t>("rank", options.rank, 0, options.size - 1);
  if (documents.empty())
    refuse("data", "no documents", "at least one", "Name more text, or lower data.validation_fraction");
  std::vector<bool> seen(static_cast<std::size_t>(store->num_documents()));
  for (const std::int64_t document : documents) {
    in_range<std::int64_t>("document", document, 0, store->num_documents() - 1);
    // Sample ids are document numbers. A repeated document would be one sample of twice the length.
    if (seen[static_cast<std::size_t>(document)])
      refuse("documents", fmt::format("document {} twice", document), "each document once",
             "Remove the repetition");
    seen[static_cast<std::size_t>(document)] = true;
    impl_->tokens += store->document_length(document);
  }
  impl_->packs = (impl_->tokens + options.pack_length - 1) / options.pack_length;
  impl_->steps = (impl_->packs + options.packs_per_step - 1) / options.packs_per_step;
  impl_->store = std::move(store);
  impl_->documents = std::move(documents);
  impl_->options = options;
}

TextLoader::~TextLoader() = default;

std::int64_t TextLoader::steps_per_epoch() const { return impl_->steps; }

MicroBatches TextLoader::next() {
  // get() rethrows the thread's exception. The position then stays, and a retry makes the step again.
  MicroBatches batches = impl_->ahead.valid() ? impl_->ahead.get() : impl_->make(impl_->position);
  impl_->position = impl_->after(impl_->position);
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

}  // namespace isograd
