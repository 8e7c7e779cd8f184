#include "comm/shm/task.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/shm/engine.hpp"

namespace isograd::shm {
namespace {

bool is_message(const Fingerprint& print) {
  return print.kind == Kind::kSend || print.kind == Kind::kReceive;
}

}  // namespace

bool Task::must_follow(const Task& earlier) const {
  for (const Extent& mine : extents_)
    for (const Extent& theirs : earlier.extents_)
      if (mine.conflicts_with(theirs)) return true;
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
    case Kind::kReduceScatter: detail = fmt::format("({})", kCombine[print.combine]); break;
    case Kind::kReduce: detail = fmt::format("({}) to rank {}", kCombine[print.combine], print.root); break;
    case Kind::kGather:
    case Kind::kSend: detail = fmt::format(" to rank {}", print.root); break;
    case Kind::kReceive:
      detail = print.root < 0 ? " from any rank" : fmt::format(" from rank {}", print.root);
      break;
    case Kind::kBroadcast:
    case Kind::kScatter: detail = fmt::format(" from rank {}", print.root); break;
    default: break;
  }
  std::string amount = std::to_string(print.count);
  if (print.sizes != 0) amount = fmt::format("uneven parts (sizes {:08x})", print.sizes & 0xffffffff);
  if (print.kind == Kind::kAllToAll) amount = "parts";
  return fmt::format("{}{} of {} {}", name_of(print.kind), detail, amount,
                     c10::toString(static_cast<c10::ScalarType>(print.dtype)));
}

std::string at(const SiteText& site) { return site.text[0] ? fmt::format(" at {}", site.text) : ""; }

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

void History::begin(const Fingerprint& fingerprint, const CallSite& site, std::uint64_t number) {
  entries_[count_++ % kLength] = {fingerprint, site, number};
}

std::string History::text(const std::vector<std::shared_ptr<Task>>& under_way) const {
  const auto open = [&](const Entry& entry) {
    return std::any_of(under_way.begin(), under_way.end(), [&](const auto& task) {
      return task->fingerprint() == entry.fingerprint &&
             (task->number() == entry.number || is_message(entry.fingerprint));
    });
  };
  const auto same_call = [](const Entry& a, const Entry& b) {
    return a.fingerprint == b.fingerprint && a.site.file == b.site.file && a.site.line == b.site.line;
  };
  std::string text;
  const std::uint64_t oldest = count_ > kLength ? count_ - kLength : 0;
  for (std::uint64_t i = oldest; i < count_;) {
    const Entry& first = entries_[i % kLength];
    const bool is_open = open(first);
    std::uint64_t end = i + 1;
    while (end < count_ && same_call(entries_[end % kLength], first) &&
           open(entries_[end % kLength]) == is_open)
      ++end;
    const std::uint64_t last = entries_[(end - 1) % kLength].number;
    std::string which;
    if (!is_message(first.fingerprint)) {
      which = first.number == last ? fmt::format("#{} ", first.number)
                                   : fmt::format("#{} to #{} ", first.number, last);
    } else if (end - i > 1) {
      which = fmt::format("{} times ", end - i);
    }
    text += fmt::format("  {}{}{}{}\n", which, call_of(first.fingerprint), at(to_text(first.site)),
                        is_open ? ", under way" : "");
    i = end;
  }
  return text;
}

}  // namespace isograd::shm
