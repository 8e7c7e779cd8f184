// What the ranks of one group write for one another: who is there, which operation each has announced and how
// far it is, and why the group failed, if it did. Lies in a segment that rank 0 creates.
//
// Memory order. A rank writes data, then publishes a token (OperationSlot::ready or OperationSlot::done);
// whoever has read the token sees the data. Publishing stores are sequentially consistent, which contains
// release, because the publisher then looks for sleepers: either it sees the sleeper, or the sleeper, who
// registers first and looks at the tokens after a fence, sees the token (Dekker's argument). Reading loads
// are acquire.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace isograd::shm {

enum class Kind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kAllocate,
  kSend,  // these two have no slot and no sequence number of the group
  kReceive
};

// What every rank must say alike about operation number `sequence`; the group fails when they do not.
struct Fingerprint {
  Kind kind = Kind::kBarrier;
  std::uint8_t combine = 0;  // kernels::Combine
  std::int8_t dtype = -1;    // c10::ScalarType
  std::uint8_t stage = 0;    // of an operation made of several exchanges
  std::int32_t root = 0;
  std::int64_t count = 0;   // elements of each rank's input; 0 where they may differ
  std::uint64_t sizes = 0;  // hash of the sizes where they differ and every rank knows all of them; else 0
  bool operator==(const Fingerprint&) const = default;
};

// Where this rank's data lies; may differ between ranks.
struct Location {
  static constexpr std::int64_t kPrivate = -1;  // goes through this rank's staging buffers
  static constexpr std::int64_t kNothing = -2;  // no bytes at all
  std::int64_t allocation = kNothing;
  std::uint64_t offset = 0;  // bytes from the allocation's start
};

// What a rank has for another one, where each gets a part of its own.
struct Span {
  std::uint64_t offset = 0;  // bytes from the Location, where that is no staging buffer
  std::uint64_t bytes = 0;
};

// The place of a call in the source, for messages: the end of the file's name.
struct SiteText {
  char text[56] = {};
};

// A few words that an exchange carries to every rank.
struct Payload {
  std::uint64_t words[3] = {};
};

// One rank's page in one of the last kSlots operations. Written by that rank alone.
struct OperationSlot {
  // (sequence + 1) << kStepBits | step, growing for ever: a reader never mistakes an old operation for its
  // own.
  alignas(64) std::atomic<std::uint64_t> ready;  // step 1: announced; 1 + c: chunks 0 .. c - 1 may be read
  Fingerprint fingerprint;                       // these five are published by `ready` ...
  Location location;
  std::uint64_t chunks;                         // that this rank's data takes if it is staged
  alignas(64) std::atomic<std::uint64_t> done;  // step c: this rank has dealt with chunks 0 .. c - 1;
  Payload payload;                              // ... and may be rewritten once every rank is done
  alignas(64) SiteText site;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(OperationSlot) == 192);

constexpr int kSlots = 64;  // operations that may be under way at once
constexpr int kStepBits = 24;
constexpr std::uint64_t kEverything = (std::uint64_t{1} << kStepBits) - 1;

inline std::uint64_t token(std::uint64_t sequence, std::uint64_t step) {
  return (sequence + 1) << kStepBits | step;
}
// The step that `word` says about operation `sequence`. A rank goes on to a later operation in the same slot
// only after everybody is done with this one.
inline std::uint64_t step_of(std::uint64_t word, std::uint64_t sequence) {
  const std::uint64_t operation = word >> kStepBits;
  if (operation < sequence + 1) return 0;
  return operation == sequence + 1 ? (word & kEverything) : kEverything;
}

struct Member {
  alignas(64) std::atomic<std::uint32_t> arrived;  // mapped everything, ready to communicate
  std::atomic<std::uint32_t> left;                 // its group object is gone
};

// Wakes sleepers. All ranks share one: groups are small and sleeping is the slow path.
struct Bell {
  alignas(64) std::atomic<std::uint32_t> count;  // the futex word
  std::atomic<std::uint32_t> sleepers;

  void ring();                                       // after publishing
  std::uint32_t listen();                            // before the last look at the tokens
  void sleep(std::uint32_t seen, long nanoseconds);  // returns at once if rung since listen()
  void leave();
};

// Why the group cannot be used any more. The first to write it wins.
struct Poison {
  enum State : std::uint32_t { kClean, kBeingWritten, kWritten };
  alignas(64) std::atomic<std::uint32_t> state;
  std::int32_t rank;
  bool of_operation;  // that failed; else of what the rank does beside them
  char text[2039];
};

struct Control {
  static constexpr std::uint64_t kMagic = 0x69736f67726164'03;  // changes with this layout
  std::uint64_t magic;
  std::int32_t size;
  Bell bell;
  Poison poison;
  // followed by Member[size], OperationSlot[size][kSlots] and Span[size][kSlots][size]

  Member& member(int rank) { return reinterpret_cast<Member*>(this + 1)[rank]; }
  OperationSlot& slot(int rank, std::uint64_t sequence) {
    auto* slots = reinterpret_cast<OperationSlot*>(reinterpret_cast<Member*>(this + 1) + size);
    return slots[static_cast<std::size_t>(rank) * kSlots + sequence % kSlots];
  }
  // What `rank` has for each rank in operation `sequence`; published by OperationSlot::ready.
  Span* spans(int rank, std::uint64_t sequence) {
    auto* spans = reinterpret_cast<Span*>(&slot(0, 0) + static_cast<std::size_t>(size) * kSlots);
    return spans +
           (static_cast<std::size_t>(rank) * kSlots + sequence % kSlots) * static_cast<std::size_t>(size);
  }
  static std::uint64_t bytes(int size) {
    const auto n = static_cast<std::uint64_t>(size);
    return sizeof(Control) + n * (sizeof(Member) + kSlots * (sizeof(OperationSlot) + n * sizeof(Span)));
  }
};
static_assert(sizeof(Control) % 64 == 0 && sizeof(Member) == 64);

}  // namespace isograd::shm
