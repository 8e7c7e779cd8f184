// An engine of one number per model, and a client without sockets, for tests of the service.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <fstream>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <protozero/pbf_writer.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/refuse.hpp"
#include "serve/service/service.hpp"

namespace isograd::serve::service_testing {

using nlohmann::json;

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  a = (a ^ b) * 0x9E3779B97F4A7C15ull;
  return a ^ (a >> 29);
}

// The gradient of a model's number is the sum of weight times target. Its digest takes in every datum and
// step in order, so it tells whether one was lost, doubled or moved.
class ToyEngine : public Engine {
 public:
  struct Toy {
    double number = 1, gradient = 0;
    std::int64_t datums = 0, steps = 0, operations = 0;
    std::uint64_t digest = 7;
  };
  std::chrono::microseconds datum_time{0};
  static inline std::atomic<bool> hold = false;  // a snapshot that is written waits
  std::vector<std::string> calls{};              // models, in the order of forward_backward
  bool full = false;                             // no save has room
  // A target whose forward_backward ends the process, and a seed whose samples do.
  static inline std::int64_t deadly = -1;

  const std::vector<BaseModel>& bases() const override { return bases_; }
  void set_digest(const std::string& digest) { bases_[0].digest = digest; }
  void create(const std::string& model, const CreateModel& request) override {
    if (request.lora.rank > 64) refuse("rank", "too much", "at most 64", "Ask for less");
    ISOGRAD_INVARIANT(!models.contains(model), model);
    models[model].digest = mix(11, *request.lora.seed);
  }
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& request) override {
    Toy& toy = models.at(model);
    if (request.loss != "cross_entropy") refuse("loss_fn", request.loss, "cross_entropy", "Name that");
    if (request.data.empty()) refuse("data", "no datums", "at least one", "Send some");
    calls.push_back(model);
    ForwardBackwardResult result;
    result.metrics = {{"loss:sum", 0}};
    for (const Datum& datum : request.data) {
      const std::vector<std::int64_t>& targets = datum.inputs.at("target_tokens").integers;
      const std::vector<float>& weights = datum.inputs.at("weights").numbers;
      if (targets.size() != datum.tokens.size())
        refuse("target_tokens", std::to_string(targets.size()), "a row for each token", "Send that");
      Array scores{.shape = {static_cast<std::int64_t>(targets.size())}, .numbers = {}, .integers = {}};
      for (std::size_t i = 0; i < targets.size(); ++i) {
        scores.numbers.push_back(static_cast<float>(toy.number * static_cast<double>(targets[i])));
        result.metrics["loss:sum"] -= toy.number * static_cast<double>(targets[i]) * weights[i];
        if (request.forward_only) continue;
        if (targets[i] == deadly) ::_exit(static_cast<int>(deadly));
        toy.gradient += weights[i] * static_cast<double>(targets[i]);
        toy.digest = mix(toy.digest, static_cast<std::uint64_t>(targets[i]));
      }
      toy.datums += request.forward_only ? 0 : 1;
      result.log_probabilities.push_back(scores);
      std::this_thread::sleep_for(datum_time);
    }
    return result;
  }
  Metrics optim_step(const std::string& model, const AdamParams& params) override {
    Toy& toy = models.at(model);
    if (toy.datums == 0) refuse("optim_step", "no gradient", "a forward_backward before it", "Send one");
    toy.number -= params.learning_rate * toy.gradient;
    toy.digest = mix(toy.digest, std::bit_cast<std::uint64_t>(toy.number));
    const Metrics metrics{{"grad_norm", toy.gradient},
                          {"datums", static_cast<double>(toy.datums)},
                          {"steps", static_cast<double>(++toy.steps)},
                          {"digest", static_cast<double>(toy.digest >> 20)}};
    toy.gradient = 0, toy.datums = 0;
    return metrics;
  }
  void drop_gradient(const std::string& model) override {
    models.at(model).gradient = 0, models.at(model).datums = 0;
  }
  void remove(const std::string& model) override { ISOGRAD_INVARIANT(models.erase(model) == 1, model); }
  std::int64_t save(const std::string& model, Save, const std::filesystem::path& directory) override {
    if (full) refuse("save", "a full disk", "room", "Make some");
    return write(directory / "toy", models.at(model));
  }
  void load(const std::string& model, const std::filesystem::path& directory, bool optimizer,
            const std::map<std::string, std::string>&) override {
    ISOGRAD_INVARIANT(!models.contains(model), model);
    Toy toy = read(directory / "toy");
    if (!optimizer) toy.gradient = 0, toy.datums = 0, toy.steps = 0;
    models[model] = toy;
  }
  void open_sampler(const std::string& sampler, const std::string&) override { samplers[sampler] = {}; }
  void open_sampler_of(const std::string& sampler, const std::string& model) override {
    samplers[sampler] = models.at(model);
  }
  void load_sampler(const std::string& sampler, const std::filesystem::path& directory) override {
    samplers[sampler] = read(directory / "toy");
  }
  Write saving(const std::string& model) override {
    if (full) refuse("save", "a full disk", "room", "Make some");
    return [toy = models.at(model)](const std::filesystem::path& directory) {
      for (int i = 0; hold && i < 20000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      write(directory / "toy", toy);
    };
  }
  Write saving_sampler(const std::string& sampler) override {
    return [toy = samplers.at(sampler)](const auto& directory) { write(directory / "toy", toy); };
  }
  void close_sampler(const std::string& sampler) override {
    ISOGRAD_INVARIANT(samplers.erase(sampler) == 1, sampler);
  }
  void submit(const std::string& id, const std::string& sampler, const Sample& request,
              std::uint64_t seed) override {
    if (request.params.temperature > 100) refuse("temperature", "more than 100", "less", "Cool down");
    Running& running = running_[id];
    running.request = request, running.seed = request.params.seed.value_or(seed);
    running.digest = samplers.at(sampler).digest;
    running.result.sequences.resize(static_cast<std::size_t>(request.samples));
  }
  std::vector<Sampled> sample_pass() override {  // a token of each sequence
    std::vector<Sampled> complete;
    for (auto& [id, running] : running_) {
      if (static_cast<std::int64_t>(running.seed) == deadly) ::_exit(static_cast<int>(deadly));
      for (std::size_t i = 0; i < running.result.sequences.size(); ++i) {
        SampledSequence& sequence = running.result.sequences[i];
        const std::uint64_t key = mix(mix(running.digest, running.seed), i * 1000 + sequence.tokens.size());
        sequence.tokens.push_back(static_cast<std::int32_t>(key % 1000));
        sequence.log_probabilities.push_back(-1.0F);
      }
      if (static_cast<std::int64_t>(running.result.sequences[0].tokens.size()) >=
          *running.request.params.max_tokens)
        complete.push_back({.id = id, .error = "", .result = running.result});
    }
    for (const Sampled& one : complete) running_.erase(one.id);
    std::this_thread::sleep_for(datum_time);
    return complete;
  }
  bool sampling() const override { return !running_.empty(); }

  std::map<std::string, Toy> models{}, samplers{};

 private:
  struct Running {
    Sample request{};
    std::uint64_t seed = 0, digest = 0;
    SampleResult result{};
  };
  static std::int64_t write(const std::filesystem::path& path, const Toy& toy) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&toy), sizeof(toy));
    return sizeof(toy);
  }
  static Toy read(const std::filesystem::path& path) {
    Toy toy;
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&toy), sizeof(toy));
    return toy;
  }
  std::vector<BaseModel> bases_{{"toy/base", "", "/toy/tokenizer", "toy", 128, 1000}};
  std::map<std::string, Running> running_{};
};

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// A forward_backward as the SDK sends it: datum i has `length` tokens, targets first + i.
inline std::string forward_backward_body(const std::string& model, std::int64_t sequence, std::int64_t first,
                                         std::int64_t datums, std::int64_t length = 2,
                                         const std::string& loss = "cross_entropy", std::int64_t rows = -1) {
  using protozero::pbf_writer;
  std::string body;
  pbf_writer request(body);
  request.add_string(1, model);
  request.add_int32(2, static_cast<std::int32_t>(sequence));
  const auto tensor = [](std::string bytes, int dtype, std::int64_t size) {
    std::string text;
    pbf_writer writer(text);
    writer.add_bytes(1, bytes);
    writer.add_enum(3, dtype);
    writer.add_packed_int64(4, &size, &size + 1);
    return text;
  };
  const auto entry = [](const std::string& key, const std::string& value) {
    std::string text;
    pbf_writer writer(text);
    writer.add_string(1, key);
    writer.add_message(2, value);
    return text;
  };
  const std::int64_t targets = rows < 0 ? length : rows;
  for (std::int64_t i = 0; i < datums; ++i) {
    std::string chunk, text, datum;
    pbf_writer(text).add_bytes(1, bytes_of(std::vector<std::int32_t>(static_cast<std::size_t>(length), 5)));
    pbf_writer(chunk).add_message(1, text);
    pbf_writer writer(datum);
    const auto count = static_cast<std::size_t>(targets);
    writer.add_message(1, chunk);
    writer.add_message(
        2, entry("target_tokens", tensor(bytes_of(std::vector<std::int64_t>(count, first + i)), 2, targets)));
    writer.add_message(2, entry("weights", tensor(bytes_of(std::vector<float>(count, 0.5F)), 1, targets)));
    request.add_message(3, datum);
  }
  request.add_string(4, loss);
  return body;
}

inline HttpRequest request_of(const std::string& method, const std::string& path, std::string body) {
  HttpRequest request{.method = method,
                      .path = path,
                      .query = {},
                      .headers = {{"x-api-key", "tml-test"}},
                      .body = std::move(body)};
  request.headers["host"] = "127.0.0.1:1";
  return request;
}

// Anything that answers requests.
using Transport = std::function<HttpReply(const HttpRequest&, const std::string& tenant)>;

// Writes what the SDK writes.
class Client {
 public:
  explicit Client(Transport transport, std::string tenant = "a")
      : transport_(std::move(transport)), tenant_(std::move(tenant)) {}
  HttpReply call(const std::string& method, const std::string& path, std::string body = "") const {
    return transport_(request_of(method, path, std::move(body)), tenant_);
  }
  HttpReply post(const std::string& path, const json& body) const {
    return call("POST", "/api/v1/" + path, body.dump());
  }
  json sure(const std::string& path, const json& body) const {
    const HttpReply reply = post(path, body);
    EXPECT_EQ(reply.status, 200) << path << " " << reply.body;
    return json::parse(reply.body);
  }
  std::string start() {
    return session = sure("create_session", {{"tags", json::array()},
                                             {"user_metadata", json::object()},
                                             {"sdk_version", "0.38.0"}})["session_id"];
  }
  std::string model_of(int number) const { return session + ":train:" + std::to_string(number); }
  json creation(int number, const json& more = json::object()) const {
    json body{{"session_id", session}, {"model_seq_id", number}, {"base_model", "toy/base"}};
    body.update(more);
    return body;
  }
  std::string create(int number = 0, const json& more = {{"lora_config", {{"rank", 8}, {"seed", 3}}}}) const {
    EXPECT_EQ(result(sure("create_model", creation(number, more))["request_id"]).status, 200);
    return model_of(number);
  }
  // Creates a model from a checkpoint.
  json load(int number, const std::string& path, bool optimizer = true) const {
    return value(sure("load_weights", {{"session_id", session},
                                       {"model_seq_id", number},
                                       {"path", path},
                                       {"optimizer", optimizer}})["request_id"]);
  }
  std::string save(const std::string& model, std::int64_t sequence, const std::string& name) const {
    return value(operation("save_weights", model, sequence, {{"path", name}}))["path"];
  }
  std::string sampler(const std::string& model, std::int64_t sequence, int number = 0) const {
    return value(operation("save_weights_for_sampler", model, sequence,
                           {{"sampling_session_seq_id", number}}))["sampling_session_id"];
  }
  // The request's id.
  std::string forward_backward(const std::string& body) const {
    const HttpReply reply = call("POST", "/api/v1/forward_backward", body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body)["request_id"];
  }
  std::string operation(const std::string& path, const std::string& model, std::int64_t sequence,
                        json body = json::object()) const {
    body["model_id"] = model, body["seq_id"] = sequence;
    return sure(path, body)["request_id"];
  }
  std::string step(const std::string& model, std::int64_t sequence) const {
    return operation("optim_step", model, sequence,
                     {{"adam_params",
                       {{"learning_rate", 0.001},
                        {"beta1", 0.9},
                        {"beta2", 0.95},
                        {"eps", 1e-12},
                        {"weight_decay", 0.0},
                        {"grad_clip_norm", 0.0}}}});
  }
  // Polls until the result is there.
  HttpReply result(const std::string& request) const {
    for (int i = 0; i < 200; ++i) {
      HttpReply reply = post("retrieve_future", {{"request_id", request}, {"allow_metadata_only", false}});
      if (reply.status != 408) return reply;
    }
    return {.status = 408, .body = "never"};
  }
  json value(const std::string& request) const {
    const HttpReply reply = result(request);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body, nullptr, false);
  }

  std::string session{};

 private:
  Transport transport_;
  std::string tenant_;
};

// A service that computes on a thread of its own, or not at all.
class Running {
 public:
  Running(ServiceOptions options, Engine& engine, bool computes = true)
      : service(std::move(options), engine) {
    if (computes) thread_ = std::thread([this] { service.run(); });
  }
  ~Running() {
    service.stop();
    if (thread_.joinable()) thread_.join();
  }
  Transport transport() {
    return [this](const HttpRequest& request, const std::string& tenant) {
      auto answered = std::make_shared<std::promise<HttpReply>>();
      std::future<HttpReply> reply = answered->get_future();
      service.handle(request, tenant, [answered](HttpReply given) { answered->set_value(std::move(given)); });
      if (reply.wait_for(std::chrono::seconds(20)) != std::future_status::ready)
        return HttpReply{.status = 599, .body = "no answer"};
      return reply.get();
    };
  }
  Service service;

 private:
  std::thread thread_;
};

}  // namespace isograd::serve::service_testing
