// Arithmetic of parts: where each rank has a part of its own, of one buffer or of several.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/shm/operation.hpp"

namespace isograd::shm {

// Chunks of `length` that `amount` takes; 1 for nothing.
inline std::uint64_t chunks_of(std::uint64_t amount, std::uint64_t length) {
  return amount == 0 ? 1 : (amount + length - 1) / length;
}

// Bytes of a staged chunk that are for one of `ranks`: whole cache lines where there is room.
std::uint64_t part_bytes(std::uint64_t chunk_bytes, int ranks);

// 0 when all pieces have the same size; otherwise a number that depends on all sizes.
std::uint64_t hash_if_uneven(const std::vector<Region>& pieces);

std::uint64_t largest_of(const std::vector<Region>& pieces);

// From the first byte of the pieces that have any to the last.
Region hull_of(const std::vector<Region>& pieces);

// The memory of all pieces, what adjoins taken together; not what lies between them.
void add_extents(const std::vector<Region>& pieces, bool written, std::vector<Extent>& extents);

// Where in its hull each piece lies.
void list_spans(const std::vector<Region>& pieces, const Region& hull, Span* spans);

// Chunk number `chunk` of a piece that is cut into chunks of `part` bytes.
Region part_of(const Region& piece, std::uint64_t chunk, std::uint64_t part);

// Chunk `chunk` of every piece but this rank's own to its part of this rank's staging buffer.
void copy_parts_in(const std::vector<Region>& pieces, std::uint64_t chunk, std::uint64_t part,
                   Engine& engine);

}  // namespace isograd::shm
