#include "verify/run.hpp"

#include <torch/csrc/autograd/grad_mode.h>

#include <fmt/ranges.h>

#include <algorithm>

#include "isograd/error.hpp"
#include "train/build.hpp"

namespace isograd {
namespace {

LayoutUnderTest layout_of(const RunConfig& config, const std::string& name, World& world) {
  const auto names = layout_names();
  if (std::find(names.begin(), names.end(), name) == names.end())
    throw ConfigError({.where = "--layout",
                       .found = name,
                       .expected = fmt::format("{}", fmt::join(names, ", ")),
                       .action = "Choose one of them"});
  return {.name = name,
          .make = nullptr,
          .make_from_model = [&config, &world, name](const VerifyModel& model, const Group&) {
            return make_layout(config, name, model.named, *model.units, world);
          }};
}

VerifyModel as_verify_model(const RunConfig& config, std::shared_ptr<DecoderLM> model) {
  VerifyModel made;
  made.named = model->named();
  made.logits = [model](const Batch& batch) { return model->logits(batch); };
  made.units = model_units(*model, config);
  made.loss_terms = [model, loss = inside(made.units->root, forward_loss(*model, config))](
                        const Batch& batch) { return loss(batch); };
  return made;
}

DeclaredLoss declared_loss(const RunConfig& config, const Corpus& corpus, int ranks) {
  const std::string& kind = config.loss.kind;
  DeclaredLoss loss;
  loss.mean = kind == "sample_mean"     ? Mean::kSamples
              : kind == "weighted_mean" ? Mean::kWeights
              : kind == "fixed"         ? Mean::kFixed
              : kind == "none"          ? Mean::kNone
                                        : Mean::kTargets;
  if (loss.mean == Mean::kFixed) loss.denominator = config.loss.denominator;
  if (normalises_by_replica(config))
    loss.replicas = [&config, &corpus, ranks] {
      std::vector<MicroBatches> replicas(count_replicas(config, ranks));
      const int shards = ranks / static_cast<int>(replicas.size());
      for (int rank = 0; rank < ranks; ++rank)
        for (const Batch& batch : make_loader(config, corpus, rank, ranks)->next())
          replicas[static_cast<std::size_t>(rank / shards)].push_back(batch);
      return replicas;
    };
  return loss;
}

Verdict verify_step(const RunConfig& config, World& world, const Corpus& corpus, MakeVerifyModel make_model,
                    std::vector<std::string> layouts) {
  if (layouts.empty()) layouts.push_back(config.parallel.strategy);
  VerifyProblem problem;
  problem.make_model = std::move(make_model);
  problem.local = make_loader(config, corpus, world.rank, world.size)->next();
  problem.whole = [&] { return make_loader(config, corpus, 0, 1)->whole_step({}); };
  problem.alone = [&] { return make_loader(config, corpus, 0, 1)->next(); };
  problem.loss = declared_loss(config, corpus, world.size);
  problem.dtype = scalar_type(config.train.dtype);
  problem.step = {.max_norm = config.train.max_norm};
  problem.make_normalizer = [&] { return make_normalizer(config, world.size); };
  for (const auto& name : layouts) problem.layouts.push_back(layout_of(config, name, world));
  return verify(problem, world.group);
}

}  // namespace

std::vector<std::string> layout_names() {
  return strategy_names();
}

Verdict verify_run(const RunConfig& config, World& world, const std::vector<std::string>& layouts) {
  const Corpus corpus = open_corpus(config, world.group);
  const auto make = [&](at::ScalarType dtype) {
    return as_verify_model(config, make_model(config, corpus, dtype));
  };
  return verify_step(config, world, corpus, make, layouts);
}

Verdict verify_finished(FinishedRun& run) {
  Corpus corpus;
  corpus.tokens = run.tokens;
  corpus.split = run.split;
  const DecoderConfig shape = run.model.config();
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : run.model.named()) values.push_back(tensor.detach());
  const auto make = [&](at::ScalarType dtype) {
    auto model = std::make_shared<DecoderLM>(shape, dtype, 0);
    at::NoGradGuard no_grad;
    auto named = model->named();
    for (std::size_t i = 0; i < named.size(); ++i) named[i].second.copy_(values[i]);
    return as_verify_model(run.config, std::move(model));
  };
  return verify_step(run.config, run.world, corpus, make, {});
}

}  // namespace isograd
