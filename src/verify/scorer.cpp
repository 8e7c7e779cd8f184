// verify for a scorer: losses over the rows of all ranks, beside plain code of the oracle's own.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>

#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "train/build.hpp"
#include "train/scorer_run.hpp"
#include "verify/layouts.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

at::Tensor of(const at::Tensor& values, const at::Tensor& mask) {
  return values.index_select(0, mask.nonzero().squeeze(1));
}

at::Tensor threshold(const at::Tensor& scores, double q) {
  return at::quantile(scores.detach(), at::full({}, q, scores.options().requires_grad(false)), 0, false,
                      "higher");
}

// σ whose derivative σ(x) σ(−x) does not cancel where it is saturated, as at::sigmoid's does.
at::Tensor soft_step(const at::Tensor& x) {
  return at::log_sigmoid(x).exp();
}

// Rows of earlier steps, which both sides rank against and neither differentiates.
struct Queued {
  at::Tensor scores, targets;  // [q, 1] fp64 that fp32 holds exactly, [q] int64; undefined: none
};

// What a run would have kept: rows of the table, scored by the weights at hand.
Queued queue_of(const RunConfig& config, const ScorerData& data, const std::string& name,
                const Scorer* trained) {
  const auto rows = static_cast<std::int64_t>(data.train.size());
  const std::int64_t kept = std::min({config.ranking.queue_size, rows, 4 * config.batch.rows_per_step});
  if (kept == 0) return {};
  const at::NoGradGuard none;
  const auto order = random_permutation(
      rows, {.seed = static_cast<std::uint64_t>(config.run.seed), .layer = hash_name("verify: queue")});
  std::vector<std::int64_t> of_table;
  for (std::int64_t i = 0; i < kept; ++i)
    of_table.push_back(data.train[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])]);
  const at::Tensor index = at::tensor(of_table, at::kLong);
  Scorer scorer = trained ? *trained : *make_scorer(config, data, name, at::kDouble).scorer;
  return {scorer.scores(data.features.index_select(0, index)).to(at::kFloat).to(at::kDouble),
          data.targets.index_select(0, index)};
}

void fill_queue(RankingLoss& loss, const Queued& queued) {
  if (!queued.scores.defined()) return;
  RankingLoss::State state = loss.state();
  for (auto& [buffer, value] : state) {
    const std::int64_t rows = queued.targets.numel();
    if (buffer == "queue_scores") value.narrow(0, 0, rows).copy_(queued.scores);
    if (buffer == "queue_labels") value.narrow(0, 0, rows).copy_(queued.targets);
    if (buffer == "position") value[0] = rows % loss.options().queue_size;
  }
  loss.load_state(state);
}

// Each O(positives · rows), straight from the definitions; 0 where a class is missing.
at::Tensor plain_loss(const std::string& name, const RunConfig& config, const at::Tensor& logits,
                      const at::Tensor& targets) {
  const at::Tensor s = logits.select(1, 0), y = targets.to(s.scalar_type());
  const at::Tensor positive = of(s, targets.eq(1)), negative = of(s, targets.eq(0));
  if (name == "cross_entropy")
    return -(at::log_sigmoid(s) * y + at::log_sigmoid(-s) * (1 - y)).sum() / s.numel();
  if (name == "sigmoid_focal") {
    const at::Tensor wrong = soft_step(-s) * y + soft_step(s) * (1 - y);
    const at::Tensor surprise = -(at::log_sigmoid(s) * y + at::log_sigmoid(-s) * (1 - y));
    return ((0.25 * y + 0.75 * (1 - y)) * wrong.square() * surprise).sum() / s.numel();
  }
  if (positive.numel() == 0) return s.sum() * 0;
  const double given = config.ranking.temperature;
  if (name == "recall_at_quantile") {
    const double tau = given > 0 ? given : RankingOptions().temperature;
    return 1 -
           soft_step((positive - threshold(s, 1 - config.ranking.quantile)) / tau).sum() / positive.numel();
  }
  if (negative.numel() == 0) return s.sum() * 0;
  if (name == "smooth_ap") {
    const double tau = given > 0 ? given : RankingOptions().temperature;
    const auto rank_among = [&](const at::Tensor& others) {
      return soft_step((others.unsqueeze(0) - positive.unsqueeze(1)) / tau).sum(1);
    };
    const at::Tensor above = rank_among(positive) + 0.5;  // a positive meets itself as 0.5, where 1 is meant
    return 1 - (above / (above + rank_among(negative))).sum() / positive.numel();
  }
  const double alpha = config.ranking.alpha, beta = config.ranking.budget;
  const at::Tensor scale = threshold(negative, 0.75) - threshold(negative, 0.25);
  if (scale.item<double>() <= 1e-12) return s.sum() * 0;
  const at::Tensor tau = scale * (given > 0 ? given : PAUCOptions().temperature);
  const at::Tensor low = threshold(negative, 1 - beta), high = threshold(negative, 1 - alpha);
  if (name == "pauc") {
    const auto rate = [&](const at::Tensor& edge) {
      return soft_step((positive - edge) / tau).sum() / positive.numel();
    };
    return 1 - 0.5 * (rate(low) + rate(high));
  }
  const at::Tensor band = of(negative, negative.detach().ge(low).logical_and(negative.detach().le(high)));
  const at::Tensor pairs = soft_step((positive.unsqueeze(1) - band.unsqueeze(0)) / tau);
  return 1 - pairs.sum() / pairs.numel();
}

}  // namespace

Verdict verify_scorer(const RunConfig& config, World& world, const std::vector<std::string>& layouts,
                      const ChangeProblem& change, const Scorer* trained) {
  const ScorerData data = open_table(config);
  const std::string& name = config.ranking.loss;
  const auto step_of = [&](int rank, int size) {
    return MicroBatches{rows_batch(data, make_row_sampler(config, data, rank, size).next())};
  };
  const Queued queued =
      make_ranking_loss(config, name, world.group) ? queue_of(config, data, name, trained) : Queued();
  VerifyProblem problem;
  problem.updates = 0;
  problem.make_model = [&](at::ScalarType dtype) {
    const ScorerModel model = make_scorer(config, data, name, dtype);
    if (trained) {
      const at::NoGradGuard none;
      auto values = Scorer(*trained).named();
      for (std::size_t i = 0; i < values.size(); ++i) model.scorer->named()[i].second.copy_(values[i].second);
    }
    // In evaluation the queue stays as it is: the step can be made again.
    const auto loss = make_ranking_loss(config, name, world.group);
    if (loss) loss->eval(), fill_queue(*loss, queued);
    VerifyModel made;
    made.named = model.scorer->named();
    made.logits = [scorer = model.scorer, &data](const Batch& batch) {
      return scorer->scores(data.features.index_select(0, batch.tokens));
    };
    made.units = model.units;
    made.loss_terms = inside(model.units.root, scorer_loss(model, data, name, loss, world.group));
    return made;
  };
  problem.local = step_of(world.rank, world.size);
  problem.whole = [&] { return step_of(0, 1); };
  problem.dtype = scalar_type(config.train.dtype);
  problem.step = {.max_norm = config.train.max_norm};
  problem.loss.global = [&](const at::Tensor& logits, const at::Tensor& targets) {
    if (!queued.scores.defined()) return plain_loss(name, config, logits, targets);
    return plain_loss(name, config,
                      at::cat({logits, queued.scores.to(logits.options().requires_grad(false))}),
                      at::cat({targets, queued.targets}));
  };
  problem.loss.name = name;
  problem.make_normalizer = [&] { return make_normalizer(config, world.size); };
  for (const auto& choice : chosen_layouts(config, layouts, world))
    problem.layouts.push_back(
        {.name = choice.text(),
         .make = nullptr,
         .make_from_model = [chosen = choice.in(config), &world](const VerifyModel& model, const Group&) {
           return make_layout(chosen, model.named, *model.units, world);
         }});
  problem.optimizer = configured_optimizer(config);
  if (change) change(problem, world);
  return verify(problem, world.group);
}

}  // namespace isograd
