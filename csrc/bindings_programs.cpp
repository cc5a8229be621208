#include "bindings_programs.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "programs/layer_programs.h"
#include "programs/metal_host.h"

#ifdef LILY_CUDA
#include "backend/cuda.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

Type to_type(const std::string& name) {
  if (name == "bfloat16") {
    return Type::bf16;
  }
  if (name == "float16") {
    return Type::f16;
  }
  if (name == "float32") {
    return Type::f32;
  }
  throw std::invalid_argument("dtype '" + name + "' is not bfloat16, float16 or float32.");
}

template <typename T>
T field(nb::dict d, const char* name) {
  if (!d.contains(name)) {
    throw std::invalid_argument(std::string("the shapes have no '") + name + "'.");
  }
  return nb::cast<T>(d[name]);
}

// (rows, columns, bits, group, experts)
MatrixDims matrix(const std::vector<int>& t, const char* name) {
  if (t.size() != 5) {
    throw std::invalid_argument(std::string(name) +
                                " is not (rows, columns, bits, group, experts).");
  }
  return {t[0], t[1], t[2], t[3], t[4]};
}

MatrixDims matrix(nb::dict d, const char* name) {
  return matrix(field<std::vector<int>>(d, name), name);
}

MoeDims moe_dims(nb::dict d) {
  return {matrix(d, "router"),        matrix(d, "gate"),          matrix(d, "up"),
          matrix(d, "down"),          matrix(d, "shared_gate"),   matrix(d, "shared_up"),
          matrix(d, "shared_down"),   matrix(d, "shared_router"), field<int>(d, "top_k"),
          field<bool>(d, "normalize")};
}

DecodeDims decode_dims(nb::dict d) {
  DecodeDims dims;
  dims.t = to_type(field<std::string>(d, "dtype"));
  dims.embedding = matrix(d, "embedding");
  dims.head = matrix(d, "head");
  dims.eps = field<float>(d, "eps");
  for (nb::handle h : field<nb::list>(d, "layers")) {
    auto l = nb::cast<nb::dict>(h);
    LayerDims layer;
    if (l.contains("delta")) {
      auto x = field<nb::dict>(l, "delta");
      layer.delta = DeltaDims{matrix(x, "qkv"),
                              matrix(x, "z"),
                              matrix(x, "b"),
                              matrix(x, "a"),
                              matrix(x, "out"),
                              field<int>(x, "key_heads"),
                              field<int>(x, "value_heads"),
                              field<int>(x, "key_dim"),
                              field<int>(x, "value_dim"),
                              field<int>(x, "conv_width"),
                              field<float>(x, "eps")};
    } else {
      auto x = field<nb::dict>(l, "attention");
      layer.attention = AttentionDims{matrix(x, "q"),
                                      matrix(x, "k"),
                                      matrix(x, "v"),
                                      matrix(x, "out"),
                                      field<int>(x, "heads"),
                                      field<int>(x, "kv_heads"),
                                      field<int>(x, "head_dim"),
                                      field<int>(x, "rotary"),
                                      field<float>(x, "base"),
                                      field<float>(x, "eps")};
    }
    layer.moe = moe_dims(field<nb::dict>(l, "moe"));
    dims.layers.push_back(std::move(layer));
  }
  return dims;
}

// "nvidia" stands for all that its backend starts with; other keys change that.
DecodeOptions decode_options(nb::dict d) {
  DecodeOptions o;
  if (d.contains("nvidia") && nb::cast<bool>(d["nvidia"])) {
    o = nvidia_options();
  }
  const std::vector<std::pair<const char*, bool*>> switches = {
      {"logits", &o.logits},
      {"fuse_norm", &o.fuse_norm},
      {"fuse_projections", &o.fuse_projections},
      {"fuse_residual", &o.fuse_residual},
      {"fuse_delta", &o.fuse_delta},
      {"fuse_route", &o.fuse_route},
      {"fuse_shared", &o.fuse_shared},
      {"fuse_head", &o.fuse_head},
      {"coalesced", &o.coalesced},
      {"nvidia", &o.nvidia},
      {"sync", &o.sync}};
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

Scan to_scan(const std::string& name) {
  const std::vector<std::pair<const char*, Scan>> forms = {
      {"norm", Scan::norm}, {"apart", Scan::apart}, {"block", Scan::block}, {"chunk", Scan::chunk}};
  for (auto& [text, scan] : forms) {
    if (name == text) {
      return scan;
    }
  }
  throw std::invalid_argument("scan '" + name + "' is not norm, apart, block or chunk.");
}

MatrixUnit to_unit(const std::string& name) {
  const std::vector<std::pair<const char*, MatrixUnit>> units = {
      {"simdgroup", MatrixUnit::simdgroup},
      {"tensor", MatrixUnit::tensor},
      {"nvidia", MatrixUnit::nvidia}};
  for (auto& [text, unit] : units) {
    if (name == text) {
      return unit;
    }
  }
  throw std::invalid_argument("matrix unit '" + name + "' is not simdgroup, tensor or nvidia.");
}

bool has_backend(const std::string& device) {
#ifdef LILY_CUDA
  if (device == "cuda") {
    return true;
  }
#endif
#ifdef LILY_METAL
  if (device == "metal") {
    return true;
  }
#endif
  return device == "cpu";
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
  m.def(
      "decode_refusal", [](nb::dict dims) { return decode_refusal(decode_dims(dims)); }, "dims"_a,
      "Why the Metal kernels do not serve a decode step of these shapes, or ''.");
  m.def(
      "decode_program",
      [](nb::dict dims, int capacity, nb::dict options) {
        DecodeDims d = decode_dims(dims);
        std::string reason = decode_refusal(d);
        if (!reason.empty()) {
          throw std::invalid_argument("the decode step has no kernels for this model: " + reason +
                                      ".");
        }
        std::vector<int> capacities;
        for (const LayerDims& l : d.layers) {
          capacities.push_back(l.attention ? capacity : 0);
        }
        return built(decode_program(d, capacities, decode_options(options)));
      },
      "dims"_a, "capacity"_a, "options"_a = nb::dict());
#ifdef LILY_CUDA
  m.def(
      "set_cuda_decode_options",
      [](nb::dict options) { set_cuda_decode_options(decode_options(options)); }, "options"_a,
      "How decode steps are built from now on; the kernels' PTX must be there.");
#endif
  m.def(
      "prefill_program",
      [](nb::dict dims, int tokens, const std::string& scan, const std::string& unit) {
        return built(prefill_program(decode_dims(dims), tokens, to_scan(scan), to_unit(unit)));
      },
      "dims"_a, "tokens"_a, "scan"_a = "norm", "unit"_a = "simdgroup");
  m.def(
      "project_program",
      [](const std::string& dtype, const std::string& kernel, int rows,
         const std::vector<std::vector<int>>& matrices, bool float32, const std::string& unit) {
        std::vector<MatrixDims> dims;
        for (const std::vector<int>& t : matrices) {
          dims.push_back(matrix(t, "a matrix"));
        }
        return built(project_program(to_type(dtype), kernel, rows, dims, float32, to_unit(unit)));
      },
      "dtype"_a, "kernel"_a, "rows"_a, "matrices"_a, "float32"_a = false, "unit"_a = "simdgroup");
  m.def(
      "embed_program",
      [](const std::string& dtype, int count, const std::vector<int>& embedding) {
        return built(embed_program(to_type(dtype), count, matrix(embedding, "the embedding")));
      },
      "dtype"_a, "count"_a, "embedding"_a);
  m.def(
      "moe_program",
      [](const std::string& dtype, const std::string& kernel, int rows, nb::dict dims,
         const std::string& unit) {
        return built(moe_program(to_type(dtype), kernel, rows, moe_dims(dims), to_unit(unit)));
      },
      "dtype"_a, "kernel"_a, "rows"_a, "dims"_a, "unit"_a = "simdgroup");
  m.def(
      "gated_delta_program",
      [](const std::string& dtype, int B, int T, int key_heads, int value_heads, float eps,
         bool has_mask, bool has_lengths, const std::string& scan) {
        GatedDeltaDims d{B, T, key_heads, value_heads, eps, true, true, has_mask, has_lengths};
        const std::string kernel = scan == "step" ? "gdn_step" : "gdn_scan";
        return built(gated_delta_program(to_type(dtype), kernel, d,
                                         scan == "step" ? Scan::norm : to_scan(scan)));
      },
      "dtype"_a, "batch"_a, "tokens"_a, "key_heads"_a, "value_heads"_a, "eps"_a,
      "has_mask"_a = false, "has_lengths"_a = false, "scan"_a = "norm");

  m.def(
      "attention_prepare_program",
      [](const std::string& dtype, int head_dim, int rotary, int tokens) {
        PrepareDims d{1, tokens, 1, 1, head_dim, rotary, 1e6f, 1e-6f, false};
        const std::string reason = prepare_refusal(to_type(dtype), d);
        if (!reason.empty()) {
          throw std::invalid_argument(reason + ".");
        }
        return built(attention_prepare_program(to_type(dtype), d));
      },
      "dtype"_a, "head_dim"_a, "rotary"_a, "tokens"_a = 1);

  m.def("has_backend", &has_backend, "device"_a,
        "Whether this build can run Programs on MLX's device: \"cpu\", \"metal\" or \"cuda\".");
  m.def(
      "set_metal_host",
      [](std::optional<std::string> runtime, bool checked, uint64_t seed, nb::object compile,
         nb::dict decode, bool nvidia) {
        if (!runtime) {
          nb::gil_scoped_release release;
          set_metal_host(std::nullopt);
          return;
        }
        MetalHostOptions o;
        o.runtime = *runtime;
        o.nvidia = nvidia;
        o.host = {checked, 1, seed};
        o.decode = decode_options(decode);
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
      "decode"_a = nb::dict(), "nvidia"_a = false,
      "Run Programs with the Metal host in place of the reference; None switches back.");
  m.def("metal_host", [] { return metal_host(); });
  m.def("reset_metal_host_counts", &reset_metal_host_counts);
  m.def("metal_host_counts", [] {
    nb::list out;
    for (const auto& [key, n] : metal_host_counts()) {
      const auto& [kind, kernel, reason] = key;
      out.append(nb::make_tuple(kind, kernel, reason, n));
    }
    return out;
  });
}

}  // namespace lily
