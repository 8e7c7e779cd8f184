#include "data/corpus.hpp"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "base/refuse.hpp"
#include "data/test_support.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using testing::config_error;
using testing::Folder;

void stop(const LinePlace& place, const BadLine& problem) {
  refuse(fmt::format("{}:{}", place.file.string(), place.line), problem.found, problem.expected,
         "Correct it");
}

// The texts, and the empty ones counted.
std::vector<std::string> documents_of(const fs::path& file, std::int64_t expected_empty = 0) {
  std::vector<std::string> documents;
  std::int64_t empty = 0;
  const auto tokenizer = byte_tokenizer();
  for_each_document(
      file,
      [&](const Document& document) {
        const std::vector<std::uint32_t> tokens = encode(document, *tokenizer, false).tokens;
        const std::string text = tokenizer->decode(tokens);
        text.empty() ? void(++empty) : documents.push_back(text);
      },
      stop);
  EXPECT_EQ(empty, expected_empty);
  return documents;
}

class Corpus : public ::testing::Test {
 protected:
  std::vector<std::string> names(const std::vector<std::string>& patterns) {
    std::vector<std::string> found;
    for (const auto& file : resolve(patterns))
      found.push_back(fs::relative(file.path, folder_.path()).string());
    return found;
  }
  std::string in(const std::string& name) { return (folder_ / name).string(); }

  Folder folder_;
};

using Names = std::vector<std::string>;

TEST_F(Corpus, FilesDirectoriesAndGlobsEachOnceSorted) {
  for (const char* name :
       {"b.txt", "a.txt", "sub/z.txt", "sub/deep/y.h", "c.md", "we[i]rd.txt", ".hidden.txt", "sub/.git/x"})
    folder_.write(name, "x");
  EXPECT_EQ(names({in("b.txt"), in("a.txt")}), (Names{"a.txt", "b.txt"}));
  EXPECT_EQ(names({in("sub")}), (Names{"sub/deep/y.h", "sub/z.txt"}));
  EXPECT_EQ(names({in("*.txt")}), (Names{"a.txt", "b.txt", "we[i]rd.txt"}));
  EXPECT_EQ(names({in("we[i]rd.txt")}), (Names{"we[i]rd.txt"}));
  EXPECT_EQ(names({in("s*")}), (Names{"sub/deep/y.h", "sub/z.txt"}));
  EXPECT_EQ(names({in(".hidden.txt"), in("sub/.git")}), (Names{".hidden.txt", "sub/.git/x"}));
  EXPECT_EQ(names({in("*.txt"), in("a.txt"), in("sub/../a.txt"), folder_.path().string()}).size(), 6u);
}

TEST_F(Corpus, FollowsLinksAlsoInLoops) {
  folder_.write("real/a.txt", "x");
  fs::create_directory(folder_ / "links");
  fs::create_directory_symlink(folder_ / "real", folder_ / "links" / "r");
  fs::create_symlink(folder_ / "absent", folder_ / "links" / "dangling");
  EXPECT_EQ(names({in("links")}), (Names{"real/a.txt"}));
  fs::create_directory_symlink(folder_ / "links", folder_ / "links" / "again");
  fs::create_directory_symlink(folder_ / "links", folder_ / "real" / "back");
  EXPECT_EQ(names({in("links")}), (Names{"real/a.txt"}));
}

TEST_F(Corpus, APatternThatMatchesNothingIsNamed) {
  folder_.write("a.txt", "x");
  fs::create_directory(folder_ / "empty");
  for (const char* name : {"absent.txt", "*.jsonl", "empty", "empty/*"}) {
    const std::string error = config_error([&] { resolve({in("a.txt"), in(name)}); });
    EXPECT_NE(error.find(in(name)), std::string::npos) << name << ": " << error;
  }
  EXPECT_NE(config_error([&] { resolve({""}); }), "");
}

TEST_F(Corpus, AFileIsOneDocument) {
  EXPECT_EQ(documents_of(folder_.write("a.txt", "one\ntwo\n")), (Names{"one\ntwo\n"}));
  EXPECT_EQ(documents_of(folder_.write("mark.txt", "\xEF\xBB\xBFtext")), (Names{"text"}));
  EXPECT_EQ(documents_of(folder_.write("nul.txt", std::string_view("a\0b", 3))),
            (Names{std::string("a\0b", 3)}));
  EXPECT_EQ(documents_of(folder_.write("empty.txt", ""), 1), Names{});
}

TEST_F(Corpus, JsonLines) {
  EXPECT_EQ(documents_of(folder_.write("a.jsonl",
                                       "{\"text\": \"one\"}\n\n{\"id\": 1, \"text\": \"z\\u00fc\\n\"}\r\n  \n"
                                       "{\"text\": \"\"}\n{\"text\": \"last\"}"),
                         1),
            (Names{"one", "zü\n", "last"}));
  EXPECT_EQ(documents_of(folder_.write("none.jsonl", "\n")), Names{});
}

TEST_F(Corpus, ABadLineIsNamedByFileAndNumber) {
  const std::string lines[] = {"{\"text\": 3}",
                               "{\"text\": \"open",
                               "[1]",
                               "{}",
                               "null",
                               "{\"text\": \"\\ud800\"}",
                               "}",
                               "{\"text\": \"a\"} {\"text\": \"b\"}",
                               std::string(100000, '[')};
  for (const auto& line : lines) {
    const auto path = folder_.write("bad.jsonl", "{\"text\": \"fine\"}\n\n" + line + "\n");
    const std::string error = config_error([&] { documents_of(path); });
    EXPECT_NE(error.find(path.string() + ":3"), std::string::npos) << line.substr(0, 40) << ": " << error;
  }
}

TEST_F(Corpus, WhatIsNotUtf8IsNamedByFileAndOffset) {
  const std::pair<std::string, std::string> cases[] = {
      {"abc\xff", "0xff at offset 3"},
      {"\xc0\x80", "0xc0 at offset 0"},          // an overlong zero
      {"a\xed\xa0\x80", "0xed at offset 1"},     // a surrogate
      {"ab\xe2\x82", "0xe2 at offset 2"},        // cut off
      {"\xf5\x80\x80\x80", "0xf5 at offset 0"},  // above U+10FFFF
      {std::string("\x7f"
                   "ELF\x02\x01\x01\x00\x90",
                   9),
       "0x90 at offset 8"}};
  for (const auto& [text, expected] : cases)
    for (const char* name : {"bad.txt", "bad.jsonl"}) {
      const auto path = folder_.write(name, text);
      const std::string error = config_error([&] { documents_of(path); });
      EXPECT_NE(error.find(path.string()), std::string::npos) << error;
      EXPECT_NE(error.find(expected), std::string::npos) << error;
    }
}

}  // namespace
}  // namespace isograd
