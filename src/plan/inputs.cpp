// Models, clusters and calibrations from outside: TOML, config.json and numbers, all checked.
#include "plan/inputs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <thread>
#include <variant>

#include "base/files.hpp"
#include "base/number_ranges.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "kernels/versions.hpp"
#include "model/hf.hpp"
#include "plan/problem.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/other_names.hpp"
#include "train/toml_file.hpp"

namespace isograd::planner {
namespace {

// ---- numbers ----

// A kind of number: its range, its unit, and what a text with a unit ends in. Bytes and rates begin at a
// million: a smaller number is of another unit.
struct Quantity {
  double least, most;
  const char *unit = "", *suffix = "", *example = "";
};
constexpr Quantity kOfBytes{1e6, 1e15, "bytes", "B", "80e9 or \"80 GiB\""},
    kOfRate{1e6, 1e15, "bytes/s", "B/s", "450e9 or \"450 GB/s\""},
    kOfFlops{1e6, 1e19, "FLOP/s", "FLOP/s", "989e12 or \"989 TFLOP/s\""},
    kOfSeconds{0, 1, "seconds", "s", "14e-6 or \"14 us\""}, kOfSpread{0, 1e6, "1", "", "0.05"},
    kOfPart{0, 1, "1", "", "0.4"}, kOfReserve{0, 1e15, "bytes", "B", "1e9 or \"1 GiB\""};
constexpr Quantity kDevices{1, kMostDevices}, kLayers{1, 100'000}, kCalibrated{1, 0x1p40},
    kSize{1, key_table::kWide}, kSizeOrNone{0, key_table::kWide}, kExperts{0, 1'000'000},
    kRows{1, key_table::kManyRows};

// Faster than any link that is sold: NVLink 6 has 1.8e12 bytes/s each way, a network 1.6 Tb/s a device.
constexpr double kFastestLink = 2e12, kFastestNetwork = 2.5e11;
constexpr double kMostTokens = 1e15, kMostParameters = 1e16;
constexpr std::uint64_t kLongestModelFile = 16 << 20;  // a config.json has kilobytes
constexpr std::int64_t kFormat = 3;                    // of a calibration; another one was measured otherwise

std::string without_blanks(std::string_view text) {
  std::string result(text);
  std::erase(result, ' ');
  return result;
}

// The number that `text` begins with, and what follows it; nothing: it begins with none.
std::optional<std::pair<double, std::string>> split_number(const std::string& text) {
  double value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc()) return std::nullopt;
  return std::pair(value, std::string(end, text.data() + text.size()));
}

double quantity_of(const std::string& text, const Quantity& kind, const std::string& where) {
  constexpr std::pair<const char*, double> kPrefixes[] = {
      {"", 1},        {"k", 1e3},     {"M", 1e6},     {"G", 1e9},  {"T", 1e12}, {"P", 1e15}, {"Ki", 0x1p10},
      {"Mi", 0x1p20}, {"Gi", 0x1p30}, {"Ti", 0x1p40}, {"m", 1e-3}, {"u", 1e-6}, {"n", 1e-9}};
  if (const auto split = split_number(without_blanks(text)))
    for (const auto& [prefix, scale] : kPrefixes) {
      if (split->second == std::string(prefix) + kind.suffix) return split->first * scale;
      if (&kind == &kOfRate && split->second == std::string(prefix) + "b/s") return split->first * scale / 8;
    }
  refuse(where, "the text " + toml_text(text),
         fmt::format("a number of {}, or a text with its unit", kind.unit),
         fmt::format("Write it as in {}", kind.example));
}

void check(double value, const Quantity& kind, const std::string& where) {
  if (!(value >= kind.least && value <= kind.most))
    refuse(where, fmt::format("{} {}", value, kind.unit),
           fmt::format("{}, at most {:g} {}",
                       kind.least > 0 ? fmt::format("above 0: at least {:g}", kind.least) : "0 or more",
                       kind.most, kind.unit),
           fmt::format("A number without a unit is of {}: write it as in {}", kind.unit, kind.example));
}

void check(std::int64_t value, const Quantity& kind, const std::string& where) {
  if (double(value) < kind.least || double(value) > kind.most)
    refuse(where, std::to_string(value), fmt::format("{:.0f} to {:.0f}", kind.least, kind.most),
           "Correct the number");
}

void check_positive(double value, double most, const std::string& where, const std::string& unit) {
  if (!(value > 0) || value > most)
    refuse(where, fmt::format("{} {}", value, unit), fmt::format("above 0, at most {:g} {}", most, unit),
           "Correct the number");
}

// ---- one list of keys for reading, checking and writing ----

[[noreturn]] void refuse_unknown(const std::string& where, const char* what, const std::string& name,
                                 const std::string& expected, const std::vector<std::string>& known) {
  auto near = nearest(name, known);
  if (const auto ours = our_key(name); ours && !near) {
    const auto found = std::ranges::find(known, ours->substr(ours->rfind('.') + 1));
    if (found != known.end()) near = *found;
  }
  refuse(where, fmt::format("an unknown {} \"{}\"", what, name),
         fmt::format("{}{}", expected, fmt::join(known, ", ")),
         near ? fmt::format("Did you mean \"{}\"?", *near) : "Leave it out");
}

// Line 0: not from a file.
std::string place(const std::string& file, const toml::source_region& source) {
  return source.begin.line == 0 ? file : fmt::format("{}:{}", file, source.begin.line);
}

// A key of a section, and where its value is kept. One that may be left out is 0 or empty then.
enum Need { kMust, kMay };
struct Key {
  Need need;
  std::string name;
  std::variant<bool*, std::int64_t*, double*, std::optional<double>*, std::string*, std::vector<std::string>*,
               Precision*, Origin*>
      at;
  const Quantity* kind = nullptr;  // of a number
};
using Keys = std::vector<Key>;

Keys keys_of(Cluster& of) {
  return {{kMust, "name", &of.name},
          {kMust, "devices", &of.devices, &kDevices},
          {kMust, "per_host", &of.per_host, &kDevices},
          {kMay, "host_memory", &of.host_memory},
          {kMay, "reserve", &of.reserve, &kOfReserve}};
}
Keys keys_of(Device& of) {
  Keys keys = {{kMust, "name", &of.name},
               {kMust, "memory", &of.memory, &kOfBytes},
               {kMust, "memory_bandwidth", &of.memory_bandwidth, &kOfRate}};
  for (std::size_t i = 0; i < kPrecisions; ++i) {
    keys.push_back({kMay, fmt::format("peak_{}", kPrecisionNames[i]), &of.peak[i], &kOfFlops});
    keys.push_back({kMay, fmt::format("best_found_{}", kPrecisionNames[i]), &of.best_found[i], &kOfFlops});
  }
  keys.push_back({kMay, "source", &of.source});
  return keys;
}
Keys keys_of(Link& of) {
  return {{kMay, "name", &of.name},
          {kMay, "ranks", &of.ranks, &kDevices},
          {kMust, "latency", &of.latency, &kOfSeconds},
          {kMust, "bandwidth", &of.bandwidth, &kOfRate},
          {kMay, "origin", &of.origin}};
}
Keys keys_of(ModelShape& of, std::int64_t& dense_layers) {
  return {{kMay, "name", &of.name},
          {kMay, "family", &of.family},
          {kMust, "layers", &of.layers, &kLayers},
          {kMust, "hidden", &of.hidden, &kSize},
          {kMust, "heads", &of.heads, &kSize},
          {kMay, "key_value_heads", &of.key_value_heads, &kSize},
          {kMay, "head_dim", &of.head_dim, &kSize},
          {kMay, "feed_forward", &of.feed_forward, &kSize},
          {kMay, "vocabulary", &of.vocabulary, &kRows},
          {kMay, "gated", &of.gated},
          {kMay, "tied_output", &of.tied_output},
          {kMay, "attention_bias", &of.attention_bias},
          {kMay, "output_bias", &of.output_bias},
          {kMay, "mlp_bias", &of.mlp_bias},
          {kMay, "query_key_norm", &of.query_key_norm},
          {kMay, "experts", &of.experts.count, &kExperts},
          {kMay, "experts_per_token", &of.experts.per_token, &kExperts},
          {kMay, "expert_feed_forward", &of.experts.feed_forward, &kSizeOrNone},
          {kMay, "shared_expert_feed_forward", &of.experts.shared_feed_forward, &kSizeOrNone},
          {kMay, "dense_layers", &dense_layers, &kExperts}};
}
Keys keys_of(Calibration& of, std::int64_t& format) {
  return {{kMust, "format", &format, &kCalibrated},
          {kMust, "machine", &of.machine},
          {kMay, "memory_bandwidth", &of.memory_bandwidth, &kOfRate},
          {kMay, "expert_bandwidth", &of.expert_bandwidth, &kOfRate},
          {kMay, "operator_overhead", &of.operator_overhead, &kOfSeconds},
          {kMay, "optimizer_bandwidth", &of.optimizer_bandwidth, &kOfRate},
          {kMay, "overlap", &of.overlap, &kOfPart},
          {kMay, "not_measured", &of.not_measured}};
}
Keys keys_of(Calibration::Product& of) {
  return {{kMust, "m", &of.m, &kCalibrated},      {kMust, "n", &of.n, &kCalibrated},
          {kMust, "k", &of.k, &kCalibrated},      {kMust, "precision", &of.precision},
          {kMust, "flops", &of.flops, &kOfFlops}, {kMay, "spread", &of.spread, &kOfSpread}};
}
Keys keys_of(Calibration::Attention& of) {
  return {{kMust, "length", &of.length, &kCalibrated},
          {kMust, "head_dim", &of.head_dim, &kCalibrated},
          {kMust, "precision", &of.precision},
          {kMust, "flops", &of.flops, &kOfFlops},
          {kMay, "spread", &of.spread, &kOfSpread}};
}
Keys keys_of(Calibration::Collective& of) {
  return {{kMust, "operation", &of.operation},           {kMust, "backend", &of.backend},
          {kMust, "ranks", &of.ranks, &kDevices},        {kMust, "latency", &of.latency, &kOfSeconds},
          {kMust, "bandwidth", &of.bandwidth, &kOfRate}, {kMay, "spread", &of.spread, &kOfSpread}};
}

template <class T>
void take(const std::string& where, const toml::node& node, T& value, const Quantity* kind) {
  const auto wrong = [&](const std::string& expected) {
    refuse(where, describe(node), expected, "Correct the value");
  };
  if constexpr (std::is_same_v<T, std::optional<double>>) {
    take(where, node, value.emplace(), kind);
  } else if constexpr (std::is_same_v<T, double>) {
    if (!node.is_string() && !node.is_number())
      wrong(fmt::format("a number of {}, or a text with its unit", kind->unit));
    value = node.is_string()    ? quantity_of(node.as_string()->get(), *kind, where)
            : node.is_integer() ? double(node.as_integer()->get())
                                : node.as_floating_point()->get();
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    if (!node.is_array()) wrong("a list of texts");
    for (const toml::node& entry : *node.as_array()) take(where, entry, value.emplace_back(), kind);
  } else if constexpr (std::is_enum_v<T>) {
    std::string text;
    take(where, node, text, kind);
    const auto names = names_of(value);
    const auto found = std::ranges::find(names, text);
    if (found == names.end()) wrong(fmt::format("one of {}", fmt::join(names, ", ")));
    value = static_cast<T>(found - names.begin());
  } else {
    if (!node.is<T>())
      wrong(std::is_same_v<T, bool>          ? "true or false"
            : std::is_same_v<T, std::string> ? "a text"
                                             : "a whole number");
    value = *node.value<T>();
  }
}

// Refuses unknown keys, and then the first one that is missing.
void read(const toml::table& table, const std::string& section, const std::string& file, const Keys& keys) {
  std::vector<std::string> known;
  const Key* missing = nullptr;
  for (const Key& key : keys) {
    known.push_back(key.name);
    const toml::node* node = table.get(key.name);
    if (!node && key.need == kMust && !missing) missing = &key;
    if (!node) continue;
    const std::string where = fmt::format("{}: {}.{}", place(file, node->source()), section, key.name);
    std::visit([&](auto* value) { take(where, *node, *value, key.kind); }, key.at);
  }
  for (const auto& [key, node] : table)
    if (const std::string name(key.str()); std::ranges::find(known, name) == known.end())
      refuse_unknown(place(file, key.source()), "key", name, fmt::format("a key of {}: ", section), known);
  if (missing)
    refuse(place(file, table.source()), fmt::format("{} without {}", section, missing->name),
           fmt::format("the key {}", missing->name), "Add it: docs/planning.md has an example");
}

void check(const Keys& keys, const std::string& prefix) {
  for (const Key& key : keys) {
    if (const auto* whole = std::get_if<std::int64_t*>(&key.at)) check(**whole, *key.kind, prefix + key.name);
    if (const auto* number = std::get_if<double*>(&key.at); number && (key.need == kMust || **number != 0))
      check(**number, *key.kind, prefix + key.name);
    if (const auto* maybe = std::get_if<std::optional<double>*>(&key.at); maybe && **maybe)
      check(***maybe, *key.kind, prefix + key.name);
  }
}

std::string written(const std::string& section, const Keys& keys) {
  std::string text = "\n" + section + "\n";
  for (const Key& key : keys)
    std::visit(
        [&]<class T>(T* value) {
          if (key.need == kMay && *value == T{}) return;
          ConfigValue shown;
          if constexpr (std::is_enum_v<T>)
            shown = std::string(name_of(*value));
          else if constexpr (std::is_same_v<T, std::optional<double>>)
            shown = **value;
          else
            shown = *value;
          text += fmt::format("{} = {}\n", key.name, toml_text(shown));
        },
        key.at);
  return text;
}

// Both take a copy, since keys point into what they are read into.
template <class T, class... More>
void check_section(const std::string& prefix, T of, More... more) {
  check(keys_of(of, more...), prefix);
}
template <class T, class... More>
std::string write_section(const std::string& section, T of, More... more) {
  return written(section, keys_of(of, more...));
}

void read_section(const toml::node& node, const std::string& section, const std::string& file,
                  const Keys& keys) {
  if (!node.is_table())
    refuse(place(file, node.source()), fmt::format("{} for {}", describe(node), section), "a section",
           fmt::format("Write {} on a line of its own, and its keys below", section));
  read(*node.as_table(), section, file, keys);
}

template <class T>
std::vector<T> read_list(const toml::table& root, const char* name, const std::string& file,
                         const T& absent = {}) {
  std::vector<T> all;
  const std::string section = fmt::format("[[{}]]", name);
  const toml::node* node = root.get(name);
  if (node && !node->is_array())
    refuse(place(file, node->source()), fmt::format("{} for {}", describe(*node), section),
           "a list of sections", fmt::format("Write {} before each", section));
  if (node)
    for (const toml::node& entry : *node->as_array())
      read_section(entry, section, file, keys_of(all.emplace_back(absent)));
  return all;
}

// `call`, with `change` made to what it refuses.
template <class Call, class Change>
auto amended(const Call& call, const Change& change) {
  try {
    return call();
  } catch (const ConfigError& error) {
    ErrorText text = error.text();
    change(text);
    throw ConfigError(text);
  }
}
template <class Call>
auto in_file(const std::string& file, const Call& call) {
  return amended(call, [&](ErrorText& text) { text.where = file + ": " + text.where; });
}

void check(const Calibration& calibration, std::int64_t format) {
  if (format != kFormat)
    refuse("calibration.format", std::to_string(format),
           fmt::format("{}: this version of isograd measures otherwise", kFormat),
           "Run isograd calibrate again");
  check_section("calibration.", calibration, format);
  for (const auto& product : calibration.products) check_section("product.", product);
  for (const auto& attention : calibration.attention) check_section("attention.", attention);
  for (const auto& collective : calibration.collectives) check_section("collective.", collective);
}

// The cluster with this number of devices: links beyond the first that joins all are left out.
Cluster with_devices(Cluster cluster, std::int64_t devices) {
  cluster.devices = devices;
  const auto joins = std::ranges::find_if(cluster.links, [&](const Link& l) { return l.ranks >= devices; });
  if (joins != cluster.links.end())
    cluster.links.erase(joins + 1, cluster.links.end());
  else if (cluster.links.empty() || cluster.links.back().ranks <= cluster.per_host)
    return cluster;  // check() says that no link joins the hosts
  cluster.links.back().ranks = devices;
  return cluster;
}

ClusterFile read_cluster_file(const std::string& name) {
  const bool here = name == "here";
  const fs::path file = here ? here_file() : fs::path(name);
  if (here && !fs::exists(file))
    refuse("here", "no " + file.string(), "what isograd calibrate measured on this machine",
           "Run isograd calibrate first, or name a cluster of the table");
  if (!fs::exists(file)) {
    const std::vector<std::string> names = built_in_clusters();
    const auto near = nearest(name, names);
    refuse("the cluster", name, fmt::format("here, a TOML file, or one of {}", fmt::join(names, ", ")),
           near                          ? fmt::format("Did you mean {}?", *near)
           : file.extension() == ".toml" ? missing_path_action(file)
                                         : "Name one of them, or describe the cluster in a TOML file");
  }
  return parse_cluster(read_file(file, kLongestModelFile), file.string());
}

}  // namespace

double parse_tokens(std::string_view text, const std::string& where) {
  const auto split = split_number(without_blanks(text));
  std::size_t power = 0;
  bool known = split.has_value();
  if (known && !split->second.empty()) {
    const std::string& suffix = split->second;
    power = std::string_view("kMGT").find(suffix[0] == 'K' ? 'k' : suffix[0]) + 1;
    known = power != 0 && (suffix.size() == 1 || suffix.substr(1) == "i");
  }
  if (!known)
    refuse(where, text.empty() ? "nothing" : std::string(text), "a number of tokens",
           "Write it as in 4194304, 4M (4 * 1024 * 1024) or 4e6");
  const double tokens = split->first * std::pow(1024, double(power));
  check_positive(tokens, kMostTokens, where, "tokens");
  if (tokens != std::floor(tokens))
    refuse(where, fmt::format("{} tokens", tokens), "a whole number", "Round it");
  return tokens;
}

std::string machine_text() {
  return fmt::format("{}, {} cores, {}", kernels::processor_name(), std::thread::hardware_concurrency(),
                     find_gpus().text());
}

fs::path here_file() { return fs::path(RunConfig{}.data.cache) / "here.toml"; }

Cluster on_devices(Cluster cluster, std::int64_t devices) {
  std::vector<Link>& links = cluster.links;
  const Cluster* known = built_in(cluster.name);
  const auto is_same = [](const Link& one, const Link& other) { return one.name == other.name; };
  if (known && known->per_host == cluster.per_host && links.size() <= known->links.size() &&
      std::equal(links.begin(), links.end(), known->links.begin(), is_same)) {
    // As the table has them, before read_cluster() left out what fewer devices do not need.
    const auto more = known->links.begin() + std::ssize(links);
    if (!links.empty()) links.back().ranks = std::prev(more)->ranks;
    links.insert(links.end(), more, known->links.end());
  }
  return with_devices(std::move(cluster), devices);
}

void check(const Cluster& cluster) {
  const Device& device = cluster.device;
  check_section("cluster.", cluster), check_section("device.", device);
  if (const std::int64_t rest = cluster.devices % cluster.per_host;
      cluster.devices > cluster.per_host && rest != 0)
    refuse("cluster.devices", fmt::format("{} devices in hosts of {}", cluster.devices, cluster.per_host),
           "a multiple: all hosts have as many devices",
           fmt::format("Take {} or {} devices, or correct per_host", cluster.devices - rest,
                       cluster.devices - rest + cluster.per_host));
  if (cluster.reserve >= device.memory)
    refuse("cluster.reserve", fmt::format("{} bytes", cluster.reserve),
           fmt::format("0 or more, below the device's {}", device.memory), "Correct the number");

  std::vector<Link> links = cluster.links;
  std::ranges::stable_sort(links, {}, &Link::ranks);
  for (std::size_t i = 0; i < links.size(); ++i) {
    const Link& link = links[i];
    const std::string where = fmt::format("link {}: ", link.name.empty() ? std::to_string(i + 1) : link.name);
    check_section(where, link);
    const bool network = i > 0 && i + 1 == links.size();
    if (const double fastest = network ? kFastestNetwork : kFastestLink; link.bandwidth > fastest)
      refuse(where + "bandwidth", fmt::format("{:g} GB/s, is that Gb/s?", link.bandwidth / 1e9),
             fmt::format("at most {:g} GB/s: of one device, each way", fastest / 1e9),
             fmt::format("Write \"{:g} GB/s\" if it is", link.bandwidth / 8e9));
    // The last may end within a group of the one before: 512 devices in racks of 72.
    const std::int64_t inside = i > 0 ? links[i - 1].ranks : 0;
    if (i > 0 && (link.ranks == inside || (!network && link.ranks % inside != 0)))
      refuse(where + "ranks", fmt::format("{} over a link of {}", link.ranks, inside),
             "a multiple of what the link inside of it joins", "Correct ranks of one of them");
  }
  if (cluster.devices > 1 && (links.empty() || links.back().ranks < cluster.devices))
    refuse("[[link]]",
           links.empty() ? "none" : fmt::format("at most {} devices that a link joins", links.back().ranks),
           fmt::format("a link that joins all {}", cluster.devices),
           "Add a [[link]] without ranks: it joins all");
}

void check(const ModelShape& model) {
  const ModelShape::Experts& experts = model.experts;
  check_section("", model, std::int64_t{0});
  if (model.heads % model.key_value_heads != 0)
    refuse("key_value_heads", std::to_string(model.key_value_heads),
           fmt::format("a divisor of heads, {}", model.heads), "Correct one of them");
  if (experts.count != 0) {
    check(experts.per_token, {1, double(experts.count)}, "experts_per_token");
    check(experts.feed_forward, kSize, "expert_feed_forward");
    for (std::size_t i = 0; i < experts.dense_layers.size(); ++i)
      if (const std::int64_t layer = experts.dense_layers[i];
          layer < 0 || layer >= model.layers || (i > 0 && layer <= experts.dense_layers[i - 1]))
        refuse("dense_layers", std::to_string(layer), fmt::format("0 to {}, ascending", model.layers - 1),
               "Correct the list");
  }
  check_positive(model.parameters(), kMostParameters, "the model", "parameters");
}

void check(const Work& work) {
  check(work.sequence, kRows, "sequence");
  check_positive(work.tokens, kMostTokens, "tokens", "tokens of a batch");
  const auto sequence = double(work.sequence);
  if (work.tokens < sequence)
    refuse("tokens", fmt::format("{:.0f} tokens of a batch", work.tokens),
           fmt::format("at least the {} of a sequence", work.sequence),
           "Make the batch larger, or sequences shorter");
  if (const double below = std::floor(work.tokens / sequence) * sequence; work.tokens != below)
    refuse("tokens", fmt::format("{:.17g} tokens in sequences of {}", work.tokens, work.sequence),
           "a multiple: a batch has whole sequences",
           fmt::format("Take {:.0f} or {:.0f}", below, below + sequence));
  if (work.states < 0 || work.states > 16)
    refuse("states", std::to_string(work.states), "0 to 16 numbers of the optimizer for each parameter",
           "AdamW has 2");
  for (const std::int64_t document : work.documents) check(document, {1, kMostTokens}, "documents");
}

void check_peak(const Device& device, const Calibration& calibration, Precision precision) {
  const auto index = std::size_t(precision);
  std::vector<std::string> known;
  for (std::size_t i = 0; i < kPrecisions; ++i)
    if (device.peak[i] > 0) known.emplace_back(kPrecisionNames[i]);
  if (device.peak[index] > 0 ||
      std::ranges::find(calibration.products, precision, &Calibration::Product::precision) !=
          calibration.products.end())
    return;
  refuse("train.dtype", fmt::format("{}, of which {} has no peak", kPrecisionNames[index], device.name),
         known.empty() ? "a device with a peak" : fmt::format("one of {}", fmt::join(known, ", ")),
         fmt::format("Choose that, or give peak_{} in [device]", kPrecisionNames[index]));
}

ClusterFile parse_cluster(std::string_view text, const std::string& file) {
  const toml::table root = parse_toml(text, file);
  static const std::vector<std::string> kSections = {"cluster", "device",    "link",      "calibration",
                                                     "product", "attention", "collective"};
  for (const auto& [key, node] : root)
    if (const std::string name(key.str()); std::ranges::find(kSections, name) == kSections.end())
      refuse_unknown(place(file, key.source()), "section", name, "one of ", kSections);
  for (const char* section : {"cluster", "device"})
    if (!root.contains(section))
      refuse(file, fmt::format("no [{}]", section), "a cluster as docs/planning.md describes it",
             fmt::format("Add [{}]", section));

  ClusterFile found;
  Cluster& cluster = found.cluster;
  read_section(*root.get("cluster"), "[cluster]", file, keys_of(cluster));
  // A device of the table needs no more than its name.
  const toml::table* device = root["device"].as_table();
  if (const auto name =
          device && device->size() == 1 ? (*device)["name"].value<std::string>() : std::nullopt) {
    const Cluster* known = built_in(*name);
    const auto near = nearest(*name, built_in_clusters());
    if (!known)
      refuse(fmt::format("{}:{}: [device].name", file, device->source().begin.line), *name,
             fmt::format("a device of the table ({}), or memory, memory_bandwidth and a peak of it",
                         fmt::join(built_in_clusters(), ", ")),
             near ? fmt::format("Did you mean {}?", *near) : "Give its numbers");
    cluster.device = known->device;
  } else {
    read_section(*root.get("device"), "[device]", file, keys_of(cluster.device));
  }
  cluster.links = read_list(root, "link", file, Link{.ranks = 0});
  for (Link& link : cluster.links)
    if (link.ranks == 0) link.ranks = cluster.devices;
  std::ranges::stable_sort(cluster.links, {}, &Link::ranks);
  found.calibration.products = read_list<Calibration::Product>(root, "product", file);
  found.calibration.attention = read_list<Calibration::Attention>(root, "attention", file);
  found.calibration.collectives = read_list<Calibration::Collective>(root, "collective", file);
  std::int64_t format = 0;
  if (const toml::node* node = root.get("calibration"))
    read_section(*node, "[calibration]", file, keys_of(found.calibration, format));
  else if (!found.calibration.empty())
    refuse(file, "measurements, and no [calibration]", "the machine that they are of",
           "Run isograd calibrate again");
  in_file(file, [&] {
    planner::check(cluster);
    if (root.contains("calibration")) check(found.calibration, format);
  });
  return found;
}

std::string to_toml(const ClusterFile& file) {
  std::string text =
      write_section("[cluster]", file.cluster) + write_section("[device]", file.cluster.device);
  for (const Link& link : file.cluster.links) text += write_section("[[link]]", link);
  if (!file.calibration.machine.empty()) text += write_section("[calibration]", file.calibration, kFormat);
  for (const auto& product : file.calibration.products) text += write_section("[[product]]", product);
  for (const auto& attention : file.calibration.attention) text += write_section("[[attention]]", attention);
  for (const auto& collective : file.calibration.collectives)
    text += write_section("[[collective]]", collective);
  return text.substr(1);
}

Cluster read_cluster(const std::string& name_or_file, std::optional<std::int64_t> devices) {
  const Cluster* known = built_in(name_or_file);
  const Cluster cluster = known ? *known : read_cluster_file(name_or_file).cluster;
  if (name_or_file == "here" && devices.value_or(0) > cluster.devices)
    refuse("here", fmt::format("{} ranks, of which {} were measured at once", *devices, cluster.devices),
           "as many at most", fmt::format("Run isograd calibrate --ranks {}", *devices));
  Cluster changed = with_devices(cluster, devices.value_or(cluster.devices));
  check(changed);
  return changed;
}

Calibration read_calibration(const std::string& name_or_file) {
  if (built_in(name_or_file)) return {};
  Calibration calibration = read_cluster_file(name_or_file).calibration;
  if (const std::string machine = machine_text(); !calibration.empty() && calibration.machine != machine)
    refuse(name_or_file + ": calibration.machine", calibration.machine, machine + ", this machine",
           "Run isograd calibrate here, or leave out [calibration], [[product]] and [[collective]] to plan "
           "from the data sheet");
  return calibration;
}

ModelShape parse_model(std::string_view numbers, const std::string& where) {
  toml::table table;
  for (std::size_t begin = 0; begin <= numbers.size();) {
    const std::size_t end = std::min(numbers.find(',', begin), numbers.size());
    const std::string part = without_blanks(numbers.substr(begin, end - begin));
    begin = end + 1;
    const std::size_t equals = part.find('=');
    if (equals == std::string::npos)
      refuse(where, part.empty() ? "nothing" : part, "key=number",
             "Write it as in layers=32,hidden=4096,heads=32");
    std::string key = part.substr(0, equals);
    const std::string value = part.substr(equals + 1);
    if (key == "key_heads") key = "key_value_heads";  // its name until 0.1.0
    if (table.contains(key)) refuse(where + ": " + key, "the key twice", "each once", "Leave one out");
    if (const auto whole = number_in<std::int64_t>(value))
      table.insert(key, *whole);
    else if (value == "true" || value == "false")
      table.insert(key, value == "true");
    else
      table.insert(key, value);
  }
  ModelShape model;
  ModelShape::Experts& experts = model.experts;
  std::int64_t dense_layers = 0;
  read(table, "model", where, keys_of(model, dense_layers));

  if (model.key_value_heads == 0) model.key_value_heads = model.heads;
  if (model.head_dim == 0 && model.heads > 0) {
    if (model.hidden % model.heads != 0)
      refuse(where + ": hidden", fmt::format("{} for {} heads", model.hidden, model.heads),
             "a multiple of heads, or head_dim", "Correct one of them, or add head_dim=...");
    model.head_dim = model.hidden / model.heads;
  }
  // Llama's: two thirds of four times the width, a multiple of 256; and its vocabulary.
  if (model.feed_forward == 0 && model.hidden > 0 && model.hidden <= std::int64_t{1} << 32)
    model.feed_forward = (model.hidden * 8 / 3 + 255) / 256 * 256;
  if (model.vocabulary == 0) model.vocabulary = 32000;
  if (experts.count > 0 && experts.feed_forward == 0) experts.feed_forward = model.feed_forward;
  for (std::int64_t layer = 0; layer < std::min(dense_layers, std::int64_t(kLayers.most)); ++layer)
    experts.dense_layers.push_back(layer);
  in_file(where, [&] { check(model); });
  return model;
}

ModelShape read_model(const fs::path& file) {
  const bool folder = fs::is_directory(file), json = folder || file.extension() == ".json";
  if (!fs::exists(file) && !json && file.extension() != ".toml")
    require_model_folder(file.string(), "the model");
  ModelShape model;
  if (json) {
    const fs::path path = folder ? file / "config.json" : file;
    const fs::path named = fs::absolute(path).parent_path().filename();
    model = amended(
        [&] { return shape_of(parse_hf_config(read_file(path, kLongestModelFile), path), named.string()); },
        [](ErrorText& text) {
          text.action += ", or give the planner its sizes alone: layers=32,hidden=4096,...";
        });
  } else {
    const RunConfig config = load_config(file);
    if (config.model.kind != "decoder")
      refuse(file.string() + ": model.kind", config.model.kind, "decoder: the planner plans language models",
             "Name the configuration of one");
    model = shape_of(configured_shape(config), file.stem().string());
  }
  model.file = file;
  in_file(file.string(), [&] { check(model); });
  return model;
}

std::vector<std::int64_t> documents_of(const fs::path& configuration, std::size_t most) {
  const RunConfig config = load_config(configuration);
  const std::shared_ptr<TokenStore> store = config.model.kind == "decoder" ? packed_corpus(config) : nullptr;
  std::vector<std::int64_t> lengths;
  if (!store || most == 0) return lengths;
  const auto documents =
      split_documents(*store, config.data.validation_fraction, static_cast<std::uint64_t>(config.run.seed))
          .train;
  const std::size_t taken = std::min(most, documents.size());
  for (std::size_t i = 0; i < taken; ++i)
    lengths.push_back(store->document_length(documents[i * documents.size() / taken]));
  return lengths;
}

}  // namespace isograd::planner
