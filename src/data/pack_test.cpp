// Corpus to shards and back.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

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
    EXPECT_EQ(shards_in_cache(), shards.size()) << why;  // what belonged to other inputs is gone
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
  repacks("a torn manifest");
  write_file(folder_ / "cache" / ".manifest.json", "[]");
  repacks("a manifest of another kind");
  EXPECT_FALSE(
      pack_corpus({.patterns = {text("a.txt")}, .shard_tokens = 7}, *byte_tokenizer(), folder_ / "cache")
          .empty());
  repacks("another shard size in between");
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
  fs::resize_file(first[0], 70);  // its own, damaged: packed again
  EXPECT_EQ(pack(both), first);
  EXPECT_FALSE(summary_.reused);
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
