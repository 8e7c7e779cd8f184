// A table of numbers with one binary target a row: CSV or NPZ.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

namespace isograd {

struct Table {
  at::Tensor features;  // [N, F] fp64
  at::Tensor targets;   // [N] int64, 0 or 1
};

// CSV: a line of column names, then numbers; `target` names the target's column, empty: the last one. NPZ as
// numpy.savez writes it (not compressed): features "x" [N, F], the target `target` [N], empty: "y". Parsed as
// hostile. ConfigError with file, line or array: a cell that is no finite number, rows of other lengths,
// targets that are not 0 or 1, no row.
Table read_table(const std::filesystem::path& file, const std::string& target);

}  // namespace isograd
