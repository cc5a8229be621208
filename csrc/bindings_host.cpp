#include "bindings_host.h"

#include <nanobind/stl/string.h>

#include "backend/host.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {

void bind_host(nb::module_& m) {
  nb::class_<HostEncoder>(m, "HostEncoder",
                          "Runs Programs on the CPU with kernels that metal.host compiled.")
      .def(
          "__init__",
          [](HostEncoder* self, const std::string& runtime, bool checked, uint32_t workers,
             uint64_t seed) { new (self) HostEncoder(runtime, {checked, workers, seed}); },
          "runtime"_a, nb::kw_only(), "checked"_a = false, "workers"_a = 1, "seed"_a = 0)
      .def("add", &HostEncoder::add, "pipeline"_a, "library"_a, "stub"_a)
      .def("encode", &HostEncoder::encode, "program"_a, "bindings"_a,
           nb::call_guard<nb::gil_scoped_release>(), "Run every dispatch; returns when all have.")
      .def_prop_ro(
          "moved",
          [](const HostEncoder& e) {
            nb::list out;
            for (const HostEncoder::Moved& m : e.moved()) {
              out.append(nb::make_tuple(m.dispatch, m.argument, m.loaded, m.stored));
            }
            return out;
          },
          "(dispatch, argument index, bytes loaded, bytes stored) of the last run (checked).");
}

}  // namespace lily
