#include "train/selection_bias.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "isograd/error.hpp"
#include "model/mixture.hpp"

namespace isograd {

SelectionBias::SelectionBias(DecoderLM& model, DataParallel& layout, double rate)
    : layout_(layout), rate_(rate) {
  const auto whole = layout.whole_parameters();
  for (const auto& [name, tensor] : model.named())
    if (name.ends_with(kSelectionBias)) biases_.emplace_back(name, tensor.detach().cpu().clone());
}

void SelectionBias::move(const std::vector<double>& choices) {
  ISOGRAD_INVARIANT(!biases_.empty() && choices.size() % biases_.size() == 0, "counts of other layers");
  const auto counts = at::tensor(choices, at::kDouble).view({static_cast<std::int64_t>(biases_.size()), -1});
  std::vector<std::pair<std::string, at::Tensor>> own;
  for (std::size_t i = 0; i < biases_.size(); ++i) {
    if (biases_[i].second.numel() == 0) continue;  // of another stage
    const at::Tensor of_layer = counts[static_cast<std::int64_t>(i)];
    biases_[i].second += at::sign(of_layer.mean() - of_layer) * rate_;
    own.push_back(biases_[i]);
  }
  layout_.write(own);
}

}  // namespace isograd
