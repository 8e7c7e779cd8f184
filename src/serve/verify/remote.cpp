#include "serve/verify/remote.hpp"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "base/json.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/http/client.hpp"

namespace isograd::serve {
namespace {

using nlohmann::json;
using protozero::pbf_reader;
using protozero::pbf_writer;

constexpr int kSilence = 60;                              // seconds; a long poll is answered after 25
constexpr std::chrono::seconds kLongest{1800};            // an operation may wait for those of other clients
constexpr std::size_t kMostBytes = std::size_t{1} << 40;  // a file of the base
constexpr const char* kProtobufType = "application/x-protobuf";

json parsed(const std::string& where, const std::string& text) {
  auto [value, problem] = parse_json(text);
  if (!problem.empty()) refuse(where, problem, "the reply of a training server", "Look at its log");
  return value;
}

// ConfigError, where a reply lacks the text that it must have.
std::string text_in(const json& reply, const char* name, const std::string& where) {
  const auto found = reply.find(name);
  if (found == reply.end() || !found->is_string())
    refuse(where, fmt::format("a reply without {}", name), "the reply of tinker's contract",
           "Look at the server's log");
  return found->get<std::string>();
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

void add_datum(pbf_writer& request, const Datum& datum) {
  pbf_writer written(request, 3);
  {
    pbf_writer chunk(written, 1);
    pbf_writer text(chunk, 1);
    text.add_bytes(1, bytes_of(std::vector<std::int32_t>(datum.tokens.begin(), datum.tokens.end())));
  }
  for (const auto& [name, array] : datum.inputs) {
    pbf_writer entry(written, 2);
    entry.add_string(1, name);
    pbf_writer tensor(entry, 2);
    const bool whole = !array.integers.empty();
    tensor.add_bytes(1, whole ? bytes_of(array.integers) : bytes_of(array.numbers));
    tensor.add_int64(3, whole ? 2 : 1);
    tensor.add_packed_int64(4, array.shape.begin(), array.shape.end());
  }
}

template <class T>
std::vector<T> values_of(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

constexpr auto kBytes = protozero::pbf_wire_type::length_delimited;

// Empty where the message has no such field.
std::string bytes_in(pbf_reader message, std::uint32_t field) {
  return message.next(field, kBytes) ? message.get_string() : "";
}

// Appends the arrays of a BatchedArray: rows, and columns if it has an inner shape.
void add_arrays(pbf_reader batched, std::vector<Array>& all) {
  const auto numbers = values_of<float>(bytes_in(batched, 1));
  const auto offsets = values_of<std::int64_t>(bytes_in(batched, 2));  // in bytes
  std::vector<std::int64_t> inner;
  if (batched.next(4, kBytes))
    for (const std::int64_t size : batched.get_packed_int64()) inner.push_back(size);
  const std::int64_t columns = inner.empty() ? 1 : inner[0];
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    const std::int64_t begin = offsets[i] / 4, end = offsets[i + 1] / 4;
    if (begin < 0 || begin > end || end > std::ssize(numbers) || inner.size() > 1 || columns < 1 ||
        (end - begin) % columns != 0)
      refuse("forward_backward", "arrays that their bytes do not have",
             "log-probabilities of the targets' shapes", "Look at the server's log");
    Array& array = all.emplace_back();
    array.shape = {(end - begin) / columns};
    array.shape.insert(array.shape.end(), inner.begin(), inner.end());
    array.numbers.assign(numbers.begin() + begin, numbers.begin() + end);
  }
}

// Calls `read` with the message that a reply is.
void read_protobuf(const char* where, const std::string& reply, const char* expected,
                   const std::function<void(pbf_reader)>& read) {
  try {
    read(pbf_reader(reply));
  } catch (const protozero::exception& error) {
    refuse(where, fmt::format("a reply that is no protobuf ({})", error.what()), expected,
           "Look at the server's log");
  }
}

std::string host_of(const std::string& url) {
  const std::size_t scheme = url.find("://"), begin = scheme == std::string::npos ? 0 : scheme + 3;
  return url.substr(begin, url.find('/', begin) - begin);
}

}  // namespace

Remote::Remote(std::string url, std::string key, std::chrono::milliseconds beat)
    : url_(std::move(url)), key_(std::move(key)) {
  while (url_.ends_with('/')) url_.pop_back();
  session_ =
      text_in(ask("POST", "create_session",
                  {{"tags", json::array()}, {"user_metadata", json::object()}, {"sdk_version", "0.38.0"}}),
              "session_id", url_);
  beat_ = std::jthread([this, beat](const std::stop_token& ends) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    while (never.wait_for(lock, ends, beat, [] { return false; }), !ends.stop_requested()) try {
        ask("POST", "session_heartbeat", {{"session_id", session_}});
      } catch (const std::exception&) {  // the next request says what is wrong
      }
  });
}

Remote::~Remote() {
  try {
    ask("POST", "sessions/" + session_ + "/finish", {{"reason", {{"type", "success"}}}});
  } catch (const std::exception&) {  // it ends by itself, when nothing is heard of it
  }
}

std::string Remote::send(const std::string& method, const std::string& path, const std::string& body,
                         const std::string& type) {
  const bool whole = path.starts_with("http://") || path.starts_with("https://");
  const std::string url = whole ? path : url_ + "/api/v1/" + path;
  // Files may lie elsewhere; the key is the server's alone.
  HttpReply reply = http_call({.url = url,
                               .key = host_of(url) == host_of(url_) ? key_ : "",
                               .method = method,
                               .type = type,
                               .body = body,
                               .seconds = kSilence,
                               .most_bytes = kMostBytes});
  if (reply.status != 200 && reply.status != 408)
    refuse(printable(url, 300), fmt::format("status {}: {}", reply.status, printable(reply.body, 500)),
           "status 200", reply.status == 401 ? "Give its key with --api-key-file" : "Look at what it says");
  if (reply.status == 408) return {};
  return std::move(reply.body);
}

json Remote::ask(const std::string& method, const std::string& path, const json& body) {
  return parsed(path, send(method, path, body.is_null() ? "" : body.dump()));
}

std::string Remote::result(const json& promise) {
  const std::string id = text_in(promise, "request_id", "a promise");
  const auto end = std::chrono::steady_clock::now() + kLongest;
  while (std::chrono::steady_clock::now() < end) {
    std::string reply = send("POST", "retrieve_future", json{{"request_id", id}}.dump());
    if (reply.empty()) {  // a server that answers at once is not asked without pause
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      continue;
    }
    if (reply.starts_with("{"))
      if (const json value = parsed(id, reply); value.contains("error"))
        refuse(printable(id, 200), printable(value.at("error").dump(-1, ' ', true), 2000), "a result",
               "Look at what the server says");
    return reply;
  }
  refuse(printable(id, 200), fmt::format("no result after {} s", kLongest.count()), "a result",
         "Look at the server's log");
}

json Remote::operation(const std::string& model, const std::string& path, json body) {
  body["model_id"] = model, body["seq_id"] = ++sequences_[model];
  return parsed(path, result(ask("POST", path, body)));
}

std::vector<std::string> Remote::bases() {
  std::vector<std::string> names;
  const json told = ask("GET", "get_server_capabilities").value("supported_models", json::array());
  for (const json& model : told) {
    names.push_back(text_in(model, "model_name", "get_server_capabilities"));
    if (printable(names.back()) != names.back())
      refuse("get_server_capabilities", printable(names.back(), 200), "a name on one line",
             "Give it another");
  }
  return names;
}

std::string Remote::create(const CreateModel& request) {
  const std::int64_t number = sequences_[""]++;
  const json promise =
      ask("POST", "create_model",
          {{"session_id", session_},
           {"model_seq_id", number},
           {"base_model", request.base},
           {"lora_config", {{"rank", request.lora.rank}, {"seed", request.lora.seed.value_or(0)}}},
           {"user_metadata", request.metadata}});
  return text_in(parsed("create_model", result(promise)), "model_id", "create_model");
}

ForwardBackwardResult Remote::forward_backward(const std::string& model, const ForwardBackward& call) {
  std::string body;
  pbf_writer request(body);
  request.add_string(1, model);
  request.add_int64(2, ++sequences_[model]);
  for (const Datum& datum : call.data) add_datum(request, datum);
  request.add_string(4, call.loss);
  for (const auto& [key, value] : call.config) {
    pbf_writer entry(request, 7);
    entry.add_string(1, key);
    pbf_writer number(entry, 2);
    number.add_double(1, std::get<double>(value));
  }
  const std::string reply =
      result(parsed("forward_backward", send("POST", "forward_backward", body, kProtobufType)));
  ForwardBackwardResult found;
  read_protobuf("forward_backward", reply, "a ForwardBackwardOutput", [&](pbf_reader message) {
    for (pbf_reader records = message; records.next(2, kBytes);)
      for (pbf_reader record = records.get_message(); record.next(2, kBytes);)
        if (pbf_reader entry = record.get_message();
            bytes_in(entry, 1) == "logprobs" && entry.next(2, kBytes))
          add_arrays(entry.get_message(), found.log_probabilities);
    while (message.next(3, kBytes))
      if (pbf_reader entry = message.get_message(), value = entry;
          value.next(2, protozero::pbf_wire_type::fixed64))
        found.metrics[bytes_in(entry, 1)] = value.get_double();
  });
  return found;
}

Metrics Remote::optim_step(const std::string& model, const AdamParams& params) {
  const json reply = operation(model, "optim_step",
                               {{"adam_params",
                                 {{"learning_rate", params.learning_rate},
                                  {"beta1", params.beta1},
                                  {"beta2", params.beta2},
                                  {"eps", params.epsilon},
                                  {"weight_decay", params.weight_decay},
                                  {"grad_clip_norm", params.clip}}}});
  Metrics metrics;
  const json said = reply.value("metrics", json::object());
  for (const auto& [name, value] : said.items())
    if (value.is_number()) metrics[name] = value.get<double>();
  return metrics;
}

// Without a number, as the SDK: a request that was refused may have left a gap in them.
void Remote::unload(const std::string& model) { result(ask("POST", "unload_model", {{"model_id", model}})); }

void Remote::download(const std::string& model, const fs::path& directory) {
  const std::string name = fmt::format("verify-{}", sequences_[model] + 1);
  operation(model, "save_weights_external", {{"path", name}});
  const std::string checkpoint = "training_runs/" + model + "/checkpoints/external_weights/" + name;
  const auto removed = c10::make_scope_exit([&] {
    try {
      send("DELETE", checkpoint);
    } catch (const ConfigError&) {  // a failed download says its own reason
    }
  });
  const json files = ask("GET", checkpoint + "/external_weights_urls").value("urls", json::object());
  for (const auto& [file, address] : files.items()) {
    if (file.empty() || file.find('/') != std::string::npos || file.starts_with('.') || !address.is_string())
      refuse("external_weights_urls", printable(file, 200), "names of files", "Look at the server's log");
    const std::string content = send("GET", address.get<std::string>());
    std::ofstream out(directory / file, std::ios::binary);  // a folder that nobody else reads
    if (!(out << content).flush())
      refuse((directory / file).string(), "no room, or no permission, to write it", "both", "Set TMPDIR");
  }
}

std::string Remote::sampler_of(const std::string& model) {
  const json saved =
      operation(model, "save_weights_for_sampler", {{"sampling_session_seq_id", sequences_[""]++}});
  return text_in(saved, "sampling_session_id", "save_weights_for_sampler");
}

std::vector<float> Remote::log_probabilities(const std::string& sampler,
                                             const std::vector<std::int64_t>& prompt) {
  const json promise = ask("POST", "asample",
                           {{"sampling_session_id", sampler},
                            {"seq_id", sequences_[""]++},
                            {"num_samples", 1},
                            {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", prompt}}}}}},
                            {"sampling_params", {{"max_tokens", 1}, {"seed", 1}}},
                            {"prompt_logprobs", true}});
  const std::string reply = result(promise);
  std::vector<float> values;
  read_protobuf("asample", reply, "a SampleResponse", [&](pbf_reader message) {
    while (message.next(2, kBytes)) values = values_of<float>(message.get_string());
  });
  if (values.size() != prompt.size())
    refuse("asample", fmt::format("{} log-probabilities of {} tokens", values.size(), prompt.size()),
           "one for each token of the prompt", "Look at the server's log");
  return values;
}

}  // namespace isograd::serve
