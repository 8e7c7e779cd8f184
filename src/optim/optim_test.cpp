#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "layout/flat.hpp"
#include "optim/optimizers.hpp"

namespace isograd {
namespace {

// A model of odd sizes in several buckets, with gradients drawn anew for each step.
struct Workbench {
  std::vector<NamedParameter> parameters;
  std::vector<Bucket> buckets;

  explicit Workbench(at::ScalarType type, std::int64_t bucket_bytes = 600) {
    at::manual_seed(4);
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (auto shape : std::vector<std::vector<std::int64_t>>{{7, 5}, {5}, {1}, {33, 4}, {129}, {300, 300}})
      named.emplace_back("p" + std::to_string(named.size()),
                         at::randn(shape, at::kDouble).to(type).requires_grad_(true));
    parameters = trainable_parameters(named);
    for (auto& plan : plan_buckets(parameters, bucket_bytes)) {
      auto gradients = at::zeros({plan.numel}, gradient_type(type));
      buckets.push_back(make_bucket(plan, parameters, gradients, 0, 1));
    }
  }

  void draw_gradients(int step) {
    at::manual_seed(100 + step);
    for (auto& bucket : buckets)
      for (const Slot& slot : bucket.plan.slots)
        slot_view(bucket.gradients, slot)
            .copy_(at::randn(slot.shape, at::kDouble) * std::pow(10.0, step % 3 - 2));
  }

  template <typename F>
  void each_slot(F&& call) {
    for (std::size_t b = 0; b < buckets.size(); ++b)
      for (const Slot& slot : buckets[b].plan.slots) call(b, slot);
  }

  double padding() {  // everything outside the slots must be zero
    double sum = 0;
    for (auto& bucket : buckets) {
      at::Tensor rest = bucket.master.clone();
      for (const Slot& slot : bucket.plan.slots) slot_view(rest, slot).zero_();
      sum += rest.abs().sum().item<double>();
    }
    return sum;
  }
};

double relative_distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

// Runs our optimizer and LibTorch's; returns the largest difference relative to the largest value.
template <typename Theirs, typename Options>
double compare(at::ScalarType type, Optimizer& ours, Options decaying, Options plain, double gradient_scale) {
  Workbench setup(type, gradient_scale == 1 ? 600 : 1 << 20);  // many buckets, and many slots in one
  std::vector<at::Tensor> with_decay, without;
  std::vector<at::Tensor> copies(setup.parameters.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    copies[i] = setup.parameters[i].tensor.detach().clone().requires_grad_(true);
    (setup.parameters[i].decays ? with_decay : without).push_back(copies[i]);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(with_decay, std::make_unique<Options>(decaying));
  groups.emplace_back(without, std::make_unique<Options>(plain));
  Theirs theirs(groups, plain);  // LibTorch fills fields that hold their default from these
  double worst = 0;
  for (int step = 0; step < 12; ++step) {
    setup.draw_gradients(step);
    setup.each_slot([&](std::size_t b, const Slot& slot) {
      copies[slot.index].mutable_grad() = slot_view(setup.buckets[b].gradients, slot) * gradient_scale;
    });
    ours.update(setup.buckets, gradient_scale);
    theirs.step();
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const auto difference = (setup.parameters[i].tensor - copies[i]).detach().abs().max().item<double>();
      worst = std::max(worst, difference / copies[i].detach().abs().max().item<double>());
    }
  }
  EXPECT_EQ(ours.updates(), 12);
  EXPECT_EQ(setup.padding(), 0);
  return worst;
}

// 12 steps of a handful of roundings each, on values near 1.
double bound(at::ScalarType type) { return 12 * 8 * (type == at::kDouble ? 0x1p-53 : 0x1p-24); }

TEST(AdamW, EqualsLibTorch) {
  for (auto type : {at::kDouble, at::kFloat})
    for (double scale : {1.0, 0.125}) {
      const AdamWOptions options{
          .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.2};
      auto theirs = [&](double decay) {
        return torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).eps(1e-6).weight_decay(decay);
      };
      auto ours = adamw(options);
      EXPECT_LT(compare<torch::optim::AdamW>(type, *ours, theirs(0.2), theirs(0), scale), bound(type));
      // The comparison can fail: one option changed.
      auto wrong =
          adamw({.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1});
      EXPECT_GT(compare<torch::optim::AdamW>(type, *wrong, theirs(0.2), theirs(0), scale), bound(type));
    }
}

// Every option another one before each update, as torch.optim.AdamW takes it from its parameter groups.
double compare_changing(at::ScalarType type, bool keeps_the_first_betas) {
  Workbench setup(type);
  std::vector<at::Tensor> copies[2], all(setup.parameters.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = setup.parameters[i].tensor.detach().clone().requires_grad_(true);
    copies[setup.parameters[i].decays ? 0 : 1].push_back(all[i]);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& of : copies) groups.emplace_back(of, std::make_unique<torch::optim::AdamWOptions>());
  torch::optim::AdamW theirs(groups, torch::optim::AdamWOptions());
  const auto ours = adamw({});
  double worst = 0;
  for (int step = 0; step < 12; ++step) {
    AdamWOptions options{.learning_rate = 0.01 / (1 + step % 4),
                         .beta1 = 0.8 + 0.015 * step,
                         .beta2 = 0.999 - 0.01 * (step % 5),
                         .epsilon = step % 2 == 0 ? 1e-12 : 1e-4,
                         .weight_decay = 0.1 * (step % 3)};
    for (std::size_t g = 0; g < 2; ++g)
      static_cast<torch::optim::AdamWOptions&>(theirs.param_groups()[g].options())
          .lr(options.learning_rate)
          .betas({options.beta1, options.beta2})
          .eps(options.epsilon)
          .weight_decay(g == 0 ? options.weight_decay : 0);
    if (keeps_the_first_betas) options.beta1 = 0.8, options.beta2 = 0.999;
    ours->set_options(options);
    EXPECT_EQ(ours->learning_rate(), options.learning_rate);
    setup.draw_gradients(step);
    setup.each_slot([&](std::size_t b, const Slot& slot) {
      all[slot.index].mutable_grad() = slot_view(setup.buckets[b].gradients, slot).clone();
    });
    ours->update(setup.buckets, 1);
    theirs.step();
    for (std::size_t i = 0; i < all.size(); ++i)
      worst = std::max(worst, relative_distance(setup.parameters[i].tensor.detach(), all[i].detach()));
  }
  return worst;
}

TEST(AdamW, TakesOtherOptionsBeforeEachUpdate) {
  EXPECT_LT(compare_changing(at::kDouble, false), 1e-12);
  EXPECT_LT(compare_changing(at::kFloat, false), bound(at::kFloat));
  EXPECT_GT(compare_changing(at::kDouble, true), 1e-4);
  const auto optimizer = adamw({.learning_rate = 0.5});
  EXPECT_THROW(optimizer->set_options({.learning_rate = 0.1, .beta1 = 1}), ConfigError);
  EXPECT_EQ(optimizer->learning_rate(), 0.5) << "a refused call changes nothing";
}

// Gradients of 1e-9: an epsilon of 1e-8 would make the first update a tenth of the learning rate.
TEST(AdamW, HonoursASmallEpsilon) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    Workbench setup(type);
    const at::Tensor before = setup.buckets[0].master.clone();
    for (auto& bucket : setup.buckets) bucket.gradients.fill_(1e-9);
    const auto optimizer = adamw({});
    optimizer->set_options({.learning_rate = 0.01, .epsilon = 1e-12, .weight_decay = 0});
    optimizer->update(setup.buckets, 1);
    const at::Tensor moved = slot_view(before - setup.buckets[0].master, setup.buckets[0].plan.slots[0]);
    EXPECT_LT((moved / 0.01 - 1 / (1 + 1e-3)).abs().max().item<double>(), type == at::kDouble ? 1e-12 : 1e-4);
  }
}

TEST(Sgd, EqualsLibTorch) {
  for (auto type : {at::kDouble, at::kFloat})
    for (auto [momentum, scale] : {std::pair(0.0, 1.0), {0.9, 1.0}, {0.9, 0.5}}) {
      auto theirs = [momentum_ = momentum](double decay) {
        return torch::optim::SGDOptions(0.05).momentum(momentum_).weight_decay(decay);
      };
      auto ours = sgd({.learning_rate = 0.05, .momentum = momentum, .weight_decay = 0.3});
      EXPECT_LT(compare<torch::optim::SGD>(type, *ours, theirs(0.3), theirs(0), scale), bound(type));
      auto wrong = sgd({.learning_rate = 0.05, .momentum = 0.5, .weight_decay = 0.3});
      EXPECT_GT(compare<torch::optim::SGD>(type, *wrong, theirs(0.3), theirs(0), scale), bound(type));
    }
}

// The code for other devices, run on the CPU: equal within the roundings of the fused pass.
TEST(ByLibTorch, EqualsTheFusedPasses) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    Workbench fused(type), plain(type);
    const kernels::AdamW adam{
        .gradient_scale = 0.5,
        .keep = 0.99,
    };
    const kernels::Sgd sgd_scalars{
        .gradient_scale = 0.5, .learning_rate = 0.02, .momentum = 0.9, .weight_decay = 0.1};
    std::vector<at::Tensor> m2, v2, b2;
    for (auto* state : {&m2, &v2, &b2}) ensure_state(*state, plain.buckets);
    auto ours = adamw({.learning_rate = 0.02,
                       .beta1 = adam.beta1,
                       .beta2 = adam.beta2,
                       .epsilon = adam.epsilon,
                       .weight_decay = 0.5});
    auto moving = sgd({.learning_rate = 0.02, .momentum = 0.9, .weight_decay = 0.1});
    for (int step = 0; step < 4; ++step) {
      fused.draw_gradients(step);
      plain.draw_gradients(step);
      const double t = step + 1;
      kernels::AdamW scalars = adam;
      scalars.step_size = 0.02 / (1 - std::pow(adam.beta1, t));
      scalars.inverse_root_correction = 1 / std::sqrt(1 - std::pow(adam.beta2, t));
      ours->update(fused.buckets, 0.5);
      moving->update(fused.buckets, 0.5);
      for (std::size_t i = 0; i < plain.buckets.size(); ++i) {
        Bucket& bucket = plain.buckets[i];
        scalars.keep = 1 - 0.02 * 0.5;
        for (const LongRun& run : long_runs_of(bucket))
          by_libtorch::adamw(scalars, bucket, m2[i], v2[i], run);
        for (const LongRun& run : long_runs_of(bucket)) by_libtorch::sgd(sgd_scalars, bucket, &b2[i], run);
      }
    }
    EXPECT_EQ(plain.padding(), 0);
    for (std::size_t i = 0; i < plain.buckets.size(); ++i) {
      const auto difference = [](const at::Tensor& a, const at::Tensor& other) {
        return ((a - other).abs().max() / other.abs().max()).item<double>();
      };
      EXPECT_LT(difference(plain.buckets[i].master, fused.buckets[i].master), bound(type))
          << c10::toString(type);
      if (type == at::kBFloat16) {
        EXPECT_TRUE(at::equal(plain.buckets[i].parameters, plain.buckets[i].master.to(at::kBFloat16)));
      }
    }
  }
}

TEST(AdamW, KeepsFp32MastersOfBf16Parameters) {
  Workbench rough(at::kBFloat16), fine(at::kFloat);
  fine.each_slot([&](std::size_t b, const Slot& slot) {  // the same start
    slot_view(fine.buckets[b].master, slot).copy_(rough.parameters[slot.index].tensor.detach());
  });
  auto a = adamw({.learning_rate = 1e-3}), b = adamw({.learning_rate = 1e-3});
  for (int step = 0; step < 5; ++step) {
    rough.draw_gradients(step);
    fine.draw_gradients(step);
    a->update(rough.buckets, 0.5);
    b->update(fine.buckets, 0.5);
  }
  for (std::size_t i = 0; i < fine.buckets.size(); ++i) {
    EXPECT_TRUE(at::equal(rough.buckets[i].master, fine.buckets[i].master));
    EXPECT_TRUE(at::equal(rough.buckets[i].parameters, fine.buckets[i].master.to(at::kBFloat16)));
  }
}

TEST(Optimizer, StateSurvivesACopyBitForBit) {
  for (auto make : {+[]() -> std::unique_ptr<Optimizer> { return adamw({.learning_rate = 0.02}); },
                    +[] { return sgd({.learning_rate = 0.02, .momentum = 0.9}); }}) {
    Workbench straight(at::kFloat), resumed(at::kFloat, 1 << 20);  // resumed has other buckets
    ASSERT_NE(straight.buckets.size(), resumed.buckets.size());
    auto whole = make(), second = make();
    for (int step = 0; step < 3; ++step) {
      straight.draw_gradients(step);
      whole->update(straight.buckets, 1);
    }
    auto saved = whole->state(straight.buckets), loaded = second->state(resumed.buckets);
    ASSERT_EQ(saved.size(), loaded.size());
    for (auto& [key, flats] : loaded)
      resumed.each_slot([&](std::size_t b, const Slot& slot) {
        straight.each_slot([&](std::size_t b2, const Slot& other) {
          if (other.name == slot.name) slot_view(flats[b], slot).copy_(slot_view(saved.at(key)[b2], other));
        });
      });
    second->set_updates(whole->updates());
    for (std::size_t i = 0; i < straight.parameters.size(); ++i)
      resumed.parameters[i].tensor.data().copy_(straight.parameters[i].tensor.data());
    for (int step = 3; step < 6; ++step) {
      straight.draw_gradients(step);
      resumed.each_slot([&](std::size_t b, const Slot& slot) {
        straight.each_slot([&](std::size_t b2, const Slot& other) {
          if (other.name == slot.name)
            slot_view(resumed.buckets[b].gradients, slot)
                .copy_(slot_view(straight.buckets[b2].gradients, other));
        });
      });
      whole->update(straight.buckets, 1);
      second->update(resumed.buckets, 1);
    }
    for (std::size_t i = 0; i < straight.parameters.size(); ++i)
      EXPECT_TRUE(at::equal(straight.parameters[i].tensor, resumed.parameters[i].tensor)) << i;
  }
  Workbench setup(at::kFloat);
  EXPECT_TRUE(sgd({})->state(setup.buckets).empty());
}

// ---- groups ----

// The parameters of the workbench are p0 [7, 5], p1 [5], p2 [1], p3 [33, 4], p4 [129] and p5 [300, 300].
const std::vector<ParameterGroup> kGroups = {{.pattern = "*1", .rate = 0.25, .weight_decay = 0.4},
                                             {.pattern = "p4", .rate = 3},
                                             {.pattern = "p0", .weight_decay = 0},
                                             {.pattern = "p5*", .rate = 0}};

// Ours with these groups against LibTorch's optimizer with a group for each parameter: {rate, weight decay}.
template <typename Theirs, typename Options>
double compare_groups(at::ScalarType type, Optimizer& ours, const Options& base, double decay,
                      std::int64_t bucket_bytes) {
  Workbench setup(type, bucket_bytes);
  const std::pair<double, double> wanted[] = {{1, 0}, {0.25, 0.4}, {1, 0}, {1, decay}, {3, 0}, {0, decay}};
  std::vector<at::Tensor> copies;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t i = 0; i < setup.parameters.size(); ++i) {
    copies.push_back(setup.parameters[i].tensor.detach().clone().requires_grad_(true));
    Options own = base;
    own.lr(base.lr() * wanted[i].first).weight_decay(wanted[i].second);
    groups.emplace_back(std::vector<at::Tensor>{copies[i]}, std::make_unique<Options>(own));
  }
  Options others = base;  // LibTorch fills fields that hold their default from these
  Theirs theirs(groups, others.weight_decay(0));
  double worst = 0;
  for (int step = 0; step < 12; ++step) {
    setup.draw_gradients(step);
    setup.each_slot([&](std::size_t b, const Slot& slot) {
      copies[slot.index].mutable_grad() = slot_view(setup.buckets[b].gradients, slot).clone();
    });
    const double rate = base.lr() / (1 + step % 3);  // as a schedule does
    ours.set_learning_rate(rate);
    for (std::size_t g = 0; g < copies.size(); ++g)
      static_cast<Options&>(theirs.param_groups()[g].options()).lr(rate * wanted[g].first);
    ours.update(setup.buckets, 1);
    theirs.step();
    for (std::size_t i = 0; i < copies.size(); ++i)
      worst = std::max(worst, relative_distance(setup.parameters[i].tensor.detach(), copies[i].detach()));
  }
  EXPECT_EQ(setup.padding(), 0);
  return worst;
}

TEST(Groups, AreThoseOfLibTorch) {
  const auto adam = torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).eps(1e-6);
  const auto plain = torch::optim::SGDOptions(0.05).momentum(0.9);
  const auto adam_of = [](std::vector<ParameterGroup> groups) {
    return adamw({.learning_rate = 0.01,
                  .beta1 = 0.9,
                  .beta2 = 0.95,
                  .epsilon = 1e-6,
                  .weight_decay = 0.2,
                  .groups = std::move(groups)});
  };
  const auto sgd_of = [](std::vector<ParameterGroup> groups) {
    return sgd({.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 0.3, .groups = std::move(groups)});
  };
  for (const auto type : {at::kDouble, at::kFloat})
    for (const std::int64_t bytes : {1, 600, 1 << 20}) {
      const auto adam_error = [&](std::vector<ParameterGroup> groups) {
        return compare_groups<torch::optim::AdamW>(type, *adam_of(std::move(groups)), adam, 0.2, bytes);
      };
      const auto sgd_error = [&](std::vector<ParameterGroup> groups) {
        return compare_groups<torch::optim::SGD>(type, *sgd_of(std::move(groups)), plain, 0.3, bytes);
      };
      EXPECT_LT(adam_error(kGroups), bound(type)) << bytes;
      EXPECT_LT(sgd_error(kGroups), bound(type)) << bytes;
      // Planted: one group fewer, and each setting of one changed.
      for (std::size_t left = 0; left < kGroups.size(); ++left) {
        auto fewer = kGroups;
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(left));
        EXPECT_GT(adam_error(fewer), 1e-3) << left;
        EXPECT_GT(sgd_error(fewer), 1e-3) << left;
      }
      auto wrong = kGroups;
      wrong[0].weight_decay = std::nullopt;  // a vector then has none
      EXPECT_GT(adam_error(wrong), 1e-4);
      EXPECT_GT(sgd_error(wrong), 1e-4);
    }
}

TEST(Groups, OfADeviceDivideItsLongRuns) {
  Workbench setup(at::kFloat, 1 << 20);
  ASSERT_EQ(setup.buckets.size(), 1u);
  const Bucket& bucket = setup.buckets[0];
  EXPECT_EQ(long_runs_of(bucket).size(), 1u);
  const auto runs = long_runs_of(bucket, [](const Slot& slot) {
    return Individual{.decays = slot.decays, .group = slot.name == "p3" ? 0 : -1};
  });
  ASSERT_EQ(runs.size(), 3u);  // p5 and p4, p3, the rest
  std::int64_t end = 0;
  for (const LongRun& run : runs) {
    EXPECT_EQ(run.range.begin, end);
    end = run.range.end;
    for (const auto& part : run.parts) EXPECT_EQ(part.of.group, run.parts.front().of.group);
  }
  EXPECT_EQ(end, bucket.plan.numel);
  EXPECT_EQ(runs[1].parts.front().of.group, 0);
}

TEST(Groups, AreRefusedWhereTheySayTwoThingsOrNothing) {
  using ::testing::HasSubstr;
  const auto told = [](std::vector<ParameterGroup> groups) {
    return error_testing::error_of([&] { adamw({.groups = groups}); });
  };
  EXPECT_THAT(told({{.pattern = ""}}), HasSubstr("a pattern of 0 characters"));
  EXPECT_THAT(told({{.pattern = std::string(1001, '*')}}), HasSubstr("a pattern of 1001 characters"));
  EXPECT_THAT(told({{.pattern = "a"}, {.pattern = "a"}}), HasSubstr("a, given twice"));
  for (const double number : {-1.0, double(NAN), double(INFINITY)}) {
    EXPECT_THAT(told({{.pattern = "a", .rate = number}}), HasSubstr("a with rate"));
    EXPECT_THAT(told({{.pattern = "a", .weight_decay = number}}), HasSubstr("a with weight_decay"));
    EXPECT_THAT(error_testing::error_of([&] { sgd({.groups = {{.pattern = "a", .rate = number}}}); }),
                HasSubstr("SGD groups: found a with rate"));
  }
  Workbench setup(at::kFloat);
  const auto optimizer = adamw({.groups = {{.pattern = "p*"}, {.pattern = "*3"}}});
  EXPECT_THAT(error_testing::error_of([&] { optimizer->update(setup.buckets, 1); }),
              HasSubstr("p3 in two groups, p* and *3"));
  const auto later = adamw({});
  later->update(setup.buckets, 1);
  EXPECT_THAT(error_testing::error_of([&] {
                later->set_options({.groups = {{.pattern = "p*"}, {.pattern = "*3"}}});
              }),
              HasSubstr("p3 in two groups"));
  later->update(setup.buckets, 1);  // a refused call changes nothing

  const std::vector<std::pair<std::string, at::Tensor>> named = {
      {"a.weight", at::zeros({1}).requires_grad_()}, {"frozen.weight", at::zeros({1})}};
  check_groups({{.pattern = "a.*"}}, named);
  EXPECT_THAT(error_testing::error_of([&] { check_groups({{.pattern = "b.*"}}, named); }),
              HasSubstr("b.*, which fits no trained parameter"));
  EXPECT_THAT(error_testing::error_of([&] { check_groups({{.pattern = "frozen.*"}}, named); }),
              HasSubstr("fits no trained"));
  EXPECT_THAT(error_testing::error_of([&] {
                check_groups({{.pattern = "a.*"}, {.pattern = "*.weight"}}, named);
              }),
              HasSubstr("a.weight in two groups, a.* and *.weight"));
}

TEST(Optimizer, RefusesImpossibleOptions) {
  EXPECT_THROW(adamw({.beta1 = 1}), ConfigError);
  EXPECT_THROW(adamw({.beta2 = -0.1}), ConfigError);
  EXPECT_THROW(adamw({.epsilon = 0}), ConfigError);
  EXPECT_THROW(adamw({.weight_decay = NAN}), ConfigError);
  EXPECT_THROW(sgd({.momentum = 1}), ConfigError);
  EXPECT_THROW(sgd({.learning_rate = -1}), ConfigError);
}

TEST(Runs, CoverTheBucketOnceWithTheRightDecay) {
  for (std::int64_t bytes : {1, 600, 1 << 20}) {
    Workbench setup(at::kFloat, bytes);
    for (auto& bucket : setup.buckets) {
      at::Tensor seen = at::zeros({bucket.plan.numel}), decays = at::zeros({bucket.plan.numel});
      for (const auto& run : runs_of(bucket)) {
        seen.narrow(0, run.range.begin, run.range.size()) += 1;
        decays.narrow(0, run.range.begin, run.range.size()) += run.of.decays ? 1 : 0;
      }
      EXPECT_TRUE(at::equal(seen, at::ones_like(seen)));
      for (const Slot& slot : bucket.plan.slots)
        EXPECT_EQ(slot_view(decays, slot).sum().item<double>(), slot.decays ? slot.numel : 0);
    }
  }
}

TEST(Runs, LeaveFrozenSlotsOut) {
  for (std::int64_t bytes : {1, 600, 1 << 20}) {
    Workbench setup(at::kFloat, bytes);
    setup.each_slot([&](std::size_t b, const Slot& slot) {
      for (Slot& own : setup.buckets[b].plan.slots)
        if (own.name == slot.name) own.trained = slot.index % 2 == 0;
    });
    for (auto& bucket : setup.buckets) {
      at::Tensor seen = at::zeros({bucket.plan.numel});
      for (const auto& run : runs_of(bucket)) seen.narrow(0, run.range.begin, run.range.size()) += 1;
      for (const Slot& slot : bucket.plan.slots)
        EXPECT_EQ(slot_view(seen, slot).sum().item<double>(), slot.trained ? slot.numel : 0);
    }
  }
}

// Parameters of the same sizes in another order would get other parameters' moments.
TEST(Optimizer, RefusesTheBucketsOfAnotherLayout) {
  for (auto make :
       {+[]() -> std::unique_ptr<Optimizer> { return adamw({}); }, +[] { return sgd({.momentum = 0.9}); }}) {
    std::vector<NamedParameter> parameters = trainable_parameters(
        {{"a", at::ones({40}).requires_grad_(true)}, {"b", at::ones({40}).requires_grad_(true)}});
    const auto buckets_of = [&](const std::vector<std::size_t>& order) {
      std::vector<Bucket> buckets;
      for (BucketPlan& plan : plan_buckets(parameters, 1 << 20, 0, order)) {
        const auto numel = plan.numel;
        buckets.push_back(make_bucket(std::move(plan), parameters, at::zeros({numel}), 0, 1));
      }
      return buckets;
    };
    auto own = buckets_of({0, 1}), other = buckets_of({1, 0});
    const auto optimizer = make();
    optimizer->state(own);
    optimizer->update(own, 1);
    for (const auto& action : std::vector<std::function<void()>>{[&] { optimizer->update(other, 1); },
                                                                 [&] { optimizer->state(other); }}) {
      try {
        action();
        ADD_FAILURE() << "accepted";
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("with 'b' where the state is that of 'a'"),
                  std::string::npos)
            << error.what();
      }
    }
    optimizer->update(own, 1);
    EXPECT_EQ(optimizer->updates(), 2);
  }
}

// A parameter that joins an optimizer late, or misses updates, has a time of its own.
TEST(AdamW, CountsTheUpdatesOfEachParameter) {
  Workbench setup(at::kDouble, 1);
  const auto optimizer = adamw({.learning_rate = 0.02});
  auto first = std::vector<Bucket>(setup.buckets.begin(), setup.buckets.end() - 1);
  for (int step = 0; step < 3; ++step) {
    setup.draw_gradients(step);
    first[0].plan.slots[0].trained = step != 1;
    optimizer->update(first, 1);
  }
  EXPECT_EQ(optimizer->missed_updates(), (Optimizer::Missed{{first[0].plan.slots[0].name, 1}}));
  optimizer->update(setup.buckets, 1);
  EXPECT_EQ(optimizer->missed_updates(), (Optimizer::Missed{{first[0].plan.slots[0].name, 1},
                                                            {setup.buckets.back().plan.slots[0].name, 3}}));
}

TEST(Schedule, WarmsUpAndDecays) {
  const Schedule cosine{.kind = Schedule::Kind::kCosine, .peak = 2, .warmup = 4, .total = 14, .floor = 0.1};
  EXPECT_DOUBLE_EQ(cosine.at(0), 2.0 / 5);
  EXPECT_DOUBLE_EQ(cosine.at(3), 8.0 / 5);
  EXPECT_DOUBLE_EQ(cosine.at(4), 2);
  EXPECT_DOUBLE_EQ(cosine.at(9), 2 * (0.1 + 0.9 * 0.5));  // half way down
  EXPECT_DOUBLE_EQ(cosine.at(14), 0.2);
  EXPECT_DOUBLE_EQ(cosine.at(1000), 0.2);
  const Schedule constant{
      .kind = Schedule::Kind::kConstant, .peak = 3, .warmup = 2, .total = 10, .floor = 0.1};
  EXPECT_DOUBLE_EQ(constant.at(0), 1);
  EXPECT_DOUBLE_EQ(constant.at(9), 3);
  const Schedule all_warmup{.peak = 1, .warmup = 5, .total = 5};
  EXPECT_DOUBLE_EQ(all_warmup.at(5), 1);
}

// Four steps of warm-up in 20, of a peak of 3 and a floor of 0.2. Each wanted number is written out.
TEST(Schedule, OfEachKindHasItsValuesAtTheBorders) {
  using Kind = Schedule::Kind;
  using Shape = Schedule::Shape;
  const auto of = [](Kind kind, std::int64_t decay = 0, Shape shape = Shape::kLinear) {
    return Schedule{
        .kind = kind, .peak = 3, .warmup = 4, .total = 20, .floor = 0.2, .decay = decay, .shape = shape};
  };
  const double pi = std::acos(-1.0);
  struct Row {
    const char* name;
    Schedule schedule;
    std::vector<std::pair<std::int64_t, double>> wanted;  // fraction of the peak
  };
  const Row rows[] = {
      {"cosine", of(Kind::kCosine), {{4, 1}, {5, 0.2 + 0.4 * (1 + std::cos(pi / 16))}, {12, 0.6}}},
      {"linear", of(Kind::kLinear), {{4, 1}, {5, 1 - 0.8 / 16}, {12, 0.6}, {19, 0.2 + 0.8 / 16}}},
      {"constant", of(Kind::kConstant), {{4, 1}, {12, 1}, {19, 1}, {20, 1}, {500, 1}}},
      {"constant, decay", of(Kind::kConstant, 5), {{14, 1}, {15, 1}, {16, 0.84}, {19, 0.36}, {20, 0.2}}},
      {"wsd", of(Kind::kWsd, 5), {{4, 1}, {14, 1}, {15, 1}, {16, 0.84}, {19, 0.36}, {20, 0.2}, {99, 0.2}}},
      {"wsd, cosine", of(Kind::kWsd, 4, Shape::kCosine), {{16, 1}, {18, 0.6}, {20, 0.2}}},
      {"wsd, 1-sqrt", of(Kind::kWsd, 4, Shape::kOneMinusSqrt), {{16, 1}, {17, 0.6}, {20, 0.2}, {21, 0.2}}},
      {"wsd, no stable part", of(Kind::kWsd, 16), {{4, 1}, {12, 0.6}, {19, 0.25}, {20, 0.2}}}};
  for (const Row& row : rows) {
    for (std::int64_t step = 0; step < 4; ++step)
      EXPECT_DOUBLE_EQ(row.schedule.at(step), 3 * 0.2 * static_cast<double>(step + 1)) << row.name;
    for (const auto& [step, wanted] : row.wanted)
      EXPECT_NEAR(row.schedule.at(step), 3 * wanted, 1e-14) << row.name << ", step " << step;
    for (std::int64_t step = 4; step < 30; ++step)
      EXPECT_LE(row.schedule.at(step + 1), row.schedule.at(step)) << row.name << ", step " << step;
  }
  for (const Schedule& wrong :
       {of(Kind::kWsd), of(Kind::kWsd, -1), of(Kind::kWsd, 17), of(Kind::kConstant, 17)})
    EXPECT_THAT(error_testing::error_of([&] { wrong.at(0); }),
                ::testing::HasSubstr("steps in 20, 4 of them"));
  EXPECT_DOUBLE_EQ(of(Kind::kCosine, 17).at(12), 3 * 0.6) << "its decay is not looked at";
}

}  // namespace
}  // namespace isograd
