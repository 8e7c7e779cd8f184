// Backends for tests: one that passes every call to another backend and can be overridden, and one that only
// has messages.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "comm/shm/backend.hpp"
#include "isograd/world.hpp"

namespace isograd::testing {

using Inner = c10::intrusive_ptr<c10d::Backend>;

// Passes on the c10d calls that Group uses. Group treats it as a foreign backend. It refuses lists of tensors
// of different sizes, as most backends do.
class PassingOn : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  explicit PassingOn(Inner inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "passing on"; }
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return inner_->allreduce(tensors, options);
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Works work = inner_->reduce(tensors, options);
    work->wait();
    if (rank_ != options.rootRank) tensors[0].zero_();  // as some backends may
    return work;
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(output, input, options);
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override {
    return inner_->_reduce_scatter_base(output, input, options);
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return inner_->gather(outputs, inputs, options);
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return inner_->scatter(outputs, inputs, options);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options) override {
    return inner_->alltoall_base(output, input, output_splits, input_splits, options);
  }
  Works barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }
  Works send(Tensors& tensors, int to, int tag) override { return inner_->send(tensors, to, tag); }
  Works recv(Tensors& tensors, int from, int tag) override { return inner_->recv(tensors, from, tag); }
  void abort() override { inner_->abort(); }

 protected:
  Inner inner_;
};

// Send and receive, counted. Every other call throws.
class MessagesOnly final : public c10d::Backend {
 public:
  explicit MessagesOnly(Inner inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "messages only"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    ++messages;
    bytes += static_cast<std::int64_t>(tensors[0].nbytes());
    return inner_->send(tensors, to, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return inner_->recv(tensors, from, tag);
  }
  void abort() override { inner_->abort(); }

  std::int64_t messages = 0, bytes = 0;  // sent by this rank

 private:
  Inner inner_;
};

// Thread ranks, each with its own ShmBackend in addition to the world's.
inline void run_over_shm(int size, const std::function<void(c10::intrusive_ptr<ShmBackend>)>& body,
                         const shm::EngineOptions& options = {}) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size, [&](World& world) {
    body(
        c10::make_intrusive<ShmBackend>(store, world.rank, size, "inner", std::chrono::seconds(60), options));
  });
}

}  // namespace isograd::testing
