// Makes rows of the table of verbs. Each verb stands behind its function, in cases/.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench/runner.hpp"

namespace isograd {

using BenchValue = decltype(BenchOption::value);
using Names = std::vector<std::string>;

inline BenchOption flag(const std::string& name, BenchValue value, const std::string& about) {
  return {.name = name, .value = value, .about = about};
}
inline BenchOption file(const std::string& name, BenchValue value, const std::string& about) {
  return {.name = name, .value = value, .about = about, .type = "FILE"};
}
inline BenchOption choice(const std::string& name, BenchValue value, const std::string& about, Names choices,
                          const char* type = "NAME") {
  return {.name = name, .value = value, .about = about, .type = type, .choices = std::move(choices)};
}
inline BenchOption number(const std::string& name, BenchValue value, const std::string& about, double least,
                          double most, const char* type = "N") {
  return {.name = name, .value = value, .about = about, .type = type, .least = least, .most = most};
}
inline BenchOption cases(const std::string& which, Names names) {
  return choice("--case", &BenchOptions::cases, which + "; all unless given, may be repeated",
                std::move(names));
}
inline BenchOption rank_counts(const std::string& which, int least, int most) {
  return number("--ranks", &BenchOptions::rank_counts, which + " unless given, may be repeated", least, most);
}
inline BenchOption ranks(const std::string& which, int least, int most) {
  return number("--ranks", &BenchOptions::ranks, which, least, most);
}

inline constexpr const char* kSpeed = "A ratio above 1 means that isograd is faster.\n";
inline constexpr const char* kSpeedOrMemory =
    "A ratio above 1 means that isograd is faster or takes less memory.\n";
inline std::string status(const std::string& what) {
  return "Status: 0 compared, whatever the ratios; 1 " + what + " differ; 2 bad input.";
}

// A verb with `options`, and those that all have: --json; --seconds, `for_each` of which it takes; --python,
// which has `package`; the last two unless null.
inline BenchVerb verb(const std::string& name, const std::string& about, const std::string& footer,
                      BenchOptions defaults, Names packages, void (*run)(Bench&),
                      std::vector<BenchOption> options, const char* for_each,
                      const char* package = "PyTorch") {
  options.push_back(file("--json", &BenchOptions::json,
                         "records go here: {bench, case, ours, peer, peer_name, unit, ratio, processor}"));
  if (for_each)
    options.push_back(number("--seconds", &BenchOptions::seconds, std::string("of taking turns") + for_each,
                             0.1, 1e6, "S"));
  if (package)
    options.push_back(file(
        "--python", &BenchOptions::python,
        fmt::format("has {}; $PYTHON, the checkout's .venv/bin/python or python3 unless given", package)));
  return {name, about, footer, std::move(defaults), std::move(packages), std::move(options), run};
}

}  // namespace isograd
