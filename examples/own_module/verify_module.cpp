// Is the gradient of a model of your own, on three ranks, the gradient of one device? And would it be noticed
// if each rank divided by its own tokens?
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>
#include <cstdio>

constexpr std::int64_t kVocabulary = 11, kHidden = 8;

struct Model : torch::nn::Module {
  at::Tensor table, output;
  Model() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);  // never keyed by a rank
    table = register_parameter("table", at::randn({kVocabulary, kHidden}, generator));
    output = register_parameter("output", at::randn({kVocabulary, kHidden}, generator));
  }
  at::Tensor logits(const at::Tensor& tokens) {
    return at::linear(at::tanh(at::embedding(table, tokens)), output);
  }
};

isograd::VerifyModel make_model(at::ScalarType dtype) {
  auto model = std::make_shared<Model>();
  model->to(dtype);
  return isograd::verify_model(
      model, [](Model& self, const isograd::Batch& batch) { return self.logits(batch.tokens); });
}

// A common mistake: each rank's own mean, averaged over the ranks.
struct MeanOfRankMeans : isograd::TokenMean {
  isograd::Denominator denominator(const isograd::StepCounts& step_counts) const override {
    isograd::Denominator wrong = isograd::TokenMean::denominator(step_counts);
    const auto own = step_counts.targets_by_rank[static_cast<std::size_t>(step_counts.rank)];
    wrong.value = static_cast<double>(own) * static_cast<double>(step_counts.targets_by_rank.size());
    return wrong;
  }
};

int main() {
  isograd::MicroBatches batches;  // of 4, 9, 14, ... tokens: ranks have different counts
  for (std::int64_t i = 0; i < 5; ++i) {
    isograd::Batch batch = isograd::empty_batch();
    batch.tokens = (at::arange(4 + 5 * i) * (i + 2)) % kVocabulary;
    batch.targets = (batch.tokens * 3 + 1) % kVocabulary;
    batch.cu_seqlens = {0, 4 + 5 * i};
    batch.sample_ids = {i};
    batch.sample_targets = {4 + 5 * i};
    batches.push_back(batch);
  }
  const auto layouts = isograd::verify_layouts({"bucketed", "zero2", "zero3"});
  const auto right = isograd::verify(make_model, batches, layouts, {.ranks = 3});
  const auto wrong =
      isograd::verify(make_model, batches, layouts,
                      {.ranks = 3, .make_normalizer = [] { return std::make_unique<MeanOfRankMeans>(); }});
  std::printf("%s\n%s\n", isograd::parity_line(right).c_str(), isograd::parity_line(wrong).c_str());
  return right.passed && !wrong.passed ? 0 : 1;
}
