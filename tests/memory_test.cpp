// Bytes that ranks keep and send, against the formulas of parameters.hpp, on ranks as threads: under every
// strategy, of a model that ranks hold together (its part along tp, its experts), and of the activations of
// stages.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "decoder_step.hpp"
#include "full_tests.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "layout/cost/meter.hpp"
#include "parallel/data/flat_parameters.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "parallel/pipeline/split_backward.hpp"
#include "train/memory.hpp"

namespace isograd {
namespace {

using tensor::shape;
using tensor::step_of;
using tensor::whole_model;

// How far bytes are off, relative to what the formula says.
double off(std::int64_t found, std::int64_t expected) {
  return std::abs(static_cast<double>(found - expected)) / static_cast<double>(expected);
}

// ---- strategies ----

struct Case {
  int stage = 0;
  bool share = false, once = false, fp32_gradients = true;
  int replicas = 1;
  std::int64_t micro_batches = 1;
  at::ScalarType dtype = at::kFloat;

  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << "stage " << c.stage << " shared " << c.share << " once " << c.once << ", " << c.replicas
         << " replicas, " << c.micro_batches << " micro-batches, " << c.dtype << " " << c.fp32_gradients;
  }
};

// The root has no parameters of its own and is freed like its blocks.
struct Layer : torch::nn::Module {
  at::Tensor weight, bias;
  Layer(int index, at::ScalarType dtype) {
    weight = register_parameter("weight", at::full({160, 161 + index}, 0.5, dtype));
    bias = register_parameter("bias", at::full({160}, 0.5, dtype));
  }
  at::Tensor forward(at::Tensor sum) { return sum + (weight * 0.25).sum() + (bias * 0.25).sum(); }
};
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

struct Measured {
  std::int64_t numel = 0, padded = 0;
  std::int64_t stays = 0;  // by the allocator, without what is transient
  PersistentBytes kept;    // by what it is for
  std::int64_t sent = 0;   // of the second of two equal steps
};

Measured measure(World& world, const Case& setup) {
  MemoryMeter meter;
  Measured result;
  const Mesh mesh(world, data_grid(world.size, {.dp_replicate = setup.replicas}));
  const auto sent = [&] {
    return bytes_sent({mesh.counting(), mesh.along({"dp_shard"}), mesh.along({"dp_replicate"})});
  };
  sent();  // makes the groups: their own memory is no part of the layout's
  const std::int64_t start = meter.alive() + meter.shared();
  const Sharded<Layers> model(std::make_shared<Layers>(setup.dtype));
  for (const at::Tensor& parameter : model->parameters()) result.numel += parameter.numel();
  std::unique_ptr<DataParallel> layout;
  FullySharded* units = nullptr;
  if (setup.stage == 3) {
    auto made = fully_shard(model, {model->layers.begin(), model->layers.end()}, mesh,
                            {.reshard_root = true,
                             .reduce_once = setup.once,
                             .fp32_gradients = setup.fp32_gradients,
                             .share_parameters = setup.share});
    units = made.get(), layout = std::move(made);
  } else {
    layout = bucketed(trainable_parameters(*model), mesh,
                      {.stage = setup.stage,
                       .share_parameters = setup.share,
                       .reduce_once = setup.once,
                       .bucket_bytes = 300000,  // several buckets
                       .first_bucket_bytes = 50000});
  }
  const auto optimizer = adamw({});
  for (int step = 0; step < 2; ++step) {
    const std::int64_t before = sent();
    layout->zero_gradients();
    for (std::int64_t i = 0; i < setup.micro_batches; ++i) {
      layout->begin_backward(i + 1 == setup.micro_batches);
      model(at::zeros({}, setup.dtype)).backward();
    }
    layout->finish_reduction();
    optimizer->update(layout->buckets(), 1);
    layout->publish_parameters();
    result.sent = sent() - before;
  }
  std::int64_t largest = 0;
  for (const Bucket& bucket : layout->buckets()) {
    result.padded += bucket.plan.numel;
    largest = std::max(largest, bucket.plan.numel);
  }
  // Transient: buckets of stages 2 and 3 take turns with two buffers, and gathered units are kept for the
  // next.
  result.stays = meter.alive() + meter.shared() - start;
  if (setup.stage >= 2 && !setup.once && world.size > setup.replicas)
    result.stays -= 2 * largest * (setup.fp32_gradients ? element_bytes(setup.dtype, 2).gradient : 2);
  if (units) result.stays -= units->most_gathered_bytes() - units->gathered_bytes();
  result.kept = measure_kept(layout->buckets(), optimizer->state(layout->buckets()),
                             setup.share ? &mesh.grid() : nullptr);
  return result;
}

DataParallelPlan plan_of(const Case& setup, int ranks, std::int64_t numel) {
  DataParallelPlan plan{
      .elements = {{.numel = numel, .shards = ranks / setup.replicas, .replicas = setup.replicas}},
      .bytes = element_bytes(setup.dtype, 2),
      .stage = setup.stage,
      .share_parameters = setup.share,
      .reduce_once = setup.once,
      .micro_batches = setup.micro_batches};
  if (!setup.fp32_gradients) plan.bytes.gradient = 2;
  return plan;
}

// One or three micro-batches by turns, and both with ISOGRAD_FULL_TESTS=1.
TEST(Memory, AndTrafficAreTheFormulas) {
  MemoryMeter::install();
  std::vector<Case> all;
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const Case& one : {Case{.stage = 0},
                            {.stage = 1},
                            {.stage = 2},
                            {.stage = 2, .once = true},
                            {.share = true},
                            {.stage = 2, .share = true},
                            {.stage = 2, .replicas = 2},
                            {.stage = 1, .replicas = 2},
                            {.stage = 3},
                            {.stage = 3, .once = true},
                            {.stage = 3, .share = true},
                            {.stage = 3, .share = true, .once = true},
                            {.stage = 3, .replicas = 2},
                            {.stage = 3, .once = true, .replicas = 2},
                            {.stage = 3, .fp32_gradients = false},
                            {.stage = 3, .once = true, .fp32_gradients = false}})
      if (one.fp32_gradients || dtype == at::kBFloat16) all.push_back(one), all.back().dtype = dtype;
  std::size_t place = 0;
  for (Case setup : all)
    for (int ranks : {2, 3, 4, 8})
      for (const std::int64_t micro_batches : {1, 3}) {
        if (micro_batches == 1) ++place;
        if (!full_tests() && takes_first(place) != (micro_batches == 1)) continue;
        if (ranks % setup.replicas != 0 || (setup.stage == 3 && ranks == setup.replicas)) continue;
        setup.micro_batches = micro_batches;
        run_ranks(ranks, [&](World& world) {
          const Measured measured = measure(world, setup);
          const auto plan = plan_of(setup, ranks, measured.numel);
          SCOPED_TRACE(::testing::PrintToString(setup) + fmt::format(", {} ranks", ranks));
          const PersistentBytes formula = persistent_bytes(plan);
          EXPECT_LE(off(measured.stays, formula.total()), 0.03)
              << measured.stays << " for " << formula.total();
          EXPECT_LE(off(measured.kept.parameters, formula.parameters), 0.03);
          EXPECT_LE(off(measured.kept.gradients, formula.gradients), 0.03);
          if (formula.master > 0)
            EXPECT_LE(off(measured.kept.master, formula.master), 0.03);
          else
            EXPECT_EQ(measured.kept.master, 0);
          EXPECT_LE(off(measured.kept.state, formula.state), 0.03);
          EXPECT_EQ(static_cast<double>(measured.sent),
                    traffic_bytes(plan_of(setup, ranks, measured.padded)).total());
          // The comparison can fail: another stage's formula.
          auto other = plan;
          other.stage = plan.stage == 1 ? 2 : 1;
          if (plan.stage < 3 && plan.elements[0].shards > 1 && !plan.reduce_once && !plan.share_parameters) {
            EXPECT_GT(off(measured.stays, persistent_bytes(other).total()), 0.03);
          }
        });
      }
}

// ---- parts of a model ----

// Large enough that what a group or an allocation takes by itself does not count; sizes that tp does not
// divide.
DecoderConfig large(std::int64_t heads, std::int64_t key_heads, std::int64_t layers) {
  DecoderConfig config = shape(heads, key_heads, false);
  config.vocabulary = 1001, config.hidden = 96, config.layers = layers, config.head_dim = 16;
  config.feed_forward = 257;
  return config;
}

// By hand: elements of rank 0's part, which is the largest.
std::int64_t elements(const DecoderConfig& config, int tp) {
  const auto most = [tp](std::int64_t number) { return (number + tp - 1) / tp; };
  const std::int64_t h = config.hidden, d = config.head_dim,
                     keys = config.key_value_heads % tp == 0 ? config.key_value_heads / tp
                                                             : config.key_value_heads;
  const std::int64_t block =
      2 * most(config.heads) * d * h + 2 * keys * d * h + 3 * most(config.feed_forward) * h + 2 * h + 2 * d;
  return config.layers * block + 2 * most(config.vocabulary) * h + h;
}

// The experts and the rest, likewise.
DecoderConfig large_with_experts() {
  DecoderConfig config = tensor::shape_with_experts(5);
  config.vocabulary = 257, config.hidden = 64, config.head_dim = 16;
  config.experts.feed_forward = 193;
  return config;
}
std::int64_t expert_elements(const DecoderConfig& config, int ep) {
  const std::int64_t own = (config.experts.count + ep - 1) / ep;
  return config.layers * own * 3 * config.experts.feed_forward * config.hidden;
}
std::int64_t other_elements(const DecoderConfig& config) {
  const std::int64_t h = config.hidden, d = config.head_dim;
  const std::int64_t block = 2 * config.heads * d * h + 2 * config.key_value_heads * d * h +
                             config.experts.count * h + 2 * h + 2 * d;
  return config.layers * block + (config.tied_output ? 1 : 2) * config.vocabulary * h + h;
}

// Bytes of buckets of experts alone.
PersistentBytes kept_of_experts(const std::vector<Bucket>& all, const OptimizerState& state) {
  std::vector<Bucket> buckets;
  OptimizerState states;
  for (std::size_t b = 0; b < all.size(); ++b) {
    const auto is_expert = [](const Slot& slot) { return slot.name.find(".experts.") != std::string::npos; };
    const auto& slots = all[b].plan.slots;
    const bool any = std::any_of(slots.begin(), slots.end(), is_expert);
    EXPECT_EQ(any, std::all_of(slots.begin(), slots.end(), is_expert)) << "a bucket of both kinds";
    if (!any) continue;
    buckets.push_back(all[b]);
    for (const auto& [name, tensors] : state)
      if (tensors.size() == all.size()) states[name].push_back(tensors[b]);
  }
  return measure_kept(buckets, states);
}

void expect_near(const PersistentBytes& kept, const PersistentBytes& formula, const std::string& where) {
  EXPECT_LE(off(kept.parameters, formula.parameters), 0.03) << where;
  EXPECT_LE(off(kept.gradients, formula.gradients), 0.03) << where;
  EXPECT_LE(off(kept.state, formula.state), 0.03) << where;
  if (formula.master > 0) {
    EXPECT_LE(off(kept.master, formula.master), 0.03) << where;
  }
}

// After a step, on ranks that have the first part of a decoder along tp or of its experts along ep.
void check_parts(bool experts, const char* strategy, int stage, at::ScalarType type, int parts, int copies) {
  const DecoderConfig config = experts ? large_with_experts() : large(5, 1, 2);
  run_ranks(parts * copies, [&](World& world) {
    MemoryMeter meter;
    RunConfig run;
    run.model.shape = config;
    (experts ? run.parallel.ep : run.parallel.tp) = parts;
    run.parallel.strategy = strategy;
    run.parallel.share_parameters = "off";
    run.parallel.bucket_bytes = 1 << 18;
    run.parallel.first_bucket_bytes = 1 << 16;
    run.train.dtype = type == at::kFloat ? "float32" : "bfloat16";
    const Mesh mesh(world, grid_of(run, world.size));
    mesh.along({"dp_shard"});  // groups take memory of their own
    if (experts)
      mesh.along({"edp"}), mesh.along({kExpertAxis}, kExpertGroup);
    else
      mesh.along({"tp"}), tensor_group(mesh);
    const std::int64_t start = meter.alive() + meter.shared();
    auto model = whole_model(config, type);
    const Layout placed = experts ? shard_experts(*model, mesh) : cut_decoder(*model, mesh);
    const ModelUnits units = model_units(*model, run);
    const auto layout = make_layout(run, model->named(), units, mesh, &placed);
    const auto optimizer = adamw({});
    layout->zero_gradients();
    layout->begin_backward(true);
    const ForwardLossTerms forward = inside(units.root, [&](const Batch& batch) -> LossTerms {
      return {{"cross_entropy",
               cross_entropy_sum(model->logits(batch), batch.targets, {.shard = model->vocabulary()})}};
    });
    forward(step_of(mesh.place(kSampleAxes), mesh.size(kSampleAxes), config.vocabulary)[0])[0].sum.backward();
    layout->finish_reduction();
    optimizer->update(layout->buckets(), 1);
    layout->publish_parameters();
    if (mesh.place({experts ? kExpertAxis : "tp"}) != 0) return;
    const auto plan_of = [&](int of_parts) {
      DataParallelPlan plan{.bytes = element_bytes(type, 2), .stage = stage};
      if (experts)
        plan.elements = {{.numel = other_elements(config), .shards = world.size},
                         {.numel = expert_elements(config, of_parts), .shards = copies}};
      else
        plan.elements = {{.numel = elements(config, of_parts), .shards = copies}};
      return plan;
    };
    const DataParallelPlan plan = plan_of(parts);
    const OptimizerState state = optimizer->state(layout->buckets());
    const PersistentBytes kept = measure_kept(layout->buckets(), state);
    const std::string where =
        fmt::format("{}, {} parts of {}, {} copies, {}", strategy, parts,
                    experts ? "the experts" : "everything", copies, c10::toString(type));
    expect_near(kept, persistent_bytes(plan), where);
    // By the allocator, with the two buffers of stage 2 (for each kind of bucket); what stage 3 gathers into
    // is memory_test's.
    std::int64_t largest = 0;
    for (const Bucket& bucket : layout->buckets()) largest = std::max(largest, bucket.plan.numel);
    const std::int64_t turns = stage == 2 && copies > 1 ? 2 * largest * plan.bytes.gradient : 0;
    if (stage < (experts ? 2 : 3)) {
      EXPECT_LE(off(meter.alive() + meter.shared() - start - turns, persistent_bytes(plan).total()), 0.03)
          << where;
    }
    // The comparison can fail: as if parts were of one rank fewer.
    DataParallelPlan own = plan, other = plan_of(parts - 1);
    for (DataParallelPlan* one : {&own, &other})
      if (experts) one->elements.erase(one->elements.begin());
    const PersistentBytes of_parts = experts ? kept_of_experts(layout->buckets(), state) : kept;
    expect_near(of_parts, persistent_bytes(own), where + ", parts");
    EXPECT_GT(off(of_parts.state, persistent_bytes(other).state), 0.03) << where;
  });
}

// With experts or without, in fp32 or bf16 by turns; ISOGRAD_FULL_TESTS=1: all.
TEST(PartsMemory, ParametersGradientsAndStatesAreTheFormulas) {
  MemoryMeter::install();
  std::size_t place = 0;
  for (const bool experts : {false, true})
    for (const auto& [strategy, stage] : {std::pair{"bucketed", 0}, {"zero1", 1}, {"zero2", 2}, {"zero3", 3}})
      for (const auto& [parts, copies] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}, {5, 1}}) {
        const bool first = takes_first(place), with_experts = place / 2 % 2 == 0;
        ++place;
        if (!full_tests() && experts != with_experts) continue;
        for (const auto type : {at::kFloat, at::kBFloat16})
          if (full_tests() || first == (type == at::kFloat))
            check_parts(experts, strategy, stage, type, parts, copies);
      }
}

constexpr TensorOverlap kOverlaps[] = {TensorOverlap::kNone, TensorOverlap::kWeights, TensorOverlap::kTokens};

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

// Tokens cut or whole by turns; ISOGRAD_FULL_TESTS=1: both.
TEST(TensorMemory, ActivationsAreTheFormula) {
  MemoryMeter::install();
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kDouble};  // in turn
  std::size_t turn = 0;
  for (const bool by_tokens : {true, false})
    for (const auto& [heads, key_heads] : {std::pair{6, 6}, {6, 3}, {6, 1}})
      for (const int tp : {2, 3, 4, 6}) {
        const TensorOverlap overlap = kOverlaps[turn / 3 % (by_tokens ? 3 : 2)];
        const at::ScalarType type = types[turn % 3];
        const bool first = takes_first(turn++ % 12);
        if (!full_tests() && first != by_tokens) continue;
        run_ranks(tp, [&](World& world) {
          const TensorParallelOptions options{.sequence_parallel = by_tokens, .overlap = overlap};
          const std::vector<std::int64_t> lengths = {301, 83, 128};
          const Batch batch = make_batch(lengths, 1001, 1);
          const auto alive_after = [&](std::int64_t layers) {
            const DecoderConfig config = large(heads, key_heads, layers);
            const Mesh mesh(world, with_key_head_view(Grid({{"tp", world.size}}), config));
            auto model = whole_model(config, type);
            cut_decoder(*model, mesh, options);
            MemoryMeter meter;
            const at::Tensor hidden = model->hidden(batch);
            return meter.alive();
          };
          const auto measured = static_cast<double>(alive_after(3) - alive_after(1)) / 2;
          const DecoderConfig config = large(heads, key_heads, 1);
          const auto predicted = [&](const TensorParallelOptions& with, int ranks) {
            return static_cast<double>(activation_bytes(config, batch.num_tokens(), ranks,
                                                        with.sequence_parallel,
                                                        static_cast<std::int64_t>(c10::elementSize(type))));
          };
          if (world.rank == 0) {
            const std::string where = fmt::format("{} heads of {}, tp {}, sequence parallel {}, {}", heads,
                                                  key_heads, tp, by_tokens, c10::toString(type));
            EXPECT_NEAR(measured / predicted(options, tp), 1, 0.01) << where;
            // The comparison can fail: tokens cut or not, one rank fewer.
            const TensorParallelOptions other{.sequence_parallel = !by_tokens};
            EXPECT_GT(std::abs(measured / predicted(other, tp) - 1), 0.05) << where;
          }
        });
      }
}

// Bytes that all ranks along tp send for a micro-batch (docs/tensor-parallelism.md). An all-reduce and its
// dual, or a reduce-scatter and an all-gather each way, send 2 (ranks - 1) of the buffer in forward and
// backward: at the ends of the regions of the embedding, of two a block, and of the head. Three numbers a
// token make the loss.
std::int64_t tp_traffic_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                              std::int64_t bytes) {
  const std::int64_t ends = 2 * (2 * config.layers + 1);
  return ends * 2 * (ranks - 1) * tokens * config.hidden * bytes + ranks * (ranks - 1) * tokens * 24;
}

TEST(TensorParallelTraffic, IsTheFormulas) {
  int turn = 0;
  for (const int tp : {2, 3, 4, 5})
    for (const bool sequence_parallel : {true, false})
      for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
        const TensorOverlap overlap = kOverlaps[turn++ % (sequence_parallel ? 3 : 2)];
        run_ranks(tp, [&](World& world) {
          const Mesh mesh(world, Grid({{"tp", world.size}}));
          DecoderConfig config = shape(8, 2, false);
          config.hidden = 60;  // the ring's share (tp - 1) / tp of every buffer is whole bytes
          auto model = whole_model(config, type);
          cut_decoder(*model, mesh, {.sequence_parallel = sequence_parallel, .overlap = overlap});
          const std::int64_t before = tensor_group(mesh).traffic().bytes();
          std::int64_t tokens = 0;
          for (const Batch& batch : step_of(0, 1, config.vocabulary)) {
            if (batch.targets.ne(kIgnoreIndex).sum().item<std::int64_t>() == 0)
              continue;  // nothing to differentiate
            tokens += batch.num_tokens();
            cross_entropy_sum(model->logits(batch), batch.targets, {.shard = model->vocabulary()}).backward();
          }
          at::Tensor sent = at::full({1}, tensor_group(mesh).traffic().bytes() - before, at::kLong);
          world.group.all_reduce(sent);
          EXPECT_EQ(sent.item<std::int64_t>(),
                    tp_traffic_bytes(config, tokens, tp, static_cast<std::int64_t>(c10::elementSize(type))))
              << tp << " ranks, sequence parallel " << sequence_parallel << ", overlap "
              << static_cast<int>(overlap) << ", " << c10::toString(type);
        });
      }
}

enum class Tokens { kUneven, kNoneOnTheFirst, kAllToFew };

// A micro-batch of this rank's own.
Batch batch_of(int rank, Tokens tokens, std::int64_t vocabulary) {
  if (rank == 0 && tokens == Tokens::kNoneOnTheFirst) return make_batch({}, vocabulary, 1);
  return make_batch({std::int64_t{5} + 4 * rank, 3}, vocabulary, static_cast<std::uint64_t>(rank) + 1);
}

// Formula and count of every rank, with choices written down by plain code.
TEST(ExpertParallelTraffic, IsTheFormulas) {
  for (const int ep : {2, 3, 4})
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
      for (const Tokens tokens : {Tokens::kUneven, Tokens::kNoneOnTheFirst, Tokens::kAllToFew}) {
        const DecoderConfig config = tensor::shape_with_experts(5);
        ExpertTrafficPlan plan{
            .choices = std::vector(static_cast<std::size_t>(ep), std::vector<std::int64_t>(5, 0)),
            .hidden = config.hidden,
            .bytes = static_cast<std::int64_t>(c10::elementSize(type)),
            .exchanges = config.layers};
        std::vector<std::int64_t> sent(static_cast<std::size_t>(ep));
        run_ranks(ep, [&](World& world) {
          const auto rank = static_cast<std::size_t>(world.rank);
          const Mesh mesh(world,
                          Grid({{"dp_shard", ep}}).viewed({"dp_shard"}, {{"edp", 1}, {kExpertAxis, ep}}));
          const auto model = whole_model(config, type);
          shard_experts(*model, mesh);
          model->set_choice_of_experts([&](const Batch&, std::int64_t, const ExpertScores&,
                                           const at::Tensor& likeliest) {
            const at::Tensor chosen =
                tokens == Tokens::kAllToFew ? at::tensor({4, 1}, at::kLong).expand_as(likeliest) : likeliest;
            for (std::int64_t t = 0; t < chosen.size(0); ++t)
              for (std::int64_t j = 0; j < 2; ++j)
                ++plan.choices[rank][static_cast<std::size_t>(chosen[t][j].item<std::int64_t>())];
            return chosen.contiguous();
          });
          Group experts = mesh.along({kExpertAxis}, kExpertGroup);
          const std::int64_t before = experts.traffic().bytes();
          const Batch batch = batch_of(world.rank, tokens, config.vocabulary);
          model->hidden(batch).to(at::kDouble).square().sum().backward();
          sent[rank] = experts.traffic().bytes() - before;
        });
        for (int rank = 0; rank < ep; ++rank)
          EXPECT_EQ(sent[static_cast<std::size_t>(rank)], expert_traffic_bytes(plan, rank))
              << ep << " ranks, " << c10::toString(type) << ", rank " << rank;
        // Each of two ranks sends what the other gets back; more ranks differ.
        EXPECT_EQ(sent[0] == sent[1], ep == 2) << ep << " ranks";
      }
}

// By hand.
TEST(ExpertParallelTraffic, FormulaOfAFewChoices) {
  ExpertTrafficPlan plan{.choices = {{3, 1, 4}, {1, 5, 9}}, .hidden = 7, .bytes = 4, .exchanges = 2};
  // Experts 0 and 1 are rank 0's: 4 + 6 rows to and from each of the two, twice 28 bytes; 2 · 3 counts.
  EXPECT_EQ(expert_traffic_bytes(plan, 0), 2 * 10 * 28 + 2 * 3 * 8);
  EXPECT_EQ(expert_traffic_bytes(plan, 1), 2 * 10 * 28 + 2 * 3 * 8);
  plan.forwards = 3;
  EXPECT_EQ(expert_traffic_bytes(plan, 0), 4 * 10 * 28 + 3 * 2 * 3 * 8);
  plan.choices = {{3, 1, 4}, {1, 5, 9}, {2, 6, 5}};  // an expert each
  plan.forwards = 1;
  EXPECT_EQ(expert_traffic_bytes(plan, 2), 2 * (4 + 9 + 2 + 6) * 28 + 2 * 2 * 3 * 8);
}

struct Kept {
  std::string schedule;
  int pp, stages_of_rank, micro_batches;
};

// Rank by rank: bytes after the first forward of a step, and the most after any, beyond what was there
// before.
struct Bytes {
  std::int64_t of_one = 0, most = 0;
};

// Two layers a stage, so that embedding and output hardly count.
DecoderConfig shape_of(int stages) {
  DecoderConfig config = shape(4, 2, false);
  config.hidden = 96, config.head_dim = 24, config.feed_forward = 257, config.vocabulary = 7;
  config.layers = 2 * stages;
  return config;
}

// The memory that one micro-batch of one process keeps between the halves of its backward, as a part of what
// its forward kept.
double measure_between_halves() {
  const DecoderConfig config = shape_of(1);
  const auto model = whole_model(config, at::kFloat);
  const Batch batch = make_batch({171, 85}, config.vocabulary, 1);
  MemoryMeter meter;
  const std::int64_t before = meter.alive();
  at::Tensor loss = model->outputs(batch).hidden.square().sum();
  const auto whole = static_cast<double>(meter.alive() - before);
  WeightsBackward left = backward_of_inputs(std::exchange(loss, {}));
  const auto halved = static_cast<double>(meter.alive() - before);
  left.run();
  return halved / whole;
}

std::vector<Bytes> measure(const Kept& kept) {
  std::vector<Bytes> found(static_cast<std::size_t>(kept.pp));
  run_ranks(kept.pp, [&](World& world) {
    const Mesh mesh(world, Grid({{kStageAxis, kept.pp}}));
    const DecoderConfig config = shape_of(kept.pp * kept.stages_of_rank);
    const auto model = whole_model(config, at::kFloat);
    const auto pipeline = std::make_shared<Pipeline>(
        mesh, PipelineOptions{.schedule = kept.schedule, .stages_of_rank = kept.stages_of_rank});
    split_decoder(*model, mesh, pipeline);
    const Batch batch = make_batch({171, 85}, config.vocabulary, 1);
    MemoryMeter meter;
    Bytes& own = found[static_cast<std::size_t>(world.rank)];
    // Twice: parameters' gradients and the memory of messages are there in the second step.
    for (int step = 0; step < 2; ++step) {
      std::map<std::pair<std::size_t, std::size_t>, at::Tensor> roots;
      std::map<std::pair<std::size_t, std::size_t>, WeightsBackward> weights;
      const std::int64_t before = meter.alive();
      own = {};
      pipeline->run(static_cast<std::size_t>(kept.micro_batches),
                    {.forward =
                         [&](std::size_t i, std::size_t part) {
                           const DecoderOutputs outputs = model->outputs(batch);
                           roots[{i, part}] = outputs.passed_on.defined() ? outputs.passed_on
                                                                          : outputs.hidden.square().sum();
                           own.most = std::max(own.most, meter.alive() - before);
                           if (own.of_one == 0) own.of_one = own.most;
                         },
                     .backward =
                         [&](std::size_t i, bool, std::size_t part) {
                           roots.at({i, part}).backward();
                           roots.erase({i, part});
                         },
                     .inputs =
                         [&](std::size_t i, std::size_t part) {
                           weights[{i, part}] = backward_of_inputs(roots.at({i, part}));
                           roots.erase({i, part});
                           own.most = std::max(own.most, meter.alive() - before);
                         },
                     .weights =
                         [&](std::size_t i, bool, std::size_t part) {
                           weights.at({i, part}).run();
                           weights.erase({i, part});
                         }});
      EXPECT_LE(meter.alive() - before, step == 0 ? INT64_MAX : own.of_one / 100) << "let go";
    }
  });
  return found;
}

TEST(PipelineMemory, ActivationsAreTheTables) {
  MemoryMeter::install();
  const double between_halves = measure_between_halves();
  EXPECT_GT(between_halves, 0.5) << "inputs of products, and the gradients of their outputs";
  EXPECT_LT(between_halves, 1) << "what is computed of activations alone is let go";
  for (const Kept& kept : {Kept{"one-after-another", 3, 1, 4},
                           {"gpipe", 3, 1, 5},
                           {"1f1b", 2, 1, 8},
                           {"1f1b", 4, 1, 9},
                           {"interleaved", 2, 2, 4},
                           {"interleaved", 3, 2, 6},
                           {"zb-h1", 2, 1, 8},
                           {"zb-h1", 4, 1, 9},
                           {"zb-v", 2, 2, 6}}) {
    const PipelineTable table =
        make_pipeline(kept.schedule, kept.pp, kept.stages_of_rank, kept.micro_batches);
    const PipelineTimeline timeline = simulate(table, uniform_times(table.stages), between_halves);
    const std::vector<Bytes> found = measure(kept);
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      const double live = static_cast<double>(found[rank].most) / static_cast<double>(found[rank].of_one);
      const double said = timeline.most_kept[rank];
      const std::string where = fmt::format("{}, {} ranks of {} stages, rank {}", kept.schedule, kept.pp,
                                            kept.stages_of_rank, rank);
      EXPECT_NEAR(live / said, 1, 0.1) << where;
      EXPECT_GT(std::abs(live / (said + 1) - 1), 0.1) << where << ": one micro-batch more would be seen";
    }
  }
}

}  // namespace
}  // namespace isograd
