#include "comm/shm/sizes.hpp"

#include <algorithm>
#include <cstring>

#include "comm/shm/engine.hpp"

namespace isograd::shm {

std::uint64_t part_bytes(std::uint64_t chunk_bytes, int ranks) {
  constexpr std::uint64_t kLine = 64, kElement = 8;
  const std::uint64_t part = chunk_bytes / static_cast<std::uint64_t>(ranks);
  return part >= kLine ? part / kLine * kLine : part / kElement * kElement;
}

std::uint64_t hash_if_uneven(const std::vector<Region>& pieces) {
  bool even = true;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  for (const Region& piece : pieces) {
    even &= piece.bytes == pieces.front().bytes;
    hash = (hash ^ piece.bytes) * 0x100000001b3;
  }
  return even ? 0 : hash | 1;
}

std::uint64_t largest_of(const std::vector<Region>& pieces) {
  std::uint64_t largest = 0;
  for (const Region& piece : pieces) largest = std::max(largest, piece.bytes);
  return largest;
}

Region hull_of(const std::vector<Region>& pieces) {
  std::byte *begin = nullptr, *end = nullptr;
  for (const Region& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (!begin || piece.data < begin) begin = piece.data;
    if (!end || piece.data + piece.bytes > end) end = piece.data + piece.bytes;
  }
  return {begin, static_cast<std::uint64_t>(end - begin)};
}

void add_extents(const std::vector<Region>& pieces, bool written, std::vector<Extent>& extents) {
  bool first = true;
  for (const Region& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (!first && extents.back().begin + extents.back().bytes == piece.data) {
      extents.back().bytes += piece.bytes;
    } else {
      extents.push_back({piece.data, piece.bytes, written});
    }
    first = false;
  }
}

void list_spans(const std::vector<Region>& pieces, const Region& hull, Span* spans) {
  for (const Region& piece : pieces) {
    *spans++ = {piece.bytes ? static_cast<std::uint64_t>(piece.data - hull.data) : 0, piece.bytes};
  }
}

Region part_of(const Region& piece, std::uint64_t chunk, std::uint64_t part) {
  const std::uint64_t begin = std::min(piece.bytes, chunk * part);
  return {piece.data + begin, std::min(part, piece.bytes - begin)};
}

void copy_parts_in(const std::vector<Region>& pieces, std::uint64_t chunk, std::uint64_t part,
                   Engine& engine) {
  std::byte* staging = engine.staging(engine.rank(), chunk);
  for (std::size_t r = 0; r < pieces.size(); ++r) {
    const Region piece = part_of(pieces[r], chunk, part);
    if (static_cast<int>(r) == engine.rank() || piece.bytes == 0) continue;
    engine.reserve(staging + r * part, piece.bytes);
    std::memcpy(staging + r * part, piece.data, piece.bytes);
  }
}

}  // namespace isograd::shm
