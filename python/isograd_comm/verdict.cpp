// The verdict of `isograd compare` on steps in memory, and checksums of tensors, for isograd.watch.
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <limits>

#include "base/files.hpp"
#include "isograd_comm/bindings.hpp"
#include "verify/present.hpp"

namespace isograd {

namespace python {
namespace {

// A key that is absent or None was not recorded.
bool recorded(const py::dict& of, const char* key) { return of.contains(key) && !of[key].is_none(); }

template <class T>
T get(const py::dict& of, const char* key, T absent = {}) {
  return recorded(of, key) ? of[key].cast<T>() : std::move(absent);
}

StepDump::Named named(const py::dict& tensors) {
  StepDump::Named result;
  for (const auto& [name, tensor] : tensors)
    result.emplace_back(name.cast<std::string>(), tensor.cast<at::Tensor>());
  return result;
}

std::vector<std::uint64_t> checksums(const py::dict& of, const char* key) {
  std::vector<std::uint64_t> result;
  for (const auto& text : get<std::vector<std::string>>(of, key))
    result.push_back(std::stoull(text, nullptr, 16));
  return result;
}

// The keys are those of step.json (docs/dump.md), and tensors by name.
StepDump dump_of(const py::dict& step) {
  StepDump dump;
  const auto number = [&](const py::dict& of, const char* key, const std::string& path) {
    const double value = get(of, key, std::numeric_limits<double>::quiet_NaN());
    if (std::isnan(value) && recorded(of, key)) dump.not_numbers.push_back(path + key);
    return value;
  };
  dump.gradients = named(step["gradients"]);
  dump.figures = {.loss = number(step, "loss", ""),
                  .targets = get(step, "targets", kNotRecorded),
                  .tokens = get(step, "tokens", kNotRecorded),
                  .norm = number(step, "norm", ""),
                  .clip_coefficient = number(step, "clip_coefficient", "")};
  dump.samples = get<std::vector<std::int64_t>>(step, "samples");
  std::sort(dump.samples.begin(), dump.samples.end());
  dump.counts = get<std::vector<std::vector<std::int64_t>>>(step, "counts");
  for (const auto& [axis, size] : get<py::dict>(step, "axes"))
    dump.axes.push_back({axis.cast<std::string>(), size.cast<int>()});
  dump.precision = step["precision"].cast<std::string>();
  dump.applied = named(get<py::dict>(step, "applied"));
  dump.moves = get<std::vector<double>>(step, "moves");
  dump.rounding = get<std::vector<double>>(step, "rounding");
  dump.scale_moves = get<double>(step, "scale_moves");
  dump.scale_rounding = get<double>(step, "scale_rounding");
  for (const auto& rank : get<std::vector<py::dict>>(step, "ranks")) {
    const std::string path = fmt::format("ranks.{}.", dump.ranks.size());
    dump.ranks.push_back({.initial = checksums(rank, "initial"),
                          .gradients = checksums(rank, "gradients"),
                          .spread = number(rank, "spread", path),
                          .owned_norm = number(rank, "owned_norm", path),
                          .norm = number(rank, "norm", path)});
  }
  const auto axes = get<std::string>(step, "peer_axes");
  for (auto& [name, sum] : named(get<py::dict>(step, "peers"))) dump.peer_sums.push_back({name, axes, sum});
  for (const auto& finding : get<std::vector<py::dict>>(step, "findings"))
    dump.findings.push_back({finding["id"].cast<std::string>(), finding["sentence"].cast<std::string>()});
  for (const auto& [cell, share] : get<py::dict>(step, "shares")) {
    const auto [rank, micro_batch] = cell.cast<std::pair<std::size_t, std::size_t>>();
    dump.shares.resize(dump.counts.size());
    dump.shares.at(rank).resize(dump.counts[rank].size());
    dump.shares.at(rank).at(micro_batch) = named(share.cast<py::dict>());
  }
  return dump;
}

// The checksum of a tensor's bits that dumps have (docs/verify.md).
std::string checksum_of(const at::Tensor& tensor) {
  const py::gil_scoped_release release;
  const at::Tensor held = tensor.detach().cpu().contiguous();
  return checksum(held.const_data_ptr(), held.nbytes());
}

StepDump in_fp64(StepDump dump) {
  const auto widen = [](StepDump::Named& tensors) {
    for (auto& [name, tensor] : tensors) tensor = tensor.to(at::kDouble);
  };
  widen(dump.gradients);
  widen(dump.applied);
  for (auto& rank : dump.shares)
    for (auto& share : rank) widen(share);
  for (auto& peers : dump.peer_sums) peers.sum = peers.sum.to(at::kDouble);
  return dump;
}

std::tuple<bool, std::string, std::string> compare(const py::dict& run, const py::dict& one_process,
                                                   const std::optional<py::dict>& alone,
                                                   const std::optional<std::string>& report,
                                                   const std::optional<std::string>& folder) {
  const DumpNames names{"run", "one_process"};
  const StepDump found = dump_of(run), expected = dump_of(one_process);
  const auto mean = get<std::string>(run, "mean", "token");
  const auto changes = get<std::map<std::string, std::string>>(run, "changes");
  const std::optional<StepDump> bound = alone ? std::optional(dump_of(*alone)) : std::nullopt;
  const py::gil_scoped_release release;
  if (folder) {  // before the comparison, which may refuse `alone`
    const std::filesystem::path in = *folder;
    write_dump(found, in / names.found);
    write_dump(expected, in / names.expected);
    if (bound) write_dump(*bound, in / "alone");
  }
  const std::optional<StepDump> rounded = bound ? std::optional(in_fp64(*bound)) : std::nullopt;
  const DumpComparison comparison = compare_dumps(in_fp64(found), in_fp64(expected), names, rounded);
  const Verdict& verdict = comparison.verdict;
  Wording wording = compare_wording(comparison, names, bound ? "alone" : "", mean);
  for (const auto& [id, change] : changes) wording.changes[id] = change;
  const std::string json = to_json(verdict, wording) + "\n";
  if (report) write_verify_page(verdict, wording, *report);
  if (folder) write_file(std::filesystem::path(*folder) / "verdict.json", json);
  return {verdict.passed, to_text(verdict, wording), json};
}

}  // namespace

void bind_verdict(py::module_& module) {
  module.def("checksum", &checksum_of, py::arg("tensor"),
             "XXH3-64 of a tensor's bits, row after row, as 16 hex digits. Of any dtype, on any device.");
  module.def("compare", &compare, py::arg("run"), py::arg("one_process"), py::arg("alone"), py::arg("report"),
             py::arg("folder"),
             "Whether a step equals that of one process, and what `isograd compare` prints and writes as "
             "JSON. report: its page goes there; folder: the dumps and the JSON.");
}

}  // namespace python
}  // namespace isograd
