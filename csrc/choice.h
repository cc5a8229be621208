// The answer to "is there a kernel?": each op in csrc/ops gives it, for a target, a dtype, weights
// and rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec.h"

namespace lily {

// What kernels are chosen for. `metal_nax` is a Mac whose GPU has Metal 4's tensor operations.
enum class Target : uint8_t { cpu, metal, metal_nax, cuda };
const char* to_string(Target t);
// Throws std::invalid_argument for a name that is not "cpu", "metal", "metal_nax" or "cuda".
Target parse_target(const std::string& name);

inline bool is_metal(Target t) {
  return t == Target::metal || t == Target::metal_nax;
}

enum class ReasonCode : uint8_t {
  ok,
  unsupported_bits,
  unsupported_group,
  unsupported_mode,
  unsupported_dtype,
  head_dim,
  not_divisible,
  out_of_range,
  masked,
};
const char* to_string(ReasonCode code);

// A kernel's name, or why there is none.
struct Choice {
  std::string kernel;
  ReasonCode code = ReasonCode::ok;
  std::string reason;  // one sentence, empty where there is a kernel

  explicit operator bool() const {
    return code == ReasonCode::ok;
  }
};

inline Choice chosen(std::string kernel) {
  return {std::move(kernel), ReasonCode::ok, ""};
}
inline Choice refused(ReasonCode code, std::string reason) {
  return {"", code, std::move(reason)};
}

// Rows in all, where a choice is asked before they are known.
constexpr int kAnyRows = 0;

// ---- What several ops ask of their weights. Each returns a Choice without a kernel's name where
// nothing is refused.

const char* name_of(Type t);

// Activations of this dtype.
Choice check_activations(Target target, Type t);
// Mode, bits and group of a quantized weight.
Choice check_format(const MatrixSpec& m);
// That, columns, and (on a GPU) the dtype of scales, biases and plain elements.
Choice check_matrix(Target target, Type t, const MatrixSpec& m);
Choice check_matrices(Target target, Type t, const std::vector<MatrixSpec>& matrices);
// A parameter that kernels read as `expected`; the CPU reads any dtype.
Choice check_vector(Target target, Type expected, const VectorSpec& v, const std::string& name);
Choice check_range(const std::string& field, int value, int low, int high);
Choice check_multiple(const std::string& field, int value, int unit);

// The first refusal, or an answer without one.
template <typename... C>
Choice first_refusal(C... choices) {
  Choice out;
  ((out ? void(out = std::move(choices)) : void()), ...);
  return out;
}

}  // namespace lily
