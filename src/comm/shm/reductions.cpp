// Operations that combine numbers: how data is split into chunks and slices, and which rank reads and writes
// what.
#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/shm/engine.hpp"
#include "comm/shm/operation.hpp"
#include "kernels/flat.hpp"

namespace isograd::shm {
namespace {

constexpr std::int64_t kCacheLine = 64;

class Reducing : public Operation {
 protected:
  Reducing(Fingerprint print, std::vector<Extent> extents, Reduction reduction)
      : Operation(print, std::move(extents)),
        reduction_(reduction),
        width_(static_cast<std::int64_t>(kernels::bytes_of(reduction.number))) {
    fingerprint_.combine = static_cast<std::uint8_t>(reduction.combine);
    payload_.words[0] = std::bit_cast<std::uint64_t>(reduction.factor);
  }
  bool is_source(int) const override { return true; }

  // The factors of all ranks, for a scaled sum.
  const double* factors() {
    if (reduction_.combine != kernels::Combine::kScaledSum) return nullptr;
    factors_.clear();
    for (int r = 0; r < size(); ++r) factors_.push_back(std::bit_cast<double>(slot(r).payload.words[0]));
    return factors_.data();
  }
  void combine(std::int64_t begin, std::int64_t end, void* const* outputs, int outputs_count) {
    kernels::reduce_slices(reduction_.number, reduction_.combine, places_.data(), size(), begin, end, outputs,
                           outputs_count, factors());
  }

  Reduction reduction_;
  std::int64_t width_;
  std::vector<void*> places_;  // where each rank's data is, by rank
 private:
  std::vector<double> factors_;
};

// All-reduce and reduce: rank r combines slice r of each chunk and writes it to all ranks, or to the root. A
// rank's own slice skips its staging buffer, because no other rank reads it there.
class AllReduce final : public Reducing {
 public:
  AllReduce(const Fingerprint& print, Region data, const Reduction& reduction)
      : Reducing(print, {{data.data, data.bytes}}, reduction),
        data_(data.data),
        count_(print.count),
        to_all_(print.kind == Kind::kAllReduce) {}

 private:
  std::uint64_t source_bytes() const override { return static_cast<std::uint64_t>(count_ * width_); }
  const std::byte* source_data() const override { return data_; }

  std::uint64_t staged_chunks() const override {
    return chunks_of(static_cast<std::uint64_t>(count_), static_cast<std::uint64_t>(staged_length()));
  }
  std::int64_t staged_length() const {
    return static_cast<std::int64_t>(engine().options().chunk_bytes) / width_;
  }
  // Without staging the whole is one chunk: each rank's slice is then one long run.
  void set_chunks(bool any_staged) override { length_ = any_staged ? staged_length() : count_; }

  std::byte* private_data(std::uint64_t chunk) const {
    return data_ + static_cast<std::int64_t>(chunk) * length_ * width_;
  }
  std::int64_t size_of(std::uint64_t chunk) const {
    return std::max<std::int64_t>(0, std::min(length_, count_ - static_cast<std::int64_t>(chunk) * length_));
  }
  struct Slice {
    std::int64_t begin, end, all;
  };
  Slice own_slice(std::uint64_t chunk) const {
    const std::int64_t n = size_of(chunk), ranks = size();
    const std::int64_t line = kCacheLine / width_;  // no two ranks write to one cache line
    const std::int64_t part = (n + ranks * line - 1) / (ranks * line) * line;
    const std::int64_t begin = std::min(n, part * rank());
    return {begin, std::min(n, begin + part), n};
  }
  // Everything except this rank's slice.
  void copy_around(const Slice& own, std::byte* to, const std::byte* from) const {
    std::memcpy(to, from, static_cast<std::size_t>(own.begin * width_));
    std::memcpy(to + own.end * width_, from + own.end * width_,
                static_cast<std::size_t>((own.all - own.end) * width_));
  }

  void copy_in(std::uint64_t chunk) override {
    const Slice own = own_slice(chunk);
    copy_around(own, engine().own_staging(chunk, static_cast<std::uint64_t>(own.all * width_)),
                private_data(chunk));
  }

  void work(std::uint64_t chunk) override {
    const Slice own = own_slice(chunk);
    if (own.begin >= own.end) return;
    const std::uint64_t offset = chunk * static_cast<std::uint64_t>(length_ * width_);
    places_.clear();
    for (int r = 0; r < size(); ++r) {
      const bool mine = r == rank();
      places_.push_back(mine ? private_data(chunk) : chunk_data(r, chunk, offset));
    }
    void* const* outputs = to_all_ ? places_.data() : &places_[static_cast<std::size_t>(fingerprint_.root)];
    combine(own.begin, own.end, outputs, to_all_ ? size() : 1);
  }

  void copy_out(std::uint64_t chunk) override {
    if (!staged(rank()) || !(to_all_ || rank() == fingerprint_.root)) return;
    copy_around(own_slice(chunk), private_data(chunk), engine().staging(rank(), chunk));
  }

  std::byte* data_;
  std::int64_t count_;
  bool to_all_;
  std::int64_t length_ = 0;  // elements of a chunk
};

class ReduceScatter final : public Reducing {
 public:
  ReduceScatter(const Fingerprint& print, std::vector<Region> pieces, Region output,
                const Reduction& reduction, std::shared_ptr<double> squares)
      : Reducing(with_sizes(print, pieces), extents_of(pieces, {output}), reduction),
        pieces_(std::move(pieces)),
        output_(output.data),
        squares_(std::move(squares)) {
    if (squares_) *squares_ = 0;
  }

 private:
  std::uint64_t source_bytes() const override { return pieces_.hull.bytes; }
  const std::byte* source_data() const override { return pieces_.hull.data; }
  void write_spans(Span* spans) const override { pieces_.write_spans(spans); }
  std::uint64_t staged_chunks() const override { return pieces_.staged_chunks(engine()); }
  void set_chunks(bool any_staged) override {
    pieces_.part = any_staged ? Pieces::staged_part(engine()) : kWhole;
  }

  void copy_in(std::uint64_t chunk) override { pieces_.copy_in(chunk, engine()); }
  void work(std::uint64_t chunk) override {
    const Region& own = pieces_.of_rank[static_cast<std::size_t>(rank())];
    const Region mine = part_of(own, chunk, pieces_.part);
    if (mine.bytes == 0) return;
    places_.clear();
    for (int r = 0; r < size(); ++r)
      places_.push_back(const_cast<std::byte*>(piece_for_me(pieces_, r, chunk)));
    void* output = output_ + chunk * pieces_.part;
    const auto count = static_cast<std::int64_t>(mine.bytes) / width_;
    if (!squares_) return combine(0, count, &output, 1);
    // Runs start at the output's start whatever its chunks are, so the bits do not depend on chunks.
    const auto first = static_cast<std::int64_t>(chunk * pieces_.part) / width_;
    for (std::int64_t at = 0; at < count;) {
      const std::int64_t end =
          std::min(count, at + kernels::kSquaresRun - (first + at) % kernels::kSquaresRun);
      combine(at, end, &output, 1);
      at = end;
      if ((first + at) % kernels::kSquaresRun == 0) square_until(first + at);
    }
    const auto all = static_cast<std::int64_t>(own.bytes) / width_;
    if (first + count == all) square_until(all);
  }

  // Squares the numbers written since the last call, at most one run.
  void square_until(std::int64_t end) {
    const std::byte* values = output_ + squared_ * width_;
    const std::int64_t count = end - squared_;
    *squares_ += reduction_.number == kernels::Number::kFloat32
                     ? kernels::squared_norm(reinterpret_cast<const float*>(values), count)
                 : reduction_.number == kernels::Number::kFloat64
                     ? kernels::squared_norm(reinterpret_cast<const double*>(values), count)
                     : kernels::squared_norm(reinterpret_cast<const kernels::Bfloat16*>(values), count);
    squared_ = end;
  }

  Pieces pieces_;  // by rank
  std::byte* output_;
  std::shared_ptr<double> squares_;
  std::int64_t squared_ = 0;  // elements
};

}  // namespace

OperationPointer reduce(const Fingerprint& print, Region data, const Reduction& reduction) {
  return std::make_shared<AllReduce>(print, data, reduction);
}
OperationPointer reduce_scatter(const Fingerprint& print, std::vector<Region> pieces, Region output,
                                const Reduction& reduction, std::shared_ptr<double> squares) {
  return std::make_shared<ReduceScatter>(print, std::move(pieces), output, reduction, std::move(squares));
}

}  // namespace isograd::shm
