// What the builders of Programs share: weights as slots, names of kernels, function constants by
// name.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "choice.h"
#include "layer_options.h"
#include "program.h"
#include "spec.h"

namespace lily {

struct MatrixSlots {
  MatrixSpec spec;
  SlotId w, scales, biases;

  bool quantized() const {
    return spec.bits != 0;
  }
};

struct Slots {
  using Matrix = MatrixSlots;
  using Vector = SlotId;
};

using Constants = std::vector<std::pair<const char*, Value>>;

inline int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// The greatest power of two that divides n, at most `most`.
inline int largest_power(int n, int most) {
  return std::min(n & -n, most);
}

// Activation dtype as kernel names spell it: "bf16" or "fp16".
std::string suffix(Type t);

// Bits as kernels count them: of a plain element where the weight is not quantized.
inline int kernel_bits(const MatrixSpec& m, Type t) {
  return m.bits != 0 ? m.bits : static_cast<int>(8 * size_of(t));
}

// Sets each constant that the kernel has from `values`, by name. Throws for one without a value.
void set_constants(Dispatch& d, const Constants& values);

// Threads of NVIDIA's forms are tuned for a GPU with this many.
constexpr int kMultiprocessors = 132;

// A Program under construction for activations of one dtype.
class Builder {
 public:
  Builder(std::string name, Target target, Type t)
      : program(std::move(name)), target(target), t(t) {}

  Program program;
  const Target target;
  const Type t;
  LayerOptions form;  // of layers' dispatches
  int layer = -1;     // of the dispatches that follow
  std::string phase;

  size_t size(size_t values) const {
    return values * size_of(t);
  }
  // Slots NAME.weight, NAME.scales, NAME.biases; each is appended to `weights`.
  MatrixSlots matrix(const std::string& name, MatrixSpec spec);
  SlotId weight(const std::string& name, size_t bytes);
  // The same by a spec, for convert of spec.h.
  auto weight_slots() {
    return [this](const std::string& path, const auto& spec) { return slots_of(path, spec); };
  }
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

 private:
  MatrixSlots slots_of(const std::string& path, const MatrixSpec& m) {
    return matrix(path, m);
  }
  SlotId slots_of(const std::string& path, const VectorSpec& v) {
    return weight(path, size_t(v.size) * size_of(v.t));
  }
};

std::vector<MatrixSpec> specs_of(const std::vector<MatrixSlots>& matrices);

// Of a matrix's codes or plain weights, all experts.
size_t code_bytes(const MatrixSpec& m);

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

// "label.field" -> value, where a dispatch's threads are to differ from the builder's choice.
using TileFields = std::map<std::string, int>;
inline void override_field(int& field, const TileFields& tiles, const std::string& name) {
  if (auto it = tiles.find(name); it != tiles.end()) {
    field = it->second;
  }
}

}  // namespace lily
