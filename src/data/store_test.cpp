// Hostile and foreign shards.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <random>

#include "data/store.hpp"
#include "data/test_support.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using testing::config_error;
using testing::Folder;
using testing::read_all;
using testing::read_document;

using Documents = std::vector<std::vector<std::int64_t>>;

std::string bytes_of(const auto& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])};
}

fs::path write_shard(const fs::path& path, const Documents& documents, std::int64_t vocabulary = 258,
                     const std::string& tokenizer = "bytes") {
  ShardWriter writer(path, tokenizer, vocabulary);
  for (const auto& document : documents)
    writer.add(std::vector<std::uint32_t>(document.begin(), document.end()));
  writer.finish();
  return path;
}

const Documents kDocuments = {{256, 1, 2, 257}, {256, 257}, {256, 9, 8, 7, 6, 5, 257}};

TEST(Store, ReadsWhatWasWrittenInBothWidths) {
  const Folder folder;
  for (std::int64_t vocabulary : {258, 65536, 65537, 1 << 20}) {
    Documents documents = kDocuments;
    documents.push_back({vocabulary - 1, 0});
    const auto path = write_shard(folder / "a.isograd", documents, vocabulary);
    const auto store = TokenStore::open({path, path});
    EXPECT_EQ(store->num_documents(), 8);
    EXPECT_EQ(store->num_tokens(), 30);
    EXPECT_EQ(store->max_token(), vocabulary - 1);
    EXPECT_EQ(store->tokenizer_name(), "bytes");
    Documents twice = documents;
    twice.insert(twice.end(), documents.begin(), documents.end());
    EXPECT_EQ(read_all(*store), twice);
    std::vector<std::int64_t> part(3);
    store->read(6, 2, part);
    EXPECT_EQ(part, (std::vector<std::int64_t>{8, 7, 6}));
    EXPECT_THROW(store->read(6, 5, part),
                 BrokenInvariant);  // beyond the document, but within the file
    EXPECT_THROW(store->read(6, -1, part), BrokenInvariant);
    EXPECT_THROW(store->document_length(8), BrokenInvariant);
    const auto width = vocabulary <= 65536 ? 2u : 4u;
    EXPECT_EQ(fs::file_size(path), 64 + 8 + (15 * width + 7) / 8 * 8 + 8 * 5u);
  }
}

TEST(Store, TruncatedAnywhereIsRefusedByName) {
  const Folder folder;
  const std::string whole = read_file(write_shard(folder / "a.isograd", kDocuments));
  for (const char* name : {"cut.isograd", "cut.bin"})
    for (std::size_t length = name == std::string("cut.bin") ? 8 : 0; length < whole.size(); ++length) {
      const auto path = folder.write(name, whole.substr(0, length));
      EXPECT_NE(config_error([&] { TokenStore::open({path}); }).find(path.string()), std::string::npos)
          << length;
    }
  EXPECT_NE(config_error([&] { TokenStore::open({folder.write("long", whole + "12345678")}); }), "");
  EXPECT_NE(config_error([&] { TokenStore::open({folder / "absent"}); }).find("absent"), std::string::npos);
  EXPECT_NE(config_error([&] { TokenStore::open({}); }).find("no files"), std::string::npos);
}

// Without the check of the file's size, reading missing pages would end this process by SIGBUS.
TEST(Store, AFileThatIsCutShortWhileItIsReadIsNamed) {
  const Folder folder;
  for (const std::uintmax_t left : {std::uintmax_t{0}, std::uintmax_t{80}, std::uintmax_t{8192}}) {
    const auto path = write_shard(folder / "a.isograd", Documents(10000, kDocuments[2]));
    const auto store = TokenStore::open({path});
    const auto size = fs::file_size(path);
    EXPECT_EQ(read_document(*store, 9999), kDocuments[2]);
    fs::resize_file(path, left);
    const auto said = config_error([&] { read_document(*store, 9999); });
    for (const std::string& part :
         {path.string(), fmt::format("found {} bytes", left), fmt::format("the {} bytes", size)})
      EXPECT_NE(said.find(part), std::string::npos) << said;
  }
  // Mapped data stays whole when another file takes the name, or the file is removed.
  const auto path = write_shard(folder / "a.isograd", kDocuments);
  const auto store = TokenStore::open({path});
  write_shard(path, {{256, 257}});
  EXPECT_EQ(read_all(*store), kDocuments);
  fs::remove(path);
  EXPECT_EQ(read_all(*store), kDocuments);
}

TEST(Store, EveryFlippedBitIsFound) {
  const Folder folder;
  const std::string whole = read_file(write_shard(folder / "a.isograd", kDocuments));
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    const auto path = folder.write("damaged.isograd", damaged);
    const std::string error = config_error([&] { TokenStore::open({path}); });
    EXPECT_NE(error.find(path.string()), std::string::npos) << "bit " << bit;
    // Only the checksum protects tokens and offsets, so its message must name it.
    if (bit / 8 >= 72) {
      EXPECT_NE(error.find("checksum"), std::string::npos) << error;
    }
  }
}

// Header words and offsets with extreme values and a valid checksum. nanoGPT's shards are plain numbers: a
// damaged isograd shard whose name ends in .bin must not be read as one of them.
TEST(Store, AFlippedBitOfTheMagicNumberIsFoundUnderAnyName) {
  const Folder folder;
  const std::string whole = read_file(write_shard(folder / "whole.isograd", kDocuments));
  for (const char* name : {"flipped.isograd", "flipped.bin"})
    for (std::size_t bit = 0; bit < 64; ++bit) {
      std::string flipped = whole;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      const auto path = folder.write(name, flipped);
      EXPECT_NE(config_error([&] { TokenStore::open({path}); }).find("magic number"), std::string::npos)
          << name << " " << bit;
    }
  // The whole magic number is gone.
  const auto path = folder.write("gone.bin", "01234567" + whole.substr(8));
  EXPECT_NE(config_error([&] { TokenStore::open({path}); }).find("magic number"), std::string::npos);
}

TEST(Store, LyingHeadersWithTheRightChecksumDoNotCrash) {
  const Folder folder;
  const std::string whole = read_file(write_shard(folder / "a.isograd", kDocuments));
  const std::size_t offsets_at = whole.size() - 8 * 4;
  std::vector<std::size_t> words = {
      8, 16, 24, 32, 40, 48, offsets_at, offsets_at + 8, offsets_at + 16, offsets_at + 24};
  int refused = 0, accepted = 0;
  for (const std::size_t at : words)
    for (const std::uint64_t value :
         {0ull, 1ull, 5ull, 258ull, 1ull << 32, 1ull << 61, 1ull << 63, ~0ull, ~0ull - 7}) {
      std::string lie = whole;
      std::memcpy(lie.data() + at, &value, 8);
      XXH3_state_t* state = XXH3_createState();
      XXH3_64bits_reset(state);
      XXH3_64bits_update(state, lie.data() + 64, lie.size() - 64);
      XXH3_64bits_update(state, lie.data(), 56);
      const std::uint64_t checksum = XXH3_64bits_digest(state);
      XXH3_freeState(state);
      std::memcpy(lie.data() + 56, &checksum, 8);
      const auto path = folder.write("lie.isograd", lie);
      if (config_error([&] { read_all(*TokenStore::open({path})); }).empty())
        ++accepted;
      else
        ++refused;
    }
  // These are still legal: vocabularies of 258 and 2^32, a name of 1 or 5 bytes, a first document at 0, a
  // second at 1 or 5, a third at 5.
  EXPECT_EQ(accepted, 8) << refused;
}

std::string llm_c(std::int32_t magic, std::int32_t version, const std::string& tokens, std::int32_t count) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic, header[1] = version, header[2] = count;
  return bytes_of(header) + tokens;
}

TEST(Store, LlmCShards) {
  const Folder folder;
  const std::vector<std::uint16_t> narrow = {50256, 1, 2, 50256, 3, 50256, 50256, 4};
  const std::vector<std::uint32_t> wide = {128000, 1, 2, 128000, 70000};
  const auto gpt2 = folder.write("gpt2.bin", llm_c(20240520, 1, bytes_of(narrow), 8));
  const auto llama = folder.write("llama.bin", llm_c(20240801, 7, bytes_of(wide), 5));
  const auto store = TokenStore::open({gpt2, gpt2}, 50256);
  const Documents once = {{50256, 1, 2}, {50256, 3}, {50256}, {50256, 4}};
  Documents twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  EXPECT_EQ(read_all(*store), twice);
  EXPECT_EQ(store->max_token(), 50256u);
  EXPECT_EQ(store->tokenizer_name(), "");
  EXPECT_EQ(read_all(*TokenStore::open({llama}, 128000)), (Documents{{128000, 1, 2}, {128000, 70000}}));
  EXPECT_EQ(read_all(*TokenStore::open({llama})), (Documents{{128000, 1, 2, 128000, 70000}}));

  auto error = [&](const std::string& content) {
    return config_error([&] { TokenStore::open({folder.write("bad.bin", content)}); });
  };
  EXPECT_NE(error(llm_c(20240520, 2, bytes_of(narrow), 8)).find("version 2"), std::string::npos);
  EXPECT_NE(error(llm_c(20240520, 1, bytes_of(narrow), 9)).find("1042 bytes for 9 tokens"),
            std::string::npos);
  EXPECT_NE(error(llm_c(20240520, 1, bytes_of(narrow), -1)).find("bytes for"), std::string::npos);
  EXPECT_NE(error(llm_c(20240520, 1, "", 0)), "");
  EXPECT_NE(error(llm_c(20240521, 1, bytes_of(narrow), 8)).find("without its magic number"),
            std::string::npos);
  const std::string whole = llm_c(20240520, 1, bytes_of(narrow), 8);
  for (std::size_t length = 1024; length < whole.size(); ++length)
    EXPECT_NE(error(whole.substr(0, length)), "") << length;
}

TEST(Store, NanoGptShards) {
  const Folder folder;
  const std::vector<std::uint16_t> tokens = {5, 6, 0, 7, 0, 8};
  const auto path = folder.write("train.bin", bytes_of(tokens));
  EXPECT_EQ(read_all(*TokenStore::open({path}, 0)), (Documents{{5, 6, 0}, {7, 0}, {8}}));
  EXPECT_EQ(read_all(*TokenStore::open({path})), (Documents{{5, 6, 0, 7, 0, 8}}));
  EXPECT_NE(config_error([&] { TokenStore::open({folder.write("odd.bin", "abc")}); }).find("3 bytes"),
            std::string::npos);
  EXPECT_NE(config_error([&] { TokenStore::open({folder.write("empty.bin", "")}); }).find("empty"),
            std::string::npos);
  // Only *.bin may lack isograd's header.
  EXPECT_NE(config_error([&] { TokenStore::open({folder.write("train.dat", bytes_of(tokens))}); }), "");
}

TEST(Store, ShardsOfDifferentTokenizersDoNotMix) {
  const Folder folder;
  const auto a = write_shard(folder / "a.isograd", kDocuments);
  const auto b = write_shard(folder / "b.isograd", kDocuments, 300, "sentencepiece:0123");
  const auto c = folder.write("c.bin", "abcd");
  EXPECT_NE(config_error([&] { TokenStore::open({a, b}); }).find("sentencepiece:0123"), std::string::npos);
  EXPECT_NE(config_error([&] { TokenStore::open({a, c}); }).find("a foreign shard"), std::string::npos);
}

// Random bytes under every name and behind every magic give an error or a readable store, never a crash.
TEST(Store, NoiseDoesNotCrash) {
  const Folder folder;
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    std::string noise(random() % 3000, '\0');
    for (auto& byte : noise) byte = static_cast<char>(random() % (i % 2 ? 256 : 2));
    const std::int32_t magic = i % 3 ? 20240520 : 20240801;
    if (noise.size() > 8 && i % 5 < 2) std::memcpy(noise.data(), kShardMagic, 8);
    if (noise.size() > 8 && i % 5 == 2) std::memcpy(noise.data(), &magic, 4);
    for (const char* name : {"noise.bin", "noise.isograd"}) {
      const auto path = folder.write(name, noise);
      config_error([&] { describe(*TokenStore::open({path}, 1)); });
    }
  }
}

TEST(Store, DescribeEscapesWhatWouldReachTheTerminal) {
  const Folder folder;
  const auto bytes = byte_tokenizer();
  Documents documents;
  for (const char* text : {"plain\n", "\x1b[31mred\x7f \xE2\x80\xAE", "third", "fourth"}) {
    const auto tokens = bytes->encode(text);
    documents.emplace_back(tokens.begin(), tokens.end());
  }
  const auto store = TokenStore::open({write_shard(folder / "a.isograd", documents)});
  const std::string text = describe(*store, bytes.get());
  EXPECT_NE(text.find("documents  4"), std::string::npos) << text;
  EXPECT_NE(text.find("plain\\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\\u{1b}[31mred\\u{7f} \\u{202e}"), std::string::npos) << text;
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_EQ(text.find("fourth"), std::string::npos);
  EXPECT_NE(describe(*store).find("256 112 108"), std::string::npos);  // without a tokenizer: the numbers
}

}  // namespace
}  // namespace isograd
