#include "comm/shm/task.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/shm/engine.hpp"

namespace isograd::shm {

bool Task::must_follow(const Task& earlier) const {
  for (const Extent& mine : extents_) {
    for (const Extent& theirs : earlier.extents_) {
      if (mine.conflicts_with(theirs)) return true;
    }
  }
  return false;
}

void Task::complete_now() {
  engine_->observe(Phase::kComplete, *this);
  complete_ = true;
}

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"barrier",    "all_reduce",     "reduce", "broadcast",
                                           "all_gather", "reduce_scatter", "gather", "scatter",
                                           "all_to_all", "empty_shared",   "send",   "recv"};
  const auto index = static_cast<std::size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "an unknown operation";
}

std::string call_of(const Fingerprint& print) {
  if (print.kind == Kind::kBarrier) return "barrier";
  static constexpr const char* kCombine[] = {"sum",        "max", "min", "product", "average",
                                             "scaled sum", "and", "or",  "xor"};
  std::string detail;
  switch (print.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      detail = fmt::format("({})", kCombine[print.combine]);
      break;
    case Kind::kReduce:
      detail = fmt::format("({}) to rank {}", kCombine[print.combine], print.root);
      break;
    case Kind::kGather:
    case Kind::kSend:
      detail = fmt::format(" to rank {}", print.root);
      break;
    case Kind::kReceive:
      detail = print.root < 0 ? " from any rank" : fmt::format(" from rank {}", print.root);
      break;
    case Kind::kBroadcast:
    case Kind::kScatter:
      detail = fmt::format(" from rank {}", print.root);
      break;
    default:
      break;
  }
  std::string amount = std::to_string(print.count);
  if (print.sizes != 0) amount = fmt::format("uneven parts (sizes {:08x})", print.sizes & 0xffffffff);
  if (print.kind == Kind::kAllToAll) amount = "parts";
  return fmt::format("{}{} of {} {}", name_of(print.kind), detail, amount,
                     c10::toString(static_cast<c10::ScalarType>(print.dtype)));
}

std::string at(const SiteText& site) {
  return site.text[0] ? fmt::format(" at {}", site.text) : "";
}

// Every call runs this, so it avoids the formatting library.
SiteText to_text(const CallSite& site) {
  SiteText text;
  if (!site.file) return text;
  const char* name = std::strrchr(site.file, '/');
  name = name ? name + 1 : site.file;
  constexpr std::size_t kLongest = sizeof(text.text) - 12;  // leaves room for the line's number
  const std::size_t length = std::min(std::strlen(name), kLongest);
  std::memcpy(text.text, name, length);
  char digits[10];
  int count = 0;
  for (unsigned line = site.line; line > 0; line /= 10) digits[count++] = static_cast<char>('0' + line % 10);
  char* end = text.text + length;
  *end++ = ':';
  while (count > 0) *end++ = digits[--count];
  *end = 0;
  return text;
}

}  // namespace isograd::shm
