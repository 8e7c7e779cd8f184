// Corpus to shards and back.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>

#include "data/corpus.hpp"
#include "data/test_support.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using testing::config_error;
using testing::Folder;

std::vector<std::string> texts(const TokenStore& store) {
  const auto bytes = byte_tokenizer();
  std::vector<std::string> found;
  for (const auto& document : testing::read_all(store))
    found.push_back(bytes->decode(std::vector<std::uint32_t>(document.begin(), document.end())));
  return found;
}

class Pack : public ::testing::Test {
 protected:
  std::vector<fs::path> pack(const CorpusOptions& options) {
    return pack_corpus(options, *byte_tokenizer(), folder_ / "cache", &summary_);
  }
  std::size_t shards_in_cache() const {
    std::size_t count = 0;
    for (const auto& entry : fs::directory_iterator(folder_ / "cache"))
      count += entry.path().extension() == ".isograd";
    return count;
  }
  std::string text(const std::string& name) const { return (folder_ / "text" / name).string(); }

  Folder folder_;
  PackSummary summary_;
};

TEST_F(Pack, DocumentsInPathOrderEmptyOnesCounted) {
  folder_.write("text/b.txt", "bee");
  folder_.write("text/a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"text\": \"two\"}\n");
  folder_.write("text/c/empty.txt", "");
  const auto shards = pack({.patterns = {(folder_ / "text").string()}});
  ASSERT_EQ(shards.size(), 1u);
  const auto store = TokenStore::open(shards);
  EXPECT_EQ(texts(*store), (std::vector<std::string>{"one", "two", "bee"}));
  EXPECT_EQ(store->tokenizer_name(), "bytes");
  EXPECT_EQ(summary_.files, 3);
  EXPECT_EQ(summary_.documents, 3);
  EXPECT_EQ(summary_.tokens, 15);
  EXPECT_EQ(summary_.empty_documents, 2);
  EXPECT_FALSE(summary_.reused);
}

TEST_F(Pack, ShardsAreBoundedAndHoldWholeDocuments) {
  std::vector<std::string> expected;
  for (int i = 0; i < 12; ++i) {
    expected.push_back(std::string(static_cast<std::size_t>(i), 'x') + "!");
    folder_.write("text/" + std::to_string(100 + i) + ".txt", expected.back());
  }
  const auto shards = pack({.patterns = {text("*")}, .shard_tokens = 16});
  EXPECT_GT(shards.size(), 5u);
  for (const auto& shard : shards) {
    const auto store = TokenStore::open({shard});
    EXPECT_TRUE(store->num_tokens() <= 16 || store->num_documents() == 1) << shard;
  }
  EXPECT_EQ(texts(*TokenStore::open(shards)), expected);
}

TEST_F(Pack, TheSameInputsArePackedOnce) {
  folder_.write("text/a.txt", "one");
  const CorpusOptions options{.patterns = {text("*.txt")}};
  const auto first = pack(options);
  const auto written = fs::last_write_time(first[0]);
  const PackSummary before = summary_;
  EXPECT_EQ(pack(options), first);
  EXPECT_TRUE(summary_.reused);
  EXPECT_EQ(summary_.documents, before.documents);
  EXPECT_EQ(summary_.tokens, before.tokens);
  EXPECT_EQ(fs::last_write_time(first[0]), written);

  auto repacks = [&](const char* why) {
    const auto shards = pack(options);
    EXPECT_FALSE(summary_.reused) << why;
    EXPECT_EQ(shards_in_cache(), shards.size()) << why;  // shards of other inputs are removed
    return texts(*TokenStore::open(shards));
  };
  folder_.write("text/a.txt", "longer");
  EXPECT_EQ(repacks("another size"), (std::vector<std::string>{"longer"}));
  folder_.write("text/a.txt", "second");
  fs::last_write_time(folder_ / "text" / "a.txt", fs::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_EQ(repacks("another time"), (std::vector<std::string>{"second"}));
  folder_.write("text/b.txt", "new");
  EXPECT_EQ(repacks("another file"), (std::vector<std::string>{"second", "new"}));
  fs::resize_file(pack(options)[0], 70);
  repacks("a truncated shard");
  fs::remove(pack(options)[0]);
  repacks("a lost shard");
  write_file(folder_ / "cache" / ".manifest.json", "{\"inputs\": 3");
  repacks("a truncated manifest");
  write_file(folder_ / "cache" / ".manifest.json", "[]");
  repacks("a manifest of another kind");
  EXPECT_FALSE(
      pack_corpus({.patterns = {text("a.txt")}, .shard_tokens = 7}, *byte_tokenizer(), folder_ / "cache")
          .empty());
  repacks("another shard size in between");
}

TEST_F(Pack, ShardsThatAKilledPackingLeftAreNotTheCorpus) {
  folder_.write("text/a.txt", "one");
  EXPECT_TRUE(packed_shards(folder_ / "cache").empty());
  const auto shards = pack({.patterns = {text("*.txt")}});
  fs::copy_file(shards[0], folder_ / "cache" / "tokens-00000000-00000.isograd");
  EXPECT_EQ(packed_shards(folder_ / "cache"), shards);
  fs::remove(shards[0]);
  EXPECT_TRUE(packed_shards(folder_ / "cache").empty());
}

TEST_F(Pack, WhatFilesHoldDecidesNotTheirTimes) {
  const fs::path file = folder_.write("text/a.txt", "first");
  const auto time = fs::last_write_time(file);
  const CorpusOptions options{.patterns = {text("*.txt")}};
  const auto packed = [&] { return texts(*TokenStore::open(pack(options))); };
  EXPECT_EQ(packed(), std::vector<std::string>{"first"});
  // Another text of the same size and time, in the same file and in another file of its name.
  std::ofstream(file, std::ios::in) << "other";
  fs::last_write_time(file, time);
  EXPECT_EQ(packed(), std::vector<std::string>{"other"});
  EXPECT_FALSE(summary_.reused);
  fs::last_write_time(folder_.write("text/b", "third"), time);
  fs::rename(folder_ / "text/b", file);
  EXPECT_EQ(packed(), std::vector<std::string>{"third"});
  // The same text with another time.
  fs::last_write_time(file, time + std::chrono::hours(1));
  EXPECT_EQ(packed(), std::vector<std::string>{"third"});
  EXPECT_TRUE(summary_.reused);
  folder_.write("text/a.txt", "third");
  packed();
  EXPECT_TRUE(summary_.reused);
}

// As the post-processor of a tokenizer.json: it adds the token "<" in front and the token ">" at the end.
class MarkingTokenizer final : public Tokenizer {
 public:
  explicit MarkingTokenizer(char begin) : begin_(begin) {}
  std::string name() const override { return "marking"; }
  std::int64_t vocabulary() const override { return 256; }
  std::int64_t bos() const override { return begin_; }
  std::int64_t eos() const override { return '>'; }
  std::vector<std::uint32_t> encode(std::string_view text) const override {
    std::vector<std::uint32_t> tokens{static_cast<std::uint32_t>(begin_)};
    tokens.insert(tokens.end(), text.begin(), text.end());
    tokens.push_back('>');
    return tokens;
  }
  std::string decode(std::span<const std::uint32_t>) const override { return ""; }

 private:
  char begin_;
};

TEST_F(Pack, AMarkThatTextAndTokenizerBothSetIsNamed) {
  folder_.write("text/a.jsonl",
                "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"text\": \"a<b>c\"}\n{\"text\": \"<two\"}\n");
  folder_.write("text/b.txt", "three>");
  const auto warned = [&](const Tokenizer& tokenizer, const std::string& pattern) {
    ::testing::internal::CaptureStderr();
    pack_corpus({.patterns = {text(pattern)}}, tokenizer, folder_ / "marks", &summary_);
    return ::testing::internal::GetCapturedStderr();
  };
  for (const bool reused : {false, true}) {
    const std::string said = warned(MarkingTokenizer('<'), "*");
    EXPECT_EQ(summary_.reused, reused);
    EXPECT_EQ(summary_.doubled_marks, 2);
    EXPECT_EQ(summary_.first_doubled, "document 3 of " + text("a.jsonl") + " begins with token 60 twice");
    EXPECT_NE(said.find("warning: " + summary_.first_doubled + ", and so do 1 more documents"),
              std::string::npos)
        << said;
  }
  EXPECT_NE(
      warned(MarkingTokenizer('<'), "b.txt").find("document 1 of " + text("b.txt") + " ends with token 62"),
      std::string::npos);
  // One token for both marks: the tokenizer alone gives an empty text two of them.
  folder_.write("text/b.txt", "three");
  EXPECT_EQ(warned(MarkingTokenizer('>'), "b.txt"), "");
  EXPECT_EQ(summary_.doubled_marks, 0);
}

TEST_F(Pack, BadCorporaAreRefused) {
  EXPECT_NE(config_error([&] { pack({}); }).find("no patterns"), std::string::npos);
  EXPECT_NE(config_error([&] { pack({.patterns = {text("absent")}}); }).find("absent"), std::string::npos);
  folder_.write("text/empty.txt", "");
  EXPECT_NE(config_error([&] { pack({.patterns = {text("empty.txt")}}); }).find("empty corpus"),
            std::string::npos);
  const auto bad = folder_.write("text/image.png", "\x89PNG\r\n");
  EXPECT_NE(config_error([&] { pack({.patterns = {(folder_ / "text").string()}}); }).find(bad.string()),
            std::string::npos);
  EXPECT_EQ(shards_in_cache(), 0u);  // nothing half-made is left
  EXPECT_NE(config_error([&] { pack({.patterns = {text("*")}, .shard_tokens = 0}); }).find("shard_tokens"),
            std::string::npos);
  folder_.write("file", "x");
  EXPECT_NE(config_error([&] {
              pack_corpus({.patterns = {(folder_ / "file").string()}}, *byte_tokenizer(),
                          folder_ / "file" / "in");
            }).find("pack into"),
            std::string::npos);
}

TEST_F(Pack, OtherShardsAreKeptWhereTheyAreNotToBeReplaced) {
  folder_.write("text/a.txt", "one");
  folder_.write("text/b.txt", "two");
  const CorpusOptions both{.patterns = {text("*.txt")}, .replace = false},
      one{.patterns = {text("a.txt")}, .replace = false};
  const auto first = pack(both);
  const std::string refusal = config_error([&] { pack(one); });
  for (const std::string& part : {first[0].filename().string(), std::string("a shard of other text"),
                                  (folder_ / "cache").string(), std::string("--overwrite")})
    EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
  EXPECT_EQ(pack(both), first);
  EXPECT_TRUE(summary_.reused);
  fs::resize_file(first[0], 70);  // our own shard, damaged: packed again
  EXPECT_EQ(pack(both), first);
  EXPECT_FALSE(summary_.reused);
}

// The process that holds the lock is named, and a request to stop ends the wait.
TEST_F(Pack, AHeldLockIsNamedAndWaitedForNoLongerThanAsked) {
  folder_.write("text/a.txt", "one");
  pack({.patterns = {text("a.txt")}});
  const fs::path lock = folder_ / "cache/.lock";
  EXPECT_EQ(fs::status(lock).permissions(), fs::perms::owner_read | fs::perms::owner_write)
      << "others may hold it";
  fs::permissions(lock, fs::perms::group_read | fs::perms::others_read,
                  fs::perm_options::add);  // a lock file of an older version
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t holder = fork();
  ASSERT_GE(holder, 0);
  if (holder == 0) {
    const int file = open(lock.c_str(), O_RDWR);
    const std::string who = "process " + std::to_string(getpid()) + "\n";
    const bool held = flock(file, LOCK_EX) == 0 && ftruncate(file, 0) == 0 &&
                      write(file, who.data(), who.size()) == static_cast<ssize_t>(who.size());
    (void)!write(ready[1], held ? "y" : "n", 1);
    pause();
    _exit(0);
  }
  char held = 0;
  ASSERT_EQ(read(ready[0], &held, 1), 1);
  ASSERT_EQ(held, 'y');
  const auto begun = std::chrono::steady_clock::now();
  const auto after = [&](std::chrono::milliseconds time) {
    return std::chrono::steady_clock::now() - begun > time;
  };
  ::testing::internal::CaptureStderr();
  const std::string said = config_error([&] {
    pack({.patterns = {text("a.txt")}, .stop = [&] { return after(std::chrono::milliseconds(1500)); }});
  });
  const std::string shown = ::testing::internal::GetCapturedStderr(),
                    who = "process " + std::to_string(holder);
  EXPECT_NE(said.find(who + ", which packs there"), std::string::npos) << said;
  EXPECT_NE(shown.find("waiting for " + who), std::string::npos) << shown;
  EXPECT_FALSE(after(std::chrono::seconds(30)));
  EXPECT_EQ(fs::status(lock).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
  close(ready[0]), close(ready[1]);
  pack({.patterns = {text("a.txt")}});
  EXPECT_TRUE(summary_.reused);
}

// Several processes may start at once: one packs, the others wait and use its shards.
TEST_F(Pack, ProcessesDoNotMeet) {
  for (int i = 0; i < 50; ++i) folder_.write("text/" + std::to_string(i), std::string(1000, 'a' + i % 26));
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int status = 3;
      try {
        PackSummary summary;
        const auto shards = pack_corpus({.patterns = {text("*")}, .shard_tokens = 5000}, *byte_tokenizer(),
                                        folder_ / "cache", &summary);
        if (TokenStore::open(shards)->num_tokens() == 50 * 1002) status = summary.reused ? 1 : 0;
      } catch (...) {
        status = 4;
      }
      _exit(status);
    }
    children.push_back(child);
  }
  int packed = 0, reused = 0;
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    packed += WEXITSTATUS(status) == 0, reused += WEXITSTATUS(status) == 1;
  }
  EXPECT_EQ(packed, 1);
  EXPECT_EQ(reused, 3);
}

}  // namespace
}  // namespace isograd
