#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace lily {

// Adds Kernel, KernelRegistry, Program, Dispatch, Bindings and query() to the module.
// A pipeline as plain Python data: key, kernel, file, constants.
nanobind::dict describe(const Pipeline& pipeline);

void bind_program(nanobind::module_& m);

}  // namespace lily
