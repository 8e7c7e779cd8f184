// Groups that pass every operation on and spoil what some of them give: mistakes of operators, put in through
// the mesh that a model or a layout is given.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "isograd/world.hpp"
#include "verify/run.hpp"

namespace isograd::hybrid {

enum class Operation { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kReceive };

struct Fault {
  AxisSet along{};  // of the groups of ranks that differ along these axes alone
  Operation of = Operation::kAllReduce;
  // What an operation has given, and what this rank gave it (before, of an all-reduce; nothing, of a
  // receive). Of floating numbers alone: counts that ranks tell each other stay right.
  std::function<void(at::Tensor& output, const at::Tensor& input, int rank, int size)> spoil{};
};

class Spoils : public c10d::Backend {
 public:
  Spoils(Group inner, Fault fault, std::shared_ptr<bool> armed)
      : c10d::Backend(inner.rank(), inner.size()),
        inner_(std::move(inner)),
        fault_(std::move(fault)),
        armed_(std::move(armed)) {}

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  const std::string getBackendName() const override { return "spoils"; }
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const bool sum = options.reduceOp == c10d::ReduceOp::SUM;
    const at::Tensor before = sum ? tensors[0].clone() : at::Tensor();
    inner_.all_reduce(tensors[0], operation(options.reduceOp));
    if (sum) spoil(Operation::kAllReduce, tensors[0], before);
    return done();
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    inner_.reduce(tensors[0], static_cast<int>(options.rootRank), operation(options.reduceOp));
    return done();
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    inner_.broadcast(tensors[0], static_cast<int>(options.rootRank));
    return done();
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    at::Tensor rows = output.view({size_, -1});
    inner_.all_gather_async(rows, input.reshape({-1})).wait();
    spoil(Operation::kAllGather, rows, input);
    return done();
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override {
    at::Tensor flat = output.view(-1);
    const at::Tensor own = input.reshape({size_, -1})[rank_].clone();
    inner_.reduce_scatter_async(flat, input.reshape({-1}), operation(options.reduceOp)).wait();
    spoil(Operation::kReduceScatter, flat, own);
    return done();
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const at::Tensor all = inner_.gather(inputs[0], static_cast<int>(options.rootRank));
    for (std::size_t r = 0; all.defined() && r < outputs[0].size(); ++r)
      outputs[0][r].copy_(all[static_cast<std::int64_t>(r)]);
    return done();
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    const at::Tensor all = inputs.empty() || inputs[0].empty() ? outputs[0] : at::stack(inputs[0]);
    inner_.scatter(outputs[0], all, static_cast<int>(options.rootRank));
    return done();
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions&) override {
    inner_.all_to_all_async(output, input, output_splits, input_splits).wait();
    spoil(Operation::kAllToAll, output, input);
    return done();
  }
  Works barrier(const c10d::BarrierOptions&) override {
    inner_.barrier();
    return done();
  }
  Works send(Tensors& tensors, int to, int tag) override {
    return c10::make_intrusive<Waits>(inner_.send_async(tensors[0], to, tag), std::function<void()>());
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    return c10::make_intrusive<Waits>(
        inner_.recv_async(tensors[0], from, tag),
        [this, tensor = tensors[0]]() mutable { spoil(Operation::kReceive, tensor, {}); });
  }

 private:
  struct Done : c10d::Work {
    bool isCompleted() override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  struct Waits : c10d::Work {
    Pending pending;
    std::function<void()> then;
    bool done = false;
    Waits(Pending pending_, std::function<void()> then_)
        : pending(std::move(pending_)), then(std::move(then_)) {}
    bool isCompleted() override { return done || (pending.progress() && wait({})); }
    bool wait(std::chrono::milliseconds) override {
      if (std::exchange(done, true)) return true;
      pending.wait();
      if (then) then();
      return true;
    }
  };
  static Works done() { return c10::make_intrusive<Done>(); }
  static ReduceOp operation(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::MAX       ? ReduceOp::kMax
           : op == c10d::ReduceOp::MIN     ? ReduceOp::kMin
           : op == c10d::ReduceOp::PRODUCT ? ReduceOp::kProduct
                                           : ReduceOp::kSum;
  }
  void spoil(Operation of, at::Tensor& output, const at::Tensor& input) {
    if (of != fault_.of || !*armed_ || !output.is_floating_point() || output.numel() == 0) return;
    const at::NoGradGuard no_grad;
    fault_.spoil(output, input, rank_, size_);
  }

  Group inner_;
  Fault fault_;
  std::shared_ptr<bool> armed_;
};

// Groups along the fault's axes are such ones. Where these are all ranks there is no group of their own.
inline MakeMesh spoiled_mesh(Fault fault, std::shared_ptr<bool> armed) {
  return [fault, armed](const World& world, const Grid& grid) {
    AxisSet along;
    for (const std::string& axis : fault.along)
      if (grid.has(axis)) along.insert(axis);
    const auto spoiled = grid.ranks_along(along, world.rank);
    return Mesh(world.group, grid,
                [world, fault, armed, spoiled](const std::vector<int>& ranks, const std::string& name) {
                  const Group right = world.subgroup(ranks, name);
                  if (ranks != spoiled) return right;
                  return Group(c10::make_intrusive<Spoils>(right, fault, armed), name, right.timeout(),
                               {.self_test = false});
                });
  };
}

}  // namespace isograd::hybrid
