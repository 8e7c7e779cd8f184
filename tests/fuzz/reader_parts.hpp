// What the files of readers share.
#pragma once

#include <ATen/core/TensorBody.h>

#include <filesystem>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/readers.hpp"

namespace isograd::fuzz {

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<Reader> model_readers();
std::vector<Reader> run_readers();
std::vector<Reader> data_readers();

void put(const std::filesystem::path& file, const std::string& bytes);
// Reads every byte, so that a view beyond its file is found.
std::uint64_t look_at(const at::Tensor& tensor);

extern const std::vector<std::string> kJson;  // what JSON is made of
std::vector<std::string> with(std::vector<std::string> words, std::initializer_list<const char*> more);

}  // namespace isograd::fuzz
