#pragma once

#include <nanobind/nanobind.h>

namespace lily {

// Adds HostEncoder to the module, after bind_program.
void bind_host(nanobind::module_& m);

}  // namespace lily
