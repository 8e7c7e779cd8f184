// A model of your own as a list of modules, in stages on three ranks: it trains as one process would, and
// verify proves its gradient. Where each stage counts its targets (they are the same ones) verify says so.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

using at::Tensor;
constexpr std::int64_t kVocabulary = 11, kHidden = 8;

struct Block : torch::nn::Module {
  Tensor weight = register_parameter("weight", at::randn({kHidden, kHidden}) * 0.3);
  Tensor bias = register_parameter("bias", at::zeros({kHidden}));
  Tensor forward(const Tensor& x) { return x + at::tanh(at::linear(x, weight, bias)); }
};

isograd::PipelineModel model_in(at::ScalarType dtype) {  // each module is made where its stage is
  using isograd::pipeline_module;
  return isograd::PipelineModel({pipeline_module<torch::nn::Embedding>(kVocabulary, kHidden),
                                 pipeline_module<Block>(), pipeline_module<Block>(), pipeline_module<Block>(),
                                 pipeline_module<torch::nn::Linear>(kHidden, kVocabulary)},
                                {.seed = 7, .dtype = dtype});
}

isograd::MicroBatches batches() {  // of 4, 9, 14, ... tokens, each followed by its successor
  isograd::MicroBatches all;
  for (std::int64_t i = 0; i < 5; ++i) {
    isograd::Batch batch = isograd::empty_batch();
    batch.tokens = (at::arange(4 + 5 * i) + i) % kVocabulary;
    batch.targets = (batch.tokens + 1) % kVocabulary;
    batch.cu_seqlens = {0, 4 + 5 * i};
    batch.sample_ids = {i};
    all.push_back(batch);
  }
  return all;
}

double train(isograd::World& world) {  // all ranks along pp; returns the last loss
  const isograd::Mesh mesh(world, isograd::Grid({{"pp", world.size}}));
  isograd::PipelineModel model = model_in(at::kFloat);
  model.split(mesh, {.schedule = "zb-h1"});
  const auto layout = isograd::bucketed(model.parameters(), mesh);
  const auto adamw = isograd::adamw({.learning_rate = 0.02});
  isograd::TokenMean mean;
  const auto loss = [](const Tensor& logits, const isograd::Batch& batch) -> isograd::LossTerms {
    return {{"cross_entropy", isograd::cross_entropy_sum(logits, batch.targets)}};
  };
  isograd::Step step(model.forward_loss({"cross_entropy"}, loss), *layout, mean, *adamw,
                     isograd::through(model.pipeline()));
  for (int i = 0; i < 39; ++i) step(batches());
  return step(batches()).loss;
}

struct CountsStages : isograd::TokenMean {  // the planted mistake: stages hold the same targets
  isograd::Denominator denominator(const isograd::StepCounts& step_counts) const override {
    isograd::Denominator wrong = isograd::TokenMean::denominator(step_counts);
    wrong.value *= 3;
    return wrong;
  }
};

int main() {
  std::vector<double> staged(3);
  isograd::run_ranks(3, [&](isograd::World& world) { staged[world.rank] = train(world); });
  isograd::World one;
  const double alone = train(one);
  std::printf("loss after 40 steps: three stages %.6f, one process %.6f\n", staged[0], alone);
  const auto make = [](at::ScalarType dtype) { return isograd::verify_model(model_in(dtype), {}); };
  const auto layouts = isograd::verify_layouts({"bucketed", "zero2"});
  isograd::VerifyOptions options{.axes = {{"pp", 3}, {"dp_shard", 2}}};
  const auto right = isograd::verify(make, batches(), layouts, options);
  options.make_normalizer = [] { return std::make_unique<CountsStages>(); };
  const auto wrong = isograd::verify(make, batches(), layouts, options);
  std::printf("%s\n%s\n", isograd::parity_line(right).c_str(), isograd::parity_line(wrong).c_str());
  return right.passed && !wrong.passed && std::abs(staged[0] - alone) < 1e-4 * alone ? 0 : 1;
}
