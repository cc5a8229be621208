// The experts of a prefill chunk: grouped GEMMs over the sorted assignments of routing.h.
//
//   moe_gate_up  act[s] = rnd(silu(gate_e x) * (up_e x)) for each sorted assignment s of expert e;
//                x is the token's row, gathered by order[s] / top_k. act [assignments, width] of A
//                in sorted order. Ungrouped (grouped = 0): one expert, row s is token s (the shared
//                expert).
//   moe_down     down[order[s]] = down_e act[s], fp32 unrounded, rows in (token, slot) order.
// Gate, up [E, width, hidden], down [E, hidden, width], affine codes. The combine is
// row_ops.h's.
//
// Layout of threads. One threadgroup takes one entry of the block map (expert, first row), the rows of a
// GemmBlock at most, and half its columns of gate with the same of up side by side (moe_gate_up) or
// its columns (moe_down). Grid: (ceil(width / half the columns) or ceil(hidden / columns), entries of
// the block map); a sentinel entry ends its threadgroup at once. Ungrouped: second dimension ceil(rows
// / rows of a block). width is a multiple of 32, hidden of 32 and of the group.
//
// Bytes, flops and threadgroup memory: gemm_tiles.h. An expert's weights are read once for each of
// its blocks; for 2048 tokens of the 35B shapes (64 rows an expert on average) that is 256 + E/2
// blocks of 64 at most.
#pragma once

#include "linear/gemm_tiles.h"
#include "params.h"

namespace lily {

// rnd(silu(gate) up) for a block's rows of act.
template <typename A>
struct SwigluStore {
  device A* act;  // of the block's first row and column
  int rows;
  int columns;
  int width;

  template <int N>
  METAL_FUNC void put(int r, int c, vec<float, N> g, vec<float, N> u) const {
    if (r < rows && c < columns) {
      vec<float, N> y;
      for (int j = 0; j < N; ++j) {
        y[j] = silu(g[j]) * u[j];
      }
      store_values<A, N>(act + size_t(r) * width + c, y);
    }
  }
};

// Rows of down in (token, slot) order.
struct DownStore {
  const device uint* order;  // of the block's first row
  device float* down;
  int rows;
  int first_column;
  int hidden;

  template <int N>
  METAL_FUNC void put(int r, int c, vec<float, N> v) const {
    if (r < rows && first_column + c < hidden) {
      store_values<float, N>(down + size_t(order[r]) * hidden + first_column + c, v);
    }
  }
};

}  // namespace lily

using namespace lily;

template <typename A, typename Block, template <typename, int, int> class Tile>
[[kernel]] void moe_gate_up(
    const device A* x [[buffer(0)]],
    const device uint* gate [[buffer(1)]],
    const device A* gate_scales [[buffer(2)]],
    const device A* gate_biases [[buffer(3)]],
    const device uint* up [[buffer(4)]],
    const device A* up_scales [[buffer(5)]],
    const device A* up_biases [[buffer(6)]],
    const device uint* order [[buffer(7)]],
    const device uint* offsets [[buffer(8)]],
    const device uint* block_map [[buffer(9)]],
    device A* act [[buffer(10)]],
    constant MoeGateUpParams& p [[buffer(11)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  typedef GemmShape<A, Block, Tile> Shape;
  typedef typename Shape::Loader Loader;
  threadgroup float4 shared[Shape::kWords];
  const bool grouped = p.grouped != 0;
  const uint expert = grouped ? block_map[2 * tg.y] : 0u;
  if (expert == kNoBlock) {
    return;
  }
  const int first_row = grouped ? int(block_map[2 * tg.y + 1]) : int(tg.y) * Block::kRows;
  const int end_row = grouped ? int(offsets[expert + 1]) : p.rows;
  constexpr int kHalf = Block::kColumns / 2;
  const int first_column = int(tg.x) * kHalf;

  const int row = first_row + Loader::x_row(tid);
  int token = 0;
  if (row < end_row) {
    token = grouped ? int(order[row]) / p.top_k : row;
  }
  Loader loader;
  loader.set_x(x + size_t(token) * p.hidden, row < end_row, tid);
  const QuantizedRows<A> gate_rows = {gate, gate_scales, gate_biases};
  const QuantizedRows<A> up_rows = {up, up_scales, up_biases};
  const size_t weight_row = size_t(expert) * p.width + first_column;
  loader.set_pair(gate_rows, up_rows, weight_row, p.width - first_column, p.hidden, tid);
  typename Shape::TileType tile;
  gemm_sums(loader, tile, p.hidden, end_row - first_row, shared, tid, sg);
  const SwigluStore<A> store = {
      act + size_t(first_row) * p.width + first_column,
      end_row - first_row,
      p.width - first_column,
      p.width};
  gemm_pair_results<Block>(tile, store, shared, tid, sg);
}

template <typename A, typename Block, template <typename, int, int> class Tile>
[[kernel]] void moe_down(
    const device A* act [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device A* scales [[buffer(2)]],
    const device A* biases [[buffer(3)]],
    const device uint* order [[buffer(4)]],
    const device uint* offsets [[buffer(5)]],
    const device uint* block_map [[buffer(6)]],
    device float* down [[buffer(7)]],
    constant MoeDownParams& p [[buffer(8)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  typedef GemmShape<A, Block, Tile> Shape;
  typedef typename Shape::Loader Loader;
  threadgroup float4 shared[Shape::kWords];
  const uint expert = block_map[2 * tg.y];
  if (expert == kNoBlock) {
    return;
  }
  const int first_row = int(block_map[2 * tg.y + 1]);
  const int end_row = int(offsets[expert + 1]);
  const int first_column = int(tg.x) * Block::kColumns;
  const int row = first_row + Loader::x_row(tid);
  Loader loader;
  loader.set_x(act + size_t(row) * p.width, row < end_row, tid);
  const QuantizedRows<A> matrix = {w, scales, biases};
  const size_t weight_row = size_t(expert) * p.hidden + first_column;
  loader.set_matrix(matrix, weight_row, p.hidden - first_column, p.width, tid);
  typename Shape::TileType tile;
  gemm_sums(loader, tile, p.width, end_row - first_row, shared, tid, sg);
  const DownStore store = {
      order + first_row, down, end_row - first_row, first_column, p.hidden};
  gemm_results<Block>(tile, store, shared, tid, sg);
}
