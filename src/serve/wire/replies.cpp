// The bodies of tinker's replies.
#include <protozero/pbf_writer.hpp>

#include "isograd/error.hpp"
#include "serve/wire/fields.hpp"
#include "serve/wire/tinker.hpp"
#include "serve/wire/xorl.hpp"

namespace isograd::serve::tinker {
namespace {

using protozero::pbf_writer;

// Strict readers refuse a null where they expect a value: what is not given is left out.
Json without_nulls(Json object) {
  for (auto it = object.begin(); it != object.end();) it = it->is_null() ? object.erase(it) : std::next(it);
  return object;
}
std::string text(Json reply) { return json_text(without_nulls(std::move(reply))); }
std::string typed(const char* type, Json reply) {
  reply["type"] = type;
  return text(std::move(reply));
}

Json if_given(const std::string& value) { return value.empty() ? Json() : Json(value); }
Json if_given(const std::map<std::string, std::string>& values) {
  return values.empty() ? Json() : Json(values);
}
Json rank_of(std::int64_t rank) { return rank > 0 ? Json(rank) : Json(); }

const Json kAdam = {{"type", "adamw"}};

Json listed(const CheckpointListing& checkpoint) {
  return without_nulls(
      {{"checkpoint_id", checkpoint.id},
       {"checkpoint_type", checkpoint.kind},
       {"time", iso_time(checkpoint.created)},
       {"tinker_path", checkpoint.path},
       {"path", xorl::path_out(checkpoint.path)},  // as xorl's client calls it
       {"size_bytes", checkpoint.bytes},
       {"public", checkpoint.is_public},
       {"user_metadata", if_given(checkpoint.metadata)},
       {"expires_at", checkpoint.expires > 0 ? Json(iso_time(checkpoint.expires)) : Json()}});
}

Json listed(const RunListing& run) {
  auto of = [](const std::optional<CheckpointListing>& one) { return one ? listed(*one) : Json(); };
  return without_nulls({{"training_run_id", run.id},
                        {"base_model", run.base},
                        {"model_owner", run.owner},
                        {"is_lora", run.rank > 0},
                        {"lora_rank", rank_of(run.rank)},
                        {"corrupted", run.corrupted},
                        {"last_request_time", iso_time(run.last_request)},
                        {"last_checkpoint", of(run.last_checkpoint)},
                        {"last_sampler_checkpoint", of(run.last_sampler_checkpoint)},
                        {"user_metadata", if_given(run.metadata)}});
}

template <class One>
Json listed(const std::vector<One>& all) {
  Json list = Json::array();
  for (const One& one : all) list.push_back(listed(one));
  return list;
}

Json listed(const Cursor& cursor) {
  return {{"offset", cursor.offset}, {"limit", cursor.limit}, {"total_count", cursor.total}};
}

// ---- protobuf ----

template <class T>
void add_values(pbf_writer& message, std::uint32_t field, const std::vector<T>& values) {
  message.add_bytes(field, reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

constexpr std::int32_t kFloat32 = 1;

void add_top(pbf_writer& message, std::uint32_t field, const std::optional<TopTokens>& top) {
  if (!top) return;
  pbf_writer written(message, field);
  add_values(written, 1, top->tokens);
  add_values(written, 2, top->log_probabilities);
  written.add_uint32(3, static_cast<std::uint32_t>(top->k));
  written.add_uint32(4, static_cast<std::uint32_t>(top->length));
}

// The log-probabilities of datums `begin` to `end`, which have the same inner shape.
void add_record(pbf_writer& output, const std::vector<Array>& arrays, std::size_t begin, std::size_t end) {
  std::string data;
  std::vector<std::int64_t> offsets{0};
  for (std::size_t i = begin; i < end; ++i) {
    const auto& numbers = arrays[i].numbers;
    data.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float));
    offsets.push_back(static_cast<std::int64_t>(data.size()));
  }
  pbf_writer record(output, 2);
  record.add_string(1, "ArrayRecord");
  {
    pbf_writer entry(record, 2);
    entry.add_string(1, "logprobs");
    pbf_writer batched(entry, 2);
    batched.add_bytes(1, data);
    add_values(batched, 2, offsets);
    batched.add_enum(3, kFloat32);
    batched.add_packed_int64(4, arrays[begin].shape.begin() + 1, arrays[begin].shape.end());
  }
  record.add_int64(3, static_cast<std::int64_t>(end - begin));
}

bool same_inner(const Array& a, const Array& b) {
  return std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1, b.shape.end());
}

}  // namespace

std::string empty_reply() { return "{}"; }

std::string session_reply(const std::string& session) {
  return typed("create_session", {{"session_id", session}});
}

std::string promise_reply(const std::string& request, const std::string& model) {
  return text({{"request_id", request}, {"model_id", if_given(model)}});
}

std::string sample_promise_reply(const std::string& request, const std::vector<std::string>& sequences) {
  return text({{"request_id", request}, {"sample_sequence_ids", sequences}});
}

std::string try_again_reply(const std::string& request) {
  return typed("try_again", {{"request_id", request}, {"queue_state", "active"}});
}

std::string failure_reply(const std::string& error, const std::string& category) {
  return text({{"error", error}, {"category", category}});
}

std::string detail_reply(const std::string& detail) { return text({{"detail", detail}}); }

std::string create_model_reply(const std::string& model) {
  return typed("create_model", {{"model_id", model}});
}

std::string load_weights_reply(const std::string& model, const std::string& path) {
  return typed("load_weights", {{"model_id", model}, {"path", path}});
}

std::string info_reply(const std::string& model, const CreateModel& made, const std::string& architecture,
                       const std::string& tokenizer) {
  const Json data = {
      {"arch", if_given(architecture)}, {"model_name", made.base}, {"tokenizer_id", if_given(tokenizer)}};
  return typed("get_info", {{"model_id", model},
                            {"model_name", made.base},
                            {"model_data", without_nulls(data)},
                            {"is_lora", made.lora.rank > 0},
                            {"lora_rank", rank_of(made.lora.rank)},
                            {"optimizer_config", kAdam}});
}

std::string optim_step_reply(const Metrics& metrics) { return text({{"metrics", finite(metrics)}}); }
std::string save_weights_reply(const std::string& path) { return typed("save_weights", {{"path", path}}); }

std::string save_for_sampler_reply(const std::string& path, const std::string& sampler) {
  return typed("save_weights_for_sampler",
               {{"path", if_given(path)}, {"sampling_session_id", if_given(sampler)}});
}

std::string save_external_reply(const std::string& path, std::int64_t bytes) {
  return typed("save_weights_external", {{"path", path}, {"size_bytes", bytes}});
}

std::string sampling_session_reply(const std::string& sampler) {
  return typed("create_sampling_session", {{"sampling_session_id", sampler}});
}

std::string sampler_reply(const std::string& sampler, const std::string& base, const std::string& path) {
  return text({{"sampler_id", sampler}, {"base_model", base}, {"model_path", if_given(path)}});
}

std::string weights_info_reply(const CreateModel& saved) {
  const bool lora = saved.lora.rank > 0;
  auto part = [&](bool trained) { return lora ? Json(trained) : Json(); };
  return text({{"base_model", saved.base},
               {"is_lora", lora},
               {"lora_rank", rank_of(saved.lora.rank)},
               {"train_unembed", part(saved.lora.unembed)},
               {"train_mlp", part(saved.lora.mlp)},
               {"train_attn", part(saved.lora.attention)},
               {"optimizer_config", kAdam}});
}

std::string capabilities_reply(const std::vector<std::pair<std::string, std::int64_t>>& contexts) {
  Json models = Json::array();
  for (const auto& [name, context] : contexts)
    models.push_back(
        {{"model_name", name}, {"max_context_length", context}, {"trainable", true}, {"sampleable", true}});
  return text({{"supported_models", models}});
}

std::string sessions_reply(const std::vector<std::string>& sessions) {
  return text({{"sessions", sessions}});
}

std::string session_info_reply(const std::vector<std::string>& models,
                               const std::vector<std::string>& samplers, const Session& session) {
  return text({{"training_run_ids", models},
               {"sampler_ids", samplers},
               {"user_metadata", if_given(session.metadata)},
               {"display_name", if_given(session.display_name)}});
}

std::string run_reply(const RunListing& run) { return text(listed(run)); }

std::string runs_reply(const std::vector<RunListing>& runs, const Cursor& cursor) {
  return text({{"training_runs", listed(runs)}, {"cursor", listed(cursor)}});
}

std::string checkpoints_reply(const std::vector<CheckpointListing>& checkpoints,
                              const std::optional<Cursor>& cursor) {
  return text({{"checkpoints", listed(checkpoints)}, {"cursor", cursor ? listed(*cursor) : Json()}});
}

std::string forward_backward_reply(const ForwardBackwardResult& result) {
  const auto& arrays = result.log_probabilities;
  for (const Array& array : arrays)
    ISOGRAD_INVARIANT(!array.shape.empty() && array.integers.empty(), "log-probabilities without a shape");
  std::string reply;
  pbf_writer output(reply);
  output.add_string(1, "ArrayRecord");
  for (std::size_t begin = 0, end = 0; begin < arrays.size(); begin = end) {
    while (end < arrays.size() && same_inner(arrays[begin], arrays[end])) ++end;
    add_record(output, arrays, begin, end);
  }
  for (const auto& [name, value] : result.metrics) {
    pbf_writer entry(output, 3);
    entry.add_string(1, name);
    entry.add_double(2, value);
  }
  return reply;
}

std::string sample_reply(const SampleResult& result) {
  std::string reply;
  pbf_writer response(reply);
  for (const SampledSequence& sequence : result.sequences) {
    pbf_writer written(response, 1);
    if (!sequence.stopped) written.add_enum(1, 1);
    add_values(written, 2, sequence.tokens);
    add_values(written, 3, sequence.log_probabilities);
    add_top(written, 4, sequence.top);
  }
  if (result.prompt_log_probabilities) add_values(response, 2, *result.prompt_log_probabilities);
  add_top(response, 3, result.top_prompt);
  response.add_int32(4, static_cast<std::int32_t>(result.cached_prompt_tokens));
  if (result.prompt_targets) {
    pbf_writer tensor(response, 5);
    add_values(tensor, 1, result.prompt_targets->numbers);
    tensor.add_enum(3, kFloat32);
    tensor.add_packed_int64(4, result.prompt_targets->shape.begin(), result.prompt_targets->shape.end());
  }
  return reply;
}

}  // namespace isograd::serve::tinker
