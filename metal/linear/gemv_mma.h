// gemv.h's products on NVIDIA's tensor cores, for PTX alone: unpacking a code costs a third of what it
// costs lane by lane, which is what keeps a GEMV there from the speed of memory.
//
// What it computes. The same as gemv.h for codes of 4 bits in groups of 64. A product of 16 x 8 x 16
// takes 16 weight rows against one row x: a code goes into a mantissa as base + code, exactly (one
// instruction for two codes); the eight columns hold x where the row's group is the column's, 0
// elsewhere, so that the sums of two groups come apart and each is scaled once. A sum starts at -base
// * sum(x). All products are exact, sums are fp32; the order of a sum is the tensor core's own.
//
// Layout of threads. A block is 16 rows (kLanes = 2, kR = 1 say so to who counts blocks). kSplit
// simdgroups share a block, each a slice of K of 128 kU values, kU 2 or 4, whose x stays in registers
// for all kBlocks blocks of a simdgroup. Lane l has rows l / 4 and l / 4 + 8 and 16-byte units l % 4,
// l % 4 + 4, ... of them. The next block's loads are in flight during a product. Slices are added
// through threadgroup memory, kGather blocks at a time, in order.
//
// Bytes: gemv.h's. Flops: none to speak of; instructions 60 a unit of 32 codes in gemv.h's terms
// become 20.
//
// Divisibility: K = 128 kU kSplit; kSimdgroups a multiple of kSplit.
#pragma once

#include <nvidia_simdgroup>

#include "linear/gemv.h"
#include "quant_mma.h"

namespace lily {

// A lane's part of a slice of x as the tensor core's columns, and the slice's sums by group.
template <typename A, int UNITS>
struct SliceX {
  uint pairs[UNITS][16];
  float sums[UNITS][2];
};

// Word w of a unit holds codes 8 w to 8 w + 7: halves of 4 bits at 0 and 16, 4 and 20, ... meet x
// (0, 4), (1, 5), (2, 6), (3, 7).
METAL_FUNC void pair_up(uint4 x, bool zero, thread uint* pairs) {
  pairs[0] = zero ? 0u : lower_halves(x[0], x[2]);
  pairs[1] = zero ? 0u : upper_halves(x[0], x[2]);
  pairs[2] = zero ? 0u : lower_halves(x[1], x[3]);
  pairs[3] = zero ? 0u : upper_halves(x[1], x[3]);
}

// Whether a lane's column is for the other one of the two groups that four units hold.
METAL_FUNC bool other_group(uint lane) {
  return ((lane / 4) & 1u) != ((lane & 3u) >> 1);
}

template <typename A, int UNITS>
METAL_FUNC void load_slice(thread SliceX<A, UNITS>& slice, StagedRow<A> x, int part, uint lane) {
  const bool zero = other_group(lane);
  for (int i = 0; i < UNITS; ++i) {
    const int unit = (part * UNITS + i) * 4 + int(lane & 3u);
    float sum = 0.0f;
    for (int w = 0; w < 4; ++w) {
      const int slot = piece_slot(unit * 4 + w);
      pair_up(x.words[slot], zero, slice.pairs[i] + 4 * w);
      const float2 sums = x.sums[slot];
      sum += sums.x + sums.y;
    }
    sum += simd_shuffle_xor(sum, ushort(1));
    const float other = simd_shuffle_xor(sum, ushort(2));
    const bool first = (lane & 2u) == 0;
    slice.sums[i][0] = first ? sum : other;
    slice.sums[i][1] = first ? other : sum;
  }
}

// A slice of two weight rows, as a lane loads it; a scale and a bias word serve two groups.
template <typename A, int UNITS>
struct RowPair {
  uint4 q[2][UNITS];
  uint scale[2][UNITS];
  uint bias[2][UNITS];
};

// Row `row` of a matrix of `units` units a row into half h of the pair.
template <typename A, int UNITS>
METAL_FUNC void load_row(thread RowPair<A, UNITS>& t, int h, const device uint* w,
                         const device A* scales, const device A* biases, int row, int units,
                         int part, uint lane) {
  const device uint4* q = (const device uint4*)w + row * units + part * UNITS * 4;
  const int word = row * (units / 4) + part * UNITS;  // of two groups
  for (int i = 0; i < UNITS; ++i) {
    t.q[h][i] = q[i * 4 + int(lane & 3u)];
  }
  for (int i = 0; i < UNITS; ++i) {
    t.scale[h][i] = ((const device uint*)scales)[word + i];
    t.bias[h][i] = ((const device uint*)biases)[word + i];
  }
}

METAL_FUNC float2 two_values(uint pair, bfloat) {
  return float2(as_type<float>(pair << 16), as_type<float>(pair & 0xffff0000u));
}
METAL_FUNC float2 two_values(uint pair, half) {
  const half2 v = as_type<half2>(pair);
  return float2(float(v.x), float(v.y));
}

// The slice's part of the products of both rows, on each of their four lanes.
template <typename A, int UNITS>
METAL_FUNC float2 slice_product(thread const RowPair<A, UNITS>& t,
                                thread const SliceX<A, UNITS>& x) {
  const float minus = -base_value(A(0.0f));
  float first = 0.0f;
  float second = 0.0f;
  for (int i = 0; i < UNITS; ++i) {
    float c[4] = {minus * x.sums[i][0], minus * x.sums[i][1], minus * x.sums[i][0],
                  minus * x.sums[i][1]};
    for (int w = 0; w < 4; ++w) {
      const uint u = t.q[0][i][w];
      const uint v = t.q[1][i][w];
      const uint low[4] = {base_and_codes<A>(u, 0), base_and_codes<A>(v, 0),
                           base_and_codes<A>(u, 1), base_and_codes<A>(v, 1)};
      nvidia::multiply_accumulate(c, low, x.pairs[i][4 * w], x.pairs[i][4 * w + 1], A(0.0f));
      const uint high[4] = {base_and_codes<A>(u, 2), base_and_codes<A>(v, 2),
                            base_and_codes<A>(u, 3), base_and_codes<A>(v, 3)};
      nvidia::multiply_accumulate(c, high, x.pairs[i][4 * w + 2], x.pairs[i][4 * w + 3], A(0.0f));
    }
    const float2 scale0 = two_values(t.scale[0][i], A(0.0f));
    const float2 bias0 = two_values(t.bias[0][i], A(0.0f));
    const float2 scale1 = two_values(t.scale[1][i], A(0.0f));
    const float2 bias1 = two_values(t.bias[1][i], A(0.0f));
    first = fma(scale0.x, c[0], fma(bias0.x, x.sums[i][0], first));
    first = fma(scale0.y, c[1], fma(bias0.y, x.sums[i][1], first));
    second = fma(scale1.x, c[2], fma(bias1.x, x.sums[i][0], second));
    second = fma(scale1.y, c[3], fma(bias1.y, x.sums[i][1], second));
  }
  return float2(first, second);
}

// Leaves a slice's products of 16 rows at out: rows l / 4 first, then l / 4 + 8.
METAL_FUNC void put_slice(threadgroup float* out, float2 products, uint lane) {
  if ((lane & 3u) < 2) {
    out[(lane & 1u) * 8 + lane / 4] = (lane & 1u) == 0 ? products.x : products.y;
  }
}

constant constexpr int kGather = 8;  // blocks of 16 rows whose slices meet in threadgroup memory

template <typename A, typename O, typename Put, int UNITS>
METAL_FUNC void gemv_mma_body(thread const Matrix<A, O>* matrices, const device A* h,
                               const device A* norm_weight, device A* x_out, StagedRow<A> x,
                               threadgroup float* scratch, thread Put& put, uint group, uint tid,
                               uint simdgroup, uint lane) {
  constexpr int kRows = 16;
  const int split = at_least_1(kSplit);
  const int teams = kSimdgroups / split;  // simdgroups that share blocks
  const int part = int(simdgroup) % split;
  const int first_block = (int(group) * teams + int(simdgroup) / split) * kBlocks;
  const int units = kK / 32;
  // No more rows a round than threads: each finishes one.
  const int gather = min(min(kGather, 2 * split), kBlocks);

  RowPair<A, UNITS> next;
  {
    int block = first_block;
    const Matrix<A, O> m = matrix_of_block(matrices, block, kRows);
    const int row = block * kRows + int(lane / 4);
    load_row(next, 0, m.w, m.scales, m.biases, min(row, m.rows - 1), units, part, lane);
    load_row(next, 1, m.w, m.scales, m.biases, min(row + 8, m.rows - 1), units, part, lane);
  }
  issue_loads();
  stage_row(x, h, norm_weight, x_out, kK, kNorm, kWriteX && group == 0, kEps, scratch, tid,
            simdgroup, lane, kSimdgroups);
  SliceX<A, UNITS> slice;
  load_slice(slice, x, part, lane);

  for (int b0 = 0; b0 < kBlocks; b0 += gather) {
    const int count = min(gather, kBlocks - b0);
    // The row that this thread finishes.
    const int team = int(tid) / (count * kRows);
    const int j = int(tid) / kRows % at_least_1(count);
    int block = (int(group) * teams + team) * kBlocks + b0 + j;
    const Matrix<A, O> own = matrix_of_block(matrices, block, kRows);
    const int row = block * kRows + int(tid) % kRows;
    const bool finishes = team < teams && row < own.rows;
    if (finishes) {
      put.begin(row);
    }
    for (int b = b0; b < b0 + count; ++b) {
      const RowPair<A, UNITS> now = next;
      if (b + 1 < kBlocks) {
        int after = first_block + b + 1;
        const Matrix<A, O> m = matrix_of_block(matrices, after, kRows);
        const int r = after * kRows + int(lane / 4);
        load_row(next, 0, m.w, m.scales, m.biases, min(r, m.rows - 1), units, part, lane);
        load_row(next, 1, m.w, m.scales, m.biases, min(r + 8, m.rows - 1), units, part, lane);
        issue_loads();
      }
      put_slice(scratch + ((b - b0) * kSimdgroups + int(simdgroup)) * kRows,
                slice_product(now, slice), lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (finishes) {
      const threadgroup float* parts =
          scratch + (j * kSimdgroups + team * split) * kRows + int(tid) % kRows;
      float sum = parts[0];
      for (int i = 1; i < split; ++i) {
        sum += parts[i * kRows];
      }
      put.put(own, row, sum);
    }
    if (b0 + gather < kBlocks) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// In place of gemv.h's LaneProducts.
struct MmaProducts {
  constexpr static constant int kScratch = kGather * kMaxSimdgroups * 16;

  template <typename A, typename O, typename Put>
  static METAL_FUNC void run(thread const Matrix<A, O>* matrices, const device A* h,
                             const device A* norm_weight, device A* x_out, StagedRow<A> x,
                             threadgroup float* scratch, thread Put& put, uint group, uint tid,
                             uint simdgroup, uint lane) {
    if (kU == 2) {
      gemv_mma_body<A, O, Put, 2>(matrices, h, norm_weight, x_out, x, scratch, put, group, tid,
                                   simdgroup, lane);
    }
    if (kU == 4) {
      gemv_mma_body<A, O, Put, 4>(matrices, h, norm_weight, x_out, x, scratch, put, group, tid,
                                   simdgroup, lane);
    }
  }
};

}  // namespace lily
