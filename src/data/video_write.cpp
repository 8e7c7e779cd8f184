// Frames as a PNG, and videos as an animated PNG, by FFmpeg's encoders.
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "data/libav.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"

namespace isograd {
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
  Writer(std::filesystem::path file, const at::Tensor& frames, double frames_per_second)
      : file_(std::move(file)) {
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
    // The trailer has seeked back to write the number of frames. Closing would take that position for the
    // end.
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

  std::filesystem::path file_;
  Complaints complaints_;
  std::unique_ptr<AVFormatContext, Close> format_;
  Codec codec_;
  AVStream* stream_ = nullptr;
};

}  // namespace

void write_apng(const std::filesystem::path& file, const at::Tensor& frames, double frames_per_second) {
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
