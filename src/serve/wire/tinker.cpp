#include "serve/wire/tinker.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cstring>
#include <protozero/pbf_reader.hpp>

#include "base/refuse.hpp"
#include "serve/wire/fields.hpp"

namespace isograd::serve::tinker {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays of the wire are little-endian");

std::string session_of(const Fields& fields) { return fields.need_text("session_id"); }

// A sequence that counts from 0.
std::int64_t counted(const Fields& fields, const char* key) {
  return fields.need_integer(key, 0, std::int64_t{1} << 62);
}

template <class Body>
Operation<Body> operation(const Fields& fields) {
  return {.model = fields.need_text("model_id"), .sequence = fields.need_integer("seq_id", 1, kMostInt32)};
}

void check_optimizer(const Fields& fields, const char* key) {
  const auto optimizer = fields.object(key);
  if (optimizer && optimizer->need_text("type") != "adamw")
    optimizer->refuse("type", "\"adamw\"", "Use AdamW; this server has no other optimizer");
}

std::optional<std::int64_t> ttl_seconds(const Fields& fields) {
  return fields.integer("ttl_seconds", kLeastTtl, kMostTtl);
}

Operation<SaveWeights> save(const Fields& fields) {
  auto result = operation<SaveWeights>(fields);
  result.body = {.name = fields.text("path"),
                 .ttl_seconds = ttl_seconds(fields),
                 .metadata = fields.metadata("user_metadata")};
  return result;
}

// ---- protobuf ----

using protozero::data_view;
using protozero::pbf_reader;
using protozero::pbf_wire_type;

constexpr std::uint32_t bytes_of(std::uint32_t field) {
  return protozero::tag_and_type(field, pbf_wire_type::length_delimited);
}
constexpr std::uint32_t varint_of(std::uint32_t field) {
  return protozero::tag_and_type(field, pbf_wire_type::varint);
}
constexpr std::uint32_t double_of(std::uint32_t field) {
  return protozero::tag_and_type(field, pbf_wire_type::fixed64);
}

// Where in the request: "forward_backward: data[3].loss_fn_inputs.weights".
using Where = std::string;

std::string text_of(pbf_reader& message, const Where& where) {
  std::string text = message.get_string();
  bool sound = text.size() <= kMostText;
  try {
    if (sound) static_cast<void>(Json(text).dump());
  } catch (const Json::type_error&) {  // not UTF-8
    sound = false;
  }
  if (!sound)
    refuse(where, brief(text), fmt::format("UTF-8 of at most {} bytes", kMostText), "Correct that text");
  return text;
}

template <class T>
std::vector<T> values_of(data_view bytes, const Where& where) {
  if (bytes.size() % sizeof(T) != 0)
    refuse(where, fmt::format("{} bytes", bytes.size()), fmt::format("a multiple of {}", sizeof(T)),
           "Send whole values of the declared dtype");
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void fill(WireArray& array, data_view bytes, std::int64_t dtype, const Where& where) {
  switch (dtype) {
    case 1: array.numbers = values_of<float>(bytes, where); return;
    case 2: array.integers = values_of<std::int64_t>(bytes, where); break;
    case 3: {
      const auto narrow = values_of<std::int32_t>(bytes, where);
      array.integers.assign(narrow.begin(), narrow.end());
      break;
    }
    case 4:
      for (const std::uint16_t high : values_of<std::uint16_t>(bytes, where))
        array.numbers.push_back(std::bit_cast<float>(std::uint32_t{high} << 16));
      return;
    default:
      refuse(where, fmt::format("dtype {}", dtype), "float32 (1), int64 (2), int32 (3) or bfloat16 (4)",
             "Declare the dtype");
  }
  array.whole = true;
}

WireArray read_tensor(pbf_reader message, const Where& where) {
  WireArray array;
  data_view values;
  std::int64_t dtype = 0;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case bytes_of(1): values = message.get_view(), array.sparse = false; break;
      case bytes_of(2): {
        array.sparse = true;
        pbf_reader rows = message.get_message();
        while (rows.next()) {
          switch (rows.tag_and_type()) {
            case bytes_of(1): values = rows.get_view(); break;
            case bytes_of(2): array.starts = values_of<std::int64_t>(rows.get_view(), where); break;
            case bytes_of(3): array.columns = values_of<std::int64_t>(rows.get_view(), where); break;
            default: rows.skip();
          }
        }
        break;
      }
      case varint_of(3): dtype = message.get_int64(); break;
      case varint_of(4): array.shape.push_back(message.get_int64()); break;
      case bytes_of(4):
        for (const std::int64_t size : message.get_packed_int64()) {
          if (array.shape.size() > 2) break;  // to_dense refuses it
          array.shape.push_back(size);
        }
        break;
      default: message.skip();
    }
    if (array.shape.size() > 3) array.shape.resize(3);
  }
  if (array.sparse && array.starts.empty()) array.starts = {0};
  fill(array, values, dtype, where);
  return array;
}

void read_chunk(pbf_reader chunk, std::vector<std::int64_t>& tokens, const Where& where) {
  while (chunk.next()) {
    switch (chunk.tag_and_type()) {
      case bytes_of(1): {
        pbf_reader text = chunk.get_message();
        while (text.next()) {
          if (text.tag_and_type() != bytes_of(1)) {
            text.skip();
            continue;
          }
          for (const std::int32_t token : values_of<std::int32_t>(text.get_view(), where)) {
            if (token < 0)
              refuse(where, fmt::format("token {}", token), "token ids of at least 0", "Correct that token");
            tokens.push_back(token);
          }
        }
        break;
      }
      case bytes_of(2): refuse_chunk(where, "image");
      case bytes_of(3): refuse_chunk(where, "dmel");
      default: chunk.skip();
    }
  }
}

// An entry of a map: calls `value` at the value, which may be absent. Returns the key.
template <class Value>
std::string read_entry(pbf_reader entry, std::uint32_t tag, const Where& where, Value value) {
  std::string key;
  while (entry.next()) {
    if (entry.tag_and_type() == bytes_of(1))
      key = text_of(entry, where);
    else if (entry.tag_and_type() == tag)
      value(entry);
    else
      entry.skip();
  }
  return key;
}

Datum read_datum(pbf_reader message, const Where& where, std::int64_t& cells) {
  Datum datum;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case bytes_of(1): read_chunk(message.get_message(), datum.tokens, where + ".model_input"); break;
      case bytes_of(2): {
        pbf_reader tensor;
        const std::string name = read_entry(message.get_message(), bytes_of(2), where,
                                            [&](pbf_reader& entry) { tensor = entry.get_message(); });
        const Where place = where + ".loss_fn_inputs." + name;
        datum.inputs[name] = as_input(to_dense(read_tensor(tensor, place), 0, place, cells), name, place);
        if (datum.inputs.size() > kMostInputs)
          refuse(where, "too many inputs", fmt::format("at most {}", kMostInputs),
                 "Send the loss's own inputs");
        break;
      }
      default: message.skip();  // spans of provenance, too: no loss of this server reads them
    }
  }
  if (datum.tokens.empty()) refuse(where, "no tokens", "at least one", "Leave that datum out");
  return datum;
}

using Config = std::map<std::string, ConfigValue>;

ConfigValue read_config_value(pbf_reader value, const Where& where) {
  std::optional<ConfigValue> result;
  while (value.next()) {
    switch (value.tag_and_type()) {
      case double_of(1): result = value.get_double(); break;
      case bytes_of(2): result = text_of(value, where); break;
      default: value.skip();
    }
  }
  if (!result) refuse(where, "neither a number nor a text", "one of them", "Give that key a value");
  return *result;
}

void check_config(const Config& config, const Where& where) {
  if (config.size() > kMostInputs)
    refuse(where, "too many keys", fmt::format("at most {}", kMostInputs), "Send the loss's own keys");
  for (const auto& [key, value] : config)
    if (const double* number = std::get_if<double>(&value); number != nullptr && !std::isfinite(*number))
      refuse(where + "." + key, fmt::format("{}", *number), "a finite number", "Correct that number");
}

Operation<ForwardBackward> read_forward_backward(pbf_reader message) {
  const Where request = "forward_backward: ", config_where = request + "loss_fn_config";
  Operation<ForwardBackward> result;
  ForwardBackward& body = result.body;
  Config older;
  std::int64_t cells = kMostCells;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case bytes_of(1): result.model = text_of(message, request + "model_id"); break;
      case varint_of(2): result.sequence = message.get_int64(); break;
      case bytes_of(3):
        if (body.data.size() == kMostDatums)
          refuse(request + "data", fmt::format("more than {} datums", kMostDatums), "fewer",
                 "Split the batch");
        body.data.push_back(
            read_datum(message.get_message(), fmt::format("{}data[{}]", request, body.data.size()), cells));
        break;
      case bytes_of(4): body.loss = text_of(message, request + "loss_fn"); break;
      case bytes_of(5): {
        double value = 0;
        const std::string key = read_entry(message.get_message(), double_of(2), config_where,
                                           [&](pbf_reader& entry) { value = entry.get_double(); });
        older[key] = value;
        check_config(older, config_where);
        break;
      }
      case varint_of(6): body.forward_only = message.get_bool(); break;
      case bytes_of(7): {
        pbf_reader value;
        const std::string key = read_entry(message.get_message(), bytes_of(2), config_where,
                                           [&](pbf_reader& entry) { value = entry.get_message(); });
        body.config[key] = read_config_value(value, config_where + "." + key);
        check_config(body.config, config_where);
        break;
      }
      default: message.skip();
    }
  }
  if (body.config.empty()) body.config = std::move(older);
  auto need = [&](bool holds, const char* field, const std::string& found, const char* expected) {
    if (!holds) refuse(request + field, found, expected, "Correct that field");
  };
  need(!result.model.empty(), "model_id", "nothing", "a model");
  need(result.sequence >= 1 && result.sequence <= kMostInt32, "seq_id", fmt::format("{}", result.sequence),
       "an integer from 1 to 2147483647");
  need(!body.loss.empty(), "loss_fn", "nothing", "the name of a loss");
  need(!body.data.empty(), "data", "no datums", "at least one datum");
  return result;
}

}  // namespace

std::string model_id(const std::string& session, std::int64_t model_sequence) {
  return fmt::format("{}:train:{}", session, model_sequence);
}
std::string sampler_id(const std::string& session, std::int64_t sequence) {
  return fmt::format("{}:sample:{}", session, sequence);
}

Address address_of(std::string_view body, bool protobuf) {
  Address found;
  if (!protobuf) {
    const RequestJson fields("the body", body);
    if (const Json* model = fields.find("model_id"); model != nullptr && model->is_string())
      found.model = model->get<std::string>();
    found.sequence = fields.integer("seq_id", 1, kMostInt32).value_or(0);
    return found;
  }
  try {
    pbf_reader message(data_view(body.data(), body.size()));
    while (message.next()) {
      switch (message.tag_and_type()) {
        case bytes_of(1): found.model = message.get_string(); break;
        case varint_of(2): found.sequence = message.get_int64(); break;
        case varint_of(6): found.forward_only = message.get_bool(); break;
        default: message.skip();
      }
    }
  } catch (const protozero::exception&) {
    if (found.model.empty() || found.sequence == 0)
      refuse("the body", "bytes that are no protobuf message", "a ForwardBackwardRequest",
             "Use an SDK of tinker");
  }
  if (found.sequence > kMostInt32)
    refuse("seq_id", std::to_string(found.sequence), "1 to 2147483647", "Count a model's operations from 1");
  return found;
}

Session create_session(std::string_view json) {
  const RequestJson fields("create_session", json);
  Session session{.metadata = fields.metadata("user_metadata")};
  if (const Json* tags = fields.list("tags"))
    for (const Json& tag : *tags) {
      if (!tag.is_string() || session.tags.size() == kMostStops ||
          tag.get_ref<const std::string&>().size() > kMostText)
        fields.refuse("tags", "a short list of texts");
      session.tags.push_back(tag.get<std::string>());
    }
  session.sdk_version = fields.text("sdk_version").value_or("");
  session.display_name = fields.text("display_name").value_or("");
  return session;
}

std::string heartbeat(std::string_view json) { return session_of(RequestJson("session_heartbeat", json)); }

std::string finish(std::string_view json) {
  const RequestJson fields("finish", json);
  const auto reason = fields.object("reason");
  return reason ? reason->text("type").value_or("success") : "success";
}

NewModel create_model(std::string_view json) {
  const RequestJson fields("create_model", json);
  NewModel model{.session = session_of(fields), .body = json_model(fields)};
  model.model = model_id(model.session, counted(fields, "model_seq_id"));
  check_optimizer(fields, "optimizer_config");
  LoraShape& shape = model.body.lora;
  const auto lora = fields.object("lora_config");
  if (!lora) return model;
  shape.rank = lora->integer("rank", 0, kMostRank).value_or(shape.rank);
  shape.unembed = lora->flag("train_unembed", true);
  shape.mlp = lora->flag("train_mlp", true);
  shape.attention = lora->flag("train_attn", true);
  if (!shape.unembed && !shape.mlp && !shape.attention)
    lora->refuse("train_attn", "one of train_unembed, train_mlp, train_attn", "Train at least one part");
  return model;
}

LoadWeights load_weights(std::string_view json) {
  const RequestJson fields("load_weights", json);
  LoadWeights load;
  load.creates = fields.find("session_id") != nullptr;
  if (load.creates) {
    if (fields.find("model_id") != nullptr)
      fields.refuse("model_id", "either model_id or session_id", "Leave one of them out");
    load.session = session_of(fields);
    load.model = model_id(load.session, counted(fields, "model_seq_id"));
  } else {
    const auto of = operation<bool>(fields);
    load.model = of.model, load.sequence = of.sequence;
  }
  load.path = fields.need_text("path");
  load.optimizer = fields.flag("optimizer", false);
  load.base = fields.text("base_model").value_or("");
  load.metadata = fields.metadata("user_metadata");
  check_optimizer(fields, "optimizer_config");
  return load;
}

std::string get_info(std::string_view json) { return RequestJson("get_info", json).need_text("model_id"); }

Operation<ForwardBackward> forward_backward(std::string_view protobuf) {
  try {
    return read_forward_backward(pbf_reader(data_view(protobuf.data(), protobuf.size())));
  } catch (const protozero::exception& error) {
    refuse("forward_backward", fmt::format("bytes that are no protobuf ({})", error.what()),
           "a ForwardBackwardRequest", "Send the message whole");
  }
}

Operation<AdamParams> optim_step(std::string_view json) {
  const RequestJson fields("optim_step", json);
  auto result = operation<AdamParams>(fields);
  if (const auto other = fields.object("optimizer_params"); other && fields.find("adam_params") == nullptr)
    other->refuse("type", "adam_params in place of optimizer_params",
                  "Use AdamW; this server has no other optimizer");
  result.body = json_adam(fields.need_object("adam_params"));
  return result;
}

Operation<SaveWeights> save_weights(std::string_view json) {
  const RequestJson fields("save_weights", json);
  auto result = save(fields);
  result.body.overwrite = fields.flag("overwrite", false);
  return result;
}

Operation<SaveWeights> save_weights_for_sampler(std::string_view json) {
  const RequestJson fields("save_weights_for_sampler", json);
  auto result = save(fields);
  if (fields.text("kind").value_or("snapshot") != "snapshot")
    fields.refuse("kind", "\"snapshot\"",
                  "Save a snapshot; weights that change while they are sampled are not offered");
  if (!result.body.name) result.body.sampling_sequence = counted(fields, "sampling_session_seq_id");
  return result;
}

Operation<SaveWeights> save_weights_external(std::string_view json) {
  const RequestJson fields("save_weights_external", json);
  auto result = save(fields);
  if (const Json* recipients = fields.list("age_encryption_recipients");
      recipients != nullptr && !recipients->empty())
    fields.refuse("age_encryption_recipients", "no recipients",
                  "Export without encryption, and read the directory on the server's disk");
  fields.need_text("path");
  return result;
}

SamplingSession create_sampling_session(std::string_view json) {
  const RequestJson fields("create_sampling_session", json);
  SamplingSession session{.session = session_of(fields),
                          .sequence = counted(fields, "sampling_session_seq_id"),
                          .base = fields.text("base_model").value_or(""),
                          .path = fields.text("model_path").value_or("")};
  if (session.base.empty() && session.path.empty())
    fields.refuse("model_path", "base_model or model_path", "Name what is sampled");
  return session;
}

SampleRequest asample(std::string_view json) {
  const RequestJson fields("asample", json);
  SampleRequest result{.sampler = fields.need_text("sampling_session_id"),
                       .sequence = counted(fields, "seq_id")};
  Sample& sample = result.body;
  sample.prompt = json_chunks(fields.need_object("prompt"));
  sample.samples = fields.integer("num_samples", 1, kMostSamples).value_or(1);
  sample.prompt_log_probabilities = fields.flag("prompt_logprobs", false);
  sample.top_prompt = fields.integer("topk_prompt_logprobs", 0, kMostTop).value_or(0);
  sample.top_samples = fields.integer("topk_sample_logprobs", 0, kMostTop).value_or(0);
  if (fields.integer("prompt_alt_tokens_k", 0, kMostInt32).value_or(0) > 0)
    fields.refuse("prompt_alt_tokens_k", "0",
                  "Ask for no alternative tokens; this server does not draw them");
  if (fields.flag("record_stability_info", false))
    fields.refuse("record_stability_info", "false", "Train with another loss than stable_reinforce");
  const auto length = static_cast<std::int64_t>(sample.prompt.size());
  if (fields.find("prompt_logprobs_last_n") != nullptr) {
    if (!sample.prompt_log_probabilities)
      fields.refuse("prompt_logprobs_last_n", "prompt_logprobs with it",
                    "Set prompt_logprobs, or leave it out");
    sample.prompt_last = fields.need_integer("prompt_logprobs_last_n", 1, length - 1);
  }
  if (const Json* targets = fields.find("target_prompt_logprobs")) {
    const std::string where = fields.where("target_prompt_logprobs");
    std::int64_t cells = kMostCells;
    Array array = to_dense(json_array(*targets, where), -1, where, cells);
    if (!array.numbers.empty() || array.shape.size() != 2 || array.shape[0] != length - 1)
      refuse(where, fmt::format("shape [{}]", fmt::join(array.shape, ", ")),
             fmt::format("integers of shape [{}, K]", length - 1), "Give a row to each token but the first");
    for (const std::int64_t token : array.integers)
      if (token < -1 || token > kMostInt32)
        refuse(where, fmt::format("{}", token), "token ids, or -1", "Correct that token");
    sample.prompt_targets = std::move(array);
  }

  SamplingParams& params = sample.params;
  const auto given = fields.object("sampling_params");
  if (!given) return result;
  params.max_tokens = given->integer("max_tokens", 1, kMostInt32);
  params.seed = given->seed("seed");
  params.temperature = given->number("temperature", params.temperature, kAtLeast0);
  params.top_k = given->integer("top_k", -1, kMostInt32).value_or(params.top_k);
  constexpr Numbers share{[](double x) { return x > 0 && x <= 1; }, "a number above 0, at most 1"};
  params.top_p = given->number("top_p", params.top_p, share);
  const Json* stop = given->find("stop");
  params.stop_given = stop != nullptr;
  if (stop == nullptr) return result;
  constexpr const char* kStops = "a text, or a list of at most 1000 texts or token ids, none empty";
  const Json one = Json::array({*stop});
  const Json& all = stop->is_array() ? *stop : one;
  if (all.size() > kMostStops || (stop != &all && !stop->is_string())) given->refuse("stop", kStops);
  for (const Json& item : all) {
    if (item.is_string() && !item.get_ref<const std::string&>().empty() &&
        item.get_ref<const std::string&>().size() <= kMostText)
      params.stop_strings.push_back(item.get<std::string>());
    else if (item.is_number_unsigned() && item.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMostInt32))
      params.stop_tokens.push_back(item.get<std::int64_t>());
    else
      given->refuse("stop", kStops);
  }
  return result;
}

std::string retrieve_future(std::string_view json) {
  return RequestJson("retrieve_future", json).need_text("request_id");
}

std::string weights_info(std::string_view json) {
  return RequestJson("weights_info", json).need_text("tinker_path");
}

std::optional<std::int64_t> ttl(std::string_view json) {
  const RequestJson fields("ttl", json);
  if (!fields.has("ttl_seconds"))
    fields.refuse("ttl_seconds", "seconds, or null", "Say how long the checkpoint is kept");
  return ttl_seconds(fields);
}

}  // namespace isograd::serve::tinker
