// The smallest configuration that still fails, and the search for it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/config.hpp"
#include "verify/run.hpp"

namespace isograd {

struct Trial {
  RunConfig config;
  int ranks = 1;
};

// Names a trial's failure, independent of sizes; empty when nothing is. May throw
// ConfigError: such a configuration is impossible, and no failure.
using FailureOf = std::function<std::string(const Trial&)>;

struct Minimised {
  Trial trial;
  std::string failure;               // the one that was kept
  int tried = 0;                     // trials made
  std::vector<std::string> changes;  // "model.layers 4 -> 1", in the order of the configuration's keys
};

// Shrinks model, batch, accumulation and ranks and switches options off, as long as the same failure stays:
// each size to its least, else by halving the interval between a size that passes and one that fails, round
// after round until nothing shrinks. Local: no single change makes the result smaller. Nothing when `trial`
// does not fail, or `most_trials` are used up before it is known.
std::optional<Minimised> minimise(const Trial& trial, const FailureOf& failure_of, int most_trials = 400);

// The same for `isograd verify`: the first of `layouts` (as in verify_run) that fails on `ranks` thread ranks
// of this process. Nothing when all of them pass.
std::optional<Minimised> minimise_run(const RunConfig& config, int ranks,
                                      const std::vector<std::string>& layouts,
                                      const ChangeProblem& change = {});

// A configuration file that fails by itself, with the command that shows it.
std::string minimised_toml(const Minimised& minimised, const std::string& file);
std::string verify_command(const std::string& file, int ranks);

}  // namespace isograd
