// Runs on videos end to end: the same on every layout, continued bit for bit, refused where they cannot be.
#include <gmock/gmock.h>

#include <cmath>

#include "isograd/checkpoint.hpp"
#include "train/build.hpp"
#include "train/evaluate.hpp"
#include "train/run_folder.hpp"
#include "train/task.hpp"
#include "train/video_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_runs::config_error_of;
using testing_runs::kVideoLayouts;
using testing_runs::VideoLayout;
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
      expect_same_steps(many, alone, 1e-9, 1e-9, layout.name);
      EXPECT_NEAR(*many.outcomes[0].validation_loss, *alone.outcomes[0].validation_loss, 1e-9) << layout.name;
      EXPECT_NEAR(many.outcomes[0].baseline, alone.outcomes[0].baseline, 1e-12);
    }
  }
}

TEST_F(VideoRuns, SavedAndReloadedEqualsUninterrupted) {
  for (const char* dtype : {"float32", "bfloat16"})
    for (const char* name : {"two", "ring2", "zero3_checkpointed_ring2"}) {
      const auto& layout = *std::ranges::find(kVideoLayouts, std::string_view(name), &VideoLayout::name);
      RunConfig config = videos(fmt::format("saving-{}-{}", dtype, name), dtype);
      layout.change(config);
      expect_continued_alike(config, layout.ranks, {"model.safetensors", "optimizer.safetensors"});
    }
}

TEST_F(VideoRuns, AnotherRunIsRefusedByKey) {
  RunConfig config = videos("run");
  run(config, 1);
  config.checkpoint.resume = "latest";
  expect_told(config, {{[](RunConfig&) {}, "no error"},
                       {[](RunConfig& c) { c.video.height = 8; }, "video.height: found 8; expected 12"},
                       {[](RunConfig& c) { c.batch.videos_per_step = 4; }, "batch.videos_per_step"},
                       {[](RunConfig& c) { c.video.max_frames = 4; }, "video.max_frames"},
                       {[](RunConfig& c) { c.model.shape.hidden = 8; }, "model.hidden"},
                       {[](RunConfig& c) { c.run.seed = 4; }, "run.seed"},
                       {[](RunConfig& c) { c.batch.tokens_per_micro_batch = 7; }, "no error"}});
  write_video(root_ / "videos/clip0.y4m", 2, 8, 8, 99);
  expect_told(config, {{[](RunConfig&) {}, "checksum of their pixels"}});
}

TEST_F(VideoRuns, WhatCannotBeTrainedIsRefusedOnEveryRank) {
  write_file(root_ / "no-video.mp4", "these bytes are no video");
  write_video(root_ / "one-frame.y4m", 1, 8, 8, 0);
  std::vector<Told> all;
  for (const char* file : {"absent.mp4", "no-video.mp4", "one-frame.y4m"})
    all.push_back({[&, file](RunConfig& c) { c.video.files = {(root_ / file).string()}; }, file});
  all.push_back({[](RunConfig& c) { c.video.files = {}; }, "video.files"});
  all.push_back({[](RunConfig& c) { c.video.timestep_features = 7; }, "timestep_features"});
  all.push_back({[](RunConfig& c) { c.parallel.cp_ring = 3; }, "parallel.cp_ring"});
  all.push_back({[](RunConfig& c) { c.parallel.cp_ulysses = 2, c.model.shape.heads = 3; }, "heads"});
  for (const char* part : {"more ranks than videos", "batch.videos_per_step=2"})
    all.push_back({[](RunConfig& c) { c.batch.videos_per_step = 1; }, part});
  const std::string text = run(tiny("text"), 1).outcomes[0].checkpoint.string();
  all.push_back({[&](RunConfig& c) { c.model.load = text; }, "model_type"});
  expect_told(videos("refused"), all);
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
