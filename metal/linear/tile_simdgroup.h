// One simdgroup's matrix tile over simdgroup_matrix (M1 and later): 8 TM rows by 8 TN columns, fp32
// sums.
//
// The interface that every GEMM here is written against; sibling files (tile_nax.h) give the
// same one for other matrix units:
//   start(lane)                 sums = 0; lane is the thread's index in its simdgroup
//   multiply_nt<K>(x, w)        sums += X W^T, X [8 TM, K], W [8 TN, K], both in threadgroup memory
//   store(y)                    sums to threadgroup memory, fp32
// Elements are reached through threadgroup memory alone: which lane holds which element is not
// documented.
//
// Bytes: a multiply reads 8 (TM + TN) K values for 64 TM TN K multiply-adds. Registers: 2 TM TN
// fp32 a lane.
#pragma once

#include "common.h"

namespace lily {

template <typename A, int TM, int TN>
struct SimdgroupTile {
  simdgroup_matrix<float, 8, 8> sums[TM][TN];

  METAL_FUNC void start(uint) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN; ++j) {
        sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
  }

  METAL_FUNC void multiply(
      thread simdgroup_matrix<A, 8, 8>* a, thread simdgroup_matrix<A, 8, 8>* b) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN; ++j) {
        simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
      }
    }
  }

  template <int K>
  METAL_FUNC void multiply_nt(
      const threadgroup A* x, int x_stride, const threadgroup A* w, int w_stride) {
    for (int k = 0; k < K; k += 8) {
      simdgroup_matrix<A, 8, 8> a[TM];
      simdgroup_matrix<A, 8, 8> b[TN];
#pragma clang loop unroll(full)
      for (int i = 0; i < TM; ++i) {
        simdgroup_load(a[i], x + 8 * i * x_stride + k, x_stride, ulong2(0, 0), false);
      }
#pragma clang loop unroll(full)
      for (int j = 0; j < TN; ++j) {
        simdgroup_load(b[j], w + 8 * j * w_stride + k, w_stride, ulong2(0, 0), true);
      }
      multiply(a, b);
    }
  }

  METAL_FUNC void store(threadgroup float* y, int stride) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN; ++j) {
        simdgroup_store(sums[i][j], y + 8 * i * stride + 8 * j, stride, ulong2(0, 0), false);
      }
    }
  }
};

}  // namespace lily
