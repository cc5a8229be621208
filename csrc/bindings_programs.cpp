#include "bindings_programs.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_program.h"
#include "bindings_spec.h"
#include "model.h"
#include "ops/attention.h"
#include "ops/embed_head.h"
#include "ops/gated_delta.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "run.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

// Changes to what a target starts with.
StepOptions to_step_options(Target target, nb::dict d) {
  StepOptions o = step_options(target);
  const std::vector<std::pair<const char*, bool*>> switches = {
      {"logits", &o.logits},
      {"fuse_norm", &o.fuse_norm},
      {"fuse_projections", &o.fuse_projections},
      {"fuse_residual", &o.fuse_residual},
      {"fuse_delta", &o.fuse_delta},
      {"fuse_route", &o.fuse_route},
      {"serial_levels", &o.serial_levels},
      {"coalesced", &o.coalesced},
      {"mma", &o.mma}};
  const std::vector<std::pair<const char*, int*>> numbers = {
      {"pack", &o.pack},
      {"context", &o.context},
      {"fixed_block_from", &o.fixed_block_from},
      {"splits", &o.splits},
      {"ahead", &o.ahead}};
  for (auto [key, value] : d) {
    const auto name = nb::cast<std::string>(key);
    bool known = name.find('.') != std::string::npos;
    if (known) {
      o.tiles[name] = nb::cast<int>(value);
    }
    for (auto& [text, to] : switches) {
      if (name == text) {
        *to = nb::cast<bool>(value);
        known = true;
      }
    }
    for (auto& [text, to] : numbers) {
      if (name == text) {
        *to = nb::cast<int>(value);
        known = true;
      }
    }
    if (!known) {
      throw std::invalid_argument("the decode step has no option '" + name + "'.");
    }
  }
  return o;
}

LayerOptions to_layer_options(nb::dict d) {
  const std::vector<std::pair<const char*, Scan>> scans = {
      {"norm", Scan::norm}, {"apart", Scan::apart}, {"block", Scan::block}};
  LayerOptions o;
  for (auto [key, value] : d) {
    const auto name = nb::cast<std::string>(key);
    if (name == "dequantize") {
      o.dequantize = nb::cast<bool>(value);
    } else if (name == "block_rows") {
      o.block_rows = nb::cast<int>(value);
      if (o.block_rows != 0 && o.block_rows != 16 && o.block_rows != 32 && o.block_rows != 64) {
        throw std::invalid_argument("block_rows " + std::to_string(o.block_rows) +
                                    " is not 16, 32, 64 or 0 for the production form.");
      }
    } else if (name == "scan") {
      for (auto& [text, scan] : scans) {
        if (nb::cast<std::string>(value) == text) {
          o.scan = scan;
        }
      }
      if (!o.scan) {
        throw std::invalid_argument("scan '" + nb::cast<std::string>(value) +
                                    "' is not norm, apart or block.");
      }
    } else {
      throw std::invalid_argument("layers have no option '" + name + "'.");
    }
  }
  return o;
}

nb::tuple to_python(const Choice& c) {
  return nb::make_tuple(c.kernel, to_string(c.code), c.reason);
}

nb::list to_python(const Pipelines& pipelines) {
  nb::list out;
  for (const auto& [key, pipeline] : pipelines) {
    out.append(describe(pipeline));
  }
  return out;
}

// Python holds what owns the Program.
struct BuiltProgram {
  std::shared_ptr<const void> owner;
  const Program* program;
  std::vector<std::pair<std::string, std::vector<char>>> tables;
};

template <typename T>
BuiltProgram built(const std::shared_ptr<T>& p) {
  BuiltProgram b{p, &p->program, {}};
  for (const Builder::Table& t : p->tables) {
    b.tables.emplace_back(p->program.slots()[t.slot.index].name, t.data);
  }
  return b;
}

}  // namespace

void bind_programs(nb::module_& m) {
  nb::class_<BuiltProgram>(m, "BuiltProgram", "A primitive's Program, made from shapes alone.")
      .def_prop_ro(
          "program", [](const BuiltProgram& b) { return b.program; },
          nb::rv_policy::reference_internal)
      .def_prop_ro("tables", [](const BuiltProgram& b) {
        nb::dict out;
        for (auto& [name, data] : b.tables) {
          out[name.c_str()] = nb::bytes(data.data(), data.size());
        }
        return out;
      });
  // ---- Is there a kernel, and if not why: (kernel or "", code, reason). rows 0: any number.
  m.def(
      "linear_kernel",
      [](const std::string& target, const std::string& dtype, nb::handle matrices, int rows,
         bool float32) {
        const Type t = to_type(dtype);
        return to_python(
            linear_kernel(parse_target(target), t, to_matrices(matrices, t), rows, float32));
      },
      "target"_a, "dtype"_a, "matrices"_a, "rows"_a = kAnyRows, "float32"_a = false);
  m.def(
      "embed_kernel",
      [](const std::string& target, const std::string& dtype, nb::handle table) {
        const Type t = to_type(dtype);
        return to_python(embed_kernel(parse_target(target), t, to_matrix(table, t)));
      },
      "target"_a, "dtype"_a, "table"_a);
  m.def(
      "moe_kernel",
      [](const std::string& target, const std::string& dtype, nb::dict moe, int rows) {
        const Type t = to_type(dtype);
        return to_python(moe_kernel(parse_target(target), t, to_moe_spec(moe, t), rows));
      },
      "target"_a, "dtype"_a, "moe"_a, "rows"_a = kAnyRows);
  m.def(
      "gated_delta_kernel",
      [](const std::string& target, const std::string& dtype, nb::dict shape,
         const std::vector<std::string>& dtypes, int rows, bool masked) {
        if (dtypes.size() != 4) {
          throw std::invalid_argument(
              "dtypes are those of conv1d.weight, A_log, dt_bias and norm.weight.");
        }
        auto vector = [&](int i) { return VectorSpec{0, to_type(dtypes[i])}; };
        return to_python(
            gated_delta_kernel(parse_target(target), to_type(dtype), to_gated_delta_shape(shape),
                               {vector(0), vector(1), vector(2), vector(3)}, rows, masked));
      },
      "target"_a, "dtype"_a, "shape"_a, "dtypes"_a, "rows"_a = kAnyRows, "masked"_a = false);
  m.def(
      "attention_kernel",
      [](const std::string& target, const std::string& dtype, nb::dict shape,
         const std::string& norm_dtype, const std::string& mask) {
        const VectorSpec norm{0, to_type(norm_dtype)};
        return to_python(attention_kernel(parse_target(target), to_type(dtype),
                                          to_attention_shape(shape), norm, norm, mask));
      },
      "target"_a, "dtype"_a, "shape"_a, "norm_dtype"_a, "mask"_a);
  m.def(
      "step_kernel",
      [](const std::string& target, nb::dict model) {
        return to_python(step_kernel(parse_target(target), to_model_spec(model)));
      },
      "target"_a, "model"_a);

  // ---- Programs from shapes alone
  m.def(
      "step_program",
      [](const std::string& target, nb::dict model, int capacity, nb::dict options) {
        const Target to = parse_target(target);
        const ModelSpec spec = to_model_spec(model);
        if (Choice c = step_kernel(to, spec); !c) {
          throw std::invalid_argument("the decode step has no kernels for this model: " + c.reason);
        }
        std::vector<int> capacities;
        for (const LayerSpec& l : spec.layers) {
          capacities.push_back(l.attention ? capacity : 0);
        }
        return built(step_program(to, spec, capacities, to_step_options(to, options)));
      },
      "target"_a, "model"_a, "capacity"_a, "options"_a = nb::dict());
  m.def(
      "chunk_program",
      [](const std::string& target, nb::dict model, int rows, nb::dict options) {
        return built(chunk_program(parse_target(target), to_model_spec(model), rows,
                                   to_layer_options(options)));
      },
      "target"_a, "model"_a, "rows"_a, "options"_a = nb::dict());
  m.def(
      "linear_program",
      [](const std::string& target, const std::string& dtype, int rows, nb::handle matrices,
         bool float32) {
        const Type t = to_type(dtype);
        return built(
            linear_program(parse_target(target), t, rows, to_matrices(matrices, t), float32));
      },
      "target"_a, "dtype"_a, "rows"_a, "matrices"_a, "float32"_a = false);
  m.def(
      "embed_program",
      [](const std::string& target, const std::string& dtype, int count, nb::handle table) {
        const Type t = to_type(dtype);
        return built(embed_program(parse_target(target), t, count, to_matrix(table, t)));
      },
      "target"_a, "dtype"_a, "count"_a, "table"_a);
  m.def(
      "moe_program",
      [](const std::string& target, const std::string& dtype, int rows, nb::dict moe) {
        const Type t = to_type(dtype);
        return built(moe_program(parse_target(target), t, rows, to_moe_spec(moe, t)));
      },
      "target"_a, "dtype"_a, "rows"_a, "moe"_a);
  m.def(
      "gated_delta_program",
      [](const std::string& target, const std::string& dtype, int B, int T, nb::dict shape,
         bool has_mask, bool has_lengths) {
        const Target to = parse_target(target);
        const GatedDeltaRows rows{B, T, true, true, has_mask, has_lengths};
        return built(gated_delta_program(to, to_type(dtype), to_gated_delta_shape(shape), rows));
      },
      "target"_a, "dtype"_a, "batch"_a, "tokens"_a, "shape"_a, "has_mask"_a = false,
      "has_lengths"_a = false);
  m.def(
      "rms_norm_program",
      [](const std::string& target, const std::string& dtype, int rows, int dim) {
        return built(rms_norm_program(parse_target(target), to_type(dtype), rows, dim, 1e-6f));
      },
      "target"_a, "dtype"_a, "rows"_a, "dim"_a);

  // ---- What must have been compiled
  m.def(
      "step_pipelines",
      [](const std::string& target, nb::dict model, const std::vector<int>& capacities,
         nb::dict options) {
        const Target to = parse_target(target);
        return to_python(
            step_pipelines(to, to_model_spec(model), capacities, to_step_options(to, options)));
      },
      "target"_a, "model"_a, "capacities"_a, "options"_a = nb::dict());
  m.def(
      "layer_pipelines",
      [](const std::string& target, nb::dict model) {
        return to_python(layer_pipelines(parse_target(target), to_model_spec(model)));
      },
      "target"_a, "model"_a);
  m.def(
      "linear_pipelines",
      [](const std::string& target, const std::string& dtype, nb::handle matrices, bool float32) {
        Pipelines out;
        const Type t = to_type(dtype);
        for (const MatrixSpec& matrix : to_matrices(matrices, t)) {
          linear_pipelines(parse_target(target), t, matrix, float32, out);
        }
        return to_python(out);
      },
      "target"_a, "dtype"_a, "matrices"_a, "float32"_a = false);
  m.def(
      "embed_pipelines",
      [](const std::string& dtype, nb::handle table) {
        Pipelines out;
        const Type t = to_type(dtype);
        embed_pipelines(t, to_matrix(table, t), out);
        return to_python(out);
      },
      "dtype"_a, "table"_a);
  m.def(
      "moe_pipelines",
      [](const std::string& target, const std::string& dtype, nb::dict moe) {
        Pipelines out;
        const Type t = to_type(dtype);
        moe_pipelines(parse_target(target), t, to_moe_spec(moe, t), out);
        return to_python(out);
      },
      "target"_a, "dtype"_a, "moe"_a);
  m.def(
      "gated_delta_pipelines",
      [](const std::string& target, const std::string& dtype) {
        Pipelines out;
        gated_delta_pipelines(parse_target(target), to_type(dtype), out);
        return to_python(out);
      },
      "target"_a, "dtype"_a);
  m.def(
      "attention_pipelines",
      [](const std::string& dtype) {
        Pipelines out;
        attention_pipelines(to_type(dtype), out);
        return to_python(out);
      },
      "dtype"_a);

  m.def(
      "gpu_target", [] { return to_string(gpu_target()); },
      "\"metal\", \"metal_nax\" or \"cuda\", whichever this build has a backend for; else "
      "\"cpu\".");
  m.def(
      "set_metal_host",
      [](std::optional<std::string> runtime, bool checked, uint64_t seed, nb::object compile,
         nb::dict step, const std::string& target) {
        if (!runtime) {
          nb::gil_scoped_release release;
          set_metal_host(std::nullopt);
          return;
        }
        MetalHostOptions o;
        o.runtime = *runtime;
        o.target = parse_target(target);
        o.host = {checked, 1, seed};
        o.step = to_step_options(o.target, step);
        // Queued steps may let go of the last reference on a stream's thread, which must not take
        // the GIL: the callable is never freed.
        auto* callable = new nb::object(std::move(compile));
        o.compile = [callable](const Pipeline& p) {
          nb::gil_scoped_acquire gil;
          nb::dict constants;
          for (const ConstantLayout& c : p.kernel->constants) {
            for (const Constant& given : p.constants) {
              if (given.id == c.id) {
                float number = 0.0f;
                if (c.type == ScalarType::float32) {
                  std::memcpy(&number, given.value.bytes.data(), 4);
                  constants[c.name.c_str()] = number;
                } else if (c.type == ScalarType::boolean) {
                  constants[c.name.c_str()] = given.value.bytes[0] != 0;
                } else {
                  int32_t integer = 0;
                  std::memcpy(&integer, given.value.bytes.data(), 4);
                  constants[c.name.c_str()] = integer;
                }
              }
            }
          }
          return nb::cast<std::pair<std::string, std::string>>(
              (*callable)(p.kernel->file, p.kernel->name, constants));
        };
        nb::gil_scoped_release release;
        set_metal_host(std::move(o));
      },
      "runtime"_a.none(), "checked"_a = false, "seed"_a = 0, "compile"_a = nb::none(),
      "step"_a = nb::dict(), "target"_a = "metal",
      "Run Programs with the Metal host in place of the reference; None switches back.");
  m.def(
      "set_step_options",
      [](nb::dict options) { set_gpu_step_options(to_step_options(gpu_target(), options)); },
      "options"_a,
      "How decode steps of this build's GPU are built from now on; NVIDIA's need their PTX.");
  m.def(
      "set_layer_options", [](nb::dict options) { set_layer_options(to_layer_options(options)); },
      "options"_a,
      "How layers' Programs are built from now on: block_rows, scan, dequantize; what an NVIDIA "
      "GPU runs then needs its PTX.");
  m.def("metal_host", [] { return metal_host(); });
  m.def("reset_run_counts", &reset_run_counts);
  m.def("run_counts", [] {
    nb::list out;
    for (const auto& [key, n] : run_counts()) {
      const auto& [kind, kernel, reason] = key;
      out.append(nb::make_tuple(kind, kernel, reason, n));
    }
    return out;
  });
}

}  // namespace lily
