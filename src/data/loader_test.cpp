#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "data/test_support.hpp"

namespace isograd {
namespace {

using testing::config_error;
using testing::MemoryStore;

// A corpus whose tokens encode their document and place.
struct PackedCorpus {
  std::shared_ptr<MemoryStore> store;
  std::vector<std::int64_t> documents;  // those that the loader gets
};

std::int64_t token_of(std::int64_t document, std::int64_t place) { return document * 1000 + place; }

PackedCorpus corpus_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::vector<std::int64_t>> documents;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    documents.emplace_back();
    for (std::int64_t i = 0; i < lengths[d]; ++i)
      documents.back().push_back(token_of(static_cast<std::int64_t>(d), i));
  }
  PackedCorpus corpus{std::make_shared<MemoryStore>(documents), {}};
  corpus.documents.resize(lengths.size());
  std::iota(corpus.documents.begin(), corpus.documents.end(), 0);
  return corpus;
}

// Random lengths (some documents longer than a pack, some of one token), options and seed.
PackedCorpus any_corpus() {
  return corpus_of(*rc::gen::nonEmpty(
      rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(1, 30))));
}

LoaderOptions any_options() {
  return {.pack_length = *rc::gen::inRange<std::int64_t>(1, 20),
          .packs_per_step = *rc::gen::inRange<std::int64_t>(1, 7),
          .packs_per_micro_batch = *rc::gen::inRange<std::int64_t>(1, 4),
          .seed = *rc::gen::arbitrary<std::uint64_t>(),
          .shuffle = *rc::gen::arbitrary<bool>(),
          .shuffle_packs = *rc::gen::arbitrary<bool>(),
          .read_ahead = *rc::gen::arbitrary<bool>()};
}

std::vector<std::int64_t> values(const at::Tensor& tensor) {
  const auto* data = tensor.data_ptr<std::int64_t>();
  return {data, data + tensor.numel()};
}

bool equal(const Batch& a, const Batch& b) {
  return values(a.tokens) == values(b.tokens) && values(a.targets) == values(b.targets) &&
         values(a.positions) == values(b.positions) && a.cu_seqlens == b.cu_seqlens &&
         a.sample_ids == b.sample_ids && a.sample_targets == b.sample_targets;
}

bool equal(const MicroBatches& a, const MicroBatches& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [](const Batch& x, const Batch& y) { return equal(x, y); });
}

void append(Batch& to, const Batch& from) {
  if (to.num_tokens() == 0) to.tokens = to.targets = to.positions = at::empty({0}, at::kLong);
  to.tokens = at::cat({to.tokens, from.tokens});
  to.targets = at::cat({to.targets, from.targets});
  to.positions = at::cat({to.positions, from.positions});
  const std::int64_t end = to.cu_seqlens.back();
  for (std::size_t f = 1; f < from.cu_seqlens.size(); ++f) to.cu_seqlens.push_back(end + from.cu_seqlens[f]);
  to.sample_ids.insert(to.sample_ids.end(), from.sample_ids.begin(), from.sample_ids.end());
  to.sample_targets.insert(to.sample_targets.end(), from.sample_targets.begin(), from.sample_targets.end());
}

Batch joined(const MicroBatches& batches) {
  Batch all;
  all.tokens = all.targets = all.positions = at::empty({0}, at::kLong);
  for (const auto& batch : batches) append(all, batch);
  return all;
}

// Concatenating the ranks gives the one-rank step for any micro-batches. Ranks differ by at most one pack.
RC_GTEST_PROP(Loader, RanksTogetherHoldTheStepOfOneRank, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  options.size = *rc::gen::inRange(1, 9);
  std::vector<std::unique_ptr<TextLoader>> ranks;
  for (options.rank = 0; options.rank < options.size; ++options.rank)
    ranks.push_back(std::make_unique<TextLoader>(corpus.store, corpus.documents, options));
  const std::int64_t steps = ranks[0]->steps_per_epoch();
  const std::int64_t packs = (corpus.store->num_tokens() + options.pack_length - 1) / options.pack_length;
  RC_ASSERT(steps == (packs + options.packs_per_step - 1) / options.packs_per_step);
  for (std::int64_t k = 0; k < std::min<std::int64_t>(2 * steps, 12); ++k) {
    const LoaderPosition at = ranks[0]->position();
    RC_ASSERT(at.epoch == k / steps && at.step == k % steps);
    const MicroBatches whole = ranks[0]->whole_step(at);
    const std::int64_t here = std::min(options.packs_per_step, packs - at.step * options.packs_per_step);
    RC_ASSERT(static_cast<std::int64_t>(whole.size()) ==
              here);  // one micro-batch a pack; the last step is short
    Batch all = joined({});
    for (int r = 0; r < options.size; ++r) {
      const MicroBatches part = ranks[static_cast<std::size_t>(r)]->next();
      const std::int64_t fewest = here / options.size, most = (here + options.size - 1) / options.size;
      const auto batches = static_cast<std::int64_t>(part.size()), group = options.packs_per_micro_batch;
      RC_ASSERT(batches >= (fewest + group - 1) / group && batches <= (most + group - 1) / group);
      for (const auto& batch : part) append(all, batch);
    }
    RC_ASSERT(equal(all, joined(whole)));
  }
}

// An epoch, token by token, against a simple construction: concatenate documents, shift, then split.
RC_GTEST_PROP(Loader, EveryTokenAndTargetOncePerEpoch, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  options.shuffle_packs = false;
  TextLoader loader(corpus.store, corpus.documents, options);
  std::map<std::int64_t, std::int64_t> next_place;  // of each document
  std::set<std::int64_t> targets_seen;
  std::vector<std::int64_t> order;
  for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step) {
    const MicroBatches packs = loader.whole_step({0, step});
    std::map<std::int64_t, std::int64_t> targets_of;
    std::map<std::int64_t, std::int64_t> declared;
    for (std::size_t p = 0; p < packs.size(); ++p) {
      const Batch& pack = packs[p];
      const bool last = step + 1 == loader.steps_per_epoch() && p + 1 == packs.size();
      RC_ASSERT((last ? pack.num_tokens() >= 1 && pack.num_tokens() <= options.pack_length
                      : pack.num_tokens() == options.pack_length));
      const auto tokens = values(pack.tokens), targets = values(pack.targets),
                 positions = values(pack.positions);
      RC_ASSERT(static_cast<std::int64_t>(tokens.size()) == pack.cu_seqlens.back());
      RC_ASSERT(pack.cu_seqlens.size() == pack.sample_ids.size() + 1);
      for (std::size_t f = 0; f < pack.sample_ids.size(); ++f) {
        const std::int64_t id = pack.sample_ids[f], length = corpus.store->document_length(id);
        RC_ASSERT((f == 0 || id != pack.sample_ids[f - 1]));  // one fragment per document in one pack
        if (order.empty() || order.back() != id) order.push_back(id);
        RC_ASSERT(pack.cu_seqlens[f] < pack.cu_seqlens[f + 1]);
        for (std::int64_t i = pack.cu_seqlens[f]; i < pack.cu_seqlens[f + 1]; ++i) {
          const auto n = static_cast<std::size_t>(i);
          const std::int64_t place = next_place[id]++;
          RC_ASSERT(tokens[n] == token_of(id, place));
          RC_ASSERT(positions[n] == i - pack.cu_seqlens[f]);
          RC_ASSERT(targets[n] == (place + 1 < length ? token_of(id, place + 1) : kIgnoreIndex));
          if (targets[n] != kIgnoreIndex) {
            RC_ASSERT(targets_seen.insert(targets[n]).second);
            ++targets_of[id];
          }
        }
        declared.try_emplace(id, pack.sample_targets[f]);
        RC_ASSERT(declared[id] == pack.sample_targets[f]);
      }
    }
    for (const auto& [id, count] : declared) RC_ASSERT(count == targets_of[id]);
  }
  for (const auto id : corpus.documents) RC_ASSERT(next_place[id] == corpus.store->document_length(id));
  RC_ASSERT(targets_seen.size() ==
            static_cast<std::size_t>(corpus.store->num_tokens()) - corpus.documents.size());
  RC_ASSERT(order.size() == corpus.documents.size());  // a document is never taken up again
  if (!options.shuffle) RC_ASSERT(order == corpus.documents);
}

// packs() of a step lists exactly the tokens of each rank's micro-batches.
RC_GTEST_PROP(Loader, PacksSayWhatEachMicroBatchHolds, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  options.size = *rc::gen::inRange(1, 6);
  const TextLoader first(corpus.store, corpus.documents, options);
  const LoaderPosition at{*rc::gen::inRange<std::int64_t>(0, 3),
                          *rc::gen::inRange<std::int64_t>(0, first.steps_per_epoch())};
  const std::vector<PackContents> packs = first.packs(at);
  std::size_t told = 0;
  for (options.rank = 0; options.rank < options.size; ++options.rank) {
    TextLoader loader(corpus.store, corpus.documents, options);
    loader.seek(at);
    const MicroBatches batches = loader.next();
    for (std::size_t m = 0; m < batches.size(); ++m) {
      std::vector<std::int64_t> tokens, ids;
      std::int64_t targets = 0;
      for (; told < packs.size() && packs[told].rank == options.rank &&
             packs[told].micro_batch == static_cast<std::int64_t>(m);
           ++told)
        for (const auto& part : packs[told].parts) {
          RC_ASSERT(part.length == corpus.store->document_length(part.document));
          ids.push_back(part.document);
          targets += part.num_targets();
          for (std::int64_t i = part.begin; i < part.end; ++i) tokens.push_back(token_of(part.document, i));
        }
      RC_ASSERT(tokens == values(batches[m].tokens));
      RC_ASSERT(ids == batches[m].sample_ids);
      RC_ASSERT(targets == batches[m].num_targets());
    }
  }
  RC_ASSERT(told == packs.size());
}

// Shuffled packs are the same packs in another order: same tokens, targets and positions, none lost or
// repeated. A sample's targets in the step are counted over the packs of that step.
RC_GTEST_PROP(Loader, ShuffledPacksAreTheSamePacks, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  auto packs_of = [&](bool shuffle_packs) {
    options.shuffle_packs = shuffle_packs;
    TextLoader loader(corpus.store, corpus.documents, options);
    std::multiset<std::vector<std::vector<std::int64_t>>> packs;
    for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step) {
      std::map<std::int64_t, std::int64_t> targets_of, declared;
      for (const Batch& pack : loader.whole_step({1, step})) {
        packs.insert({values(pack.tokens), values(pack.targets), values(pack.positions), pack.cu_seqlens,
                      pack.sample_ids});
        const auto targets = values(pack.targets);
        for (std::size_t f = 0; f < pack.sample_ids.size(); ++f) {
          declared[pack.sample_ids[f]] = pack.sample_targets[f];
          for (std::int64_t i = pack.cu_seqlens[f]; i < pack.cu_seqlens[f + 1]; ++i)
            targets_of[pack.sample_ids[f]] += targets[static_cast<std::size_t>(i)] != kIgnoreIndex;
        }
      }
      RC_ASSERT(declared == targets_of);
    }
    return packs;
  };
  RC_ASSERT(packs_of(true) == packs_of(false));
}

// The properties above must detect the naive shift within a fragment.
TEST(Loader, TargetsCrossPacksAndSteps) {
  const PackedCorpus corpus = corpus_of({7, 2});
  TextLoader loader(corpus.store, corpus.documents,
                    {.pack_length = 3, .packs_per_step = 2, .packs_per_micro_batch = 2, .shuffle = false});
  MicroBatches step = loader.next();
  ASSERT_EQ(step.size(), 1u);
  EXPECT_EQ(values(step[0].tokens), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(values(step[0].targets), (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(values(step[0].positions), (std::vector<std::int64_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(step[0].cu_seqlens, (std::vector<std::int64_t>{0, 3, 6}));
  EXPECT_EQ(step[0].sample_ids, (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(step[0].sample_targets, (std::vector<std::int64_t>{6, 6}));
  step = loader.next();  // the short last step
  EXPECT_EQ(values(step[0].tokens), (std::vector<std::int64_t>{6, 1000, 1001}));
  EXPECT_EQ(values(step[0].targets), (std::vector<std::int64_t>{kIgnoreIndex, 1001, kIgnoreIndex}));
  EXPECT_EQ(step[0].sample_targets, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(step[0].num_targets(), 1);
  EXPECT_EQ(loader.position().epoch, 1);
}

RC_GTEST_PROP(Loader, ResumesAnywhere, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  options.size = *rc::gen::inRange(1, 4);
  options.rank = *rc::gen::inRange(0, options.size);
  TextLoader loader(corpus.store, corpus.documents, options);
  const auto stop = *rc::gen::inRange<std::int64_t>(0, 2 * loader.steps_per_epoch() + 1);
  for (std::int64_t k = 0; k < stop; ++k) loader.next();
  const LoaderPosition position = loader.position();
  TextLoader resumed(corpus.store, corpus.documents, options);
  if (*rc::gen::arbitrary<bool>()) resumed.next();  // the prefetched step is dropped
  resumed.seek(position);
  for (int k = 0; k < 4; ++k) {
    RC_ASSERT(resumed.position().epoch == loader.position().epoch);
    RC_ASSERT(resumed.position().step == loader.position().step);
    RC_ASSERT(equal(resumed.next(), loader.next()));
  }
}

TEST(Loader, OrderFollowsSeedAndEpochOnly) {
  std::vector<std::int64_t> lengths(200, 3);
  const PackedCorpus corpus = corpus_of(lengths);
  auto ids = [&](std::uint64_t seed, std::int64_t epoch, std::int64_t packs_per_step) {
    TextLoader loader(corpus.store, corpus.documents,
                      {.pack_length = 5, .packs_per_step = packs_per_step, .seed = seed});
    Batch all = joined({});
    for (std::int64_t k = 0; k < loader.steps_per_epoch(); ++k)
      for (const auto& batch : loader.whole_step({epoch, k})) append(all, batch);
    return all.sample_ids;
  };
  EXPECT_EQ(ids(1, 0, 8), ids(1, 0, 3));
  EXPECT_NE(ids(1, 0, 8), ids(2, 0, 8));
  EXPECT_NE(ids(1, 0, 8), ids(1, 1, 8));
}

TEST(Loader, ALateErrorReachesTheCallerAndThePositionStays) {
  const PackedCorpus corpus = corpus_of({10, 10, 10});
  TextLoader loader(corpus.store, corpus.documents, {.pack_length = 5, .packs_per_step = 1});
  loader.next();
  loader.seek({0, 2});  // waits for the thread: nothing reads when the store starts to fail
  corpus.store->fails = true;
  EXPECT_NE(config_error([&] { loader.next(); }).find("a damaged page"), std::string::npos);
  EXPECT_EQ(loader.position().step, 2);
  corpus.store->fails = false;
  EXPECT_TRUE(equal(loader.next(), loader.whole_step({0, 2})));
  // next() rethrows an exception of the thread.
  struct LateStore final : TokenStore {
    std::int64_t num_documents() const override { return 1; }
    std::int64_t num_tokens() const override { return 8; }
    std::int64_t document_length(std::int64_t) const override { return 8; }
    void read(std::int64_t, std::int64_t begin, std::span<std::int64_t> out) const override {
      if (begin + static_cast<std::int64_t>(out.size()) > 5) testing::torn_page();
      std::fill(out.begin(), out.end(), 1);
    }
    std::uint32_t max_token() const override { return 1; }
    std::string tokenizer_name() const override { return "test"; }
  };
  TextLoader late(std::make_shared<LateStore>(), {0}, {.pack_length = 4, .packs_per_step = 1});
  EXPECT_EQ(late.next().size(), 1u);
  EXPECT_NE(config_error([&] { late.next(); }).find("a damaged page"), std::string::npos);
  EXPECT_EQ(late.position().step, 1);
}

TEST(Loader, BadOptionsAreNamed) {
  const PackedCorpus corpus = corpus_of({4, 4});
  auto error = [&](LoaderOptions options, std::vector<std::int64_t> documents = {0, 1}) {
    return config_error([&] { TextLoader(corpus.store, documents, options); });
  };
  EXPECT_EQ(error({}), "");
  EXPECT_NE(error({.pack_length = 0}).find("data.pack_length: found 0"), std::string::npos);
  EXPECT_NE(error({.pack_length = -1}).find("data.pack_length"), std::string::npos);
  EXPECT_NE(error({.packs_per_step = 0}).find("batch.packs_per_step"), std::string::npos);
  EXPECT_NE(error({.packs_per_micro_batch = 0}).find("batch.packs_per_micro_batch"), std::string::npos);
  EXPECT_NE(error({.pack_length = std::int64_t{1} << 40}).find("data.pack_length"), std::string::npos);
  EXPECT_NE(error({.rank = 2, .size = 2}).find("rank: found 2"), std::string::npos);
  EXPECT_NE(error({}, {}).find("no documents"), std::string::npos);
  EXPECT_NE(error({}, {0, 0}).find("document 0 twice"), std::string::npos);
  EXPECT_NE(error({}, {0, 2}).find("document: found 2"), std::string::npos);
  TextLoader loader(corpus.store, {0, 1}, {.pack_length = 4, .packs_per_step = 1});
  EXPECT_NE(config_error([&] { loader.seek({0, 2}); }).find("step 2 of epoch 0"), std::string::npos);
  EXPECT_NE(config_error([&] { loader.seek({-1, 0}); }).find("epoch -1"), std::string::npos);
}

TEST(Loader, AStepWithoutTargetsAndARankWithoutPacks) {
  const PackedCorpus corpus = corpus_of({1, 1, 1});
  LoaderOptions options{.pack_length = 8, .packs_per_step = 4, .rank = 0, .size = 3};
  std::size_t batches = 0;
  for (; options.rank < options.size; ++options.rank) {
    TextLoader loader(corpus.store, corpus.documents, options);
    const MicroBatches step = loader.next();
    batches += step.size();
    for (const auto& batch : step) {
      EXPECT_EQ(batch.num_targets(), 0);
      EXPECT_EQ(batch.num_fragments(), 3);
      EXPECT_EQ(batch.sample_targets, (std::vector<std::int64_t>{0, 0, 0}));
    }
  }
  EXPECT_EQ(batches, 1u);
  EXPECT_EQ(Batch{}.num_targets(), 0);
}

RC_GTEST_PROP(Split, EveryDocumentOnceAndByTheSeedOnly, (std::uint64_t seed)) {
  const auto documents = *rc::gen::inRange<std::size_t>(1, 60);
  const double fraction = *rc::gen::inRange(0, 100) / 100.0;
  const PackedCorpus corpus = corpus_of(std::vector<std::int64_t>(documents, 2));
  const Split split = split_documents(*corpus.store, fraction, seed),
              again = split_documents(*corpus.store, fraction, seed);
  RC_ASSERT(split.train == again.train && split.validation == again.validation);
  std::vector<std::int64_t> all = split.train;
  all.insert(all.end(), split.validation.begin(), split.validation.end());
  std::sort(all.begin(), all.end());
  RC_ASSERT(all == corpus.documents);
  RC_ASSERT(!split.train.empty());
  RC_ASSERT(split.validation.empty() == (fraction == 0 || documents == 1));
  if (fraction > 0 && documents > 1)
    RC_ASSERT(std::abs(static_cast<double>(split.validation.size()) -
                       fraction * static_cast<double>(documents)) <= 1);
}

TEST(Split, SeedsDifferAndFractionsAreChecked) {
  const PackedCorpus corpus = corpus_of(std::vector<std::int64_t>(100, 2));
  EXPECT_NE(split_documents(*corpus.store, 0.2, 1).validation,
            split_documents(*corpus.store, 0.2, 2).validation);
  for (double bad : {-0.1, 1.0, std::nan("")})
    EXPECT_NE(config_error([&] { split_documents(*corpus.store, bad, 1); }).find("validation_fraction"),
              std::string::npos);
}

// ---- whole documents in packs ----

RC_GTEST_PROP(BestFit, EveryTokenOnceAndOnlyLongDocumentsAreSplit, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  options.packing = LoaderOptions::Packing::kBestFit;
  TextLoader loader(corpus.store, corpus.documents, options);
  std::multiset<std::pair<std::int64_t, std::int64_t>> seen;
  std::vector<std::int64_t> rooms;  // packs that have room left
  for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step)
    for (const PackContents& pack : loader.packs({0, step})) {
      std::int64_t tokens = 0;
      for (const auto& part : pack.parts) {
        RC_ASSERT(part.begin % options.pack_length == 0);
        RC_ASSERT(part.end == std::min(part.begin + options.pack_length, part.length));
        for (std::int64_t i = part.begin; i < part.end; ++i) seen.insert({part.document, i});
        tokens += part.end - part.begin;
      }
      RC_ASSERT(tokens <= options.pack_length);
      rooms.push_back(options.pack_length - tokens);
    }
  RC_ASSERT(static_cast<std::int64_t>(seen.size()) == corpus.store->num_tokens());
  RC_ASSERT((std::set(seen.begin(), seen.end()).size()) == seen.size());
  // If two packs fitted into one, the later would have been put into the earlier.
  std::ranges::sort(rooms, std::greater());
  if (rooms.size() > 1) RC_ASSERT(rooms[0] + rooms[1] < 2 * options.pack_length);
}

RC_GTEST_PROP(BestFit, AStepIsTheSameOnEveryNumberOfRanksAndAfterASeek, ()) {
  const PackedCorpus corpus = any_corpus();
  LoaderOptions options = any_options();
  options.packing = LoaderOptions::Packing::kBestFit;
  options.size = *rc::gen::inRange(1, 5);
  std::vector<std::unique_ptr<TextLoader>> ranks;
  for (options.rank = 0; options.rank < options.size; ++options.rank)
    ranks.push_back(std::make_unique<TextLoader>(corpus.store, corpus.documents, options));
  options.rank = 0, options.size = 1;
  TextLoader alone(corpus.store, corpus.documents, options), later(corpus.store, corpus.documents, options);
  for (std::int64_t step = 0; step < 2 * alone.steps_per_epoch(); ++step) {
    later.seek(alone.position());
    const MicroBatches own = alone.next();
    RC_ASSERT(equal(later.next(), own));
    Batch whole, split;
    for (const Batch& batch : own) append(whole, batch);
    for (auto& rank : ranks)
      for (const Batch& batch : rank->next()) append(split, batch);
    RC_ASSERT(equal(whole, split));
  }
}

}  // namespace
}  // namespace isograd
