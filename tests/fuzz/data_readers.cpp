// Texts, shards, tables, videos, tokenizers.
#include <ATen/ATen.h>
#include <sentencepiece_trainer.h>
#include <xxhash.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/python.hpp"
#include "data/corpus.hpp"
#include "data/options.hpp"
#include "data/store.hpp"
#include "data/table.hpp"
#include "data/video_testing.hpp"
#include "fuzz/readers.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;

void prepare_texts(const fs::path& folder) {
  put(folder / "a.txt", "one document, with é and 語\n");
  put(folder / "b.jsonl",
      "{\"text\": \"first\", \"more\": [1, {\"a\": null}]}\n\n{\"text\": \"second \\u00e9\"}\n");
}

void read_texts(const fs::path& file) {
  std::size_t bytes = 0;
  for_each_document(
      file,
      [&](const Document& document) { bytes += encode(document, *byte_tokenizer(), false).tokens.size(); },
      [](const LinePlace&, const BadLine&) {});
}

void prepare_manifests(const fs::path& folder) {
  put(folder.parent_path() / "text-of-manifest/a.txt", "some text");
  pack_corpus({.patterns = {(folder.parent_path() / "text-of-manifest").string()}}, *byte_tokenizer(),
              folder);
}

// Whatever the manifest says, the corpus is packed, or its shards are as they were.
void read_manifests(const fs::path& file) {
  const fs::path folder = file.parent_path(), text = folder.parent_path() / "text-of-manifest";
  const auto shards = pack_corpus({.patterns = {text.string()}}, *byte_tokenizer(), folder);
  TokenStore::open(shards);
}

void prepare_shards(const fs::path& folder) {
  for (const std::int64_t vocabulary : {258, 70'000}) {
    ShardWriter writer(folder / (std::to_string(vocabulary) + ".isograd"), "bytes", vocabulary);
    for (std::uint32_t d = 1; d < 5; ++d) writer.add(std::vector<std::uint32_t>(d, 250 + d));
    writer.finish();
  }
  fs::copy(folder / "258.isograd", folder / "renamed.bin");
  for (const std::int32_t magic : {20240520, 20240801}) {
    std::vector<std::int32_t> header(256, 0);
    header[0] = magic, header[1] = magic == 20240520 ? 1 : 7, header[2] = 6;
    put(folder / (std::to_string(magic) + ".bin"),
        std::string(reinterpret_cast<const char*>(header.data()), 1024) +
            std::string(magic == 20240520 ? 12 : 24, '\3'));
  }
  put(folder / "nano.bin", std::string("\0\1\2\3\4\0\5\0\3\0", 10));
}

void read_shards(const fs::path& file) {
  for (const auto end : {std::optional<std::uint32_t>(), std::optional<std::uint32_t>(3)}) {
    const auto store = TokenStore::open({file}, end);
    for (std::int64_t d = 0; d < store->num_documents(); ++d) {
      std::vector<std::int64_t> tokens(static_cast<std::size_t>(store->document_length(d)));
      store->read(d, 0, tokens);
    }
    describe(*store, byte_tokenizer().get(), 2);
  }
}

std::string right_shard(std::string file) {
  if (file.size() < kShardHeader || std::memcmp(file.data(), kShardMagic, sizeof kShardMagic) != 0)
    return file;
  const std::uint64_t size = file.size();
  std::memcpy(file.data() + 48, &size, 8);
  const std::string hashed = file.substr(kShardHeader) + file.substr(0, 56);
  const std::uint64_t hash = XXH3_64bits(hashed.data(), hashed.size());
  std::memcpy(file.data() + 56, &hash, 8);
  return file;
}

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

// As numpy.savez writes it but for the checksums, which are not read.
std::string npz(const std::vector<std::pair<std::string, std::string>>& members) {
  std::string text, directory;
  for (const auto& [name, data] : members) {
    const std::string sizes = little_endian(data.size(), 4) + little_endian(data.size(), 4);
    directory += little_endian(0x02014b50, 4) + std::string(16, '\0') + sizes +
                 little_endian(name.size(), 2) + std::string(12, '\0') + little_endian(text.size(), 4) + name;
    text += little_endian(0x04034b50, 4) + std::string(14, '\0') + sizes + little_endian(name.size(), 2) +
            std::string(2, '\0') + name + data;
  }
  const std::string count = little_endian(members.size(), 2);
  return text + directory + little_endian(0x06054b50, 4) + std::string(4, '\0') + count + count +
         little_endian(directory.size(), 4) + little_endian(text.size(), 4) + std::string(2, '\0');
}

std::string npy(const std::string& type, const std::string& shape, const std::string& data) {
  const std::string header =
      "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }\n";
  return std::string("\x93NUMPY\x01\x00", 8) + little_endian(header.size(), 2) + header + data;
}

void prepare_tables(const fs::path& folder) {
  put(folder / "a.csv", "length, width,class\n1,2.5,0\r\n\n-3e1, 4 ,1\n");
  put(folder / "b.npz", npz({{"x.npy", npy("<f8", "2, 2", std::string(32, '\0'))},
                             {"y.npy", npy("|u1", "2,", std::string("\0\1", 2))}}));
  put(folder / "c.npz", npz({{"x.npy", npy("<f4", "3, 1", std::string(12, '\0'))},
                             {"y.npy", npy("<i8", "3,", std::string(24, '\0'))}}));
}

void read_tables(const fs::path& file) {
  const Table table = read_table(file, "");
  look_at(table.features), look_at(table.targets);
}

void prepare_videos(const fs::path& folder) {
  const at::Tensor frames = testing::numbered_frames(6, 16, 24);
  testing::write_video(folder / "png.mov", frames);
  testing::write_video(folder / "png.mkv", frames);
  testing::write_video(folder / "mpeg4.mp4", frames,
                       {.codec = AV_CODEC_ID_MPEG4, .format = AV_PIX_FMT_YUV420P});
  testing::write_video(folder / "mpeg4.avi", frames,
                       {.codec = AV_CODEC_ID_MPEG4, .format = AV_PIX_FMT_YUV420P});
  testing::write_video(folder / "mjpeg.mkv", frames,
                       {.codec = AV_CODEC_ID_MJPEG, .format = AV_PIX_FMT_YUVJ420P});
  testing::write_video(folder / "ffv1.mkv", frames,
                       {.codec = AV_CODEC_ID_FFV1, .format = AV_PIX_FMT_YUV444P});
  testing::write_video(
      folder / "mpeg1.mpg", frames,
      {.codec = AV_CODEC_ID_MPEG1VIDEO, .format = AV_PIX_FMT_YUV420P, .frames_per_second = 25});
  testing::write_video(folder / "gif.gif", frames, {.codec = AV_CODEC_ID_GIF, .format = AV_PIX_FMT_RGB8});
  testing::write_video(folder / "apng.apng", frames, {.codec = AV_CODEC_ID_APNG});
}

void read_video(const fs::path& file) {
  VideoOptions options;
  options.height = 16, options.frames_per_second = 0, options.patch = {1, 4, 4};
  look_at(decode_video(file, options));
}

// Files that name an existing video, which no reader may follow.
void prepare_playlists(const fs::path& folder) {
  const fs::path video = folder.parent_path() / "of-playlists.mkv";
  testing::write_video(video, testing::numbered_frames(6, 16, 24));
  for (const auto& [name, text] : testing::playlists(video.string())) put(folder / name, text);
  for (const char* name : {"master.m3u8", "live.mp4"})
    put(folder / name, testing::playlists(name).at("live.m3u8"));  // names itself
}

void read_playlist(const fs::path& file) {
  try {
    read_video(file);
  } catch (const ConfigError&) {
    return;
  }
  throw std::runtime_error("a playlist was followed");
}

void prepare_tokenizers(const fs::path& folder) {
  std::string text;
  for (int i = 0; i < 200; ++i)
    text +=
        "the gradient of many ranks is the gradient of one rank " + std::to_string(i * 7919 % 1000) + "\n";
  put(folder.parent_path() / "tokenizer-text.txt", text);
  const auto train = [&](const std::string& name, const std::string& options) {
    const auto status = sentencepiece::SentencePieceTrainer::Train(
        "--input=" + (folder.parent_path() / "tokenizer-text.txt").string() + " --model_prefix=" +
        (folder / name).string() + " --minloglevel=2 --num_threads=1 --hard_vocab_limit=false " + options);
    if (!status.ok()) throw std::runtime_error(status.ToString());
    fs::remove(folder / (name + ".vocab"));
  };
  train("bpe", "--vocab_size=300 --model_type=bpe --byte_fallback=true");
  train("unigram", "--vocab_size=60 --model_type=unigram --user_defined_symbols=<a>,<ab>,<abc>");
  train("plain", "--vocab_size=60 --model_type=unigram --normalization_rule_name=identity");
  train("small", "--vocab_size=300 --model_type=bpe --normalization_rule_name=identity --byte_fallback=true");
}

void read_tokenizer(const fs::path& file) {
  const auto tokenizer = sentencepiece_tokenizer(file);
  std::string text = "the  gradient <abc> of\u00a0one \ufdfa\u3300 a\u0308 rank\n\xff\xc3 語 ", all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const std::string& one : {text, all, std::string()}) tokenizer->decode(tokenizer->encode(one));
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t token = 0; token < 400; ++token) tokens.push_back(token);
  tokenizer->decode(tokens);
}

// For a tokenizer.json: byte-level pairs, marks around a document.
void prepare_json_tokenizers(const fs::path& folder) {
  const auto added = [](int id, const char* content) {
    return nlohmann::json{{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                          {"rstrip", false}, {"normalized", false}, {"special", true}};
  };
  const nlohmann::json mark = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                       text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const nlohmann::json tokenizer = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", {added(0, "<s>"), added(1, "</s>")}},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {mark, text}},
        {"pair", {text, text}},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {0}}, {"tokens", {"<s>"}}}}}}}},
      {"decoder",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"vocab", {{"<s>", 0}, {"</s>", 1}, {"a", 2}, {"b", 3}, {"ab", 4}, {"\u0120", 5}}},
        {"merges", {"a b"}}}}};
  put(folder / "tokenizer.json", tokenizer.dump());
  put(folder / "tokenizer_config.json",
      R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true})");
}

void read_json_tokenizer(const fs::path& file) {
  const auto tokenizer = json_tokenizer(file.parent_path() / "tokenizer.json");
  const auto tokens = tokenizer->encode("ab a\u0308 b");
  tokenizer->decode(tokens);
}

std::string python_with_tokenizers() {
  const std::string command = find_python() + " -c 'import tokenizers' >/dev/null 2>&1";
  return std::system(command.c_str()) == 0 ? "" : "a Python with the package tokenizers";
}

}  // namespace

std::vector<Reader> data_readers() {
  return {
      {"text", prepare_texts, read_texts, with(kJson, {"\n", "\"text\":", "\xff", "\xc3"})},
      {"manifest", prepare_manifests, read_manifests,
       with(kJson, {"\"shards\":", "\"name\":", "\"bytes\":"})},
      {"shard",
       prepare_shards,
       read_shards,
       {std::string("isograd\1", 8), std::string(8, '\0'), std::string(8, '\xff')},
       right_shard},
      {"table",
       prepare_tables,
       read_tables,
       {",", "\n", "'<f8'", "'shape': (", "PK\5\6", "PK\1\2", "nan", "1e999", "x.npy", "\""}},
      {"video",
       prepare_videos,
       read_video,
       {"moov", "mdat", "stts", "ftyp", "IDAT", "fcTL", "RIFF", "\x1A\x45\xDF\xA3", "stsd"}},
      {"playlist",
       prepare_playlists,
       read_playlist,
       {"#EXTM3U\n", "#EXTINF:1,\n", "#EXT-X-ENDLIST\n", "#EXT-X-STREAM-INF:BANDWIDTH=1\n",
        "ffconcat version 1.0\n", "file '../of-playlists.mkv'\n", "../of-playlists.mkv\n",
        "m=video 9 RTP/AVP 96\n", "<MPD", "a.mkv", "%d"}},
      {"SentencePiece",
       prepare_tokenizers,
       read_tokenizer,
       {std::string("\x0a\x04\x0a\x02", 4), std::string("\x1a\x02\x12\x00", 4),
        std::string("\x12\x02\x18\x04", 4), std::string(4, '\0'), std::string("\x18\x04", 2), "<a>",
        "\xe2\x96\x81"}},
      {"tokenizer.json",
       prepare_json_tokenizers,
       read_json_tokenizer,
       with(kJson, {"\"merges\":", "\"vocab\":", "\"Unigram\"", "\"WordLevel\"",
                    "\"regex\":", "\"id\":4294967295", "\"type\":", "\"added_tokens\":"}),
       {},
       false,
       python_with_tokenizers},
  };
}

}  // namespace isograd::fuzz
