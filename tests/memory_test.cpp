// What strategies really keep and send, against the formulas of parameters.hpp, on ranks as threads: of
// modules, of decoders whose matrices or experts are sharded over model-parallel ranks, and of activations.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "experts_step.hpp"
#include "full_tests.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "layout/cost/meter.hpp"
#include "parallel/data/rank_roles.hpp"
#include "train/build.hpp"
#include "train/memory.hpp"

namespace isograd {
namespace {

// How far bytes are off, relative to the formula's.
double off(std::int64_t found, std::int64_t expected) {
  return std::abs(static_cast<double>(found - expected)) / static_cast<double>(expected);
}

void expect_near(const PersistentBytes& kept, const PersistentBytes& formula, const std::string& where) {
  EXPECT_LE(off(kept.parameters, formula.parameters), 0.03) << where;
  EXPECT_LE(off(kept.gradients, formula.gradients), 0.03) << where;
  EXPECT_LE(off(kept.state, formula.state), 0.03) << where;
  if (formula.master > 0)
    EXPECT_LE(off(kept.master, formula.master), 0.03) << where;
  else
    EXPECT_EQ(kept.master, 0) << where;
}

struct Layer : torch::nn::Module {
  at::Tensor weight, bias;
  Layer(int index, at::ScalarType dtype) {
    weight = register_parameter("weight", at::full({160, 161 + index}, 0.5, dtype));
    bias = register_parameter("bias", at::full({160}, 0.5, dtype));
  }
  at::Tensor forward(at::Tensor sum) { return sum + (weight * 0.25).sum() + (bias * 0.25).sum(); }
};
// The root has no parameters of its own and is freed like its blocks.
struct Layers : torch::nn::Module {
  std::vector<Sharded<Layer>> layers;
  explicit Layers(at::ScalarType dtype) {
    for (int i = 0; i < 6; ++i)
      layers.emplace_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>(i, dtype)));
  }
  at::Tensor forward(at::Tensor sum) {
    for (auto& layer : layers) sum = layer(sum);
    return sum;
  }
};

struct Case {
  int stage = 0;
  bool share = false, once = false;
  int replicas = 1;
  std::int64_t micro_batches = 1;
  at::ScalarType dtype = at::kFloat;
  bool fp32_gradients = true;

  DataParallelPlan plan(std::int64_t numel, int ranks) const {
    DataParallelPlan plan{.elements = {{.numel = numel, .shards = ranks / replicas, .replicas = replicas}},
                          .bytes = element_bytes(dtype, 2),
                          .stage = stage,
                          .share_parameters = share,
                          .reduce_once = once,
                          .micro_batches = micro_batches};
    if (!fp32_gradients) plan.bytes.gradient = 2;
    return plan;
  }
};

std::int64_t sent(const Mesh& mesh) {
  return bytes_sent({mesh.counting(), mesh.along({"dp_shard"}), mesh.along({"dp_replicate"})});
}

void expect_formulas(World& world, const Case& setup) {
  MemoryMeter meter;
  const Mesh mesh(world, data_grid(world.size, {.dp_replicate = setup.replicas}));
  sent(mesh);  // makes the groups: their own memory is no part of the layout's
  const std::int64_t start = meter.alive() + meter.shared();
  const Sharded<Layers> model(std::make_shared<Layers>(setup.dtype));
  std::int64_t numel = 0, padded = 0, largest = 0, moved = 0;
  for (const at::Tensor& parameter : model->parameters()) numel += parameter.numel();
  std::unique_ptr<FullySharded> stage3;
  std::unique_ptr<DataParallel> whole;
  if (setup.stage == 3) {
    stage3 = fully_shard(model, {model->layers.begin(), model->layers.end()}, mesh,
                         {.reshard_root = true,
                          .reduce_once = setup.once,
                          .fp32_gradients = setup.fp32_gradients,
                          .share_parameters = setup.share});
  } else {
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (const auto& item : model->named_parameters()) named.emplace_back(item.key(), item.value());
    whole = bucketed(trainable_parameters(named), mesh,
                     {.stage = setup.stage,
                      .share_parameters = setup.share,
                      .reduce_once = setup.once,
                      .bucket_bytes = 300000,  // several buckets
                      .first_bucket_bytes = 50000});
  }
  DataParallel& layout = stage3 ? static_cast<DataParallel&>(*stage3) : *whole;
  const auto optimizer = adamw({});
  for (int step = 0; step < 2; ++step) {
    const std::int64_t before = sent(mesh);
    layout.zero_gradients();
    for (std::int64_t i = 0; i < setup.micro_batches; ++i) {
      layout.begin_backward(i + 1 == setup.micro_batches);
      model(at::zeros({}, setup.dtype)).backward();
    }
    layout.finish_reduction();
    optimizer->update(layout.buckets(), 1);
    layout.publish_parameters();
    moved = sent(mesh) - before;
  }
  std::int64_t stays = meter.alive() + meter.shared() - start;
  for (const Bucket& bucket : layout.buckets()) {
    padded += bucket.plan.numel;
    largest = std::max(largest, bucket.plan.numel);
  }
  const DataParallelPlan plan = setup.plan(numel, world.size);
  const bool sharded = plan.elements[0].shards > 1;
  // Transient, and said so in data_parallel.hpp and fully_shard.hpp: reductions of every micro-batch take
  // turns with two buffers, and gathered units are kept for the next one.
  if (setup.stage >= 2 && !setup.once && sharded) stays -= 2 * largest * plan.bytes.gradient;
  if (stage3) stays -= stage3->most_gathered_bytes() - stage3->gathered_bytes();
  const PersistentBytes formula = persistent_bytes(plan);
  const std::string where =
      fmt::format("stage {} shared {} once {}, {} shards x {}, {} micro-batches, {} {}", setup.stage,
                  setup.share, setup.once, plan.elements[0].shards, setup.replicas, setup.micro_batches,
                  c10::toString(setup.dtype), setup.fp32_gradients);
  EXPECT_LE(off(stays, formula.total()), 0.03) << stays << " for " << formula.total() << ", " << where;
  EXPECT_EQ(static_cast<double>(moved), traffic_bytes(setup.plan(padded, world.size)).total()) << where;
  if (setup.stage == 3) return;
  const Grid* shared_on = setup.share ? &mesh.grid() : nullptr;
  expect_near(measure_kept(layout.buckets(), optimizer->state(layout.buckets()), shared_on), formula, where);
  // The comparison can fail: another stage's formula.
  DataParallelPlan other = plan;
  other.stage = plan.stage == 1 ? 2 : 1;
  if (sharded && !setup.once && !setup.share) {
    EXPECT_GT(off(stays, persistent_bytes(other).total()), 0.03) << where;
  }
}

TEST(Memory, AndTrafficAreTheFormulas) {
  MemoryMeter::install();
  std::vector<Case> all;
  for (const std::int64_t micro_batches : {1, 3})
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const auto add = [&](Case one) {
        one.micro_batches = micro_batches, one.dtype = dtype;
        all.push_back(one);
      };
      for (const int stage : {0, 1, 2}) add({.stage = stage});
      for (const int stage : {1, 2}) add({.stage = stage, .replicas = 2});
      for (const int stage : {0, 2}) add({.stage = stage, .share = true});
      add({.stage = 2, .once = true});
      for (const bool once : {false, true}) {
        add({.stage = 3, .once = once});
        add({.stage = 3, .share = true, .once = once});
        add({.stage = 3, .once = once, .replicas = 2});
        if (dtype == at::kBFloat16) add({.stage = 3, .once = once, .fp32_gradients = false});
      }
    }
  // The halves of the list differ in the micro-batches alone: one or three by turns, and both with
  // ISOGRAD_FULL_TESTS=1.
  const std::size_t half = all.size() / 2;
  for (std::size_t at = 0; at < all.size(); ++at)
    for (const int ranks : {2, 4, 8}) {
      const std::size_t place = 3 * (at % half) + static_cast<std::size_t>(ranks) / 4;
      if (!full_tests() && takes_first(place) != (at < half)) continue;
      if (all[at].stage == 3 && ranks == all[at].replicas) continue;  // nothing is sharded
      run_ranks(ranks, [&](World& world) { expect_formulas(world, all[at]); });
    }
}

// ---- decoders whose matrices are sharded over tp, or experts over ep ----

// Large enough that padding and what a group or an allocation takes by itself do not count; sizes that the
// ranks do not divide.
DecoderConfig large(std::int64_t heads, std::int64_t key_heads, std::int64_t layers) {
  DecoderConfig config = tensor::shape(heads, key_heads, false);
  config.vocabulary = 1001, config.hidden = 96, config.layers = layers, config.head_dim = 16;
  config.feed_forward = 257;
  return config;
}
DecoderConfig large_with_experts() {
  DecoderConfig config = experts::Cell{}.config();
  config.vocabulary = 257, config.hidden = 64, config.head_dim = 16;
  config.experts.count = 5, config.experts.feed_forward = 193;
  return config;
}

// By hand: elements of rank 0's part, which is the largest. Of experts, and of all else.
struct Elements {
  std::int64_t experts = 0, others = 0;
};
Elements of_tp(const DecoderConfig& config, int tp) {
  const auto most = [tp](std::int64_t number) { return (number + tp - 1) / tp; };
  const std::int64_t h = config.hidden, d = config.head_dim,
                     keys = config.key_value_heads % tp == 0 ? config.key_value_heads / tp
                                                             : config.key_value_heads;
  const std::int64_t block =
      2 * most(config.heads) * d * h + 2 * keys * d * h + 3 * most(config.feed_forward) * h + 2 * h + 2 * d;
  return {.others = config.layers * block + 2 * most(config.vocabulary) * h + h};
}
Elements of_ep(const DecoderConfig& config, int ep) {
  const std::int64_t h = config.hidden, d = config.head_dim, own = (config.experts.count + ep - 1) / ep;
  const std::int64_t block = 2 * config.heads * d * h + 2 * config.key_value_heads * d * h +
                             config.experts.count * h + 2 * h + 2 * d;
  return {.experts = config.layers * own * 3 * config.experts.feed_forward * h,
          .others = config.layers * block + (config.tied_output ? 1 : 2) * config.vocabulary * h + h};
}

// What is kept of buckets of experts alone.
PersistentBytes kept_of_experts(const std::vector<Bucket>& all, const OptimizerState& state) {
  std::vector<Bucket> buckets;
  OptimizerState states;
  for (std::size_t b = 0; b < all.size(); ++b) {
    const auto is_expert = [](const Slot& slot) { return slot.name.find(".experts.") != std::string::npos; };
    const auto& slots = all[b].plan.slots;
    const bool any = std::ranges::any_of(slots, is_expert);
    EXPECT_EQ(any, std::ranges::all_of(slots, is_expert)) << "a bucket of both kinds";
    if (!any) continue;
    buckets.push_back(all[b]);
    for (const auto& [name, tensors] : state)
      if (tensors.size() == all.size()) states[name].push_back(tensors[b]);
  }
  return measure_kept(buckets, states);
}

// One step on `size` ranks of tp or ep, of whose parts `copies` ranks have one.
void expect_formulas(World& world, bool experts, int size, int copies, const char* strategy,
                     at::ScalarType type) {
  MemoryMeter meter;
  RunConfig run;
  const DecoderConfig config = run.model.shape = experts ? large_with_experts() : large(5, 1, 2);
  (experts ? run.parallel.ep : run.parallel.tp) = size;
  run.parallel.strategy = strategy;
  run.parallel.share_parameters = "off";
  run.parallel.bucket_bytes = 1 << 18;
  run.parallel.first_bucket_bytes = 1 << 16;
  run.train.dtype = type == at::kFloat ? "float32" : "bfloat16";
  const Mesh mesh(world, grid_of(run, world.size));
  mesh.along({"dp_shard"});
  experts ? (mesh.along({"edp"}), mesh.along({kExpertAxis}, kExpertGroup))
          : (mesh.along({"tp"}), tensor_group(mesh));
  const std::int64_t start = meter.alive() + meter.shared();
  auto model = tensor::whole_model(config, type);
  const Layout placed = experts ? deal_experts(*model, mesh) : cut_decoder(*model, mesh);
  const ModelUnits units = model_units(*model, run);
  const auto layout = make_layout(run, model->named(), units, mesh, &placed);
  const auto optimizer = adamw({});
  layout->zero_gradients();
  layout->begin_backward(true);
  const ForwardLossTerms forward = inside(units.root, [&](const Batch& batch) -> LossTerms {
    return {{"cross_entropy",
             cross_entropy_sum(model->logits(batch), batch.targets, {.shard = model->vocabulary()})}};
  });
  const int place = mesh.place(kSampleAxes), places = mesh.size(kSampleAxes);
  forward(tensor::step_of(place, places, config.vocabulary)[0])[0].sum.backward();
  layout->finish_reduction();
  optimizer->update(layout->buckets(), 1);
  layout->publish_parameters();
  if (mesh.place({experts ? kExpertAxis : "tp"}) != 0) return;

  const int stage = stage_of(strategy);
  const auto plan_for = [&](const Elements& elements) {
    DataParallelPlan plan{.bytes = element_bytes(type, 2), .stage = stage};
    plan.elements = {{.numel = elements.others, .shards = places}};
    if (experts) plan.elements.push_back({.numel = elements.experts, .shards = copies});
    return plan;
  };
  const auto by_hand = experts ? of_ep : of_tp;
  DataParallelPlan plan = plan_for(by_hand(config, size)), fewer = plan_for(by_hand(config, size - 1));
  const OptimizerState state = optimizer->state(layout->buckets());
  PersistentBytes kept = measure_kept(layout->buckets(), state);
  const std::string where = fmt::format("{}, {} {}, copies {}, {}", strategy, experts ? "ep" : "tp", size,
                                        copies, c10::toString(type));
  expect_near(kept, persistent_bytes(plan), where);
  // By the allocator, with the two buffers of stage 2, which each kind of bucket has; what stage 3 gathers
  // into is measured above.
  std::int64_t largest = 0;
  for (const Bucket& bucket : layout->buckets()) largest = std::max(largest, bucket.plan.numel);
  const std::int64_t turns = stage == 2 && copies > 1 ? 2 * largest * plan.bytes.gradient : 0;
  if (stage < (experts ? 2 : 3)) {
    EXPECT_LE(off(meter.alive() + meter.shared() - start - turns, persistent_bytes(plan).total()), 0.03)
        << where;
  }
  if (experts) {
    plan.elements.erase(plan.elements.begin()), fewer.elements.erase(fewer.elements.begin());
    kept = kept_of_experts(layout->buckets(), state);
    expect_near(kept, persistent_bytes(plan), where + ", experts");
  }
  // The comparison can fail: parts of one rank fewer.
  EXPECT_GT(off(kept.state, persistent_bytes(fewer).state), 0.03) << where;
}

TEST(Memory, OfModelParallelRanksIsTheFormulas) {
  MemoryMeter::install();
  for (const bool experts : {false, true})
    for (const char* strategy : {"bucketed", "zero1", "zero2", "zero3"})
      for (const auto type : {at::kFloat, at::kBFloat16})
        for (const auto& [size, copies] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}, {5, 1}})
          run_ranks(size * copies,
                    [&](World& world) { expect_formulas(world, experts, size, copies, strategy, type); });
}

// By hand, of rank 0: bytes that one block's forward keeps for backward (docs/tensor-parallelism.md). For T
// tokens and t of them in the rank's stream, with h query heads, k key heads and f features: 2 t hidden
// before the norms, 2 T hidden into the products, T head_dim (2 h + 2 k) of attention (norms of queries and
// keys also keep their inputs), 3 T f; and in fp32 2 t for the norms, T h for attention, T (h + k) for norms
// of queries and keys. Where every rank has all key heads k = h, a copy for each query head, of which only
// those that are read are normed.
std::int64_t activation_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                              bool sequence_parallel, std::int64_t bytes) {
  const auto most = [ranks](std::int64_t number) { return (number + ranks - 1) / ranks; };
  const std::int64_t stream = sequence_parallel ? most(tokens) : tokens, heads = most(config.heads),
                     all_keys = config.key_value_heads, readers = config.heads / all_keys;
  const bool split = all_keys % ranks == 0, copied = ranks % all_keys == 0 && config.heads % ranks == 0;
  const std::int64_t keys = split    ? most(all_keys)
                            : copied ? 1
                                     : heads,
                     normed_keys = split || copied ? keys : (heads + readers - 1) / readers,
                     normed_heads = config.query_key_norm ? heads + normed_keys : 0;
  const std::int64_t kept = 2 * stream * config.hidden + 2 * tokens * config.hidden +
                            tokens * config.head_dim * (2 * heads + 2 * keys + normed_heads) +
                            3 * tokens * most(config.feed_forward);
  return kept * bytes + (2 * stream + tokens * (heads + normed_heads)) * std::max<std::int64_t>(bytes, 4);
}

// What a layer's forward keeps for backward on a rank of tp.
TEST(Memory, OfActivationsOverTpIsTheFormula) {
  MemoryMeter::install();
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kDouble};  // in turn
  const TensorOverlap overlaps[] = {TensorOverlap::kNone, TensorOverlap::kWeights, TensorOverlap::kTokens};
  std::size_t turn = 0;
  for (const bool by_tokens : {true, false})
    for (const auto& [heads, key_heads] : {std::pair{6, 6}, {6, 3}, {6, 1}})
      for (const int tp : {2, 3, 4, 6}) {
        const TensorOverlap overlap = overlaps[turn / 3 % (by_tokens ? 3 : 2)];
        const at::ScalarType type = types[turn++ % 3];
        run_ranks(tp, [&](World& world) {
          const TensorParallelOptions options{.sequence_parallel = by_tokens, .overlap = overlap};
          const std::vector<std::int64_t> lengths = {301, 83, 128};
          const Batch batch = make_batch(lengths, 1001, 1);
          const auto alive_after = [&](std::int64_t layers) {
            const DecoderConfig config = large(heads, key_heads, layers);
            const Mesh mesh(world, with_key_head_view(Grid({{"tp", world.size}}), config));
            auto model = tensor::whole_model(config, type);
            cut_decoder(*model, mesh, options);
            MemoryMeter meter;
            const at::Tensor hidden = model->hidden(batch);
            return meter.alive();
          };
          const auto measured = static_cast<double>(alive_after(3) - alive_after(1)) / 2;
          const DecoderConfig config = large(heads, key_heads, 1);
          const auto foretold = [&](const TensorParallelOptions& with, int ranks) {
            return static_cast<double>(activation_bytes(config, batch.num_tokens(), ranks,
                                                        with.sequence_parallel,
                                                        static_cast<std::int64_t>(c10::elementSize(type))));
          };
          if (world.rank == 0) {
            const std::string where = fmt::format("{} heads of {}, tp {}, sequence parallel {}, {}", heads,
                                                  key_heads, tp, by_tokens, c10::toString(type));
            EXPECT_NEAR(measured / foretold(options, tp), 1, 0.01) << where;
            // The comparison can fail: tokens cut or not, one rank fewer.
            const TensorParallelOptions other{.sequence_parallel = !by_tokens};
            EXPECT_GT(std::abs(measured / foretold(other, tp) - 1), 0.05) << where;
          }
        });
      }
}

}  // namespace
}  // namespace isograd
