// The client of verify_server() against servers that do as they like.
#include "serve/verify/remote.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "base/error_testing.hpp"
#include "serve/http/http.hpp"
#include "serve/wire/tinker.hpp"

namespace isograd::serve {
namespace {

using error_testing::error_of;
using nlohmann::json;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Answers by the end of the path, and remembers requests with their keys. Read them when it has answered.
struct Answering {
  std::map<std::string, std::string> answers{{"create_session", R"({"session_id":"s"})"}, {"finish", "{}"}};
  std::vector<std::string> requests{}, keys{};
  HttpServer http{{}, {}, [this](const HttpRequest& request, const Respond& respond) {
                    requests.push_back(request.method + " " + request.path);
                    keys.push_back(request.headers.at("x-api-key"));
                    const auto found = answers.find(request.path.substr(request.path.rfind('/') + 1));
                    found == answers.end() ? respond({.status = 404, .body = "{}"})
                                           : respond({.body = found->second});
                  }};
  std::string url() const { return fmt::format("http://127.0.0.1:{}", http.port()); }
};

TEST(Remote, GivesItsKeyToItsServerAloneAndLeavesNoCheckpoint) {
  Answering server, files;
  server.answers["save_weights_external"] = R"({"request_id":"r"})";
  server.answers["retrieve_future"] = "{}";
  server.answers["external_weights_urls"] = json{{"urls", {{"adapter", files.url() + "/adapter"}}}}.dump();
  server.answers["verify-1"] = "{}";
  {
    Remote remote(server.url(), "tml-secret");
    EXPECT_THAT(error_of([&] { remote.download("m", "/nowhere"); }), HasSubstr("status 404"));
  }
  EXPECT_THAT(server.keys, ::testing::Each("tml-secret"));
  EXPECT_THAT(files.keys, ElementsAre(""));
  EXPECT_THAT(server.requests,
              Contains("DELETE /api/v1/training_runs/m/checkpoints/external_weights/verify-1"));
}

TEST(Remote, AnErrorOfAnyTypeIsTold) {
  Answering server;
  server.answers["unload_model"] = R"({"request_id":"r"})";
  server.answers["retrieve_future"] = R"({"error":{"code":7}})";
  Remote remote(server.url(), "");
  EXPECT_THAT(error_of([&] { remote.unload("m"); }), HasSubstr("7"));
}

TEST(Remote, ReadsWhatForwardBackwardReturns) {
  Answering server;
  server.answers["forward_backward"] = R"({"request_id":"r"})";
  Remote remote(server.url(), "");
  const ForwardBackwardResult sent{
      .log_probabilities = {{.shape = {2}, .numbers = {-1, -2}},
                            {.shape = {2, 3}, .numbers = {-1, -2, -3, -4, -5, -6}}},
      .metrics = {{"loss:sum", 2.5}}};
  const std::string reply = server.answers["retrieve_future"] = tinker::forward_backward_reply(sent);
  const ForwardBackwardResult found = remote.forward_backward("m", {});
  EXPECT_EQ(found.metrics, sent.metrics);
  ASSERT_EQ(found.log_probabilities.size(), 2);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(found.log_probabilities[i].shape, sent.log_probabilities[i].shape);
    EXPECT_EQ(found.log_probabilities[i].numbers, sent.log_probabilities[i].numbers);
  }
  // Every other reply is read, or refused by name.
  int refused = 0;
  for (std::size_t at = 0; at < reply.size(); ++at)
    for (const int change : {0, 1, 0x80}) {
      if (at == 0 && change == 0) continue;  // no reply: it asks again
      std::string other = reply.substr(0, change ? reply.size() : at);
      if (change) other[at] = static_cast<char>(other[at] ^ change);
      server.answers["retrieve_future"] = other;
      refused += error_of([&] { remote.forward_backward("m", {}); }) != "no error";
    }
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace isograd::serve
