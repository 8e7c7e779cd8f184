#include "data/table.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstring>

#include "base/files.hpp"
#include "base/number_ranges.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

Table read_csv(const std::string& name, std::string_view text, const std::string& target) {
  std::vector<double> numbers;
  std::size_t columns = 0, label = 0;
  std::int64_t line_number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = text.find('\n', begin);
    if (end == text.npos) end = text.size();
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1, ++line_number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const auto found = csv_cells(line);
    const std::string where = fmt::format("{}:{}", name, line_number);
    if (columns == 0) {
      columns = found.size();
      const auto at = std::find(found.begin(), found.end(), target);
      if (columns < 2 || (!target.empty() && at == found.end()))
        refuse(where, fmt::format("columns '{}'", line.substr(0, 200)),
               target.empty() ? "names of two columns at least" : "a column '" + target + "'",
               "Write the columns' names into the first line, and data.target");
      label = target.empty() ? columns - 1 : static_cast<std::size_t>(at - found.begin());
      continue;
    }
    if (found.size() != columns)
      refuse(where, fmt::format("{} cells", found.size()), fmt::format("{}", columns), "Correct that line");
    for (const std::string& cell : found) {
      const auto value = number_in<double>(cell);
      if (!value || !std::isfinite(*value))
        refuse(where, fmt::format("'{}'", cell.substr(0, 40)), "a finite number",
               "Encode categories as numbers, and fill or drop what is missing");
      numbers.push_back(*value);
    }
  }
  const std::int64_t rows = columns == 0 ? 0 : static_cast<std::int64_t>(numbers.size() / columns);
  if (rows == 0) refuse(name, "no row", "names of columns, then rows", "Name a table with rows");
  const auto wide = static_cast<std::int64_t>(columns), at = static_cast<std::int64_t>(label);
  const at::Tensor all = at::tensor(numbers, at::kDouble).view({rows, wide});
  return {at::cat({all.narrow(1, 0, at), all.narrow(1, at + 1, wide - at - 1)}, 1),
          all.select(1, at).clone()};
}

// Little-endian numbers of an untrusted file.
class Bytes {
 public:
  Bytes(std::string name, std::string_view data) : name_(std::move(name)), data_(data) {}
  std::string_view at(std::uint64_t offset, std::uint64_t size) const {
    if (offset > data_.size() || size > data_.size() - offset)
      refuse(name_,
             fmt::format("an archive of {} bytes that names bytes {} to {}", data_.size(), offset,
                         offset + size),
             "a whole NPZ file", "Write the file again with numpy.savez");
    return data_.substr(offset, size);
  }
  std::uint64_t number(std::uint64_t offset, std::uint64_t size) const {
    const std::string_view bytes = at(offset, size);
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::uint64_t size() const { return data_.size(); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::string_view data_;
};

// One uncompressed member of a zip archive.
std::string_view member(const Bytes& zip, const std::string& name) {
  // The directory's end is before a comment whose length is a u16.
  std::uint64_t end = zip.size() < 22 ? 0 : zip.size() - 21;
  const std::uint64_t stop = end > 0xFFFF ? end - 0xFFFF - 1 : 0;
  while (end > stop && zip.number(end - 1, 4) != 0x06054b50) --end;
  if (end == stop) refuse(zip.name(), "no zip directory", "an NPZ file", "Write it with numpy.savez");
  const std::uint64_t count = zip.number(end - 1 + 10, 2);
  std::uint64_t at = zip.number(end - 1 + 16, 4);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (zip.number(at, 4) != 0x02014b50)
      refuse(zip.name(), "a damaged zip directory", "an NPZ file", "Write it with numpy.savez");
    const std::uint64_t name_size = zip.number(at + 28, 2), size = zip.number(at + 24, 4);
    if (zip.at(at + 46, name_size) == name) {
      if (zip.number(at + 10, 2) != 0)
        refuse(zip.name(), name + " compressed", "arrays stored as they are",
               "Write the file with numpy.savez, not savez_compressed");
      const std::uint64_t local = zip.number(at + 42, 4);
      return zip.at(local + 30 + zip.number(local + 26, 2) + zip.number(local + 28, 2), size);
    }
    at += 46 + name_size + zip.number(at + 30, 2) + zip.number(at + 32, 2);
  }
  refuse(zip.name(), "no array '" + name + "'", "arrays x [N, F] and y [N]",
         "Name the target in data.target");
}

at::Tensor array_of(const Bytes& zip, const std::string& key) {
  const std::string where = zip.name() + ": " + key;
  const Bytes npy(where, member(zip, key + ".npy"));
  if (npy.at(0, 6) != std::string_view("\x93NUMPY", 6))
    refuse(where, "no NPY header", "an array", "Write it again");
  const bool first = npy.number(6, 1) == 1;
  const std::uint64_t length = npy.number(8, first ? 2 : 4), data = (first ? 10 : 12) + length;
  const std::string header(npy.at(data - length, length));
  static const std::vector<std::pair<std::string, at::ScalarType>> types = {
      {"'<f8'", at::kDouble}, {"'<f4'", at::kFloat}, {"'<i8'", at::kLong},
      {"'<i4'", at::kInt},    {"'|u1'", at::kByte},  {"'|b1'", at::kByte}};
  const auto type = std::find_if(types.begin(), types.end(),
                                 [&](const auto& t) { return header.find(t.first) != header.npos; });
  const auto shape = header.find("'shape': (");
  if (type == types.end() || shape == header.npos || header.find("'fortran_order': False") == header.npos)
    refuse(where, header.substr(0, 120), "float32, float64, int32, int64, uint8 or bool in C order",
           "Convert the array");
  std::vector<std::int64_t> sizes;
  std::uint64_t elements = 1;
  const char* next = header.c_str() + shape + 10;
  while (*next && *next != ')') {
    std::int64_t size = 0;
    const auto [rest, error] = std::from_chars(next, header.c_str() + header.size(), size);
    if (error != std::errc() || size < 1)
      refuse(where, header.substr(0, 120), "extents of 1 or more", "Write it again");
    sizes.push_back(size);
    if (sizes.size() > 2) refuse(where, header.substr(0, 120), "one or two extents", "Write it again");
    if (__builtin_mul_overflow(elements, static_cast<std::uint64_t>(size), &elements) ||
        elements > zip.size())
      refuse(where, "more elements than bytes", "a whole array", "Write it again");
    next = rest;
    while (*next == ',' || *next == ' ') ++next;
  }
  at::Tensor result = at::empty(sizes, type->second);
  const std::string_view bytes = npy.at(data, result.nbytes());
  std::memcpy(result.mutable_data_ptr(), bytes.data(), bytes.size());
  return result.to(at::kDouble);
}

}  // namespace

std::vector<std::string> csv_cells(std::string_view line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"')
      cells.back() += line[++i];
    else if (line[i] == '"')
      quoted = !quoted;
    else if (line[i] == ',' && !quoted)
      cells.emplace_back();
    else
      cells.back() += line[i];
  }
  for (std::string& cell : cells) {
    cell.erase(cell.find_last_not_of(" \t\r") + 1);
    cell.erase(0, cell.find_first_not_of(" \t"));
  }
  return cells;
}

Table read_table(const fs::path& file, const std::string& target) {
  const std::string name = file.string(), text = read_file(file, UINT64_MAX);  // rows are unlimited
  Table table;
  if (file.extension() == ".npz") {
    const Bytes zip(name, text);
    table = {array_of(zip, "x"), array_of(zip, target.empty() ? "y" : target)};
  } else {
    table = read_csv(name, text, target);
  }
  if (table.features.dim() != 2 || table.targets.dim() != 1 ||
      table.features.size(0) != table.targets.size(0) || table.features.numel() == 0)
    refuse(name,
           fmt::format("x {}, target {}", c10::str(table.features.sizes()), c10::str(table.targets.sizes())),
           "x [N, F] and a target [N], not empty", "Give one target for each row");
  if (!at::isfinite(table.features).all().item<bool>())
    refuse(name, "a feature that is not finite", "finite numbers", "Fill or drop what is missing");
  const at::Tensor binary = table.targets.eq(0).logical_or(table.targets.eq(1));
  if (!binary.all().item<bool>())
    refuse(name, "targets other than 0 and 1", "a binary target", "Choose the rare class as 1");
  table.targets = table.targets.to(at::kLong);
  return table;
}

}  // namespace isograd
