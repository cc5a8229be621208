// What every kernel uses: conversions, activations, reductions.
//
// A is the activation dtype (bfloat or half). Products, sums, gates and states are fp32; a
// value is rounded to A once, by an explicit cast. Nothing here assumes contraction or fast-math:
// where a fused multiply-add matters for speed or for equal bits it is spelt fma().
#pragma once

#include <metal_stdlib>
#if defined(__NVPTX__)
#include <dependent_launch>
#endif

using namespace metal;

namespace lily {

// A divisor from a function constant: front ends check a kernel also while its constants are still
// 0.
METAL_FUNC int at_least_1(int x) {
  return max(x, 1);
}

// Some backends (NVIDIA) start a dispatch of a step while the previous one still runs: when that one
// has waited itself, or even before, where it calls start_next(). What a kernel does before this
// call may read weights, the position and what earlier steps wrote; and, unless the previous dispatch
// calls start_next(), what was written two dispatches before or earlier. It writes nothing.
// Elsewhere a dispatch starts when all of that is there.
METAL_FUNC void wait_for_previous() {
#if defined(__NVPTX__)
  nvidia::wait_for_previous();
#endif
}

// At the start of a kernel whose follower reads nothing of this step before it waits. Small kernels
// would otherwise wait longer for their start than they run.
METAL_FUNC void start_next() {
#if defined(__NVPTX__)
  nvidia::start_next();
#endif
}

// A hint that the 128 bytes around p will be read soon, by whichever kernel: to the L2 cache.
METAL_FUNC void prefetch(const device void* p) {
#if defined(__NVPTX__)
  nvidia::prefetch(p);
#else
  (void)p;
#endif
}

METAL_FUNC float minus_infinity() {
  return -numeric_limits<float>::infinity();
}

// ---------------------------------------------------------------- conversions
//
// Overloads choose by a value of A (its content is not used); x points to fp32 in registers.

// The eight values of one 16-byte word.
METAL_FUNC void widen(uint4 u, thread float* x, bfloat) {
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = as_type<float>(u[i] << 16);
    x[2 * i + 1] = as_type<float>(u[i] & 0xffff0000u);
  }
}

METAL_FUNC void widen(uint4 u, thread float* x, half) {
  for (int i = 0; i < 4; ++i) {
    const half2 v = as_type<half2>(u[i]);
    x[2 * i] = float(v.x);
    x[2 * i + 1] = float(v.y);
  }
}

// The inverse; x holds values that A represents exactly.
METAL_FUNC uint4 narrow(thread const float* x, bfloat) {
  uint4 u;
  for (int i = 0; i < 4; ++i) {
    u[i] = (as_type<uint>(x[2 * i]) >> 16) | (as_type<uint>(x[2 * i + 1]) & 0xffff0000u);
  }
  return u;
}

METAL_FUNC uint4 narrow(thread const float* x, half) {
  uint4 u;
  for (int i = 0; i < 4; ++i) {
    half2 v;
    v.x = half(x[2 * i]);
    v.y = half(x[2 * i + 1]);
    u[i] = as_type<uint>(v);
  }
  return u;
}

// Eight values of A from a 16-byte aligned address.
template <typename A>
METAL_FUNC void load8(const device A* p, thread float* x) {
  widen(*(const device uint4*)p, x, A(0.0f));
}

// ---------------------------------------------------------------- activations

METAL_FUNC float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

METAL_FUNC float silu(float x) {
  return x / (1.0f + precise::exp(-x));
}

// log(1 + x) for x >= 0, without losing small x: the rounding of 1 + x is divided out again.
METAL_FUNC float log1p_positive(float x) {
  const float u = 1.0f + x;
  const float d = u - 1.0f;
  return d == 0.0f ? x : precise::log(u) * (x / d);
}

METAL_FUNC float softplus(float x) {
  return max(x, 0.0f) + log1p_positive(precise::exp(-fabs(x)));
}

// ---------------------------------------------------------------- reductions

// Sum over each aligned group of `lanes` lanes (a power of two); every lane gets it, with equal
// bits.
METAL_FUNC float group_sum(float v, int lanes) {
  for (int m = 1; m < lanes; m <<= 1) {
    v += simd_shuffle_xor(v, ushort(m));
  }
  return v;
}

METAL_FUNC float group_max(float v) {
  for (int m = 1; m < 32; m <<= 1) {
    v = max(v, simd_shuffle_xor(v, ushort(m)));
  }
  return v;
}

// Sum over a threadgroup of `simdgroups` simdgroups, in a fixed order; scratch holds one float for
// each. Holds one barrier; the caller puts another before scratch is written again.
METAL_FUNC float threadgroup_sum(float v, threadgroup float* scratch, uint simdgroup, uint lane,
                                 int simdgroups) {
  v = group_sum(v, 32);
  if (lane == 0) {
    scratch[simdgroup] = v;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float t = scratch[0];
  for (int i = 1; i < simdgroups; ++i) {
    t += scratch[i];
  }
  return t;
}

// Greater value first, then lower id: the order of argmax and of the router.
METAL_FUNC bool ranks_before(float value, uint id, float other_value, uint other_id) {
  return value > other_value || (value == other_value && id < other_id);
}

// Loads that stand before this are issued before what follows. Without it NVIDIA's assembler moves
// them to their uses, to save registers, and each then waits for memory by itself.
METAL_FUNC void issue_loads() {
  simdgroup_barrier(mem_flags::mem_none);
}

}  // namespace lily
