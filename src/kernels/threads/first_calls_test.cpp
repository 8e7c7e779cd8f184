#include "kernels/threads/first_calls.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

namespace isograd {
namespace {

// LibTorch's header lists the functions that it computes with MKL, two slashes before those that it does not.
TEST(FirstCalls, AreMadeOfAllFunctionsThatLibTorchComputesWithMkl) {
  std::ifstream file(ISOGRAD_TORCH_INCLUDE "/ATen/cpu/vml.h");
  ASSERT_TRUE(file) << ISOGRAD_TORCH_INCLUDE;
  const std::string header(std::istreambuf_iterator<char>(file), {});
  const std::regex entry("(?:^|\n)IMPLEMENT_VML_MKL\\((\\w+), ");
  std::vector<std::string> listed;
  for (std::sregex_iterator found(header.begin(), header.end(), entry), end; found != end; ++found)
    listed.push_back((*found)[1]);
  ASSERT_GE(listed.size(), 10u);
  make_first_calls();
  EXPECT_THAT(functions_of_first_calls(), ::testing::IsSupersetOf(listed));
}

}  // namespace
}  // namespace isograd
