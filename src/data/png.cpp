// One frame as a PNG, by FFmpeg's encoder.
#include <fmt/format.h>

#include <cstring>

#include "base/refuse.hpp"
#include "data/libav.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"

namespace isograd {

std::string encode_png(const at::Tensor& frame) {
  using namespace libav;
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
  codec->width = static_cast<int>(frame.size(1)), codec->height = static_cast<int>(frame.size(0));
  codec->pix_fmt = AV_PIX_FMT_RGB24;
  codec->time_base = {1, 1};
  codec->thread_count = 1;
  Frame image(av_frame_alloc());
  image->format = codec->pix_fmt, image->width = codec->width, image->height = codec->height;
  Packet packet(av_packet_alloc());
  int status = avcodec_open2(codec.get(), encoder, nullptr);
  if (status >= 0) status = av_frame_get_buffer(image.get(), 0);
  if (status >= 0) {
    const at::Tensor pixels = frame.contiguous();
    const auto row = static_cast<std::size_t>(3 * codec->width);
    for (int y = 0; y < codec->height; ++y)
      std::memcpy(image->data[0] + y * image->linesize[0],
                  pixels.const_data_ptr<std::uint8_t>() + static_cast<std::size_t>(y) * row, row);
    status = avcodec_send_frame(codec.get(), image.get());
  }
  if (status >= 0) status = avcodec_receive_packet(codec.get(), packet.get());
  if (status < 0) fail(fmt::format("{} ({})", text_of(status), complaints.first()));
  return {reinterpret_cast<const char*>(packet->data), static_cast<std::size_t>(packet->size)};
}

}  // namespace isograd
