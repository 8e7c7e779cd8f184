// config.json of a Hugging Face directory.
#pragma once

#include <filesystem>
#include <string>

#include "isograd/decoder_lm.hpp"

namespace isograd {

// `file` is for messages.
DecoderConfig parse_hf_config(const std::string& text, const std::filesystem::path& file);
std::string hf_config_text(const DecoderConfig& config, at::ScalarType dtype);

}  // namespace isograd
