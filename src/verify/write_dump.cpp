// A dump goes to disk: written beside and renamed.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/verify.hpp"
#include "model/safetensors.hpp"
#include "verify/dump_format.hpp"

namespace isograd {

using namespace dump_format;

namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

// JSON has no NaN and no infinity: they are written as texts, which read_dump() takes back.
json number(double value) {
  return std::isfinite(value) ? json(value) : json(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

json describe(const StepDump& dump) {
  json object = {{"format", kFormat}, {"version", kVersion}};
  const StepFigures& figures = dump.figures;
  const auto recorded = [&](const std::string& key, double value) {
    const auto& broken = dump.not_numbers;
    return !std::isnan(value) || std::find(broken.begin(), broken.end(), key) != broken.end();
  };
  const auto put = [&](const char* key, double value) {
    if (recorded(key, value)) object[key] = number(value);
  };
  put("loss", figures.loss);
  if (figures.targets != kNotRecorded) object["targets"] = figures.targets;
  if (figures.tokens != kNotRecorded) object["tokens"] = figures.tokens;
  put("norm", figures.norm);
  put("clip_coefficient", figures.clip_coefficient);
  if (!dump.samples.empty()) object["samples"] = dump.samples;
  if (!dump.counts.empty()) object["counts"] = dump.counts;
  for (const auto& [axis, size] : dump.axes) object["axes"][axis] = size;
  if (!dump.precision.empty()) object["precision"] = dump.precision;
  for (const auto& [name, gradient] : dump.gradients) object["parameters"].push_back(name);
  for (const auto& [name, value] : dump.terms) object["terms"][name] = number(value);
  for (const auto& [name, value] : dump.scales) object["scales"][name] = number(value);
  if (!dump.owners.empty()) object["owners"] = dump.owners;
  if (!dump.moves.empty()) object["moves"] = dump.moves;
  if (!dump.rounding.empty()) object["rounding"] = dump.rounding;
  for (std::size_t r = 0; r < dump.ranks.size(); ++r) {
    const StepDump::RankView& rank = dump.ranks[r];
    json view = json::object();
    for (const auto& [key, value] : {std::pair{"spread", rank.spread},
                                     {"owned_norm", rank.owned_norm},
                                     {"norm", rank.norm},
                                     {"bytes_moved", rank.bytes_moved}})
      if (recorded(fmt::format("ranks.{}.{}", r, key), value)) view[key] = number(value);
    for (const auto hash : rank.initial) view["initial"].push_back(fmt::format("{:016x}", hash));
    for (const auto hash : rank.gradients) view["gradients"].push_back(fmt::format("{:016x}", hash));
    object["ranks"].push_back(std::move(view));
  }
  for (const auto& peers : dump.peer_sums) object["peers"][peers.name] = peers.axes;
  for (const auto& finding : dump.findings)
    object["findings"].push_back({{"id", finding.id}, {"sentence", finding.sentence}});
  return object;
}

// Files that cannot be written: what the operating system said, as an error of the input.
template <typename Action>
void on_disk(const fs::path& path, Action&& action) {
  try {
    action();
  } catch (const fs::filesystem_error& error) {
    throw ConfigError({.where = path.string(),
                       .found = error.code().message(),
                       .expected = "a place that a dump can be written to",
                       .action = "Choose another folder"});
  }
}

}  // namespace

void write_dump(const StepDump& dump, const fs::path& directory) {
  const fs::path path = directory.has_filename() ? directory : directory.parent_path();
  if (fs::exists(path) && !fs::exists(path / kStep) && !(fs::is_directory(path) && fs::is_empty(path)))
    throw ConfigError({.where = path.string(),
                       .found = "something that is no dump",
                       .expected = "a new folder, or a dump to be replaced",
                       .action = "Choose another folder"});
  on_disk(path, [&] {
    if (path.has_parent_path()) fs::create_directories(path.parent_path());
    std::string partial = (path.parent_path() / ("." + path.filename().string() + ".XXXXXX")).string();
    if (!mkdtemp(partial.data()))
      throw fs::filesystem_error("mkdtemp", path, std::error_code(errno, std::generic_category()));
    try {
      fs::permissions(partial, fs::perms(0755));
      write_safetensors(fs::path(partial) / kGradients, dump.gradients);
      if (!dump.applied.empty()) write_safetensors(fs::path(partial) / kApplied, dump.applied);
      StepDump::Named peers;
      for (const auto& each : dump.peer_sums) peers.emplace_back(each.name, each.sum);
      if (!peers.empty()) write_safetensors(fs::path(partial) / kPeers, peers);
      for (std::size_t rank = 0; rank < dump.shares.size(); ++rank)
        for (std::size_t i = 0; i < dump.shares[rank].size(); ++i)
          if (!dump.shares[rank][i].empty())
            write_safetensors(fs::path(partial) / share_file(rank, i), dump.shares[rank][i]);
      write_file(fs::path(partial) / kStep, describe(dump).dump(1) + "\n");
      if (fs::exists(path)) {
        const fs::path replaced = partial + ".replaced";
        fs::rename(path, replaced);
        fs::rename(partial, path);
        fs::remove_all(replaced);
      } else {
        fs::rename(partial, path);
      }
    } catch (...) {
      std::error_code ignored;
      fs::remove_all(partial, ignored);
      throw;
    }
  });
}

}  // namespace isograd
