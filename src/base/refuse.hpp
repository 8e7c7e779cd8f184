// Refuses invalid input in one call.
#pragma once

#include <string>

namespace isograd {

// Throws ConfigError. The parts are those of ErrorText (isograd/error.hpp).
[[noreturn]] void refuse(std::string where, std::string found, std::string expected, std::string action);

}  // namespace isograd
