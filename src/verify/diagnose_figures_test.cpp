// What else of a step may be wrong where its gradient is right, and dumps that contradict themselves.
#include "verify/diagnosis_testing.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace isograd {
namespace {

using namespace diagnosis_test;

TEST(Diagnosis, Figures) {
  const auto norm_becomes = [](StepDump& found, double norm) {
    found.figures.norm = norm;
    for (auto& rank : found.ranks) rank.norm = norm;
  };
  EXPECT_EQ(with([](StepDump&, StepDump&) {}), "");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.figures.loss *= 3; }), "loss_scaled");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.figures.loss *= 1.1; }), "loss_differs");
  EXPECT_EQ(
      with([&](StepDump& found, StepDump&) { norm_becomes(found, found.figures.norm * std::sqrt(3.0)); }),
      "norm_counts_replicas");
  EXPECT_EQ(with([&](StepDump& found, StepDump&) {
              for (auto& rank : found.ranks) rank.norm = rank.owned_norm;
              found.figures.norm = found.ranks[0].norm;
            }),
            "norm_of_own_shard");
  EXPECT_EQ(with([&](StepDump& found, StepDump&) {
              double sum = 0;
              for (auto& rank : found.ranks) sum += rank.owned_norm;
              norm_becomes(found, sum / 3);
            }),
            "norms_averaged");
  EXPECT_EQ(with([&](StepDump& found, StepDump&) { norm_becomes(found, found.figures.norm * 1.1); }),
            "norm_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.owners[1] = {0, 1}; }), "elements_not_owned_once");
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              for (std::size_t i = 0; i < 3; ++i) found.applied[i].second = found.gradients[i].second.clone();
            }),
            "clip_not_applied");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.applied[1].second = found.applied[1].second * 2; }),
            "groups_clipped_apart");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.figures.clip_coefficient = 1; }), "clip_differs");
  // No clip makes longer, takes nothing away, or turns.
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              for (auto& [name, applied] : found.applied) applied = applied * 2;
            }),
            "optimizer_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.applied[1].second = found.applied[1].second * 8; }),
            "optimizer_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.applied[1].second = found.applied[1].second * 0; }),
            "optimizer_differs");
  EXPECT_EQ(
      with([](StepDump& found, StepDump&) { found.applied[1].second = found.applied[1].second.roll(1); }),
      "optimizer_differs");
  // Where no coefficient was recorded, what the reference takes away says what is right.
  const auto takes = [&](double times, double reference) {
    return with([=](StepDump& found, StepDump& expected) {
      found.figures.clip_coefficient = expected.figures.clip_coefficient = std::nan("");
      for (std::size_t i = 0; i < 3; ++i) {
        found.applied[i].second = found.gradients[i].second * times;
        expected.applied[i].second = expected.gradients[i].second * reference;
      }
    });
  };
  EXPECT_EQ(takes(0.5, 0.5), "");
  for (const double times : {3.0, 0.9, -1.0, 1 + 1e-7}) EXPECT_EQ(takes(times, 0.5), "optimizer_differs");
  // A turn by less than a thousandth, and of one parameter whose gradient is next to nothing.
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              at::Tensor& applied = found.applied[1].second;
              const at::Tensor turned = applied.roll(1);
              applied = applied + 9e-4 * turned * (applied.norm() / turned.norm());
            }),
            "optimizer_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              for (StepDump* dump : {&found, &expected}) {
                dump->gradients[2].second.mul_(1e-5);
                dump->applied[2].second = dump->gradients[2].second * kClip;
                dump->figures.norm = std::nan("");
                for (auto& rank : dump->ranks) rank.norm = rank.owned_norm = std::nan("");
              }
              found.applied[2].second = found.applied[2].second * -50;
            }),
            "optimizer_differs");
  // Against no reference at all: an update of plain SGD does not turn around, and takes no more than the
  // gradient.
  for (const double times : {-1.0, 3.0})
    EXPECT_EQ(with([=](StepDump& found, StepDump& expected) {
                found.figures.clip_coefficient = expected.figures.clip_coefficient = std::nan("");
                expected.applied.clear();
                for (std::size_t i = 0; i < 3; ++i)
                  found.applied[i].second = found.gradients[i].second * times;
              }),
              "optimizer_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              found.applied.clear();
              found.figures.clip_coefficient = 1.5, expected.figures.clip_coefficient = std::nan("");
            }),
            "clip_differs");
  // Terms, beside a loss that is right or was not recorded.
  const auto terms = [&](double cross_entropy, double balance, double loss) {
    return with([=](StepDump& found, StepDump& expected) {
      found.terms = {{"cross_entropy", cross_entropy}, {"balance", balance}, {"another", 7}};
      expected.terms = {{"cross_entropy", 1.5}, {"balance", 0.5}, {"recorded by none", std::nan("")}};
      found.figures.loss *= loss;
    });
  };
  EXPECT_EQ(terms(1.5, 0.5, 1), "");
  EXPECT_EQ(terms(0.1, 9.9, 1), "loss_differs");
  EXPECT_EQ(terms(1.5, 0.5 + 1e-8, std::nan("")), "loss_differs");
  EXPECT_EQ(terms(1.5, 0.5, 1.1), "loss_differs");
  // What the ranks say contradicts itself.
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.ranks[1].owned_norm = 1e9; }), "norm_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              found.owners.clear();
              found.ranks[1].owned_norm = found.figures.norm * 1.01;
            }),
            "norm_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              found.figures.norm = std::nan("");
              for (auto& rank : found.ranks) rank.norm = rank.owned_norm = std::nan("");
              found.owners[1] = {0, 1};
            }),
            "elements_not_owned_once");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.ranks[1].spread = 0.5; }), "replicas_differ");
  EXPECT_EQ(with([](StepDump& found, StepDump&) { found.counts[1][0] += 1; }), "other_targets");
  EXPECT_EQ(with([](StepDump&, StepDump& expected) { expected.counts[1][0] += 1; }), "other_targets");
  for (const char* key : {"norm", "owned_norm", "bytes_moved"})
    EXPECT_EQ(with([key](StepDump& found, StepDump&) {
                StepDump::RankView& rank = found.ranks[1];
                (*key == 'n'   ? rank.norm
                 : *key == 'o' ? rank.owned_norm
                               : rank.bytes_moved) = std::numeric_limits<double>::infinity();
              }),
              "not_finite")
        << key;
  // Rank 0 recorded no checksums, and those of the others differ.
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              found.ranks[1].gradients = {1, 2, 3};
              found.ranks[2].gradients = {1, 2, 4};
              found.ranks[2].spread = std::nan("");
            }),
            "replicas_differ");
  EXPECT_EQ(with([](StepDump& found, StepDump&) {
              found.ranks[1].initial = {1, 2, 3};
              found.ranks[2].initial = {1, 2, 4};
            }),
            "initial_parameters_differ");
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              expected.ranks[0].bytes_moved = 1000;
              found.ranks[0].bytes_moved = 2000;
            }),
            "reduced_every_micro_batch");
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              expected.ranks[0].bytes_moved = 1000;
              found.ranks[0].bytes_moved = 1500;
            }),
            "traffic_differs");
  // One process moves nothing, and asks for nothing.
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              expected.ranks[0].bytes_moved = 0;
              found.ranks[0].bytes_moved = 1500;
            }),
            "");
}

// Of two stages on two data ranks each: squares that are summed along one axis alone, and the mean of what
// comes of that.
TEST(Diagnosis, NormsOfPartsAlongOneAxis) {
  using Norms = std::vector<double>;
  const auto said_of = [](const std::function<Norms(const Norms& owned)>& norms) {
    ToyTrainer trainer{.counts = {{40, 10}, {30, 20}}, .axes = {{"pp", 2}, {"dp_shard", 2}}};
    trainer.change = [norms](RunPair& pair, const Experiment&) {
      Norms owned;
      for (const double share : {0.1, 0.2, 0.3, 0.4})
        owned.push_back(pair.expected.figures.norm * std::sqrt(share));
      const Norms found = norms(owned);
      pair.found.ranks.assign(4, {});
      for (std::size_t r = 0; r < 4; ++r)
        pair.found.ranks[r].owned_norm = owned[r], pair.found.ranks[r].norm = found[r];
      pair.found.figures.norm = found[0];
      pair.found.owners.assign(3, {1, 1});
    };
    return sentence_of(trainer.diagnosis());
  };
  const auto of_stages = [](const Norms& o) {
    const double first = std::hypot(o[0], o[1]), second = std::hypot(o[2], o[3]);
    return Norms{first, first, second, second};
  };
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  using ::testing::StartsWith;
  EXPECT_EQ(said_of([](const Norms& o) { return Norms(4, std::hypot(std::hypot(o[0], o[1], o[2]), o[3])); }),
            "");
  EXPECT_THAT(
      said_of([](const Norms& o) { return o; }),
      AllOf(StartsWith("norm_of_own_shard"), HasSubstr("each rank has the norm of the part it keeps")));
  EXPECT_THAT(said_of(of_stages),
              AllOf(StartsWith("norm_of_own_shard"), HasSubstr("squares are not summed over pp (2)")));
  EXPECT_THAT(said_of([](const Norms& o) {
                const double first = std::hypot(o[0], o[2]), second = std::hypot(o[1], o[3]);
                return Norms{first, second, first, second};
              }),
              AllOf(StartsWith("norm_of_own_shard"), HasSubstr("squares are not summed over dp_shard (2)")));
  EXPECT_THAT(said_of([&](const Norms& o) { return Norms(4, (of_stages(o)[0] + of_stages(o)[2]) / 2); }),
              AllOf(StartsWith("norms_averaged"), HasSubstr("the mean over pp (2) of the norms")));
  EXPECT_THAT(said_of([](const Norms& o) { return Norms(4, (o[0] + o[1] + o[2] + o[3]) / 4); }),
              AllOf(StartsWith("norms_averaged"), HasSubstr("the mean of the norms of the ranks' parts")));
  // Of no axis.
  EXPECT_THAT(said_of([&](const Norms& o) {
                const Norms of = of_stages(o);
                return Norms{of[0], of[2], of[2], of[0]};
              }),
              StartsWith("norm_differs"));
}

// Where nobody recorded a coefficient, all parameters are held to the one that the large ones show.
TEST(Diagnosis, WhatIsTooSmallForARatioOfItsOwnIsAppliedAsTheOthersAre) {
  const auto takes = [](double of_small) {
    return with([=](StepDump& found, StepDump& expected) {
      for (StepDump* dump : {&found, &expected}) {
        dump->gradients[2].second = dump->gradients[2].second * 1e-5;
        dump->figures.norm = dump->figures.clip_coefficient = NAN;
        for (auto& rank : dump->ranks) rank.norm = rank.owned_norm = NAN;
      }
      expected.applied.clear();
      for (std::size_t i = 0; i < 3; ++i)
        found.applied[i].second = found.gradients[i].second * (i == 2 ? of_small : 0.5);
    });
  };
  EXPECT_EQ(takes(0.5), "");
  EXPECT_EQ(takes(-50000), "optimizer_differs");
}

// A loss that cancels is known to the rounding of its terms, or of numbers of size 1.
TEST(Diagnosis, ALossThatCancels) {
  const auto losses = [](const char* precision, double own, double wanted, bool terms) {
    return with([=](StepDump& found, StepDump& expected) {
      found.figures.loss = own, expected.figures.loss = wanted;
      found.precision = precision;
      if (terms) found.terms = expected.terms = {{"a", 1.0}, {"b", -1.0}};
    });
  };
  EXPECT_EQ(losses("fp64", 3e-16, 0, false), "");
  EXPECT_EQ(losses("fp32", 1e-9, 0, false), "");
  EXPECT_EQ(losses("fp32", 9e-7, 0, false), "");
  EXPECT_EQ(losses("fp32", 1e-6, 0, false), "loss_differs");  // 16 u are 9.5e-7
  EXPECT_EQ(losses("fp64", 1e-14, 0, false), "loss_differs");
  EXPECT_EQ(losses("fp32", 9e-7, 0, true), "");
  EXPECT_EQ(losses("fp32", 1e-6, 0, true), "loss_differs");
  EXPECT_EQ(losses("fp32", 5.001, 5, true), "loss_differs");
}

// A dump that contradicts itself is no right step, and no reference.
TEST(Diagnosis, DumpsThatContradictThemselves) {
  for (const bool theirs : {false, true}) {
    const auto in = [theirs](const std::function<void(StepDump&)>& change,
                             std::vector<std::string>* notices = nullptr) {
      return with(
          [&](StepDump& found, StepDump& expected) {
            StepDump& one = theirs ? expected : found;
            if (theirs) expected.ranks = found.ranks, expected.owners = found.owners;
            StepDump& other = theirs ? found : expected;
            other.figures.norm = NAN;  // nothing to compare with on the other side
            for (auto& rank : other.ranks) rank.norm = rank.owned_norm = NAN;
            change(one);
          },
          notices);
    };
    SCOPED_TRACE(theirs ? "reference" : "run");
    EXPECT_EQ(in([](StepDump&) {}), "");
    EXPECT_EQ(in([](StepDump& dump) { dump.figures.norm *= 1 + 2e-9; }), "norm_differs");
    EXPECT_EQ(in([](StepDump& dump) { dump.ranks[1].norm *= 1 + 2e-9; }), "norm_differs");
    EXPECT_EQ(in([](StepDump& dump) { dump.ranks[2].spread = 0.5; }), "replicas_differ");
    EXPECT_EQ(in([](StepDump& dump) {
                for (std::uint64_t r = 0; r < 3; ++r) dump.ranks[r].gradients = {1, 2, 3 + r / 2};
              }),
              "sum_order_depends_on_rank");
    EXPECT_EQ(in([](StepDump& dump) { dump.owners[1] = {0, 1}; }), "elements_not_owned_once");
    EXPECT_EQ(in([](StepDump& dump) {
                dump.owners.clear();
                for (auto& rank : dump.ranks) rank.owned_norm *= 0.9;
              }),
              "norm_differs");
    EXPECT_EQ(in([](StepDump& dump) {
                dump.owners.clear();  // each element may count on several ranks
                for (auto& rank : dump.ranks) rank.owned_norm *= 1.2;
              }),
              "");
    EXPECT_EQ(in([](StepDump& dump) { dump.figures.tokens = dump.figures.targets - 1; }), "other_targets");
    // Shares, which the toy's gradient is made of.
    const auto shares = [](StepDump& dump) {
      dump.shares.resize(dump.counts.size());
      for (std::size_t k = 0; k < dump.counts.size(); ++k)
        for (const auto count : dump.counts[k]) {
          dump.shares[k].emplace_back();
          for (const auto& [name, gradient] : dump.gradients)
            dump.shares[k].back().emplace_back(name, gradient * (static_cast<double>(count) / 105));
        }
    };
    EXPECT_EQ(in(shares), "");
    for (const double wrong : {1.001, std::nan("")})
      EXPECT_EQ(in([&](StepDump& dump) {
                  shares(dump);
                  dump.shares[2][1][0].second = dump.shares[2][1][0].second * wrong;
                }),
                "shares_differ")
          << wrong;
    std::vector<std::string> notices;
    EXPECT_EQ(in(
                  [&](StepDump& dump) {
                    shares(dump);
                    dump.shares[0][1].clear();
                  },
                  &notices),
              "");
    ASSERT_EQ(notices.size(), 1u);
    EXPECT_NE(notices[0].find("1 micro-batches with targets have none"), std::string::npos) << notices[0];
  }
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              for (StepDump* dump : {&found, &expected}) {
                dump->figures.norm = 5;
                for (auto& rank : dump->ranks) rank.norm = 5;
              }
            }),
            "norm_differs");
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              for (StepDump* dump : {&found, &expected}) dump->figures.targets = 0, dump->counts.clear();
            }),
            "other_targets other_targets");
  EXPECT_EQ(with([](StepDump& found, StepDump& expected) {
              for (StepDump* dump : {&found, &expected}) dump->applied.clear();
              found.figures.clip_coefficient = NAN, expected.figures.clip_coefficient = 2;
            }),
            "clip_differs");
}

// Checksums of the start are those of parameters, wherever they stand, and of one precision.
TEST(Diagnosis, StartsAreAlignedByName) {
  const auto starts = [](const char* precision, std::vector<std::uint64_t> own,
                         std::vector<std::uint64_t> theirs) {
    return with([=](StepDump& found, StepDump& expected) {
      found.precision = precision;
      for (auto& rank : found.ranks) rank.initial = own;
      expected.ranks[0].initial = theirs;
      std::reverse(expected.gradients.begin(), expected.gradients.end());
    });
  };
  EXPECT_EQ(starts("fp64", {1, 2, 3}, {3, 2, 1}), "");
  EXPECT_EQ(starts("fp64", {1, 2, 3}, {1, 2, 3}), "initial_parameters_differ");
  EXPECT_EQ(starts("fp32", {1, 2, 3}, {7, 8, 9}), "");
  EXPECT_EQ(with([](StepDump&, StepDump& expected) {
              expected.ranks.resize(2);
              expected.ranks[0].initial = {1, 2, 3}, expected.ranks[1].initial = {1, 2, 4};
            }),
            "initial_parameters_differ");
}

}  // namespace
}  // namespace isograd
