// A decoder whose experts are dealt to ranks: its gradient, loss and norm are those of one process with all
// tokens and all experts, under every strategy and beside every other data axis.
#include <gmock/gmock.h>

#include <array>

#include "isograd/expert_parallel.hpp"
#include "tensor_step.hpp"

namespace isograd {
namespace {

using tensor::Errors;
using tensor::Gradient;

struct Cell {
  int ranks = 2;  // that see different tokens
  int ep = 2, ring = 1, replicas = 1, tp = 1;
  std::int64_t experts = 5, each = 2;
  std::string strategy = "bucketed";
  Mean mean = Mean::kTargets;
  int accumulation = 3;
  bool checkpointed = false;
  bool ties = false;     // routers of zeros: all tokens go to the first experts
  bool shared = false;   // an expert beside them that every token goes through
  bool sigmoid = false;  // a router of dots1, which has one too: groups, a selection bias, weights to 2.5
  bool sequence_parallel = true;
  std::function<void(TrainableParameters&)> change_placements = [](TrainableParameters&) {};

  int places() const { return ranks / ring; }
  DecoderConfig config() const {
    DecoderConfig config = small_config("qwen3");
    config.family = shared ? "qwen2_moe" : "qwen3_moe";
    if (shared) config.query_key_norm = false, config.attention_bias = true;
    config.vocabulary = 31, config.hidden = 12, config.heads = 4, config.key_value_heads = 2;
    config.head_dim = 4, config.feed_forward = 20;
    config.experts = {
        .count = experts, .per_token = each, .feed_forward = 7, .shared_feed_forward = shared ? 5 : 0};
    if (!sigmoid) return config;
    config.family = "dots1", config.query_key_norm = true, config.attention_bias = false;
    config.experts.shared_feed_forward = 14;
    config.experts.sigmoid = true, config.experts.scale = 2.5;
    config.experts.dense_layers = {0};
    if (experts % 4 == 0)
      config.experts.groups = experts / 2 > 4 ? 4 : 2, config.experts.groups_per_token = 2;
    return config;
  }
  Grid grid() const {
    const Grid plain({{"dp_replicate", replicas},
                      {"dp_shard", ranks / ring / replicas},
                      {"cp_ring", ring},
                      {"cp_ulysses", 1},
                      {"tp", tp}});
    return plain.viewed(data_axes(plain), {{"edp", ranks / ep}, {kExpertAxis, ep}});
  }
  friend void PrintTo(const Cell& c, std::ostream* out) {
    *out << c.ranks << " data ranks, tp " << c.tp << ", sequence parallel " << c.sequence_parallel << ", ep "
         << c.ep << ", ring " << c.ring << ", replicas " << c.replicas << ", " << c.each << " of "
         << c.experts << " experts, " << c.strategy << ", sample mean " << (c.mean == Mean::kSamples) << ", "
         << c.accumulation << " micro-batches, checkpointed " << c.checkpointed << ", ties " << c.ties
         << ", shared " << c.shared << ", sigmoid " << c.sigmoid;
  }
};

std::shared_ptr<DecoderLM> whole_model(const Cell& cell, at::ScalarType type, std::uint64_t draw = 0) {
  auto model = tensor::whole_model(cell.config(), type, draw);
  const at::NoGradGuard no_grad;
  if (cell.ties)
    for (auto [name, values] : model->named())
      if (name.find("mlp.gate.weight") != std::string::npos) values.zero_();
  for (auto [name, values] : model->named())
    if (name.ends_with("e_score_correction_bias"))
      values.copy_(at::arange(values.numel(), at::kDouble).mul(7 + static_cast<double>(draw)).sin().mul(0.2));
  return model;
}

// The experts of a token, by its sample, position and layer.
using Choices = std::map<std::array<std::int64_t, 3>, std::vector<std::int64_t>>;

template <typename F>
void for_tokens(const Batch& batch, std::int64_t layer, F&& with) {
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
    for (std::int64_t t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t)
      with(t, std::array{batch.sample_ids[f], batch.positions[t].item<std::int64_t>(), layer});
}

DecoderLM::ChooseExperts recorded(Choices& choices) {
  return [&choices](const Batch& batch, std::int64_t layer, const ExpertScores&,
                    const at::Tensor& likeliest) {
    for_tokens(batch, layer, [&](std::int64_t t, const auto& token) {
      const at::Tensor row = likeliest[t].contiguous();
      choices[token] = {row.const_data_ptr<std::int64_t>(), row.const_data_ptr<std::int64_t>() + row.numel()};
    });
    return likeliest;
  };
}

// Routing is discontinuous: in lower precision the comparison is of the same choices.
DecoderLM::ChooseExperts replayed(const Choices& choices) {
  return
      [&choices](const Batch& batch, std::int64_t layer, const ExpertScores&, const at::Tensor& likeliest) {
        at::Tensor chosen = likeliest.clone();
        for_tokens(batch, layer, [&](std::int64_t t, const auto& token) {
          chosen[t] = at::tensor(choices.at(token), at::kLong);
        });
        return chosen;
      };
}

Gradient one_process(const Cell& cell, at::ScalarType type, const DecoderLM::ChooseExperts& choose,
                     std::uint64_t draw = 0) {
  const auto model = whole_model(cell, type, draw);
  model->set_choice_of_experts(choose);
  return tensor::one_process(*model, cell.places(), cell.accumulation, cell.mean);
}

struct Found {
  Gradient gradient;
  std::vector<StepReport> reports;
};

Found train(const Cell& cell, at::ScalarType type, const DecoderLM::ChooseExperts& choose = {}) {
  Found found;
  found.reports.resize(static_cast<std::size_t>(cell.ranks * cell.tp));
  run_ranks(cell.ranks * cell.tp, [&](World& world) {
    const Mesh mesh(world, cell.grid());
    const auto model = whole_model(cell, type);
    const Layout along_tp = cut_decoder(*model, mesh, {.sequence_parallel = cell.sequence_parallel});
    const Layout placed = deal_experts(*model, mesh, along_tp.placements());
    if (choose) model->set_choice_of_experts(choose);
    if (cell.ring > 1) model->set_attention(ContextAttention(mesh));
    TrainableParameters parameters = trainable_parameters(model->named());
    parameters.placements = placed.placements();
    cell.change_placements(parameters);
    std::optional<ModelUnits> units;
    std::unique_ptr<DataParallel> layout;
    if (cell.strategy.starts_with("zero3")) {
      units = model_units(*model, RunConfig{});
      layout = fully_shard(units->root, model->named(), units->blocks, mesh,
                           {.checkpoint = cell.checkpointed,
                            .reduce_once = cell.strategy == "zero3 once",
                            .placements = parameters.placements,
                            .share_parameters = cell.strategy == "zero3 shared"});
    } else {
      layout = testing::strategy_named(cell.strategy).make(parameters, mesh, {.bucket_bytes = 3000});
    }
    const auto mean = tensor::normalizer_of(cell.mean);
    const auto optimizer = sgd({.learning_rate = 0});
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      const at::Tensor hidden = model->hidden(batch);
      at::Tensor sum = cross_entropy_sum(model->logits_of(hidden), batch.targets,
                                         {.weights = batch.weights, .shard = model->vocabulary()});
      // Every rank makes the backward of every round, with targets or without.
      if (!sum.requires_grad()) sum = sum + hidden.narrow(0, 0, 0).sum();
      return {{"cross_entropy", sum}};
    };
    Step step(units ? inside(units->root, forward) : forward, *layout, *mean, *optimizer,
              {.even_micro_batches = cell.ring > 1});
    MicroBatches batches = tensor::step_of(mesh.place(kSampleAxes), mesh.size(kSampleAxes),
                                           cell.config().vocabulary, cell.accumulation);
    if (cell.ring > 1) batches = cut_micro_batches(batches, {.ring = cell.ring}, mesh.place(kContextAxes));
    const StepReport report = step(batches);
    found.reports[static_cast<std::size_t>(world.rank)] = report;
    const auto gradients = tensor::whole_gradients(*layout, placed);
    if (world.rank == 0) found.gradient.of = gradients;
    if (world.rank == 0) found.gradient.loss = report.loss;
  });
  return found;
}

class ExpertParallel : public ::testing::TestWithParam<Cell> {};

const char* const kStrategies[] = {"naive",  "bucketed",     "zero1", "zero2",      "zero2 once",
                                   "shared", "shared zero2", "zero3", "zero3 once", "zero3 shared"};

// With ISOGRAD_FULL_TESTS=1 every ep with every number of experts, strategy, mean and accumulation, alone and
// beside copies, replicas and a ring; otherwise each of these with some of the others.
std::vector<Cell> cells() {
  std::vector<Cell> all;
  if (std::getenv("ISOGRAD_FULL_TESTS")) {
    struct Ranks {
      int ranks, ep, ring = 1, replicas = 1, tp = 1;
    };
    for (const Mean mean : {Mean::kTargets, Mean::kSamples})
      for (const int accumulation : {1, 3})
        for (const char* strategy : kStrategies)
          for (const auto& [experts, each] : {std::pair{4, 2}, {5, 2}, {8, 2}, {60, 4}})
            for (const Ranks& on : {Ranks{2, 1},
                                    {2, 2},
                                    {3, 3},
                                    {4, 4},
                                    {8, 8},
                                    {4, 2},
                                    {6, 3},
                                    {4, 2, 2},
                                    {4, 4, 2},
                                    {4, 2, 1, 2},
                                    {8, 2, 2, 2},
                                    {1, 1, 1, 1, 2},
                                    {2, 2, 1, 1, 2},
                                    {4, 2, 1, 1, 2},
                                    {2, 2, 2, 1, 2}})
              if (on.ep <= experts)
                all.push_back({.ranks = on.ranks,
                               .ep = on.ep,
                               .ring = on.ring,
                               .replicas = on.replicas,
                               .tp = on.tp,
                               .experts = experts,
                               .each = each,
                               .strategy = strategy,
                               .mean = mean,
                               .accumulation = accumulation,
                               .checkpointed = all.size() % 3 == 0,
                               .ties = all.size() % 5 == 0,
                               .shared = all.size() % 4 == 0,
                               .sigmoid = all.size() % 7 == 0,
                               .sequence_parallel = all.size() % 2 == 0});
    return all;
  }
  for (const char* strategy : kStrategies) {
    all.push_back({.ranks = 4, .ep = 2, .strategy = strategy, .checkpointed = true});
    all.push_back(
        {.ranks = 2, .experts = 4, .strategy = strategy, .mean = Mean::kSamples, .accumulation = 1});
  }
  for (const char* strategy : {"zero1", "shared", "zero3"}) {
    all.push_back({.ranks = 4, .ep = 2, .replicas = 2, .strategy = strategy, .mean = Mean::kSamples});
    all.push_back({.ranks = 4, .ep = 4, .replicas = 2, .strategy = strategy});
    all.push_back({.ranks = 4, .ep = 4, .ring = 2, .strategy = strategy});
    all.push_back({.ranks = 3, .ep = 3, .experts = 60, .each = 4, .strategy = strategy});
    all.push_back({.ranks = 6, .ep = 3, .experts = 5, .strategy = strategy, .ties = true});
  }
  for (const bool sequence_parallel : {true, false})
    for (const bool shared : {true, false}) {
      all.push_back({.ranks = 1, .ep = 1, .tp = 3, .shared = shared, .sequence_parallel = sequence_parallel});
      all.push_back({.ranks = 2,
                     .ep = 2,
                     .tp = 2,
                     .strategy = shared ? "zero3" : "zero1",
                     .shared = shared,
                     .sequence_parallel = sequence_parallel});
      all.push_back({.ranks = 4,
                     .ep = 2,
                     .ring = shared ? 2 : 1,
                     .tp = 2,
                     .strategy = "shared",
                     .mean = Mean::kSamples,
                     .shared = shared,
                     .sequence_parallel = sequence_parallel});
    }
  all.push_back({.ranks = 2, .ep = 1, .shared = true});
  for (const char* strategy : kStrategies) {
    all.push_back({.ranks = 3, .ep = 3, .experts = 8, .each = 3, .strategy = strategy, .sigmoid = true});
    all.push_back({.ranks = 4,
                   .ep = 2,
                   .ring = 2,
                   .strategy = strategy,
                   .mean = Mean::kSamples,
                   .checkpointed = true,
                   .sigmoid = true});
  }
  for (const bool sequence_parallel : {true, false})
    all.push_back({.ranks = 2,
                   .ep = 2,
                   .tp = 2,
                   .experts = 4,
                   .strategy = "zero1",
                   .sigmoid = true,
                   .sequence_parallel = sequence_parallel});
  all.push_back({.ranks = 8, .ep = 8, .experts = 8, .accumulation = 1});
  all.push_back({.ranks = 5, .ep = 5, .strategy = "zero2"});
  all.push_back({.ranks = 8, .ep = 2, .ring = 2, .replicas = 2, .strategy = "zero3", .mean = Mean::kSamples});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cells, ExpertParallel, ::testing::ValuesIn(cells()));

TEST_P(ExpertParallel, GradientLossAndNormAreOneProcesss) {
  const Cell cell = GetParam();
  const Gradient wanted = one_process(cell, at::kDouble, {});
  const Found found = train(cell, at::kDouble);
  EXPECT_LT(tensor::largest_error(found.gradient, wanted), 1e-10);
  for (const StepReport& report : found.reports) {
    EXPECT_NEAR(report.loss, wanted.loss, 1e-10 * wanted.loss);
    EXPECT_NEAR(report.norm, wanted.norm(), 1e-10 * wanted.norm());
  }
}

TEST_P(ExpertParallel, InLowerPrecisionNoWorseThanOneProcess) {
  const Cell cell = GetParam();
  Choices choices;
  const Gradient exact = one_process(cell, at::kDouble, recorded(choices));
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const Errors found = tensor::errors(train(cell, type, replayed(choices)).gradient, exact);
    // E2: four times what one process has, the most of up to 16 at other values (tensor_test.cpp).
    Errors alone;
    std::vector<std::string> outside;
    for (std::uint64_t draw = 0; draw < 16 && (draw == 0 || !outside.empty()); ++draw) {
      outside.clear();
      Choices of_draw;
      const Gradient exact_here = draw == 0 ? exact : one_process(cell, at::kDouble, recorded(of_draw), draw);
      const Choices& here = draw == 0 ? choices : of_draw;
      for (const auto& [name, error] :
           tensor::errors(one_process(cell, type, replayed(here), draw), exact_here))
        alone[name] = std::max(alone[name], error);
      for (const auto& [name, error] : found)
        if (!(error <= 4 * alone.at(name))) outside.push_back(name);
    }
    EXPECT_THAT(outside, ::testing::IsEmpty()) << c10::toString(type);
  }
}

// What works on this rank's part alone is summed along tp: routers where the tokens are cut, and nothing of
// them where every rank has the same tokens.
TEST(ExpertParallelPlanted, ARouterSummedWronglyAlongTpIsSeen) {
  for (const bool sequence_parallel : {true, false}) {
    Cell cell{.ranks = 2, .ep = 2, .tp = 2, .sequence_parallel = sequence_parallel};
    const Gradient wanted = one_process(cell, at::kDouble, {});
    cell.change_placements = [&](TrainableParameters& parameters) {
      for (auto& [name, placement] : parameters.placements) {
        if (name.find("mlp.gate.weight") == std::string::npos) continue;
        if (sequence_parallel)
          placement.summed.erase("tp");
        else
          placement.summed.insert("tp");
      }
    };
    for (const auto& [name, error] : tensor::errors(train(cell, at::kDouble).gradient, wanted)) {
      if (name.find("mlp.gate.weight") != std::string::npos)
        EXPECT_GT(error, 1e-2) << sequence_parallel << ", " << name;
      else
        EXPECT_LT(error, 1e-10) << sequence_parallel << ", " << name;
    }
  }
}

// Copies of experts that ranks do not add up: the experts are wrong, and nothing else. Without the sum a
// rank's gradient is another one, so that the right cells have something to show.
TEST(ExpertParallelPlanted, AreSeen) {
  for (const char* strategy : {"bucketed", "zero1", "zero3"}) {
    Cell cell{.ranks = 4, .ep = 2, .strategy = strategy};
    const Gradient wanted = one_process(cell, at::kDouble, {});
    ASSERT_LT(tensor::largest_error(train(cell, at::kDouble).gradient, wanted), 1e-10);
    cell.change_placements = [](TrainableParameters& parameters) {
      for (auto& [name, placement] : parameters.placements)
        if (name.find(".experts.") != std::string::npos) placement.summed.erase("edp");
    };
    for (const auto& [name, error] : tensor::errors(train(cell, at::kDouble).gradient, wanted)) {
      if (name.find(".experts.") != std::string::npos)
        EXPECT_GT(error, 1e-2) << strategy << ", " << name;
      else
        EXPECT_LT(error, 1e-10) << strategy << ", " << name;
    }
  }
}

}  // namespace
}  // namespace isograd
