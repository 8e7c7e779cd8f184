// isograd data: text into shards, and what shards hold.
#include <cstdio>
#include <optional>

#include "cli/verbs.hpp"
#include "isograd/error.hpp"
#include "isograd/text_data.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

struct PackFlags {
  CorpusOptions corpus;
  std::string tokenizer = "bytes", out;
};

int pack(const PackFlags& flags) {
  const auto tokenizer =
      flags.tokenizer == "bytes" ? byte_tokenizer() : sentencepiece_tokenizer(flags.tokenizer);
  PackSummary summary;
  const auto shards = pack_corpus(flags.corpus, *tokenizer, flags.out, &summary);
  std::string text =
      fmt::format("{} documents, {} tokens from {} files{}\n", summary.documents, summary.tokens,
                  summary.files, summary.reused ? " (unchanged: the shards were there already)" : "");
  if (summary.empty_documents > 0)
    text += fmt::format("{} documents without text were left out\n", summary.empty_documents);
  for (const auto& shard : shards) text += shard.string() + "\n";
  std::fputs(text.c_str(), stdout);
  return 0;
}

struct ShowFlags {
  std::vector<std::string> shards;
  std::string tokenizer;
  std::optional<std::uint32_t> end_of_text;
  std::int64_t documents = 3;
};

int show(const ShowFlags& flags) {
  const auto store = TokenStore::open({flags.shards.begin(), flags.shards.end()}, flags.end_of_text);
  std::unique_ptr<Tokenizer> tokenizer;
  if (flags.tokenizer == "bytes" || (flags.tokenizer.empty() && store->tokenizer_name() == "bytes"))
    tokenizer = byte_tokenizer();
  else if (!flags.tokenizer.empty())
    tokenizer = sentencepiece_tokenizer(flags.tokenizer);
  if (tokenizer && !store->tokenizer_name().empty() && tokenizer->name() != store->tokenizer_name())
    throw ConfigError({.where = "--tokenizer " + flags.tokenizer,
                       .found = tokenizer->name(),
                       .expected = store->tokenizer_name() + ", which packed these shards",
                       .action = "Give that one, or leave --tokenizer out to see the numbers of tokens"});
  std::fputs(describe(*store, tokenizer.get(), flags.documents).c_str(), stdout);
  return 0;
}

}  // namespace

std::vector<Verb> data_verbs(CLI::App& program) {
  CLI::App* data = program.add_subcommand("data", "Pack text into token shards, and look into shards");
  data->require_subcommand(1);

  CLI::App* packing = data->add_subcommand("pack", "Tokenize text and write shards");
  auto pack_flags = std::make_shared<PackFlags>();
  packing
      ->add_option("TEXT", pack_flags->corpus.patterns,
                   "files, directories or globs of UTF-8 text; .jsonl: one document a line, field \"text\"")
      ->required();
  packing->add_option("--out", pack_flags->out, "folder for the shards; other shards in it are removed")
      ->type_name("DIR")
      ->required();
  packing->add_option("--tokenizer", pack_flags->tokenizer, "\"bytes\" or a SentencePiece model file")
      ->type_name("FILE")
      ->capture_default_str();
  packing->add_option("--shard-tokens", pack_flags->corpus.shard_tokens, "most tokens of a shard")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  packing->footer(
      "  isograd data pack 'books/*.txt' --out shards\n"
      "  isograd train run.toml --set data.shards=shards/*\n\n"
      "Status: 0 done; 2 bad input; 4 a defect of isograd.");

  CLI::App* showing = data->add_subcommand("show", "Say what shards hold");
  auto show_flags = std::make_shared<ShowFlags>();
  showing->add_option("SHARD", show_flags->shards, "shards of isograd, llm.c or nanoGPT")->required();
  showing->add_option("--documents", show_flags->documents, "how many of the first documents are shown")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->capture_default_str();
  showing
      ->add_option("--tokenizer", show_flags->tokenizer,
                   "decodes them: \"bytes\" or a SentencePiece model file")
      ->type_name("FILE");
  showing
      ->add_option("--end-of-text", show_flags->end_of_text,
                   "delimits documents in shards of llm.c and nanoGPT")
      ->type_name("TOKEN");
  showing->footer(
      "Every byte is read and checksums are checked. Status: 0 whole; 2 bad input; 4 a defect of isograd.");
  return {{packing, [pack_flags] { return pack(*pack_flags); }},
          {showing, [show_flags] { return show(*show_flags); }}};
}

}  // namespace isograd
