#pragma once

#include <nanobind/nanobind.h>

namespace lily {

// Adds built_with_cuda and, in a build for NVIDIA, the table of compiled kernels.
void bind_cuda(nanobind::module_& m);

}  // namespace lily
