// Videos by FFmpeg: owners of its objects, the frames of a file, frames as PNG and animated PNG.
#include "data/libav.hpp"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "data/options.hpp"
#include "isograd/data.hpp"

namespace isograd::libav {
namespace {

thread_local Complaints* listening = nullptr;

}  // namespace

std::string text_of(int status) {
  std::array<char, AV_ERROR_MAX_STRING_SIZE> text{};
  av_strerror(status, text.data(), text.size());
  return text.data();
}

Complaints::Complaints() : outer_(listening) {
  // FFmpeg has one callback per process. Threads without a listener keep FFmpeg's default.
  static std::once_flag once;
  std::call_once(once, [] { av_log_set_callback(&Complaints::take); });
  listening = this;
}

Complaints::~Complaints() { listening = outer_; }

void Complaints::take(void* object, int level, const char* format, va_list arguments) {
  if (!listening) return av_log_default_callback(object, level, format, arguments);
  if (level > AV_LOG_ERROR || !listening->first_.empty()) return;
  std::array<char, 400> line{};
  std::vsnprintf(line.data(), line.size(), format, arguments);
  std::string& text = listening->first_ = line.data();
  while (!text.empty() && (text.back() == '\n' || text.back() == '.' || text.back() == ' ')) text.pop_back();
}

OneFile::OneFile(const fs::path& file, std::chrono::milliseconds limit) : limit_(limit) {
  renew();
  struct stat status {};
  // Opening a device may have effects. Without O_NONBLOCK opening a FIFO waits for its other end.
  if (::stat(file.c_str(), &status) != 0 ||
      (S_ISREG(status.st_mode) &&
       (descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) < 0)) {
    refusal_ = errno == ENOENT ? "no such file" : std::strerror(errno);
    return;
  }
  if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    refusal_ = "no regular file";
    return;
  }
  bytes_ = status.st_size;
  constexpr int kBuffer = 1 << 16;
  io_ = avio_alloc_context(static_cast<unsigned char*>(av_malloc(kBuffer)), kBuffer, 0, this, &OneFile::read,
                           nullptr, &OneFile::seek);
}

OneFile::~OneFile() {
  if (io_) av_freep(&io_->buffer);
  avio_context_free(&io_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

int OneFile::read(void* self, std::uint8_t* to, int bytes) {
  const auto* file = static_cast<const OneFile*>(self);
  if (file->is_late()) return AVERROR(ETIMEDOUT);
  const auto count = ::read(file->descriptor_, to, static_cast<std::size_t>(bytes));
  if (count < 0) return AVERROR(errno);
  return count == 0 ? AVERROR_EOF : static_cast<int>(count);
}

std::int64_t OneFile::seek(void* self, std::int64_t offset, int whence) {
  const auto* file = static_cast<const OneFile*>(self);
  if ((whence & AVSEEK_SIZE) != 0) return file->bytes_;
  const auto at = ::lseek(file->descriptor_, offset, whence & ~AVSEEK_FORCE);
  return at < 0 ? AVERROR(errno) : at;
}

}  // namespace isograd::libav

namespace isograd {
namespace {

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

// Containers that hold all of their video. Playlists, scripts, image sequences and networks name further
// files; a pipe is one image; wav and mp3 are reported as files without video.
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

// ---- encoding ----

namespace {

using namespace libav;

// One frame of `pixels` [rows, columns, 3], 24 bits each.
void configure(AVCodecContext& codec, const at::Tensor& pixels, AVRational time_base) {
  codec.width = static_cast<int>(pixels.size(1)), codec.height = static_cast<int>(pixels.size(0));
  codec.pix_fmt = AV_PIX_FMT_RGB24;
  codec.time_base = time_base;
  codec.thread_count = 1;
}

// Copies contiguous `pixels` into the frame. Returns FFmpeg's status.
int fill(AVFrame& image, const AVCodecContext& codec, const at::Tensor& pixels) {
  image.format = codec.pix_fmt, image.width = codec.width, image.height = codec.height;
  const int status = av_frame_get_buffer(&image, 0);
  const auto row = static_cast<std::size_t>(3 * codec.width);
  for (int y = 0; status >= 0 && y < codec.height; ++y)
    std::memcpy(image.data[0] + y * image.linesize[0],
                pixels.const_data_ptr<std::uint8_t>() + static_cast<std::size_t>(y) * row, row);
  return status;
}

// Writes the file in memory, so that it is whole or absent.
class Writer {
 public:
  Writer(fs::path file, const at::Tensor& frames, double frames_per_second) : file_(std::move(file)) {
    const AVCodec* encoder = avcodec_find_encoder(AV_CODEC_ID_APNG);
    if (!encoder) fail("an FFmpeg without an encoder of animated PNGs", 0);
    AVFormatContext* made = nullptr;
    check(avformat_alloc_output_context2(&made, nullptr, "apng", nullptr), "no container for it");
    format_.reset(made);
    stream_ = avformat_new_stream(made, nullptr);
    codec_.reset(avcodec_alloc_context3(encoder));
    configure(*codec_, frames[0], {1000, static_cast<int>(std::lround(1000 * frames_per_second))});
    if (made->oformat->flags & AVFMT_GLOBALHEADER) codec_->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    check(avcodec_open2(codec_.get(), encoder, nullptr), "no encoder for it");
    stream_->time_base = codec_->time_base;
    check(avcodec_parameters_from_context(stream_->codecpar, codec_.get()), "no stream for it");
    check(avio_open_dyn_buf(&made->pb), "no memory for it");
    AVDictionary* settings = nullptr;
    av_dict_set(&settings, "plays", "0", 0);  // for ever
    const int status = avformat_write_header(made, &settings);
    av_dict_free(&settings);
    check(status, "a header not to be written");
  }

  void add(const at::Tensor& pixels, std::int64_t number) {
    Frame image(av_frame_alloc());
    image->pts = number;
    check(fill(*image, *codec_, pixels), "no memory for a frame");
    check(avcodec_send_frame(codec_.get(), image.get()), "a frame not to be encoded");
    drain();
  }

  void finish() {
    check(avcodec_send_frame(codec_.get(), nullptr), "frames not to be encoded");
    drain();
    check(av_write_trailer(format_.get()), "an end not to be written");
    check(format_->pb->error, "no memory for it");
    // The trailer has seeked back; closing would take that position for the end.
    std::uint8_t* bytes = nullptr;
    const int size = avio_get_dyn_buf(format_->pb, &bytes);
    write_file(file_, {reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size)});
  }

 private:
  struct Close {
    void operator()(AVFormatContext* format) const {
      std::uint8_t* bytes = nullptr;
      if (format->pb) avio_close_dyn_buf(format->pb, &bytes);
      av_free(bytes);
      avformat_free_context(format);
    }
  };

  [[noreturn]] void fail(const std::string& found, int status) const {
    refuse(file_.string(), status < 0 ? fmt::format("{} ({})", found, text_of(status)) : found,
           "a file to be written, as an animated PNG",
           "Choose another place, or install the distribution's libavformat");
  }
  void check(int status, const char* what) const {
    if (status < 0) fail(what, status);
  }

  void drain() {
    Packet packet(av_packet_alloc());
    for (;;) {
      const int status = avcodec_receive_packet(codec_.get(), packet.get());
      if (status == AVERROR(EAGAIN) || status == AVERROR_EOF) return;
      check(status, "a frame not to be encoded");
      av_packet_rescale_ts(packet.get(), codec_->time_base, stream_->time_base);
      packet->stream_index = stream_->index;
      check(av_interleaved_write_frame(format_.get(), packet.get()), "a frame not to be written");
    }
  }

  fs::path file_;
  Complaints complaints_;
  std::unique_ptr<AVFormatContext, Close> format_;
  Codec codec_;
  AVStream* stream_ = nullptr;
};

}  // namespace

void write_apng(const fs::path& file, const at::Tensor& frames, double frames_per_second) {
  if (frames.dim() != 4 || frames.size(3) != 3 || frames.numel() == 0 || frames.scalar_type() != at::kByte ||
      frames.size(1) > 1 << 14 || frames.size(2) > 1 << 14 || !(frames_per_second >= 0.001) ||
      frames_per_second > 1e6)
    refuse("write_apng",
           c10::str(c10::toString(frames.scalar_type()), " ", frames.sizes(), " at ", frames_per_second,
                    " frames per second"),
           "frames uint8 [frames, rows, columns, 3], at 0.001 to 1e6 of them per second",
           "Correct the frames or the rate");
  const at::Tensor pixels = frames.contiguous();
  Writer writer(file, pixels, frames_per_second);
  for (std::int64_t f = 0; f < pixels.size(0); ++f) writer.add(pixels[f], f);
  writer.finish();
}

std::string encode_png(const at::Tensor& frame) {
  const auto fail = [](const std::string& found) {
    refuse("encode_png", found, "a frame uint8 [rows, columns, 3], and an FFmpeg with a PNG encoder",
           "Check the frame's size and type, or install the distribution's libavcodec");
  };
  if (frame.dim() != 3 || frame.size(2) != 3 || frame.numel() == 0 || frame.scalar_type() != at::kByte ||
      frame.size(0) > 1 << 14 || frame.size(1) > 1 << 14)
    fail(c10::str(c10::toString(frame.scalar_type()), " ", frame.sizes()));
  const Complaints complaints;
  const AVCodec* encoder = avcodec_find_encoder(AV_CODEC_ID_PNG);
  if (!encoder) fail("no PNG encoder");
  Codec codec(avcodec_alloc_context3(encoder));
  configure(*codec, frame, {1, 1});
  Frame image(av_frame_alloc());
  Packet packet(av_packet_alloc());
  int status = avcodec_open2(codec.get(), encoder, nullptr);
  if (status >= 0) status = fill(*image, *codec, frame.contiguous());
  if (status >= 0) status = avcodec_send_frame(codec.get(), image.get());
  if (status >= 0) status = avcodec_receive_packet(codec.get(), packet.get());
  if (status < 0) fail(fmt::format("{} ({})", text_of(status), complaints.first()));
  return {reinterpret_cast<const char*>(packet->data), static_cast<std::size_t>(packet->size)};
}

}  // namespace isograd
