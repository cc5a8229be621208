// What the prefill kernels share: rounding, activations, wide loads, affine dequantization.
//
// A is the activation type (bfloat or half). Sums, gates and states are fp32; a value is rounded to A
// once, by the explicit cast A(x).
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace lily {

METAL_FUNC float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

METAL_FUNC float silu(float x) {
  return x / (1.0f + precise::exp(-x));
}

// log(1 + exp(x)) without overflow.
METAL_FUNC float softplus(float x) {
  return max(x, 0.0f) + precise::log(1.0f + precise::exp(-fabs(x)));
}

template <typename A>
METAL_FUNC float4 load4(const device A* p) {
  const vec<A, 4> v = *(const device vec<A, 4>*)p;
  return float4(float(v[0]), float(v[1]), float(v[2]), float(v[3]));
}

template <typename A>
METAL_FUNC void store4(device A* p, float4 x) {
  vec<A, 4> v;
  v[0] = A(x[0]);
  v[1] = A(x[1]);
  v[2] = A(x[2]);
  v[3] = A(x[3]);
  *(device vec<A, 4>*)p = v;
}

}  // namespace lily
