// Whole runs on every axis: trained, measured, sampled, saved, resumed and proven as one process, and
// mistakes in them found.
#include <torch/csrc/autograd/grad_mode.h>

#include "axis_runs.hpp"
#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "isograd/expert_parallel.hpp"
#include "planted.hpp"
#include "train/build.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_runs::config_error_of;

struct OnRanks {
  int ranks;
  const char* set;
};

std::string words_of(const OnRanks& cell) { return fmt::format("{} {}", cell.ranks, cell.set); }

constexpr const char* kSharedExpert =
    "model.family=qwen2_moe model.query_key_norm=false model.attention_bias=true "
    "model.shared_expert_feed_forward=10 loss.balance=0 loss.router_z=0";

class AxisRun : public AxisRuns {
 protected:
  // It has layers for up to five stages.
  RunConfig deep(const std::string& name, const std::string& dtype = "float64") const {
    return changed(text(name, dtype), "model.layers=5");
  }
  // Cells under one of the two `ways` by turns, each of which is a run of its own on one process.
  void check(const RunConfig& base, const std::vector<std::string>& ways, const std::vector<OnRanks>& cells) {
    std::vector<RunConfig> ones;
    std::vector<Run> alone;
    for (const std::string& way : ways) {
      ones.push_back(on(base, way, "alone"));
      alone.push_back(checked(ones.back(), 1));
      EXPECT_GT(std::abs(alone.back().steps[0].report.loss - alone.back().steps[3].report.loss), 1e-3);
      EXPECT_FALSE(alone.back().outcomes[0].sample.empty() && base.model.kind == "decoder");
    }
    DefaultCases made(6);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (!made.has(words_of(cells[i]))) continue;
      const std::size_t way = takes_first(i) ? 0 : ways.size() - 1;
      expect_same(checked(on(ones[way], cells[i].set, "cell"), cells[i].ranks), alone[way], 0,
                  fmt::format("{} ranks, {}, {}", cells[i].ranks, cells[i].set, ways[way]));
    }
    if (ways.size() > 1) {  // the two train differently
      EXPECT_GT(std::abs(alone[0].steps[3].report.loss - alone[1].steps[3].report.loss), 1e-4);
    }
  }
};

const std::vector<std::string> kMeans = {"loss.kind=token_mean", "loss.kind=sample_mean"};

TEST_F(AxisRun, OfShardsIsTheRunOfOneProcess) {
  check(text("shards"), kMeans,
        {{1, "strategy=zero3"},
         {2, "strategy=zero3 share_parameters=off"},
         {3, "strategy=zero3 share_parameters=on"},
         {5, "strategy=zero3 share_parameters=off checkpoint_activations=true"},
         {3, "strategy=zero3 share_parameters=off reshard_after_forward=false"},
         {2, "strategy=zero3 share_parameters=off reduce_once=true"},
         {4, "strategy=zero3 share_parameters=off replicas=2"},
         {2, "strategy=naive share_parameters=off"},
         {3, "strategy=overlapped share_parameters=off"},
         {4, "strategy=bucketed share_parameters=off"},
         {4, "strategy=zero1 share_parameters=on replicas=2"},
         {3, "strategy=zero2 share_parameters=off"},
         {2, "strategy=zero2 share_parameters=off reduce_once=true"}});
}

TEST_F(AxisRun, OfContextRanksIsTheRunOfOneProcess) {
  check(text("context"), kMeans,
        {{2, "cp_ring=2"},
         {3, "cp_ring=3 strategy=zero1 cp_fsdp_mode=none"},
         {3, "cp_ulysses=3 strategy=zero3"},
         {6, "cp_ring=2 cp_ulysses=3 strategy=zero2 cp_fsdp_mode=ring_only"},
         {4, "cp_ring=2 strategy=zero1"},
         {4, "cp_ring=2 strategy=zero3 cp_fsdp_mode=none"},
         {6, "cp_ring=2 cp_ulysses=3 strategy=zero3 cp_fsdp_mode=ulysses_only"},
         {4, "cp_ring=2 strategy=naive"}});
}

const std::vector<OnRanks> kTensor = {
    {2, "tp=2"},
    {2, "tp=2 strategy=zero3 tensor_overlap=tokens"},
    {3, "tp=3 strategy=zero1 tensor_overlap=weights"},
    {3, "tp=3 strategy=naive sequence_parallel=false share_parameters=off"},
    {4, "tp=2 strategy=zero3 share_parameters=off"},
    {4, "tp=2 strategy=zero2 sequence_parallel=false share_parameters=off tensor_overlap=weights"},
    {4, "tp=2 cp_ring=2 tensor_overlap=tokens"},
    {5, "tp=5 tensor_overlap=tokens"},
    {6,
     "tp=6 strategy=zero3 sequence_parallel=false tensor_overlap=weights"},  // key heads along a view of tp
    {8, "tp=2 cp_ring=2 strategy=zero1 share_parameters=off"}};

TEST_F(AxisRun, AlongTpIsTheRunOfOneProcess) {
  check(text("tensor"), kMeans, kTensor);
  // Sizes of which ranks have as many, and a part that fills its bucket.
  check(changed(text("even"), "model.feed_forward=120 model.vocabulary=960"), {""},
        {kTensor.begin(), kTensor.begin() + 6});
}

TEST_F(AxisRun, InStagesIsTheRunOfOneProcess) {
  check(deep("stages"), kMeans,
        {{2, "pp=2"},
         {2, "pp=2 schedule=gpipe batch.packs_per_micro_batch=1"},
         {2, "pp=2 schedule=interleaved stages_per_rank=2 batch.packs_per_micro_batch=1"},
         {3, "pp=3 schedule=one-after-another"},
         {3, "pp=3 schedule=zb-h1 batch.packs_per_micro_batch=1"},
         {2, "pp=2 schedule=zb-v stages_per_rank=2 batch.packs_per_micro_batch=1"},
         {4, "pp=2 schedule=zb-h1 strategy=zero2 batch.packs_per_micro_batch=1"},
         {5, "pp=5 batch.packs_per_micro_batch=1"},
         {4, "pp=2 strategy=zero1 batch.packs_per_micro_batch=1"},
         {4, "pp=2 strategy=zero2 share_parameters=off"},
         {4, "pp=2 strategy=zero3 batch.packs_per_micro_batch=1"},
         {4,
          "pp=2 schedule=interleaved stages_per_rank=2 strategy=zero3 share_parameters=off "
          "batch.packs_per_micro_batch=1"},
         {4, "pp=2 tp=2 strategy=naive"},
         {4, "pp=2 cp_ring=2"},
         {8, "pp=2 replicas=2 strategy=zero1 share_parameters=off"}});
  check(changed(deep("tied"), "model.tied_output=true"), {""},
        {{2, "pp=2"},
         {4, "pp=2 strategy=zero1"},
         {3, "pp=3"},
         {4, "pp=4 schedule=zb-h1"},
         {6, "pp=3 strategy=zero3 share_parameters=off"},
         {2, "pp=2 schedule=zb-v stages_per_rank=2 batch.packs_per_micro_batch=1"}});
}

// Five experts: uneven along every ep but 5. Five packs: uneven too, with rounds in which some ranks have
// none. Losses of routers are over all layers, which may lie in several stages.
TEST_F(AxisRun, WithExpertsIsTheRunOfOneProcess) {
  const RunConfig base = experts("experts");
  const Run alone = run(on(base, "", "alone"), 1);
  EXPECT_GT(term(alone.steps[0], "balance"), 1.01);  // tokens are not spread evenly: the terms mean something
  EXPECT_EQ(alone.steps[0].report.terms.size(), 3u);
  check(base, {"loss.balance_over=layers", "loss.balance_over=model loss.kind=sample_mean"},
        {{2, ""},
         {3, "strategy=zero1 batch.packs_per_micro_batch=1"},
         {3, "strategy=zero3 checkpoint_activations=true batch.packs_per_micro_batch=1"},
         {4, "strategy=zero2 cp_ring=2"},
         {4, "strategy=zero3 replicas=2"},
         {5, "strategy=naive share_parameters=off"},
         {8, "strategy=zero3 cp_ring=2 replicas=2 share_parameters=off batch.packs_per_micro_batch=1"},
         {2, "ep=2"},
         {2, "ep=2 strategy=naive batch.packs_per_micro_batch=1"},
         {3, "ep=3 strategy=naive batch.packs_per_micro_batch=1"},
         {4, "ep=2 cp_ring=2"},
         {4, "ep=4 strategy=overlapped batch.packs_per_micro_batch=1"},
         {5, "ep=5 expert_overlap=halves"},
         {4, "ep=2 batch.packs_per_micro_batch=1"},
         {8, "ep=4 cp_ring=2 batch.packs_per_micro_batch=1"},
         // Shards of experts along edp, of the rest along all data axes but those of replicas.
         {2, "ep=2 strategy=zero1 batch.packs_per_micro_batch=1"},
         {4, "ep=2 strategy=zero1"},
         {4, "ep=2 strategy=zero2 batch.packs_per_micro_batch=1"},
         {4, "ep=4 strategy=zero2 cp_ring=2 batch.packs_per_micro_batch=1"},
         {3, "ep=3 strategy=zero3 batch.packs_per_micro_batch=1"},
         {4, "ep=2 strategy=zero3 batch.packs_per_micro_batch=1"},
         {4, "ep=2 strategy=zero1 replicas=2 batch.packs_per_micro_batch=1"},
         {4, "ep=4 strategy=zero3 replicas=2 batch.packs_per_micro_batch=1"},
         {8, "ep=2 strategy=zero3 cp_ring=2 replicas=2 batch.packs_per_micro_batch=1"},
         {4, "ep=2 strategy=zero3 share_parameters=off checkpoint_activations=true"},
         // Each expert's matrices cut along tp.
         {2, "tp=2"},
         {4, "ep=2 tp=2 strategy=zero3 batch.packs_per_micro_batch=1"},
         {2, "pp=2"},
         {3, "pp=3 batch.packs_per_micro_batch=1"},
         {2, "pp=2 schedule=interleaved stages_per_rank=2 batch.packs_per_micro_batch=1"},
         {3, "pp=3 schedule=zb-h1 batch.packs_per_micro_batch=1"},
         {2, "pp=2 schedule=zb-v stages_per_rank=2 batch.packs_per_micro_batch=1"},
         {4, "pp=2 ep=2 schedule=zb-h1 batch.packs_per_micro_batch=1"},
         {4, "pp=2 ep=2"},
         {4, "pp=2 ep=2 strategy=zero1"}});
  check(base, {kSharedExpert}, {{3, "ep=3 batch.packs_per_micro_batch=1"}, {4, "ep=2 strategy=naive"}});
}

TEST_F(AxisRun, OfVideosIsTheRunOfOneProcess) {
  const RunConfig base = video("videos");
  const std::vector<OnRanks> cells = {{2, "tp=2"},
                                      {3, "tp=3 strategy=zero3 sequence_parallel=false"},
                                      {4, "tp=4 strategy=zero1"},
                                      {4, "tp=2 cp_ring=2 strategy=zero3"},
                                      {6, "tp=3 strategy=naive sequence_parallel=false"}};
  check(base, kMeans, cells);
  // A checkpoint of it goes on without tp.
  const Run trained = run(on(base, cells[3].set, "trained"), cells[3].ranks);
  RunConfig going_on = on(base, "", "going-on");
  going_on.model = RunConfig{}.model;
  going_on.model.kind = "video";
  going_on.model.load = trained.outcomes[0].checkpoint.string();
  EXPECT_LT(run(going_on, 1).steps[0].report.loss, trained.steps[0].report.loss);
}

// A checkpoint of one mesh goes on on another one.
TEST_F(AxisRun, GoesOnOnAnotherMesh) {
  struct Moves {
    RunConfig base;
    std::vector<std::pair<OnRanks, OnRanks>> moves;
  };
  const OnRanks none{1, "pp=1"};
  const std::vector<Moves> all = {
      {text("text"),
       {{{3, "strategy=zero3"}, {2, "pp=1"}},
        {{3, "pp=1"}, {2, "strategy=zero3 share_parameters=off"}},
        {{4, "tp=2 strategy=zero3 share_parameters=off"}, {3, "tp=3"}},
        {{5, "tp=5 strategy=naive sequence_parallel=false"}, {3, "pp=1"}},
        {{3, "pp=1"}, {6, "tp=6 strategy=zero1 share_parameters=off"}},
        {{2, "pp=2"}, {3, "pp=3"}},
        {{4, "pp=2 tp=2 strategy=zero1"}, {3, "strategy=zero3"}},
        {{3, "strategy=zero3"}, {4, "pp=2 strategy=zero2"}},
        {{4, "pp=2 strategy=zero3 share_parameters=off"}, {3, "pp=3"}},
        {{3, "strategy=zero2 share_parameters=off"}, {2, "strategy=bucketed share_parameters=on"}},
        {{2, "pp=2"}, {4, "pp=2 strategy=zero3"}}}},
      {experts("experts"),
       {{{2, "ep=2"}, {3, "strategy=zero3 batch.packs_per_micro_batch=1"}},
        {{3, "strategy=zero3 batch.packs_per_micro_batch=1"}, {3, "ep=3 strategy=naive"}},
        {{3, "ep=3 strategy=naive"}, {4, "ep=2 strategy=zero2 batch.packs_per_micro_batch=1"}},
        {{4, "ep=2 strategy=zero2 batch.packs_per_micro_batch=1"},
         {4, "ep=2 strategy=zero3 replicas=2 batch.packs_per_micro_batch=1"}},
        {{4, "ep=2 strategy=zero3 replicas=2 batch.packs_per_micro_batch=1"}, none},
        {none, {2, "ep=2"}}}}};
  for (const auto& [base, moves] : all) {
    const Run alone = run(on(base, "", "alone"), 1);
    DefaultCases made(4);
    for (const auto& [from, to] : moves) {
      if (!made.has(fmt::format("{} to {}", words_of(from), words_of(to)))) continue;
      RunConfig saving = on(base, from.set, "saving");
      saving.checkpoint.every = 2, saving.checkpoint.keep = 10;
      expect_same(run(saving, from.ranks), alone, 0, from.set);
      RunConfig resumed = on(base, to.set, "resumed");
      resumed.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000002").string();
      expect_same(run(resumed, to.ranks), alone, 2, fmt::format("{}, then {}", from.set, to.set));
    }
  }
}

constexpr const char* kFiles[] = {"model.safetensors", "optimizer.safetensors"};

TEST_F(AxisRun, SavedAndReloadedEqualsUninterrupted) {
  std::size_t turn = 0;
  for (const char* dtype : {"float32", "bfloat16"})
    for (const auto& [base, cell] :
         {std::pair{text("x", dtype), OnRanks{4, "tp=2 strategy=zero1 share_parameters=off"}},
          {text("x", dtype), {4, "pp=2 strategy=zero1"}},
          {experts("x", dtype), {3, "strategy=zero3 batch.packs_per_micro_batch=1"}}}) {
      if (!full_tests() && turn++ % 2 != 0) continue;  // 3 cells: each precision has others
      const Run straight = run(on(base, cell.set, "straight"), cell.ranks);
      RunConfig saving = on(base, cell.set, "saving");
      saving.checkpoint.every = 2, saving.checkpoint.keep = 10;
      run(saving, cell.ranks);
      RunConfig resumed = on(base, cell.set, "resumed");
      const fs::path middle = fs::path(saving.run.directory) / "checkpoints/step-00000002";
      resumed.checkpoint.resume = middle.string();
      const Run again = run(resumed, cell.ranks);
      for (const char* name : kFiles) {
        EXPECT_TRUE(file(again.outcomes[0].checkpoint, name) == file(straight.outcomes[0].checkpoint, name))
            << dtype << ", " << cell.set << ", " << name;
        EXPECT_FALSE(file(middle, name) == file(again.outcomes[0].checkpoint, name)) << "it did not move";
      }
      if (base.model.shape.experts.count == 0) continue;
      // A model with other experts is not this run's.
      resumed.run.directory += "-other";
      resumed.model.shape.experts.count = 6;
      EXPECT_THAT(config_error_of([&] { run(resumed, cell.ranks); }),
                  AllOf(HasSubstr("model.experts"), HasSubstr("5"), HasSubstr("6")));
    }
}

// Options of speed and memory alone: each list has one result, in one of two precisions by turns.
// ISOGRAD_FULL_TESTS=1: in both.
TEST_F(AxisRun, OptionsThatChangeNoBit) {
  struct Same {
    bool has_experts;
    int ranks;
    std::string set;
    std::vector<const char*> by;
  };
  const std::vector<Same> all = {
      {true,
       2,
       "pp=2 batch.packs_per_micro_batch=1 ",
       {"schedule=1f1b", "schedule=zb-h1", "schedule=gpipe", "schedule=one-after-another"}},
      {true,
       2,
       "pp=2 stages_per_rank=2 batch.packs_per_micro_batch=1 ",
       {"schedule=interleaved", "schedule=zb-v"}},
      {false,
       3,
       "pp=3 loss.fused=on batch.packs_per_micro_batch=1 ",
       {"schedule=1f1b", "schedule=zb-h1", "schedule=gpipe"}},
      {false, 3, "tp=3 loss.fused=on ", {"tensor_overlap=none", "tensor_overlap=weights"}},
      {false,
       3,
       "tp=3 sequence_parallel=false model.attention_bias=true model.output_bias=true model.mlp_bias=true ",
       {"tensor_overlap=none", "tensor_overlap=weights"}},
      {true, 3, fmt::format("ep=3 {} ", kSharedExpert), {"expert_overlap=none", "expert_overlap=shared"}},
      {true,
       3,
       fmt::format("ep=3 strategy=zero3 checkpoint_activations=true {} ", kSharedExpert),
       {"expert_overlap=none", "expert_overlap=shared"}}};
  std::size_t turn = 0;
  for (const Same& same : all)
    for (const char* dtype : {"float32", "bfloat16"}) {
      if (!full_tests() && takes_first(turn++)) continue;
      std::vector<fs::path> saved;
      for (const char* by : same.by) {
        RunConfig config =
            on(same.has_experts ? experts("x", dtype) : text("x", dtype), same.set + by, "bits");
        config.train.steps = 2, config.train.evaluate_every = 0;
        saved.push_back(run(config, same.ranks).outcomes[0].checkpoint);
        for (const char* name : kFiles)
          EXPECT_TRUE(file(saved[0], name) == file(saved.back(), name))
              << dtype << ", " << same.set << by << ", " << name;
      }
    }
}

// A directory of Hugging Face's form, whoever wrote it, and from one, however it is cut.
TEST_F(AxisRun, LoadsAndWritesHuggingFaceDirectories) {
  const Run first = run(on(text("first"), "", "first"), 1);
  const auto loading = [&](RunConfig config) {
    config.model = RunConfig{}.model;
    config.model.load = first.outcomes[0].checkpoint.string();
    return config;
  };
  const Run alone = run(loading(on(text("x"), "", "alone")), 1);
  const RunConfig cut = on(text("x"), "tp=6 strategy=zero3 share_parameters=off", "cut");
  expect_same(run(loading(cut), 6), alone, 0, "loaded");
}

// Every layout in one cell, in the others one of three by turns; ISOGRAD_FULL_TESTS=1: every layout in all.
TEST_F(AxisRun, IsProvenOnEveryLayout) {
  struct Proof {
    RunConfig base;
    OnRanks cell;
    std::vector<std::string> layouts;
    std::vector<std::string> holds{};  // the beginnings of some of their names
  };
  const std::vector<std::string> every = {kAllLayouts}, names = {"bucketed", "zero1", "zero3"};
  std::size_t turn = 0;
  const auto some = [&] {
    return full_tests() ? every : std::vector<std::string>{names[turn++ % names.size()]};
  };
  // Two or three data ranks see three or four packs: unequally many, and several micro-batches.
  const RunConfig plain = changed(text("x", "float32"), "batch.packs_per_step=3");
  const RunConfig moe = changed(experts("x", "float32"), "batch.packs_per_step=4");
  const RunConfig tied = changed(plain, "model.tied_output=true");
  const RunConfig deeper = changed(plain, "model.layers=5"), of_videos = video("videos");
  const std::vector<Proof> proofs = {
      {plain, {2, "tp=2"}, full_tests() ? every : std::vector<std::string>{"zero3", "naive"}},
      {plain, {4, "tp=2 strategy=zero1 sequence_parallel=false"}, some()},
      {plain, {6, "tp=6 strategy=zero3"}, some()},
      {deeper, {2, "pp=2 schedule=interleaved stages_per_rank=2"}, some()},
      {plain, {3, "pp=3"}, some()},
      {deeper, {2, "pp=2 schedule=zb-v stages_per_rank=2"}, some()},
      {plain, {4, "pp=2"}, some()},
      {plain, {4, "pp=2 tp=2"}, some()},
      {tied, {3, "pp=3"}, some()},
      {moe, {2, "pp=2"}, {}},
      {moe, {3, "pp=1"}, some()},
      {moe, {3, "loss.balance_over=model"}, some()},
      {moe,
       {2, "ep=2 batch.packs_per_step=3"},
       every,
       {"naive", "overlapped", "bucketed:share=off", "zero1:replicas=1:share=on",
        "zero2:replicas=1:share=off", "zero3:replicas=1:share=off", "zero3:replicas=1:share=on",
        "zero3:replicas=2"}},
      {moe, {4, "ep=2"}, {"bucketed:share=on", "zero1:replicas=2:share=off", "zero3:replicas=2:share=off"}},
      {of_videos, {2, "tp=2"}, {}},
      {of_videos, {4, "tp=2 cp_ring=2 strategy=zero3"}, {}},
      {of_videos, {6, "tp=3 strategy=naive sequence_parallel=false"}, {}}};
  for (const auto& [base, cell, layouts, holds] : proofs) {
    const Verdict verdict = verified(on(base, cell.set, "proof"), cell.ranks, layouts);
    EXPECT_TRUE(verdict.passed) << cell.set << "\n" << to_text(verdict);
    EXPECT_GE(verdict.layouts.size(), layouts == every ? 5 : std::max<std::size_t>(1, layouts.size()))
        << cell.set;
    for (const std::string& name : holds)
      EXPECT_TRUE(std::any_of(verdict.layouts.begin(), verdict.layouts.end(),
                              [&](const LayoutVerdict& layout) { return layout.name.starts_with(name); }))
          << name;
    if (base.model.shape.experts.count == 0) continue;
    for (const LayoutVerdict& layout : verdict.layouts) {
      EXPECT_GT(layout.choices.tokens, 0) << layout.name;
      EXPECT_EQ(layout.choices.wrong, 0) << layout.name;
    }
  }
}

// ---- mistakes ----

std::string first_finding(const Verdict& verdict) {
  return verdict.findings.empty() ? "none" : verdict.findings[0].id;
}

TEST_F(AxisRun, TargetsCountedOnPeersAreFound) {
  for (const OnRanks& cell : {OnRanks{4, "tp=2"}, {2, "pp=2"}}) {
    const Verdict verdict = verified(
        on(text("x", "float32"), cell.set, "counted"), cell.ranks, {}, [](VerifyProblem& problem, World&) {
          problem.make_normalizer = [] { return std::make_unique<planted::CountsPeers>(2); };
        });
    EXPECT_FALSE(verdict.passed);
    // With tp two axes have two ranks each: the factor fits both, and neither is named.
    EXPECT_EQ(first_finding(verdict), cell.ranks == 4 ? "scaled_by_factor" : "counted_on_peers") << cell.set;
  }
}

// Placements whose sums over ranks are left out, of all experts or one layer's, or of norms under cut tokens.
TEST_F(AxisRun, ASumLeftOutIsFound) {
  struct Left {
    RunConfig base;
    const char *set, *which, *strategy;
  };
  const std::string one_layer = "layers.1.mlp.experts.up_proj";
  const RunConfig moe = experts("x", "float32");
  for (const Left& left : {Left{moe, "ep=2", ".experts.", "bucketed"},
                           {moe, "ep=2", one_layer.c_str(), "bucketed"},
                           {moe, "ep=2", one_layer.c_str(), "zero2"},
                           {moe, "ep=2", one_layer.c_str(), "zero3"},
                           {text("x", "float32"), "tp=2", "input_layernorm.weight", "bucketed"}}) {
    const Verdict verdict = verified(
        on(left.base, left.set, "unsummed"), 4, {left.strategy}, [&](VerifyProblem& problem, World&) {
          problem.make_model = [&, make = problem.make_model](at::ScalarType dtype) {
            VerifyModel made = make(dtype);
            made.cut = [&, right = made.cut](const Mesh& mesh) {
              Layout::Named placements = right(mesh).placements();
              for (auto& [name, placement] : placements)
                if (name.find(left.which) != std::string::npos)
                  placement.summed.erase("tp"), placement.summed.erase("edp");
              return Layout(mesh, placements);
            };
            return made;
          };
        });
    EXPECT_FALSE(verdict.passed) << left.which;
    EXPECT_EQ(first_finding(verdict), "not_summed_over_axis") << left.which << ", " << left.strategy;
    EXPECT_THAT(to_text(verdict), HasSubstr(left.which[0] == 'i' ? "layernorm" : "experts"));
    for (const ParameterVerdict& one : verdict.layouts.at(0).parameters)
      EXPECT_EQ(one.exact.passed, one.name.find(left.which) == std::string::npos) << one.name;
  }
}

// In bf16 rounding turns many choices: they are replayed, and what is left is what the bound allows.
TEST_F(AxisRun, ChoicesThatRoundingTurnsAreReplayed) {
  const char* close =
      "model.experts=32 model.initializer_range=0.02 batch.packs_per_step=12 "
      "model.experts_every=1 model.layers=3 model.hidden=16 model.heads=2 model.key_value_heads=1 "
      "model.head_dim=8 model.feed_forward=24";
  const RunConfig moe = experts("x", "bfloat16");
  for (const RunConfig& config :
       {on(moe, close, "flips"),
        on(with_sigmoid_routers(moe),
           std::string(close) + " model.expert_groups=8 model.expert_groups_per_token=3",
           "flips-of-groups")}) {
    const Verdict verdict = verified(config, 3, {"bucketed", "zero3"});
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
    for (const LayoutVerdict& layout : verdict.layouts) {
      EXPECT_GT(layout.choices.flipped, 0) << layout.name;
      EXPECT_EQ(layout.choices.wrong, 0) << layout.name;
      EXPECT_GT(layout.choices.margin, 0) << layout.name;
      EXPECT_LE(layout.choices.margin, 1) << layout.name;
    }
    EXPECT_THAT(to_text(verdict), HasSubstr("near ties that rounding turned"));
  }
}

// One expert to a token, whose weight is 1: the router has no gradient but rounding, and documents are apart.
TEST_F(AxisRun, OneNormalisedExpertIsProven) {
  const Verdict verdict = verified(on(experts("x", "float32"),
                                      "model.experts_per_token=1 model.normalise_experts=true loss.balance=0 "
                                      "loss.router_z=0",
                                      "one-expert"),
                                   3, {"bucketed"});
  EXPECT_TRUE(verdict.passed) << to_text(verdict);
}

// A run whose routers choose others, in the run's precision alone: the margin tells it from rounding.
TEST_F(AxisRun, ChoicesThatRoundingDoesNotExplainFail) {
  const auto other = [](VerifyProblem& problem, World& world) {
    problem.make_model = [rank = world.rank, make = problem.make_model](at::ScalarType dtype) {
      VerifyModel made = make(dtype);
      if (dtype != at::kFloat || rank != 0) return made;
      // Before whatever verify asks for: the second choice of each seventh token becomes another expert.
      made.choose_experts = [choose = made.choose_experts](const DecoderLM::ChooseExperts& given) {
        choose([given](const Batch& batch, std::int64_t layer, const ExpertScores& scores,
                       const at::Tensor& likeliest) {
          at::Tensor other = likeliest.clone();
          for (std::int64_t t = 3; layer == 1 && t < other.size(0); t += 7)
            other[t][1] = scores.values[t].argmin();
          return given ? given(batch, layer, scores, other) : other;
        });
      };
      return made;
    };
  };
  const Verdict verdict = verified(on(experts("x", "float32"), "", "wrong"), 2, {"bucketed"}, other);
  EXPECT_FALSE(verdict.passed);
  EXPECT_GT(verdict.layouts.at(0).choices.wrong, 0);
  EXPECT_EQ(verdict.layouts.at(0).choices.layer, 1);
  EXPECT_THAT(to_text(verdict), HasSubstr("other_experts"));
}

// The balance term's counts added up twice on one rank: E1 fails.
TEST_F(AxisRun, RoutingCountedTwiceOnOneRankIsFound) {
  const auto twice = [](VerifyProblem& problem, World& world) {
    problem.experiments = false;
    problem.make_model = [rank = world.rank, make = problem.make_model](at::ScalarType dtype) {
      VerifyModel made = make(dtype);
      if (rank != 1) return made;
      made.look_ahead = [right = made.look_ahead](const ForwardLossTerms& forward) -> LookAhead {
        return [look = right(forward)](const MicroBatches& batches, const Group& data) {
          MicroBatches twice = batches;
          twice.insert(twice.end(), batches.begin(), batches.end());
          look(twice, data);
        };
      };
      return made;
    };
  };
  const Verdict verdict = verified(on(experts("x", "float32"), "", "twice"), 3, {"bucketed"}, twice);
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e1.state, Grade::State::kFailed);
  EXPECT_EQ(first_finding(verdict), "undecided");  // without experiments
}

// While it trains a step of the live layout is proven too, and copies along tp are compared: masters too, in
// stages of two sizes.
TEST_F(AxisRun, IsWatchedWhileItTrains) {
  std::size_t turn = 0;
  for (const char* dtype : {"float32", "bfloat16"})
    for (const char* set : {"tp=2 strategy=zero3 share_parameters=off", "pp=2 share_parameters=off",
                            "pp=2 strategy=zero3 share_parameters=off"}) {
      if (!full_tests() && turn++ % 2 == 0) continue;
      const RunConfig config = on(text("x", dtype), std::string(set) + " verify.every=2", "watched");
      EXPECT_EQ(checked(config, 4).outcomes[0].end, Outcome::End::kFinished) << dtype << ", " << set;
    }
  for (const char* parameter : {"model.norm.weight", "model.layers.1.mlp.down_proj.weight"}) {
    const RunConfig config = on(text("x", "float32"), "tp=2 share_parameters=off", "other-bit");
    const Run stopped = run(config, 4, [&](World& world, TrainerHooks& hooks) {
      hooks.check = [parameter, rank = world.rank](RunningRun& running) {
        const at::NoGradGuard no_grad;
        for (auto& [own, tensor] : running.run.model.named())
          if (own == parameter && rank == 3 && running.step == 2) tensor.flatten()[0] += 1;
        return check_running(running);
      };
    });
    EXPECT_EQ(stopped.outcomes[0].end, Outcome::End::kRefuted) << parameter;
    EXPECT_EQ(stopped.outcomes[0].steps, 2) << parameter;
  }
}

// ---- losses of routers ----

// A learning rate that sends all weights out of range: the second step is refused on all ranks, and all know
// where.
TEST_F(AxisRun, RouterLogitsThatAreNotFiniteAreNamed) {
  for (const char* scope : {"step", "micro_batch"})
    for (const char* after : {"stop", "skip"}) {
      const bool stop = after == std::string("stop");  // skip: without losses, it is known all the same
      const RunConfig config = on(
          experts("x"),
          fmt::format("optimizer.kind=sgd schedule.peak=1e150 schedule.warmup=0 verify.at_end=false "
                      "train.max_norm=0 model.experts_every=1 train.on_non_finite={} {}",
                      after,
                      stop ? fmt::format("loss.balance_scope={}", scope) : "loss.balance=0 loss.router_z=0"),
          "infinite");
      for (const Outcome& outcome : run(config, 3).outcomes) {
        EXPECT_THAT(outcome.not_finite, HasSubstr("the router logits of layer 0 on rank 0"))
            << scope << after;
        EXPECT_EQ(outcome.end, stop ? Outcome::End::kDiverged : Outcome::End::kFinished);
      }
    }
}

// Another loss on every number of ranks, which is its definition; on one rank with one micro-batch it is that
// of the step. Cut into the same micro-batches, stages have the loss that ranks without them have.
TEST_F(AxisRun, MicroBatchScopeIsThatOfTheMicroBatches) {
  const RunConfig base = experts("x");
  const std::string micro = "loss.balance_scope=micro_batch verify.at_end=false batch.packs_per_micro_batch=";
  const auto trained = [&](int ranks, const std::string& set) { return run(on(base, set, "scope"), ranks); };
  const auto balance = [](const Run& of) { return term(of.steps[0], "balance"); };
  const Run step = trained(1, "batch.packs_per_micro_batch=5");
  expect_same(trained(1, micro + "5"), step, 0, "one rank");
  expect_same(trained(5, micro + "5"), step, 0, "five ranks, one pack each");
  // Three rounds, in the last of which one of two ranks has nothing.
  const Run alone = trained(1, micro + "1"), both = trained(2, micro + "1");
  EXPECT_GT(std::abs(balance(both) - balance(step)), 1e-6);
  EXPECT_GT(std::abs(balance(both) - balance(alone)), 1e-6);
  expect_same(trained(2, micro + "1 pp=2"), alone, 0, "two stages");
  expect_same(trained(3, micro + "1 pp=3 schedule=gpipe"), alone, 0, "three stages");
  expect_same(trained(4, micro + "1 pp=2"), both, 0, "two data ranks, two stages");
  expect_same(trained(6, micro + "1 pp=3 schedule=zb-h1"), both, 0, "two data ranks, three stages");
  expect_same(trained(4, micro + "1 pp=2 ep=2"), both, 0, "experts on two ranks, two stages");
  EXPECT_THAT(config_error_of([&] { trained(2, micro + "1 pp=2 loss.balance_over=model"); }),
              AllOf(HasSubstr("loss.balance_scope"), HasSubstr("loss.balance_over = \"layers\"")));
}

// Bytes to other ranks' experts and back follow from the choices of tokens exactly: with ranks out
// of packs, and everything that makes a forward twice.
TEST_F(AxisRun, TrafficToExpertsIsTheFormulas) {
  std::size_t turn = 0;
  for (const char* dtype : {"float32", "bfloat16"})
    for (const OnRanks& cell : {OnRanks{2, "ep=2"},
                                {3, "ep=3"},
                                {3, "ep=3 batch.packs_per_micro_batch=1"},
                                {4, "ep=2 strategy=zero2"},
                                {2, "ep=2 loss.balance=0"},
                                {3, "ep=3 expert_overlap=halves"},
                                {2, "ep=2 strategy=zero3 share_parameters=off checkpoint_activations=true"},
                                {4, "ep=4 cp_ring=2"},
                                {4, "ep=2 tp=2"},
                                {4, "ep=2 pp=2 batch.packs_per_micro_batch=1"}}) {
      if (!full_tests() && takes_first(turn++ % 10) != (dtype[0] == 'f')) continue;
      RunConfig config = on(experts("x", dtype), cell.set, "traffic");
      config.run.memory = true, config.verify.at_end = false, config.train.steps = 2;
      for (const Outcome& outcome : run(config, cell.ranks).outcomes) {
        ASSERT_TRUE(outcome.to_experts) << cell.set;
        EXPECT_GT(outcome.to_experts->bytes, 0) << cell.set << dtype;
        EXPECT_EQ(outcome.to_experts->bytes, outcome.to_experts->by_formula) << cell.set << dtype;
      }
    }
  RunConfig without = on(experts("x"), "train.steps=2", "without");
  without.run.memory = true;
  EXPECT_FALSE(run(without, 2).outcomes[0].to_experts);
}

// ---- what is refused ----

TEST_F(AxisRun, WhatDoesNotFitTheRanksIsRefused) {
  const RunConfig plain = deep("x"), moe = experts("x");
  const auto refused = [&](const RunConfig& base, int ranks, const std::string& set) {
    return config_error_of([&] { run(on(base, set, "refused"), ranks); });
  };
  EXPECT_THAT(refused(plain, 2, "strategy=zero3 share_parameters=off gather_limit_bytes=20000"),
              HasSubstr("gather_limit_bytes"));
  EXPECT_THAT(refused(plain, 4, "cp_ring=3"), HasSubstr("product divides the ranks: 1, 2, 4"));
  EXPECT_THAT(refused(changed(plain, "model.heads=2 model.key_value_heads=1"), 3, "cp_ulysses=3"),
              HasSubstr("Use cp_ulysses 2, and cp_ring for the rest"));
  EXPECT_THAT(refused(plain, 7, "tp=7"), HasSubstr("7 ranks for 6 query heads; expected at most 6"));
  EXPECT_THAT(refused(plain, 4, "tp=3"), HasSubstr("parallel.tp: found 3 for 4 ranks"));
  EXPECT_THAT(refused(plain, 4, "tp=2 cp_ulysses=2"), HasSubstr("parallel.cp_ulysses"));
  EXPECT_THAT(refused(plain, 2, "tp=2 sequence_parallel=false tensor_overlap=tokens"),
              HasSubstr("parallel.tensor_overlap: found tokens, and parallel.sequence_parallel off"));
  EXPECT_THAT(refused(plain, 6, "pp=6"), HasSubstr("6 stages for 5 layers"));
  EXPECT_THAT(refused(plain, 3, "pp=2"), HasSubstr("parallel.pp"));
  EXPECT_THAT(refused(plain, 2, "pp=2 schedule=zb-h1 strategy=zero3"),
              AllOf(HasSubstr("zb-h1 under zero3"), HasSubstr("1f1b"), HasSubstr("zero2")));
  EXPECT_THAT(refused(plain, 2, "pp=2 schedule=zb-v"), HasSubstr("1 stages on each rank"));
  EXPECT_THAT(refused(plain, 2, "pp=2 schedule=interleaved"), HasSubstr("interleaved"));
  EXPECT_THAT(refused(plain, 2, "pp=2 stages_per_rank=2"), HasSubstr("1f1b"));
  EXPECT_THAT(refused(moe, 3, "ep=2"), AllOf(HasSubstr("parallel.ep"), HasSubstr("3 ranks")));
  EXPECT_THAT(refused(moe, 2, "tp=2 model.expert_feed_forward=1"),
              AllOf(HasSubstr("parallel.tp"), HasSubstr("features of an expert")));
  // Ranks that were started with different rules.
  run_ranks(3, [&](World& world) {
    RunConfig own = moe;
    if (world.rank == 1) own.model.shape.experts.per_token = 1;
    const auto other_rules =
        AllOf(HasSubstr("model.experts_per_token"), HasSubstr("1 on rank 1, 2 on rank 0"));
    EXPECT_THAT(config_error_of([&] { Trainer(own, world).run(); }), other_rules);
    EXPECT_THAT(config_error_of([&] { verify_run(own, world); }), other_rules);
  });
  EXPECT_THAT(config_error_of([&] {
                verified(on(moe, "verify.at_end=false loss.balance_scope=micro_batch", "unproven"), 2);
              }),
              HasSubstr("loss.balance_scope"));
}

TEST_F(AxisRun, WhatDoesNotFitTheModelIsRefused) {
  const std::string moe =
      "model.family=qwen3_moe model.query_key_norm=true model.experts=4 "
      "model.expert_feed_forward=32 ";
  const auto refused = [](const std::string& set) {
    return config_error_of([&] {
      std::istringstream words(set);
      parse_config("", "run.toml", {std::istream_iterator<std::string>(words), {}});
    });
  };
  EXPECT_EQ(refused(moe), "no error");
  EXPECT_EQ(refused(moe + "parallel.ep=2 parallel.tp=2"), "no error");
  EXPECT_EQ(refused(moe + "loss.balance=0.1 loss.balance_scope=micro_batch verify.at_end=false"), "no error");
  EXPECT_EQ(expert_overlap_named(RunConfig().parallel.expert_overlap), ExpertOverlap::kNone);
  EXPECT_EQ(ExpertParallelOptions().overlap, ExpertOverlap::kNone);
  struct Refused {
    std::string set;
    std::vector<const char*> parts;
  };
  const std::vector<Refused> all = {
      {"parallel.sequence_parallel=false", {"parallel.tp is 1"}},
      {"parallel.tensor_overlap=weights", {"parallel.tp is 1"}},
      {"parallel.tensor_overlap=both", {"parallel.tensor_overlap"}},
      {moe + "parallel.ep=5", {"parallel.ep", "at most 4"}},
      {moe + "parallel.ep=2 parallel.expert_overlap=both", {"parallel.expert_overlap", "both", "halves"}},
      {moe + "parallel.expert_overlap=halves", {"parallel.expert_overlap", "parallel.ep is 1"}},
      {"parallel.ep=2", {"parallel.ep", "has none"}},
      {"model.kind=video parallel.ep=2", {"parallel.ep", "no effect"}},
      {moe + "model.experts_per_token=5", {"experts_per_token", "at most 4"}},
      {moe + "model.family=llama", {"experts"}},
      {moe + "model.shared_expert_feed_forward=8", {"qwen3_moe"}},
      {moe + "loss.balance=0.1 loss.balance_scope=micro_batch",
       {"loss.balance_scope", "verify.at_end = false"}},
      {moe + "loss.balance=0.1 loss.normalise_over=[\"dp_shard\",\"cp_ring\",\"cp_ulysses\"]",
       {"loss.normalise_over"}},
      {moe + "loss.router_z=0.1 model.experts_every=9", {"none has experts"}},
      {"model.kind=video loss.router_z=0.1", {"no effect"}},
      {"model.kind=scorer loss.router_z=0.1", {"no effect"}},
      {moe + "loss.balance_over=model", {"loss.balance is 0"}},
      {"loss.balance=0.1", {"loss.balance", "none has experts"}},
      {"model.family=mixtral model.experts=4 model.expert_feed_forward=32",
       {"expert_feed_forward", "mixtral"}}};
  for (const auto& [set, parts] : all)
    for (const char* part : parts) EXPECT_THAT(refused(set), HasSubstr(part)) << set;
}

}  // namespace
}  // namespace isograd
