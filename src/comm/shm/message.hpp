// Send and Receive: the two ends of a message in a Channel.
//
// A channel carries messages from one rank to another. It is in the sender's segment, before its staging
// buffers. The memory order is that of control.hpp: data first, then a token that the reader acquires.
//
// A message has a number, counted per channel, and an envelope that the sender posts. The receiver takes the
// first envelope with the right tag. Small data is in the envelope. Data inside an allocation of the group is
// read in place. Other data goes through the channel's ring, one accepted message at a time.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "comm/shm/control.hpp"
#include "comm/shm/task.hpp"

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

// The record of the messages from one other rank.
struct Inbox {
  std::uint64_t first = 0;        // all messages before it are finished
  std::set<std::uint64_t> taken;  // later messages that are matched, set aside or finished
  // Small messages, by number, that filled all envelopes while a receive waited for another tag.
  std::map<std::uint64_t, std::shared_ptr<Envelope>> set_aside;
  const Task* in_ring = nullptr;  // the receive whose data is in the ring now
};

// Complete when its memory may be reused, possibly before the message is received.
// The root of the fingerprint is the other end.
std::shared_ptr<Task> send(const Fingerprint& print, Region data, int tag);

// From rank -1: any rank; the first message with this tag is taken.
std::shared_ptr<Task> receive(const Fingerprint& print, Region data, int tag);

}  // namespace isograd::shm
