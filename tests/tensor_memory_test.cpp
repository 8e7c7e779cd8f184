// What a rank of tp keeps and what its forward keeps for backward, against the formulas, on ranks as threads.
#include "tensor_step.hpp"

#include "layout/cost/meter.hpp"
#include "memory_bytes.hpp"
#include "train/memory.hpp"

namespace isograd::tensor {
namespace {

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

TEST(TensorMemory, ParametersGradientsAndStatesAreTheFormulas) {
  MemoryMeter::install();
  for (const auto& [strategy, stage] : {std::pair{"bucketed", 0}, {"zero1", 1}, {"zero2", 2}, {"zero3", 3}})
    for (const auto type : {at::kFloat, at::kBFloat16})
      for (const auto& [tp, data] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}, {5, 1}}) {
        const DecoderConfig config = large(5, 1, 2);
        run_ranks(tp * data, [&](World& world) {
          MemoryMeter meter;
          RunConfig run;
          run.model.shape = config;
          run.parallel.tp = tp;
          run.parallel.strategy = strategy;
          run.parallel.share_parameters = "off";
          run.parallel.bucket_bytes = 1 << 18;
          run.parallel.first_bucket_bytes = 1 << 16;
          run.train.dtype = type == at::kFloat ? "float32" : "bfloat16";
          const Mesh mesh(world, grid_of(run, world.size));
          mesh.along({"dp_shard"}), mesh.along({"tp"}), tensor_group(mesh);
          const std::int64_t start = meter.alive() + meter.shared();
          auto model = whole_model(config, type);
          const Layout placed = cut_decoder(*model, mesh);
          const ModelUnits units = model_units(*model, run);
          const auto layout = make_layout(run, model->named(), units, mesh, &placed);
          const auto optimizer = adamw({});
          layout->zero_gradients();
          layout->begin_backward(true);
          const ForwardLossTerms forward = inside(units.root, [&](const Batch& batch) -> LossTerms {
            return {{"cross_entropy",
                     cross_entropy_sum(model->logits(batch), batch.targets, {.shard = model->vocabulary()})}};
          });
          forward(step_of(mesh.place(kSampleAxes), data, config.vocabulary)[0])[0].sum.backward();
          layout->finish_reduction();
          optimizer->update(layout->buckets(), 1);
          layout->publish_parameters();
          const DataParallelPlan plan{
              .elements = {{.numel = elements(config, tp), .shards = data}},
              .bytes = element_bytes(type, 2),
              .stage = stage};
          const PersistentBytes formula = persistent_bytes(plan);
          const PersistentBytes kept = measure_kept(layout->buckets(), optimizer->state(layout->buckets()));
          if (mesh.place({"tp"}) == 0) {
            const std::string where =
                fmt::format("{}, tp {}, data {}, {}", strategy, tp, data, c10::toString(type));
            EXPECT_LE(off(kept.parameters, formula.parameters), 0.03) << where;
            EXPECT_LE(off(kept.gradients, formula.gradients), 0.03) << where;
            EXPECT_LE(off(kept.state, formula.state), 0.03) << where;
            // By the allocator, with the two buffers of stage 2; what stage 3 gathers into is memory_test's.
            std::int64_t largest = 0;
            for (const Bucket& bucket : layout->buckets()) largest = std::max(largest, bucket.plan.numel);
            const std::int64_t turns = stage == 2 && data > 1 ? 2 * largest * plan.bytes.gradient : 0;
            if (stage < 3) {
              EXPECT_LE(off(meter.alive() + meter.shared() - start - turns, formula.total()), 0.03) << where;
            }
            // The comparison can fail: parts of one rank fewer.
            DataParallelPlan other = plan;
            other.elements[0].numel = elements(config, tp - 1);
            EXPECT_GT(off(kept.state, persistent_bytes(other).state), 0.03) << where;
          }
        });
      }
}

TEST(TensorMemory, ActivationsAreTheFormula) {
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
            auto model = whole_model(config, type);
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
}  // namespace isograd::tensor
