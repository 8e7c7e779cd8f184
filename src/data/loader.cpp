// Steps of packs, the same in every layout, read ahead on a thread.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <mutex>

#include "data/epoch.hpp"
#include "isograd/error.hpp"
#include "isograd/text_data.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // so that their product fits

void in_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most)
    throw ConfigError({.where = name,
                       .found = std::to_string(value),
                       .expected = fmt::format("{} to {}", least, most),
                       .action = "Correct the value"});
}

struct Range {
  std::int64_t begin = 0, end = 0;
};

// Rank r of n takes a contiguous part of the packs; parts differ by at most one pack.
Range part(Range packs, int rank, int size) {
  const std::int64_t count = packs.end - packs.begin;
  return {packs.begin + count * rank / size, packs.begin + count * (rank + 1) / size};
}

// Packs [packs.begin, packs.end) of the epoch, one after another, as one batch. `step`: the tokens of the
// epoch that this step holds, on all ranks.
Batch make_batch(const TokenStore& store, const Epoch& epoch, std::int64_t pack_length, Range packs,
                 Range step) {
  std::vector<Epoch::Piece> fragments;
  for (std::int64_t pack = packs.begin; pack < packs.end; ++pack) {
    const auto pieces =
        epoch.pieces(pack * pack_length, std::min((pack + 1) * pack_length, epoch.num_tokens()));
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
    // The shift is made on the whole sample: the last token of a fragment predicts across the cut.
    std::copy(tokens + 1, tokens + length, targets);
    if (fragment.end < fragment.length)
      store.read(fragment.document, fragment.end, {targets + length - 1, 1});
    else
      targets[length - 1] = kIgnoreIndex;
    for (std::int64_t i = 0; i < length; ++i) positions[i] = i;
    tokens += length, targets += length, positions += length;

    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
    batch.sample_ids.push_back(fragment.document);
    // All tokens of the document but its last have a target; those inside the step count.
    const std::int64_t last = fragment.start + fragment.length - 1;
    batch.sample_targets.push_back(
        std::max<std::int64_t>(0, std::min(last, step.end) - std::max(fragment.start, step.begin)));
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
  mutable std::shared_ptr<const Epoch> current;

  std::future<MicroBatches> ahead;  // the step at `position`. Last: its destructor waits for the thread

  std::shared_ptr<const Epoch> epoch(std::int64_t number) const {
    const std::lock_guard lock(mutex);
    if (!current || current->number() != number) {
      current.reset();  // one epoch at a time in memory
      current = std::make_shared<Epoch>(*store, documents, options.seed, number, options.shuffle);
    }
    return current;
  }

  // The part of a step that rank `rank` of `size` gets, in micro-batches of `group` packs.
  MicroBatches make(LoaderPosition at, int rank, int size, std::int64_t group) const {
    const auto order = epoch(at.epoch);
    const Range all{at.step * options.packs_per_step,
                    std::min((at.step + 1) * options.packs_per_step, packs)};
    const Range step{all.begin * options.pack_length, std::min(all.end * options.pack_length, tokens)};
    const Range own = part(all, rank, size);
    MicroBatches batches;
    for (std::int64_t pack = own.begin; pack < own.end; pack += group)
      batches.push_back(
          make_batch(*store, *order, options.pack_length, {pack, std::min(pack + group, own.end)}, step));
    return batches;
  }

  MicroBatches make(LoaderPosition at) const {
    return make(at, options.rank, options.size, options.packs_per_micro_batch);
  }

  LoaderPosition after(LoaderPosition at) const {
    if (++at.step == steps) at = {at.epoch + 1, 0};
    return at;
  }

  void check(LoaderPosition at) const {
    if (at.epoch < 0 || at.step < 0 || at.step >= steps)
      throw ConfigError({.where = "position of the data",
                         .found = fmt::format("step {} of epoch {}", at.step, at.epoch),
                         .expected = fmt::format("a step below {}, those of an epoch", steps),
                         .action = "Resume with the data, pack length and batch that the run began with"});
  }
};

TextLoader::TextLoader(std::shared_ptr<TokenStore> store, std::vector<std::int64_t> documents,
                       LoaderOptions options)
    : impl_(std::make_unique<Impl>()) {
  in_range("data.pack_length", options.pack_length, 1, kMostTokens);
  in_range("batch.packs_per_step", options.packs_per_step, 1, kMostTokens);
  in_range("batch.packs_per_micro_batch", options.packs_per_micro_batch, 1, kMostTokens);
  in_range("ranks", options.size, 1, 1 << 20);
  in_range("rank", options.rank, 0, options.size - 1);
  if (documents.empty())
    throw ConfigError({.where = "data",
                       .found = "no documents",
                       .expected = "at least one",
                       .action = "Name more text, or lower data.validation_fraction"});
  std::vector<bool> seen(static_cast<std::size_t>(store->num_documents()));
  for (const std::int64_t document : documents) {
    in_range("document", document, 0, store->num_documents() - 1);
    // Sample ids are document numbers: one given twice would be one sample of twice the length.
    if (seen[static_cast<std::size_t>(document)])
      throw ConfigError({.where = "documents",
                         .found = fmt::format("document {} twice", document),
                         .expected = "each document once",
                         .action = "Remove the repetition"});
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

std::int64_t TextLoader::steps_per_epoch() const {
  return impl_->steps;
}

MicroBatches TextLoader::next() {
  // get() rethrows what the thread threw; the position then stays, and the step is made anew if asked again.
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

LoaderPosition TextLoader::position() const {
  return impl_->position;
}

void TextLoader::seek(LoaderPosition position) {
  impl_->check(position);
  impl_->ahead = {};  // waits for the thread, drops what it made
  impl_->position = position;
}

}  // namespace isograd
