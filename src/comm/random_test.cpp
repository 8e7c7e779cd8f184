// Random sequences of operations on random overlapping groups, with tiny staging chunks, against a model that
// runs them one after another.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/shm/backend.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

// Runs `body` on thread ranks whose group has these staging options.
void run_with(int size, shm::EngineOptions options,
              const std::function<void(Group&, const c10::intrusive_ptr<ShmBackend>&)>& body) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size, [&](World& world) {
    auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, size, "small", 60s, options);
    Group group(backend, "small", 60s);
    body(group, backend);
  });
}

constexpr int kBuffers = 4;  // 0 and 1 in shared memory of the whole group, 2 and 3 private
constexpr std::int64_t kMostNumel = 70;
constexpr int kMostRanks = 6;  // at most
constexpr int kSubgroups = 3;  // in addition to the group of all

enum class Verb {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kAllGatherRows,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kAllToAllRows,
  kMessage,  // from each rank to the one `shift` places further
  kBarrier,
  kChange,
  kWait,
  kDelay,
  kVerbs
};

struct Step {
  Verb verb;
  int group;   // 0: all ranks
  int buffer;  // of rank r: (buffer + r * spread) % kBuffers, so that ranks mix kinds of memory
  int spread;
  std::int64_t begin, length;
  int root;  // modulo the number of ranks
  int shift;
  ReduceOp op;
  bool async;

  int buffer_of(int rank) const { return (buffer + rank * spread) % kBuffers; }
  // Rows of rank i in all_gather_rows; rows from rank a to rank b in all_to_all. At most `length` in all.
  std::int64_t rows_of(int i) const { return (length + i * shift) % (length + 1); }
  std::int64_t rows_between(int a, int b, int size) const {
    return (a + b * shift + length) % (length / size + 1);
  }
  Group::Rows scattered(int size) const {
    Group::Rows rows = split_rows(length, size);
    if (shift % 2) std::reverse(rows.begin(), rows.end());
    return rows;
  }
};

rc::Gen<Step> step_generator() {
  using rc::gen::inRange;
  return rc::gen::apply(
      [](int verb, int group, int buffer, int spread, std::int64_t begin, std::int64_t length, int root,
         int shift, int op, bool async) {
        return Step{static_cast<Verb>(verb),
                    group,
                    buffer,
                    spread,
                    begin,
                    std::min(length, kMostNumel - begin),
                    root,
                    shift,
                    static_cast<ReduceOp>(op),
                    async};
      },
      inRange(0, static_cast<int>(Verb::kVerbs)), inRange(0, kSubgroups + 1), inRange(0, kBuffers),
      inRange(0, 2), inRange<std::int64_t>(0, kMostNumel), inRange<std::int64_t>(0, kMostNumel + 1),
      inRange(0, 60), inRange(0, 6), inRange(0, 4), rc::gen::arbitrary<bool>());
}

// The ranks of each group, in order. The first group is all ranks.
using Members = std::vector<std::vector<int>>;

Members random_members(int size) {
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  Members groups{all};
  for (int g = 0; g < kSubgroups; ++g) {
    std::vector<int> members;
    for (int r : all) {
      if (*rc::gen::arbitrary<bool>()) members.insert(members.begin() + (r % 2 ? 0 : members.size()), r);
    }
    groups.push_back(members.empty() ? std::vector<int>{g % size} : members);
  }
  return groups;
}

struct RankState {
  Tensors buffers, results;
};

at::Tensor initial(int rank, int buffer) {
  return at::arange(kMostNumel, at::kLong).mul(rank * 31 + buffer * 7 + 1).remainder(101);
}

void change(at::Tensor tensor, int rank, std::size_t step) {
  tensor.mul_(3).add_(rank + 11 * static_cast<int>(step)).remainder_(1009);
}

at::Tensor combine(const Tensors& parts, ReduceOp op) {
  at::Tensor result = parts[0].clone();
  for (std::size_t r = 1; r < parts.size(); ++r)
    result = op == ReduceOp::kSum       ? result + parts[r]
             : op == ReduceOp::kProduct ? result * parts[r]
             : op == ReduceOp::kMax     ? at::maximum(result, parts[r])
                                        : at::minimum(result, parts[r]);
  return result;
}

// Runs one step for its group: member i operates on `views[i]`, and its outputs go to `results[i]`.
void model_step(const Step& step, const Tensors& views, const std::vector<Tensors*>& results) {
  const int size = static_cast<int>(views.size()), root = step.root % size;
  const std::int64_t k = step.length / size;
  Tensors before;
  for (const at::Tensor& view : views) before.push_back(view.clone());
  for (int i = 0; i < size; ++i) {
    const auto me = static_cast<std::size_t>(i);
    const auto get = [&](const at::Tensor& result) { results[me]->push_back(result.clone()); };
    Tensors parts;
    switch (step.verb) {
      case Verb::kAllReduce: at::Tensor(views[me]).copy_(combine(before, step.op)); break;
      case Verb::kReduce:
        if (i == root) at::Tensor(views[me]).copy_(combine(before, step.op));
        break;
      case Verb::kBroadcast: at::Tensor(views[me]).copy_(before[static_cast<std::size_t>(root)]); break;
      case Verb::kAllGather: get(at::stack(before)); break;
      case Verb::kAllGatherRows:
        for (int r = 0; r < size; ++r)
          parts.push_back(before[static_cast<std::size_t>(r)].narrow(0, 0, step.rows_of(r)));
        get(at::cat(parts));
        break;
      case Verb::kReduceScatter:
        get(combine(before, step.op).split_with_sizes(step.scattered(size))[me]);
        break;
      case Verb::kGather:
        if (i == root) get(at::stack(before));
        break;
      case Verb::kScatter: get(before[static_cast<std::size_t>(root)].narrow(0, i * k, k)); break;
      case Verb::kAllToAll:
      case Verb::kAllToAllRows:
        for (int r = 0; r < size; ++r) {
          std::int64_t first = 0;
          for (int b = 0; b < i; ++b) first += step.rows_between(r, b, size);
          const bool even = step.verb == Verb::kAllToAll;
          parts.push_back(before[static_cast<std::size_t>(r)].narrow(
              0, even ? i * k : first, even ? k : step.rows_between(r, i, size)));
        }
        get(at::cat(parts));
        break;
      case Verb::kMessage:
        if (step.shift % size) get(before[static_cast<std::size_t>((i - step.shift % size + size) % size)]);
        break;
      default: break;
    }
  }
}

std::vector<RankState> run_model(const std::vector<Step>& steps, const Members& members) {
  std::vector<RankState> ranks(members[0].size());
  for (int r : members[0]) {
    for (int b = 0; b < kBuffers; ++b) ranks[static_cast<std::size_t>(r)].buffers.push_back(initial(r, b));
  }
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const Step& step = steps[s];
    Tensors views;
    std::vector<Tensors*> results;
    for (int r : members[static_cast<std::size_t>(step.group)]) {
      RankState& rank = ranks[static_cast<std::size_t>(r)];
      at::Tensor& buffer = rank.buffers[static_cast<std::size_t>(step.buffer_of(r))];
      if (step.verb == Verb::kChange) change(buffer, r, s);
      views.push_back(buffer.narrow(0, step.begin, step.length));
      results.push_back(&rank.results);
    }
    model_step(step, views, results);
  }
  return ranks;
}

// Starts one step. Its outputs go to `results` and are there when `pending` is complete.
void start_step(const Step& step, Group& group, at::Tensor view, Tensors& results,
                std::vector<Pending>& pending) {
  const int rank = group.rank(), size = group.size(), root = step.root % size;
  const auto fresh = [&](std::vector<std::int64_t> sizes) {
    results.push_back(at::full(sizes, -1, at::kLong));
    return results.back();
  };
  const auto whole = [&](std::int64_t parts) { return view.narrow(0, 0, step.length / parts * parts); };
  Group::Rows rows, to, from;
  for (int r = 0; r < size; ++r) {
    rows.push_back(step.rows_of(r));
    to.push_back(step.rows_between(rank, r, size));
    from.push_back(step.rows_between(r, rank, size));
  }
  const auto sum = [](const Group::Rows& each) { return std::reduce(each.begin(), each.end()); };
  switch (step.verb) {
    case Verb::kAllReduce: return pending.push_back(group.all_reduce_async(view, step.op));
    case Verb::kReduce: return pending.push_back(group.reduce_async(view, root, step.op));
    case Verb::kBroadcast: return pending.push_back(group.broadcast_async(view, root));
    case Verb::kAllGather: return pending.push_back(group.all_gather_async(fresh({size, step.length}), view));
    case Verb::kAllGatherRows:
      return pending.push_back(group.all_gather_rows_async(
          fresh({sum(rows)}), view.narrow(0, 0, rows[static_cast<std::size_t>(rank)]), rows));
    case Verb::kReduceScatter: {
      const auto parts = step.scattered(size);
      return pending.push_back(
          group.reduce_scatter_async(fresh({parts[static_cast<std::size_t>(rank)]}), view, step.op, parts));
    }
    case Verb::kGather:
      return pending.push_back(
          group.gather_async(rank == root ? fresh({size, step.length}) : at::Tensor(), view, root));
    case Verb::kScatter:
      return pending.push_back(group.scatter_async(fresh({step.length / size}),
                                                   whole(size).view({size, step.length / size}), root));
    case Verb::kAllToAll:
      return pending.push_back(group.all_to_all_async(fresh({step.length / size * size}), whole(size)));
    case Verb::kAllToAllRows:
      return pending.push_back(
          group.all_to_all_async(fresh({sum(from)}), view.narrow(0, 0, sum(to)), from, to));
    case Verb::kMessage:
      if (const int shift = step.shift % size) {
        pending.push_back(group.recv_async(fresh({step.length}), (rank + size - shift) % size));
        pending.push_back(group.send_async(view, (rank + shift) % size));
      }
      return;
    case Verb::kBarrier: return group.barrier();
    default: return;
  }
}

// `groups[g]` is empty where this rank is no member.
void run_rank(const std::vector<Step>& steps, int rank, std::vector<std::optional<Group>>& groups,
              RankState& state) {
  std::vector<Pending> pending;
  int group_of_pending = 0;
  const auto wait_all = [&] {
    for (auto it = pending.rbegin(); it != pending.rend(); ++it) it->wait();
    pending.clear();
  };
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const Step& step = steps[s];
    auto& group = groups[static_cast<std::size_t>(step.group)];
    if (!group) continue;
    // Only within one group do operations on the same memory wait for each other.
    if (step.group != group_of_pending || step.verb == Verb::kChange || step.verb == Verb::kWait) wait_all();
    group_of_pending = step.group;
    at::Tensor buffer = state.buffers[static_cast<std::size_t>(step.buffer_of(rank))];
    if (step.verb == Verb::kChange) change(buffer, rank, s);
    if (step.verb == Verb::kDelay) {  // a different rank is late each time
      if (static_cast<int>(s) % kMostRanks == rank) std::this_thread::sleep_for(300us);
      for (auto& each : pending) each.progress();
    }
    start_step(step, *group, buffer.narrow(0, step.begin, step.length), state.results, pending);
    if (!step.async) wait_all();
  }
  wait_all();
}

TEST(RandomSequences, AgreeWithTheSequentialModel) {
  const bool passed = rc::check("random operations on random groups", [] {
    const int size = *rc::gen::inRange(1, kMostRanks + 1).as("ranks");
    const Members members = random_members(size);
    const auto steps = *rc::gen::container<std::vector<Step>>(step_generator());
    const shm::EngineOptions options{.chunk_bytes = 64 * static_cast<std::uint64_t>(*rc::gen::inRange(1, 4)),
                                     .chunks = static_cast<std::uint64_t>(*rc::gen::inRange(1, 4)),
                                     .ring_bytes = 64 * static_cast<std::uint64_t>(*rc::gen::inRange(1, 4))};
    const auto expected = run_model(steps, members);
    auto store = c10::make_intrusive<c10d::HashStore>();
    std::atomic<int> wrong{0};
    run_ranks(size, [&](World& world) {
      std::vector<std::optional<Group>> groups(members.size());
      RankState state;
      for (std::size_t g = 0; g < members.size(); ++g) {
        const auto place = std::find(members[g].begin(), members[g].end(), world.rank);
        if (place == members[g].end()) continue;
        const std::string name = "group " + std::to_string(g);
        auto backend =
            c10::make_intrusive<ShmBackend>(store, static_cast<int>(place - members[g].begin()),
                                            static_cast<int>(members[g].size()), name, 60s, options);
        groups[g].emplace(backend, name, 60s);
      }
      for (int b = 0; b < kBuffers; ++b) {
        state.buffers.push_back(b < 2 ? groups[0]->empty_shared(kMostNumel, at::kLong)
                                      : at::empty({kMostNumel}, at::kLong));
        state.buffers.back().copy_(initial(world.rank, b));
      }
      run_rank(steps, world.rank, groups, state);
      const RankState& right = expected[static_cast<std::size_t>(world.rank)];
      for (std::size_t b = 0; b < kBuffers; ++b) wrong += !at::equal(state.buffers[b], right.buffers[b]);
      wrong += state.results.size() != right.results.size();
      for (std::size_t i = 0; i < std::min(state.results.size(), right.results.size()); ++i)
        wrong += !at::equal(state.results[i], right.results[i]);
    });
    RC_ASSERT(wrong.load() == 0);
  });
  EXPECT_TRUE(passed);
}

// Sums are added in rank order, whatever the path and the chunks: the same bits everywhere.
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
