// The pairwise cells of the sweep find what is planted in them: a table of mistakes, each with the cell that
// finds it first and how many of those that it is in do.
#include <gtest/gtest.h>

#include "full_tests.hpp"
#include "hybrid_mutants.hpp"
#include "hybrid_testing.hpp"

namespace isograd::hybrid {
namespace {

class HybridMutants : public HybridCells {};

// As the sweep judges a cell; empty: nothing is seen.
std::string seen(const RunConfig& config, int ranks, const Wanted& wanted, const Mutant& mutant) {
  try {
    const Measured found =
        measure(config, ranks, wanted, {.planted = mutant.planted, .look_before = false, .repeat = false});
    if (!(found.gradient < 1e-10)) return fmt::format("gradient {:.0e} ({})", found.gradient, found.worst);
    if (!(found.loss < 1e-10)) return fmt::format("loss {:.0e}", found.loss);
    if (!(found.assembled < 1e-12)) return fmt::format("norm {:.0e}", found.assembled);
    if (!found.same_norm) return "norm, other bits";
    return {};
  } catch (const std::exception& error) {
    return fmt::format("refused: {}", std::string(error.what()).substr(0, 60));
  }
}

// Every mutant is tried in the cells that it is in, from the smallest mesh on, until one finds it; with
// ISOGRAD_FULL_TESTS=1 in all of them.
TEST_F(HybridMutants, AreSeenByThePairwiseCells) {
  std::vector<Cell> cells = pairwise_cells();
  std::stable_sort(cells.begin(), cells.end(),
                   [](const Cell& a, const Cell& b) { return a.ranks() < b.ranks(); });
  const std::vector<Mutant> all = mutants();
  EXPECT_GE(all.size(), 40u);
  int caught = 0;
  for (const Mutant& mutant : all) {
    int in = 0, tried = 0, found = 0;
    std::string first, where;
    for (const Cell& cell : cells) {
      if (!mutant.exists(cell)) continue;
      ++in;
      if (found > 0 && !full_tests()) continue;
      ++tried;
      const std::string what = seen(config_for(cell), cell.ranks(), wanted(cell), mutant);
      if (what.empty()) continue;
      if (++found == 1) first = what, where = cell.name();
    }
    EXPECT_GT(in, 0) << mutant.what << ": in no cell";
    EXPECT_GT(found, 0) << mutant.kind << ": " << mutant.what;
    caught += found > 0;
    std::printf("%-9s | %-58s | %3d cells, %d of %d tried | %-44s | %s\n", mutant.kind.c_str(),
                mutant.what.c_str(), in, found, tried, first.c_str(), where.c_str());
    std::fflush(stdout);
  }
  std::printf("%d of %zu mistakes seen\n", caught, all.size());
}

}  // namespace
}  // namespace isograd::hybrid
