// Converts refusals of the operating system that std::filesystem throws.
#pragma once

#include <filesystem>

#include "isograd/error.hpp"

namespace isograd {

// The text of a path error (too long, no permission, a loop of links) as a ConfigError would have it.
ErrorText text_of(const std::filesystem::filesystem_error& error);

}  // namespace isograd
