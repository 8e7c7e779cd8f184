// config.json of a Hugging Face directory.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

inline constexpr const char* kGenerationConfig = "generation_config.json";

// `file` is for messages.
DecoderConfig parse_hf_config(const std::string& text, const std::filesystem::path& file);
// The tokens of eos_token_id in a generation_config.json, one or a list; nothing else of it is read.
std::vector<std::int64_t> parse_generation_eos(const std::string& text, const std::filesystem::path& file);
std::string hf_config_text(const DecoderConfig& config, at::ScalarType dtype);

}  // namespace isograd
