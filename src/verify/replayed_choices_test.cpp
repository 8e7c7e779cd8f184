// How far scores are from choosing otherwise.
#include "verify/replayed_choices.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "model/experts.hpp"

namespace isograd {
namespace {

struct RoutingCase {
  std::int64_t experts, each, groups, of_groups;
};
constexpr RoutingCase kCases[] = {{5, 2, 1, 1}, {8, 1, 1, 1}, {8, 3, 4, 2}, {12, 4, 3, 2}, {6, 3, 3, 3}};

std::vector<std::int64_t> best_of(const std::vector<double>& scores, const RoutingCase& of) {
  // Sigmoids keep the order; a bias of what they leave makes them these scores.
  const at::Tensor bias = at::tensor(scores, at::kDouble) - 0.5;
  const Routing routing = route(at::zeros({1, of.experts}, at::kDouble),
                                {.count = of.experts,
                                 .per_token = of.each,
                                 .sigmoid = true,
                                 .groups = of.groups,
                                 .groups_per_token = of.of_groups},
                                bias);
  std::vector<std::int64_t> chosen(routing.chosen.const_data_ptr<std::int64_t>(),
                                   routing.chosen.const_data_ptr<std::int64_t>() + of.each);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

TEST(ReplayedChoices, NoSmallerErrorOfScoresExplainsAnotherChoice) {
  std::mt19937_64 random(20261125);
  std::uniform_real_distribution<double> uniform(0, 1);
  int others = 0;
  for (const RoutingCase& of : kCases)
    for (int round = 0; round < 200; ++round) {
      const ExpertScores kind{.values = {}, .groups = of.groups, .groups_per_token = of.of_groups};
      const auto scores_of = [&](double center, double width) {
        std::vector<double> scores(static_cast<std::size_t>(of.experts));
        for (double& score : scores) score = center + width * (uniform(random) - 0.5);
        return scores;
      };
      const auto scores = scores_of(0.5, 0.2);
      const auto own = best_of(scores, of);
      EXPECT_EQ(apart_from_best(scores.data(), of.experts, kind, own), 0);
      const auto wanted = best_of(scores_of(0.5, 0.2), of);  // any other choice that scores can make
      const double apart = apart_from_best(scores.data(), of.experts, kind, wanted);
      EXPECT_EQ(apart > 0, wanted != own);
      if (wanted == own) continue;
      ++others;
      // Every score may be off by half of it: by less, nothing chooses so.
      for (int attempt = 0; attempt < 50; ++attempt) {
        auto moved = scores;
        for (std::size_t e = 0; e < moved.size(); ++e) {
          const bool taken = std::binary_search(wanted.begin(), wanted.end(), static_cast<std::int64_t>(e));
          const double part = attempt == 0 ? 1 : uniform(random);
          moved[e] += (taken ? part : -part) * 0.499 * apart;
        }
        EXPECT_NE(best_of(moved, of), wanted) << of.experts << ", " << of.groups;
      }
      if (of.groups > 1) continue;
      auto moved = scores;  // by a little more, the right errors do
      for (std::size_t e = 0; e < moved.size(); ++e)
        moved[e] +=
            (std::binary_search(wanted.begin(), wanted.end(), static_cast<std::int64_t>(e)) ? 0.501
                                                                                            : -0.501) *
            apart;
      EXPECT_EQ(best_of(moved, of), wanted);
    }
  EXPECT_GT(others, 500);
}

TEST(ReplayedChoices, ExpertsOfMoreGroupsThanATokenHasAreNeverTheBest) {
  const std::vector<double> scores{0.9, 0.1, 0.8, 0.2, 0.7, 0.3};
  const ExpertScores kind{.values = {}, .groups = 3, .groups_per_token = 2};
  EXPECT_EQ(apart_from_best(scores.data(), 6, kind, {0, 2, 4}), HUGE_VAL);
  EXPECT_EQ(apart_from_best(scores.data(), 6, kind, {0, 2, 3}), 0);
}

}  // namespace
}  // namespace isograd
