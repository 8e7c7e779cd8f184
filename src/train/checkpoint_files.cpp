#include "train/checkpoint_files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char* kListing = "checksums.json";
constexpr const char* kPartial = ".partial";    // being written
constexpr const char* kReplaced = ".replaced";  // whole; another of the same step is taking its place
constexpr const char* kDeleting = ".deleting";

fs::path hidden(const fs::path& directory, const char* suffix) {
  return directory.parent_path() / ("." + directory.filename().string() + suffix);
}

bool is_complete(const fs::path& directory) {
  return fs::is_regular_file(directory / kListing);
}

// .step-00000100.replaced -> step-00000100, for one suffix.
std::optional<fs::path> visible(const fs::path& path, std::string_view suffix) {
  const std::string name = path.filename().string();
  if (name.size() <= suffix.size() + 1 || name[0] != '.' || !name.ends_with(suffix)) return std::nullopt;
  fs::path result = path.parent_path() / name.substr(1, name.size() - 1 - suffix.size());
  if (!checkpoint_step(result)) return std::nullopt;
  return result;
}

// Errors of the file system are errors of the input here: a full disk, a folder without permission.
template <class Work>
auto files(const std::string& where, Work work) {
  try {
    return work();
  } catch (const fs::filesystem_error& error) {
    refuse(where, error.what(), "a folder that can be read and written",
           "Check its permissions and the space on its disk");
  }
}

void fsync_file(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool synced = file >= 0 && ::fsync(file) == 0;
  const int problem = errno;
  if (file >= 0) ::close(file);
  if (!synced)
    refuse(path.string(), std::string("fsync: ") + std::strerror(problem), "a file on its disk",
           "Free space on the disk or choose another run.directory");
}

void write_checksums(const fs::path& directory) {
  nlohmann::json listed = nlohmann::json::object();
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    listed[name] = {{"bytes", entry.file_size()}, {"xxh3", checksum_file(entry.path())}};
  }
  const std::string text = listed.dump();
  write_file(
      directory / kListing,
      nlohmann::json{{"format", 1}, {"files", listed}, {"xxh3_of_files", checksum(text.data(), text.size())}}
              .dump(1) +
          "\n");
}

// An old checkpoint that cannot be removed (other permissions, a file system that went read-only below) costs
// space, not the run: it is hidden by now, and each later save tries again.
void remove_old(const fs::path& hidden_folder) {
  std::error_code error;
  fs::remove_all(hidden_folder, error);
  if (error)
    print(stderr,
          fmt::format("isograd: warning: {} could not be removed ({}); the new checkpoint is whole. Remove "
                      "that folder yourself\n",
                      printable(hidden_folder.string()), error.message()));
}

// Removes what a killed save left behind.
void clear_leftovers(const fs::path& root) {
  std::vector<fs::path> entries;
  for (const auto& entry : fs::directory_iterator(root)) entries.push_back(entry.path());
  for (const auto& path : entries) {
    std::error_code ignored;  // the first failure to remove it was reported
    if (visible(path, kPartial)) fs::remove_all(path);
    if (visible(path, kDeleting)) fs::remove_all(path, ignored);
    if (auto original = visible(path, kReplaced)) {
      if (fs::exists(*original)) {
        fs::remove_all(path, ignored);
      } else {
        fs::rename(path, *original);
      }
    }
  }
}

[[noreturn]] void throw_damaged(const fs::path& directory, const std::string& file, const std::string& found,
                                const std::string& expected) {
  std::string action = "Restore this file";
  const auto step = checkpoint_step(directory);
  for (const auto& other : list_checkpoints(directory.parent_path()))
    if (step && *checkpoint_step(other) < *step)
      action = "Restore this file or resume from " + other.string();
  refuse((directory / file).string(), found, expected, action);
}

// All listed files but those of `unread`, which may be missing too.
void compare_with_listing(const fs::path& directory, const std::set<std::string>& unread) {
  const auto [listing, problem] = parse_json(read_file(directory / kListing));
  const auto damaged_listing = [&] {
    throw_damaged(directory, kListing, "a listing that does not match its own checksum",
                  "format 1, unchanged");
  };
  if (!problem.empty()) throw_damaged(directory, kListing, problem, "format 1, unchanged");
  if (listing.value("format", nlohmann::json()) != 1 || !listing.contains("files") ||
      !listing["files"].is_object())
    damaged_listing();
  const auto& listed = listing["files"];
  const std::string text = listed.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (listing.value("xxh3_of_files", nlohmann::json()) != checksum(text.data(), text.size()))
    damaged_listing();

  for (const auto& [name, facts] : listed.items()) {
    const fs::path file = directory / name;
    if (name.find('/') != std::string::npos || !facts.is_object() || !facts.contains("bytes") ||
        !facts.contains("xxh3"))
      damaged_listing();
    if (unread.contains(name)) continue;
    if (!fs::is_regular_file(file)) throw_damaged(directory, name, "no such file", "the file that was saved");
    if (fs::file_size(file) != facts["bytes"])
      throw_damaged(directory, name, fmt::format("{} bytes", fs::file_size(file)),
                    facts["bytes"].dump() + " bytes");
    if (const std::string found = checksum_file(file); facts["xxh3"] != found)
      throw_damaged(directory, name, "checksum " + found, "checksum " + facts["xxh3"].dump());
  }
  // An extra file could be read instead of a listed one (a sharded index next to model.safetensors).
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const std::string kind = entry.path().extension().string();
    if (name != kListing && !listed.contains(name) && (kind == ".json" || kind == ".safetensors"))
      refuse(entry.path().string(), "a file that was not saved with the checkpoint",
             "only the files of checksums.json", "Move it elsewhere");
  }
}

constexpr int kFormat = 1;

// Visits every field with its key, for writing and reading alike. Counts are checked to be 0 or more.
template <class State, class Visit>
void state_fields(State& state, Visit visit) {
  visit("step", state.step);
  visit("updates", state.updates);
  visit("skipped", state.skipped);
  visit("epoch", state.position.epoch);
  visit("step_of_epoch", state.position.step);
  visit("seed", state.seed);
  visit("pack_length", state.pack_length);
  visit("packs_per_step", state.packs_per_step);
  visit("shuffle_packs", state.shuffle_packs);
  visit("validation_fraction", state.validation_fraction);
  visit("documents", state.documents);
  visit("tokens", state.tokens);
  visit("optimizer", state.optimizer);
  visit("dtype", state.dtype);
  visit("tokenizer", state.tokenizer);
  visit("config", state.config);
  visit("bucket_order", state.bucket_order);
  visit("order", state.order);
  visit("missed_updates", state.missed_updates);
}

struct Reader {
  const nlohmann::json& json;
  const std::string& file;

  [[noreturn]] void bad(const char* key, const std::string& found, const std::string& expected) const {
    refuse(file + ": " + key, found, expected, "Restore the file or resume from another checkpoint");
  }
  const nlohmann::json& at(const char* key) const {
    if (!json.contains(key)) bad(key, "no such key", "a value");
    return json[key];
  }
  void operator()(const char* key, std::int64_t& value) const {
    const auto& item = at(key);
    const bool any_sign = std::string_view(key) == "seed";
    if (!item.is_number_integer() || (!any_sign && item.get<std::int64_t>() < 0))
      bad(key, item.dump(), any_sign ? "an integer" : "an integer, 0 or more");
    value = item.get<std::int64_t>();
  }
  void operator()(const char* key, double& value) const {
    if (!at(key).is_number()) bad(key, at(key).dump(), "a number");
    value = at(key).get<double>();
  }
  void operator()(const char* key, std::vector<std::string>& value) const {
    if (!json.contains(key)) return;
    const auto& list = json[key];
    const auto is_text = [](const auto& item) { return item.is_string(); };
    if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_text))
      bad(key, list.dump(), "a list of texts");
    value = list.get<std::vector<std::string>>();
  }
  void operator()(const char* key, std::map<std::string, std::string>& value) const {
    if (!json.contains(key)) return;
    const auto& table = json[key];
    const auto is_text = [](const auto& item) { return item.is_string(); };
    if (!table.is_object() || !std::all_of(table.begin(), table.end(), is_text))
      bad(key, table.dump(), "a table of texts");
    value = table.get<std::map<std::string, std::string>>();
  }
  void operator()(const char* key, std::map<std::string, std::int64_t>& value) const {
    if (!json.contains(key)) return;
    const auto& table = json[key];
    const auto is_count = [](const auto& item) { return item.is_number_unsigned(); };
    if (!table.is_object() || !std::all_of(table.begin(), table.end(), is_count))
      bad(key, table.dump(), "a table of integers, 0 or more");
    value = table.get<std::map<std::string, std::int64_t>>();
  }
  void operator()(const char* key, std::string& value) const {
    if (!at(key).is_string()) bad(key, at(key).dump(), "a text");
    value = at(key).get<std::string>();
  }
};

}  // namespace

std::optional<std::int64_t> checkpoint_step(const fs::path& directory) {
  std::string name = directory.filename().string();
  if (auto original = visible(directory, kReplaced)) name = original->filename().string();
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string digits = name.substr(kPrefix.size());
  if (digits.size() < 8 || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return std::stoll(digits);
}

fs::path checkpoint_path(const fs::path& root, std::int64_t step) {
  return root / fmt::format("step-{:08}", step);
}

std::vector<fs::path> list_checkpoints(const fs::path& root) {
  return files(root.string(), [&] {
    std::vector<fs::path> found;
    if (!fs::is_directory(root)) return found;
    for (const auto& entry : fs::directory_iterator(root)) {
      const auto original = visible(entry.path(), kReplaced);
      if (original && fs::exists(*original)) continue;
      if (checkpoint_step(entry.path()) && is_complete(entry.path())) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return *checkpoint_step(a) < *checkpoint_step(b); });
    return found;
  });
}

fs::path resolve_checkpoint(const fs::path& root, const std::string& which) {
  if (which == "latest") {
    auto found = list_checkpoints(root);
    if (found.empty())
      refuse("checkpoint.resume = \"latest\"", "no complete checkpoint in " + root.string(),
             "at least one folder step-NNNNNNNN",
             "Check run.directory, or leave checkpoint.resume out to start anew");
    return found.back();
  }
  const fs::path directory = which;
  if (!is_complete(directory))
    refuse("checkpoint " + which,
           fs::is_directory(directory) ? std::string("a folder without ") + kListing
                                       : std::string("no such folder"),
           "a complete checkpoint's folder (step-NNNNNNNN), or \"latest\"",
           fs::exists(directory) ? "Name the checkpoint's own folder" : missing_path_action(directory));
  return directory;
}

void publish_directory(const fs::path& directory, const std::function<void(const fs::path&)>& write,
                       const Moment& moment) {
  const auto at = [&](std::string_view name) {
    if (moment) moment(name);
  };
  const fs::path root = directory.parent_path(), partial = hidden(directory, kPartial);
  const fs::path replaced = hidden(directory, kReplaced);
  files(directory.string(), [&] {
    // The folder above is the run's. Where it has gone meanwhile it is not made anew.
    if (fs::create_directory(root)) fsync_directory(root.parent_path());
    clear_leftovers(root);
    fs::create_directory(partial);
    try {
      at("empty folder");
      write(partial);
      at("files written");
      write_checksums(partial);
      at("checksums written");
      for (const auto& entry : fs::directory_iterator(partial)) fsync_file(entry.path());
      fsync_directory(partial);
    } catch (...) {
      std::error_code ignored;
      fs::remove_all(partial,
                     ignored);  // a full disk gets its space back; the first error is the one to tell
      throw;
    }
    at("synced");
    const bool again = fs::exists(directory);
    if (again) fs::rename(directory, replaced);
    at("moved aside");
    fs::rename(partial, directory);
    fsync_directory(root);
    at("renamed");
    if (again) remove_old(replaced);
    at("published");
  });
}

void prune_checkpoints(const fs::path& root, std::int64_t step, std::int64_t keep, const Moment& moment) {
  files(root.string(), [&] {
    std::vector<fs::path> past, gone;
    for (const auto& path : list_checkpoints(root))
      (*checkpoint_step(path) > step ? gone : past).push_back(path);
    const auto surplus = static_cast<std::int64_t>(past.size()) - std::max<std::int64_t>(keep, 1);
    for (std::int64_t i = 0; i < surplus; ++i) gone.push_back(past[static_cast<std::size_t>(i)]);
    for (const auto& path : gone) {
      // Under its own name a folder is whole or absent, in deletion too.
      const fs::path doomed = hidden(path, kDeleting);
      fs::rename(path, doomed);
      if (moment) moment("deleting");
      remove_old(doomed);
    }
  });
}

void verify_checksums(const fs::path& directory) {
  files(directory.string(), [&] { compare_with_listing(directory, {}); });
}

void verify_model_files(const fs::path& directory) {
  files(directory.string(), [&] {
    if (is_complete(directory)) compare_with_listing(directory, {"optimizer.safetensors", "state.json"});
  });
}

std::string to_json(const TrainingState& state) {
  nlohmann::ordered_json json{{"format", kFormat}};
  state_fields(state, [&](const char* key, const auto& value) { json[key] = value; });
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

TrainingState parse_state(const std::string& text, const std::string& file) {
  const auto [json, problem] = parse_json(text);
  const Reader reader{json, file};
  if (!problem.empty()) reader.bad("the whole file", problem, "the state of a run");
  if (reader.at("format") != kFormat)
    reader.bad("format", json["format"].dump(),
               std::to_string(kFormat) + ", the only one this version reads");
  TrainingState state;
  state_fields(state, reader);
  return state;
}

}  // namespace isograd
