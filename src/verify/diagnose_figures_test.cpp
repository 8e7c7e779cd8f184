// What else of a step may be wrong where its gradient is right, and dumps that contradict themselves.
#include "verify/diagnosis_testing.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace isograd {
namespace {

using namespace diagnosis_test;

TEST(Diagnosis, Figures) {
  const auto with = [](std::function<void(StepDump&, StepDump&)> change) {
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
    const auto findings = trainer.diagnosis();
    return findings.empty() ? std::string() : ids(findings);
  };
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
}

}  // namespace
}  // namespace isograd
