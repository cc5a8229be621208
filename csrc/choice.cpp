#include "choice.h"

#include <algorithm>
#include <stdexcept>

namespace lily {
namespace {

constexpr const char* kTargets[] = {"cpu", "metal", "metal_nax", "cuda"};

// The quantizations that have kernels, everywhere. Codes lie in 32-bit words, low bits first.
struct QuantizedFormat {
  const char* mode;
  std::vector<int> bits, groups;
};
const std::vector<QuantizedFormat>& formats() {
  static const std::vector<QuantizedFormat> all = {{"affine", {4, 6, 8}, {32, 64, 128}}};
  return all;
}

bool holds(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

std::string join(const std::vector<int>& list) {
  std::string out;
  for (int x : list) {
    out += (out.empty() ? "" : ", ") + std::to_string(x);
  }
  return out;
}

}  // namespace

const char* to_string(Target t) {
  return kTargets[static_cast<int>(t)];
}

Target parse_target(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kTargets[i]) {
      return static_cast<Target>(i);
    }
  }
  throw std::invalid_argument("there is no target '" + name +
                              "'; there are cpu, metal, metal_nax and cuda.");
}

const char* to_string(ReasonCode code) {
  constexpr const char* names[] = {"ok",
                                   "unsupported_bits",
                                   "unsupported_group",
                                   "unsupported_mode",
                                   "unsupported_dtype",
                                   "head_dim",
                                   "not_divisible",
                                   "out_of_range",
                                   "masked"};
  return names[static_cast<int>(code)];
}

const char* name_of(Type t) {
  return t == Type::bf16 ? "bfloat16" : t == Type::fp16 ? "float16" : "float32";
}

Choice check_activations(Target target, Type t) {
  if (target != Target::cpu && t == Type::fp32) {
    return refused(ReasonCode::unsupported_dtype,
                   "dtype 'float32' has no kernel; bfloat16 and float16 have.");
  }
  return {};
}

Choice check_format(const MatrixSpec& m) {
  std::string modes;
  for (const QuantizedFormat& f : formats()) {
    modes += (modes.empty() ? "'" : ", '") + std::string(f.mode) + "'";
    if (m.mode != f.mode) {
      continue;
    }
    if (!holds(f.groups, m.group)) {
      return refused(
          ReasonCode::unsupported_group,
          "group " + std::to_string(m.group) + " has no kernel; " + join(f.groups) + " have.");
    }
    if (!holds(f.bits, m.bits)) {
      return refused(
          ReasonCode::unsupported_bits,
          "bits " + std::to_string(m.bits) + " has no kernel; 0, " + join(f.bits) + " have.");
    }
    return {};
  }
  return refused(ReasonCode::unsupported_mode,
                 "mode '" + m.mode + "' has no kernel; " + modes + " has.");
}

Choice check_matrix(Target target, Type t, const MatrixSpec& m) {
  if (m.bits != 0) {
    if (Choice c = check_format(m); !c) {
      return c;
    }
  }
  if (Choice c = check_multiple("columns", m.cols, 32); !c) {
    return c;
  }
  if (target != Target::cpu && m.t != t) {
    return refused(ReasonCode::unsupported_dtype, std::string("a weight of dtype ") + name_of(m.t) +
                                                      " has no kernel for activations of " +
                                                      name_of(t) + ".");
  }
  return {};
}

Choice check_matrices(Target target, Type t, const std::vector<MatrixSpec>& matrices) {
  for (const MatrixSpec& m : matrices) {
    if (Choice c = check_matrix(target, t, m); !c) {
      return c;
    }
  }
  return {};
}

Choice check_vector(Target target, Type expected, const VectorSpec& v, const std::string& name) {
  if (target != Target::cpu && v.t != expected) {
    return refused(
        ReasonCode::unsupported_dtype,
        name + " is " + name_of(v.t) + "; kernels read it as " + name_of(expected) + ".");
  }
  return {};
}

Choice check_range(const std::string& field, int value, int low, int high) {
  if (value < low || value > high) {
    return refused(ReasonCode::out_of_range, field + " " + std::to_string(value) + " is outside " +
                                                 std::to_string(low) + " to " +
                                                 std::to_string(high) + ".");
  }
  return {};
}

Choice check_multiple(const std::string& field, int value, int unit) {
  if (value % unit != 0) {
    return refused(
        ReasonCode::not_divisible,
        field + " " + std::to_string(value) + " is no multiple of " + std::to_string(unit) + ".");
  }
  return {};
}

}  // namespace lily
