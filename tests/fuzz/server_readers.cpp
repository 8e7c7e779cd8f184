// The files that a training server finds when it starts, and its file of keys.
#include <unistd.h>

#include <optional>
#include <stdexcept>

#include "base/files.hpp"
#include "base/json.hpp"
#include "fuzz/readers.hpp"
#include "serve/http/keys.hpp"
#include "serve/service/service_testing.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;
namespace testing = serve::service_testing;

// The journal's records in place of the journal, whose checksums would hide most changes of them.
constexpr const char* kRecords = "records";
constexpr std::string_view kBetween = "\n---\n";

serve::ServiceOptions options_of(const fs::path& state) {
  serve::ServiceOptions options;
  options.state = state, options.print_steps = false, options.snapshot_least = 1e9;
  return options;
}

// A server's folder as a kill leaves it: a snapshot, and a journal behind it.
void prepare_state(const fs::path& folder) {
  const fs::path made = folder.parent_path() / "made";
  testing::ToyEngine engine, second;
  std::string session, model, sampler;
  const auto sample = [&](testing::Client& client, int sequence) {
    return client.sure("asample", {{"sampling_session_id", sampler},
                                   {"seq_id", sequence},
                                   {"prompt", {{"chunks", {{{"tokens", {1, 2, 3}}}}}}},
                                   {"sampling_params", {{"max_tokens", 3}}}})["request_id"];
  };
  {
    testing::Running running(options_of(made), engine);
    testing::Client client(running.transport());
    session = client.start(), model = client.create();
    client.forward_backward(testing::forward_backward_body(model, 1, 5, 3));
    client.step(model, 2);
    client.operation("save_weights", model, 3, {{"path", "kept"}});
    sampler = client.value(client.operation("save_weights_for_sampler", model, 4,
                                            {{"sampling_session_seq_id", 0}}))["sampling_session_id"];
    client.result(sample(client, 0));
  }
  testing::Running running(options_of(made), second);
  testing::Client client(running.transport());
  client.session = session;
  client.post("load_weights", {{"session_id", session},
                               {"model_seq_id", 1},
                               {"path", "tinker://" + model + "/weights/kept"},
                               {"optimizer", true}});
  client.forward_backward(testing::forward_backward_body(session + ":train:1", 1, 7, 2));
  client.value(client.step(session + ":train:1", 2));
  client.operation("save_weights_external", model, 5, {{"path", "files"}});
  client.value(client.operation("unload_model", model, 6));
  client.call("PUT", "/api/v1/training_runs/" + model + "/checkpoints/weights/kept/ttl",
              R"({"ttl_seconds":1000000000})");
  client.result(sample(client, 1));
  client.forward_backward(testing::forward_backward_body(session + ":train:1", 4, 7, 2));  // 3 is missing
  fs::copy(made, folder / "state", fs::copy_options::recursive);
  fs::remove(folder / "state/LOCK");
  put(folder / "state/deaths.json", "{\"" + model + ":op:7\": 2}");
  std::string records;
  const fs::path copy = folder.parent_path() / "journal";
  fs::copy_file(folder / "state/journal", copy);
  const serve::Journal journal(copy, [&](std::uint64_t, std::string_view record) {
    records.append(records.empty() ? "" : kBetween).append(record);
  });
  put(folder / "state" / kRecords, records);
}

void write_journal(const fs::path& state, std::string_view records) {
  std::uint64_t position = 0;
  for (const auto& entry : fs::directory_iterator(state))
    if (entry.path().filename().string().starts_with("snapshot-"))
      position = parse_json(read_file(entry.path() / "state.json")).value.at("position");
  fs::remove(state / "journal");
  serve::Journal journal(state / "journal", [](std::uint64_t, std::string_view) {});
  journal.drop_before(position);
  for (std::size_t begin = 0; begin <= records.size();) {
    const std::size_t end = std::min(records.find(kBetween, begin), records.size());
    journal.append(records.substr(begin, end - begin));
    begin = end + kBetween.size();
  }
}

// Starts a server twice: what a start leaves is sound.
void read_state(const fs::path& file) {
  fs::path folder = file;
  while (folder.filename() != "state") folder = folder.parent_path();
  const fs::path state = folder.parent_path().parent_path() / ("started-" + std::to_string(::getpid()));
  fs::remove_all(state);
  fs::copy(folder, state, fs::copy_options::recursive);
  if (file.filename() == kRecords) write_journal(state, read_file(file));
  fs::remove(state / kRecords);
  for (const bool again : {false, true}) {
    testing::ToyEngine engine;
    std::optional<serve::Service> service;
    try {
      service.emplace(options_of(state), engine);
    } catch (const ConfigError& error) {
      if (again) throw std::logic_error(std::string("the second start is refused: ") + error.what());
      throw;
    }
    for (const char* path :
         {"/metrics", "/isograd/status", "/api/v1/checkpoints", "/api/v1/training_runs", "/api/v1/sessions"})
      service->handle(testing::request_of("GET", path, ""), "a", [&](const serve::HttpReply& reply) {
        if (reply.status != 200) throw std::logic_error(path + (" is answered with: " + reply.body));
      });
    service->stop();
    service->run();  // a snapshot
  }
}

// An info.json whose own checksum is right.
std::string right_description(std::string text) {
  auto [body, problem] = parse_json(text);
  if (!problem.empty() || !body.contains("checkpoint")) return text;
  body.erase("checksum");
  const std::string summed = body.dump(-1, ' ', true);
  body["checksum"] = checksum(summed.data(), summed.size());
  return body.dump(1);
}

void read_keys(const fs::path& file) { serve::ApiKeys(file).tenant_of("tml-key"); }

std::string http() {
  try {
    serve::NewKey("a");
    return "";
  } catch (const ConfigError&) {
    return "libmicrohttpd";
  }
}

}  // namespace

std::vector<Reader> server_readers() {
  return {{"server", prepare_state, read_state,
           with(kJson, {"\"kind\":", "\"done\"", "\"control\"", "\"of\":", "\"sequence\":", "\"time\":",
                        "\"expires\":", ":train:0", "tinker://", kBetween.data()}),
           right_description},
          {.name = "keys",
           .prepare =
               [](const fs::path& folder) {
                 put(folder / "keys", "# a file\n" + serve::NewKey("alice").line + "\n\n" +
                                          serve::NewKey("bob-2").line + "\r\n");
               },
           .read = read_keys,
           .words = {" ", "\n", "\r\n", "#", "alice ", "tml-", std::string(64, 'a')},
           .missing = http}};
}

}  // namespace isograd::fuzz
