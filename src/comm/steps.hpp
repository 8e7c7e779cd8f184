// Steps: an exchange of messages written from top to bottom, that can still be moved on without waiting.
//
//   Steps pass_around(Group group, at::Tensor mine, at::Tensor theirs) {
//     co_await both(group.send_async(mine, right), group.recv_async(theirs, left));
//     ...                                          // goes on when both are complete
//   }
//
// A C++20 coroutine: co_await leaves the function until the messages (or the inner Steps) it names are
// complete; progress() and wait() come back to it.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>
#include <vector>

#include "isograd/group.hpp"

namespace isograd {

using Messages = std::vector<Pending>;

template <typename... Pendings>
Messages both(Pendings... pending) {
  Messages messages;
  (messages.push_back(std::move(pending)), ...);
  return messages;
}

class Steps {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  Steps(Steps&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Steps& operator=(Steps&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Steps() {
    if (handle_) handle_.destroy();
  }

  // Goes as far as possible without waiting; true at the end. Throws what the steps throw.
  bool progress() {
    return run([](auto& part) { return part.progress(); });
  }
  void wait() {
    run([](auto& part) { return part.wait(), true; });
  }

 private:
  explicit Steps(Handle handle) : handle_(handle) {}
  template <typename Move>
  bool run(Move move);

  Handle handle_;
};

struct Steps::promise_type {
  Messages messages;           // what the function waits for
  std::vector<Steps> inner;    // or this one, one at most
  std::exception_ptr failure;  // what it threw

  Steps get_return_object() { return Steps(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() { return {}; }
  std::suspend_always final_suspend() noexcept { return {}; }
  void return_void() {}
  void unhandled_exception() { failure = std::current_exception(); }
  std::suspend_always await_transform(Messages awaited) {
    messages = std::move(awaited);
    return {};
  }
  std::suspend_always await_transform(Steps awaited) {
    inner.push_back(std::move(awaited));
    return {};
  }
};

template <typename Move>
bool Steps::run(Move move) {
  promise_type& promise = handle_.promise();
  for (;;) {
    for (Steps& steps : promise.inner) {
      if (!move(steps)) return false;
    }
    for (Pending& message : promise.messages) {
      if (!move(message)) return false;
    }
    promise.inner.clear();
    promise.messages.clear();
    if (promise.failure) std::rethrow_exception(promise.failure);
    if (handle_.done()) return true;
    handle_.resume();
  }
}

}  // namespace isograd
