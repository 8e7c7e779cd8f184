// For tests: a small language model on generated text of uneven documents, as a problem for verify().
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "isograd/data.hpp"
#include "isograd/model.hpp"
#include "isograd/random.hpp"
#include "isograd/verify.hpp"
#include "isograd/world.hpp"
#include "train/build.hpp"
#include "verify/run.hpp"

namespace isograd::verify_test {

// A folder that goes when the test ends.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "isograd-verify-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// 24 documents of 3 to 160 letters: shorter and longer than a pack.
inline std::shared_ptr<TokenStore> generated_corpus() {
  static const ScratchFolder folder;
  static const std::shared_ptr<TokenStore> store = [] {
    std::filesystem::create_directories(folder.path() / "text");
    for (std::uint64_t document = 0; document < 24; ++document) {
      const RandomKey key{.seed = 5, .sample = document};
      const auto length = 3 + random_bits(key, 0) % 158;
      std::string text;
      for (std::uint64_t i = 1; i <= length; ++i) text += static_cast<char>('a' + random_bits(key, i) % 26);
      std::ofstream(folder.path() / "text" / fmt::format("{:02}.txt", document)) << text;
    }
    const auto shards = pack_corpus({.patterns = {(folder.path() / "text").string()}}, *byte_tokenizer(),
                                    folder.path() / "shards");
    return TokenStore::open(shards);
  }();
  return store;
}

struct Small {
  bool tied = true;
  std::int64_t key_value_heads = 2;
  std::int64_t packs_per_step = 7;
  std::int64_t packs_per_micro_batch = 2;
  std::int64_t pack_length = 40;
  at::ScalarType dtype = at::kFloat;
  double max_norm = 0.5;  // clips

  DecoderConfig shape() const {
    DecoderConfig config;
    config.hidden = 32;
    config.layers = 2;
    config.heads = 4;
    config.key_value_heads = key_value_heads;
    config.head_dim = 8;
    config.feed_forward = 48;
    config.tied_output = tied;
    config.initializer_range = 0.2;  // gradients of every parameter far from zero
    return config;
  }

  LoaderOptions loader(int rank, int size) const {
    return {.pack_length = pack_length,
            .packs_per_step = packs_per_step,
            .packs_per_micro_batch = packs_per_micro_batch,
            .seed = 3,
            .rank = rank,
            .size = size,
            .read_ahead = false};
  }
};

inline std::unique_ptr<TextLoader> loader_of(const Small& small, int rank, int size) {
  auto store = generated_corpus();
  std::vector<std::int64_t> documents(static_cast<std::size_t>(store->num_documents()));
  std::iota(documents.begin(), documents.end(), 0);
  return std::make_unique<TextLoader>(store, documents, small.loader(rank, size));
}

inline VerifyModel model_of(const Small& small, at::ScalarType dtype) {
  auto model = std::make_shared<DecoderLM>(small.shape(), dtype, 11);
  return {.named = model->named(),
          .logits = [model](const Batch& batch) { return model->logits(batch); },
          .loss_terms = [model](const Batch& batch) -> LossTerms {
            return {{"cross_entropy",
                     cross_entropy_sum(model->logits(batch), batch.targets, {.weights = batch.weights})}};
          }};
}

// A model whose blocks ZeRO-3 can take; to all others it is the plain one.
inline VerifyModel model_in_units(const Small& small, at::ScalarType dtype) {
  auto model = std::make_shared<DecoderLM>(small.shape(), dtype, 11);
  const ModelUnits units = model_units(*model, RunConfig{});
  return {.named = model->named(),
          .logits = [model](const Batch& batch) { return model->logits(batch); },
          .loss_terms =
              inside(units.root,
                     [model](const Batch& batch) -> LossTerms {
                       return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets, {})}};
                     }),
          .units = units};
}

// Buckets small enough that a model of this size has several.
inline LayoutUnderTest bucketed_layout(bool overlap = true) {
  return {overlap ? "bucketed" : "bucketed, no overlap", [overlap](auto parameters, Group group) {
            return bucketed(std::move(parameters), group, {.bucket_bytes = 16 << 10, .overlap = overlap});
          }};
}
inline LayoutUnderTest naive_layout() {
  return {"naive", [](auto parameters, Group group) { return naive(std::move(parameters), group); }};
}

inline VerifyProblem problem_of(const Small& small, const World& world) {
  VerifyProblem problem;
  problem.updates = 0;
  problem.make_model = [small](at::ScalarType dtype) { return model_of(small, dtype); };
  problem.local = loader_of(small, world.rank, world.size)->next();
  problem.whole = [small] { return loader_of(small, 0, 1)->whole_step({}); };
  problem.alone = [small] { return loader_of(small, 0, 1)->next(); };
  problem.dtype = small.dtype;
  problem.step = {.max_norm = small.max_norm};
  problem.layouts = {bucketed_layout()};
  return problem;
}

// Rank 0's verdict of a step on `ranks` thread ranks; all of them agree on whether it passes.
inline Verdict verdict_of(int ranks, const std::function<Verdict(World&)>& verify_here) {
  Verdict verdict;
  std::vector<int> passed(static_cast<std::size_t>(ranks));
  run_ranks(ranks,
            [&](World& world) {
              Verdict own = verify_here(world);
              passed[static_cast<std::size_t>(world.rank)] = own.passed;
              if (world.rank == 0) verdict = std::move(own);
            },
            {.timeout = std::chrono::seconds(60)});
  for (int answer : passed)
    if (answer != passed[0]) throw std::runtime_error("the ranks do not agree on the verdict");
  return verdict;
}

// The verdict on the small model; `change` plants a fault, on every rank.
inline Verdict verify_on(int ranks, const Small& small, const ChangeProblem& change = {}) {
  return verdict_of(ranks, [&](World& world) {
    VerifyProblem problem = problem_of(small, world);
    if (change) change(problem, world);
    return verify(problem, world.group);
  });
}

// The verdict on a configured run.
inline Verdict verify_on(int ranks, const RunConfig& config, const std::vector<std::string>& layouts = {},
                         const ChangeProblem& change = {}) {
  return verdict_of(ranks, [&](World& world) { return verify_run(config, world, layouts, change); });
}

// The models of a problem, changed after they are made.
inline void change_model(VerifyProblem& problem, const std::function<void(VerifyModel&)>& change) {
  problem.make_model = [make = problem.make_model, change](at::ScalarType dtype) {
    VerifyModel model = make(dtype);
    change(model);
    return model;
  };
}

}  // namespace isograd::verify_test
