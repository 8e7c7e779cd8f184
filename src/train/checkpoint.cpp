// Checkpoints: whole, checksummed folders, the state of a run as JSON, and tensors that any mesh can load.
#include "isograd/checkpoint.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <set>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "layout/flat.hpp"
#include "model/safetensors.hpp"
#include "train/checkpoint_files.hpp"
#include "train/rank_zero.hpp"
#include "train/whole_tensors.hpp"

namespace isograd {
namespace {

constexpr const char* kPartial = ".partial";    // being written
constexpr const char* kReplaced = ".replaced";  // whole; another of the same step is taking its place
constexpr const char* kDeleting = ".deleting";

fs::path hidden(const fs::path& directory, const char* suffix) {
  return directory.parent_path() / ("." + directory.filename().string() + suffix);
}

bool is_complete(const fs::path& directory) { return fs::is_regular_file(directory / kListing); }

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

// An old checkpoint that cannot be removed costs space, not the run: it is hidden, and each save tries again.
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
  const std::string text = json_text(listed);
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
  visit("validation_loss", state.validation_loss);
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
  void operator()(const char* key, std::optional<double>& value) const {
    if (!json.contains(key) || json[key].is_null()) return;
    if (!json[key].is_number()) bad(key, json[key].dump(), "a number, or null");
    value = json[key].get<double>();
  }
  template <class Value>
  void operator()(const char* key, Value& value) const {
    using Count = std::int64_t;
    const auto read = [&](bool sound, const char* expected) {
      if (!sound) bad(key, json[key].dump(), expected);
      value = json[key].get<Value>();
    };
    if constexpr (std::is_same_v<Value, Count>) {
      const bool any_sign = std::string_view(key) == "seed", whole = at(key).is_number_integer();
      read(whole && (any_sign || json[key].get<Count>() >= 0),
           any_sign ? "an integer" : "an integer, 0 or more");
    } else if constexpr (std::is_same_v<Value, double>) {
      read(at(key).is_number(), "a number");
    } else if constexpr (std::is_same_v<Value, std::string>) {
      read(at(key).is_string(), "a text");
    } else if (json.contains(key)) {  // lists and tables, which checkpoints of earlier versions lack
      constexpr bool list = std::is_same_v<Value, std::vector<std::string>>,
                     counts = std::is_same_v<Value, std::map<std::string, Count>>;
      const auto sound = [](const nlohmann::json& item) {
        return counts ? item.is_number_unsigned() : item.is_string();
      };
      const nlohmann::json& many = json[key];
      read((list ? many.is_array() : many.is_object()) && std::all_of(many.begin(), many.end(), sound),
           list     ? "a list of texts"
           : counts ? "a table of integers, 0 or more"
                    : "a table of texts");
    }
  }
};

// ---- tensors ----

constexpr const char* kOptimizerFile = "optimizer.safetensors";

std::string described(at::ScalarType type, at::IntArrayRef sizes) { return c10::str(type, " ", sizes); }

std::string dtypes_of(DataParallel& layout) {
  std::set<std::string> names;
  for (const Bucket& bucket : layout.buckets()) names.insert(float_type(bucket.plan.dtype).name);
  return fmt::format("{}", fmt::join(names, ", "));
}

// This rank's part of each bucket, by name; "master" where the parameters have one.
OptimizerState sharded_state(DataParallel& layout, Optimizer& optimizer) {
  OptimizerState state = optimizer.state(layout.buckets());
  std::vector<at::Tensor> masters;
  bool any = false;
  for (Bucket& bucket : layout.buckets()) {
    const bool own = bucket.master.scalar_type() != bucket.parameters.scalar_type();
    masters.push_back(own ? bucket.master : at::Tensor());
    any = any || own;
  }
  if (any) state["master"] = std::move(masters);
  return state;
}

// One state tensor of one parameter and its place in a bucket.
struct Place {
  const Bucket& bucket;
  const Slot& slot;
  at::Tensor flat;  // [held.size()] of the bucket
};

// State tensors by name: per parameter, not per bucket or shard, so that another layout can load them.
std::map<std::string, Place> places(DataParallel& layout, const OptimizerState& state) {
  std::map<std::string, Place> places;
  for (const auto& [key, flats] : state)
    for (std::size_t b = 0; b < flats.size(); ++b)
      if (flats[b].defined())
        for (const Slot& slot : layout.buckets()[b].plan.slots)
          places.emplace(slot.name + "." + key, Place{layout.buckets()[b], slot, flats[b]});
  return places;
}

// ConfigError for this rank's first parameter that its master does not round to.
void check_masters(const fs::path& file, DataParallel& layout) {
  for (const Bucket& bucket : layout.buckets()) {
    if (bucket.master.scalar_type() == bucket.parameters.scalar_type()) continue;
    for (const Slot& slot : bucket.plan.slots) {
      const Range part = within(bucket.held, slot);
      const auto own = [&](const at::Tensor& of) {
        return of.narrow(0, part.begin - bucket.held.begin, part.size());
      };
      if (part.size() == 0 || at::allclose(own(bucket.master).to(bucket.plan.dtype), own(bucket.parameters),
                                           /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true))
        continue;
      refuse(file.string() + ": " + slot.name + ".master", "values that do not round to the parameter's",
             "masters of these very weights: the first update would bring the masters' back",
             "Read the weights from the same checkpoint before making the layout; where its own files "
             "differ, start anew from its weights with model.load");
    }
  }
}

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

std::vector<std::pair<double, fs::path>> best_checkpoints(const fs::path& root, std::int64_t step) {
  std::vector<std::pair<double, fs::path>> losses;
  for (const auto& path : list_checkpoints(root)) {
    if (*checkpoint_step(path) > step || !fs::exists(path / kStateFile)) continue;
    const nlohmann::json state = parse_json(read_file(path / kStateFile)).value;
    const auto loss = state.is_object() ? state.value("validation_loss", nlohmann::json()) : nlohmann::json();
    if (loss.is_number()) losses.emplace_back(loss.get<double>(), path);
  }
  std::ranges::stable_sort(losses, {}, &std::pair<double, fs::path>::first);
  return losses;
}

fs::path resolve_checkpoint(const fs::path& root, const std::string& which) {
  if (which == "latest" || which == "best" || which == "auto") {
    const bool best = which == "best";
    if (best) {
      if (const auto found = best_checkpoints(root); !found.empty()) return found.front().second;
    } else if (const auto found = list_checkpoints(root); !found.empty() || which == "auto") {
      return found.empty() ? fs::path() : found.back();
    }
    refuse(
        fmt::format("checkpoint.resume = \"{}\"", which),
        fmt::format("no complete checkpoint{} in {}", best ? " with a validation loss" : "", root.string()),
        "at least one folder step-NNNNNNNN",
        "Check run.directory, or leave checkpoint.resume out to start anew");
  }
  const fs::path directory = which;
  if (!is_complete(directory))
    refuse("checkpoint " + which,
           fs::is_directory(directory) ? std::string("a folder without ") + kListing
                                       : std::string("no such folder"),
           "a complete checkpoint's folder (step-NNNNNNNN), or \"latest\", \"best\" or \"auto\"",
           fs::exists(directory) ? "Name the checkpoint's own folder" : missing_path_action(directory));
  return directory;
}

fs::path published(const fs::path& directory) {
  const fs::path replaced = hidden(directory, kReplaced);
  return fs::exists(directory) || !is_complete(replaced) ? directory : replaced;
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
    fs::remove_all(partial);  // those of a directory that is no step's
    if (fs::exists(replaced)) fs::exists(directory) ? remove_old(replaced) : fs::rename(replaced, directory);
    fs::create_directory(partial);
    try {
      at("empty folder");
      write(partial);
      at("files written");
      write_checksums(partial);
      at("checksums written");
      fsync_all(partial);
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

void prune_checkpoints(const fs::path& root, std::int64_t step, std::int64_t keep, std::int64_t keep_best,
                       const Moment& moment) {
  files(root.string(), [&] {
    std::vector<fs::path> past, gone;
    for (const auto& path : list_checkpoints(root))
      (*checkpoint_step(path) > step ? gone : past).push_back(path);
    std::set<fs::path> best;
    if (keep_best > 0)
      for (const auto& [loss, path] : best_checkpoints(root, step))
        if (static_cast<std::int64_t>(best.size()) < keep_best) best.insert(path);
    const auto surplus = static_cast<std::int64_t>(past.size()) - std::max<std::int64_t>(keep, 1);
    for (std::int64_t i = 0; i < surplus; ++i) {
      const fs::path& path = past[static_cast<std::size_t>(i)];
      if (!best.contains(path)) gone.push_back(path);
    }
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
  state_fields(state, [&](const char* key, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const std::optional<double>&>) {
      if (value) json[key] = *value;
    } else {
      json[key] = value;
    }
  });
  return json_text(json, 1) + "\n";
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

// ---- whole checkpoints ----

fs::path save_checkpoint(const SaveOptions& options, const TrainingState& state,
                         const WriteModel& write_model, DataParallel& layout, Optimizer& optimizer) {
  const fs::path directory = checkpoint_path(options.root, state.step);
  Group all = layout.mesh().all();
  on_every_rank(all, [&] { layout.take_over_writes({}); });
  layout.compare_writes();
  TrainingState whole_state = state;
  whole_state.updates = optimizer.updates();
  whole_state.missed_updates = optimizer.missed_updates();
  if (whole_state.bucket_order.empty()) whole_state.bucket_order = layout.bucket_order();
  if (whole_state.optimizer.empty()) whole_state.optimizer = optimizer.kind();
  if (whole_state.dtype.empty()) whole_state.dtype = dtypes_of(layout);
  WholeTensors weights = WholeTensors::parameters(layout, options.placed);
  WholeTensors states(layout, sharded_state(layout, optimizer), options.placed);
  on_rank_zero_with(all, {&weights, &states}, [&] {
    if (options.makes_folders) make_folders(options.root);
    publish_directory(directory, [&](const fs::path& folder) {
      write_model(folder, weights.stream());
      weights.drain();
      write_safetensors(folder / kOptimizerFile, states.stream());
      write_file(folder / kStateFile, to_json(whole_state));
    });
    prune_checkpoints(options.root, state.step, options.keep, options.keep_best);
  });
  return directory;
}

TrainingState open_checkpoint(const fs::path& directory) {
  verify_checksums(directory);
  const fs::path file = directory / kStateFile;
  return parse_state(read_file(file), file.string());
}

void restore_optimizer(const fs::path& directory, const TrainingState& state, DataParallel& layout,
                       Optimizer& optimizer, const Layout* placed) {
  const fs::path path = directory / kOptimizerFile;
  const auto bad = [&](const std::string& name, const std::string& found, const std::string& expected) {
    refuse(path.string() + ": " + name, found, expected,
           "Resume with the model, optimizer and dtype that this checkpoint was saved with");
  };
  const auto saved = read_safetensors(path);
  const auto needed = places(layout, sharded_state(layout, optimizer));
  // True if the parameter "a" of "a.key" is in another pipeline stage.
  const auto is_elsewhere = [&](const std::string& name) {
    return placed && std::ranges::any_of(placed->parameters(), [&](const PlacedParameter& each) {
             return !each.held && each.name == name.substr(0, name.rfind('.'));
           });
  };
  for (const auto& [name, tensor] : saved)
    if (!needed.contains(name) && !is_elsewhere(name))
      bad(name, "a tensor that this run has no place for", "none");
  for (const auto& [name, place] : needed) {
    const auto& [bucket, slot, flat] = place;
    const std::vector<std::int64_t>& shape =
        placed ? placed->parameter(slot.name).placement.whole_shape : slot.shape;
    const std::string expected = described(flat.scalar_type(), shape);
    const auto found = saved.find(name);
    if (found == saved.end()) bad(name, "no such tensor", expected);
    const at::Tensor& source = found->second;
    if (source.sizes() != at::IntArrayRef(shape) || source.scalar_type() != flat.scalar_type())
      bad(name, described(source.scalar_type(), source.sizes()), expected);
    if (state.updates == 0 && !name.ends_with(".master") && source.count_nonzero().item<std::int64_t>() > 0)
      refuse((directory / kStateFile).string() + ": updates",
             fmt::format("0, with values in {} of {}", name, path.filename().string()),
             "the number of updates that the optimizer had made",
             "The caller of save_checkpoint() left TrainingState::updates at 0. Where the number is "
             "known, set it in the state that you pass; else start anew from the weights");
    write_slot(flat, bucket.held, slot, placed ? placed->local(slot.name, source) : source);
  }
  Group everyone = layout.mesh().all();
  on_every_rank(everyone, [&] { check_masters(path, layout); });
  optimizer.set_updates(state.updates);
  optimizer.set_missed_updates(state.missed_updates);
}

std::unique_ptr<Tokenizer> checkpoint_tokenizer(const fs::path& directory, const TrainingState& state) {
  if (state.tokenizer == "bytes") return byte_tokenizer();
  const bool json = state.tokenizer.starts_with("tokenizer.json:");
  const fs::path file = directory / (json ? "tokenizer.json" : "tokenizer.model");
  if (!fs::exists(file))
    refuse(directory.string(),
           state.tokenizer.empty() ? "a model trained on shards of an unknown tokenizer"
                                   : "tokenizer " + state.tokenizer + " without its file",
           file.filename().string() + " next to the weights",
           "Decode with the tokenizer that packed the shards");
  return open_tokenizer(file.string());
}

}  // namespace isograd
