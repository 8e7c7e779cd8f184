// The safetensors format: an 8-byte length, a JSON header, then the bytes of every tensor without gaps.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "isograd/model.hpp"

namespace isograd {

// The types of parameters and gradients, the finest first, with their names in train.dtype and config.json,
// and in verdicts and dumps.
struct FloatType {
  at::ScalarType type;
  const char *name, *precision;
};
inline constexpr FloatType kFloatTypes[] = {{at::kDouble, "float64", "fp64"},
                                            {at::kFloat, "float32", "fp32"},
                                            {at::kHalf, "float16", "fp16"},
                                            {at::kBFloat16, "bfloat16", "bf16"}};
// The row with that value, as in float_type("fp32", &FloatType::precision); null: none has it.
const FloatType* float_type(const auto& value, auto FloatType::*of) {
  const FloatType* const row = std::ranges::find(kFloatTypes, value, of);
  return row == std::end(kFloatTypes) ? nullptr : row;
}
const FloatType& float_type(at::ScalarType type);  // ConfigError: another type

using Metadata = std::map<std::string, std::string>;

// Tensors by name, on the CPU. They are views of a read-only mapping of the file, kept alive by any of them:
// copy before writing into one. (One whose offset is not aligned for its dtype is a copy.) The file is not
// trusted: length of the header, JSON, duplicate keys, dtypes, shapes, overflow, bounds, overlaps and gaps
// are checked; a ConfigError names the file and the tensor.
std::map<std::string, at::Tensor> read_safetensors(const fs::path& path, Metadata* metadata = nullptr);

// Whole or not at all. Tensors of larger elements come first (all stay aligned), otherwise in the given
// order. Contiguous CPU tensors are written from where they are. ConfigError: a name twice, a dtype that the
// format does not have, a full disk.
void write_safetensors(const fs::path& path, const NamedTensors& tensors,
                       const Metadata& metadata = {{"format", "pt"}});
// One file whose tensors come one after another, in the order of its entries.
class SafetensorsFile {
 public:
  SafetensorsFile(const fs::path& path, std::vector<TensorStream::Entry> entries,
                  const Metadata& metadata = {{"format", "pt"}});
  void add(const at::Tensor& tensor);
  bool is_whole() const { return written_ == entries_.size(); }
  void commit();  // once it is whole

 private:
  std::vector<TensorStream::Entry> entries_;
  AtomicFile file_;
  std::size_t written_ = 0;
};
std::int64_t bytes_of(const TensorStream::Entry& entry);
// Writes a whole stream.
void write_safetensors(const fs::path& path, const TensorStream& tensors,
                       const Metadata& metadata = {{"format", "pt"}});

// ---- the weights of a model: model.safetensors, or several files and model.safetensors.index.json ----

struct FoundTensor {
  at::Tensor tensor;
  fs::path file;
};
// By name; the files stay mapped. ConfigErrors, which end with `action`: neither of the two or both, an index
// that contradicts the files.
std::map<std::string, FoundTensor> read_tensor_files(const fs::path& directory, const std::string& action);
// Several files where one would have more than `file_bytes` and several tensors. ConfigError: the folder has
// the other kind.
void write_tensor_files(const fs::path& directory, const TensorStream& weights, std::int64_t file_bytes);

}  // namespace isograd
