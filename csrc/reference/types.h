// Element types of the CPU reference, and rounding to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mlx/types/half_types.h"

namespace lily {

enum class Type : uint8_t { fp32, fp16, bf16 };

inline size_t size_of(Type t) {
  return t == Type::fp32 ? 4 : 2;
}

// rnd() of the numerics contract: nearest even, once.
inline float round_to(Type t, float x) {
  switch (t) {
    case Type::fp16:
      return static_cast<float>(mlx::core::float16_t(x));
    case Type::bf16:
      return static_cast<float>(mlx::core::bfloat16_t(x));
    default:
      return x;
  }
}

inline float load(Type t, const void* p, size_t i) {
  switch (t) {
    case Type::fp16:
      return static_cast<float>(static_cast<const mlx::core::float16_t*>(p)[i]);
    case Type::bf16:
      return static_cast<float>(static_cast<const mlx::core::bfloat16_t*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}

inline void store(Type t, void* p, size_t i, float x) {
  switch (t) {
    case Type::fp16:
      static_cast<mlx::core::float16_t*>(p)[i] = mlx::core::float16_t(x);
      break;
    case Type::bf16:
      static_cast<mlx::core::bfloat16_t*>(p)[i] = mlx::core::bfloat16_t(x);
      break;
    default:
      static_cast<float*>(p)[i] = x;
  }
}

inline const void* at(Type t, const void* p, int64_t elements) {
  return static_cast<const char*>(p) + elements * static_cast<int64_t>(size_of(t));
}

inline void* at(Type t, void* p, int64_t elements) {
  return static_cast<char*>(p) + elements * static_cast<int64_t>(size_of(t));
}

// One weight matrix [experts, rows, cols] as mlx-lm loaded it: affine codes with a scale and a bias
// a group of columns, or plain elements (bits = 0). The last axis is contiguous, the others
// strided.
struct Matrix {
  const void* weight = nullptr;
  const void* scales = nullptr;
  const void* biases = nullptr;
  Type type = Type::fp32;  // of scales and biases, or of the plain elements
  int bits = 0;
  int group = 0;
  int rows = 0;
  int cols = 0;
  int64_t weight_row = 0;  // strides: bytes for weight, elements for scales and biases
  int64_t weight_expert = 0;
  int64_t scale_row = 0;
  int64_t scale_expert = 0;

  Matrix expert(int e) const {
    Matrix m = *this;
    m.weight = static_cast<const char*>(weight) + e * weight_expert;
    if (bits != 0) {
      m.scales = at(type, scales, e * scale_expert);
      m.biases = at(type, biases, e * scale_expert);
    }
    return m;
  }
};

}  // namespace lily
