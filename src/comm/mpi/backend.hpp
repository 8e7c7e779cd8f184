// MpiBackend: every c10d collective by MPI's non-blocking calls, for CPU ranks on several hosts.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/mpi/mpi.hpp"
#include "comm/mpi/numbers.hpp"
#include "comm/mpi/work.hpp"

namespace isograd {

// Tensors are contiguous and on the CPU. Copies: any type. Reductions: SUM, MAX, MIN, PRODUCT of float64,
// float32, bfloat16, float16 (16-bit floats are combined in float32 and rounded once), int64, int32, int16,
// int8, uint8, bool (or, or, and, and); AVG and PREMUL_SUM for PyTorch; BAND, BOR, BXOR of integers. MPI
// determines the order of summation. Mismatched calls are detected only where MPI detects them. MPI advances
// only while somebody waits or polls.
class MpiBackend final : public c10d::Backend {
 public:
  // Takes ownership of `comm`.
  MpiBackend(MPI_Comm comm, std::string name, std::chrono::milliseconds timeout,
             std::int64_t most_elements = mpi::kMostElements);

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { channel_->set_timeout(timeout); }
  // Later calls and waits on this rank throw. Its process then ends without MPI_Finalize, so mpirun ends the
  // other ranks.
  void abort() override;

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Sizes = std::vector<std::int64_t>;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override;
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override;
  // The tensors of a list may differ in size.
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::AllgatherOptions& options = {}) override;
  Works allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options = {}) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options = {}) override;
  Works gather(std::vector<Tensors>& outputs, Tensors& inputs,
               const c10d::GatherOptions& options = {}) override;
  Works scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                const c10d::ScatterOptions& options = {}) override;
  Works reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ReduceScatterOptions& options = {}) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override;
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options = {}) override;
  // Splits are numbers of rows (dim 0). Without splits the parts are equal.
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits, Sizes& input_splits,
                      const c10d::AllToAllOptions& options = {}) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override;
  Works send(Tensors& tensors, int to, int tag) override;
  Works recv(Tensors& tensors, int from, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;
  Works barrier(const c10d::BarrierOptions& options = {}) override;

 private:
  Works start(const std::string& name, c10d::OpType type, Tensors results, std::chrono::milliseconds timeout,
              const std::function<void(mpi::Operation&)>& issue);
  Works receive(Tensors& tensors, int from, int tag, const std::string& name, c10d::OpType type);
  void reduce_into(mpi::Operation& operation, const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
  void gather_equal(mpi::Operation& operation, const at::Tensor& output, at::Tensor input);
  void scatter_equal(mpi::Operation& operation, const at::Tensor& output, at::Tensor input,
                     const c10d::ReduceOp& op);
  void exchange(mpi::Operation& operation, const at::Tensor& output, const at::Tensor& input,
                const Sizes& output_counts, const Sizes& input_counts);
  // These throw ConfigError.
  void check(const at::Tensor& tensor, const std::string& where) const;
  void check_root(std::int64_t root, const std::string& where) const;
  void check_same(std::size_t found, std::size_t expected, const std::string& what,
                  const std::string& where) const;
  const at::Tensor& only(const Tensors& tensors, const std::string& where) const;
  Sizes elements(const at::Tensor& tensor, const Sizes& splits, const std::string& where) const;
  int count(std::int64_t elements, const std::string& where) const;
  // The counts and displacements of consecutive parts. The operation keeps them until it is complete.
  std::pair<const int*, const int*> parts(mpi::Operation& operation, const Sizes& counts) const;
  // Calls `issue(first element, count)` for pieces of at most most_elements, once also for an empty tensor.
  void pieces(std::int64_t elements, const std::function<void(std::int64_t, int)>& issue) const;

  std::shared_ptr<mpi::Channel> channel_;
  std::int64_t most_elements_;
};

}  // namespace isograd
