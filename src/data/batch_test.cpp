// Batches of samples that are not token sequences.
#include "isograd/batch.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BatchOfSamples, CountsOneTargetForEach) {
  const at::Tensor images = at::arange(24).view({3, 2, 2, 2}).to(at::kByte);
  const Batch batch = batch_of_samples({images}, at::tensor({4, -100, 2}, at::kLong), {10, 11, 12});
  EXPECT_THAT(batch.cu_seqlens, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(batch.sample_ids, ElementsAre(10, 11, 12));
  EXPECT_THAT(batch.sample_targets, ElementsAre(1, 0, 1));
  EXPECT_EQ(batch.num_tokens(), 3);
  EXPECT_EQ(batch.num_targets(), 2);
  EXPECT_TRUE(batch.inputs.at(0).equal(images));
  EXPECT_TRUE(to_device(batch, at::kCPU).inputs.at(0).equal(images));
}

// One class per pixel: the targets of a sample are consecutive.
TEST(BatchOfSamples, CountsSeveralTargetsForEach) {
  at::Tensor classes = at::arange(12).view({2, 2, 3});
  classes[1][0][2] = kIgnoreIndex;
  const Batch batch = batch_of_samples({at::zeros({2, 5}), at::ones({2})}, classes, {7, 3});
  EXPECT_THAT(batch.cu_seqlens, ElementsAre(0, 6, 12));
  EXPECT_THAT(batch.sample_targets, ElementsAre(6, 5));
  EXPECT_TRUE(batch.targets.equal(classes.flatten()));
  EXPECT_EQ(batch.tokens.numel(), 12);
  const Batch none = batch_of_samples({at::zeros({0, 5})}, at::zeros({0}, at::kLong), {});
  EXPECT_EQ(none.num_tokens(), 0);
  EXPECT_EQ(none.num_fragments(), 0);
}

TEST(BatchOfSamples, NamesAnInputThatIsNotThere) {
  const Batch one = batch_of_samples({at::ones({2, 3})}, at::zeros({2}, at::kLong), {5, 6});
  EXPECT_EQ(one.inputs[0].size(1), 3);
  const Batch none = empty_batch();
  for (const auto& [batch, said] : {std::pair(&none, "batch.inputs.empty()"), {&one, "found 1 of them"}})
    EXPECT_THAT(error_testing::error_of([&, of = batch] { (void)of->inputs[1]; }), HasSubstr(said));
}

TEST(BatchOfSamples, NamesWhatDoesNotFit) {
  const auto error_of = [](const std::vector<at::Tensor>& inputs, const at::Tensor& targets) {
    return error_testing::error_of([&] { batch_of_samples(inputs, targets, {1, 2}); });
  };
  const at::Tensor targets = at::zeros({2}, at::kLong);
  EXPECT_EQ(error_of({at::zeros({2, 4})}, targets), "no error");
  EXPECT_THAT(error_of({at::zeros({2, 4}), at::zeros({3})}, targets),
              AllOf(HasSubstr("inputs[1]"), HasSubstr("[3]"), HasSubstr("[2, ...]")));
  EXPECT_THAT(error_of({at::Tensor()}, targets), HasSubstr("undefined"));
  EXPECT_THAT(error_of({}, targets.to(at::kFloat)), HasSubstr("[2] of Float"));
  EXPECT_THAT(error_of({}, at::zeros({3}, at::kLong)), HasSubstr("[3] of Long"));
  EXPECT_THAT(error_of({}, {}), HasSubstr("targets"));
}

}  // namespace
}  // namespace isograd
