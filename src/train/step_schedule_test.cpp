// In which order a step's micro-batches may run: StepOptions::schedule.
#include <ATen/ATen.h>
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

  Scheduled(Group group, const MicroBatchSchedule& schedule)
      : layout(bucketed(trainable_parameters(model.named()), std::move(group), {.bucket_bytes = 300})),
        step(
            [this](const Batch& batch) -> LossTerms {
              return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
            },
            *layout, mean, *optimizer, {.max_norm = 0, .schedule = schedule}) {}
};

// All forwards first, then the backwards from the last to the first: what a schedule may do.
void backwards_at_the_end(MicroBatchWork& work) {
  for (std::size_t i = 0; i < work.size(); ++i) work.forward(i);
  for (std::size_t i = work.size(); i-- > 0;) work.backward(i, i == 0);
}

TEST(Schedule, AnyScheduleGivesTheGradientOfOneDevice) {
  const auto batches = toy::make_step(3, 4);
  const auto wanted = toy::reference(toy::Model(), batches);
  run_ranks(3, [&](World& world) {
    Scheduled rank(world.group, backwards_at_the_end);
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
}

}  // namespace
}  // namespace isograd
