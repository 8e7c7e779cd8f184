#include "comm/shm/history.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <mutex>

#include "comm/operations_file.hpp"

namespace isograd {
namespace {

std::mutex files_mutex;
std::list<std::filesystem::path> files;  // files of the OperationsFiles that exist

}  // namespace

OperationsFile::OperationsFile(std::filesystem::path file) {
  const std::lock_guard lock(files_mutex);
  place_ = files.insert(files.end(), std::move(file));
}

OperationsFile::~OperationsFile() {
  const std::lock_guard lock(files_mutex);
  files.erase(place_);
}

std::string OperationsFile::keep(const std::string& text) {
  const std::lock_guard lock(files_mutex);
  if (files.empty()) return {};
  const std::string name = files.back().string();
  const int file =
      ::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
  if (file < 0) return {};
  const std::string all = fmt::format("{:%Y-%m-%d %H:%M:%S} UTC: {}", fmt::gmtime(std::time(nullptr)), text);
  const ssize_t written =
      ::write(file, all.data(), all.size());  // one call, so that the ranks' texts do not mix
  ::close(file);
  return written == static_cast<ssize_t>(all.size()) ? name : std::string();
}

}  // namespace isograd

namespace isograd::shm {
namespace {

bool is_message(Kind kind) {
  return kind == Kind::kSend || kind == Kind::kReceive;
}

}  // namespace

void History::begin(const Fingerprint& fingerprint, const CallSite& site, std::uint64_t number) {
  entries_[count_++ % kLength] = {fingerprint, site, number};
}

std::string History::text(const std::vector<std::shared_ptr<Task>>& under_way) const {
  const auto open = [&](const Entry& entry) {
    return std::any_of(under_way.begin(), under_way.end(), [&](const auto& task) {
      return task->fingerprint() == entry.fingerprint &&
             (task->number() == entry.number || is_message(entry.fingerprint.kind));
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
    if (!is_message(first.fingerprint.kind)) {
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
