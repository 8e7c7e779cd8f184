// A model of one's own as a list of modules in stages: its gradient, loss and norm are those of one process
// that calls the same modules one after another on the whole batch.
#include <gmock/gmock.h>

#include <atomic>

#include "staged_modules.hpp"

namespace isograd {
namespace {

using namespace staged;
using tensor::Gradient;

// The same by plain code: a forward in one line for each module.
struct Plain {
  std::map<std::string, at::Tensor> of;  // parameters by name
  at::Tensor mix(const at::Tensor& x, const Batch& batch, const std::string& name) const {
    at::Tensor mixed = at::zeros_like(x);
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      const auto begin = batch.cu_seqlens[f], end = batch.cu_seqlens[f + 1];
      for (auto row = begin; row < end; ++row)
        for (auto other = begin; other < end; ++other) {
          at::Tensor one = at::zeros({x.size(0), 1}, x.options());
          one[row][0] = 1.0 / static_cast<double>(end - begin);
          mixed = mixed + one.matmul(x.narrow(0, other, 1));
        }
    }
    return x + at::tanh(mixed.matmul(of.at(name).t()));
  }
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    return x.matmul(of.at(name + ".weight").t()) + of.at(name + ".bias");
  }
  at::Tensor logits(Kind kind, const Batch& batch) const {
    at::Tensor x = of.at("embed.weight").index_select(0, batch.tokens);
    x = mix(x, batch, "1.weight");
    if (kind == Kind::kBareStage) x = x.tanh();
    if (kind == Kind::kFrozenStage) x = linear(x, "2");
    if (kind == Kind::kMixed || kind == Kind::kTied) {
      x = linear(x.tanh(), "3");
      const at::Tensor mean = x.mean(1, true), off = x - mean;
      x = off / (off.square().mean(1, true) + 1e-5).sqrt() * of.at("4.0.weight") + of.at("4.0.bias");
      x = mix(linear(x, "4.1"), batch, "5.weight");
      x = linear(x.tanh(), "7");
    }
    return x.matmul(of.at(kind == Kind::kTied ? "embed.weight" : "head.weight").t());
  }
};

struct Cell {
  int pp = 2, stages_of_rank = 1, data = 1;  // pp 0: no such axis
  std::string schedule = "1f1b";
  int accumulation = 3;
  Mean mean = Mean::kTargets;
  Kind kind = Kind::kMixed;
  std::string strategy = "bucketed";
  double slip = 1;  // see Mix
  int ranks() const { return std::max(pp, 1) * data; }
  Grid grid() const { return pp == 0 ? Grid({{"dp_shard", data}}) : Grid({{"pp", pp}, {"dp_shard", data}}); }
  friend void PrintTo(const Cell& c, std::ostream* out) {
    *out << c.schedule << ", pp " << c.pp << " x " << c.stages_of_rank << " stages, data " << c.data << ", "
         << c.accumulation << " micro-batches, " << c.strategy << ", kind " << static_cast<int>(c.kind)
         << ", sample mean " << (c.mean == Mean::kSamples);
  }
};

MicroBatches step_of(const Cell& cell, int place) {
  return tensor::step_of(place, cell.data, kVocabulary, cell.accumulation);
}

struct Found {
  Gradient gradient;
  std::map<std::string, at::Tensor> values;  // initial ones, whole
  std::vector<StepReport> reports;
};

ForwardLossTerms with_cross_entropy(const PipelineModel& model) {
  return model.forward_loss({"cross_entropy"}, [](const at::Tensor& logits, const Batch& batch) -> LossTerms {
    return {{"cross_entropy", cross_entropy_sum(logits, batch.targets, {.weights = batch.weights})}};
  });
}

Found train(const Cell& cell) {
  Found found;
  const int ranks = cell.ranks();
  found.reports.resize(static_cast<std::size_t>(ranks));
  run_ranks(
      ranks,
      [&](World& world) {
        const Mesh mesh(world, cell.grid());
        PipelineModel model(list_of(cell.kind), {.seed = 5, .dtype = at::kDouble});
        const Layout placed =
            model.split(mesh, {.schedule = cell.schedule, .stages_of_rank = cell.stages_of_rank});
        for (const auto& child : model.modules().children())
          if (auto* mix = dynamic_cast<Mix*>(child.get()); mix && model.pipeline().own_stages().back() == 0)
            mix->slip = cell.slip;
        std::map<std::string, at::Tensor> values;
        for (const PlacedParameter& each : placed.parameters()) {
          at::Tensor own = at::empty({0}, at::kDouble);
          for (const auto& [name, tensor] : model.named())
            if (name == each.name) own = tensor.detach();
          values[each.name] = placed.whole(each.name, own).clone();
        }
        const auto layout =
            testing::strategy_named(cell.strategy).make(model.parameters(), mesh, {.bucket_bytes = 500});
        const auto mean = tensor::normalizer_of(cell.mean);
        const auto optimizer = sgd({.learning_rate = 0});
        Step step(with_cross_entropy(model), *layout, *mean, *optimizer, through(model.pipeline()));
        const StepReport report = step(step_of(cell, mesh.place(mesh.data())));
        found.reports[static_cast<std::size_t>(world.rank)] = report;
        std::map<std::string, at::Tensor> local;
        for (const auto& view : layout->views()) local[view.name] = view.gradient;
        std::map<std::string, at::Tensor> gradients;
        for (const PlacedParameter& each : placed.parameters()) {
          at::Tensor trained = at::full({1}, local.contains(each.name) ? 1 : 0, at::kLong);
          world.group.all_reduce(trained, ReduceOp::kMax);
          if (trained.item<std::int64_t>() != 0)
            gradients[each.name] =
                placed.whole(each.name, each.held ? local.at(each.name) : at::empty({0}, at::kDouble))
                    .clone();
        }
        if (world.rank == 0) found.gradient = {.of = gradients, .loss = report.loss}, found.values = values;
      },
      kPatience);
  return found;
}

// The whole batch at once, of all data ranks.
Gradient one_process(const Cell& cell, const std::map<std::string, at::Tensor>& values) {
  Plain model;
  for (const auto& [name, value] : values) {
    const bool frozen = name.starts_with("3.") || (cell.kind == Kind::kFrozenStage && name.starts_with("2."));
    model.of[name] = value.clone().set_requires_grad(!frozen);
  }
  double targets = 0, samples = 0;
  for (int place = 0; place < cell.data; ++place)
    for (const Batch& batch : step_of(cell, place))
      for (const std::int64_t count : batch.sample_targets) targets += double(count), samples += count > 0;
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int place = 0; place < cell.data; ++place)
    for (const Batch& batch : step_of(cell, place)) {
      const at::Tensor log_p = at::log_softmax(model.logits(cell.kind, batch), 1);
      for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
        for (auto t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t) {
          const auto target = batch.targets[t].item<std::int64_t>();
          if (target == kIgnoreIndex) continue;
          const double of =
              cell.mean == Mean::kTargets ? targets : samples * static_cast<double>(batch.sample_targets[f]);
          loss = loss - log_p[t][target] / of;
        }
    }
  loss.backward();
  Gradient result{.of = {}, .loss = loss.item<double>()};
  for (const auto& [name, tensor] : model.of)
    if (tensor.requires_grad()) result.of[name] = tensor.grad();
  return result;
}

class PipelineModules : public ::testing::TestWithParam<Cell> {};

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"})
    for (const int pp : {1, 2, 3, 4})
      all.push_back({.pp = pp,
                     .schedule = schedule,
                     .accumulation = pp + 1,
                     .mean = pp % 2 == 0 ? Mean::kSamples : Mean::kTargets});
  for (const int pp : {1, 2, 3, 4}) {
    all.push_back({.pp = pp, .stages_of_rank = 2, .schedule = "interleaved", .accumulation = pp + 1});
    all.push_back({.pp = pp, .stages_of_rank = 2, .schedule = "zb-v", .mean = Mean::kSamples});
  }
  for (const char* strategy : {"naive", "bucketed", "zero1", "zero2"}) {
    all.push_back({.pp = 2, .data = 2, .strategy = strategy});
    all.push_back({.pp = 2, .stages_of_rank = 2, .data = 2, .schedule = "zb-v", .strategy = strategy});
    all.push_back({.pp = 4, .data = 2, .kind = Kind::kBareStage, .strategy = strategy});
    all.push_back({.pp = 4, .data = 2, .kind = Kind::kFrozenStage, .strategy = strategy});
  }
  all.push_back({.pp = 2, .data = 3, .schedule = "zb-h1", .mean = Mean::kSamples});
  all.push_back({.pp = 0, .data = 2});
  all.push_back({.pp = 0, .stages_of_rank = 2, .data = 2, .schedule = "zb-v", .kind = Kind::kTied});
  for (const Kind kind : {Kind::kBareStage, Kind::kFrozenStage})
    for (const char* schedule : {"1f1b", "gpipe", "zb-h1"})
      all.push_back({.pp = 4, .schedule = schedule, .kind = kind});
  for (const int pp : {1, 2, 3, 4}) all.push_back({.pp = pp, .kind = Kind::kTied});
  for (const int pp : {2, 3})
    all.push_back({.pp = pp, .data = 2, .schedule = "zb-h1", .kind = Kind::kTied, .strategy = "zero2"});
  for (const int pp : {2, 3})  // both ends on the first rank
    all.push_back({.pp = pp, .stages_of_rank = 2, .schedule = "zb-v", .kind = Kind::kTied});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cells, PipelineModules, ::testing::ValuesIn(cells()));

TEST_P(PipelineModules, GradientLossAndNormAreOneProcesss) {
  const Cell cell = GetParam();
  const Found found = train(cell);
  const Gradient wanted = one_process(cell, found.values);
  EXPECT_EQ(found.gradient.of.size(), wanted.of.size());
  EXPECT_LT(tensor::largest_error(found.gradient, wanted), 1e-10);
  for (const StepReport& report : found.reports) {
    EXPECT_NEAR(report.loss, wanted.loss, 1e-10 * wanted.loss);
    EXPECT_NEAR(report.norm, wanted.norm(), 1e-10 * wanted.norm());
    ASSERT_EQ(report.terms.size(), 1u);
    EXPECT_EQ(report.terms[0].name, "cross_entropy");
  }
}

// A stage's gradient that is off by a millionth.
TEST(PipelineModulesPlanted, AStageThatScalesItsGradientIsSeen) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    Cell cell{.pp = 2, .schedule = schedule};
    const Found right = train(cell);
    const Gradient wanted = one_process(cell, right.values);
    EXPECT_LT(tensor::largest_error(right.gradient, wanted), 1e-10);
    cell.slip = 1 + 1e-6;
    const Found wrong = train(cell);
    EXPECT_NEAR(wrong.reports[0].loss, wanted.loss, 1e-10 * wanted.loss) << "which does not show it";
    const auto errors = tensor::errors(wrong.gradient, wanted);
    EXPECT_GT(errors.at("1.weight"), 1e-7);
    EXPECT_LT(errors.at("head.weight"), 1e-10) << "behind it";
  }
}

// Each stage's own part of the gradient is not the whole one: what is compared above is put together.
TEST(PipelineModulesPlanted, DataRanksHaveOtherGradients) {
  const Cell cell{.pp = 2, .data = 2};
  const Found found = train(cell);
  Cell half = cell;
  half.data = 1;
  const Gradient wanted = one_process(cell, found.values), of_one = one_process(half, found.values);
  EXPECT_GT(tensor::largest_error(of_one, wanted), 0.1);
}

TEST(PipelineModulesValues, AreTheSameForEveryNumberOfStages) {
  const auto wanted = train({.pp = 1}).values;
  EXPECT_EQ(wanted.size(), 12u);
  EXPECT_FALSE(wanted.at("1.weight").equal(wanted.at("5.weight"))) << "each module has its own";
  for (const Cell& cell : {Cell{.pp = 2}, Cell{.pp = 4},
                           Cell{.pp = 2, .stages_of_rank = 2, .schedule = "zb-v"}, Cell{.pp = 2, .data = 2}})
    for (const auto& [name, value] : train(cell).values) EXPECT_TRUE(value.equal(wanted.at(name))) << name;
  at::manual_seed(4);
  const at::Tensor drawn = at::rand({3});
  at::manual_seed(4);
  PipelineModel(list_of(Kind::kMixed)).make_all();
  EXPECT_TRUE(at::rand({3}).equal(drawn)) << "the generator is as it was";
}

TEST(PipelineModulesMaking, EachRankMakesItsOwnAlone) {
  std::array<std::atomic<int>, 6> made{};
  run_ranks(3, [&](World& world) {
    std::vector<PipelineModule> list;
    for (std::size_t i = 0; i < made.size(); ++i)
      list.push_back(pipeline_module([&made, i] {
        ++made[i];
        return std::make_shared<Counting>();
      }));
    PipelineModel model(std::move(list));
    const Mesh mesh(world, Grid({{"pp", 3}}));
    const Layout placed = model.split(mesh);
    EXPECT_EQ(placed.parameters().size(), 6u);
    EXPECT_EQ(model.named().size(), 2u);
    EXPECT_EQ(model.modules().children().size(), 2u);
    for (const PlacedParameter& each : placed.parameters())
      EXPECT_EQ(each.held,
                each.name.front() - '0' == 2 * world.rank || each.name.front() - '0' == 2 * world.rank + 1);
  });
  for (const auto& times : made) EXPECT_EQ(times, 1);
}

// Outside of a step each rank computes its stages one after another.
TEST(PipelineModulesLook, GivesTheOutputOfOneProcess) {
  const Batch batch = tensor::step_of(0, 1, kVocabulary)[0];
  PipelineModel whole(list_of(Kind::kMixed), {.seed = 5, .dtype = at::kDouble});
  whole.make_all();
  const at::Tensor wanted = whole.outputs(batch).output.detach();
  EXPECT_EQ(wanted.sizes(), (std::vector<std::int64_t>{batch.num_tokens(), kVocabulary}));
  for (const Cell& cell : {Cell{.pp = 3}, Cell{.pp = 2, .stages_of_rank = 2, .schedule = "zb-v"}})
    run_ranks(cell.pp, [&](World& world) {
      const at::NoGradGuard no_grad;
      PipelineModel model(list_of(Kind::kMixed), {.seed = 5, .dtype = at::kDouble});
      model.split(Mesh(world, cell.grid()),
                  {.schedule = cell.schedule, .stages_of_rank = cell.stages_of_rank});
      const at::Tensor output = model.outputs(batch).output;
      EXPECT_EQ(output.defined(), model.pipeline().rank_of(model.pipeline().stages() - 1) == world.rank);
      if (output.defined()) {
        EXPECT_TRUE(output.equal(wanted));
      }
      world.group.barrier();
    });
}

}  // namespace
}  // namespace isograd
