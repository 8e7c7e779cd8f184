// The tables of docs/planning_reference.md that the room's functions make, held to what stands there.
// tools/planning_tables.py writes them: it runs these tests with ISOGRAD_WRITE_TABLES=1.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>

#include "base/files.hpp"
#include "plan/inputs.hpp"
#include "plan/problem.hpp"
#include "plan/search.hpp"
#include "plan/trial.hpp"

namespace isograd::planner {
namespace {

using Cells = std::vector<std::vector<std::string>>;

std::string markdown(const Cells& rows) {
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    text += fmt::format("| {} |\n", fmt::join(rows[i], " | "));
    if (i == 0)
      text +=
          "|" +
          std::string(fmt::format("{}", fmt::join(std::vector<std::string>(rows[i].size(), "---"), "|"))) +
          "|\n";
  }
  return text;
}

// The lines between "<!-- table: NAME -->" and "<!-- end of table -->".
void expect_table(const std::string& name, const Cells& rows) {
  const std::filesystem::path page = ISOGRAD_PLANNING_PAGE;
  std::string text = read_file(page);
  const std::string begins = fmt::format("<!-- table: {} -->\n", name), ends = "<!-- end of table -->";
  const std::size_t found = text.find(begins);
  ASSERT_NE(found, std::string::npos) << page << " has no table " << name;
  const std::size_t first = found + begins.size(), last = text.find(ends, first);
  ASSERT_NE(last, std::string::npos) << "the table " << name << " does not end";
  const std::string made = markdown(rows), stands = text.substr(first, last - first);
  if (std::getenv("ISOGRAD_WRITE_TABLES") != nullptr && made != stands)
    write_file(page, text.replace(first, last - first, made));
  else
    EXPECT_EQ(stands, made) << "python3 tools/planning_tables.py writes it";
}

std::string percent(double part) { return fmt::format("{:.1f} %", 100 * part); }
std::string signed_percent(double part) { return fmt::format("{:+.1f} %", 100 * part); }

// ---- tables that need no published rows ----

TEST(PlanningTables, Recipe) {
  const Work work{.tokens = 4194304, .sequence = 4096};
  Cells rows = {
      {"GPUs", "samples", "accumulation", "or fewer GPUs", "or a batch of tokens", "or a micro-batch"}};
  for (const std::int64_t ranks : {128, 512, 1024}) {
    const BatchNumbers of = batch_numbers(work, 2, ranks);
    rows.push_back({std::to_string(ranks), std::to_string(of.samples),
                    of.too_many_ranks ? "below 1: more GPUs than the batch has work for"
                                      : std::to_string(of.accumulation)});
    for (const double way : {double(of.fewer_ranks), of.larger_batch, double(of.smaller_micro_batch)})
      rows.back().push_back(of.too_many_ranks ? fmt::format("{:.0f}", way) : "");
  }
  expect_table("recipe", rows);
}

TEST(PlanningTables, Zero) {
  Cells rows = {{"strategy", "keeps", "bytes a parameter, N = 64", "with fp32 gradients as well",
                 "as isograd keeps them (fp32 gradients instead)", "sends, elements a parameter"}};
  for (const ZeroRow& row : zero_table(64))
    rows.push_back({row.strategy, row.kept_formula, fmt::format("{:g}", row.kept),
                    fmt::format("{:g}", row.kept_with_fp32_gradients), fmt::format("{:g}", row.isograd_kept),
                    fmt::format("{:g}", row.sent)});
  expect_table("zero", rows);
}

TEST(PlanningTables, Clusters) {
  Cells rows = {{"name", "memory, GiB", "TB/s", "bfloat16, TFLOP/s", "float8", "best product found",
                 "devices a host", "on the fast link", "GB/s each way", "network, GB/s a device", "source"}};
  const auto or_nothing = [](double value) {
    return value > 0 ? fmt::format("{:g}", value / 1e12) : std::string();
  };
  for (const std::string& name : built_in_clusters()) {
    const Cluster& one = *built_in(name);
    rows.push_back({name, fmt::format("{:g}", one.device.memory / (1 << 30)),
                    fmt::format("{:g}", one.device.memory_bandwidth / 1e12), or_nothing(one.device.peak[2]),
                    or_nothing(one.device.peak[3]), or_nothing(one.device.best_found[2]),
                    std::to_string(one.per_host), std::to_string(one.links[0].ranks),
                    fmt::format("{:g}", one.links[0].bandwidth / 1e9),
                    fmt::format("{:g}", one.links[1].bandwidth / 1e9), one.device.source});
  }
  expect_table("clusters", rows);
}

TEST(PlanningTables, Constants) {
  const Constants of;
  Cells rows = {{"constant", "value", "fitted or taken", "an independent source"}};
  const auto add = [&](const char* name, std::string value, const char* fitted, const char* source) {
    rows.push_back({name, std::move(value), fitted, source});
  };
  add("share of a data sheet's FLOP/s that products reach", fmt::format("{:g}", of.share_of_peak), "fitted",
      "the best product found on an H100 is 794.5 of 989 TFLOP/s, 0.80 (stas00/ml-engineering)");
  add("host's time for a layer of a micro-batch", fmt::format("{:g} ms", 1e3 * of.layer_overhead), "fitted",
      "none was found: 130 operators of 15 us under Python");
  add("share of a link's bandwidth inside a host", fmt::format("{:g}", of.share_inside), "fitted",
      "calculon takes 0.65; rings on 8 H200 reach 367 of 450 GB/s, 0.82");
  add("share of a network's bandwidth", fmt::format("{:g}", of.share_across), "fitted",
      "the playbook's all-reduce of 256 MB: 160 of 400 GB/s on 4 hosts, 100 on 8 (0.40, 0.25)");
  add("bytes that an allocator takes for a byte kept", fmt::format("{:g}", of.allocated), "fitted",
      "none was found");
  add("memory of libraries", fmt::format("{:g} GiB", of.fixed_bytes / (1 << 30)), "fitted", "none was found");
  add("part of a backward that hides a reduction", fmt::format("{:g}", of.overlap), "taken",
      "arXiv:2006.15704: 0.35 to 0.38");
  add("share of the peak that attention reaches", fmt::format("{:g}", of.share_of_attention), "taken",
      "a third on an H100 (arXiv:2407.08608); A100: 0.4 here of 0.50 to 0.73 (arXiv:2307.08691)");
  add("share of a memory's bandwidth", fmt::format("{:g}", of.share_of_memory), "taken", "none was found");
  add("times that forward and backward move a kept byte", fmt::format("{:g}", of.passes), "counted",
      "(180 h + 30 f) / (20 h + 8 f)");
  expect_table("constants", rows);
}

// ---- tables of published rows ----

class PublishedTables : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(ISOGRAD_PUBLISHED_RUNS)) GTEST_SKIP() << "missing: published_runs.csv";
    rows_ = read_rows(ISOGRAD_PUBLISHED_RUNS);
  }
  // A row for each, by devices.
  Cells compared(const std::vector<std::string>& columns,
                 const std::function<bool(const PublishedRow&)>& chosen,
                 const std::function<std::vector<std::string>(const PublishedRow&)>& described) const {
    std::vector<TimedRow> timed = timed_rows(rows_);
    std::erase_if(timed, [&](const TimedRow& one) { return !chosen(*one.row); });
    std::ranges::stable_sort(timed, {}, [](const TimedRow& one) {
      return std::pair(one.row->candidate.ranks, one.row->candidate.shards);
    });
    Cells cells = {columns};
    for (const char* column : {"published, tokens/s a GPU", "predicted", "off"}) cells[0].push_back(column);
    for (const TimedRow& one : timed) {
      const double tokens = one.row->work.tokens / one.row->candidate.ranks;
      cells.push_back(described(*one.row));
      for (const std::string& cell :
           {fmt::format("{:.0f}", tokens / one.published), fmt::format("{:.0f}", tokens / one.predicted),
            signed_percent(one.published / one.predicted - 1)})
        cells.back().push_back(cell);
    }
    return cells;
  }
  std::vector<PublishedRow> rows_{};
};

TEST_F(PublishedTables, Errors) { expect_table("errors", errors_table(rows_)); }

TEST_F(PublishedTables, ShardsOverAllOrEight) {
  expect_table(
      "shards",
      compared(
          {"GPUs", "states sharded over"},
          [](const PublishedRow& row) { return row.id.starts_with("intern-t1z"); },
          [](const PublishedRow& row) {
            return std::vector{std::to_string(row.candidate.ranks), std::to_string(row.candidate.shards)};
          }));
}

TEST_F(PublishedTables, DataParallelismOfAFixedBatch) {
  expect_table("fixed batch",
               compared(
                   {"GPUs", "ZeRO", "micro-batch x accumulation"},
                   [](const PublishedRow& row) {
                     const Candidate& c = row.candidate;
                     return row.model.name == "nanotron-1b" && c.tp * c.pp == 1 && c.micro_batch == 1;
                   },
                   [](const PublishedRow& row) {
                     const Candidate& c = row.candidate;
                     return std::vector{std::to_string(c.ranks),
                                        c.strategy == Strategy::kZero1 ? std::string("1") : "0",
                                        fmt::format("{} x {}", c.micro_batch, c.micro_batches)};
                   }));
}

TEST_F(PublishedTables, Zero3AndPipelines) {
  expect_table("zero3", compared(
                            {"program", "model, layers x width", "GPUs", "layout"},
                            [](const PublishedRow& row) { return row.id.starts_with("ptdp-t2"); },
                            [](const PublishedRow& row) {
                              return std::vector{row.framework,
                                                 fmt::format("{} x {}", row.model.layers, row.model.hidden),
                                                 std::to_string(row.candidate.ranks), to_text(row.candidate)};
                            }));
}

// Where the models are wrong: the same rows by what they have much or little of.
TEST_F(PublishedTables, WhereTheyAreWrong) {
  const std::vector<TimedRow> timed = timed_rows(rows_);
  Cells cells = {{"rows", "number", "median error", "90 %", "published / predicted, median"}};
  const auto add = [&](const std::string& name, const std::function<bool(const TimedRow&)>& chosen) {
    std::vector<double> errors, ratios;
    for (const TimedRow& one : timed)
      if (chosen(one))
        ratios.push_back(one.published / one.predicted),
            errors.push_back(std::abs(one.predicted / one.published - 1));
    ASSERT_FALSE(errors.empty()) << name;
    std::ranges::sort(errors), std::ranges::sort(ratios);
    const auto at = [](const std::vector<double>& sorted, double part) {
      return sorted[static_cast<std::size_t>(part * static_cast<double>(sorted.size() - 1))];
    };
    cells.push_back({name, std::to_string(errors.size()), percent(at(errors, 0.5)), percent(at(errors, 0.9)),
                     fmt::format("{:.2f}", at(ratios, 0.5))});
  };
  const auto nanotron = [](const TimedRow& one) { return one.program.starts_with("nanotron"); };
  const auto memory = [](const TimedRow& one) { return one.row->memory / (1 << 30); };
  add("nanotron, confirmed by a twin",
      [&](const TimedRow& one) { return one.program == "nanotron, confirmed"; });
  add("nanotron, a twin 25 % off or more",
      [&](const TimedRow& one) { return nanotron(one) && one.row->twin_ratio >= 1.25; });
  add("nanotron, tp over hosts (16 and more)",
      [&](const TimedRow& one) { return nanotron(one) && one.row->candidate.tp > 8; });
  add("nanotron, more than 74 of 80 GiB",
      [&](const TimedRow& one) { return nanotron(one) && memory(one) > 74; });
  add("nanotron, tp at most 8, below 74 GiB, 64 GPUs or fewer", [&](const TimedRow& one) {
    return nanotron(one) && one.row->candidate.tp <= 8 && memory(one) < 74 && one.row->candidate.ranks <= 64;
  });
  add("nanotron, tp at most 8, below 74 GiB, more GPUs", [&](const TimedRow& one) {
    return nanotron(one) && one.row->candidate.tp <= 8 && memory(one) < 74 && one.row->candidate.ranks > 64;
  });
  add("others, one sequence of at most 2,048 tokens", [&](const TimedRow& one) {
    return !nanotron(one) && one.row->candidate.micro_batch * one.row->work.sequence <= 2048;
  });
  add("others, sequences of 32,768 and more",
      [&](const TimedRow& one) { return !nanotron(one) && one.row->work.sequence >= 32768; });
  add("others, zero3 over 128 shards and more", [&](const TimedRow& one) {
    return !nanotron(one) && one.row->candidate.strategy == Strategy::kZero3 &&
           one.row->candidate.shards >= 128;
  });
  add("others, V100", [&](const TimedRow& one) { return one.row->hardware.starts_with("V100"); });
  expect_table("wrong", cells);
}

}  // namespace
}  // namespace isograd::planner
