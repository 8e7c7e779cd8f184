// verify for a model that is not ours, the matcher, and the page.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/testing.hpp"
#include "isograd/verify_module.hpp"
#include "verify/present.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr std::int64_t kVocabulary = 13, kHidden = 6;

struct Mine : torch::nn::Module {
  at::Tensor table, scale, output;
  explicit Mine(int rank_dependence = 0) {
    auto generator =
        at::make_generator<at::CPUGeneratorImpl>(3 + static_cast<std::uint64_t>(rank_dependence));
    table = register_parameter("table", at::randn({kVocabulary, kHidden}, generator));
    scale = register_parameter("<scale>", at::ones({kHidden}));  // a name that a page must escape
    output = register_parameter("output", at::randn({kVocabulary, kHidden}, generator));
  }
  at::Tensor logits(const at::Tensor& tokens) {
    return at::linear(at::tanh(at::embedding(table, tokens)) * scale, output);
  }
};

VerifyModel mine(at::ScalarType dtype) {
  auto model = std::make_shared<Mine>();
  model->to(dtype);
  return verify_model(model, [](Mine& self, const Batch& batch) { return self.logits(batch.tokens); });
}

// `count` batches of 4, 9, 14, ... tokens.
MicroBatches batches_of(std::int64_t count) {
  MicroBatches batches;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t length = 4 + 5 * i;
    Batch batch = empty_batch();
    batch.tokens = (at::arange(length) * (i + 2)).remainder(kVocabulary);
    batch.targets = (batch.tokens * 3 + 1).remainder(kVocabulary);
    batch.cu_seqlens = {0, length};
    batch.sample_ids = {i};
    batch.sample_targets = {length};
    batches.push_back(std::move(batch));
  }
  return batches;
}

struct UnreducedCount : TokenMean {
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value = static_cast<double>(census.targets_by_rank[static_cast<std::size_t>(census.rank)]);
    return wrong;
  }
};

class LibraryAtRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LibraryAtRanks, testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(LibraryAtRanks, AModelOfOnesOwnEqualsASingleDevice) {
  const auto layouts = verify_layouts({"naive", "overlapped", "bucketed", "zero1", "zero2", "zero3"});
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const Verdict verdict = verify(mine, batches_of(6), layouts, {.ranks = GetParam(), .dtype = dtype});
    EXPECT_THAT(verdict, EqualsSingleDevice());
    EXPECT_EQ(verdict.ranks, GetParam());
    EXPECT_EQ(verdict.layouts.size(), 6u);
  }
  EXPECT_THAT(verify(mine, batches_of(7), layouts,
                     {.ranks = GetParam(), .loss = {.mean = Mean::kSamples, .replicas = {}}}),
              EqualsSingleDevice());
}

TEST(Library, AWrongLoopIsFoundAndTheMatcherSaysWhat) {
  const Verdict verdict =
      verify(mine, batches_of(6), verify_layouts({"bucketed"}),
             {.ranks = 3, .make_normalizer = [] { return std::make_unique<UnreducedCount>(); }});
  EXPECT_THAT(verdict, Not(EqualsSingleDevice()));
  testing::StringMatchResultListener said;
  EXPECT_FALSE(testing::ExplainMatchResult(EqualsSingleDevice(), verdict, &said));
  EXPECT_THAT(said.str(), HasSubstr("parity FAIL: 3 ranks != 1 device"));
  EXPECT_THAT(said.str(), HasSubstr("<scale>"));
  EXPECT_THAT(testing::PrintToString(verdict), HasSubstr("parity FAIL"));
}

TEST(Library, RefusesALayoutItDoesNotKnow) {
  EXPECT_THROW(verify_layout("magic"), ConfigError);
  EXPECT_THROW(verify_layout("zero2:replicas=2"), ConfigError);
}

TEST(Page, StandsAloneEscapesAndExplains) {
  const verify_test::ScratchFolder folder;
  Verdict verdict =
      verify(mine, batches_of(5), verify_layouts({"bucketed", "zero2"}),
             {.ranks = 2, .make_normalizer = [] { return std::make_unique<UnreducedCount>(); }});
  verdict.layouts[0].name = "<script>alert(1)</script>";
  verdict.layouts[1].parameters[0].exact.error = std::nan("");
  verdict.layouts[1].parameters[0].exact.ratio = std::nan("");
  Wording wording = verify_wording(verdict);
  wording.findings.push_back({.id = "count_not_reduced", .sentence = "a & b", .evidence = {"1 < 2"}});
  wording.command = "isograd verify 'my \"own\".toml'";
  wording.configuration = "[run]\n# </pre>";
  wording.notices = {"<b>"};
  write_verify_page(verdict, wording, folder.path() / "page.html");
  const std::string page = read_file(folder.path() / "page.html");
  for (const char* text :
       {"What this page shows", "What is wrong", "a &amp; b", "count_not_reduced: the loss", "1 &lt; 2",
        "&lt;script&gt;alert(1)", "&lt;scale&gt;", "To see it again", "my &quot;own&quot;",
        "Errors in exact arithmetic", "Errors in fp32", "Ratios", "not a finite"})
    EXPECT_THAT(page, HasSubstr(text));
  for (const char* text :
       {"<script", "<scale>", "<b>", "http:", "https:", "src=", "url(", "@import", "<link"})
    EXPECT_THAT(page, Not(HasSubstr(text)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  // As many cells as parameters, layouts and claimed precisions.
  std::size_t cells = 0;
  for (std::size_t at = page.find("<title>", page.find("<svg")); at != std::string::npos;
       at = page.find("<title>", at + 1))
    ++cells;
  EXPECT_EQ(cells, 3u * 2 * 2);
}

TEST(Page, OfAVerdictWithoutLayouts) {
  const verify_test::ScratchFolder folder;
  Verdict verdict;
  verdict.diagnosis = {"2 of 3 parameters differ over the ranks before the step"};
  write_verify_page(verdict, verify_wording(verdict), folder.path() / "page.html");
  EXPECT_THAT(read_file(folder.path() / "page.html"), HasSubstr("2 of 3 parameters differ"));
  EXPECT_THAT(to_text(verdict), HasSubstr("parity FAIL"));
}

}  // namespace
}  // namespace isograd
