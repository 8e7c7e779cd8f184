// Records of .jsonl files to tokens and weights, compressed files, and bad lines.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <nlohmann/json.hpp>

#include "data/corpus.hpp"
#include "data/test_support.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using testing::config_error;
using testing::Folder;

Encoded encoded(const std::string& text, bool all = false) {
  const auto record = nlohmann::json::parse(text);
  return encode({.text = {}, .record = &record}, *byte_tokenizer(), all);
}

// The learnt part of a record's text, the end of the text as "$".
std::string learnt(const Encoded& document) {
  std::string text;
  for (std::size_t i = 0; i < document.tokens.size(); ++i)
    if (document.weights.empty() || document.weights[i] != 0)
      text += document.tokens[i] < 256    ? static_cast<char>(document.tokens[i])
              : document.tokens[i] == 256 ? '^'
                                          : '$';
  return text;
}

TEST(Records, ACompletionIsLearntAndItsPromptIsNot) {
  const char* record = R"({"prompt": "ask", "completion": "tell"})";
  EXPECT_EQ(learnt(encoded(record)), "tell$");
  EXPECT_EQ(learnt(encoded(record, true)), "^asktell$");
  EXPECT_EQ(learnt(encoded(R"({"text": "tell"})")), "^tell$");
}

TEST(Records, WeightsAreOfTheSampleAndOfEachToken) {
  EXPECT_EQ(encoded(R"({"text": "ab", "weight": 0.5})").weights, std::vector<float>(4, 0.5F));
  const Encoded tokens = encoded(R"({"tokens": [256, 7, 8, 257], "weights": [0, 1, 0.25, 1], "weight": 2})");
  EXPECT_EQ(tokens.tokens, (std::vector<std::uint32_t>{256, 7, 8, 257}));
  EXPECT_EQ(tokens.weights, (std::vector<float>{0, 2, 0.5F, 2}));
}

TEST(Records, BadOnesSayWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"other": 1})", "no field \"text\""},
      {R"({"text": 3})", "of type number"},
      {R"({"prompt": "a"})", "without \"completion\""},
      {R"({"completion": "a"})", "without \"prompt\""},
      {R"({"prompt": "a", "completion": 3})", "of type number"},
      {R"({"prompt": [{"role": "user"}], "completion": "text"})", "\"completion\" without messages"},
      {R"({"messages": []})", "without messages"},
      {R"({"messages": [{"content": "a"}]})", "without a role"},
      {R"({"messages": [{"role": "user", "weight": -1}]})", "-1"},
      {R"({"text": "ab", "weight": -1})", "weight = -1"},
      {R"({"text": "ab", "weight": "much"})", "much"},
      {R"({"text": "ab", "weight": 1e300})", "1e+300"},
      {R"({"text": "ab", "weight": 0})", "all zero"},
      {R"({"tokens": [1, 2], "weights": [1, 0]})", "all zero"},
      {R"({"tokens": [1, 2], "weights": [1]})", "1 weights of 2 tokens"},
      {R"({"tokens": [1, 2], "weights": [1, -3]})", "-3"},
      {R"({"tokens": [1, 258]})", "258"},
      {R"({"tokens": [1, 0.5]})", "0.5"},
      {R"({"tokens": [1, 2], "weights": [1e30, 1e30], "weight": 1e30})", "no float holds"},
      {R"({"prompt": [{"role": "user"}], "completion": [{"role": "assistant", "weight": 2}]})",
       "in \"completion\""},
      {R"({"tokens": 4})", "no list"}};
  for (const auto& [record, expected] : cases) {
    try {
      encoded(record);
      ADD_FAILURE() << record << " was accepted";
    } catch (const BadLine& problem) {
      EXPECT_NE(problem.found.find(expected), std::string::npos) << record << ": " << problem.found;
      EXPECT_FALSE(problem.expected.empty());
    }
  }
  EXPECT_NE(config_error([] {
              encoded(R"({"messages": [{"role": "assistant", "content": "a"}]})");
            }).find("chat template"),
            std::string::npos);
}

// ---- files ----

std::string gzipped(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(text.size() + 1000, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string zstded(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

class Files : public ::testing::Test {
 protected:
  std::vector<fs::path> pack(const CorpusOptions& options) {
    return pack_corpus(options, *byte_tokenizer(), folder_ / "cache", &summary_);
  }
  std::vector<fs::path> pack_all(CorpusOptions::OnBadLine on_bad_line = CorpusOptions::OnBadLine::kStop) {
    return pack({.patterns = {(folder_ / "text").string()}, .on_bad_line = on_bad_line});
  }
  Folder folder_;
  PackSummary summary_;
};

std::string many_lines() {
  std::string lines;
  for (int i = 0; i < 20000; ++i)
    lines += fmt::format("{{\"text\": \"line {} {}\"}}\n", i, i * 7919 % 104729);
  return lines;
}

TEST_F(Files, CompressedOnesAreTheSameDocuments) {
  const std::string lines = many_lines();
  std::vector<std::vector<std::vector<std::int64_t>>> found;
  const std::pair<std::string, std::string> files[] = {
      {"a.jsonl", lines}, {"a.jsonl.gz", gzipped(lines)}, {"a.jsonl.zst", zstded(lines)}};
  for (const auto& [name, bytes] : files) {
    fs::remove_all(folder_ / "text");
    folder_.write("text/" + name, bytes);
    found.push_back(testing::read_all(*TokenStore::open(pack_all())));
    EXPECT_EQ(summary_.documents, 20000) << name;
  }
  EXPECT_EQ(found[0], found[1]);
  EXPECT_EQ(found[0], found[2]);
  // Two streams one after the other are one text, as zcat and zstdcat have it.
  folder_.write("text/a.jsonl.zst", zstded("{\"text\": \"a\"}\n") + zstded("{\"text\": \"b\"}"));
  EXPECT_EQ(testing::read_all(*TokenStore::open(pack_all())).size(), 2u);
}

TEST_F(Files, CompressedOnesThatAreCutShortOrDamagedAreNamed) {
  const std::string lines = many_lines();
  for (const auto& [name, whole] :
       {std::pair("a.jsonl.gz", gzipped(lines)), {"a.jsonl.zst", zstded(lines)}}) {
    std::string damaged = whole;
    for (std::size_t i = damaged.size() / 2; i < damaged.size() / 2 + 40; ++i)
      damaged[i] = static_cast<char>(~damaged[i]);
    for (const std::string& bytes :
         {whole.substr(0, whole.size() - 1), whole.substr(0, whole.size() / 2), whole.substr(0, 12),
          std::string(), damaged, std::string("{\"text\": \"plain\"}\n")}) {
      fs::remove_all(folder_ / "text");
      const fs::path path = folder_.write(std::string("text/") + name, bytes);
      for (const auto on : {CorpusOptions::OnBadLine::kStop, CorpusOptions::OnBadLine::kSkip}) {
        const std::string error = config_error([&] { pack_all(on); });
        EXPECT_NE(error.find(path.string()), std::string::npos)
            << name << " of " << bytes.size() << ": " << error;
        // A damaged byte may make a line bad before the checksum at the end of the file is reached.
        if (bytes != damaged || on == CorpusOptions::OnBadLine::kSkip)
          EXPECT_NE(error.find("Copy it again"), std::string::npos) << error;
      }
    }
  }
}

TEST_F(Files, BadLinesAreLeftOutCountedAndListed) {
  folder_.write("text/a.jsonl",
                "{\"text\": \"one\"}\n{\"text\": 3}\n\n{broken\n{\"text\": \"two\"}\n\"\xff\"\n");
  EXPECT_NE(config_error([&] { pack_all(); }).find("a.jsonl:2"), std::string::npos);
  const auto shards = pack_all(CorpusOptions::OnBadLine::kSkip);
  EXPECT_EQ(TokenStore::open(shards)->num_documents(), 2);
  EXPECT_EQ(summary_.bad_lines, 3);
  EXPECT_NE(summary_.first_bad.find("a.jsonl:2"), std::string::npos) << summary_.first_bad;
  const std::string list = read_file(folder_ / "cache" / ".bad-lines.txt");
  EXPECT_EQ(std::ranges::count(list, '\n'), 3);
  for (const char* place : {"a.jsonl:2", "a.jsonl:4", "a.jsonl:6"})
    EXPECT_NE(list.find(place), std::string::npos);
  EXPECT_EQ(pack_all(CorpusOptions::OnBadLine::kSkip), shards);  // again, and still says so
  EXPECT_TRUE(summary_.reused);
  EXPECT_EQ(summary_.bad_lines, 3);
  EXPECT_NE(config_error([&] { pack_all(); }).find("a.jsonl:2"),
            std::string::npos);  // never hidden by the cache
}

TEST_F(Files, ADoubledMarkIsDroppedWhereThatIsAskedFor) {
  folder_.write("text/a.jsonl", "{\"tokens\": [256, 256, 7, 257, 257]}\n{\"tokens\": [256, 7, 257]}\n");
  CorpusOptions options{.patterns = {(folder_ / "text").string()}};
  EXPECT_EQ(TokenStore::open(pack(options))->num_tokens(), 8);
  EXPECT_EQ(summary_.doubled_marks, 1);
  options.drop_doubled_mark = true;
  EXPECT_EQ(testing::read_document(*TokenStore::open(pack(options)), 0),
            (std::vector<std::int64_t>{256, 7, 257}));
}

RC_GTEST_FIXTURE_PROP(Files, WeightsComeBackFromShards, ()) {
  std::vector<std::vector<float>> expected;
  std::string lines;
  const std::int64_t documents = *rc::gen::inRange(1, 8);
  for (std::int64_t d = 0; d < documents; ++d) {
    const auto raw = *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 3));
    std::vector<float> weights{1, 1};
    for (const int each : raw) weights.push_back(static_cast<float>(each) / 2);
    const std::vector<int> tokens(weights.size(), 9);
    lines += nlohmann::json{{"tokens", tokens}, {"weights", weights}}.dump() + "\n";
    expected.push_back(weights);
  }
  fs::remove_all(folder_ / "text");
  folder_.write("text/a.jsonl", lines);
  const auto store = TokenStore::open(pack({.patterns = {(folder_ / "text").string()}, .shard_tokens = 20}));
  bool ones = true, mask = true;
  for (std::size_t d = 0; d < expected.size(); ++d) {
    for (std::size_t begin = 0; begin < expected[d].size(); ++begin) {
      std::vector<float> found(expected[d].size() - begin);
      store->read_weights(static_cast<std::int64_t>(d), static_cast<std::int64_t>(begin), found);
      RC_ASSERT(found == std::vector<float>(expected[d].begin() + static_cast<std::ptrdiff_t>(begin),
                                            expected[d].end()));
    }
    for (const float weight : expected[d]) ones &= weight == 1, mask &= weight == 1 || weight == 0;
  }
  using Weights = TokenStore::Weights;
  RC_ASSERT(store->weights() == (ones ? Weights::kOnes : mask ? Weights::kMask : Weights::kNumbers));
}

TEST_F(Files, AShardWithDamagedWeightsIsRefused) {
  folder_.write("text/a.jsonl", "{\"tokens\": [1, 2, 3], \"weights\": [1, 0, 0.5]}\n");
  const fs::path shard = pack_all().at(0);
  const std::string whole = read_file(shard);
  for (std::size_t at = 64; at < whole.size(); ++at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 0x40);
    EXPECT_NE(config_error([&] { TokenStore::open({folder_.write("damaged.isograd", bytes)}); }), "") << at;
  }
}

}  // namespace
}  // namespace isograd
