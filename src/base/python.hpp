// The Python interpreter for what runs in one.
#pragma once

#include <string>

namespace isograd {

// `wish`, else $PYTHON, .venv/bin/python here, python3.
std::string find_python(const std::string& wish = "");

}  // namespace isograd
