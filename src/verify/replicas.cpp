#include "verify/replicas.hpp"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>

#include "isograd/fully_shard.hpp"
#include "verify/digest.hpp"

namespace isograd {
namespace {

// What one rank keeps of one parameter: elements [begin, end) of its bucket or of itself.
struct KeptPiece {
  std::size_t order;  // of the parameter, in the model
  std::string name;
  std::int64_t begin, end;
  at::Tensor bits;
  std::int64_t cut = 0;  // which of the parts along the axes that the parameter is cut along
};

std::int64_t cut_of(const std::string& parameter, const Layout* placed) {
  AxisSet axes;
  if (placed)
    for (const Cut& each : placed->parameter(parameter).placement.cuts) axes.insert(each.axis);
  return axes.empty() ? 0 : placed->mesh().place(axes);
}

// Of each parameter what is computed with and its fp32 master, in the model's order, so that ranks with other
// buckets or other parts of the model say as much as all. Nothing stands for what this rank has none of.
std::vector<KeptPiece> kept_pieces(const std::vector<std::pair<std::string, at::Tensor>>& named,
                                   DataParallel& layout, const Layout* placed) {
  std::vector<KeptPiece> pieces;
  std::map<std::string, std::size_t> place_of;
  const at::Tensor nothing = at::empty({0});
  const bool readable = dynamic_cast<FullySharded*>(&layout) == nullptr;
  for (std::size_t i = 0; i < named.size(); ++i) {
    const auto& [name, tensor] = named[i];
    const std::int64_t cut = cut_of(name, placed);
    place_of[name] = pieces.size();
    pieces.push_back({i, name, 0, readable ? tensor.numel() : 0, readable ? tensor : nothing, cut});
    pieces.push_back({i, name + " (its fp32 master)", 0, 0, nothing, cut});
  }
  const auto keep = [](KeptPiece& piece, const Bucket& bucket, const Slot& slot, const at::Tensor& flat) {
    const std::int64_t begin = std::max(slot.offset, bucket.held.begin);
    const std::int64_t end = std::max(begin, std::min(slot.offset + slot.numel, bucket.held.end));
    piece.begin = begin - slot.offset, piece.end = end - slot.offset;
    piece.bits = flat.narrow(0, begin < end ? begin - bucket.held.begin : 0, end - begin);
  };
  for (const Bucket& bucket : layout.buckets())
    for (const Slot& slot : bucket.plan.slots) {
      const std::size_t place = place_of.at(slot.name);
      if (!readable) keep(pieces[place], bucket, slot, bucket.parameters);
      if (bucket.master.scalar_type() != bucket.parameters.scalar_type())
        keep(pieces[place + 1], bucket, slot, bucket.master);
    }
  return pieces;
}

}  // namespace

std::string Divergence::text() const {
  std::vector<std::string> sides;
  for (const auto& camp : camps)
    sides.push_back(fmt::format("rank{} {}", camp.size() == 1 ? "" : "s", fmt::join(camp, ", ")));
  return fmt::format("replicas differ in {} parameter{}, first {}: {}", differing, differing == 1 ? "" : "s",
                     parameter, fmt::join(sides, " against "));
}

std::optional<Divergence> find_divergence(const std::vector<std::pair<std::string, at::Tensor>>& named,
                                          const std::vector<std::pair<std::string, at::Tensor>>& buffers,
                                          DataParallel& layout, const Layout* placed) {
  Group group = layout.mesh().all();
  std::vector<KeptPiece> pieces = kept_pieces(named, layout, placed);
  for (const auto& [name, buffer] : buffers)
    pieces.push_back({named.size(), name + " (a buffer)", 0, buffer.numel(), buffer.detach().flatten()});
  std::vector<at::Tensor> bits;
  for (const KeptPiece& piece : pieces) bits.push_back(piece.bits);
  const at::Tensor digests = digest(bits);
  constexpr std::size_t kColumns = 4;
  at::Tensor rows = at::empty({static_cast<std::int64_t>(pieces.size()), kColumns}, at::kLong);
  auto* row = rows.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    *row++ = pieces[i].begin;
    *row++ = pieces[i].end;
    *row++ = digests.const_data_ptr<std::int64_t>()[i];
    *row++ = pieces[i].cut;
  }
  const at::Tensor all = group.all_gather(rows).contiguous();  // [W, pieces, kColumns]
  const auto* value = all.const_data_ptr<std::int64_t>();

  std::optional<Divergence> found;
  std::size_t first = 0, differing = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::map<std::array<std::int64_t, 3>, std::map<std::int64_t, std::vector<int>>> by_part;
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto* entry = value + (static_cast<std::size_t>(rank) * pieces.size() + i) * kColumns;
      if (entry[0] < entry[1]) by_part[{entry[3], entry[0], entry[1]}][entry[2]].push_back(rank);
    }
    for (const auto& [part, by_bits] : by_part) {
      if (by_bits.size() == 1) continue;
      ++differing;
      if (!found || pieces[i].order < first) {
        first = pieces[i].order;
        found = Divergence{.parameter = pieces[i].name, .camps = {}};
        for (const auto& [hash, ranks] : by_bits) found->camps.push_back(ranks);
        std::sort(found->camps.begin(), found->camps.end(), [](const auto& a, const auto& b) {
          return std::pair(-static_cast<std::ptrdiff_t>(a.size()), a[0]) <
                 std::pair(-static_cast<std::ptrdiff_t>(b.size()), b[0]);
        });
      }
      break;
    }
  }
  if (found) found->differing = differing;
  return found;
}

}  // namespace isograd
