#pragma once

#include <nanobind/nanobind.h>

namespace lily {

// Programs of the primitives from shapes alone, and the switch of the Metal host.
void bind_programs(nanobind::module_& m);

}  // namespace lily
