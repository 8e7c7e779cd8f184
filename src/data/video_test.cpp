// Video files, stores of patches, PNG.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>

#include "data/options.hpp"
#include "data/test_support.hpp"
#include "data/video_testing.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr WriteOptions kMpeg4{.codec = AV_CODEC_ID_MPEG4, .format = AV_PIX_FMT_YUV420P};

VideoOptions options_for(const fs::path& path, VideoGrid patch = {2, 8, 8}) {
  return {.patterns = {path.string()}, .height = 64, .frames_per_second = 0, .max_frames = 0, .patch = patch};
}

class Video : public ::testing::Test {
 protected:
  Folder folder_;
  fs::path write(const std::string& name, const at::Tensor& frames, WriteOptions options = {}) const {
    write_video(folder_ / name, frames, options);
    return folder_ / name;
  }
  std::string error_of(const fs::path& file, const VideoOptions& options) const {
    return config_error([&] { VideoStore::open(options); });
  }
  std::string error_of(const fs::path& file) const { return error_of(file, options_for(file)); }
};

TEST_F(Video, WhatWasWrittenIsReadBack) {
  const at::Tensor frames = numbered_frames(5, 16, 24);
  for (const char* name : {"a.avi", "a.mov", "a.mkv"}) {
    const fs::path file = write(name, frames);
    const at::Tensor read = decode_video(file, options_for(file));
    EXPECT_TRUE(at::equal(read, frames.slice(0, 0, 4))) << name;  // whole patches of two frames
  }
}

TEST_F(Video, FramesAreTakenByTheirTime) {
  const at::Tensor frames = numbered_frames(30, 8, 8);
  for (const char* name : {"a.avi", "a.mkv"}) {  // mkv rounds time stamps to milliseconds
    const fs::path file = write(name, frames, {.frames_per_second = 30});
    for (const auto& [rate, step] : {std::pair{10.0, 3}, {30.0, 1}, {15.0, 2}, {60.0, 1}, {1.0, 30}}) {
      VideoOptions options = options_for(file, {1, 8, 8});
      options.frames_per_second = rate;
      EXPECT_TRUE(at::equal(decode_video(file, options), frames.slice(0, 0, 30, step)))
          << name << " " << rate;
      options.max_frames = 1;
      EXPECT_TRUE(at::equal(decode_video(file, options), frames.slice(0, 0, 1)));
    }
  }
}

TEST_F(Video, FramesAreScaledToWholePatches) {
  const fs::path file = write("a.avi", numbered_frames(2, 40, 72));
  for (const auto& [height, rows, columns] :
       {std::array<std::int64_t, 3>{20, 16, 32}, {1000, 40, 72}, {39, 32, 56}, {8, 8, 16}}) {
    VideoOptions options = options_for(file);
    options.height = height;
    EXPECT_EQ(decode_video(file, options).sizes(), (std::vector<std::int64_t>{2, rows, columns, 3}))
        << height;
  }
  // A single colour is preserved.
  const fs::path plain = write("plain.avi", at::full({2, 40, 72, 3}, 77, at::kByte));
  VideoOptions options = options_for(plain);
  options.height = 20;
  EXPECT_TRUE(decode_video(plain, options).eq(77).all().item<bool>());
}

TEST_F(Video, StoresAreTheSameEachTime) {
  write("b.avi", numbered_frames(4, 16, 16, 1), kMpeg4),
      write("a.mp4", numbered_frames(6, 32, 16, 2), kMpeg4);
  const auto one = VideoStore::open(options_for(folder_.path())),
             two = VideoStore::open(options_for(folder_.path()));
  EXPECT_EQ(one->fingerprint(), two->fingerprint());
  ASSERT_EQ(one->num_videos(), 2);
  EXPECT_EQ(one->name(0), "a.mp4");  // by name
  EXPECT_EQ(one->grid(0), (VideoGrid{3, 4, 2}));
  EXPECT_EQ(one->grid(1), (VideoGrid{2, 2, 2}));
  EXPECT_EQ(one->largest(), (VideoGrid{3, 4, 2}));
  EXPECT_EQ(one->first_token(1), 24);
  EXPECT_EQ(one->num_tokens(), 32);
  VideoOptions other = options_for(folder_.path());
  other.height = 16;
  EXPECT_NE(VideoStore::open(other)->fingerprint(), one->fingerprint());
}

TEST_F(Video, BadFilesAreNamed) {
  EXPECT_THAT(error_of(folder_ / "absent.avi"), HasSubstr("absent.avi"));
  EXPECT_THAT(config_error([&] { decode_video(folder_ / "absent.avi", options_for("")); }),
              AllOf(HasSubstr("absent.avi"), HasSubstr("no such file")));
  const fs::path text = folder_.write("text.avi", "not a video, however long this sentence becomes");
  EXPECT_THAT(error_of(text), AllOf(HasSubstr("text.avi"), HasSubstr("no video format")));
  EXPECT_THAT(error_of(folder_.write("empty.mp4", "")), HasSubstr("empty.mp4"));

  // Only sound: one second of silence.
  std::string wav(
      "RIFF\x24\x1f\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\x40\x1f\0\0", 44);
  wav.append(8000, '\x80');
  EXPECT_THAT(error_of(folder_.write("sound.wav", wav)),
              AllOf(HasSubstr("sound.wav"), HasSubstr("no video stream")));

  const fs::path small = write("small.avi", numbered_frames(4, 6, 24));
  EXPECT_THAT(error_of(small), AllOf(HasSubstr("small.avi"), HasSubstr("24 x 6"), HasSubstr("8 x 8")));
  const fs::path brief = write("brief.avi", numbered_frames(1, 16, 16));
  EXPECT_THAT(error_of(brief), AllOf(HasSubstr("brief.avi"), HasSubstr("1 frames"), HasSubstr("2 frames")));
  const fs::path none = write("none.avi", numbered_frames(0, 16, 16));
  EXPECT_THAT(error_of(none), HasSubstr("none.avi"));
}

// References to other files are never fetched, whatever the names: live streams would wait for ever.
TEST_F(Video, PlaylistsAreNamedAndNotFollowed) {
  const fs::path video = write("video.mkv", numbered_frames(6, 16, 16));
  EXPECT_EQ(decode_video(video, options_for(video)).size(0), 6) << "what they name can be read";
  for (const std::string& named : {video.string(), std::string("video.mkv"), "file:" + video.string()})
    for (const auto& [name, text] : playlists(named))
      EXPECT_THAT(error_of(folder_.write(name, text)), AllOf(HasSubstr(name), HasSubstr("format"))) << text;
  for (const char* itself : {"self.m3u8", "self.mkv", "self.ffconcat"})
    for (const auto& [name, text] : playlists(itself))
      EXPECT_THAT(error_of(folder_.write(itself, text)), AllOf(HasSubstr(itself), HasSubstr("format")))
          << name;
  EXPECT_THAT(
      error_of(folder_.write("live.m3u8", playlists("video.mkv").at("live.m3u8"))),
      AllOf(HasSubstr("\"hls\""), HasSubstr("playlists, scripts and image sequences are not followed")));
  // A name with a number, which FFmpeg takes for a sequence of images.
  const std::string png = encode_png(numbered_frames(1, 16, 16)[0]);
  folder_.write("image-1.png", png), folder_.write("image-%d.png", png);
  EXPECT_THAT(error_of(folder_ / "image-%d.png"), HasSubstr("format"));
}

TEST_F(Video, WhatIsNoRegularFileIsRefusedUnopened) {
  const fs::path fifo = folder_ / "fifo.mp4", link = folder_ / "link.mp4", socket = folder_ / "socket.mkv";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  fs::create_symlink(fifo, link);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  ASSERT_LT(socket.native().size(), sizeof(address.sun_path));
  socket.native().copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  for (const fs::path& file : {fifo, link, socket, fs::path("/dev/zero"), folder_ / "."})
    EXPECT_THAT(config_error([&] { decode_video(file, options_for(file)); }), HasSubstr("no regular file"))
        << file;
  close(listener);
}

// Simulates a file whose frames never arrive in time.
TEST_F(Video, AFrameThatDoesNotComeEndsTheReading) {
  const fs::path video = write("video.mkv", numbered_frames(6, 16, 16));
  const auto within = [&](std::chrono::milliseconds limit) {
    return config_error([&] { decode_video(video, options_for(video), limit); });
  };
  EXPECT_THAT(within(std::chrono::milliseconds(0)),
              AllOf(HasSubstr("video.mkv"), HasSubstr("nothing for 0 s")));
  EXPECT_EQ(within(std::chrono::minutes(1)), "");
}

TEST_F(Video, TruncatedFilesAreNamed) {
  for (const char* name : {"a.avi", "a.mp4", "a.mkv"})
    for (const WriteOptions& how : {kMpeg4, WriteOptions{}}) {
      if (std::string(name) == "a.mp4" && how.codec == AV_CODEC_ID_PNG) continue;
      const fs::path file = write(name, numbered_frames(12, 64, 64), how);
      const auto whole = fs::file_size(file);
      ASSERT_EQ(decode_video(file, options_for(file)).size(0), 12);
      for (const double part : {0.9, 0.6, 0.3, 0.02}) {
        write_video(file, numbered_frames(12, 64, 64), how);
        fs::resize_file(file, static_cast<std::uintmax_t>(part * static_cast<double>(whole)));
        EXPECT_THAT(error_of(file), HasSubstr(name)) << part << ", codec " << how.codec;
      }
    }
}

TEST_F(Video, DamageIsNamed) {
  const fs::path file = write("a.avi", numbered_frames(12, 64, 64));
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekp(static_cast<std::streamoff>(fs::file_size(file) / 2));
  bytes << std::string(64, '\x55');
  bytes.close();
  EXPECT_THAT(error_of(file), AllOf(HasSubstr("a.avi"), HasSubstr("frames")));
}

TEST_F(Video, BadOptionsAreNamed) {
  const fs::path file = write("a.avi", numbered_frames(4, 16, 16));
  const auto with = [&](auto&& change) {
    VideoOptions options = options_for(file);
    change(options);
    return error_of(file, options);
  };
  EXPECT_THAT(with([](VideoOptions& o) { o.patch.h = 0; }), HasSubstr("video.patch_height"));
  EXPECT_THAT(with([](VideoOptions& o) { o.height = 7; }), HasSubstr("video.height"));
  EXPECT_THAT(with([](VideoOptions& o) { o.frames_per_second = -1; }), HasSubstr("video.frames_per_second"));
  EXPECT_THAT(with([](VideoOptions& o) { o.frames_per_second = std::nan(""); }),
              HasSubstr("frames_per_second"));
  EXPECT_THAT(with([](VideoOptions& o) { o.max_frames = 1; }), HasSubstr("video.max_frames"));
  EXPECT_THAT(with([](VideoOptions& o) { o.patterns = {}; }), HasSubstr("at least one"));
}

TEST(VideoPatches, AreInTheOrderSaid) {
  const VideoGrid patch{2, 3, 4}, grid{3, 2, 5};
  const at::Tensor frames = numbered_frames(6, 6, 20);
  const at::Tensor patches = patchify(frames, patch);
  ASSERT_EQ(patches.sizes(), (std::vector<std::int64_t>{30, 72}));
  const auto pixel = frames.accessor<std::uint8_t, 4>();
  std::int64_t token = 0;
  for (std::int64_t t = 0; t < grid.t; ++t)
    for (std::int64_t h = 0; h < grid.h; ++h)
      for (std::int64_t w = 0; w < grid.w; ++w, ++token) {
        std::int64_t element = 0;
        for (std::int64_t f = 0; f < 2; ++f)
          for (std::int64_t y = 0; y < 3; ++y)
            for (std::int64_t x = 0; x < 4; ++x)
              for (std::int64_t c = 0; c < 3; ++c, ++element)
                ASSERT_EQ((patches.accessor<std::uint8_t, 2>()[token][element]),
                          pixel[2 * t + f][3 * h + y][4 * w + x][c]);
      }
  EXPECT_TRUE(at::equal(unpatchify(patches, grid, patch), frames));
  EXPECT_THAT(config_error([&] { unpatchify(patches, {3, 2, 4}, patch); }), HasSubstr("[24, 72]"));
  EXPECT_THAT(config_error([&] { patchify(frames, {4, 3, 4}); }), HasSubstr("whole patches"));
}

TEST(VideoPatches, TokenNumbersNameThem) {
  const VideoGrid patch{2, 4, 4};
  const std::vector<at::Tensor> videos{numbered_frames(4, 8, 12, 1), numbered_frames(2, 4, 4, 2),
                                       numbered_frames(6, 12, 8, 3)};
  const auto store = VideoStore::from_frames(videos, patch);
  std::vector<at::Tensor> all;
  std::int64_t token = 0;
  for (std::int64_t v = 0; v < store->num_videos(); ++v) {
    all.push_back(patchify(videos[static_cast<std::size_t>(v)], patch));
    EXPECT_EQ(store->first_token(v), token);
    const VideoGrid grid = store->grid(v);
    for (std::int64_t t = 0; t < grid.t; ++t)
      for (std::int64_t h = 0; h < grid.h; ++h)
        for (std::int64_t w = 0; w < grid.w; ++w)
          EXPECT_TRUE(at::equal(store->coordinates(at::tensor({token++}, at::kLong)),
                                at::tensor({t, h, w}).view({1, 3})));
  }
  EXPECT_EQ(token, store->num_tokens());
  const at::Tensor numbers = at::tensor({21, 0, 11, 12, 3}, at::kLong);
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor patches = store->patches(numbers, type);
    EXPECT_EQ(patches.scalar_type(), type);
    EXPECT_LE(patches.abs().max().item<double>(), 1);
    if (type != at::kBFloat16) {
      EXPECT_TRUE(
          at::equal(to_bytes(patches), at::cat(all).index_select(0, numbers)));  // an exact round trip
    }
  }
  EXPECT_EQ(store->patches(at::empty({0}, at::kLong), at::kFloat).sizes(),
            (std::vector<std::int64_t>{0, 96}));
  for (const std::int64_t bad : {std::int64_t{-1}, store->num_tokens()})
    EXPECT_THAT(config_error([&] { store->coordinates(at::tensor({bad}, at::kLong)); }),
                HasSubstr("tokens of videos"));
  EXPECT_THAT(config_error([&] { store->grid(3); }), HasSubstr("0 to 2"));
  EXPECT_THAT(config_error([&] { VideoStore::from_frames({}, patch); }), HasSubstr("at least one"));
}

TEST_F(Video, APngIsTheFrame) {
  const at::Tensor frame = numbered_frames(1, 13, 21)[0];
  const fs::path file = folder_.write("frame.png", encode_png(frame));
  EXPECT_TRUE(at::equal(decode_video(file, options_for(file, {1, 1, 1}))[0], frame));
  EXPECT_THAT(config_error([&] { encode_png(frame.to(at::kFloat)); }), HasSubstr("encode_png"));
}

TEST_F(Video, AnAnimatedPngIsItsFrames) {
  for (const std::int64_t count : {1, 5}) {
    const at::Tensor frames = numbered_frames(count, 13, 21);
    const fs::path file = folder_.write("frames.png", "");
    write_apng(file, frames, 12.5);
    EXPECT_TRUE(at::equal(decode_video(file, options_for(file, {1, 1, 1})), frames)) << count;
  }
  const at::Tensor frames = numbered_frames(2, 4, 4);
  EXPECT_THAT(config_error([&] { write_apng("/nowhere/frames.png", frames, 8); }), HasSubstr("/nowhere"));
  EXPECT_THAT(config_error([&] { write_apng("frames.png", frames, 0); }), HasSubstr("frames per second"));
  EXPECT_THAT(config_error([&] { write_apng("frames.png", frames[0], 8); }), HasSubstr("uint8"));
}

}  // namespace
}  // namespace isograd
