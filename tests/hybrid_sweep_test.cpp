// Axes, strategies, schedules, means, models and precisions combined: in every cell of a covering array the
// raw gradient is one process's, and the norm that of the gradient; what cannot be combined is refused by
// name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "full_tests.hpp"
#include "hybrid_testing.hpp"

namespace isograd::hybrid {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Hybrid : public HybridCells {};

struct Totals {
  int cells = 0, failed = 0;
  double gradient = 0, norm = 0, staged = 0, parts = 0, loss = 0, seconds = 0;
  std::string worst{};
  void add(const Measured& measured, const std::string& name) {
    ++cells;
    if (measured.gradient > gradient) gradient = measured.gradient, worst = name + ", " + measured.worst;
    norm = std::max(norm, measured.assembled), staged = std::max(staged, measured.staged);
    parts = std::max(parts, measured.parts);
    loss = std::max(loss, measured.loss), seconds += measured.seconds;
  }
};

// Pairwise, or with ISOGRAD_FULL_TESTS=1 every three values.
TEST_F(Hybrid, CellsHaveOneProcesssGradientAndNorm) {
  std::vector<Cell> cells;
  if (full_tests())
    for (const covering::Row& row : covering_rows(3).rows) cells.push_back({row});
  else
    cells = pairwise_cells();
  Totals totals;
  std::size_t place = 0;
  for (const Cell& cell : cells) {
    // A quarter of the cells looks before, another one at a step made again.
    const bool looks = full_tests() || place % 4 == 0, repeats = full_tests() || place % 4 == 2;
    ++place;
    const RunConfig config = config_for(cell);
    EXPECT_EQ(refusal_of(config, cell.ranks()), "no error") << cell.name();
    std::string wrong;
    try {
      const Measured measured =
          measure(config, cell.ranks(), wanted(cell), {.look_before = looks, .repeat = repeats});
      totals.add(measured, cell.name());
      wrong = wrong_with(measured);
      EXPECT_TRUE(measured.summed > 0 || cell.data() == 1 || !looks) << cell.name();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    if (!wrong.empty()) ++totals.failed;
    EXPECT_EQ(wrong, "") << cell.name();
  }
  std::printf(
      "E1: %d cells run (seed %llu), %d failed; worst gradient %.1e of %.0e (%s), loss %.1e; norm %.1e, in stages "
      "%.1e, by parameter %.1e, of %.0e; %.0f s\n",
      totals.cells, static_cast<unsigned long long>(kSeed), totals.failed, totals.gradient, kExact,
      totals.worst.c_str(), totals.loss, totals.norm, totals.staged, totals.parts, kNorm, totals.seconds);
}

// One axis to the end, whatever else there is by turns: 5 and 8 ranks. ISOGRAD_FULL_TESTS=1: 6 and 7 too.
TEST_F(Hybrid, LongAxesHaveOneProcesss) {
  struct Long {
    Cell cell;
    const char* name;
    int ranks;
    std::function<void(RunConfig&)> change;
  };
  const Cell plain, experts = plain.with(kModel, "experts"), zero3 = plain.with(kStrategy, "zero3");
  std::vector<Long> all;
  for (const int n : {5, 6, 7, 8}) {
    if (!full_tests() && (n == 6 || n == 7)) continue;
    all.push_back({n % 2 ? plain : experts, "pp", n, [n](RunConfig& c) { c.parallel.pp = n; }});
    all.push_back({n % 2 ? zero3 : experts.with(kStrategy, "zero1"), "dp_shard", n, [](RunConfig&) {}});
    all.push_back({n % 2 ? plain.with(kModel, "video") : zero3, "cp_ring", n,
                   [n](RunConfig& c) { c.parallel.cp_ring = n; }});
    all.push_back(
        {plain.with(kModel, n % 2 ? "biased" : "tied"), "tp", n, [n](RunConfig& c) { c.parallel.tp = n; }});
    all.push_back({n % 2 ? experts : plain.with(kModel, "sigmoid").with(kStrategy, "zero2"), "ep", n,
                   [n](RunConfig& c) { c.parallel.ep = n; }});
  }
  all.push_back({plain, "cp_ulysses", 8, [](RunConfig& c) { c.parallel.cp_ulysses = 8; }});
  Totals totals;
  for (const Long& each : all) {
    RunConfig config = config_for(each.cell);
    if (!each.cell.is(kModel, "video")) config.batch.packs_per_step = 9;
    each.change(config);
    config.model.shape.layers = std::max<std::int64_t>(config.model.shape.layers, config.parallel.pp);
    const Measured measured =
        measure(config, each.ranks, wanted_of(config), {.look_before = full_tests(), .repeat = full_tests()});
    totals.add(measured, each.name);
    EXPECT_EQ(wrong_with(measured), "") << each.name << " " << each.ranks;
  }
  std::printf("E1: %d long axes; worst gradient %.1e (%s), norm %.1e\n", totals.cells, totals.gradient,
              totals.worst.c_str(), totals.norm);
}

// Every value of every factor in bf16, where the bound is four times what one process is off by, the most of
// up to 16 draws (other values of the parameters, other micro-batches). With ISOGRAD_FULL_TESTS=1 every pair
// of them, and in fp32 too.
TEST_F(Hybrid, InLowerPrecisionNoWorseThanOneProcess) {
  std::vector<Cell> cells;
  for (const covering::Row& row : covering_rows(full_tests() ? 2 : 1).rows) {
    cells.push_back({row, "bfloat16"});
    if (full_tests()) cells.push_back({row, "float32"});
  }
  double worst = 0, most = 0;  // of what is allowed; of one process
  for (const Cell& cell : cells) {
    const Rounding rounding = rounding_of(config_for(cell), cell.ranks());
    EXPECT_THAT(rounding.outside, IsEmpty()) << cell.name();
    EXPECT_LT(rounding.assembled, kNorm) << cell.name();
    worst = std::max(worst, rounding.share), most = std::max(most, rounding.alone);
  }
  std::printf(
      "E2: %zu cells in lower precision; worst error %.2f of what is allowed, where one process is off by up "
      "to %.2f\n",
      cells.size(), worst, most);
}

// For each rule, cells that break it alone, by as few values as can be.
std::vector<Cell> breaking(const Rule& rule, std::size_t most) {
  std::vector<Cell> found;
  const auto breaks_alone = [&](const Cell& cell) {
    for (const Rule& other : rules())
      if (other.broken({cell.row}) != (&other == &rule)) return false;
    return true;
  };
  std::vector<Cell> begin;
  for (const char* model : {"dense", "experts", "video"}) begin.push_back(Cell{}.with(kModel, model));
  for (int changes = 1; changes <= 4 && found.size() < most; ++changes) {
    const std::function<void(const Cell&, std::size_t, int)> change = [&](const Cell& cell, std::size_t from,
                                                                          int left) {
      if (found.size() >= most) return;
      if (left == 0) {
        if (breaks_alone(cell)) found.push_back(cell);
        return;
      }
      for (std::size_t f = from; f < kFactors; ++f)
        for (std::size_t value = 1; value < factors()[f].values.size(); ++value) {
          Cell other = cell;
          if (other.row[f] == static_cast<int>(value)) continue;
          other.row[f] = static_cast<int>(value);
          change(other, f + 1, left - 1);
        }
    };
    for (const Cell& cell : begin) change(cell, 0, changes);
  }
  return found;
}

TEST_F(Hybrid, WhatDoesNotGoTogetherIsRefusedByName) {
  int refused = 0;
  for (const Rule& rule : rules()) {
    if (rule.refused.empty()) continue;
    const auto cells = breaking(rule, 6);
    EXPECT_THAT(cells, ::testing::Not(IsEmpty())) << rule.what;
    for (const Cell& cell : cells) {
      const std::string said = refusal_of(config_for(cell), cell.ranks());
      for (const char* part : rule.refused)
        EXPECT_THAT(said, HasSubstr(part)) << rule.what << ": " << cell.name();
      ++refused;
    }
  }
  std::printf("%d cells refused by name\n", refused);
}

}  // namespace
}  // namespace isograd::hybrid
