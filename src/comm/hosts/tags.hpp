// The places of stages, and the tags of messages between hosts.
#pragma once

namespace isograd::hosts {

// Places whose messages two operations might confuse have separate tags.
enum Place : int { kReduceWithin, kExchange, kReturn, kGatherWithin };

inline constexpr int kFirstTag = 32760;  // every MPI has tags up to 32767

constexpr int tag_of(Place place) {
  return kFirstTag + place;
}

}  // namespace isograd::hosts
