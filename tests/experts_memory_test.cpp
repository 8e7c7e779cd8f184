// What a rank keeps of a model whose experts are dealt to ranks, against the formulas, on ranks as threads:
// of its experts, and of everything.
#include "experts_step.hpp"

#include "layout/cost/meter.hpp"
#include "memory_bytes.hpp"
#include "train/memory.hpp"

namespace isograd {
namespace {

// Large enough that padding and what an allocation takes by itself do not count.
DecoderConfig large() {
  DecoderConfig config = experts::Cell{}.config();
  config.vocabulary = 257, config.hidden = 64, config.head_dim = 16;
  config.experts.count = 5, config.experts.feed_forward = 193;
  return config;
}

// By hand: elements of rank 0's experts, of which it has most, and of the rest.
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

// Of buckets of experts alone.
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

TEST(ExpertParallelMemory, ParametersGradientsAndStatesAreTheFormulas) {
  MemoryMeter::install();
  const DecoderConfig config = large();
  for (const auto& [strategy, stage] : {std::pair{"bucketed", 0}, {"zero1", 1}, {"zero2", 2}, {"zero3", 3}})
    for (const auto type : {at::kFloat, at::kBFloat16})
      for (const auto& [ep, copies] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}, {5, 1}})
        run_ranks(ep * copies, [&](World& world) {
          MemoryMeter meter;
          RunConfig run;
          run.model.shape = config;
          run.parallel.ep = ep;
          run.parallel.strategy = strategy;
          run.parallel.share_parameters = "off";
          run.parallel.bucket_bytes = 1 << 18;
          run.parallel.first_bucket_bytes = 1 << 16;
          run.train.dtype = type == at::kFloat ? "float32" : "bfloat16";
          const Mesh mesh(world, grid_of(run, world.size));
          mesh.along({"dp_shard"}), mesh.along({"edp"}), mesh.along({kExpertAxis}, kExpertGroup);
          const std::int64_t start = meter.alive() + meter.shared();
          auto model = tensor::whole_model(config, type);
          const Layout placed = deal_experts(*model, mesh);
          const ModelUnits units = model_units(*model, run);
          const auto layout = make_layout(run, model->named(), units, mesh, &placed);
          const auto optimizer = adamw({});
          layout->zero_gradients();
          layout->begin_backward(true);
          const ForwardLossTerms forward = inside(units.root, [&](const Batch& batch) -> LossTerms {
            return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets)}};
          });
          forward(tensor::step_of(world.rank, world.size, config.vocabulary)[0])[0].sum.backward();
          layout->finish_reduction();
          optimizer->update(layout->buckets(), 1);
          layout->publish_parameters();
          if (mesh.place({kExpertAxis}) != 0) return;
          const DataParallelPlan all{
              .elements = {{.numel = other_elements(config), .shards = world.size},
                           {.numel = expert_elements(config, ep), .shards = copies}},
              .bytes = element_bytes(type, 2),
              .stage = stage};
          DataParallelPlan experts = all;
          experts.elements.erase(experts.elements.begin());
          const OptimizerState state = optimizer->state(layout->buckets());
          const std::string where =
              fmt::format("{}, ep {}, copies {}, {}", strategy, ep, copies, c10::toString(type));
          const auto expect_near = [&](const PersistentBytes& kept, const PersistentBytes& formula,
                                       const char* of) {
            EXPECT_LE(off(kept.parameters, formula.parameters), 0.03) << where << of;
            EXPECT_LE(off(kept.gradients, formula.gradients), 0.03) << where << of;
            EXPECT_LE(off(kept.state, formula.state), 0.03) << where << of;
            if (formula.master > 0) {
              EXPECT_LE(off(kept.master, formula.master), 0.03) << where << of;
            }
          };
          expect_near(measure_kept(layout->buckets(), state), persistent_bytes(all), ", all");
          const PersistentBytes of_experts = kept_of_experts(layout->buckets(), state);
          expect_near(of_experts, persistent_bytes(experts), ", experts");
          // By the allocator, with the two buffers of stage 2 for each kind of bucket; what stage 3
          // gathers into is memory_test's.
          if (stage < 2) {
            EXPECT_LE(off(meter.alive() + meter.shared() - start, persistent_bytes(all).total()), 0.03)
                << where;
          }
          // The comparison can fail: as if the experts of one rank fewer shared them out.
          DataParallelPlan other = experts;
          other.elements[0].numel = expert_elements(config, ep - 1);
          EXPECT_GT(off(of_experts.state, persistent_bytes(other).state), 0.03) << where;
        });
}

}  // namespace
}  // namespace isograd
