// A decoder whose layers lie in stages: its gradient, loss and norm are those of one process, under every
// schedule, beside data and tensor ranks.
#include <gmock/gmock.h>

#include "counted_products.hpp"
#include "full_tests.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "tensor_step.hpp"

namespace isograd {
namespace {

using tensor::Gradient;

struct Cell {
  int pp = 2, stages_of_rank = 1, data = 1, tp = 1;
  std::string schedule = "1f1b";
  int accumulation = 3;  // the most micro-batches of a data rank
  Mean mean = Mean::kTargets;
  bool tied = false;
  std::string strategy = "bucketed";
  double slip = 1;             // what a planted mistake multiplies the last stage's stream by
  bool after_nothing = false;  // a step without a target anywhere goes before
  bool idle = false;   // all data ranks but the first have no micro-batch, and one of that rank's is empty
  int lost = -1;       // the micro-batch whose gradients of weights a planted mistake loses
  bool fused = false;  // the output and its cross entropy
  // Of zero3: units keep their parameters from forward to backward, compute forwards again, share one copy.
  bool stays_whole = false, checkpoint = false, share = false;

  int stages() const { return pp * stages_of_rank; }
  DecoderConfig config() const {
    DecoderConfig config = tensor::shape(4, 2, tied);
    config.layers = std::max(2, stages()) + 1;
    return config;
  }
  Grid grid() const {
    return Grid(
        {{"pp", pp}, {"dp_replicate", 1}, {"dp_shard", data}, {"cp_ring", 1}, {"cp_ulysses", 1}, {"tp", tp}});
  }
  friend void PrintTo(const Cell& c, std::ostream* out) {
    *out << c.schedule << ", pp " << c.pp << " x " << c.stages_of_rank << " stages, data " << c.data
         << ", tp " << c.tp << ", " << c.accumulation << " micro-batches, " << c.strategy << ", tied "
         << c.tied << ", sample mean " << (c.mean == Mean::kSamples) << ", idle " << c.idle << ", fused "
         << c.fused << (c.stays_whole ? ", stays whole" : "") << (c.checkpoint ? ", checkpoint" : "")
         << (c.share ? ", one copy" : "");
  }
};

struct Found {
  Gradient gradient;
  std::vector<StepReport> reports;
};

MicroBatches batches_of(const Cell& cell, const Mesh& mesh) {
  const int place = mesh.place(kSampleAxes), places = cell.idle ? 1 : mesh.size(kSampleAxes);
  if (place >= places) return {};
  MicroBatches own = tensor::step_of(place, places, cell.config().vocabulary, cell.accumulation);
  if (cell.idle) own.insert(own.begin() + 1, empty_batch());
  return own;
}

// Gradients are as they were before the second half of one micro-batch's backward.
MicroBatchSchedule losing(int lost, const Pipeline& pipeline, DataParallel& layout) {
  return [lost, &pipeline, &layout](MicroBatchWork& work) {
    pipeline.run(work.size(),
                 {.forward = [&](std::size_t i, std::size_t part) { work.forward(i, part); },
                  .inputs = [&](std::size_t i, std::size_t part) { work.backward_inputs(i, part); },
                  .weights =
                      [&](std::size_t i, bool last, std::size_t part) {
                        std::vector<at::Tensor> before;
                        for (const auto& view : layout.views()) before.push_back(view.gradient.clone());
                        work.backward_weights(i, last, part);
                        const auto views = layout.views();
                        if (static_cast<int>(i) == lost)
                          for (std::size_t v = 0; v < views.size(); ++v) views[v].gradient.copy_(before[v]);
                      }});
  };
}

Found train(const Cell& cell) {
  Found found;
  const int ranks = cell.pp * cell.data * cell.tp;
  found.reports.resize(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh(world, cell.grid());
    const auto model = tensor::whole_model(cell.config(), at::kDouble);
    const auto pipeline = std::make_shared<Pipeline>(
        mesh, PipelineOptions{.schedule = cell.schedule, .stages_of_rank = cell.stages_of_rank});
    const Layout along_tp = cut_decoder(*model, mesh);
    const Layout placed = split_decoder(*model, mesh, pipeline, along_tp.placements());
    std::vector<std::pair<std::string, at::Tensor>> own;
    for (const auto& [name, tensor] : model->named())
      if (placed.parameter(name).held) own.emplace_back(name, tensor);
    TrainableParameters parameters = trainable_parameters(own);
    parameters.placements = placed.placements();
    const ModelUnits units = model_units(*model, RunConfig{});
    std::unique_ptr<DataParallel> layout;
    if (cell.strategy == "zero3")
      layout = fully_shard(units.root, model->named(), units.blocks, mesh,
                           {.reshard_after_forward = !cell.stays_whole,
                            .checkpoint = cell.checkpoint,
                            .placements = placed.placements(),
                            .share_parameters = cell.share,
                            .blocks_of_pass = units.blocks_of_pass});
    else
      layout = testing::strategy_named(cell.strategy).make(parameters, mesh, {.bucket_bytes = 3000});
    const auto mean = tensor::normalizer_of(cell.mean);
    const auto optimizer = sgd({.learning_rate = 0});
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      const DecoderOutputs outputs = model->outputs(batch);
      if (outputs.passed_on.defined()) return {{"cross_entropy", outputs.passed_on}};
      if (cell.fused)
        return {{"cross_entropy",
                 linear_cross_entropy_sum(
                     outputs.hidden, model->output_weight(), batch.targets,
                     {.weights = batch.weights, .shard = model->vocabulary(), .tile_tokens = 4})}};
      return {{"cross_entropy", cross_entropy_sum(model->logits_of(outputs.hidden * cell.slip), batch.targets,
                                                  {.weights = batch.weights, .shard = model->vocabulary()})}};
    };
    StepOptions options = through(*pipeline);
    if (cell.lost >= 0) options.schedule = losing(cell.lost, *pipeline, *layout);
    Step step(cell.strategy == "zero3" ? inside(units.root, forward) : forward, *layout, *mean, *optimizer,
              std::move(options));
    if (cell.after_nothing) {
      MicroBatches nothing = batches_of(cell, mesh);
      for (Batch& batch : nothing) {
        batch.targets = at::full_like(batch.targets, kIgnoreIndex);
        batch.sample_targets.assign(batch.sample_targets.size(), 0);
      }
      EXPECT_FALSE(step(nothing).updated);
    }
    if (cell.idle) {
      EXPECT_FALSE(step({}).updated);  // no rank has any
    }
    const StepReport report = step(batches_of(cell, mesh));
    found.reports[static_cast<std::size_t>(world.rank)] = report;
    const auto gradients = tensor::whole_gradients(*layout, placed);
    if (world.rank == 0) found.gradient.of = gradients;
    if (world.rank == 0) found.gradient.loss = report.loss;
  });
  return found;
}

class PipelineParallel : public ::testing::TestWithParam<Cell> {};

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const char* schedule : {"one-after-another", "gpipe", "1f1b"})
    for (const int pp : {1, 2, 3, 4, 5})
      all.push_back({.pp = pp,
                     .schedule = schedule,
                     .accumulation = pp % 2 == 0 ? pp : 2 * pp + 1,
                     .mean = pp % 2 == 0 ? Mean::kSamples : Mean::kTargets});
  for (const auto& [pp, stages] : {std::pair{2, 2}, {2, 3}, {3, 2}, {4, 2}})
    for (const int rounds : {1, 2})
      all.push_back(
          {.pp = pp, .stages_of_rank = stages, .schedule = "interleaved", .accumulation = pp * rounds});
  all.push_back({.pp = 3, .stages_of_rank = 2, .schedule = "interleaved", .accumulation = 4});  // filled up
  all.push_back({.pp = 2, .stages_of_rank = 2, .schedule = "one-after-another"});
  for (const char* strategy : {"naive", "bucketed", "zero1", "zero2"})
    all.push_back({.pp = 2, .data = 2, .strategy = strategy});
  all.push_back({.pp = 2, .tp = 2, .mean = Mean::kSamples});
  all.push_back({.pp = 2, .data = 2, .tp = 2, .schedule = "gpipe"});
  all.push_back({.pp = 2, .tied = true});
  all.push_back(
      {.pp = 2, .stages_of_rank = 2, .data = 2, .schedule = "interleaved", .accumulation = 2, .tied = true});
  all.push_back({.pp = 8, .accumulation = 8});
  for (const Mean mean : {Mean::kTargets, Mean::kSamples})
    for (const int pp : {2, 3}) all.push_back({.pp = pp, .data = 2, .mean = mean, .after_nothing = true});
  for (const char* strategy : {"naive", "bucketed", "zero2"})
    all.push_back({.pp = 3, .data = 2, .schedule = "gpipe", .strategy = strategy, .idle = true});
  all.push_back({.pp = 2,
                 .stages_of_rank = 2,
                 .data = 3,
                 .schedule = "interleaved",
                 .mean = Mean::kSamples,
                 .idle = true});
  // Backwards in halves.
  for (const int pp : {1, 2, 3, 4, 5})
    for (const int micro_batches : {1, pp, 2 * pp + 1}) {
      const Mean mean = (pp + micro_batches) % 2 == 0 ? Mean::kSamples : Mean::kTargets;
      all.push_back({.pp = pp, .schedule = "zb-h1", .accumulation = micro_batches, .mean = mean});
      all.push_back(
          {.pp = pp, .stages_of_rank = 2, .schedule = "zb-v", .accumulation = micro_batches, .mean = mean});
    }
  for (const char* strategy : {"naive", "bucketed", "zero1", "zero2"}) {
    all.push_back({.pp = 2, .data = 2, .schedule = "zb-h1", .strategy = strategy});
    all.push_back({.pp = 2, .stages_of_rank = 2, .data = 2, .schedule = "zb-v", .strategy = strategy});
  }
  for (const Mean mean : {Mean::kTargets, Mean::kSamples}) {
    all.push_back({.pp = 2, .tp = 2, .schedule = "zb-h1", .mean = mean});
    all.push_back({.pp = 2, .stages_of_rank = 2, .data = 2, .tp = 2, .schedule = "zb-v", .mean = mean});
    all.push_back({.pp = 2, .data = 2, .schedule = "zb-h1", .mean = mean, .after_nothing = true});
  }
  all.push_back({.pp = 2, .schedule = "zb-h1", .tied = true});
  all.push_back({.pp = 2, .data = 2, .schedule = "zb-h1", .tied = true, .strategy = "zero2"});
  for (const int pp : {2, 3})  // both ends on the first rank
    all.push_back({.pp = pp, .stages_of_rank = 2, .schedule = "zb-v", .accumulation = 2 * pp, .tied = true});
  all.push_back({.pp = 2, .schedule = "zb-h1", .fused = true});
  all.push_back({.pp = 2, .stages_of_rank = 2, .tp = 2, .schedule = "zb-v", .tied = true, .fused = true});
  // A tied embedding's ends on two ranks of more.
  for (const int pp : {3, 4, 5})
    for (const char* schedule : {"1f1b", "zb-h1"})
      all.push_back({.pp = pp, .schedule = schedule, .accumulation = pp, .tied = true});
  all.push_back({.pp = 3, .stages_of_rank = 2, .schedule = "interleaved", .tied = true});
  for (const char* strategy : {"naive", "zero1", "zero2", "zero3"})
    all.push_back({.pp = 3, .data = 2, .tied = true, .strategy = strategy});
  all.push_back({.pp = 3, .tp = 2, .tied = true});
  all.push_back({.pp = 3, .tied = true, .after_nothing = true});
  // Units of ZeRO-3 in stages.
  for (const auto& [schedule, stages] :
       {std::pair{"one-after-another", 2}, {"gpipe", 1}, {"1f1b", 1}, {"interleaved", 2}})
    for (const int data : {2, 3}) {
      const Cell cell{
          .pp = 2, .stages_of_rank = stages, .data = data, .schedule = schedule, .strategy = "zero3"};
      all.push_back(cell);
      for (bool Cell::*option : {&Cell::stays_whole, &Cell::checkpoint, &Cell::share, &Cell::tied,
                                 &Cell::idle, &Cell::after_nothing}) {
        Cell with = cell;
        with.*option = true;
        if (data == 2) all.push_back(with);
      }
    }
  all.push_back({.pp = 4, .data = 2, .mean = Mean::kSamples, .strategy = "zero3", .fused = true});
  all.push_back({.pp = 2, .data = 2, .tp = 2, .strategy = "zero3"});
  all.push_back({.pp = 3, .strategy = "zero3"});  // nobody to share with
  if (!full_tests()) return all;
  for (const int pp : {1, 2, 3, 4, 5, 8})
    for (const auto& [schedule, stages] : {std::pair{"one-after-another", 1},
                                           {"one-after-another", 2},
                                           {"gpipe", 1},
                                           {"1f1b", 1},
                                           {"interleaved", 2},
                                           {"interleaved", 3},
                                           {"zb-h1", 1},
                                           {"zb-v", 2}})
      for (const int micro_batches : {pp, 2 * pp + 1})
        for (const Mean mean : {Mean::kTargets, Mean::kSamples})
          for (const bool tied : {false, true})
            all.push_back({.pp = pp,
                           .stages_of_rank = stages,
                           .schedule = schedule,
                           .accumulation = micro_batches,
                           .mean = mean,
                           .tied = tied});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cells, PipelineParallel, ::testing::ValuesIn(cells()));

Gradient one_process(const Cell& cell) {
  return tensor::one_process(*tensor::whole_model(cell.config(), at::kDouble), cell.idle ? 1 : cell.data,
                             cell.accumulation, cell.mean);
}

TEST_P(PipelineParallel, GradientLossAndNormAreOneProcesss) {
  const Cell cell = GetParam();
  const Gradient wanted = one_process(cell);
  const Found found = train(cell);
  EXPECT_LT(tensor::largest_error(found.gradient, wanted), 1e-10);
  for (const StepReport& report : found.reports) {
    EXPECT_NEAR(report.loss, wanted.loss, 1e-10 * wanted.loss);
    EXPECT_NEAR(report.norm, wanted.norm(), 1e-10 * wanted.norm());
    ASSERT_EQ(report.terms.size(), 1u);
    EXPECT_EQ(report.terms[0].name, "cross_entropy");
    EXPECT_NEAR(report.terms[0].value, wanted.loss, 1e-10 * wanted.loss);
  }
}

// Every schedule adds micro-batches up in their order.
TEST(PipelineParallelBits, AreTheSameUnderAllSchedules) {
  const std::vector<std::pair<int, std::vector<const char*>>> by_stages = {{1, {"gpipe", "1f1b", "zb-h1"}},
                                                                           {2, {"interleaved", "zb-v"}}};
  for (const auto& [stages, schedules] : by_stages)
    for (const bool fused : {false, true}) {
      Cell cell{.pp = 3,
                .stages_of_rank = stages,
                .schedule = "one-after-another",
                .accumulation = 6,
                .fused = fused};
      const Gradient wanted = train(cell).gradient;
      for (const char* schedule : schedules) {
        cell.schedule = schedule;
        for (const auto& [name, gradient] : train(cell).gradient.of)
          EXPECT_TRUE(gradient.equal(wanted.of.at(name))) << schedule << ", " << name;
      }
    }
}

// One for the forward, one for the gradient of what goes in, one for that of the weight.
TEST(PipelineParallelHalves, MakeEachMatrixProductOnce) {
  one_process(Cell{});  // the first product of a process tries kernels out
  for (const auto& [schedule, stages] : {std::pair{"1f1b", 1}, {"zb-h1", 1}, {"zb-v", 2}}) {
    const Cell cell{.pp = 2, .stages_of_rank = stages, .schedule = schedule, .accumulation = 4};
    const CountedProducts counted;
    train(cell);
    // q, k, v, o, gate, up and down of each layer, and the output.
    EXPECT_EQ(CountedProducts::count, 4 * 3 * (7 * cell.config().layers + 1)) << schedule;
  }
}

TEST(PipelineParallelPlanted, AStreamThatIsOffIsSeen) {
  Cell cell{.pp = 2};
  const Gradient wanted = one_process(cell);
  cell.slip = 1 + 1e-6;
  EXPECT_GT(tensor::largest_error(train(cell).gradient, wanted), 1e-8);
}

TEST(PipelineParallelPlanted, AMicroBatchWhoseWeightsAreLostIsSeen) {
  for (const auto& [schedule, stages] : {std::pair{"zb-h1", 1}, {"zb-v", 2}}) {
    Cell cell{.pp = 2, .stages_of_rank = stages, .schedule = schedule, .accumulation = 4};
    const Gradient wanted = one_process(cell);
    cell.lost = 4;  // none of them: the way to lose one is no mistake itself
    EXPECT_LT(tensor::largest_error(train(cell).gradient, wanted), 1e-10);
    cell.lost = 2;
    const auto errors = tensor::errors(train(cell).gradient, wanted);
    for (const auto& [name, error] : errors) EXPECT_GT(error, 1e-3) << name;
  }
}

// Outside of a step: no schedule says whose turn it is, and none is needed where each rank has one stage.
TEST(PipelineParallelLook, GivesTheLogitsOfOneProcess) {
  const Cell cell{.pp = 3};
  const at::NoGradGuard no_grad;
  const Batch batch = tensor::step_of(0, 1, cell.config().vocabulary)[0];
  const at::Tensor wanted = tensor::whole_model(cell.config(), at::kDouble)->logits(batch);
  const auto look = [&](World& world, const Cell& with, const at::Tensor& expected) {
    const at::NoGradGuard of_this_thread;
    const Mesh mesh(world, with.grid());
    const auto model = tensor::whole_model(with.config(), at::kDouble);
    const auto pipeline = std::make_shared<Pipeline>(
        mesh, PipelineOptions{.schedule = with.schedule, .stages_of_rank = with.stages_of_rank});
    split_decoder(*model, mesh, pipeline);
    const DecoderOutputs outputs = model->outputs(batch);
    if (!outputs.passed_on.defined()) {
      const at::Tensor logits = model->logits_of(outputs.hidden);
      EXPECT_LT((logits - expected).abs().max().item<double>(), 1e-12);
    }
    world.group.barrier();
  };
  run_ranks(3, [&](World& world) { look(world, cell, wanted); });
  // A rank with several stages computes them one after another, each once it is given what it needs.
  const Cell several{.pp = 2, .stages_of_rank = 2, .schedule = "interleaved"};
  const at::Tensor wanted_of_several = tensor::whole_model(several.config(), at::kDouble)->logits(batch);
  run_ranks(2, [&](World& world) { look(world, several, wanted_of_several); });
  run_ranks(2, [&](World& world) {
    Pipeline pipeline(Mesh(world, several.grid()), {.schedule = "interleaved", .stages_of_rank = 2});
    EXPECT_THAT(error_testing::error_of([&] { pipeline.stage(); }),
                ::testing::HasSubstr("a forward outside of a step, of a rank with 2 stages"));
    EXPECT_THAT(error_testing::error_of([&] { pipeline.look_at(1 - world.rank); }),
                ::testing::HasSubstr("one of this rank's"));
  });
}

TEST(PipelineParallelLayers, AreDealtByCost) {
  const auto counts = [](const std::vector<double>& costs, int stages, double behind = 0) {
    std::vector<std::int64_t> result;
    std::int64_t next = 0;
    for (const StageLayers& own : deal_layers(costs, stages, behind)) {
      EXPECT_EQ(own.begin, next);
      next += own.count;
      result.push_back(own.count);
    }
    EXPECT_EQ(next, static_cast<std::int64_t>(costs.size()));
    return result;
  };
  EXPECT_EQ(counts({1, 1, 1, 1}, 2), (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(counts({1, 1, 1, 1, 1, 1}, 2, 4), (std::vector<std::int64_t>{5, 1}));  // a head that costs four
  EXPECT_EQ(counts({1, 1, 5, 1, 1}, 3), (std::vector<std::int64_t>{2, 1, 2}));
  EXPECT_THAT(error_testing::error_of([] {
                deal_layers({1, 1}, 3);
              }),
              ::testing::HasSubstr("3 for 2 layers"));
}

TEST(PipelineParallelRefused, WhatCannotBeRun) {
  using ::testing::HasSubstr;
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, Cell{}.grid());
    const auto refused = [&](PipelineOptions options) {
      return error_testing::error_of([&] { Pipeline(mesh, std::move(options)); });
    };
    EXPECT_THAT(refused({.schedule = "zb-v"}), HasSubstr("1 stages on each rank"));
    EXPECT_THAT(refused({.table = make_pipeline("1f1b", 3, 1, 3)}), HasSubstr("2 ranks along pp"));
    Pipeline pipeline(mesh, {.table = make_pipeline("1f1b", 2, 1, 3)});
    EXPECT_THAT(error_testing::error_of([&] {
                  pipeline.run(4, {.forward = [](std::size_t, std::size_t) {},
                                   .backward = [](std::size_t, bool, std::size_t) {}});
                }),
                HasSubstr("4 micro-batches in the step"));
  });
}

}  // namespace
}  // namespace isograd
