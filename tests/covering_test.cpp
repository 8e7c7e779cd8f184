// The generator of the sweep's cells: complete, admissible and the same for a seed, by systems of factors
// that are small enough to look at every row.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "covering.hpp"

namespace isograd::covering {
namespace {

struct System {
  std::vector<Factor> factors;
  std::vector<std::pair<std::pair<int, int>, std::pair<int, int>>>
      apart;     // (factor, value) never with the other
  int most = 0;  // of the sum of all values

  bool possible(const Row& row) const {
    const auto has = [&](const std::pair<int, int>& one) {
      return row[static_cast<std::size_t>(one.first)] == one.second;
    };
    for (const auto& [one, other] : apart)
      if (has(one) && has(other)) return false;
    int sum = 0;
    for (const int value : row) sum += std::max(value, 0);
    return sum <= most;
  }
  std::vector<Row> all() const {
    std::vector<Row> rows{Row{}};
    for (const Factor& factor : factors) {
      std::vector<Row> longer;
      for (const Row& row : rows)
        for (std::size_t value = 0; value < factor.values.size(); ++value) {
          longer.push_back(row);
          longer.back().push_back(static_cast<int>(value));
        }
      rows = std::move(longer);
    }
    std::erase_if(rows, [&](const Row& row) { return !possible(row); });
    return rows;
  }
};

System drawn() {
  System system;
  const int factors = *rc::gen::inRange(3, 7);
  for (int f = 0; f < factors; ++f)
    system.factors.push_back(
        {std::to_string(f), std::vector<std::string>(static_cast<std::size_t>(*rc::gen::inRange(1, 5)))});
  const auto drawn_value = [&] {
    const int factor = *rc::gen::inRange(0, factors);
    return std::pair(
        factor, *rc::gen::inRange(
                    0, static_cast<int>(system.factors[static_cast<std::size_t>(factor)].values.size())));
  };
  const int pairs = *rc::gen::inRange(0, 7);
  for (int i = 0; i < pairs; ++i) system.apart.emplace_back(drawn_value(), drawn_value());
  system.most = *rc::gen::inRange(2, 3 * factors);
  return system;
}

// Values of the chosen factors.
std::set<std::vector<std::pair<int, int>>> combinations(const std::vector<Row>& rows, int strength) {
  std::set<std::vector<std::pair<int, int>>> found;
  for (const Row& row : rows)
    for (std::uint32_t chosen = 0; chosen < (1u << row.size()); ++chosen) {
      if (__builtin_popcount(chosen) != strength) continue;
      std::vector<std::pair<int, int>> values;
      for (std::size_t f = 0; f < row.size(); ++f)
        if (chosen >> f & 1) values.emplace_back(static_cast<int>(f), row[f]);
      found.insert(std::move(values));
    }
  return found;
}

RC_GTEST_PROP(Covering, HasWhateverAnAdmissibleRowHas, ()) {
  const System system = drawn();
  const int strength = *rc::gen::inRange(1, 4);
  const auto possible = [&](const Row& row) { return system.possible(row); };
  const Array found = cover(system.factors, strength, possible, 7);
  for (const Row& row : found.rows) RC_ASSERT(system.possible(row));
  const auto wanted = combinations(system.all(), strength), had = combinations(found.rows, strength);
  RC_ASSERT(had == wanted);
  RC_ASSERT(found.covered == static_cast<std::int64_t>(wanted.size()));
  RC_ASSERT(cover(system.factors, strength, possible, 7).rows == found.rows);
  RC_ASSERT(found.rows.size() <= wanted.size());
}

TEST(Covering, TakesFewRows) {
  const std::vector<Factor> factors(10, {"of four", {"a", "b", "c", "d"}});
  const auto all = [](const Row&) { return true; };
  EXPECT_LE(cover(factors, 2, all, 1).rows.size(), 40u);   // 16 at the least
  EXPECT_LE(cover(factors, 3, all, 1).rows.size(), 200u);  // 64 at the least
  EXPECT_NE(cover(factors, 2, all, 1).rows, cover(factors, 2, all, 2).rows);
}

}  // namespace
}  // namespace isograd::covering
