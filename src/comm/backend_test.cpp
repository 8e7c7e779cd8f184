// ShmBackend as a c10d backend, and Group over a foreign backend.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error_testing.hpp"
#include "comm/group_impl.hpp"
#include "comm/shm/backend.hpp"
#include "comm/wrappers_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

// Thread ranks that each hold the backend itself.
void run_backends(int size, const std::function<void(const c10::intrusive_ptr<ShmBackend>&)>& body) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size, [&](World& world) {
    body(c10::make_intrusive<ShmBackend>(store, world.rank, size, "backend", 60s));
  });
}

TEST(ShmBackend, RefusesWhatItCannotDoNamingWhatItCan) {
  run_backends(2, [](const auto& backend) {
    at::Tensor tensor = at::ones({4});
    Tensors one{tensor}, two{tensor, tensor};
    std::vector<Tensors> lists{{tensor, tensor}};
    std::vector<std::int64_t> sizes;
    const auto refused = [](auto&& call) { return error_testing::error_of(call); };
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::BAND;
    EXPECT_THAT(refused([&] { backend->allreduce(one, options); }), HasSubstr("found BAND of Float"));
    Tensors complex{at::ones({4}, at::kComplexFloat)}, truth{at::ones({4}, at::kBool)};
    EXPECT_THAT(refused([&] { backend->allreduce(complex); }), HasSubstr("found a tensor of ComplexFloat"));
    options.reduceOp = c10d::ReduceOp::AVG;
    EXPECT_THAT(refused([&] { backend->allreduce(truth, options); }), HasSubstr("found AVG of Bool"));
    EXPECT_THAT(refused([&] { backend->reduce(one, {.rootRank = 2}); }), HasSubstr("found root 2"));
    EXPECT_THAT(refused([&] { backend->send(one, backend->getRank(), 0); }), HasSubstr("as the other end"));
    EXPECT_THAT(refused([&] { backend->recv(one, 7, 0); }), HasSubstr("rank 7 as the other end"));
    EXPECT_THAT(refused([&] { backend->allreduce_sparse(one, {}); }), HasSubstr("sparse"));
    sizes = {1, 2};
    EXPECT_THAT(refused([&] { backend->alltoall_base(tensor, tensor, sizes, sizes); }),
                HasSubstr("splits [1, 2] for 4 rows"));
    lists[0].pop_back();
    EXPECT_THAT(refused([&] { backend->allgather(lists, one); }), HasSubstr("a list of 1 tensors"));
    EXPECT_THAT(refused([&] { backend->allreduce(two); }), HasSubstr("found 2 tensors"));
    EXPECT_THAT(refused([&] { backend->allgather(lists, two); }), HasSubstr("found 2 tensors"));
    at::Tensor wrong = at::ones({9});
    EXPECT_THAT(refused([&] { backend->_allgather_base(wrong, tensor); }),
                HasSubstr("9 elements of Float in all and 4"));
    EXPECT_THAT(refused([&] { backend->_reduce_scatter_base(tensor, wrong); }),
                HasSubstr("9 elements of Float in all and 4"));
    backend->barrier()->wait();  // none of these reached the other rank
  });
}

class Foreign final : public testing::PassingOn {
 public:
  using PassingOn::PassingOn;
  Works barrier(const c10d::BarrierOptions&) override { throw std::runtime_error("the network is down"); }
  void abort() override { throw std::runtime_error("it has no abort either"); }
};

TEST(Group, WrapsAnyBackend) {
  run_backends(3, [](const auto& backend) {
    Group group(c10::make_intrusive<Foreign>(backend), "theirs", 60s, {.self_test = false});
    EXPECT_EQ(group.size(), 3);
    EXPECT_EQ(group.rank(), backend->getRank());
    at::Tensor buffer = group.empty_shared(10, at::kDouble);
    EXPECT_EQ(buffer.sum().template item<double>(), 0);
    buffer.fill_(group.rank() + 1);
    Pending pending = group.all_reduce_async(buffer);
    while (!pending.progress()) std::this_thread::yield();
    pending.wait();
    EXPECT_EQ(buffer[9].template item<double>(), 6);
    group.all_reduce(buffer, ReduceOp::kMin);
    group.broadcast(buffer, 2);
    EXPECT_EQ(group.all_gather(buffer).sum().template item<double>(), 180);
    try {
      group.barrier();
      FAIL() << "must throw";
    } catch (const PeerError& error) {
      EXPECT_THAT(error.what(), HasSubstr("barrier of group 'theirs' on rank"));
      EXPECT_THAT(error.what(), HasSubstr("the network is down"));
    }
    group.poison("it has no abort either");
  });
}

// As NCCL at the first message between two ranks: both ends wait in the call itself.
class WaitsForItsReceiver final : public testing::PassingOn {
 public:
  using PassingOn::PassingOn;
  Works send(Tensors&, int, int) override {
    throw std::runtime_error("its messages cross and wait for ever");
  }
  Works recv(Tensors&, int, int) override {
    throw std::runtime_error("its messages cross and wait for ever");
  }
};

TEST(Group, MessagesTakeAnotherWayThanABackendWhoseSendsWait) {
  for (const int ranks : {2, 3})
    testing::run_over_shm(ranks, [](const c10::intrusive_ptr<ShmBackend>& shm) {
      const auto messages = c10::make_intrusive<testing::MessagesOnly>(shm);
      Group group = Group::Impl::make_group(c10::make_intrusive<WaitsForItsReceiver>(shm), messages, "mixed",
                                            60s, {});  // its self-test sends in a ring
      const int right = (group.rank() + 1) % group.size(),
                left = (group.rank() + group.size() - 1) % group.size();
      at::Tensor first = at::empty({3}), second = at::empty({2});
      Pending late = group.recv_async(second, left, 7);
      Pending early = group.recv_async(first, left, 5);
      group.send(at::full({3}, 10.0f + static_cast<float>(group.rank())), right, 5);
      group.send(at::full({2}, 20.0f + static_cast<float>(group.rank())), right, 7);
      late.wait();
      early.wait();
      EXPECT_EQ(first[2].item<float>(), 10.0f + static_cast<float>(left));
      EXPECT_EQ(second[0].item<float>(), 20.0f + static_cast<float>(left));
      const auto operations = group.traffic().operations;
      EXPECT_EQ(operations.at("send").calls, messages->messages);
      EXPECT_EQ(operations.at("send").bytes, messages->bytes);
      EXPECT_GT(operations.at("all_reduce").calls, 0);
    });
  // Planted fault: such a backend carries the messages itself.
  EXPECT_THROW(testing::run_over_shm(2,
                                     [](const c10::intrusive_ptr<ShmBackend>& shm) {
                                       Group group(c10::make_intrusive<WaitsForItsReceiver>(shm), "alone",
                                                   5s);
                                     }),
               PeerError);
}

}  // namespace
}  // namespace isograd
