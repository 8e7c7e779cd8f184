#include "serve/wire/xorl.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error_testing.hpp"
#include "base/json.hpp"

namespace isograd::serve::xorl {
namespace {

using error_testing::error_of;
using ::testing::HasSubstr;
using Json = nlohmann::json;
using Ints = std::vector<std::int64_t>;
using Floats = std::vector<float>;

std::string pass(const std::string& inputs, const std::string& loss = "cross_entropy",
                 const std::string& tokens = R"({"input_ids":[1,2,3]})") {
  return R"({"model_id":"m","seq_id":2,"forward_backward_input":{"loss_fn":")" + loss +
         R"(","data":[{"model_input":)" + tokens + R"(,"loss_fn_inputs":{)" + inputs + "}}]}}";
}

TEST(Xorl, PassesAreRead) {
  const auto request =
      forward_backward(pass(R"("target_tokens":{"data":[2,-100,4],"dtype":"int64","shape":[3]})"));
  EXPECT_EQ(request.model, "m");
  EXPECT_EQ(request.sequence, 2);
  EXPECT_FALSE(request.body.forward_only);
  const Datum& datum = request.body.data.at(0);
  EXPECT_EQ(datum.tokens, (Ints{1, 2, 3}));
  EXPECT_EQ(datum.inputs.at("target_tokens").integers, (Ints{2, 0, 4}));
  EXPECT_EQ(datum.inputs.at("weights").numbers, (Floats{1, 0, 1}));
  EXPECT_EQ(datum.inputs.at("weights").shape, Ints{3});

  const auto weighted =
      forward_backward(pass(R"("labels":[2,-100,4],"weights":{"data":[1,1,0],"dtype":"int64","shape":null})",
                            "cross_entropy", R"({"chunks":[{"type":"encoded_text","tokens":[1,2,3]}]})"));
  EXPECT_EQ(weighted.body.data[0].inputs.at("weights").numbers, (Floats{1, 0, 0}));
  EXPECT_FALSE(weighted.body.data[0].inputs.contains("labels"));

  const auto policy = forward_backward(
      pass(R"("target_tokens":[-100,3,4],"advantages":[5,6,7],"logprobs":[-1,-1.5,-2])", "ppo"));
  EXPECT_EQ(policy.body.data[0].inputs.at("advantages").numbers, (Floats{0, 6, 7}));
  EXPECT_FALSE(policy.body.data[0].inputs.contains("weights"));

  const auto forward = forward_backward(
      R"({"forward_input":{"data":[{"model_input":{"input_ids":[1]},"loss_fn_inputs":{"target_tokens":[2]}}],
          "loss_fn_params":{"beta":0.5,"kind":"x"}}})");
  EXPECT_TRUE(forward.body.forward_only);
  EXPECT_EQ(forward.model, "default");
  EXPECT_EQ(forward.sequence, 0);
  EXPECT_EQ(std::get<double>(forward.body.config.at("beta")), 0.5);
}

TEST(Xorl, OtherRequestsAreRead) {
  const NewModel whole = create_model(R"({"base_model":"b"})");
  EXPECT_EQ(whole.model, "default");
  EXPECT_EQ(whole.body.lora.rank, 0);
  EXPECT_EQ(whole.body.metadata.at("isograd.normalise"), "tokens");
  const NewModel adapter = create_model(
      R"({"model_id":"m","base_model":"b","lora_config":{"lora_rank":4,"alpha":16,"dropout":0.0,
          "target_modules":["q_proj","k_proj","v_proj","o_proj","lm_head"]}})");
  EXPECT_EQ(adapter.body.lora.rank, 4);
  EXPECT_EQ(adapter.body.metadata.at("isograd.alpha"), "16");
  EXPECT_TRUE(adapter.body.lora.attention);
  EXPECT_FALSE(adapter.body.lora.mlp);
  EXPECT_TRUE(adapter.body.lora.unembed);
  EXPECT_FALSE(create_model(R"({"base_model":"b","lora_config":{"target_modules":null}})").body.lora.unembed);

  EXPECT_EQ(optim_step(R"({"seq_id":3,"adam_params":{"learning_rate":1,"grad_clip_norm":5}})").body.clip, 5);
  EXPECT_EQ(optim_step(R"({"seq_id":3,"adam_params":{"grad_clip_norm":5},"gradient_clip":2})").body.clip, 2);
  EXPECT_EQ(save_weights(R"({"model_id":"m","seq_id":3,"path":null})").body.name, std::nullopt);
  EXPECT_EQ(save_weights_for_sampler(R"({"model_id":"m","name":"n"})").body.name, "n");
  const LoadWeights load = load_weights(R"({"path":"xorl://default/weights/n","optimizer":true})");
  EXPECT_EQ(load.path, "tinker://default/weights/n");
  EXPECT_TRUE(load.optimizer);
  EXPECT_FALSE(load.creates);
  EXPECT_EQ(create_sampling_session(R"({"model_path":"xorl://m/sampler_weights/n"})"),
            "tinker://m/sampler_weights/n");
  EXPECT_EQ(list_checkpoints("{}"), "default");
  EXPECT_EQ(delete_checkpoint(R"({"model_id":"m","checkpoint_id":"weights/n"})"),
            std::pair(std::string("m"), std::string("weights/n")));
  EXPECT_TRUE(kill_session(R"({"model_id":"m"})").save);
  EXPECT_FALSE(kill_session(R"({"save_checkpoint":false})").save);
  EXPECT_EQ(weights_info(R"({"xorl_path":"xorl://a/b/c"})"), "tinker://a/b/c");
}

TEST(Xorl, BadRequestsAreRefused) {
  const std::pair<const char*, std::string> passes[] = {
      {"data[0].loss_fn_inputs.weights", pass(R"("weights":"x")")},
      {"weights.data[1]", pass(R"("weights":[1,"a"])")},
      {"weights[1]", pass(R"("weights":[1,1e39])")},
      {"weights.dtype", pass(R"("weights":{"data":[1],"dtype":"float64"})")},
      {"values for shape", pass(R"("weights":{"data":[1],"dtype":"float32","shape":[2]})")},
      {"target_tokens[0]", pass(R"("target_tokens":[-7])")},
      {"int64", pass(R"("target_tokens":[0.5])")},
      {"labels and target_tokens", pass(R"("labels":[1],"target_tokens":[1])")},
      {"-100 without advantages", pass(R"("target_tokens":[-100])", "ppo")},
      {"no tokens", pass("", "ppo", R"({"input_ids":[]})")},
      {"model_input.input_ids[0]", pass("", "ppo", R"({"input_ids":[-1]})")},
      {"image", pass("", "ppo", R"({"chunks":[{"type":"image","data":"aa"}]})")},
      {"forward_backward_input", "{}"},
      {"data", R"({"forward_backward_input":{"data":[]}})"},
      {"data[0]", R"({"forward_backward_input":{"data":[3]}})"},
      {"loss_fn_params.a", R"({"forward_backward_input":{"loss_fn_params":{"a":[]},"data":[]}})"},
      {"seq_id", R"({"seq_id":0,"forward_backward_input":{"data":[]}})"},
  };
  for (const auto& [part, body] : passes)
    EXPECT_THAT(error_of([&, &text = body] { forward_backward(text); }), HasSubstr(part));
  auto lora = [](const std::string& config) {
    return error_of([&] { create_model(R"({"base_model":"b","lora_config":{)" + config + "}}"); });
  };
  EXPECT_THAT(lora(R"("dropout":0.1)"), HasSubstr("lora_config.dropout"));
  EXPECT_THAT(lora(R"("alpha":0)"), HasSubstr("lora_config.alpha"));
  EXPECT_THAT(lora(R"("rank":-1)"), HasSubstr("lora_config.rank"));
  EXPECT_THAT(lora(R"("target_modules":["q_proj"])"), HasSubstr("all of k_proj"));
  EXPECT_THAT(lora(R"("target_modules":["lm_head","router"])"), HasSubstr("names among"));
  EXPECT_THAT(lora(R"("target_modules":[])"), HasSubstr("names among"));
  EXPECT_THAT(error_of([] { save_weights_for_sampler("{}"); }), HasSubstr("name"));
  EXPECT_THAT(error_of([] { delete_checkpoint("{}"); }), HasSubstr("checkpoint_id"));
  EXPECT_THAT(error_of([] { kill_session(R"({"save_checkpoint":3})"); }), HasSubstr("save_checkpoint"));
}

TEST(Xorl, ResultsHaveTheClientsFields) {
  const auto request = forward_backward(pass(R"("target_tokens":[2,-100,4],"weights":[1,1,0.5])")).body;
  const ForwardBackwardResult result{.log_probabilities = {{{3}, {-1, -9, -3}, {}}},
                                     .metrics = {{"loss:sum", 2.5}, {"x:max", std::nan("")}}};
  const Json reply = Json::parse(forward_backward_reply(request, result));
  EXPECT_EQ(reply["loss_fn_output_type"], "cross_entropy");
  const Json& output = reply["loss_fn_outputs"][0];
  EXPECT_EQ(output["logprobs"], Json({{"data", {-1, -9, -3}}, {"dtype", "float32"}, {"shape", {3}}}));
  EXPECT_EQ(output["elementwise_loss"]["data"], Json({1, 0, 1.5}));
  EXPECT_EQ(output["loss"], 2.5);
  EXPECT_EQ(reply["metrics"], Json({{"loss:sum", 2.5}, {"loss:mean", 1.25}, {"valid_tokens:sum", 2}}));
  EXPECT_EQ(Json::parse(path_reply("tinker://m/weights/n"))["model_path"], "xorl://m/weights/n");
  EXPECT_EQ(Json::parse(sampling_session_reply("tinker://m/sampler_weights/n"))["lora_name"], "n");
  EXPECT_EQ(Json::parse(create_model_reply("m"))["model_id"], "m");
  const CheckpointListing saved{
      .id = "weights/n", .kind = "training", .path = "tinker://m/weights/n", .created = 1e9, .bytes = 7};
  EXPECT_EQ(Json::parse(tinker::checkpoints_reply({saved}, {}))["checkpoints"][0],
            Json({{"checkpoint_id", "weights/n"},
                  {"checkpoint_type", "training"},
                  {"time", "2001-09-09T01:46:40Z"},
                  {"tinker_path", "tinker://m/weights/n"},
                  {"path", "xorl://m/weights/n"},
                  {"public", false},
                  {"size_bytes", 7}}));
  EXPECT_EQ(Json::parse(deleted_reply("tinker://m/weights/n"))["deleted_path"], "xorl://m/weights/n");
  EXPECT_EQ(Json::parse(killed_reply("tinker://m/weights/n"))["checkpoint_path"], "xorl://m/weights/n");
  EXPECT_FALSE(Json::parse(killed_reply("")).contains("checkpoint_path"));
  const Json info = Json::parse(session_info_reply({{"a", 5, true}, {"b", 6, false}}, 64));
  EXPECT_EQ(info["registered_models"], Json({"a", "b"}));
  EXPECT_EQ(info["loaded_training_adapters"], Json({"a"}));
  EXPECT_EQ(info["session_activity"], Json({{"a", 5}, {"b", 6}}));
}

}  // namespace
}  // namespace isograd::serve::xorl
