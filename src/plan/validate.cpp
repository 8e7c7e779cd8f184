// Published runs, predicted: a table of rows as published_runs.csv has them, and how far off the models are.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include "base/number_ranges.hpp"
#include "base/refuse.hpp"
#include "data/table.hpp"
#include "plan/inputs.hpp"
#include "plan/trial.hpp"

namespace isograd::planner {
namespace {

constexpr double kGibibyte = 1 << 30;
constexpr double kUsable = 0.9;  // of a device's memory: what needs more is called too large

// Names that tables of runs use, by how they begin, the longest last; devices of the built-in table.
constexpr std::pair<std::string_view, std::string_view> kDevices[] = {{"A100-SXM-40GB", "a100-40"},
                                                                      {"A100-SXM-80GB", "a100-80"},
                                                                      {"H100-SXM-80GB", "h100"},
                                                                      {"H100-96GB", "h100-96"},
                                                                      {"H200", "h200"},
                                                                      {"B200", "b200"},
                                                                      {"GB200", "gb200"},
                                                                      {"B300", "b300"},
                                                                      {"GB300", "gb300"},
                                                                      {"V100", "v100"},
                                                                      {"TPU-v4", "tpu-v4"},
                                                                      {"TPU-v5e", "tpu-v5e"},
                                                                      {"TPU-v5p", "tpu-v5p"},
                                                                      {"TPU-v6e", "tpu-v6e"}};

bool says(std::string text, std::initializer_list<const char*> words) {
  for (char& c : text) c = char(std::tolower(static_cast<unsigned char>(c)));
  return std::ranges::any_of(words, [&](const char* word) { return text.find(word) != std::string::npos; });
}

class RowReader {
 public:
  RowReader(const fs::path& file, const std::string& header) : file_(file) {
    const auto names = csv_cells(header);
    for (std::size_t i = 0; i < names.size(); ++i) columns_[names[i]] = i;
  }

  void next(const std::string& line) {
    ++line_;
    cells_ = csv_cells(line);
    if (cells_.size() != columns_.size())
      refuse(where(), fmt::format("{} cells", cells_.size()),
             fmt::format("{}, as the first line", columns_.size()), "Correct that line");
  }
  const std::string& text(const char* column) const {
    const auto found = columns_.find(column);
    if (found == columns_.end())
      refuse(fmt::format("{}, line 1", file_.string()), fmt::format("no column '{}'", column),
             "the columns of published_runs.csv (docs/planning_reference.md)",
             "Add it; its cells may be empty");
    return cells_[found->second];
  }
  std::optional<double> number(const char* column) const {
    const std::string& cell = text(column);
    if (cell.empty()) return std::nullopt;
    const auto value = number_in<double>(cell);
    if (!value || !std::isfinite(*value) || *value < 0)
      refuse(fmt::format("{}, column '{}'", where(), column), fmt::format("'{}'", cell),
             "a number, 0 or more, or nothing", "Correct that cell");
    return value;
  }
  // `otherwise`: where the row says nothing.
  double number(const char* column, double otherwise) const { return number(column).value_or(otherwise); }
  template <class Integer>
  void into(Integer& to, const char* column, double otherwise) const {
    const double found = number(column, otherwise);
    if (constexpr auto kMost = double(std::numeric_limits<Integer>::max() / 2); found > kMost)
      refuse(fmt::format("{}, column '{}'", where(), column), text(column), fmt::format("at most {}", kMost),
             "Correct that cell");
    to = static_cast<Integer>(found);
  }

 private:
  std::string where() const { return fmt::format("{}, line {}", file_.string(), line_); }
  const fs::path& file_;
  std::map<std::string, std::size_t, std::less<>> columns_{};
  std::vector<std::string> cells_{};
  std::size_t line_ = 1;
};

bool is_nanotron(const PublishedRow& row) { return row.framework == "nanotron"; }
bool is_fp4(const PublishedRow& row) { return says(row.precision, {"fp4"}); }

PublishedRow row_of(const RowReader& cells) {
  PublishedRow row{.id = cells.text("id"),
                   .tier = cells.text("tier"),
                   .source = cells.text("source"),
                   .hardware = cells.text("hardware"),
                   .framework = cells.text("framework"),
                   .recompute = cells.text("recompute"),
                   .flags = cells.text("flags"),
                   .precision = cells.text("precision")};
  row.failed = row.tier == "A-fail";
  ModelShape& model = row.model;
  model.name = cells.text("model");
  cells.into(model.layers, "layers", 0), cells.into(model.hidden, "hidden", 0);
  cells.into(model.heads, "heads", 1), cells.into(model.key_value_heads, "kv_heads", double(model.heads));
  cells.into(model.feed_forward, "ffn", 0), cells.into(model.vocabulary, "vocab", 50304);
  model.head_dim = model.heads > 0 ? model.hidden / model.heads : 0;
  model.gated = cells.number("glu", 0) == 1, model.tied_output = cells.number("tied", 0) == 1;
  Candidate& candidate = row.candidate;
  cells.into(candidate.ranks, "gpus", 1), cells.into(candidate.tp, "tp", 1),
      cells.into(candidate.pp, "pp", 1);
  cells.into(candidate.cp_ring, "cp", 1), cells.into(candidate.ep, "ep", 1);
  cells.into(candidate.stages_per_rank, "vpp", 1), cells.into(candidate.micro_batch, "mbs", 1);
  cells.into(candidate.micro_batches, "grad_acc", 1), cells.into(candidate.shards, "shards", 1);
  candidate.shards = std::max(candidate.shards, 1);
  candidate.replicas = std::max(1, int(std::min(cells.number("dp", 1), 1e9)) / candidate.shards);
  candidate.strategy = static_cast<Strategy>(std::clamp(cells.number("zero", 0), 0.0, 3.0));
  candidate.sequence_parallel = cells.number("sp", 1) != 0;
  candidate.checkpoint = row.recompute == "full";
  const std::string& schedule = cells.text("schedule");
  candidate.schedule = candidate.pp == 1                          ? Schedule::kNone
                       : schedule.starts_with("zb-v")             ? Schedule::kZeroBubbleV
                       : schedule.find("zb") != std::string::npos ? Schedule::kZeroBubbleH1
                       : candidate.stages_per_rank > 1            ? Schedule::kInterleaved
                                                                  : Schedule::kOneFOneB;
  row.work.precision =
      says(row.precision, {"fp8", "float8", "int8", "fp4"}) ? Precision::kFloat8 : Precision::kBFloat16;
  cells.into(row.work.sequence, "seq", 0);
  const double samples = cells.number("gbs", 0), gpus = candidate.ranks, sequence = double(row.work.sequence);
  row.work.tokens = samples * sequence;
  row.memory = cells.number("mem_gb", 0) * kGibibyte;
  row.twin_ratio = cells.number("twin_ratio", 0);
  // Seconds, or what they follow from. Model FLOPs with all pairs, as these tables count.
  if (const auto step = cells.number("step_s"))
    row.seconds = *step;
  else if (const auto tokens = cells.number("tokens_per_s_per_gpu"); tokens && *tokens > 0)
    row.seconds = row.work.tokens / (*tokens * gpus);
  else if (const auto rate = cells.number("samples_per_s"); rate && *rate > 0)
    row.seconds = samples / *rate;
  else if (const auto flops = cells.number("tflops_per_gpu"); flops && *flops > 0) {
    const double h = double(model.hidden), L = double(model.layers), layer = products_of_layer(model);
    const double all = 6 * row.work.tokens * (L * layer + double(model.vocabulary) * h) +
                       12 * L * h * sequence * row.work.tokens;
    const bool again = candidate.checkpoint && cells.text("tflops_kind").starts_with("hardware");
    row.seconds = all * (again ? 4.0 / 3 : 1) / (*flops * 1e12 * gpus);
  }
  return row;
}

// nanotron's batch is as published, and all ranks that it names are there.
bool is_whole(const PublishedRow& row) {
  const Candidate& candidate = row.candidate;
  return candidate.data_ranks() * candidate.micro_batch * candidate.micro_batches == row.work.samples();
}

bool is_timed(const PublishedRow& row) { return row.tier == "A" && row.seconds > 0 && row.candidate.ep == 1; }

std::optional<Cluster> cluster_of(const PublishedRow& row) {
  for (const auto& [begins, name] : kDevices)
    if (row.hardware.starts_with(begins)) {
      // With all of its links: read_cluster() leaves out those that its number of devices does not need.
      Cluster cluster = *built_in(name);
      cluster.devices = row.candidate.ranks;
      auto& peak = cluster.device.peak;
      if (is_fp4(row)) {  // peaks of fp4: twice fp8, on GB300 three times
        peak[std::size_t(Precision::kFloat8)] *= name == "gb300" ? 3 : 2;
        cluster.device.name += "-fp4";
      }
      // Devices that have no fp8 units compute those products in 16 bits.
      if (double& float8 = peak[std::size_t(Precision::kFloat8)]; float8 == 0)
        float8 = peak[std::size_t(Precision::kBFloat16)];
      return cluster;
    }
  return std::nullopt;
}

struct Predicted {
  double seconds = 0, memory = 0;
  bool too_large = false;
};
std::optional<Predicted> predicted(const PublishedRow& row) {
  auto cluster = cluster_of(row);
  if (!cluster || row.model.layers == 0 || row.model.hidden == 0 || row.work.sequence == 0)
    return std::nullopt;
  const Calibration nothing;
  const Program program = is_nanotron(row) ? Program::kNanotron : Program::kOther;
  Problem problem{.model = row.model,
                  .cluster = *cluster,
                  .calibration = nothing,
                  .work = row.work,
                  .constants = constants_of(program, cluster->device, row.work.precision),
                  .program = program};
  // Attention again in backward: two of nine parts more.
  if (row.recompute.starts_with("selective")) problem.constants.share_of_attention *= 7.0 / 9;
  Pipelines pipelines;
  MemoryModel stages(problem, pipelines);
  Predicted made;
  if (row.seconds > 0)
    made.seconds = published_step(problem, row.candidate,
                                  program == Program::kNanotron ? stages.stages(row.candidate)
                                                                : std::vector<StageShape>{})
                       .total();
  if (program == Program::kNanotron && (row.memory > 0 || row.failed)) {
    // In place of the device's reserve, and with the allocator's part of what is kept.
    cluster->reserve = problem.constants.fixed_bytes;
    problem.constants.by_hidden *= problem.constants.allocated;
    problem.constants.by_feed_forward *= problem.constants.allocated;
    made.memory = MemoryModel(problem, pipelines).of(row.candidate).total();
    made.too_large = made.memory > kUsable * cluster->device.memory;
  }
  return made;
}

// Adds the errors of these rows, if there are any. Quantiles are interpolated between ranks, as numpy's are.
void add_errors(std::vector<Errors>& all, const std::string& source, const char* what,
                std::vector<double> values) {
  if (values.empty()) return;
  std::ranges::sort(values);
  const auto quantile = [&](double part) {
    const double at = part * double(values.size() - 1);
    const auto below = std::size_t(at);
    const double above = values[std::min(below + 1, values.size() - 1)];
    return values[below] + (at - double(below)) * (above - values[below]);
  };
  all.push_back({source, what, values.size(), quantile(0.5), quantile(0.75), quantile(0.9), values.back()});
}
void add_part(std::vector<Errors>& all, const std::string& source, const char* what, std::size_t rows,
              std::size_t of_them) {
  const double part = double(of_them) / double(rows);
  if (rows > 0) all.push_back({source, what, rows, part, part, part, part});
}

// "Megatron-Bridge 26.04 NeMo Container" and its like are one source.
std::string program_of(const PublishedRow& row) {
  return row.framework.starts_with("Megatron-Bridge") ? "Megatron-Bridge" : row.framework;
}

struct Seen {
  const PublishedRow* row;
  Predicted predicted;
  double error() const { return std::abs(predicted.seconds / row->seconds - 1); }
};

// For each model on each number of devices, whether one of the five that are predicted to be the fastest is
// within 5 % of the fastest that was measured.
void add_cells(std::vector<Errors>& to, const std::vector<Seen>& seen) {
  std::map<std::pair<std::string, std::int32_t>, std::vector<const Seen*>> cells;
  for (const Seen& one : seen) cells[{one.row->model.name, one.row->candidate.ranks}].push_back(&one);
  std::size_t all = 0, good = 0;
  for (auto& [cell, layouts] : cells) {
    if (layouts.size() < 2) continue;
    std::ranges::sort(layouts, {}, [](const Seen* one) { return one->predicted.seconds; });
    const auto seconds = [](const Seen* one) { return one->row->seconds; };
    const double best = seconds(*std::ranges::min_element(layouts, {}, seconds));
    layouts.resize(std::min<std::size_t>(layouts.size(), 5));
    ++all;
    good += seconds(*std::ranges::min_element(layouts, {}, seconds)) <= 1.05 * best;
  }
  add_part(to, "nanotron, below 74 GiB: one of the top five within 5 % of the best", "cells", all, good);
}

}  // namespace

std::vector<PublishedRow> read_rows(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  if (!in || !std::getline(in, line))
    refuse(file.string(), in.is_open() ? "an empty file" : "a file that cannot be read",
           "a table in the format of published_runs.csv", "Give the path of one");
  RowReader reader(file, line);
  std::vector<PublishedRow> rows;
  while (std::getline(in, line)) {
    if (line.empty()) continue;
    reader.next(line);
    rows.push_back(row_of(reader));
  }
  return rows;
}

std::vector<TimedRow> timed_rows(const std::vector<PublishedRow>& rows) {
  std::vector<TimedRow> timed;
  for (const PublishedRow& row : rows) {
    if (!is_timed(row) || (is_nanotron(row) && !is_whole(row))) continue;
    const auto found = predicted(row);
    if (!found) continue;
    const bool confirmed = row.twin_ratio > 0 && row.twin_ratio < 1.1;
    timed.push_back({&row,
                     !is_nanotron(row) ? program_of(row)
                     : confirmed       ? "nanotron, confirmed"
                                       : "nanotron, others",
                     row.seconds, found->seconds});
  }
  return timed;
}

std::vector<Errors> validate(const std::vector<PublishedRow>& rows) {
  std::vector<Errors> all;
  std::vector<Seen> nanotron;
  std::map<std::string, std::vector<double>> others;
  std::vector<double> memory, together;
  std::size_t ran = 0, refused = 0, failed = 0, too_large = 0;
  for (const PublishedRow& row : rows) {
    if (row.tier != "A" && !row.failed) continue;
    const bool timed = is_timed(row);
    if (!is_nanotron(row) && !timed) continue;
    const auto found = predicted(row);
    if (!found) continue;
    if (!is_nanotron(row)) {
      together.push_back(Seen{&row, *found}.error());
      others[program_of(row)].push_back(together.back());
      continue;
    }
    if (row.failed) {
      ++failed, too_large += found->too_large;
      continue;
    }
    if (row.memory > 0) {
      memory.push_back(std::abs(found->memory / row.memory - 1));
      ++ran, refused += found->too_large;
    }
    if (timed && is_whole(row)) nanotron.push_back({&row, *found});
  }
  add_errors(all, "nanotron", "memory", memory);
  add_part(all, "nanotron, that ran: called too large", "fits", ran, refused);
  add_part(all, "nanotron, that failed: called too large", "fits", failed, too_large);

  const auto subset = [&](const char* name, double most_twin, double most_gib, int most_tp) {
    std::vector<double> errors;
    for (const Seen& one : nanotron) {
      const PublishedRow& row = *one.row;
      if (most_twin > 0 && (row.twin_ratio == 0 || row.twin_ratio >= most_twin)) continue;
      if (most_gib > 0 && !(row.memory > 0 && row.memory < most_gib * kGibibyte)) continue;
      if (row.candidate.tp <= most_tp) errors.push_back(one.error());
    }
    add_errors(all, name, "seconds", errors);
  };
  constexpr int kAnyTp = 1 << 20;
  subset("nanotron, twin ratio below 1.1, below 74 GiB, tp at most 8", 1.1, 74, 8);
  subset("nanotron, twin ratio below 1.25, tp at most 8", 1.25, 0, 8);
  subset("nanotron, below 74 GiB, tp at most 8", 0, 74, 8);
  subset("nanotron", 0, 0, kAnyTp);
  std::erase_if(nanotron,
                [](const Seen& one) { return !(one.row->memory > 0 && one.row->memory < 74 * kGibibyte); });
  add_cells(all, nanotron);
  add_errors(all, "all other dense rows", "seconds", together);
  for (const auto& [program, errors] : others) add_errors(all, program, "seconds", errors);
  return all;
}

std::vector<Errors> validate_scaling(const std::vector<PublishedRow>& rows) {
  // A family: one submitter's runs of one inner layout. The identifier's number of nodes is no part of it.
  std::map<std::string, std::vector<const PublishedRow*>> families;
  for (const PublishedRow& row : rows) {
    if (row.tier != "A" || row.framework != "NeMo (MLPerf)" || row.seconds <= 0) continue;
    std::string name = row.id.substr(0, row.id.find("_n"));
    if (const auto dfw = name.find("eos-dfw"); dfw != std::string::npos) name.erase(dfw + 3, 4);
    const Candidate& c = row.candidate;
    families[fmt::format("{} {} {} tp {} pp {} x {} cp {} mbs {}", name, row.model.name, row.hardware, c.tp,
                         c.pp, c.stages_per_rank, c.cp_ring, c.micro_batch)]
        .push_back(&row);
  }
  std::vector<Errors> all;
  for (auto& [family, worlds] : families) {
    if (worlds.size() < 3) continue;
    std::ranges::sort(worlds, {}, [](const PublishedRow* row) { return row->candidate.ranks; });
    const auto rounds = [](const PublishedRow* row) { return double(row->candidate.micro_batches); };
    const PublishedRow* one = worlds.front();
    const auto two =
        std::ranges::find_if(worlds, [&](const PublishedRow* row) { return rounds(row) != rounds(one); });
    if (two == worlds.end()) continue;
    const double each = (one->seconds - (*two)->seconds) / (rounds(one) - rounds(*two)),
                 fixed = one->seconds - each * rounds(one);
    std::vector<double> errors;
    for (const PublishedRow* row : worlds)
      if (row->candidate.ranks != one->candidate.ranks && row->candidate.ranks != (*two)->candidate.ranks)
        errors.push_back(std::abs((each * rounds(row) + fixed) / row->seconds - 1));
    add_errors(all, "MLPerf " + family, "seconds", errors);
  }
  return all;
}

std::vector<std::vector<std::string>> errors_table(const std::vector<PublishedRow>& rows) {
  std::vector<Errors> all = validate(rows);
  std::ranges::move(validate_scaling(rows), std::back_inserter(all));
  const auto percent = [](double part) { return fmt::format("{:.1f} %", 100 * part); };
  std::vector<std::vector<std::string>> table{{"rows of", "what", "rows", "median", "75 %", "90 %", "worst"}};
  for (const Errors& one : all) {
    const bool spread = one.what == "seconds" || one.what == "memory";
    table.push_back({one.source, one.what, std::to_string(one.rows), percent(one.median)});
    for (const double error : {one.p75, one.p90, one.worst})
      table.back().push_back(spread ? percent(error) : "");
  }
  return table;
}

}  // namespace isograd::planner
