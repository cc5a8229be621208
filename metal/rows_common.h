// What the prefill kernels share beside common.h: loads and stores of four values of A at once.
//
// A is the activation type (bfloat or half). Sums, gates and states are fp32; a value is rounded to
// A once, by the explicit cast A(x).
#pragma once

#include "common.h"

namespace lily {

constant constexpr uint kNoBlock = 0xffffffffu;  // expert of a block map entry past the last block

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

// Two values of type A that share a word, lower half first.
template <typename A>
METAL_FUNC float2 unpack2(uint u);

template <>
METAL_FUNC float2 unpack2<bfloat>(uint u) {
  return float2(as_type<float>(u << 16), as_type<float>(u & 0xffff0000u));
}

template <>
METAL_FUNC float2 unpack2<half>(uint u) {
  const half2 h = as_type<half2>(u);
  return float2(float(h[0]), float(h[1]));
}

template <typename A>
METAL_FUNC float4 unpack4(uint lo, uint hi) {
  const float2 a = unpack2<A>(lo);
  const float2 b = unpack2<A>(hi);
  return float4(a[0], a[1], b[0], b[1]);
}

}  // namespace lily
