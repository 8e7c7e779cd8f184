// A build without libmicrohttpd refuses to serve by name and explains how to build with it.
#include <gmock/gmock.h>

#include "base/error_testing.hpp"
#include "serve/http/http.hpp"
#include "serve/http/keys.hpp"

namespace isograd::serve {
namespace {

TEST(WithoutHttp, IsSaidByName) {
  for (const std::string& said :
       {error_testing::error_of([] { HttpServer({}, {}, {}); }),
        error_testing::error_of([] { ApiKeys("keys"); }), error_testing::error_of([] { NewKey("ann"); })})
    EXPECT_THAT(said,
                ::testing::AllOf(::testing::HasSubstr("isograd serve"), ::testing::HasSubstr("without HTTP"),
                                 ::testing::HasSubstr("ISOGRAD_SERVE=ON")));
}

}  // namespace
}  // namespace isograd::serve
