#include "comm/shm/operation.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "comm/shm/engine.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return "barrier";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllocate:
      return "empty_shared";
  }
  return "an unknown operation";
}

}  // namespace

std::string Operation::name() const {
  return fmt::format("{} #{}", name_of(fingerprint_.kind), sequence_);
}

std::string Operation::call_of(const Fingerprint& fingerprint) {
  if (fingerprint.kind == Kind::kBarrier) return "barrier";
  static constexpr const char* kCombine[] = {"sum", "max", "min"};
  std::string detail;
  if (fingerprint.kind == Kind::kAllReduce || fingerprint.kind == Kind::kReduceScatter) {
    detail = fmt::format("({})", kCombine[fingerprint.combine]);
  } else if (fingerprint.kind == Kind::kBroadcast) {
    detail = fmt::format(" from rank {}", fingerprint.root);
  }
  return fmt::format("{}{} of {} {}", name_of(fingerprint.kind), detail, fingerprint.count,
                     c10::toString(static_cast<c10::ScalarType>(fingerprint.dtype)));
}

bool Operation::shares_memory_with(const Operation& other) const {
  for (const Extent& mine : extents_) {
    for (const Extent& theirs : other.extents_) {
      if (mine.overlaps(theirs)) return true;
    }
  }
  return false;
}

const Slot& Operation::slot(int rank) const {
  return engine_->slot(rank, sequence_);
}

std::byte* Operation::chunk_data(int rank, std::uint64_t chunk, std::uint64_t offset) const {
  if (staged(rank)) return engine_->staging(rank, chunk);
  return engine_->shared_data(rank, locations_[static_cast<std::size_t>(rank)]) + offset;
}

void Operation::publish_ready(std::uint64_t step) {
  engine_->slot(engine_->rank(), sequence_).ready.store(token(sequence_, step), std::memory_order_seq_cst);
  engine_->ring();
}

void Operation::publish_done(std::uint64_t step) {
  engine_->slot(engine_->rank(), sequence_).done.store(token(sequence_, step), std::memory_order_seq_cst);
  engine_->ring();
}

void Operation::announce(bool staging_free) {
  Slot& mine = engine_->slot(engine_->rank(), sequence_);
  mine.fingerprint = fingerprint_;
  mine.location = local_;
  mine.payload = payload_;
  announced_ = true;
  if (!uses_staging()) return publish_ready(kEverything);
  chunks_ = chunk_count(true);
  ISOGRAD_INVARIANT(chunks_ + 1 < kEverything, fmt::format("{} chunks", chunks_));
  if (staging_free) copy_in(in_++);  // saves the others one look
  publish_ready(1 + in_);
}

// Compares with each rank as it comes: a mismatch is told even while others are missing.
bool Operation::agree() {
  const int size = engine_->size();
  bool all = true, any_staged = false;
  for (int r = 0; r < size; ++r) {
    const Slot& theirs = slot(r);
    if (step_of(theirs.ready.load(std::memory_order_acquire), sequence_) == 0) {
      all = false;
      continue;
    }
    if (theirs.fingerprint != fingerprint_) {
      engine_->fail(
          *this,
          fmt::format("the ranks disagreed: rank {} called {}, rank {} called {}", engine_->rank(), call(), r,
                      call_of(theirs.fingerprint)),
          "Make every rank call the same operations with the same sizes and types in the same order");
    }
    any_staged |= is_source(r) && theirs.location.allocation < 0;
  }
  if (!all) return false;
  for (int r = 0; r < size; ++r) locations_.push_back(slot(r).location);
  chunks_ = chunk_count(any_staged);
  agreed_ = true;
  return true;
}

std::uint64_t Operation::least_ready() const {
  std::uint64_t least = kEverything;
  for (int r = 0; r < engine_->size(); ++r) {
    if (is_source(r))
      least = std::min(least, step_of(slot(r).ready.load(std::memory_order_acquire), sequence_));
  }
  return least - 1;  // step 1 is the announcement, which all have made
}

std::uint64_t Operation::least_done() const {
  std::uint64_t least = kEverything;
  for (int r = 0; r < engine_->size(); ++r) {
    least = std::min(least, step_of(slot(r).done.load(std::memory_order_acquire), sequence_));
  }
  return least;
}

bool Operation::advance(bool may_announce, bool staging_free) {
  bool moved = false;
  if (!announced_) {
    if (!may_announce) return false;
    announce(staging_free);
    moved = true;
  }
  if (!agreed_ && agree()) moved = true;
  const bool fills = uses_staging() && staging_free;
  for (bool again = true; again;) {
    again = false;
    if (fills && in_ < chunks_ && in_ - out_ < engine_->options().chunks) {
      copy_in(in_++);
      publish_ready(1 + in_);
      again = true;
    }
    if (agreed_ && worked_ < chunks_ && least_ready() > worked_) {
      work(worked_++);
      publish_done(worked_ == chunks_ ? kEverything : worked_);
      again = true;
    }
    if (agreed_ && out_ < worked_ && least_done() > out_) {
      copy_out(out_++);
      again = true;
    }
    moved |= again;
  }
  all_done_ = agreed_ && out_ == chunks_;
  complete_ = all_done_ || (agreed_ && worked_ == chunks_ && !waits_for_all());
  return moved;
}

std::vector<int> Operation::awaited() const {
  std::vector<int> ranks;
  if (complete_) return ranks;
  for (int r = 0; r < engine_->size(); ++r) {
    const Slot& theirs = slot(r);
    const std::uint64_t ready = step_of(theirs.ready.load(std::memory_order_acquire), sequence_);
    const std::uint64_t done = step_of(theirs.done.load(std::memory_order_acquire), sequence_);
    bool late = false;
    if (!announced_) {  // its slot is still in use by the operation kSlots earlier, or one before it is
      late = sequence_ >= kSlots &&
             step_of(theirs.done.load(std::memory_order_acquire), sequence_ - kSlots) < kEverything;
    } else if (!agreed_) {
      late = ready == 0;
    } else {
      late = (worked_ < chunks_ && is_source(r) && ready <= worked_ + 1) || (out_ < worked_ && done <= out_);
    }
    if (late && r != engine_->rank()) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace isograd::shm
