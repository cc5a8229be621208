#include "primitives/common.h"

#include <sstream>

#include "backend/gpu.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "run.h"

namespace lily {

std::string shape_text(const mx::array& a) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < a.ndim(); ++i) {
    out << (i ? ", " : "") << a.shape(static_cast<int>(i));
  }
  out << ']';
  return out.str();
}

void fail(const char* op, const std::string& text) {
  throw std::invalid_argument(std::string(op) + ": " + text);
}

void check_ndim(const char* op, const char* what, const mx::array& a, size_t ndim) {
  if (a.ndim() != ndim) {
    fail(op, std::string(what) + " has shape " + shape_text(a) + "; " + std::to_string(ndim) +
                 " axes are expected");
  }
}

void check_shape(const char* op, const char* what, const mx::array& a, const mx::Shape& expected) {
  if (a.shape() != expected) {
    mx::array want(expected, mx::bool_, nullptr, {});
    fail(op, std::string(what) + " has shape " + shape_text(a) + "; " + shape_text(want) +
                 " is expected");
  }
}

void check_dtype(const char* op, const char* what, const mx::array& a, mx::Dtype dtype) {
  if (a.dtype() != dtype) {
    fail(op, std::string(what) + " has another dtype than the other inputs; cast it with astype");
  }
}

int64_t rows_of(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : static_cast<int64_t>(x.size()) / x.shape(-1);
}

mx::cpu::CommandEncoder& encoder(mx::Stream s) {
  return mx::cpu::get_command_encoder(s);
}

Type type_of(mx::Dtype dtype, const char* what) {
  if (dtype == mx::float32) {
    return Type::fp32;
  }
  if (dtype == mx::float16) {
    return Type::fp16;
  }
  if (dtype == mx::bfloat16) {
    return Type::bf16;
  }
  std::ostringstream out;
  out << what << " has dtype " << dtype << "; use float32, float16 or bfloat16";
  throw std::invalid_argument(out.str());
}

mx::Dtype dtype_of(Type t) {
  return t == Type::fp32 ? mx::float32 : t == Type::fp16 ? mx::float16 : mx::bfloat16;
}

Weight::Weight(mx::array w, std::optional<mx::array> s, std::optional<mx::array> b, int bits,
               int group)
    : weight(std::move(w)), scales(std::move(s)), biases(std::move(b)), bits(bits), group(group) {
  auto fail = [](const std::string& text) { throw std::invalid_argument("Weight: " + text); };
  if (weight.ndim() != 2 && weight.ndim() != 3) {
    fail("weight has shape " + shape_text(weight) + "; use [rows, cols] or [experts, rows, cols]");
  }
  if (bits == 0) {
    type_of(weight.dtype(), "weight");
    if (scales || biases) {
      fail("scales or biases given with bits 0; give bits and group of the quantized weight");
    }
  } else {
    if (Choice c = check_format({0, 0, bits, group, 1, Type::fp32, "affine"}); !c) {
      fail(c.reason);
    }
    if (!scales || !biases) {
      fail("affine codes need scales and biases");
    }
    if (weight.dtype() != mx::uint32) {
      fail("codes must be uint32 words");
    }
    type_of(scales->dtype(), "scales");
    if (biases->dtype() != scales->dtype() || biases->shape() != scales->shape()) {
      fail("biases " + shape_text(*biases) + " differ from scales " + shape_text(*scales) +
           " in shape or dtype");
    }
    mx::Shape expected = weight.shape();
    expected.back() = cols() / group;
    if (cols() % group != 0 || scales->shape() != expected) {
      fail("scales " + shape_text(*scales) + " do not fit codes " + shape_text(weight) + " of " +
           std::to_string(bits) + " bits in groups of " + std::to_string(group));
    }
  }
  if (Choice c = check_matrix(Target::cpu, Type::fp32, spec()); !c) {
    fail(c.reason);
  }
}

MatrixSpec Weight::spec() const {
  return {rows(), cols(), bits, group, experts(), type_of(dtype(), "a weight"), "affine"};
}

VectorSpec spec_of(const mx::array& vector) {
  return {static_cast<int>(vector.size()), type_of(vector.dtype(), "a parameter")};
}

ModelSpec specs_of(const Model<Weights>& model) {
  return convert_model<Specs>(model, [](const std::string&, const auto& x) {
    if constexpr (std::is_same_v<std::decay_t<decltype(x)>, Weight>) {
      return x.spec();
    } else {
      return spec_of(*x);
    }
  });
}

reference::DeltaShape reference_shape(Type t, int B, int T, const GatedDeltaShape& s) {
  return {t, B, T, s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.conv_width, s.eps};
}

reference::AttentionShape reference_shape(Type t, int B, int T, const AttentionShape& s,
                                          Type norms) {
  return {t, B, T, s.heads, s.kv_heads, s.head_dim, s.rotary, s.base, s.eps, norms};
}

Format append(const Weight& w, std::vector<mx::array>& inputs) {
  inputs.push_back(w.weight);
  if (w.bits != 0) {
    inputs.push_back(*w.scales);
    inputs.push_back(*w.biases);
  }
  return {w.bits, w.group};
}

namespace {

void check_contiguous(const mx::array& a) {
  if (a.strides(-1) != 1 && a.shape(-1) != 1) {
    throw std::invalid_argument(
        "a weight of shape " + shape_text(a) +
        " is not contiguous along its last axis; make it so with mx.contiguous");
  }
}

void check_arrays(const mx::array& w, const mx::array* s, const mx::array* b) {
  check_contiguous(w);
  if (s != nullptr) {
    check_contiguous(*s);
    check_contiguous(*b);
    if (s->strides() != b->strides()) {
      throw std::invalid_argument(
          "scales and biases of one weight differ in strides; make them contiguous");
    }
  }
}

Matrix make_matrix(const mx::array& w, const mx::array* s, const mx::array* b, Format format) {
  check_arrays(w, s, b);
  const bool experts = w.ndim() == 3;
  Matrix m;
  m.bits = format.bits;
  m.group = format.group;
  m.rows = w.shape(-2);
  m.weight = w.data<char>();
  m.weight_row = w.strides(-2) * static_cast<int64_t>(w.itemsize());
  m.weight_expert = experts ? w.strides(0) * static_cast<int64_t>(w.itemsize()) : 0;
  if (format.bits == 0) {
    m.type = type_of(w.dtype(), "weight");
    m.cols = w.shape(-1);
    return m;
  }
  m.type = type_of(s->dtype(), "scales");
  m.cols = w.shape(-1) * 32 / format.bits;
  m.scales = s->data<char>();
  m.biases = b->data<char>();
  m.scale_row = s->strides(-2);
  m.scale_expert = experts ? s->strides(0) : 0;
  return m;
}

}  // namespace

std::vector<MatrixSpec> specs_at(const std::vector<mx::array>& inputs, size_t cursor,
                                 const std::vector<Format>& formats) {
  std::vector<MatrixSpec> specs;
  for (const Format& f : formats) {
    const mx::array& w = inputs.at(cursor);
    const mx::array& typed = f.bits == 0 ? w : inputs.at(cursor + 1);
    specs.push_back({w.shape(-2), f.bits == 0 ? w.shape(-1) : w.shape(-1) * 32 / f.bits, f.bits,
                     f.group, w.ndim() == 3 ? w.shape(0) : 1, type_of(typed.dtype(), "a weight"),
                     "affine"});
    cursor += f.bits == 0 ? 1 : 3;
  }
  return specs;
}

Matrix matrix_at(const std::vector<mx::array>& inputs, size_t& cursor, Format format) {
  const mx::array& w = inputs.at(cursor);
  if (format.bits == 0) {
    cursor += 1;
    return make_matrix(w, nullptr, nullptr, format);
  }
  cursor += 3;
  return make_matrix(w, &inputs.at(cursor - 2), &inputs.at(cursor - 1), format);
}

Matrix matrix_of(const Weight& w) {
  return make_matrix(w.weight, w.scales ? &*w.scales : nullptr, w.biases ? &*w.biases : nullptr,
                     {w.bits, w.group});
}

void check_layout(const Weight& w) {
  check_arrays(w.weight, w.scales ? &*w.scales : nullptr, w.biases ? &*w.biases : nullptr);
}

void check_columns(const char* op, const char* name, const Weight& w, int cols) {
  if (w.cols() != cols) {
    throw std::invalid_argument(std::string(op) + ": " + name + " has " + std::to_string(w.cols()) +
                                " columns, its input has " + std::to_string(cols));
  }
}

mx::array contiguous(const mx::array& x, mx::Stream s) {
  if (x.is_available() && x.flags().row_contiguous) {
    return x;  // weights mostly: a node less in every graph
  }
  return mx::contiguous(x, false, s);
}

void allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

mx::array fresh(mx::Shape shape, mx::Dtype dtype) {
  mx::array a(std::move(shape), dtype, nullptr, {});
  allocate(a);
  a.set_status(mx::array::Status::available);
  return a;
}

void Primitive::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Gpu& gpu = require_gpu(name());
  for (auto& out : outputs) {
    gpu.allocate(out);
  }
  if (!runs_program(inputs, outputs)) {
    throw std::runtime_error(std::string("lily_mlx: ") + name() +
                             " has no GPU kernel for these arrays (mixed dtypes, or strided ones); "
                             "load the model with engine=\"stock\"");
  }
}

const Gpu& require_gpu(const std::string& name) {
  if (gpu() == nullptr) {
    throw std::runtime_error("lily_mlx: " + name +
                             " has no GPU backend in this build; load the model with "
                             "engine=\"stock\"");
  }
  return *gpu();
}

bool Primitive::runs_program(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  const Target target = target_of(stream());
  return target != Target::cpu && run_program(target, in, out);
}

void Primitive::refuse_gradient() {
  throw std::invalid_argument(
      std::string("lily_mlx: ") + name() +
      " has no gradient; call model.train() first, which runs the stock ops");
}

std::vector<mx::array> Primitive::jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                      const std::vector<int>&) {
  refuse_gradient();
}

std::vector<mx::array> Primitive::vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                      const std::vector<int>&, const std::vector<mx::array>&) {
  refuse_gradient();
}

std::pair<std::vector<mx::array>, std::vector<int>> Primitive::vmap(const std::vector<mx::array>&,
                                                                    const std::vector<int>&) {
  throw std::invalid_argument(std::string("lily_mlx: ") + name() +
                              " does not go through mx.vmap; give it a batch axis instead");
}

}  // namespace lily
