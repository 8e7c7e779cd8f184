// How an Engine handles a lost, late, stopped or disagreeing peer: it reports the peer's name to every rank.
#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iterator>
#include <mutex>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "comm/failures.hpp"
#include "comm/shm/engine.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

std::mutex files_mutex;
std::list<fs::path> files;  // files of the OperationsFiles that exist

}  // namespace

OperationsFile::OperationsFile(fs::path file) {
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
  const ssize_t written = ::write(file, all.data(), all.size());  // in one call: ranks' texts do not mix
  ::close(file);
  return written == static_cast<ssize_t>(all.size()) ? name : std::string();
}

}  // namespace isograd

namespace isograd::shm {
namespace {
constexpr const char* kRestart = "Look at that rank's output for the reason, then restart all ranks";
}

std::string Engine::who(int rank) const { return describe(rank, members_[static_cast<std::size_t>(rank)]); }

std::string Engine::where(const Task& task) const {
  return fmt::format("{} of group '{}' on rank {} of {}{}", task.name(), name_, rank_, size_,
                     at(to_text(task.site_)));
}

// `task` and the earlier tasks that may block it. A collective may be blocked by all earlier collectives. Any
// task may be blocked by tasks whose memory or turn it waits for.
std::vector<const Task*> Engine::holding_up(const Task& task) const {
  const auto self = std::find_if(under_way_.begin(), under_way_.end(),
                                 [&](const auto& other) { return other.get() == &task; });
  if (self == under_way_.end()) return {};
  std::vector<const Task*> found{&task};
  for (auto other = self; other != under_way_.begin();) {
    const Task& earlier = **--other;
    const bool holds = std::any_of(found.begin(), found.end(), [&](const Task* later) {
      return (!later->is_message() && !earlier.is_message()) ||
             (!later->started_ && later->must_follow(earlier));
    });
    if (holds && !earlier.complete_) found.push_back(&earlier);
  }
  return found;
}

std::vector<int> Engine::awaited(const Task& task) {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const Task* each : holding_up(task))
    for (int r : each->awaited())
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void Engine::look_after_peers(Task& task, std::chrono::steady_clock::time_point since,
                              std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  throw_if_lost(task);
  if (task.complete_) return;
  warn_of_stopped(task);
  // This rank itself may have been stopped, so what arrived meanwhile still counts.
  if (std::chrono::steady_clock::now() - since >= timeout && step(task) == Moved::kNothing)
    time_out(task, timeout);
}

// A rank may end after it has done its part. So check for dead ranks first, then for missing parts.
void Engine::throw_if_lost(Task& task) {
  std::vector<int> lost = watch_->dead();
  const auto dead = lost.size();
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && control_->member(r).left.load(std::memory_order_acquire)) lost.push_back(r);
  if (lost.empty() || step(task) == Moved::kComplete) return;
  const auto is_lost = [&](int r) { return std::find(lost.begin(), lost.end(), r) != lost.end(); };
  std::vector<int> missed;
  for (const Task* each : holding_up(task)) {
    const std::vector<int> ranks = each->awaited();
    if (each->any_will_do() && !std::all_of(ranks.begin(), ranks.end(), is_lost)) continue;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(missed), is_lost);
  }
  if (missed.empty()) return;
  const int r = *std::min_element(missed.begin(), missed.end());
  const bool died = std::find(lost.begin(), lost.end(), r) - lost.begin() < static_cast<std::ptrdiff_t>(dead);
  const MemberInfo& member = members_[static_cast<std::size_t>(r)];
  const std::string name = member.pid == members_[static_cast<std::size_t>(rank_)].pid
                               ? fmt::format("rank {} (a thread of this process)", r)
                               : fmt::format("rank {} (host {}, pid {})", r, member.host, member.pid);
  ended_by_another_rank = true;
  fail(
      task, fmt::format("{} {}", name, died ? "has ended" : "left the group"),
      fmt::format(
          "{}. If it ended in order, it made fewer steps: a rank without data calls step({{}}) as often as the others",
          kRestart),
      /*in_order=*/!died);
}

// A rank that a debugger or signal has stopped may continue, so this is no error before the timeout.
void Engine::warn_of_stopped(const Task& task) {
  for (int r : awaited(task)) {
    const bool stopped = is_stopped(members_[static_cast<std::size_t>(r)]);
    const auto index = static_cast<std::size_t>(r);
    if (stopped && !warned_of_[index]) {
      print(stderr, fmt::format("isograd: {} waits for {}\n", where(task), who(r)));
      std::fflush(stderr);
    }
    warned_of_[index] = stopped;
  }
}

void Engine::time_out(const Task& task, std::chrono::milliseconds timeout) {
  std::string names;
  for (int r : awaited(task)) names += (names.empty() ? "" : ", ") + who(r);
  fail(task,
       names.empty() ? fmt::format("the operation unfinished after {} ms, and no rank known to be late",
                                   timeout.count())
                     : fmt::format("{} did not arrive within {} ms", names, timeout.count()),
       "Read the output of those ranks. If they were only slow, raise parallel.timeout_seconds (in C++: "
       "JoinOptions::timeout). Then restart all ranks");
}

bool Engine::poisoned() const {
  return control_->poison.state.load(std::memory_order_acquire) == Poison::kWritten;
}

void Engine::throw_poison(const Task& task) {
  const Poison& poison = control_->poison;
  throw RelayedError({.where = where(task),
                      .found = fmt::format("rank {} failed: {}", poison.rank, poison.text),
                      .expected = "every rank to take part",
                      .action = "Fix what that rank reports, then restart all ranks"},
                     poison.of_operation);
}

void Engine::fail(const Task& task, const std::string& found, const std::string& action, bool in_order) {
  if (spoil(fmt::format("{}: {}", task.name(), found), /*of_operation=*/true))
    print_history(where(task), in_order);
  throw_peer_error(where(task), found, "every rank to take part", action);
}

void Engine::poison(const std::string& reason) noexcept { spoil(reason, /*of_operation=*/false); }

bool Engine::spoil(const std::string& reason, bool of_operation) noexcept {
  if (inherited()) return false;
  Poison& poison = control_->poison;
  std::uint32_t clean = Poison::kClean;
  if (!poison.state.compare_exchange_strong(clean, Poison::kBeingWritten, std::memory_order_acq_rel))
    return false;
  poison.rank = rank_;
  poison.of_operation = of_operation;
  const std::size_t length = std::min(reason.size(), sizeof(poison.text) - 1);
  std::memcpy(poison.text, reason.data(), length);
  poison.text[length] = 0;
  poison.state.store(Poison::kWritten, std::memory_order_seq_cst);
  control_->bell.ring();
  return true;
}

std::uint64_t Engine::sequence() {
  const std::lock_guard lock(mutex_);
  return next_sequence_;
}

std::string Engine::history() {
  const std::lock_guard lock(mutex_);
  return history_.text(under_way_);
}

// Only the first rank that detects a failed operation prints. After other failures (a file, a model) the last
// operations are irrelevant. Those before ranks disagreed or hung, or one was killed, show where they parted.
// A rank that left `in_order` has its reason in its own output, so without a file they are left out.
void Engine::print_history(const std::string& where, bool in_order) noexcept {
  if (!options_.print_history) return;
  try {
    const std::string text = history();
    if (text.empty()) return;
    const std::string what = fmt::format("the last operations of rank {} in group '{}'", rank_, name_);
    const std::string file = OperationsFile::keep(fmt::format("{}, oldest first:\n{}", what, text));
    if (!file.empty())
      print(stderr, fmt::format("isograd: {}: {}\n", what, printable(file)));
    else if (!in_order)  // without the error, which the caller throws
      print(stderr, fmt::format("isograd: {}\nisograd: {}, oldest first:\n{}", where, what, text));
    std::fflush(stderr);
  } catch (...) {  // the failure itself is reported in any case
  }
}

}  // namespace isograd::shm
