// A plan as JSON: docs/planning.md has the keys.
#include <nlohmann/json.hpp>

#include "plan/problem.hpp"
#include "plan/trial.hpp"

namespace isograd::planner {
namespace {

using PlanJson = nlohmann::ordered_json;
using Entry = std::pair<const char*, PlanJson>;

template <class... Entries>
PlanJson object(Entries&&... entries) {
  PlanJson json = PlanJson::object();
  (json.emplace(entries.first, std::move(entries.second)), ...);
  return json;
}

}  // namespace

#define FIELD(name) Entry(#name, one.name)
#define TEXT(name) Entry(#name, std::string(name_of(one.name)))
#define SUM(name) Entry(#name, one.name())

// Found by nlohmann for members of these types, so not in an unnamed namespace.
static void to_json(PlanJson& json, const Estimate& one) {
  json = object(FIELD(value), FIELD(low), FIELD(high), TEXT(origin));
}

static void to_json(PlanJson& json, const ModelShape& one) {
  json = object(FIELD(name), FIELD(family), FIELD(layers), FIELD(hidden), FIELD(heads), FIELD(key_heads),
                FIELD(head_dim), FIELD(feed_forward), FIELD(vocabulary), FIELD(gated), FIELD(tied_output),
                FIELD(attention_bias), FIELD(output_bias), FIELD(mlp_bias), FIELD(query_key_norm),
                Entry("experts", one.experts.count), Entry("experts_per_token", one.experts.per_token),
                Entry("expert_feed_forward", one.experts.feed_forward),
                Entry("shared_expert_feed_forward", one.experts.shared_feed_forward),
                Entry("dense_layers", one.experts.dense_layers), SUM(parameters), SUM(active_parameters));
}

static void to_json(PlanJson& json, const Link& one) {
  json = object(FIELD(name), FIELD(ranks), FIELD(latency), FIELD(bandwidth), TEXT(origin));
}

static PlanJson rates_json(const std::array<double, kPrecisions>& rates) {
  PlanJson all = PlanJson::object();
  for (std::size_t i = 0; i < kPrecisions; ++i)
    if (rates[i] > 0) all[kPrecisionNames[i]] = rates[i];
  return all;
}

static void to_json(PlanJson& json, const Device& one) {
  json = object(FIELD(name), FIELD(memory), FIELD(memory_bandwidth), Entry("peak", rates_json(one.peak)),
                Entry("best_found", rates_json(one.best_found)), FIELD(source));
}

static void to_json(PlanJson& json, const Cluster& one) {
  json = object(FIELD(name), FIELD(devices), FIELD(per_host), SUM(hosts), FIELD(host_memory), FIELD(reserve),
                FIELD(device), FIELD(links));
}

static void to_json(PlanJson& json, const Work& one) {
  json = object(FIELD(tokens), FIELD(sequence), SUM(samples), TEXT(precision), FIELD(fp32_gradients),
                FIELD(states), Entry("documents", one.documents.size()));
}

static void to_json(PlanJson& json, const Candidate& one) {
  json = object(FIELD(ranks), FIELD(replicas), FIELD(shards), FIELD(cp_ring), FIELD(cp_ulysses), FIELD(tp),
                FIELD(ep), FIELD(pp), FIELD(stages_per_rank), TEXT(strategy), TEXT(schedule),
                FIELD(sequence_parallel), FIELD(reduce_once), FIELD(share_parameters),
                Entry("checkpoint_activations", one.checkpoint), Entry("reshard_after_forward", one.reshard),
                FIELD(micro_batch), FIELD(micro_batches), FIELD(bucket_bytes));
}

static void to_json(PlanJson& json, const MemoryParts& one) {
  json = object(FIELD(parameters), FIELD(gradients), FIELD(masters), FIELD(states), SUM(kept),
                FIELD(activations), FIELD(logits), FIELD(gathered), FIELD(buffers), FIELD(passing),
                FIELD(reserve), SUM(total), FIELD(rank_of_pipeline));
}

static void to_json(PlanJson& json, const StepParts::Hidden& one) {
  json = object(FIELD(tp), FIELD(cp), FIELD(ep), FIELD(gather), FIELD(reduce));
}

static void to_json(PlanJson& json, const StepParts& one) {
  json = object(FIELD(products), FIELD(attention), FIELD(memory_bound), FIELD(overhead), FIELD(tp), FIELD(cp),
                FIELD(ep), FIELD(bubble), FIELD(gather), FIELD(reduce), FIELD(tail), FIELD(norm),
                FIELD(optimizer), FIELD(publish), FIELD(uneven), SUM(total), FIELD(hidden));
}

static void to_json(PlanJson& json, const Planned::Part& one) {
  json = object(FIELD(name), FIELD(formula), FIELD(number));
}

static void to_json(PlanJson& json, const Planned& one) {
  json = object(Entry("layout", to_text(one.candidate)), FIELD(candidate), FIELD(memory), FIELD(step),
                FIELD(seconds), FIELD(bytes), FIELD(tokens_per_second), FIELD(mfu), FIELD(head_room),
                FIELD(proved), FIELD(memory_parts), FIELD(step_parts));
}

static void to_json(PlanJson& json, const Neighbour& one) {
  json = object(FIELD(change), FIELD(reason),
                Entry("seconds", one.seconds ? PlanJson(*one.seconds) : PlanJson()));
}

static void to_json(PlanJson& json, const Law& one) {
  json = object(FIELD(name), FIELD(unit), FIELD(statement), FIELD(moved_by), FIELD(at), FIELD(now),
                FIELD(bites));
}

static void to_json(PlanJson& json, const RecipeStep& one) {
  json = object(FIELD(name), FIELD(formula), FIELD(result), FIELD(origin));
}

static void to_json(PlanJson& json, const WayOut& one) {
  json = object(FIELD(name), FIELD(tokens), FIELD(planned));
}

static void to_json(PlanJson& json, const ScalingPoint& one) {
  json = object(FIELD(devices), FIELD(best), FIELD(efficiency), FIELD(law));
}

static void to_json(PlanJson& json, const Tried& one) {
  json =
      object(Entry("layout", to_text(one.planned.candidate)), Entry("seconds", one.planned.seconds),
             Entry("bytes", one.planned.bytes),
             Entry("measured_seconds", one.run ? PlanJson(one.run->seconds_of_step) : PlanJson()),
             Entry("measured_bytes", one.run ? PlanJson(one.run->peak_bytes) : PlanJson()), FIELD(why_not));
}

static void to_json(PlanJson& json, const LargestMicroBatch& one) {
  json = object(FIELD(layout), FIELD(measured), FIELD(foretold), FIELD(ended_early),
                Entry("tried", PlanJson::array()));
  for (const auto& [size, fits] : one.tried)
    json["tried"].push_back(object(Entry("micro_batch", size), Entry("fits", fits)));
}

std::string to_json(const Plan& plan, const Trials* trials) {
  const Plan& one = plan;
  PlanJson json = object(
      FIELD(model), FIELD(cluster), FIELD(work), FIELD(candidates), FIELD(fitting), FIELD(top), FIELD(front),
      Entry("nearest", one.nearest ? PlanJson(*one.nearest) : PlanJson()), FIELD(missing), FIELD(neighbours),
      FIELD(laws), FIELD(recipe), FIELD(ways_out), FIELD(scaling), FIELD(warnings));
  if (trials) json["tried"] = trials->layouts, json["largest_micro_batch"] = trials->largest;
  return json.dump(2, ' ', false, PlanJson::error_handler_t::replace) + "\n";
}

std::string to_json(const Plan& plan) { return to_json(plan, nullptr); }

#undef FIELD
#undef TEXT
#undef SUM

}  // namespace isograd::planner
