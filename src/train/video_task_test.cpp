// Runs on videos end to end: the same on every layout, continued bit for bit, refused where they cannot be.
#include <gmock/gmock.h>

#include <cmath>

#include "isograd/checkpoint.hpp"
#include "train/build.hpp"
#include "train/resume.hpp"
#include "train/task.hpp"
#include "train/video_model.hpp"
#include "train/video_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_runs::config_error_of;
using testing_runs::kVideoLayouts;
using testing_runs::write_video;

class VideoRuns : public testing_runs::TinyVideos {};

// Layouts differ in rounding alone; 1e-9 as in Resume.AtAnotherNumberOfRanks.
TEST_F(VideoRuns, IsTheRunOfOneProcess) {
  for (const char* mean : {"token_mean", "sample_mean"}) {
    RunConfig plain = videos(std::string("alone-") + mean, "float64");
    plain.loss.kind = mean;
    const Run alone = run(plain, 1);
    ASSERT_EQ(alone.steps.size(), 7u);
    EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
    EXPECT_GT(alone.outcomes[0].baseline, 1);
    for (const auto& layout : kVideoLayouts) {
      RunConfig config = videos(std::string(layout.name) + mean, "float64");
      config.loss.kind = mean;
      layout.change(config);
      const Run many = run(config, layout.ranks);
      ASSERT_EQ(many.steps.size(), 7u) << layout.name;
      for (std::size_t i = 0; i < 7; ++i) {
        const StepReport &a = many.steps[i].report, &b = alone.steps[i].report;
        EXPECT_EQ(a.census.targets, b.census.targets) << layout.name;
        EXPECT_NEAR(a.loss, b.loss, 1e-9 * b.loss) << layout.name << ", step " << i + 1;
        EXPECT_NEAR(a.norm, b.norm, 1e-9 * b.norm) << layout.name << ", step " << i + 1;
      }
      EXPECT_NEAR(*many.outcomes[0].validation_loss, *alone.outcomes[0].validation_loss, 1e-9) << layout.name;
      EXPECT_NEAR(many.outcomes[0].baseline, alone.outcomes[0].baseline, 1e-12);
    }
  }
}

TEST_F(VideoRuns, SampleMeanIsAnotherLoss) {
  RunConfig tokens = videos("tokens", "float64"), samples = videos("samples", "float64");
  samples.loss.kind = "sample_mean";
  const double a = run(tokens, 1).steps[0].report.loss, b = run(samples, 1).steps[0].report.loss;
  EXPECT_GT(std::abs(a - b), 1e-3);
}

TEST_F(VideoRuns, SavedAndReloadedEqualsUninterrupted) {
  for (const char* dtype : {"float32", "bfloat16"})
    for (const char* layout : {"two", "ring2", "zero3_checkpointed_ring2"}) {
      const auto* found = std::find_if(std::begin(kVideoLayouts), std::end(kVideoLayouts),
                                       [&](const auto& known) { return std::string(layout) == known.name; });
      RunConfig saving = videos(fmt::format("saving-{}-{}", dtype, layout), dtype);
      found->change(saving);
      saving.checkpoint.every = 3;
      saving.checkpoint.keep = 10;
      const Run straight = run(saving, found->ranks);
      RunConfig config = saving;
      config.run.directory += "-resumed";
      const fs::path middle = fs::path(saving.run.directory) / "checkpoints/step-00000003";
      config.checkpoint.resume = middle.string();
      const Run resumed = run(config, found->ranks);
      ASSERT_EQ(resumed.steps.size(), 4u);
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_EQ(resumed.steps[i].report.loss, straight.steps[3 + i].report.loss) << layout << " " << dtype;
      for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json"})
        EXPECT_TRUE(file(resumed.outcomes[0].checkpoint, name) == file(straight.outcomes[0].checkpoint, name))
            << name << " " << layout << " " << dtype;
      EXPECT_FALSE(file(middle, "model.safetensors") ==
                   file(straight.outcomes[0].checkpoint, "model.safetensors"));
    }
}

TEST_F(VideoRuns, AnotherRunIsRefusedByKey) {
  const RunConfig saving = videos("run");
  run(saving, 1);
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    RunConfig config = saving;
    config.checkpoint.resume = "latest";
    change(config);
    return config_error_of([&] { run(config, 2); });
  };
  EXPECT_EQ(refused([](RunConfig&) {}), "no error");
  EXPECT_THAT(refused([](RunConfig& c) { c.video.height = 8; }),
              HasSubstr("video.height: found 8; expected 12"));
  EXPECT_THAT(refused([](RunConfig& c) { c.batch.videos_per_step = 4; }), HasSubstr("batch.videos_per_step"));
  EXPECT_THAT(refused([](RunConfig& c) { c.video.max_frames = 4; }), HasSubstr("video.max_frames"));
  EXPECT_THAT(refused([](RunConfig& c) { c.model.shape.hidden = 8; }), HasSubstr("model.hidden"));
  EXPECT_THAT(refused([](RunConfig& c) { c.run.seed = 4; }), HasSubstr("run.seed"));
  EXPECT_EQ(refused([](RunConfig& c) { c.batch.tokens_per_micro_batch = 7; }), "no error");
  write_video(root_ / "videos/clip0.y4m", 2, 8, 8, 99);
  EXPECT_THAT(refused([](RunConfig&) {}), HasSubstr("checksum of their pixels"));
}

TEST_F(VideoRuns, WhatCannotBeTrainedIsRefusedOnEveryRank) {
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    RunConfig config = videos("refused");
    change(config);
    return config_error_of([&] { run(config, 2); });
  };
  EXPECT_THAT(refused([](RunConfig& c) { c.video.files = {}; }), HasSubstr("video.files"));
  EXPECT_THAT(refused([&](RunConfig& c) { c.video.files = {(root_ / "absent.mp4").string()}; }),
              HasSubstr("absent.mp4"));
  write_file(root_ / "no-video.mp4", "these bytes are no video");
  EXPECT_THAT(refused([&](RunConfig& c) { c.video.files = {(root_ / "no-video.mp4").string()}; }),
              HasSubstr("no-video.mp4"));
  write_video(root_ / "one-frame.y4m", 1, 8, 8, 0);
  EXPECT_THAT(refused([&](RunConfig& c) { c.video.files = {(root_ / "one-frame.y4m").string()}; }),
              HasSubstr("one-frame.y4m"));
  EXPECT_THAT(refused([](RunConfig& c) { c.video.timestep_features = 7; }), HasSubstr("timestep_features"));
  EXPECT_THAT(refused([](RunConfig& c) { c.parallel.cp_ring = 3; }), HasSubstr("parallel.cp_ring"));
  EXPECT_THAT(refused([](RunConfig& c) {
                c.parallel.cp_ulysses = 2;
                c.model.shape.heads = 3;
              }),
              HasSubstr("heads"));
  EXPECT_THAT(refused([](RunConfig& c) { c.batch.videos_per_step = 1; }),
              AllOf(HasSubstr("more ranks than videos"), HasSubstr("batch.videos_per_step=2")));
  const RunConfig text = tiny("text");
  run(text, 1);
  EXPECT_THAT(refused([&](RunConfig& c) {
                c.model.load = (fs::path(text.run.directory) / "checkpoints/step-00000007").string();
              }),
              HasSubstr("model_type"));
}

TEST_F(VideoRuns, GoesOnFromTheWeightsOfAnotherRun) {
  const RunConfig first = videos("first");
  const Run trained = run(first, 1);
  RunConfig second = videos("second");
  second.model.load = trained.outcomes[0].checkpoint.string();
  const Run more = run(second, 2);
  EXPECT_LT(more.steps[0].report.loss, trained.steps[0].report.loss);
}

TEST_F(VideoRuns, TheReportShowsFramesAndLossesByLength) {
  const std::string html = read_file(run(videos("run"), 2).outcomes[0].report);
  EXPECT_THAT(html, HasSubstr("data:image/png;base64,iVBORw0KGgo"));
  EXPECT_THAT(html, HasSubstr("noised, t = 0.7"));
  EXPECT_THAT(html, HasSubstr("Loss by length"));
  EXPECT_THAT(html, HasSubstr("clip3.y4m"));
  EXPECT_THAT(html, HasSubstr("5 videos"));
  EXPECT_THAT(html, HasSubstr("img-src data:"));
}

// New videos of a trained model: as many as asked for, the same by seed, of whole patches.
TEST_F(VideoRuns, GivesNewVideos) {
  const RunConfig config = videos("run");
  const fs::path checkpoint = run(config, 1).outcomes[0].checkpoint;
  EXPECT_TRUE(is_video_model(checkpoint));
  EXPECT_FALSE(is_video_model(root_));
  const auto sample = [&](const char* folder, VideoSampleOptions options) {
    options.steps = 3;
    options.folder = root_ / folder;
    std::vector<std::string> bytes;
    for (const fs::path& file : sample_videos(checkpoint, options)) bytes.push_back(read_file(file));
    return bytes;
  };
  const auto first = sample("one", {.videos = 2, .seed = 4});
  ASSERT_EQ(first.size(), 2u);
  EXPECT_NE(first[0], first[1]);
  EXPECT_EQ(sample("two", {.videos = 2, .seed = 4}), first);
  EXPECT_NE(sample("two", {.seed = 5})[0], first[0]);
  const auto frames_of = [&](const fs::path& file) {
    return decode_video(
        file, {.patterns = {file.string()}, .height = 100, .frames_per_second = 0, .patch = {1, 1, 1}});
  };
  // The largest size of the training videos, for each axis separately.
  EXPECT_EQ(frames_of(root_ / "one/sample-1.png").sizes(), (std::vector<std::int64_t>{8, 12, 16, 3}));
  sample("two", {.frames = 4, .height = 8, .width = 12});
  EXPECT_EQ(frames_of(root_ / "two/sample-0.png").sizes(), (std::vector<std::int64_t>{4, 8, 12, 3}));
  const auto refused = [&](VideoSampleOptions options) {
    return config_error_of([&] { sample("two", options); });
  };
  EXPECT_THAT(refused({.frames = 3}), AllOf(HasSubstr("--frames 3"), HasSubstr("multiple of 2 up to 8")));
  EXPECT_THAT(refused({.width = 20}), AllOf(HasSubstr("--width 20"), HasSubstr("Ask for 16")));
}

TEST(Base64, OfEveryLength) {
  EXPECT_EQ(base64(""), "");
  EXPECT_EQ(base64("f"), "Zg==");
  EXPECT_EQ(base64("fo"), "Zm8=");
  EXPECT_EQ(base64("foo"), "Zm9v");
  EXPECT_EQ(base64("\xff\xfe\xfd\xfc"), "//79/A==");
}

}  // namespace
}  // namespace isograd
