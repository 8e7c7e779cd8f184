// A build without FFmpeg or SentencePiece refuses them by name and explains how to build with them.
#include <gmock/gmock.h>

#include "base/error_testing.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(WithoutVideos, IsSaidByName) {
  for (const std::string& said :
       {error_of([] { decode_video("clip.mp4", {}); }), error_of([] { write_apng("clip.mp4", {}, 8); })})
    EXPECT_THAT(said,
                AllOf(HasSubstr("clip.mp4"), HasSubstr("without videos"), HasSubstr("ISOGRAD_VIDEO=ON")));
  EXPECT_THAT(error_of([] { encode_png({}); }), HasSubstr("ISOGRAD_VIDEO=ON"));
}

TEST(WithoutSentencePiece, IsSaidByName) {
  EXPECT_THAT(
      error_of([] { sentencepiece_tokenizer("m.model"); }),
      AllOf(HasSubstr("m.model"), HasSubstr("without SentencePiece"), HasSubstr("ISOGRAD_SENTENCEPIECE=ON")));
}

}  // namespace
}  // namespace isograd
