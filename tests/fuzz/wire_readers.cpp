// Bodies of requests to the training server: a file has the name of its request.
#include <functional>
#include <map>
#include <stdexcept>

#include "base/files.hpp"
#include "fuzz/readers.hpp"
#include "serve/wire/tinker.hpp"
#include "serve/wire/wire_testing.hpp"
#include "serve/wire/xorl.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;
namespace tinker = serve::tinker;
namespace xorl = serve::xorl;

struct Body {
  std::string sound;
  std::function<void(const std::string&)> read;
};

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

const std::map<std::string, Body>& bodies() {
  static const std::map<std::string, Body> all = {
      {"pass",
       {serve::wire_testing::bytes_of_hex(serve::wire_testing::kPpo),
        [](const std::string& body) { look_at_pass(tinker::forward_backward(body).body); }}},
      {"older_pass",
       {serve::wire_testing::bytes_of_hex(serve::wire_testing::kOlder),
        [](const std::string& body) { look_at_pass(tinker::forward_backward(body).body); }}},
      {"create_model",
       {R"({"session_id":"s","model_seq_id":0,"base_model":"b","user_metadata":{"a":"b"},
                            "lora_config":{"rank":8,"seed":1,"train_mlp":true},"optimizer_config":{"type":"adamw"}})",
        [](const std::string& body) { tinker::create_model(body); }}},
      {"load_weights",
       {R"({"session_id":"s","model_seq_id":1,"path":"tinker://a/weights/n","optimizer":true})",
        [](const std::string& body) { tinker::load_weights(body); }}},
      {"optim_step",
       {R"({"model_id":"m","seq_id":2,"adam_params":{"learning_rate":0.5,"beta1":0.9,"eps":1e-8}})",
        [](const std::string& body) { tinker::optim_step(body); }}},
      {"save",
       {R"({"model_id":"m","seq_id":2,"path":"n","ttl_seconds":3600,"kind":"snapshot","overwrite":true})",
        [](const std::string& body) {
          tinker::save_weights(body), tinker::save_weights_for_sampler(body);
          tinker::save_weights_external(body), xorl::save_weights(body);
        }}},
      {"asample",
       {R"({"sampling_session_id":"s","seq_id":0,"num_samples":2,"prompt":{"chunks":[{"tokens":[1,2,3]}]},
                       "prompt_logprobs":true,"prompt_logprobs_last_n":1,"target_prompt_logprobs":{"data":[5,6],
                       "dtype":"int64","shape":[2,3],"sparse_crow_indices":[0,1,2],"sparse_col_indices":[1,2]},
                       "sampling_params":{"max_tokens":9,"stop":["x"],"temperature":0.5,"top_p":0.5}})",
        [](const std::string& body) { tinker::asample(body); }}},
      {"create_xorl",
       {R"({"model_id":"m","base_model":"b","lora_config":{"rank":4,"alpha":16,"dropout":0.0,
                           "target_modules":["lm_head"]}})",
        [](const std::string& body) { xorl::create_model(body); }}},
      {"pass_xorl",
       {R"({"model_id":"m","seq_id":2,"forward_backward_input":{"loss_fn":"cross_entropy","data":[{
                         "model_input":{"input_ids":[1,2]},"loss_fn_inputs":{"weights":[1,0.5],
                         "target_tokens":{"data":[2,-100],"dtype":"int64","shape":[2]}}}]}})",
        [](const std::string& body) { look_at_pass(xorl::forward_backward(body).body); }}},
  };
  return all;
}

void prepare(const fs::path& folder) {
  for (const auto& [name, body] : bodies()) put(folder / name, body.sound);
}

void read(const fs::path& file) { bodies().at(file.filename()).read(read_file(file)); }

}  // namespace

std::vector<Reader> wire_readers() {
  return {{"requests", prepare, read,
           with(kJson, {"\"tokens\":[", "\"shape\":[", "\"stop\":", "\"weights\"", "\"dtype\"", "\x12",
                        "\x1a", "\x0a"})}};
}

}  // namespace isograd::fuzz
