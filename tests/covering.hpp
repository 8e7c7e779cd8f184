// Covering arrays: few rows in which every combination of values of any `strength` factors stands that an
// admissible row has. Greedy (Cohen et al. 1997, "The AETG system"): each row begins with a combination that
// is missing, and takes of its further values those that add most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "isograd/random.hpp"

namespace isograd::covering {

struct Factor {
  std::string name;
  std::vector<std::string> values;
};

// By factor a place in its values; -1: not said yet.
using Row = std::vector<int>;
// Whether the values said so far may stand in one row. Once false it stays so, whatever is said besides.
using Possible = std::function<bool(const Row&)>;

struct Array {
  std::vector<Row> rows;
  std::int64_t covered = 0, impossible = 0;  // combinations
};

class Search {
 public:
  Search(std::vector<int> sizes, int strength, Possible possible, std::uint64_t seed)
      : sizes_(std::move(sizes)), possible_(std::move(possible)), seed_(seed), of_factor_(sizes_.size()) {
    Combination of{};
    choose(0, strength, of);
  }

  // The same rows for the same seed.
  Array run() {
    Array array;
    for (Combination& of : combinations_)
      for (std::size_t t = 0; t < of.states.size(); ++t) {
        if (of.states[t] != State::kMissing) continue;
        Row best;
        std::int64_t most = -1;
        for (int attempt = 0; attempt < kAttempts; ++attempt) {
          Row row = beginning(of, t);
          if (!possible_(row) || !complete(row, 0)) break;  // a search through everything: it cannot be
          if (const std::int64_t adds = missing_in(row); adds > most) most = adds, best = row;
        }
        if (best.empty()) {
          of.states[t] = State::kImpossible;
          ++array.impossible;
          continue;
        }
        array.covered += cover(best);
        array.rows.push_back(best);
      }
    return array;
  }

 private:
  enum class State : char { kMissing, kCovered, kImpossible };
  struct Combination {
    std::vector<std::size_t> factors{};  // ascending
    std::vector<State> states{};         // by the values of these, the last one changing fastest
  };
  static constexpr int kAttempts = 6;

  void choose(std::size_t from, int left, Combination& of) {
    if (left == 0) {
      std::size_t states = 1;
      for (const std::size_t f : of.factors) {
        states *= static_cast<std::size_t>(sizes_[f]);
        of_factor_[f].push_back(combinations_.size());
      }
      combinations_.push_back({of.factors, std::vector<State>(states, State::kMissing)});
      return;
    }
    for (std::size_t f = from; f < sizes_.size(); ++f) {
      of.factors.push_back(f);
      choose(f + 1, left - 1, of);
      of.factors.pop_back();
    }
  }

  Row beginning(const Combination& of, std::size_t t) const {
    Row row(sizes_.size(), -1);
    for (std::size_t i = of.factors.size(); i-- > 0;) {
      const auto size = static_cast<std::size_t>(sizes_[of.factors[i]]);
      row[of.factors[i]] = static_cast<int>(t % size);
      t /= size;
    }
    return row;
  }

  // Where in `states` the row's values lie; -1: one of them is not said.
  std::int64_t place(const Combination& of, const Row& row) const {
    std::int64_t t = 0;
    for (const std::size_t f : of.factors) {
      if (row[f] < 0) return -1;
      t = t * sizes_[f] + row[f];
    }
    return t;
  }

  // Missing combinations that hold factor f, of what is said.
  std::int64_t adds(const Row& row, std::size_t f) const {
    std::int64_t sum = 0;
    for (const std::size_t c : of_factor_[f]) {
      const std::int64_t t = place(combinations_[c], row);
      sum += t >= 0 && combinations_[c].states[static_cast<std::size_t>(t)] == State::kMissing;
    }
    return sum;
  }

  std::int64_t missing_in(const Row& row) const {
    std::int64_t sum = 0;
    for (const Combination& of : combinations_)
      sum += of.states[static_cast<std::size_t>(place(of, row))] == State::kMissing;
    return sum;
  }

  std::int64_t cover(const Row& row) {
    std::int64_t sum = 0;
    for (Combination& of : combinations_) {
      State& state = of.states[static_cast<std::size_t>(place(of, row))];
      sum += state == State::kMissing;
      state = State::kCovered;
    }
    return sum;
  }

  // The factors from `f` on, in their order, so that those which restrict others most come first. False:
  // there is no such row. Of values that add equally much one is drawn; of those that add nothing, the first.
  bool complete(Row& row, std::size_t f) {
    while (f < row.size() && row[f] >= 0) ++f;
    if (f == row.size()) return true;
    struct Value {
      std::int64_t adds;
      std::uint64_t draw;
      int value;
    };
    std::vector<Value> values;
    for (int value = 0; value < sizes_[f]; ++value) {
      row[f] = value;
      const std::int64_t sum = adds(row, f);
      values.push_back({sum, sum > 0 ? random_bits({.seed = seed_}, drawn_++) : ~std::uint64_t{0}, value});
    }
    std::stable_sort(values.begin(), values.end(), [](const Value& a, const Value& b) {
      return std::pair(-a.adds, a.draw) < std::pair(-b.adds, b.draw);
    });
    for (const Value& each : values) {
      row[f] = each.value;
      if (possible_(row) && complete(row, f + 1)) return true;
    }
    row[f] = -1;
    return false;
  }

  std::vector<int> sizes_;
  Possible possible_;
  std::uint64_t seed_, drawn_ = 0;
  std::vector<Combination> combinations_{};
  std::vector<std::vector<std::size_t>> of_factor_;  // combinations that hold it
};

inline Array cover(const std::vector<Factor>& factors, int strength, const Possible& possible,
                   std::uint64_t seed) {
  std::vector<int> sizes;
  for (const Factor& factor : factors) sizes.push_back(static_cast<int>(factor.values.size()));
  return Search(std::move(sizes), strength, possible, seed).run();
}

}  // namespace isograd::covering
