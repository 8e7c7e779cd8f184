#include "comm/shm/message.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/shm/engine.hpp"

namespace isograd::shm {
namespace {

std::string describe(const Fingerprint& print, int tag) {
  return call_of(print) + (tag ? fmt::format(" with tag {}", tag) : "");
}

// Copies between memory and a ring, around the ring's end.
void to_ring(std::byte* ring, std::uint64_t ring_bytes, std::uint64_t position, const std::byte* from,
             std::uint64_t bytes) {
  const std::uint64_t begin = position % ring_bytes, first = std::min(bytes, ring_bytes - begin);
  std::memcpy(ring + begin, from, first);
  std::memcpy(ring, from + first, bytes - first);
}

void from_ring(std::byte* to, const std::byte* ring, std::uint64_t ring_bytes, std::uint64_t position,
               std::uint64_t bytes) {
  const std::uint64_t begin = position % ring_bytes, first = std::min(bytes, ring_bytes - begin);
  std::memcpy(to, ring + begin, first);
  std::memcpy(to + first, ring, bytes - first);
}

void finish(Envelope& envelope, std::uint64_t number) {
  envelope.finished.store(number + 1, std::memory_order_seq_cst);
}

// Advances behind the oldest unfinished message.
void let_go(Inbox& inbox, Channel& way) {
  while (inbox.taken.contains(inbox.first) &&
         way.envelope(inbox.first).finished.load(std::memory_order_relaxed) == inbox.first + 1)
    inbox.taken.erase(inbox.first++);
}

class Send final : public Task {
 public:
  Send(const Fingerprint& print, Region data, int tag)
      : Task(print, {{data.data, data.bytes, false}}), data_(data.data), bytes_(data.bytes), tag_(tag) {}

  std::string name() const override { return fmt::format("send #{} to rank {}", number_, fingerprint_.root); }
  std::string call() const override { return describe(fingerprint_, tag_) + at(to_text(site_)); }
  std::vector<int> awaited() const override {
    return complete_ ? std::vector<int>{} : std::vector<int>{fingerprint_.root};
  }

 private:
  void enter() override {
    number_ = engine().take_message_number(fingerprint_.root);
    local_ = engine().locate(data_, bytes_);
  }
  bool can_start() override {
    return number_ < Channel::kEnvelopes ||
           channel().envelope(number_).finished.load(std::memory_order_acquire) ==
               number_ - Channel::kEnvelopes + 1;
  }
  bool advance(bool may_start, bool staging_free) override {
    Channel& way = channel();
    Envelope& envelope = way.envelope(number_);
    bool moved = false;
    if (!started_) {
      if (!may_start) return false;
      post(envelope);
      moved = true;
    }
    bool done = bytes_ <= Envelope::kInline;
    if (!done && local_.allocation >= 0) {  // read in place
      done = envelope.finished.load(std::memory_order_acquire) == number_ + 1;
    } else if (!done && way.accepted.load(std::memory_order_acquire) == number_ + 1) {
      const std::uint64_t ring_bytes = engine().ring_bytes();
      const std::uint64_t before = way.written.load(std::memory_order_relaxed);  // only this rank writes it
      const std::uint64_t room = ring_bytes - (before - way.read.load(std::memory_order_acquire));
      // A quarter of the ring at a time, so that the receiver works meanwhile.
      const std::uint64_t bytes = std::min({room, bytes_ - written_, ring_bytes / 4});
      if (bytes > 0) {
        std::byte* ring = engine().message_ring(engine().rank(), fingerprint_.root);
        engine().reserve(ring, std::min(ring_bytes, before + bytes));
        to_ring(ring, ring_bytes, before, data_ + written_, bytes);
        written_ += bytes;
        way.written.store(before + bytes, std::memory_order_seq_cst);
        engine().ring();
        moved = true;
      }
      done = written_ == bytes_;
    }
    if (done) {
      engine().observe(Phase::kWorked, *this);
      complete_now();
    }
    return moved || done;
  }
  bool is_message() const override { return true; }
  void post(Envelope& envelope) {
    engine().observe(Phase::kStart, *this);
    envelope.tag = tag_;
    envelope.dtype = fingerprint_.dtype;
    envelope.count = fingerprint_.count;
    envelope.bytes = bytes_;
    envelope.location = local_;
    envelope.site = to_text(site_);
    if (bytes_ > 0 && bytes_ <= Envelope::kInline) std::memcpy(envelope.data, data_, bytes_);
    envelope.posted.store(number_ + 1, std::memory_order_seq_cst);
    engine().ring();
    started_ = true;
    engine().observe(Phase::kAnnounced, *this);
  }
  Channel& channel() const { return engine().channel(engine().rank(), fingerprint_.root); }

  const std::byte* data_;
  std::uint64_t bytes_;
  int tag_;
  Location local_;
  std::uint64_t written_ = 0;  // bytes written to the ring
};

class Receive final : public Task {
 public:
  Receive(const Fingerprint& print, Region data, int tag)
      : Task(print, {{data.data, data.bytes, true}}),
        data_(data.data),
        bytes_(data.bytes),
        tag_(tag),
        source_(print.root) {}

  std::string name() const override {
    const int from = source_;
    return from < 0 ? "recv from any rank" : fmt::format("recv from rank {}", from);
  }
  std::string call() const override { return describe(fingerprint_, tag_) + at(to_text(site_)); }
  std::vector<int> awaited() const override {
    if (complete_) return {};
    if (source_ >= 0) return {source_};
    std::vector<int> ranks;
    for (int r = 0; r < engine().size(); ++r)
      if (r != engine().rank()) ranks.push_back(r);
    return ranks;
  }
  bool any_will_do() const override { return fingerprint_.root < 0 && !started_; }
  int source() const override { return source_; }  // valid once matched

 private:
  void enter() override {}
  // Messages of one tag go to receives in call order. A receive from any rank need not wait for an earlier
  // one from a certain rank: see claimed().
  bool must_follow(const Task& earlier) const override {
    if (Task::must_follow(earlier)) return true;
    const auto* other = dynamic_cast<const Receive*>(&earlier);
    return other && !other->started_ && other->tag_ == tag_ &&
           (other->fingerprint_.root < 0 || other->fingerprint_.root == fingerprint_.root);
  }
  bool advance(bool may_start, bool staging_free) override {
    bool moved = false;
    if (!started_) {
      if (!may_start) return false;
      if (fingerprint_.root >= 0) {
        if (!match(fingerprint_.root)) return false;
      } else {
        for (int r = 0; r < engine().size() && !started_; ++r)
          if (r != engine().rank()) match(r);
        if (!started_) return false;
      }
      moved = true;
    }
    Envelope& envelope = channel().envelope(number_);
    const std::uint64_t before = read_;
    if (!take(copy_ ? *copy_ : envelope)) return moved || read_ != before;
    engine().observe(Phase::kWorked, *this);
    if (!copy_) {
      finish(envelope, number_);
      engine().ring();
      let_go(engine().inbox(source_), channel());
    }
    complete_now();
    return true;
  }
  bool is_message() const override { return true; }
  // The oldest message with the right tag, among the envelopes and the messages set aside.
  bool match(int from) {
    Inbox& inbox = engine().inbox(from);
    Channel& way = engine().channel(from, engine().rank());
    const auto aside = std::find_if(inbox.set_aside.begin(), inbox.set_aside.end(),
                                    [&](const auto& entry) { return entry.second->tag == tag_; });
    const bool has_aside = aside != inbox.set_aside.end();
    const std::uint64_t end = inbox.first + Channel::kEnvelopes;
    std::uint64_t n = inbox.first;
    bool here = false;
    for (; n < end; ++n) {
      if (inbox.taken.contains(n)) continue;
      if (way.envelope(n).posted.load(std::memory_order_acquire) != n + 1) break;
      here = way.envelope(n).tag == tag_;
      if (here) break;
    }
    if (!here && !has_aside) {
      if (n == end) set_aside(inbox, way);
      return false;
    }
    if (fingerprint_.root < 0 && claimed(from)) return false;
    const bool use_aside = has_aside && !(here && n < aside->first);
    source_ = from;
    number_ = use_aside ? aside->first : n;
    check(use_aside ? *aside->second : way.envelope(n));
    started_ = true;  // set even on a mismatch, so that nothing is delivered later
    if (use_aside) {
      copy_ = aside->second;
      inbox.set_aside.erase(aside);
    } else {
      inbox.taken.insert(n);
    }
    engine().observe(Phase::kAnnounced, *this);
    return true;
  }
  // An earlier receive from this very rank comes first.
  bool claimed(int from) const {
    for (const auto& task : engine().under_way()) {
      if (task.get() == this) return false;
      const auto* other = dynamic_cast<const Receive*>(task.get());
      if (other && !other->started_ && other->tag_ == tag_ && other->fingerprint_.root == from) return true;
    }
    return false;
  }
  // Every envelope holds a message with another tag, and the right message may be waiting for an envelope.
  // Copies of the small messages are kept to free their envelopes.
  void set_aside(Inbox& inbox, Channel& way) {
    bool moved = false;
    for (std::uint64_t n = inbox.first; n < inbox.first + Channel::kEnvelopes; ++n) {
      Envelope& envelope = way.envelope(n);
      if (inbox.taken.contains(n) || envelope.bytes > Envelope::kInline) continue;
      const auto copy = std::make_shared<Envelope>();
      copy->tag = envelope.tag;
      copy->dtype = envelope.dtype;
      copy->count = envelope.count;
      copy->bytes = envelope.bytes;
      copy->site = envelope.site;
      std::memcpy(copy->data, envelope.data, envelope.bytes);
      inbox.set_aside[n] = copy;
      inbox.taken.insert(n);
      finish(envelope, n);
      moved = true;
    }
    if (!moved) return;  // nobody needs to wake up
    let_go(inbox, way);
    engine().ring();
  }
  void check(const Envelope& envelope) {
    if (envelope.count == fingerprint_.count && envelope.dtype == fingerprint_.dtype) return;
    const Fingerprint sent{
        .kind = Kind::kSend, .dtype = envelope.dtype, .root = engine().rank(), .count = envelope.count};
    engine().fail(*this,
                  fmt::format("the ranks disagreed: rank {} called {}, rank {} called {}", engine().rank(),
                              call(), source_, describe(sent, envelope.tag) + at(envelope.site)),
                  "Make both ends agree on the number of elements and their type");
  }
  // true once all data is here
  bool take(const Envelope& envelope) {
    if (bytes_ <= Envelope::kInline) {
      if (bytes_ > 0) std::memcpy(data_, envelope.data, bytes_);
      return true;
    }
    if (envelope.location.allocation >= 0) {
      std::memcpy(data_, engine().shared_data(source_, envelope.location), bytes_);
      return true;
    }
    Inbox& inbox = engine().inbox(source_);
    if (inbox.in_ring && inbox.in_ring != this) return false;
    Channel& way = channel();
    if (!inbox.in_ring) {
      inbox.in_ring = this;
      way.accepted.store(number_ + 1, std::memory_order_seq_cst);
      engine().ring();
    }
    const std::uint64_t before = way.read.load(std::memory_order_relaxed);  // only this rank writes it
    const std::uint64_t bytes = way.written.load(std::memory_order_acquire) - before;
    if (bytes > 0) {
      from_ring(data_ + read_, engine().message_ring(source_, engine().rank()), engine().ring_bytes(), before,
                bytes);
      read_ += bytes;
      way.read.store(before + bytes, std::memory_order_seq_cst);
      engine().ring();
    }
    if (read_ == bytes_) inbox.in_ring = nullptr;
    return read_ == bytes_;
  }
  Channel& channel() const { return engine().channel(source_, engine().rank()); }

  std::byte* data_;
  std::uint64_t bytes_;
  int tag_;
  int source_ = -1;
  std::uint64_t read_ = 0;          // bytes read from the ring
  std::shared_ptr<Envelope> copy_;  // of a message that was set aside
};

}  // namespace

std::shared_ptr<Task> send(const Fingerprint& print, Region data, int tag) {
  return std::make_shared<Send>(print, data, tag);
}
std::shared_ptr<Task> receive(const Fingerprint& print, Region data, int tag) {
  return std::make_shared<Receive>(print, data, tag);
}

}  // namespace isograd::shm
