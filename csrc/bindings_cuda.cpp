#include "bindings_cuda.h"

#include <nanobind/stl/string.h>

#ifdef LILY_CUDA
#include <algorithm>

#include "backend/cuda.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {

#ifdef LILY_CUDA
namespace {

double copy_rate() {
  constexpr size_t kBytes = size_t{1} << 30;
  CUdeviceptr from, to;
  CUevent begin, end;
  mlx::core::cu::device(0).make_current();
  check_cuda(cuMemAlloc(&from, kBytes), "memory for the copy rate");
  check_cuda(cuMemAlloc(&to, kBytes), "memory for the copy rate");
  check_cuda(cuMemsetD8(from, 0x35, kBytes), "memory for the copy rate");
  check_cuda(cuEventCreate(&begin, 0), "an event");
  check_cuda(cuEventCreate(&end, 0), "an event");
  float best = 1e30f;
  for (int i = 0; i < 6; ++i) {  // the first warms up
    float ms = 0;
    check_cuda(cuEventRecord(begin, nullptr), "an event");
    check_cuda(cuMemcpyDtoDAsync(to, from, kBytes, nullptr), "the copy");
    check_cuda(cuEventRecord(end, nullptr), "an event");
    check_cuda(cuEventSynchronize(end), "the copy");
    check_cuda(cuEventElapsedTime(&ms, begin, end), "an event");
    best = std::min(best, ms);
  }
  cuEventDestroy(begin);
  cuEventDestroy(end);
  cuMemFree(from);
  cuMemFree(to);
  return 2.0 * kBytes / (best * 1e-3);
}

}  // namespace
#endif

void bind_cuda(nb::module_& m) {
#ifdef LILY_CUDA
  m.attr("built_with_cuda") = true;
  m.def(
      "cuda_add_kernel",
      [](const std::string& key, const std::string& text, const std::string& entry) {
        cuda_kernels().add(key, text, entry);
      },
      "key"_a, "text"_a, "entry"_a,
      "Give the PTX of a pipeline; the driver gets it when it is first used.");
  m.def("cuda_copy_rate", &copy_rate, "Bytes a second, read plus written, of a 1 GiB device copy.");
  m.def("cuda_has_kernel", [](const std::string& key) { return cuda_kernels().has(key); }, "key"_a);
#else
  m.attr("built_with_cuda") = false;
#endif
}

}  // namespace lily
