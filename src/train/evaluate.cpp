#include "train/evaluate.hpp"

#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "isograd/error.hpp"
#include "train/step_work.hpp"

namespace isograd {

std::optional<Evaluation> evaluate(BatchLoader* loader,
                                   const std::function<MicroBatches(MicroBatches)>& own_parts,
                                   const ForwardLossTerms& forward, Normalizer& mean, DataParallel& layout,
                                   std::int64_t step) {
  if (!loader) return std::nullopt;
  loader->seek({});
  Normalizer& known = mean.undeferred();  // a step that is under way goes on as it was
  StepWork work(forward, layout, known);
  work.count(own_parts(loader->next()), /*stop_requested=*/false, /*even=*/false);
  const Census& census = work.census();
  if (census.targets == 0) return std::nullopt;
  const at::NoGradGuard no_grad;
  work.look();
  at::Tensor sums = at::tensor(work.ledger().message(census), at::kDouble);
  layout.mesh().counting().all_reduce(sums);
  return Evaluation{.step = step, .loss = sums[0].item<double>(), .targets = census.targets};
}

void check_prompt(const Tokenizer& tokenizer, const std::string& prompt, const DecoderConfig& model,
                  const std::string& where) {
  const auto tokens = static_cast<std::int64_t>(tokenizer.encode(prompt).size()),
             marks = static_cast<std::int64_t>(tokenizer.encode("").size());
  if (!prompt.empty() && tokens <= marks)
    throw ConfigError({.where = where,
                       .found = "a text of which the tokenizer makes no token",
                       .expected = "a prompt that the model can see",
                       .action = "Give another, or none for a new document"});
  const std::int64_t taken = tokens - (tokenizer.eos() >= 0 && marks > 0 ? 1 : 0);  // nothing follows an end
  if (!prompt.empty() && taken >= model.max_positions)
    throw ConfigError(
        {.where = where,
         .found = fmt::format("{} tokens", taken),
         .expected = fmt::format("fewer than {}, the model's positions, so that some are left to "
                                 "generate",
                                 model.max_positions),
         .action = "Shorten the prompt"});
}

std::string sample_text(DecoderLM& model, const Tokenizer& tokenizer, const std::string& prompt,
                        SampleOptions options) {
  std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  const auto eos = tokenizer.eos();
  if (eos >= 0 && !tokens.empty() && tokens.back() == static_cast<std::uint32_t>(eos)) tokens.pop_back();
  if (tokens.empty() && eos >= 0) tokens.push_back(static_cast<std::uint32_t>(eos));
  if (tokens.empty()) tokens = tokenizer.encode("\n");
  const DecoderConfig& shape = model.config();
  const std::int64_t most =
      shape.sliding_window > 0 ? std::min(shape.sliding_window, shape.max_positions) : shape.max_positions;
  const std::int64_t room = most - static_cast<std::int64_t>(tokens.size());
  options.max_tokens = std::clamp<std::int64_t>(room, 0, options.max_tokens);
  const auto more = generate(model, tokens, options);
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokenizer.decode(tokens);
}

}  // namespace isograd
