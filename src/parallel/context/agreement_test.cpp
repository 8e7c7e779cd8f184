// Attention over context ranks refuses bad input, and no rank waits for one that is at fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/world.hpp"
#include "parallel/context/context_testing.hpp"

namespace isograd {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr std::int64_t kTokens = 20, kDim = 4;

Batch whole_batch() {
  Batch batch;
  batch.cu_seqlens = {0, kTokens};
  batch.tokens = batch.targets = batch.positions = at::arange(kTokens);
  return batch;
}

struct Input {
  Batch batch;
  at::Tensor q, k, v;
};

Input input_of(const ContextCut& cut, int rank, std::int64_t heads = 8) {
  const at::Tensor x = at::ones({cut.tokens_of(rank), heads, kDim});
  return {cut_batch(whole_batch(), cut, rank), x, x, x};
}

struct Fault {
  const char* name;
  std::function<void(Input&)> plant;
  const char* said;       // to the rank at fault
  bool by_itself = true;  // a rank sees it without the others
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"fewer tokens",
       [](Input& in) {
         for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->slice(0, 1);
       },
       "T = 5 as the cut says"},
      {"keys of fewer tokens", [](Input& in) { in.k = in.v = in.k.slice(0, 1); }, "T = 5 as the cut says"},
      {"no heads",
       [](Input& in) {
         for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->flatten(1);
       },
       "q [T, H, D]"},
      {"values of another type", [](Input& in) { in.v = in.v.to(at::kDouble); }, "one floating-point dtype"},
      {"all of another type",
       [](Input& in) {
         for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->to(at::kDouble);
       },
       "8 key heads of 4 Double", false},
      {"another head width",
       [](Input& in) {
         for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->slice(2, 0, 2);
       },
       "8 key heads of 2 Float", false},
      {"a batch that was not cut", [](Input& in) { in.batch = whole_batch(); }, "Cut it first"},
      {"another rank's part",
       [](Input& in) {
         auto other = std::make_shared<ContextCut>(*in.batch.cut);
         other->rank = 0;
         in.batch.cut = other;
       },
       "rank 0's part of a batch cut for 4 ranks"},
      {"a cut for fewer ranks",
       [](Input& in) {
         in = input_of(cut_documents({0, kTokens}, {.ring = 2}), 1);
       },
       "a batch cut for 2 ranks"},
  };
  return all;
}

// The rank at fault says what is wrong, the others at once which rank it is; then all go on.
TEST(ContextAttention, NobodyWaitsForARankAtFault) {
  const JoinOptions options{.timeout = std::chrono::seconds(20)};
  for (const ContextSizes& sizes : {ContextSizes{4, 1}, {2, 2}, {1, 4}})
    for (const int faulty : {0, 2})
      run_ranks(
          4,
          [&](World& world) {
            const Mesh mesh(world,
                            data_grid(world.size, {.cp_ring = sizes.ring, .cp_ulysses = sizes.ulysses}));
            const ContextAttention attention(mesh);
            const ContextCut cut =
                cut_documents({0, kTokens}, {.ring = sizes.ring, .ulysses = sizes.ulysses});
            for (const Fault& fault : faults()) {
              if (faulty == 0 && std::string(fault.name) == "another rank's part") continue;  // its own
              Input in = input_of(cut, world.rank);
              if (world.rank == faulty) fault.plant(in);
              const std::string said = error_of([&] { attention(in.batch, in.q, in.k, in.v); });
              // Each rank's own, valid by itself, is compared with rank 0's.
              const std::string wanted =
                  world.rank == faulty
                      ? fault.said
                      : fmt::format("context rank {}", fault.by_itself || faulty ? faulty : 1);
              EXPECT_THAT(said, HasSubstr(wanted)) << fault.name << ", " << sizes.name();
              in = input_of(cut, world.rank);
              EXPECT_TRUE(attention(in.batch, in.q, in.k, in.v).equal(at::ones_like(in.q))) << fault.name;
            }
          },
          options);
}

// A second layer attends by the same cut: its heads are its own.
TEST(ContextAttention, EveryLayersHeadsAreChecked) {
  run_ranks(4, [&](World& world) {
    const ContextAttention attention(Mesh(world, data_grid(world.size, {.cp_ulysses = 4})));
    const ContextCut cut = cut_documents({0, kTokens}, {.ulysses = 4});
    const Input first = input_of(cut, world.rank, 8), second = input_of(cut, world.rank, 6);
    attention(first.batch, first.q, first.k, first.v);
    EXPECT_THAT(error_of([&] { attention(first.batch, second.q, second.k, second.v); }),
                HasSubstr("Use cp_ulysses 3 or 6, and cp_ring for the rest"));
    const at::Tensor keys = first.k.slice(1, 0, 3);
    EXPECT_THAT(error_of([&] { attention(first.batch, first.q.slice(1, 0, 6), keys, keys); }),
                HasSubstr("cp_ulysses 4 for 6 query heads and 3 key heads"));
    EXPECT_TRUE(attention(first.batch, first.q, first.k, first.v).equal(at::ones_like(first.q)));
  });
}

}  // namespace
}  // namespace isograd
