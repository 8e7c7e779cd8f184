// Bodies of requests to the training server: a file has the name of its request.
#include <unistd.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>

#include "base/files.hpp"
#include "base/json.hpp"
#include "fuzz/readers.hpp"
#include "serve/http/request.hpp"
#include "serve/service/service_testing.hpp"
#include "serve/wire/tinker.hpp"
#include "serve/wire/wire_testing.hpp"
#include "serve/wire/xorl.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;
namespace tinker = serve::tinker;
namespace xorl = serve::xorl;

struct Body {
  std::string sound;  // "@@": the session of a client
  std::function<void(const std::string&)> read;
  std::string path{};  // below /api/v1; empty: the name
  bool of_xorl = false;
};

// Reads a body with each of the parsers.
template <class... Parse>
std::function<void(const std::string&)> by(Parse... parsers) {
  return [=](const std::string& body) {
    std::exception_ptr refused;
    const auto read = [&](const auto& parse) {
      try {
        parse(body);
      } catch (const ConfigError&) {
        refused = std::current_exception();
      }
    };
    (read(parsers), ...);
    if (refused) std::rethrow_exception(refused);
  };
}

// A model gets sound values: every array is as large as its shape says, every token one that int32 holds.
void look_at_pass(const serve::ForwardBackward& request) {
  for (const serve::Datum& datum : request.data) {
    if (datum.tokens.empty()) throw std::logic_error("a datum without tokens");
    for (const auto& [name, array] : datum.inputs) {
      std::int64_t cells = 1;
      for (const std::int64_t size : array.shape) cells *= size;
      if (cells != static_cast<std::int64_t>(array.numbers.size() + array.integers.size()))
        throw std::logic_error("an array of another size than its shape");
    }
  }
}

// A body that is too large comes in pieces of any length. A sound object is kept with what is short in it.
void look_at_short_parts(const std::string& text) {
  for (const bool json : {true, false}) {
    serve::ShortParts whole(json), bytes(json);
    whole.add(text);
    for (const char& byte : text) bytes.add({&byte, 1});
    const std::string kept = whole.body();
    if (kept != bytes.body()) throw std::logic_error("other short parts, byte by byte: " + kept);
    if (kept.size() > (json ? 18 : 68) * 1024) throw std::logic_error("short parts that are not short");
    const auto all = parse_json(text), parts = parse_json(kept);
    if (!json || !all.problem.empty()) continue;
    if (!parts.problem.empty()) throw std::logic_error(parts.problem + " in the short parts " + kept);
    for (const auto& [key, value] : parts.value.items())
      if (all.value.at(key) != value) throw std::logic_error("another " + key + " in the short parts");
    if (text.size() < 1024 && parts.value != all.value) throw std::logic_error("short parts are missing");
  }
}

const std::map<std::string, Body>& bodies() {
  const auto hex = serve::wire_testing::bytes_of_hex;
  const auto pass = [](const std::string& body) { look_at_pass(tinker::forward_backward(body).body); };
  const auto pass_xorl = [](const std::string& body) { look_at_pass(xorl::forward_backward(body).body); };
  static const std::map<std::string, Body> all = {
      {"pass", {hex(serve::wire_testing::kPpo), pass, "forward_backward"}},
      {"older_pass", {hex(serve::wire_testing::kOlder), pass, "forward_backward"}},
      {"create_session",
       {R"({"tags":["a"],"user_metadata":{"a":1},"sdk_version":"0.38.0","display_name":"x\",{\\"})",
        by(tinker::create_session)}},
      {"session_heartbeat", {R"({"session_id":"@@"})", by(tinker::heartbeat)}},
      {"finish",
       {R"({"reason":{"type":"success"},"detail":"x"})", by(tinker::finish), "sessions/unknown/finish"}},
      {"create_model",
       {R"({"session_id":"@@","model_seq_id":1,"base_model":"toy/base","user_metadata":{"a":"b"},
            "lora_config":{"rank":8,"seed":1,"train_mlp":true},"optimizer_config":{"type":"adamw"}})",
        by(tinker::create_model)}},
      {"load_weights",
       {R"({"session_id":"@@","model_seq_id":2,"path":"tinker://a/weights/n","optimizer":true})",
        by(tinker::load_weights)}},
      {"load_operation",
       {R"({"model_id":"@@:train:0","seq_id":2,"path":"tinker://a/weights/n"})",
        by(tinker::load_weights, xorl::load_weights), "load_weights"}},
      {"optim_step",
       {R"({"model_id":"@@:train:0","seq_id":2,"gradient_clip":1,
            "adam_params":{"learning_rate":0.5,"beta1":0.9,"eps":1e-8}})",
        by(tinker::optim_step, xorl::optim_step)}},
      {"save_weights",
       {R"({"model_id":"@@:train:0","seq_id":2,"path":"n","ttl_seconds":3600,"kind":"snapshot",
            "overwrite":true,"name":"n"})",
        by(tinker::save_weights, tinker::save_weights_for_sampler, tinker::save_weights_external,
           xorl::save_weights, xorl::save_weights_for_sampler)}},
      {"create_sampling_session",
       {R"({"session_id":"@@","sampling_session_seq_id":1,"base_model":"toy/base"})",
        by(tinker::create_sampling_session)}},
      {"asample",
       {R"({"sampling_session_id":"@@:sample:0","seq_id":0,"num_samples":2,
            "prompt":{"chunks":[{"tokens":[1,2,3]}]},
            "prompt_logprobs":true,"prompt_logprobs_last_n":1,"target_prompt_logprobs":{"data":[5,6],
            "dtype":"int64","shape":[2,3],"sparse_crow_indices":[0,1,2],"sparse_col_indices":[1,2]},
            "sampling_params":{"max_tokens":9,"stop":["x"],"temperature":0.5,"top_p":0.5}})",
        by(tinker::asample)}},
      {"retrieve_future", {R"({"request_id":"@@:train:0:op:0"})", by(tinker::retrieve_future)}},
      {"get_info", {R"({"model_id":"@@:train:0"})", by(tinker::get_info)}},
      {"weights_info",
       {R"({"tinker_path":"tinker://a/weights/n","xorl_path":"xorl://a/weights/n"})",
        by(tinker::weights_info, xorl::weights_info)}},
      {"ttl", {R"({"ttl_seconds":3600})", by(tinker::ttl), "training_runs/a/checkpoints/weights/n/ttl"}},
      {"create_xorl",
       {R"({"model_id":"m","base_model":"toy/base","lora_config":{"rank":4,"alpha":16,"dropout":0.0,
            "target_modules":["lm_head"]}})",
        by(xorl::create_model), "create_model", true}},
      {"pass_xorl",
       {R"({"model_id":"x","seq_id":2,"forward_backward_input":{"loss_fn":"cross_entropy","data":[{
            "model_input":{"input_ids":[1,2]},"loss_fn_inputs":{"weights":[1,0.5],
            "target_tokens":{"data":[2,-100],"dtype":"int64","shape":[2]}}}]}})",
        pass_xorl, "forward_backward", true}},
      {"forward_xorl",
       {R"({"model_id":"x","forward_input":{"loss_fn":"ppo","loss_fn_params":{"clip_low_threshold":0.8},
            "data":[{"model_input":{"input_ids":[1,2]},"loss_fn_inputs":{"advantages":[1,0.5],
            "logprobs":[1,0.5],"labels":[2,-100]}}]}})",
        pass_xorl, "forward", true}},
      {"sampling_xorl",
       {R"({"model_path":"xorl://x/sampler_weights/n"})", by(xorl::create_sampling_session),
        "create_sampling_session", true}},
      {"list_checkpoints", {R"({"model_id":"x"})", by(xorl::list_checkpoints), "", true}},
      {"delete_checkpoint",
       {R"({"model_id":"x","checkpoint_id":"weights/n"})", by(xorl::delete_checkpoint), "", true}},
      {"abort_gradient_epoch", {R"({"model_id":"x"})", by(), "", true}},
      {"kill_session", {R"({"model_id":"x","save_checkpoint":true})", by(xorl::kill_session), "", true}},
  };
  return all;
}

// A service of this process, which accepts and does not compute. It remembers what earlier inputs asked for.
class Answering {
 public:
  explicit Answering(const fs::path& state) {
    serve::ServiceOptions options;
    options.state = state, options.poll_seconds = 1e9, options.limits["request-bytes"] = 1 << 26;
    options.print_steps = false;
    service_.emplace(std::move(options), engine_);
    session_ = parse_json(ask("create_session", "{}", false).body).value.at("session_id");
    ask("create_model", R"({"session_id":"@@","model_seq_id":0,"base_model":"toy/base"})", false);
    ask("create_sampling_session", bodies().at("create_sampling_session").sound, false);
  }
  // Without an answer if the request waits.
  serve::HttpReply ask(const std::string& path, std::string body, bool of_xorl) {
    for (std::size_t at; !session_.empty() && (at = body.find("@@")) != std::string::npos;)
      body.replace(at, 2, session_);
    auto request = serve::service_testing::request_of(path.ends_with("/ttl") ? "PUT" : "POST",
                                                      "/api/v1/" + path, std::move(body));
    if (of_xorl) request.headers.erase("x-api-key");
    const auto answer = std::make_shared<serve::HttpReply>();
    service_->handle(request, "a", [answer](serve::HttpReply reply) { *answer = std::move(reply); });
    return *answer;
  }

 private:
  serve::service_testing::ToyEngine engine_;
  std::optional<serve::Service> service_;
  std::string session_;
};

void prepare(const fs::path& folder) {
  for (const auto& [name, body] : bodies()) put(folder / name, body.sound);
}

void read(const fs::path& file) {
  static Answering& service =
      *new Answering(file.parent_path().parent_path() / ("answering-" + std::to_string(::getpid())));
  const std::string name = file.filename(), text = read_file(file);
  look_at_short_parts(text);
  const Body& body = bodies().at(name);
  const serve::HttpReply reply = service.ask(body.path.empty() ? name : body.path, text, body.of_xorl);
  if (reply.status >= 500 || (!reply.body.empty() && !parse_json(reply.body).problem.empty()))
    throw std::logic_error("answered with " + std::to_string(reply.status) + ": " + reply.body);
  body.read(text);
}

}  // namespace

std::vector<Reader> wire_readers() {
  return {{"requests", prepare, read,
           with(kJson, {"\"tokens\":[", "\"shape\":[", "\"stop\":", "\"weights\"", "\"dtype\"",
                        "\"model_id\":", "\"seq_id\":", "@@", "@@:train:0", "\x12", "\x1a", "\x0a"})}};
}

}  // namespace isograd::fuzz
