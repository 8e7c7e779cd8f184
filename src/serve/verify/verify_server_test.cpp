#include "serve/verify/verify_server.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "base/refuse.hpp"
#include "full_tests.hpp"
#include "model/decoder_testing.hpp"
#include "model/safetensors.hpp"
#include "serve/models/model_engine.hpp"
#include "serve/service/service.hpp"
#include "serve/verify/remote.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using Tensors = std::map<std::string, at::Tensor>;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::uint64_t kSeed = 20261128;

// Each datum's gradient times the factor that `datum` gives in `call`.
using Factor = std::function<double(const ForwardBackward& call, const Datum& datum)>;

// The engine of `isograd serve` with one mistake.
class WrongEngine : public ModelEngine {
 public:
  using ModelEngine::ModelEngine;
  std::function<void(ForwardBackward&)> change_call{};
  std::function<void(AdamParams&, double denominator)> change_step{};
  std::function<void(Tensors& now, const Tensors& before, const AdamParams&)> change_saved{};
  std::function<void(ForwardBackwardResult&, const ForwardBackward&)> change_result{};
  std::function<void(Metrics&, const AdamParams&)> change_metrics{};
  Factor factor{};
  std::int64_t adds_twice = -1, loses = -1;  // a call of each step
  bool keeps_first_sampler = false, samplers_follow = false, leaves_output = false, mixes_models = false;
  std::string normalise{};  // whatever was asked for
  fs::path folder{};

  void create(const std::string& model, const CreateModel& request) override {
    CreateModel made = request;
    (request.lora.seed == 8 ? neighbour_ : judged_) = model;
    if (!normalise.empty()) made.metadata["isograd.normalise"] = normalise;
    if (leaves_output) made.lora.unembed = false;
    ModelEngine::create(model, made);
  }
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& request) override {
    // Figures of the other model belong to neither of its counts.
    if (model == neighbour_) return ModelEngine::forward_backward(mixes_models ? judged_ : model, request);
    ForwardBackwardResult result = computed(model, request);
    if (change_result) change_result(result, request);
    return result;
  }
  ForwardBackwardResult computed(const std::string& model, const ForwardBackward& request) {
    ForwardBackward call = request;
    if (change_call) change_call(call);
    for (const Datum& datum : call.data) {
      const auto weights = datum.inputs.find("weights");
      const std::size_t rows = datum.tokens.size();
      for (std::size_t row = 0; row < rows; ++row)
        tokens_ += weights == datum.inputs.end() ||
                           weights->second.numbers[row * (weights->second.numbers.size() / rows)] != 0
                       ? 1
                       : 0;
    }
    const std::int64_t place = calls_++;
    call.forward_only |= place == loses;
    if (place == adds_twice) ModelEngine::forward_backward(model, call);
    if (!factor) return ModelEngine::forward_backward(model, call);
    ForwardBackwardResult all;
    for (const Datum& datum : call.data) {
      ForwardBackward one{.data = {datum}, .loss = call.loss, .config = call.config};
      const auto times = static_cast<float>(factor(call, datum));
      for (const char* name : {"weights", "advantages"})
        if (const auto found = one.data[0].inputs.find(name); found != one.data[0].inputs.end())
          for (float& number : found->second.numbers) number *= times;
      if (const auto beta = one.config.find("beta"); beta != one.config.end())
        beta->second = std::get<double>(beta->second) * times;
      const ForwardBackwardResult result = ModelEngine::forward_backward(model, one);
      all.log_probabilities.push_back(result.log_probabilities[0]);
      all.metrics["loss:sum"] += result.metrics.at("loss:sum");
    }
    return all;
  }
  Metrics optim_step(const std::string& model, const AdamParams& params) override {
    AdamParams changed = params_ = params;
    if (change_step) change_step(changed, tokens_);
    calls_ = 0, tokens_ = 0;
    Metrics metrics = ModelEngine::optim_step(model, changed);
    if (change_metrics) change_metrics(metrics, params);
    return metrics;
  }
  std::int64_t save(const std::string& model, Save which, const fs::path& directory) override {
    const std::int64_t bytes = ModelEngine::save(model, which, directory);
    if (!change_saved) return bytes;
    Tensors now;
    for (const auto& [name, tensor] : read_safetensors(directory / "model.safetensors"))
      now[name] = tensor.clone();
    const Tensors before = std::exchange(saved_, now);
    if (!before.empty()) change_saved(now, before, params_);
    write_safetensors(directory / "model.safetensors", NamedTensors(now.begin(), now.end()));
    return bytes;
  }
  void open_sampler_of(const std::string& sampler, const std::string& model) override {
    if (!keeps_first_sampler && !samplers_follow) return ModelEngine::open_sampler_of(sampler, model);
    std::string& first = first_samplers_[model];
    if (first.empty()) return ModelEngine::open_sampler_of(first = sampler, model);
    if (samplers_follow) {
      ModelEngine::open_sampler_of(sampler, model);
      close_sampler(first);
      return ModelEngine::open_sampler_of(first, model);
    }
    const fs::path stored = folder / fmt::format("sampler-{}", stored_++);
    fs::create_directories(stored);
    saving_sampler(first)(stored), load_sampler(sampler, stored);
  }

 private:
  std::string judged_{}, neighbour_{};
  std::int64_t calls_ = 0, stored_ = 0;
  double tokens_ = 0;
  AdamParams params_{};
  Tensors saved_{};
  std::map<std::string, std::string> first_samplers_{};
};

const std::vector<JudgedModel> kAdapter = {{4, "tokens"}}, kWhole = {{0, "tokens"}};

class VerifyServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) / fmt::format("verify_server_{}", ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_ / "base");
    fmt::print("seed {}\n", kSeed);
    write_base(small("qwen3"));
  }
  static DecoderConfig small(const std::string& family) {
    DecoderConfig config = small_config(family);
    config.layers = 1;
    return config;
  }
  void write_base(const DecoderConfig& config, at::ScalarType dtype = at::kDouble) const {
    DecoderLM model(config, dtype, kSeed);
    perturb(model, kSeed + 1);
    write_hf(root_ / "base", model);
  }
  void TearDown() override { fs::remove_all(root_); }

  // `work` with the address of a server.
  void serve(const std::function<void(const std::string& url)>& work,
             const std::function<void(WrongEngine&)>& plant = {}, at::ScalarType dtype = at::kDouble,
             double session_seconds = 900, std::int64_t most_models = 64) {
    ModelEngineOptions options;
    options.bases = {{"tiny", root_ / "base"}}, options.dtype = dtype;
    WrongEngine engine(options);
    engine.folder = root_;
    if (plant) plant(engine);
    Limits limits = kLimits;
    limits["models"] = most_models;
    Service service({.state = root_ / fmt::format("state-{}", servers_++),
                     .limits = limits,
                     .session_seconds = session_seconds,
                     .print_steps = false},
                    engine);
    std::thread computing([&] { service.run(); });
    HttpServer http(
        {}, [](const HttpRequest&) { return nullptr; },
        [&](const HttpRequest& request, Respond respond) {
          service.handle(request, "", std::move(respond));
        });
    try {
      work(fmt::format("http://127.0.0.1:{}", http.port()));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    service.stop();
    computing.join();
  }
  ServerVerdict verdict(const std::vector<JudgedModel>& models,
                        const std::function<void(WrongEngine&)>& plant = {},
                        at::ScalarType dtype = at::kDouble, bool downloads = false,
                        std::int64_t most_models = 64) {
    ServerVerdict found;
    serve(
        [&](const std::string& url) {
          found = verify_server(url, "tml-any", downloads ? fs::path() : root_ / "base", models);
        },
        plant, dtype, 900, most_models);
    fmt::print("{}", to_text(found));
    return found;
  }

  fs::path root_;
  int servers_ = 0;
};

void change(ForwardBackward& call, const char* name,
            const std::function<float(float, std::size_t column)>& of) {
  for (Datum& datum : call.data)
    if (const auto found = datum.inputs.find(name); found != datum.inputs.end()) {
      std::vector<float>& numbers = found->second.numbers;
      const std::size_t columns = numbers.size() / datum.tokens.size();
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = of(numbers[i], i % columns);
    }
}
void as_ppo(ForwardBackward& call, const std::string& loss) {
  if (call.loss != loss) return;
  call.loss = "ppo";
  for (Datum& datum : call.data) datum.inputs.erase("sequence_ratio_mask");
}

TEST_F(VerifyServerTest, PassesWhatIsRight) {
  const std::vector<JudgedModel> both = {{4, "tokens"}, {0, "tokens"}};
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const ServerVerdict found = verdict(full_tests() ? judged_models() : both, {}, dtype, /*downloads=*/true);
    EXPECT_TRUE(found.passed());
    EXPECT_EQ(found.compared.size(),
              full_tests() ? 30 : 12);  // of each model: two steps and what they return, two samplers
  }
  DecoderConfig tied = small("llama");
  tied.tied_output = true;
  write_base(tied, at::kBFloat16);  // its values are exact in a server of another type
  EXPECT_TRUE(verdict(both).passed());
  EXPECT_TRUE(verdict(kAdapter, {}, at::kFloat).passed());
  DecoderConfig with_experts = small("qwen2_moe");
  with_experts.attention_bias = true;
  with_experts.experts = {.count = 4, .per_token = 2, .feed_forward = 24, .shared_feed_forward = 16};
  write_base(with_experts);
  EXPECT_TRUE(verdict(both).passed());
}

struct Planted {
  std::string name;
  std::function<void(WrongEngine&)> plant;
  std::vector<JudgedModel> models = kAdapter;
  bool full = false;  // left out of the ordinary suite
};
constexpr bool kFull = true;

TEST_F(VerifyServerTest, NamesEachMistake) {
  const auto call = [](std::function<void(ForwardBackward&)> change) {
    return [change](WrongEngine& engine) { engine.change_call = change; };
  };
  const auto step = [](std::function<void(AdamParams&, double)> change) {
    return [change](WrongEngine& engine) { engine.change_step = change; };
  };
  const auto factor = [](Factor of) { return [of](WrongEngine& engine) { engine.factor = of; }; };
  const auto mode = [](const char* is) { return [is](WrongEngine& engine) { engine.normalise = is; }; };
  const auto computed_as_ppo = [&](const char* loss) {
    return call([loss](ForwardBackward& request) { as_ppo(request, loss); });
  };
  const auto without_config = [&](const char* loss) {
    return call([loss](ForwardBackward& request) {
      if (request.loss == loss) request.config.clear();
    });
  };
  const Factor by_rows = [](const ForwardBackward& request, const Datum&) {
    double rows = 0;
    for (const Datum& datum : request.data) rows += static_cast<double>(datum.tokens.size());
    return 1 / rows;
  };
  const std::vector<Planted> mistakes = {
      {"each call's gradient is divided by its rows", factor(by_rows)},
      {"each call's gradient is divided by its rows", factor(by_rows), kWhole, kFull},
      {"each call's gradient is divided by its datums",
       factor([](const ForwardBackward& request, const Datum&) {
         return 1 / static_cast<double>(request.data.size());
       }),
       kAdapter, kFull},
      {"each datum's gradient is divided by the sum of its weights",
       factor([](const ForwardBackward&, const Datum& datum) {
         double sum = 0;
         const auto found = datum.inputs.find("weights");
         if (found == datum.inputs.end())
           sum = static_cast<double>(datum.tokens.size());
         else
           for (const float weight : found->second.numbers) sum += weight;
         return 1 / sum;
       })},
      {"negative weights are dropped", call([](ForwardBackward& request) {
         change(request, "weights", [](float w, std::size_t) { return std::max(w, 0.F); });
       })},
      {"weights are taken for a mask", call([](ForwardBackward& request) {
         change(request, "weights", [](float w, std::size_t) { return w != 0 ? 1.F : 0; });
       })},
      {"all targets of a token but the first are dropped", call([](ForwardBackward& request) {
         change(request, "weights", [](float w, std::size_t column) { return column == 0 ? w : 0; });
       }),
       kAdapter, kFull},
      {"sequence_ratio_mask is ignored", call([](ForwardBackward& request) {
         change(request, "sequence_ratio_mask", [](float, std::size_t) { return 1.F; });
       })},
      {"cispo is computed as ppo", computed_as_ppo("cispo")},
      {"gspo is computed as ppo", computed_as_ppo("gspo"), kAdapter, kFull},
      {"loss_fn_config of cispo is ignored", without_config("cispo"), kAdapter, kFull},
      {"loss_fn_config of gspo is ignored", without_config("gspo"), kAdapter, kFull},
      {"loss_fn_config of dro is ignored", call([](ForwardBackward& request) {
         if (request.loss == "dro") request.config["beta"] = 0.0;
       })},
      {"beta1 is ignored", step([](AdamParams& params, double) { params.beta1 = 0.9; }), kAdapter, kFull},
      {"beta2 is ignored", step([](AdamParams& params, double) { params.beta2 = 0.95; })},
      {"eps is ignored", step([](AdamParams& params, double) { params.epsilon = 1e-8; })},
      {"weight_decay is ignored", step([](AdamParams& params, double) { params.weight_decay = 0; })},
      {"grad_clip_norm is ignored", step([](AdamParams& params, double) { params.clip = 0; })},
      {"grad_clip_norm is ignored", step([](AdamParams& params, double) { params.clip = 0; }), kWhole, kFull},
      {"the sum is clipped before it is divided",
       step([](AdamParams& params, double denominator) { params.clip /= denominator; })},
      {"the sum is not divided", mode("none"), {{4, "weights"}}},
      {"the sum is not divided", mode("none"), {{4, "tokens"}, {4, "sequences"}, {0, "tokens"}}, kFull},
      {"the sum is divided by its tokens",
       mode("tokens"),
       {{4, "none"}, {4, "weights"}, {4, "sequences"}},
       kFull},
      {"the sum is divided by its datums", mode("sequences"), {{4, "weights"}}},
      {"call 3 (importance_sampling) of a step is added twice",
       [](WrongEngine& engine) { engine.adds_twice = 2; }, kAdapter, kFull},
      {"call 2 (cross_entropy) of a step is lost", [](WrongEngine& engine) { engine.loses = 1; }},
      {"call 7 (gspo) of a step is lost", [](WrongEngine& engine) { engine.loses = 6; }, kWhole},
      {"a call of another model is added", [](WrongEngine& engine) { engine.mixes_models = true; }},
      {"an older sampler has newer weights", [](WrongEngine& engine) { engine.samplers_follow = true; }},
      {"the sampler has older weights", [](WrongEngine& engine) { engine.keeps_first_sampler = true; }},
      {"an older sampler has newer weights", [](WrongEngine& engine) { engine.samplers_follow = true; },
       kWhole, kFull},
  };
  for (const auto& [name, plant, models, full] : mistakes) {
    if (full && !full_tests()) continue;
    const ServerVerdict found = verdict(models, plant);
    EXPECT_THAT(found.wrong, Each(HasSubstr(name)));
    EXPECT_EQ(found.wrong.size(), models.size()) << name;
    EXPECT_THAT(found.unjudged, IsEmpty());
  }
}

// These are planted in what is exported: the samplers are still right, and then seem wrong.
TEST_F(VerifyServerTest, NamesWhatIsMissingInWholeWeights) {
  const auto saved = [&](decltype(WrongEngine::change_saved) change) {
    return verdict(kWhole, [change](WrongEngine& engine) { engine.change_saved = change; }).wrong;
  };
  const auto contains = [](const char* name) { return ::testing::Contains(HasSubstr(name)); };
  EXPECT_THAT(saved([](Tensors& now, const Tensors& before, const AdamParams&) {
                for (const char* name : {"lm_head.weight", "model.embed_tokens.weight"})
                  now[name] = before.at(name);
              }),
              contains("these are not trained: model.embed_tokens.weight lm_head.weight"));
  EXPECT_THAT(saved([](Tensors& now, const Tensors& before, const AdamParams& params) {
                for (auto& [name, tensor] : now)
                  if (tensor.dim() == 1)
                    tensor += before.at(name) * (params.learning_rate * params.weight_decay);
              }),
              contains("norms and biases do not decay"));
}

// The weights are right.
TEST_F(VerifyServerTest, NamesWhatIsReturnedWrongly) {
  const auto rows_of = [](const ForwardBackward& call) {
    std::size_t rows = 0;
    for (const Datum& datum : call.data) rows += datum.tokens.size();
    return static_cast<double>(rows);
  };
  const auto said = [](const char* text) { return HasSubstr(text); };
  // In the first step, each in a kind of its own.
  const ServerVerdict all = verdict(kAdapter, [&](WrongEngine& engine) {
    engine.change_result = [&](ForwardBackwardResult& result, const ForwardBackward& call) {
      result.metrics["loss:sum"] /= rows_of(call);
      std::ranges::rotate(result.log_probabilities[0].numbers,
                          result.log_probabilities[0].numbers.begin() + 1);
    };
    engine.change_metrics = [](Metrics& metrics, const AdamParams&) {
      std::swap(metrics["grad_norm"], metrics["grad_norm_sum"]);
      metrics["denominator"] += 1, metrics["tokens"] += 1, metrics["step"] += 1;
    };
  });
  EXPECT_THAT(all.wrong,
              ::testing::ElementsAre(
                  said("step 1: the error of log-probabilities of call 1 (cross_entropy) is "),
                  said("step 1: the loss of a call is divided by its rows"),
                  said("step 1: grad_norm is that of the sum"), said("step 1: grad_norm_sum of "),
                  said("step 1: denominator of "), said("step 1: tokens of "), said("step 1: step of ")));
  EXPECT_THAT(all.unjudged, IsEmpty());
  // One call, by little; a row that is missing, in an adapter and in whole weights; what shows in the second
  // step alone.
  const ServerVerdict some = verdict({{4, "tokens"}, {0, "tokens"}}, [](WrongEngine& engine) {
    engine.change_result = [](ForwardBackwardResult& result, const ForwardBackward& call) {
      if (call.loss == "ppo") result.metrics["loss:sum"] *= 1 + 1e-7;
      if (call.loss == "dro") result.log_probabilities[0].numbers.pop_back();
    };
  });
  EXPECT_EQ(some.wrong.size(), 4);
  EXPECT_THAT(some.wrong, ::testing::Contains(said("loss:sum of call 4 (ppo) is ")).Times(2));
  EXPECT_THAT(
      some.wrong,
      ::testing::Contains(said("in another shape than the targets, of call 6 (dro) is inf")).Times(2));
  const ServerVerdict clipped = verdict(kAdapter, [](WrongEngine& engine) {
    engine.change_metrics = [](Metrics& metrics, const AdamParams& params) {
      if (params.clip > 0) metrics["grad_norm"] = std::min(metrics["grad_norm"], params.clip);
    };
  });
  EXPECT_THAT(clipped.wrong, ::testing::ElementsAre(said("step 2: grad_norm is that after the clip")));
  // Not returned: not judged.
  const ServerVerdict silent = verdict(kAdapter, [](WrongEngine& engine) {
    engine.change_result = [](ForwardBackwardResult& result, const ForwardBackward&) {
      result.metrics.clear();
    };
    engine.change_metrics = [](Metrics& metrics, const AdamParams&) { metrics.erase("grad_norm"); };
  });
  EXPECT_FALSE(silent.passed());
  EXPECT_THAT(silent.wrong, IsEmpty());
  EXPECT_THAT(silent.unjudged,
              ::testing::ElementsAre(said("loss:sum of call 1 (cross_entropy), which is not returned"),
                                     said("grad_norm of the step, which is not returned")));
}

TEST_F(VerifyServerTest, SaysWhatItCouldNotJudge) {
  const ServerVerdict refused = verdict(kAdapter, [](WrongEngine& engine) {
    engine.change_call = [](ForwardBackward& request) {
      if (request.loss == "ppo" || request.loss == "gspo")
        refuse("loss_fn", request.loss, "another", "Take it");
    };
  });
  EXPECT_FALSE(refused.passed());
  EXPECT_THAT(refused.wrong, IsEmpty());
  EXPECT_THAT(refused.unjudged,
              ::testing::ElementsAre(HasSubstr("loss_fn: found ppo"), HasSubstr("loss_fn: found gspo")));
  EXPECT_EQ(refused.compared.size(), 6);  // the other losses
  EXPECT_THAT(to_text(refused), Not(HasSubstr("PASS")));
  // Rounding of bfloat16 hides mistakes.
  const ServerVerdict coarse = verdict({{4, "tokens"}, {0, "tokens"}}, {}, at::kBFloat16, /*downloads=*/true);
  EXPECT_FALSE(coarse.passed());
  EXPECT_EQ(coarse.unjudged.size(), 2);
  EXPECT_THAT(coarse.unjudged, Each(HasSubstr("--dtype float32 or float64")));
  EXPECT_THAT(coarse.wrong, IsEmpty());
  // An adapter of less than was asked for.
  const ServerVerdict smaller = verdict(kAdapter, [](WrongEngine& engine) { engine.leaves_output = true; });
  EXPECT_FALSE(smaller.passed());
  EXPECT_THAT(smaller.unjudged, ::testing::Contains(HasSubstr("an adapter without ")));
  // Wrong in a way that has no name.
  const ServerVerdict other = verdict(kAdapter, [](WrongEngine& engine) {
    engine.change_step = [](AdamParams& params, double) { params.learning_rate *= 1.001; };
  });
  EXPECT_THAT(other.wrong, Each(HasSubstr("another gradient or update")));
  EXPECT_FALSE(other.wrong.empty());
  // Nobody there.
  EXPECT_THROW(verify_server("http://127.0.0.1:1", ""), ConfigError);
  EXPECT_FALSE(ServerVerdict{}.passed());
}

// All is judged but what needs a second model, and a model that failed makes room for the next one.
TEST_F(VerifyServerTest, AServerOfOneModelIsJudgedWithoutASecondOne) {
  const std::vector<JudgedModel> both = {{4, "tokens"}, {0, "tokens"}};
  const auto lacks_second = [] {
    return ::testing::AllOf(HasSubstr("whether a call of another model is added: this needs two models"),
                            HasSubstr("limit models: found 2; expected at most 1"));
  };
  const ServerVerdict right = verdict(both, {}, at::kDouble, /*downloads=*/true, /*most_models=*/1);
  EXPECT_THAT(right.wrong, IsEmpty());
  EXPECT_THAT(right.unjudged, ::testing::ElementsAre(lacks_second(), lacks_second()));
  EXPECT_EQ(right.compared.size(), 12);
  const ServerVerdict wrong = verdict(
      both, [](WrongEngine& engine) { engine.normalise = "none"; }, at::kDouble, false, 1);
  EXPECT_THAT(wrong.wrong, ::testing::ElementsAre(HasSubstr("the sum is not divided"),
                                                  HasSubstr("the sum is not divided")));
  const ServerVerdict refused = verdict(
      both,
      [](WrongEngine& engine) {
        engine.change_call = [](ForwardBackward& request) {
          if (request.loss == "ppo") refuse("loss_fn", request.loss, "another", "Take it");
        };
      },
      at::kDouble, false, 1);
  EXPECT_THAT(refused.unjudged,
              ::testing::ElementsAre(HasSubstr("loss_fn: found ppo"), lacks_second(), lacks_second()));
  EXPECT_THAT(refused.wrong, IsEmpty());
}

TEST_F(VerifyServerTest, ASessionLivesWhileNothingIsAsked) {
  serve(
      [](const std::string& url) {
        Remote alive(url, "tml-any", std::chrono::milliseconds(200)),
            silent(url, "tml-any", std::chrono::hours(1));
        CreateModel request;
        request.base = "tiny";
        std::this_thread::sleep_for(
            std::chrono::milliseconds(2300));  // silent sessions are ended every second
        EXPECT_FALSE(alive.create(request).empty());
        EXPECT_THROW(silent.create(request), ConfigError);
      },
      {}, at::kDouble, /*session_seconds=*/1);
}

}  // namespace
}  // namespace isograd::serve
