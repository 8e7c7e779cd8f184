#include "base/python.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace isograd {
namespace {

namespace fs = std::filesystem;

TEST(Python, TheCheckoutIsThatOfTheBuildFolder) {
  std::string name = (fs::temp_directory_path() / "isograd-python-XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  const fs::path folder = name;
  EXPECT_EQ(checkout_of(folder / "bin/isograd"), "");  // installed
  std::ofstream(folder / "CMakeCache.txt") << "# a cache\nCMAKE_BUILD_TYPE:STRING=Release\n"
                                              "CMAKE_HOME_DIRECTORY:INTERNAL=/somewhere/isograd\n";
  EXPECT_EQ(checkout_of(folder / "bin/isograd"), "/somewhere/isograd");
  EXPECT_EQ(checkout_of("isograd"), "");
  EXPECT_EQ(find_python("my-python"), "my-python");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace isograd
