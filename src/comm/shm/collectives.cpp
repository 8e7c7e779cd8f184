// The kinds of operation: who is a source, how its data is cut into chunks, what is done with each.
#include <algorithm>
#include <cstring>

#include "comm/shm/engine.hpp"
#include "comm/shm/operation.hpp"

namespace isograd::shm {
namespace {

constexpr std::int64_t kCacheLine = 64;

std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) {
  return (a + b - 1) / b;
}

Fingerprint fingerprint(Kind kind, std::int64_t count, std::int8_t dtype) {
  Fingerprint print;
  print.kind = kind;
  print.count = count;
  print.dtype = dtype;
  return print;
}

class AllReduce final : public Operation {
 public:
  AllReduce(std::byte* data, std::int64_t count, std::int8_t dtype, kernels::Number number,
            kernels::Combine combine)
      : Operation(fingerprint(Kind::kAllReduce, count, dtype),
                  {{data, static_cast<std::uint64_t>(count) * kernels::bytes_of(number)}}),
        data_(data),
        count_(count),
        width_(static_cast<std::int64_t>(kernels::bytes_of(number))),
        number_(number),
        combine_(combine) {
    fingerprint_.combine = static_cast<std::uint8_t>(combine);
  }

 private:
  bool is_source(int) const override { return true; }
  std::uint64_t source_bytes() const override { return static_cast<std::uint64_t>(count_ * width_); }
  const std::byte* source_data() const override { return data_; }

  std::uint64_t chunk_count(bool any_staged) const override {
    // Without staging the whole is one chunk: each rank's slice is then one long run.
    length_ = any_staged ? static_cast<std::int64_t>(engine().options().chunk_bytes) / width_ : count_;
    return count_ == 0 ? 1
                       : divide_up(static_cast<std::uint64_t>(count_), static_cast<std::uint64_t>(length_));
  }
  std::int64_t first_of(std::uint64_t chunk) const { return static_cast<std::int64_t>(chunk) * length_; }
  std::int64_t size_of(std::uint64_t chunk) const { return std::min(length_, count_ - first_of(chunk)); }

  void copy_in(std::uint64_t chunk) override {
    std::memcpy(engine().staging(engine().rank(), chunk), data_ + first_of(chunk) * width_,
                static_cast<std::size_t>(size_of(chunk) * width_));
  }

  // Reads slice `rank` of every rank's chunk and writes the combination into all of them.
  void work(std::uint64_t chunk) override {
    const int size = engine().size();
    const std::int64_t n = size_of(chunk);
    const std::int64_t line = kCacheLine / width_;  // no two ranks write to one cache line
    const std::int64_t part = (n + size * line - 1) / (size * line) * line;
    const std::int64_t begin = std::min(n, part * engine().rank()), end = std::min(n, begin + part);
    if (begin >= end) return;
    places_.clear();
    for (int r = 0; r < size; ++r) {
      places_.push_back(chunk_data(r, chunk, static_cast<std::uint64_t>(first_of(chunk) * width_)));
    }
    kernels::reduce_slices(number_, combine_, places_.data(), size, begin, end, places_.data(), size);
  }

  void copy_out(std::uint64_t chunk) override {
    if (!staged(engine().rank()) || count_ == 0) return;
    std::memcpy(data_ + first_of(chunk) * width_, engine().staging(engine().rank(), chunk),
                static_cast<std::size_t>(size_of(chunk) * width_));
  }

  std::byte* data_;
  std::int64_t count_, width_;
  mutable std::int64_t length_ = 0;  // elements of a chunk
  kernels::Number number_;
  kernels::Combine combine_;
  std::vector<void*> places_;
};

class ReduceScatter final : public Operation {
 public:
  ReduceScatter(const std::byte* input, std::byte* output, std::int64_t count, int size, std::int8_t dtype,
                kernels::Number number, kernels::Combine combine)
      : Operation(fingerprint(Kind::kReduceScatter, count, dtype),
                  {{input, static_cast<std::uint64_t>(count * size) * kernels::bytes_of(number)},
                   {output, static_cast<std::uint64_t>(count) * kernels::bytes_of(number)}}),
        input_(input),
        output_(output),
        count_(count),
        width_(static_cast<std::int64_t>(kernels::bytes_of(number))),
        size_(size),
        number_(number),
        combine_(combine) {
    fingerprint_.combine = static_cast<std::uint8_t>(combine);
  }

 private:
  bool is_source(int) const override { return true; }
  std::uint64_t source_bytes() const override { return static_cast<std::uint64_t>(count_ * size_ * width_); }
  const std::byte* source_data() const override { return input_; }

  std::uint64_t chunk_count(bool any_staged) const override {
    length_ =
        any_staged ? static_cast<std::int64_t>(engine().options().chunk_bytes) / (width_ * size_) : count_;
    return count_ == 0 ? 1
                       : divide_up(static_cast<std::uint64_t>(count_), static_cast<std::uint64_t>(length_));
  }
  std::int64_t first_of(std::uint64_t chunk) const { return static_cast<std::int64_t>(chunk) * length_; }
  std::int64_t size_of(std::uint64_t chunk) const { return std::min(length_, count_ - first_of(chunk)); }

  // A staged chunk holds a piece for each rank, one after another.
  void copy_in(std::uint64_t chunk) override {
    for (int r = 0; r < size_; ++r) {
      std::memcpy(engine().staging(engine().rank(), chunk) + r * length_ * width_,
                  input_ + (r * count_ + first_of(chunk)) * width_,
                  static_cast<std::size_t>(size_of(chunk) * width_));
    }
  }

  void work(std::uint64_t chunk) override {
    const std::int64_t n = size_of(chunk);
    if (n <= 0) return;
    const int rank = engine().rank();
    std::vector<const void*> places;
    for (int r = 0; r < size_; ++r) {
      const std::byte* data =
          chunk_data(r, chunk, static_cast<std::uint64_t>((rank * count_ + first_of(chunk)) * width_));
      places.push_back(staged(r) ? data + rank * length_ * width_ : data);
    }
    void* output = output_ + first_of(chunk) * width_;
    kernels::reduce_slices(number_, combine_, places.data(), size_, 0, n, &output, 1);
  }

  const std::byte* input_;
  std::byte* output_;
  std::int64_t count_, width_, size_;
  mutable std::int64_t length_ = 0;  // elements of a chunk, of each part
  kernels::Number number_;
  kernels::Combine combine_;
};

// Broadcast and all-gather: sources' bytes are copied to `outputs_[source]`.
class Copies : public Operation {
 protected:
  Copies(Fingerprint print, std::vector<Extent> extents, const std::byte* input,
         std::vector<std::byte*> outputs, std::uint64_t bytes)
      : Operation(print, std::move(extents)), input_(input), outputs_(std::move(outputs)), bytes_(bytes) {}

  std::uint64_t source_bytes() const override { return bytes_; }
  const std::byte* source_data() const override { return input_; }
  std::uint64_t chunk_count(bool any_staged) const override {
    length_ = any_staged ? engine().options().chunk_bytes : bytes_;
    return bytes_ == 0 ? 1 : divide_up(bytes_, length_);
  }
  std::uint64_t size_of(std::uint64_t chunk) const { return std::min(length_, bytes_ - chunk * length_); }

  void copy_in(std::uint64_t chunk) override {
    std::memcpy(engine().staging(engine().rank(), chunk), input_ + chunk * length_, size_of(chunk));
  }
  void work(std::uint64_t chunk) override {
    if (bytes_ == 0) return;
    const std::uint64_t offset = chunk * length_;
    for (int r = 0; r < engine().size(); ++r) {
      if (!is_source(r)) continue;
      const std::byte* from = r == engine().rank() ? input_ + offset : chunk_data(r, chunk, offset);
      std::byte* to = outputs_[static_cast<std::size_t>(r)] + offset;
      if (from != to) std::memcpy(to, from, size_of(chunk));
    }
  }

  const std::byte* input_;
  std::vector<std::byte*> outputs_;  // by rank
  std::uint64_t bytes_;
  mutable std::uint64_t length_ = 0;  // bytes of a chunk
};

class Broadcast final : public Copies {
 public:
  Broadcast(std::byte* data, std::int64_t count, std::int8_t dtype, std::uint64_t bytes, int root, int size,
            bool is_root)
      : Copies(fingerprint(Kind::kBroadcast, count, dtype), {{data, bytes}}, data,
               std::vector<std::byte*>(static_cast<std::size_t>(size), data), bytes),
        is_root_(is_root) {
    fingerprint_.root = root;
  }

 private:
  bool is_source(int rank) const override { return rank == fingerprint_.root; }
  bool waits_for_all() const override { return is_root_; }
  bool is_root_;
};

class AllGather final : public Copies {
 public:
  AllGather(const std::byte* input, std::vector<std::byte*> outputs, std::int64_t count, std::int8_t dtype,
            std::uint64_t bytes)
      : Copies(fingerprint(Kind::kAllGather, count, dtype), extents_of(input, outputs, bytes), input, outputs,
               bytes) {}

 private:
  static std::vector<Extent> extents_of(const std::byte* input, const std::vector<std::byte*>& outputs,
                                        std::uint64_t bytes) {
    std::vector<Extent> extents{{input, bytes}};
    for (const std::byte* output : outputs) extents.push_back({output, bytes});
    return extents;
  }
  bool is_source(int) const override { return true; }
};

// No data besides what the announcement carries.
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
  std::uint64_t chunk_count(bool) const override { return 1; }
  void copy_in(std::uint64_t) override {}
  void work(std::uint64_t) override {
    if (!received_) return;
    for (int r = 0; r < engine().size(); ++r) received_->push_back(slot(r).payload);
  }
  bool waits_for_all() const override { return false; }
  std::shared_ptr<std::vector<Payload>> received_;
};

}  // namespace

std::shared_ptr<Operation> all_reduce(std::byte* data, std::int64_t count, std::int8_t dtype,
                                      kernels::Number number, kernels::Combine combine) {
  return std::make_shared<AllReduce>(data, count, dtype, number, combine);
}

std::shared_ptr<Operation> broadcast(std::byte* data, std::int64_t count, std::int8_t dtype,
                                     std::uint64_t element_bytes, int root, int size, bool is_root) {
  return std::make_shared<Broadcast>(data, count, dtype, static_cast<std::uint64_t>(count) * element_bytes,
                                     root, size, is_root);
}

std::shared_ptr<Operation> all_gather(const std::byte* input, std::vector<std::byte*> outputs,
                                      std::int64_t count, std::int8_t dtype, std::uint64_t element_bytes) {
  return std::make_shared<AllGather>(input, std::move(outputs), count, dtype,
                                     static_cast<std::uint64_t>(count) * element_bytes);
}

std::shared_ptr<Operation> reduce_scatter(const std::byte* input, std::byte* output, std::int64_t count,
                                          int size, std::int8_t dtype, kernels::Number number,
                                          kernels::Combine combine) {
  return std::make_shared<ReduceScatter>(input, output, count, size, dtype, number, combine);
}

std::shared_ptr<Operation> barrier() {
  return std::make_shared<Exchange>(Fingerprint{}, Payload{}, nullptr);
}

std::shared_ptr<Operation> exchange(std::uint8_t stage, std::int64_t count, std::int8_t dtype,
                                    const Payload& mine, std::shared_ptr<std::vector<Payload>> received) {
  Fingerprint print = fingerprint(Kind::kAllocate, count, dtype);
  print.stage = stage;
  return std::make_shared<Exchange>(print, mine, std::move(received));
}

}  // namespace isograd::shm
