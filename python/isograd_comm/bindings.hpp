// What the module is put together from.
#pragma once

#include <pybind11/pybind11.h>

namespace isograd::python {

// For `isograd bench comm`; names with an underscore, not for users.
void bind_timing(pybind11::module_& module);
// Of heads without logits.
void bind_losses(pybind11::module_& module);
void bind_ranking(pybind11::module_& module);
void bind_verdict(pybind11::module_& module);

}  // namespace isograd::python
