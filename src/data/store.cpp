// TokenStore over mapped shards, and its split into training and validation documents.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "data/shard.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

class ShardStore final : public TokenStore {
 public:
  ShardStore(const std::vector<std::filesystem::path>& files, std::optional<std::uint32_t> end_of_text) {
    for (const auto& file : files) {
      const Shard& shard = *shards_.emplace_back(std::make_unique<Shard>(file, end_of_text));
      if (shard.tokenizer() != shards_.front()->tokenizer())
        refuse("token shard " + file.string(), describe_tokenizer(shard),
               describe_tokenizer(*shards_.front()) + ", as in " + shards_.front()->path().string(),
               "Open shards of one tokenizer together");
      first_.push_back(first_.back() + shard.num_documents());
      tokens_ += shard.num_tokens();
      max_token_ = std::max(max_token_, shard.max_token());
    }
  }

  std::int64_t num_documents() const override { return first_.back(); }
  std::int64_t num_tokens() const override { return tokens_; }
  std::uint32_t max_token() const override { return max_token_; }
  std::string tokenizer_name() const override { return shards_.front()->tokenizer(); }

  std::int64_t document_length(std::int64_t document) const override {
    const auto [shard, local] = find(document);
    return static_cast<std::int64_t>(shard->offset(local + 1) - shard->offset(local));
  }

  void read(std::int64_t document, std::int64_t begin, std::span<std::int64_t> out) const override {
    const auto [shard, local] = find(document);
    shard->require_whole();
    const std::uint64_t at = shard->offset(local), length = shard->offset(local + 1) - at;
    const auto skip = static_cast<std::uint64_t>(begin);
    ISOGRAD_INVARIANT(begin >= 0 && skip <= length && out.size() <= length - skip,
                      fmt::format("tokens [{}, {} + {}) of {}", begin, begin, out.size(), length));
    shard->read(at + skip, out);
  }

 private:
  static std::string describe_tokenizer(const Shard& shard) {
    return shard.tokenizer().empty() ? "a foreign shard" : "tokens of " + shard.tokenizer();
  }

  std::pair<const Shard*, std::int64_t> find(std::int64_t document) const {
    ISOGRAD_INVARIANT(document >= 0 && document < num_documents(), std::to_string(document));
    const auto after = std::upper_bound(first_.begin(), first_.end(), document);
    const auto shard = after - first_.begin() - 1;
    return {shards_[static_cast<std::size_t>(shard)].get(), document - *(after - 1)};
  }

  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::int64_t> first_{0};  // [shards + 1], first document of each shard
  std::int64_t tokens_ = 0;
  std::uint32_t max_token_ = 0;
};

}  // namespace

std::shared_ptr<TokenStore> TokenStore::open(const std::vector<std::filesystem::path>& files,
                                             std::optional<std::uint32_t> end_of_text) {
  if (files.empty())
    refuse("data.shards", "no files", "at least one token shard", "Name shards, or text to pack");
  return std::make_shared<ShardStore>(files, end_of_text);
}

Split split_documents(const TokenStore& store, double validation_fraction, std::uint64_t seed) {
  if (!(validation_fraction >= 0 && validation_fraction < 1))
    refuse("data.validation_fraction", std::to_string(validation_fraction), "0 or more, below 1",
           "Choose a share of the documents, such as 0.02");
  const std::int64_t documents = store.num_documents();
  std::int64_t held_out = std::llround(validation_fraction * static_cast<double>(documents));
  if (validation_fraction > 0 && documents > 1)
    held_out = std::clamp<std::int64_t>(held_out, 1, documents - 1);
  if (documents == 1) held_out = 0;

  // The `held_out` documents with the smallest random numbers.
  std::vector<std::pair<std::uint64_t, std::int64_t>> drawn(static_cast<std::size_t>(documents));
  const std::uint64_t purpose = hash_name("data.split");
  for (std::int64_t d = 0; d < documents; ++d)
    drawn[static_cast<std::size_t>(d)] = {
        random_bits({.seed = seed, .sample = static_cast<std::uint64_t>(d), .layer = purpose}, 0), d};
  if (held_out > 0 && held_out < documents)
    std::nth_element(drawn.begin(), drawn.begin() + held_out, drawn.end());
  Split split;
  split.validation.reserve(static_cast<std::size_t>(held_out));
  split.train.reserve(static_cast<std::size_t>(documents - held_out));
  for (std::int64_t i = 0; i < documents; ++i)
    (i < held_out ? split.validation : split.train).push_back(drawn[static_cast<std::size_t>(i)].second);
  std::sort(split.validation.begin(), split.validation.end());
  std::sort(split.train.begin(), split.train.end());
  return split;
}

}  // namespace isograd
