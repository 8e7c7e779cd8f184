// Models, clusters and calibrations from outside: TOML, config.json and numbers, all checked.
#include "plan/inputs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>
#include <thread>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "kernels/versions.hpp"
#include "model/hf.hpp"
#include "plan/problem.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/toml_file.hpp"

namespace isograd::planner {
namespace {

namespace fs = std::filesystem;

// ---- numbers ----

// A kind of number: the range of plain ones, and what a text's unit ends in.
struct Quantity {
  const char *unit, *suffix, *example;
  double least, most;
};
// Least: a device of a megabyte, a link of a megabyte a second. A smaller number is of another unit.
constexpr Quantity kOfBytes{"bytes", "B", "80e9 or \"80 GiB\"", 1e6, 1e15},
    kOfRate{"bytes/s", "B/s", "450e9 or \"450 GB/s\"", 1e6, 1e15},
    kOfFlops{"FLOP/s", "FLOP/s", "989e12 or \"989 TFLOP/s\"", 1e6, 1e19},
    kOfSeconds{"seconds", "s", "14e-6 or \"14 us\"", 0, 1}, kOfPart{"", "", "0.05", 0, 1e6};
// Faster than any link that is sold: NVLink 6 has 1.8e12 bytes/s each way, a network 1.6 Tb/s a device.
constexpr double kFastestLink = 2e12, kFastestNetwork = 2.5e11;
constexpr double kMostTokens = 1e15, kMostParameters = 1e16;
constexpr std::int64_t kMostLayers = 100'000, kMostExperts = 1'000'000;
constexpr std::uint64_t kLongestModelFile = 16 << 20;  // a config.json has kilobytes
constexpr std::int64_t kFormat = 1;                    // of a calibration; another one was measured otherwise

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

void check_quantity(double value, const Quantity& kind, const std::string& where) {
  positive(value, kind.most, where, kind.unit);
  if (value < kind.least)
    refuse(where, fmt::format("{} {}", value, kind.unit),
           fmt::format("at least {:g} {}", kind.least, kind.unit),
           fmt::format("A number without a unit is of {}: write {}", kind.unit, kind.example));
}

void check_whole(std::int64_t value, std::int64_t most, const std::string& where) {
  if (value < 1 || value > most)
    refuse(where, std::to_string(value), fmt::format("1 to {}", most), "Correct the number");
}

// 0 is allowed: not known, or none.
void check_or_zero(double value, const Quantity& kind, const std::string& where) {
  if (value != 0) check_quantity(value, kind, where);
}

// ---- TOML: one list of keys for reading and writing ----

class KeyReader {
 public:
  KeyReader(const toml::table& table, std::string section, std::string file)
      : table_(table), section_(std::move(section)), file_(std::move(file)) {}

  template <class T, class... Kind>
  void operator()(const char* key, T& value, const Kind&... kind) {
    if (!maybe(key, value, kind...) && missing_.empty()) missing_ = key;
  }
  template <class T, class... Kind>
  bool maybe(const char* key, T& value, const Kind&... kind) {
    known_.emplace_back(key);
    const toml::node* node = table_.get(key);
    if (node) take(fmt::format("{}: {}.{}", place(*node), section_, key), *node, value, kind...);
    return node != nullptr;
  }
  // Refuses unknown keys, and then the first one that is missing.
  void finish() const {
    for (const auto& [key, node] : table_) {
      const std::string name(key.str());
      if (std::ranges::find(known_, name) != known_.end()) continue;
      const auto near = nearest(name, known_);
      refuse(place(key.source()), fmt::format("an unknown key \"{}\"", name),
             fmt::format("a key of {}: {}", section_, fmt::join(known_, ", ")),
             near ? fmt::format("Did you mean \"{}\"?", *near) : "Leave it out");
    }
    if (!missing_.empty())
      refuse(place(table_), fmt::format("{} without {}", section_, missing_),
             fmt::format("the key {}", missing_), "Add it: docs/planning.md has an example");
  }

 private:
  std::string place(const toml::node& node) const { return place(node.source()); }
  std::string place(const toml::source_region& source) const {  // line 0: not from a file
    return source.begin.line == 0 ? file_ : fmt::format("{}:{}", file_, source.begin.line);
  }
  [[noreturn]] static void wrong(const std::string& where, const toml::node& node,
                                 const std::string& expected) {
    refuse(where, describe(node), expected, "Correct the value");
  }
  template <class T>
  static void take(const std::string& where, const toml::node& node, T& value) {
    const auto* found = node.as<T>();
    if (!found)
      wrong(where, node,
            std::is_same_v<T, bool>          ? "true or false"
            : std::is_same_v<T, std::string> ? "a text"
                                             : "a whole number");
    value = found->get();
  }
  static void take(const std::string& where, const toml::node& node, double& value, const Quantity& kind) {
    if (const auto* text = node.as_string())
      value = quantity_of(text->get(), kind, where);
    else if (!node.is_number())
      wrong(where, node, fmt::format("a number of {}, or a text with its unit", kind.unit));
    else
      value = *node.value<double>();
  }
  static void take(const std::string& where, const toml::node& node, std::optional<double>& value,
                   const Quantity& kind) {
    take(where, node, value.emplace(), kind);
  }
  static void take(const std::string& where, const toml::node& node, std::vector<std::string>& value) {
    if (!node.is_array()) wrong(where, node, "a list of texts");
    for (const toml::node& entry : *node.as_array()) take(where, entry, value.emplace_back());
  }
  template <class Enum, std::size_t kCount>
  static void take(const std::string& where, const toml::node& node, Enum& value,
                   const char* const (&names)[kCount]) {
    std::string text;
    take(where, node, text);
    const auto found = std::ranges::find(names, text);
    if (found == std::end(names)) wrong(where, node, fmt::format("one of {}", fmt::join(names, ", ")));
    value = static_cast<Enum>(found - std::begin(names));
  }

  const toml::table& table_;
  std::string section_, file_, missing_;
  std::vector<std::string> known_;
};

class KeyWriter {
 public:
  explicit KeyWriter(const std::string& header) : text_("\n" + header + "\n") {}
  template <class T>
  void operator()(const char* key, const T& value) {
    text_ += fmt::format("{} = {}\n", key, toml_text(value));
  }
  void operator()(const char* key, double value, const Quantity&) { (*this)(key, value); }
  template <class Enum, std::size_t kCount>
  void operator()(const char* key, Enum value, const char* const (&names)[kCount]) {
    (*this)(key, std::string(names[std::size_t(value)]));
  }
  void maybe(const char* key, const std::optional<double>& value, const Quantity&) {
    if (value) (*this)(key, *value);
  }
  template <class T, class... Kind>
  void maybe(const char* key, const T& value, const Kind&... kind) {
    if (value != T{}) (*this)(key, value, kind...);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

template <class Keys>
void list_keys(Keys& keys, Cluster& cluster) {
  keys("name", cluster.name);
  keys("devices", cluster.devices);
  keys("per_host", cluster.per_host);
  keys.maybe("host_memory", cluster.host_memory);
  keys.maybe("reserve", cluster.reserve, kOfBytes);
}
template <class Keys>
void list_keys(Keys& keys, Device& device) {
  keys("name", device.name);
  keys("memory", device.memory, kOfBytes);
  keys("memory_bandwidth", device.memory_bandwidth, kOfRate);
  for (std::size_t i = 0; i < kPrecisions; ++i) {
    keys.maybe(fmt::format("peak_{}", kPrecisionNames[i]).c_str(), device.peak[i], kOfFlops);
    keys.maybe(fmt::format("best_found_{}", kPrecisionNames[i]).c_str(), device.best_found[i], kOfFlops);
  }
  keys.maybe("source", device.source);
}
template <class Keys>
void list_keys(Keys& keys, Link& link) {
  keys.maybe("name", link.name);
  keys.maybe("ranks", link.ranks);
  keys("latency", link.latency, kOfSeconds);
  keys("bandwidth", link.bandwidth, kOfRate);
  keys.maybe("origin", link.origin, kOriginNames);
}
template <class Keys>
void list_keys(Keys& keys, ModelShape& model, std::int64_t& dense_layers) {
  keys.maybe("name", model.name), keys.maybe("family", model.family);
  keys("layers", model.layers), keys("hidden", model.hidden), keys("heads", model.heads);
  keys.maybe("key_heads", model.key_heads), keys.maybe("head_dim", model.head_dim);
  keys.maybe("feed_forward", model.feed_forward), keys.maybe("vocabulary", model.vocabulary);
  keys.maybe("gated", model.gated), keys.maybe("tied_output", model.tied_output);
  keys.maybe("attention_bias", model.attention_bias), keys.maybe("output_bias", model.output_bias);
  keys.maybe("mlp_bias", model.mlp_bias), keys.maybe("query_key_norm", model.query_key_norm);
  keys.maybe("experts", model.experts.count), keys.maybe("experts_per_token", model.experts.per_token);
  keys.maybe("expert_feed_forward", model.experts.feed_forward);
  keys.maybe("shared_expert_feed_forward", model.experts.shared_feed_forward);
  keys.maybe("dense_layers", dense_layers);
}
template <class Keys>
void list_keys(Keys& keys, Calibration& calibration, std::int64_t& format) {
  keys("format", format);
  keys("machine", calibration.machine);
  keys.maybe("memory_bandwidth", calibration.memory_bandwidth, kOfRate);
  keys.maybe("operator_overhead", calibration.operator_overhead, kOfSeconds);
  keys.maybe("optimizer_bandwidth", calibration.optimizer_bandwidth, kOfRate);
  keys.maybe("overlap", calibration.overlap, kOfPart);
  keys.maybe("not_measured", calibration.not_measured);
}
template <class Keys>
void list_keys(Keys& keys, Calibration::Product& product) {
  keys("m", product.m), keys("n", product.n), keys("k", product.k);
  keys("precision", product.precision, kPrecisionNames);
  keys("flops", product.flops, kOfFlops);
  keys.maybe("spread", product.spread, kOfPart);
}
template <class Keys>
void list_keys(Keys& keys, Calibration::Attention& attention) {
  keys("length", attention.length), keys("head_dim", attention.head_dim);
  keys("precision", attention.precision, kPrecisionNames);
  keys("flops", attention.flops, kOfFlops);
  keys.maybe("spread", attention.spread, kOfPart);
}
template <class Keys>
void list_keys(Keys& keys, Calibration::Collective& collective) {
  keys("operation", collective.operation);
  keys("backend", collective.backend);
  keys("ranks", collective.ranks);
  keys("latency", collective.latency, kOfSeconds);
  keys("bandwidth", collective.bandwidth, kOfRate);
  keys.maybe("spread", collective.spread, kOfPart);
}

template <class T, class... More>
void read_section(const toml::node& node, const std::string& section, const std::string& file, T& value,
                  More&... more) {
  if (!node.is_table())
    refuse(fmt::format("{}:{}", file, node.source().begin.line),
           fmt::format("{} for {}", describe(node), section), "a section",
           fmt::format("Write {} on a line of its own, and its keys below", section));
  KeyReader keys(*node.as_table(), section, file);
  list_keys(keys, value, more...);
  keys.finish();
}

template <class T>
std::vector<T> read_list(const toml::table& root, const char* name, const std::string& file,
                         const T& absent) {
  std::vector<T> all;
  const std::string section = fmt::format("[[{}]]", name);
  if (const toml::node* node = root.get(name)) {
    const toml::array* list = node->as_array();
    if (!list)
      refuse(fmt::format("{}:{}", file, node->source().begin.line),
             fmt::format("{} for {}", describe(*node), section), "a list of sections",
             fmt::format("Write {} before each", section));
    for (const toml::node& entry : *list) read_section(entry, section, file, all.emplace_back(absent));
  }
  return all;
}

template <class T, class... More>
std::string write_section(const std::string& section, T value, More... more) {
  KeyWriter keys(section);
  list_keys(keys, value, more...);
  return keys.text();
}

// `call`, with `file` in front of what it refuses.
template <class Call>
auto in_file(const std::string& file, const Call& call) {
  try {
    return call();
  } catch (const ConfigError& error) {
    ErrorText text = error.text();
    text.where = file + ": " + text.where;
    throw ConfigError(text);
  }
}

void check(const Calibration& calibration, std::int64_t format) {
  if (format != kFormat)
    refuse("calibration.format", std::to_string(format),
           fmt::format("{}: this version of isograd measures otherwise", kFormat),
           "Run isograd calibrate again");
  check_or_zero(calibration.memory_bandwidth, kOfRate, "calibration.memory_bandwidth");
  check_or_zero(calibration.optimizer_bandwidth, kOfRate, "calibration.optimizer_bandwidth");
  check_or_zero(calibration.operator_overhead, kOfSeconds, "calibration.operator_overhead");
  if (const double overlap = calibration.overlap.value_or(0); !(overlap >= 0 && overlap <= 1))
    refuse("calibration.overlap", fmt::format("{}", overlap), "0 to 1: a part", "Correct the number");
  for (const auto& product : calibration.products) {
    for (const std::int64_t size : {product.m, product.n, product.k})
      check_whole(size, std::int64_t{1} << 40, "a size of a [[product]]");
    check_quantity(product.flops, kOfFlops, "product.flops");
    check_or_zero(product.spread, kOfPart, "product.spread");
  }
  for (const auto& attention : calibration.attention) {
    for (const std::int64_t size : {attention.length, attention.head_dim})
      check_whole(size, std::int64_t{1} << 40, "a size of an [[attention]]");
    check_quantity(attention.flops, kOfFlops, "attention.flops");
    check_or_zero(attention.spread, kOfPart, "attention.spread");
  }
  for (const auto& collective : calibration.collectives) {
    check_whole(collective.ranks, kMostDevices, "collective.ranks");
    check_or_zero(collective.latency, kOfSeconds, "collective.latency");
    check_quantity(collective.bandwidth, kOfRate, "collective.bandwidth");
    check_or_zero(collective.spread, kOfPart, "collective.spread");
  }
}

// The cluster with this number of devices: links beyond the first that joins all are left out.
Cluster with_devices(Cluster cluster, std::int64_t devices) {
  cluster.devices = devices;
  const auto joins = std::ranges::find_if(cluster.links, [&](const Link& l) { return l.ranks >= devices; });
  if (joins != cluster.links.end()) {
    cluster.links.erase(joins + 1, cluster.links.end());
  } else if (cluster.links.empty() || cluster.links.back().ranks <= cluster.per_host) {
    return cluster;  // check() says that no link joins the hosts
  }
  cluster.links.back().ranks = devices;
  return cluster;
}

ClusterFile read_cluster_file(const std::string& name) {
  const bool here = name == "here";
  const fs::path file = here ? here_file() : fs::path(name);
  if (!fs::exists(file)) {
    if (here)
      refuse("here", "no " + file.string(), "what isograd calibrate measured on this machine",
             "Run isograd calibrate first, or name a cluster of the table");
    const std::vector<std::string> names = built_in_clusters();
    const auto near = nearest(name, names);
    refuse("the cluster", name, fmt::format("here, a TOML file, or one of {}", fmt::join(names, ", ")),
           near                          ? fmt::format("Did you mean {}?", *near)
           : file.extension() == ".toml" ? missing_path_action(file)
                                         : "Name one of them, or describe the cluster in a TOML file");
  }
  return parse_cluster(read_file(file, kLongestModelFile), file.string());
}

// ---- models ----

const char* const kSizesAlone = "or give the planner its sizes alone: layers=32,hidden=4096,...";

}  // namespace

double positive(double value, double most, const std::string& where, const std::string& unit) {
  if (!(value > 0) || value > most)
    refuse(where, fmt::format("{} {}", value, unit), fmt::format("above 0, at most {:g} {}", most, unit),
           "Correct the number");
  return value;
}

double parse_tokens(std::string_view text, const std::string& where) {
  const auto split = split_number(without_blanks(text));
  constexpr std::string_view kSuffixes = "kMGT";
  std::size_t power = 0;
  bool known = split.has_value();
  if (known && !split->second.empty()) {
    std::string suffix = split->second;
    if (suffix[0] == 'K') suffix[0] = 'k';
    power = kSuffixes.find(suffix[0]) + 1;
    known = power != 0 && (suffix.size() == 1 || suffix.substr(1) == "i");
  }
  if (!known)
    refuse(where, text.empty() ? "nothing" : std::string(text), "a number of tokens",
           "Write it as in 4194304, 4M (4 * 1024 * 1024) or 4e6");
  const double tokens = split->first * std::pow(1024, double(power));
  positive(tokens, kMostTokens, where, "tokens");
  if (tokens != std::floor(tokens))
    refuse(where, fmt::format("{} tokens", tokens), "a whole number", "Round it");
  return tokens;
}

std::string machine_text() {
  return fmt::format("{}, {} cores, {}", kernels::processor_name(), std::thread::hardware_concurrency(),
                     find_gpus().text());
}

fs::path here_file() { return fs::path(RunConfig{}.data.cache) / "here.toml"; }

void check(const Cluster& cluster) {
  const Device& device = cluster.device;
  check_whole(cluster.devices, kMostDevices, "cluster.devices");
  check_whole(cluster.per_host, kMostDevices, "cluster.per_host");
  if (const std::int64_t rest = cluster.devices % cluster.per_host;
      cluster.devices > cluster.per_host && rest != 0)
    refuse("cluster.devices", fmt::format("{} devices in hosts of {}", cluster.devices, cluster.per_host),
           "a multiple: all hosts have as many devices",
           fmt::format("Take {} or {} devices, or correct per_host", cluster.devices - rest,
                       cluster.devices - rest + cluster.per_host));
  check_quantity(device.memory, kOfBytes, "device.memory");
  check_quantity(device.memory_bandwidth, kOfRate, "device.memory_bandwidth");
  for (std::size_t i = 0; i < kPrecisions; ++i) {
    check_or_zero(device.peak[i], kOfFlops, fmt::format("device.peak_{}", kPrecisionNames[i]));
    check_or_zero(device.best_found[i], kOfFlops, fmt::format("device.best_found_{}", kPrecisionNames[i]));
  }
  if (!(cluster.reserve >= 0 && cluster.reserve < device.memory))
    refuse("cluster.reserve", fmt::format("{} bytes", cluster.reserve),
           fmt::format("0 or more, below the device's {}", device.memory), "Correct the number");

  std::vector<Link> links = cluster.links;
  std::ranges::stable_sort(links, {}, &Link::ranks);
  for (std::size_t i = 0; i < links.size(); ++i) {
    const Link& link = links[i];
    const std::string where = "link " + (link.name.empty() ? std::to_string(i + 1) : link.name);
    check_whole(link.ranks, kMostDevices, where + ": ranks");
    if (!(link.latency >= 0 && link.latency <= kOfSeconds.most))
      refuse(where + ": latency", fmt::format("{} seconds", link.latency),
             "0 to 1 second: of a step of a ring",
             fmt::format("A number without a unit is of seconds: write {}", kOfSeconds.example));
    check_quantity(link.bandwidth, kOfRate, where + ": bandwidth");
    const bool network = i > 0 && i + 1 == links.size();
    if (const double fastest = network ? kFastestNetwork : kFastestLink; link.bandwidth > fastest)
      refuse(where + ": bandwidth", fmt::format("{:g} GB/s, is that Gb/s?", link.bandwidth / 1e9),
             fmt::format("at most {:g} GB/s: of one device, each way", fastest / 1e9),
             fmt::format("Write \"{:g} GB/s\" if it is", link.bandwidth / 8e9));
    // The last may end within a group of the one before: 512 devices in racks of 72.
    const std::int64_t inside = i > 0 ? links[i - 1].ranks : 0;
    if (i > 0 && (link.ranks == inside || (!network && link.ranks % inside != 0)))
      refuse(where + ": ranks", fmt::format("{} over a link of {}", link.ranks, inside),
             "a multiple of what the link inside of it joins", "Correct ranks of one of them");
  }
  if (cluster.devices > 1 && (links.empty() || links.back().ranks < cluster.devices))
    refuse("[[link]]",
           links.empty() ? "none" : fmt::format("at most {} devices that a link joins", links.back().ranks),
           fmt::format("a link that joins all {}", cluster.devices),
           "Add a [[link]] without ranks: it joins all");
}

void check(const ModelShape& model) {
  constexpr auto kWide = std::int64_t(key_table::kWide);
  constexpr auto kManyRows = std::int64_t(key_table::kManyRows);
  const ModelShape::Experts& experts = model.experts;
  check_whole(model.layers, kMostLayers, "layers");
  check_whole(model.hidden, kWide, "hidden");
  check_whole(model.heads, kWide, "heads");
  check_whole(model.key_heads, kWide, "key_heads");
  check_whole(model.head_dim, kWide, "head_dim");
  check_whole(model.feed_forward, kWide, "feed_forward");
  check_whole(model.vocabulary, kManyRows, "vocabulary");
  if (model.heads % model.key_heads != 0)
    refuse("key_heads", std::to_string(model.key_heads), fmt::format("a divisor of heads, {}", model.heads),
           "Correct one of them");
  if (experts.count != 0) {
    check_whole(experts.count, kMostExperts, "experts");
    check_whole(experts.per_token, experts.count, "experts_per_token");
    check_whole(experts.feed_forward, kWide, "expert_feed_forward");
    if (experts.shared_feed_forward != 0)
      check_whole(experts.shared_feed_forward, kWide, "shared_expert_feed_forward");
    for (std::size_t i = 0; i < experts.dense_layers.size(); ++i)
      if (const std::int64_t layer = experts.dense_layers[i];
          layer < 0 || layer >= model.layers || (i > 0 && layer <= experts.dense_layers[i - 1]))
        refuse("dense_layers", std::to_string(layer), fmt::format("0 to {}, ascending", model.layers - 1),
               "Correct the list");
  }
  positive(model.parameters(), kMostParameters, "the model", "parameters");
}

void check(const Work& work) {
  check_whole(work.sequence, std::int64_t(key_table::kManyRows), "sequence");
  positive(work.tokens, kMostTokens, "tokens", "tokens of a batch");
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
  for (const std::int64_t document : work.documents)
    check_whole(document, std::int64_t(kMostTokens), "documents");
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
    if (const std::string name(key.str()); std::ranges::find(kSections, name) == kSections.end()) {
      const auto near = nearest(name, kSections);
      refuse(fmt::format("{}:{}", file, key.source().begin.line),
             fmt::format("an unknown section \"{}\"", name),
             fmt::format("one of {}", fmt::join(kSections, ", ")),
             near ? fmt::format("Did you mean \"{}\"?", *near) : "Leave it out");
    }
  for (const char* section : {"cluster", "device"})
    if (!root.contains(section))
      refuse(file, fmt::format("no [{}]", section), "a cluster as docs/planning.md describes it",
             fmt::format("Add [{}]", section));

  ClusterFile found;
  Cluster& cluster = found.cluster;
  read_section(*root.get("cluster"), "[cluster]", file, cluster);
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
    read_section(*root.get("device"), "[device]", file, cluster.device);
  }
  cluster.links = read_list(root, "link", file, Link{.ranks = 0});
  for (Link& link : cluster.links)
    if (link.ranks == 0) link.ranks = cluster.devices;
  std::ranges::stable_sort(cluster.links, {}, &Link::ranks);
  found.calibration.products = read_list(root, "product", file, Calibration::Product{});
  found.calibration.attention = read_list(root, "attention", file, Calibration::Attention{});
  found.calibration.collectives = read_list(root, "collective", file, Calibration::Collective{});
  std::int64_t format = 0;
  if (const toml::node* node = root.get("calibration"))
    read_section(*node, "[calibration]", file, found.calibration, format);
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
    const std::string key = part.substr(0, equals), value = part.substr(equals + 1);
    if (table.contains(key)) refuse(where + ": " + key, "the key twice", "each once", "Leave one out");
    std::int64_t whole = 0;
    const auto [last, failed] = std::from_chars(value.data(), value.data() + value.size(), whole);
    if (failed == std::errc() && last == value.data() + value.size())
      table.insert(key, whole);
    else if (value == "true" || value == "false")
      table.insert(key, value == "true");
    else
      table.insert(key, value);
  }
  ModelShape model;
  ModelShape::Experts& experts = model.experts;
  std::int64_t dense_layers = 0;
  KeyReader keys(table, "model", where);
  list_keys(keys, model, dense_layers);
  keys.finish();

  if (model.key_heads == 0) model.key_heads = model.heads;
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
  for (std::int64_t layer = 0; layer < std::min(dense_layers, kMostLayers); ++layer)
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
    try {
      model = shape_of(parse_hf_config(read_file(path, kLongestModelFile), path), named.string());
    } catch (const ConfigError& error) {
      ErrorText text = error.text();
      text.action += std::string(", ") + kSizesAlone;
      throw ConfigError(text);
    }
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
