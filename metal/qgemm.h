// Dense GEMM with quantized weights: y = rnd(x W^T), or fp32 unrounded, or rnd(h + rnd(x W^T)).
//
// x [rows, K] of A; W [N, K] affine codes with scales and biases [N, K / group] (or A itself: bits
// 16); y [rows, N] of O (A or float); h [rows, N] of A where has_residual. Any rows and N; K as
// gemm_tiles.h says.
//
//   qgemm        one matrix; grid (ceil(N / columns), ceil(rows / rows of a
//                block))
//   qgemm_multi  up to four matrices with the same x and K (n = 0 for none), side by side in the
//                grid's first dimension: sum of ceil(n_i / columns)
//   dequantize_rows  W as A in memory, 16 values a thread (for comparison, with bits 16 above)
//
// Layout, bytes and flops: gemm_tiles.h. x is read once a block of columns and W once a block of rows,
// from cache where it holds them.
#pragma once

#include "gemm_tiles.h"

namespace lily {

struct QgemmParams {
  int rows;
  int n;
  int depth;
  int has_residual;
};

struct QgemmMultiParams {
  int rows;
  int depth;
  int n[4];
};

// Where a block's results go: y = rnd(v), or rnd(h + rnd(v)), as far as it lies in [rows, n).
template <typename A, typename O>
struct QgemmStore {
  const device A* h;
  device O* y;
  int first_row;
  int rows;
  int first_column;
  int n;
  bool has_residual;

  template <int N>
  METAL_FUNC void put(int r, int c, vec<float, N> v) const {
    const int column = first_column + c;
    if (first_row + r >= rows || column >= n) {
      return;
    }
    const size_t at = size_t(first_row + r) * n + column;
    if (has_residual) {
      for (int j = 0; j < N; ++j) {
        v[j] = column + j < n ? float(h[at + j]) + float(A(v[j])) : 0.0f;
      }
    }
    if (n % N == 0) {
      store_values<O, N>(y + at, v);
      return;
    }
    for (int j = 0; j < N; ++j) {
      if (column + j < n) {
        y[at + j] = O(v[j]);
      }
    }
  }
};

}  // namespace lily

using namespace lily;

template <typename A, typename O, typename Block, template <typename, int, int> class Tile>
[[kernel]] void qgemm(
    const device A* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device A* scales [[buffer(2)]],
    const device A* biases [[buffer(3)]],
    const device A* h [[buffer(4)]],
    device O* y [[buffer(5)]],
    constant QgemmParams& p [[buffer(6)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  typedef GemmShape<A, Block, Tile> Shape;
  typedef typename Shape::Loader Loader;
  threadgroup float4 shared[Shape::kWords];
  const int first_row = int(tg.y) * Block::kRows;
  const int first_column = int(tg.x) * Block::kColumns;
  const int row = first_row + Loader::x_row(tid);
  Loader loader;
  loader.set_x(x + size_t(row) * p.depth, row < p.rows, tid);
  const QuantizedRows<A> matrix = {w, scales, biases};
  loader.set_matrix(matrix, first_column, p.n - first_column, p.depth, tid);
  typename Shape::TileType tile;
  gemm_sums(loader, tile, p.depth, p.rows - first_row, shared, tid, sg);
  const QgemmStore<A, O> store = {
      h, y, first_row, p.rows, first_column, p.n, p.has_residual != 0};
  gemm_results<Block>(tile, store, shared, tid, sg);
}

template <typename A, typename O, typename Block, template <typename, int, int> class Tile>
[[kernel]] void qgemm_multi(
    const device A* x [[buffer(0)]],
    const device uint* w0 [[buffer(1)]],
    const device A* scales0 [[buffer(2)]],
    const device A* biases0 [[buffer(3)]],
    device O* y0 [[buffer(4)]],
    const device uint* w1 [[buffer(5)]],
    const device A* scales1 [[buffer(6)]],
    const device A* biases1 [[buffer(7)]],
    device O* y1 [[buffer(8)]],
    const device uint* w2 [[buffer(9)]],
    const device A* scales2 [[buffer(10)]],
    const device A* biases2 [[buffer(11)]],
    device O* y2 [[buffer(12)]],
    const device uint* w3 [[buffer(13)]],
    const device A* scales3 [[buffer(14)]],
    const device A* biases3 [[buffer(15)]],
    device O* y3 [[buffer(16)]],
    constant QgemmMultiParams& p [[buffer(17)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  typedef GemmShape<A, Block, Tile> Shape;
  typedef typename Shape::Loader Loader;
  threadgroup float4 shared[Shape::kWords];
  int m = 0;
  int block = int(tg.x);
  for (int i = 0; i < 3; ++i) {
    const int blocks = (p.n[i] + Block::kColumns - 1) / Block::kColumns;
    if (m == i && block >= blocks) {
      block -= blocks;
      m = i + 1;
    }
  }
  const device uint* w = m == 0 ? w0 : m == 1 ? w1 : m == 2 ? w2 : w3;
  const device A* scales = m == 0 ? scales0 : m == 1 ? scales1 : m == 2 ? scales2 : scales3;
  const device A* biases = m == 0 ? biases0 : m == 1 ? biases1 : m == 2 ? biases2 : biases3;
  device O* y = m == 0 ? y0 : m == 1 ? y1 : m == 2 ? y2 : y3;
  const int n = p.n[m];
  const int first_row = int(tg.y) * Block::kRows;
  const int first_column = block * Block::kColumns;
  const int row = first_row + Loader::x_row(tid);
  Loader loader;
  loader.set_x(x + size_t(row) * p.depth, row < p.rows, tid);
  const QuantizedRows<A> matrix = {w, scales, biases};
  loader.set_matrix(matrix, first_column, n - first_column, p.depth, tid);
  typename Shape::TileType tile;
  gemm_sums(loader, tile, p.depth, p.rows - first_row, shared, tid, sg);
  const QgemmStore<A, O> store = {x, y, first_row, p.rows, first_column, n, false};
  gemm_results<Block>(tile, store, shared, tid, sg);
}

// w: `runs` runs of 16 codes; bits 4 or 8.
template <typename A>
[[kernel]] void dequantize_rows(
    const device uint* w [[buffer(0)]],
    const device A* scales [[buffer(1)]],
    const device A* biases [[buffer(2)]],
    device A* out [[buffer(3)]],
    constant int& runs [[buffer(4)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  const int run = int(tg.x) * 256 + int(tid);
  if (run >= runs) {
    return;
  }
  const float scale = float(group_value(scales, run * 16, kGroup));
  const float bias = float(group_value(biases, run * 16, kGroup));
  const device uint* p = w + size_t(run) * (kBits / 2);
  for (int i = 0; i < 4; ++i) {
    float4 v;
    for (int c = 0; c < 4; ++c) {
      const uint code =
          kBits == 4 ? (p[i / 2] >> (16 * (i % 2) + 4 * c)) & 15u : (p[i] >> (8 * c)) & 255u;
      v[c] = fma(float(code), scale, bias);
    }
    store4(out + size_t(run) * 16 + 4 * i, v);
  }
}
