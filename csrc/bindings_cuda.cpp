#include "bindings_cuda.h"

#include <nanobind/stl/string.h>

#ifdef LILY_CUDA
#include "backend/cuda.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {

void bind_cuda(nb::module_& m) {
#ifdef LILY_CUDA
  m.attr("built_with_cuda") = true;
  m.def(
      "cuda_add_kernel",
      [](const std::string& key, const std::string& file, const std::string& entry) {
        cuda_kernels().add(key, file, entry);
      },
      "key"_a, "file"_a, "entry"_a, "Name the PTX of a pipeline; it is read when first used.");
  m.def("cuda_has_kernel", [](const std::string& key) { return cuda_kernels().has(key); }, "key"_a);
#else
  m.attr("built_with_cuda") = false;
#endif
}

}  // namespace lily
