#include "base/print.hpp"

#include <gtest/gtest.h>

#include "base/refuse.hpp"

namespace isograd {
namespace {

TEST(Printable, KeepsTextAndWritesTheRestOut) {
  EXPECT_EQ(printable("plain, \"quoted\", \\ and é 語 👩‍💻"),
            "plain, \"quoted\", \\ and é 語 👩‍💻");
  EXPECT_EQ(printable("a\nparity PASS\r\tb"), "a\\nparity PASS\\u{d}\\tb");
  EXPECT_EQ(printable("\x1b[31mred\x1b[0m"), "\\u{1b}[31mred\\u{1b}[0m");
  EXPECT_EQ(printable(std::string_view("\0\x07\x7f", 3)), "\\u{0}\\u{7}\\u{7f}");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\u{9b}31m");  // another start of a terminal's escape sequence
  EXPECT_EQ(printable("a\xE2\x80\xAE"
                      "b\xE2\x80\xA8"
                      "c\xEF\xBB\xBF"),
            "a\\u{202e}b\\u{2028}c\\u{feff}");
  EXPECT_EQ(printable("\xff\xc3(\xed\xa0\x80"), "\\xff\\xc3(\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xc3"), "\\xc3");
  EXPECT_EQ(printable("éééé", 3), "ééé…");
  EXPECT_EQ(printable("ééé", 3), "ééé");
  EXPECT_EQ(printable("\xff\xff\xff\xff", 2), "\\xff\\xff…");
}

TEST(Printable, OfEveryByteNoControlIsLeft) {
  for (int first = 0; first < 256; ++first)
    for (int second = 0; second < 256; ++second) {
      const std::string text = printable(std::string{static_cast<char>(first), static_cast<char>(second)});
      for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        EXPECT_TRUE(byte >= 0x20 && byte != 0x7f) << first << " " << second;
      }
    }
}

TEST(Print, KeepsOwnLines) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  print(file, "a\n\tb \x1b[2J é\xff\n");
  std::rewind(file);
  char text[100] = {};
  EXPECT_GT(std::fread(text, 1, sizeof text - 1, file), 0u);
  std::fclose(file);
  EXPECT_STREQ(text, "a\n\tb \\u{1b}[2J é\\xff\n");
}

TEST(Errors, PrintForeignPartsOnOneLineAndKeepThemAsTheyAre) {
  const ConfigError error({.where = "dir/\x1b[2Jname",
                           .found = "a\nparity PASS: forged",
                           .expected = "b",
                           .action = std::string(10'000, 'x')});
  const std::string text = error.what();
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_LT(text.size(), 4200u);
  EXPECT_EQ(error.text().found, "a\nparity PASS: forged");
}

TEST(Errors, OfTheFileSystemAreErrorsOfTheInput) {
  try {
    (void)std::filesystem::exists(std::string(5000, 'a'));
    FAIL() << "a path of 5,000 characters";
  } catch (const std::filesystem::filesystem_error& error) {
    EXPECT_EQ(exit_status(error), 2);
    EXPECT_EQ(text_of(error).where, std::string(5000, 'a'));
    EXPECT_EQ(text_of(error).found, "File name too long");
  }
}

}  // namespace
}  // namespace isograd
