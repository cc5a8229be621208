// One row times up to four weight matrices: y_m = rnd(W_m x), x = h or rnd(rms_norm(h)).
//
// Serves [qkv | z | b | a] and [q+gate | k | v] with the layer's norm (1 dispatch instead of 5),
// out_proj and o_proj with the residual (y = rnd(h + rnd(sum))), the router with the shared
// expert's gate (fp32 results, and a copy of the normalised row for the experts), and each of their
// unfused forms.
//
// Layout of threads. kLanes lanes share a row, so a simdgroup reads 32 / kLanes rows at
// once, R deep: a block of R * 32 / kLanes rows. Each lane loads U units of each
// of its R rows before it uses one; the first are issued before h is there, and before the
// norm, which each threadgroup does again for itself (h comes from the cache). kSplit simdgroups may share a block, each a part
// of K; their sums are added in order through threadgroup memory. A simdgroup does kBlocks blocks,
// one after another, with the next loads in flight. Sums over lanes are butterflies: equal bits on
// every lane, whatever the order of threads.
//
// Bytes: N * K * (bits / 8 + 2 * sizeof(A) / group) of weights, K * sizeof(A) of h and norm weight
// from memory once (then from the cache, once a threadgroup), N * sizeof(O) written. DeltaNet
// input, 12352 x 2048 at 4 bits, group 64: 14.2 MB; out_proj 2048 x 4096: 4.7 MB; router 257 x 2048
// at 8 bits: 0.56 MB.
//
// Divisibility: K / unit_codes(bits) by kLanes * U * kSplit; kLanes a power of two, at least R; K by
// group and 8. Any number of rows.
#pragma once

#include "linear/gemv_tiles.h"

namespace lily {

constant int kK [[function_constant(0)]];
constant int kRows0 [[function_constant(1)]];  // rows of matrix 0 to 3; 0 when it is absent
constant int kRows1 [[function_constant(2)]];
constant int kRows2 [[function_constant(3)]];
constant int kRows3 [[function_constant(4)]];
constant int kBits0 [[function_constant(5)]];  // 16: not quantized
constant int kBits1 [[function_constant(6)]];
constant int kBits2 [[function_constant(7)]];
constant int kBits3 [[function_constant(8)]];
constant int kGroup [[function_constant(9)]];
constant int kLanes [[function_constant(10)]];
constant int kR [[function_constant(11)]];
constant int kU [[function_constant(12)]];
constant int kSplit [[function_constant(13)]];
constant int kSimdgroups [[function_constant(14)]];  // a threadgroup, 1 to 16; a multiple of kSplit
constant int kBlocks [[function_constant(15)]];      // a simdgroup; 1 when kSplit > 1
constant bool kNorm [[function_constant(16)]];
constant bool kResidual [[function_constant(17)]];
constant bool kWriteX [[function_constant(18)]];
constant float kEps [[function_constant(19)]];

// Which arguments exist: matrix m is there when kRows<m> > 0, its scales and biases when its bits
// are not 16.
constant bool kHas1 [[function_constant(23)]];
constant bool kHas2 [[function_constant(24)]];
constant bool kHas3 [[function_constant(25)]];
constant bool kQuantized0 [[function_constant(26)]];
constant bool kQuantized1 [[function_constant(27)]];
constant bool kQuantized2 [[function_constant(28)]];
constant bool kQuantized3 [[function_constant(29)]];

constant constexpr int kMaxSimdgroups = 16;

template <typename A, typename O>
struct Matrix {
  const device uint* w;
  const device A* scales;
  const device A* biases;
  device O* y;
  int rows;
  int bits;
};

// The matrix in which a block of rows lies; block becomes its number in there. Selects, not an
// index: an array indexed at run time would live in memory.
template <typename A, typename O>
METAL_FUNC Matrix<A, O> matrix_of_block(thread const Matrix<A, O>* m, thread int& block,
                                        int block_rows) {
  const int blocks0 = (kRows0 + block_rows - 1) / block_rows;
  const int blocks1 = (kRows1 + block_rows - 1) / block_rows;
  const int blocks2 = (kRows2 + block_rows - 1) / block_rows;
  const bool in1 = kHas1 && block >= blocks0;
  const bool in2 = kHas2 && block >= blocks0 + blocks1;
  const bool in3 = kHas3 && block >= blocks0 + blocks1 + blocks2;
  block -= in3 ? blocks0 + blocks1 + blocks2 : in2 ? blocks0 + blocks1 : in1 ? blocks0 : 0;
  Matrix<A, O> r;
  r.w = in3 ? m[3].w : in2 ? m[2].w : in1 ? m[1].w : m[0].w;
  r.scales = in3 ? m[3].scales : in2 ? m[2].scales : in1 ? m[1].scales : m[0].scales;
  r.biases = in3 ? m[3].biases : in2 ? m[2].biases : in1 ? m[1].biases : m[0].biases;
  r.y = in3 ? m[3].y : in2 ? m[2].y : in1 ? m[1].y : m[0].y;
  r.rows = in3 ? kRows3 : in2 ? kRows2 : in1 ? kRows1 : kRows0;
  r.bits = in3 ? kBits3 : in2 ? kBits2 : in1 ? kBits1 : kBits0;
  return r;
}

// What becomes of a finished sum: a store, rounded to O, with the residual when there is one. That is
// asked for in begin(), so that it has come when the sum is there.
template <typename A, typename O>
struct StoreRow {
  const device A* residual;
  float before;

  METAL_FUNC void begin(int row) {
    if (kResidual) {
      before = float(residual[row]);
    }
  }

  METAL_FUNC void put(thread const Matrix<A, O>& m, int row, float sum) {
    m.y[row] = kResidual ? O(before + float(O(sum))) : O(sum);
  }
};

// One simdgroup's walk over its blocks and, in each, over its part of K.
template <typename A, typename O, typename Put, int R, int U>
METAL_FUNC void gemv_body(thread const Matrix<A, O>* matrices, const device A* h,
                          const device A* norm_weight, device A* x_out, StagedRow<A> x,
                          threadgroup float* scratch, thread Put& put, uint group, uint tid,
                          uint simdgroup, uint lane) {
  const int lanes = at_least_1(kLanes);
  const int split = at_least_1(kSplit);
  const int groups = kK / at_least_1(kGroup);
  const int block_rows = R * (32 / lanes);
  const int part = int(simdgroup) % split;
  const int slot = (int(group) * kSimdgroups + int(simdgroup)) / split;
  const int sub_row = int(lane) / lanes;
  const int sub_lane = int(lane) % lanes;

  Tile<A, R, U> tile;
  int rows[R];
  for (int b = 0; b < kBlocks; ++b) {
    int block = slot * kBlocks + b;
    const Matrix<A, O> m = matrix_of_block(matrices, block, block_rows);
    const int units = units_in(kK, m.bits);
    const int chunks = units / (lanes * U * split);
    const int first = part * chunks * lanes * U + sub_lane;
    const int row0 = block * block_rows + sub_row;
    if (b == 0) {
      for (int r = 0; r < R; ++r) {
        rows[r] = min(row0 + r * (32 / lanes), m.rows - 1);
      }
      load_tile(tile, m.w, m.scales, m.biases, rows, units, groups, m.bits, kGroup, first, lanes);
      issue_loads();
      stage_row(x, h, norm_weight, x_out, kK, kNorm, kWriteX && group == 0, kEps, scratch, tid,
                simdgroup, lane, kSimdgroups);
    }
    // The block after this one, so that its first loads can be issued early.
    int next_block = slot * kBlocks + b + 1;
    const Matrix<A, O> next = matrix_of_block(matrices, next_block, block_rows);
    const int row = row0 + sub_lane * (32 / lanes);  // the one that this lane will finish
    const bool finishes = part == 0 && sub_lane < R && row < m.rows;
    if (finishes) {
      put.begin(row);
    }
    float acc[R];
    for (int r = 0; r < R; ++r) {
      acc[r] = 0.0f;
    }
    for (int c = 0; c < chunks; ++c) {
      const Tile<A, R, U> now = tile;
      const int unit = first + c * lanes * U;
      if (c + 1 < chunks) {
        load_tile(tile, m.w, m.scales, m.biases, rows, units, groups, m.bits, kGroup,
                  unit + lanes * U, lanes);
        issue_loads();
      } else if (b + 1 < kBlocks) {
        for (int r = 0; r < R; ++r) {
          rows[r] = min(next_block * block_rows + sub_row + r * (32 / lanes), next.rows - 1);
        }
        const int next_units = units_in(kK, next.bits);
        load_tile(tile, next.w, next.scales, next.biases, rows, next_units, groups, next.bits,
                  kGroup, part * (next_units / split) + sub_lane, lanes);
        issue_loads();
      }
#define LILY_CASE(BITS) add_tile<A, R, U, BITS>(now, x, unit, lanes, acc);
      LILY_BY_BITS(m.bits, LILY_CASE)
#undef LILY_CASE
    }
    // Lane r of a row's lanes keeps the sum of row r.
    float sum = 0.0f;
    for (int r = 0; r < R; ++r) {
      const float t = group_sum(acc[r], lanes);
      sum = sub_lane == r ? t : sum;
    }
    if (split > 1) {
      scratch[int(simdgroup) * 32 + int(lane)] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = 1; i < split; ++i) {
        sum += scratch[(int(simdgroup) - part + i) * 32 + int(lane)];
      }
    }
    if (finishes) {
      put.put(m, row, sum);
    }
  }
}

// The shapes (R, U) that are compiled in; the function constants choose one.
#define LILY_GEMV_SHAPES(CASE) \
  CASE(1, 1) CASE(1, 2) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(4, 1) CASE(4, 2) CASE(8, 1)

// A threadgroup's products, lane by lane; gemv_mma.h has another form.
struct LaneProducts {
  constexpr static constant int kScratch = kMaxSimdgroups * 32;  // floats of threadgroup memory

  template <typename A, typename O, typename Put>
  static METAL_FUNC void run(thread const Matrix<A, O>* matrices, const device A* h,
                             const device A* norm_weight, device A* x_out, StagedRow<A> x,
                             threadgroup float* scratch, thread Put& put, uint group, uint tid,
                             uint simdgroup, uint lane) {
    start_next();
#define LILY_CASE(R, U)                                                                         \
  if (kR == R && kU == U) {                                                                     \
    gemv_body<A, O, Put, R, U>(matrices, h, norm_weight, x_out, x, scratch, put, group, tid,    \
                               simdgroup, lane);                                                \
  }
    LILY_GEMV_SHAPES(LILY_CASE)
#undef LILY_CASE
  }
};

// KMAX bounds K: it sizes the threadgroup memory.
template <typename A, typename O, int KMAX, typename Products = LaneProducts>
[[kernel]] void gemv(
    const device A* h [[buffer(0)]],
    const device A* norm_weight [[buffer(1), function_constant(kNorm)]],
    const device A* residual [[buffer(2), function_constant(kResidual)]],
    device A* x_out [[buffer(3), function_constant(kWriteX)]], const device uint* w0 [[buffer(4)]],
    const device A* scales0 [[buffer(5), function_constant(kQuantized0)]],
    const device A* biases0 [[buffer(6), function_constant(kQuantized0)]],
    device O* y0 [[buffer(7)]], const device uint* w1 [[buffer(8), function_constant(kHas1)]],
    const device A* scales1 [[buffer(9), function_constant(kQuantized1)]],
    const device A* biases1 [[buffer(10), function_constant(kQuantized1)]],
    device O* y1 [[buffer(11), function_constant(kHas1)]],
    const device uint* w2 [[buffer(12), function_constant(kHas2)]],
    const device A* scales2 [[buffer(13), function_constant(kQuantized2)]],
    const device A* biases2 [[buffer(14), function_constant(kQuantized2)]],
    device O* y2 [[buffer(15), function_constant(kHas2)]],
    const device uint* w3 [[buffer(16), function_constant(kHas3)]],
    const device A* scales3 [[buffer(17), function_constant(kQuantized3)]],
    const device A* biases3 [[buffer(18), function_constant(kQuantized3)]],
    device O* y3 [[buffer(19), function_constant(kHas3)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 words[KMAX * sizeof(A) / 16];
  threadgroup float2 sums[KMAX / 8];
  threadgroup float scratch[Products::kScratch];
  StagedRow<A> x;
  x.words = words;
  x.sums = sums;
  const Matrix<A, O> matrices[4] = {{w0, scales0, biases0, y0, kRows0, kBits0},
                                    {w1, scales1, biases1, y1, kRows1, kBits1},
                                    {w2, scales2, biases2, y2, kRows2, kBits2},
                                    {w3, scales3, biases3, y3, kRows3, kBits3}};
  StoreRow<A, O> put;
  put.residual = residual;
  Products::run(matrices, h, norm_weight, x_out, x, scratch, put, group.x, tid, simdgroup, lane);
}

// The norm apart, for the unfused form: y = rnd(rms_norm(h)). One threadgroup.
// Bytes: 3 * K * sizeof(A).
template <typename A>
[[kernel]] void norm_row(const device A* h [[buffer(0)]], const device A* weight [[buffer(1)]],
                         device A* y [[buffer(2)]], uint tid [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scratch[kMaxSimdgroups];
  const int threads = kSimdgroups * 32;
  float squares = 0.0f;
  for (int p = int(tid); p < kK / 8; p += threads) {
    float x[8];
    load8(h + p * 8, x);
    for (int i = 0; i < 8; ++i) {
      squares = fma(x[i], x[i], squares);
    }
  }
  const float sum = threadgroup_sum(squares, scratch, simdgroup, lane, kSimdgroups);
  const float scale = precise::rsqrt(sum / float(kK) + kEps);
  for (int k = int(tid); k < kK; k += threads) {
    y[k] = A(float(h[k]) * scale * float(weight[k]));
  }
}

}  // namespace lily
