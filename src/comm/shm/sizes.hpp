// Arithmetic of parts: each rank's part of one buffer or of several.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/shm/operation.hpp"

namespace isograd::shm {

// The number of chunks of `length` for `amount`; at least 1.
inline std::uint64_t chunks_of(std::uint64_t amount, std::uint64_t length) {
  return amount == 0 ? 1 : (amount + length - 1) / length;
}

// Bytes of a staged chunk for each of `ranks`: whole cache lines if there is room.
std::uint64_t part_bytes(std::uint64_t chunk_bytes, int ranks);

// 0 when all pieces have the same size; otherwise a hash of all sizes.
std::uint64_t hash_if_uneven(const std::vector<Region>& pieces);

std::uint64_t largest_of(const std::vector<Region>& pieces);

// From the first byte of the non-empty pieces to the last.
Region hull_of(const std::vector<Region>& pieces);

// The memory of all pieces. Adjacent pieces become one extent; gaps are left out.
void add_extents(const std::vector<Region>& pieces, bool written, std::vector<Extent>& extents);

// Each piece's place in the hull.
void list_spans(const std::vector<Region>& pieces, const Region& hull, Span* spans);

// Chunk number `chunk` of a piece that is split into chunks of `part` bytes.
Region part_of(const Region& piece, std::uint64_t chunk, std::uint64_t part);

// Copies chunk `chunk` of every piece except this rank's own to its part of this rank's staging buffer.
void copy_parts_in(const std::vector<Region>& pieces, std::uint64_t chunk, std::uint64_t part,
                   Engine& engine);

}  // namespace isograd::shm
