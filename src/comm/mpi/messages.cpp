// MpiBackend's all-to-all, messages and barrier.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>

#include "comm/mpi/backend.hpp"
#include "comm/mpi/runtime.hpp"
#include "isograd/error.hpp"

namespace isograd {

using c10d::OpType;
using mpi::copied_type;
using mpi::data_of;
using mpi::Operation;

void MpiBackend::exchange(Operation& operation, const at::Tensor& output, const at::Tensor& input,
                          const Sizes& output_counts, const Sizes& input_counts) {
  operation.used.push_back(input);
  operation.used.push_back(output);
  const auto [sent, sent_begins] = parts(operation, input_counts);
  const auto [received, received_begins] = parts(operation, output_counts);
  const MPI_Datatype type = copied_type(input, operation.where);
  mpi::check(MPI_Ialltoallv(data_of(input), sent, sent_begins, type, data_of(output), received,
                            received_begins, type, channel_->comm(), operation.next()),
             operation.where);
}

// The elements for or from each rank: `splits` rows each, or equal parts.
MpiBackend::Sizes MpiBackend::elements(const at::Tensor& tensor, const Sizes& splits,
                                       const std::string& where) const {
  const std::int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1, ranks = size_;
  Sizes counts = splits;
  if (counts.empty()) {
    const Sizes equal(static_cast<std::size_t>(ranks), rows / ranks);
    check_same(static_cast<std::size_t>(rows % ranks), 0, "rows beyond equal parts", where);
    counts = equal;
  }
  check_same(counts.size(), static_cast<std::size_t>(ranks), "splits", where);
  check_same(static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})),
             static_cast<std::size_t>(rows), "rows in all splits", where);
  const std::int64_t width = tensor.dim() > 0 ? c10::multiply_integers(tensor.sizes().slice(1)) : 1;
  for (std::int64_t& part : counts) part *= width;
  return counts;
}

MpiBackend::Works MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits,
                                            Sizes& input_splits, const c10d::AllToAllOptions& options) {
  return start("all_to_all", OpType::ALLTOALL_BASE, {output}, options.timeout, [&](Operation& operation) {
    check(output, operation.where);
    check(input, operation.where);
    check_same(output.element_size(), input.element_size(), "bytes in an element of output", operation.where);
    exchange(operation, output, mpi::overlap(output, input) ? input.detach().clone() : input,
             elements(output, output_splits, operation.where),
             elements(input, input_splits, operation.where));
  });
}

MpiBackend::Works MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  return start("all_to_all", OpType::ALLTOALL, outputs, options.timeout, [&](Operation& operation) {
    check_same(outputs.size(), static_cast<std::size_t>(size_), "outputs", operation.where);
    check_same(inputs.size(), static_cast<std::size_t>(size_), "inputs", operation.where);
    const at::Tensor flat = mpi::place_for(outputs);
    exchange(operation, flat, mpi::joined(inputs), mpi::sizes_of(outputs), mpi::sizes_of(inputs));
    operation.finish = [flat, outputs](const Operation&) { mpi::distribute(flat, outputs); };
  });
}

MpiBackend::Works MpiBackend::send(Tensors& tensors, int to, int tag) {
  return start(fmt::format("send to rank {}", to), OpType::SEND, tensors, c10d::kUnsetTimeout,
               [&](Operation& operation) {
                 const at::Tensor& tensor = only(tensors, operation.where);
                 check_root(to, operation.where);
                 pieces(tensor.numel(), [&](std::int64_t begin, int count) {
                   mpi::check(
                       MPI_Isend(mpi::at_element(tensor, begin), count, copied_type(tensor, operation.where),
                                 to, tag, channel_->comm(), operation.next()),
                       operation.where);
                 });
               });
}

MpiBackend::Works MpiBackend::receive(Tensors& tensors, int from, int tag, const std::string& name,
                                      c10d::OpType type) {
  return start(name, type, tensors, c10d::kUnsetTimeout, [&](Operation& operation) {
    const at::Tensor& tensor = only(tensors, operation.where);
    const MPI_Datatype element = copied_type(tensor, operation.where);
    pieces(tensor.numel(), [&](std::int64_t begin, int count) {
      mpi::check(MPI_Irecv(mpi::at_element(tensor, begin), count, element, from, tag, channel_->comm(),
                           operation.next()),
                 operation.where);
    });
    operation.finish = [element, expected = tensor.numel()](const Operation& done) {
      std::int64_t total = 0;
      for (const MPI_Status& status : done.statuses) {
        int count = 0;
        MPI_Get_count(&status, element, &count);
        total += count;
      }
      if (total == expected) return;
      throw PeerError({.where = done.where,
                       .found = fmt::format("a message of {} elements", total),
                       .expected = fmt::format("{}", expected),
                       .action = "Send and receive tensors of one size and type"});
    };
  });
}

MpiBackend::Works MpiBackend::recv(Tensors& tensors, int from, int tag) {
  const std::string name = fmt::format("recv from rank {}", from);
  check_root(from, name);
  return receive(tensors, from, tag, name, OpType::RECV);
}

MpiBackend::Works MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  if (tensors.size() == 1 && tensors[0].numel() > most_elements_) {
    // A split message could come from different ranks, so it is refused.
    count(tensors[0].numel(), "recv from any rank");
  }
  return receive(tensors, MPI_ANY_SOURCE, tag, "recv from any rank", OpType::RECVANYSOURCE);
}

MpiBackend::Works MpiBackend::barrier(const c10d::BarrierOptions& options) {
  return start("barrier", OpType::BARRIER, {}, options.timeout, [&](Operation& operation) {
    mpi::check(MPI_Ibarrier(channel_->comm(), operation.next()), operation.where);
  });
}

}  // namespace isograd
