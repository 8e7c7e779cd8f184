// The memory that the ranks of one group write for each other: the members, the operation that each has
// announced and its progress, and the reason if the group failed. It is in a segment that rank 0 creates.
//
// Memory order. A rank writes data, then publishes a token (OperationSlot::ready or OperationSlot::done). A
// rank that has read the token sees the data. Publishing stores are sequentially consistent, which includes
// release, because the publisher then looks for sleepers. Either it sees the sleeper, or the sleeper, which
// registers first and reads the tokens after a fence, sees the token (Dekker's argument). Reading loads are
// acquire.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

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

// The values that every rank must announce alike for operation number `sequence`. The group fails when they
// differ.
struct Fingerprint {
  Kind kind = Kind::kBarrier;
  std::uint8_t combine = 0;  // kernels::Combine
  std::int8_t dtype = -1;    // c10::ScalarType
  std::uint8_t stage = 0;    // of an operation with several exchanges
  std::int32_t root = 0;
  std::int64_t count = 0;   // elements of each rank's input; 0 where they may differ
  std::uint64_t sizes = 0;  // hash of the sizes where they differ and every rank knows all of them; else 0
  bool operator==(const Fingerprint&) const = default;
};

// The place of this rank's data. It may differ between ranks.
struct Location {
  static constexpr std::int64_t kPrivate = -1;  // goes through this rank's staging buffers
  static constexpr std::int64_t kNothing = -2;  // no bytes at all
  std::int64_t allocation = kNothing;
  std::uint64_t offset = 0;  // bytes from the allocation's start
};

// One rank's data for another rank, where each gets a different part.
struct Span {
  std::uint64_t offset = 0;  // bytes from the Location, unless that is a staging buffer
  std::uint64_t bytes = 0;
};

// The source location of a call, for messages: the end of the file's name.
struct SiteText {
  char text[56] = {};
};

// A few words that an exchange carries to every rank.
struct Payload {
  std::uint64_t words[3] = {};
};

// One rank's page in one of the last kSlots operations. Only that rank writes it.
struct OperationSlot {
  // (sequence + 1) << kStepBits | step. It only grows, so a reader cannot confuse an old operation with its
  // own.
  alignas(64) std::atomic<std::uint64_t> ready;  // step 1: announced; 1 + c: chunks 0 .. c - 1 may be read
  Fingerprint fingerprint;                       // these five are published by `ready` ...
  Location location;
  std::uint64_t chunks;                         // that this rank's data takes if it is staged
  alignas(64) std::atomic<std::uint64_t> done;  // step c: this rank has processed chunks 0 .. c - 1;
  Payload payload;                              // ... and may be rewritten once every rank is done
  alignas(64) SiteText site;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(OperationSlot) == 192);

constexpr int kSlots = 64;  // the most operations under way at once
constexpr int kStepBits = 24;
constexpr std::uint64_t kEverything = (std::uint64_t{1} << kStepBits) - 1;

inline std::uint64_t token(std::uint64_t sequence, std::uint64_t step) {
  return (sequence + 1) << kStepBits | step;
}
// The step of operation `sequence` in `word`. A rank starts a later operation in the same slot only after all
// ranks are done with this one.
inline std::uint64_t step_of(std::uint64_t word, std::uint64_t sequence) {
  const std::uint64_t operation = word >> kStepBits;
  if (operation < sequence + 1) return 0;
  return operation == sequence + 1 ? (word & kEverything) : kEverything;
}

struct Member {
  alignas(64) std::atomic<std::uint32_t> arrived;  // mapped everything, ready to communicate
  std::atomic<std::uint32_t> left;                 // its group object is destroyed
};

// Wakes sleepers. All ranks share one, because groups are small and sleeping is the slow path.
struct Bell {
  alignas(64) std::atomic<std::uint32_t> count;  // the futex word
  std::atomic<std::uint32_t> sleepers;

  void ring();                                       // after publishing
  std::uint32_t listen();                            // before the last look at the tokens
  void sleep(std::uint32_t seen, long nanoseconds);  // returns at once if rung since listen()
  void leave();
};

// The reason why the group failed. The first writer wins.
struct Poison {
  enum State : std::uint32_t { kClean, kBeingWritten, kWritten };
  alignas(64) std::atomic<std::uint32_t> state;
  std::int32_t rank;
  bool of_operation;  // an operation failed; false: something else on the rank
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
  // This rank's spans for each rank in operation `sequence`; published by OperationSlot::ready.
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
