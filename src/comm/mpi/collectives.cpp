// MpiBackend's collectives. Each is one MPI call, or several where a tensor is split or there are many.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/torch_versions.hpp"
#include "comm/mpi/backend.hpp"
#include "comm/mpi/runtime.hpp"
#include "isograd/error.hpp"

namespace isograd {

using c10d::OpType;
using mpi::copied_type;
using mpi::data_of;
using mpi::Operand;
using mpi::Operation;

// root < 0: the result goes to all ranks.
void MpiBackend::reduce_into(Operation& operation, const at::Tensor& tensor, const c10d::ReduceOp& op,
                             int root) {
  check(tensor, operation.where);
  const Operand form = mpi::operand(tensor, op, operation.where);
  operation.used.push_back(form.tensor);
  const bool receives = root < 0 || root == rank_;
  pieces(form.tensor.numel(), [&](std::int64_t begin, int count) {
    void* data = mpi::at_element(form.tensor, begin);
    const int code = root < 0
                         ? MPI_Iallreduce(MPI_IN_PLACE, data, count, form.type, form.operation,
                                          channel_->comm(), operation.next())
                         : MPI_Ireduce(receives ? MPI_IN_PLACE : data, receives ? data : nullptr, count,
                                       form.type, form.operation, root, channel_->comm(), operation.next());
    mpi::check(code, operation.where);
  });
  if (!receives) return;
  auto before = std::move(operation.finish);
  operation.finish = [form, tensor, before, size = size_](const Operation& done) {
    if (before) before(done);
    mpi::deliver(form, form.tensor, tensor, size);
  };
}

MpiBackend::Works MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start("all_reduce", OpType::ALLREDUCE, tensors, options.timeout, [&](Operation& operation) {
    reduce_into(operation, only(tensors, operation.where), options.reduceOp, -1);
  });
}

MpiBackend::Works MpiBackend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  return start("all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, tensors, options.timeout,
               [&](Operation& operation) {
                 for (const at::Tensor& tensor : tensors)
                   reduce_into(operation, tensor, options.reduceOp, -1);
               });
}

MpiBackend::Works MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start("reduce", OpType::REDUCE, tensors, options.timeout, [&](Operation& operation) {
    check_root(options.rootRank, operation.where);
    reduce_into(operation, only(tensors, operation.where), options.reduceOp,
                static_cast<int>(options.rootRank));
  });
}

MpiBackend::Works MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start("broadcast", OpType::BROADCAST, tensors, options.timeout, [&](Operation& operation) {
    const at::Tensor& tensor = only(tensors, operation.where);
    check_root(options.rootRank, operation.where);
    pieces(tensor.numel(), [&](std::int64_t begin, int count) {
      mpi::check(MPI_Ibcast(mpi::at_element(tensor, begin), count, copied_type(tensor, operation.where),
                            static_cast<int>(options.rootRank), channel_->comm(), operation.next()),
                 operation.where);
    });
  });
}

MpiBackend::Works MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  return allgather_coalesced(outputs, inputs, options);
}

MpiBackend::Works MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  Tensors results;
  for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
  return start("all_gather", OpType::ALLGATHER, results, options.timeout, [&](Operation& operation) {
    check_same(outputs.size(), inputs.size(), "lists of outputs", operation.where);
    std::vector<at::Tensor> flats;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& input = inputs[i];
      check(input, operation.where);
      check_same(outputs[i].size(), static_cast<std::size_t>(size_), "outputs", operation.where);
      const at::Tensor& own = outputs[i][static_cast<std::size_t>(rank_)];
      check_same(static_cast<std::size_t>(own.numel()), static_cast<std::size_t>(input.numel()),
                 "elements in the output of this rank's input", operation.where);
      at::Tensor flat = mpi::place_for(outputs[i]);
      const auto [counts, begins] = parts(operation, mpi::sizes_of(outputs[i]));
      mpi::check(MPI_Iallgatherv(data_of(input), count(input.numel(), operation.where),
                                 copied_type(input, operation.where), data_of(flat), counts, begins,
                                 copied_type(flat, operation.where), channel_->comm(), operation.next()),
                 operation.where);
      operation.used.push_back(input);
      flats.push_back(flat);
    }
    operation.finish = [flats, lists = outputs](const Operation&) {
      for (std::size_t i = 0; i < flats.size(); ++i) mpi::distribute(flats[i], lists[i]);
    };
  });
}

void MpiBackend::gather_equal(Operation& operation, const at::Tensor& output, at::Tensor input) {
  check(input, operation.where);
  check(output, operation.where);
  check_same(static_cast<std::size_t>(output.nbytes()),
             static_cast<std::size_t>(input.nbytes()) * static_cast<std::size_t>(size_), "bytes of output",
             operation.where);
  const auto* place =
      static_cast<const std::byte*>(output.data_ptr()) + static_cast<std::ptrdiff_t>(input.nbytes()) * rank_;
  const bool in_place = input.data_ptr() == place;
  if (!in_place && mpi::overlap(output, input)) input = input.detach().clone();
  operation.used.push_back(input);
  const int each = count(input.numel(), operation.where);
  const MPI_Datatype type = copied_type(input, operation.where);
  mpi::check(MPI_Iallgather(in_place ? MPI_IN_PLACE : data_of(input), each, type, data_of(output), each, type,
                            channel_->comm(), operation.next()),
             operation.where);
}

MpiBackend::Works MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return start("all_gather", OpType::_ALLGATHER_BASE, {output}, options.timeout,
               [&](Operation& operation) { gather_equal(operation, output, input); });
}

MpiBackend::Works MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& options) {
  return start("all_gather_coalesced", OpType::COALESCED, outputs, options.timeout,
               [&](Operation& operation) {
                 check_same(outputs.size(), inputs.size(), "outputs", operation.where);
                 for (std::size_t i = 0; i < inputs.size(); ++i)
                   gather_equal(operation, outputs[i], inputs[i]);
               });
}

MpiBackend::Works MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  const Tensors results = outputs.empty() ? Tensors{} : outputs[0];
  return start("gather", OpType::GATHER, results, options.timeout, [&](Operation& operation) {
    const at::Tensor& input = only(inputs, operation.where);
    check_root(options.rootRank, operation.where);
    const int root = static_cast<int>(options.rootRank);
    const MPI_Datatype type = copied_type(input, operation.where);
    operation.used.push_back(input);
    std::pair<const int*, const int*> places{nullptr, nullptr};
    at::Tensor flat;
    if (root == rank_) {
      check_same(results.size(), static_cast<std::size_t>(size_), "outputs", operation.where);
      flat = mpi::place_for(results);
      places = parts(operation, mpi::sizes_of(results));
      operation.finish = [flat, results](const Operation&) { mpi::distribute(flat, results); };
    }
    mpi::check(MPI_Igatherv(data_of(input), count(input.numel(), operation.where), type,
                            flat.defined() ? data_of(flat) : nullptr, places.first, places.second, type, root,
                            channel_->comm(), operation.next()),
               operation.where);
  });
}

MpiBackend::Works MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ScatterOptions& options) {
  return start("scatter", OpType::SCATTER, outputs, options.timeout, [&](Operation& operation) {
    const at::Tensor& output = only(outputs, operation.where);
    check_root(options.rootRank, operation.where);
    const int root = static_cast<int>(options.rootRank);
    const MPI_Datatype type = copied_type(output, operation.where);
    std::pair<const int*, const int*> places{nullptr, nullptr};
    at::Tensor flat;
    if (root == rank_) {
      check_same(inputs.size(), 1, "lists of inputs", operation.where);
      check_same(inputs[0].size(), static_cast<std::size_t>(size_), "inputs", operation.where);
      flat = mpi::joined(inputs[0]);
      operation.used.push_back(flat);
      places = parts(operation, mpi::sizes_of(inputs[0]));
    }
    mpi::check(MPI_Iscatterv(flat.defined() ? data_of(flat) : nullptr, places.first, places.second, type,
                             data_of(output), count(output.numel(), operation.where), type, root,
                             channel_->comm(), operation.next()),
               operation.where);
  });
}

MpiBackend::Works MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  return start("reduce_scatter", OpType::REDUCE_SCATTER, outputs, options.timeout, [&](Operation& operation) {
    const at::Tensor& output = only(outputs, operation.where);
    check_same(inputs.size(), 1, "lists of inputs", operation.where);
    check_same(inputs[0].size(), static_cast<std::size_t>(size_), "inputs", operation.where);
    const auto own = static_cast<std::size_t>(inputs[0][static_cast<std::size_t>(rank_)].numel());
    check_same(static_cast<std::size_t>(output.numel()), own, "elements of output", operation.where);
    const Operand form = mpi::operand(mpi::joined(inputs[0]), options.reduceOp, operation.where);
    const at::Tensor combined = at::empty({output.numel()}, form.tensor.options());
    operation.used.push_back(form.tensor);
    const auto [counts, begins] = parts(operation, mpi::sizes_of(inputs[0]));
    mpi::check(MPI_Ireduce_scatter(data_of(form.tensor), data_of(combined), counts, form.type, form.operation,
                                   channel_->comm(), operation.next()),
               operation.where);
    operation.finish = [form, combined, output, size = size_](const Operation&) {
      mpi::deliver(form, combined, output, size);
    };
  });
}

void MpiBackend::scatter_equal(Operation& operation, const at::Tensor& output, at::Tensor input,
                               const c10d::ReduceOp& op) {
  check(input, operation.where);
  check(output, operation.where);
  check_same(static_cast<std::size_t>(input.nbytes()),
             static_cast<std::size_t>(output.nbytes()) * static_cast<std::size_t>(size_), "bytes of input",
             operation.where);
  const Operand form = mpi::operand(input, op, operation.where);
  // PyTorch may pass a part of the input as output.
  const bool direct = form.tensor.scalar_type() == output.scalar_type() && !mpi::overlap(output, form.tensor);
  const at::Tensor combined =
      direct ? output : at::empty({output.numel()}, form.tensor.options().requires_grad(false));
  operation.used.push_back(form.tensor);
  mpi::check(MPI_Ireduce_scatter_block(data_of(form.tensor), data_of(combined),
                                       count(output.numel(), operation.where), form.type, form.operation,
                                       channel_->comm(), operation.next()),
             operation.where);
  auto before = std::move(operation.finish);
  operation.finish = [form, combined, output, before, size = size_](const Operation& done) {
    if (before) before(done);
    mpi::deliver(form, combined, output, size);
  };
}

MpiBackend::Works MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return start("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {output}, options.timeout,
               [&](Operation& operation) { scatter_equal(operation, output, input, options.reduceOp); });
}

MpiBackend::Works MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::ReduceScatterOptions& options) {
  return start("reduce_scatter_coalesced", torch_versions::kReduceScatterCoalesced, outputs, options.timeout,
               [&](Operation& operation) {
                 check_same(outputs.size(), inputs.size(), "outputs", operation.where);
                 for (std::size_t i = 0; i < inputs.size(); ++i)
                   scatter_equal(operation, outputs[i], inputs[i], options.reduceOp);
               });
}
}  // namespace isograd
