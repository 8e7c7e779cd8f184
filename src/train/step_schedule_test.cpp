// In which order a step's micro-batches may run: StepOptions::schedule.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

// A rank whose step leaves the parameters as they are.
struct Scheduled {
  toy::Model model;
  std::unique_ptr<DataParallel> layout;
  std::unique_ptr<Optimizer> optimizer = sgd({.learning_rate = 0});
  TokenMean mean;
  Step step;

  Scheduled(Group group, const MicroBatchSchedule& schedule, std::size_t parts = 1)
      : layout(bucketed(trainable_parameters(model.named()), std::move(group), {.bucket_bytes = 300})),
        step(
            [this](const Batch& batch) -> LossTerms {
              return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
            },
            *layout, mean, *optimizer, {.max_norm = 0, .schedule = schedule, .parts = parts}) {}
};

// All forwards first, then the backwards from the last to the first: what a schedule may do.
void backwards_at_the_end(MicroBatchWork& work) {
  for (std::size_t i = 0; i < work.size(); ++i) work.forward(i);
  for (std::size_t i = work.size(); i-- > 0;) work.backward(i, i == 0);
}

// Gradients of weights are put off by one micro-batch, and the last backward is whole.
void in_halves(MicroBatchWork& work) {
  const std::size_t all = work.size();
  for (std::size_t i = 0; i < all; ++i) {
    work.forward(i);
    if (i + 1 < all) work.backward_inputs(i);
    if (i > 0) work.backward_weights(i - 1, false);
    if (i + 1 == all) work.backward(i, true);
  }
}

TEST(Schedule, AnyScheduleGivesTheGradientOfOneDevice) {
  const auto batches = toy::make_step(3, 4);
  const auto wanted = toy::reference(toy::Model(), batches);
  for (const auto& schedule : {backwards_at_the_end, in_halves})
    run_ranks(3, [&](World& world) {
      Scheduled rank(world.group, schedule);
      EXPECT_NEAR(rank.step(batches[static_cast<std::size_t>(world.rank)]).loss, wanted.loss, 1e-12);
      std::vector<at::Tensor> gradients;
      for (auto& view : rank.layout->views()) gradients.push_back(view.gradient);
      EXPECT_LT(toy::worst_error(gradients, wanted.gradients), 1e-10);
    });
}

TEST(Schedule, AScheduleThatLeavesSomethingOutIsRefused) {
  const auto batches = toy::make_step(1, 3)[0];
  ASSERT_GT(batches.size(), 1u);
  const auto error = [&](const MicroBatchSchedule& schedule) {
    Scheduled rank(Group::solo(), schedule);
    return error_testing::error_of([&] { rank.step(batches); });
  };
  EXPECT_EQ(error(backwards_at_the_end), "no error");
  const auto expect = [&](const MicroBatchSchedule& schedule, const char* what) {
    const std::string said = error(schedule);
    EXPECT_NE(said.find(what), std::string::npos) << said;
    EXPECT_NE(said.find("StepOptions::schedule"), std::string::npos) << said;
  };
  expect([](MicroBatchWork&) {}, "a forward and a backward of each");
  expect([](MicroBatchWork& work) { work.backward(0, false); }, "forward(i) before backward(i)");
  expect(
      [](MicroBatchWork& work) {
        work.forward(0);
        work.backward(0, false);
        work.backward(0, false);
      },
      "each once");
  expect(
      [](MicroBatchWork& work) {
        work.forward(0);
        work.backward(0, true);
      },
      "`last` with the last backward");
  expect([](MicroBatchWork& work) { work.backward_inputs(0); }, "forward(i) before backward_inputs(i)");
  expect(
      [](MicroBatchWork& work) {
        work.forward(0);
        work.backward_weights(0, false);
      },
      "backward_inputs(i) before backward_weights(i)");
  for (const bool whole : {true, false})
    expect(
        [whole](MicroBatchWork& work) {
          work.forward(0);
          work.backward_inputs(0);
          whole ? work.backward(0, false) : work.backward_inputs(0);
        },
        "each once");
  expect(
      [](MicroBatchWork& work) {
        work.forward(0);
        work.backward_inputs(0);
        work.backward_weights(0, false);
        work.backward_weights(0, false);
      },
      "each once");
  expect(
      [](MicroBatchWork& work) {
        work.forward(0);
        work.backward_inputs(0);
        work.backward_weights(0, true);
      },
      "`last` with the last backward");
  expect(
      [](MicroBatchWork& work) {
        for (std::size_t i = 0; i < work.size(); ++i) {
          work.forward(i);
          work.backward_inputs(i);
          if (i > 0) work.backward_weights(i, false);
        }
      },
      "a forward and a backward of each");
}

// What a message counts: backwards that ran, of all parts, or the index of the micro-batch that was asked
// for.
TEST(Schedule, ARefusalSaysWhichMicroBatchOrHowManyBackwards) {
  const auto batches = toy::make_step(1, 4)[0];
  const std::size_t all = batches.size();
  ASSERT_GT(all, 1u);
  const auto error = [&](std::size_t parts, const MicroBatchSchedule& schedule) {
    Scheduled rank(Group::solo(), schedule, parts);
    return error_testing::error_of([&] { rank.step(batches); });
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(error(2, [](MicroBatchWork&) {}),
              HasSubstr(fmt::format("0 of {} backwards ({} micro-batches in 2 parts)", 2 * all, all)));
  const auto one = [](MicroBatchWork& work) {
    work.forward(0);
    work.backward(0, false);
  };
  EXPECT_THAT(error(1, one), HasSubstr(fmt::format("1 of {} backwards", all)));
  EXPECT_THAT(error(1, [](MicroBatchWork& work) { work.backward(1, false); }),
              HasSubstr(fmt::format("micro-batch 1 (they are numbered 0 to {})", all - 1)));
}

// ZeRO-3's units gather their parameters for a whole backward; and work of one's own need not have halves.
TEST(Schedule, HalvesThatThereAreNoneOfAreRefused) {
  struct Wholly : MicroBatchWork {
    std::size_t size() const override { return 1; }
    void forward(std::size_t, std::size_t) override {}
    void backward(std::size_t, bool, std::size_t) override {}
  } work;
  const auto error = [](const std::function<void()>& act) { return error_testing::error_of(act); };
  EXPECT_NE(error([&] { work.backward_inputs(0); }).find("computes backwards whole"), std::string::npos);
  EXPECT_NE(error([&] { work.backward_weights(0, true); }).find("1f1b"), std::string::npos);
}

}  // namespace
}  // namespace isograd
