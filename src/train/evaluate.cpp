#include "train/evaluate.hpp"

#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "isograd/error.hpp"
#include "loss/ledger.hpp"

namespace isograd {

std::optional<Evaluation> evaluate(BatchLoader* loader,
                                   const std::function<MicroBatches(MicroBatches)>& own_parts,
                                   const ForwardLossTerms& forward, Normalizer& mean, DataParallel& layout,
                                   std::int64_t step) {
  if (!loader) return std::nullopt;
  loader->seek({});
  MicroBatches micro_batches = own_parts(loader->next());
  Group group = layout.mesh().counting();
  Normalizer& known = mean.undeferred();  // a step that is under way goes on as it was
  const Census census = known.count(micro_batches, group, /*stop_requested=*/false);
  if (census.targets == 0) return std::nullopt;
  const Denominator denominator = known.denominator(census);
  at::NoGradGuard no_grad;
  TermLedger ledger;                                    // knows what is the whole on every rank
  const bool every_round = layout.takes_every_round();  // a forward is a collective
  if (every_round)
    micro_batches.resize(std::max(micro_batches.size(), static_cast<std::size_t>(census.rounds)),
                         empty_batch());
  for (const auto& batch : micro_batches)
    if (every_round || batch.cut || batch.num_tokens() > 0) {  // so is a part's
      const LossTerms terms = forward(known.prepare(batch, denominator));
      ledger.add(terms, known.scale(terms, denominator).item<double>(), denominator, census);
    }
  at::Tensor sums = at::tensor(ledger.message(census), at::kDouble);
  group.all_reduce(sums);
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
