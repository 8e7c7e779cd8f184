// verify for a model of one's own, on ranks that are threads of this process.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/verify.hpp"
#include "isograd/world.hpp"

namespace isograd {

struct VerifyOptions {
  int ranks = 2;
  at::ScalarType dtype = at::kFloat;  // the run's precision
  StepOptions step{};
  DeclaredLoss loss{};
  MakeNormalizer make_normalizer{};  // of the loop under test; not given: the one of `loss`
  // Parameters are compared after so many updates of plain SGD and of `optimizer`. 0: not compared.
  int updates = 0;
  OptimizerOptions optimizer = AdamWOptions{};
};

// A model under token cross entropy: named parameters, and a function of the batch that gives logits [T, V].
VerifyModel verify_model(std::vector<std::pair<std::string, at::Tensor>> named,
                         std::function<at::Tensor(const Batch&)> logits);

// A module whose `logits(*module, batch)` gives them. Values must not depend on the rank: take them from
// isograd's keyed random numbers or from a file, not from the global generator.
template <typename Module, typename Logits>
VerifyModel verify_model(std::shared_ptr<Module> module, Logits logits) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  return verify_model(std::move(named),
                      [module, logits](const Batch& batch) { return logits(*module, batch); });
}

// isograd's own strategies: naive, overlapped, bucketed, zero1, zero2, zero3. ConfigError on another name.
LayoutUnderTest verify_layout(const std::string& strategy);
std::vector<LayoutUnderTest> verify_layouts(const std::vector<std::string>& strategies);

// One step over `batches`, the whole of it: rank r of W has batches r, r + W, ...; a rank may have none. Fill
// in sample_ids and sample_targets where the loss needs them. `make_model` is called on every rank.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options = {});

// The same on ranks that are there already; collective over `world`. options.ranks is not looked at.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options, World& world);

}  // namespace isograd
