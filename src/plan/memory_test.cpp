// Bytes that are predicted, against those that LibTorch's allocator hands out to real blocks, the elements of
// laid-out models, and the known answers of the fit of published rows.
#include "plan/memory.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>

#include "full_tests.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/tensor_parallel.hpp"
#include "layout/cost/meter.hpp"
#include "model/decoder_testing.hpp"
#include "model/kept_tensors.hpp"
#include "plan/layouts_testing.hpp"
#include "train/prepared_run.hpp"
#include "train/rank_layout.hpp"

namespace isograd {
namespace {

// Sizes that no product of others equals, so that a tensor left out is seen.
DecoderConfig shape_of(const std::string& family, std::int64_t layers) {
  DecoderConfig config;
  config.family = family, config.layers = layers, config.max_positions = 1024;
  config.vocabulary = 61, config.hidden = 42, config.heads = 6, config.key_value_heads = 3;
  config.head_dim = 10, config.feed_forward = 57;
  config.attention_bias = family.starts_with("qwen2");
  config.query_key_norm = family.starts_with("qwen3") || family == "dots1";
  if (config.dense_family() == family) return config;
  config.experts = {.count = 5, .per_token = 2, .feed_forward = 23, .normalise = family != "qwen2_moe"};
  if (family == "mixtral") config.experts.feed_forward = config.feed_forward;
  if (family == "qwen2_moe") config.experts.shared_feed_forward = 31;
  if (family == "dots1") config.experts.shared_feed_forward = 2 * config.experts.feed_forward;
  config.experts.sigmoid = family == "dots1";
  if (family == "dots1") config.experts.scale = 2.5;
  return config;
}

// Every expert gets as many tokens.
void spread_evenly(DecoderLM& model) {
  model.set_choice_of_experts(
      [](const Batch&, std::int64_t, const ExpertScores& scores, const at::Tensor& best) {
        const std::int64_t each = best.size(1), experts = scores.values.size(1);
        return at::arange(best.numel()).remainder(experts).view({-1, each});
      });
}

using Prepare = std::function<Batch(DecoderLM& model)>;

// Bytes that a block keeps: those of three layers less those of one, halved. What the router says is let go,
// as a step does it; experts' sizes are those of all tokens.
std::int64_t measured(const DecoderConfig& like, at::ScalarType type, const Prepare& prepare) {
  std::int64_t kept[2];
  for (const int more : {0, 1}) {
    DecoderConfig config = like;
    config.layers = 1 + 2 * more;
    DecoderLM model(config, type, 3);
    const Batch batch = prepare(model);
    model.hidden(batch);  // tables of the rotary embedding
    const MemoryMeter meter;
    const at::Tensor hidden = model.outputs(batch).hidden;
    kept[more] = meter.alive();
  }
  EXPECT_EQ((kept[1] - kept[0]) % 2, 0);
  return (kept[1] - kept[0]) / 2;
}

std::int64_t bytes_of(at::ScalarType type) { return static_cast<std::int64_t>(c10::elementSize(type)); }

// Equal to the byte, and not without any one of the tensors.
void expect_listed(const DecoderConfig& config, const KeptShape& shape, std::int64_t found,
                   const std::string& where) {
  const std::vector<KeptTensor> listed = kept_by_block(config, 0, shape);
  EXPECT_EQ(found, total(listed)) << where;
  for (const KeptTensor& tensor : listed) {
    EXPECT_GT(tensor.bytes, 0) << where << ": " << tensor.name;
    EXPECT_NE(found, total(listed) - tensor.bytes) << where << ": " << tensor.name << " would not be missed";
  }
}

TEST(KeptTensors, AreWhatABlockKeeps) {
  MemoryMeter::install();
  int turn = 0;
  for (const char* family :
       {"llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "dots1"})
    for (const bool biased : {false, true}) {
      for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
        DecoderConfig config = shape_of(family, 1);
        if (config.family != "llama" && (biased || turn++ % 2 == 1)) continue;  // two types or one
        if (biased) config.attention_bias = config.output_bias = config.mlp_bias = config.tied_output = true;
        std::int64_t found = 0;
        run_ranks(1, [&](World&) {  // on one thread
          found = measured(config, type, [&](DecoderLM& model) {
            if (config.experts.count > 0) spread_evenly(model);
            return make_batch({101, 23}, config.vocabulary, 1);
          });
        });
        expect_listed(config, {.tokens = 124, .element = bytes_of(type)}, found,
                      fmt::format("{} {} {}", family, c10::toString(type), biased));
      }
    }
}

// The first of the ranks along tp is the fullest; 124 tokens and 6 heads over 2, 3 and 4 ranks.
TEST(KeptTensors, AreWhatABlockKeepsAlongTp) {
  MemoryMeter::install();
  int turn = 0;
  for (const char* family : {"llama", "qwen3", "qwen2_moe", "qwen3_moe"})
    for (const int tp : {2, 3, 4, 6})
      for (const bool sequence_parallel : {true, false}) {
        const at::ScalarType type = std::array{at::kFloat, at::kBFloat16, at::kDouble}[turn++ % 3];
        const DecoderConfig config = shape_of(family, 1);
        std::int64_t found = 0;
        run_ranks(tp, [&](World& world) {
          const std::int64_t own = measured(config, type, [&](DecoderLM& model) {
            cut_decoder(model, Mesh(world, with_key_head_view(Grid({{"tp", tp}}), config)),
                        {.sequence_parallel = sequence_parallel});
            if (config.experts.count > 0) spread_evenly(model);
            return make_batch({101, 23}, config.vocabulary, 1);
          });
          if (world.rank == 0) found = own;
        });
        expect_listed(
            config,
            {.tokens = 124, .element = bytes_of(type), .tp = tp, .sequence_parallel = sequence_parallel},
            found,
            fmt::format("{} tp {} sequence parallel {} {}", family, tp, sequence_parallel,
                        c10::toString(type)));
      }
}

TEST(KeptTensors, AreWhatABlockKeepsAlongCpAndEp) {
  MemoryMeter::install();
  int turn = 0;
  for (const auto& [ring, ulysses, key_value_heads] :
       {std::tuple{2, 1, 3}, {1, 2, 2}, {1, 3, 3}, {1, 6, 3}, {2, 2, 2}, {2, 3, 3}}) {
    const at::ScalarType type = std::array{at::kFloat, at::kBFloat16, at::kDouble}[turn++ % 3];
    DecoderConfig config = shape_of("qwen3", 1);
    config.key_value_heads = key_value_heads;
    const std::int64_t each = 24;
    run_ranks(ring * ulysses, [&](World& world) {
      const std::int64_t found = measured(config, type, [&](DecoderLM& model) {
        model.set_attention(
            ContextAttention(Mesh(world, data_grid(world.size, {.cp_ring = ring, .cp_ulysses = ulysses}))));
        Batch whole = make_batch({each * world.size}, config.vocabulary, 1);
        whole.targets = whole.tokens;
        const ContextCut cut =
            cut_documents(whole.cu_seqlens, {.ring = ring, .ulysses = ulysses, .level = false});
        return cut_batch(whole, cut, world.rank);
      });
      const KeptShape shape{
          .tokens = each, .element = bytes_of(type), .cp_ulysses = ulysses, .context_parallel = true};
      EXPECT_EQ(found, total(kept_by_block(config, 0, shape))) << ring << " x " << ulysses;
      if (ulysses > 1) {  // the comparison can fail
        KeptShape without = shape;
        without.cp_ulysses = 1;
        EXPECT_NE(found, total(kept_by_block(config, 0, without)));
      }
    });
  }
  for (const int ep : {2, 3}) {
    DecoderConfig config = shape_of("dots1", 1);
    config.experts.count = 6;
    run_ranks(ep, [&](World& world) {
      const std::int64_t found = measured(config, at::kFloat, [&](DecoderLM& model) {
        shard_experts(
            model,
            Mesh(world, Grid({{"dp_shard", ep}}).viewed({"dp_shard"}, {{"edp", 1}, {kExpertAxis, ep}})));
        spread_evenly(model);
        return make_batch({103, 23}, config.vocabulary, 1);
      });
      expect_listed(config, {.tokens = 126, .element = 4, .ep = ep}, found, fmt::format("ep {}", ep));
    });
  }
}

}  // namespace

namespace planner {
namespace {

// All that a problem refers to.
struct Planning {
  explicit Planning(const DecoderConfig& config) : model(shape_of(config, "tested")) {}
  ModelShape model;
  Cluster cluster{.host_memory = true};
  Calibration calibration{};
  Work work{.tokens = 64 * 48, .sequence = 48, .precision = Precision::kFloat32};
  Program program = Program::kIsograd;
  Constants constants{};
  Problem problem() const {
    return {.model = model,
            .cluster = cluster,
            .calibration = calibration,
            .work = work,
            .constants = constants,
            .program = program};
  }
};

// Elements that a rank of each place of the pipeline has, keeps and shares, as `isograd layout` says it.
TEST(Stages, ElementsAndKeptBytesAreThoseOfLayOut) {
  const std::vector<Candidate> candidates = {
      {.ranks = 1},
      {.ranks = 4, .shards = 4, .strategy = Strategy::kZero1},
      {.ranks = 8, .replicas = 2, .shards = 2, .tp = 2, .strategy = Strategy::kZero2},
      {.ranks = 6, .shards = 2, .tp = 3, .strategy = Strategy::kZero3},
      {.ranks = 4, .tp = 4},
      {.ranks = 6, .tp = 6},
      {.ranks = 6, .cp_ring = 2, .cp_ulysses = 3, .strategy = Strategy::kZero1},
      {.ranks = 2, .pp = 2, .schedule = Schedule::kOneFOneB},
      {.ranks = 6, .tp = 2, .pp = 3, .schedule = Schedule::kGPipe},
      {.ranks = 4,
       .shards = 2,
       .pp = 2,
       .stages_per_rank = 2,
       .strategy = Strategy::kZero2,
       .schedule = Schedule::kInterleaved},
      {.ranks = 2, .pp = 2, .stages_per_rank = 2, .schedule = Schedule::kZeroBubbleV},
      {.ranks = 2, .shards = 2, .ep = 2, .strategy = Strategy::kZero1},
      {.ranks = 8, .shards = 4, .tp = 2, .ep = 2, .strategy = Strategy::kZero3},
      {.ranks = 16,
       .shards = 4,
       .tp = 2,
       .ep = 4,
       .pp = 2,
       .strategy = Strategy::kBucketed,
       .schedule = Schedule::kOneFOneB}};
  for (const char* family :
       {"llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "dots1"})
    for (const bool tied : {false, true}) {
      DecoderConfig shape = isograd::shape_of(family, 5);
      shape.tied_output = tied;
      if (shape.experts.count > 0 && shape.family != "mixtral") shape.experts.dense_layers = {0};
      if (shape.family == "llama" && tied) shape.attention_bias = shape.output_bias = shape.mlp_bias = true;
      Planning setup(shape);
      if (tied) setup.work.precision = Precision::kBFloat16;
      for (const Candidate& candidate : candidates) {
        if (candidate.ep > 1 && shape.experts.count == 0) continue;
        const Problem problem = setup.problem();
        const auto stages =
            stage_shapes(problem, candidate.tp, candidate.ep, candidate.pp * candidate.stages_per_rank);
        RunConfig config;
        config.model.shape = shape;
        set_layout(config, setup.cluster, setup.work, candidate);
        Candidate with = candidate;
        with.micro_batches = setup.work.samples() / candidate.data_ranks();
        double padded = 0;
        for (int rank = 0; rank < candidate.pp; ++rank) {
          const RunLayout laid = lay_out(config, candidate.ranks, candidate.ranks / candidate.pp * rank, 1);
          padded = std::max(padded, static_cast<double>(laid.layout.total.total()));
          EXPECT_EQ(with.micro_batches, laid.plan.micro_batches);
          const DataParallelPlan plan = data_parallel_plan(problem, with, stages, rank);
          const std::string where =
              fmt::format("{} tied {} tp {} ep {} pp {} x {} rank {}", family, tied, candidate.tp,
                          candidate.ep, candidate.pp, candidate.stages_per_rank, rank);
          ASSERT_EQ(plan.elements.size(), laid.plan.elements.size()) << where;
          for (std::size_t i = 0; i < plan.elements.size(); ++i) {
            EXPECT_EQ(plan.elements[i].numel, laid.plan.elements[i].numel) << where;
            EXPECT_EQ(plan.elements[i].shards, laid.plan.elements[i].shards) << where;
            EXPECT_EQ(plan.elements[i].replicas, laid.plan.elements[i].replicas) << where;
          }
          EXPECT_EQ(persistent_bytes(plan).total(), persistent_bytes(laid.plan).total()) << where;
          DataParallelPlan none = plan;  // the comparison can fail
          none.elements[0].numel -= shape.hidden;
          EXPECT_NE(persistent_bytes(none).total(), persistent_bytes(laid.plan).total()) << where;
        }
        Pipelines pipelines;
        MemoryModel memory(problem, pipelines);
        EXPECT_GE(padded, memory.of(with).kept());
      }
    }
}

// Rows of shared/data/published_runs.csv through the program that fitted the constants (numpy, 1.089 times
// 20 and 8, 0.293 GiB), to its six digits.
TEST(PublishedMemory, IsTheFittedFormula) {
  struct Row {
    std::int64_t layers, hidden, feed_forward;
    bool tied;
    int dp, tp, pp;
    std::int64_t micro_batch, micro_batches;
    bool zero1;
    double gib;
  };
  const std::vector<Row> rows = {{16, 2048, 8192, false, 4, 1, 2, 2, 32, true, 29.384295},
                                 {16, 2048, 8192, true, 1, 8, 1, 16, 16, false, 34.344778},
                                 {16, 2048, 8192, true, 2, 4, 1, 1, 128, false, 9.909133},
                                 {32, 4096, 14336, false, 2, 2, 8, 2, 64, true, 46.026455},
                                 {32, 4096, 14336, false, 2, 2, 8, 1, 128, false, 33.773256},
                                 {16, 2048, 8192, false, 1, 16, 4, 32, 8, false, 20.462024},
                                 {16, 2048, 8192, false, 1, 1, 8, 1, 128, true, 20.545791},
                                 {80, 8192, 28672, false, 1, 32, 1, 1, 256, false, 60.854607},
                                 {80, 8192, 28672, false, 1, 4, 16, 1, 256, false, 72.501708},
                                 {16, 2048, 8192, true, 1, 32, 1, 128, 2, false, 48.927538}};
  constexpr double kGiB = 1 << 30;
  for (const Row& row : rows) {
    DecoderConfig config;
    config.layers = row.layers, config.hidden = row.hidden, config.feed_forward = row.feed_forward;
    config.vocabulary = 131072, config.tied_output = row.tied;
    Planning setup(config);
    setup.program = Program::kNanotron;
    setup.constants.by_hidden = 1.089 * 20, setup.constants.by_feed_forward = 1.089 * 8;
    setup.cluster = {.device = {.memory = 80 * kGiB}, .reserve = 0.293 * kGiB};
    setup.work.sequence = 4096;
    const Problem problem = setup.problem();
    Pipelines pipelines;
    MemoryModel memory(problem, pipelines);
    const Candidate candidate{.ranks = row.dp * row.tp * row.pp,
                              .shards = row.dp,
                              .tp = row.tp,
                              .pp = row.pp,
                              .strategy = row.zero1 ? Strategy::kZero1 : Strategy::kBucketed,
                              .schedule = row.pp > 1 ? Schedule::kOneFOneB : Schedule::kNone,
                              .micro_batch = row.micro_batch,
                              .micro_batches = row.micro_batches};
    EXPECT_NEAR(memory.of(candidate).total() / kGiB, row.gib, 1e-6) << row.layers << " layers, tp " << row.tp;
  }
}

at::Tensor forward(DecoderLM& model, const Batch& batch) {
  return cross_entropy_sum(model.logits(batch), batch.targets, {.shard = model.vocabulary()});
}

// The most that a step of one rank holds, the model, its gradients and AdamW's states included.
double measured_peak(World& world, const DecoderConfig& config, at::ScalarType type, const Batch& batch) {
  MemoryMeter meter;
  const auto model = std::make_shared<DecoderLM>(config, type, 3);
  const auto layout = bucketed(trainable_parameters(*model), Mesh(world, data_grid(1, {})), {});
  const auto optimizer = adamw({});
  for (int step = 0; step < 2; ++step) {
    meter.restart_peak();
    layout->zero_gradients();
    layout->begin_backward(true);
    const at::Tensor loss = forward(*model, batch);
    loss.backward();
    layout->finish_reduction();
    optimizer->update(layout->buckets(), 1);
    layout->publish_parameters();
  }
  return static_cast<double>(meter.peak());
}

TEST(Memory, IsWithinFivePerCentOfTheMeter) {
  MemoryMeter::install();
  for (const char* family : {"llama", "qwen3", "qwen2_moe", "dots1"})
    for (const auto type : {at::kFloat, at::kBFloat16})
      for (const std::int64_t tokens : {256, 768}) {
        DecoderConfig config = isograd::shape_of(family, 3);
        config.hidden = 96, config.head_dim = 16, config.feed_forward = 256, config.vocabulary = 700;
        if (config.experts.count > 0)
          config.experts.feed_forward = 64, config.experts.shared_feed_forward = 128;
        Batch batch = make_batch({tokens}, config.vocabulary, 1);
        batch.targets = batch.tokens;
        Planning setup(config);
        setup.work = {.tokens = static_cast<double>(tokens),
                      .sequence = tokens,
                      .precision = type == at::kFloat ? Precision::kFloat32 : Precision::kBFloat16};
        const Problem problem = setup.problem();
        Pipelines pipelines;
        MemoryModel memory(problem, pipelines);
        const MemoryParts parts = memory.of(Candidate{});
        double found = 0;
        run_ranks(1, [&](World& world) { found = measured_peak(world, config, type, batch); });
        const std::string where = fmt::format(
            "{} {} {} tokens: {:.0f} measured; {:.0f} kept, {:.0f} activations, {:.0f} logits, {:.0f} passing",
            family, c10::toString(type), tokens, found, parts.kept(), parts.activations, parts.logits,
            parts.passing);
        EXPECT_NEAR(parts.total() / found, 1, 0.05) << where;
        EXPECT_GT(std::abs((parts.total() - parts.activations) / found - 1), 0.05)
            << where << ": without activations";
        EXPECT_LE(memory.least(Candidate{}), parts.total());
      }
}

// Layouts of 2 and 4 ranks. In the middle of a step a pipeline's rank holds what micro-batches in flight
// keep, some of them between the halves of a backward, and the gradients that are on their way.
MeasuredLayouts measured_layouts(bool experts) {
  using enum Strategy;
  MeasuredLayouts layouts(8, 8, experts);
  for (const Strategy strategy : {kZero1, kZero2, kZero3})
    layouts.add(fmt::format("{}, 4 ranks", name_of(strategy)), {.shards = 4, .strategy = strategy}, 1);
  layouts.add("zero2, hybrid", {.replicas = 2, .shards = 2, .strategy = kZero2}, 2);
  layouts.add("tp, zero1", {.shards = 2, .tp = 2, .strategy = kZero1}, 2);
  layouts.add("1f1b, tp", {.tp = 2, .pp = 2, .schedule = Schedule::kOneFOneB}, 8);
  return layouts;
}

TEST(Memory, OfLayoutsIsWithinFivePerCentOfTheMeter) {
  MemoryMeter::install();
  const std::filesystem::path folder = folder_with_text("memory", 1 << 16);
  const std::array families{"llama", "qwen3", "qwen2_moe", "mixtral"};
  for (std::size_t f = 0; f < families.size(); ++f) {
    const std::string family = families[f];
    DecoderConfig shape = isograd::shape_of(family, 8);
    shape.heads = 4, shape.key_value_heads = 2;
    shape.hidden = 96, shape.head_dim = 16, shape.feed_forward = 256, shape.vocabulary = 258;
    if (shape.experts.count > 0) {
      shape.experts.count = 4, shape.experts.feed_forward = family == "mixtral" ? 256 : 64;
      if (shape.experts.shared_feed_forward > 0) shape.experts.shared_feed_forward = 128;
    }
    const MeasuredLayouts layouts = measured_layouts(shape.experts.count > 0);
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      if (!full_tests() && (i + f) % families.size() != 0)
        continue;  // else each layout for one of the models
      const auto& [name, candidate] = layouts[i];
      Planning setup(shape);
      setup.work = {.tokens = 8 * 512, .sequence = 512, .precision = Precision::kFloat32};
      const RunConfig config = measured_config(shape, setup.cluster, setup.work, candidate, folder);
      std::vector<double> found(static_cast<std::size_t>(candidate.ranks));
      run_ranks(candidate.ranks, [&](World& world) {
        MemoryMeter meter;
        PreparedRun run(config, world);
        run.step();
        meter.restart_peak();
        run.step();
        found[static_cast<std::size_t>(world.rank)] = static_cast<double>(meter.peak() + meter.shared());
      });
      const Problem problem = setup.problem();
      Pipelines pipelines;
      MemoryModel memory(problem, pipelines);
      for (std::size_t rank = 0; rank < found.size(); ++rank) {
        const MemoryParts parts =
            memory.of_rank(candidate, static_cast<int>(rank) / (candidate.ranks / candidate.pp));
        const std::string where = fmt::format(
            "{}, {}, rank {}: {:.0f} measured, {:.0f} predicted; {:.0f} kept, {:.0f} activations, {:.0f} "
            "logits, {:.0f} gathered, {:.0f} buffers, {:.0f} passing",
            family, name, rank, found[rank], parts.total(), parts.kept(), parts.activations, parts.logits,
            parts.gathered, parts.buffers, parts.passing);
        if (full_tests()) std::printf("%+5.1f %s\n", 100 * (parts.total() / found[rank] - 1), where.c_str());
        EXPECT_NEAR(parts.total() / found[rank], 1, 0.05) << where;
        EXPECT_GT(std::abs((parts.total() - parts.activations) / found[rank] - 1), 0.05)
            << where << ": without activations";
      }
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace planner
}  // namespace isograd
