// Which rank gets which tokens, and its part of the batch.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/refuse.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using Pieces = std::vector<Piece>;

const char* const kCutting = "cutting a batch over context ranks";

void check(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options) {
  if (cu_seqlens.empty() || cu_seqlens.front() != 0 || !std::is_sorted(cu_seqlens.begin(), cu_seqlens.end()))
    refuse(kCutting, fmt::format("cu_seqlens [{}]", fmt::join(cu_seqlens, ", ")),
           "numbers that ascend from 0 to the number of tokens", "Change Batch::cu_seqlens");
  if (options.ring < 1 || options.ulysses < 1 || options.pad_to_multiple < 0 || options.token_cost < 0 ||
      options.most_tokens < 0)
    refuse(kCutting,
           fmt::format("cp_ring {}, cp_ulysses {}, pad_to_multiple {}, token_cost {}, most_tokens {}",
                       options.ring, options.ulysses, options.pad_to_multiple, options.token_cost,
                       options.most_tokens),
           "axes of 1 or more, the others of 0 or more", "Change these fields of CutOptions");
}

std::int64_t scores_of(const Piece& piece, std::int64_t document_length, bool causal) {
  return causal ? piece.length * piece.begin + piece.length * (piece.length + 1) / 2
                : piece.length * document_length;
}

// Tokens [0, length) in chunks over `parts` ranks: first and last, second and second last, ... where later
// tokens cost more. f(part, begin, end) of each chunk that is not empty.
template <typename F>
void assign_blocks(std::int64_t length, int parts, bool causal, F&& f) {
  const int chunks = causal ? 2 * parts : parts;
  for (int i = 0; i < chunks; ++i) {
    const std::int64_t begin = length * i / chunks, end = length * (i + 1) / chunks;
    if (begin < end) f(i < parts ? i : chunks - 1 - i, begin, end);
  }
}

// The row of all documents, split as if it were one.
std::vector<Pieces> assign_row(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options) {
  std::vector<Pieces> by_ring(static_cast<std::size_t>(options.ring));
  assign_blocks(
      cu_seqlens.back(), options.ring, options.causal, [&](int part, std::int64_t begin, std::int64_t end) {
        for (std::size_t d = 0; d + 1 < cu_seqlens.size(); ++d) {
          const std::int64_t from = std::max(begin, cu_seqlens[d]), to = std::min(end, cu_seqlens[d + 1]);
          if (from < to)
            by_ring[static_cast<std::size_t>(part)].push_back(
                {static_cast<std::int64_t>(d), from - cu_seqlens[d], to - from});
        }
      });
  return by_ring;
}

double imbalance(const std::vector<std::int64_t>& costs) {
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  const double highest = static_cast<double>(*std::max_element(costs.begin(), costs.end()));
  return total > 0 ? highest * static_cast<double>(costs.size()) / total : 1;
}

class Leveller {
 public:
  Leveller(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options)
      : options_(options), order_(cu_seqlens.size() - 1) {
    for (std::size_t d = 0; d + 1 < cu_seqlens.size(); ++d)
      lengths_.push_back(cu_seqlens[d + 1] - cu_seqlens[d]);
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::stable_sort(order_.begin(), order_.end(),
                     [&](std::size_t a, std::size_t b) { return lengths_[a] > lengths_[b]; });
  }

  // Cuts as few documents as will do, the longest.
  std::vector<Pieces> run() {
    std::size_t best = 0;
    double least = try_cutting(0);
    for (std::size_t cut = 1; cut <= order_.size() && least > 1 + options_.tolerance; ++cut) {
      if (lengths_[order_[cut - 1]] < 2 * options_.ring) break;  // nothing to level with
      if (const double now = try_cutting(cut); now < least) least = now, best = cut;
    }
    try_cutting(best);
    return std::move(by_ring_);
  }

 private:
  // The imbalance if the first `cut` documents of the order are cut.
  double try_cutting(std::size_t cut) {
    costs_.assign(static_cast<std::size_t>(options_.ring), 0);
    by_ring_.assign(static_cast<std::size_t>(options_.ring), {});
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const std::size_t document = order_[i];
      if (lengths_[document] == 0) continue;
      if (i < cut)
        assign_blocks(
            lengths_[document], options_.ring, options_.causal,
            [&](int part, std::int64_t begin, std::int64_t end) { add(part, document, begin, end - begin); });
      else
        add(static_cast<int>(std::min_element(costs_.begin(), costs_.end()) - costs_.begin()), document, 0,
            lengths_[document]);
    }
    return imbalance(costs_);
  }

  void add(int part, std::size_t document, std::int64_t begin, std::int64_t length) {
    const Piece piece{static_cast<std::int64_t>(document), begin, length};
    by_ring_[static_cast<std::size_t>(part)].push_back(piece);
    costs_[static_cast<std::size_t>(part)] +=
        scores_of(piece, lengths_[document], options_.causal) + options_.token_cost * length;
  }

  const CutOptions& options_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::size_t> order_;  // documents, longest first
  std::vector<std::int64_t> costs_;
  std::vector<Pieces> by_ring_;
};

// In the order of the documents; pieces that meet become one.
Pieces in_order(Pieces pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.document, a.begin) < std::pair(b.document, b.begin);
  });
  Pieces joined;
  for (const Piece& piece : pieces) {
    if (!joined.empty() && joined.back().document == piece.document &&
        joined.back().begin + joined.back().length == piece.begin)
      joined.back().length += piece.length;
    else
      joined.push_back(piece);
  }
  return joined;
}

// Even parts for the Ulysses ranks.
void split(const Pieces& pieces, int parts, std::vector<Pieces>& to) {
  std::int64_t total = 0, done = 0;
  for (const Piece& piece : pieces) total += piece.length;
  std::vector<Pieces> by_part(static_cast<std::size_t>(parts));
  for (Piece piece : pieces)
    while (piece.length > 0) {
      int part = 0;
      while (total * (part + 1) / parts <= done) ++part;
      const std::int64_t length = std::min(piece.length, total * (part + 1) / parts - done);
      by_part[static_cast<std::size_t>(part)].push_back({piece.document, piece.begin, length});
      piece.begin += length, piece.length -= length, done += length;
    }
  for (Pieces& part : by_part) to.push_back(std::move(part));
}

// The first rank with the most tokens.
int fullest_rank(const ContextCut& cut) {
  int fullest = 0;
  for (int rank = 0; rank < static_cast<int>(cut.pieces.size()); ++rank)
    if (cut.tokens_of(rank) > cut.tokens_of(fullest)) fullest = rank;
  return fullest;
}

// Checks the tokens that ranks really get, padding included.
void check_memory(const ContextCut& cut, const CutOptions& options) {
  const std::int64_t most = options.most_tokens, unit = options.pad_to_multiple;
  const int worst = fullest_rank(cut);
  const std::int64_t held = cut.tokens_of(worst);
  if (most == 0 || held <= most) return;
  std::int64_t longest = 0, padding = 0;
  const auto documents = static_cast<std::int64_t>(cut.cu_seqlens.size()) - 1;
  for (std::int64_t d = 0; d < documents; ++d)
    if (cut.document_length(d) > cut.document_length(longest)) longest = d;
  for (const Piece& piece : cut.pieces[static_cast<std::size_t>(worst)])
    if (piece.document >= documents) padding += piece.length;
  const std::int64_t total = cut.cu_seqlens.back(), usable = unit > 0 ? most / unit * unit : most;
  refuse(kCutting,
         fmt::format("{} tokens on one of {} ranks{}{}", held, cut.pieces.size(),
                     padding > 0 ? fmt::format(", {} of them padding", padding) : "",
                     total > 0 ? fmt::format("; the longest document, {}, has {} of {}", longest,
                                             cut.document_length(longest), total)
                               : ""),
         fmt::format("at most {} on a rank", most),
         usable == 0
             ? fmt::format("Lower pad_to_multiple to {} or less", most)
             : fmt::format("Use {} context ranks or more, or shorter packs", (total + usable - 1) / usable));
}

}  // namespace

ContextCut cut_documents(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options) {
  check(cu_seqlens, options);
  const auto by_ring = options.level ? Leveller(cu_seqlens, options).run() : assign_row(cu_seqlens, options);
  ContextCut cut{.cu_seqlens = cu_seqlens, .pieces = {}, .rank = 0};
  for (const Pieces& pieces : by_ring) split(in_order(pieces), options.ulysses, cut.pieces);
  for (std::size_t d = 0; d + 1 < cu_seqlens.size(); ++d)
    if (cu_seqlens[d] == cu_seqlens[d + 1])
      cut.pieces.front().push_back({static_cast<std::int64_t>(d), 0, 0});
  if (options.pad_to_multiple > 0) {
    const std::int64_t unit = options.pad_to_multiple, longest = cut.tokens_of(fullest_rank(cut));
    const std::int64_t most = std::max<std::int64_t>(1, (longest + unit - 1) / unit) * unit;
    for (std::size_t r = 0; r < cut.pieces.size(); ++r)
      if (const std::int64_t missing = most - cut.tokens_of(static_cast<int>(r)); missing > 0)
        cut.pieces[r].push_back({static_cast<std::int64_t>(cu_seqlens.size() - 1 + r), 0, missing});
  }
  check_memory(cut, options);
  return cut;
}

Batch cut_batch(const Batch& whole, const ContextCut& cut, int rank) {
  const std::int64_t total = whole.num_tokens();
  if (whole.cut) refuse(kCutting, "a batch that is a part already", "a whole batch", "Cut it once");
  if (!whole.inputs.empty())
    refuse(kCutting, "a batch with inputs, which belong to whole samples", "tokens",
           "Assign such samples whole (data parallelism)");
  if (whole.cu_seqlens != cut.cu_seqlens || whole.tokens.numel() != total || whole.targets.numel() != total ||
      whole.positions.numel() != total || (whole.weights.defined() && whole.weights.numel() != total))
    refuse(kCutting,
           fmt::format("{} tokens, {} targets, {} positions, cu_seqlens ending at {}", whole.tokens.numel(),
                       whole.targets.numel(), whole.positions.numel(), total),
           fmt::format("as many of each as cu_seqlens say, and the cut's cu_seqlens, which end at {}",
                       cut.cu_seqlens.back()),
           "Cut the batch that the documents were taken from");
  auto own = std::make_shared<ContextCut>(cut);
  own->rank = rank;
  Batch part;
  part.draw = whole.draw;
  const auto documents = static_cast<std::int64_t>(cut.cu_seqlens.size()) - 1;
  const bool ids = static_cast<std::int64_t>(whole.sample_ids.size()) == documents,
             lengths = static_cast<std::int64_t>(whole.sample_targets.size()) == documents;
  std::vector<std::int64_t> from;  // the uncut row of each token; −1 − i: the i-th token of padding
  for (const Piece& piece : own->own()) {
    const bool padding = piece.document >= documents;
    const auto d = static_cast<std::size_t>(padding ? 0 : piece.document);
    for (std::int64_t i = 0; i < piece.length; ++i)
      from.push_back(padding ? -1 - i : cut.cu_seqlens[d] + piece.begin + i);
    part.cu_seqlens.push_back(part.cu_seqlens.back() + piece.length);
    if (ids) part.sample_ids.push_back(padding ? kPaddingSample : whole.sample_ids[d]);
    if (lengths) part.sample_targets.push_back(padding ? 0 : whole.sample_targets[d]);
  }
  const at::Tensor rows = at::tensor(from, at::kLong), is_padding = rows.lt(0), index = rows.clamp_min(0);
  const auto take = [&](const at::Tensor& x, double in_padding) {
    // A batch of nothing but padding has no row to take.
    at::Tensor result = total > 0 ? x.index_select(0, index.to(x.device())) : x.new_zeros({index.size(0)});
    return result.masked_fill_(is_padding.to(x.device()), in_padding);
  };
  part.tokens = take(whole.tokens, 0);
  part.targets = take(whole.targets, kIgnoreIndex);
  part.positions = take(whole.positions, 0);
  part.positions = at::where(is_padding, -1 - rows, part.positions);
  if (whole.weights.defined()) part.weights = take(whole.weights, 0);
  part.cut = std::move(own);
  return part;
}

MicroBatches cut_micro_batches(const MicroBatches& whole, const CutOptions& options, int rank) {
  MicroBatches parts;
  for (const Batch& batch : whole)
    parts.push_back(cut_batch(batch, cut_documents(batch.cu_seqlens, options), rank));
  return parts;
}

CutCost cost_of(const ContextCut& cut, const CutOptions& options) {
  CutCost cost;
  const auto ring = static_cast<std::size_t>(options.ring), inner = static_cast<std::size_t>(options.ulysses);
  ISOGRAD_INVARIANT(cut.pieces.size() == ring * inner, fmt::format("a cut for {} ranks", cut.pieces.size()));
  cost.tokens.assign(ring, 0), cost.scores.assign(ring, 0);
  std::vector<std::int64_t> costs(ring);
  std::vector<std::set<std::size_t>> holders(cut.cu_seqlens.size() - 1);
  for (std::size_t i = 0; i < cut.pieces.size(); ++i)
    for (const Piece& piece : cut.pieces[i]) {
      const std::size_t r = i / inner;
      cost.tokens[r] += piece.length;
      cost.scores[r] += scores_of(piece, cut.document_length(piece.document), options.causal);
      if (static_cast<std::size_t>(piece.document) >= holders.size())
        cost.padding += piece.length;
      else
        holders[static_cast<std::size_t>(piece.document)].insert(r);
    }
  for (std::size_t r = 0; r < ring; ++r) costs[r] = cost.scores[r] + options.token_cost * cost.tokens[r];
  for (const auto& ranks : holders) cost.documents_cut += ranks.size() > 1;
  cost.imbalance = imbalance(costs);
  return cost;
}

std::string describe(const CutCost& cost) {
  return fmt::format(
      "cut over {} ring ranks: tokens {}; scores {}; {} documents cut; {} tokens of padding; "
      "highest cost {:.3f} of the mean",
      cost.tokens.size(), fmt::join(cost.tokens, " "), fmt::join(cost.scores, " "), cost.documents_cut,
      cost.padding, cost.imbalance);
}

}  // namespace isograd
