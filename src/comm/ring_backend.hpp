// RingBackend: gives every collective to a backend that has send and receive only.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/ring.hpp"

namespace isograd {

// Collectives run one after another, in the order of the calls, whenever one of them is polled or waited for.
// A message is therefore never taken for one of another collective, even where tags are ignored.
// Made by Group (GroupOptions::ring), which checks the arguments and hands over contiguous tensors.
class RingBackend final : public c10d::Backend {
 public:
  RingBackend(c10::intrusive_ptr<c10d::Backend> messages, const std::string& name,
              std::chrono::milliseconds timeout, std::int64_t segment_bytes = kRingSegmentBytes);

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  const std::string getBackendName() const override { return "ring over " + messages_->getBackendName(); }
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override;
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions&) override;
  Works barrier(const c10d::BarrierOptions&) override;
  Works send(Tensors& tensors, int to, int tag) override { return messages_->send(tensors, to, tag); }
  Works recv(Tensors& tensors, int from, int tag) override { return messages_->recv(tensors, from, tag); }
  void abort() override { messages_->abort(); }

  struct Queue;

 private:
  Works start(Steps steps, c10d::OpType type, Tensors results);

  c10::intrusive_ptr<c10d::Backend> messages_;
  Group group_;  // over messages_
  std::int64_t segment_bytes_;
  std::shared_ptr<Queue> queue_;
};

}  // namespace isograd
