// isograd data: text into shards, and what shards hold.
#include <cstdio>
#include <optional>

#include <fmt/ranges.h>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "isograd/data.hpp"
#include "isograd/world.hpp"
#include "train/task.hpp"

namespace isograd {
namespace {

struct PackFlags {
  CorpusOptions corpus;
  std::string tokenizer = "bytes", out;
};

int pack(const PackFlags& flags) {
  const auto tokenizer = open_tokenizer(flags.tokenizer);
  PackSummary summary;
  const auto shards = pack_corpus(flags.corpus, *tokenizer, flags.out, &summary);
  std::string text =
      fmt::format("{} documents, {} tokens from {} files{}\n", summary.documents, summary.tokens,
                  summary.files, summary.reused ? " (unchanged: the shards were there already)" : "");
  if (summary.bad_lines > 0) text += fmt::format("{} bad lines were left out\n", summary.bad_lines);
  if (summary.empty_documents > 0)
    text += fmt::format("{} documents without text were left out\n", summary.empty_documents);
  for (const auto& shard : shards) text += printable(shard.string()) + "\n";
  print(stdout, text);
  return 0;
}

struct ShowFlags {
  std::vector<std::string> shards, sets;
  std::string tokenizer;
  std::optional<std::int64_t> step;
  int ranks = 1;
  std::optional<std::uint32_t> end_of_text;
  std::int64_t documents = 3;
};

// The contents of a step depend on the configuration too: on seed, packs, batch and held-out documents.
int show_step(const ShowFlags& flags) {
  if (flags.shards.size() != 1 || fs::path(flags.shards[0]).extension() != ".toml")
    refuse("--step", fmt::format("{} after `data show`", fmt::join(flags.shards, " ")),
           "the run's configuration, a .toml file, which says what a step holds",
           "Write: isograd data show CONFIG.toml --step N");
  const RunConfig config = load_config(flags.shards[0], flags.sets);
  check(config, flags.ranks);
  World alone;
  const auto task = make_task(config, alone.group);
  print(stdout, task->describe_step(*flags.step, grid_of(config, flags.ranks).size(kSampleAxes)));
  return 0;
}

int show(const ShowFlags& flags) {
  if (flags.step) return show_step(flags);
  for (const std::string& name : flags.shards)
    if (fs::path(name).extension() == ".toml")
      refuse("isograd data show " + name, "a run's configuration, and no --step",
             "a shard, or a configuration and which of its steps is to be shown",
             fmt::format("Write: isograd data show {} --step N", name));
  const auto store = TokenStore::open({flags.shards.begin(), flags.shards.end()}, flags.end_of_text);
  std::unique_ptr<Tokenizer> tokenizer;
  if (flags.tokenizer == "bytes" || (flags.tokenizer.empty() && store->tokenizer_name() == "bytes"))
    tokenizer = byte_tokenizer();
  else if (!flags.tokenizer.empty())
    tokenizer = open_tokenizer(flags.tokenizer);
  if (tokenizer && !store->tokenizer_name().empty() && tokenizer->name() != store->tokenizer_name())
    refuse("--tokenizer " + flags.tokenizer, tokenizer->name(),
           store->tokenizer_name() + ", which packed these shards",
           "Give that one, or leave --tokenizer out to see the numbers of tokens");
  print(stdout, describe(*store, tokenizer.get(), flags.documents));
  return 0;
}

}  // namespace

std::vector<Verb> data_verbs(CLI::App& program) {
  CLI::App* data = program.add_subcommand("data", "Pack text into token shards, and look into shards");
  data->require_subcommand(1);

  CLI::App* packing = data->add_subcommand("pack", "Tokenize text and write shards");
  auto pack_flags = std::make_shared<PackFlags>();
  pack_flags->corpus.replace = false;
  packing
      ->add_option(
          "TEXT", pack_flags->corpus.patterns,
          "files, folders or globs of UTF-8 text; in .jsonl, .jsonl.gz and .jsonl.zst files each line is a "
          "document, as docs/conversations.md says")
      ->required();
  add_option(*packing, "--out", pack_flags->out, "folder for the shards, which holds no other shards", "DIR")
      ->required();
  offers(add_option(*packing, "--tokenizer", pack_flags->tokenizer,
                    "\"bytes\", a SentencePiece model file or a tokenizer.json", "FILE"),
         {"bytes", "<files>"});
  add_option(*packing, "--shard-tokens", pack_flags->corpus.shard_tokens,
             "largest number of tokens in a shard", "N", 1, 0x1p40);
  packing->add_flag_callback(
      "--skip-bad-lines", [pack_flags] { pack_flags->corpus.on_bad_line = CorpusOptions::OnBadLine::kSkip; },
      "leave out lines that are no documents, and list them in DIR/.bad-lines.txt");
  packing->add_flag("--train-on-all", pack_flags->corpus.train_on_all,
                    "learn all tokens of conversations, not the assistant's alone");
  packing->add_flag("--drop-doubled-mark", pack_flags->corpus.drop_doubled_mark,
                    "leave out one of two equal marks at the beginning or end of a text");
  packing->add_flag_callback(
      "--overwrite", [pack_flags] { pack_flags->corpus.replace = true; },
      "replace shards in --out that come from other text or another tokenizer");
  packing->footer(
      "  isograd data pack 'books/*.txt' --out shards\n"
      "  isograd train run.toml --set data.shards=shards/*\n\n"
      "Exit status: 0 done; 2 bad input; 4 a defect of isograd.");

  CLI::App* showing = data->add_subcommand("show", "Show the contents of shards or the samples of a step");
  auto show_flags = std::make_shared<ShowFlags>();
  showing
      ->add_option("SHARD", show_flags->shards,
                   "shards of isograd, llm.c or nanoGPT; with --step, the configuration of a run")
      ->required();
  add_option(*showing, "--step", show_flags->step,
             "show the packs or videos of this step of a run, counted from 1, with their documents", "N", 1,
             0x1p40);
  add_option(*showing, "--ranks", show_flags->ranks,
             "number of ranks of the run, to show which of them takes which pack", "N", 1, 0x1p20)
      ->needs("--step");
  add_option(*showing, "--set", show_flags->sets,
             "override a key of the configuration, as in --set batch.packs_per_step=8", "KEY=VALUE")
      ->needs("--step");
  add_option(*showing, "--documents", show_flags->documents, "number of documents to show, from the first on",
             "N", 0, 0x1p30);
  offers(add_option(*showing, "--tokenizer", show_flags->tokenizer,
                    "tokenizer to decode with: \"bytes\", a SentencePiece model file or a tokenizer.json",
                    "FILE"),
         {"bytes", "<files>"});
  add_option(*showing, "--end-of-text", show_flags->end_of_text,
             "token between documents in shards of llm.c and nanoGPT", "TOKEN");
  showing->footer(
      "  isograd data show shards/*\n"
      "  isograd data show run.toml --step 12 --ranks 2\n\n"
      "Reads every byte and checks the checksums.\n"
      "Exit status: 0 intact; 2 bad input; 4 a defect of isograd.");
  return {{packing, [pack_flags] { return pack(*pack_flags); }},
          {showing, [show_flags] { return show(*show_flags); }}};
}

}  // namespace isograd
