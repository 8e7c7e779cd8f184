// isograd export: the adapter of a checkpoint, or the model with it merged in, for other programs.
#include <set>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/lora.hpp"
#include "train/build.hpp"
#include "train/checkpoint_files.hpp"

namespace isograd {

Verb export_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "export", "Export the low-rank adapter of a checkpoint, or the model with it merged in");
  struct Flags {
    std::string checkpoint, directory;
    bool merge = false;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("CHECKPOINT", flags->checkpoint,
                   "a checkpoint, or the folder of a run (its latest checkpoint)")
      ->required();
  verb->add_option("DIRECTORY", flags->directory, "folder to create for the files")->required();
  verb->add_flag(
      "--merge", flags->merge,
      "add the adapter to the base model's weights and write a Hugging Face directory; default: write a "
      "directory that PEFT loads on top of the base model");
  verb->footer(
      "  isograd export runs/lora adapter\n"
      "  isograd export runs/lora merged --merge\n\n"
      "Exit status: 0 done; 2 bad input; 4 a defect of isograd.");
  const auto action = [flags] {
    const fs::path from = find_model(flags->checkpoint, "isograd export"),
                   to = fs::absolute(flags->directory).lexically_normal();
    if (fs::exists(to))
      refuse(flags->directory, "something of that name", "a new folder", "Name another, or remove it");
    if (!fs::exists(from / "state.json"))
      refuse(from.string(), "a folder without state.json", "a checkpoint of isograd train", "Name a run's");
    const TrainingState state = open_checkpoint(from);
    const SavedDecoder saved = read_decoder(from, &state);
    if (!saved.adapter)
      refuse(from.string(), "a checkpoint of all parameters, without an adapter",
             "one of a run with model.lora.rank",
             "Use the checkpoint itself: it is a Hugging Face directory");
    publish_directory(to, [&](const fs::path& folder) {
      if (!flags->merge) return write_peft(folder, *saved.adapter, saved.model->config(), saved.base);
      merge(*saved.model, *saved.adapter);
      write_hf(folder, *saved.model);
      const std::set<std::string> of_run = {"adapter_config.json", "adapter_model.safetensors",
                                            "config.json",         "optimizer.safetensors",
                                            "state.json",          "checksums.json"};
      for (const auto& entry : fs::directory_iterator(from))  // the tokenizer's
        if (!of_run.contains(entry.path().filename().string()))
          fs::copy_file(entry.path(), folder / entry.path().filename());
    });
    print(stdout, fmt::format("{}: {}\n", printable(to.string()),
                              flags->merge ? "a Hugging Face directory" : "a directory of PEFT's"));
    return 0;
  };
  return {verb, action};
}

}  // namespace isograd
