// Expands patterns to files, and files to documents.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/data.hpp"

namespace isograd {

struct InputFile {
  std::filesystem::path path;  // canonical
  std::uint64_t bytes = 0;
  // Nanoseconds, compared only for equality. A program may set `modified`; only the file system sets
  // `changed`.
  std::int64_t modified = 0, changed = 0;
  std::uint64_t inode = 0;
  bool operator==(const InputFile&) const = default;
};

// The files that match the patterns, each once, sorted by path. ConfigError: a pattern matches nothing.
std::vector<InputFile> resolve(const std::vector<std::string>& patterns);

// A whole file, or a line of a .jsonl file (also .jsonl.gz, .jsonl.zst), which is a JSON object.
struct Document {
  std::string_view text;
  const nlohmann::json* record = nullptr;  // not null: of a line, and `text` is empty
};

// Thrown for a line that is no document: what is wrong with it.
struct BadLine {
  std::string found, expected;
};

struct LinePlace {
  std::filesystem::path file;
  std::int64_t line = 1;
};

// Passes each document of the file to `visit`, in order. A line that is no JSON object, or for which `visit`
// throws BadLine, goes to `bad`. Lines are streamed: memory does not grow with the file.
void for_each_document(const std::filesystem::path& file, const std::function<void(const Document&)>& visit,
                       const std::function<void(const LinePlace&, const BadLine&)>& bad);

// Tokens of a document, and what each counts as a target.
struct Encoded {
  std::vector<std::uint32_t> tokens;
  std::vector<float> weights;  // one each, 0: no target; empty: all 1
};

bool is_conversation(const Document& document);  // of messages, which the chat template joins

// Throws BadLine: a record that is none of CorpusOptions' forms. No tokens: there is no text in it.
Encoded encode(const Document& document, const Tokenizer& tokenizer, bool train_on_all);

// The shards that pack_corpus() finished in `directory`, whatever its text is by now; none: nothing was
// packed, or a shard is missing.
std::vector<std::filesystem::path> packed_shards(const std::filesystem::path& directory);

}  // namespace isograd
