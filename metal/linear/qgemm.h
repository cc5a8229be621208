// Dense GEMM with quantized weights: y_i = rnd(x W_i^T), or fp32 unrounded, for up to four matrices
// with the same x and K (n = 0 for none).
//
// x [rows, K] of A; W [N, K] affine codes with scales and biases [N, K / group] (or A itself: bits
// 16); y [rows, N] of O (A or float). Any rows and N; K as gemm_tiles.h says. Grid (sum of ceil(n_i
// / columns of a block), ceil(rows / rows of a block)).
//
// Layout, bytes and flops: gemm_tiles.h. x is read once a block of columns and W once a block of rows,
// from cache where it holds them.
#pragma once

#include "linear/gemm_tiles.h"
#include "params.h"

namespace lily {

// Where a block's results go: y = rnd(v), as far as it lies in [rows, n).
template <typename O>
struct QgemmStore {
  device O* y;
  int first_row;
  int rows;
  int first_column;
  int n;

  template <int N>
  METAL_FUNC void put(int r, int c, vec<float, N> v) const {
    const int column = first_column + c;
    if (first_row + r >= rows || column >= n) {
      return;
    }
    const size_t at = size_t(first_row + r) * n + column;
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
  const QgemmStore<O> store = {y, first_row, p.rows, first_column, n};
  gemm_results<Block>(tile, store, shared, tid, sg);
}
