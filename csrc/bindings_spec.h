// Models and their parts from Python: dicts of fields as spec.h names them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "primitives/common.h"
#include "spec.h"

namespace lily {

namespace nb = nanobind;

// "bfloat16", "float16" or "float32".
Type to_type(const std::string& name);
// (rows, columns, bits, group, experts), and where they differ from affine and the activations':
// mode, dtype.
MatrixSpec to_matrix(nb::handle tuple, Type activations);
std::vector<MatrixSpec> to_matrices(nb::handle list, Type activations);

Moe<Specs> to_moe_spec(nb::dict d, Type activations);
GatedDeltaShape to_gated_delta_shape(nb::dict d);
AttentionShape to_attention_shape(nb::dict d);
// Vectors that are left out have the dtype that kernels read.
ModelSpec to_model_spec(nb::dict d);

Model<Weights> to_model_weights(nb::dict d);

}  // namespace lily
