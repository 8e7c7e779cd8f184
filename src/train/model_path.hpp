// Where a model is to be read from, before anything reads it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace isograd {

// "organisation/name" of a text that names a repository on the Hugging Face Hub and no folder here: by its
// form, or by its address.
std::optional<std::string> hub_id(const std::string& text);

// ConfigError unless `text` is a folder: the nearest one that is there is named, and for a Hub id the command
// that fetches it. `where`: the key or flag that holds it.
void require_model_folder(const std::string& text, const std::string& where);

}  // namespace isograd
