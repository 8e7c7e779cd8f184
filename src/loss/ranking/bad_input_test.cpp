// Ranking losses: refusals, the answer to a diverged model, warnings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"
#include "loss/ranking/ranking_testing.hpp"

namespace isograd {
namespace {

using twin::column;
using twin::labels;
using twin::plain;
using twin::plain_as;

using ::testing::AllOf;
using ::testing::HasSubstr;

// τ below what fp32 can divide by: 1/τ is infinite and a tie NaN; the product with PAUC's dispersion: 0,
// which made its class invalid and the loss 0.
TEST(BadInput, IsATemperatureThatCannotBeDividedBy) {
  EXPECT_THAT(error_of([] {
                LossWarmup([](const auto& s, const auto&, const auto&) { return s.sum(); },
                           std::make_shared<SmoothAPLoss>(), WarmupOptions{.temp_end = 1e-40});
              }),
              HasSubstr("temp_end"));
  SmoothAPLoss loss(plain(0.5));
  EXPECT_THAT(error_of([&] { loss.set_temperature(1e-39); }), HasSubstr("at least 1.2e-38"));
  for (auto state = loss.state(); auto& [name, value] : state)
    if (name == "temperature") {
      value.fill_(0);
      EXPECT_THAT(error_of([&] { loss.load_state(state); }), HasSubstr("temperature"));
    }
  EXPECT_EQ(loss.temperature(), 0.5);
  const at::Tensor scores = leaf(at::tensor({1.f, 2.f, 1.f, 3.f}).unsqueeze(1));
  loss.set_temperature(1.2e-38);
  const at::Tensor value = loss.forward(scores, labels({0, 1, 1, 0}));
  EXPECT_TRUE(std::isfinite(value.item<float>()));
  EXPECT_TRUE(at::isfinite(gradient_of(value, scores)).all().item<bool>());

  for (const auto surrogate : {PAUCOptions::Surrogate::kTrapezoid, PAUCOptions::Surrogate::kPairwise})
    for (const auto thresholds : {Thresholds::kGather, Thresholds::kSelect}) {
      if (thresholds == Thresholds::kSelect && surrogate == PAUCOptions::Surrogate::kPairwise) continue;
      run_ranks(3, [&](World& world) {
        auto options = plain_as<PAUCOptions>(1e-35);
        options.surrogate = surrogate, options.thresholds = thresholds, options.beta = 0.5;
        PAUCAtBudgetLoss pauc(options, world.group);
        const at::Tensor rows = (at::arange(8).to(at::kFloat) * 1e-6f).unsqueeze(1);
        const at::Tensor targets = labels({0, 1, 0, 0, 1, 0, 0, 1});
        EXPECT_THAT(error_of([&] { pauc.forward(rows, targets); }),
                    AllOf(HasSubstr("temperature"), HasSubstr("times the dispersion")))
            << "on every rank alike, before the queue";
        pauc.set_temperature(0.1);
        EXPECT_GT(pauc.forward(rows, targets).item<float>(), 0);
      });
    }
}

// Scores that are not finite are no bad input: they are what a diverged model gives. The step must see it, on
// every rank, and the queue must not.
TEST(NotFinite, ScoresOfOneRankMakeTheLossNaNOnAll) {
  using Make = std::function<std::shared_ptr<RankingLoss>(Group)>;
  const auto with = [](auto options) {
    options.queue_size = 6, options.check_queue = true, options.num_classes = 2;
    return options;
  };
  const std::vector<Make> losses = {
      [&](Group group) { return std::make_shared<SmoothAPLoss>(with(plain(0.5)), group); },
      [&](Group group) {
        return std::make_shared<PAUCAtBudgetLoss>(with(plain_as<PAUCOptions>(0.5)), group);
      },
      [&](Group group) {
        auto options = with(plain_as<RecallOptions>(0.5));
        options.thresholds = Thresholds::kSelect;
        return std::make_shared<RecallAtQuantileLoss>(options, group);
      }};
  for (const int ranks : {1, 3})
    for (const Make& make : losses)
      for (const double bad : {static_cast<double>(NAN), HUGE_VAL, -HUGE_VAL})
        run_ranks(ranks, [&](World& world) {
          const auto loss = make(world.group);
          const at::Tensor fine = at::arange(8, at::kDouble).view({4, 2}) + world.rank;
          const at::Tensor targets = labels({0, 1, -100, 1});
          loss->forward(fine, targets);
          const auto before = loss->state();
          at::Tensor broken = fine.clone();
          if (world.rank == ranks - 1) broken[1][0] = bad;
          broken = leaf(broken);
          const RankingResult result = loss->evaluate(broken, targets);
          EXPECT_TRUE(std::isnan(result.loss.item<double>()));
          EXPECT_TRUE(at::isnan(result.per_class).all().item<bool>());
          const at::Tensor gradient = gradient_of(result.loss, broken);
          EXPECT_TRUE(at::isnan(gradient[0]).all().item<bool>());
          EXPECT_EQ(gradient[2].abs().sum().item<double>(), 0) << "an ignored row";
          const auto after = loss->state();
          for (std::size_t i = 0; i < after.size(); ++i)
            EXPECT_TRUE(after[i].second.equal(before[i].second) || after[i].first == "position");
          at::Tensor ignored = fine.clone();
          ignored[2][0] = bad;
          EXPECT_TRUE(std::isfinite(loss->forward(ignored, targets).item<double>()));
          const RankingMetrics metrics =
              ranking_metrics(world.group, broken.detach().select(1, 0), targets, 0.3, 0.4);
          EXPECT_TRUE(std::isnan(metrics.average_precision));
          EXPECT_EQ(metrics.positives, 2 * ranks);
        });
}

// A class that never gets a value makes the loss look better than it is. Said once, by one rank.
TEST(Warning, NamesAClassThatHasNeverHadAValue) {
  struct Heard : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  };
  std::vector<std::vector<std::string>> heard(2);
  run_ranks(2, [&](World& world) {
    Heard handler;
    const c10::WarningUtils::WarningHandlerGuard guard(&handler);
    RankingOptions options = plain(0.5);
    options.num_classes = 3;
    SmoothAPLoss loss(options, world.group);
    const at::Tensor scores = at::sin(at::arange(12, at::kDouble)).view({4, 3});
    // Class 2 never comes, class 1 in the last forward before it would be said.
    for (int forward = 1; forward <= 50; ++forward) {
      loss.forward(scores, labels(forward == 20 ? std::vector<std::int64_t>{0, 1, 0, 1}
                                                : std::vector<std::int64_t>{0, 0, 0, 0}));
      EXPECT_EQ(handler.texts.size(), forward < 20 || world.rank == 1 ? 0u : 1u);
    }
    loss.eval();
    heard[static_cast<std::size_t>(world.rank)] = handler.texts;
  });
  ASSERT_EQ(heard[0].size(), 1u);
  EXPECT_THAT(heard[0][0], AllOf(HasSubstr("SmoothAPLoss: class 2"), HasSubstr("a positive row")));
  EXPECT_TRUE(heard[1].empty());
}

TEST(BadInput, IsNamed) {
  const auto of = [](auto options, const char* key) {
    using Options = decltype(options);
    const std::string text = error_of([&] {
      if constexpr (std::is_same_v<Options, RecallOptions>)
        RecallAtQuantileLoss made(options);
      else if constexpr (std::is_same_v<Options, PAUCOptions>)
        PAUCAtBudgetLoss made(options);
      else
        SmoothAPLoss made(options);
    });
    EXPECT_THAT(text, HasSubstr(key));
  };
  const auto changed = [](auto options, auto change) {
    change(options);
    return options;
  };
  of(changed(RankingOptions{}, [](auto& o) { o.num_classes = 0; }), "num_classes");
  of(changed(RankingOptions{}, [](auto& o) { o.queue_size = -1; }), "queue_size");
  of(changed(RankingOptions{}, [](auto& o) { o.temperature = 0; }), "temperature");
  of(changed(RankingOptions{}, [](auto& o) { o.temperature = NAN; }), "temperature");
  of(changed(RankingOptions{}, [](auto& o) { o.temperature = 1e-39; }), "temperature");
  of(changed(RankingOptions{}, [](auto& o) { o.max_pool_size = -3; }), "max_pool_size");
  of(changed(RankingOptions{}, [](auto& o) { o.reduction = LossReduction::kMeanPositive; }), "reduction");
  of(changed(RecallOptions{}, [](auto& o) { o.quantile = 1; }), "quantile");
  of(changed(PAUCOptions{}, [](auto& o) { o.alpha = -0.1; }), "alpha");
  of(changed(PAUCOptions{}, [](auto& o) { o.alpha = 0.1; }), "beta");
  of(changed(PAUCOptions{}, [](auto& o) { o.beta = 1.1; }), "beta");
  of(changed(PAUCOptions{}, [](auto& o) { o.n_knots = 1; }), "n_knots");
  const auto selects = [](auto& o) { o.thresholds = Thresholds::kSelect; };
  of(changed(RankingOptions{}, selects), "thresholds");
  of(changed(PAUCOptions{}, [&](auto& o) { selects(o), o.surrogate = PAUCOptions::Surrogate::kPairwise; }),
     "thresholds");
  of(changed(RecallOptions{}, [&](auto& o) { selects(o), o.max_pool_size = 9; }), "thresholds");
  SmoothAPLoss loss(plain(1));
  const at::Tensor s = column({1, 2}), t = labels({0, 1});
  const auto refused = [&](const at::Tensor& scores, const at::Tensor& targets, const RankingExtras& extras,
                           const char* part) {
    EXPECT_THAT(error_of([&] { loss.forward(scores, targets, extras); }), HasSubstr(part));
  };
  refused(at::zeros({2, 2}), t, {}, "scores [2, 2]");
  refused(s, labels({0}), {}, "targets [1]");
  refused(s, labels({0, 2}), {}, "target 2 in row 1");
  refused(s, at::tensor({0.5, 1.0}), {}, "target 0.5 in row 0");
  refused(s, t, {at::ones({3}, at::kBool), {}}, "iid_mask [3]");
  refused(s, t, {{}, at::ones({2, 1})}, "sample_weight [2, 1]");
  refused(s, t, {{}, at::tensor({1., -1.})}, "sample_weight -1 in row 1");
  EXPECT_EQ(loss.forward(column({1, NAN, 2}), labels({1, -100, 0})).dim(), 0)
      << "an ignored row may hold anything";
  const at::Tensor value = loss.forward(s, t);
  EXPECT_THAT(error_of([&] { torch::autograd::grad({value}, {s}, {}, true, /*create_graph=*/true); }),
              HasSubstr("create_graph"));
}

// A mistake of some ranks is refused on all ranks, and the message names the rank.
TEST(BadInput, OfOneRankIsNamedOnAll) {
  run_ranks(3, [](World& world) {
    const bool odd = world.rank == 1;
    RankingOptions options = plain(1);
    options.queue_size = 4, options.check_queue = true;
    const at::Tensor s = column({1, 2}), t = labels({0, 1});
    SmoothAPLoss loss(options, world.group);
    const auto refused = [&](auto call, const char* part) { EXPECT_THAT(error_of(call), HasSubstr(part)); };
    refused([&] { loss.forward(odd ? at::zeros({2}) : s, t); }, odd ? "scores [2]" : "rank 1 refused");
    refused([&] { loss.forward(odd ? s.to(at::kFloat) : s, t); }, "rank 1: Float");
    refused(
        [&] {
          loss.forward(s, t, odd ? RankingExtras{} : RankingExtras{{}, at::ones({2})});
        },
        "rank 1: not given");
    EXPECT_EQ(loss.forward(odd ? s.narrow(0, 0, 0) : s, odd ? t.narrow(0, 0, 0) : t,
                           odd ? RankingExtras{} : RankingExtras{{}, at::ones({2})})
                  .dim(),
              0)
        << "a rank without rows has nothing to weigh";
    options.num_classes = odd ? 2 : 1;
    SmoothAPLoss classes(options, world.group);
    refused([&] { classes.forward(at::zeros({2, odd ? 2 : 1}), t); }, "differ");
    options.num_classes = 1, options.temperature = odd ? 0.5 : 1;
    SmoothAPLoss temperatures(options, world.group);
    refused([&] { temperatures.forward(s, t); }, "the same loss with the same options");
    options.temperature = 1;
    SmoothAPLoss queues(options, world.group);
    if (odd) queues.named_buffers()["queue_scores"].fill_(3);
    refused([&] { queues.forward(s, t); }, "queues that differ");
    SmoothAPLoss mode(options, world.group);
    mode.train(!odd);
    refused([&] { mode.forward(s, t); }, "evaluation");
  });
}

}  // namespace
}  // namespace isograd
