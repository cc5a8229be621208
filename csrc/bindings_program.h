#pragma once

#include <nanobind/nanobind.h>

namespace lily {

// Adds Kernel, KernelRegistry, Program, Dispatch, Bindings and query() to the module.
void bind_program(nanobind::module_& m);

}  // namespace lily
