// model.safetensors, or several files listed in model.safetensors.index.json.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

[[noreturn]] void refuse_tensor(const fs::path& file, const std::string& tensor, const std::string& found,
                                const std::string& expected, const std::string& action) {
  refuse(file.string() + (tensor.empty() ? "" : ": " + tensor), found, expected, action);
}

std::map<std::string, FoundTensor> read_shards(const fs::path& directory, const std::string& action) {
  const auto bad = [&](const fs::path& file, const std::string& tensor, const std::string& found,
                       const std::string& expected) { refuse_tensor(file, tensor, found, expected, action); };
  const fs::path index = directory / kIndexFile;
  const std::string text = read_file(index);
  const auto [object, problem] = parse_json(text);
  if (!problem.empty()) bad(index, "", problem, "an object with the file of every tensor");
  if (!object.contains("weight_map") || !object["weight_map"].is_object())
    bad(index, "", "no weight_map", "an object with the file of every tensor");
  std::map<std::string, std::map<std::string, at::Tensor>> shards;
  for (const auto& [name, file] : object["weight_map"].items()) {
    const std::string shard = file.is_string() ? file.get<std::string>() : "";
    if (shard.empty() || shard.front() == '.' || shard.find_first_of("/\\") != std::string::npos ||
        shard.find('\0') != std::string::npos)
      bad(index, name, brief(file), "the name of a file next to the index");
    if (!shards.contains(shard)) shards.emplace(shard, read_safetensors(directory / shard));
    if (!shards[shard].contains(name))
      bad(directory / shard, name, "no such tensor", "one, as the index says");
  }
  std::map<std::string, FoundTensor> stored;
  for (const auto& [shard, tensors] : shards)
    for (const auto& [name, tensor] : tensors) {
      const auto place = object["weight_map"].find(name);
      if (place == object["weight_map"].end() || *place != shard)
        bad(directory / shard, name, "a tensor that the index does not place here", "none");
      stored.emplace(name, FoundTensor{tensor, directory / shard});
    }
  return stored;
}

}  // namespace

std::map<std::string, FoundTensor> read_tensor_files(const fs::path& directory, const std::string& action) {
  const bool whole = fs::exists(directory / kWhole), index = fs::exists(directory / kIndexFile);
  if (whole == index)
    refuse_tensor(directory, "", whole ? "both a whole file and an index of shards" : "no weights",
                  fmt::format("either {} or {}", kWhole, kIndexFile), action);
  if (index) return read_shards(directory, action);
  std::map<std::string, FoundTensor> stored;
  for (auto& [name, tensor] : read_safetensors(directory / kWhole))
    stored.emplace(name, FoundTensor{tensor, directory / kWhole});
  return stored;
}

namespace {

// The entries of each file, in order.
std::vector<std::vector<TensorStream::Entry>> split_over_files(const TensorStream& weights,
                                                               std::int64_t file_bytes) {
  std::vector<std::vector<TensorStream::Entry>> files;
  std::int64_t bytes = 0;
  for (const TensorStream::Entry& entry : weights.entries) {
    if (files.empty() || bytes + bytes_of(entry) > file_bytes) files.emplace_back(), bytes = 0;
    files.back().push_back(entry);
    bytes += bytes_of(entry);
  }
  return files;
}

void write_indexed(const fs::path& directory, const TensorStream& weights,
                   const std::vector<std::vector<TensorStream::Entry>>& files) {
  nlohmann::ordered_json places = nlohmann::ordered_json::object();
  std::vector<std::string> names;
  std::int64_t total = 0;
  for (const auto& entries : files) {
    names.push_back(fmt::format("model-{:05}-of-{:05}.safetensors", names.size() + 1, files.size()));
    for (const TensorStream::Entry& entry : entries)
      places[entry.name] = names.back(), total += bytes_of(entry);
  }
  std::size_t next = 0;
  std::optional<SafetensorsFile> file;
  weights.each([&](const at::Tensor& tensor) {
    if (!file) file.emplace(directory / names.at(next), files.at(next)), ++next;
    file->add(tensor);
    if (!file->is_whole()) return;
    file->commit();
    file.reset();
  });
  ISOGRAD_INVARIANT(next == files.size() && !file, "fewer tensors than entries");
  write_file(
      directory / kIndexFile,
      nlohmann::ordered_json{{"metadata", {{"total_size", total}}}, {"weight_map", places}}.dump(2) + "\n");
}

}  // namespace

void write_tensor_files(const fs::path& directory, const TensorStream& weights, std::int64_t file_bytes) {
  const auto refuse_other = [&](const char* file) {
    refuse(directory.string(), std::string(file) + " of another model", "a folder without it",
           "Write into a folder of its own");
  };
  if (fs::exists(directory / kIndexFile)) refuse_other(kIndexFile);
  const auto files = split_over_files(weights, file_bytes);
  if (files.size() <= 1) return write_safetensors(directory / kWhole, weights);
  if (fs::exists(directory / kWhole)) refuse_other(kWhole);
  write_indexed(directory, weights, files);
}

}  // namespace isograd
