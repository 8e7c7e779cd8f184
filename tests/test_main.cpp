// main() of every GoogleTest executable: one intra-op thread per rank, and the random seed printed.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  at::set_num_threads(1);
  std::vector<char*> arguments(argv, argv + argc);
  // Thousands of names of tests, more than a variable or an argument can hold, lie in a file (run_all.py).
  std::string flags = "--gtest_flagfile=";
  if (const char* file = std::getenv("ISOGRAD_TEST_FLAGS"))  // before those of the command line, which win
    arguments.insert(arguments.begin() + 1, (flags += file).data());
  int count = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  ::testing::InitGoogleTest(&count, arguments.data());
  return RUN_ALL_TESTS();
}
