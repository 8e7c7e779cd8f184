// A dump of a step as files: written under another name and renamed, read as hostile.
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "model/safetensors.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

constexpr const char* kFormat = "isograd-dump";
constexpr int kVersion = 1;
constexpr const char* kStep = "step.json";
constexpr const char* kGradients = "gradients.safetensors";
constexpr const char* kApplied = "applied.safetensors";
constexpr const char* kPeers = "peers.safetensors";

constexpr std::pair<const char*, double StepDump::RankView::*> kNumbersOfRank[] = {
    {"spread", &StepDump::RankView::spread},
    {"owned_norm", &StepDump::RankView::owned_norm},
    {"norm", &StepDump::RankView::norm},
    {"bytes_moved", &StepDump::RankView::bytes_moved}};

std::string share_file(std::size_t rank, std::size_t micro_batch) {
  return fmt::format("share-{}-{}.safetensors", rank, micro_batch);
}

// JSON has no NaN and no infinity: they are written as texts, which read_dump() takes back.
json number(double value) {
  return std::isfinite(value) ? json(value) : json(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

json describe(const StepDump& dump) {
  json object = {{"format", kFormat}, {"version", kVersion}};
  const StepFigures& figures = dump.figures;
  const auto recorded = [&](const std::string& key, double value) {
    const auto& broken = dump.not_numbers;
    return !std::isnan(value) || std::ranges::find(broken, key) != broken.end();
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
  if (dump.scale_moves != 0) object["scale_moves"] = number(dump.scale_moves);
  if (dump.scale_rounding != 0) object["scale_rounding"] = number(dump.scale_rounding);
  for (std::size_t r = 0; r < dump.ranks.size(); ++r) {
    const StepDump::RankView& rank = dump.ranks[r];
    json view = json::object();
    for (const auto& [key, of] : kNumbersOfRank)
      if (recorded(fmt::format("ranks.{}.{}", r, key), rank.*of)) view[key] = number(rank.*of);
    for (const auto hash : rank.initial) view["initial"].push_back(fmt::format("{:016x}", hash));
    for (const auto hash : rank.gradients) view["gradients"].push_back(fmt::format("{:016x}", hash));
    object["ranks"].push_back(std::move(view));
  }
  for (const auto& peers : dump.peer_sums) object["peers"][peers.name] = peers.axes;
  for (const auto& finding : dump.findings)
    object["findings"].push_back({{"id", finding.id}, {"sentence", finding.sentence}});
  return object;
}

constexpr std::uintmax_t kMostJson = 256 << 20;
constexpr std::int64_t kMostInteger = std::int64_t{1} << 53;
constexpr std::int64_t kMostRanks = 1 << 20;

[[noreturn]] void refuse_dump(const std::string& where, const std::string& found,
                              const std::string& expected) {
  refuse(where, found, expected, "Write the dump again as docs/dump.md says");
}

class StepReader {
 public:
  explicit StepReader(const fs::path& path) : path_(path) {
    std::error_code none;
    const auto bytes = fs::file_size(path, none);
    if (!none && bytes > kMostJson)
      bad("", fmt::format("{} bytes", bytes), fmt::format("at most {}", kMostJson));
    const std::string text = read_file(path);
    auto [object, problem] = parse_json<json>(text);
    const bool not_finite =
        text.find("NaN") != std::string::npos || text.find("Infinity") != std::string::npos;
    if (!problem.empty())
      bad("", not_finite ? "NaN or Infinity, which JSON does not have" : problem,
          "a JSON object; a number that is not finite is written as \"nan\" or \"inf\"");
    object_ = std::move(object);
  }

  StepDump read() {
    if (const auto* format = find("format"); !format || *format != kFormat)
      bad("format", format ? show(*format) : "no such key", fmt::format("\"{}\"", kFormat));
    if (integer("version", 0) != kVersion)
      bad("version", show(object_["version"]), fmt::format("{}, the version that is read here", kVersion));
    StepDump dump;
    dump.figures = {.loss = number("loss", find("loss"), true),
                    .targets = integer("targets", kNotRecorded),
                    .tokens = integer("tokens", kNotRecorded),
                    .norm = number("norm", find("norm")),
                    .clip_coefficient = number("clip_coefficient", find("clip_coefficient"))};
    dump.samples =
        integers("samples", entries("samples", &json::is_array, "a list of whole numbers"), -kMostInteger);
    std::ranges::sort(dump.samples);
    for (const json& rank :
         entries("counts", &json::is_array, "for each rank a list of its micro-batches' targets")) {
      if (!rank.is_array()) bad("counts", show(rank), "a list of whole numbers");
      dump.counts.push_back(integers("counts", rank, 0));
    }
    const json& axes = of_kind("axes", &json::is_object, "sizes by name, {\"dp_shard\": 4}");
    std::int64_t all = 1;
    for (const auto& [axis, size] : axes.items()) {
      const std::int64_t ranks = whole("axes." + axis, size);
      if (ranks < 1 || ranks > kMostRanks)
        bad("axes." + axis, show(size), fmt::format("1 to {} ranks", kMostRanks));
      if ((all *= ranks) > kMostRanks)
        bad("axes", show(axes), fmt::format("{} ranks at most, along all axes together", kMostRanks));
      dump.axes.push_back({axis, static_cast<int>(ranks)});
    }
    if (const auto* value = find("precision")) {
      if (!value->is_string() || !float_type(value->get<std::string>(), &FloatType::precision))
        bad("precision", show(*value), "\"fp64\", \"fp32\", \"bf16\" or \"fp16\"");
      dump.precision = value->get<std::string>();
    }
    for (const json& name : of_kind("parameters", &json::is_array, "the names in the model's order")) {
      if (!name.is_string()) bad("parameters", show(name), "names");
      order_.push_back(name.get<std::string>());
    }
    dump.terms = numbers("terms", "values by name");
    dump.scales = numbers("scales", "factors by name, {\"learning_rate\": 0.1}");
    for (const json& pair : entries("owners", &json::is_array, "for each parameter the least and the most")) {
      if (!pair.is_array()) bad("owners", show(pair), "a list of whole numbers");
      const auto two = integers("owners", pair, 0);
      if (two.size() != 2) bad("owners", show(pair), "[least, most]");
      dump.owners.emplace_back(two[0], two[1]);
    }
    dump.moves = lengths("moves");
    dump.rounding = lengths("rounding");
    dump.scale_moves = length("scale_moves", find("scale_moves"));
    dump.scale_rounding = length("scale_rounding", find("scale_rounding"));
    for (const json& rank : entries("ranks", &json::is_array, "what each rank says for itself"))
      dump.ranks.push_back(rank_view(rank, fmt::format("ranks.{}.", dump.ranks.size())));
    const json& peers = entries("peers", &json::is_object, "axes by name, {\"norm.weight\": \"tp\"}");
    for (const auto& [name, along] : peers.items()) {
      if (!along.is_string())
        bad("peers." + name, show(along), "the axes along which its copies lie, \"tp\"");
      dump.peer_sums.push_back({name, along.get<std::string>(), {}});
    }
    for (const json& finding :
         entries("findings", &json::is_array, "[{\"id\": \"updates_differ\", \"sentence\": ...}]"))
      dump.findings.push_back(finding_of(finding, fmt::format("findings.{}.", dump.findings.size())));
    dump.not_numbers = std::move(not_numbers_);
    expect_ranks(dump);
    refuse_others(object_, seen_, "");
    return dump;
  }

  const std::vector<std::string>& order() const { return order_; }

  [[noreturn]] void bad(const std::string& key, const std::string& found, const std::string& expected) const {
    refuse_dump(path_.string() + (key.empty() ? "" : ": " + brief(key)), found, expected);
  }

 private:
  static std::string show(const nlohmann::json& value) { return brief(value); }

  const json* find(const char* key) {
    seen_.insert(key);
    const auto place = object_.find(key);
    if (place != object_.end() && place->is_null())
      bad(key, "null", "a value, or no such key where it was not recorded");
    return place == object_.end() ? nullptr : &*place;
  }

  // A list or an object; null, which has no entries, where there is no such key.
  using Kind = bool (json::*)() const noexcept;
  const json& of_kind(const char* key, Kind is, const char* expected) {
    static const json none;
    const json* value = find(key);
    if (value && !(value->*is)()) bad(key, show(*value), expected);
    return value ? *value : none;
  }

  // The same, neither empty nor longer than there can be ranks.
  const json& entries(const std::string& key, Kind is, const char* expected) {
    const json& value = of_kind(key.c_str(), is, expected);
    if (!value.is_null()) expect_entries(key, value);
    if (std::ssize(value) > kMostRanks && (key == "counts" || key == "ranks"))
      bad(key, show(value), expected);
    return value;
  }
  // An empty list is not what was not recorded: that has no key.
  void expect_entries(const std::string& key, const json& list) const {
    if (list.empty()) bad(key, "an empty list", "entries, or no such key where they were not recorded");
  }

  std::int64_t whole(const std::string& key, const json& value) const {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{kMostInteger}) ||
        value.get<std::int64_t>() < -kMostInteger)
      bad(key, show(value), "a whole number of at most 2^53");
    return value.get<std::int64_t>();
  }

  std::int64_t integer(const char* key, std::int64_t absent) {
    const json* value = find(key);
    if (!value) return absent;
    const std::int64_t result = whole(key, *value);
    if (result < 0) bad(key, show(*value), "0 or more");
    return result;
  }

  std::vector<std::int64_t> integers(const std::string& key, const json& values, std::int64_t least) const {
    std::vector<std::int64_t> result;
    for (const json& value : values) {
      result.push_back(whole(key, value));
      if (result.back() < least) bad(key, show(value), "0 or more");
    }
    return result;
  }

  // For each parameter a finite length, 0 or more.
  std::vector<double> lengths(const char* key) {
    std::vector<double> result;
    for (const json& entry : entries(key, &json::is_array, "a list of numbers, one for each parameter"))
      result.push_back(length(key, &entry));
    return result;
  }

  // Finite, 0 or more; 0 where it was not recorded.
  double length(const std::string& key, const json* recorded) const {
    const double value = recorded ? real(key, *recorded) : 0;
    if (!(value >= 0) || std::isinf(value)) bad(key, show(*recorded), "a finite number, 0 or more");
    return value;
  }

  double real(const std::string& key, const json& value) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (value.is_number()) return value.get<double>();
    if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (value == "inf") return kInfinity;
    if (value == "-inf") return -kInfinity;
    bad(key, show(value), "a number, \"nan\", \"inf\" or \"-inf\"");
  }

  // A figure; NaN where it was not recorded. Remembers the keys of those that are no numbers.
  double number(const std::string& key, const json* recorded, bool any_sign = false) {
    if (!recorded) return std::numeric_limits<double>::quiet_NaN();
    const double value = real(key, *recorded);
    if (std::isnan(value)) not_numbers_.push_back(key);
    if (value < 0 && !any_sign) bad(key, show(*recorded), "0 or more");
    return value;
  }

  std::vector<std::pair<std::string, double>> numbers(const std::string& key, const char* expected) {
    std::vector<std::pair<std::string, double>> result;
    for (const auto& [name, value] : of_kind(key.c_str(), &json::is_object, expected).items())
      result.emplace_back(name, number(fmt::format("{}.{}", key, name), &value, true));
    return result;
  }

  StepDump::RankView rank_view(const json& view, const std::string& in) {
    if (!view.is_object()) bad("ranks", show(view), "an object for each rank");
    StepDump::RankView read;
    std::set<std::string> known{"initial", "gradients"};
    for (const auto& [key, of] : kNumbersOfRank) {
      read.*of = number(in + key, view.contains(key) ? &view[key] : nullptr);
      known.insert(key);
    }
    for (const auto& [key, hashes] : {std::pair{"initial", &read.initial}, {"gradients", &read.gradients}}) {
      if (!view.contains(key)) continue;
      if (!view[key].is_array()) bad(in + key, show(view[key]), "checksums of 16 hex digits");
      expect_entries(in + key, view[key]);
      for (const json& entry : view[key]) {
        const std::string text = entry.is_string() ? entry.get<std::string>() : "";
        if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
          bad(in + key, show(entry), "16 hex digits");
        hashes->push_back(std::stoull(text, nullptr, 16));
      }
    }
    refuse_others(view, known, in);
    return read;
  }

  Finding finding_of(const json& entry, const std::string& in) const {
    if (!entry.is_object()) bad("findings", show(entry), "an object for each finding");
    const auto text = [&](const char* key) {
      const auto found = entry.find(key);
      if (found == entry.end() || !found->is_string() || found->get_ref<const std::string&>().empty())
        bad(in + key, found == entry.end() ? "no such key" : show(*found), "a text");
      return found->get<std::string>();
    };
    Finding finding{text("id"), text("sentence"), {}};
    if (std::ranges::none_of(kDiagnoses, [&](auto& known) { return finding.id == known.id; }))
      bad(in + "id", show(entry["id"]), "a name of docs/museum.md");
    refuse_others(entry, {"id", "sentence"}, in);
    return finding;
  }

  // Lists by rank are of one number of ranks, and checksums of one number of parameters.
  void expect_ranks(const StepDump& dump) const {
    std::size_t all = 1, data_ranks = 1;  // ranks; ranks that have samples of their own
    for (const auto& [axis, size] : dump.axes) {
      all *= static_cast<std::size_t>(size);
      if (axis != "tp" && axis != "pp") data_ranks *= static_cast<std::size_t>(size);
    }
    const auto expect = [&](const char* key, std::size_t ranks, bool fits) {
      if (!dump.axes.empty() && ranks > 1 && !fits)
        bad(key, fmt::format("{} ranks", ranks), fmt::format("the {} that \"axes\" makes", all));
    };
    expect("counts", dump.counts.size(), dump.counts.size() == all || dump.counts.size() == data_ranks);
    expect("ranks", dump.ranks.size(), dump.ranks.size() == all);
    std::size_t initial = 0, gradients = 0;
    for (std::size_t r = 0; r < dump.ranks.size(); ++r)
      for (const auto& [key, own, known] :
           {std::tuple{"initial", dump.ranks[r].initial.size(), &initial},
            std::tuple{"gradients", dump.ranks[r].gradients.size(), &gradients}}) {
        if (*known && own && own != *known)
          bad(fmt::format("ranks.{}.{}", r, key), fmt::format("{} checksums", own),
              fmt::format("{}, as on the ranks before it", *known));
        if (own) *known = own;
      }
  }

  void refuse_others(const json& object, const std::set<std::string>& known, const std::string& in) const {
    for (const auto& [key, value] : object.items())
      if (!known.contains(key)) bad(in + key, "this key", fmt::format("{}", fmt::join(known, ", ")));
  }

  fs::path path_;
  json object_;
  std::set<std::string> seen_;
  std::vector<std::string> order_, not_numbers_;
};

StepDump::Named read_gradients(const fs::path& file, std::vector<std::string> order, std::string* precision) {
  const auto bad = [&](const std::string& found, const std::string& expected) {
    refuse_dump(file.string(), found, expected);
  };
  const auto tensors = read_safetensors(file);
  if (tensors.empty()) bad("no tensor", "one gradient for each parameter");
  if (order.empty())
    for (const auto& [name, tensor] : tensors) order.push_back(name);
  if (order.size() != tensors.size())
    bad(fmt::format("{} tensors", tensors.size()),
        fmt::format("the {} that \"parameters\" of {} names", order.size(), kStep));
  const bool in_fp64 = *precision == "fp64";
  const FloatType* coarsest = kFloatTypes;
  StepDump::Named gradients;
  std::set<std::string> taken;
  for (const auto& name : order) {
    const auto place = tensors.find(name);
    if (place == tensors.end() || !taken.insert(name).second)
      bad(fmt::format("{} {}", place == tensors.end() ? "no tensor" : "twice in \"parameters\"", name),
          "each tensor named once");
    const at::ScalarType type = place->second.scalar_type();
    const FloatType* const row = float_type(type, &FloatType::type);
    if (!row) bad(fmt::format("{} in {}", name, c10::toString(type)), "F64, F32, BF16 or F16");
    if (in_fp64 && type != at::kDouble)
      bad(fmt::format("{} in {}", name, c10::toString(type)),
          fmt::format("F64, as \"precision\" of {} says: what was rounded proves nothing in fp64", kStep));
    coarsest = std::max(coarsest, row);
    gradients.emplace_back(name, place->second.to(at::kDouble));  // F64 stays in the file, mapped
  }
  if (precision->empty()) *precision = coarsest->precision;
  return gradients;
}

}  // namespace

void write_dump(const StepDump& dump, const fs::path& directory) {
  const fs::path path = directory.has_filename() ? directory : directory.parent_path();
  if (fs::exists(path) && !fs::exists(path / kStep) && !(fs::is_directory(path) && fs::is_empty(path)))
    refuse(path.string(), "something that is no dump", "a new folder, or a dump to be replaced",
           "Choose another folder");
  std::string partial = (path.parent_path() / ("." + path.filename().string() + ".XXXXXX")).string();
  try {
    if (path.has_parent_path()) fs::create_directories(path.parent_path());
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
      const fs::path replaced = partial + ".replaced";
      if (fs::exists(path)) fs::rename(path, replaced);
      fs::rename(partial, path);
      fs::remove_all(replaced);
    } catch (...) {
      std::error_code ignored;
      fs::remove_all(partial, ignored);
      throw;
    }
  } catch (const fs::filesystem_error& error) {
    refuse(path.string(), error.code().message(), "a place that a dump can be written to",
           "Choose another folder");
  }
}

StepDump read_dump(const fs::path& directory) {
  if (!fs::is_directory(directory))
    refuse(directory.string(), fs::exists(directory) ? "no folder" : "no such folder",
           fmt::format("a dump: a folder with {} and {}", kGradients, kStep),
           "Name the folder that the trainer wrote (docs/dump.md)");
  for (const char* file : {kStep, kGradients})
    if (!fs::exists(directory / file))
      refuse(directory.string(), fmt::format("a folder without {}", file),
             fmt::format("a dump: a folder with {} and {}", kGradients, kStep),
             "Name the folder that the trainer wrote; docs/dump.md says how one is written");
  StepReader reader(directory / kStep);
  StepDump dump = reader.read();
  dump.gradients = read_gradients(directory / kGradients, reader.order(), &dump.precision);
  std::vector<std::string> names;
  std::map<std::string, at::IntArrayRef> shapes;
  for (const auto& [name, gradient] : dump.gradients) {
    names.push_back(name);
    shapes.emplace(name, gradient.sizes());
  }
  const auto more = [&](const std::string& file, const std::vector<std::string>& of) {
    auto tensors = read_gradients(directory / file, of, &dump.precision);
    for (const auto& [name, tensor] : tensors)
      if (tensor.sizes() != shapes.at(name))
        refuse_dump((directory / file).string() + ": tensor " + name,
                    fmt::format("another shape than in {}", kGradients), "the same");
    return tensors;
  };
  std::vector<std::string> with_peers;
  for (const auto& peers : dump.peer_sums) {
    with_peers.push_back(peers.name);
    if (!shapes.contains(peers.name)) reader.bad("peers", peers.name, fmt::format("names of {}", kGradients));
  }
  const auto expect_all = [&](const std::string& key, std::size_t count) {
    if (count != 0 && count != names.size())
      reader.bad(key, fmt::format("{} entries", count),
                 fmt::format("one for each of {} parameters", names.size()));
  };
  expect_all("owners", dump.owners.size());
  expect_all("moves", dump.moves.size());
  expect_all("rounding", dump.rounding.size());
  for (std::size_t r = 0; r < dump.ranks.size(); ++r) {
    expect_all(fmt::format("ranks.{}.initial", r), dump.ranks[r].initial.size());
    expect_all(fmt::format("ranks.{}.gradients", r), dump.ranks[r].gradients.size());
  }
  if (fs::exists(directory / kApplied)) dump.applied = more(kApplied, names);
  if (!with_peers.empty()) {
    const auto sums = more(kPeers, with_peers);
    for (std::size_t i = 0; i < sums.size(); ++i) dump.peer_sums[i].sum = sums[i].second;
  }
  // Which shares there are follows from the counts.
  for (std::size_t rank = 0; rank < dump.counts.size(); ++rank)
    for (std::size_t i = 0; i < dump.counts[rank].size(); ++i) {
      if (!fs::exists(directory / share_file(rank, i))) continue;
      dump.shares.resize(dump.counts.size());
      dump.shares[rank].resize(dump.counts[rank].size());
      dump.shares[rank][i] = more(share_file(rank, i), names);
    }
  return dump;
}

}  // namespace isograd
