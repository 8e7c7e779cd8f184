// The Python interpreter for what runs in one.
#pragma once

#include <filesystem>
#include <string>

namespace isograd {

// `wish`, else $PYTHON, .venv/bin/python of the checkout that this program was built in, python3. Never one
// of the working folder, which may be anybody's.
std::string find_python(const std::string& wish = "");

// The source tree of the build folder in whose bin/ `program` lies; empty where it lies in none (installed).
std::filesystem::path checkout_of(const std::filesystem::path& program);

}  // namespace isograd
