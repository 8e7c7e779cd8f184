#include "comm/shm/operation.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "comm/shm/engine.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {

std::string Operation::name() const { return fmt::format("{} #{}", name_of(fingerprint_.kind), number_); }

std::string Operation::call() const { return call_of(fingerprint_) + at(to_text(site_)); }

const OperationSlot& Operation::slot(int rank) const { return engine().slot(rank, number_); }

const Span& Operation::span_for_me(int rank) const { return engine().spans(rank, number_)[engine().rank()]; }

int Operation::rank() const { return engine().rank(); }
int Operation::size() const { return engine().size(); }

std::byte* Operation::chunk_data(int rank, std::uint64_t chunk, std::uint64_t offset) const {
  if (staged(rank)) return engine().staging(rank, chunk);
  return engine().shared_data(rank, locations_[static_cast<std::size_t>(rank)]) + offset;
}

void Operation::publish_ready(std::uint64_t step) {
  engine().slot(rank(), number_).ready.store(token(number_, step), std::memory_order_seq_cst);
  engine().ring();
}

void Operation::publish_done(std::uint64_t step) {
  engine().slot(rank(), number_).done.store(token(number_, step), std::memory_order_seq_cst);
  engine().ring();
}

void Operation::enter() {
  number_ = engine().take_sequence();
  is_local_source_ = is_source(rank());
  if (is_local_source_) local_ = engine().locate(source_data(), source_bytes());
}

void Operation::announce(bool staging_free) {
  engine().observe(Phase::kStart, *this);
  OperationSlot& mine = engine().slot(rank(), number_);
  mine.fingerprint = fingerprint_;
  mine.location = local_;
  mine.payload = payload_;
  mine.chunks = is_local_source_ ? staged_chunks() : 1;
  if (site_.file) {
    mine.site = to_text(site_);
  } else {
    mine.site.text[0] = 0;
  }
  if (is_local_source_) write_spans(engine().spans(rank(), number_));
  started_ = true;
  if (!uses_staging()) {
    publish_ready(kEverything);
  } else {
    set_chunks(true);
    chunks_ = mine.chunks;
    ISOGRAD_INVARIANT(chunks_ + 1 < kEverything, fmt::format("{} chunks", chunks_));
    if (staging_free) copy_in(in_++);  // saves the others another look
    publish_ready(1 + in_);
  }
  engine().observe(Phase::kAnnounced, *this);
}

// Compares with each rank as it arrives, so a mismatch is reported even while others are missing.
bool Operation::agree() {
  const int ranks = size();
  bool all = true, any_staged = false;
  std::uint64_t most = 1;
  for (int r = 0; r < ranks; ++r) {
    const OperationSlot& theirs = slot(r);
    if (step_of(theirs.ready.load(std::memory_order_acquire), number_) == 0) {
      all = false;
      continue;
    }
    if (theirs.fingerprint != fingerprint_)
      engine().fail(
          *this,
          fmt::format("the ranks disagreed: rank {} called {}, rank {} called {}", rank(), call(), r,
                      call_of(theirs.fingerprint) + at(theirs.site)),
          "Make every rank call the same operations with the same sizes and types in the same order");
    if (!is_source(r)) continue;
    any_staged |= theirs.location.allocation == Location::kPrivate;
    most = std::max(most, theirs.chunks);
  }
  if (!all) return false;
  locations_.reserve(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) locations_.push_back(slot(r).location);
  check_spans();
  set_chunks(any_staged);
  chunks_ = any_staged ? most : 1;
  agreed_ = true;
  return true;
}

std::uint64_t Operation::least_ready() const {
  std::uint64_t least = kEverything;
  for (int r = 0; r < size(); ++r)
    if (is_source(r))
      least = std::min(least, step_of(slot(r).ready.load(std::memory_order_acquire), number_));
  return least - 1;  // step 1 is the announcement, which all have made
}

std::uint64_t Operation::least_done() const {
  std::uint64_t least = kEverything;
  for (int r = 0; r < size(); ++r)
    least = std::min(least, step_of(slot(r).done.load(std::memory_order_acquire), number_));
  return least;
}

bool Operation::can_start() { return engine().slot_is_free(number_); }

bool Operation::advance(bool may_start, bool staging_free) {
  bool moved = false;
  if (!started_) {
    if (!may_start) return false;
    announce(staging_free);
    moved = true;
  }
  if (!agreed_ && agree()) moved = true;
  const bool fills = uses_staging() && staging_free;
  for (bool again = true; again;) {
    again = false;
    if (fills && in_ < chunks_ && in_ - out_ < engine().options().chunks) {
      copy_in(in_++);
      publish_ready(1 + in_);
      again = true;
    }
    if (agreed_ && worked_ < chunks_ && least_ready() > worked_) {
      work(worked_++);
      if (worked_ == chunks_) engine().observe(Phase::kWorked, *this);
      publish_done(worked_ == chunks_ ? kEverything : worked_);
      again = true;
    }
    if (agreed_ && out_ < worked_ && least_done() > out_) {
      copy_out(out_++);
      again = true;
    }
    moved |= again;
  }
  const bool all_done = agreed_ && out_ == chunks_;
  if (all_done) engine().slot_left_by_all(number_);
  if (all_done || (agreed_ && worked_ == chunks_ && !waits_for_all())) complete_now();
  return moved;
}

std::vector<int> Operation::awaited() const {
  std::vector<int> ranks;
  if (complete_) return ranks;
  for (int r = 0; r < size(); ++r) {
    const OperationSlot& theirs = slot(r);
    const std::uint64_t ready = step_of(theirs.ready.load(std::memory_order_acquire), number_);
    const std::uint64_t done = step_of(theirs.done.load(std::memory_order_acquire), number_);
    bool late = false;
    if (!started_) {  // an earlier operation still uses its slot
      late = number_ >= kSlots &&
             step_of(theirs.done.load(std::memory_order_acquire), number_ - kSlots) < kEverything;
    } else if (!agreed_) {
      late = ready == 0;
    } else {
      late = (worked_ < chunks_ && is_source(r) && ready <= worked_ + 1) || (out_ < worked_ && done <= out_);
    }
    if (late && r != rank()) ranks.push_back(r);
  }
  return ranks;
}

Fingerprint with_sizes(Fingerprint print, const std::vector<Region>& pieces) {
  bool even = true;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  for (const Region& piece : pieces) {
    even &= piece.bytes == pieces.front().bytes;
    hash = (hash ^ piece.bytes) * 0x100000001b3;
  }
  if (!even) print.sizes = hash | 1, print.count = 0;
  return print;
}

std::vector<Extent> extents_of(const std::vector<Region>& inputs, const std::vector<Region>& outputs) {
  std::vector<Extent> extents;
  const auto add = [&](const std::vector<Region>& pieces, bool written) {
    bool first = true;
    for (const Region& piece : pieces) {
      if (piece.bytes == 0) continue;
      if (!first && extents.back().begin + extents.back().bytes == piece.data)
        extents.back().bytes += piece.bytes;
      else
        extents.push_back({piece.data, piece.bytes, written});
      first = false;
    }
  };
  add(inputs, false);
  add(outputs, true);
  return extents;
}

Region part_of(const Region& piece, std::uint64_t chunk, std::uint64_t part) {
  const std::uint64_t begin = std::min(piece.bytes, chunk * part);
  return {piece.data + begin, std::min(part, piece.bytes - begin)};
}

Pieces::Pieces(std::vector<Region> by_rank) : of_rank(std::move(by_rank)) {
  std::byte *begin = nullptr, *end = nullptr;
  for (const Region& piece : of_rank) {
    if (piece.bytes == 0) continue;
    if (!begin || piece.data < begin) begin = piece.data;
    if (!end || piece.data + piece.bytes > end) end = piece.data + piece.bytes;
  }
  hull = {begin, static_cast<std::uint64_t>(end - begin)};
}

std::uint64_t Pieces::staged_part(const Engine& engine) {
  constexpr std::uint64_t kLine = 64, kElement = 8;
  const std::uint64_t part = engine.options().chunk_bytes / static_cast<std::uint64_t>(engine.size());
  return part >= kLine ? part / kLine * kLine : part / kElement * kElement;
}

std::uint64_t Pieces::staged_chunks(const Engine& engine) const {
  std::uint64_t largest = 0;
  for (const Region& piece : of_rank) largest = std::max(largest, piece.bytes);
  return chunks_of(largest, staged_part(engine));
}

void Pieces::write_spans(Span* spans) const {
  for (const Region& piece : of_rank)
    *spans++ = {piece.bytes ? static_cast<std::uint64_t>(piece.data - hull.data) : 0, piece.bytes};
}

void Pieces::copy_in(std::uint64_t chunk, Engine& engine) const {
  std::byte* staging = engine.staging(engine.rank(), chunk);
  for (std::size_t r = 0; r < of_rank.size(); ++r) {
    const Region piece = part_of(of_rank[r], chunk, part);
    if (static_cast<int>(r) == engine.rank() || piece.bytes == 0) continue;
    engine.reserve(staging + r * part, piece.bytes);
    std::memcpy(staging + r * part, piece.data, piece.bytes);
  }
}

const std::byte* Operation::piece_for_me(const Pieces& own, int rank, std::uint64_t chunk) const {
  const auto self = static_cast<std::uint64_t>(this->rank());
  if (rank == this->rank()) return part_of(own.of_rank[self], chunk, own.part).data;
  return staged(rank) ? chunk_data(rank, chunk, 0) + self * own.part
                      : chunk_data(rank, chunk, span_for_me(rank).offset + chunk * own.part);
}

}  // namespace isograd::shm
