// The row-wise operations of prefill that no GEMM takes along.
//
//   rms_norm_rows  x = rnd(h * rsqrt(mean h^2 + eps) * weight); a threadgroup of 256 a row, h read
//                  twice (the second time from cache). Bytes: 4 H a row.
//   add_rows       h' = rnd(h + y). Bytes: 6 a value.
//   swiglu_rows    act = rnd(silu(gate) * up) from fp32 products (for comparison: moe_gemm fuses
//                  it). Bytes: 10 a value.
//   moe_combine    y = sum over the k slots, in their order, of weight * down (fp32), then +
//                  sigmoid(shared_gate) * shared_down; out = rnd(y), or rnd(h + rnd(y)) with a
//                  residual. A threadgroup of 256 a token, four values a thread. Bytes: 4 (k + 1) H
//                  read, 2 to 4 H written and read, a token.
// H and the counts of values are multiples of four.
#pragma once

#include "params.h"
#include "rows_common.h"

using namespace lily;

template <typename A>
[[kernel]] void rms_norm_rows(
    const device A* h [[buffer(0)]],
    const device A* weight [[buffer(1)]],
    device A* x [[buffer(2)]],
    constant int& hidden [[buffer(3)]],
    constant float& eps [[buffer(4)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float partials[8];
  const size_t row = size_t(tg.x) * hidden;
  float4 sums = float4(0.0f);
  for (int i = int(tid) * 4; i < hidden; i += 1024) {
    const float4 v = load4(h + row + i);
    sums = fma(v, v, sums);
  }
  const float sum = simd_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (lane == 0) {
    partials[sg] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (int i = 0; i < 8; ++i) {
    total += partials[i];
  }
  const float scale = precise::rsqrt(total / float(hidden) + eps);
  for (int i = int(tid) * 4; i < hidden; i += 1024) {
    store4(x + row + i, load4(h + row + i) * scale * load4(weight + i));
  }
}

template <typename A>
[[kernel]] void add_rows(
    const device A* h [[buffer(0)]],
    const device A* y [[buffer(1)]],
    device A* out [[buffer(2)]],
    constant int& count [[buffer(3)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  const size_t at = (size_t(tg.x) * 256 + tid) * 4;
  if (at < size_t(count)) {
    store4(out + at, load4(h + at) + load4(y + at));
  }
}

template <typename A>
[[kernel]] void swiglu_rows(
    const device float* gate [[buffer(0)]],
    const device float* up [[buffer(1)]],
    device A* act [[buffer(2)]],
    constant int& count [[buffer(3)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  const size_t at = (size_t(tg.x) * 256 + tid) * 4;
  if (at < size_t(count)) {
    const float4 g = *(const device float4*)(gate + at);
    const float4 u = *(const device float4*)(up + at);
    float4 y;
    for (int c = 0; c < 4; ++c) {
      y[c] = silu(g[c]) * u[c];
    }
    store4(act + at, y);
  }
}

template <typename A>
[[kernel]] void moe_combine(
    const device float* down [[buffer(0)]],
    const device float* weights [[buffer(1)]],
    const device float* shared_down [[buffer(2)]],
    const device float* shared_gate [[buffer(3)]],
    const device A* h [[buffer(4)]],
    device A* out [[buffer(5)]],
    constant CombineParams& p [[buffer(6)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  const size_t token = tg.x;
  const device float* w = weights + token * p.top_k;
  const float gate = p.has_shared != 0 ? sigmoid(shared_gate[token]) : 0.0f;
  for (int i = int(tid) * 4; i < p.hidden; i += 1024) {
    float4 y = float4(0.0f);
    for (int s = 0; s < p.top_k; ++s) {
      const float4 d = *(const device float4*)(down + (token * p.top_k + s) * p.hidden + i);
      y = fma(float4(w[s]), d, y);
    }
    const size_t at = token * p.hidden + i;
    if (p.has_shared != 0) {
      y = fma(float4(gate), *(const device float4*)(shared_down + at), y);
    }
    if (p.has_residual != 0) {
      const float4 x = load4(h + at);
      for (int c = 0; c < 4; ++c) {
        y[c] = x[c] + float(A(y[c]));
      }
    }
    store4(out + at, y);
  }
}
