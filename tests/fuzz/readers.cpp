#include "fuzz/readers.hpp"

#include <ATen/ATen.h>
#include <sentencepiece_trainer.h>
#include <xxhash.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "base/files.hpp"
#include "base/json.hpp"
#include "data/corpus.hpp"
#include "data/shard.hpp"
#include "data/table.hpp"
#include "data/video.hpp"
#include "data/video_testing.hpp"
#include "isograd/decoder_lm.hpp"
#include "isograd/dump.hpp"
#include "isograd/error.hpp"
#include "isograd/text_data.hpp"
#include "model/hf_config.hpp"
#include "model/rotary_table.hpp"
#include "model/safetensors.hpp"
#include "train/checkpoint_files.hpp"
#include "train/checkpoint_state.hpp"
#include "train/config.hpp"
#include "train/metrics.hpp"
#include "verify/compare_dumps.hpp"
#include "verify/present.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;
using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

void put(const fs::path& file, const std::string& bytes) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << bytes;
}

// Every byte, so that a view beyond its file is found.
std::uint64_t look_at(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  return XXH3_64bits(whole.const_data_ptr(), whole.nbytes());
}

const std::vector<std::string> kJson = {
    "{",    "}",  "[",     "]",           "{\"a\":", "[[",           "\"", ",",  ":",
    "null", "-1", "1e999", "\"\\ud800\"", "\\u0000", "\xEF\xBB\xBF", "{}", "[]", "18446744073709551616"};

std::vector<std::string> with(std::vector<std::string> words, std::initializer_list<const char*> more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// ---- tensors and models ----

std::string right_length(std::string file) {
  if (file.size() < 8) return file;
  const std::size_t end = file.rfind("}}");
  const std::uint64_t length = end == std::string::npos || end < 8 ? file.size() - 8 : end + 2 - 8;
  std::memcpy(file.data(), &length, 8);
  return file;
}

void prepare_tensors(const fs::path& folder) {
  Tensors tensors{
      {"scalar", at::tensor(2.5)}, {"empty", at::empty({4, 0})}, {"odd", at::ones({3}, at::kByte)}};
  for (auto type : {at::kBool, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                    at::kFloat, at::kDouble, at::kComplexFloat, at::kFloat8_e4m3fn})
    tensors.emplace_back(c10::toString(type), at::zeros({3, 2}, at::TensorOptions().dtype(type)));
  tensors.emplace_back("packed", at::empty({2, 2}, at::kFloat4_e2m1fn_x2));
  write_safetensors(folder / "types.safetensors", tensors, {{"format", "pt"}, {"note", "é"}});
  write_safetensors(folder / "one.safetensors", {{"w", at::ones({5, 7})}});
}

void read_tensors(const fs::path& file) {
  Metadata metadata;
  for (const auto& [name, tensor] : read_safetensors(file, &metadata)) look_at(tensor);
}

DecoderConfig tiny(const std::string& family) {
  DecoderConfig config;
  config.family = family;
  config.vocabulary = 11, config.hidden = 8, config.layers = 2, config.heads = 2, config.key_value_heads = 1;
  config.head_dim = 4, config.feed_forward = 6, config.max_positions = 32;
  config.attention_bias = family == "qwen2";
  config.query_key_norm = family == "qwen3";
  return config;
}

void prepare_model_configs(const fs::path& folder) {
  for (const char* family : {"llama", "qwen2", "qwen3", "mistral"}) {
    DecoderConfig config = tiny(family);
    put(folder / (std::string(family) + ".json"), hf_config_text(config, at::kFloat));
    for (const char* kind : {"linear", "llama3", "yarn"}) {
      config.rope_scaling = {.kind = kind, .factor = 4, .original_max_positions = 16};
      put(folder / (std::string(family) + "-" + kind + ".json"), hf_config_text(config, at::kFloat));
    }
  }
}

void read_model_config(const fs::path& file) {
  const DecoderConfig config = parse_hf_config(read_file(file), file);
  if (config.head_dim <= 1024) look_at(rotary_frequencies(config, 8, at::kDouble).first);
}

void prepare_models(const fs::path& folder) {
  DecoderLM model(tiny("llama"), at::kFloat, 1);
  write_hf(folder / "whole", model);
  fs::create_directories(folder / "cut");
  fs::copy(folder / "whole/config.json", folder / "cut/config.json");
  Tensors parts[2];
  nlohmann::json map;
  for (const auto& [name, tensor] : model.named()) {
    const std::size_t part = map.size() % 2;
    parts[part].emplace_back(name, tensor);
    map[name] = "part-" + std::to_string(part) + ".safetensors";
  }
  for (std::size_t i = 0; i < 2; ++i)
    write_safetensors(folder / "cut" / ("part-" + std::to_string(i) + ".safetensors"), parts[i]);
  put(folder / "cut/model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
}

void read_model(const fs::path& file) {
  const auto model = read_hf(file.parent_path(), at::kFloat);
  for (const auto& [name, tensor] : model->named()) look_at(tensor.detach());
}

// ---- runs ----

void prepare_states(const fs::path& folder) {
  TrainingState state;
  state.optimizer = "adamw", state.dtype = "float32", state.tokenizer = "bytes", state.config = "[run]\n";
  state.bucket_order = {"a", "b"}, state.order = {{"video.patch_height", "8"}};
  put(folder / "state.json", to_json(state));
}

void prepare_listings(const fs::path& folder) {
  publish_directory(folder / "step-00000007", [](const fs::path& to) {
    put(to / "model.safetensors", "weights");
    put(to / "config.json", "{}");
    put(to / "state.json", "{\"format\": 1}");
  });
}

std::string right_listing(std::string text) {
  auto [listing, problem] = parse_json(text);
  if (!problem.empty() || !listing.contains("files")) return text;
  const std::string files = listing["files"].dump();
  listing["xxh3_of_files"] = checksum(files.data(), files.size());
  return listing.dump(1);
}

void prepare_metrics(const fs::path& folder) {
  std::string text;
  for (int step = 1; step < 4; ++step)
    text += to_json_line({.step = step, .loss = 0.5 * step, .tokens = 7, .updated = true});
  put(folder / "metrics.jsonl",
      text + to_json_line({.step = 3, .validation_loss = 2.0, .validation_targets = 5}));
}

void prepare_configurations(const fs::path& folder) {
  put(folder / "defaults.toml", to_toml(RunConfig{}));
  put(folder / "some.toml",
      "# a run\n[run]\ndirectory = 'runs/x'\nseed = 0x10\n[data]\ntext = [\"a*.txt\", 'b']\n[train]\nsteps = "
      "1_000\n"
      "[optimizer]\nkind = \"sgd\"\n[parallel]\nstrategy = \"zero3\"\n[loss]\nkind = 'sample_mean'\n");
}

void read_configuration(const fs::path& file) {
  const std::string text = read_file(file);
  const RunConfig config = parse_config(text, file.string());
  if (to_toml(parse_config(to_toml(config), "again")) != to_toml(config))
    throw std::runtime_error("a configuration that is not read back as it was written");
}

// The file's lines as the command line's --set.
void read_overrides(const fs::path& file) {
  std::vector<std::string> lines;
  const std::string text = read_file(file);
  for (std::size_t begin = 0; begin < text.size() && lines.size() < 100;) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parse_config("", "", lines);
}

// ---- dumps ----

StepDump a_dump(double factor) {
  StepDump dump;
  for (const char* name : {"a.weight", "a.bias", "b"})
    dump.gradients.emplace_back(name, at::arange(1, 7).to(at::kDouble) * factor);
  dump.figures = {.loss = 2.5, .targets = 12, .tokens = 16, .norm = 3, .clip_coefficient = 0.5};
  dump.samples = {1, 2, 3, 3};
  dump.counts = {{3, 4}, {5}};
  dump.axes = {{"dp_replicate", 1}, {"dp_shard", 2}};
  dump.precision = "fp64";
  dump.terms = {{"cross_entropy", 2.5}, {"z", NAN}};
  for (const auto& [name, gradient] : dump.gradients) dump.applied.emplace_back(name, gradient * 0.5);
  dump.owners = {{1, 1}, {1, 1}, {1, 2}};
  StepDump::RankView rank;
  rank.initial = rank.gradients = {1, 2, 3};
  rank.norm = 3;
  dump.ranks = {rank, rank};
  dump.shares = {{dump.gradients, dump.gradients}, {dump.gradients}};
  return dump;
}

void prepare_dumps(const fs::path& folder) {
  write_dump(a_dump(1), folder / "found");
}

void read_dumps(const fs::path& file) {
  StepDump found = read_dump(file.parent_path());
  for (const double factor : {1.0, 2.0}) {
    const StepDump sound = a_dump(factor);
    for (const bool first : {true, false}) {
      const auto compared =
          compare_dumps(first ? found : sound, first ? sound : found, {"found", "expected"});
      Wording wording{.left = "found", .right = "expected", .reference = "expected", .subject = "found"};
      wording.findings = compared.findings;
      wording.notices = compared.notices;
      to_text(compared.verdict, wording);
      to_json(compared.verdict, wording);
    }
  }
}

// ---- data ----

void prepare_texts(const fs::path& folder) {
  put(folder / "a.txt", "one document, with é and 語\n");
  put(folder / "b.jsonl",
      "{\"text\": \"first\", \"more\": [1, {\"a\": null}]}\n\n{\"text\": \"second \\u00e9\"}\n");
}

void read_texts(const fs::path& file) {
  std::size_t bytes = 0;
  for_each_document(file, [&](std::string_view text) { bytes += byte_tokenizer()->encode(text).size(); });
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

// What the program must find: a crash, a loop, memory without bound, an error that nobody foresaw.
void read_wrongly(const fs::path& file) {
  const std::string text = read_file(file);
  const int what = static_cast<int>(XXH3_64bits(text.data(), text.size()) % 16);
  if (what == 1) std::raise(SIGSEGV);
  for (volatile bool forever = true; what == 2 && forever;) {
  }
  std::vector<std::string> memory;
  while (what == 3) memory.emplace_back(std::size_t{1} << 20, 'x');
  if (what == 4) throw std::logic_error("nobody foresaw this");
  if (what == 5)
    throw ConfigError({.where = "a file", .found = "this", .expected = "that", .action = "None"});
}

}  // namespace

const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = {
      {"safetensors", prepare_tensors, read_tensors,
       with(kJson,
            {"\"dtype\"", "\"shape\":[", "\"data_offsets\":[0,0]", "__metadata__", "\"F4\"", "\"I64\""}),
       right_length},
      {"config.json", prepare_model_configs, read_model_config,
       with(kJson, {"\"rope_scaling\":", "\"rope_type\":\"yarn\"", "\"layer_types\":", "\"eos_token_id\":[",
                    "\"factor\":"})},
      {"model folder",
       prepare_models,
       read_model,
       with(kJson, {"\"weight_map\"", "../", "\"F16\"", "model.layers.9."}),
       {}},
      {"state.json", prepare_states,
       [](const fs::path& file) { parse_state(read_file(file), file.string()); }, kJson},
      {"checksums.json", prepare_listings, [](const fs::path& file) { verify_checksums(file.parent_path()); },
       with(kJson, {"../", "\"bytes\":", "\"xxh3\":"}), right_listing},
      {"metrics", prepare_metrics, [](const fs::path& file) { read_metrics(file); },
       with(kJson, {"\n", "\"step\":"})},
      {"TOML",
       prepare_configurations,
       read_configuration,
       {"[", "]",   "[[", "{",     "}",  "=",   "\"",  "\"\"\"",     "'''",   "\\u0000", "\\U00110000", "\n",
        "#", "[a.", "a.", "1e999", "0x", "nan", "inf", "1979-05-27", "[x]\n", "{a=",     "\xff"}},
      {"--set",
       [](const fs::path& folder) {
         put(folder / "lines",
             "train.steps=10\noptimizer.kind=sgd\ndata.text=['a', "
             "'b']\nrun.directory=\"x\"\nschedule.peak=1e-3\n");
       },
       read_overrides,
       {"=", "[", "]", "\"", "'", "{", ".", "\n", "data.text=", "train.steps=", "1e999", "true", "\\u"}},
      {"dump", prepare_dumps, read_dumps,
       with(kJson, {"\"counts\":", "\"owners\":", "\"ranks\":", "\"nan\"", "\"-inf\"",
                    "\"parameters\":", "\"axes\":"})},
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
      {"SentencePiece",
       prepare_tokenizers,
       read_tokenizer,
       {std::string("\x0a\x04\x0a\x02", 4), std::string("\x1a\x02\x12\x00", 4),
        std::string("\x12\x02\x18\x04", 4), std::string(4, '\0'), std::string("\x18\x04", 2), "<a>",
        "\xe2\x96\x81"}},
      {"planted",
       [](const fs::path& folder) { put(folder / "file", "0123456789"); },
       read_wrongly,
       {},
       {},
       true},
  };
  return all;
}

}  // namespace isograd::fuzz
