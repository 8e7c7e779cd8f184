// Video files for tests, written with FFmpeg's libraries.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>

#include "data/libav.hpp"

namespace isograd::testing {

// Frames uint8 [F, H, W, 3] that encode (seed, frame, row, column, colour), so that any permutation is
// detected.
inline at::Tensor numbered_frames(std::int64_t frames, std::int64_t rows, std::int64_t columns,
                                  std::int64_t seed = 0) {
  const at::Tensor index = at::arange(frames * rows * columns * 3, at::kLong);
  return ((index * 7919 + seed * 104729) % 251).to(at::kByte).reshape({frames, rows, columns, 3});
}

struct WriteOptions {
  AVCodecID codec = AV_CODEC_ID_PNG;  // lossless
  AVPixelFormat format = AV_PIX_FMT_RGB24;
  int frames_per_second = 10;
};

// The name determines the container.
inline void write_video(const std::filesystem::path& file, const at::Tensor& frames,
                        WriteOptions options = {}) {
  using namespace libav;
  const auto must = [](int status) {
    if (status < 0) throw std::runtime_error("write_video: " + text_of(status));
  };
  const Complaints quiet;
  AVFormatContext* made = nullptr;
  must(avformat_alloc_output_context2(&made, nullptr, nullptr, file.c_str()));
  const std::unique_ptr<AVFormatContext, Release<avformat_free_context>> container(made);
  Codec codec(avcodec_alloc_context3(avcodec_find_encoder(options.codec)));
  codec->width = static_cast<int>(frames.size(2)), codec->height = static_cast<int>(frames.size(1));
  codec->pix_fmt = options.format;
  codec->time_base = {1, options.frames_per_second};
  codec->thread_count = 1;
  codec->gop_size = 4;
  if ((made->oformat->flags & AVFMT_GLOBALHEADER) != 0) codec->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
  must(avcodec_open2(codec.get(), codec->codec, nullptr));
  AVStream* stream = avformat_new_stream(made, nullptr);
  must(avcodec_parameters_from_context(stream->codecpar, codec.get()));
  stream->time_base = codec->time_base;
  stream->avg_frame_rate = {options.frames_per_second, 1};
  must(avio_open(&made->pb, file.c_str(), AVIO_FLAG_WRITE));
  must(avformat_write_header(made, nullptr));
  Packet packet(av_packet_alloc());
  const auto drain = [&] {
    while (avcodec_receive_packet(codec.get(), packet.get()) >= 0) {
      av_packet_rescale_ts(packet.get(), codec->time_base, stream->time_base);
      packet->stream_index = 0;
      must(av_interleaved_write_frame(made, packet.get()));
    }
  };
  const Scaler scaler(sws_getContext(codec->width, codec->height, AV_PIX_FMT_RGB24, codec->width,
                                     codec->height, codec->pix_fmt, SWS_POINT, nullptr, nullptr, nullptr));
  const at::Tensor pixels = frames.contiguous();
  for (std::int64_t i = 0; i < frames.size(0); ++i) {
    Frame frame(av_frame_alloc());
    frame->format = codec->pix_fmt, frame->width = codec->width, frame->height = codec->height;
    frame->pts = i;
    must(av_frame_get_buffer(frame.get(), 0));
    const std::uint8_t* from[4] = {pixels[i].const_data_ptr<std::uint8_t>()};
    const int stride[4] = {3 * codec->width};
    must(sws_scale(scaler.get(), from, stride, 0, codec->height, frame->data, frame->linesize));
    must(avcodec_send_frame(codec.get(), frame.get()));
    drain();
  }
  must(avcodec_send_frame(codec.get(), nullptr));
  drain();
  must(av_write_trailer(made));
  must(avio_closep(&made->pb));
}

// Texts, by file name, that FFmpeg takes for descriptions of other files: they name `video`.
inline std::map<std::string, std::string> playlists(const std::string& video) {
  const std::string head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n",
                    live = head + "#EXTINF:1,\n" + video + "\n", ended = live + "#EXT-X-ENDLIST\n",
                    concat = "ffconcat version 1.0\nfile '" + video + "'\n",
                    master = "#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1000\n" + video + "\n",
                    sdp =
                        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP "
                        "96\na=rtpmap:96 H264/90000\n",
                    dash =
                        "<?xml version=\"1.0\"?>\n<MPD xmlns=\"urn:mpeg:dash:schema:mpd:2011\" "
                        "type=\"dynamic\" minimumUpdatePeriod=\"PT1S\"><Period><AdaptationSet "
                        "mimeType=\"video/mp4\"><Representation id=\"0\"><BaseURL>" +
                        video + "</BaseURL></Representation></AdaptationSet></Period></MPD>\n";
  return {{"live.m3u8", live},    {"live.mp4", live},          {"live.mkv", live},
          {"ended.m3u8", ended},  {"ended.avi", ended},        {"master.m3u8", master},
          {"concat.txt", concat}, {"concat.ffconcat", concat}, {"concat.mkv", concat},
          {"stream.sdp", sdp},    {"stream.mp4", sdp},         {"dash.mpd", dash},
          {"dash.mp4", dash}};
}

}  // namespace isograd::testing
