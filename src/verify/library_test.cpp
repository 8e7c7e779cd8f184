// verify for a model that is not ours, the matcher, and the page.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <numeric>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/testing.hpp"
#include "isograd/verify.hpp"
#include "planted.hpp"
#include "verify/present.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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

template <class Model>
VerifyModel in_type(at::ScalarType dtype, std::shared_ptr<Model> model) {
  model->to(dtype);
  return verify_model(model, [](Model& self, const Batch& batch) { return self.logits(batch.tokens); });
}

VerifyModel mine(at::ScalarType dtype) { return in_type(dtype, std::make_shared<Mine>()); }

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

// A model that reads Batch::inputs: rows of 1 to 5 samples a micro-batch, and none on the last of 3 ranks.
TEST(Library, AModelOfInputsEqualsASingleDevice) {
  const auto make = [](at::ScalarType dtype) {
    auto model = std::make_shared<Mine>();
    model->to(dtype);
    return verify_model(model, [](Mine& self, const Batch& batch) {
      const at::Tensor rows = batch.inputs.empty() ? at::zeros({0, kHidden}) : batch.inputs[0];
      return at::linear(at::tanh(rows.to(self.scale.scalar_type()) * self.scale), self.output);
    });
  };
  MicroBatches batches;
  for (const std::int64_t rows : {1, 5}) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(rows));
    std::iota(ids.begin(), ids.end(), 10 * rows);
    batches.push_back(batch_of_samples({at::sin(at::arange(rows * kHidden) + rows).view({rows, kHidden})},
                                       at::arange(rows).remainder(kVocabulary), ids));
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    EXPECT_THAT(
        verify(make, batches, verify_layouts({"bucketed", "zero2", "zero3"}), {.ranks = 3, .dtype = dtype}),
        EqualsSingleDevice());
}

// A buffer that follows each rank's own rows, while the gradient is right.
struct Averaging : Mine {
  at::Tensor seen = register_buffer("seen", at::zeros({}, at::kDouble));
  at::Tensor logits(const at::Tensor& tokens) {
    at::NoGradGuard no_grad;
    if (tokens.numel() > 0) seen.mul_(0.9).add_(tokens.to(at::kDouble).mean(), 0.1);
    at::AutoGradMode with_graph(true);
    return Mine::logits(tokens);
  }
};

TEST(Library, BuffersThatRanksChangeApartAreNoPass) {
  const auto averaging = [](at::ScalarType dtype) { return in_type(dtype, std::make_shared<Averaging>()); };
  EXPECT_TRUE(verify(averaging, batches_of(3), verify_layouts({"bucketed"}), {.ranks = 1}).passed);
  for (int ranks : {2, 3}) {
    const Verdict verdict =
        verify(averaging, batches_of(5), verify_layouts({"bucketed", "zero3"}), {.ranks = ranks});
    EXPECT_FALSE(verdict.passed);
    for (const auto& layout : verdict.layouts) {
      ASSERT_EQ(layout.findings.size(), 1u) << layout.name;
      EXPECT_EQ(layout.findings[0].id, "buffers_differ") << layout.name;
      EXPECT_THAT(layout.findings[0].sentence, HasSubstr("differ: seen")) << layout.name;
    }
  }
}

// One weight under two names, and an embedding whose gradient is sparse: right modules both.
struct Tied : torch::nn::Module {
  at::Tensor table, output;
  bool sparse;
  explicit Tied(bool sparse_) : sparse(sparse_) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    table = register_parameter("table", at::randn({kVocabulary, kHidden}, generator));
    output = sparse ? register_parameter("output", at::randn({kVocabulary, kHidden}, generator))
                    : register_parameter("tied", table);
  }
  at::Tensor logits(const at::Tensor& tokens) {
    return at::linear(at::tanh(at::embedding(table, tokens, -1, false, sparse)), output);
  }
};

TEST(Library, TiedWeightsAndSparseGradientsAreProven) {
  for (const bool sparse : {false, true})
    for (const int ranks : {1, 3}) {
      const auto make = [&](at::ScalarType dtype) { return in_type(dtype, std::make_shared<Tied>(sparse)); };
      const auto sharded = [&](at::ScalarType dtype) {
        auto model = std::make_shared<Tied>(sparse);
        model->to(dtype);
        return verify_model(Sharded<Tied>(model), {},
                            [](Tied& self, const Batch& batch) { return self.logits(batch.tokens); });
      };
      const auto layouts = verify_layouts({"naive", "bucketed", "zero2", "zero3"});
      for (const MakeVerifyModel& each : {MakeVerifyModel(make), MakeVerifyModel(sharded)}) {
        EXPECT_THAT(verify(each, batches_of(5), layouts, {.ranks = ranks}), EqualsSingleDevice())
            << "sparse " << sparse << ", " << ranks << " ranks";
        if (ranks == 1) continue;
        const Verdict wrong = verify(
            each, batches_of(5), verify_layouts({"bucketed"}),
            {.ranks = ranks, .make_normalizer = [] { return std::make_unique<planted::CountNotReduced>(); }});
        EXPECT_FALSE(wrong.passed) << "a planted mistake";
      }
    }
}

// An MLP cut over tp, with two mistakes at the ends of its TP region.
struct AlongTp : torch::nn::Module {
  enum Mistake { kNone, kBiasBeforeLeave, kSummedTwice } mistake;
  at::Tensor table, scale, up, down, bias, output;
  Group tp = Group::solo();
  explicit AlongTp(Mistake mistake_) : mistake(mistake_) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto make = [&](const char* name, at::IntArrayRef shape) {
      return register_parameter(name, at::randn(shape, generator) * 0.5);
    };
    table = make("table", {kVocabulary, kHidden}), scale = make("scale", {kHidden});
    up = make("up", {9, kHidden}), down = make("down", {kHidden, 9});
    bias = make("bias", {kHidden}), output = make("output", {kVocabulary, kHidden});
  }
  at::Tensor logits(const at::Tensor& tokens) {
    const at::Tensor x = at::embedding(table, tokens) * scale;
    const at::Tensor part = at::linear(at::silu(at::linear(copy_to_tp(tp, x), up)), down);
    const at::Tensor sum =
        mistake == kBiasBeforeLeave ? reduce_from_tp(tp, part + bias) : reduce_from_tp(tp, part) + bias;
    return at::linear(x + sum, output);
  }
  Layout cut(const Mesh& mesh) {
    tp = tensor_group(mesh);
    std::vector<CutRule> rules{cut_along("up", 0), cut_along("down", 1)};
    if (mistake == kSummedTwice) rules.push_back(summed_along("scale"));
    return isograd::cut(*this, mesh, rules);
  }
};

TEST(Library, MistakesAlongTpAreNamed) {
  const auto verified = [](AlongTp::Mistake mistake, std::vector<Axis> axes) {
    const auto make = [mistake](at::ScalarType dtype) {
      auto model = std::make_shared<AlongTp>(mistake);
      VerifyModel made = in_type(dtype, model);
      made.cut = [model](const Mesh& mesh) { return model->cut(mesh); };
      return made;
    };
    return verify(make, batches_of(5), verify_layouts({"bucketed"}), {.axes = std::move(axes)});
  };
  for (const auto& axes :
       std::vector<std::vector<Axis>>{{{"tp", 2}}, {{"tp", 3}}, {{"dp_shard", 2}, {"tp", 2}}}) {
    EXPECT_THAT(verified(AlongTp::kNone, axes), EqualsSingleDevice());
    const std::string tp = fmt::format("tp ({})", axes.back().size);
    const Verdict bias = verified(AlongTp::kBiasBeforeLeave, axes),
                  twice = verified(AlongTp::kSummedTwice, axes);
    ASSERT_EQ(bias.layouts.at(0).findings.size(), 1u);
    EXPECT_THAT(bias.layouts[0].findings[0].sentence,
                AllOf(HasSubstr("another loss along " + tp), HasSubstr("added before reduce_from_tp()")));
    ASSERT_EQ(twice.layouts.at(0).findings.size(), 1u);
    EXPECT_EQ(twice.layouts[0].findings[0].id, "some_parameters_scaled");
    EXPECT_THAT(
        twice.layouts[0].findings[0].sentence,
        AllOf(HasSubstr("(scale) scaled by"), HasSubstr("the size of " + tp), HasSubstr("a summed axis")));
  }
}

class LibraryAtRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LibraryAtRanks, ::testing::Values(1, 2, 3, 4, 5, 8));

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
             {.ranks = 3, .make_normalizer = [] { return std::make_unique<planted::CountNotReduced>(); }});
  EXPECT_THAT(verdict, Not(EqualsSingleDevice()));
  ::testing::StringMatchResultListener said;
  EXPECT_FALSE(::testing::ExplainMatchResult(EqualsSingleDevice(), verdict, &said));
  EXPECT_THAT(said.str(), HasSubstr("parity FAIL: 3 ranks != 1 device under bucketed; "));
  EXPECT_THAT(said.str(), HasSubstr("<scale>"));
  EXPECT_THAT(::testing::PrintToString(verdict), HasSubstr("parity FAIL"));
}

// The gradient of the first step is right whatever becomes of its update: the default follows two.
struct ForgetsToPublish : planted::Wrapped {
  using Wrapped::Wrapped;
  void publish_parameters() override {}
};

TEST(Library, TheDefaultFollowsUpdates) {
  EXPECT_EQ(VerifyOptions{}.updates, 2);
  EXPECT_EQ(VerifyProblem{}.updates, 2);
  const LayoutUnderTest forgets{
      .name = "forgets", .make = [](std::vector<NamedParameter> parameters, Group group) {
        return std::make_unique<ForgetsToPublish>(bucketed(std::move(parameters), group, {.stage = 2}));
      }};
  EXPECT_TRUE(verify(mine, batches_of(6), {forgets}, {.ranks = 3, .updates = 0}).passed);
  const Verdict verdict = verify(mine, batches_of(6), {forgets}, {.ranks = 3});
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts[0].trajectories.size(), 2u);
}

// Ranks that are threads share the global generator: a model that seeds it is made by one at a time, and one
// whose values are others on every rank takes rank 0's.
TEST(Library, ModelsThatDrawFromTheGlobalGeneratorTakeRankZerosValues) {
  for (const bool seeds : {true, false})
    for (int time = 0; time < 8; ++time) {
      const auto make = [seeds](at::ScalarType dtype) {
        if (seeds) at::manual_seed(3);
        auto model = std::make_shared<Mine>();
        at::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) parameter.copy_(at::randn(parameter.sizes()));
        return in_type(dtype, model);
      };
      const Verdict verdict =
          verify(make, batches_of(5), verify_layouts({"bucketed"}), {.ranks = 3, .updates = 0});
      EXPECT_TRUE(verdict.passed) << seeds << " " << time << "\n" << to_text(verdict);
    }
}

// So are buffers that a model draws when it is made.
TEST(Library, BuffersThatAreDrawnTakeRankZerosValues) {
  struct Projected : Mine {
    at::Tensor shift = register_buffer("shift", at::randn({kHidden}));
    at::Tensor logits(const at::Tensor& tokens) {
      return at::linear(at::tanh(at::embedding(table, tokens) * scale + shift), output);
    }
  };
  const auto make = [](at::ScalarType dtype) { return in_type(dtype, std::make_shared<Projected>()); };
  for (const int ranks : {1, 3}) {
    const Verdict verdict =
        verify(make, batches_of(5), verify_layouts({"bucketed"}), {.ranks = ranks, .updates = 0});
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
  }
}

struct Layer : torch::nn::Module {
  at::Tensor weight;
  explicit Layer(at::Generator& generator) {
    weight = register_parameter("weight", at::randn({kHidden, kHidden}, generator) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(at::linear(x, weight)); }
};
struct Layered : torch::nn::Module {
  at::Tensor table, output;
  std::vector<Sharded<Layer>> layers;
  bool past_the_unit;
  explicit Layered(bool past_the_unit_) : past_the_unit(past_the_unit_) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    table = register_parameter("table", at::randn({kVocabulary, kHidden}, generator));
    output = register_parameter("output", at::randn({kVocabulary, kHidden}, generator));
    for (int i = 0; i < 3; ++i)
      layers.emplace_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>(generator)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = at::embedding(table, tokens);
    for (auto& layer : layers) x = past_the_unit ? layer->forward(x) : layer(x);
    return at::linear(x, output);
  }
};

// A block that is called past its unit finds no parameters there: only where verify shards it, too.
TEST(Library, ShardedBlocksOfOnesOwnAreSharded) {
  const auto verdict_of = [](bool past_the_unit, bool with_blocks) {
    return verify(
        [=](at::ScalarType dtype) {
          const auto module = std::make_shared<Layered>(past_the_unit);
          module->to(dtype);
          const auto logits = [](Layered& self, const Batch& batch) { return self.forward(batch.tokens); };
          return with_blocks ? verify_model(Sharded<Layered>(module),
                                            {module->layers.begin(), module->layers.end()}, logits)
                             : verify_model(module, logits);
        },
        batches_of(6), verify_layouts({"bucketed", "zero3"}), {.ranks = 3});
  };
  const Verdict right = verdict_of(false, true);
  EXPECT_TRUE(right.passed) << to_text(right);
  EXPECT_GT(right.layouts[1].bytes_moved, right.layouts[0].bytes_moved);  // blocks are gathered twice
  EXPECT_TRUE(verdict_of(true, false).passed);
  bool found = false;
  try {
    found = !verdict_of(true, true).passed;
  } catch (const std::exception&) {
    found = true;  // what the program would end with
  }
  EXPECT_TRUE(found);
}

TEST(Library, RefusesALayoutItDoesNotKnow) {
  EXPECT_THROW(verify_layout("magic"), ConfigError);
  EXPECT_THROW(verify_layout("zero2:replicas=2"), ConfigError);
}

TEST(Page, StandsAloneEscapesAndExplains) {
  const verify_test::ScratchFolder folder;
  Verdict verdict =
      verify(mine, batches_of(5), verify_layouts({"bucketed", "zero2"}),
             {.ranks = 2, .make_normalizer = [] { return std::make_unique<planted::CountNotReduced>(); }});
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
        "Errors in exact arithmetic", "Errors in fp32", "Ratios", "not finite"})
    EXPECT_THAT(page, HasSubstr(text));
  for (const char* text :
       {"<script", "<scale>", "<b>", "http:", "https:", "src=", "url(", "@import", "<link"})
    EXPECT_THAT(page, Not(HasSubstr(text)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  // On a narrow screen the first column is what is seen: the verdict.
  const std::size_t row = page.find("<tr>", page.find("<table")), first = page.find("<th", row);
  EXPECT_EQ(page.substr(page.find('>', first) + 1, 7), "verdict");
  // A dot for each parameter, layout and claimed precision, and one for its ratio.
  std::size_t cells = 0;
  for (std::size_t at = page.find("<title>", page.find("<svg")); at != std::string::npos;
       at = page.find("<title>", at + 1))
    ++cells;
  EXPECT_EQ(cells, 3u * 2 * (2 + 1));
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
