// The part that the quantized GEMMs share: a threadgroup's product of BM rows with 64 weight rows.
//
// What it computes. sums[r, n] = sum over k of x[r, k] * w[n, k], fp32, where w = scale * code +
// bias is rounded to A on its way into threadgroup memory. Rows and weight rows are named by
// pointers of the loading threads, so that gathered rows, experts, and two matrices side by side
// cost nothing here.
//
// Layout of threads. 128 threads; 16 rows: 1 x 4 simdgroups of 16 x 16, 32 rows: 2 x 2 of 16 x 32,
// 64 rows: 2 x 2 of 32 x 32. A step covers 32 of k: a thread brings 16 codes of one weight row (8
// or 16 bytes) and BM / 4 values of one row of x. The next step's bytes are loaded to registers
// before this step's product.
//
// Threadgroup memory: 80 (BM + 64) bytes for the operands, the same space for the fp32 result, 272
// BM bytes. Bytes: a threadgroup reads BM K values and 64 K codes with their scales; flops 128 BM
// K.
//
// Function constants: 0 = bits of a code (4, 8, or 16 for weights of type A without scales), 1 =
// group size (32, 64 or 128). K is a multiple of 32 and of the group; buffers are 16-byte aligned.
#pragma once

#include "prefill_common.h"

constant int kBits [[function_constant(0)]];
constant int kGroup [[function_constant(1)]];

namespace lily {

constant constexpr int kGemmThreads = 128;
constant constexpr int kGemmWeightRows = 64;
constant constexpr int kGemmStep = 32;
constant constexpr int kGemmStride = kGemmStep + 8;         // of the operands in threadgroup memory
constant constexpr int kGemmOutStride = kGemmWeightRows + 4;  // of the result there

// 16 codes to 16 values of A in threadgroup memory.
template <typename A>
METAL_FUNC void dequantize16(uint4 lo, uint4 hi, float scale, float bias, threadgroup A* out) {
  if (kBits == 16) {
    *(threadgroup uint4*)out = lo;
    *(threadgroup uint4*)(out + 8) = hi;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    vec<A, 4> v;
    for (int c = 0; c < 4; ++c) {
      const uint code =
          kBits == 4 ? (lo[i / 2] >> (16 * (i % 2) + 4 * c)) & 15u : (lo[i] >> (8 * c)) & 255u;
      v[c] = A(fma(float(code), scale, bias));
    }
    *(threadgroup vec<A, 4>*)(out + 4 * i) = v;
  }
}

// The scale or bias that serves code `k` of a row.
template <typename A>
METAL_FUNC float group_value(const device A* values, int k, int group) {
  return float(values[k / group]);
}

METAL_FUNC size_t groups_before(size_t row, int depth, int group) {
  return row * size_t(depth / group);
}

// What one thread brings: a run of one row of x and half a step of one weight row.
template <typename A, int BM>
struct GemmLoader {
  constexpr static constant int kRun = BM * kGemmStep / kGemmThreads;
  const device A* x;
  const device uchar* w;
  const device A* scales;
  const device A* biases;
  bool has_x;
  bool has_w;
  int half_step;
  vec<A, 4> x_next[kRun / 4];
  uint4 lo;
  uint4 hi;
  float scale;
  float bias;

  // The row of x that thread tid brings.
  static METAL_FUNC int x_row(uint tid) {
    return int(tid) / (kGemmStep / kRun);
  }

  // The weight row that thread tid brings.
  static METAL_FUNC int w_row(uint tid) {
    return int(tid) / 2;
  }

  METAL_FUNC void set_x(const device A* row, bool valid, uint tid) {
    x = row + int(tid) % (kGemmStep / kRun) * kRun;
    has_x = valid;
    for (int i = 0; i < kRun / 4; ++i) {
      x_next[i] = vec<A, 4>(A(0.0f));
    }
  }

  // Row `row` of a matrix of depth K at w with its scales and biases.
  METAL_FUNC void set_w(
      const device uint* matrix,
      const device A* matrix_scales,
      const device A* matrix_biases,
      size_t row,
      int depth,
      bool valid,
      uint tid) {
    half_step = int(tid) % 2 * 16;
    w = (const device uchar*)matrix + row * size_t(depth * kBits / 8);
    scales = matrix_scales + groups_before(row, depth, kGroup);
    biases = matrix_biases + groups_before(row, depth, kGroup);
    has_w = valid;
    lo = uint4(0);
    hi = uint4(0);
    scale = 0.0f;
    bias = 0.0f;
  }

  METAL_FUNC void fetch(int k) {
    if (has_x) {
      for (int i = 0; i < kRun / 4; ++i) {
        x_next[i] = *(const device vec<A, 4>*)(x + k + 4 * i);
      }
    }
    if (has_w) {
      const int at = k + half_step;
      const device uchar* p = w + at * kBits / 8;
      if (kBits == 4) {
        const uint2 words = *(const device uint2*)p;
        lo[0] = words[0];
        lo[1] = words[1];
      } else {
        lo = *(const device uint4*)p;
      }
      if (kBits == 16) {
        hi = *(const device uint4*)(p + 16);
      } else {
        scale = group_value(scales, at, kGroup);
        bias = group_value(biases, at, kGroup);
      }
    }
  }

  METAL_FUNC void put(threadgroup A* xs, threadgroup A* ws, uint tid) {
    threadgroup A* x_out = xs + x_row(tid) * kGemmStride + int(tid) % (kGemmStep / kRun) * kRun;
    for (int i = 0; i < kRun / 4; ++i) {
      *(threadgroup vec<A, 4>*)(x_out + 4 * i) = x_next[i];
    }
    dequantize16<A>(lo, hi, scale, bias, ws + w_row(tid) * kGemmStride + half_step);
  }
};

// How the four simdgroups share BM x 64, in 8 x 8 tiles.
template <int BM>
struct GemmShape {
  constexpr static constant int kRowGroups = BM == 16 ? 1 : 2;
  constexpr static constant int kColumnGroups = 4 / kRowGroups;
  constexpr static constant int kTileRows = BM / 8 / kRowGroups;
  constexpr static constant int kTileColumns = kGemmWeightRows / 8 / kColumnGroups;
  constexpr static constant int kOperandBytes = 2 * kGemmStride * (BM + kGemmWeightRows);
  constexpr static constant int kResultBytes = 4 * kGemmOutStride * BM;
  constexpr static constant int kWords =  // of 16 bytes
      (kOperandBytes > kResultBytes ? kOperandBytes : kResultBytes) / 16;
};

// Leaves the fp32 result [BM, 64] in shared memory, row stride kGemmOutStride, visible to all
// threads.
template <typename A, int BM, template <typename, int, int> class Tile>
METAL_FUNC threadgroup float* gemm_tile(
    thread GemmLoader<A, BM>& loader,
    int depth,
    threadgroup float4* shared,
    uint tid,
    uint sg) {
  typedef GemmShape<BM> Shape;
  threadgroup A* xs = (threadgroup A*)shared;
  threadgroup A* ws = xs + BM * kGemmStride;
  const int row = int(sg) / Shape::kColumnGroups * Shape::kTileRows * 8;
  const int column = int(sg) % Shape::kColumnGroups * Shape::kTileColumns * 8;
  Tile<A, Shape::kTileRows, Shape::kTileColumns> tile;
  tile.start(tid % 32);
  loader.fetch(0);
  for (int k = 0; k < depth; k += kGemmStep) {
    loader.put(xs, ws, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k + kGemmStep < depth) {
      loader.fetch(k + kGemmStep);
    }
    tile.template multiply_nt<kGemmStep>(
        xs + row * kGemmStride, kGemmStride, ws + column * kGemmStride, kGemmStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup float* result = (threadgroup float*)shared;
  tile.store(result + row * kGemmOutStride + column, kGemmOutStride);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result;
}

METAL_FUNC float4 gemm_result4(const threadgroup float* result, int row, int column) {
  return *(const threadgroup float4*)(result + row * kGemmOutStride + column);
}

}  // namespace lily
