// The requests of the tinker SDK, as far as verify_server() makes them.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "serve/wire/messages.hpp"

namespace isograd::serve {

// A session of a server, which the destructor finishes. ConfigError from any call: what the server answered.
class Remote {
 public:
  // `beat`: how often the server hears of the session, whatever is computed here meanwhile.
  Remote(std::string url, std::string key, std::chrono::milliseconds beat = std::chrono::seconds(10));
  ~Remote();
  Remote(const Remote&) = delete;
  Remote& operator=(const Remote&) = delete;

  std::vector<std::string> bases();
  std::string create(const CreateModel& request);  // the model
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& call);
  Metrics optim_step(const std::string& model, const AdamParams& params);
  void unload(const std::string& model);
  // The model's weights as PEFT's (rank 0: transformers') files, into `directory`.
  void download(const std::string& model, const std::filesystem::path& directory);
  std::string sampler_of(const std::string& model);
  std::vector<float> log_probabilities(const std::string& sampler, const std::vector<std::int64_t>& prompt);

 private:
  std::string send(const std::string& method, const std::string& path, const std::string& body = "",
                   const std::string& type = "application/json");
  nlohmann::json ask(const std::string& method, const std::string& path, const nlohmann::json& body = {});
  // The result of an operation, whose request is `promise`.
  std::string result(const nlohmann::json& promise);
  nlohmann::json operation(const std::string& model, const std::string& path, nlohmann::json body);

  std::string url_, key_, session_;
  std::map<std::string, std::int64_t> sequences_{};  // of models; "": of models, samplers and samples
  std::jthread beat_{};
};

}  // namespace isograd::serve
