#include "model/safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "base/files.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Safetensors : public ::testing::Test {
 protected:
  Safetensors() { fs::create_directories(folder_); }
  ~Safetensors() override { fs::remove_all(folder_); }

  fs::path raw(const std::string& header, std::size_t data_bytes) {
    std::string text(8, '\0');
    const std::uint64_t length = header.size();
    std::memcpy(text.data(), &length, 8);
    write_file(path_, text + header + std::string(data_bytes, '\1'));
    return path_;
  }
  // The error that reading gives; empty when there is none.
  std::string error() {
    try {
      read_safetensors(path_);
    } catch (const ConfigError& problem) {
      EXPECT_THAT(problem.what(), HasSubstr(path_.string()));
      return problem.what();
    }
    return "";
  }

  fs::path folder_ = fs::temp_directory_path() / ("isograd-safetensors-" + std::to_string(getpid()));
  fs::path path_ = folder_ / "file.safetensors";
};

TEST_F(Safetensors, ADeepHeaderIsRefused) {
  for (const std::string& open : {std::string("["), std::string("{\"a\":")}) {
    std::string header = "{\"t\":";
    for (int i = 0; i < 100'000; ++i) header += open;
    raw(header, 8);
    EXPECT_THAT(error(), HasSubstr("more than 100 levels"));
  }
}

// With the square of their number reading takes ten minutes, and writing one.
TEST_F(Safetensors, ManyTensorsTakeTimeInProportion) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  const at::Tensor one = at::ones({1});
  for (int i = 0; i < 100'000; ++i) tensors.emplace_back("t" + std::to_string(i), one);
  write_safetensors(path_, tensors);
  EXPECT_EQ(read_safetensors(path_).size(), tensors.size());
}

TEST_F(Safetensors, ShapesWhoseStridesOverflowAreRefused) {
  const auto of_shape = [&](const std::string& shape) {
    raw("{\"t\":{\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":[0,0]}}", 0);
    return error();
  };
  EXPECT_EQ(of_shape("[0,3]"), "");
  EXPECT_EQ(of_shape("[1000000,0,1000000]"), "");
  EXPECT_THAT(of_shape("[0,1152921504606846976,1152921504606846976]"), HasSubstr("fits in memory"));
  EXPECT_THAT(of_shape("[4294967296,4294967296,0]"), HasSubstr("fits in memory"));
  std::string many = "[0";
  for (int i = 0; i < 64; ++i) many += ",1";
  EXPECT_THAT(of_shape(many + "]"), HasSubstr("65 extents"));
}

TEST_F(Safetensors, EveryDtypeComesBackWithItsBytes) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  constexpr at::ScalarType kTypes[] = {at::kBool,
                                       at::kByte,
                                       at::kChar,
                                       at::kUInt16,
                                       at::kShort,
                                       at::kUInt32,
                                       at::kInt,
                                       at::kUInt64,
                                       at::kLong,
                                       at::kHalf,
                                       at::kBFloat16,
                                       at::kFloat,
                                       at::kDouble,
                                       at::kComplexFloat,
                                       at::kFloat8_e4m3fn,
                                       at::kFloat8_e5m2,
                                       at::kFloat8_e4m3fnuz,
                                       at::kFloat8_e5m2fnuz,
                                       at::kFloat8_e8m0fnu,
                                       at::kFloat4_e2m1fn_x2};
  for (const at::ScalarType type : kTypes) {
    at::Tensor tensor = at::empty({3, 5}, type);
    auto* bytes = static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
    for (std::size_t i = 0; i < tensor.nbytes(); ++i)
      bytes[i] = type == at::kBool ? i % 2 : static_cast<std::uint8_t>(7 * i + static_cast<int>(type));
    tensors.emplace_back(c10::toString(type), tensor);
  }
  tensors.emplace_back("scalar", at::tensor(2.5));
  tensors.emplace_back("empty", at::empty({4, 0}));
  tensors.emplace_back("strided", at::arange(12).view({3, 4}).t());
  write_safetensors(path_, tensors, {{"format", "pt"}, {"note", "\xc3\xa9"}});

  Metadata metadata;
  const auto back = read_safetensors(path_, &metadata);
  EXPECT_EQ(metadata, (Metadata{{"format", "pt"}, {"note", "\xc3\xa9"}}));
  ASSERT_EQ(back.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto& other = back.at(name);
    EXPECT_EQ(other.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(other.sizes(), tensor.sizes()) << name;
    const at::Tensor dense = tensor.contiguous();
    EXPECT_EQ(std::memcmp(other.const_data_ptr(), dense.const_data_ptr(), dense.nbytes()), 0) << name;
  }
}

TEST_F(Safetensors, OneTensorKeepsTheMappingAlive) {
  write_safetensors(path_, {{"a", at::arange(1000)}, {"b", at::ones({7})}});
  const at::Tensor a = read_safetensors(path_).at("a");
  fs::remove(path_);
  EXPECT_TRUE(a.equal(at::arange(1000)));
}

TEST_F(Safetensors, UnalignedDataIsRead) {
  raw(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);  // the header's length is odd
  EXPECT_EQ(read_safetensors(path_).at("a").numel(), 2);
}

TEST_F(Safetensors, HostileHeadersAreNamed) {
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"w\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
  };
  struct Case {
    std::string header;
    std::size_t bytes;
    std::string found;
  };
  const std::vector<Case> cases = {
      {"[]", 0, "no JSON object"},
      {"{", 0, "no JSON object"},
      {std::string(100000, '['), 0, "no JSON object"},
      {"{\"w\xff\":1}", 0, "no JSON object"},
      {R"({"w":3})", 0, "tensor w"},
      {entry("\"F33\"", "[1]", "[0,4]"), 4, "dtype \"F33\""},
      {entry("4", "[1]", "[0,4]"), 4, "dtype 4"},
      {entry("\"F6_E2M3\"", "[4]", "[0,3]"), 3, "dtype"},
      {entry("\"F32\"", "{}", "[0,4]"), 4, "shape {}"},
      {entry("\"F32\"", "[-1]", "[0,4]"), 4, "shape holds -1"},
      {entry("\"F32\"", "[1.0]", "[0,4]"), 4, "shape holds 1.0"},
      {entry("\"F32\"", "[1]", "[0]"), 4, "data_offsets"},
      {entry("\"F32\"", "[1]", "[0,1e2]"), 4, "data_offsets holds"},
      {entry("\"F32\"", "[1]", "[4,0]"), 4, "bytes 4 to 0"},
      {entry("\"F32\"", "[2]", "[0,8]"), 4, "bytes 0 to 8"},
      {entry("\"F32\"", "[1]", "[0,18446744073709551615]"), 4, "bytes 0 to"},
      {entry("\"F32\"", "[2]", "[0,4]"), 4, "8 bytes for F32 [2]"},
      {entry("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0, "fits in memory"},
      {entry("\"F32\"", "[4611686018427387904,4]", "[0,0]"), 0, "fits in memory"},
      {entry("\"F4\"", "[3]", "[0,1]"), 1, "even last dimension"},
      {entry("\"F4\"", "[]", "[0,1]"), 1, "whole bytes"},
      {entry("\"F32\"", "[1]", "[0,4]"), 8, "8 bytes of data"},
      {entry("\"F32\"", "[1]", "[4,8]"), 8, "overlap or leave a gap"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "tensor b"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "the key \"a\" twice"},
      {R"({"a":{"dtype":"U8","shape":[4],"shape":[2],"data_offsets":[0,2]}})", 2, "the key \"shape\" twice"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}})", 2, "tensor a"},
      {R"({"__metadata__":{"format":3}})", 0, "is no text"},
      {R"({"__metadata__":[]})", 0, "is no object"},
  };
  for (const auto& [header, bytes, found] : cases) {
    raw(header, bytes);
    EXPECT_THAT(error(), HasSubstr(found)) << header.substr(0, 200);
  }
  write_file(path_, "1234567");
  EXPECT_THAT(error(), HasSubstr("7 bytes"));
  write_file(path_, std::string(8, '\xff') + "{}");
  EXPECT_THAT(error(), HasSubstr("a header of 18446744073709551615 bytes"));
  fs::remove(path_);
  EXPECT_THAT(error(), HasSubstr("file.safetensors"));
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  write_safetensors(path_, {{"a", at::ones({3, 3})}, {"b", at::zeros({5}, at::kLong)}});
  const std::string whole = read_file(path_);
  EXPECT_EQ(error(), "");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_file(path_, whole.substr(0, length));
    EXPECT_NE(error(), "") << length;
  }
  write_file(path_, whole + "x");
  EXPECT_NE(error(), "");
}

// A flipped bit in the header gives an error or tensors that lie within the file; never anything else.
TEST_F(Safetensors, AnyHeaderByteMayBeWrong) {
  write_safetensors(path_, {{"a", at::ones({3, 3})}, {"b", at::zeros({5}, at::kLong)}});
  const std::string whole = read_file(path_);
  const std::size_t header_end = whole.size() - 36 - 40;
  for (std::size_t i = 0; i < header_end; ++i)
    for (int bit = 0; bit < 8; bit += 3) {
      std::string broken = whole;
      broken[i] = static_cast<char>(broken[i] ^ (1 << bit));
      write_file(path_, broken);
      try {
        std::int64_t bytes = 0;
        for (const auto& [name, tensor] : read_safetensors(path_))
          bytes += static_cast<std::int64_t>(tensor.nbytes());
        EXPECT_EQ(bytes, 36 + 40);
      } catch (const ConfigError&) {
      }
    }
}

TEST_F(Safetensors, WhatTheFormatCannotHoldIsRefused) {
  EXPECT_THROW(write_safetensors(path_, {{"a", at::ones({1})}, {"a", at::ones({1})}}), ConfigError);
  EXPECT_THROW(write_safetensors(path_, {{"__metadata__", at::ones({1})}}), ConfigError);
  EXPECT_THROW(write_safetensors(path_, {{"a", at::Tensor()}}), ConfigError);
  EXPECT_THROW(write_safetensors(path_, {{"a", at::ones({1}, at::kComplexDouble)}}), ConfigError);
  EXPECT_THROW(write_safetensors(path_, {{"\xff", at::ones({1})}}), ConfigError);
  EXPECT_FALSE(fs::exists(path_));
  EXPECT_TRUE(fs::is_empty(folder_));
}

}  // namespace
}  // namespace isograd
