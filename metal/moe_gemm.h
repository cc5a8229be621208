// The experts of a prefill chunk: grouped GEMMs over the sorted assignments of routing.h.
//
//   moe_gate_up  act[s] = rnd(silu(gate_e x) * (up_e x)) for each sorted assignment s of expert e;
//                x is the token's row, gathered by order[s] / top_k. act [assignments, width] of A
//                in sorted order. Ungrouped (grouped = 0): one expert, row s is token s (the shared
//                expert).
//   moe_down     down[order[s]] = down_e act[s], fp32 unrounded, rows in (token, slot) order.
// Gate, up [E, width, hidden], down [E, hidden, width], affine codes. The combine is
// prefill_ops.h's.
//
// Layout of threads. One threadgroup of 128 takes one entry of the block map (expert, first row),
// at most BM rows, and 32 columns of gate with the same 32 of up side by side (moe_gate_up) or 64
// columns (moe_down). Grid: (width / 32 or ceil(hidden / 64), entries of the block map); a sentinel
// entry ends its threadgroup at once. Ungrouped: second dimension ceil(rows / BM). width is a
// multiple of 32, hidden of 32 and of the group.
//
// Bytes, flops and threadgroup memory: gemm_tiles.h. An expert's weights are read once for each of
// its blocks; for 2048 tokens of the 35B shapes (64 rows an expert on average) that is 256 + E/2
// blocks of 64 at most.
#pragma once

#include "gemm_tiles.h"

namespace lily {

struct MoeGateUpParams {
  int rows;  // assignments, or tokens when not grouped
  int width;
  int hidden;
  int top_k;
  int grouped;
};

struct MoeDownParams {
  int hidden;
  int width;
};

}  // namespace lily

using namespace lily;

template <typename A, int BM, template <typename, int, int> class Tile>
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
  threadgroup float4 shared[GemmShape<BM>::kWords];
  typedef GemmLoader<A, BM> Loader;
  const bool grouped = p.grouped != 0;
  const uint expert = grouped ? block_map[2 * tg.y] : 0u;
  if (expert == kNoBlock) {
    return;
  }
  const int first_row = grouped ? int(block_map[2 * tg.y + 1]) : int(tg.y) * BM;
  const int end_row = grouped ? int(offsets[expert + 1]) : p.rows;
  const int first_column = int(tg.x) * 32;

  const int row = first_row + Loader::x_row(tid);
  int token = 0;
  if (row < end_row) {
    token = grouped ? int(order[row]) / p.top_k : row;
  }
  const int w_row = Loader::w_row(tid);
  const bool is_gate = w_row < 32;
  const size_t weight_row = size_t(expert) * p.width + first_column + w_row % 32;
  Loader loader;
  loader.set_x(x + size_t(token) * p.hidden, row < end_row, tid);
  loader.set_w(
      is_gate ? gate : up,
      is_gate ? gate_scales : up_scales,
      is_gate ? gate_biases : up_biases,
      weight_row,
      p.hidden,
      true,
      tid);
  const threadgroup float* result = gemm_tile<A, BM, Tile>(loader, p.hidden, shared, tid, sg);
  for (int i = int(tid); i < BM * 8; i += kGemmThreads) {
    const int r = i / 8;
    const int c = i % 8 * 4;
    if (first_row + r < end_row) {
      const float4 g = gemm_result4(result, r, c);
      const float4 u = gemm_result4(result, r, c + 32);
      float4 y;
      for (int j = 0; j < 4; ++j) {
        y[j] = silu(g[j]) * u[j];
      }
      store4(act + size_t(first_row + r) * p.width + first_column + c, y);
    }
  }
}

template <typename A, int BM, template <typename, int, int> class Tile>
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
  threadgroup float4 shared[GemmShape<BM>::kWords];
  typedef GemmLoader<A, BM> Loader;
  const uint expert = block_map[2 * tg.y];
  if (expert == kNoBlock) {
    return;
  }
  const int first_row = int(block_map[2 * tg.y + 1]);
  const int end_row = int(offsets[expert + 1]);
  const int first_column = int(tg.x) * kGemmWeightRows;
  const int row = first_row + Loader::x_row(tid);
  const int column = first_column + Loader::w_row(tid);
  Loader loader;
  loader.set_x(act + size_t(row) * p.width, row < end_row, tid);
  loader.set_w(
      w, scales, biases, size_t(expert) * p.hidden + column, p.width, column < p.hidden, tid);
  const threadgroup float* result = gemm_tile<A, BM, Tile>(loader, p.width, shared, tid, sg);
  for (int i = int(tid); i < BM * kGemmWeightRows / 4; i += kGemmThreads) {
    const int r = i / (kGemmWeightRows / 4);
    const int c = i % (kGemmWeightRows / 4) * 4;
    if (first_row + r < end_row && first_column + c < p.hidden) {
      const size_t out_row = order[first_row + r];
      store4(down + out_row * p.hidden + first_column + c, gemm_result4(result, r, c));
    }
  }
}
