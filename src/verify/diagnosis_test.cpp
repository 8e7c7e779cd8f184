#include "verify/diagnosis.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "verify/compare.hpp"
#include "verify/statements.hpp"

namespace isograd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

at::Tensor random_gradient(std::uint64_t seed) {
  return at::randn({50}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}

// A verdict over parameters a, b, c whose gradients a fault changed.
struct Case {
  std::vector<at::Tensor> reference{random_gradient(1), random_gradient(2), random_gradient(3)};
  std::vector<at::Tensor> found = reference;
  StepFigures oracle{.loss = 5, .targets = 90, .tokens = 100, .norm = 2, .clip_coefficient = 0.5};
  StepFigures figures = oracle;

  LayoutVerdict layout() const {
    LayoutVerdict layout;
    const auto scales = error_scales(reference);
    for (std::size_t i = 0; i < reference.size(); ++i) {
      ParameterVerdict parameter;
      parameter.name = std::string(1, static_cast<char>('a' + i));
      parameter.elements = 50;
      parameter.norm = reference[i].norm().item<double>();
      parameter.exact = compare_exact(found[i], reference[i], scales[i], Bounds{});
      layout.parameters.push_back(parameter);
    }
    layout.exact = figures;
    grade(layout, oracle, "fp64", true, Bounds{});
    return layout;
  }
  std::vector<std::string> diagnosis(int ranks = 4) const { return diagnose(layout(), oracle, ranks); }
};

TEST(Diagnosis, SaysNothingWhenAllIsWell) {
  EXPECT_THAT(Case().diagnosis(), IsEmpty());
}

TEST(Diagnosis, OneRatioForAll) {
  Case c;
  for (auto& gradient : c.found) gradient = gradient / 4;
  EXPECT_THAT(c.diagnosis(4), ElementsAre("all parameters scaled by 1/4 (the layout has 4 ranks)"));
  EXPECT_THAT(c.diagnosis(3), ElementsAre("all parameters scaled by 1/4"));
}

TEST(Diagnosis, OneRatioForAllButThoseThatAreZero) {
  Case c;
  c.reference[1] = at::zeros({50}, at::kDouble);
  c.found = {c.reference[0] * 90, c.reference[1], c.reference[2] * 90};
  EXPECT_THAT(c.diagnosis(), ElementsAre("all parameters scaled by 90"));
}

TEST(Diagnosis, SomeParametersScaled) {
  Case c;
  c.found[1] = c.found[1] * 0.5;
  EXPECT_THAT(c.diagnosis(2), ElementsAre("1 of 3 parameters scaled by 1/2 (the layout has 2 ranks): b"));
  c.found[1] = at::zeros({50}, at::kDouble);
  EXPECT_THAT(c.diagnosis(2), ElementsAre("1 of 3 parameters scaled by 0: b"));
}

TEST(Diagnosis, AnotherDirectionIsUnknownWithNumbers) {
  Case c;
  c.found[2] = c.found[2] + 0.1 * random_gradient(9);
  EXPECT_THAT(c.diagnosis(),
              ElementsAre(HasSubstr("unknown pattern: the direction of 1 of 3 parameters differs")));
}

TEST(Diagnosis, AScaleTooCloseToOneIsNotCalledAScale) {
  Case c;
  c.found[0] = c.found[0] * (1 + 1e-8);
  EXPECT_THAT(c.diagnosis(), ElementsAre(HasSubstr("unknown pattern")));
}

TEST(Diagnosis, NotFinite) {
  Case c;
  c.found[0] = c.found[0].clone();
  c.found[0][7] = NAN;
  EXPECT_THAT(c.diagnosis(), ElementsAre("not finite: 1 parameters (a)"));
}

TEST(Diagnosis, FiguresOfTheStep) {
  Case c;
  c.figures.targets = 45;
  c.figures.loss = 10;
  EXPECT_THAT(c.diagnosis(), ElementsAre("counts differ: 45 targets of 100 tokens, expected 90 of 100",
                                         "loss 10, expected 5 (ratio 2)"));
}

TEST(Diagnosis, RatiosByName) {
  EXPECT_EQ(ratio_text(3), "3");
  EXPECT_EQ(ratio_text(1.0 / 7), "1/7");
  EXPECT_EQ(ratio_text(0.75), "0.75");
  EXPECT_EQ(ratio_text(-1), "-1");
}

TEST(Present, JsonHasTheAgreedKeysAndNoNaN) {
  Case c;
  c.found[0] = c.found[0].clone();
  c.found[0][7] = NAN;
  Verdict verdict;
  verdict.precision = "fp64";
  verdict.ranks = 2;
  verdict.layouts = {c.layout()};
  verdict.diagnosis = c.diagnosis(2);
  const auto document = nlohmann::json::parse(to_json(verdict));
  EXPECT_EQ(document["verdict"], "fail");
  EXPECT_EQ(document["grades"]["E1"]["state"], "fail");
  EXPECT_EQ(document["diagnosis"].size(), 1u);
  ASSERT_EQ(document["parameters"].size(), 3u);
  const auto& worst = document["parameters"][0];  // worst first
  EXPECT_EQ(worst["name"], "a");
  for (const char* key : {"ratio", "cosine", "error"}) EXPECT_TRUE(worst[key].is_null()) << key;
  EXPECT_EQ(worst["allowed"], 1e-10);
  EXPECT_THAT(parity_line(verdict), HasSubstr("parity FAIL: 2 ranks != 1 device"));
  EXPECT_THAT(to_text(verdict, 1), HasSubstr("and 2 more, all passed"));
  EXPECT_EQ(to_table(verdict).rows.size(), 3u);
  EXPECT_FALSE(to_table(verdict).passed);
}

}  // namespace
}  // namespace isograd
