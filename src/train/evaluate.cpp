#include "train/evaluate.hpp"

#include <torch/csrc/autograd/grad_mode.h>

namespace isograd {

std::optional<Evaluation> evaluate(BatchLoader* loader,
                                   const std::function<MicroBatches(MicroBatches)>& own_parts,
                                   const ForwardLossTerms& forward, Normalizer& mean, DataParallel& layout,
                                   std::int64_t step) {
  if (!loader) return std::nullopt;
  loader->seek({});
  MicroBatches micro_batches = own_parts(loader->next());
  Group& group = layout.group();
  const Census census = mean.count(micro_batches, group, /*stop_requested=*/false);
  if (census.targets == 0) return std::nullopt;
  const Denominator denominator = mean.denominator(census);
  at::NoGradGuard no_grad;
  at::Tensor loss = at::zeros({1}, at::kDouble);
  const bool every_round = layout.takes_every_round();  // a forward is a collective
  if (every_round)
    micro_batches.resize(std::max(micro_batches.size(), static_cast<std::size_t>(census.rounds)),
                         empty_batch());
  for (const auto& batch : micro_batches)
    if (every_round || batch.cut || batch.num_tokens() > 0)  // so is a part's
      loss += mean.scale(forward(mean.prepare(batch, denominator)), denominator).to(at::kCPU, at::kDouble);
  group.all_reduce(loss);
  return Evaluation{.step = step, .loss = loss.item<double>(), .targets = census.targets};
}

std::string sample_text(DecoderLM& model, const Tokenizer& tokenizer, const std::string& prompt,
                        SampleOptions options) {
  std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  const auto eos = tokenizer.eos();
  if (eos >= 0 && !tokens.empty() && tokens.back() == static_cast<std::uint32_t>(eos)) tokens.pop_back();
  if (tokens.empty() && eos >= 0) tokens.push_back(static_cast<std::uint32_t>(eos));
  if (tokens.empty()) tokens = tokenizer.encode("\n");
  const std::int64_t room = model.config().max_positions - static_cast<std::int64_t>(tokens.size());
  options.max_tokens = std::clamp<std::int64_t>(room, 0, options.max_tokens);
  const auto more = generate(model, tokens, options);
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokenizer.decode(tokens);
}

}  // namespace isograd
