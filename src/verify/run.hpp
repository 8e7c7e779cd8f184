// verify for a configured run: the same data, model and layout that `isograd train` would use.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "isograd/verify.hpp"
#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd {

// Names that `--layout` takes.
std::vector<std::string> layout_names();

// Collective: one step of the configured batch, from the configured initial weights. `layouts` empty: the
// configured strategy. ConfigError on an unknown layout.
Verdict verify_run(const RunConfig& config, World& world, const std::vector<std::string>& layouts = {});

// Collective: the same for a run that has just ended, with the weights as they are now. For
// TrainerHooks::on_finish.
Verdict verify_finished(FinishedRun& run);

// A self-contained HTML page; `config` (TOML) is folded into it. Rank 0 only.
void write_verify_page(const Verdict& verdict, const std::filesystem::path& file, const std::string& config);

}  // namespace isograd
