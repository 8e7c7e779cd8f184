// Random sequences of operations with tiny staging chunks against a model that runs them one after another.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <atomic>
#include <cmath>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/shm/backend.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;

// Runs `body` on thread ranks whose group has staging buffers as given.
void run_with(int size, shm::EngineOptions options,
              const std::function<void(Group&, const c10::intrusive_ptr<ShmBackend>&)>& body) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size, [&](World& world) {
    auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, size, "small", 60s, options);
    Group group(backend, "small", 60s);
    body(group, backend);
  });
}

constexpr int kBuffers = 4;  // 0 and 1 in shared memory, 2 and 3 not
constexpr std::int64_t kNumel = 70;
constexpr int kRanks = 6;  // at most

struct Step {
  enum Verb {
    kAllReduce,
    kBroadcast,
    kAllGather,
    kReduceScatter,
    kBarrier,
    kChange,
    kWait,
    kDelay,
    kVerbs
  } verb;
  int buffer;  // on rank r: (buffer + r * spread) % kBuffers, so that ranks mix kinds of memory
  int spread;
  std::int64_t begin, length;
  int root;  // modulo the number of ranks
  ReduceOp op;
  bool async;

  int buffer_of(int rank) const { return (buffer + rank * spread) % kBuffers; }
};

rc::Gen<Step> step_generator() {
  return rc::gen::apply(
      [](int verb, int buffer, int spread, std::int64_t begin, std::int64_t length, int root, int op,
         bool async) {
        return Step{
            static_cast<Step::Verb>(verb), buffer, spread, begin, std::min(length, kNumel - begin), root,
            static_cast<ReduceOp>(op),     async};
      },
      rc::gen::inRange(0, static_cast<int>(Step::kVerbs)), rc::gen::inRange(0, kBuffers),
      rc::gen::inRange(0, 2), rc::gen::inRange<std::int64_t>(0, kNumel),
      rc::gen::inRange<std::int64_t>(0, kNumel + 1), rc::gen::inRange(0, 60), rc::gen::inRange(0, 3),
      rc::gen::arbitrary<bool>());
}

using Memory = std::vector<std::vector<at::Tensor>>;  // [rank][buffer]

at::Tensor initial(int rank, int buffer) {
  return at::arange(kNumel, at::kLong).mul(rank * 31 + buffer * 7 + 1).remainder(101);
}

void change(at::Tensor tensor, int rank, std::size_t step) {
  tensor.mul_(3).add_(rank + 11 * static_cast<int>(step)).remainder_(1009);
}

// What the sequence means, one operation after another over all ranks. Returns what was gathered.
std::vector<at::Tensor> run_model(Memory& memory, const std::vector<Step>& steps, int size) {
  std::vector<at::Tensor> gathered;
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const Step& step = steps[s];
    std::vector<at::Tensor> views;
    for (int r = 0; r < size; ++r) {
      views.push_back(memory[r][step.buffer_of(r)].narrow(0, step.begin, step.length));
    }
    const auto combine = [&](std::vector<at::Tensor> parts) {
      at::Tensor result = parts[0].clone();
      for (std::size_t r = 1; r < parts.size(); ++r) {
        result = step.op == ReduceOp::kSum   ? result + parts[r]
                 : step.op == ReduceOp::kMax ? at::maximum(result, parts[r])
                                             : at::minimum(result, parts[r]);
      }
      return result;
    };
    switch (step.verb) {
      case Step::kAllReduce: {
        const at::Tensor result = combine(views);
        for (auto& view : views) view.copy_(result);
        break;
      }
      case Step::kBroadcast: {
        const at::Tensor sent = views[step.root % size].clone();
        for (auto& view : views) view.copy_(sent);
        break;
      }
      case Step::kAllGather:
        gathered.push_back(at::stack(views));
        break;
      case Step::kReduceScatter: {  // all ranks' first `size * k` elements; what each rank gets, stacked
        const std::int64_t k = step.length / size;
        for (auto& view : views) view = view.narrow(0, 0, k * size);
        gathered.push_back(combine(views).view({size, k}));
        break;
      }
      case Step::kChange:
        for (int r = 0; r < size; ++r) change(memory[r][step.buffer_of(r)], r, s);
        break;
      default:
        break;
    }
  }
  return gathered;
}

void run_rank(const std::vector<Step>& steps, Group& group, ShmBackend& backend,
              std::vector<at::Tensor>& buffers, std::vector<at::Tensor>& gathered) {
  const int rank = group.rank(), size = group.size();
  std::vector<Pending> pending;
  const auto wait_all = [&] {
    for (auto it = pending.rbegin(); it != pending.rend(); ++it) it->wait();
    pending.clear();
  };
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const Step& step = steps[s];
    at::Tensor view =
        buffers[static_cast<std::size_t>(step.buffer_of(rank))].narrow(0, step.begin, step.length);
    switch (step.verb) {
      case Step::kAllReduce:
        pending.push_back(group.all_reduce_async(view, step.op));
        if (!step.async) pending.back().wait();
        break;
      case Step::kBroadcast:
        group.broadcast(view, step.root % size);
        break;
      case Step::kAllGather:
        gathered.push_back(group.all_gather(view));
        break;
      case Step::kReduceScatter: {
        const std::int64_t k = step.length / size;
        at::Tensor input = view.narrow(0, 0, k * size), output = at::full({k}, -1, at::kLong);
        c10d::ReduceScatterOptions options;
        options.reduceOp = step.op == ReduceOp::kSum   ? c10d::ReduceOp::SUM
                           : step.op == ReduceOp::kMax ? c10d::ReduceOp::MAX
                                                       : c10d::ReduceOp::MIN;
        backend._reduce_scatter_base(output, input, options)->wait();
        gathered.push_back(output);
        break;
      }
      case Step::kBarrier:
        group.barrier();
        break;
      case Step::kChange:
        wait_all();
        change(buffers[static_cast<std::size_t>(step.buffer_of(rank))], rank, s);
        break;
      case Step::kWait:
        wait_all();
        break;
      default:  // another rank is late each time
        if (static_cast<int>(s) % size == rank) std::this_thread::sleep_for(300us);
        for (auto& each : pending) each.progress();
    }
  }
  wait_all();
}

TEST(RandomSequences, AgreeWithTheSequentialModel) {
  const bool passed = rc::check("random operations", [] {
    const int size = *rc::gen::inRange(1, kRanks + 1).as("ranks");
    const auto steps = *rc::gen::container<std::vector<Step>>(step_generator());
    const shm::EngineOptions options{.chunk_bytes = 64 * static_cast<std::uint64_t>(*rc::gen::inRange(1, 4)),
                                     .chunks = static_cast<std::uint64_t>(*rc::gen::inRange(1, 4))};
    Memory model;
    for (int r = 0; r < size; ++r) {
      model.emplace_back();
      for (int b = 0; b < kBuffers; ++b) model[r].push_back(initial(r, b));
    }
    const auto expected = run_model(model, steps, size);
    std::atomic<int> wrong{0};
    run_with(size, options, [&](Group& group, const c10::intrusive_ptr<ShmBackend>& backend) {
      const int rank = group.rank();
      std::vector<at::Tensor> buffers, gathered;
      for (int b = 0; b < kBuffers; ++b) {
        buffers.push_back(b < 2 ? backend->empty_shared(kNumel, at::kLong) : at::empty({kNumel}, at::kLong));
        buffers.back().copy_(initial(rank, b));
      }
      run_rank(steps, group, *backend, buffers, gathered);
      for (int b = 0; b < kBuffers; ++b) wrong += !at::equal(buffers[b], model[rank][b]);
      wrong += gathered.size() != expected.size();
      for (std::size_t i = 0; i < expected.size() && i < gathered.size(); ++i) {
        const bool whole = gathered[i].dim() == 2;
        wrong += !at::equal(gathered[i], whole ? expected[i] : expected[i][rank]);
      }
    });
    RC_ASSERT(wrong.load() == 0);
  });
  EXPECT_TRUE(passed);
}

// The order of the sum is that of the ranks, whatever the path and the chunks: the same bits everywhere.
TEST(Bits, DoNotDependOnThePathOrTheChunks) {
  constexpr std::int64_t kCount = 10'007;
  for (int size : {3, 5}) {
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size; ++r) {
      const at::Tensor x = at::arange(kCount, at::kDouble).add(1.0 + r * 1234.5);
      inputs.push_back(x.sin().mul(x.cos().mul(20).exp2()).to(at::kFloat));  // many magnitudes
    }
    at::Tensor expected = inputs[0].clone(), reversed = inputs[static_cast<std::size_t>(size) - 1].clone();
    for (int r = 1; r < size; ++r) {
      expected += inputs[r];
      reversed += inputs[size - 1 - r];
    }
    ASSERT_FALSE(at::equal(expected, reversed)) << "inputs too tame to tell orders apart";
    for (std::uint64_t chunk_bytes : {64, 4096, 1 << 19}) {
      run_with(size, {.chunk_bytes = chunk_bytes}, [&](Group& group, const c10::intrusive_ptr<ShmBackend>&) {
        at::Tensor plain = inputs[static_cast<std::size_t>(group.rank())].clone();
        at::Tensor shared = group.empty_shared(kCount, at::kFloat);
        shared.copy_(plain);
        group.all_reduce(plain);
        group.all_reduce(shared);
        ASSERT_TRUE(at::equal(plain, expected)) << "staged in chunks of " << chunk_bytes;
        ASSERT_TRUE(at::equal(shared, expected)) << "in place";
      });
    }
  }
}

}  // namespace
}  // namespace isograd
