// Packs a corpus into shards, once. A manifest next to them records their inputs.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "data/corpus.hpp"
#include "data/store.hpp"

namespace isograd {
namespace {

// Hidden like the lock, so that the folder and folder/* contain only shards.
constexpr const char* kManifest = ".manifest.json";
constexpr const char* kBadLines = ".bad-lines.txt";
constexpr int kManifestVersion = 2;
constexpr std::size_t kMostOfFirst = 300;  // characters of the first bad line's message

// Held while a directory is inspected or filled. A second process waits, then finds the shards.
class DirectoryLock {
 public:
  DirectoryLock(const fs::path& directory, const std::function<bool()>& stop) : directory_(directory) {
    std::error_code error;
    fs::create_directories(directory, error);
    if (error) refuse(error.message());
    constexpr std::chrono::milliseconds kPoll(50);
    constexpr std::chrono::seconds kQuiet(1), kLongest(3600);
    const auto begun = std::chrono::steady_clock::now();
    bool said = false;
    while (lock_.emplace(directory / ".lock").problem() != 0) {
      if (lock_->problem() != EWOULDBLOCK) refuse(std::strerror(lock_->problem()));
      const auto waited = std::chrono::steady_clock::now() - begun;
      const bool asked = stop && stop();
      if (asked || waited > kLongest)
        isograd::refuse("pack into " + directory_.string(),
                        fmt::format("{}, which packs there{}", holder(),
                                    asked ? "" : fmt::format(", for {} s", kLongest.count())),
                        asked ? "it to end before this run is asked to stop" : "it to end",
                        "Wait for it or end it, or choose another directory (data.cache)");
      if (!said && waited > kQuiet) {
        print(stderr, fmt::format("waiting for {}, which packs text into {}\n", holder(),
                                  printable(directory_.string())));
        said = true;
      }
      std::this_thread::sleep_for(kPoll);
    }
    const std::string who = fmt::format("process {}\n", getpid());  // for waiting processes
    if (ftruncate(lock_->file(), 0) == 0) (void)!pwrite(lock_->file(), who.data(), who.size(), 0);
  }

 private:
  std::string holder() const {
    char text[100] = {};
    const auto length = pread(lock_->file(), text, sizeof(text) - 1, 0);
    const std::string line(text, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
    return line.empty() ? "another process" : printable(line.substr(0, line.find('\n')));
  }

  [[noreturn]] void refuse(const std::string& found) const {
    isograd::refuse("pack into " + directory_.string(), found, "a directory that can be written to",
                    "Choose another directory (data.cache)");
  }

  const fs::path& directory_;
  std::optional<FileLock> lock_{};
};

// The manifest of a directory; null: none, or not readable, which is treated alike.
nlohmann::json read_manifest(const fs::path& directory) {
  if (!fs::is_regular_file(directory / kManifest)) return {};
  auto [manifest, problem] = parse_json(read_file(directory / kManifest));
  return problem.empty() ? manifest : nlohmann::json();
}

// The contents of the files, by checksum, and the manifest's record of them.
struct Contents {
  std::vector<std::string> checksums;               // of each file
  nlohmann::json files = nlohmann::json::object();  // by the checksum of the path
  bool read = false;                                // whether any of them was read
};

// A file is read again unless size, times and inode are unchanged. A program can set the time of the
// content's change but not that of the file's. A change within kSettled of the reading may have the same
// time.
Contents contents_of(const std::vector<InputFile>& files, const nlohmann::json& manifest) {
  constexpr std::int64_t kSettled = 2'000'000'000;  // nanoseconds: the coarsest time stamps of file systems
  Contents contents;
  for (const InputFile& file : files) {
    const std::string path = file.path.string(), key = checksum(path.data(), path.size());
    nlohmann::json entry = {
        {"bytes", file.bytes}, {"modified", file.modified}, {"changed", file.changed}, {"inode", file.inode}};
    try {
      const nlohmann::json& known = manifest.at("files").at(key);
      bool same = known.at("read").get<std::int64_t>() > file.changed + kSettled;
      for (const auto& [name, value] : entry.items()) same = same && known.at(name) == value;
      if (same) {
        contents.checksums.push_back(known.at("checksum"));
        contents.files[key] = known;
        continue;
      }
    } catch (const nlohmann::json::exception&) {  // absent, or of another type
    }
    entry["read"] = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
    contents.checksums.push_back(checksum_file(file.path));
    entry["checksum"] = contents.checksums.back();
    contents.files[key] = std::move(entry);
    contents.read = true;
  }
  return contents;
}

std::string fingerprint(const std::vector<InputFile>& files, const Contents& contents,
                        const CorpusOptions& corpus, const Tokenizer& tokenizer) {
  // An empty document shows the marks that the tokenizer adds, which its name does not determine.
  std::string text =
      fmt::format("{}\n{}\n{}\n{}\n{}\n", kManifestVersion, tokenizer.name(), tokenizer.vocabulary(),
                  fmt::join(tokenizer.encode(""), " "), corpus.shard_tokens);
  if (corpus.on_bad_line == CorpusOptions::OnBadLine::kSkip) text += "bad lines are left out\n";
  if (corpus.train_on_all) text += "all tokens are targets\n";
  if (corpus.drop_doubled_mark) text += "no doubled marks\n";
  for (std::size_t i = 0; i < files.size(); ++i)
    text += fmt::format("{}{}{}\n", files[i].path.string(), '\0', contents.checksums[i]);
  return checksum(text.data(), text.size());
}

// The shards that the manifest of `directory` names; nothing: one is missing or of another size.
std::optional<std::vector<fs::path>> shards_of(const fs::path& directory, const nlohmann::json& manifest) {
  try {
    std::vector<fs::path> shards;
    for (const auto& shard : manifest.at("shards")) {
      const fs::path path = directory / fs::path(shard.at("name").get<std::string>()).filename();
      if (!fs::is_regular_file(path) || fs::file_size(path) != shard.at("bytes").get<std::uint64_t>())
        return std::nullopt;
      shards.push_back(path);
    }
    return shards;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  } catch (const fs::filesystem_error&) {  // a name that no file can have
    return std::nullopt;
  }
}

// The same, if they are of these inputs.
std::optional<std::vector<fs::path>> reuse(const fs::path& directory, const nlohmann::json& manifest,
                                           const std::string& inputs, const std::string& chat_template,
                                           PackSummary& summary) {
  auto shards = shards_of(directory, manifest);
  try {
    if (!shards || manifest.at("inputs") != inputs) return std::nullopt;
    if (manifest.value("chat_template", chat_template) != chat_template) return std::nullopt;
    summary.documents = manifest.at("documents");
    summary.tokens = manifest.at("tokens");
    summary.empty_documents = manifest.at("empty_documents");
    summary.doubled_marks = manifest.at("doubled_marks");
    summary.first_doubled = manifest.at("first_doubled");
    summary.bad_lines = manifest.value("bad_lines", std::int64_t{0});
    summary.first_bad = manifest.value("first_bad", "");
    summary.reused = true;
    return shards;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

// Otherwise the shards might differ from the manifest.
void require_unchanged(const std::vector<InputFile>& files) {
  for (const InputFile& file : files) {
    if (resolve({file.path.string()}).front() == file) continue;
    isograd::refuse("data.text " + file.path.string(), "a file that changed while it was packed",
                    "one that stays as it is", "Start again when it is complete");
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

// Refuses to replace shards of other inputs, whose names start with another prefix.
void refuse_others(const fs::path& directory, const std::string& prefix) {
  std::vector<std::string> others;
  for (const auto& entry : fs::directory_iterator(directory))
    if (const std::string name = entry.path().filename().string();
        is_shard_name(name) && !name.starts_with(prefix))
      others.push_back(name);
  if (others.empty()) return;
  isograd::refuse("pack into " + directory.string(),
                  fmt::format("{} of other text or another tokenizer, such as {}",
                              others.size() == 1 ? "a shard" : fmt::format("{} shards", others.size()),
                              *std::min_element(others.begin(), others.end())),
                  "a folder for these shards, which would replace those",
                  "Give them a folder of their own (--out), or replace what is there: --overwrite");
}

// Looks for a token in the text that the tokenizer also adds, such as a leading "<s>"; takes it out if
// `drop`.
void look_for_doubled(Encoded& document, bool drop, const Tokenizer& tokenizer, const fs::path& file,
                      std::int64_t number, PackSummary& summary) {
  auto& [tokens, weights] = document;
  const auto is = [&](std::size_t i, std::int64_t mark) { return mark >= 0 && tokens[i] == mark; };
  const std::size_t count = tokens.size();
  if (count < 2) return;
  const bool begins = is(0, tokenizer.bos()) && is(1, tokenizer.bos()),
             ends = is(count - 1, tokenizer.eos()) && is(count - 2, tokenizer.eos());
  // An empty text gives two equal marks: both are the tokenizer's.
  if ((!begins && !ends) || (count == 2 && tokens == tokenizer.encode(""))) return;
  if (++summary.doubled_marks == 1)
    summary.first_doubled =
        fmt::format("document {} of {} {} with token {} twice", number, printable(file.string()),
                    begins ? "begins" : "ends", begins ? tokenizer.bos() : tokenizer.eos());
  if (!drop || count < 3) return;
  if (ends) tokens.pop_back();
  if (begins) tokens.erase(tokens.begin());
  if (!weights.empty() && ends) weights.pop_back();
  if (!weights.empty() && begins) weights.erase(weights.begin());
}

void warn_of_bad_lines(const PackSummary& summary, const fs::path& directory) {
  if (summary.bad_lines == 0) return;
  print(stderr,
        fmt::format("warning: {} bad line{} left out (data.on_bad_line = \"skip\"), the first: {}; {} names "
                    "all of them\n",
                    summary.bad_lines, summary.bad_lines == 1 ? " is" : "s are", summary.first_bad,
                    printable((directory / kBadLines).string())));
}

void warn_of_doubled(const PackSummary& summary, bool drop) {
  if (summary.doubled_marks == 0) return;
  if (drop) {
    print(stderr,
          fmt::format("{}{}: one of the two is left out (data.drop_doubled_mark)\n", summary.first_doubled,
                      summary.doubled_marks == 1
                          ? ""
                          : fmt::format(", and so do {} more documents", summary.doubled_marks - 1)));
    return;
  }
  print(stderr,
        fmt::format("warning: {}{}: the text has a mark of its own, and the tokenizer adds one; take it out "
                    "of the text, or set data.drop_doubled_mark, unless it is meant to be learnt twice\n",
                    summary.first_doubled,
                    summary.doubled_marks == 1
                        ? ""
                        : fmt::format(", and so do {} more documents", summary.doubled_marks - 1)));
}

std::vector<fs::path> write_shards(const std::vector<InputFile>& files, const CorpusOptions& corpus,
                                   const Tokenizer& tokenizer, const fs::path& directory,
                                   const std::string& prefix, PackSummary& summary, bool& chats) {
  std::vector<fs::path> shards;
  std::unique_ptr<ShardWriter> writer;
  std::optional<AtomicFile> bad_lines;
  for (const auto& file : files) {
    std::int64_t number = 0;  // of the document in this file, without empty ones
    const auto add = [&](const Document& document) {
      chats = chats || is_conversation(document);
      Encoded encoded = encode(document, tokenizer, corpus.train_on_all);
      if (encoded.tokens.empty()) {  // a tokenizer may normalise a text of spaces to nothing
        ++summary.empty_documents;
        return;
      }
      look_for_doubled(encoded, corpus.drop_doubled_mark, tokenizer, file.path, ++number, summary);
      const auto count = static_cast<std::int64_t>(encoded.tokens.size());
      if (writer && writer->tokens() + count > corpus.shard_tokens) {
        writer->finish();
        writer.reset();
      }
      if (!writer) {
        shards.push_back(directory / fmt::format("{}-{:05}.isograd", prefix, shards.size()));
        writer = std::make_unique<ShardWriter>(shards.back(), tokenizer.name(), tokenizer.vocabulary());
      }
      writer->add(encoded.tokens, encoded.weights);
      ++summary.documents;
      summary.tokens += count;
    };
    for_each_document(file.path, add, [&](const LinePlace& place, const BadLine& problem) {
      const std::string where = fmt::format("{}:{}", place.file.string(), place.line);
      if (corpus.on_bad_line == CorpusOptions::OnBadLine::kStop)
        isograd::refuse(where, problem.found, problem.expected,
                        "Correct or remove the line, or leave such lines out (data.on_bad_line = \"skip\")");
      if (!bad_lines) bad_lines.emplace(directory / kBadLines);
      const std::string text =
          fmt::format("{}: found {}, expected {}", where, problem.found, problem.expected);
      bad_lines->write(printable(text) + "\n");
      if (++summary.bad_lines == 1) summary.first_bad = printable(text, kMostOfFirst);
    });
  }
  if (writer) writer->finish();
  if (bad_lines)
    bad_lines->commit();
  else
    fs::remove(directory / kBadLines);
  return shards;
}

}  // namespace

std::vector<fs::path> packed_shards(const fs::path& directory) {
  return shards_of(directory, read_manifest(directory)).value_or(std::vector<fs::path>());
}

std::vector<fs::path> pack_corpus(const CorpusOptions& corpus, const Tokenizer& tokenizer,
                                  const fs::path& directory, PackSummary* summary) {
  if (corpus.shard_tokens < 1)
    isograd::refuse("shard_tokens", std::to_string(corpus.shard_tokens), "1 or more", "Raise it");
  const std::vector<InputFile> files = resolve(corpus.patterns);
  if (files.empty())
    isograd::refuse("data.text", "no patterns", "at least one file, directory or glob",
                    "Name text to train on");
  PackSummary found{.files = static_cast<std::int64_t>(files.size())};
  const DirectoryLock lock(directory, corpus.stop);
  nlohmann::json manifest = read_manifest(directory);
  const Contents contents = contents_of(files, manifest);
  const std::string inputs = fingerprint(files, contents, corpus, tokenizer);
  const std::string chat = tokenizer.chat_template(), chat_checksum = checksum(chat.data(), chat.size());
  auto shards = reuse(directory, manifest, inputs, chat_checksum, found);
  if (shards && contents.read) {
    manifest["files"] = contents.files;
    write_file(directory / kManifest, manifest.dump(1) + "\n");
  }
  if (!shards) {
    // The inputs are part of the name, so that shards of two corpora are never confused.
    const std::string prefix = "tokens-" + inputs.substr(0, 8);
    if (!corpus.replace) refuse_others(directory, prefix);
    bool chats = false;
    shards = write_shards(files, corpus, tokenizer, directory, prefix, found, chats);
    if (shards->empty())
      isograd::refuse("data.text " + fmt::format("{}", fmt::join(corpus.patterns, " ")),
                      fmt::format("an empty corpus: {} files, no text in them", files.size()),
                      "at least one document", "Name files with text in them");
    try {
      require_unchanged(files);
    } catch (const ConfigError&) {
      for (const auto& shard : *shards) fs::remove(shard);
      throw;
    }
    manifest = {{"inputs", inputs},
                {"tokenizer", tokenizer.name()},
                {"files", contents.files},
                {"documents", found.documents},
                {"tokens", found.tokens},
                {"empty_documents", found.empty_documents},
                {"doubled_marks", found.doubled_marks},
                {"first_doubled", found.first_doubled},
                {"bad_lines", found.bad_lines},
                {"first_bad", found.first_bad},
                {"shards", nlohmann::json::array()}};
    if (chats) manifest["chat_template"] = chat_checksum;
    for (const auto& shard : *shards)
      manifest["shards"].push_back({{"name", shard.filename().string()}, {"bytes", fs::file_size(shard)}});
    write_file(directory / kManifest, manifest.dump(1) + "\n");
    remove_others(directory, *shards);
  }
  warn_of_bad_lines(found, directory);
  warn_of_doubled(found, corpus.drop_doubled_mark);
  if (summary) *summary = found;
  return *shards;
}

}  // namespace isograd
