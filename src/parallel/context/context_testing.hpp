// Batches cut over context ranks, for tests.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/error_testing.hpp"
#include "isograd/context_parallel.hpp"

namespace isograd::testing {

struct ContextSizes {
  int ring = 1, ulysses = 1;
  int ranks() const { return ring * ulysses; }
  std::string name() const { return fmt::format("ring {} x ulysses {}", ring, ulysses); }
};

// Those that everything about attention over context ranks is shown for.
inline const std::vector<ContextSizes> kContextSizes = {{2, 1}, {3, 1}, {4, 1}, {5, 1}, {1, 2},
                                                        {1, 4}, {2, 2}, {2, 3}, {4, 2}};

struct ContextCase {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the documents
  CutOptions options{};

  std::vector<std::int64_t> cu_seqlens() const {
    std::vector<std::int64_t> ends{0};
    for (const std::int64_t length : lengths) ends.push_back(ends.back() + length);
    return ends;
  }
  ContextCut cut(const ContextSizes& sizes, bool causal) const {
    CutOptions all = options;
    all.ring = sizes.ring, all.ulysses = sizes.ulysses, all.causal = causal;
    return cut_documents(cu_seqlens(), all);
  }
};

inline const std::vector<ContextCase> kContextCases = {
    {.name = "one long document", .lengths = {61}},
    {.name = "packs of many", .lengths = {5, 1, 9, 0, 3, 12, 7, 2, 4, 8, 6, 10, 11, 5}},
    {.name = "a row of many", .lengths = {5, 1, 9, 0, 3, 12, 7, 2, 4, 8}, .options = {.level = false}},
    {.name = "one over all ranks and short ones", .lengths = {3, 57, 5, 2}},
    {.name = "ranks with only padding", .lengths = {1}, .options = {.pad_to_multiple = 3}},
    {.name = "ranks without tokens", .lengths = {0, 1}},
    {.name = "padded", .lengths = {13, 4, 22}, .options = {.level = false, .pad_to_multiple = 4}},
};

// The uncut row of each of a rank's tokens; -1 for padding.
inline std::vector<std::int64_t> rows_of(const ContextCut& cut, int rank) {
  std::vector<std::int64_t> rows;
  for (const Piece& piece : cut.pieces[static_cast<std::size_t>(rank)])
    for (std::int64_t i = 0; i < piece.length; ++i)
      rows.push_back(piece.document + 1 < static_cast<std::int64_t>(cut.cu_seqlens.size())
                         ? cut.cu_seqlens[static_cast<std::size_t>(piece.document)] + piece.begin + i
                         : -1);
  return rows;
}

// B20: where a document and the one before it lie on more than one rank, the boundary between them is lost,
// and it is taken for that document's continuation.
inline std::shared_ptr<const ContextCut> joined_across_shards(const ContextCut& cut) {
  const auto documents = static_cast<std::int64_t>(cut.cu_seqlens.size()) - 1;
  std::vector<std::set<std::size_t>> holders(static_cast<std::size_t>(documents));
  for (std::size_t r = 0; r < cut.pieces.size(); ++r)
    for (const Piece& piece : cut.pieces[r])
      if (piece.document < documents && piece.length > 0)
        holders[static_cast<std::size_t>(piece.document)].insert(r);
  std::vector<std::int64_t> into(holders.size()), shift(holders.size());
  for (std::int64_t d = 0; d < documents; ++d) {
    const auto i = static_cast<std::size_t>(d);
    into[i] = d;
    if (d == 0 || holders[i].empty() || holders[i - 1].empty()) continue;
    std::set<std::size_t> both = holders[i];
    both.insert(holders[i - 1].begin(), holders[i - 1].end());
    if (both.size() == 1) continue;
    into[i] = into[i - 1];
    shift[i] = shift[i - 1] + cut.document_length(d - 1);
  }
  auto wrong = std::make_shared<ContextCut>(cut);
  for (auto& pieces : wrong->pieces)
    for (Piece& piece : pieces)
      if (piece.document < documents) {
        const auto d = static_cast<std::size_t>(piece.document);
        piece.document = into[d];
        piece.begin += shift[d];
      }
  return wrong;
}

using error_testing::error_of;

}  // namespace isograd::testing
