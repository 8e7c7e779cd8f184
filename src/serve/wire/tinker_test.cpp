#include "serve/wire/tinker.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <protozero/pbf_writer.hpp>

#include "base/error_testing.hpp"
#include "base/json.hpp"
#include "serve/wire/wire_testing.hpp"

namespace isograd::serve::tinker {
namespace {

using error_testing::error_of;
using protozero::pbf_writer;
using ::testing::HasSubstr;
using wire_testing::bytes_of_hex;
using wire_testing::kOlder;
using wire_testing::kPpo;
using Json = nlohmann::json;
using Ints = std::vector<std::int64_t>;
using Floats = std::vector<float>;

// ---- replies as the client's own classes serialize them ----

constexpr const char* kOutput =
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000000bf000080bf000000c0"
    "1218000000000000000008000000000000000c0000000000000018011802123e0a0b41727261795265636f7264122d0a086c6f6770726f62"
    "7312210a08000040c0000080c0121000000000000000000800000000000000180122010218011a130a086c6f73733a73756d110000000000"
    "0004401a140a09776f7273743a6d617811000000000000f87f";

constexpr const char* kSampled =
    "0a2e120803000000040000001a08000080be000000bf22180a0803000000040000001208000080be000000bf180120020a0e080112040900"
    "00001a04000080bf12080000c07f0000c0bf1a180a0800000000080000001208804fc3c7000000be1801200220072a100a08000000c00000"
    "0000180122020102";

TEST(TinkerProtobuf, RequestsOfTheClientAreRead) {
  const auto request = forward_backward(bytes_of_hex(kPpo));
  EXPECT_EQ(request.model, "s:train:0");
  EXPECT_EQ(request.sequence, 3);
  EXPECT_EQ(request.body.loss, "ppo");
  EXPECT_FALSE(request.body.forward_only);
  EXPECT_EQ(std::get<double>(request.body.config.at("clip_low_threshold")), 0.8);
  EXPECT_EQ(std::get<std::string>(request.body.config.at("loss_id")), "x");
  ASSERT_EQ(request.body.data.size(), 2u);
  const Datum &dense = request.body.data[0], &sparse = request.body.data[1];
  EXPECT_EQ(dense.tokens, (Ints{5, 6, 7}));
  EXPECT_EQ(dense.inputs.at("target_tokens").integers, (Ints{6, 7, 8}));
  EXPECT_EQ(dense.inputs.at("logprobs").numbers, (Floats{-0.5, -1, -2.25}));
  EXPECT_EQ(dense.inputs.at("advantages").numbers, (Floats{1.5, 0, -1}));
  EXPECT_EQ(dense.inputs.at("advantages").shape, Ints{3});
  EXPECT_EQ(sparse.tokens, (Ints{300, 2}));
  EXPECT_EQ(sparse.inputs.at("target_tokens").integers, (Ints{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(sparse.inputs.at("weights").numbers, (Floats{0, 0, 0.25, -2, 0, 0}));
  EXPECT_EQ(sparse.inputs.at("weights").shape, (Ints{2, 3}));
}

TEST(TinkerProtobuf, OlderMapsAndNarrowTypesAreRead) {
  const auto request = forward_backward(bytes_of_hex(kOlder));
  EXPECT_EQ(request.sequence, 2147483647);
  EXPECT_TRUE(request.body.forward_only);
  EXPECT_EQ(std::get<double>(request.body.config.at("beta")), 0.5);
  const Datum& datum = request.body.data.at(0);
  EXPECT_EQ(datum.tokens, (Ints{1, 2}));
  EXPECT_EQ(datum.inputs.at("weights").numbers, (Floats{1, -2.5}));
  EXPECT_EQ(datum.inputs.at("weights").shape, Ints{2});
  EXPECT_EQ(datum.inputs.at("target_tokens").integers, (Ints{9, 70000}));
}

TEST(TinkerProtobuf, ResultsHaveTheBytesOfTheClientsClasses) {
  ForwardBackwardResult result;
  result.log_probabilities = {{{2}, {-0.5, -1}, {}}, {{1}, {-2}, {}}, {{1, 2}, {-3, -4}, {}}};
  result.metrics = {{"loss:sum", 2.5}, {"worst:max", std::numeric_limits<double>::quiet_NaN()}};
  EXPECT_EQ(forward_backward_reply(result), bytes_of_hex(kOutput));

  SampleResult sampled;
  sampled.sequences.push_back({.stopped = true,
                               .tokens = {3, 4},
                               .log_probabilities = {-0.25, -0.5},
                               .top = TopTokens{1, 2, {3, 4}, {-0.25, -0.5}}});
  sampled.sequences.push_back({.stopped = false, .tokens = {9}, .log_probabilities = {-1}});
  sampled.prompt_log_probabilities = Floats{std::numeric_limits<float>::quiet_NaN(), -1.5};
  sampled.top_prompt = TopTokens{1, 2, {0, 8}, {-99999, -0.125}};
  sampled.cached_prompt_tokens = 7;
  sampled.prompt_targets = Array{{1, 2}, {-2, 0}, {}};
  EXPECT_EQ(sample_reply(sampled), bytes_of_hex(kSampled));
}

// ---- bad protobuf ----

template <class T>
std::string packed(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

struct Parts {
  std::string model = "m", loss = "cross_entropy", name = "weights", tokens = packed<std::int32_t>({1, 2});
  std::int64_t sequence = 1;
  int dtype = 1, kind = 1;  // kind: the field of the chunk
  Ints shape{2};
  std::string dense = packed<float>({1, 1});
  bool unpacked = false, sparse = false, no_data = false, no_tensor = false;
  Ints starts{}, columns{};
  double config = 1;
};

std::string message(const Parts& parts) {
  std::string bytes;
  pbf_writer request(bytes);
  request.add_string(1, parts.model);
  request.add_int64(2, parts.sequence);
  request.add_string(99, "a field of a later client");
  if (!parts.no_data) {
    pbf_writer datum(request, 3);
    {
      pbf_writer chunk(datum, 1);
      pbf_writer text(chunk, static_cast<protozero::pbf_tag_type>(parts.kind));
      text.add_bytes(1, parts.tokens);
    }
    pbf_writer entry(datum, 2);
    entry.add_string(1, parts.name);
    if (!parts.no_tensor) {
      pbf_writer tensor(entry, 2);
      if (parts.sparse) {
        pbf_writer rows(tensor, 2);
        rows.add_bytes(1, parts.dense);
        rows.add_bytes(2, packed(parts.starts));
        rows.add_bytes(3, packed(parts.columns));
      } else {
        tensor.add_bytes(1, parts.dense);
      }
      tensor.add_enum(3, parts.dtype);
      if (parts.unpacked)
        for (const std::int64_t size : parts.shape) tensor.add_int64(4, size);
      else
        tensor.add_packed_int64(4, parts.shape.begin(), parts.shape.end());
    }
  }
  request.add_string(4, parts.loss);
  pbf_writer entry(request, 7);
  entry.add_string(1, "beta");
  pbf_writer value(entry, 2);
  value.add_double(1, parts.config);
  return bytes;
}

TEST(TinkerProtobuf, SoundPartsAreRead) {
  EXPECT_EQ(forward_backward(message({})).body.data[0].inputs.at("weights").numbers, (Floats{1, 1}));
  EXPECT_EQ(
      forward_backward(message({.shape = {1, 2}, .unpacked = true})).body.data[0].inputs.at("weights").shape,
      (Ints{1, 2}));
  const Parts csr{.shape = {2, 3}, .sparse = true, .starts = {0, 0, 2}, .columns = {0, 2}};
  EXPECT_EQ(forward_backward(message(csr)).body.data[0].inputs.at("weights").numbers,
            (Floats{0, 0, 0, 1, 0, 1}));
  // Absent values of map entries are defaults.
  std::string bytes = message({});
  pbf_writer request(bytes);
  pbf_writer(request, 5).add_string(1, "gamma");
  EXPECT_EQ(forward_backward(bytes).body.config.size(), 1u);  // the newer map counts
}

TEST(TinkerProtobuf, BadRequestsAreRefusedByPlace) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const std::int64_t huge = std::int64_t{1} << 62;
  const struct {
    const char* part;
    Parts parts;
  } cases[] = {
      {"model_id", {.model = ""}},
      {"UTF-8", {.model = "\xFF"}},
      {"UTF-8", {.model = std::string(5000, 'm')}},
      {"seq_id", {.sequence = 0}},
      {"seq_id", {.sequence = -1}},
      {"seq_id", {.sequence = std::int64_t{1} << 31}},
      {"loss_fn", {.loss = ""}},
      {"no datums", {.no_data = true}},
      {"data[0]", {.tokens = ""}},
      {"multiple of 4", {.tokens = "abc"}},
      {"token -1", {.tokens = packed<std::int32_t>({-1})}},
      {"image", {.kind = 2}},
      {"dmel", {.kind = 3}},
      {"dtype 0", {.dtype = 0}},
      {"dtype 7", {.dtype = 7}},
      {"dtype 0", {.no_tensor = true}},
      {"multiple of 4", {.dense = "abcde"}},
      {"multiple of 8", {.dtype = 2, .dense = "abcd"}},
      {"multiple of 2", {.dtype = 4, .dense = "abc"}},
      {"2 values for shape [3]", {.shape = {3}}},
      {"shape [-2]", {.shape = {-2}}},
      {"shape [-1, -2]", {.shape = {-1, -2}, .unpacked = true}},
      {"one dimension or two", {.shape = {1, 1, 2}}},
      {"one dimension or two", {.shape = Ints(1000, 1), .unpacked = true}},
      {"shape [4611686018427387904, 4]", {.shape = {huge, 4}}},
      {"weights[1]", {.dense = packed<float>({1, nan})}},
      {"weights[0]", {.dense = packed<float>({-inf, 1})}},
      {"int64", {.name = "target_tokens"}},
      {"target_tokens[1]", {.name = "target_tokens", .dtype = 2, .dense = packed<std::int64_t>({1, -1})}},
      {"two dimensions", {.shape = {2}, .sparse = true, .starts = {0, 1, 2}, .columns = {0, 1}}},
      {"row indices", {.shape = {2, 2}, .sparse = true, .starts = {0, 2}, .columns = {0, 1}}},
      {"row indices", {.shape = {2, 2}, .sparse = true, .starts = {1, 1, 2}, .columns = {0, 1}}},
      {"row indices", {.shape = {2, 2}, .sparse = true, .starts = {0, 1, 3}, .columns = {0, 1}}},
      {"row indices", {.shape = {2, 2}, .sparse = true, .starts = {0, 1, 2}, .columns = {0}}},
      {"ascending row", {.shape = {3, 2}, .sparse = true, .starts = {0, 2, 1, 2}, .columns = {0, 1}}},
      {"ascending row", {.shape = {3, 2}, .sparse = true, .starts = {0, huge, 1, 2}, .columns = {0, 1}}},
      {"ascending row", {.shape = {3, 2}, .sparse = true, .starts = {0, -1, 1, 2}, .columns = {0, 1}}},
      {"column 2", {.shape = {2, 2}, .sparse = true, .starts = {0, 1, 2}, .columns = {0, 2}}},
      {"column -1", {.shape = {2, 2}, .sparse = true, .starts = {0, 1, 2}, .columns = {0, -1}}},
      {"column 1", {.shape = {1, 2}, .sparse = true, .starts = {0, 2}, .columns = {1, 1}}},
      {"cells", {.shape = {2, 1 << 26}, .sparse = true, .starts = {0, 1, 2}, .columns = {0, 1}}},
      {"sizes from 0", {.shape = {2, huge}, .sparse = true, .starts = {0, 1, 2}, .columns = {0, 1}}},
      {"loss_fn_config.beta", {.config = nan}},
  };
  for (const auto& [part, parts] : cases) {
    const std::string bytes = message(parts);
    EXPECT_THAT(error_of([&] { forward_backward(bytes); }), HasSubstr(part));
  }
}

TEST(TinkerProtobuf, CutAndForeignBytesAreRefused) {
  const std::string whole = message({});
  for (std::size_t end = 0; end < whole.size(); ++end) {
    const std::string cut = whole.substr(0, end);
    try {
      forward_backward(cut);  // a cut between fields may leave a whole request
    } catch (const ConfigError&) {
    }
  }
  for (const char* bytes :
       {"\x0b\x0c", "\x1a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "\x08", "\xff\xff\xff\xff\xff\xff"})
    EXPECT_THAT(error_of([&] { forward_backward(bytes); }), HasSubstr("no protobuf"));
  std::string empty_datums;
  for (int i = 0; i < 100'000; ++i) empty_datums += std::string("\x1a\0", 2);
  EXPECT_THAT(error_of([&] { forward_backward(empty_datums); }), HasSubstr("no tokens"));
  std::string many = "\x0a\x01m\x10\x01";
  const std::string one("\x1a\x0a\x0a\x08\x0a\x06\x0a\x04\1\0\0\0", 12);
  for (int i = 0; i < 70'000; ++i) many += one;
  EXPECT_THAT(error_of([&] { forward_backward(many); }), HasSubstr("more than 65536"));
}

// ---- JSON ----

TEST(TinkerJson, RequestsAreRead) {
  const Session session = create_session(
      R"({"tags":["a","b"],"user_metadata":{"k":"v","n":3},"sdk_version":"0.38.0","project_id":null,"type":"x"})");
  EXPECT_EQ(session.tags, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(session.metadata, (std::map<std::string, std::string>{{"k", "v"}, {"n", "3"}}));
  EXPECT_EQ(session.sdk_version, "0.38.0");
  EXPECT_EQ(heartbeat(R"({"session_id":"s"})"), "s");
  EXPECT_EQ(finish(R"({"reason":{"type":"errored"},"detail":null})"), "errored");

  const NewModel model = create_model(
      R"({"session_id":"s","model_seq_id":2,"base_model":"b","lora_config":{"rank":8,"seed":18446744073709551615,
          "train_mlp":false},"optimizer_config":{"type":"adamw"},"user_metadata":{"isograd.normalise":"tokens"}})");
  EXPECT_EQ(model.model, "s:train:2");
  EXPECT_EQ(model.body.lora.rank, 8);
  EXPECT_EQ(model.body.lora.seed, ~std::uint64_t{0});
  EXPECT_FALSE(model.body.lora.mlp);
  EXPECT_TRUE(model.body.lora.unembed);
  EXPECT_EQ(model.body.metadata.at("isograd.normalise"), "tokens");
  EXPECT_EQ(create_model(R"({"session_id":"s","model_seq_id":0,"base_model":"b"})").body.lora.rank, 0);

  const LoadWeights created =
      load_weights(R"({"session_id":"s","model_seq_id":1,"path":"tinker://a/weights/n","optimizer":true})");
  EXPECT_TRUE(created.creates);
  EXPECT_EQ(created.model, "s:train:1");
  EXPECT_TRUE(created.optimizer);
  const LoadWeights older =
      load_weights(R"({"model_id":"m","seq_id":4,"path":"tinker://a/weights/n","optimizer":false})");
  EXPECT_FALSE(older.creates);
  EXPECT_EQ(older.sequence, 4);
  EXPECT_EQ(get_info(R"({"model_id":"m"})"), "m");

  const auto step = optim_step(
      R"({"model_id":"m","seq_id":2,"adam_params":{"learning_rate":0.5,"beta1":0,"beta2":0.9,"eps":1e-8,
          "weight_decay":0.1,"grad_clip_norm":1}})");
  EXPECT_EQ(step.body.learning_rate, 0.5);
  EXPECT_EQ(step.body.beta1, 0);
  EXPECT_EQ(step.body.beta2, 0.9);
  EXPECT_EQ(step.body.epsilon, 1e-8);
  EXPECT_EQ(step.body.weight_decay, 0.1);
  EXPECT_EQ(step.body.clip, 1);

  const auto saved = save_weights(
      R"({"model_id":"m","seq_id":2,"path":"n","ttl_seconds":3600,"overwrite":true,"user_metadata":{"a":"b"}})");
  EXPECT_EQ(saved.body.name, "n");
  EXPECT_EQ(saved.body.ttl_seconds, 3600);
  EXPECT_TRUE(saved.body.overwrite);
  const auto sampler = save_weights_for_sampler(R"({"model_id":"m","seq_id":2,"sampling_session_seq_id":7})");
  EXPECT_FALSE(sampler.body.name);
  EXPECT_EQ(sampler.body.sampling_sequence, 7);
  EXPECT_EQ(save_weights_for_sampler(R"({"model_id":"m","seq_id":2,"path":"n","kind":"snapshot"})").body.name,
            "n");
  EXPECT_EQ(save_weights_external(R"({"model_id":"m","seq_id":2,"path":"n"})").body.name, "n");
  EXPECT_EQ(
      create_sampling_session(R"({"session_id":"s","sampling_session_seq_id":0,"base_model":"b"})").base,
      "b");
  EXPECT_EQ(retrieve_future(R"({"request_id":"r","allow_metadata_only":true})"), "r");
  EXPECT_EQ(weights_info(R"({"tinker_path":"tinker://a/weights/b"})"), "tinker://a/weights/b");
  EXPECT_EQ(ttl(R"({"ttl_seconds":null})"), std::nullopt);
  EXPECT_EQ(ttl(R"({"ttl_seconds":7200})"), 7200);
}

constexpr const char* kPrompt =
    R"("prompt":{"chunks":[{"type":"encoded_text","tokens":[1,2]},{"tokens":[3]}]})";

std::string ask(const std::string& more) {
  return std::string(R"({"sampling_session_id":"s:sample:0","seq_id":1000000001,)") + kPrompt + more + "}";
}

TEST(TinkerJson, SamplesAreRead) {
  const auto plain = asample(ask(""));
  EXPECT_EQ(plain.sampler, "s:sample:0");
  EXPECT_EQ(plain.sequence, 1000000001);
  EXPECT_EQ(plain.body.prompt, (Ints{1, 2, 3}));
  EXPECT_EQ(plain.body.samples, 1);
  EXPECT_FALSE(plain.body.params.stop_given);
  const auto full = asample(ask(
      R"(,"num_samples":3,"prompt_logprobs":true,"topk_prompt_logprobs":2,"topk_sample_logprobs":4,
          "prompt_logprobs_last_n":2,"target_prompt_logprobs":{"data":[5,6],"dtype":"int64","shape":[2,3],
          "sparse_crow_indices":[0,1,2],"sparse_col_indices":[1,2]},"record_stability_info":false,
          "prompt_alt_tokens_k":0,"sampling_params":{"max_tokens":9,"seed":5,"stop":["x","yz"],"temperature":0,
          "top_k":4,"top_p":0.5})"));
  EXPECT_EQ(full.body.samples, 3);
  EXPECT_TRUE(full.body.prompt_log_probabilities);
  EXPECT_EQ(full.body.prompt_last, 2);
  EXPECT_EQ(full.body.top_prompt, 2);
  EXPECT_EQ(full.body.top_samples, 4);
  EXPECT_EQ(full.body.prompt_targets->integers, (Ints{-1, 5, -1, -1, -1, 6}));
  EXPECT_EQ(full.body.params.max_tokens, 9);
  EXPECT_EQ(full.body.params.seed, 5u);
  EXPECT_EQ(full.body.params.stop_strings, (std::vector<std::string>{"x", "yz"}));
  EXPECT_EQ(full.body.params.temperature, 0);
  EXPECT_EQ(full.body.params.top_k, 4);
  EXPECT_EQ(full.body.params.top_p, 0.5);
  EXPECT_TRUE(asample(ask(R"(,"sampling_params":{"stop":[]})")).body.params.stop_given);
  EXPECT_EQ(asample(ask(R"(,"sampling_params":{"stop":[7]})")).body.params.stop_tokens, Ints{7});
  EXPECT_EQ(asample(ask(R"(,"sampling_params":{"stop":"end"})")).body.params.stop_strings.at(0), "end");
}

TEST(TinkerJson, BadRequestsAreRefusedByField) {
  std::string stops = "[";
  for (int i = 0; i < 100'000; ++i) stops += i == 0 ? "\"a\"" : ",\"a\"";
  auto params = [](const std::string& field) { return ask(R"(,"sampling_params":{)" + field + "}"); };
  const std::pair<const char*, std::string> samples[] = {
      {"asample: sampling_params.temperature", params(R"("temperature":-1)")},
      {"sampling_params.temperature", params(R"("temperature":"hot")")},
      {"no JSON object", params(R"("temperature":NaN)")},
      {"no JSON object", params(R"("temperature":1e400)")},
      {"sampling_params.top_p", params(R"("top_p":0)")},
      {"sampling_params.top_p", params(R"("top_p":1.5)")},
      {"sampling_params.top_k", params(R"("top_k":-2)")},
      {"sampling_params.max_tokens", params(R"("max_tokens":0)")},
      {"sampling_params.max_tokens", params(R"("max_tokens":2.0)")},
      {"sampling_params.max_tokens", params(R"("max_tokens":true)")},
      {"sampling_params.seed", params(R"("seed":-1)")},
      {"sampling_params.stop", params("\"stop\":" + stops + "]")},
      {"sampling_params.stop", params(R"("stop":"")")},
      {"sampling_params.stop", params(R"("stop":[1.5])")},
      {"sampling_params.stop", params(R"("stop":[-1])")},
      {"sampling_params.stop", params(R"("stop":7)")},
      {"asample: num_samples", ask(R"(,"num_samples":0)")},
      {"num_samples", ask(R"(,"num_samples":1000000)")},
      {"twice", ask(R"(,"num_samples":1,"num_samples":2)")},
      {"prompt_alt_tokens_k", ask(R"(,"prompt_alt_tokens_k":1)")},
      {"stable_reinforce", ask(R"(,"record_stability_info":true)")},
      {"prompt_logprobs", ask(R"(,"prompt_logprobs_last_n":1)")},
      {"prompt_logprobs_last_n", ask(R"(,"prompt_logprobs":true,"prompt_logprobs_last_n":3)")},
      {"topk_prompt_logprobs", ask(R"(,"topk_prompt_logprobs":-1)")},
      {"shape [2, K]", ask(R"(,"target_prompt_logprobs":{"data":[1,2,3],"dtype":"int64","shape":[3,1]})")},
      {"token ids, or -1", ask(R"(,"target_prompt_logprobs":{"data":[1,-2],"dtype":"int64","shape":[2,1]})")},
      {"chunks", R"({"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[]}})"},
      {"image_asset_pointer",
       R"({"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[{"type":"image_asset_pointer"}]}})"},
      {"tokens[0]", R"({"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[{"tokens":[-1]}]}})"},
      {"tokens[0]",
       R"({"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[{"tokens":[2147483648]}]}})"},
      {"chunks[0]", R"({"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[7]}})"},
      {"prompt", R"({"sampling_session_id":"s","seq_id":0})"},
      {"seq_id", R"({"sampling_session_id":"s","seq_id":-1,)" + std::string(kPrompt) + "}"},
      {"sampling_session_id", R"({"seq_id":0,)" + std::string(kPrompt) + "}"},
      {"no JSON object", ""},
      {"no JSON object", "[1]"},
      {"no JSON object", "{\"a\":\"\xff\"}"},
      {"levels", "{\"a\":" + std::string(1'000'000, '[')},
  };
  for (const auto& [part, body] : samples) EXPECT_THAT(error_of([&] { asample(body); }), HasSubstr(part));

  auto step = [](const std::string& adam) {
    return error_of([&] { optim_step(R"({"model_id":"m","seq_id":1,"adam_params":{)" + adam + "}}"); });
  };
  EXPECT_THAT(step(R"("learning_rate":-1)"), HasSubstr("optim_step: adam_params.learning_rate"));
  EXPECT_THAT(step(R"("beta1":1)"), HasSubstr("adam_params.beta1"));
  EXPECT_THAT(step(R"("beta2":1.5)"), HasSubstr("adam_params.beta2"));
  EXPECT_THAT(step(R"("eps":-1e-9)"), HasSubstr("adam_params.eps"));
  EXPECT_THAT(step(R"("weight_decay":-1)"), HasSubstr("adam_params.weight_decay"));
  EXPECT_THAT(step(R"("grad_clip_norm":"1")"), HasSubstr("adam_params.grad_clip_norm"));

  const auto operation = [](const std::string& more) {
    return R"({"model_id":"m","seq_id":1,)" + more + "}";
  };
  const auto model = [](const std::string& more) {
    return R"({"session_id":"s","model_seq_id":0,"base_model":"b",)" + more + "}";
  };
  const struct {
    std::function<void(const std::string&)> parse;
    const char* part;
    std::string body;
  } others[] = {
      {optim_step, "dimuon", operation(R"("optimizer_params":{"type":"dimuon"})")},
      {optim_step, "adam_params", R"({"model_id":"m","seq_id":1})"},
      {optim_step, "seq_id", R"({"model_id":"m","seq_id":0,"adam_params":{}})"},
      {optim_step, "seq_id", R"({"model_id":"m","seq_id":-5,"adam_params":{}})"},
      {optim_step, "seq_id", R"({"model_id":"m","seq_id":2147483648,"adam_params":{}})"},
      {optim_step, "seq_id", R"({"model_id":"m","seq_id":18446744073709551615,"adam_params":{}})"},
      {optim_step, "model_id", R"({"model_id":7,"seq_id":1,"adam_params":{}})"},
      {create_model, "lora_config.rank", model(R"("lora_config":{"rank":-1})")},
      {create_model, "lora_config.rank", model(R"("lora_config":{"rank":1000000})")},
      {create_model, "at least one part",
       model(R"("lora_config":{"rank":1,"train_unembed":false,"train_mlp":false,"train_attn":false})")},
      {create_model, "optimizer_config.type", model(R"("optimizer_config":{"type":"dimuon","version":1})")},
      {create_model, "base_model", R"({"session_id":"s","model_seq_id":0})"},
      {create_model, "user_metadata", model(R"("user_metadata":[])")},
      {create_session, "user_metadata",
       R"({"tags":[],"user_metadata":{"a":")" + std::string(70'000, 'x') + "\"}}"},
      {create_session, "tags", R"({"tags":[1]})"},
      {load_weights, "model_id", R"({"session_id":"s","model_seq_id":1,"model_id":"m","path":"p"})"},
      {load_weights, "path", R"({"session_id":"s","model_seq_id":1})"},
      {save_weights, "ttl_seconds", operation(R"("path":"n","ttl_seconds":1)")},
      {save_weights, "ttl_seconds", operation(R"("path":"n","ttl_seconds":1000000000000)")},
      {save_weights, "path", operation(R"("path":"")")},
      {save_weights, "overwrite", operation(R"("path":"n","overwrite":1)")},
      {save_weights_for_sampler, "inflight", operation(R"("sampling_session_seq_id":0,"kind":"inflight")")},
      {save_weights_for_sampler, "sampling_session_seq_id", R"({"model_id":"m","seq_id":1})"},
      {save_weights_external, "age_encryption_recipients",
       operation(R"("path":"n","age_encryption_recipients":["age1"])")},
      {create_sampling_session, "model_path", R"({"session_id":"s","sampling_session_seq_id":0})"},
      {ttl, "ttl_seconds", R"({"ttl_seconds":1})"},
      {ttl, "ttl_seconds", "{}"},
      {retrieve_future, "request_id", "{}"},
      {weights_info, "tinker_path", R"({"xorl_path":"a"})"},
      {heartbeat, "session_id", R"({"session_id":[]})"},
  };
  for (const auto& each : others) EXPECT_THAT(error_of([&] { each.parse(each.body); }), HasSubstr(each.part));
}

TEST(TinkerJson, RepliesHoldWhatTheClientRequires) {
  EXPECT_EQ(Json::parse(session_reply("s")), Json({{"type", "create_session"}, {"session_id", "s"}}));
  EXPECT_EQ(Json::parse(promise_reply("r", "")), Json({{"request_id", "r"}}));
  EXPECT_EQ(Json::parse(promise_reply("r", "m"))["model_id"], "m");
  EXPECT_EQ(Json::parse(sample_promise_reply("r", {"a", "b"}))["sample_sequence_ids"], Json({"a", "b"}));
  EXPECT_EQ(Json::parse(try_again_reply("r")),
            Json({{"type", "try_again"}, {"request_id", "r"}, {"queue_state", "active"}}));
  EXPECT_EQ(Json::parse(failure_reply("no \xff", "user"))["category"], "user");
  EXPECT_EQ(Json::parse(optim_step_reply({{"norm", 2.0}, {"bad", std::nan("")}})),
            Json({{"metrics", {{"norm", 2.0}}}}));
  const Json info = Json::parse(info_reply("m", {.base = "b", .lora = {.rank = 0}}, "qwen3", ""));
  EXPECT_EQ(info["model_data"], Json({{"arch", "qwen3"}, {"model_name", "b"}}));
  EXPECT_EQ(info["is_lora"], false);
  EXPECT_FALSE(info.contains("lora_rank"));
  EXPECT_EQ(Json::parse(save_for_sampler_reply("", "s:sample:1")),
            Json({{"type", "save_weights_for_sampler"}, {"sampling_session_id", "s:sample:1"}}));
  const CheckpointListing checkpoint{.id = "weights/n",
                                     .kind = "training",
                                     .path = "tinker://m/weights/n",
                                     .created = 1'000'000'000.7,
                                     .expires = 0,
                                     .bytes = 5,
                                     .is_public = false};
  const Json list = Json::parse(checkpoints_reply({checkpoint}, Cursor{0, 20, 1}));
  EXPECT_EQ(list["checkpoints"][0]["time"], "2001-09-09T01:46:40Z");
  EXPECT_FALSE(list["checkpoints"][0].contains("expires_at"));
  EXPECT_EQ(list["cursor"]["total_count"], 1);
  EXPECT_FALSE(Json::parse(checkpoints_reply({}, {})).contains("cursor"));
  const RunListing run{.id = "m",
                       .base = "b",
                       .owner = "me",
                       .rank = 8,
                       .last_request = 1,
                       .corrupted = false,
                       .last_checkpoint = checkpoint,
                       .metadata = {{"a", "b"}}};
  const Json runs = Json::parse(runs_reply({run}, {}));
  EXPECT_EQ(runs["training_runs"][0]["last_checkpoint"]["tinker_path"], "tinker://m/weights/n");
  EXPECT_EQ(runs["training_runs"][0]["lora_rank"], 8);
  EXPECT_EQ(Json::parse(weights_info_reply({.base = "b"}))["train_attn"], true);
  EXPECT_EQ(Json::parse(capabilities_reply({{"b", 64}}))["supported_models"][0]["max_context_length"], 64);
}

}  // namespace
}  // namespace isograd::serve::tinker
