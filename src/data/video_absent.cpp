// Videos in a build without FFmpeg's libraries: they are refused.
#include "base/refuse.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_without_video(const std::string& where) {
  refuse(where, "a build of isograd without videos", "one that was made with FFmpeg's libraries",
         "Install libavformat, libavcodec, libavutil and libswscale with their headers, and build "
         "again with -DISOGRAD_VIDEO=ON");
}

}  // namespace

at::Tensor decode_video(const fs::path& file, const VideoOptions&) {
  refuse_without_video("video " + file.string());
}

std::string encode_png(const at::Tensor&) { refuse_without_video("encode_png"); }

void write_apng(const fs::path& file, const at::Tensor&, double) { refuse_without_video(file.string()); }

}  // namespace isograd
