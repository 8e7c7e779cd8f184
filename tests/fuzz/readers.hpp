// The readers of files from outside, each with sound files to begin from.
#pragma once

#include <ATen/core/TensorBody.h>

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace isograd::fuzz {

struct Reader {
  std::string name;
  // Writes sound files into an empty folder; each of them is changed in turn, the others are not.
  std::function<void(const std::filesystem::path& folder)> prepare;
  // Reads `file`, or the folder that it lies in, and looks at all of what was read. What is wrong with it
  // must come as a ConfigError.
  std::function<void(const std::filesystem::path& file)> read;
  std::vector<std::string> words{};  // what the format is made of
  // Makes a changed file's own length or checksum right again, so that changes behind it are seen.
  std::function<std::string(std::string)> repair{};
  bool planted = false;                    // does wrong on purpose; only by name
  std::function<std::string()> missing{};  // what this machine lacks to read such files; empty: nothing
};

const std::vector<Reader>& readers();

// ---- what the files of readers share ----

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<Reader> model_readers();
std::vector<Reader> run_readers();
std::vector<Reader> data_readers();
std::vector<Reader> wire_readers();
std::vector<Reader> server_readers();

void put(const std::filesystem::path& file, const std::string& bytes);
// Reads every byte, so that a view beyond its file is found.
std::uint64_t look_at(const at::Tensor& tensor);

extern const std::vector<std::string> kJson;  // what JSON is made of
std::vector<std::string> with(std::vector<std::string> words, std::initializer_list<const char*> more);
std::vector<std::string> lines_of(const std::filesystem::path& file, std::size_t most);

}  // namespace isograd::fuzz
