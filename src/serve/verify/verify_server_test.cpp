#include "serve/verify/verify_server.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "base/refuse.hpp"
#include "model/decoder_testing.hpp"
#include "serve/models/model_engine.hpp"
#include "serve/service/service.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::uint64_t kSeed = 20261128;

// The engine of `isograd serve` with one mistake.
class WrongEngine : public ModelEngine {
 public:
  using ModelEngine::ModelEngine;
  std::function<void(ForwardBackward&)> change_call{};
  std::function<void(AdamParams&, double denominator)> change_step{};
  std::int64_t adds_twice = -1, loses = -1;  // a call of each step
  bool keeps_first_sampler = false, samplers_follow = false, forgets_normalise = false;
  fs::path folder{};

  void create(const std::string& model, const CreateModel& request) override {
    CreateModel made = request;
    const auto mode = made.metadata.find("isograd.normalise");
    divides_ = mode != made.metadata.end() && mode->second == "tokens";
    if (forgets_normalise) made.metadata.clear();
    ModelEngine::create(model, made);
  }
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& request) override {
    ForwardBackward call = request;
    if (change_call) change_call(call);
    for (const Datum& datum : call.data) {
      const auto weights = datum.inputs.find("weights");
      tokens_ += weights == datum.inputs.end()
                     ? static_cast<double>(datum.tokens.size())
                     : static_cast<double>(
                           std::ranges::count_if(weights->second.numbers, [](float w) { return w != 0; }));
    }
    const std::int64_t place = calls_++;
    call.forward_only |= place == loses;
    if (place == adds_twice) ModelEngine::forward_backward(model, call);
    return ModelEngine::forward_backward(model, call);
  }
  Metrics optim_step(const std::string& model, const AdamParams& params) override {
    AdamParams changed = params;
    if (change_step) change_step(changed, divides_ ? tokens_ : 1);
    calls_ = 0, tokens_ = 0;
    return ModelEngine::optim_step(model, changed);
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
    const fs::path saved = folder / fmt::format("sampler-{}", saved_++);
    fs::create_directories(saved);
    save_sampler(first, saved), load_sampler(sampler, saved);
  }

 private:
  std::int64_t calls_ = 0, saved_ = 0;
  double tokens_ = 0;
  bool divides_ = false;
  std::map<std::string, std::string> first_samplers_{};
};

class VerifyServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) / fmt::format("verify_server_{}", ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_ / "base");
    fmt::print("seed {}\n", kSeed);
    write_base("qwen3", false);
  }
  void write_base(const std::string& family, bool tied) const {
    DecoderConfig config = small_config(family);
    config.tied_output = tied;
    DecoderLM model(config, at::kDouble, kSeed);
    perturb(model, kSeed + 1);
    write_hf(root_ / "base", model);
  }
  void TearDown() override { fs::remove_all(root_); }

  ServerVerdict verdict(const std::function<void(WrongEngine&)>& plant = {},
                        at::ScalarType dtype = at::kDouble, bool downloads = false) {
    ModelEngineOptions options;
    options.bases = {{"tiny", root_ / "base"}}, options.dtype = dtype;
    WrongEngine engine(options);
    engine.folder = root_;
    if (plant) plant(engine);
    Service service({.state = root_ / fmt::format("state-{}", servers_++), .print_steps = false}, engine);
    std::thread computing([&] { service.run(); });
    ServerVerdict found;
    {
      HttpServer http(
          {}, [](const HttpRequest&) { return nullptr; },
          [&](const HttpRequest& request, Respond respond) {
            service.handle(request, "", std::move(respond));
          });
      try {
        found = verify_server(fmt::format("http://127.0.0.1:{}", http.port()), "tml-any",
                              downloads ? fs::path() : root_ / "base");
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      service.stop();
      computing.join();
    }
    fmt::print("{}", to_text(found));
    return found;
  }

  fs::path root_;
  int servers_ = 0;
};

void scale(Datum& datum, double factor) {
  for (const char* name : {"weights", "advantages"})
    if (const auto found = datum.inputs.find(name); found != datum.inputs.end())
      for (float& number : found->second.numbers) number = static_cast<float>(number * factor);
}

TEST_F(VerifyServerTest, PassesWhatIsRight) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const ServerVerdict found = verdict({}, dtype, /*downloads=*/true);
    EXPECT_TRUE(found.passed());
    EXPECT_EQ(found.compared.size(), 8);  // in two modes: two steps, two samplers
  }
  write_base("llama", true);
  EXPECT_TRUE(verdict().passed());
}

TEST_F(VerifyServerTest, NamesEachMistake) {
  const auto call = [](std::function<void(ForwardBackward&)> change) {
    return [change](WrongEngine& engine) { engine.change_call = change; };
  };
  const auto step = [](std::function<void(AdamParams&, double)> change) {
    return [change](WrongEngine& engine) { engine.change_step = change; };
  };
  const std::vector<std::pair<std::string, std::function<void(WrongEngine&)>>> mistakes = {
      {"each call's gradient is divided by its rows", call([](ForwardBackward& request) {
         double rows = 0;
         for (const Datum& datum : request.data) rows += static_cast<double>(datum.tokens.size());
         for (Datum& datum : request.data) scale(datum, 1 / rows);
       })},
      {"each call's gradient is divided by its datums", call([](ForwardBackward& request) {
         for (Datum& datum : request.data) scale(datum, 1 / static_cast<double>(request.data.size()));
       })},
      {"each datum's gradient is divided by the sum of its weights", call([](ForwardBackward& request) {
         for (Datum& datum : request.data) {
           double sum = 0;
           const auto found = datum.inputs.find("weights");
           if (found == datum.inputs.end())
             sum = static_cast<double>(datum.tokens.size());
           else
             for (const float weight : found->second.numbers) sum += weight;
           scale(datum, 1 / sum);
         }
       })},
      {"negative weights are dropped", call([](ForwardBackward& request) {
         for (Datum& datum : request.data)
           if (const auto found = datum.inputs.find("weights"); found != datum.inputs.end())
             for (float& weight : found->second.numbers) weight = std::max(weight, 0.F);
       })},
      {"beta1 is ignored", step([](AdamParams& params, double) { params.beta1 = 0.9; })},
      {"beta2 is ignored", step([](AdamParams& params, double) { params.beta2 = 0.95; })},
      {"eps is ignored", step([](AdamParams& params, double) { params.epsilon = 1e-8; })},
      {"weight_decay is ignored", step([](AdamParams& params, double) { params.weight_decay = 0; })},
      {"grad_clip_norm is ignored", step([](AdamParams& params, double) { params.clip = 0; })},
      {"the sum is clipped before it is divided",
       step([](AdamParams& params, double denominator) { params.clip /= denominator; })},
      {"the sum is not divided", [](WrongEngine& engine) { engine.forgets_normalise = true; }},
      {"call 3 (importance_sampling) of a step is added twice",
       [](WrongEngine& engine) { engine.adds_twice = 2; }},
      {"call 2 (cross_entropy) of a step is lost", [](WrongEngine& engine) { engine.loses = 1; }},
      {"an older sampler has a newer adapter", [](WrongEngine& engine) { engine.samplers_follow = true; }},
      {"the sampler has an older adapter", [](WrongEngine& engine) { engine.keeps_first_sampler = true; }},
  };
  for (const auto& [name, plant] : mistakes) {
    const ServerVerdict found = verdict(plant);
    // Mode `none` has nothing to divide: there the clip is right, and so is a server without modes.
    const bool tokens_alone = name.starts_with("the sum is");
    EXPECT_THAT(found.wrong, Each(HasSubstr(name)));
    EXPECT_EQ(found.wrong.size(), tokens_alone ? 1U : 2U) << name;
    EXPECT_THAT(found.unjudged, IsEmpty());
  }
}

TEST_F(VerifyServerTest, SaysWhatItCouldNotJudge) {
  const ServerVerdict refused = verdict([](WrongEngine& engine) {
    engine.change_call = [](ForwardBackward& request) {
      if (request.loss == "ppo") refuse("loss_fn", "ppo", "another", "Take it");
    };
  });
  EXPECT_FALSE(refused.passed());
  EXPECT_THAT(refused.wrong, IsEmpty());
  EXPECT_THAT(refused.unjudged, ::testing::Contains(HasSubstr("loss_fn: found ppo")));
  EXPECT_THAT(to_text(refused), Not(HasSubstr("PASS")));
  // Wrong in a way that has no name.
  const ServerVerdict other = verdict([](WrongEngine& engine) {
    engine.change_step = [](AdamParams& params, double) { params.learning_rate *= 1.001; };
  });
  EXPECT_THAT(other.wrong, Each(HasSubstr("another gradient or update")));
  EXPECT_FALSE(other.wrong.empty());
  // Nobody there.
  EXPECT_THROW(verify_server("http://127.0.0.1:1", ""), ConfigError);
  EXPECT_FALSE(ServerVerdict{}.passed());
}

}  // namespace
}  // namespace isograd::serve
