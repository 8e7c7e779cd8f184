// The error of input that cannot be taken, in one call.
#pragma once

#include <string>

namespace isograd {

// Throws ConfigError; the parts as in ErrorText (isograd/error.hpp).
[[noreturn]] void refuse(std::string where, std::string found, std::string expected, std::string action);

}  // namespace isograd
