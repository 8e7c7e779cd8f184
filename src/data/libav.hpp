// RAII owners of FFmpeg's objects, and its error messages.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/avstring.h>
#include <libswscale/swscale.h>
}

#include <chrono>
#include <filesystem>
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

// Collects FFmpeg's errors of this thread, which are otherwise printed. AV_LOG_ERROR means "cannot losslessly
// be recovered".
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

// One regular file that FFmpeg reads by its descriptor, so that it has no name to open. Reads fail `limit`
// after the last renew().
class OneFile {
 public:
  // An empty `refusal` afterwards means that it is open.
  OneFile(const std::filesystem::path& file, std::chrono::milliseconds limit);
  ~OneFile();
  OneFile(const OneFile&) = delete;
  OneFile& operator=(const OneFile&) = delete;
  const std::string& refusal() const { return refusal_; }  // "no such file", "no regular file"
  AVIOContext* io() { return io_; }
  std::int64_t bytes() const { return bytes_; }
  void renew() { deadline_ = std::chrono::steady_clock::now() + limit_; }
  bool is_late() const { return std::chrono::steady_clock::now() >= deadline_; }

 private:
  static int read(void* self, std::uint8_t* to, int bytes);
  static std::int64_t seek(void* self, std::int64_t offset, int whence);
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point deadline_{};
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
  std::string refusal_{};
  AVIOContext* io_ = nullptr;
};

}  // namespace isograd::libav
