#include "serve/wire/xorl.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "serve/wire/fields.hpp"

namespace isograd::serve::xorl {
namespace {

constexpr std::int64_t kIgnored = -100;  // a label that is no target

std::string model_of(const Fields& fields) { return fields.text("model_id").value_or("default"); }

template <class Body>
Operation<Body> operation_of(const Fields& fields) {
  return {.model = model_of(fields), .sequence = fields.integer("seq_id", 1, kMostInt32).value_or(0)};
}

// The parts whose projections `target_modules` names. An adapter has all projections of a part or none.
void read_modules(const Fields& lora, LoraShape& shape) {
  const Json* names = lora.list("target_modules");
  shape.unembed = false;  // xorl's own choice where none are named
  if (names == nullptr) return;
  const std::vector<std::string> attention{"k_proj", "o_proj", "q_proj", "v_proj"};
  const std::vector<std::string> mlp{"down_proj", "gate_proj", "up_proj"}, unembed{"lm_head"};
  std::size_t found = 0;
  auto holds = [&](const std::vector<std::string>& part) {
    std::size_t held = 0;
    for (const std::string& name : part)
      held += std::find(names->begin(), names->end(), name) != names->end();
    found += held;
    if (held != 0 && held != part.size())
      lora.refuse("target_modules", fmt::format("all of {} or none", fmt::join(part, ", ")),
                  "Name all projections of a part");
    return held != 0;
  };
  shape.attention = holds(attention), shape.mlp = holds(mlp), shape.unembed = holds(unembed);
  if (found == 0 || found != names->size())
    lora.refuse("target_modules", fmt::format("names among {}, {}, lm_head, each once",
                                              fmt::join(attention, ", "), fmt::join(mlp, ", ")));
}

// A target of -100 becomes token 0 with weight 0 (and no advantage).
void read_ignored(Datum& datum, WireArray& targets, const std::string& loss) {
  std::vector<float> weights(targets.integers.size(), 1.0F);
  bool any = false;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (targets.integers[i] != kIgnored) continue;
    any = true, targets.integers[i] = 0, weights[i] = 0;
    for (const char* name : {"weights", "advantages"})
      if (auto at = datum.inputs.find(name); at != datum.inputs.end() && i < at->second.numbers.size())
        at->second.numbers[i] = 0;
  }
  if (loss == "cross_entropy" && !datum.inputs.contains("weights")) {
    std::vector<std::int64_t> shape = targets.shape;
    if (shape.empty()) shape = {static_cast<std::int64_t>(weights.size())};
    datum.inputs["weights"] = {.shape = shape, .numbers = std::move(weights)};
  } else if (any && loss != "cross_entropy" && !datum.inputs.contains("advantages")) {
    refuse("forward_backward: target_tokens", "-100 without advantages",
           "advantages, of which those rows have 0", "Send advantages");
  }
}

Datum read_datum(const Json& value, const std::string& where, const std::string& loss, std::int64_t& cells) {
  if (!value.is_object()) refuse(where, brief(value), "an object", "Correct that datum");
  const Fields fields(value, where + ".");
  Datum datum;
  const Fields input = fields.need_object("model_input");
  datum.tokens =
      input.find("chunks") != nullptr ? json_chunks(input) : input.integers("input_ids", 0, kMostInt32);
  if (datum.tokens.empty()) refuse(where, "no tokens", "at least one", "Leave that datum out");
  const Json* inputs = fields.find("loss_fn_inputs");
  if (inputs == nullptr || !inputs->is_object() || inputs->size() > kMostInputs)
    fields.refuse("loss_fn_inputs", fmt::format("an object of at most {} arrays", kMostInputs));
  std::optional<WireArray> targets;
  for (const auto& [name, array] : inputs->items()) {
    const std::string place = fmt::format("{}.loss_fn_inputs.{}", where, name);
    if (name == "labels" || name == "target_tokens") {
      if (targets) refuse(place, "labels and target_tokens", "one of them", "Leave one of them out");
      targets = json_array(array, place);
    } else {
      datum.inputs[name] = as_input(to_dense(json_array(array, place), 0, place, cells), name, place);
    }
  }
  if (targets) {
    const std::string place = where + ".loss_fn_inputs.target_tokens";
    if (targets->sparse) refuse(place, "a sparse array", "a dense one", "Send all targets");
    read_ignored(datum, *targets, loss);
    datum.inputs["target_tokens"] =
        as_input(to_dense(*std::move(targets), 0, place, cells), "target_tokens", place);
  }
  return datum;
}

Json array_json(std::vector<float> numbers, const std::vector<std::int64_t>& shape) {
  return {{"data", std::move(numbers)}, {"dtype", "float32"}, {"shape", shape}};
}

std::string moved(const std::string& path, std::string_view from, std::string_view to) {
  return path.starts_with(from) ? std::string(to) + path.substr(from.size()) : path;
}

std::string path_in(const std::string& path) { return moved(path, "xorl://", "tinker://"); }

Operation<SaveWeights> save(std::string_view json, const char* request, const char* key) {
  const RequestJson fields(request, json);
  auto result = operation_of<SaveWeights>(fields);
  result.body.name = fields.text(key);
  return result;
}

}  // namespace

std::string path_out(const std::string& path) { return moved(path, "tinker://", "xorl://"); }

NewModel create_model(std::string_view json) {
  const RequestJson fields("create_model", json);
  NewModel model{.model = model_of(fields), .body = json_model(fields)};
  model.body.metadata.emplace("isograd.normalise", "tokens");
  LoraShape& shape = model.body.lora;
  const auto lora = fields.object("lora_config");
  if (!lora) return model;
  shape.rank =
      lora->integer(lora->find("rank") != nullptr ? "rank" : "lora_rank", 0, kMostRank).value_or(shape.rank);
  const double alpha = lora->number("alpha", 0, kAbove0);
  if (alpha > 0) model.body.metadata.emplace("isograd.alpha", fmt::format("{}", alpha));
  lora->number("dropout", 0, {[](double x) { return x == 0; }, "0: adapters of this server have no dropout"});
  read_modules(*lora, shape);
  return model;
}

Operation<ForwardBackward> forward_backward(std::string_view json) {
  const RequestJson fields("forward_backward", json);
  auto result = operation_of<ForwardBackward>(fields);
  result.body.forward_only = fields.find("forward_input") != nullptr;
  const Fields input =
      fields.need_object(result.body.forward_only ? "forward_input" : "forward_backward_input");
  result.body.loss = input.text("loss_fn").value_or("cross_entropy");
  const char* of_loss = input.find("loss_fn_params") != nullptr ? "loss_fn_params" : "loss_fn_config";
  if (const auto params = input.object(of_loss))
    for (const auto& [key, value] : input.find(of_loss)->items()) {
      if (value.is_number())
        result.body.config[key] = value.get<double>();
      else if (value.is_string())
        result.body.config[key] = value.get<std::string>();
      else if (!value.is_null())
        params->refuse(key.c_str(), "a number or a text");
    }
  const Json* data = input.list("data");
  if (data == nullptr || data->empty() || data->size() > kMostDatums)
    input.refuse("data", fmt::format("1 to {} datums", kMostDatums));
  std::int64_t cells = kMostCells;
  result.body.data.reserve(data->size());
  for (const Json& datum : *data)
    result.body.data.push_back(read_datum(
        datum, input.where(fmt::format("data[{}]", result.body.data.size())), result.body.loss, cells));
  return result;
}

Operation<AdamParams> optim_step(std::string_view json) {
  const RequestJson fields("optim_step", json);
  auto result = operation_of<AdamParams>(fields);
  result.body = json_adam(fields.need_object("adam_params"));
  result.body.clip = fields.number("gradient_clip", result.body.clip, kClip);
  return result;
}

Operation<SaveWeights> save_weights(std::string_view json) { return save(json, "save_weights", "path"); }

Operation<SaveWeights> save_weights_for_sampler(std::string_view json) {
  auto result = save(json, "save_weights_for_sampler", "name");
  if (!result.body.name)
    refuse("save_weights_for_sampler: name", "nothing", "a name", "Name the weights that are saved");
  return result;
}

LoadWeights load_weights(std::string_view json) {
  const RequestJson fields("load_weights", json);
  const auto of = operation_of<bool>(fields);
  LoadWeights load;
  load.model = of.model, load.sequence = of.sequence;
  load.path = path_in(fields.need_text("path"));
  load.optimizer = fields.flag("optimizer", false);
  return load;
}

std::string create_sampling_session(std::string_view json) {
  return path_in(RequestJson("create_sampling_session", json).need_text("model_path"));
}

std::string list_checkpoints(std::string_view json) {
  return model_of(RequestJson("list_checkpoints", json));
}

std::pair<std::string, std::string> delete_checkpoint(std::string_view json) {
  const RequestJson fields("delete_checkpoint", json);
  return {model_of(fields), fields.need_text("checkpoint_id")};
}

KillSession kill_session(std::string_view json) {
  const RequestJson fields("kill_session", json);
  return {model_of(fields), fields.flag("save_checkpoint", true)};
}

std::string weights_info(std::string_view json) {
  return path_in(RequestJson("weights_info", json).need_text("xorl_path"));
}

std::string create_model_reply(const std::string& model) {
  return json_text({{"model_id", model}, {"status", "created"}});
}

std::string forward_backward_reply(const ForwardBackward& request, const ForwardBackwardResult& result) {
  Json outputs = Json::array(), metrics = finite(result.metrics);
  double valid = 0;
  for (std::size_t i = 0; i < result.log_probabilities.size(); ++i) {
    const Array& log_probabilities = result.log_probabilities[i];
    const auto& inputs = request.data.at(i).inputs;
    Json output = {{"logprobs", array_json(log_probabilities.numbers, log_probabilities.shape)}};
    const bool entropy = request.loss == "cross_entropy";
    const auto at = inputs.find(entropy ? "weights" : "advantages");
    if (at != inputs.end())
      for (const float factor : at->second.numbers) valid += factor != 0;
    if (entropy && at != inputs.end() && at->second.numbers.size() == log_probabilities.numbers.size()) {
      std::vector<float> losses(log_probabilities.numbers.size());
      double sum = 0;
      for (std::size_t k = 0; k < losses.size(); ++k) {
        losses[k] = at->second.numbers[k] == 0 ? 0 : -at->second.numbers[k] * log_probabilities.numbers[k];
        sum += losses[k];
      }
      output["loss"] = sum;
      output["elementwise_loss"] = array_json(std::move(losses), log_probabilities.shape);
    }
    outputs.push_back(std::move(output));
  }
  if (valid > 0) {
    metrics.emplace("valid_tokens:sum", valid);
    if (metrics.contains("loss:sum")) metrics.emplace("loss:mean", metrics["loss:sum"].get<double>() / valid);
  }
  return json_text({{"loss_fn_output_type", request.loss},
                    {"loss_fn_outputs", std::move(outputs)},
                    {"metrics", std::move(metrics)},
                    {"info", Json::object()}});
}

// Two names, for older clients and newer ones.
std::string path_reply(const std::string& path) {
  return json_text({{"path", path_out(path)}, {"model_path", path_out(path)}});
}

std::string sampling_session_reply(const std::string& path) {
  const std::string out = path_out(path);
  return json_text({{"success", true},
                    {"model_path", out},
                    {"lora_name", out.substr(out.rfind('/') + 1)},
                    {"message", "ready"}});
}

std::string aborted_reply(const std::string& model, std::int64_t steps) {
  return json_text({{"success", true}, {"model_id", model}, {"step", steps}});
}

std::string killed_reply(const std::string& path) {
  Json reply{{"success", true}, {"message", "the model is closed"}};
  if (!path.empty()) reply["checkpoint_path"] = path_out(path);
  return json_text(reply);
}

std::string deleted_reply(const std::string& path) {
  return json_text({{"success", true}, {"deleted_path", path_out(path)}});
}

// Models of these clients have no limit of idle time, and their samples come from elsewhere.
std::string session_info_reply(const std::vector<OpenModel>& models, std::int64_t most_models) {
  Json names = Json::array(), activity = Json::object(), adapters = Json::array();
  for (const OpenModel& model : models) {
    names.push_back(model.name), activity[model.name] = model.last_request;
    if (model.adapter) adapters.push_back(model.name);
  }
  return json_text({{"registered_models", names},
                    {"active_sessions", models.size()},
                    {"session_activity", activity},
                    {"idle_timeout_seconds", 0},
                    {"loaded_sampling_adapters", Json::object()},
                    {"loaded_training_adapters", adapters},
                    {"max_training_adapters", most_models}});
}

}  // namespace isograd::serve::xorl
