// The catalogue of all parameters, the collectives that follow from their placements, and comparisons of
// ranks.
#include "isograd/parameters.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

// The elements of a slice in a tensor where it begins at `begin`. Shares memory.
at::Tensor box(at::Tensor tensor, const std::vector<std::int64_t>& begin,
               const std::vector<std::int64_t>& sizes) {
  for (std::size_t dim = 0; dim < sizes.size(); ++dim)
    tensor = tensor.narrow(static_cast<std::int64_t>(dim), begin[dim], sizes[dim]);
  return tensor;
}

bool is_everywhere(const Placement& placement, const Grid& grid) {
  return placement.stages.empty() || !grid.has(kStageAxis) ||
         static_cast<int>(placement.stages.size()) == grid.size({kStageAxis});
}

// Each rank's text, by rank. Collective.
std::vector<std::string> all_texts(const std::string& mine, Group& group) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  std::copy(mine.begin(), mine.end(), bytes.data_ptr<std::uint8_t>());
  const at::Tensor sizes = group.all_gather(at::full({1}, bytes.size(0), at::kLong)).flatten();
  const at::Tensor all = group.all_gather_rows(bytes);
  const auto* begin = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto size = static_cast<std::size_t>(sizes[rank].item<std::int64_t>());
    texts.emplace_back(begin, size);
    begin += size;
  }
  return texts;
}

// The line of each text in which they differ first; a text that has ended says "nothing more".
std::pair<std::string, std::string> first_difference(const std::string& one, const std::string& other) {
  const auto line = [](const std::string& text, std::size_t begin) {
    return begin >= text.size() ? std::string("nothing more")
                                : text.substr(begin, text.find('\n', begin) - begin);
  };
  std::size_t begin = 0;
  while (line(one, begin) == line(other, begin)) begin += line(one, begin).size() + 1;
  return {line(one, begin), line(other, begin)};
}

// ConfigError on every rank that names the first parameter whose placement differs between ranks, and the
// difference. Collective.
void check_same_placements(const std::vector<std::pair<std::string, Placement>>& placements, Group group) {
  if (group.size() == 1) return;
  std::vector<std::string> texts;
  for (const auto& [name, placement] : placements)
    texts.push_back(fmt::format("{}", fmt::join(describe(name, placement), "\n")));
  const auto count = static_cast<std::int64_t>(texts.size());
  const at::Tensor counts = group.all_gather(at::full({1}, count, at::kLong));
  const auto most = counts.max().item<std::int64_t>();
  at::Tensor mine = at::zeros({most}, at::kLong);  // 0: this rank has no such parameter
  for (std::int64_t i = 0; i < count; ++i) mine[i] = hash_of(texts[i].data(), texts[i].size());
  const at::Tensor all = group.all_gather(mine);  // [ranks, most]
  const at::Tensor differs = all.ne(all.select(0, 0)).any(0);
  if (!differs.any().item<bool>()) return;
  const auto index = differs.to(at::kLong).argmax().item<std::int64_t>();
  const auto by_rank = all_texts(index < count ? texts[index] : "no such parameter", group);
  const auto other =
      std::find_if(by_rank.begin(), by_rank.end(), [&](const auto& text) { return text != by_rank[0]; });
  const auto [first, second] = first_difference(by_rank[0], *other);
  const std::string& named = by_rank[0].find('\'') != std::string::npos ? by_rank[0] : *other;
  refuse(fmt::format("the placement of {}", named.substr(0, named.find('\n'))),
         fmt::format("{} on rank 0, {} on rank {}", first, second, other - by_rank.begin()),
         "the same placements in the same order on every rank",
         "Make the placements from what all ranks know alike");
}

}  // namespace

Layout::Layout(Mesh mesh, Named placements) : mesh_(std::move(mesh)) {
  check_same_placements(placements,
                        mesh_.all());  // first, so that what follows throws on all ranks or on none
  std::set<std::string> names;
  for (const auto& [name, placement] : placements) {
    check_placement(name, placement, mesh_.grid());
    if (!names.insert(name).second)
      refuse(fmt::format("the placement of parameter '{}'", name), "two of them", "one for each parameter",
             "Give tied parameters once, with every stage that holds them");
  }
  const Grid& grid = mesh_.grid();
  for (auto& [name, placement] : placements)
    parameters_.push_back({.name = std::move(name),
                           .placement = placement,
                           .copies = isograd::copies(placement, grid),
                           .local_shape = isograd::local_shape(placement, grid, mesh_.rank()),
                           .held = holds(placement, grid, mesh_.rank()),
                           .owned = owned_part(placement, grid, mesh_.rank())});
}

Layout::Named Layout::placements() const {
  Named named;
  for (const PlacedParameter& each : parameters_) named.emplace_back(each.name, each.placement);
  return named;
}

const PlacedParameter& Layout::parameter(const std::string& name) const {
  const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const PlacedParameter& each) { return each.name == name; });
  if (found == parameters_.end())
    refuse(fmt::format("parameter '{}'", name), "no parameter of this name in the layout",
           fmt::format("one of its {} parameters", parameters_.size()), "Correct the name");
  return *found;
}

void Layout::check_local(const PlacedParameter& parameter, const at::Tensor& tensor) const {
  const bool fits =
      tensor.defined() &&
      (parameter.held ? tensor.sizes() == at::IntArrayRef(parameter.local_shape) : tensor.numel() == 0);
  if (fits) return;
  refuse(
      fmt::format("parameter '{}' on rank {}", parameter.name, mesh_.rank()),
      tensor.defined() ? fmt::format("a tensor of shape [{}]", fmt::join(tensor.sizes(), ", ")) : "no tensor",
      parameter.held ? fmt::format("its local shape, [{}]", fmt::join(parameter.local_shape, ", "))
                     : "an empty tensor, because this rank does not hold it",
      "Give the rank's part, as local() makes it");
}

at::Tensor Layout::local(const std::string& name, const at::Tensor& whole) const {
  const PlacedParameter& placed = parameter(name);
  if (whole.sizes() != at::IntArrayRef(placed.placement.whole_shape))
    refuse(fmt::format("parameter '{}'", name),
           fmt::format("a tensor of shape [{}]", fmt::join(whole.sizes(), ", ")),
           fmt::format("the whole one, [{}]", fmt::join(placed.placement.whole_shape, ", ")),
           "Give the whole tensor");
  at::NoGradGuard no_grad;
  at::Tensor result = at::empty(placed.local_shape, whole.options());
  for (const Slice& slice : slices(placed.placement, mesh_.grid(), mesh_.rank()))
    box(result, slice.local, slice.sizes).copy_(box(whole, slice.whole, slice.sizes));
  return result;
}

at::Tensor Layout::whole(const std::string& name, const at::Tensor& local) const {
  const PlacedParameter& placed = parameter(name);
  const Placement& placement = placed.placement;
  const Grid& grid = mesh_.grid();
  check_local(placed, local);
  at::NoGradGuard no_grad;
  at::Tensor result = at::empty(placement.whole_shape, local.options().requires_grad(false));
  if (placed.held) {
    AxisSet cut;
    for (const Cut& each : placement.cuts) cut.insert(each.axis);
    const std::vector<int> ranks = grid.ranks_along(cut, mesh_.rank());
    std::vector<std::int64_t> numel;
    for (const int rank : ranks) numel.push_back(c10::multiply_integers(local_shape(placement, grid, rank)));
    const at::Tensor flat = local.detach().reshape({-1});
    at::Tensor parts = flat;
    if (ranks.size() > 1) {
      parts = at::empty({c10::multiply_integers(placement.whole_shape)}, result.options());
      mesh_.along(cut).all_gather_rows_async(parts, flat, numel).wait();
    }
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const at::Tensor part = parts.narrow(0, begin, numel[i]).view(local_shape(placement, grid, ranks[i]));
      for (const Slice& slice : slices(placement, grid, ranks[i]))
        box(result, slice.whole, slice.sizes).copy_(box(part, slice.local, slice.sizes));
      begin += numel[i];
    }
  }
  if (is_everywhere(placement, grid)) return result;
  // Another stage that holds the parameter keeps its own values, so that verify sees a difference.
  const bool own = placed.held && mesh_.place({kStageAxis}) != placement.stages.front();
  mesh_.along({kStageAxis}).broadcast(own ? at::empty_like(result) : result, placement.stages.front());
  return result;
}

Layout::Named whole_placements(const std::vector<std::pair<std::string, at::Tensor>>& named,
                               const Grid& grid) {
  Layout::Named placements;
  for (const auto& [name, tensor] : named) placements.emplace_back(name, placed(grid, tensor.sizes().vec()));
  return placements;
}

std::int64_t hash_of(const void* data, std::size_t bytes) {
  return static_cast<std::int64_t>(std::stoull(checksum(data, bytes), nullptr, 16));
}

at::Tensor checksums(const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  at::Tensor result = at::empty({static_cast<std::int64_t>(tensors.size())}, at::kLong);
  auto* sums = result.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor values = tensors[i].detach().cpu().contiguous();
    const std::string bits = values.nbytes() > 0 ? checksum(values.const_data_ptr(), values.nbytes()) : "";
    const std::string text =
        fmt::format("{} [{}] {}", c10::toString(values.scalar_type()), fmt::join(values.sizes(), ", "), bits);
    sums[i] = hash_of(text.data(), text.size());
  }
  return result;
}

void refuse_empty_module(const std::source_location& call) {
  refuse(fmt::format("the module given at {}:{}", call.file_name(), call.line()),
         "an empty holder or a null pointer", "a module",
         "Make it before the call: Mlp model(...), or std::make_shared<Mlp>(...)");
}

}  // namespace isograd
