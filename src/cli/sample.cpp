// isograd sample: text or videos from a checkpoint.
#include <ATen/Parallel.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/waiting.hpp"
#include "cli/verbs.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/lora.hpp"
#include "train/build.hpp"
#include "train/checkpoint_files.hpp"
#include "train/evaluate.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

struct SampleFlags {
  std::string checkpoint, prompt, tokenizer;
  SampleRequest options{.prompt = {}, .temperature = 0.8};
  VideoSampleOptions videos;
  std::vector<CLI::Option*> of_text, of_videos;
};

// Flags for the other kind of model would have no effect, so they are refused.
void refuse_flags(const std::vector<CLI::Option*>& flags, const std::string& kind, const std::string& model) {
  for (const CLI::Option* flag : flags)
    if (flag->count() > 0)
      refuse(flag->get_name(), fmt::format("a flag of {} models", kind),
             "flags that have an effect: this is a model of " + model, "Leave it out");
}

// The tokenizer of a Hugging Face directory that transformers would use.
std::string tokenizer_beside(const fs::path& directory) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (fs::exists(directory / name)) return (directory / name).string();
  refuse(directory.string(), "no tokenizer.json, tokenizer.model or checkpoint's state.json, which names one",
         "a tokenizer", "Add --tokenizer with a SentencePiece model or tokenizer.json, or --tokenizer bytes");
}

// One thread for small models: where a pass over the weights takes milliseconds, waiting for one another
// makes several slower. OMP_NUM_THREADS overrides this.
void choose_threads(DecoderLM& model) {
  constexpr std::size_t kManyBytes = std::size_t{1} << 30;
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : model.named()) bytes += tensor.nbytes();
  if (bytes < kManyBytes && !std::getenv("OMP_NUM_THREADS")) at::set_num_threads(1);
}

int run(const SampleFlags& flags) {
  const fs::path directory = find_model(flags.checkpoint, "isograd sample");
  if (is_video_model(directory)) {
    refuse_flags(flags.of_text, "text", "videos");
    VideoSampleOptions options = flags.videos;
    options.seed = flags.options.seed;
    std::optional<Waiting> waiting(std::in_place, "step", options.videos * options.steps, 0,
                                   StatusOptions{.in_a_log = false});
    options.begins = [&](std::int64_t video, std::int64_t step) {
      waiting->begin(video * options.steps + step + 1,
                     fmt::format("video {} of {}", video + 1, options.videos));
    };
    const std::vector<fs::path> files = sample_videos(directory, options);
    waiting.reset();
    for (const fs::path& file : files) print(stdout, printable(file.string()) + "\n");
    return 0;
  }
  refuse_flags(flags.of_videos, "video", "text");
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<TrainingState> state;
  if (fs::exists(directory / "state.json")) {
    state = open_checkpoint(directory);
    tokenizer =
        flags.tokenizer.empty() ? checkpoint_tokenizer(directory, *state) : open_tokenizer(flags.tokenizer);
  } else {
    tokenizer = open_tokenizer(flags.tokenizer.empty() ? tokenizer_beside(directory) : flags.tokenizer);
    verify_model_files(directory);  // open_checkpoint() did otherwise
  }
  const auto [model, adapter, base] = read_decoder(directory, state ? &*state : nullptr);
  model->set_adapter(adapter.get());
  choose_threads(*model);
  if (tokenizer->vocabulary() > model->config().vocabulary)
    refuse("--tokenizer " + flags.tokenizer, fmt::format("a vocabulary of {}", tokenizer->vocabulary()),
           fmt::format("at most {}, that of {}", model->config().vocabulary, directory.string()),
           "Give the tokenizer that the model was trained with");
  check_prompt(*tokenizer, flags.prompt, model->config(), "--prompt");
  for (const auto& notice :
       prompt_notices(*tokenizer, flags.prompt, model->config(), flags.options.max_tokens))
    print(stderr, notice + "\n");
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  const auto show = [&](std::string_view text) {
    if (terminal)
      print(stdout, text);  // a model may have learnt escape sequences
    else
      std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };

  SampleRequest request = flags.options;
  std::optional<Waiting> waiting;
  if (!terminal) {  // where the text is not seen as it grows
    waiting.emplace("token", request.max_tokens, 0, StatusOptions{.in_a_log = false});
    request.stops = [&, next = Clock::time_point()](const std::vector<std::int64_t>& drawn) mutable {
      if (const auto now = Clock::now(); now >= next) {
        next = now + std::chrono::milliseconds(100);
        waiting->begin(static_cast<std::int64_t>(drawn.size()), "text of " + directory.string());
      }
      return false;
    };
  }
  sample_text(*model, *tokenizer, flags.prompt, request, show);
  waiting.reset();
  show("\n");
  return 0;
}

}  // namespace

fs::path find_model(const fs::path& given, const std::string& verb) {
  if (fs::exists(given / "state.json")) return given;
  if (given.filename() == "best" && !fs::exists(given)) {  // RUN/best, RUN/checkpoints/best
    const fs::path run = given.parent_path(), root = run / "checkpoints";
    for (const fs::path& folder : {root, run})  // neither: a name, as those of the Hugging Face Hub are
      if (fs::is_directory(folder)) return resolve_checkpoint(folder, "best");
  }
  if (fs::is_directory(given / "checkpoints")) return resolve_checkpoint(given / "checkpoints", "latest");
  if (fs::exists(given / "config.json")) return given;
  require_model_folder(given.string(), verb);
  if (list_checkpoints(given).empty())
    refuse(verb, given.string() + ", a folder without a model",
           "a run's folder, a checkpoint (step-NNNNNNNN), or a Hugging Face directory (config.json and "
           "weights)",
           "Name run.directory of a run of isograd train that has saved a checkpoint");
  return resolve_checkpoint(given, "latest");
}

Verb sample_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("sample", "Generate text or videos from a checkpoint");
  auto flags = std::make_shared<SampleFlags>();
  SampleRequest& options = flags->options;
  verb->add_option(
          "CHECKPOINT", flags->checkpoint,
          "a checkpoint, the folder of a run (its latest checkpoint), RUN/best, or a Hugging Face directory")
      ->required();
  constexpr double kMany = 0x1p30;
  add_option(*verb, "--seed", options.seed,
             "seed of the random numbers: the same seed gives the same text or videos", "S")
      ->capture_default_str();
  // Flags of one kind of model are refused for the other.
  const auto text = [&](CLI::Option* option) { flags->of_text.push_back(option->group("Text models")); };
  const auto video = [&](CLI::Option* option) { flags->of_videos.push_back(option->group("Video models")); };
  text(add_option(*verb, "--prompt", flags->prompt, "text to continue; default: begin a new document",
                  "TEXT"));
  text(add_option(*verb, "--tokens", options.max_tokens, "maximum number of tokens", "N", 1, kMany));
  text(add_option(*verb, "--temperature", options.temperature,
                  "divides the logits; 0 always takes the most likely token", "T", 0, 1e6));
  text(add_option(*verb, "--top-k", options.top_k, "draw from the K most likely tokens only; 0 is off", "K",
                  0, kMany)
           ->capture_default_str());
  text(add_option(*verb, "--top-p", options.top_p,
                  "draw from the most likely tokens only, until their probabilities add up to P", "P", 1e-9,
                  1));
  text(offers(
      add_option(
          *verb, "--tokenizer", flags->tokenizer,
          "\"bytes\", a SentencePiece model or a tokenizer.json; default: the one saved with the checkpoint",
          "FILE"),
      {"bytes", "<files>"}));
  VideoSampleOptions& videos = flags->videos;
  const char* known = "; default: the largest number that the model was trained on";
  for (const auto& [name, number, about] :
       {std::tuple{"--videos", &videos.videos, std::string("number of videos to make")},
        {"--steps", &videos.steps, "steps of Euler's method from noise to data"},
        {"--frames", &videos.frames, std::string("frames per video") + known},
        {"--height", &videos.height, std::string("height in pixels") + known},
        {"--width", &videos.width, std::string("width in pixels") + known}})
    video(add_option(*verb, name, *number, about, "N", 1, kMany));
  video(add_option(*verb, "--out", videos.folder, "folder to write the videos to, as animated PNGs", "DIR"));
  verb->footer(
      "  isograd sample runs/first_light --prompt \"// Returns the \" --temperature 0.5\n"
      "  isograd sample runs/video --videos 4 --steps 100 --out samples\n\n"
      "Exit status: 0 done; 2 bad input; 4 a defect of isograd.");
  return {verb, [flags] { return run(*flags); }};
}

}  // namespace isograd
