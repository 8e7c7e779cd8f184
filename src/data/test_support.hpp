// Shared by the room's tests: a temporary folder, a store in memory, the text of an error.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"

namespace isograd::testing {

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "isograd-data-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path_ = std::filesystem::canonical(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::filesystem::path write(const std::string& name, std::string_view text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    // A new file without fsync: the tests write thousands, and some file systems flush a file that is
    // rewritten in place.
    std::filesystem::remove(path_ / name);
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

// The message of the ConfigError that `action` throws; "" when it throws none.
inline std::string config_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

[[noreturn]] inline void torn_page() { refuse("test", "a damaged page", "a whole one", "None"); }

class MemoryStore final : public TokenStore {
 public:
  explicit MemoryStore(std::vector<std::vector<std::int64_t>> documents) : documents_(std::move(documents)) {}
  std::int64_t num_documents() const override { return static_cast<std::int64_t>(documents_.size()); }
  std::int64_t num_tokens() const override {
    std::int64_t total = 0;
    for (const auto& document : documents_) total += static_cast<std::int64_t>(document.size());
    return total;
  }
  std::int64_t document_length(std::int64_t document) const override {
    return static_cast<std::int64_t>(documents_.at(static_cast<std::size_t>(document)).size());
  }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int64_t> out) const override {
    if (fails) torn_page();
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = documents_.at(static_cast<std::size_t>(document)).at(static_cast<std::size_t>(begin) + i);
  }
  std::uint32_t max_token() const override { return 1u << 30; }
  std::string tokenizer_name() const override { return "test"; }

  bool fails = false;

 private:
  std::vector<std::vector<std::int64_t>> documents_;
};

inline std::vector<std::int64_t> read_document(const TokenStore& store, std::int64_t document) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(store.document_length(document)));
  store.read(document, 0, tokens);
  return tokens;
}

inline std::vector<std::vector<std::int64_t>> read_all(const TokenStore& store) {
  std::vector<std::vector<std::int64_t>> documents;
  for (std::int64_t d = 0; d < store.num_documents(); ++d) documents.push_back(read_document(store, d));
  return documents;
}

}  // namespace isograd::testing
