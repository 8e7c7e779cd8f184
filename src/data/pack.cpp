// Corpus to shards, once: a manifest beside them says what they were made from.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "data/corpus.hpp"
#include "data/shard.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

// Hidden like the lock, so that the folder and folder/* name its shards and nothing else.
constexpr const char* kManifest = ".manifest.json";
constexpr int kManifestVersion = 1;

// Held while a directory is looked at or filled; a second process waits, then finds the work done.
class DirectoryLock {
 public:
  explicit DirectoryLock(const fs::path& directory) {
    std::error_code error;
    fs::create_directories(directory, error);
    file_ = error ? -1 : open((directory / ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    int result = -1;
    while (file_ >= 0 && (result = flock(file_, LOCK_EX)) != 0 && errno == EINTR) {
    }
    if (result != 0) {
      const std::string found = error ? error.message() : std::strerror(errno);
      if (file_ >= 0) close(file_);
      throw ConfigError({.where = "pack into " + directory.string(),
                         .found = found,
                         .expected = "a directory that can be written to",
                         .action = "Choose another directory (data.cache)"});
    }
  }
  ~DirectoryLock() { close(file_); }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int file_ = -1;
};

std::string fingerprint(const std::vector<InputFile>& files, const CorpusOptions& corpus,
                        const Tokenizer& tokenizer) {
  // An empty document shows the marks around each, which do not follow from the name alone.
  std::string text =
      fmt::format("{}\n{}\n{}\n{}\n{}\n", kManifestVersion, tokenizer.name(), tokenizer.vocabulary(),
                  fmt::join(tokenizer.encode(""), " "), corpus.shard_tokens);
  for (const auto& file : files)
    text += fmt::format("{}{}{} {}\n", file.path.string(), '\0', file.bytes, file.modified);
  return checksum(text.data(), text.size());
}

// The shards that `directory` already holds for these inputs, or nothing. A manifest that cannot be read is
// as good as none: the corpus is packed again.
std::optional<std::vector<fs::path>> reuse(const fs::path& directory, const std::string& inputs,
                                           PackSummary& summary) {
  if (!fs::exists(directory / kManifest)) return std::nullopt;
  try {
    const auto [manifest, problem] = parse_json(read_file(directory / kManifest));
    if (!problem.empty() || manifest.at("inputs") != inputs) return std::nullopt;
    std::vector<fs::path> shards;
    for (const auto& shard : manifest.at("shards")) {
      const fs::path path = directory / fs::path(shard.at("name").get<std::string>()).filename();
      if (!fs::is_regular_file(path) || fs::file_size(path) != shard.at("bytes").get<std::uint64_t>())
        return std::nullopt;
      shards.push_back(path);
    }
    summary.documents = manifest.at("documents");
    summary.tokens = manifest.at("tokens");
    summary.empty_documents = manifest.at("empty_documents");
    summary.reused = true;
    return shards;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  } catch (const fs::filesystem_error&) {  // a name that no file can have
    return std::nullopt;
  }
}

bool is_shard_name(const std::string& name) {
  return name.starts_with("tokens-") && name.ends_with(".isograd");
}

void remove_others(const fs::path& directory, const std::vector<fs::path>& keep) {
  for (const auto& entry : fs::directory_iterator(directory))
    if (is_shard_name(entry.path().filename().string()) &&
        std::find(keep.begin(), keep.end(), entry.path()) == keep.end())
      fs::remove(entry.path());
}

// Shards of other inputs, whose names begin otherwise than `prefix`.
void refuse_others(const fs::path& directory, const std::string& prefix) {
  std::vector<std::string> others;
  for (const auto& entry : fs::directory_iterator(directory))
    if (const std::string name = entry.path().filename().string();
        is_shard_name(name) && !name.starts_with(prefix))
      others.push_back(name);
  if (others.empty()) return;
  throw ConfigError(
      {.where = "pack into " + directory.string(),
       .found = fmt::format("{} of other text or another tokenizer, such as {}",
                            others.size() == 1 ? "a shard" : fmt::format("{} shards", others.size()),
                            *std::min_element(others.begin(), others.end())),
       .expected = "a folder for these shards, which would replace those",
       .action = "Give them a folder of their own (--out), or replace what is there: --overwrite"});
}

std::vector<fs::path> write_shards(const std::vector<InputFile>& files, const CorpusOptions& corpus,
                                   const Tokenizer& tokenizer, const fs::path& prefix, PackSummary& summary) {
  std::vector<fs::path> shards;
  std::unique_ptr<ShardWriter> writer;
  for (const auto& file : files) {
    summary.empty_documents += for_each_document(file.path, [&](std::string_view text) {
      const std::vector<std::uint32_t> tokens = tokenizer.encode(text);
      if (tokens.empty()) {  // a tokenizer may normalise a text of spaces away
        ++summary.empty_documents;
        return;
      }
      const auto count = static_cast<std::int64_t>(tokens.size());
      if (writer && writer->tokens() + count > corpus.shard_tokens) {
        writer->finish();
        writer.reset();
      }
      if (!writer) {
        shards.push_back(prefix.string() + fmt::format("-{:05}.isograd", shards.size()));
        writer = std::make_unique<ShardWriter>(shards.back(), tokenizer.name(), tokenizer.vocabulary());
      }
      writer->add(tokens);
      ++summary.documents;
      summary.tokens += count;
    });
  }
  if (writer) writer->finish();
  return shards;
}

}  // namespace

std::vector<fs::path> pack_corpus(const CorpusOptions& corpus, const Tokenizer& tokenizer,
                                  const fs::path& directory, PackSummary* summary) {
  if (corpus.shard_tokens < 1)
    throw ConfigError({.where = "shard_tokens",
                       .found = std::to_string(corpus.shard_tokens),
                       .expected = "1 or more",
                       .action = "Raise it"});
  const std::vector<InputFile> files = resolve(corpus.patterns);
  if (files.empty())
    throw ConfigError({.where = "data.text",
                       .found = "no patterns",
                       .expected = "at least one file, directory or glob",
                       .action = "Name text to train on"});
  PackSummary found{.files = static_cast<std::int64_t>(files.size())};
  const std::string inputs = fingerprint(files, corpus, tokenizer);
  const DirectoryLock lock(directory);
  auto shards = reuse(directory, inputs, found);
  if (!shards) {
    // The inputs are part of the name, so that shards of two corpora never pass for one.
    const std::string prefix = "tokens-" + inputs.substr(0, 8);
    if (!corpus.replace) refuse_others(directory, prefix);
    shards = write_shards(files, corpus, tokenizer, directory / prefix, found);
    if (shards->empty())
      throw ConfigError({.where = "data.text " + fmt::format("{}", fmt::join(corpus.patterns, " ")),
                         .found = fmt::format("an empty corpus: {} files, no text in them", files.size()),
                         .expected = "at least one document",
                         .action = "Name files with text in them"});
    nlohmann::json manifest = {{"inputs", inputs},
                               {"tokenizer", tokenizer.name()},
                               {"files", found.files},
                               {"documents", found.documents},
                               {"tokens", found.tokens},
                               {"empty_documents", found.empty_documents},
                               {"shards", nlohmann::json::array()}};
    for (const auto& shard : *shards)
      manifest["shards"].push_back({{"name", shard.filename().string()}, {"bytes", fs::file_size(shard)}});
    write_file(directory / kManifest, manifest.dump(1) + "\n");
    remove_others(directory, *shards);
  }
  if (summary) *summary = found;
  return *shards;
}

}  // namespace isograd
