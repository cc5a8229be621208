// What the builders of Programs share: weights as slots, names of kernels, function constants by
// name.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "program.h"
#include "reference/types.h"

namespace lily {

// Shape and format of a weight: [rows, cols] or [experts, rows, cols], bits 0 = plain elements.
struct MatrixDims {
  int rows = 0;
  int cols = 0;
  int bits = 0;
  int group = 0;
  int experts = 1;
};

struct MatrixSlots {
  MatrixDims dims;
  Type t;  // of scales and biases, or of plain elements
  SlotId w, scales, biases;

  bool quantized() const {
    return dims.bits != 0;
  }
};

using Constants = std::vector<std::pair<const char*, Value>>;

inline int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// Activation dtype as kernel names spell it: "bf16", "f16", "f32"; prefill kernels say "fp16".
std::string suffix(Type t);
std::string prefill_suffix(Type t);

// Bits as kernels count them: of a plain element where the weight is not quantized.
inline int kernel_bits(const MatrixDims& d, Type t) {
  return d.bits != 0 ? d.bits : static_cast<int>(8 * size_of(t));
}

// Sets each constant that the kernel has from `values`, by name. Throws for one without a value.
void set_constants(Dispatch& d, const Constants& values);

// A Program under construction for activations of one dtype.
class Builder {
 public:
  Builder(std::string name, Type t) : program(std::move(name)), t(t) {}

  Program program;
  const Type t;
  int layer = -1;  // of the dispatches that follow
  std::string phase;

  size_t size(size_t values) const {
    return values * size_of(t);
  }
  // Slots NAME.weight, NAME.scales, NAME.biases; each is appended to `weights`.
  MatrixSlots matrix(const std::string& name, const MatrixDims& d);
  SlotId weight(const std::string& name, size_t bytes);
  SlotId input(const std::string& name, size_t bytes);
  SlotId output(const std::string& name, size_t bytes);
  SlotId scratch(const std::string& name, size_t bytes);
  // A table that the Program brings along.
  SlotId table(const std::string& name, const void* data, size_t bytes);

  // Adds with the current layer and phase.
  void add(Dispatch d, const std::string& label);

  std::vector<SlotId> weights;  // in the order in which they were made
  struct Table {
    SlotId slot;
    std::vector<char> data;
  };
  std::vector<Table> tables;
};

// Of a matrix's codes or plain weights, all experts.
size_t code_bytes(const MatrixDims& d, Type t);

// Reads the matrix: codes, and scales and biases where it is quantized. `experts`: of how many
// experts bytes are moved, all by default.
void read_matrix(Dispatch& d, const MatrixSlots& m, const std::string& w, const std::string& scales,
                 const std::string& biases, std::optional<int> experts = std::nullopt);

// The same where the kernel's signature always has scales and biases; plain weights give `w` for
// them.
void read_matrix_always(Dispatch& d, const MatrixSlots& m, const std::string& w,
                        const std::string& scales, const std::string& biases,
                        std::optional<int> experts = std::nullopt);

// An argument that exists in the signature and is not read for this shape.
void read_nothing(Dispatch& d, const std::string& name, SlotId any);

// ---- One row (gemv.h, head.h)

// "label.field" -> value, where a dispatch's threads are to differ from the builder's choice.
using TileFields = std::map<std::string, int>;
inline void override_field(int& field, const TileFields& tiles, const std::string& name) {
  if (auto it = tiles.find(name); it != tiles.end()) {
    field = it->second;
  }
}

struct GemvOptions {
  std::optional<SlotId> norm;      // normalise h with this weight first
  std::optional<SlotId> residual;  // y = rnd(residual + rnd(W x))
  std::optional<SlotId> row;       // gets the normalised row
  bool float32 = false;            // y is fp32, unrounded
  float eps = 0.0f;
  std::optional<std::vector<size_t>> offsets;  // of each y in its slot, bytes
  TileFields tiles;
  bool sync = false;  // NVIDIA's tensor cores, where gemv_sync.h serves
};

// y_i = W_i h for one to four matrices with the same columns and group, one dispatch.
void add_gemv(Builder& b, const std::string& label, const std::vector<MatrixSlots>& matrices,
              SlotId h, const std::vector<SlotId>& y, const GemvOptions& options);

// Why gemv.h has no kernel for a product of these, empty when it has.
std::string gemv_refusal(Type t, const std::vector<MatrixDims>& matrices, bool float32);

// How many lanes, rows and units: see gemv.h.
struct GemvTile {
  int lanes, r, u, split, simdgroups, blocks;
};
GemvTile gemv_tile(int cols, const std::vector<int>& bits, int rows);
Constants gemv_constants(Type t, const std::vector<MatrixDims>& matrices, const GemvTile& tile,
                         const GemvOptions& options);
// The tensor-core form's tile, for an NVIDIA card of `kMultiprocessors`, and whether it has a kernel.
constexpr int kMultiprocessors = 132;
std::optional<GemvTile> sync_tile(Type t, const std::vector<MatrixDims>& matrices, bool float32);
// Throws std::invalid_argument where no kernel is compiled for this tile, or K is no multiple of it.
void check_tile(const GemvTile& tile, const std::vector<MatrixDims>& matrices, Type t, bool sync,
                const std::string& label);
void override_tile(GemvTile& tile, const TileFields& tiles, const std::string& label);
int gemv_groups(const std::vector<MatrixDims>& matrices, const GemvTile& tile);
int kmax(int cols);

}  // namespace lily
