#include "loss/projection.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "kernels/matmul/product.hpp"
#include "loss/checks.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kSliceBytes = std::int64_t{1} << 19,
                       kMostOnHeap = std::int64_t{32} << 20;  // glibc maps what is larger apart

}  // namespace

// Tile sizes: the whole vocabulary with as many tokens as fit into the buffer, for a row seen whole needs
// its logits made only once; a narrower tile only where a few tokens would not fit. More tokens in a tile
// mean fewer passes over the weight's gradient: where that is small they cost little, and the buffer takes
// half of it. With G bytes of gradient and V columns on a rank of elements of b bytes
//   tokens = clamp(buffer / (b V), 16, 1024), buffer = 64 MiB from G = 64 MiB on, else max(G / 2, least),
// where 64 tokens of V columns fit into 64 MiB. least = 2 MiB, or 8 where a pass over the gradient also
// widens what it adds. Beside the buffer lies a slice of it, which a product makes.
Tiles choose_tiles(const at::Tensor& weight, const VocabularyShard& shard, Tiles tiles, std::int64_t rows) {
  // A GPU has no cache that a tile should fit into, and wants few and large kernels.
  const bool on_cpu = weight.is_cpu();
  const std::int64_t kMostBytes = std::int64_t{on_cpu ? 64 : 512} << 20, kMost = on_cpu ? 1024 : 1 << 16;
  constexpr std::int64_t kFewest = 16, kFewestUncut = 64;
  const at::ScalarType sum_type = computing_type(weight.scalar_type());
  // Each tile of tokens is a collective: ranks must choose alike, whatever their own columns.
  const std::int64_t ranks = shard.group.size(),
                     vocabulary = std::max<std::int64_t>(1, (shard.vocabulary + ranks - 1) / ranks),
                     element = static_cast<std::int64_t>(weight.element_size()),
                     gradient = shard.vocabulary * weight.size(1) *
                                static_cast<std::int64_t>(c10::elementSize(sum_type)),
                     least = std::int64_t{sum_type == weight.scalar_type() ? 2 : 8} << 20,
                     buffer = gradient >= kMostBytes || !on_cpu ? kMostBytes : std::max(gradient / 2, least);
  if (tiles.vocabulary == 0)
    tiles.vocabulary =
        std::min(vocabulary, kMostBytes / element / (tiles.tokens > 0 ? tiles.tokens : kFewestUncut));
  tiles.vocabulary = std::clamp<std::int64_t>(tiles.vocabulary, 1, vocabulary);
  if (tiles.tokens == 0) tiles.tokens = std::clamp(buffer / element / tiles.vocabulary, kFewest, kMost);
  tiles.tokens = std::clamp<std::int64_t>(tiles.tokens, 1, std::max<std::int64_t>(1, rows));
  return tiles;
}

TiledLogits::TiledLogits(at::Tensor weight, at::Tensor bias, Tiles tiles)
    : weight_(std::move(weight)), bias_(std::move(bias)), tiles_(tiles) {}

// In a buffer of its own, which a product fills slice by slice: tiles made one after the other would leave
// adjacent holes in the C library's heap. One too large for the heap is given back at once.
at::Tensor TiledLogits::operator()(const at::Tensor& rows, std::int64_t first, std::int64_t columns) {
  const auto of = [&](std::int64_t begin, std::int64_t count) {
    return product(rows, weight_.narrow(0, first + begin, count), {},
                   bias_.defined() ? bias_.narrow(0, first + begin, count) : at::Tensor());
  };
  const std::int64_t count = rows.size(0), whole = tiles_.tokens * tiles_.vocabulary,
                     element = static_cast<std::int64_t>(weight_.element_size()),
                     elements = kSliceBytes / element;
  if (!rows.is_cpu() || count * columns <= elements || whole * element > kMostOnHeap) return of(0, columns);
  if (!buffer_.defined()) buffer_ = at::empty({whole}, rows.options());
  at::Tensor made = buffer_.narrow(0, 0, count * columns).view({count, columns});
  const std::int64_t step = std::max<std::int64_t>(64, elements / count);
  for (std::int64_t begin = 0; begin < columns; begin += step) {
    const std::int64_t width = std::min(step, columns - begin);
    made.narrow(1, begin, width).copy_(of(begin, width));
  }
  return made;
}

void accumulate(const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& turned, bool first,
                at::Tensor to) {
  if (to.scalar_type() == gradient.scalar_type()) return multiply_into(to, gradient.t(), rows.t(), !first);
  if (!to.is_cpu()) {
    to.add_(at::mm(gradient.t(), rows));
    return;
  }
  // In slices whose partial result is still in the cache when it is added.
  constexpr std::int64_t kSliceElements = std::int64_t{1} << 20;
  const std::int64_t columns = to.size(0), step = std::max<std::int64_t>(
                                               64, kSliceElements / std::max<std::int64_t>(1, to.size(1)));
  for (std::int64_t begin = 0; begin < columns; begin += step) {
    const std::int64_t count = std::min(step, columns - begin);
    const at::Tensor part = product(gradient.narrow(1, begin, count).t(), turned);
    if (first)
      to.narrow(0, begin, count).copy_(part);
    else
      to.narrow(0, begin, count).add_(part);
  }
}

bool wants_gradient(const at::Tensor& values) {
  return at::GradMode::is_enabled() && values.defined() && values.requires_grad();
}

void check_projection(const std::string& where, const at::Tensor& hidden, const at::Tensor& weight,
                      const at::Tensor& bias) {
  check_type(where, "hidden", hidden);
  check_type(where, "weight", weight);
  const auto describe = [](const at::Tensor& t) {
    return fmt::format("{} of {} on {}", c10::str(t.sizes()), c10::toString(t.scalar_type()),
                       t.device().str());
  };
  const auto fits = [&](const at::Tensor& t) {
    return t.scalar_type() == hidden.scalar_type() && t.device() == hidden.device();
  };
  if (hidden.dim() != 2 || weight.dim() != 2 || hidden.size(1) != weight.size(1) || !fits(weight))
    refuse(where, fmt::format("hidden {}, weight {}", describe(hidden), describe(weight)),
           "hidden [T, H] and weight [V, H] of one type on one device", "Flatten the leading dims of hidden");
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0) || !fits(bias)))
    refuse(where, fmt::format("bias {}, weight {}", describe(bias), describe(weight)),
           "bias [V] of the weight's type on its device", "Pass one bias for each token of the vocabulary");
}

torch::autograd::variable_list made_gradients(const std::string& where,
                                              torch::autograd::AutogradContext& context,
                                              const at::Tensor& upstream) {
  if (at::GradMode::is_enabled())
    refuse(where, "a backward with create_graph", "first derivatives only",
           "Use at::linear and at::cross_entropy_loss where second derivatives are needed");
  const auto type = static_cast<at::ScalarType>(context.saved_data["type"].toInt());
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  torch::autograd::variable_list gradients = context.get_saved_variables();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    if (!context.needs_input_grad(i)) {
      gradient = at::Tensor();
      continue;
    }
    const at::Tensor scale = upstream.to(computing_type(gradient.scalar_type()));
    // They are not read again unless the graph is kept.
    gradient = (keep ? gradient * scale : gradient.detach().mul_(scale)).to(type);
  }
  gradients.emplace_back();
  return gradients;
}

}  // namespace isograd
