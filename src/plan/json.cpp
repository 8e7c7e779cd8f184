// A plan as JSON: docs/planning_reference.md has the keys.
#include "base/json.hpp"
#include "plan/problem.hpp"
#include "plan/trial.hpp"

namespace isograd::planner {

using PlanJson = nlohmann::ordered_json;

// nlohmann finds the functions by the namespace of their types, so they are in no unnamed one. FIELDS(a, b):
// the members a and b of `one` under their names.
#define FIELD(name) json[#name] = one.name;
#define FIELDS(...) NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(FIELD, __VA_ARGS__))
#define JSON_OF(Type, ...) \
  static void to_json(PlanJson& json, const Type& one) { FIELDS(__VA_ARGS__) }

static void to_json(PlanJson& json, Origin one) { json = std::string(name_of(one)); }
static void to_json(PlanJson& json, Precision one) { json = std::string(name_of(one)); }
static void to_json(PlanJson& json, Strategy one) { json = std::string(name_of(one)); }
static void to_json(PlanJson& json, Schedule one) { json = std::string(name_of(one)); }

template <class T>
static PlanJson or_null(const std::optional<T>& one) {
  return one ? PlanJson(*one) : PlanJson();
}

JSON_OF(Estimate, value, low, high, origin)

static void to_json(PlanJson& json, const ModelShape& one) {
  FIELDS(name, family, layers, hidden, heads, key_value_heads, head_dim, feed_forward, vocabulary, gated);
  FIELDS(tied_output, attention_bias, output_bias, mlp_bias, query_key_norm);
  json["experts"] = one.experts.count, json["experts_per_token"] = one.experts.per_token;
  json["expert_feed_forward"] = one.experts.feed_forward;
  json["shared_expert_feed_forward"] = one.experts.shared_feed_forward;
  json["dense_layers"] = one.experts.dense_layers;
  json["parameters"] = one.parameters(), json["active_parameters"] = one.active_parameters();
}

JSON_OF(Link, name, ranks, latency, bandwidth, origin)

static void to_json(PlanJson& json, const Device& one) {
  FIELDS(name, memory, memory_bandwidth);
  for (const auto& [key, rates] : {std::pair("peak", &one.peak), {"best_found", &one.best_found}}) {
    json[key] = PlanJson::object();
    for (std::size_t i = 0; i < kPrecisions; ++i)
      if ((*rates)[i] > 0) json[key][kPrecisionNames[i]] = (*rates)[i];
  }
  FIELDS(source);
}

static void to_json(PlanJson& json, const Cluster& one) {
  FIELDS(name, devices, per_host);
  json["hosts"] = one.hosts();
  FIELDS(host_memory, reserve, device, links);
}

static void to_json(PlanJson& json, const Work& one) {
  FIELDS(tokens, sequence);
  json["samples"] = one.samples();
  FIELDS(precision, fp32_gradients, states);
  json["documents"] = one.documents.size();
}

static void to_json(PlanJson& json, const Candidate& one) {
  FIELDS(ranks, replicas, shards, cp_ring, cp_ulysses, tp, ep, pp, stages_per_rank, strategy, schedule);
  FIELDS(sequence_parallel, reduce_once, share_parameters);
  json["checkpoint_activations"] = one.checkpoint, json["reshard_after_forward"] = one.reshard;
  FIELDS(micro_batch, micro_batches, bucket_bytes);
}

static void to_json(PlanJson& json, const MemoryParts& one) {
  FIELDS(parameters, gradients, masters, states);
  json["kept"] = one.kept();
  FIELDS(activations, logits, gathered, buffers, passing, reserve);
  json["total"] = one.total();
  FIELDS(rank_of_pipeline);
}

JSON_OF(StepParts::Hidden, tp, cp, ep, gather, reduce)

static void to_json(PlanJson& json, const StepParts& one) {
  FIELDS(products, attention, memory_bound, overhead, tp, cp, ep, bubble, gather, reduce, tail, norm);
  FIELDS(optimizer, publish, uneven);
  json["total"] = one.total();
  FIELDS(hidden);
}

JSON_OF(Planned::Part, name, formula, number)

static void to_json(PlanJson& json, const Planned& one) {
  json["layout"] = to_text(one.candidate);
  FIELDS(candidate, memory, step, seconds, bytes, tokens_per_second, mfu, head_room, proved);
  FIELDS(memory_parts, step_parts);
}

static void to_json(PlanJson& json, const Neighbour& one) {
  FIELDS(change, reason);
  json["seconds"] = or_null(one.seconds);
}

JSON_OF(Law, name, unit, statement, moved_by, at, now, reached)
JSON_OF(RecipeStep, name, formula, result, origin)
JSON_OF(WayOut, name, tokens, planned)
JSON_OF(ScalingPoint, devices, best, efficiency, law)

static void to_json(PlanJson& json, const Tried& one) {
  json["layout"] = to_text(one.planned.candidate);
  json["seconds"] = one.planned.seconds, json["bytes"] = one.planned.bytes;
  json["measured_seconds"] = one.run ? PlanJson(one.run->seconds_of_step) : PlanJson();
  json["measured_bytes"] = one.run ? PlanJson(one.run->peak_bytes) : PlanJson();
  FIELDS(why_not);
}

static void to_json(PlanJson& json, const LargestMicroBatch& one) {
  FIELDS(layout, measured, predicted, ended_early);
  json["tried"] = PlanJson::array();
  for (const auto& [size, fits] : one.tried) json["tried"].push_back({{"micro_batch", size}, {"fits", fits}});
}

std::string to_json(const Plan& one, const Trials* trials) {
  PlanJson json;
  FIELDS(model, cluster, work, candidates, fitting, top, front);
  json["nearest"] = or_null(one.nearest);
  FIELDS(missing, neighbours, laws, recipe, ways_out, scaling, warnings);
  if (trials) json["tried"] = trials->layouts, json["largest_micro_batch"] = trials->largest;
  return json_text(json, 2) + "\n";
}

std::string to_json(const Plan& plan) { return to_json(plan, nullptr); }

#undef FIELD
#undef FIELDS
#undef JSON_OF

}  // namespace isograd::planner
