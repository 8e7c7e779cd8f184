#include "serve/service/service.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <numeric>
#include <random>

#include "full_tests.hpp"
#include "serve/service/service_testing.hpp"
#include "serve/store/store_testing.hpp"

namespace isograd::serve {
namespace {

using namespace service_testing;
namespace fs = std::filesystem;

struct Folder {
  Folder() {
    std::string name = (fs::temp_directory_path() / "isograd-service-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path = name;
  }
  ~Folder() { fs::remove_all(path); }
  fs::path path;
};

struct Served {
  Served() {
    options.state = folder.path / "state", options.print_steps = false;
    options.snapshot_least = 1e9;
  }
  // Starts the service: the first time with a session and a model of the client, later on the same state.
  void serve(bool computes = true) {
    running.reset();
    if (!client.session.empty()) engine = {};
    running.emplace(options, engine, computes);
    const std::string session = client.session;
    client = Client(running->transport());
    client.session = session;
    if (session.empty()) client.start(), model = client.create();
  }
  // Ends the service as a kill does, without a snapshot.
  void kill() {
    const fs::path copy = folder.path / "copy";
    fs::copy(options.state, copy, fs::copy_options::recursive);
    running.reset();
    fs::remove_all(options.state), fs::rename(copy, options.state);
  }
  Folder folder;
  ToyEngine engine;
  ServiceOptions options;
  std::optional<Running> running;
  Client client{{}};
  std::string model;
};

class ServiceTest : public ::testing::Test, protected Served {};

json sampling(const std::string& sampler, int sequence, int samples = 2, int tokens = 5) {
  return {{"sampling_session_id", sampler},
          {"seq_id", sequence},
          {"num_samples", samples},
          {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {1, 2, 3}}}}}}},
          {"sampling_params", {{"max_tokens", tokens}, {"temperature", 1.0}}},
          {"prompt_logprobs", false}};
}

TEST(Service, ChunksInAnyOrderAndTwiceAreOneBatch) {
  const auto digest = [](bool shuffled) {
    Served one;
    one.serve();
    const Client& client = one.client;
    const std::string model = one.model;
    std::vector<std::string> ids(4);
    for (const int chunk : shuffled ? std::vector{2, 3, 2, 4, 4, 1, 3} : std::vector{1, 2, 3, 4})
      ids[static_cast<std::size_t>(chunk) - 1] =
          client.forward_backward(forward_backward_body(model, chunk, 10 * chunk, 3));
    const std::string step = client.step(model, 5);
    EXPECT_EQ(client.step(model, 5), step);
    const json metrics = client.value(step)["metrics"];
    EXPECT_EQ(metrics["datums"], 12);
    for (const std::string& id : ids) {
      const HttpReply reply = client.result(id);
      EXPECT_EQ(reply.type, tinker::kProtobuf);
      EXPECT_EQ(client.result(id).body, reply.body);  // readable again
    }
    return metrics["digest"].get<double>();
  };
  EXPECT_EQ(digest(true), digest(false));
}

TEST(Service, PiecesJoinToTheResultOfOneCall) {
  std::vector<std::string> bodies;
  for (const std::int64_t tokens : {1, 7, 1000000}) {
    Served one;
    one.options.piece_tokens = tokens;
    one.serve();
    bodies.push_back(
        one.client.result(one.client.forward_backward(forward_backward_body(one.model, 1, 8, 16))).body);
    EXPECT_EQ(one.engine.calls.size(), tokens == 1 ? 16u : tokens == 7 ? 4u : 1u);
  }
  EXPECT_EQ(bodies[0], bodies[2]);
  EXPECT_EQ(bodies[1], bodies[2]);
}

TEST_F(ServiceTest, AHoleWaitsAndALongPollSaysTryAgain) {
  options.poll_seconds = 0.2;
  serve();
  const std::string late = client.forward_backward(forward_backward_body(model, 2, 1, 1));
  const HttpReply reply = client.post("retrieve_future", {{"request_id", late}});
  EXPECT_EQ(reply.status, 408);
  EXPECT_EQ(json::parse(reply.body)["type"], "try_again");
  EXPECT_TRUE(engine.calls.empty());
  client.forward_backward(forward_backward_body(model, 1, 1, 1));
  EXPECT_EQ(client.result(late).status, 200);
  EXPECT_EQ(client.post("retrieve_future", {{"request_id", "nothing"}}).status, 410);
}

TEST_F(ServiceTest, AFailedOperationFailsTheLaterOnesWithItsCause) {
  serve();
  const std::string bad =
      client.forward_backward(forward_backward_body(model, 1, 1, 1, 2, "stable_reinforce"));
  const std::string step = client.step(model, 2);
  const std::string broken = client.forward_backward(forward_backward_body(model, 3, 1, 1).substr(0, 60));
  for (const std::string& id : {bad, step, broken}) {
    const json failure = client.value(id);
    EXPECT_EQ(failure["category"], "user") << failure;
    EXPECT_NE(failure.value("error", "").find("stable_reinforce"), std::string::npos) << failure;
  }
  EXPECT_FALSE(engine.models.contains(model));
  const std::string next = client.create(1);
  client.forward_backward(forward_backward_body(next, 1, 1, 1));
  EXPECT_EQ(client.value(client.step(next, 2))["metrics"]["steps"], 1);
  // A save that is refused changes nothing, and the model goes on.
  client.save(next, 3, "one");
  EXPECT_EQ(client.value(client.operation("save_weights", next, 4, {{"path", "one"}}))["category"], "user");
  EXPECT_EQ(client.value(client.operation("save_weights", next, 5, {{"path", "a/b"}}))["category"], "user");
  client.forward_backward(forward_backward_body(next, 6, 1, 1));
  EXPECT_EQ(client.value(client.step(next, 7))["metrics"]["steps"], 2);
}

TEST_F(ServiceTest, UserErrorsAreNeverOnesThatClientsRetry) {
  serve();
  const auto refused = [&](const HttpReply& reply, int status) {
    EXPECT_EQ(reply.status, status) << reply.body;
    EXPECT_TRUE(json::parse(reply.body).contains("detail"));
  };
  refused(client.call("POST", "/api/v1/optim_step", "{"), 400);
  refused(client.call("POST", "/api/v1/optim_step", "[]"), 400);
  refused(client.call("POST", "/api/v1/forward_backward", "\xff\xff"), 400);
  refused(client.call("POST", "/api/v1/create_session", "7"), 400);
  refused(client.call("GET", "/api/v1/nothing"), 404);
  refused(client.call("GET", "/"), 404);
  refused(client.call("GET", "/api/v1/optim_step"), 404);
  refused(client.post("optim_step", {{"model_id", "unknown"}, {"seq_id", 1}}), 404);
  refused(client.post("optim_step", {{"model_id", model}}), 400);
  for (const json& number : {json(0), json(-1), json(1.5), json("1"), json(1e300)})
    refused(client.post("optim_step", {{"model_id", model}, {"seq_id", number}}), 400);
  refused(client.post("create_model", client.creation(1, {{"base_model", "other"}})), 400);
  refused(client.post("create_model", client.creation(1, {{"session_id", "other"}})), 404);
  refused(client.post("create_sampling_session", {{"session_id", client.session},
                                                  {"sampling_session_seq_id", 0},
                                                  {"model_path", "tinker://a/weights/b"}}),
          404);
  refused(client.post("asample", sampling("nobody", 0)), 404);
  refused(client.post("get_info", {{"model_id", "nobody"}}), 404);
  refused(client.post("weights_info", {{"tinker_path", "tinker://a/weights/b"}}), 404);
  refused(client.call("DELETE", "/api/v1/training_runs/a/checkpoints/weights/b"), 404);
  refused(client.call("PUT", "/api/v1/training_runs/a/checkpoints/weights/b/ttl", R"({"ttl_seconds":1})"),
          400);
  refused(client.call("GET", "/isograd/files/00/../../x"), 404);
  // Refused when they run, and their sequence is used.
  std::int64_t sequence = 0;
  const auto failed = [&](const std::string& id) {
    const json reply = client.value(id);
    EXPECT_EQ(reply["category"], "user") << reply;
    EXPECT_NE(reply["error"].get<std::string>().find("found"), std::string::npos) << reply;
  };
  for (const json& path : {json(".."), json("a b"), json(""), json(7)})
    failed(client.operation("save_weights", model, ++sequence, {{"path", path}}));
  failed(client.operation("save_weights_for_sampler", model, ++sequence,
                          {{"sampling_session_seq_id", 0}, {"kind", "inflight"}}));
  failed(client.operation("optim_step", model, ++sequence, {{"optimizer_params", {{"type", "dimuon"}}}}));
  failed(client.sure("create_model", client.creation(5, {{"lora_config", {{"rank", 99}}}}))["request_id"]);
  EXPECT_EQ(client.load(6, "tinker://a/weights/b")["category"], "user");
}

TEST_F(ServiceTest, AnotherTenantsThingsLookUnknown) {
  running.emplace(options, engine);
  Client owner(running->transport(), "a"), other(running->transport(), "b");
  owner.start(), other.start();
  const std::string model = owner.create();
  const std::string saved = owner.save(model, 1, "one"), sampler = owner.sampler(model, 2);
  const std::string future = owner.sure("asample", sampling(sampler, 0))["request_id"];
  EXPECT_EQ(owner.result(future).status, 200);
  owner.value(owner.operation("save_weights_external", model, 3, {{"path", "one"}}));
  const auto as_unknown = [&](const HttpReply& foreign, HttpReply unknown, const std::string& id,
                              const std::string& name) {
    EXPECT_EQ(foreign.status, unknown.status);
    EXPECT_TRUE(foreign.status == 404 || foreign.status == 410) << foreign.body;
    for (std::size_t at = 0; (at = unknown.body.find(name, at)) != std::string::npos; at += id.size())
      unknown.body.replace(at, name.size(), id);
    EXPECT_EQ(foreign.body, unknown.body);
  };
  const auto compare = [&](const std::string& path, const std::string& key, const std::string& id,
                           json body) {
    json unknown = body;
    body[key] = id, unknown[key] = "none";
    as_unknown(other.post(path, body), other.post(path, unknown), id, "none");
  };
  compare("get_info", "model_id", model, {});
  compare("optim_step", "model_id", model, {{"seq_id", 4}});
  compare("unload_model", "model_id", model, json::object());
  compare("weights_info", "tinker_path", saved, {});
  compare("create_sampling_session", "model_path", saved,
          {{"session_id", other.session}, {"sampling_session_seq_id", 0}});
  compare("create_sampling_session", "session_id", owner.session,
          {{"sampling_session_seq_id", 0}, {"base_model", "toy/base"}});
  compare("asample", "sampling_session_id", sampler, sampling("x", 1));
  compare("retrieve_future", "request_id", future, {});
  compare("session_heartbeat", "session_id", owner.session, {});
  compare("create_model", "session_id", owner.session, {{"model_seq_id", 9}, {"base_model", "toy/base"}});
  const std::string checkpoint = "/api/v1/training_runs/" + model + "/checkpoints/weights/one";
  const auto compare_path = [&](const char* method, const std::string& before, const std::string& id,
                                const std::string& after = "", const std::string& body = "") {
    const auto asked = [&](const std::string& name) {
      return other.call(method, "/api/v1/" + before + name + after, body);
    };
    as_unknown(asked(id), asked("none"), id, "none");
  };
  compare_path("GET", "samplers/", sampler);
  compare_path("GET", "sessions/", owner.session);
  compare_path("POST", "sessions/", owner.session, "/finish",
               R"({"reason":{"type":"success"},"detail":null})");
  for (const char* after : {"", "/checkpoints", "/checkpoints/external_weights/one/external_weights_urls"})
    compare_path("GET", "training_runs/", model, after);
  const std::string one = "/checkpoints/weights/one";
  for (const std::string& after : {one, one + "/publish"})
    compare_path("DELETE", "training_runs/", model, after);
  compare_path("POST", "training_runs/", model, one + "/publish");
  compare_path("PUT", "training_runs/", model, one + "/ttl", R"({"ttl_seconds":null})");
  EXPECT_EQ(json::parse(other.call("GET", "/api/v1/training_runs").body)["cursor"]["total_count"], 0);
  EXPECT_TRUE(json::parse(other.call("GET", "/api/v1/checkpoints").body)["checkpoints"].empty());
  for (const char* path : {"/metrics", "/isograd/status"}) {
    const auto tells = [&](const Client& who) {
      return who.call("GET", path).body.find(model) != std::string::npos;
    };
    EXPECT_TRUE(tells(owner) && tells(Client(running->transport(), "operator"))) << path;
    EXPECT_FALSE(tells(other)) << path;
  }
  EXPECT_EQ(owner.call("POST", checkpoint + "/publish").status, 200);
  EXPECT_EQ(other.post("weights_info", {{"tinker_path", saved}}).status, 200);
  EXPECT_EQ(other.call("DELETE", checkpoint).status, 404);
  EXPECT_EQ(owner.call("DELETE", checkpoint + "/publish").status, 200);
  EXPECT_EQ(other.post("weights_info", {{"tinker_path", saved}}).status, 404);
  // A load is refused only when it runs.
  const auto loaded = [&](int number, std::string path) { return other.load(number, path).dump(); };
  std::string unknown = loaded(1, "tinker://none:train:0/weights/one");
  const std::size_t at = unknown.find("none:train:0");
  ASSERT_NE(at, std::string::npos) << unknown;
  EXPECT_EQ(loaded(2, saved), unknown.replace(at, 12, model));
}

TEST_F(ServiceTest, WhatWaitsForAnUnloadedModelIsAnswered) {
  serve();
  const std::string unload = client.operation("unload_model", model, 2, json::object());
  const std::string step = client.operation("save_weights", model, 3, {{"path", "late"}});
  client.forward_backward(forward_backward_body(model, 1, 1, 2));  // only now can they run
  EXPECT_EQ(client.value(unload)["type"], "unload_model");
  EXPECT_NE(client.result(step).body.find("unloaded"), std::string::npos);
}

TEST_F(ServiceTest, AForwardPassThatIsRefusedLeavesTheModel) {
  serve();
  std::string body = forward_backward_body(model, 1, 1, 2, 2, "no such loss");
  protozero::pbf_writer(body).add_bool(6, true);
  const HttpReply refused = client.result(client.forward_backward(body));
  EXPECT_NE(refused.body.find("no such loss"), std::string::npos) << refused.body;
  protozero::pbf_writer(body = forward_backward_body(model, 2, 1, 2)).add_bytes(3, "no datum");  // unreadable
  protozero::pbf_writer(body).add_bool(6, true);
  EXPECT_NE(client.result(client.forward_backward(body)).body.find("error"), std::string::npos);
  client.forward_backward(forward_backward_body(model, 3, 1, 2));
  EXPECT_EQ(client.value(client.step(model, 4))["metrics"]["datums"], 2);
}

TEST_F(ServiceTest, Checkpoints) {
  serve();
  client.forward_backward(forward_backward_body(model, 1, 1, 2));
  client.step(model, 2);
  client.forward_backward(forward_backward_body(model, 3, 5, 2));  // an open accumulator is saved too
  const std::string path = client.save(model, 4, "one");
  EXPECT_EQ(path, "tinker://" + model + "/weights/one");
  const auto created = [&](int number, bool optimizer) {
    EXPECT_EQ(client.load(number, path, optimizer)["type"], "load_weights");
    const std::string id = client.model_of(number);
    EXPECT_EQ(client.sure("get_info", {{"model_id", id}})["lora_rank"], 8);
    client.forward_backward(forward_backward_body(id, 1, 9, 1));
    return client.value(client.step(id, 2))["metrics"];
  };
  client.forward_backward(forward_backward_body(model, 5, 9, 1));
  const json uninterrupted = client.value(client.step(model, 6))["metrics"];
  EXPECT_EQ(created(1, true), uninterrupted);
  EXPECT_NE(created(2, false), uninterrupted);
  // Loaded, then overwritten and deleted: a snapshot comes first.
  EXPECT_EQ(client.value(
                client.operation("save_weights", model, 7, {{"path", "one"}, {"overwrite", true}}))["path"],
            path);
  EXPECT_TRUE(fs::exists(folder.path / "state" / "snapshot-1"));
  const std::string weights =
      client.value(client.operation("save_weights_for_sampler", model, 8, {{"path", "s"}}))["path"];
  EXPECT_EQ(
      client.value(client.operation("load_weights", model, 9, {{"path", path}, {"optimizer", true}}))["type"],
      "load_weights");
  EXPECT_EQ(json::parse(client.call("GET", "/api/v1/checkpoints").body)["checkpoints"].size(), 2u);
  const json opening{{"session_id", client.session}, {"sampling_session_seq_id", 0}, {"model_path", weights}};
  const json sampler = client.sure("create_sampling_session", opening);
  EXPECT_EQ(client.sure("create_sampling_session", opening), sampler);
  const json promise = client.sure("asample", sampling(sampler["sampling_session_id"], 0));
  EXPECT_EQ(client.sure("asample", sampling(sampler["sampling_session_id"], 0)), promise);
  EXPECT_NE(promise["sample_sequence_ids"][0], promise["sample_sequence_ids"][1]);
  EXPECT_EQ(client.result(promise["request_id"]).type, tinker::kProtobuf);
  const std::string url = "/api/v1/training_runs/" + model + "/checkpoints/weights/one";
  EXPECT_EQ(client.call("PUT", url + "/ttl", R"({"ttl_seconds":null})").status, 200);
  EXPECT_EQ(client.call("DELETE", url).status, 200);
  EXPECT_EQ(client.call("DELETE", url).status, 200);
  EXPECT_EQ(client.post("weights_info", {{"tinker_path", path}}).status, 404);
  // External ones are read by anybody who has the address.
  client.value(client.operation("save_weights_external", model, 10, {{"path", "out"}}));
  const json urls =
      json::parse(client
                      .call("GET", "/api/v1/training_runs/" + model +
                                       "/checkpoints/external_weights/out/external_weights_urls")
                      .body);
  const std::string address = urls["urls"]["toy"];
  EXPECT_TRUE(address.starts_with("http://127.0.0.1:1/isograd/files/"));
  EXPECT_EQ(fs::file_size(client.call("GET", address.substr(18)).file), sizeof(ToyEngine::Toy));
  EXPECT_EQ(client.call("GET", address.substr(18) + "/../toy").status, 404);
  EXPECT_EQ(client.call("GET", "/isograd/files//toy").status, 404);
  EXPECT_NE(client.call("GET", "/metrics").body.find("isograd_steps_total{model=\"" + model),
            std::string::npos);
  EXPECT_EQ(json::parse(client.call("GET", "/isograd/status").body)["models"].size(), 3u);
}

TEST_F(ServiceTest, Sessions) {
  options.session_seconds = 1.5;
  serve();
  Client silent(running->transport());
  silent.start();
  silent.create();
  const std::string waits = silent.step(silent.model_of(0), 2);  // behind a hole
  const std::string sampler = client.sampler(model, 1, 3);
  EXPECT_EQ(sampler, client.session + ":sample:3");
  for (int i = 0; i < 35; ++i) {
    EXPECT_EQ(client.post("session_heartbeat", {{"session_id", client.session}}).status, 200);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_EQ(silent.post("session_heartbeat", {{"session_id", silent.session}}).status, 410);
  EXPECT_EQ(silent.value(waits)["category"], "user");
  const std::string finish = "/api/v1/sessions/" + client.session + "/finish";
  EXPECT_EQ(client.call("POST", finish, R"({"reason":{"type":"success"},"detail":null})").status, 200);
  EXPECT_EQ(client.call("POST", finish, R"({"reason":{"type":"errored"},"detail":null})").status, 200);
  EXPECT_EQ(client.post("session_heartbeat", {{"session_id", client.session}}).status, 410);
  EXPECT_EQ(client.post("optim_step", {{"model_id", model}, {"seq_id", 2}}).status, 400);
  for (int i = 0; i < 100 && !json::parse(client.call("GET", "/isograd/status").body)["models"].empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(client.post("asample", sampling(sampler, 0)).status, 404);
  EXPECT_EQ(client.call("GET", "/api/v1/training_runs/" + model).status, 200);  // still listed
  running->service.stop();
  EXPECT_TRUE(engine.models.empty());
  EXPECT_TRUE(engine.samplers.empty());
}

// The name of the limit that a reply, or a future's, says was reached.
std::string limit_in(const HttpReply& reply) {
  EXPECT_TRUE(reply.status == 200 || reply.status == 400) << reply.status << " " << reply.body;
  const json said = json::parse(reply.body, nullptr, false);
  if (!said.is_object()) return reply.type;
  const std::string text = said.value("error", said.value("detail", ""));
  EXPECT_EQ(said.value("category", "user"), "user");
  EXPECT_NE(text.find("at most"), std::string::npos) << reply.body;
  const std::size_t at = text.find("limit ") + 6;
  return text.substr(at, text.find(':', at) - at);
}

TEST_F(ServiceTest, Limits) {
  options.limits["models"] = 1, options.limits["samplers"] = 2, options.limits["checkpoint-bytes"] = 1;
  options.limits["open-requests"] = 3, options.limits["open-samples"] = 2;
  serve();
  EXPECT_EQ(limit_in(client.post("create_model", client.creation(1))), "models");
  Client other(running->transport(), "b");
  other.start(), other.create();
  std::vector<std::string> samplers;
  std::int64_t sequence = 0;
  for (int i = 0; i < 3; ++i) samplers.push_back(client.sampler(model, ++sequence, i));
  EXPECT_EQ(client.post("asample", sampling(samplers[0], 0)).status, 404);  // the longest unused made room
  EXPECT_EQ(engine.samplers.size(), 2u);
  client.save(model, ++sequence, "one");
  EXPECT_EQ(limit_in(client.result(client.operation("save_weights", model, ++sequence, {{"path", "two"}}))),
            "checkpoint-bytes");
  for (int i = 0; i < 3; ++i) client.forward_backward(forward_backward_body(model, sequence + 5 + i, 1, 1));
  EXPECT_EQ(client.call("POST", "/api/v1/forward_backward", forward_backward_body(model, sequence + 9, 1, 1))
                .status,
            429);
  engine.datum_time = std::chrono::milliseconds(20);
  const std::string first = client.sure("asample", sampling(samplers[1], 0, 1, 10))["request_id"];
  client.sure("asample", sampling(samplers[2], 0, 1, 10));
  EXPECT_EQ(client.post("asample", sampling(samplers[2], 1)).status, 429);
  EXPECT_EQ(client.result(first).status, 200);
}

TEST_F(ServiceTest, SessionsAndWhatClientsSayAreLimited) {
  options.limits["sessions"] = 2, options.limits["checkpoints"] = 1, options.limits["metadata-bytes"] = 6000;
  serve();
  Client other(running->transport());
  other.start();
  EXPECT_EQ(limit_in(client.post("create_session", {{"tags", json::array()}})), "sessions");
  Client(running->transport(), "b").start();
  const json said{{"a", std::string(4000, 'x')}};
  EXPECT_EQ(client.post("create_model", client.creation(1, {{"user_metadata", said}})).status, 200);
  EXPECT_EQ(limit_in(client.post("create_model", client.creation(2, {{"user_metadata", said}}))),
            "metadata-bytes");
  const auto save = [&](int sequence, const char* name, const json& metadata) {
    return client.result(
        client.operation("save_weights", model, sequence, {{"path", name}, {"user_metadata", metadata}}));
  };
  EXPECT_EQ(limit_in(save(1, "one", said)), "metadata-bytes");
  EXPECT_NE(save(2, "one", json::object()).body.find("weights/one"), std::string::npos);
  EXPECT_EQ(limit_in(save(3, "two", json::object())), "checkpoints");
  client.forward_backward(forward_backward_body(model, 4, 1, 1));
  EXPECT_EQ(client.value(client.step(model, 5))["metrics"]["steps"], 1);
}

TEST_F(ServiceTest, BytesOfRequestsAreLimitedWhileTheyWait) {
  options.limits["request-bytes"] = 3000;
  serve();
  serve(false);  // nothing is computed
  const std::string late = client.model_of(1), body = forward_backward_body(late, 2, 1, 20),
                    first = client.sure("create_model", client.creation(1))["request_id"];
  ASSERT_TRUE(body.size() > 1500 && body.size() < 2800) << body.size();
  client.forward_backward(body);
  const auto post = [&](std::int64_t sequence) {
    return client.call("POST", "/api/v1/forward_backward", forward_backward_body(late, sequence, 1, 20))
        .status;
  };
  EXPECT_EQ(post(3), 429);  // the client waits by itself
  serve(false);
  EXPECT_EQ(post(3), 429);
  serve();
  client.result(first);
  EXPECT_EQ(post(1), 200);
  client.result(late + ":op:2");
  EXPECT_EQ(post(3), 200);
}

// Waits until operations before `next` are computed, without fetching a result.
void wait_for(const Client& client, const std::string& model, std::int64_t next) {
  for (int i = 0; i < 400; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
    const json status = json::parse(client.call("GET", "/isograd/status").body);
    for (const json& each : status["models"])
      if (each["model"] == model && each["next"] >= next) return;
  }
  ADD_FAILURE() << "operation " << next - 1 << " of " << model << " is not complete";
}

// A pass whose result takes about 1100 bytes.
std::string forward(const std::string& model, std::int64_t sequence) {
  std::string body = forward_backward_body(model, sequence, 1, 2, 100);
  protozero::pbf_writer(body).add_bool(6, true);
  return body;
}

// The oldest fetched results make room; where there are none, requests are refused until some are fetched.
TEST_F(ServiceTest, BytesOfResultsAreLimited) {
  options.limits["result-bytes"] = 4000;
  serve();
  std::vector<std::string> ids;
  for (std::int64_t i = 1; i <= 8; ++i) {
    ids.push_back(client.forward_backward(forward(model, i)));
    EXPECT_EQ(client.result(ids.back()).type, tinker::kProtobuf) << i;
  }
  EXPECT_EQ(client.result(ids[0]).status, 410);
  const json use = json::parse(client.call("GET", "/isograd/status").body)["tenants"]["a"];
  EXPECT_LE(use["result_bytes"], 4000);
  EXPECT_GT(use["result_bytes"], 2000);
  EXPECT_EQ(use["request_bytes"], 0);
  EXPECT_EQ(client.result(ids[7]).type, tinker::kProtobuf);
  const std::string sampler = client.sampler(model, 9);
  std::int64_t next = 10;
  const auto fill = [&] {  // with results that are not fetched
    for (ids.clear(); ids.size() < 5; ++next) {
      ids.push_back(client.forward_backward(forward(model, next)));
      wait_for(client, model, next + 1);
    }
  };
  fill();
  EXPECT_EQ(limit_in(client.post("asample", sampling(sampler, 0))), "result-bytes");
  EXPECT_EQ(limit_in(client.post("create_model", client.creation(1))), "result-bytes");
  Client other(running->transport(), "b");
  other.start(), other.create();
  EXPECT_EQ(limit_in(client.result(client.forward_backward(forward(model, next++)))), "result-bytes");
  int kept = 0;  // the last may have been refused
  for (const std::string& id : ids) kept += client.result(id).type == tinker::kProtobuf;
  EXPECT_GE(kept, 4);
  EXPECT_EQ(client.result(client.sure("asample", sampling(sampler, 0))["request_id"]).type,
            tinker::kProtobuf);
  // A refused forward pass changed nothing. A refused gradient fails the model, which can still be saved.
  const std::string gradient = client.forward_backward(forward_backward_body(model, next++, 3, 2));
  EXPECT_EQ(client.result(gradient).type, tinker::kProtobuf);
  fill();
  EXPECT_EQ(limit_in(client.result(client.forward_backward(forward_backward_body(model, next++, 5, 1)))),
            "result-bytes");
  for (const std::string& id : ids) client.result(id);
  EXPECT_NE(client.result(client.step(model, next++)).body.find("result-bytes"), std::string::npos);
  kill(), serve();
  client.load(2, client.save(model, next++, "one"));
  const std::string from = client.model_of(2);
  client.forward_backward(forward_backward_body(from, 1, 5, 1));
  EXPECT_EQ(client.value(client.step(from, 2))["metrics"]["datums"], 3);
}

// A snapshot has older ones than those that a replay computes again.
TEST_F(ServiceTest, TheOldestResultsMakeRoomAfterAReplayToo) {
  options.limits["result-bytes"] = 4000;  // of three
  serve();
  std::vector<std::string> ids;
  const auto compute = [&] {
    ids.push_back(client.forward_backward(forward(model, std::ssize(ids) + 1)));
    EXPECT_EQ(client.result(ids.back()).type, tinker::kProtobuf);
  };
  compute(), compute();
  serve();  // behind a snapshot
  compute(), compute();
  kill(), serve();
  compute();
  for (std::size_t i = 0; i < ids.size(); ++i)
    EXPECT_EQ(client.result(ids[i]).status, i < 2 ? 410 : 200) << i;
}

TEST_F(ServiceTest, BytesOfDumpsAreLimited) {
  options.limits["dump-bytes"] = 100;
  serve();
  const std::string dumps = client.create(1, {{"user_metadata", {{"isograd.dump", "true"}}}});
  fs::create_directories(options.state / "dumps" / dumps / "1");
  client.forward_backward(forward_backward_body(dumps, 1, 1, 2));
  EXPECT_EQ(client.value(client.step(dumps, 2))["metrics"]["steps"], 1);
  std::ofstream(options.state / "dumps" / dumps / "1" / "gradients") << std::string(100, 'x');
  client.forward_backward(forward_backward_body(dumps, 3, 1, 2));
  EXPECT_EQ(limit_in(client.result(client.step(dumps, 4))), "dump-bytes");
  client.forward_backward(forward_backward_body(model, 1, 1, 2));
  EXPECT_EQ(client.value(client.step(model, 2))["metrics"]["steps"], 1);  // it dumps nothing
  serve();                                                                // from a snapshot
  const std::string path = client.save(dumps, 5, "one");
  fs::remove_all(options.state / "dumps");
  client.load(2, path);
  EXPECT_EQ(client.value(client.step(client.model_of(2), 1))["metrics"]["steps"], 2);
}

TEST_F(ServiceTest, TenantsTakeTurnsByTime) {
  engine.datum_time = std::chrono::milliseconds(1);
  options.piece_tokens = 8;  // four datums
  running.emplace(options, engine);
  Client many(running->transport(), "a"), few(running->transport(), "b");
  many.start(), few.start();
  const std::string big = many.create(), small = few.create();
  for (int i = 1; i <= 2; ++i) many.forward_backward(forward_backward_body(big, i, 1, 1024));
  const std::string last = many.step(big, 3);
  for (int i = 1; i <= 100; ++i) few.result(few.forward_backward(forward_backward_body(small, i, 1, 1)));
  EXPECT_EQ(many.value(last)["metrics"]["datums"], 2048);
  running->service.stop();
  // One datum of B waits for at most the piece that runs when it comes, and one more.
  std::size_t run = 0, longest = 0;
  std::size_t ended = 0;
  for (std::size_t i = 0; i < engine.calls.size(); ++i)
    if (engine.calls[i] == small) ended = i;
  for (std::size_t i = 0; i < ended; ++i) {
    run = engine.calls[i] == big ? run + 1 : 0;
    longest = std::max(longest, run);
  }
  EXPECT_LE(longest, 3u);
  EXPECT_LT(ended, engine.calls.size() - 10);
}

// Sends what xorl's client does, of the model that it calls `name`.
struct XorlClient {
  HttpReply ask(const std::string& method, const std::string& path, const json& body = {}) const {
    HttpRequest request = request_of(method, "/api/v1/" + path, body.is_null() ? "" : body.dump());
    request.headers.erase("x-api-key");
    request.headers["authorization"] = "Bearer k";
    return running->transport()(request, "a");
  }
  json post(const std::string& path, json body = json::object()) const {
    body["model_id"] = name;
    const HttpReply reply = ask("POST", path, body);
    EXPECT_EQ(reply.status, 200) << path << " " << reply.body;
    return json::parse(reply.body);
  }
  json value(const json& promise) const {
    return post("retrieve_future", {{"request_id", promise["request_id"]}});
  }
  json run(const std::string& path, const json& body = json::object()) const {
    return value(post(path, body));
  }
  json pass(const std::vector<int>& targets, const std::string& path = "forward_backward") const {
    const json datum{{"model_input", {{"input_ids", targets}}},
                     {"loss_fn_inputs", {{"target_tokens", targets}}}};
    return run(path, {{path + "_input", {{"loss_fn", "cross_entropy"}, {"data", json::array({datum})}}}});
  }
  std::optional<Running>& running;
  std::string name;
  json creation{{"base_model", "toy/base"}, {"lora_config", {{"rank", 4}}}};
  json adam{{"adam_params", {{"learning_rate", 0.1}}}};
};

TEST_F(ServiceTest, XorlsClientCountsNothingAndHasNoSession) {
  running.emplace(options, engine);
  const XorlClient use{running, "default"};
  const json promise = use.post("create_model", use.creation);
  EXPECT_EQ(use.value(promise)["model_id"], "default");
  EXPECT_EQ(use.post("create_model", use.creation), promise);
  EXPECT_TRUE(use.pass({3, 4})["metrics"].contains("loss:sum"));
  use.pass({3, 4}, "forward");
  EXPECT_EQ(use.run("optim_step", use.adam)["metrics"]["grad_norm"], 7);
  const json saved = use.run("save_weights", {{"path", "one"}});
  EXPECT_TRUE(saved["path"].get<std::string>().starts_with("xorl://"));
  EXPECT_EQ(use.post("weights_info", {{"xorl_path", saved["path"]}})["base_model"], "toy/base");
  EXPECT_EQ(use.run("load_weights", {{"path", saved["path"]}, {"optimizer", true}})["path"], saved["path"]);
  use.pass({3, 4});
  EXPECT_EQ(engine.models.begin()->second.steps, 1);
  // A model of the same name is a new one.
  EXPECT_NE(use.post("create_model", use.creation), promise);
  use.pass({3, 4});
  EXPECT_EQ(engine.models.size(), 1u);
  EXPECT_EQ(engine.models.begin()->second.steps, 0);
}

// Requests of xorl's client that do not train, some made twice: its connection may break. The state survives
// a restart.
TEST_F(ServiceTest, XorlSessionsAreShownAbortedAndKilled) {
  running.emplace(options, engine);
  const XorlClient use{running, "m"};
  use.run("create_model", use.creation);
  use.pass({3});
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(use.run("abort_gradient_epoch"), json({{"success", true}, {"model_id", "m"}, {"step", 0}}));
  use.pass({5});
  EXPECT_EQ(use.run("optim_step", use.adam)["metrics"]["grad_norm"], 5);  // not 8
  const std::string saved = use.run("save_weights", {{"path", "one"}})["path"];

  const json info = json::parse(use.ask("GET", "session_info").body);
  EXPECT_EQ(info["registered_models"], json({"m"}));
  EXPECT_EQ(info["loaded_training_adapters"], json({"m"}));
  const auto listed = [&] {
    std::vector<std::string> ids;
    const json all = use.post("list_checkpoints");
    for (const json& one : all["checkpoints"]) ids.push_back(one["checkpoint_id"]);
    std::sort(ids.begin(), ids.end());
    return ids;
  };
  EXPECT_EQ(listed(), std::vector<std::string>{"weights/one"});
  EXPECT_EQ(use.ask("POST", "list_checkpoints", {{"model_id", "other"}}).status, 404);
  EXPECT_EQ(
      use.ask("POST", "delete_checkpoint", {{"model_id", "m"}, {"checkpoint_id", "weights/two"}}).status,
      404);

  // A model that goes on from the checkpoint has the name that its path has, and is the one that is meant.
  const std::string run = saved.substr(7, saved.find('/', 7) - 7);
  const json from{{"model_id", run}, {"base_model", "toy/base"}, {"lora_config", {{"rank", 4}}}};
  const json promise = json::parse(use.ask("POST", "create_model", from).body);
  EXPECT_EQ(use.value(promise)["model_id"], run);
  const HttpReply load = use.ask("POST", "load_weights", {{"model_id", run}, {"path", saved}});
  EXPECT_EQ(use.value(json::parse(load.body))["path"], saved);
  EXPECT_EQ(engine.models.size(), 2u);
  EXPECT_EQ(use.ask("POST", "kill_session", {{"model_id", run}, {"save_checkpoint", false}}).status, 200);
  EXPECT_EQ(engine.models.size(), 1u);

  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(use.post("delete_checkpoint", {{"checkpoint_id", "weights/one"}}),
              json({{"success", true}, {"deleted_path", saved}}));
  EXPECT_EQ(listed(), std::vector<std::string>{});
  use.pass({2});  // is in the checkpoint
  const json killed = use.post("kill_session");
  EXPECT_EQ(killed["success"], true);
  EXPECT_EQ(listed(), std::vector<std::string>{"weights/operation-8"});
  EXPECT_TRUE(killed["checkpoint_path"].get<std::string>().ends_with("/weights/operation-8"));
  EXPECT_TRUE(engine.models.empty());
  running.reset(), engine = {};
  running.emplace(options, engine);
  EXPECT_TRUE(engine.models.empty());
  EXPECT_EQ(use.post("kill_session"), killed);
  EXPECT_EQ(json::parse(use.ask("GET", "session_info").body)["registered_models"], json::array());
  EXPECT_EQ(
      use.ask("POST", "optim_step", {{"model_id", "m"}, {"adam_params", use.adam["adam_params"]}}).status,
      400);
  use.run("create_model", use.creation);
  use.run("load_weights", {{"path", killed["checkpoint_path"]}, {"optimizer", true}});
  EXPECT_EQ(use.run("optim_step", use.adam)["metrics"]["grad_norm"], 2);
  // One that failed is closed too, without a checkpoint.
  use.run("optim_step", use.adam);
  EXPECT_FALSE(use.post("kill_session").contains("checkpoint_path"));
}

TEST_F(ServiceTest, AFullJournalRefusesAndGoesOn) {
  serve();
  client.result(client.forward_backward(forward_backward_body(model, 1, 1, 1)));
  const auto size = fs::file_size(folder.path / "state" / "journal");
  const std::string body = forward_backward_body(model, 2, 1, 1);
  std::string second;
  {
    const store_testing::FullDisk full(size + body.size() + 400);  // a request fits, and not its completion
    second = client.forward_backward(body);
    EXPECT_EQ(client.call("POST", "/api/v1/forward_backward", forward_backward_body(model, 3, 1, 50)).status,
              503);
  }
  EXPECT_EQ(client.result(second).status, 200);
  client.forward_backward(forward_backward_body(model, 3, 1, 1));
  EXPECT_EQ(client.value(client.step(model, 4))["metrics"]["datums"], 3);
}

TEST_F(ServiceTest, RequestsThatArriveTogetherShareAnFsyncAndWaitForIt) {
  options.sync = true;
  serve();
  constexpr int kRequests = 100;
  store_testing::sync_time = std::chrono::milliseconds(20);
  const int before = store_testing::syncs;
  std::atomic<int> answered = 0, early = 0;
  for (int i = 1; i <= kRequests; ++i) {
    const int begun = store_testing::syncs_begun;
    running->service.handle(
        request_of("POST", "/api/v1/forward_backward", forward_backward_body(model, i, 1, 1)), "a",
        [&, begun](const HttpReply& reply) {
          if (store_testing::syncs <= begun) ++early;
          EXPECT_EQ(reply.status, 200);
          ++answered;
        });
  }
  for (int i = 0; i < 20000 && answered < kRequests; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  store_testing::sync_time = {};
  EXPECT_EQ(answered, kRequests);
  EXPECT_EQ(early, 0);
  std::printf("%d fsyncs for %d requests\n", store_testing::syncs - before, kRequests);
  EXPECT_LE(store_testing::syncs - before, kRequests / 5);
  EXPECT_EQ(client.value(client.step(model, kRequests + 1))["metrics"]["datums"], kRequests);
}

TEST_F(ServiceTest, AFailedFsyncEndsTheServerAndTheNextOneGoesOn) {
  options.sync = true;
  serve();
  running.reset();
  {
    Running idle(options, engine = {}, /*computes=*/false);
    std::thread computing([&] { EXPECT_THROW(idle.service.run(), ConfigError); });
    store_testing::syncs_fail = true;
    const Client refused(idle.transport());
    EXPECT_EQ(refused.post("create_session", {{"tags", json::array()}, {"sdk_version", "0.38.0"}}).status,
              503);
    computing.join();
    store_testing::syncs_fail = false;
  }
  serve();
  client.forward_backward(forward_backward_body(model, 1, 1, 1));
  EXPECT_EQ(client.value(client.step(model, 2))["metrics"]["datums"], 1);
}

TEST(Service, ARestartGoesOnWithTheSameBits) {
  for (const double snapshots : {1e9, 0.0}) {  // by replay alone; by snapshots
    Served one;
    one.options.snapshot_least = snapshots, one.options.snapshot_share = 1e9;
    one.serve();
    const Client& client = one.client;
    const std::string model = one.client.create(1, {{"lora_config", {{"rank", 8}}}});  // seeds are drawn
    client.forward_backward(forward_backward_body(model, 1, 1, 3));
    client.result(client.step(model, 2));
    client.forward_backward(forward_backward_body(model, 3, 7, 3));
    const std::string sampler = client.sampler(model, 4),
                      future = client.sure("asample", sampling(sampler, 0))["request_id"];
    const HttpReply sampled = client.result(future);
    const std::string waits = client.step(model, 7);
    const auto last_steps = [&] {
      json last = json::array();
      const json status = json::parse(client.call("GET", "/isograd/status").body);
      for (const json& each : status["models"])
        if (each.contains("last")) last.push_back(each["last"]);
      return last;
    };
    const json last = last_steps();
    if (snapshots > 0) one.running->service.stop();
    one.serve();
    ASSERT_FALSE(last.empty());
    EXPECT_EQ(last.back()["datums"], 3);
    EXPECT_EQ(last_steps(), last);
    EXPECT_EQ(client.result(future).body, sampled.body);
    EXPECT_EQ(client.sampler(model, 4, 9), sampler);
    client.forward_backward(forward_backward_body(model, 5, 9, 1));
    client.forward_backward(forward_backward_body(model, 6, 11, 1));
    const json metrics = client.value(waits)["metrics"];
    EXPECT_EQ(metrics["datums"], 5);
    EXPECT_EQ(metrics["steps"], 2);
    client.result(client.sure("asample", sampling(sampler, 1))["request_id"]);
    EXPECT_EQ(client.result(future).body, sampled.body);
  }
}

TEST_F(ServiceTest, ManySmallChangesOfOneTenantDoNotStopTheOthers) {
  serve();
  client.value(client.operation("save_weights", model, 1, {{"path", "one"}}));
  serve(false);
  for (int i = 0; i < 20; ++i)
    running->service.handle(
        request_of("PUT", "/api/v1/training_runs/" + model + "/checkpoints/weights/one/ttl",
                   R"({"ttl_seconds":null})"),
        "a", [](const HttpReply&) {});
  const std::string step = client.step(model, 2);
  serve();
  client.result(step);
  fs::copy_file(options.state / "journal", folder.path / "journal");
  std::vector<std::string> done;
  const Journal journal(folder.path / "journal", [&](std::uint64_t, std::string_view text) {
    const LogRecord record = LogRecord::decode(text);
    if (record.text("kind") == "done") done.push_back(record.text("id"));
  });
  EXPECT_LE(std::ranges::find(done, step) - std::ranges::find(done, "control:0"), 2);
}

TEST_F(ServiceTest, OperationsGoOnWhileASnapshotIsWritten) {
  // One after the first call; it takes so long that there is no other.
  options.snapshot_least = 1e-3, options.snapshot_share = 1e-2;
  engine.datum_time = std::chrono::milliseconds(1);
  ToyEngine::hold = true;
  serve();
  const auto snapshots = [&] {
    const Client all(running->transport(), "operator");
    return json::parse(all.call("GET", "/isograd/status").body)["snapshots"].get<int>();
  };
  const auto steps = [&](const Client& of, int first, int last) {
    json metrics;
    for (int sequence = first; sequence < last; sequence += 2) {
      of.forward_backward(forward_backward_body(model, sequence, sequence, 2));
      metrics = of.value(of.step(model, sequence + 1))["metrics"];
    }
    return metrics;
  };
  steps(client, 1, 9);
  client.result(client.forward_backward(forward_backward_body(model, 9, 1, 2)));
  EXPECT_EQ(snapshots(), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ToyEngine::hold = false;
  for (int i = 0; i < 5000 && snapshots() == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(snapshots(), 1);
  // As a kill leaves it: the snapshot is of its position, whatever was done while it was written.
  ServiceOptions killed = options;
  killed.state = folder.path / "copy";
  fs::copy(options.state, killed.state, fs::copy_options::recursive);
  EXPECT_TRUE(fs::exists(killed.state / "snapshot-1"));
  ToyEngine other;
  Running second(killed, other);
  EXPECT_GT(other.calls.size(), 3u);
  const json expected = steps(client, 10, 12);
  EXPECT_EQ(steps(Client(second.transport()), 10, 12), expected);
}

// Calls that would change what is written wait until it is, or cannot be, as engine.hpp says.
struct WaitingEngine : ToyEngine {
  Write saving(const std::string& model) override {
    const auto reader = std::make_shared<int>();
    readers[model] = reader;
    return [this, reader, write = ToyEngine::saving(model)](const fs::path& directory) {
      for (int i = 0; breaks && !waiting && i < 5000; ++i) std::this_thread::sleep_for(kMoment);
      if (breaks) throw std::runtime_error("the disk is broken");
      write(directory);
    };
  }
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& request) override {
    const auto& reader = readers[model];
    waiting = !reader.expired();
    for (int i = 0; !reader.expired() && i < 10000; ++i) std::this_thread::sleep_for(kMoment);
    if (!reader.expired()) throw std::runtime_error("nobody writes the snapshot any more");
    return ToyEngine::forward_backward(model, request);
  }
  static constexpr std::chrono::milliseconds kMoment{1};
  std::map<std::string, std::weak_ptr<int>> readers{};
  std::atomic<bool> breaks = false, waiting = false;
};

TEST_F(ServiceTest, AnExceptionOfTheWriterFreesWhatWaitsForIt) {
  WaitingEngine waiting;
  waiting.breaks = true, waiting.datum_time = std::chrono::milliseconds(15);
  options.snapshot_least = 0.2, options.snapshot_share = 1e9;
  std::optional<Running> broken;
  broken.emplace(options, waiting);
  client = Client(broken->transport());
  client.start();
  const std::string first = client.create(0), second = client.create(1);
  std::string pass = forward_backward_body(first, 1, 1, 20);  // a snapshot is due behind it
  protozero::pbf_writer(pass).add_bool(6, true);
  client.result(client.forward_backward(pass));
  // Writing the first model fails, and the second one is not written.
  const HttpReply reply = client.result(client.forward_backward(forward_backward_body(second, 1, 1, 2)));
  EXPECT_EQ(reply.type, tinker::kProtobuf) << reply.body;
  EXPECT_TRUE(waiting.waiting);
  EXPECT_EQ(client.value(client.step(second, 2))["metrics"]["datums"], 2);
  // An operation that needs a snapshot says why there is none.
  EXPECT_EQ(client.load(2, client.save(second, 3, "one"))["type"], "load_weights");
  const json refused =
      client.value(client.operation("save_weights", second, 4, {{"path", "one"}, {"overwrite", true}}));
  EXPECT_NE(refused.value("error", "").find("the disk is broken"), std::string::npos) << refused;
  waiting.breaks = false;
  client.save(second, 5, "two");
  broken.reset();
  serve();  // from a snapshot
  EXPECT_TRUE(fs::exists(options.state / "snapshot-1"));
  client.forward_backward(forward_backward_body(second, 6, 1, 2));
  EXPECT_EQ(client.value(client.step(second, 7))["metrics"]["steps"], 2);
}

TEST_F(ServiceTest, AnotherBaseOfTheNameRefusesItsModelsAndTheOthersGoOn) {
  engine.set_digest("one");
  options.limits["samplers"] = 2;
  serve();
  client.forward_backward(forward_backward_body(model, 1, 3, 2));
  client.result(client.step(model, 2));
  const json saved = client.value(client.operation("save_weights", model, 3, {{"path", "kept"}}));
  const std::string sampler = client.sampler(model, 4);
  const auto opened = [&](int number) -> std::string {
    return client.sure("create_sampling_session", {{"session_id", client.session},
                                                   {"sampling_session_seq_id", number},
                                                   {"base_model", "toy/base"}})["sampling_session_id"];
  };
  const std::string bare = opened(9);
  const auto sample = [&](const std::string& of, int sequence) {
    json ask = sampling(of, sequence);
    ask["sampling_params"]["seed"] = 5;
    return client.post("asample", ask);
  };
  const auto id_in = [](const HttpReply& reply) { return json::parse(reply.body).value("request_id", ""); };
  const std::string told = client.result(id_in(sample(sampler, 0))).body,
                    told_bare = client.result(id_in(sample(bare, 0))).body;
  EXPECT_NE(told, told_bare);
  const std::string whole = client.create(5, {{"rank", 0}});
  const std::string waits = client.step(model, 6);  // behind a hole
  const auto start_on = [&](const std::string& digest, bool killed, bool computes = true) {
    const fs::path copy = folder.path / "copy";
    if (killed) fs::copy(options.state, copy, fs::copy_options::recursive);
    running.reset();
    if (killed) fs::remove_all(options.state), fs::rename(copy, options.state);
    engine = {}, engine.set_digest(digest);
    running.emplace(options, engine, computes);
    const std::string session = std::exchange(client, Client(running->transport())).session;
    client.session = session;
  };
  const auto refused = [](const HttpReply& reply) {
    for (const char* part : {"found", "digest two", "expected", "digest one", "Put them back"})
      EXPECT_NE(reply.body.find(part), std::string::npos) << reply.body;
  };
  start_on("one", false, false);
  const std::string late_sample = id_in(sample(sampler, 1));  // accepted alone
  for (int start = 0; start < 2; ++start) {
    start_on("two", false);
    EXPECT_EQ(client.call("POST", "/api/v1/forward_backward", forward_backward_body(model, 5, 1, 1)).status,
              400);
    refused(client.call("POST", "/api/v1/forward_backward", forward_backward_body(model, 5, 1, 1)));
    refused(client.result(waits));
    refused(client.result(late_sample));
    refused(sample(sampler, 2)), refused(sample(bare, 2));
    EXPECT_TRUE(engine.samplers.empty());
    client.forward_backward(forward_backward_body(whole, 1 + 2 * start, 1, 2));
    EXPECT_EQ(client.value(client.step(whole, 2 + 2 * start))["metrics"]["datums"], 2);
    const std::string fresh = client.create(10 + start);
    refused(client.result(client.operation("load_weights", fresh, 1, {{"path", saved["path"]}})));
  }
  opened(10), opened(11);  // makes no room: those of the other base are not there
  // The right base again: nothing of the model and the samplers is lost, nor what waited.
  start_on("one", false);
  EXPECT_EQ(client.result(late_sample).body, told);
  EXPECT_EQ(client.result(id_in(sample(sampler, 2))).body, told);
  EXPECT_EQ(client.result(id_in(sample(bare, 2))).body, told_bare);
  client.forward_backward(forward_backward_body(model, 5, 9, 3));
  const json metrics = client.value(waits)["metrics"];
  EXPECT_EQ(metrics["datums"], 3);
  EXPECT_EQ(metrics["steps"], 2);
  // A replay after a kill cannot be done on another base, but what was saved stays.
  start_on("one", false);
  const json late = client.value(client.operation("save_weights", model, 7, {{"path", "late"}}));
  const std::string another = client.create(7);
  client.result(client.forward_backward(forward_backward_body(another, 1, 1, 1)));
  start_on("two", true);
  refused(client.result(client.forward_backward(forward_backward_body(another, 2, 1, 1))));
  EXPECT_EQ(client.sure("weights_info", {{"tinker_path", late["path"]}})["lora_rank"], 8);
  EXPECT_EQ(client.result(client.step(client.create(8), 1)).status, 200);
}

// ---- deaths and damage ----

// How often the process dies before the work, which waits for results, is done in it.
int deaths_in(Served& served, const std::function<void()>& work) {
  for (int deaths = 0; deaths < 20; ++deaths) {
    served.running.reset();
    const pid_t child = ::fork();
    if (child == 0) {
      ToyEngine::deadly = 13;
      ::alarm(20);
      try {
        served.serve(), work();
        ::_exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "the server cannot start: %s\n", error.what());
        ::_exit(3);
      }
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    if (WEXITSTATUS(status) == 0) return deaths;
    EXPECT_EQ(WEXITSTATUS(status), 13);
  }
  return -1;
}

TEST_F(ServiceTest, AnOperationThatKillsTheProcessIsFailedAndTheOthersGoOn) {
  options.deaths = 3;
  Served undisturbed;
  json expected;
  for (Served* one : {&undisturbed, static_cast<Served*>(this)}) {
    const Client& use = one->client;
    one->serve();
    const std::string good = one->client.create(1);
    const std::string sampler = use.sampler(one->model, 1);
    one->serve(false);  // what follows is accepted alone
    std::vector<std::string> ids{use.forward_backward(forward_backward_body(good, 1, 5, 2)),
                                 use.step(good, 2)};
    ids.push_back(use.sure("asample", sampling(sampler, 1))["request_id"]);
    if (one != this) {
      one->serve();
      expected = use.value(ids[1]);
      use.result(ids[2]);
      continue;
    }
    ids.push_back(use.forward_backward(forward_backward_body(model, 2, 13, 1)));
    ids.push_back(use.step(model, 3));
    json ask = sampling(sampler, 0);
    ask["sampling_params"]["seed"] = 13;
    ids.push_back(use.sure("asample", ask)["request_id"]);
    // Once in a pass of both samples, then by itself each.
    EXPECT_EQ(deaths_in(*this,
                        [&] {
                          for (const std::string& id : ids) use.result(id);
                        }),
              1 + 2 + 3);
    serve();
    EXPECT_EQ(use.value(ids[1]), expected);
    EXPECT_EQ(use.result(ids[2]).type, tinker::kProtobuf);
    for (std::size_t i = 3; i < 6; ++i) {
      const json failure = use.value(ids[i]);
      EXPECT_NE(failure.value("error", "").find("died 3 times"), std::string::npos) << failure;
      EXPECT_EQ(failure["category"], i == 4 ? "user" : "server") << failure;
    }
    EXPECT_EQ(use.value(use.operation("unload_model", model, 4))["type"], "unload_model");
  }
}

TEST_F(ServiceTest, ADamagedCheckpointFailsTheModelThatLoadedIt) {
  enum class Damage { kMissing, kWeights, kDescription };
  for (const Damage damage : {Damage::kMissing, Damage::kWeights, Damage::kDescription}) {
    Served one;
    one.serve();
    Client& use = one.client;
    const std::string path = use.save(one.model, 1, "one");
    one.serve();  // behind a snapshot: a replay does not save it again
    EXPECT_EQ(use.call("PUT", fmt::format("/api/v1/training_runs/{}/checkpoints/weights/one/ttl", one.model),
                       R"({"ttl_seconds":null})")
                  .status,
              200);
    use.load(1, path);
    const std::string lost = use.model_of(1), other = use.create(2);
    use.forward_backward(forward_backward_body(lost, 1, 1, 1));
    const std::string kept = use.save(lost, 2, "kept");
    use.load(3, path);  // a model that ends with a checkpoint
    HttpRequest kill = request_of("POST", "/api/v1/kill_session", json{{"model_id", use.model_of(3)}}.dump());
    kill.headers.erase("x-api-key");
    const std::string last = one.running->transport()(kill, "a").body;
    EXPECT_NE(last.find("/weights/operation-1"), std::string::npos) << last;
    const std::string sampler = use.sampler(lost, 3);
    const std::string sample = use.sure("asample", sampling(sampler, 0))["request_id"],
                      sampled = use.result(sample).body;
    use.result(use.forward_backward(forward_backward_body(other, 1, 1, 2)));
    one.kill();
    fs::path damaged;
    for (const auto& entry : fs::directory_iterator(one.options.state / "checkpoints"))
      if (entry.path().string().ends_with("~one")) damaged = entry.path();
    ASSERT_FALSE(damaged.empty());
    if (damage == Damage::kMissing) fs::remove_all(damaged);
    if (damage == Damage::kWeights) std::ofstream(damaged / "toy") << "x";
    if (damage == Damage::kDescription) std::ofstream(damaged / "info.json") << "x";
    for (int start = 0; start < 2; ++start) {
      one.serve();
      const json failure = use.value(use.step(lost, 4 + start));
      const char* said = damage == Damage::kMissing   ? "no folder"
                         : damage == Damage::kWeights ? "checksum"
                                                      : "info.json";
      EXPECT_NE(failure.value("error", "").find(said), std::string::npos) << failure;
      EXPECT_EQ(use.result(sample).body, sampled);
      EXPECT_EQ(use.load(4 + 2 * start, kept)["type"], "load_weights");
      EXPECT_EQ(one.running->transport()(kill, "a").body, last);
      const std::string ended = "tinker://" + use.model_of(3) + "/weights/operation-1";
      EXPECT_EQ(use.load(5 + 2 * start, ended)["type"], "load_weights");
      for (const std::string& saved : {kept, ended}) {
        const json info = use.sure("weights_info", {{"tinker_path", saved}});
        EXPECT_EQ(info["base_model"], "toy/base") << saved;
        EXPECT_EQ(info["lora_rank"], 8) << saved;
      }
    }
    EXPECT_EQ(use.value(use.step(other, 2))["metrics"]["datums"], 2);
  }
}

// A sample that has a death runs alone, so that it was not in a pass of several that died.
TEST_F(ServiceTest, DeathsAreOfWhatRanAndAreForgottenWhenItIsDone) {
  serve();
  const std::string sampler = client.value(client.operation(
      "save_weights_for_sampler", model, 1, {{"sampling_session_seq_id", 0}}))["sampling_session_id"];
  serve(false);
  const std::string first = client.sure("asample", sampling(sampler, 0))["request_id"],
                    second = client.sure("asample", sampling(sampler, 1))["request_id"];
  running.reset();
  const fs::path file = options.state / "deaths.json";
  std::ofstream(file) << json{{first, 1}};
  StateFolder(options.state).set_doing("samples");
  serve(false);
  const auto deaths = [&] { return json::parse(std::ifstream(file)); };
  EXPECT_EQ(deaths(), (json{{first, 1}, {second, 1}}));
  serve();
  client.result(first), client.result(second);
  EXPECT_EQ(deaths(), json::object());
  fs::copy(options.state, folder.path / "copy", fs::copy_options::recursive);  // as a kill leaves it
  running.reset();
  fs::remove_all(options.state), fs::rename(folder.path / "copy", options.state);
  std::ofstream(file) << json{{first, 1}};
  StateFolder(options.state).set_doing("\xff");  // bytes of a power cut
  serve(false);
  EXPECT_FALSE(deaths().contains(first)) << "the replay has completed it";
}

TEST_F(ServiceTest, AModelIsKilledOnceWhateverWasAskedMeanwhile) {
  options.poll_seconds = 0.01;
  serve();
  serve(false);
  HttpRequest kill = request_of("POST", "/api/v1/kill_session", json{{"model_id", model}}.dump());
  kill.headers.erase("x-api-key");
  const auto waiting = [&] {
    return json::parse(client.call("GET", "/isograd/status").body)["models"][0]["queue"].get<int>();
  };
  const int before = waiting();
  EXPECT_EQ(running->transport()(kill, "a").status, 408);
  client.step(model, 3);
  EXPECT_EQ(running->transport()(kill, "a").status, 408);
  EXPECT_EQ(waiting(), before + 2);
}

TEST_F(ServiceTest, AStateThatIsNotAsAServerWroteItIsRefused) {
  const auto refused = [&](const std::string& file, const std::string& found) {
    try {
      serve(false);
      ADD_FAILURE() << file << " is accepted without " << found;
    } catch (const ConfigError& error) {
      for (const std::string& part : {file, found, std::string("Restore the state folder")})
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << ": " << error.what();
    }
  };
  serve();
  client.result(client.forward_backward(forward_backward_body(model, 1, 1, 1)));
  client.save(model, 2, "one");
  client.result(client.sure("asample", sampling(client.sampler(model, 3), 0))["request_id"]);
  client.step(model, 5);  // behind a hole
  running.reset();
  const fs::path saved = options.state / "snapshot-1/state.json";
  const json sound = json::parse(std::ifstream(saved));
  using Pointer = json::json_pointer;
  std::vector<Pointer> fields{Pointer("/state"), Pointer("/position"), Pointer("/folders")};
  const std::function<void(Pointer)> add_below = [&](const Pointer of) {
    for (const auto& [key, value] : sound.at(of).items()) {
      fields.push_back(of / key);
      if (value.is_object()) add_below(fields.back());
    }
  };
  for (const char* kind : {"sessions", "models", "samplers", "saved", "futures"}) {
    const Pointer all = Pointer("/state") / kind;
    fields.push_back(all);
    add_below(all / sound.at(all).begin().key());
  }
  EXPECT_GT(fields.size(), 80u);
  int optional = 0;
  for (const Pointer& field : fields) {
    json damaged = sound;
    damaged.at(field.parent_pointer()).erase(field.back());
    std::ofstream(saved) << damaged;
    const std::string& key = field.back();
    if (key == "seed") continue;  // the client's, or drawn
    if (key != "digest" && key != "operation") {
      refused("snapshot-1", "'" + key + "'");
      continue;
    }
    optional += 1;
    serve(false);
    EXPECT_EQ(client.sure("get_info", {{"model_id", model}})["lora_rank"], 8) << field;
  }
  EXPECT_EQ(optional, 4);
  json damaged = sound;
  damaged["state"].erase("waiting");  // where nothing waits there is none
  std::ofstream(saved) << damaged;
  refused("snapshot-1", "bodies");
  std::ofstream(saved) << sound;
  {
    Journal journal(options.state / "journal", [](std::uint64_t, std::string_view) {});
    journal.append("{\"kind\":\"done\",\"of\":\"control\",\"id\":\"control:7\"}\n");  // there is none
  }
  refused("journal", "control:7");
}

TEST_F(ServiceTest, TheLaterOfTwoSavesStaysWhateverTheClockSays) {
  serve();
  const auto train_and_save = [&](int first) {
    client.forward_backward(forward_backward_body(model, first, first, 2));
    client.step(model, first + 1);
    return client.value(
        client.operation("save_weights", model, first + 2, {{"path", "one"}, {"overwrite", true}}))["path"];
  };
  train_and_save(1);
  const json path = train_and_save(4);
  fs::copy(options.state, folder.path / "copy", fs::copy_options::recursive);  // as a kill leaves it
  running.reset();
  fs::remove_all(options.state), fs::rename(folder.path / "copy", options.state);
  std::vector<LogRecord> records;
  const fs::path file = options.state / "journal";
  {
    const Journal journal(file, [&](std::uint64_t, std::string_view text) {
      records.push_back(LogRecord::decode(text));
      if (records.back().text("id") == model + ":op:3") records.back().head["time"] = 1e12;
    });
  }
  fs::remove(file);
  {
    Journal journal(file, [](std::uint64_t, std::string_view) {});
    for (const LogRecord& record : records) journal.append(record.encode());
  }
  serve();
  client.value(client.operation("load_weights", model, 7, {{"path", path}, {"optimizer", true}}));
  client.forward_backward(forward_backward_body(model, 8, 1, 1));
  EXPECT_EQ(client.value(client.step(model, 9))["metrics"]["steps"], 3);
}

TEST_F(ServiceTest, ResultsDoNotAgeWithoutAServer) {
  serve();
  const std::string id = client.step(model, 1), told = client.result(id).body;
  running.reset();
  const fs::path saved = options.state / "snapshot-1/state.json";
  json state = json::parse(std::ifstream(saved));
  for (json& future : state["state"]["futures"]) future["finished"] = future["finished"].get<double>() - 1e5;
  std::ofstream(saved) << state;
  options.result_seconds = 60;
  serve();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the watching thread looks every 100 ms
  EXPECT_EQ(client.result(id).body, told);
}

TEST_F(ServiceTest, AJournalThatLostItsEndGoesOnFromTheSnapshot) {
  serve();
  const fs::path journal = options.state / "journal", old = folder.path / "old";
  fs::copy_file(journal, old);
  client.forward_backward(forward_backward_body(model, 1, 1, 1));
  client.result(client.step(model, 2));
  running.reset();  // writes a snapshot
  fs::copy_file(old, journal, fs::copy_options::overwrite_existing);
  for (int i = 0; i < 2; ++i) {
    serve();
    client.forward_backward(forward_backward_body(model, 3 + 2 * i, 1, 1));
    EXPECT_EQ(client.value(client.step(model, 4 + 2 * i))["metrics"]["steps"], 2 + i);
  }
}

// A power cut may lose the end of the journal and keep files: the journal is cut behind every record, in full
// runs at every byte.
TEST_F(ServiceTest, CheckpointsWhoseRequestWasLostAreKept) {
  serve();
  client.save(model, 1, "kept");
  client.save(model, 2, "deleted");
  const std::string url = "/api/v1/training_runs/" + model + "/checkpoints/weights/";
  EXPECT_EQ(client.call("DELETE", url + "deleted").status, 200);
  serve();  // behind a snapshot
  client.forward_backward(forward_backward_body(model, 3, 1, 2));
  const std::string step = client.step(model, 4), late = client.save(model, 5, "late");
  const json expected = client.value(step);
  client.save(model, 6, "deleted");
  EXPECT_EQ(client.value(client.operation("save_weights", model, 7, {{"path", "kept"}, {"overwrite", true}}))
                .value("type", ""),
            "save_weights");
  kill();
  const fs::path sound = folder.path / "sound", checkpoints = options.state / "checkpoints";
  fs::rename(options.state, sound);
  std::vector<std::size_t> ends{24};  // a header, then records behind 16 bytes each
  std::vector<LogRecord> records;
  {
    fs::copy_file(sound / "journal", folder.path / "journal");
    const Journal journal(folder.path / "journal", [&](std::uint64_t, std::string_view text) {
      ends.push_back(ends.back() + 16 + text.size());
      records.push_back(LogRecord::decode(text));
    });
  }
  ASSERT_EQ(ends.back(), fs::file_size(sound / "journal"));
  ASSERT_EQ(records.size(), 10u);
  CheckpointInfo info;
  info.run = model, info.kind = "weights";
  std::vector<std::size_t> cuts = ends;
  if (full_tests()) {
    cuts.resize(ends.back() - ends[0] + 1);
    std::iota(cuts.begin(), cuts.end(), ends[0]);
  }
  for (const std::size_t cut : cuts) {
    running.reset();
    fs::remove_all(options.state);
    fs::copy(sound, options.state, fs::copy_options::recursive);
    fs::resize_file(options.state / "journal", cut);
    fs::create_directory(checkpoints / (info.run + "~weights~mine"));  // not a server's
    std::set<std::string> accepted;
    for (std::size_t i = 0; i < records.size() && ends[i + 1] <= cut; ++i)
      accepted.insert(records[i].text("id"));
    ::testing::internal::CaptureStderr();
    serve(false);
    const std::string told = ::testing::internal::GetCapturedStderr();
    const auto there = [&](const char* name) {
      info.name = name;
      return fs::exists(CheckpointStore(checkpoints).directory(info));
    };
    EXPECT_TRUE(there("kept")) << cut;
    EXPECT_TRUE(fs::exists(checkpoints / (info.run + "~weights~mine"))) << cut;
    EXPECT_TRUE(there("late")) << cut;
    EXPECT_TRUE(there("deleted")) << cut;
    EXPECT_EQ(told.find("~weights~late, whose") == told.npos, accepted.contains(model + ":op:5")) << told;
    EXPECT_EQ(told.find("~weights~deleted, whose") == told.npos, accepted.contains(model + ":op:6")) << told;
    serve();
    EXPECT_EQ(client.load(1, "tinker://" + model + "/weights/kept")["type"], "load_weights");
    if (!accepted.contains(model + ":op:5")) continue;
    EXPECT_EQ(client.value(step), expected) << cut;
    EXPECT_EQ(client.value(model + ":op:5")["path"], late) << cut;
    EXPECT_EQ(client.load(2, late)["type"], "load_weights") << cut;
  }
}

TEST_F(ServiceTest, WhatIsNoCheckpointIsNamedAtTheStartAndCounted) {
  serve();
  const fs::path checkpoints = options.state / "checkpoints";
  const auto folder_of = [&](const std::string& name) {
    for (const auto& entry : fs::directory_iterator(checkpoints))
      if (entry.path().filename().string().ends_with("~weights~" + name)) return entry.path();
    return fs::path();
  };
  int sequence = 0;
  for (const char* name : {"whole", "changed", "gone", "moved", "linked"})
    client.save(model, ++sequence, name);
  running.reset();  // with a snapshot: a replay would save them again
  const fs::path moved = checkpoints / "foreign", linked = folder_of("linked");
  std::ofstream(folder_of("changed") / "info.json", std::ios::app) << "x";
  fs::remove(folder_of("gone") / "info.json");
  fs::rename(folder_of("moved"), moved);
  fs::rename(linked, folder.path / "linked");
  fs::create_directory_symlink(folder.path / "linked", linked);
  std::ofstream(checkpoints / "notes\n.txt") << "mine";
  ::testing::internal::CaptureStderr();
  serve();
  const std::string told = ::testing::internal::GetCapturedStderr();
  std::map<std::string, std::string> found = {{(folder_of("changed") / "info.json").string(), "found "},
                                              {(folder_of("gone") / "info.json").string(), "no regular file"},
                                              {moved.string(), "the checkpoint tinker://"},
                                              {linked.string(), "no folder"},
                                              {(checkpoints / "notes\\n.txt").string(), "no folder"}};
  std::istringstream lines(told);
  int ignored = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("no checkpoint, ignored: ")) continue;
    ++ignored;
    const auto of = std::ranges::find_if(
        found, [&](const auto& one) { return line.find(one.first + ": ") != line.npos; });
    ASSERT_NE(of, found.end()) << line;
    EXPECT_NE(line.find(of->second), line.npos) << line;
    EXPECT_NE(line.find("Restore it from a copy of the state folder, or delete this checkpoint"), line.npos);
    found.erase(of);
  }
  EXPECT_EQ(ignored, 5) << told;
  const auto status = [&](const std::string& tenant) {
    return json::parse(running->transport()(request_of("GET", "/isograd/status", ""), tenant).body);
  };
  EXPECT_EQ(status("operator").at("checkpoints_ignored"), 5);
  EXPECT_FALSE(status("a").contains("checkpoints_ignored"));
  EXPECT_EQ(client.load(1, "tinker://" + model + "/weights/whole")["type"], "load_weights");
  EXPECT_EQ(fs::file_size(checkpoints / "notes\n.txt"), 4u);
}

TEST_F(ServiceTest, AnExpiredCheckpointIsUnknownAndItsNameIsFree) {
  serve();
  const auto save = [&](std::int64_t sequence) {
    return client.value(
        client.operation("save_weights", model, sequence, {{"path", "a"}, {"ttl_seconds", 3600}}));
  };
  const std::string path = save(1)["path"];
  EXPECT_EQ(client.post("weights_info", {{"tinker_path", path}}).status, 200);
  EXPECT_NE(save(2).value("error", "").find("name that is free"), std::string::npos);
  running.reset();
  const fs::path saved = options.state / "snapshot-1/state.json";
  json state = json::parse(std::ifstream(saved));
  json& expires = state["state"]["saved"][path]["info"]["expires"];
  EXPECT_GT(expires, seconds_now() + 3000);
  expires = seconds_now() - 1;
  std::ofstream(saved) << state;
  serve();
  EXPECT_EQ(client.post("weights_info", {{"tinker_path", path}}).status, 404);
  EXPECT_EQ(client.load(1, path)["category"], "user");
  client.result(client.forward_backward(forward_backward_body(model, 3, 1, 1)));
  EXPECT_FALSE(fs::is_empty(options.state / "checkpoints"));  // until there is a snapshot without it
  serve();
  EXPECT_TRUE(fs::is_empty(options.state / "checkpoints"));
  EXPECT_EQ(save(4)["path"], path);
}

TEST_F(ServiceTest, FilesThatAnExpiredCheckpointLeftAreRemovedAtTheStart) {
  serve();
  running.reset();
  CheckpointInfo info;
  info.run = "a:train:0", info.kind = "weights", info.name = "old", info.created = 1, info.expires = 2;
  CheckpointStore store(options.state / "checkpoints");
  store.save(info, [](const fs::path&) { return 0; });
  serve();
  EXPECT_FALSE(fs::exists(store.directory(info)));
}

TEST_F(ServiceTest, AStateFolderWithoutAllOfItsJournalIsRefusedAndKept) {
  serve();
  client.save(model, 1, "one");
  serve();  // behind a snapshot
  client.result(client.forward_backward(forward_backward_body(model, 2, 1, 1)));
  kill();
  const auto refused = [&](const fs::path& missing, const std::string& found) {
    fs::rename(missing, folder.path / "kept");
    try {
      serve(false);
      ADD_FAILURE() << "started without " << missing;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(found), std::string::npos) << error.what();
    }
    fs::rename(folder.path / "kept", missing);
  };
  refused(options.state / "journal", "no such file");
  refused(options.state / "snapshot-1", "records from position");
  serve();
  EXPECT_EQ(client.load(1, "tinker://" + model + "/weights/one")["type"], "load_weights");
}

TEST_F(ServiceTest, ADeleteWithoutRoomIsNoErrorThatClientsRepeat) {
  serve();
  const std::string path = client.save(model, 1, "one");
  client.value(client.operation("load_weights", model, 2, {{"path", path}, {"optimizer", true}}));
  engine.full = true;
  const std::string url = "/api/v1/training_runs/" + model + "/checkpoints/weights/one";
  const HttpReply refused = client.call("DELETE", url);
  EXPECT_EQ(refused.status, 400) << refused.body;
  EXPECT_NE(refused.body.find("room"), std::string::npos) << refused.body;
  engine.full = false;
}

TEST_F(ServiceTest, ABodyThatIsTooLargeUsesItsSequence) {
  serve();
  const auto unread = [&](const std::string& path, const std::string& body) {
    HttpRequest request = request_of("POST", "/api/v1/" + path, body);
    request.too_large = 1000;
    return running->service.unread(request, "a");
  };
  const auto refused = [&](const std::string& path, const std::string& short_parts) {
    const auto reply = unread(path, short_parts);
    if (!reply || reply->status != 200) return ADD_FAILURE() << path;
    const std::string id = json::parse(reply->body)["request_id"];
    EXPECT_NE(client.result(id).body.find("at most 1000 bytes"), std::string::npos);
  };
  std::string forward = forward_backward_body(model, 1, 1, 0);
  protozero::pbf_writer(forward).add_bool(6, true);
  refused("forward_backward", forward);  // and the model goes on
  refused("save_weights", json{{"model_id", model}, {"seq_id", 2}}.dump());
  client.forward_backward(forward_backward_body(model, 3, 1, 2));
  EXPECT_EQ(client.value(client.step(model, 4))["metrics"]["datums"], 2);
  const std::string later = client.step(model, 6);
  refused("forward_backward", forward_backward_body(model, 5, 1, 0));
  EXPECT_NE(client.result(later).body.find("at most 1000 bytes"), std::string::npos);
  for (const char* path : {"create_session", "create_model", "load_weights", "optim_step", "asample"}) {
    EXPECT_FALSE(unread(path, json{{"session_id", client.session}, {"model_seq_id", 9}}.dump())) << path;
  }
}

TEST_F(ServiceTest, SecretsAreNotJournalled) {
  serve();
  const std::string secret = "only-its-owner-knows";
  client.value(client.operation("load_weights", model, 1,
                                {{"path", "tinker://a/weights/b"}, {"weights_access_token", secret}}));
  client.sure("load_weights", {{"session_id", client.session},
                               {"model_seq_id", 1},
                               {"path", "tinker://a/weights/b"},
                               {"optimizer", true},
                               {"weights_access_token", secret}});
  std::ifstream file(options.state / "journal", std::ios::binary);
  const std::string journal(std::istreambuf_iterator<char>(file), {});
  EXPECT_NE(journal.find("tinker://a/weights/b"), std::string::npos);
  EXPECT_EQ(journal.find(secret), std::string::npos);
}

TEST_F(ServiceTest, InvalidUtf8IsAnErrorLikeAnyOther) {
  serve();
  const std::string bad = client.forward_backward(forward_backward_body(model, 1, 1, 1, 2, "ÿþ"));
  for (int start = 0; start < 2; ++start, serve()) EXPECT_EQ(client.value(bad)["category"], "user");
}

// ---- kills ----

struct Pipes {
  int requests[2], replies[2];
};

void write_text(int file, const std::string& text) {
  const std::uint64_t size = text.size();
  std::string all(reinterpret_cast<const char*>(&size), sizeof(size));
  all += text;
  for (std::size_t at = 0; at < all.size();) {
    const ssize_t done = ::write(file, all.data() + at, all.size() - at);
    if (done <= 0) return;
    at += static_cast<std::size_t>(done);
  }
}

bool read_text(int file, std::string& text) {
  const auto read_all = [&](char* into, std::size_t size) {
    for (std::size_t at = 0; at < size;) {
      const ssize_t done = ::read(file, into + at, size - at);
      if (done <= 0) return false;
      at += static_cast<std::size_t>(done);
    }
    return true;
  };
  std::uint64_t size = 0;
  if (!read_all(reinterpret_cast<char*>(&size), sizeof(size))) return false;
  text.resize(size);
  return read_all(text.data(), size);
}

// A service in a process of its own, which ends by SIGKILL after a random time and is started again.
class KilledService {
 public:
  KilledService(ServiceOptions options, std::uint64_t seed, bool kills)
      : options_(std::move(options)), random_(seed), kills_(kills) {
    ::signal(SIGPIPE, SIG_IGN);  // a killed server reads no more
    start();
  }
  ~KilledService() { stop(); }
  HttpReply call(const HttpRequest& request, const std::string&) {
    for (int attempt = 0; attempt < 1000 && !broken_; ++attempt) {
      write_text(pipes_.requests[1], json{request.method, request.path, request.headers}.dump());
      write_text(pipes_.requests[1], request.body);
      std::string status, type, body;
      if (read_text(pipes_.replies[0], status) && read_text(pipes_.replies[0], type) &&
          read_text(pipes_.replies[0], body))
        return {.status = std::stoi(status), .type = type, .body = body};
      stop();
      restarts += 1;
      start();
    }
    return {.status = 599, .body = "no answer"};
  }
  int restarts = 0;

 private:
  void start() {
    ASSERT_EQ(::pipe2(pipes_.requests, O_CLOEXEC), 0);
    ASSERT_EQ(::pipe2(pipes_.replies, O_CLOEXEC), 0);

    const auto life = std::chrono::microseconds(std::uniform_int_distribution<int>(500, 70000)(random_));
    child_ = ::fork();
    ASSERT_GE(child_, 0);
    if (child_ > 0) {
      ::close(pipes_.requests[0]), ::close(pipes_.replies[1]);
      return;
    }
    ::close(pipes_.requests[1]), ::close(pipes_.replies[0]);
    const auto end_soon = [life] {
      std::thread([life] {
        std::this_thread::sleep_for(life);
        ::kill(::getpid(), SIGKILL);
      }).detach();
    };
    // Every other life may end while the state is restored.
    if (kills_ && restarts % 2 == 0) end_soon();
    try {
      ToyEngine engine;
      engine.datum_time = std::chrono::microseconds(100);
      Running running(options_, engine);
      if (kills_ && restarts % 2 == 1) end_soon();
      const Transport transport = running.transport();
      std::string head, body;
      while (read_text(pipes_.requests[0], head) && read_text(pipes_.requests[0], body)) {
        const json parts = json::parse(head);
        HttpRequest request{
            .method = parts[0], .path = parts[1], .query = {}, .headers = parts[2], .body = body};
        const HttpReply reply = transport(request, "a");
        write_text(pipes_.replies[1], std::to_string(reply.status));
        write_text(pipes_.replies[1], reply.type);
        write_text(pipes_.replies[1], reply.body);
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the server cannot start: %s\n", error.what());
      ::_exit(3);
    }
    ::_exit(0);
  }
  void stop() {
    ::close(pipes_.requests[1]), ::close(pipes_.replies[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child_, &status, 0), child_);
    broken_ |= WIFEXITED(status) && WEXITSTATUS(status) == 3;
    EXPECT_FALSE(broken_);
  }

  ServiceOptions options_;
  std::mt19937_64 random_;
  bool kills_, broken_ = false;
  Pipes pipes_{};
  pid_t child_ = -1;
};

// Everything that a client is told, with the session's name replaced.
std::vector<std::string> scripted_run(const Transport& transport, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::string> told;
  Client client(transport);
  client.start();
  const auto tell = [&](const HttpReply& reply) {
    EXPECT_EQ(reply.status, 200) << reply.body;
    std::string body = reply.body;
    for (std::size_t at; (at = body.find(client.session)) != std::string::npos;)
      body.replace(at, client.session.size(), "S");
    told.push_back(body);
  };
  const std::string one = client.create(0), two = client.create(1);
  std::map<std::string, std::int64_t> next{{one, 1}, {two, 1}};
  const auto twice = [&](const auto& post) {
    const std::string id = post();
    EXPECT_EQ(post(), id);
    return id;
  };
  for (int round = 0; round < 3; ++round) {
    std::vector<std::string> ids;
    for (const std::string& model : {one, two}) {
      const std::int64_t first = next[model];
      for (const std::int64_t chunk : {1, 2, 3, 0})
        ids.push_back(twice([&] {
          return client.forward_backward(forward_backward_body(model, first + chunk, 100 * round + chunk, 4));
        }));
      ids.push_back(twice([&] { return client.step(model, first + 4); }));
      const std::string name = "round" + std::to_string(round % 2);
      ids.push_back(
          client.operation("save_weights", model, first + 5, {{"path", name}, {"overwrite", true}}));
      next[model] = first + 6;
    }
    for (const std::string& id : ids) tell(client.result(id));
    const std::string sampler = client.sampler(one, next[one]++, round);
    json ask = sampling(sampler, round);
    ask["sampling_params"]["seed"] = round;
    const std::string sample = client.sure("asample", ask)["request_id"];
    // The other model goes on from the first one's weights, which are deleted afterwards.
    const std::string path = "tinker://" + one + "/weights/round" + std::to_string(round % 2);
    tell(client.result(twice([&] {
      return client.operation("load_weights", two, next[two], {{"path", path}, {"optimizer", true}});
    })));
    next[two] += 1;
    if (round % 3 == 2)
      EXPECT_EQ(client
                    .call("DELETE", "/api/v1/training_runs/" + one + "/checkpoints/weights/round" +
                                        std::to_string(round % 2))
                    .status,
                200);
    tell(client.result(sample));
  }
  return told;
}

TEST(Service, KillsLoseAndDoubleNothing) {
  const std::uint64_t seed = 20261128;
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  ServiceOptions options;
  options.print_steps = false, options.piece_tokens = 4, options.poll_seconds = 5;
  options.snapshot_least = 0.01, options.snapshot_share = 0.5;
  std::vector<std::string> expected;
  {
    Folder folder;
    options.state = folder.path / "state";
    KilledService service(options, seed, false);
    expected = scripted_run(
        [&](const auto& request, const auto& tenant) { return service.call(request, tenant); }, seed);
  }
  ASSERT_EQ(expected.size(), 42u);
  // A fast machine finishes many runs before the first kill.
  const int wanted = full_tests() ? 500 : 100;
  int kills = 0;
  for (std::uint64_t run = 0; kills < wanted && run < 2000; ++run) {
    Folder folder;
    options.state = folder.path / "state";
    KilledService service(options, seed + run, true);
    const auto told = scripted_run(
        [&](const auto& request, const auto& tenant) { return service.call(request, tenant); }, seed);
    kills += service.restarts;
    ASSERT_EQ(told, expected) << "run " << run << ", " << service.restarts << " kills";
  }
  std::printf("%d kills\n", kills);
  EXPECT_GE(kills, wanted);
}

}  // namespace
}  // namespace isograd::serve
