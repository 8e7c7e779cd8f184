// Channel: messages from one rank to another. It is in the sender's segment, before its staging buffers. The
// memory order is that of control.hpp: data first, then a token that the reader acquires.
//
// A message has a number, counted per channel, and an envelope that the sender posts. The receiver takes the
// first envelope with the right tag. Small data is in the envelope. Data inside an allocation of the group is
// read in place. Other data goes through the channel's ring, one accepted message at a time.
#pragma once

#include "comm/shm/control.hpp"

namespace isograd::shm {

struct Envelope {
  static constexpr std::uint64_t kInline = 1024;  // bytes of a message that travel in the envelope

  alignas(64) std::atomic<std::uint64_t> posted;    // by the sender: message number + 1
  alignas(64) std::atomic<std::uint64_t> finished;  // by the receiver: message number + 1, all data taken
  // Published by `posted`:
  alignas(64) std::int32_t tag;
  std::int8_t dtype;
  std::int64_t count;
  std::uint64_t bytes;
  Location location;
  SiteText site;
  alignas(64) std::byte data[kInline];
};

struct Channel {
  static constexpr std::uint64_t kEnvelopes = 16;

  alignas(64) std::atomic<std::uint64_t> accepted;  // by the receiver: number + 1 of the message in the ring
  alignas(64) std::atomic<std::uint64_t> written;   // by the sender: bytes put into the ring, ever
  alignas(64) std::atomic<std::uint64_t> read;      // by the receiver: bytes taken out of it, ever
  Envelope envelopes[kEnvelopes];

  Envelope& envelope(std::uint64_t number) { return envelopes[number % kEnvelopes]; }
};
static_assert(sizeof(Channel) % 64 == 0);

}  // namespace isograd::shm
