// Lists of modules under verify and in checkpoints; what does not fit is refused by name, on every rank.
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>
#include <filesystem>

#include "isograd/checkpoint.hpp"
#include "isograd/verify.hpp"
#include "staged_modules.hpp"

namespace isograd {
namespace {

using namespace staged;
using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct CountsStages : TokenMean {
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = TokenMean::denominator(step_counts);
    wrong.value *= 2;
    return wrong;
  }
};

MakeVerifyModel made_of(Kind kind, bool counting = false) {
  return [kind, counting](at::ScalarType dtype) {
    auto list = list_of(kind);
    if (counting) list.insert(list.end() - 1, pipeline_module<Counting>().called("counting"));
    return verify_model(PipelineModel(std::move(list), {.dtype = dtype}), {});
  };
}
std::vector<Axis> axes_of(int pp, int data) { return {{"pp", pp}, {"dp_shard", data}}; }

TEST(PipelineModulesVerify, ProvesLists) {
  const auto batches = tensor::step_of(0, 1, kVocabulary, 5);
  const auto passes = [&](Kind kind, const std::vector<std::string>& strategies, std::vector<Axis> axes,
                          at::ScalarType dtype = at::kFloat) {
    const Verdict verdict =
        verify(made_of(kind), batches, verify_layouts(strategies), {.axes = std::move(axes), .dtype = dtype});
    EXPECT_TRUE(verdict.passed) << static_cast<int>(kind) << "\n" << to_text(verdict);
  };
  passes(Kind::kMixed, {"naive", "zero1", "zero2"}, axes_of(2, 2));
  passes(Kind::kBareStage, {"bucketed", "zero2"}, axes_of(4, 2));
  passes(Kind::kFrozenStage, {"bucketed", "zero2"}, axes_of(4, 2));
  passes(Kind::kBareStage, {"bucketed"}, axes_of(4, 1), at::kBFloat16);
  passes(Kind::kTied, {"bucketed", "zero1"}, axes_of(2, 1));
  // Under ZeRO-3 a rank's modules are one unit, whole from its first forward to its last backward.
  passes(Kind::kMixed, {"zero3"}, axes_of(2, 2));
  passes(Kind::kTied, {"bucketed", "zero3"}, axes_of(3, 2));
  const Verdict wrong =
      verify(made_of(Kind::kMixed), batches, verify_layouts({"bucketed"}),
             {.axes = axes_of(2, 1), .make_normalizer = [] { return std::make_unique<CountsStages>(); }});
  EXPECT_FALSE(wrong.passed);
}

// A buffer lies on the ranks of its stage alone, of which rank 0 is none: it changes on them with their
// forwards, alike where they have as many.
TEST(PipelineModulesVerify, LooksAtTheBuffersOfEachStage) {
  const auto verdict_of = [](std::vector<Axis> axes) {
    return verify(made_of(Kind::kMixed, /*counting=*/true), tensor::step_of(0, 1, kVocabulary, 5),
                  verify_layouts({"bucketed"}), {.axes = std::move(axes)});
  };
  const Verdict alike = verdict_of(axes_of(3, 1)), differing = verdict_of(axes_of(3, 2));
  EXPECT_TRUE(alike.passed) << to_text(alike);
  EXPECT_THAT(to_text(differing), AllOf(HasSubstr("buffers_differ"), HasSubstr("counting.count")));
}

// A checkpoint has the whole model, and goes on with other stages: one process would have made the same
// steps.
TEST(PipelineModulesCheckpoint, GoesOnWithAnotherNumberOfStages) {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / fmt::format("isograd-staged-{}", ::getpid());
  fs::remove_all(root);
  const MicroBatches batches = tensor::step_of(0, 1, kVocabulary, 4);
  std::map<std::string, at::Tensor> saved;
  // The last loss of so many steps, from the checkpoint or from the beginning.
  const auto train = [&](int pp, Kind kind, int steps, bool resumes, bool saves) {
    double last = 0;
    run_ranks(
        pp,
        [&](World& world) {
          const Mesh mesh(world, Grid({{"pp", pp}}));
          PipelineModel model(list_of(kind), {.seed = 5, .dtype = at::kDouble});
          const Layout placed = model.split(mesh);
          if (resumes) {
            const at::NoGradGuard no_grad;
            for (auto [name, tensor] : model.named()) tensor.copy_(saved.at(name));
          }
          const auto layout = bucketed(model.parameters(), mesh);
          const auto optimizer = adamw({.learning_rate = 1e-2});
          TokenMean mean;
          Step step(model.forward_loss({"cross_entropy"},
                                       [](const at::Tensor& logits, const Batch& batch) -> LossTerms {
                                         return {{"cross_entropy", cross_entropy_sum(logits, batch.targets)}};
                                       }),
                    *layout, mean, *optimizer, through(model.pipeline()));
          TrainingState state;
          state.step = state.updates = 3;
          if (resumes)
            restore_optimizer(checkpoint_path(root, 3), open_checkpoint(checkpoint_path(root, 3)), *layout,
                              *optimizer, &placed);
          for (int i = 0; i < steps; ++i) {
            const double loss = step(batches).loss;
            if (world.rank == 0) last = loss;
          }
          if (!saves) return;
          save_checkpoint(
              {.root = root, .placed = &placed}, state,
              [&](const fs::path&, const TensorStream& weights) {
                std::size_t next = 0;
                weights.each([&](const at::Tensor& tensor) {
                  saved[weights.entries.at(next++).name] = tensor.detach().clone();
                });
              },
              *layout, *optimizer);
        },
        kPatience);
    return last;
  };
  for (const Kind kind : {Kind::kMixed, Kind::kFrozenStage, Kind::kBareStage}) {
    const double wanted = train(1, kind, 5, false, false);
    train(4, kind, 3, false, true);
    EXPECT_EQ(saved.size(), kind == Kind::kMixed ? 12u : kind == Kind::kFrozenStage ? 5u : 3u);
    for (const int pp : {1, 2, 3}) EXPECT_NEAR(train(pp, kind, 2, true, false), wanted, 1e-10 * wanted) << pp;
    fs::remove_all(root);
    saved.clear();
  }
}

// The files have the parameters of the whole list, for any number of stages and for one process.
TEST(PipelineModulesWeights, AreReadOnAnotherNumberOfStages) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("isograd-stage-weights-{}", ::getpid());
  const auto on_stages = [&](int pp, Kind kind, std::uint64_t seed, const auto& use) {
    run_ranks(
        pp,
        [&](World& world) {
          const Mesh mesh(world, Grid({{"pp", pp}}));
          PipelineModel model(list_of(kind), {.seed = seed, .dtype = at::kDouble});
          const Layout placed = model.split(mesh);
          use(model, mesh, placed);
        },
        kPatience);
  };
  for (const Kind kind : {Kind::kMixed, Kind::kTied, Kind::kFrozenStage}) {
    fs::remove_all(folder);
    PipelineModel wanted(list_of(kind), {.seed = 5, .dtype = at::kDouble});
    wanted.make_all();
    const std::map<std::string, at::Tensor> values(wanted.named().begin(), wanted.named().end());
    const auto expect_values = [&](const PipelineModel& model) {
      for (const auto& [name, tensor] : model.named())
        EXPECT_TRUE(at::equal(tensor, values.at(name))) << name;
    };
    on_stages(3, kind, 5, [&](PipelineModel& model, const Mesh& mesh, const Layout& placed) {
      const auto layout = bucketed(model.parameters(), mesh);
      write_weights(folder, model, *layout, placed);
      write_weights(folder, model, *layout, placed, 1 << 20);  // an int
    });
    PipelineModel whole(list_of(kind), {.seed = 9, .dtype = at::kDouble});
    whole.make_all();
    EXPECT_TRUE(std::ranges::any_of(whole.named(), [&](const auto& one) {
      return !at::equal(one.second, values.at(one.first));
    })) << "nothing is read yet";
    read_weights(folder, whole.modules());
    expect_values(whole);
    on_stages(2, kind, 9, [&](PipelineModel& model, const Mesh&, const Layout& placed) {
      read_weights(folder, model, placed);
      expect_values(model);
    });
  }
  on_stages(2, Kind::kMixed, 9, [&](PipelineModel& model, const Mesh& mesh, const Layout& placed) {
    EXPECT_THAT(error_of([&] { read_weights(folder, model, placed); }),
                AllOf(HasSubstr("no such tensor"), HasSubstr("Make the module as it was")));
    auto list = list_of(Kind::kTied);
    list.push_back(pipeline_module<Counting>().called("counting"));
    PipelineModel counts(std::move(list), {.dtype = at::kDouble});
    const Layout parts = counts.split(mesh);
    EXPECT_THAT(error_of([&] { write_weights(folder, counts, *bucketed(counts.parameters(), mesh), parts); }),
                AllOf(HasSubstr("counting.count"), HasSubstr("model.modules())")))
        << "on every rank, of which one has the buffer";
  });
  fs::remove_all(folder);
}

// ---- what is refused ----

// The errors of all ranks.
std::vector<std::string> refused(int ranks, const std::function<std::vector<PipelineModule>(int rank)>& list,
                                 const PipelineOptions& options = {}, int pp = 0) {
  std::vector<std::string> told(static_cast<std::size_t>(ranks));
  run_ranks(
      ranks,
      [&](World& world) {
        const int along = pp > 0 ? pp : ranks;
        const Mesh mesh(world, Grid({{"pp", along}, {"dp_shard", ranks / along}}));
        told[static_cast<std::size_t>(world.rank)] =
            error_of([&] { PipelineModel(list(world.rank)).split(mesh, options); });
      },
      kPatience);
  return told;
}
PipelineModule linear(std::int64_t width) { return pipeline_module<nn::Linear>(width, kHidden); }

TEST(PipelineModulesRefused, ListsThatAreNone) {
  EXPECT_EQ(
      error_of([] { PipelineModel({}); }),
      "ConfigError: a pipeline's list of modules: found none; expected one for each stage, or more. Give "
      "the model's modules in the order of its forward.");
  EXPECT_EQ(
      error_of([] {
        PipelineModel({linear(2).called("a"), linear(2), linear(2).called("a")});
      }),
      "ConfigError: module 'a' of a pipeline: found two modules of this name; expected a name for each, "
      "so that each parameter has its own. Rename one of them, or leave names out.");
  EXPECT_THAT(error_of([] { PipelineModel({linear(2).called("1"), linear(2)}); }), HasSubstr("module '1'"));
  EXPECT_THAT(error_of([] { PipelineModel({linear(2).called("a.b")}); }), HasSubstr("a name with a dot"));
  EXPECT_THAT(error_of([] { PipelineModel({linear(2).costing(0)}); }), HasSubstr("a cost of 0"));
  EXPECT_THAT(error_of([] { PipelineModel({PipelineModule{}}); }), HasSubstr("nothing that makes it"));
  EXPECT_THAT(error_of([] { PipelineModel({linear(2)}).forward_loss({}, {}); }), HasSubstr("no term"));
  for (const std::string& told : refused(3, [](int) { return std::vector{linear(2), linear(2)}; }))
    EXPECT_EQ(told,
              "ConfigError: a pipeline's list of modules: found 2 for 3 stages; expected a module for each "
              "stage at least. Use fewer ranks along pp, or fewer stages on each.");
  for (const std::string& told : refused(2,
                                         [](int) {
                                           return std::vector{linear(2), linear(2), linear(2)};
                                         },
                                         {.schedule = "zb-v", .stages_of_rank = 2}))
    EXPECT_THAT(told, HasSubstr("3 for 4 stages"));
}

TEST(PipelineModulesRefused, RanksThatDoNotSayTheSame) {
  const auto list = [](std::size_t count) {
    std::vector<PipelineModule> all;
    for (std::size_t i = 0; i < count; ++i) all.push_back(linear(2));
    return all;
  };
  for (const std::string& told : refused(3, [&](int rank) { return list(rank == 1 ? 3 : 4); }))
    EXPECT_EQ(
        told,
        "ConfigError: module 3 of a pipeline's list: found '3' of cost 1 on rank 0, nothing more on rank "
        "1; expected the same list on every rank. Make the list from what all ranks know alike.");
  // A module of another size on one of two data ranks.
  const auto sizes = refused(
      4,
      [&](int rank) {
        return std::vector{linear(2), linear(rank == 3 ? 5 : 4)};
      },
      {}, 2);
  for (const std::string& told : sizes)
    EXPECT_EQ(told,
              "ConfigError: module '1' of a pipeline: found '1.weight', Float [6, 4] on rank 2, '1.weight', "
              "Float [6, 5] on rank 3; expected the same parameters on all ranks of its stage. Make it from "
              "what all ranks know alike, and freeze the same parameters everywhere.");
  // Values that a rank has drawn for itself.
  const auto drawn = refused(
      4,
      [&](int rank) {
        return std::vector{linear(2), pipeline_module([rank] {
                             auto made = std::make_shared<nn::LinearImpl>(2, 2);
                             const at::NoGradGuard no_grad;
                             made->weight.fill_(rank);
                             return made;
                           })};
      },
      {}, 2);
  for (const std::string& told : drawn)
    EXPECT_THAT(told, AllOf(HasSubstr("differ in the values of parameter 0"), HasSubstr("'1.weight'")));
}

TEST(PipelineModulesRefused, ModulesThatAreNoneOrShareATensor) {
  const auto null = [](int) {
    return std::vector{linear(2), pipeline_module([] { return std::shared_ptr<nn::LinearImpl>(); })};
  };
  for (const std::string& told : refused(2, null))
    EXPECT_THAT(told, HasSubstr("module '1' of a pipeline: found a null module;"));
  const auto norm = [](int) { return std::vector{linear(2), pipeline_module<nn::BatchNorm1d>(kHidden)}; };
  for (const std::string& told : refused(2, norm))
    EXPECT_THAT(told, AllOf(HasSubstr("module '1'"), HasSubstr("batch normalisation")));
  const auto drops = [](int) { return std::vector{linear(2), pipeline_module<nn::Dropout>(0.5)}; };
  for (const std::string& told : refused(2, drops)) EXPECT_THAT(told, HasSubstr("dropout of 0.5"));
  // A tensor that two functions have kept, unknown to the list; seen where one rank makes both.
  const auto secretly = [](int) {
    const at::Tensor table = at::ones({kVocabulary, kHidden});
    return std::vector{pipeline_module([table] { return std::make_shared<Embedding>(table); }),
                       linear(kHidden), linear(kHidden),
                       pipeline_module([table] { return std::make_shared<Output>(table); })};
  };
  for (const std::string& told : refused(2, secretly, {.schedule = "zb-v", .stages_of_rank = 2}))
    EXPECT_THAT(told, AllOf(HasSubstr("parameter '3.weight'"), HasSubstr("the tensor of '0.weight'")));
  EXPECT_THAT(error_of([&] { PipelineModel(secretly(0)).make_all(); }), HasSubstr("parameter '3.weight'"));
}

TEST(PipelineModulesRefused, CallsInAnotherOrder) {
  run_ranks(1, [](World& world) {
    const Mesh mesh(world, Grid({{"pp", 1}}));
    PipelineModel model(list_of(Kind::kMixed));
    EXPECT_THAT(error_of([&] { model.pipeline(); }), HasSubstr("found a model that has not been split"));
    EXPECT_THAT(error_of([&] { model.outputs(empty_batch()); }), HasSubstr("modules that no rank has made"));
    model.split(mesh);
    EXPECT_THAT(error_of([&] { model.split(mesh); }), HasSubstr("found a model that is in stages already"));
    EXPECT_THAT(error_of([&] { model.make_all(); }), HasSubstr("found a model in stages"));
  });
}

TEST(PipelineModulesRefused, ALossWithOtherTerms) {
  run_ranks(1, [](World& world) {
    const Mesh mesh(world, Grid({{"pp", 1}}));
    PipelineModel model(list_of(Kind::kMixed));
    model.split(mesh);
    const auto forward = model.forward_loss({"cross_entropy", "z"}, [](const at::Tensor&, const Batch&) {
      return LossTerms{{"cross_entropy", at::zeros({})}};
    });
    EXPECT_THAT(error_of([&] { forward(tensor::step_of(0, 1, kVocabulary)[0]); }),
                HasSubstr("a loss that gives 'cross_entropy'; expected 'cross_entropy', 'z'"));
  });
}

}  // namespace
}  // namespace isograd
