// Modules of a user's, as tests put them into the stages of a pipeline.
#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "decoder_step.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd::staged {

namespace nn = torch::nn;

constexpr std::int64_t kVocabulary = 23, kHidden = 6;
inline const JoinOptions kPatience{.timeout = std::chrono::minutes(1)};  // of ranks that wait for one another

struct Embedding : nn::Module {
  at::Tensor weight;
  explicit Embedding(at::Tensor values = {}) {
    weight = register_parameter("weight", values.defined() ? values : at::randn({kVocabulary, kHidden}));
  }
  at::Tensor forward(const at::Tensor& tokens) { return at::embedding(weight, tokens); }
};

// Adds the mean of each token's own document, so that a stage needs the batch.
struct Mix : nn::Module {
  at::Tensor weight;
  double slip = 1;  // what a planted mistake multiplies this block's gradients by
  Mix() { weight = register_parameter("weight", at::randn({kHidden, kHidden}) * 0.5); }
  at::Tensor forward(const at::Tensor& x, const Batch& batch) {
    std::vector<at::Tensor> means;
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      const at::Tensor own = x.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]);
      means.push_back(own.mean(0, /*keepdim=*/true).expand_as(own));
    }
    const at::Tensor mixed = means.empty() ? x : at::cat(means);
    const at::Tensor y = at::tanh(at::linear(mixed, weight));
    return x + y * slip + y.detach() * (1 - slip);
  }
};

struct Output : nn::Module {
  at::Tensor weight;
  explicit Output(at::Tensor values = {}) {
    weight = register_parameter("weight", values.defined() ? values : at::randn({kVocabulary, kHidden}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
};

struct FrozenLinear : nn::LinearImpl {
  FrozenLinear() : nn::LinearImpl(kHidden, kHidden) {
    for (at::Tensor& parameter : parameters()) parameter.set_requires_grad(false);
  }
};

// Counts its forwards.
struct Counting : nn::Module {
  at::Tensor count, weight;
  Counting() {
    weight = register_parameter("weight", at::ones({kHidden}));
    count = register_buffer("count", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    count.add_(1);
    return x * weight;
  }
};

inline nn::Sequential normed() {
  return nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({kHidden})), nn::Linear(kHidden, kHidden));
}

enum class Kind { kMixed, kTied, kBareStage, kFrozenStage };

// For each cell; nine modules under kMixed, of which some have no parameters and one has frozen ones.
inline std::vector<PipelineModule> list_of(Kind kind, std::int64_t tied_rows = kVocabulary) {
  if (kind == Kind::kBareStage || kind == Kind::kFrozenStage) {  // dear, so that it is a stage by itself
    std::vector<PipelineModule> list{pipeline_module<Embedding>().called("embed"), pipeline_module<Mix>()};
    list.push_back(kind == Kind::kBareStage ? pipeline_module<nn::Tanh>().costing(100)
                                            : pipeline_module<FrozenLinear>().costing(100));
    list.push_back(pipeline_module<Output>().called("head"));
    return list;
  }
  at::Tensor table;
  if (kind == Kind::kTied) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    table = at::randn({tied_rows, kHidden}, generator);
  }
  return {pipeline_module<Embedding>(table).called("embed"),
          pipeline_module<Mix>(),
          pipeline_module<nn::Tanh>(),
          pipeline_module<FrozenLinear>(),
          pipeline_module(normed),
          pipeline_module<Mix>(),
          pipeline_module<nn::Tanh>(),
          pipeline_module<nn::Linear>(kHidden, kHidden),
          pipeline_module<Output>(table).called("head")};
}

}  // namespace isograd::staged
