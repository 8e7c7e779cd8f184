// A table of numbers with one binary target per row: CSV or NPZ.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace isograd {

struct Table {
  at::Tensor features;  // [N, F] fp64
  at::Tensor targets;   // [N] int64, 0 or 1
};

// The cells of a line of CSV, without blanks around them; quotes may hold commas, and two of them are one.
std::vector<std::string> csv_cells(std::string_view line);

// CSV: column names, then numbers; `target`: the target's column, empty: the last. NPZ as numpy.savez writes
// it: "x" [N, F] and `target` [N], empty: "y". The file is untrusted: ConfigError with file, line or array
// for a cell that is no finite number, uneven rows, targets other than 0 and 1, no rows.
Table read_table(const std::filesystem::path& file, const std::string& target);

}  // namespace isograd
