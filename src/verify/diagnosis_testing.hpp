// For tests of diagnoses: gradients put together from parts whose weights are known.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "verify/diagnosis.hpp"

namespace isograd::diagnosis_test {

inline at::Tensor random_gradient(std::uint64_t seed, std::int64_t numel = 50) {
  return at::randn({numel}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}

inline constexpr double kClip = 0.25;  // of the dumps that say nothing else

// A trainer whose gradient is Σ over ranks k and micro-batches j of weight(k, j) / N · (sum of n_kj tokens),
// on parameters a, b and c.
struct ToyTrainer {
  using Counts = std::vector<std::vector<std::int64_t>>;
  Counts counts = {{40, 10}, {5}, {30, 20}};
  std::function<double(const Counts&, std::size_t k, std::size_t j)> weight = [](const Counts&, std::size_t,
                                                                                 std::size_t) { return 1.0; };
  std::function<double(std::size_t home)> of_data = [](std::size_t) { return 1.0; };  // by whose data it was
  using Axes = std::vector<Axis>;
  std::function<double(const Axes&)> of_axes = [](const Axes&) { return 1.0; };
  double loss_ratio = 1;
  Axes axes = {{"dp_shard", 3}};
  std::function<void(RunPair&, const Experiment&)> change = [](RunPair&, const Experiment&) {};
  std::vector<std::string>* made = nullptr;  // experiments, in order

  static double all(const Counts& counts) {
    double sum = 0;
    for (const auto& rank : counts)
      for (auto count : rank) sum += static_cast<double>(count);
    return sum;
  }
  static double of(const std::vector<std::int64_t>& rank) {
    double sum = 0;
    for (auto count : rank) sum += static_cast<double>(count);
    return sum;
  }

  std::optional<RunPair> run(const Experiment& experiment) const {
    if (made) made->push_back(experiment.text());
    if (experiment.without_noise || experiment.without_resume || experiment.ranks > 0) return std::nullopt;
    Counts now = counts;
    std::vector<std::size_t> home(now.size());
    std::iota(home.begin(), home.end(), std::size_t{0});
    if (experiment.swapped[0] >= 0) {
      const auto a = static_cast<std::size_t>(experiment.swapped[0]);
      const auto b = static_cast<std::size_t>(experiment.swapped[1]);
      std::swap(home[a], home[b]);
      std::swap(now[a], now[b]);
    }
    for (std::size_t k = 0; k < now.size(); ++k) {
      if (experiment.counts == Experiment::Counts::kEqual)
        for (auto& count : now[k]) count = count > 0 ? 5 : 0;
      if (experiment.counts == Experiment::Counts::kUneven)
        for (std::size_t j = 0; j < now[k].size(); ++j)
          now[k][j] = now[k][j] ? 1 + (now[k][j] * static_cast<std::int64_t>(k + 2 * j)) % 11 : 0;
      if (static_cast<int>(k) == experiment.empty_rank)
        for (auto& count : now[k]) count = 0;
      if (experiment.one_micro_batch) now[k] = {static_cast<std::int64_t>(of(now[k]))};
      if (experiment.only_rank >= 0)
        for (std::size_t j = 0; j < now[k].size(); ++j)
          if (static_cast<int>(k) != experiment.only_rank ||
              (experiment.only_micro_batch >= 0 && static_cast<int>(j) != experiment.only_micro_batch))
            now[k][j] = 0;
    }
    Axes along = axes;
    if (experiment.only_axis >= 0) {
      int ranks = 1;
      for (auto& [name, size] : along) {
        ranks *= size;
        size = 1;
      }
      along.at(static_cast<std::size_t>(experiment.only_axis)).size = ranks;
    }
    RunPair pair;
    const double total = all(now);
    for (std::uint64_t p = 0; p < 3; ++p) {
      at::Tensor found = at::zeros({50}, at::kDouble), expected = at::zeros({50}, at::kDouble);
      for (std::size_t k = 0; k < now.size(); ++k)
        for (std::size_t j = 0; j < now[k].size(); ++j) {
          if (now[k][j] == 0) continue;
          const auto part =
              random_gradient(100 * p + 10 * home[k] + j) * static_cast<double>(now[k][j]) / total;
          expected += part;
          found += part * weight(now, k, j) * of_data(home[k]) * of_axes(along);
        }
      const std::string name(1, static_cast<char>('a' + p));
      pair.found.gradients.emplace_back(name, found);
      pair.expected.gradients.emplace_back(name, expected);
    }
    double squares = 0;
    for (const auto& [name, gradient] : pair.expected.gradients)
      squares += gradient.square().sum().template item<double>();
    pair.expected.figures = {5, static_cast<std::int64_t>(total), 2 * static_cast<std::int64_t>(total),
                             std::sqrt(squares), kClip};
    pair.found.figures = pair.expected.figures;
    pair.found.figures.loss *= loss_ratio;
    for (StepDump* dump : {&pair.found, &pair.expected}) {
      dump->counts = now;
      dump->axes = along;
      dump->precision = "fp64";
    }
    change(pair, experiment);
    return pair;
  }
  std::vector<Finding> diagnosis(bool again = true) const {
    return diagnose(*run({}), again ? RunAgain([this](const Experiment& e) { return run(e); }) : RunAgain());
  }
};

inline std::string ids(const std::vector<Finding>& findings) {
  std::string text;
  for (const auto& finding : findings) text += (text.empty() ? "" : " ") + finding.id;
  return text;
}

// Ids, sentences and evidence.
inline std::string sentence_of(const std::vector<Finding>& findings) {
  std::string text = ids(findings);
  for (const auto& finding : findings) {
    text += "\n" + finding.sentence;
    for (const auto& line : finding.evidence) text += "\n  " + line;
  }
  return text;
}

// What is said of a right gradient, whose figures are all there, after `change`.
inline std::vector<Finding> findings_with(const std::function<void(StepDump&, StepDump&)>& change,
                                          std::vector<std::string>* notices = nullptr) {
  ToyTrainer trainer;
  trainer.change = [change](RunPair& pair, const Experiment&) {
    double squares = 0;
    for (auto& [name, gradient] : pair.expected.gradients) {
      squares += gradient.square().sum().template item<double>();
      pair.expected.applied.emplace_back(name, gradient * kClip);
    }
    pair.found.applied = pair.expected.applied;
    pair.expected.figures.norm = pair.found.figures.norm = std::sqrt(squares);
    pair.expected.ranks.assign(1, {});
    pair.found.ranks.assign(3, {});
    for (std::size_t r = 0; r < 3; ++r) {
      pair.found.ranks[r].owned_norm = std::sqrt(squares * (r == 0 ? 0.5 : 0.25));
      pair.found.ranks[r].norm = pair.found.figures.norm;
    }
    pair.found.owners.assign(3, {1, 1});
    change(pair.found, pair.expected);
  };
  const auto again = [&](const Experiment& experiment) { return trainer.run(experiment); };
  return diagnose(*trainer.run({}), again, notices);
}
inline std::string with(const std::function<void(StepDump&, StepDump&)>& change,
                        std::vector<std::string>* notices = nullptr) {
  return ids(findings_with(change, notices));
}

}  // namespace isograd::diagnosis_test
