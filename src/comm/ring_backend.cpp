#include "comm/ring_backend.hpp"

#include <ATen/ATen.h>

namespace isograd {

// The collectives under way. The first is the only one that moves.
struct RingBackend::Queue {
  struct Item {
    Steps steps;
    bool over = false;
    std::exception_ptr failure;
  };

  // Moves on, until `item` is over where `wait`. A failure is that of all that follow.
  void run(const Item& item, bool wait) {
    const std::lock_guard lock(mutex);
    const at::NoGradGuard no_graph;  // the steps add to tensors in place
    while (!item.over) {
      Item& first = *items.front();
      try {
        if (failure) std::rethrow_exception(failure);
        if (wait) {
          first.steps.wait();
        } else if (!first.steps.progress()) {
          return;
        }
      } catch (...) {
        failure = first.failure = std::current_exception();
      }
      first.over = true;
      items.pop_front();
    }
  }

  std::recursive_mutex mutex;  // autograd may call from several threads of one rank
  std::deque<std::shared_ptr<Item>> items;
  std::exception_ptr failure;
};

namespace {

class RingWork final : public c10d::Work {
 public:
  RingWork(std::shared_ptr<RingBackend::Queue> queue, std::shared_ptr<RingBackend::Queue::Item> item,
           int rank, c10d::OpType type, std::vector<at::Tensor> results)
      : c10d::Work(rank, type),
        queue_(std::move(queue)),
        item_(std::move(item)),
        results_(std::move(results)) {}

  bool isCompleted() override {
    queue_->run(*item_, false);
    return item_->over;
  }
  bool isSuccess() const override { return item_->over && !item_->failure; }
  std::exception_ptr exception() const override { return item_->failure; }
  // Each message has the group's timeout.
  bool wait(std::chrono::milliseconds) override {
    queue_->run(*item_, true);
    if (item_->failure) std::rethrow_exception(item_->failure);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }

 private:
  std::shared_ptr<RingBackend::Queue> queue_;
  std::shared_ptr<RingBackend::Queue::Item> item_;
  std::vector<at::Tensor> results_;
};

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::MAX       ? ReduceOp::kMax
         : op == c10d::ReduceOp::MIN     ? ReduceOp::kMin
         : op == c10d::ReduceOp::PRODUCT ? ReduceOp::kProduct
                                         : ReduceOp::kSum;
}

}  // namespace

RingBackend::RingBackend(c10::intrusive_ptr<c10d::Backend> messages, const std::string& name,
                         std::chrono::milliseconds timeout, std::int64_t segment_bytes)
    : c10d::Backend(messages->getRank(), messages->getSize()),
      messages_(messages),
      group_(std::move(messages), name, timeout, {.self_test = false, .ring = false}),
      segment_bytes_(segment_bytes),
      queue_(std::make_shared<Queue>()) {}

RingBackend::Works RingBackend::start(Steps steps, c10d::OpType type, Tensors results) {
  auto item = std::make_shared<Queue::Item>(Queue::Item{std::move(steps), false, nullptr});
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->items.push_back(item);
  }
  queue_->run(*item, false);  // the first messages leave at once
  return c10::make_intrusive<RingWork>(queue_, std::move(item), rank_, type, std::move(results));
}

RingBackend::Works RingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start(ring::all_reduce(group_, tensors.at(0), from_c10d(options.reduceOp), segment_bytes_),
               c10d::OpType::ALLREDUCE, tensors);
}

RingBackend::Works RingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start(ring::reduce(group_, tensors.at(0), static_cast<int>(options.rootRank),
                            from_c10d(options.reduceOp), segment_bytes_),
               c10d::OpType::REDUCE, tensors);
}

RingBackend::Works RingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start(ring::broadcast(group_, tensors.at(0), static_cast<int>(options.rootRank), segment_bytes_),
               c10d::OpType::BROADCAST, tensors);
}

RingBackend::Works RingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions&) {
  return start(ring::all_gather(group_, output, input, segment_bytes_), c10d::OpType::_ALLGATHER_BASE,
               {output});
}

RingBackend::Works RingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  ring::Rows counts(static_cast<std::size_t>(size_), output.numel());
  return start(ring::reduce_scatter(group_, output, input, std::move(counts), from_c10d(options.reduceOp),
                                    segment_bytes_),
               c10d::OpType::_REDUCE_SCATTER_BASE, {output});
}

RingBackend::Works RingBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Tensors places = outputs.empty() ? Tensors{} : outputs[0];
  return start(ring::gather(group_, places, inputs.at(0), static_cast<int>(options.rootRank)),
               c10d::OpType::GATHER, places);
}

RingBackend::Works RingBackend::scatter(Tensors& outputs, Lists& inputs,
                                        const c10d::ScatterOptions& options) {
  return start(ring::scatter(group_, outputs.at(0), inputs.empty() ? Tensors{} : inputs[0],
                             static_cast<int>(options.rootRank)),
               c10d::OpType::SCATTER, outputs);
}

RingBackend::Works RingBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                              Splits& input_splits, const c10d::AllToAllOptions&) {
  const auto cut = [&](const at::Tensor& whole, const Splits& splits) {
    return whole.split_with_sizes(splits.empty() ? split_rows(whole.size(0), size_) : splits);
  };
  return start(ring::all_to_all(group_, cut(output, output_splits), cut(input, input_splits)),
               c10d::OpType::ALLTOALL_BASE, {output});
}

RingBackend::Works RingBackend::barrier(const c10d::BarrierOptions&) {
  return start(ring::barrier(group_), c10d::OpType::BARRIER, {});
}

}  // namespace isograd
