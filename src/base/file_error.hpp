// The operating system's refusals that std::filesystem throws, as errors of the input.
#pragma once

#include <filesystem>

#include "isograd/error.hpp"

namespace isograd {

// A path that is too long, no permission, a loop of links: its text as a ConfigError would have it.
ErrorText text_of(const std::filesystem::filesystem_error& error);

}  // namespace isograd
