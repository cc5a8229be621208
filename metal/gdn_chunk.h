// Gated DeltaNet over a prefill chunk in matrix form, an alternative to the scan of gdn_scan.h.
//
// What it computes: the same recurrence, C = 32 tokens at a time. With l_t the running sum of log g
// in the block, S the state before it, and rows t of K, Q, V:
//   L[t, s] = beta_t exp(l_t - l_s) (k_t . k_s) for s < t;   T = (I + L)^-1
//   P[t, s] = exp(l_t - l_s) (q_t . k_s) for s <= t
//   U = T (beta (V - exp(l) K S^T)); Y = exp(l) Q S^T + P U; S' = exp(l_C) S + sum_s exp(l_C - l_s)
//   u_s k_s^T
// Matrices that hold states or gates are fp32 on both sides of the product. Against the exact
// recurrence y and the state are within 5e-5 of their rms; the scan is the closer one, and the two
// are not bit-equal. g below 1e-12 counts as 1e-12. Tokens past the end count as k = q = v = 0, g =
// 1, beta = 0.
//
// Layout of threads.
//   gdn_chunk_prepare  grid (blocks, Hv, B), 128 threads: the two products of 32 x 32 x 128 (a
//                      simdgroup eight rows), the inverse by forward substitution (a lane a
//                      column); blocks are independent
//   gdn_chunk_scan     grid (Dv / 16, Hv, B), 128 threads: block after block, 16 rows of S in
//                      threadgroup memory
// Threadgroup memory: 26,880 and 32,384 bytes.
//
// Bytes a block and value head: prepare reads 16 KB and writes 8.3 KB; scan reads Dv / 16 times 24
// KB (from cache) and writes 16 KB. Flops a block and head: 2 (3 * 32 * 128 * 128 + 4 * 32 * 32 *
// 128).
#pragma once

#include "prefill_common.h"
#include "tile_mma.h"

namespace lily {

constant constexpr int kChunk = 32;
constant constexpr int kChunkDim = 128;             // Dk = Dv
constant constexpr int kChunkRows = 16;             // rows of S a threadgroup
constant constexpr int kChunkHalfStride = 128 + 8;  // of K and Q in A
constant constexpr int kChunkStride = 128 + 4;      // of K, Q and S in fp32
constant constexpr int kChunkSquareStride = 32 + 4;
constant constexpr int kChunkUStride = 16 + 4;
constant constexpr int kChunkThreads = 128;

struct GdnChunkParams {
  int tokens;
  int key_heads;
  int value_heads;
  int blocks;
};

// Copies rows [first, first + 32) of one head to threadgroup memory, zeros past the end.
template <typename A>
METAL_FUNC void chunk_copy(
    const device A* x, int stride, int n, threadgroup A* out, uint tid) {
  for (int i = int(tid); i < kChunk * kChunkDim / 8; i += kChunkThreads) {
    const int row = i / (kChunkDim / 8);
    const int column = i % (kChunkDim / 8) * 8;
    const uint4 v = row < n ? *(const device uint4*)(x + size_t(row) * stride + column) : uint4(0);
    *(threadgroup uint4*)(out + row * kChunkHalfStride + column) = v;
  }
}

// The same, widened to fp32 and each row times scale[row].
template <typename A>
METAL_FUNC void chunk_widen(
    const device A* x,
    int stride,
    int n,
    const threadgroup float* scale,
    threadgroup float* out,
    uint tid) {
  for (int i = int(tid); i < kChunk * kChunkDim / 4; i += kChunkThreads) {
    const int row = i / (kChunkDim / 4);
    const int column = i % (kChunkDim / 4) * 4;
    float4 v = float4(0.0f);
    if (row < n) {
      v = load4(x + size_t(row) * stride + column) * scale[row];
    }
    *(threadgroup float4*)(out + row * kChunkStride + column) = v;
  }
}

METAL_FUNC void chunk_square(const device float* x, threadgroup float* out, uint tid) {
  for (int i = int(tid); i < kChunk * kChunk / 4; i += kChunkThreads) {
    ((threadgroup float4*)out)[i] = ((const device float4*)x)[i];
  }
}

}  // namespace lily

using namespace lily;

// inverse, mix [B, Hv, blocks, 32, 32]: T and P; log_decay [B, Hv, blocks, 32]: l.
template <typename A>
[[kernel]] void gdn_chunk_prepare(
    const device A* q [[buffer(0)]],
    const device A* k [[buffer(1)]],
    const device float* g [[buffer(2)]],
    const device float* beta [[buffer(3)]],
    device float* inverse [[buffer(4)]],
    device float* mix [[buffer(5)]],
    device float* log_decay [[buffer(6)]],
    constant GdnChunkParams& p [[buffer(7)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 operands[2 * kChunk * kChunkHalfStride / 8];
  threadgroup float kk[kChunk * kChunkSquareStride];
  threadgroup float qk[kChunk * kChunkSquareStride];
  threadgroup float decay[kChunk];
  threadgroup float betas[kChunk];
  threadgroup A* ks = (threadgroup A*)operands;
  threadgroup A* qs = ks + kChunk * kChunkHalfStride;

  const int block = int(tg.x);
  const int head = int(tg.y);
  const int batch = int(tg.z);
  const int n = min(kChunk, p.tokens - block * kChunk);
  const size_t first = size_t(batch) * p.tokens + block * kChunk;
  const int key_stride = p.key_heads * kChunkDim;
  const size_t key_at = first * key_stride + head / (p.value_heads / p.key_heads) * kChunkDim;
  const size_t out = (size_t(batch) * p.value_heads + head) * p.blocks + block;

  chunk_copy(k + key_at, key_stride, n, ks, tid);
  chunk_copy(q + key_at, key_stride, n, qs, tid);
  if (sg == 0) {
    const bool inside = int(lane) < n;
    const size_t at = (first + lane) * p.value_heads + head;
    const float step = inside ? precise::log(max(g[at], 1e-12f)) : 0.0f;
    const float sum = simd_prefix_inclusive_sum(step);
    decay[lane] = sum;
    betas[lane] = inside ? beta[at] : 0.0f;
    log_decay[out * kChunk + lane] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int row = int(sg) * 8;
  SimdgroupTile<A, 1, 4> tile;
  tile.start(tid % 32);
  tile.template multiply_nt<kChunkDim>(
      ks + row * kChunkHalfStride, kChunkHalfStride, ks, kChunkHalfStride);
  tile.store(kk + row * kChunkSquareStride, kChunkSquareStride);
  tile.start(tid % 32);
  tile.template multiply_nt<kChunkDim>(
      qs + row * kChunkHalfStride, kChunkHalfStride, ks, kChunkHalfStride);
  tile.store(qk + row * kChunkSquareStride, kChunkSquareStride);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = int(tid); i < kChunk * kChunk; i += kChunkThreads) {
    const int t = i / kChunk;
    const int s = i % kChunk;
    const float ratio = s <= t ? precise::exp(decay[t] - decay[s]) : 0.0f;
    kk[t * kChunkSquareStride + s] *= s < t ? betas[t] * ratio : 0.0f;
    mix[out * kChunk * kChunk + i] = qk[t * kChunkSquareStride + s] * ratio;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Column `lane` of T, row by row, in the space of K; a lane reads only what it wrote.
  if (sg == 0) {
    threadgroup float* column = (threadgroup float*)operands + lane;
    for (int t = 0; t < kChunk; ++t) {
      float x = t == int(lane) ? 1.0f : 0.0f;
      for (int s = 0; s < t; ++s) {
        x = fma(-kk[t * kChunkSquareStride + s], column[s * kChunk], x);
      }
      column[t * kChunk] = x;
      inverse[(out * kChunk + t) * kChunk + lane] = x;
    }
  }
}

template <typename A>
[[kernel]] void gdn_chunk_scan(
    const device A* q [[buffer(0)]],
    const device A* k [[buffer(1)]],
    const device A* v [[buffer(2)]],
    const device float* beta [[buffer(3)]],
    const device float* inverse [[buffer(4)]],
    const device float* mix [[buffer(5)]],
    const device float* log_decay [[buffer(6)]],
    const device float* state_in [[buffer(7)]],
    device float* state_out [[buffer(8)]],
    device float* y [[buffer(9)]],
    constant GdnChunkParams& p [[buffer(10)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 s4[kChunkRows * kChunkStride / 4];
  threadgroup float4 x4[kChunk * kChunkStride / 4];  // Q, then K
  threadgroup float4 square4[kChunk * kChunk / 4];   // T, then P, then Y
  threadgroup float u[kChunk * kChunkUStride];
  threadgroup float decay[kChunk];  // exp(l)
  threadgroup float tail[kChunk];   // exp(l_C - l)
  threadgroup float ones[kChunk];
  threadgroup float* s = (threadgroup float*)s4;
  threadgroup float* x = (threadgroup float*)x4;
  threadgroup float* square = (threadgroup float*)square4;

  const int head = int(tg.y);
  const int batch = int(tg.z);
  const int dv = int(tg.x) * kChunkRows;
  const int key_stride = p.key_heads * kChunkDim;
  const int value_stride = p.value_heads * kChunkDim;
  const int key_head = head / (p.value_heads / p.key_heads);
  const size_t head_index = size_t(batch) * p.value_heads + head;
  const size_t state_at = (head_index * kChunkDim + dv) * kChunkDim;
  const int row = int(sg) * 8;

  for (int i = int(tid); i < kChunkRows * kChunkDim / 4; i += kChunkThreads) {
    const float4 value = ((const device float4*)(state_in + state_at))[i];
    s4[i / (kChunkDim / 4) * (kChunkStride / 4) + i % (kChunkDim / 4)] = value;
  }
  for (int block = 0; block < p.blocks; ++block) {
    const int n = min(kChunk, p.tokens - block * kChunk);
    const size_t first = size_t(batch) * p.tokens + block * kChunk;
    const size_t key_at = first * key_stride + key_head * kChunkDim;
    const size_t square_at = head_index * p.blocks + block;
    const device float* logs = log_decay + square_at * kChunk;
    if (int(tid) < kChunk) {
      const float last = logs[kChunk - 1];
      decay[tid] = precise::exp(logs[tid]);
      tail[tid] = precise::exp(last - logs[tid]);
      ones[tid] = 1.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    chunk_widen(q + key_at, key_stride, n, decay, x, tid);
    chunk_square(inverse + square_at * kChunk * kChunk, square, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    SimdgroupTile<float, 1, 2> y_tile;
    y_tile.start(tid % 32);
    y_tile.template multiply_nt<kChunkDim>(x + row * kChunkStride, kChunkStride, s, kChunkStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    chunk_widen(k + key_at, key_stride, n, ones, x, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    SimdgroupTile<float, 1, 2> u_tile;
    u_tile.start(tid % 32);
    u_tile.template multiply_nt<kChunkDim>(x + row * kChunkStride, kChunkStride, s, kChunkStride);
    u_tile.store(u + row * kChunkUStride, kChunkUStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < kChunk * kChunkRows; i += kChunkThreads) {
      const int t = i / kChunkRows;
      const int c = i % kChunkRows;
      float rest = 0.0f;
      if (t < n) {
        const float value = float(v[(first + t) * value_stride + head * kChunkDim + dv + c]);
        rest = beta[(first + t) * p.value_heads + head] *
            fma(-decay[t], u[t * kChunkUStride + c], value);
      }
      u[t * kChunkUStride + c] = rest;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    u_tile.start(tid % 32);
    u_tile.template multiply_nn<kChunk>(square + row * kChunk, kChunk, u, kChunkUStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    u_tile.store(u + row * kChunkUStride, kChunkUStride);
    chunk_square(mix + square_at * kChunk * kChunk, square, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    y_tile.template multiply_nn<kChunk>(square + row * kChunk, kChunk, u, kChunkUStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y_tile.store(square + row * kChunkUStride, kChunkUStride);
    for (int i = int(tid); i < kChunk * kChunkRows; i += kChunkThreads) {
      u[i / kChunkRows * kChunkUStride + i % kChunkRows] *= tail[i / kChunkRows];
    }
    for (int i = int(tid); i < kChunkRows * kChunkDim; i += kChunkThreads) {
      s[i / kChunkDim * kChunkStride + i % kChunkDim] *= decay[kChunk - 1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int i = int(tid); i < n * kChunkRows; i += kChunkThreads) {
      const int t = i / kChunkRows;
      const int c = i % kChunkRows;
      y[(first + t) * value_stride + head * kChunkDim + dv + c] = square[t * kChunkUStride + c];
    }
    SimdgroupTile<float, 2, 4> s_tile;
    const int column = int(sg) * 32;
    s_tile.load(s + column, kChunkStride);
    s_tile.template multiply_tn<kChunk>(u, kChunkUStride, x + column, kChunkStride);
    s_tile.store(s + column, kChunkStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = int(tid); i < kChunkRows * kChunkDim / 4; i += kChunkThreads) {
    ((device float4*)(state_out + state_at))[i] =
        s4[i / (kChunkDim / 4) * (kChunkStride / 4) + i % (kChunkDim / 4)];
  }
}
