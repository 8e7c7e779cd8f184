// Named checkpoints: a folder each, with an info.json that has the checksums of the other files and of
// itself.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/store/store.hpp"

namespace isograd::serve {
namespace {

using nlohmann::json;

constexpr const char* kInfo = "info.json";
constexpr std::size_t kMostName = 128, kMostRun = 80;  // a folder's name has at most 255 bytes
constexpr std::string_view kScheme = "tinker://",
                           kLettersAndDigits =
                               "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

bool consists_of(std::string_view text, std::string_view others) {
  return text.find_first_not_of(std::string(kLettersAndDigits) + std::string(others)) == text.npos;
}

std::string shown(std::string_view text) { return "\"" + printable(text, 200) + "\""; }

// No two checkpoints have one folder: a run has neither '+' nor '~', a name has no '~'.
std::string folder_name(const CheckpointInfo& info) {
  std::string run = info.run;
  std::replace(run.begin(), run.end(), ':', '+');
  return run + "~" + info.kind + "~" + info.name;
}

bool is_regular(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(fs::symlink_status(path, error));
}

json to_json(const CheckpointInfo& info) {
  return {{"path", info.path()},         {"tenant", info.tenant},    {"base", info.base},
          {"digest", info.digest},       {"rank", info.rank},        {"bytes", info.bytes},
          {"created", info.created},     {"expires", info.expires},  {"public", info.is_public},
          {"operation", info.operation}, {"metadata", info.metadata}};
}

CheckpointInfo from_json(const json& from) {
  CheckpointInfo info = parse_checkpoint_path(from.at("path"));
  from.at("tenant").get_to(info.tenant), from.at("base").get_to(info.base);
  from.at("rank").get_to(info.rank), from.at("bytes").get_to(info.bytes);
  from.at("created").get_to(info.created), from.at("expires").get_to(info.expires);
  info.digest = from.value("digest", "");  // version 1 began without it
  from.at("public").get_to(info.is_public), from.at("metadata").get_to(info.metadata);
  info.operation = from.value("operation", std::int64_t{0});  // an older server's: none
  return info;
}

std::string sum_of(const json& body) {
  const std::string text = json_text(body, -1, true);
  return checksum(text.data(), text.size());
}

// {"checkpoint": to_json(), "files": {name: checksum}, "checksum": of the other two}
void write_info(const fs::path& directory, const CheckpointInfo& info, const json& files) {
  json body{{"checkpoint", to_json(info)}, {"files", files}};
  body["checksum"] = sum_of(body);
  write_file(directory / kInfo, json_text(body, 1, true) + "\n");
}

[[noreturn]] void refuse_damaged(const fs::path& file, const std::string& found) {
  refuse(file.string(), found, "a file of a checkpoint as it was saved",
         "Restore it from a copy of the state folder, or delete this checkpoint");
}

json read_info(const fs::path& directory) {
  const fs::path file = directory / kInfo;
  if (!is_regular(file)) refuse_damaged(file, "no regular file");
  auto [body, problem] = parse_json(read_file(file));
  if (!problem.empty()) refuse_damaged(file, problem);
  const auto sum = body.find("checksum");
  const json written = sum == body.end() ? json() : *sum;
  body.erase("checksum");
  if (written != sum_of(body)) refuse_damaged(file, "another checksum than its own");
  return body;
}

CheckpointInfo described_in(const fs::path& folder) {
  if (!fs::is_directory(fs::symlink_status(folder))) refuse_damaged(folder, "no folder");
  const json body = read_info(folder);
  CheckpointInfo info;
  try {
    info = from_json(body.at("checkpoint"));
  } catch (const std::exception& error) {
    refuse_damaged(folder / kInfo, error.what());
  }
  if (folder_name(info) != folder.filename()) refuse_damaged(folder, "the checkpoint " + info.path());
  return info;
}

// The checksums of all files below the folder, by relative path.
json checksums_below(const fs::path& directory) {
  json files = json::object();
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    const fs::file_status status = entry.symlink_status();
    if (fs::is_directory(status)) continue;
    ISOGRAD_INVARIANT(fs::is_regular_file(status), entry.path().string());
    files[entry.path().lexically_relative(directory).string()] = checksum_file(entry.path());
  }
  ISOGRAD_INVARIANT(!files.contains(kInfo), "fill() wrote info.json");
  return files;
}

}  // namespace

void check_checkpoint_name(const std::string& name) {
  if (!name.empty() && name.size() <= kMostName && consists_of(name, "._-") && name != "." && name != "..")
    return;
  refuse("name of a checkpoint",
         name.size() > kMostName ? fmt::format("a name of {} bytes", name.size()) : shown(name),
         fmt::format("1 to {} of A-Z, a-z, 0-9, '.', '_', '-', and neither \".\" nor \"..\"", kMostName),
         "Choose another name");
}

CheckpointInfo parse_checkpoint_path(const std::string& path) {
  const auto refuse_path = [&](const std::string& found) {
    refuse("path of a checkpoint", found, "tinker://<run>/<kind>/<name>",
           "Give the path that the save returned");
  };
  if (!path.starts_with(kScheme)) refuse_path(shown(path));
  CheckpointInfo info;
  const std::string rest = path.substr(kScheme.size());
  const std::size_t first = rest.find('/'), second = first == rest.npos ? first : rest.find('/', first + 1);
  if (second == rest.npos || rest.find('/', second + 1) != rest.npos) refuse_path(shown(path));
  info.run = rest.substr(0, first);
  info.kind = rest.substr(first + 1, second - first - 1);
  info.name = rest.substr(second + 1);
  if (info.run.empty() || info.run.size() > kMostRun || info.run[0] == '.' || !consists_of(info.run, "._:-"))
    refuse_path("the run " + shown(info.run));
  if (info.kind != "weights" && info.kind != "sampler_weights" && info.kind != "external_weights")
    refuse_path("the kind " + shown(info.kind) + " (not weights, sampler_weights or external_weights)");
  check_checkpoint_name(info.name);
  return info;
}

CheckpointStore::CheckpointStore(fs::path root) : root_(std::move(root)) {
  make_folders(root_);
  WholeFolder::remove_partial(root_);
  for (const auto& entry : fs::directory_iterator(root_)) {
    const fs::path folder = entry.path();
    try {
      const CheckpointInfo info = described_in(folder);
      WholeFolder::remove_partial(folder);
      by_path_[info.path()] = info;
    } catch (const std::exception& error) {
      ignored_.push_back(printable(error.what()));
    }
  }
}

fs::path CheckpointStore::directory(const CheckpointInfo& info) const { return root_ / folder_name(info); }

CheckpointInfo CheckpointStore::save(CheckpointInfo info,
                                     const std::function<std::int64_t(const fs::path&)>& fill) {
  parse_checkpoint_path(info.path());
  WholeFolder folder(directory(info));
  info.bytes = fill(folder.directory());
  write_info(folder.directory(), info, checksums_below(folder.directory()));
  folder.commit();
  return by_path_[info.path()] = info;
}

void CheckpointStore::check_files(const CheckpointInfo& info) const {
  const fs::path folder = directory(info);
  if (!fs::is_directory(fs::symlink_status(folder))) refuse_damaged(folder, "no folder");
  const json body = read_info(folder);
  for (const auto& [name, sum] : body.at("files").items()) {
    // No part of the path may be a link.
    fs::path file = folder;
    for (const fs::path& part : fs::path(name)) {
      file /= part;
      if (fs::is_symlink(fs::symlink_status(file))) refuse_damaged(file, "a symbolic link");
    }
    if (!is_regular(file)) refuse_damaged(file, "no regular file");
    if (json(checksum_file(file)) != sum) refuse_damaged(file, "another checksum");
  }
}

void CheckpointStore::update(const CheckpointInfo& info) {
  const fs::path folder = directory(info);
  if (!by_path_.contains(info.path())) refuse_damaged(folder, "no description that could be read");
  write_info(folder, info, read_info(folder).at("files"));
  by_path_[info.path()] = info;
}

void CheckpointStore::remove(const CheckpointInfo& info) {
  const std::string path = info.path();         // `info` may be the entry itself
  const WholeFolder doomed(root_ / "removed");  // a hidden name, whose destructor removes what it has
  const fs::path folder = directory(info);
  if (::rename(folder.c_str(), doomed.directory().c_str()) != 0 && errno != ENOENT)  // else somebody did it
    refuse_file("rename", folder, errno);
  fsync_directory(root_);
  by_path_.erase(path);
}

}  // namespace isograd::serve
