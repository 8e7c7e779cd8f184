// isograd sample: text from a checkpoint.
#include <cstdio>

#include "cli/verbs.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"
#include "train/build.hpp"
#include "train/evaluate.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

struct Flags {
  std::string checkpoint, prompt, tokenizer;
  SampleOptions options;
};

// A checkpoint, a run's folder (its latest checkpoint), or a Hugging Face directory.
fs::path find_model(const fs::path& given) {
  if (fs::exists(given / "state.json")) return given;
  if (fs::is_directory(given / "checkpoints")) return resolve_checkpoint(given / "checkpoints", "latest");
  if (fs::exists(given / "config.json")) return given;
  return resolve_checkpoint(given, fs::is_directory(given) ? "latest" : given.string());
}

std::unique_ptr<Tokenizer> tokenizer_named(const std::string& name) {
  return name == "bytes" ? byte_tokenizer() : sentencepiece_tokenizer(name);
}

int run(const Flags& flags) {
  const fs::path directory = find_model(flags.checkpoint);
  std::unique_ptr<Tokenizer> tokenizer;
  at::ScalarType dtype = at::kFloat;
  if (fs::exists(directory / "state.json")) {
    const TrainingState state = open_checkpoint(directory);
    dtype = scalar_type(state.dtype);
    tokenizer =
        flags.tokenizer.empty() ? checkpoint_tokenizer(directory, state) : tokenizer_named(flags.tokenizer);
  } else if (flags.tokenizer.empty()) {
    throw ConfigError({.where = directory.string(),
                       .found = "a model without a checkpoint's state.json, which names the tokenizer",
                       .expected = "--tokenizer",
                       .action = "Add --tokenizer bytes, or --tokenizer with a SentencePiece model file"});
  } else {
    tokenizer = tokenizer_named(flags.tokenizer);
  }
  const auto model = read_hf(directory, dtype);
  if (tokenizer->vocabulary() > model->config().vocabulary)
    throw ConfigError(
        {.where = "--tokenizer " + flags.tokenizer,
         .found = fmt::format("a vocabulary of {}", tokenizer->vocabulary()),
         .expected = fmt::format("at most {}, that of {}", model->config().vocabulary, directory.string()),
         .action = "Give the tokenizer that the model was trained with"});
  std::fputs((sample_text(*model, *tokenizer, flags.prompt, flags.options) + "\n").c_str(), stdout);
  return 0;
}

}  // namespace

Verb sample_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("sample", "Generate text from a checkpoint");
  auto flags = std::make_shared<Flags>();
  SampleOptions& options = flags->options;
  verb->add_option("CHECKPOINT", flags->checkpoint,
                   "a checkpoint, a run's folder (its latest), or a Hugging Face directory")
      ->required();
  verb->add_option("--prompt", flags->prompt, "what the text begins with; empty: a new document")
      ->type_name("TEXT");
  verb->add_option("--tokens", options.max_tokens, "how many are generated, at most")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  verb->add_option("--temperature", options.temperature, "divides the logits; 0: always the likeliest token")
      ->type_name("T")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  verb->add_option("--top-k", options.top_k, "only among the k likeliest; 0: off")
      ->type_name("K")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->capture_default_str();
  verb->add_option("--top-p", options.top_p, "only among the likeliest that make up this probability")
      ->type_name("P")
      ->check(CLI::Range(1e-9, 1.0))
      ->capture_default_str();
  verb->add_option("--seed", options.seed, "the same seed gives the same text")
      ->type_name("S")
      ->capture_default_str();
  verb->add_option("--tokenizer", flags->tokenizer,
                   "\"bytes\" or a SentencePiece model, where none is kept with it")
      ->type_name("FILE");
  verb->footer(
      "  isograd sample runs/first_light --prompt \"// Returns the \" --temperature 0.5\n\n"
      "Status: 0 done; 2 bad input; 4 a defect of isograd.");
  return {verb, [flags] { return run(*flags); }};
}

}  // namespace isograd
