// Finds the Python interpreter.
#pragma once

#include <filesystem>
#include <string>

namespace isograd {

// `wish`, else $PYTHON, .venv/bin/python of the checkout that built this program, else python3. Never one of
// the working folder, which may belong to another user.
std::string find_python(const std::string& wish = "");

// The source tree of the build folder with `program` in its bin/; empty: none (installed).
std::filesystem::path checkout_of(const std::filesystem::path& program);

}  // namespace isograd
