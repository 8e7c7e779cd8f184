// A model of one's own over the stages of a pipeline: a list of modules, each taking what the one before it
// gives. Each rank makes those of its own stages and no others.
#pragma once

#include "isograd/cxx20.hpp"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/normalizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {

// A module that has been made, and how it is called: with what the module before it gave, and the batch.
struct CallableModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& x, const Batch& batch)> forward;
};

// Of a module with forward(Tensor) or forward(Tensor, const Batch&), which give a tensor; or its holder.
template <typename Module>
CallableModule callable_module(std::shared_ptr<Module> module) {
  static_assert(std::is_base_of_v<torch::nn::Module, Module>, "a stage is made of torch::nn modules");
  CallableModule made{.module = module, .forward = {}};
  if (module)
    made.forward = [module](const at::Tensor& x, const Batch& batch) -> at::Tensor {
      if constexpr (requires { module->forward(x); })
        return module->forward(x);
      else
        return module->forward(x, batch);
    };
  return made;
}
template <typename Module>
CallableModule callable_module(const torch::nn::ModuleHolder<Module>& holder) {
  return callable_module(holder.ptr());
}

// One of the list, before it is made.
struct PipelineModule {
  // What the names of its parameters begin with, before a dot. Empty: its place in the list, as
  // torch::nn::Sequential has it.
  std::string name{};
  // Of ranks that are threads one at a time: it must not communicate (make groups before the list).
  std::function<CallableModule()> make;
  // Tensors that were made outside of it and that it may register. One that several modules register is a
  // tied parameter; no other tensor may be in two modules.
  std::vector<at::Tensor> given{};
  double cost = 1;  // of its forward and backward, in a unit of all: stages are dealt by it

  PipelineModule called(std::string its_name) && {
    name = std::move(its_name);
    return std::move(*this);
  }
  PipelineModule costing(double its_cost) && {
    cost = its_cost;
    return std::move(*this);
  }
};

template <typename Module>
concept ModuleHolder = requires {
  typename Module::ContainedType;
};

// pipeline_module<Block>(8, 16): std::make_shared<Block>(8, 16), where and when it is needed;
// pipeline_module<torch::nn::Linear>(8, 16) likewise. Tensors among the arguments are `given`.
template <typename Module, typename... Arguments>
PipelineModule pipeline_module(Arguments... arguments) {
  PipelineModule one;
  [[maybe_unused]] const auto note = [&one](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, at::Tensor>)
      if (argument.defined()) one.given.push_back(argument);
  };
  (note(arguments), ...);
  one.make = [... arguments = std::move(arguments)] {
    if constexpr (ModuleHolder<Module>)
      return callable_module(std::make_shared<typename Module::ContainedType>(arguments...));
    else
      return callable_module(std::make_shared<Module>(arguments...));
  };
  return one;
}
// Of a function that makes a module, as a std::shared_ptr or a holder (torch::nn::Sequential).
template <typename Make>
concept MakesModule = !ModuleHolder<Make> && std::invocable<Make&>;
template <MakesModule Make>
PipelineModule pipeline_module(Make make, std::vector<at::Tensor> given = {}) {
  PipelineModule one;
  one.make = [make = std::move(make)]() mutable { return callable_module(make()); };
  one.given = std::move(given);
  return one;
}

struct PipelineModelOptions {
  // Each module is made with the default generator of the CPU seeded by this and its name, so that its values
  // are the same on every rank and for every number of stages. The generator is put back afterwards; no other
  // thread should draw from it meanwhile.
  std::uint64_t seed = 0;
  std::optional<at::ScalarType> dtype{};  // what modules are converted to; not given: as they are made
  at::Device device = at::kCPU;           // and moved to
  // What the first module is called with; not given: Batch::tokens. Of a batch that fills up a round
  // (empty_batch()) too: its modules run like any others.
  std::function<at::Tensor(const Batch& batch)> input{};
  bool accept_dropout = false;  // as PrepareOptions has it
};

// The modules of a list, made one after another, or those of a rank's stages alone:
//
//   PipelineModel model({pipeline_module<Embedding>(kVocabulary, kHidden), pipeline_module<Block>(kHidden),
//                        pipeline_module<Block>(kHidden), pipeline_module<torch::nn::Linear>(kHidden,
//                        kVocabulary)});
//   const Layout placed = model.split(mesh, {.schedule = "1f1b"});
//   const auto layout = bucketed(model.parameters(), mesh);
//   Step step(model.forward_loss({"cross_entropy"}, loss), *layout, mean, *optimizer,
//   through(model.pipeline()));
//
// Modules stand in stages in the list's order, as even as their costs allow. Parameters are called
// "<module>.<parameter>", for every number of stages. Buffers stay with their module on the ranks that have
// it: they belong to no layout and no checkpoint, and forward must change them alike on all ranks that see
// different data (check_buffers() of modules()). Copies share the modules.
class PipelineModel {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  // Makes nothing. ConfigError: no module, two of one name, a name with a dot, a cost that is not positive.
  explicit PipelineModel(std::vector<PipelineModule> list, PipelineModelOptions options = {});

  // All modules, in this process, as one device has them. ConfigError: after split(), and as split() of each.
  void make_all();

  // Leaves this rank the modules of its stages; those that it has not yet are made, and no others. Collective
  // over mesh.all(), once, before a layout is made. Without ranks along pp every rank has all of them.
  // ConfigError on every rank: fewer modules than stages; lists, or a module's parameters, buffers or values,
  // that differ between ranks; a tensor in two modules that is not `given` to both; a null module, and what
  // prepare_module() refuses of one; and whatever Pipeline refuses.
  Layout split(const Mesh& mesh, PipelineOptions options = {});
  const Pipeline& pipeline() const;  // ConfigError before split()

  // This rank's modules under their names, as children of one module: for train(), eval(), buffers.
  const torch::nn::Module& modules() const;
  torch::nn::Module& modules();
  // This rank's parameters, tied ones once. A tied parameter has the name that it has in the first module
  // that registers it, on whichever rank that is.
  const NamedTensors& named() const;
  // The same for a layout, with all placements and with what is checked before each step.
  TrainableParameters parameters() const;

  struct Outputs {
    at::Tensor output{};     // of the last module, where this rank has it
    at::Tensor passed_on{};  // otherwise: Pipeline::pass_on()
  };
  // The forward of the stage whose turn it is; outside of a step of all of this rank's stages, one after
  // another, collective over the ranks along pp. ConfigError before make_all() or split().
  Outputs outputs(const Batch& batch) const;

  // For a Step: `loss` of the last module's output, and before the last stage what is passed on. `terms`:
  // the names of the terms that `loss` gives, in its order, which every stage must know. ConfigError: none,
  // or a loss with others.
  using LossOfOutput = std::function<LossTerms(const at::Tensor& output, const Batch& batch)>;
  ForwardLossTerms forward_loss(std::vector<std::string> terms, LossOfOutput loss) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
