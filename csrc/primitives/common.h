// What every primitive shares: weights as graph inputs, dtype checks, and the refusal of gradients.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "choice.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "reference/ops.h"
#include "spec.h"

namespace lily {

namespace mx = mlx::core;

// A linear layer's weight as mlx-lm holds it, [rows, cols] or [experts, rows, cols]: plain elements
// (bits = 0), or affine codes in uint32 words with scales and biases of one dtype.
struct Weight {
  mx::array weight;
  std::optional<mx::array> scales;
  std::optional<mx::array> biases;
  int bits = 0;
  int group = 0;

  Weight() : weight(mx::Shape{0, 0}, mx::float32, nullptr, {}) {}
  // Throws std::invalid_argument for a format that has no kernel on any device.
  Weight(mx::array weight, std::optional<mx::array> scales, std::optional<mx::array> biases,
         int bits, int group);

  int rows() const {
    return weight.shape(-2);
  }
  int cols() const {
    return bits == 0 ? weight.shape(-1) : weight.shape(-1) * 32 / bits;
  }
  int experts() const {
    return weight.ndim() == 3 ? weight.shape(0) : 1;
  }
  mx::Dtype dtype() const {
    return bits == 0 ? weight.dtype() : scales->dtype();
  }
  MatrixSpec spec() const;
};

// What stands for a weight in a plan (spec.h).
struct Weights {
  using Matrix = Weight;
  using Vector = std::optional<mx::array>;
};

VectorSpec spec_of(const mx::array& vector);
// Shapes, formats and dtypes of a part of a plan.
ModelSpec specs_of(const Model<Weights>& model);

// Shapes as the CPU reference takes them, for B sequences of T rows.
reference::DeltaShape reference_shape(Type t, int B, int T, const GatedDeltaShape& s);
reference::AttentionShape reference_shape(Type t, int B, int T, const AttentionShape& s,
                                          Type norms);

// How a Weight lies in a primitive's inputs: weight, then scales and biases when bits != 0.
struct Format {
  int bits;
  int group;
};

Type type_of(mx::Dtype dtype, const char* what);
mx::Dtype dtype_of(Type t);

// Appends w's arrays to inputs and returns its format.
Format append(const Weight& w, std::vector<mx::array>& inputs);

// Shapes of the matrices at in[cursor ...].
std::vector<MatrixSpec> specs_at(const std::vector<mx::array>& inputs, size_t cursor,
                                 const std::vector<Format>& formats);
// Reads the matrix at inputs[cursor] and moves the cursor past it. Evaluated arrays only.
Matrix matrix_at(const std::vector<mx::array>& inputs, size_t& cursor, Format format);
Matrix matrix_of(const Weight& w);
// Throws unless the evaluated arrays lie in memory as a Matrix can. Touches no data, which on a GPU
// would move it.
void check_layout(const Weight& w);

// Throws unless x's last axis is w's columns.
void check_columns(const char* op, const char* name, const Weight& w, int cols);

mx::array contiguous(const mx::array& x, mx::Stream s);

// Allocates an output.
void allocate(mx::array& out);

// An array of its own, allocated, its contents undefined.
mx::array fresh(mx::Shape shape, mx::Dtype dtype);

class Primitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  // Allocates the outputs and runs the Program; throws where there is none for these arrays.
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                             const std::vector<int>&) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                             const std::vector<int>&, const std::vector<mx::array>&) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>&,
                                                           const std::vector<int>&) override;

 protected:
  // Queues this primitive's Program on its stream where kernels run there; false: nothing was
  // queued, and the reference is to run. Outputs are allocated.
  bool runs_program(const std::vector<mx::array>& in, std::vector<mx::array>& out);
  // The same for kernels of `target`; false where none serves these arrays.
  virtual bool run_program(Target, const std::vector<mx::array>&, std::vector<mx::array>&) {
    return false;
  }

 private:
  [[noreturn]] void refuse_gradient();
};

using Arrays = std::vector<mx::array>;

std::string shape_text(const mx::array& a);

// Throws std::invalid_argument with the op's name before the text.
[[noreturn]] void fail(const char* op, const std::string& text);

// Throw what fail throws, naming what does not fit.
void check_ndim(const char* op, const char* what, const mx::array& a, size_t ndim);
void check_shape(const char* op, const char* what, const mx::array& a, const mx::Shape& expected);
void check_dtype(const char* op, const char* what, const mx::array& a, mx::Dtype dtype);

int64_t rows_of(const mx::array& x);

mx::cpu::CommandEncoder& encoder(mx::Stream s);

// The backend of this build, or an error that names the way out.
class Gpu;
const Gpu& require_gpu(const std::string& name);

}  // namespace lily
