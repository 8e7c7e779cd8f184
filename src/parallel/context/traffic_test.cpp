// Bytes that ranks send, against the formulas of docs/context-parallelism.md.
#include <gtest/gtest.h>

#include "isograd/world.hpp"
#include "parallel/context/context_testing.hpp"

namespace isograd {
namespace {

using namespace testing;

constexpr std::int64_t kTrafficDim = 4;

struct Sent {
  std::int64_t forward = 0, backward = 0;
};

// One document of `tokens` over all ranks, forward and backward; of all ranks together.
Sent sent(World& world, const ContextSizes& sizes, std::int64_t tokens, std::int64_t heads,
          std::int64_t key_heads, at::ScalarType type, bool causal) {
  const Mesh mesh(world, data_grid(world.size, {.cp_ring = sizes.ring, .cp_ulysses = sizes.ulysses}));
  const ContextGroups groups = context_groups(mesh);
  const ContextAttention attention(groups, causal);
  Batch whole;
  whole.cu_seqlens = {0, tokens};
  whole.tokens = whole.targets = whole.positions = at::arange(tokens);
  const CutOptions options{.ring = sizes.ring, .ulysses = sizes.ulysses, .causal = causal};
  const Batch part = cut_batch(whole, cut_documents(whole.cu_seqlens, options), world.rank);
  const auto draw = [&](std::int64_t n) {
    return at::ones({part.num_tokens(), n, kTrafficDim}, at::TensorOptions(type)).requires_grad_();
  };
  const at::Tensor q = draw(heads), k = draw(key_heads), v = draw(key_heads);
  const auto so_far = [&] {
    std::int64_t bytes = 0;
    for (const Group* group : {&groups.ring, &groups.ulysses})
      for (const char* kind : {"send", "all_to_all"}) {
        const auto traffic = group->traffic();
        const auto place = traffic.operations.find(kind);
        if (place != traffic.operations.end()) bytes += place->second.bytes;
      }
    return bytes;
  };
  const std::int64_t before = so_far();
  const at::Tensor out = attention(part, q, k, v);
  const std::int64_t forward = so_far() - before;
  out.sum().backward();
  at::Tensor sums = at::tensor({forward, so_far() - before - forward}, at::kLong);
  world.group.all_reduce(sums);
  return {sums[0].item<std::int64_t>(), sums[1].item<std::int64_t>()};
}

// Keys and values take R − 1 hops, but for the late chunk of rank 0, which nobody needs: (2R − 1)/2R of them
// on average; gradients start where the keys are used first: 3/4 of them. Not causal: all of both.
TEST(ContextTraffic, OfTheRing) {
  for (const int ring : {2, 3, 4, 5})
    for (const bool causal : {true, false})
      for (const auto type : {at::kFloat, at::kBFloat16})
        run_ranks(ring, [&](World& world) {
          const std::int64_t chunk = 6, tokens = 2 * ring * chunk, heads = 4, key_heads = 2;
          const Sent now = sent(world, {ring, 1}, tokens, heads, key_heads, type, causal);
          const std::int64_t bytes = type == at::kFloat ? 4 : 2;
          // Numbers that all ranks would send if all of their keys and values took all hops.
          const std::int64_t all = (ring - 1) * 2 * tokens * key_heads * kTrafficDim;
          const std::int64_t keys = causal ? all / (2 * ring) * (2 * ring - 1) : all;
          const std::int64_t gradients = causal ? all / 4 * 3 : all;
          EXPECT_EQ(now.forward, keys * bytes) << ring << causal;
          EXPECT_EQ(now.backward, keys * bytes + gradients * 4) << ring << causal;
        });
}

// Queries, keys and values to the heads and outputs back; in backward gradients of outputs in the tensors'
// type, those of queries, keys and values in fp32. A key head goes to every rank that reads it.
TEST(ContextTraffic, OfUlysses) {
  for (const int ulysses : {2, 4})
    for (const std::int64_t key_heads : {8, 2})
      for (const auto type : {at::kFloat, at::kBFloat16})
        run_ranks(ulysses, [&](World& world) {
          const std::int64_t tokens = 8 * ulysses, heads = 8;
          const Sent now = sent(world, {1, ulysses}, tokens, heads, key_heads, type, true);
          const std::int64_t bytes = type == at::kFloat ? 4 : 2;
          const std::int64_t keys = std::max<std::int64_t>(key_heads, ulysses);
          const std::int64_t moved = tokens * kTrafficDim / ulysses * (ulysses - 1);
          EXPECT_EQ(now.forward, moved * (2 * heads + 2 * keys) * bytes) << ulysses << " " << key_heads;
          EXPECT_EQ(now.backward, moved * (heads * bytes + (heads + 2 * keys) * 4))
              << ulysses << " " << key_heads;
        });
}

}  // namespace
}  // namespace isograd
