// An attention block and an MLP of your own, cut over tp: what it takes, and the proof that the gradient is
// the one of one device. Without the two copy_to_tp() it is not, and verify says so.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>
#include <cstdio>

using at::Tensor;
constexpr std::int64_t kVocabulary = 11, kHidden = 8, kHeads = 5, kHead = 4, kInner = 13;

struct Block : torch::nn::Module {
  Tensor table, norm, qkv, out, up, down, down_bias, head;
  isograd::Group tp = isograd::Group::solo();
  bool enters = true;  // what the planted mistake leaves out

  Block() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);  // the same whole model on every rank
    const auto make = [&](const char* name, at::IntArrayRef shape) {
      return register_parameter(name, at::randn(shape, generator) * 0.5);
    };
    table = make("table", {kVocabulary, kHidden}), norm = make("norm", {kHidden});
    qkv = make("qkv", {3 * kHeads * kHead, kHidden}), out = make("out", {kHidden, kHeads * kHead});
    up = make("up", {kInner, kHidden}), down = make("down", {kHidden, kInner});
    down_bias = make("down_bias", {kHidden}), head = make("head", {kVocabulary, kHidden});
  }

  Tensor logits(const Tensor& tokens) {
    const auto enter = [this](const Tensor& x) { return enters ? isograd::copy_to_tp(tp, x) : x; };
    Tensor x = at::embedding(table, tokens);
    const auto parts = at::linear(enter(x * norm), qkv).view({x.size(0), 3, -1, kHead}).permute({1, 2, 0, 3});
    const Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + isograd::reduce_from_tp(tp, at::linear(attended.transpose(0, 1).reshape({x.size(0), -1}), out));
    const Tensor inner = at::silu(at::linear(enter(x), up));
    return at::linear(x + isograd::reduce_from_tp(tp, at::linear(inner, down)) + down_bias,
                      head);  // the bias: once
  }

  isograd::Layout cut(const isograd::Mesh& mesh) {
    tp = isograd::tensor_group(mesh);
    return isograd::cut(
        *this, mesh,
        {isograd::cut_along("qkv", 0, kHead, {kHeads * kHead, kHeads * kHead, kHeads * kHead}),
         isograd::cut_along("out", 1, kHead), isograd::cut_along("up", 0), isograd::cut_along("down", 1)});
  }
};

isograd::Verdict verified(std::vector<isograd::Axis> axes, bool enters) {
  const auto make_model = [enters](at::ScalarType dtype) {
    auto block = std::make_shared<Block>();
    block->to(dtype);
    block->enters = enters;
    isograd::VerifyModel model = isograd::verify_model(
        block, [](Block& self, const isograd::Batch& batch) { return self.logits(batch.tokens); });
    model.cut = [block](const isograd::Mesh& mesh) { return block->cut(mesh); };
    return model;
  };
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
  return isograd::verify(make_model, batches, isograd::verify_layouts({"bucketed"}),
                         {.axes = std::move(axes)});
}

int main() {
  bool passed = true;
  for (const auto& axes : std::vector<std::vector<isograd::Axis>>{
           {{"tp", 2}}, {{"tp", 3}}, {{"dp_shard", 2}, {"tp", 2}}, {{"tp", 5}}}) {
    const auto right = verified(axes, true), wrong = verified(axes, false);
    std::printf("%s\n%s\n", isograd::parity_line(right).c_str(), isograd::parity_line(wrong).c_str());
    passed = passed && right.passed && !wrong.passed;
  }
  return passed ? 0 : 1;
}
