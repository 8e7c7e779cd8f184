#include "data/libav.hpp"

#include <array>
#include <cstdarg>
#include <cstdio>
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
  // The callback is the process's. Threads that do not listen keep FFmpeg's own.
  static std::once_flag once;
  std::call_once(once, [] { av_log_set_callback(&Complaints::take); });
  listening = this;
}

Complaints::~Complaints() {
  listening = outer_;
}

void Complaints::take(void* object, int level, const char* format, va_list arguments) {
  if (!listening) return av_log_default_callback(object, level, format, arguments);
  if (level > AV_LOG_ERROR || !listening->first_.empty()) return;
  std::array<char, 400> line{};
  std::vsnprintf(line.data(), line.size(), format, arguments);
  std::string& text = listening->first_ = line.data();
  while (!text.empty() && (text.back() == '\n' || text.back() == '.' || text.back() == ' ')) text.pop_back();
}

}  // namespace isograd::libav
