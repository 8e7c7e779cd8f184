#include "data/libav.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

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

OneFile::OneFile(const std::filesystem::path& file, std::chrono::milliseconds limit) : limit_(limit) {
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
