// Send and Receive: the two ends of a message in a Channel.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "comm/shm/channel.hpp"
#include "comm/shm/task.hpp"

namespace isograd::shm {

class Receive;

// The record of the messages from one other rank.
struct Inbox {
  std::uint64_t first = 0;        // all messages before it are finished
  std::set<std::uint64_t> taken;  // later messages that are matched, set aside or finished
  // Small messages, by number, that filled all envelopes while a receive waited for another tag.
  std::map<std::uint64_t, std::shared_ptr<Envelope>> set_aside;
  Receive* in_ring = nullptr;  // the receive whose data is in the ring now
};

// Complete when its memory may be reused, possibly before the message is received.
class Send final : public Task {
 public:
  Send(const std::byte* data, std::uint64_t bytes, std::int64_t count, std::int8_t dtype, int to, int tag);
  std::string name() const override;
  std::string call() const override;
  std::vector<int> awaited() const override;

 private:
  void enter() override;
  bool can_start() override;
  bool advance(bool may_start, bool staging_free) override;
  bool is_message() const override { return true; }
  void post(Envelope& envelope);
  Channel& channel() const;

  const std::byte* data_;
  std::uint64_t bytes_;
  int tag_;
  Location local_;
  std::uint64_t written_ = 0;  // bytes written to the ring
};

class Receive final : public Task {
 public:
  // from = -1: any rank; the first message with this tag is taken.
  Receive(std::byte* data, std::uint64_t bytes, std::int64_t count, std::int8_t dtype, int from, int tag);
  std::string name() const override;
  std::string call() const override;
  std::vector<int> awaited() const override;
  bool any_will_do() const override { return fingerprint_.root < 0 && !started_; }
  int source() const { return source_; }  // valid once matched

 private:
  void enter() override {}
  bool must_follow(const Task& earlier) const override;
  bool advance(bool may_start, bool staging_free) override;
  bool is_message() const override { return true; }
  bool match(int from);
  bool claimed(int from) const;
  void set_aside(Inbox& inbox, Channel& way);
  void check(const Envelope& envelope);
  bool take(const Envelope& envelope);  // true once all data is here
  Channel& channel() const;

  std::byte* data_;
  std::uint64_t bytes_;
  int tag_;
  int source_ = -1;
  std::uint64_t read_ = 0;          // bytes read from the ring
  std::shared_ptr<Envelope> copy_;  // of a message that was set aside
};

}  // namespace isograd::shm
