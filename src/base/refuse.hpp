// Throws an error in one call.
#pragma once

#include <filesystem>
#include <string>

#include "isograd/error.hpp"

namespace isograd {

namespace fs = std::filesystem;  // in all of isograd's own files

// Throws ConfigError. The parts are those of ErrorText (isograd/error.hpp).
[[noreturn]] void refuse(std::string where, std::string found, std::string expected, std::string action);
// Throws PeerError.
[[noreturn]] void throw_peer_error(std::string where, std::string found, std::string expected,
                                   std::string action);

// The text of a path error (too long, no permission, a loop of links) as a ConfigError would have it.
ErrorText text_of(const fs::filesystem_error& error);

}  // namespace isograd
