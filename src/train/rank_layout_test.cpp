// A run's planned layout, compared with layouts that are made and with the definition of an owner, counted
// element by element.
#include "train/rank_layout.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>

#include "train/build.hpp"
#include "train/memory.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using testing_runs::config_error_of;

struct Case {
  const char* name;
  std::vector<std::string> sets;  // of parallel.* unless they name another section
  int multiple = 1;               // of which the ranks are one
};

// Five experts sharded unevenly over two ranks.
std::vector<std::string> experts_over_two(std::vector<std::string> sets) {
  for (const char* more :
       {"share_parameters=off", "ep=2", "model.family=qwen3_moe", "model.query_key_norm=true",
        "model.experts=5", "model.experts_per_token=2", "model.expert_feed_forward=9"})
    sets.emplace_back(more);
  return sets;
}

// Cut, copied and summed, copied and the same along tp: of 27 features and as many heads as ranks along tp.
std::vector<std::string> along_tp(const std::string& strategy, int tp) {
  return {"strategy=" + strategy,    "share_parameters=off",
          fmt::format("tp={}", tp),  fmt::format("model.heads={}", tp),
          "model.key_value_heads=1", "model.query_key_norm=true",
          "model.family=qwen3"};
}

const std::vector<Case> kCases = {
    {"naive", {"strategy=naive"}},
    {"overlapped", {"strategy=overlapped"}},
    {"bucketed, one copy", {}},
    {"bucketed", {"share_parameters=off"}},
    {"zero1 in bf16", {"strategy=zero1", "share_parameters=off", "train.dtype=bfloat16"}},
    {"zero2 in bf16 with bf16 gradients",
     {"strategy=zero2", "share_parameters=off", "train.dtype=bfloat16", "train.fp32_gradients=false"}},
    {"zero2, one copy, replicas", {"strategy=zero2", "replicas=2"}, 2},
    {"zero2, reduced once", {"strategy=zero2", "share_parameters=off", "reduce_once=true"}},
    {"zero3 in bf16", {"strategy=zero3", "share_parameters=off", "train.dtype=bfloat16"}},
    {"zero3, one copy", {"strategy=zero3"}},
    {"zero3, reduced once, replicas, momentum alone",
     {"strategy=zero3", "share_parameters=off", "replicas=2", "reduce_once=true", "optimizer.kind=sgd",
      "optimizer.momentum=0.9"},
     2},
    {"zero1 over a ring", {"strategy=zero1", "share_parameters=off", "cp_ring=2"}, 2},
    {"zero3, whole along Ulysses",
     {"strategy=zero3", "share_parameters=off", "cp_ulysses=2", "cp_fsdp_mode=none"},
     2},
    {"experts", experts_over_two({"strategy=bucketed"}), 2},
    {"experts, zero1 in bf16", experts_over_two({"strategy=zero1", "train.dtype=bfloat16"}), 2},
    {"experts, zero2", experts_over_two({"strategy=zero2"}), 2},
    {"experts, zero3, replicas", experts_over_two({"strategy=zero3", "replicas=2"}), 2},
    {"experts over a ring, zero1, the rest in replicas alone",
     experts_over_two({"strategy=zero1", "cp_ring=2", "cp_fsdp_mode=none"}), 2},
    {"tp, bucketed", along_tp("bucketed", 2), 2},
    {"tp, zero1", along_tp("zero1", 2), 2},
    {"tp of 3, zero2", along_tp("zero2", 3), 3},
    {"tp, zero3", along_tp("zero3", 2), 2},
};

class RankLayouts : public testing_runs::TinyRuns {
 protected:
  // Odd sizes: buckets with padding, slices that end within a parameter.
  RunConfig of(const Case& one) const {
    RunConfig config = tiny("layout");
    config.model.shape.layers = 2;
    config.model.shape.feed_forward = 27;
    config.parallel.first_bucket_bytes = 1024;
    std::vector<std::string> sets = one.sets;
    for (std::string& set : sets)
      if (set.find('.') > set.find('=')) set = "parallel." + set;
    return parse_config(to_toml(config), one.name, sets);
  }

  // `look(config, ranks)` for each case on several numbers of ranks.
  void for_cases(const std::vector<int>& ranks, const std::function<void(const RunConfig&, int)>& look) {
    for (const Case& one : kCases)
      for (const int count : ranks) {
        if (count % one.multiple != 0) continue;
        SCOPED_TRACE(::testing::Message() << one.name << " on " << count << " ranks");
        look(of(one), count);
      }
  }
};

bool same(Range a, Range b) { return a.begin == b.begin && a.end == b.end; }

PersistentBytes sum(const RankLayout& layout) {
  PersistentBytes result = layout.padding;
  for (const LaidParameter& parameter : layout.parameters) result += parameter.kept;
  return result;
}

void expect_same(const PersistentBytes& found, const PersistentBytes& wanted) {
  EXPECT_EQ(found.parameters, wanted.parameters);
  EXPECT_EQ(found.gradients, wanted.gradients);
  EXPECT_EQ(found.master, wanted.master);
  EXPECT_EQ(found.state, wanted.state);
}

// Buckets, what each rank holds and owns of them, and the bytes that are really allocated for it.
TEST_F(RankLayouts, AreThoseThatAreMade) {
  for_cases({1, 2, 4}, [](const RunConfig& config, int ranks) {
    run_ranks(ranks, [&](World& world) {
      const RunLayout predicted = lay_out(config, ranks, world.rank);
      const auto model = make_task(config, world.group)->make_model(scalar_type(config.train.dtype));
      const Mesh mesh(world, grid_of(config, ranks));
      std::optional<Layout> placed;
      if (model_parallel(config)) placed.emplace(model->cut(mesh));
      const ModelUnits units = model->make_units();
      const auto layout = make_layout(config, model->named(), units, mesh, placed ? &*placed : nullptr);
      const auto& buckets = layout->buckets();
      ASSERT_EQ(predicted.layout.buckets.size(), buckets.size());
      for (std::size_t b = 0; b < buckets.size(); ++b) {
        const LaidBucket& laid = predicted.layout.buckets[b];
        EXPECT_EQ(laid.planned.plan.numel, buckets[b].plan.numel);
        EXPECT_TRUE(same(laid.held, buckets[b].held));
        EXPECT_EQ(laid.sharded, buckets[b].sharded);
        Range owned{};
        for (const OwnedBy& one : laid.owners)
          if (one.rank == world.rank) owned = one.elements;
        EXPECT_EQ(owned.size(), buckets[b].owned.size());
        if (owned.size() > 0) {
          EXPECT_TRUE(same(owned, buckets[b].owned));
        }
        ASSERT_EQ(laid.planned.plan.slots.size(), buckets[b].plan.slots.size());
        for (std::size_t s = 0; s < buckets[b].plan.slots.size(); ++s) {
          EXPECT_EQ(laid.planned.plan.slots[s].name, buckets[b].plan.slots[s].name);
          EXPECT_EQ(laid.planned.plan.slots[s].offset, buckets[b].plan.slots[s].offset);
        }
      }
      const auto optimizer = make_optimizer(config);
      optimizer->update(layout->buckets(), 1);
      const Grid* shared_on = predicted.plan.share_parameters ? &mesh.grid() : nullptr;
      expect_same(predicted.layout.total, measure_kept(buckets, optimizer->state(buckets), shared_on));
    });
  });
}

TEST_F(RankLayouts, TotalsAreSumsAndTheFormulasOfMemory) {
  for_cases({1, 2, 3, 4, 8}, [](const RunConfig& config, int ranks) {
    if (ranks > config.batch.packs_per_step) return;
    for (int rank = 0; rank < ranks; ++rank) {
      const RunLayout run = lay_out(config, ranks, rank);
      expect_same(sum(run.layout), run.layout.total);
      DataParallelPlan padded = run.plan;
      for (const LaidBucket& bucket : run.layout.buckets) {
        const bool experts = cut_along_data(bucket.planned.plan.sync, run.layout.grid);
        padded.elements.at(experts ? 1 : 0).numel += bucket.padding;
      }
      expect_same(run.layout.total, persistent_bytes(padded));
      // The comparison can fail: one stage further.
      if (padded.elements[0].shards > 1 && padded.stage == 1) {
        padded.stage = 3;
        EXPECT_NE(run.layout.total.total(), persistent_bytes(padded).total());
      }
    }
  });
}

// How often each element of a parameter is owned, as each rank reports for itself.
using Counts = std::map<std::string, at::Tensor>;

void count_owned(Counts& counts, const RankLayout& layout) {
  for (const LaidParameter& parameter : layout.parameters) {
    at::Tensor& whole = counts[parameter.name];
    if (!whole.defined()) whole = at::zeros(parameter.placement.whole_shape, at::kLong);
    at::Tensor local = at::zeros(parameter.local_shape, at::kLong);
    for (const OwnedBy& one : parameter.owners)
      if (one.rank == layout.rank)
        local.view({-1}).narrow(0, one.elements.begin, one.elements.size()).add_(1);
    for (const Slice& slice : slices(parameter.placement, layout.grid, layout.rank)) {
      at::Tensor to = whole, from = local;
      for (std::size_t dim = 0; dim < slice.sizes.size(); ++dim) {
        to = to.narrow(static_cast<std::int64_t>(dim), slice.whole[dim], slice.sizes[dim]);
        from = from.narrow(static_cast<std::int64_t>(dim), slice.local[dim], slice.sizes[dim]);
      }
      to.add_(from);
    }
  }
}

void expect_one_owner_each(const Counts& counts) {
  for (const auto& [name, count] : counts)
    EXPECT_TRUE(count.eq(1).all().item<bool>()) << name << "\n" << count;
}

TEST_F(RankLayouts, GiveEachElementOneOwner) {
  for_cases({1, 2, 3, 4, 6}, [](const RunConfig& config, int ranks) {
    if (ranks > config.batch.packs_per_step * config.parallel.tp) return;
    Counts counts;
    std::vector<std::string> owners;  // as each rank reports them
    for (int rank = 0; rank < ranks; ++rank) {
      const RankLayout layout = lay_out(config, ranks, rank).layout;
      count_owned(counts, layout);
      std::string& text = owners.emplace_back();
      for (const LaidParameter& parameter : layout.parameters)
        for (const OwnedBy& one : parameter.owners)
          if (parameter.placement.cuts.empty())  // each rank reports its own shard of a sharded parameter
            text +=
                fmt::format("{} {} {} {}\n", parameter.name, one.rank, one.elements.begin, one.elements.end);
      EXPECT_EQ(text, owners.front());
    }
    expect_one_owner_each(counts);
  });
}

TEST_F(RankLayouts, FitTheScreenWhateverNamesAreLike) {
  RunConfig config = tiny("wide");
  config.parallel.strategy = "zero3";
  config.parallel.replicas = 2;
  config.parallel.cp_ring = config.parallel.cp_ulysses = 2;
  config.batch.packs_per_step = 4096;
  RunLayout run = lay_out(config, 512, 300);
  run.layout.parameters[0].name = "a\x1b[2J" + std::string(200, 'b') + "the end";
  const std::string text = to_text(run);
  EXPECT_THAT(to_text(lay_out(of(kCases.back()), 2, 0)), HasSubstr("cut along      tp (dim 1)"));
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_THAT(text, HasSubstr("bthe end"));
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    const auto columns = std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; });
    EXPECT_LE(columns, 100) << line;
    begin = end + 1;
  }
}

TEST_F(RankLayouts, RefuseRanksThatThereAreNot) {
  RunConfig config = tiny("refused");
  EXPECT_THAT(config_error_of([&] { lay_out(config, 2, 2); }), HasSubstr("--rank 2: found 2 ranks"));
  EXPECT_THAT(config_error_of([&] { lay_out(config, 2, -1); }), HasSubstr("expected 0 to 1"));
  config.parallel.replicas = 2;
  config.parallel.strategy = "zero1";
  EXPECT_THAT(config_error_of([&] { lay_out(config, 3, 0); }), HasSubstr("Change parallel.replicas"));
}

}  // namespace
}  // namespace isograd
