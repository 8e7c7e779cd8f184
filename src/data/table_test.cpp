#include "data/table.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

class TableFile : public ::testing::Test {
 protected:
  TableFile() {
    folder_ = std::filesystem::temp_directory_path() / ("isograd-table-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  ~TableFile() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  std::string refusal(const std::string& name, const std::string& text, const std::string& target = "") {
    return error_testing::error_of([&] { read_table(write(name, text), target); });
  }

  std::filesystem::path folder_;
};

TEST_F(TableFile, OfCommasIsRead) {
  const auto file = write("a.csv", "length, width,class\n1,2.5,0\r\n\n-3e1, 4 ,1\n");
  const Table table = read_table(file, "");
  EXPECT_TRUE(table.features.equal(at::tensor({1., 2.5, -30., 4.}, at::kDouble).view({2, 2})));
  EXPECT_TRUE(table.targets.equal(at::tensor({0, 1}, at::kLong)));
  const auto other = write("b.csv", "rare,x\n1,7\n0,8\n");
  EXPECT_TRUE(read_table(other, "rare").features.equal(at::tensor({7., 8.}, at::kDouble).view({2, 1})));
}

TEST_F(TableFile, ThatIsWrongIsNamedWithItsLine) {
  EXPECT_THAT(refusal("a.csv", "x,y\n1,0\n1,zero\n"), HasSubstr("a.csv:3: found 'zero'"));
  EXPECT_THAT(refusal("a.csv", "x,y\n1,0\nnan,0\n"), HasSubstr("found 'nan'"));
  EXPECT_THAT(refusal("a.csv", "x,y\n1,0,2\n"), HasSubstr("3 cells"));
  EXPECT_THAT(refusal("a.csv", "x,y\n1,0\n2,5\n"), HasSubstr("other than 0 and 1"));
  EXPECT_THAT(refusal("a.csv", "x,y\n1,0\n", "z"), HasSubstr("a column 'z'"));
  EXPECT_THAT(refusal("a.csv", ""), HasSubstr("no row"));
  EXPECT_THAT(refusal("a.npz", "not a zip"), HasSubstr("no zip directory"));
}

// A zip of one stored array, as numpy.savez writes it, without the checksum, which is not read.
std::string number(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}
std::string npy(const std::string& type, const std::string& shape, const std::string& data) {
  const std::string header =
      "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }\n";
  return std::string("\x93NUMPY\x01\x00", 8) + number(header.size(), 2) + header + data;
}
std::string zip(const std::vector<std::pair<std::string, std::string>>& members, int method = 0) {
  std::string text, directory;
  for (const auto& [name, data] : members) {
    directory += number(0x02014b50, 4) + number(0, 6) + number(method, 2) + number(0, 8) +
                 number(data.size(), 4) + number(data.size(), 4) + number(name.size(), 2) + number(0, 12) +
                 number(text.size(), 4) + name;
    text += number(0x04034b50, 4) + number(0, 22) + number(name.size(), 2) + number(0, 2) + name + data;
  }
  return text + directory + number(0x06054b50, 4) + number(0, 4) + number(members.size(), 2) +
         number(members.size(), 2) + number(directory.size(), 4) + number(text.size(), 4) + number(0, 2);
}
std::string bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

TEST_F(TableFile, OfArraysIsRead) {
  const std::string x = npy("<f4", "2, 3", bytes_of({1, 2, 3, 4, 5, 6})),
                    y = npy("|u1", "2,", std::string("\x00\x01", 2));
  const Table table = read_table(write("a.npz", zip({{"x.npy", x}, {"y.npy", y}})), "");
  EXPECT_TRUE(table.features.equal(at::tensor({1., 2., 3., 4., 5., 6.}, at::kDouble).view({2, 3})));
  EXPECT_TRUE(table.targets.equal(at::tensor({0, 1}, at::kLong)));
  EXPECT_THAT(refusal("b.npz", zip({{"x.npy", x}})), HasSubstr("no array 'y.npy'"));
  EXPECT_THAT(refusal("b.npz", zip({{"x.npy", x}, {"y.npy", y}}, 8)), HasSubstr("compressed"));
  EXPECT_THAT(refusal("b.npz", zip({{"x.npy", npy("<c8", "2, 3", "")}, {"y.npy", y}})), HasSubstr("float32"));
  EXPECT_THAT(refusal("b.npz", zip({{"x.npy", npy("<f4", "200000, 300000", "")}, {"y.npy", y}})),
              HasSubstr("more elements than bytes"));
  for (const char* shape :
       {"0, 1099511627776, 1099511627776", "0, 3", "4294967296, 4294967296", "1, 1, 2, 3", "-2, 3"})
    EXPECT_NE(
        refusal("b.npz", zip({{"x.npy", npy("<f4", shape, bytes_of({1, 2, 3, 4, 5, 6}))}, {"y.npy", y}})),
        "no error")
        << shape;
  const std::string strange = npy("|b1", "2,", std::string("\x00\x07", 2));  // a bool that is neither 0 nor 1
  EXPECT_THAT(refusal("b.npz", zip({{"x.npy", x}, {"y.npy", strange}})), HasSubstr("other than 0 and 1"));
  // Truncated anywhere it is an error, never a read beyond the end.
  const std::string whole = zip({{"x.npy", x}, {"y.npy", y}});
  for (std::size_t size = 0; size < whole.size(); size += 7) {
    EXPECT_NE(refusal("c.npz", whole.substr(0, size)), "no error");
    std::string damaged = whole;
    damaged[size] = static_cast<char>(damaged[size] ^ 0x55);
    refusal("d.npz", damaged);  // may still be a valid table; must return
  }
}

}  // namespace
}  // namespace isograd
