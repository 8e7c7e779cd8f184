// Operation: one collective on one rank.
//
//   announce   publish what is called (fingerprint) and where this rank's data is
//   agree      when all have announced: same call everywhere? how many chunks?
//   chunks     for chunk c: copy in (sources in private memory) -> work, once every source has c in place
//              -> copy out, once every rank has worked on c; several chunks are under way at once
//
// Data inside an allocation of the group is read and written in place: one chunk, no copies.
#pragma once

#include "comm/shm/task.hpp"
#include "kernels/reduce.hpp"

namespace isograd::shm {

struct Pieces;

class Operation : public Task {
 public:
  std::string name() const final;
  std::string call() const final;
  std::vector<int> awaited() const final;

 protected:
  using Task::Task;

  // ---- implemented by each kind of operation ----
  virtual bool is_source(int rank) const = 0;          // other ranks read its data
  virtual std::uint64_t source_bytes() const = 0;      // of this rank's data, if it is a source
  virtual const std::byte* source_data() const = 0;    // of this rank
  virtual std::uint64_t staged_chunks() const = 0;     // that this rank's data takes in staging buffers
  virtual void set_chunks(bool any_staged) = 0;        // called before any of the following
  virtual void write_spans(Span*) const {}             // this rank's data for each rank, where that matters
  virtual void check_spans() {}                        // once all have announced
  virtual void copy_in(std::uint64_t chunk) = 0;       // private data -> this rank's staging
  virtual void work(std::uint64_t chunk) = 0;          // read the sources
  virtual void copy_out(std::uint64_t) {}              // this rank's staging -> private data
  virtual bool waits_for_all() const { return true; }  // complete only when every rank has worked

  // Rank's chunk. `offset` is the chunk's place in data that is not staged.
  std::byte* chunk_data(int rank, std::uint64_t chunk, std::uint64_t offset) const;
  bool staged(int rank) const {
    return locations_[static_cast<std::size_t>(rank)].allocation == Location::kPrivate;
  }
  const OperationSlot& slot(int rank) const;
  const Span& span_for_me(int rank) const;
  // Another rank's chunk of its piece for this rank, or this rank's own.
  const std::byte* piece_for_me(const Pieces& own, int rank, std::uint64_t chunk) const;
  int rank() const;
  int size() const;

  Payload payload_;

 private:
  void enter() final;
  bool can_start() final;
  bool advance(bool may_start, bool staging_free) final;
  // This rank's staging buffers are needed, now or later.
  bool holds_staging() const final { return uses_staging() && !(started_ && agreed_ && out_ == chunks_); }
  bool uses_staging() const { return is_local_source_ && local_.allocation == Location::kPrivate; }
  void announce(bool staging_free);
  bool agree();
  std::uint64_t least_ready() const;  // chunks that every source has in place
  std::uint64_t least_done() const;   // chunks that every rank has worked on
  void publish_ready(std::uint64_t step);
  void publish_done(std::uint64_t step);

  Location local_;
  bool is_local_source_ = false;
  bool agreed_ = false;
  std::vector<Location> locations_;  // by rank, known after the agreement
  std::uint64_t chunks_ = 0;         // known after the agreement
  std::uint64_t in_ = 0;             // chunks in place on this rank
  std::uint64_t worked_ = 0;
  std::uint64_t out_ = 0;  // chunks that every rank has worked on and this one has copied out
};

struct Reduction {
  kernels::Number number;
  kernels::Combine combine;
  double factor = 1;  // multiplies this rank's data, for kScaledSum
};

// ---- parts: each rank's part of one buffer or of several --------------------------------------------------

// The number of chunks of `length` for `amount`; at least 1.
inline std::uint64_t chunks_of(std::uint64_t amount, std::uint64_t length) {
  return amount == 0 ? 1 : (amount + length - 1) / length;
}

// `print`, with a hash of all sizes in place of the count where the pieces' sizes differ.
Fingerprint with_sizes(Fingerprint print, const std::vector<Region>& pieces);

// The memory that is read and the memory that is written. Adjacent pieces become one extent; gaps are left
// out.
std::vector<Extent> extents_of(const std::vector<Region>& inputs, const std::vector<Region>& outputs);

// Chunk number `chunk` of a piece that is split into chunks of `part` bytes.
Region part_of(const Region& piece, std::uint64_t chunk, std::uint64_t part);

constexpr std::uint64_t kWhole = ~std::uint64_t{0} >> 1;  // bytes of a chunk that is not staged

// The pieces that a source has for each rank. A staged chunk holds a part of each piece, in order; the piece
// for this rank itself is not staged.
struct Pieces {
  explicit Pieces(std::vector<Region> by_rank);
  // Whole cache lines of a staged chunk for each rank if there is room.
  static std::uint64_t staged_part(const Engine& engine);
  std::uint64_t staged_chunks(const Engine& engine) const;
  void write_spans(Span* spans) const;  // each piece's place in the hull
  void copy_in(std::uint64_t chunk, Engine& engine) const;

  std::vector<Region> of_rank;
  Region hull;             // from the first byte of the non-empty pieces to the last
  std::uint64_t part = 0;  // bytes of a chunk for one rank
};

using OperationPointer = std::shared_ptr<Operation>;

// The fingerprints have the kind, type, root and count of the call.
// All-reduce: every rank's `data` becomes the combination of all, in rank order. Reduce: the root's alone.
OperationPointer reduce(const Fingerprint& print, Region data, const Reduction& reduction);
// pieces[r] of all ranks are combined into rank r's `output`, which may be its own piece. `squares`, if not
// null, becomes Σ x² over the output; kFloat32, kFloat64 and kBFloat16 only.
OperationPointer reduce_scatter(const Fingerprint& print, std::vector<Region> pieces, Region output,
                                const Reduction& reduction, std::shared_ptr<double> squares = nullptr);
// Every rank's `data` becomes the root's.
OperationPointer broadcast(const Fingerprint& print, Region data, int size, bool is_root);
// All-gather: outputs[r] becomes rank r's input. On rank r that output may be the input itself. Gather: the
// same on the root alone; `outputs` is empty elsewhere.
OperationPointer gather(const Fingerprint& print, Region input, std::vector<Region> outputs);
// `output` becomes the root's inputs[rank]. `inputs` is empty elsewhere.
OperationPointer scatter(const Fingerprint& print, Region output, std::vector<Region> inputs, int size);
// outputs[r] becomes rank r's inputs[rank]. The sizes may differ between pairs.
OperationPointer all_to_all(const Fingerprint& print, std::vector<Region> outputs,
                            std::vector<Region> inputs);
OperationPointer barrier();

// Sends every rank's payload to every rank: `received` has one per rank afterwards.
OperationPointer exchange(const Fingerprint& print, const Payload& mine,
                          std::shared_ptr<std::vector<Payload>> received);

}  // namespace isograd::shm
