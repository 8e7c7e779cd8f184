#include "train/memory.hpp"

#include <gmock/gmock.h>

#include <cmath>

#include "train/metrics.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

// Multiplications and additions of the model's products, one by one: each matrix that a token goes through,
// forward and twice in backward; for each attended pair a product of two heads' channels and a weighted sum
// of them.
double counted_flops(DecoderLM& model, const MicroBatches& batches) {
  const DecoderConfig& shape = model.config();
  double weights = 0;
  for (const auto& [name, tensor] : model.named())
    if (tensor.dim() == 2 && (name != "model.embed_tokens.weight" || shape.tied_output))
      weights += static_cast<double>(tensor.numel());
  double flops = 0;
  for (const Batch& batch : batches)
    for (std::size_t f = 1; f < batch.cu_seqlens.size(); ++f)
      for (std::int64_t i = 0; i < batch.cu_seqlens[f] - batch.cu_seqlens[f - 1]; ++i) {
        flops += 3 * 2 * weights;
        for (std::int64_t j = 0; j <= i; ++j)
          flops += 3.0 * static_cast<double>(shape.layers * shape.heads *
                                             (2 * shape.head_dim + 2 * shape.head_dim));
      }
  return flops;
}

class Utilisation : public testing_runs::TinyRuns {};

TEST_F(Utilisation, FlopsOfEachStepAreThoseOfTheWholeBatchOnAnyRanks) {
  for (const bool tied : {false, true})
    for (const int ranks : {1, 2, 3, 5}) {
      RunConfig config = tiny("run");
      config.overwrite = true;
      config.model.shape.tied_output = tied;
      config.run.peak_tflops = 1e-9;  // 1000 FLOP/s per rank, so that the MFU is the number of counted FLOPs
      const Run made = run(config, ranks);
      const World alone;
      Group group = alone.group;
      const auto task = make_task(config, group);
      const auto loader = task->make_loader(0, 1);
      DecoderConfig shape = config.model.shape;
      DecoderLM model(shape, at::kFloat, 0);
      double all = 0, seconds = 0;
      for (const StepEvent& step : made.steps) {
        const double counted = counted_flops(model, loader->whole_step(position_of_step(*loader, step.step)));
        ASSERT_TRUE(step.mfu);
        EXPECT_NEAR(*step.mfu * step.seconds * 1e3 * ranks / counted, 1, 1e-12) << ranks << " ranks";
        all += counted, seconds += step.seconds;
      }
      EXPECT_NEAR(*made.outcomes[0].mfu * seconds * 1e3 * ranks / all, 1, 1e-12);
    }
}

TEST_F(Utilisation, IsInTheLogWithThePerplexity) {
  RunConfig config = tiny("run");
  config.overwrite = true;
  const Run made = run(config, 2);
  std::size_t steps = 0, evaluations = 0;
  for (const MetricRow& row : read_metrics(root_ / "run/metrics.jsonl")) {
    if (row.loss) {
      EXPECT_EQ(*row.mfu, *made.steps[steps++].mfu);
      EXPECT_DOUBLE_EQ(*row.perplexity, std::exp(*row.loss));
    } else {
      EXPECT_DOUBLE_EQ(*row.validation_perplexity, std::exp(*row.validation_loss));
      ++evaluations;
    }
  }
  EXPECT_EQ(steps, 7u);
  EXPECT_GT(evaluations, 0u);
  const std::string report = read_file(made.outcomes[0].report);
  EXPECT_THAT(report, HasSubstr("tflops = 1 of each rank"));
  EXPECT_THAT(report, HasSubstr("validation perplexity"));
  config.loss.kind = "sample_mean";  // exp of a mean over samples is no perplexity
  run(config, 1);
  for (const MetricRow& row : read_metrics(root_ / "run/metrics.jsonl"))
    EXPECT_FALSE(row.perplexity || row.validation_perplexity);
}

TEST(UtilisationPeak, IsKnownWhereRoundsAgree) {
  EXPECT_EQ(*steady_time({{4, 4, 9}, {5, 4, 5}, {6, 5, 6}}), 5);
  EXPECT_FALSE(steady_time({{4, 4, 9}, {5, 4, 5}, {6.1, 7, 6.1}}));  // 6.1 is more than 1.5 times 4
  EXPECT_FALSE(steady_time({{1, 1, 1}, {250, 250, 250}, {1, 1, 1}}));
  EXPECT_FALSE(steady_time({{1, 1, 1}, {std::nan(""), std::nan(""), std::nan("")}, {1, 1, 1}}));
}

TEST_F(Utilisation, PeakIsMeasuredWhereNoneIsGiven) {
  RunConfig config = tiny("run");
  config.run.peak_tflops = 0;
  run_ranks(2, [&](World& world) {
    const Peak peak = find_peak(config, at::kFloat, at::kCPU, world.group);
    // A machine that is busy with other tests is not steady.
    EXPECT_THAT(peak.source,
                HasSubstr(peak.flops_per_second > 0 ? "measured on all ranks at once" : "no MFU"));
    if (peak.flops_per_second > 0) EXPECT_GT(peak.flops_per_second, 1e7);
    at::Tensor both = at::full({1}, peak.flops_per_second, at::kDouble);
    world.group.all_reduce(both);
    EXPECT_EQ(both.item<double>(), 2 * peak.flops_per_second);  // one number on every rank
  });
}

}  // namespace
}  // namespace isograd
