// Operations that copy data: broadcast, gather and all-gather (every rank reads the whole of a source),
// scatter and all-to-all (a source has a part for each rank), and operations without data.
#include <fmt/format.h>

#include <cstring>

#include "comm/shm/engine.hpp"
#include "comm/shm/operation.hpp"

namespace isograd::shm {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// The whole of each source goes to `outputs_[source]`. Without outputs this rank is only a source.
class Copies final : public Operation {
 public:
  Copies(Fingerprint print, std::vector<Extent> extents, Region input, std::vector<Region> outputs,
         bool waits)
      : Operation(print, std::move(extents)), input_(input), outputs_(std::move(outputs)), waits_(waits) {}

 private:
  bool is_source(int rank) const override {
    return fingerprint_.kind != Kind::kBroadcast || rank == fingerprint_.root;
  }
  bool waits_for_all() const override { return waits_; }
  std::uint64_t source_bytes() const override { return input_.bytes; }
  const std::byte* source_data() const override { return input_.data; }
  std::uint64_t staged_chunks() const override {
    return chunks_of(input_.bytes, engine().options().chunk_bytes);
  }
  void set_chunks(bool any_staged) override {
    length_ = any_staged ? engine().options().chunk_bytes : kWhole;
  }
  void copy_in(std::uint64_t chunk) override {
    const Region part = part_of(input_, chunk, length_);
    copy_bytes(engine().own_staging(chunk, part.bytes), part.data, part.bytes);
  }
  void work(std::uint64_t chunk) override {
    if (outputs_.empty()) return;
    for (int r = 0; r < size(); ++r) {
      if (!is_source(r)) continue;
      const Region to = part_of(outputs_[static_cast<std::size_t>(r)], chunk, length_);
      if (to.bytes == 0) continue;
      const std::uint64_t offset = chunk * length_;
      copy_bytes(to.data, r == rank() ? input_.data + offset : chunk_data(r, chunk, offset), to.bytes);
    }
  }

  Region input_;
  std::vector<Region> outputs_;  // by rank
  std::uint64_t length_ = 0;     // bytes of a chunk
  bool waits_;
};

// Each source has a piece for each rank. A rank's piece for itself is copied directly.
class Parts final : public Operation {
 public:
  Parts(Fingerprint print, std::vector<Region> outputs, std::vector<Region> inputs, bool waits)
      : Operation(print, extents_of(inputs, outputs)),
        outputs_(std::move(outputs)),
        inputs_(std::move(inputs)),
        waits_(waits) {}

 private:
  bool is_source(int rank) const override {
    return fingerprint_.kind == Kind::kAllToAll || rank == fingerprint_.root;
  }
  bool waits_for_all() const override { return waits_; }
  std::uint64_t source_bytes() const override { return inputs_.hull.bytes; }
  const std::byte* source_data() const override { return inputs_.hull.data; }
  void write_spans(Span* spans) const override { inputs_.write_spans(spans); }
  std::uint64_t staged_chunks() const override { return inputs_.staged_chunks(engine()); }
  void set_chunks(bool any_staged) override {
    inputs_.part = any_staged ? Pieces::staged_part(engine()) : kWhole;
  }

  void check_spans() override {
    for (int r = 0; r < size(); ++r) {
      if (!is_source(r)) continue;
      const std::uint64_t given = span_for_me(r).bytes,
                          expected = outputs_[static_cast<std::size_t>(r)].bytes;
      if (given == expected) continue;
      engine().fail(*this,
                    fmt::format("the ranks disagreed: rank {} has {} bytes for rank {}, which expects {}", r,
                                given, rank(), expected),
                    "Make what each rank sends another the same as what that one expects");
    }
  }

  void copy_in(std::uint64_t chunk) override { inputs_.copy_in(chunk, engine()); }
  void work(std::uint64_t chunk) override {
    for (int r = 0; r < size(); ++r) {
      if (!is_source(r)) continue;
      const Region to = part_of(outputs_[static_cast<std::size_t>(r)], chunk, inputs_.part);
      if (to.bytes > 0) copy_bytes(to.data, piece_for_me(inputs_, r, chunk), to.bytes);
    }
  }

  std::vector<Region> outputs_;  // by source
  Pieces inputs_;                // by destination rank
  bool waits_;
};

// No data except the payload of the announcement.
class Exchange final : public Operation {
 public:
  Exchange(Fingerprint print, const Payload& mine, std::shared_ptr<std::vector<Payload>> received)
      : Operation(print, {}), received_(std::move(received)) {
    payload_ = mine;
  }

 private:
  bool is_source(int) const override { return false; }
  std::uint64_t source_bytes() const override { return 0; }
  const std::byte* source_data() const override { return nullptr; }
  std::uint64_t staged_chunks() const override { return 1; }
  void set_chunks(bool) override {}
  void copy_in(std::uint64_t) override {}
  void work(std::uint64_t) override {
    if (!received_) return;
    for (int r = 0; r < size(); ++r) received_->push_back(slot(r).payload);
  }
  bool waits_for_all() const override { return false; }
  std::shared_ptr<std::vector<Payload>> received_;
};

}  // namespace

OperationPointer broadcast(const Fingerprint& print, Region data, int size, bool is_root) {
  return std::make_shared<Copies>(print, std::vector<Extent>{{data.data, data.bytes, !is_root}}, data,
                                  std::vector<Region>(static_cast<std::size_t>(size), data), is_root);
}
OperationPointer gather(const Fingerprint& print, Region input, std::vector<Region> outputs) {
  return std::make_shared<Copies>(with_sizes(print, outputs), extents_of({input}, outputs), input, outputs,
                                  true);
}
OperationPointer scatter(const Fingerprint& print, Region output, std::vector<Region> inputs, int size) {
  std::vector<Region> outputs(static_cast<std::size_t>(size));
  outputs[static_cast<std::size_t>(print.root)] = output;
  const bool is_root = !inputs.empty();
  return std::make_shared<Parts>(print, std::move(outputs), std::move(inputs), is_root);
}
OperationPointer all_to_all(const Fingerprint& print, std::vector<Region> outputs,
                            std::vector<Region> inputs) {
  return std::make_shared<Parts>(print, std::move(outputs), std::move(inputs), true);
}
OperationPointer barrier() { return std::make_shared<Exchange>(Fingerprint{}, Payload{}, nullptr); }
OperationPointer exchange(const Fingerprint& print, const Payload& mine,
                          std::shared_ptr<std::vector<Payload>> received) {
  return std::make_shared<Exchange>(print, mine, std::move(received));
}

}  // namespace isograd::shm
