// FFmpeg's objects, owned, and what it complains of.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libswscale/swscale.h>
}

#include <memory>
#include <string>

namespace isograd::libav {

template <auto release>
struct Release {
  template <typename T>
  void operator()(T* object) const {
    if constexpr (requires { release(&object); })
      release(&object);
    else
      release(object);
  }
};
using Format = std::unique_ptr<AVFormatContext, Release<avformat_close_input>>;
using Codec = std::unique_ptr<AVCodecContext, Release<avcodec_free_context>>;
using Frame = std::unique_ptr<AVFrame, Release<av_frame_free>>;
using Packet = std::unique_ptr<AVPacket, Release<av_packet_free>>;
using Scaler = std::unique_ptr<SwsContext, Release<sws_freeContext>>;

std::string text_of(int status);  // of a negative return value

// While it lives, FFmpeg's messages on this thread go here instead of to stderr. AV_LOG_ERROR is what "cannot
// losslessly be recovered", in FFmpeg's own definition.
class Complaints {
 public:
  Complaints();
  ~Complaints();
  Complaints(const Complaints&) = delete;
  Complaints& operator=(const Complaints&) = delete;
  bool empty() const { return first_.empty(); }
  const std::string& first() const { return first_; }

 private:
  static void take(void* object, int level, const char* format, va_list arguments);
  std::string first_;
  Complaints* outer_;
};

}  // namespace isograd::libav
