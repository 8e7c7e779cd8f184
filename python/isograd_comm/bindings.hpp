// The parts of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace isograd::python {

void bind_timing(
    pybind11::module_& module);  // for `isograd bench comm`; names with an underscore, not for users
void bind_losses(pybind11::module_& module);
void bind_verdict(pybind11::module_& module);

}  // namespace isograd::python
