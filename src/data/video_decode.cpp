// Decodes the frames of a video file with FFmpeg's libraries.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "base/refuse.hpp"
#include "data/libav.hpp"
#include "data/video.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using namespace libav;

[[noreturn]] void refuse_video(const fs::path& file, std::string found, std::string expected,
                               std::string action) {
  refuse("video " + file.string(), std::move(found), std::move(expected), std::move(action));
}

[[noreturn]] void damaged(const fs::path& file, const std::string& found) {
  refuse_video(file, found, "a file that decodes whole and without an error",
               "Fetch it again, repair it with `ffmpeg -i FILE -c:v libx264 repaired.mp4`, or leave it out");
}

constexpr std::int64_t kMostPixelsOfFrame = std::int64_t{1}
                                            << 26;  // 8192 x 8192; a few bytes can ask for more

// Containers that hold all of their video themselves. Playlists and scripts (hls, dash, concat, sdp, ...),
// image sequences (image2) and networks are excluded: they name further files, which may never end. A pipe is
// one image. wav and mp3 are included so that they are reported as files without video.
constexpr const char* kContainers =
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,flv,ogg,asf,gif,apng,h264,hevc,obu,ivf,yuv4mpegpipe,mxf,nut,dv,mjpeg,png_pipe,jpeg_pipe,webp_pipe,wav,mp3";

// Reads one file and opens no other.
class Reader {
 public:
  Reader(const fs::path& file, const VideoOptions& options, std::chrono::milliseconds limit)
      : file_(file), options_(options), limit_(limit), input_(file, limit) {
    if (!input_.refusal().empty()) refuse_video(file, input_.refusal(), "a video file", "Check the path");
    const AVInputFormat* container = nullptr;
    int status = av_probe_input_buffer2(input_.io(), &container, file.c_str(), nullptr, 0, 0);
    if (status >= 0 && !av_match_list(container->name, kContainers, ','))
      refuse_video(file, fmt::format("the format \"{}\"", container->name),
                   "a file that holds its video itself, such as MP4, Matroska, WebM, AVI, MPEG or GIF; "
                   "playlists, scripts and image sequences are not followed",
                   "Leave it out, or convert it with `ffmpeg -i FILE -c copy out.mkv`");
    AVDictionary* settings = nullptr;
    av_dict_set(&settings, "format_whitelist", kContainers, 0);  // also for a container within another
    av_dict_set(&settings, "protocol_whitelist", "", 0);
    AVFormatContext* opened = avformat_alloc_context();
    opened->pb = input_.io();
    opened->interrupt_callback = {
        [](void* input) { return static_cast<int>(static_cast<OneFile*>(input)->is_late()); }, &input_};
    opened->io_open = [](AVFormatContext*, AVIOContext**, const char*, int, AVDictionary**) {
      return AVERROR(EACCES);
    };
    if (status >= 0)
      status = avformat_open_input(&opened, file.c_str(), container, &settings);
    else
      avformat_free_context(opened);
    av_dict_free(&settings);
    if (status < 0) damaged(file, because("no video format that can be read", status));
    format_.reset(opened);
    if (const int found = avformat_find_stream_info(opened, nullptr); found < 0)
      damaged(file, because("a damaged header", found));
    open_decoder();
  }

  at::Tensor run() {
    Packet packet(av_packet_alloc());
    Frame frame(av_frame_alloc());
    bool ended = false;
    while (!ended && !enough()) {
      const int status = av_read_frame(format_.get(), packet.get());
      if (input_.is_late()) damaged(file_, late());
      ended = status == AVERROR_EOF;
      if (!ended && status >= 0) count_bytes(*packet);
      if (status < 0 && !ended) damaged(file_, because(after("an error"), status));
      const bool ours = ended || packet->stream_index == stream_->index;
      if (ours) {
        if (!ended && (packet->flags & AV_PKT_FLAG_CORRUPT) != 0)
          damaged(file_, because(after("a packet that is cut off"), 0));
        packets_ += ended ? 0 : 1;
        decode(ended ? nullptr : packet.get(), frame.get());
      }
      av_packet_unref(packet.get());
    }
    if (ended && packets_ < stream_->nb_frames)
      damaged(file_, fmt::format("{} frames, where its header says {}: it is truncated", packets_,
                                 stream_->nb_frames));
    return result();
  }

 private:
  std::string late() const { return after(fmt::format("nothing for {} s", limit_.count() / 1e3)); }

  // A header of a few bytes can name the same bytes of a file as an endless packet.
  void count_bytes(const AVPacket& packet) {
    constexpr std::int64_t kHeader = 8, kTimes = 4, kSmall = 1 << 20;  // no container has smaller headers
    read_ += packet.size + kHeader;
    if (read_ > kTimes * input_.bytes() + kSmall)
      damaged(file_, after(fmt::format("more than {} times the file's {} bytes in packets", kTimes,
                                       input_.bytes())));
  }
  std::string after(const std::string& what) const { return fmt::format("{} after {} frames", what, seen_); }
  std::string because(std::string what, int status) const {
    if (input_.is_late()) return late();
    if (!complaints_.empty()) return fmt::format("{} ({})", what, complaints_.first());
    return status < 0 ? fmt::format("{} ({})", what, text_of(status)) : what;
  }

  void open_decoder() {
    const AVCodec* decoder = nullptr;
    const int index = av_find_best_stream(format_.get(), AVMEDIA_TYPE_VIDEO, -1, -1, &decoder, 0);
    if (index == AVERROR_DECODER_NOT_FOUND)
      refuse_video(file_, "a codec that these libraries of FFmpeg do not have", "one that they can decode",
                   "Re-encode the file with `ffmpeg -i FILE -c:v libx264 out.mp4`, or leave it out");
    if (index < 0 || (format_->streams[index]->disposition & AV_DISPOSITION_ATTACHED_PIC) != 0)  // album art
      refuse_video(file_, "no video stream", "a video file",
                   "Leave the file out; a glob such as dir/*.mp4 chooses files");
    stream_ = format_->streams[index];
    codec_.reset(avcodec_alloc_context3(decoder));
    avcodec_parameters_to_context(codec_.get(), stream_->codecpar);
    codec_->thread_count = 1;
    codec_->max_pixels = kMostPixelsOfFrame;
    codec_->flags |= AV_CODEC_FLAG_BITEXACT;  // the same pixels on every processor
    if (const int status = avcodec_open2(codec_.get(), decoder, nullptr); status < 0)
      damaged(file_, because("a header that its decoder refuses", status));
  }

  void decode(const AVPacket* packet, AVFrame* frame) {
    if (const int status = avcodec_send_packet(codec_.get(), packet); status < 0 && status != AVERROR_EOF)
      damaged(file_, because(after("a damaged packet"), status));
    for (int status = 0; !enough();) {
      status = avcodec_receive_frame(codec_.get(), frame);
      if (status == AVERROR(EAGAIN) || status == AVERROR_EOF) break;
      if (status < 0 || frame->decode_error_flags != 0 || (frame->flags & AV_FRAME_FLAG_CORRUPT) != 0)
        damaged(file_, because(after("a damaged frame"), std::min(status, 0)));
      take(frame);
      input_.renew();
      ++seen_;
      av_frame_unref(frame);
    }
    if (!complaints_.empty()) damaged(file_, because(after("an error"), 0));
  }

  bool enough() const { return options_.max_frames > 0 && taken_ >= options_.max_frames; }

  // Takes the first of several frames in one interval of 1 / frames_per_second.
  bool is_due(const AVFrame* frame) {
    if (options_.frames_per_second == 0) return true;
    AVRational unit = stream_->time_base;
    std::int64_t at = frame->best_effort_timestamp;
    if (at == AV_NOPTS_VALUE) {
      if (stream_->avg_frame_rate.num == 0) return true;
      at = seen_, unit = av_inv_q(stream_->avg_frame_rate);
    }
    if (seen_ == 0) began_ = at;
    // Some files round their time stamps to milliseconds, so a millisecond too early is on time.
    constexpr std::int64_t kRounding = 1000;  // microseconds
    constexpr int kFine = 100000;
    const AVRational microsecond{1, 1000000};
    const std::int64_t interval =
        av_rescale_q_rnd(av_rescale_q(at - began_, unit, microsecond) + kRounding, microsecond,
                         av_inv_q(av_d2q(options_.frames_per_second, kFine)), AV_ROUND_DOWN);
    if (seen_ > 0 && interval <= interval_) return false;
    interval_ = interval;
    return true;
  }

  // Whole patches within the limit and the file's own size; the columns keep the aspect ratio.
  void choose_size(const AVFrame* frame) {
    const VideoGrid patch = options_.patch;
    if (frame->height < patch.h || frame->width < patch.w)
      refuse_video(file_, fmt::format("frames of {} x {} pixels", frame->width, frame->height),
                   fmt::format("at least one patch, {} x {}", patch.w, patch.h),
                   "Leave the file out, or use smaller patches");
    rows_ = std::min<std::int64_t>(options_.height, frame->height) / patch.h * patch.h;
    const double wide = static_cast<double>(frame->width) * static_cast<double>(rows_) / frame->height;
    columns_ = std::max<std::int64_t>(1, std::llround(wide / static_cast<double>(patch.w))) * patch.w;
    columns_ = std::min(columns_, frame->width / patch.w * patch.w);
    scaled_.reset(av_frame_alloc());
    scaled_->format = AV_PIX_FMT_RGB24;
    scaled_->width = static_cast<int>(columns_), scaled_->height = static_cast<int>(rows_);
    if (av_frame_get_buffer(scaled_.get(), 0) < 0)
      refuse_video(file_, "no memory for a frame", "some", "Use less");
  }

  void take(const AVFrame* frame) {
    if (!is_due(frame)) return;
    if (!scaled_) choose_size(frame);
    constexpr int kExact = SWS_AREA | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_BITEXACT;
    scaler_.reset(sws_getCachedContext(scaler_.release(), frame->width, frame->height,
                                       static_cast<AVPixelFormat>(frame->format), scaled_->width,
                                       scaled_->height, AV_PIX_FMT_RGB24, kExact, nullptr, nullptr, nullptr));
    if (!scaler_ || sws_scale(scaler_.get(), frame->data, frame->linesize, 0, frame->height, scaled_->data,
                              scaled_->linesize) < 0)
      damaged(file_, because(after("a frame that cannot be scaled"), 0));
    const auto row = static_cast<std::size_t>(3 * columns_);
    pixels_.resize(pixels_.size() + static_cast<std::size_t>(rows_) * row);
    std::uint8_t* to = pixels_.data() + pixels_.size() - static_cast<std::size_t>(rows_) * row;
    for (std::int64_t y = 0; y < rows_; ++y)
      std::memcpy(to + static_cast<std::size_t>(y) * row, scaled_->data[0] + y * scaled_->linesize[0], row);
    ++taken_;
  }

  at::Tensor result() const {
    if (seen_ == 0) refuse_video(file_, "no frame", "a video with frames", "Leave the file out");
    const std::int64_t whole = taken_ / options_.patch.t * options_.patch.t;
    if (whole == 0)
      refuse_video(file_,
                   fmt::format("{} frames of {} taken at {} frames per second", taken_, seen_,
                               options_.frames_per_second),
                   fmt::format("at least one patch, {} frames", options_.patch.t),
                   "Leave the file out, take more frames per second, or use patches of fewer frames");
    at::Tensor frames = at::empty({whole, rows_, columns_, 3}, at::kByte);
    std::memcpy(frames.data_ptr(), pixels_.data(), static_cast<std::size_t>(frames.numel()));
    return frames;
  }

  const fs::path file_;
  const VideoOptions& options_;
  const std::chrono::milliseconds limit_;
  OneFile input_;
  Complaints complaints_;
  Format format_;
  Codec codec_;
  AVStream* stream_ = nullptr;  // owned by format_
  Scaler scaler_;
  Frame scaled_;
  std::int64_t packets_ = 0, seen_ = 0, taken_ = 0, rows_ = 0, columns_ = 0;
  std::int64_t began_ = 0, interval_ = 0, read_ = 0;
  std::vector<std::uint8_t> pixels_;  // of the frames taken
};

}  // namespace

at::Tensor decode_video(const fs::path& file, const VideoOptions& options) {
  constexpr std::chrono::seconds kLongestFrame(60);
  return decode_video(file, options, kLongestFrame);
}

at::Tensor decode_video(const fs::path& file, const VideoOptions& options, std::chrono::milliseconds limit) {
  check(options);
  return Reader(file, options, limit).run();
}

}  // namespace isograd
