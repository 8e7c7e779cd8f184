// Models, clusters, calibrations and documents from outside, read and checked. Every refusal of
// docs/planning_reference.md that is not about a layout is made here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/planner.hpp"

namespace isograd::planner {

inline constexpr std::int64_t kMostDevices = 10'000'000;

// "layers=32,hidden=4096,heads=32,...": the fields of ModelShape by name; the rest is derived as Llama has
// it.
ModelShape parse_model(std::string_view numbers, const std::string& where);

// [cluster], [device], [[link]], [calibration], [[product]], [[attention]], [[collective]]: docs/planning.md.
// Numbers are of bytes, seconds, FLOP/s, or texts with a unit ("450 GB/s"). `file` is for messages.
// ConfigError: unknown keys (with the near ones), a unit that seems to be another ("is that Gb/s?").
struct ClusterFile {
  Cluster cluster{};
  Calibration calibration{};
};
ClusterFile parse_cluster(std::string_view text, const std::string& file);
std::string to_toml(const ClusterFile& file);  // which parse_cluster() reads back, number for number

// The table of docs/planning_reference.md, a source for each number; null: no such name. Its last link joins
// as many devices as are asked for: read_cluster().
const Cluster* built_in(std::string_view name);
// `data.cache`/here.toml, where `isograd calibrate` writes and --cluster here reads.
std::filesystem::path here_file();

// More of the same devices, or fewer: the network joins all. A cluster of the table gets back the links that
// read_cluster() left out; of another that has none check() says so.
Cluster on_devices(Cluster cluster, std::int64_t devices);

// "AMD EPYC, 2 cores, LibTorch 2.13": what read_calibration() compares.
std::string machine_text();

// ConfigError: the device has neither a peak nor calibrated products of that precision.
void check_peak(const Device& device, const Calibration& calibration, Precision precision);

// "4M" (4 * 1024 * 1024, as batches are said), "1.5e12", "4194304".
double parse_tokens(std::string_view text, const std::string& where);

// Tokens of the documents of a configuration's corpus, if it is packed already; at most `most` of them,
// evenly spread.
std::vector<std::int64_t> documents_of(const std::filesystem::path& configuration,
                                       std::size_t most = 1 << 20);

}  // namespace isograd::planner
