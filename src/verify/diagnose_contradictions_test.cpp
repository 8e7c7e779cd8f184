// Updates beside the gradient of the same dump: what contradicts it, and what does not.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "verify/diagnosis_testing.hpp"

namespace isograd {
namespace {

using namespace diagnosis_test;

// An update is held to the gradient of its own dump, on either side, and the side is named.
TEST(Diagnosis, UpdatesThatContradictTheirOwnGradient) {
  using Change = std::function<void(StepDump&)>;
  const auto times = [](std::size_t first, std::size_t end, double factor) {
    return [=](StepDump& dump) {
      for (std::size_t i = first; i < end; ++i) dump.applied[i].second = dump.applied[i].second * factor;
    };
  };
  const std::vector<std::pair<const char*, Change>> wrong = {
      {"optimizer_differs", times(0, 3, 3)},
      {"optimizer_differs", times(0, 3, -1)},
      {"optimizer_differs", times(1, 2, -1)},
      {"optimizer_differs", times(1, 2, 0)},
      {"clip_not_applied", times(0, 3, 4)},
      {"groups_clipped_apart", times(1, 2, 2)},
      {"optimizer_differs",
       [](StepDump& dump) { std::swap(dump.applied[0].second, dump.applied[1].second); }}};
  const auto said = [](const std::function<void(StepDump&, StepDump&)>& change,
                       std::vector<std::string>* notices = nullptr) {
    return sentence_of(findings_with(change, notices));
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != text.npos; };
  for (const auto& [id, change] : wrong) {
    // The run says nothing of its update; says a right one; says the same.
    EXPECT_EQ(with([&](StepDump& run, StepDump& one) { change(one), run.applied.clear(); }), id);
    EXPECT_EQ(with([&](StepDump&, StepDump& one) { change(one); }), id);
    EXPECT_TRUE(
        has(said([&](StepDump&, StepDump& one) { change(one); }), "the reference contradicts itself"));
    const auto both = said([&](StepDump& run, StepDump& one) { change(one), change(run); });
    EXPECT_TRUE(both.starts_with(std::string(id) + " " + id) && has(both, "the reference contradicts"))
        << both;
  }
  // Where no coefficient is recorded, no clip turns around or makes longer.
  for (const double factor : {-1.0, 8.0}) {
    const auto both = said([&](StepDump& run, StepDump& one) {
      for (StepDump* dump : {&run, &one}) dump->figures.clip_coefficient = NAN, times(1, 2, factor)(*dump);
    });
    EXPECT_TRUE(both.starts_with("optimizer_differs optimizer_differs")) << both;
    EXPECT_TRUE(has(both, "the reference contradicts") && has(both, "the run contradicts")) << both;
  }
  // Right ones: weight decay of some parameters that both have, each group clipped by itself where nobody
  // says otherwise, a reference alone.
  const auto decayed = [](StepDump& dump, std::size_t end = 2) {
    for (std::size_t i = 0; i < end; ++i)
      dump.applied[i].second = dump.applied[i].second + random_gradient(70 + i);
  };
  for (const std::size_t end : {2, 3})
    for (const double coefficient : {kClip, double{NAN}}) {
      std::vector<std::string> notices;
      EXPECT_EQ(said(
                    [&](StepDump& run, StepDump& one) {
                      run.figures.clip_coefficient = one.figures.clip_coefficient = coefficient;
                      decayed(run, end), decayed(one, end);
                    },
                    &notices),
                "");
      ASSERT_EQ(notices.size(), 1u);
      EXPECT_TRUE(has(notices[0], "weight decay")) << notices[0];
    }
  EXPECT_EQ(with([&](StepDump& run, StepDump& one) {
              for (StepDump* dump : {&run, &one}) dump->figures.clip_coefficient = NAN, times(1, 2, 2)(*dump);
            }),
            "");
  EXPECT_EQ(with([](StepDump& run, StepDump&) { run.applied.clear(); }), "");
  // A run that forgot the decay: that is no contradiction.
  const auto forgot = said([&](StepDump&, StepDump& one) { decayed(one); });
  EXPECT_TRUE(has(forgot, "optimizer_differs") && !has(forgot, "contradicts")) << forgot;
}

}  // namespace
}  // namespace isograd
