// Directories of checkpoints: published whole or not at all, checksummed, listed, pruned. Knows no tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "isograd/checkpoint.hpp"

namespace isograd {

// Called at named points of a save; tests kill the process there.
using Moment = std::function<void(std::string_view)>;

// Step of a directory named step-00000100; nothing for any other name.
std::optional<std::int64_t> checkpoint_step(const std::filesystem::path& directory);

inline constexpr const char* kListing = "checksums.json";
inline constexpr const char* kStateFile = "state.json";

// `write` fills a hidden sibling of `directory`, which gets checksums.json, is fsynced and renamed to
// `directory`. An earlier directory of that name is moved aside just before the rename and removed after it;
// an earlier checkpoint stays listed until then. Leftovers of killed saves are removed first. The containing
// folder is created if missing, the one above it is not.
void publish_directory(const std::filesystem::path& directory,
                       const std::function<void(const std::filesystem::path&)>& write,
                       const Moment& moment = {});
// `directory`; where a write was killed between its two renames, the earlier one that was moved aside.
std::filesystem::path published(const std::filesystem::path& directory);

// The validation losses of the complete checkpoints below `root` up to `step` that say theirs, the lowest
// first; of equal ones the earlier.
std::vector<std::pair<double, std::filesystem::path>> best_checkpoints(
    const std::filesystem::path& root, std::int64_t step = std::numeric_limits<std::int64_t>::max());

// Deletes checkpoints of a step above `step`, and of the others all but the newest `keep` and the best
// `keep_best`.
void prune_checkpoints(const std::filesystem::path& root, std::int64_t step, std::int64_t keep,
                       std::int64_t keep_best, const Moment& moment = {});

// Compares every file with checksums.json. ConfigError names the first bad one and what to resume from.
void verify_checksums(const std::filesystem::path& directory);

// As above for a model's files, if the directory has a checksums.json. The run's state may be missing.
void verify_model_files(const std::filesystem::path& directory);

// TrainingState as state.json, parsed as a file from outside.
std::string to_json(const TrainingState& state);
// ConfigError names `file` and the key that is missing or wrong.
TrainingState parse_state(const std::string& text, const std::string& file);

}  // namespace isograd
