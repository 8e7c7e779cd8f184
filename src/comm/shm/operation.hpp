// Operation: one collective on one rank as a state machine that is moved on by polling.
//
//   announce   publish what is called (fingerprint) and where this rank's data lies
//   agree      when all have announced: same call everywhere? how many chunks?
//   chunks     for chunk c: copy in (sources in private memory) -> work, once every source has c in place
//              -> copy out, once every rank has worked on c; several chunks are under way at once
//
// Data inside an allocation of the group is read and written where it lies: one chunk, no copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm/control.hpp"
#include "kernels/reduce.hpp"

namespace isograd::shm {

class Engine;

// Memory of this rank that an operation reads or writes; two operations that share some run one after
// another.
struct Extent {
  const std::byte* begin = nullptr;
  std::uint64_t bytes = 0;
  bool overlaps(const Extent& other) const {
    return bytes > 0 && other.bytes > 0 && begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
};

class Operation {
 public:
  virtual ~Operation() = default;
  bool complete() const { return complete_; }
  std::uint64_t sequence() const { return sequence_; }
  std::string name() const;  // "all_reduce #12"
  std::string call() const { return call_of(fingerprint_); }
  // The ranks this one waits for.
  std::vector<int> awaited() const;
  // Everybody has dealt with all of it: its slot may be used again.
  bool finished_by_all() const { return all_done_; }
  bool shares_memory_with(const Operation& other) const;

  // Kept alive until the operation is destroyed: the tensors.
  std::shared_ptr<void> keep_alive;

 protected:
  Operation(Fingerprint fingerprint, std::vector<Extent> extents)
      : fingerprint_(fingerprint), extents_(std::move(extents)) {}

  // ---- what a kind of operation says about itself ----
  virtual bool is_source(int rank) const = 0;        // its data is read by others
  virtual std::uint64_t source_bytes() const = 0;    // of this rank's data, if it is a source
  virtual const std::byte* source_data() const = 0;  // of this rank
  virtual std::uint64_t chunk_count(bool any_staged) const = 0;
  virtual void copy_in(std::uint64_t chunk) = 0;       // private data -> this rank's staging
  virtual void work(std::uint64_t chunk) = 0;          // read the sources
  virtual void copy_out(std::uint64_t) {}              // this rank's staging -> private data
  virtual bool waits_for_all() const { return true; }  // complete only when every rank has worked

  // Rank's chunk, wherever it lies; `offset` is the chunk's place in data that is not staged.
  std::byte* chunk_data(int rank, std::uint64_t chunk, std::uint64_t offset) const;
  bool staged(int rank) const { return locations_[static_cast<std::size_t>(rank)].allocation < 0; }
  Engine& engine() const { return *engine_; }
  const Slot& slot(int rank) const;

  Fingerprint fingerprint_;
  Payload payload_;

 private:
  friend class Engine;
  // Moves on as far as possible. `may_announce`: no earlier operation shares its memory. `staging_free`: no
  // earlier operation still needs this rank's staging buffers. Returns whether anything moved.
  bool advance(bool may_announce, bool staging_free);
  static std::string call_of(const Fingerprint& fingerprint);  // "all_reduce(sum) of 12 Float"
  // This rank's staging buffers are needed, now or later.
  bool holds_staging() const { return uses_staging() && !(announced_ && out_ == chunks_); }
  bool uses_staging() const { return is_local_source_ && local_.allocation < 0 && source_bytes() > 0; }
  void announce(bool staging_free);
  bool agree();
  std::uint64_t least_ready() const;  // chunks that every source has in place
  std::uint64_t least_done() const;   // chunks that every rank has worked on
  void publish_ready(std::uint64_t step);
  void publish_done(std::uint64_t step);

  Engine* engine_ = nullptr;
  std::uint64_t sequence_ = 0;
  std::vector<Extent> extents_;
  Location local_;
  bool is_local_source_ = false;
  bool announced_ = false;
  bool agreed_ = false;
  bool complete_ = false;
  bool all_done_ = false;
  std::vector<Location> locations_;  // by rank, known after the agreement
  std::uint64_t chunks_ = 0;         // known after the agreement
  std::uint64_t in_ = 0;             // chunks in place on this rank
  std::uint64_t worked_ = 0;
  std::uint64_t out_ = 0;  // chunks that every rank has worked on and this one has copied out
};

// `data` of every rank becomes the combination of all, in rank order.
std::shared_ptr<Operation> all_reduce(std::byte* data, std::int64_t count, std::int8_t dtype,
                                      kernels::Number number, kernels::Combine combine);
// `data` becomes root's.
std::shared_ptr<Operation> broadcast(std::byte* data, std::int64_t count, std::int8_t dtype,
                                     std::uint64_t element_bytes, int root, int size, bool is_root);
// outputs[r] becomes rank r's input. An output may be the input itself on its own rank.
std::shared_ptr<Operation> all_gather(const std::byte* input, std::vector<std::byte*> outputs,
                                      std::int64_t count, std::int8_t dtype, std::uint64_t element_bytes);
// `input` holds size x count elements; `output` becomes the combination of everyone's part number `rank`.
std::shared_ptr<Operation> reduce_scatter(const std::byte* input, std::byte* output, std::int64_t count,
                                          int size, std::int8_t dtype, kernels::Number number,
                                          kernels::Combine combine);
std::shared_ptr<Operation> barrier();

// Every rank's payload to every rank: `received` has one per rank afterwards.
std::shared_ptr<Operation> exchange(std::uint8_t stage, std::int64_t count, std::int8_t dtype,
                                    const Payload& mine, std::shared_ptr<std::vector<Payload>> received);

}  // namespace isograd::shm
