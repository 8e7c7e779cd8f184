// Models, clusters, calibrations and documents from outside, read and checked. Every refusal of
// docs/planning.md that is not about a layout is made here.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/planner.hpp"

namespace isograd::planner {

// "layers=32,hidden=4096,heads=32,...": the fields of ModelShape by name; the rest is derived as Llama has
// it.
ModelShape parse_model(std::string_view numbers, const std::string& where);

// [cluster], [[link]], [calibration], [[product]], [[collective]]: docs/planning.md. `file` is for messages.
// ConfigError: unknown keys (with the near ones), a unit that seems to be another ("is that Gb/s?").
struct ClusterFile {
  Cluster cluster{};
  Calibration calibration{};
};
ClusterFile parse_cluster(std::string_view text, const std::string& file);
std::string to_toml(const ClusterFile& file);  // which parse_cluster() reads back, number for number

// The table of docs/planning.md, a source for each number; null: no such name.
const Cluster* built_in(std::string_view name);
// `data.cache`/here.toml, where `isograd calibrate` writes and --cluster here reads.
std::filesystem::path here_file();

// 0, negative, NaN, infinite or absurd: ConfigError at `where`, with what is allowed.
double positive(double value, double most, const std::string& where, const std::string& unit);
// "4M", "1.5e12", "4194304".
double parse_tokens(std::string_view text, const std::string& where);

// Tokens of the documents of a configuration's corpus, if it is there; at most `most` of them, evenly spread.
std::vector<std::int64_t> documents_of(const std::filesystem::path& configuration,
                                       std::size_t most = 1 << 20);

}  // namespace isograd::planner
