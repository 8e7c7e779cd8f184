#include "serve/models/model_engine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <random>
#include <set>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "base/json.hpp"
#include "model/safetensors.hpp"
#include "serve/models/fixed_weights.hpp"
#include "serve/models/plain_testing.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ModelEngineTest : public EngineTest {
 protected:
  // On a base of its own.
  std::unique_ptr<ModelEngine> engine(const std::string& family, at::ScalarType dtype = at::kDouble,
                                      std::int64_t micro_batch_tokens = 20) const {
    return std::make_unique<ModelEngine>(options(base(family, dtype), dtype, micro_batch_tokens));
  }
};

struct Case {
  std::string family;
  std::int64_t rank;
  std::string mode;
  bool mlp = true, unembed = true;
};

TEST_F(ModelEngineTest, TwentyMixedStepsAreThoseOfPlainTorch) {
  for (const Case& each :
       {Case{"qwen3", 4, "none"}, Case{"qwen2", 1, "tokens", false, false}, Case{"mistral", 8, "weights"},
        Case{"llama", 0, "sequences"}, Case{"tied", 2, "none"}, Case{"tied", 0, "tokens"}}) {
    const auto engine = this->engine(each.family);
    CreateModel request =
        request_of(each.rank, {{"isograd.normalise", each.mode}, {"isograd.alpha", "6"}, {"mine", "x"}});
    request.lora.mlp = each.mlp, request.lora.unembed = each.unembed;
    engine->create("m", request);
    const Tensors first = weights(*engine, "m");
    const double scale = each.rank > 0 ? 6.0 / static_cast<double>(each.rank) : 0;
    Plain plain(config_of(each.family), base_weights(folder("base_" + each.family)), first, scale);
    Calls calls(kSeed);
    std::set<std::string> losses;
    const double least = each.mode == "weights" ? 0.01 : -0.6;
    for (int step = 0; step < 20; ++step) {
      for (std::int64_t i = calls.integer(1, 3); i > 0; --i) {
        const ForwardBackward call = calls.any(*engine, "m", least);
        const ForwardBackwardResult found = engine->forward_backward("m", call);
        for (std::size_t d = 0; d < call.data.size(); ++d) {
          const at::Tensor expected = plain.log_probabilities(call.data[d]).detach();
          EXPECT_EQ(found.log_probabilities[d].shape, expected.sizes().vec());
          EXPECT_LT((at::tensor(found.log_probabilities[d].numbers).view(expected.sizes()) - expected)
                        .abs()
                        .max()
                        .item<double>(),
                    3e-6);
        }
        losses.insert(call.loss);
        const double loss = plain.accumulate(call);
        EXPECT_NEAR(found.metrics.at("loss:sum"), loss, 1e-10 * (1 + std::abs(loss))) << call.loss;
      }
      const AdamParams params = calls.params();
      const Metrics metrics = engine->optim_step("m", params);
      const double norm = plain.step(params, each.mode);
      EXPECT_NEAR(metrics.at("grad_norm"), norm, 1e-10 * norm);
      EXPECT_NEAR(metrics.at("grad_norm_sum"), norm * metrics.at("denominator"),
                  1e-10 * metrics.at("grad_norm_sum"));
      EXPECT_EQ(metrics.at("step"), step + 1);
    }
    EXPECT_LT(apart(weights(*engine, "m"), plain.trained()), 1e-10) << each.family;
    EXPECT_GT(apart(weights(*engine, "m"), first), 1e-2);
    EXPECT_EQ(losses.size(), 6U);
  }
}

// Five steps of signed cross entropies on the engine and on a reference with a mistake.
TEST_F(ModelEngineTest, MistakesAreSeen) {
  const auto distance = [&](const Mistake& mistake, const std::string& mode) {
    const auto engine = this->engine("qwen3");
    engine->create("m", request_of(4, {{"isograd.normalise", mode}}));
    Plain plain(small_config("qwen3"), base_weights(folder("base_qwen3")), weights(*engine, "m"), 8, mistake);
    Calls calls(kSeed + 3);
    for (int step = 0; step < 5; ++step) {
      for (std::int64_t lengths = 0; lengths < 2; ++lengths) {
        const ForwardBackward call =
            calls.cross_entropy(lengths ? std::vector<std::int64_t>{3, 9, 4} : std::vector<std::int64_t>{6});
        engine->forward_backward("m", call);
        plain.accumulate(call);
      }
      AdamParams params = calls.params();
      params.beta2 = 0.99, params.epsilon = 1e-3, params.clip = 0.5;
      engine->optim_step("m", params);
      plain.step(params, mode);
    }
    return apart(weights(*engine, "m"), plain.trained());
  };
  EXPECT_LT(distance({}, "tokens"), 1e-11);
  EXPECT_GT(distance({.divides_by_call = true}, "tokens"), 1e-5);
  EXPECT_GT(distance({.drops_negative = true}, "none"), 1e-5);
  EXPECT_GT(distance({.fixed_beta2 = true}, "none"), 1e-5);
  EXPECT_GT(distance({.clips_before_scale = true}, "tokens"), 1e-5);
  EXPECT_GT(distance({.counts_first_call_twice = true}, "tokens"), 1e-5);
}

TEST_F(ModelEngineTest, CallsAndMicroBatchesDoNotMatter) {
  const auto run = [&](std::size_t datums_of_call, std::int64_t micro_batch_tokens) {
    const auto engine = this->engine("qwen3", at::kDouble, micro_batch_tokens);
    engine->create("m", request_of(4, {{"isograd.normalise", "tokens"}}));
    Calls calls(kSeed + 4);
    for (int step = 0; step < 3; ++step) {
      const ForwardBackward all = calls.cross_entropy({5, 12, 1, 7, 3, 9, 2, 8});
      for (std::size_t i = 0; i < all.data.size(); i += datums_of_call) {
        ForwardBackward call = all;
        call.data.assign(all.data.begin() + static_cast<std::ptrdiff_t>(i),
                         all.data.begin() + static_cast<std::ptrdiff_t>(i + datums_of_call));
        engine->forward_backward("m", call);
      }
      engine->optim_step("m", {.learning_rate = 1e-2, .epsilon = 1e-6, .clip = 0.5});
    }
    return weights(*engine, "m");
  };
  const Tensors one = run(8, 4096);
  for (const auto& [datums, tokens] :
       {std::pair<std::size_t, std::int64_t>{1, 4096}, {4, 4096}, {8, 1}, {8, 13}, {4, 20}})
    EXPECT_LT(apart(run(datums, tokens), one), 1e-12) << datums << " " << tokens;
  EXPECT_TRUE(same_bits(run(8, 4096), one));
}

TEST_F(ModelEngineTest, SavedModelsGoOnWithTheSameBits) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t rank : {4, 0})
      for (const bool open : {false, true}) {
        const auto engine = this->engine("qwen3", dtype);
        engine->create("m", request_of(rank, {{"isograd.normalise", "tokens"}}));
        Calls calls(kSeed + 5);
        const auto step = [&](const std::string& model, const ForwardBackward& call) {
          engine->forward_backward(model, call);
          engine->optim_step(model, {.learning_rate = 1e-2, .weight_decay = 0.1, .clip = 1});
        };
        for (int i = 0; i < 2; ++i) step("m", calls.cross_entropy({5, 12}));
        if (open) engine->forward_backward("m", calls.cross_entropy({7}));
        const fs::path saved = folder(fmt::format("saved_{}_{}_{}", static_cast<int>(dtype), rank, open));
        engine->save("m", Engine::Save::kTraining, saved);
        const auto again = this->engine("qwen3", dtype);
        again->load("with", saved, true, {});
        again->load("without", saved, false, {});
        EXPECT_TRUE(same_bits(weights(*again, "without"), weights(*engine, "m")));
        for (int i = 0; i < 2; ++i) {
          const ForwardBackward call = calls.cross_entropy({3, 9, 4});
          step("m", call);
          for (const char* model : {"with", "without"}) {
            again->forward_backward(model, call);
            again->optim_step(model, {.learning_rate = 1e-2, .weight_decay = 0.1, .clip = 1});
          }
        }
        EXPECT_TRUE(same_bits(weights(*again, "with"), weights(*engine, "m"))) << dtype << rank << open;
        EXPECT_FALSE(same_bits(weights(*again, "without"), weights(*engine, "m")));
        const CreateModel described = read_saved(saved).created;
        EXPECT_EQ(described.base, "tiny");
        EXPECT_EQ(described.lora.rank, rank);
        EXPECT_EQ(described.metadata.at("isograd.normalise"), "tokens");
      }
}

TEST_F(ModelEngineTest, CallsWaitThatWouldChangeWhatIsBeingSaved) {
  for (const std::int64_t rank : {4, 0}) {
    const auto engine = this->engine("qwen3");
    engine->create("m", request_of(rank));
    Calls calls(kSeed + 6);
    const std::map<std::string, std::function<void()>> changes = {
        {"1 accumulates",
         [&] {
           engine->forward_backward("m", calls.cross_entropy({5, 12}));
         }},
        {"2 steps", [&] { engine->optim_step("m", {.learning_rate = 1e-2}); }},
        {"3 accumulates", [&] { engine->forward_backward("m", calls.cross_entropy({7})); }},
        {"4 accumulates", [&] { engine->forward_backward("m", calls.cross_entropy({3})); }},
        {"5 drops", [&] { engine->drop_gradient("m"); }},
        {"6 goes", [&] { engine->remove("m"); }}};
    for (const auto& [name, change] : changes) {
      const fs::path now = folder(fmt::format("{} now {}", rank, name)),
                     later = folder(fmt::format("{} later {}", rank, name));
      engine->save("m", Engine::Save::kTraining, now);
      Engine::Write write = engine->saving("m");
      ForwardBackward pass = calls.cross_entropy({4});
      pass.forward_only = true;
      engine->forward_backward("m", pass);  // changes nothing, so it does not wait
      std::future<void> changed = std::async(std::launch::async, change);
      EXPECT_EQ(changed.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << name;
      std::exchange(write, {})(later);
      changed.get();
      for (const auto& entry : fs::directory_iterator(now))
        EXPECT_TRUE(read_file(entry.path()) == read_file(later / entry.path().filename())) << name;
    }
  }
}

TEST_F(ModelEngineTest, ABaseHasTheDigestOfWhatItIsMadeOf) {
  const auto digest = [&] { return ModelEngine({.bases = {{"b", folder("base_qwen3")}}}).bases()[0].digest; };
  base("qwen3");
  const std::string one = digest();
  base("qwen3");
  EXPECT_EQ(digest(), one);
  const fs::path weights = folder("base_qwen3") / "model.safetensors";
  std::string bytes = read_file(weights);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(weights, bytes);
  EXPECT_NE(digest(), one);
  base("qwen3");
  const fs::path config = folder("base_qwen3") / "config.json";
  const std::string text = read_file(config);
  write_file(config, text + "\n");  // the meaning counts
  EXPECT_EQ(digest(), one);
  nlohmann::json changed = parse_json(text).value;
  changed["rms_norm_eps"] = 0.5;
  write_file(config, changed.dump());
  EXPECT_NE(digest(), one);
}

TEST_F(ModelEngineTest, DenominatorsDivideOnce) {
  const auto engine = this->engine("qwen3");
  Calls calls(kSeed + 6);
  const std::vector<ForwardBackward> given = {calls.cross_entropy({5, 8}, 0.1),
                                              calls.cross_entropy({6}, 0.1)};
  constexpr double kClip = 0.1;
  const auto run = [&](const std::string& mode, double factor) {
    engine->create(mode, request_of(4, {{"isograd.normalise", mode}}));
    for (ForwardBackward call : given) {
      for (Datum& datum : call.data)
        for (float& weight : datum.inputs.at("weights").numbers) weight = static_cast<float>(weight * factor);
      engine->forward_backward(mode, call);
    }
    const Metrics metrics = engine->optim_step(mode, {.learning_rate = 1e-2, .epsilon = 1e-4, .clip = kClip});
    const Tensors found = weights(*engine, mode);
    engine->remove(mode);
    return std::pair(metrics, found);
  };
  // 19 rows, less the one of weight 0 in each datum. A power of 2 divides weights without rounding.
  const auto [by_tokens, of_tokens] = run("tokens", 1);
  EXPECT_EQ(by_tokens.at("denominator"), 16);
  EXPECT_EQ(by_tokens.at("tokens"), 16);
  EXPECT_EQ(run("sequences", 1).first.at("denominator"), 3);
  EXPECT_EQ(run("none", 1).first.at("denominator"), 1);
  double sum = 0;
  for (const auto& call : given)
    for (const auto& datum : call.data)
      for (const float weight : datum.inputs.at("weights").numbers) sum += weight;
  EXPECT_NEAR(run("weights", 1).first.at("denominator"), sum, 1e-12);
  const auto [divided, of_divided] = run("weights", 1);
  const auto [halved, of_halved] = run("weights", 0.5);
  EXPECT_NEAR(divided.at("grad_norm"), halved.at("grad_norm"), 1e-13);
  EXPECT_LT(apart(of_divided, of_halved), 1e-12);
  const auto [summed, of_summed] = run("none", 1.0 / 16);
  EXPECT_NEAR(run("none", 1).first.at("grad_norm"), 16 * summed.at("grad_norm"), 1e-12);
  // The clip sees what the client would have divided itself.
  EXPECT_GT(summed.at("grad_norm"), 2 * kClip);
  EXPECT_NEAR(by_tokens.at("grad_norm"), summed.at("grad_norm"), 1e-13);
  EXPECT_LT(apart(of_tokens, of_summed), 1e-12);
  EXPECT_GT(std::abs(run("none", 1.0 / 15).first.at("grad_norm") - by_tokens.at("grad_norm")), 1e-3);
}

TEST_F(ModelEngineTest, TenantsDoNotSeeOneAnother) {
  const auto run = [&](const std::vector<std::string>& models) {
    const auto engine = this->engine("qwen3", at::kFloat);
    std::map<std::string, Calls> calls;
    for (const auto& model : models) {
      engine->create(model, request_of(model == "a" ? 4 : 8));
      calls.emplace(model, Calls(kSeed + model[0]));
    }
    for (int step = 0; step < 3; ++step) {
      for (int call = 0; call < 2; ++call)
        for (const auto& model : models) engine->forward_backward(model, calls.at(model).any(*engine, model));
      for (const auto& model : models) engine->optim_step(model, calls.at(model).params());
    }
    std::map<std::string, Tensors> all;
    for (const auto& model : models) all[model] = weights(*engine, model);
    return all;
  };
  const auto both = run({"a", "b"});
  EXPECT_TRUE(same_bits(run({"a"}).at("a"), both.at("a")));
  EXPECT_TRUE(same_bits(run({"b"}).at("b"), both.at("b")));
}

// ---- refusals ----

TEST_F(ModelEngineTest, BadCallsChangeNothing) {
  const auto engine = this->engine("qwen3");
  engine->create("m", request_of(4));
  engine->create("w", request_of(4, {{"isograd.normalise", "weights"}}));
  Calls calls(kSeed + 7);
  const ForwardBackward good = calls.cross_entropy({5, 4});
  const auto refused = [&](const std::string& text, const std::function<void(ForwardBackward&)>& change,
                           const std::string& model = "m") {
    ForwardBackward call = good;
    change(call);
    try {
      engine->forward_backward(model, call);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  const auto inputs = [](ForwardBackward & call) -> auto& { return call.data[1].inputs; };
  refused("cross_entropy, importance_sampling, ppo, cispo, dro, gspo", [](auto& c) { c.loss = "mean"; });
  refused("not published", [](auto& c) { c.loss = "stable_reinforce"; });
  refused("forward_backward_custom", [](auto& c) { c.loss = "custom"; });
  refused("no beta", [](auto& c) { c.loss = "dro"; });
  refused("unknown key", [](auto& c) { c.config["reduction"] = 1.0; });
  refused("clip_low_threshold, clip_high_threshold", [](auto& c) { c.loss = "ppo", c.config["beta"] = 1.0; });
  refused("in ascending order", [](auto& c) { c.loss = "ppo", c.config["clip_low_threshold"] = 2.0; });
  refused("'high'", [](auto& c) { c.loss = "ppo", c.config["clip_low_threshold"] = "high"; });
  refused("no datums", [](auto& c) { c.data.clear(); });
  refused("datum 1: model_input: found no tokens", [](auto& c) { c.data[1].tokens.clear(); });
  refused("token 61", [](auto& c) { c.data[1].tokens[2] = 61; });
  refused("token -1", [](auto& c) { c.data[1].tokens[2] = -1; });
  refused("at most 64", [&](auto& c) { c.data[1] = Calls(1).supervised(65); });
  refused("token 99", [&](auto& c) { inputs(c)["target_tokens"].integers[0] = 99; });
  refused("a row for each token", [&](auto& c) { inputs(c)["target_tokens"] = Calls(1).tokens({3}); });
  refused("floating-point", [&](auto& c) { inputs(c)["target_tokens"] = Calls(1).numbers({4}, 0, 1); });
  refused("shape of target_tokens", [&](auto& c) { inputs(c)["weights"] = Calls(1).numbers({3}, 0, 1); });
  refused("shape of target_tokens", [&](auto& c) { inputs(c)["weights"] = Calls(1).numbers({4, 2}, 0, 1); });
  refused("3 numbers", [&](auto& c) { inputs(c)["weights"].numbers.pop_back(); });
  refused("finite numbers", [&](auto& c) { inputs(c)["weights"].numbers[0] = NAN; });
  refused("finite numbers", [&](auto& c) { inputs(c)["weights"].numbers[0] = INFINITY; });
  refused("datum 1: weights: found no such input", [&](auto& c) { inputs(c).erase("weights"); });
  refused("target_tokens, weights", [&](auto& c) { inputs(c)["mask"] = inputs(c)["weights"]; });
  refused(
      "negative ones", [](auto&) {}, "w");
  refused(
      "does not exist", [](auto&) {}, "other");
  refused("zeros alone", [](auto& c) {
    c.loss = "gspo";
    for (Datum& datum : c.data) {
      const Array weights = datum.inputs.at("weights");
      datum.inputs.erase("weights");
      datum.inputs["logprobs"] = datum.inputs["advantages"] = datum.inputs["sequence_ratio_mask"] = weights;
    }
    for (float& mask : c.data[1].inputs["sequence_ratio_mask"].numbers) mask = 0;
  });

  // Nothing was added by any of them.
  EXPECT_THAT(message_of([&] { engine->optim_step("m", {}); }), HasSubstr("no forward_backward"));
  engine->create("n", request_of(4));
  for (const char* model : {"m", "n"}) {
    engine->forward_backward(model, good);
    for (const auto& [text, params] :
         std::vector<std::pair<std::string, AdamParams>>{{"learning_rate", {.learning_rate = -1}},
                                                         {"beta1", {.beta1 = 1}},
                                                         {"beta2", {.beta2 = NAN}},
                                                         {"epsilon", {.epsilon = -1}},
                                                         {"weight_decay", {.weight_decay = -1}},
                                                         {"clip", {.clip = NAN}}})
      if (std::string(model) == "m")
        EXPECT_THAT(message_of([&] { engine->optim_step("m", params); }), HasSubstr(text));
    engine->optim_step(model, {.learning_rate = 1e-2});
  }
  EXPECT_TRUE(same_bits(weights(*engine, "m"), weights(*engine, "n")));
}

TEST_F(ModelEngineTest, StepsThatCannotBeMadeChangeNothing) {
  const auto engine = this->engine("qwen3");
  engine->create("m", request_of(4, {{"isograd.normalise", "tokens"}}));
  Calls calls(kSeed + 8);
  ForwardBackward silent = calls.cross_entropy({5}), loud = calls.cross_entropy({5});
  for (float& weight : silent.data[0].inputs["weights"].numbers) weight = 0;
  engine->forward_backward("m", silent);
  EXPECT_THAT(message_of([&] { engine->optim_step("m", {}); }), HasSubstr("a denominator of 0"));
  engine->forward_backward("m", loud);
  EXPECT_EQ(engine->optim_step("m", {}).at("tokens"), 4);
  engine->create("dumps", request_of(4, {{"isograd.dump", "true"}}));
  engine->forward_backward("dumps", loud);
  EXPECT_THAT(message_of([&] { engine->optim_step("dumps", {}); }), HasSubstr("without a folder for dumps"));
  const Tensors before = weights(*engine, "m");
  // exp(lp + 1e30) overflows.
  ForwardBackward overflows = loud;
  overflows.loss = "importance_sampling";
  auto& inputs = overflows.data[0].inputs;
  inputs.erase("weights");
  inputs["logprobs"] = Calls(1).numbers({5}, -1e30, -1e29),
  inputs["advantages"] = Calls(1).numbers({5}, 0.5, 1);
  engine->forward_backward("m", overflows);
  EXPECT_THAT(message_of([&] { engine->optim_step("m", {}); }), HasSubstr("not finite"));
  EXPECT_TRUE(same_bits(weights(*engine, "m"), before));
  EXPECT_THAT(message_of([&] { engine->optim_step("m", {}); }), HasSubstr("no forward_backward"));
  // An advantage of 0 adds 0 there.
  for (float& advantage : inputs["advantages"].numbers) advantage = 0;
  engine->forward_backward("m", overflows);
  engine->forward_backward("m", loud);
  EXPECT_EQ(engine->optim_step("m", {}).at("step"), 2);
}

TEST_F(ModelEngineTest, BadModelsAreRefused) {
  const auto engine = this->engine("qwen3");
  const auto refused = [&](const std::string& text, const CreateModel& request) {
    EXPECT_THAT(message_of([&] { engine->create("x", request); }), HasSubstr(text));
  };
  CreateModel other = request_of(4), none = request_of(4), some = request_of(0);
  other.base = "Qwen/Qwen3-8B";
  none.lora.attention = none.lora.mlp = none.lora.unembed = false, some.lora.mlp = false;
  refused("one of tiny", other);
  refused("attention", none);
  refused("whole weights", some);
  refused("rank", request_of(-1));
  refused("rank", request_of(100000));
  refused("isograd.normalise, isograd.alpha", request_of(4, {{"isograd.normalize", "tokens"}}));
  refused("none, tokens, weights or sequences", request_of(4, {{"isograd.normalise", "mean"}}));
  for (const char* alpha : {"0", "-1", "x", "", "1e", "nan", "inf"})
    refused("a number above 0", request_of(4, {{"isograd.alpha", alpha}}));
  for (const char* key : {"isograd.dump", "isograd.norms"})
    refused("true or false", request_of(4, {{key, "1"}}));
  engine->create("x", request_of(4));
  refused("exists", request_of(4));
  EXPECT_THAT(message_of([&] { ModelEngine({}); }), HasSubstr("one at least"));
  // Directories.
  engine->save("x", Engine::Save::kSampler, folder("sampler"));
  engine->save("x", Engine::Save::kTraining, folder("training"));
  EXPECT_THAT(message_of([&] { engine->load("y", folder("sampler"), false, {}); }),
              HasSubstr("weights for sampling"));
  EXPECT_THAT(message_of([&] { engine->load("y", folder("empty"), false, {}); }), HasSubstr("no such file"));
  EXPECT_THAT(message_of([&] {
                engine->load("y", folder("training"), true, {{"isograd.alpha", "4"}});
              }),
              HasSubstr("32"));
  const auto narrow = this->engine("qwen3", at::kFloat);
  EXPECT_THAT(message_of([&] { narrow->load("y", folder("training"), true, {}); }), HasSubstr("float64"));
  narrow->load("y", folder("training"), false, {});
  write_file(folder("training") / "isograd.json", "{\"format\": 1}");
  EXPECT_THAT(message_of([&] { engine->load("y", folder("training"), false, {}); }), HasSubstr("base"));
}

// ---- samplers ----

SampleResult sample(ModelEngine& engine, const std::string& sampler, Sample request, std::uint64_t seed = 1) {
  engine.submit("id", sampler, request, seed);
  while (engine.sampling())
    for (auto& done : engine.sample_pass()) {
      EXPECT_EQ(done.error, "");
      return done.result;
    }
  ADD_FAILURE() << "no answer";
  return {};
}

TEST_F(ModelEngineTest, SamplersHaveTheWeightsOfTheirTime) {
  for (const std::int64_t rank : {4, 0}) {
    const auto engine = this->engine("qwen3");
    engine->create("m", request_of(rank));
    Calls calls(kSeed + 9);
    const Datum text = calls.supervised(12);
    Sample request;
    request.prompt = text.tokens, request.prompt_log_probabilities = true, request.params.max_tokens = 1;
    request.top_prompt = 3, request.top_samples = 2, request.samples = 2;
    Array targets{.shape = {11, 2}, .integers = std::vector<std::int64_t>(22, -1)};
    for (std::size_t i = 0; i < 11; ++i) targets.integers[2 * i] = text.tokens[i + 1];
    request.prompt_targets = targets;
    // The trainer's log-probability of each token after the first.
    const auto trained = [&] {
      ForwardBackward call{.data = {text}, .loss = "cross_entropy", .forward_only = true};
      auto& to = call.data[0].inputs["target_tokens"].integers;
      std::copy(text.tokens.begin() + 1, text.tokens.end(), to.begin());
      return engine->forward_backward("m", call).log_probabilities[0].numbers;
    };
    const auto difference = [&](const std::string& sampler, const std::vector<float>& expected) {
      const SampleResult found = sample(*engine, sampler, request);
      EXPECT_EQ(found.sequences.size(), 2U);
      EXPECT_EQ(found.sequences[0].tokens.size(), 1U);
      EXPECT_EQ(found.sequences[0].top->k, 2);
      EXPECT_EQ(found.top_prompt->length, 12);
      EXPECT_TRUE(std::isnan((*found.prompt_log_probabilities)[0]));
      double most = 0;
      for (std::size_t i = 0; i < 11; ++i) {
        most = std::max(
            most, static_cast<double>(std::abs((*found.prompt_log_probabilities)[i + 1] - expected[i])));
        EXPECT_EQ(found.prompt_targets->numbers[2 * i], (*found.prompt_log_probabilities)[i + 1]);
        EXPECT_EQ(found.prompt_targets->numbers[2 * i + 1], 0);
      }
      return most;
    };
    const std::vector<float> first = trained();
    engine->open_sampler("base", "tiny");
    engine->open_sampler_of("before", "m");
    for (int i = 0; i < 2; ++i) {
      engine->forward_backward("m", calls.cross_entropy({9, 12}));
      engine->optim_step("m", {.learning_rate = 3e-2});
    }
    engine->open_sampler_of("after", "m");
    const std::vector<float> second = trained();
    EXPECT_LT(difference("base", first), 1e-6);
    EXPECT_LT(difference("before", first), 1e-6);
    EXPECT_LT(difference("after", second), 1e-6);
    EXPECT_GT(difference("before", second), 1e-2);  // a stale one is seen
    // Through files, and after the model has gone.
    engine->save("m", Engine::Save::kSampler, folder(fmt::format("saved_{}", rank)));
    engine->saving_sampler("before")(folder(fmt::format("before_{}", rank)));
    engine->saving_sampler("base")(folder(fmt::format("base_{}", rank)));
    engine->remove("m");
    engine->load_sampler("saved", folder(fmt::format("saved_{}", rank)));
    engine->load_sampler("before again", folder(fmt::format("before_{}", rank)));
    engine->load_sampler("base again", folder(fmt::format("base_{}", rank)));
    EXPECT_LT(difference("saved", second), 1e-6);
    EXPECT_LT(difference("before again", first), 1e-6);
    EXPECT_LT(difference("base again", first), 1e-6);
    // A request outlives its sampler.
    engine->submit("late", "after", request, 1);
    engine->close_sampler("after");
    std::vector<Engine::Sampled> late;
    while (late.empty()) late = engine->sample_pass();
    EXPECT_EQ(late[0].id, "late");
    EXPECT_THAT(message_of([&] { engine->submit("x", "after", request, 1); }), HasSubstr("does not exist"));
  }
}

// Its pages are the calling thread's, whoever still writes its weights. Else the oldest page of another
// sampler would have to go.
TEST_F(ModelEngineTest, AClosedSamplerGivesItsPagesBackAtOnce) {
  const DecoderConfig config = config_of("qwen3");
  ModelEngineOptions options = this->options(base("qwen3"));
  options.sampler.page = 4;
  options.sampler.cache_bytes =  // 5 pages
      5 * 4 * 2 * config.layers * config.key_value_heads * config.head_dim * std::int64_t{sizeof(double)};
  ModelEngine engine(options);
  engine.create("m", request_of(4));
  engine.open_sampler("oldest", "tiny"), engine.open_sampler("newest", "tiny");
  engine.open_sampler_of("closed", "m"), engine.remove("m");
  const auto sampled = [&](const std::string& sampler, std::int64_t first) {  // takes 3 pages and keeps 2
    Sample request;
    request.prompt.assign(9, first), request.params.max_tokens = 1;
    return sample(engine, sampler, request);
  };
  EXPECT_EQ(sampled("oldest", 1).cached_prompt_tokens, 0);
  const SampleResult expected = sampled("closed", 1);
  const Engine::Write write = engine.saving_sampler("closed");
  engine.close_sampler("closed");
  EXPECT_EQ(sampled("newest", 2).cached_prompt_tokens, 0);
  EXPECT_EQ(sampled("oldest", 1).cached_prompt_tokens, 8);
  std::async(std::launch::async, [&] { write(folder("closed")); }).get();
  engine.load_sampler("again", folder("closed"));
  EXPECT_EQ(sampled("again", 1).sequences[0].tokens, expected.sequences[0].tokens);
}

TEST_F(ModelEngineTest, SamplesDependOnTheirSeedAlone) {
  const auto engine = this->engine("qwen3");
  engine->open_sampler("s", "tiny");
  Sample request;
  request.prompt = {1, 2, 3}, request.samples = 3, request.params.max_tokens = 20,
  request.params.stop_given = true;
  const SampleResult one = sample(*engine, "s", request, 5), same = sample(*engine, "s", request, 5),
                     other = sample(*engine, "s", request, 6);
  request.params.seed = 5;
  const SampleResult given = sample(*engine, "s", request, 99);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(one.sequences[i].tokens, same.sequences[i].tokens);
    EXPECT_EQ(one.sequences[i].tokens, given.sequences[i].tokens);
    EXPECT_EQ(one.sequences[i].tokens.size(), 20U);
    EXPECT_FALSE(one.sequences[i].stopped);
  }
  EXPECT_NE(one.sequences[0].tokens, other.sequences[0].tokens);
  EXPECT_NE(one.sequences[0].tokens, one.sequences[1].tokens);
  request.params.stop_tokens = {one.sequences[0].tokens[7]};
  const SampleResult stopped = sample(*engine, "s", request);
  EXPECT_TRUE(stopped.sequences[0].stopped);
  EXPECT_LE(stopped.sequences[0].tokens.size(), 8U);
  EXPECT_EQ(stopped.sequences[0].tokens.back(),
            one.sequences[0].tokens[stopped.sequences[0].tokens.size() - 1]);
  // Without a limit up to the context.
  request.params.stop_tokens.clear(), request.params.max_tokens.reset();
  EXPECT_EQ(sample(*engine, "s", request).sequences[0].tokens.size(), 62U);
}

// Tokens 0 to 59 are characters, 60 is a special token.
constexpr std::string_view kCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567";

std::string tokenizer_json() {
  std::string vocabulary;
  for (std::size_t i = 0; i < kCharacters.size(); ++i)
    vocabulary += fmt::format("\"{}\": {}, ", kCharacters[i], i);
  return R"({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
    "added_tokens": [{"id": 60, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                      "normalized": false, "special": true}],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
    "decoder": {"type": "Fuse"},
    "model": {"type": "WordLevel", "unk_token": "a", "vocab": {)" +
         vocabulary + R"("<|end|>": 60}}})";
}

TEST_F(ModelEngineTest, StopStringsEndASequence) {
  write_file(folder("base_qwen3") / "tokenizer.json", tokenizer_json());
  const auto engine = this->engine("qwen3");
  EXPECT_EQ(engine->bases()[0].tokenizer.filename(), "tokenizer.json");
  engine->open_sampler("s", "tiny");
  Sample request;
  request.prompt = {1, 2, 3}, request.samples = 4, request.params.max_tokens = 40,
  request.params.stop_given = true;
  const SampleResult free = sample(*engine, "s", request);
  request.params.stop_strings = {"no such text"};
  try {
    EXPECT_EQ(sample(*engine, "s", request).sequences[0].tokens, free.sequences[0].tokens);
  } catch (const ConfigError& error) {
    if (std::string(error.what()).find("the package tokenizers") == std::string::npos) throw;
    GTEST_SKIP() << "missing: " << error.what();
  }
  std::string text;
  std::vector<std::size_t> ends;  // of the text, by tokens
  for (const std::int32_t token : free.sequences[0].tokens) {
    if (token < 60) text += kCharacters[static_cast<std::size_t>(token)];
    ends.push_back(text.size());
  }
  const std::string stop = text.substr(text.size() / 2, 3);
  const std::size_t last = text.find(stop) + stop.size();
  request.params.stop_strings = {"no such text", stop};
  const SampleResult stopped = sample(*engine, "s", request);
  EXPECT_TRUE(stopped.sequences[0].stopped);
  EXPECT_EQ(stopped.sequences[0].tokens.size(),
            static_cast<std::size_t>(std::ranges::find(ends, last) - ends.begin()) + 1);
  // The special token, by its id or by its text.
  request.params.stop_strings = {"<|end|>"};
  const SampleResult by_text = sample(*engine, "s", request);
  request.params.stop_strings.clear(), request.params.stop_tokens = {60};
  const SampleResult by_id = sample(*engine, "s", request);
  bool any = false;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(by_text.sequences[i].tokens, by_id.sequences[i].tokens);
    any = any || by_id.sequences[i].stopped;
  }
  EXPECT_TRUE(any);
}

TEST_F(ModelEngineTest, BadSamplesAreRefused) {
  const auto engine = this->engine("qwen3");
  engine->open_sampler("s", "tiny");
  const auto refused = [&](const std::string& text, const std::function<void(Sample&)>& change) {
    Sample request;
    request.prompt = {1, 2, 3}, request.params.max_tokens = 4;
    change(request);
    EXPECT_THAT(message_of([&] { engine->submit("x", "s", request, 1); }), HasSubstr(text));
  };
  refused("no token", [](auto& r) { r.prompt.clear(); });
  refused("a vocabulary of 61", [](auto& r) { r.prompt[1] = 61; });
  refused("samples", [](auto& r) { r.samples = 0; });
  refused("num_samples", [](auto& r) { r.samples = 4096, r.params.max_tokens = 1 << 20; });
  refused("max_tokens", [](auto& r) { r.params.max_tokens = 0; });
  refused("temperature", [](auto& r) { r.params.temperature = -1; });
  refused("temperature", [](auto& r) { r.params.temperature = NAN; });
  refused("top_k", [](auto& r) { r.params.top_k = -2; });
  refused("top_p", [](auto& r) { r.params.top_p = 0; });
  refused("top_p", [](auto& r) { r.params.top_p = 1.5; });
  refused("top_prompt", [](auto& r) { r.top_prompt = 62; });
  refused("target_prompt_logprobs", [](auto& r) { r.prompt_targets = Calls(1).tokens({3, 1}); });
  refused("a base without a tokenizer", [](auto& r) { r.params.stop_strings = {"x"}; });
  for (const std::int64_t tokens : {70L, 1000000000L})
    EXPECT_NE(message_of([&] {
                Sample request;
                request.prompt = {1, 2, 3}, request.params.max_tokens = tokens;
                engine->submit("x", "s", request, 1);
              }),
              "no error");
  EXPECT_FALSE(engine->sampling());
}

}  // namespace
}  // namespace isograd::serve
