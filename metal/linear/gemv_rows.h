// Products of 2 to 16 rows with quantized weights: each weight is read once and meets every row.
//
// What it computes, fp32 sums, weights unrounded (scale * code + bias in fp32):
//   gemv_rows_multi    y_i = rnd(x W_i^T), or fp32 unrounded; x [rows, K], up to four matrices W_i
//                      [n_i, K] (n_i = 0 for none)
//   moe_gate_up_rows   act[s] = rnd(silu(gate_e x) * (up_e x)), s sorted assignments of routing.h
//   moe_down_rows      down[order[s]] = down_e act[s], fp32
// The expert kernels take one block map entry (block_rows >= MT) a threadgroup row, so that an
// expert that no token chose costs nothing and one that several chose is read once.
//
// Layout of threads. 128 threads. `lanes` (a power of two, at most 32, at most K / 16) neighbouring
// lanes share a weight row, 16 codes a lane a step; a lane holds R rows of weights and R x MT sums.
// The x of a step (16 lanes values a row) is staged in threadgroup memory. R rows, 32 / lanes of
// them side by side, four simdgroups: a threadgroup makes 4 R (32 / lanes) rows of W, half as many
// columns of act in moe_gate_up_rows.
//
// Threadgroup memory: 1 KB MT + 64 B. Bytes: W once; x ceil(N / rows a threadgroup) times, from
// cache. Flops: 2 rows N K.
//
// Function constants: 0 = bits (16: weights of type A), 1 = group. K is a multiple of
// 16 and of the group.
#pragma once

#include "params.h"
#include "rows_common.h"
#include "quant.h"

constant int kBits [[function_constant(0)]];
constant int kGroup [[function_constant(1)]];

namespace lily {

constant constexpr int kRowsThreads = 128;
constant constexpr int kRowsUnit = 16;  // codes a lane takes at once

// One weight row as a lane reads it.
template <typename A>
struct WeightRow {
  const device uchar* w;
  const device A* scales;
  const device A* biases;
  bool valid;
};

template <typename A>
METAL_FUNC WeightRow<A> weight_row(
    const device uint* w,
    const device A* scales,
    const device A* biases,
    size_t row,
    int depth,
    int group,
    bool valid) {
  WeightRow<A> r;
  r.w = (const device uchar*)w + row * size_t(depth * kBits / 8);
  r.scales = scales + row * size_t(depth / group);
  r.biases = biases + row * size_t(depth / group);
  r.valid = valid;
  return r;
}

// 16 codes as loaded.
struct RawUnit {
  CodeRun<kRowsUnit> codes;
  float scale;
  float bias;
};

template <typename A>
METAL_FUNC void load_unit(thread const WeightRow<A>& row, int k, int group, thread RawUnit& u) {
  load_codes(row.w + k * kBits / 8, kBits, u.codes);
  if (kBits <= 8) {
    u.scale = float(row.scales[k / group]);
    u.bias = float(row.biases[k / group]);
  }
}

template <typename A>
METAL_FUNC void decode_unit(thread const RawUnit& u, thread float4* w) {
  for (int i = 0; i < 4; ++i) {
    if (kBits <= 8) {
      for (int c = 0; c < 4; ++c) {
        w[i][c] = fma(float(code_at(u.codes, 4 * i + c, kBits)), u.scale, u.bias);
      }
    } else {
      const uint4 word = u.codes.words[i / 2];
      w[i] = unpack4<A>(word[i % 2 * 2], word[i % 2 * 2 + 1]);
    }
  }
}

// sums[r * MT + m] = the lane's rows r times row m of x, equal in the `lanes` lanes of a weight
// row. x_rows [MT] names the rows of x; xs holds 2 * MT * 32 words of 16 bytes.
template <typename A, int R, int MT>
METAL_FUNC void rows_product(
    const device A* x,
    const threadgroup uint* x_rows,
    threadgroup uint4* xs,
    thread const WeightRow<A>* weights,
    int rows,
    int depth,
    int lanes,
    int group,
    uint tid,
    uint lane,
    thread float* sums) {
  const int part = int(lane) % lanes;
  const int step = lanes * kRowsUnit;
  const int words = step / 8;
  for (int i = 0; i < R * MT; ++i) {
    sums[i] = 0.0f;
  }
  for (int k = 0; k < depth; k += step) {
    const int at = k + part * kRowsUnit;
    RawUnit raw[R];
    for (int r = 0; r < R; ++r) {
      if (weights[r].valid && at < depth) {
        load_unit(weights[r], at, group, raw[r]);
      }
    }
    for (int i = int(tid); i < rows * words; i += kRowsThreads) {
      const int from = k + i % words * 8;
      if (from < depth) {
        xs[i] = *(const device uint4*)(x + size_t(x_rows[i / words]) * depth + from);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at < depth) {
      float4 w[R][4];
      for (int r = 0; r < R; ++r) {
        if (weights[r].valid) {
          decode_unit<A>(raw[r], w[r]);
        } else {
          for (int i = 0; i < 4; ++i) {
            w[r][i] = float4(0.0f);
          }
        }
      }
#pragma clang loop unroll(full)
      for (int m = 0; m < MT; ++m) {
        if (m < rows) {
          const uint4 lo = xs[m * words + 2 * part];
          const uint4 hi = xs[m * words + 2 * part + 1];
          const float4 x0 = unpack4<A>(lo[0], lo[1]);
          const float4 x1 = unpack4<A>(lo[2], lo[3]);
          const float4 x2 = unpack4<A>(hi[0], hi[1]);
          const float4 x3 = unpack4<A>(hi[2], hi[3]);
          for (int r = 0; r < R; ++r) {
            const float4 t = fma(w[r][3], x3, fma(w[r][2], x2, fma(w[r][1], x1, w[r][0] * x0)));
            sums[r * MT + m] += (t[0] + t[1]) + (t[2] + t[3]);
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // All sums at once, level by level. Unrolled, as below: an index known at run time would put the
  // sums into memory.
  for (int mask = 1; mask < lanes; mask *= 2) {
#pragma clang loop unroll(full)
    for (int i = 0; i < R * MT; ++i) {
      if (i % MT < rows) {
        sums[i] += simd_shuffle_xor(sums[i], ushort(mask));
      }
    }
  }
}

// The first weight row of a lane when a threadgroup makes 4 R (32 / lanes) of them.
METAL_FUNC int first_weight_row(int group_index, int per_lane, int lanes, uint sg, uint lane) {
  const int sets = 32 / lanes;
  return ((group_index * 4 + int(sg)) * sets + int(lane) / lanes) * per_lane;
}

template <typename A, typename O, int R, int MT>
METAL_FUNC void gemv_rows_matrix(
    const device A* x,
    const device uint* w,
    const device A* scales,
    const device A* biases,
    device O* y,
    threadgroup uint* x_rows,
    threadgroup uint4* xs,
    int rows,
    int n,
    int depth,
    int lanes,
    int group_index,
    uint tid,
    uint sg,
    uint lane) {
  if (int(tid) < rows) {
    x_rows[tid] = tid;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int first = first_weight_row(group_index, R, lanes, sg, lane);
  WeightRow<A> weights[R];
  for (int r = 0; r < R; ++r) {
    weights[r] = weight_row(w, scales, biases, first + r, depth, kGroup, first + r < n);
  }
  float sums[R * MT];
  rows_product<A, R, MT>(
      x, x_rows, xs, weights, rows, depth, lanes, kGroup, tid, lane, sums);
  if (int(lane) % lanes == 0) {
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
      for (int m = 0; m < MT; ++m) {
        if (m < rows && first + r < n) {
          y[size_t(m) * n + first + r] = O(sums[r * MT + m]);
        }
      }
    }
  }
}

}  // namespace lily

using namespace lily;

template <typename A, typename O, int R, int MT>
[[kernel]] void gemv_rows_multi(
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
    constant GemvRowsMultiParams& p [[buffer(17)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint x_rows[MT];
  threadgroup uint4 xs[2 * MT * 32];
  const int made = 4 * R * (32 / p.lanes);
  int m = 0;
  int tile = int(tg.x);
  for (int i = 0; i < 3; ++i) {
    const int tiles = (p.n[i] + made - 1) / made;
    if (m == i && tile >= tiles) {
      tile -= tiles;
      m = i + 1;
    }
  }
  gemv_rows_matrix<A, O, R, MT>(
      x,
      m == 0 ? w0 : m == 1 ? w1 : m == 2 ? w2 : w3,
      m == 0 ? scales0 : m == 1 ? scales1 : m == 2 ? scales2 : scales3,
      m == 0 ? biases0 : m == 1 ? biases1 : m == 2 ? biases2 : biases3,
      m == 0 ? y0 : m == 1 ? y1 : m == 2 ? y2 : y3,
      x_rows,
      xs,
      p.rows,
      p.n[m],
      p.depth,
      p.lanes,
      tile,
      tid,
      sg,
      lane);
}

template <typename A, int R, int MT>
[[kernel]] void moe_gate_up_rows(
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
    constant MoeRowsParams& p [[buffer(11)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint x_rows[MT];
  threadgroup uint4 xs[2 * MT * 32];
  const uint expert = block_map[2 * tg.y];
  if (expert == kNoBlock) {
    return;
  }
  const int first_row = int(block_map[2 * tg.y + 1]);
  const int rows = min(MT, int(offsets[expert + 1]) - first_row);
  if (int(tid) < rows) {
    x_rows[tid] = order[first_row + int(tid)] / uint(p.top_k);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  constexpr int kColumns = R / 2;
  const int column = first_weight_row(int(tg.x), kColumns, p.lanes, sg, lane);
  WeightRow<A> weights[R];
  for (int r = 0; r < kColumns; ++r) {
    const bool valid = column + r < p.width;
    const size_t row = size_t(expert) * p.width + column + r;
    weights[r] = weight_row(gate, gate_scales, gate_biases, row, p.hidden, kGroup, valid);
    weights[kColumns + r] = weight_row(up, up_scales, up_biases, row, p.hidden, kGroup, valid);
  }
  float sums[R * MT];
  rows_product<A, R, MT>(
      x, x_rows, xs, weights, rows, p.hidden, p.lanes, kGroup, tid, lane, sums);
  if (int(lane) % p.lanes == 0) {
#pragma clang loop unroll(full)
    for (int r = 0; r < kColumns; ++r) {
#pragma clang loop unroll(full)
      for (int m = 0; m < MT; ++m) {
        if (m < rows && weights[r].valid) {
          const float y = silu(sums[r * MT + m]) * sums[(kColumns + r) * MT + m];
          act[size_t(first_row + m) * p.width + column + r] = A(y);
        }
      }
    }
  }
}

template <typename A, int R, int MT>
[[kernel]] void moe_down_rows(
    const device A* act [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device A* scales [[buffer(2)]],
    const device A* biases [[buffer(3)]],
    const device uint* order [[buffer(4)]],
    const device uint* offsets [[buffer(5)]],
    const device uint* block_map [[buffer(6)]],
    device float* down [[buffer(7)]],
    constant MoeRowsParams& p [[buffer(8)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint x_rows[MT];
  threadgroup uint4 xs[2 * MT * 32];
  const uint expert = block_map[2 * tg.y];
  if (expert == kNoBlock) {
    return;
  }
  const int first_row = int(block_map[2 * tg.y + 1]);
  const int rows = min(MT, int(offsets[expert + 1]) - first_row);
  if (int(tid) < rows) {
    x_rows[tid] = uint(first_row) + tid;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int first = first_weight_row(int(tg.x), R, p.lanes, sg, lane);
  WeightRow<A> weights[R];
  for (int r = 0; r < R; ++r) {
    const size_t row = size_t(expert) * p.hidden + first + r;
    weights[r] = weight_row(w, scales, biases, row, p.width, kGroup, first + r < p.hidden);
  }
  float sums[R * MT];
  rows_product<A, R, MT>(
      act, x_rows, xs, weights, rows, p.width, p.lanes, kGroup, tid, lane, sums);
  if (int(lane) % p.lanes == 0) {
#pragma clang loop unroll(full)
    for (int m = 0; m < MT; ++m) {
      if (m < rows) {
        device float* out = down + size_t(order[first_row + m]) * p.hidden;
        for (int r = 0; r < R; ++r) {
          if (weights[r].valid) {
            out[first + r] = sums[r * MT + m];
          }
        }
      }
    }
  }
}
