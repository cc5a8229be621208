// Functions in fp32 that the reference's operations share.
#pragma once

#include <cmath>
#include <limits>

namespace lily::reference {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

inline float sum_of_squares(const float* x, int n) {
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) {
    sum += x[i] * x[i];
  }
  return sum;
}

}  // namespace lily::reference
