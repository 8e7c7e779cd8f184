// Keys of tenants: read from a file, never shown.
#include "serve/http/keys.hpp"

#include <gmock/gmock.h>
#include <stdlib.h>

#include "base/error_testing.hpp"
#include "base/files.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

// SHA-256 of "abc" (FIPS 180-2, B.1).
constexpr const char* kAbc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

class Keys : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "isograd-keys-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }
  ApiKeys keys(const std::string& text) const {
    write_file(directory_ / "keys", text);
    return ApiKeys(directory_ / "keys");
  }
  fs::path directory_;
};

TEST_F(Keys, NameTheirTenants) {
  const NewKey ann("ann"), bob("bob"), again("ann");
  EXPECT_NE(ann.key, again.key);
  EXPECT_TRUE(ann.key.starts_with("tml-"));
  EXPECT_EQ(ann.key.size(), 68u);
  EXPECT_THAT(ann.line, Not(HasSubstr(ann.key.substr(4))));
  const ApiKeys known =
      keys("# who may train\n\n" + ann.line + "\r\n" + bob.line + "\n" + again.line + "\ncarl " + kAbc);
  EXPECT_EQ(known.tenant_of(ann.key), "ann");
  EXPECT_EQ(known.tenant_of(again.key), "ann");
  EXPECT_EQ(known.tenant_of(bob.key), "bob");
  EXPECT_EQ(known.tenant_of("abc"), "carl");
  for (const std::string& wrong : {std::string(), std::string("ab"), std::string("abc "), std::string(kAbc),
                                   ann.key.substr(1), std::string(1 << 16, 'k'), std::string("\xff\0", 2)})
    EXPECT_EQ(known.tenant_of(wrong), std::nullopt);
}

TEST_F(Keys, LinesThatAreNoneAreRefusedUnseen) {
  const std::string digest = kAbc;
  for (const std::string& line : std::vector<std::string>{
           "tml-secret", "ann tml-secret", "ann", "ann ", " " + digest, "ann " + digest + "0",
           "ann " + digest.substr(1), "ann " + digest.substr(2) + "-1", "a/n " + digest, "ann  " + digest,
           "ann " + digest + " secret"}) {
    const std::string said = error_of([&] { keys("# one\n" + line + "\n"); });
    EXPECT_THAT(said, HasSubstr("keys:2")) << line;
    EXPECT_THAT(said, Not(HasSubstr("secret")));
  }
  EXPECT_THAT(error_of([&] { keys("ann " + digest + "\nbob " + digest); }),
              HasSubstr("keys:2: found a key that an earlier line has"));
  EXPECT_THAT(error_of([&] { keys("# none\n"); }), HasSubstr("no key"));
  EXPECT_THAT(error_of([&] { ApiKeys(directory_ / "absent"); }), HasSubstr("absent"));
  for (const char* tenant : {"", "a b", "a\n", "a/b"})
    EXPECT_NE(error_of([&] { NewKey{tenant}; }), "no error") << tenant;
}

}  // namespace
}  // namespace isograd::serve
