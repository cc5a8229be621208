// The end and the start of a step: final norm + lm_head + argmax into the token slot; embedding of
// the slot's token.
//
// head_gemv: the GEMV of gemv.h on one matrix, with the norm; each threadgroup keeps the greatest
// of its logits (the lowest id among equals). Logits go to memory only when asked for.
//
// embed_row: h = rnd(scale * code + bias) of the slot's token; eight values a thread. An id past
// the vocabulary reads the last row instead of memory that is not there.
//
// A logit that is NaN is never chosen; with nothing to choose from the token is 0.
//
// Bytes: head 248320 x 2048 at 4 bits, group 64: 286 MB; 8 bytes a threadgroup for the partials;
// logits, when asked for, 4 N. Embedding: one row of 1.2 KB, 4 KB written.
#pragma once

#include "linear/gemv.h"
#include "quant.h"

namespace lily {

constant bool kWriteLogits [[function_constant(20)]];
constant int kPartials [[function_constant(21)]];  // threadgroups of the first stage

struct Best {
  float value;
  uint id;
};

METAL_FUNC Best no_best() {
  Best b;
  b.value = minus_infinity();
  b.id = 0xffffffffu;
  return b;
}

METAL_FUNC void keep_better(thread Best& b, float value, uint id) {
  if (ranks_before(value, id, b.value, b.id)) {
    b.value = value;
    b.id = id;
  }
}

// The best of a threadgroup, valid on thread 0.
METAL_FUNC void threadgroup_best(thread Best& b, threadgroup float* values, threadgroup uint* ids,
                                 uint simdgroup, uint lane, int simdgroups) {
  for (int m = 1; m < 32; m <<= 1) {
    const float value = simd_shuffle_xor(b.value, ushort(m));
    const uint id = simd_shuffle_xor(b.id, ushort(m));
    keep_better(b, value, id);
  }
  if (lane == 0) {
    values[simdgroup] = b.value;
    ids[simdgroup] = b.id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && lane == 0) {
    for (int i = 1; i < simdgroups; ++i) {
      keep_better(b, values[i], ids[i]);
    }
  }
}

// A finished sum is a logit.
template <typename A>
struct BestRow {
  device float* logits;
  Best best;

  METAL_FUNC void begin(int) {}

  METAL_FUNC void put(thread const Matrix<A, float>&, int row, float sum) {
    keep_better(best, sum, uint(row));
    if (kWriteLogits) {
      logits[row] = sum;
    }
  }
};

template <typename A, int KMAX, typename Products = LaneProducts>
[[kernel]] void head_gemv(const device A* h [[buffer(0)]],
                          const device A* norm_weight [[buffer(1), function_constant(kNorm)]],
                          const device uint* w [[buffer(2)]],
                          const device A* scales [[buffer(3), function_constant(kQuantized0)]],
                          const device A* biases [[buffer(4), function_constant(kQuantized0)]],
                          device float* logits [[buffer(5), function_constant(kWriteLogits)]],
                          device float* partial_values [[buffer(6)]],
                          device uint* partial_ids [[buffer(7)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 words[KMAX * sizeof(A) / 16];
  threadgroup float2 sums[KMAX / 8];
  threadgroup float scratch[Products::kScratch];
  threadgroup float values[kMaxSimdgroups];
  threadgroup uint ids[kMaxSimdgroups];
  StagedRow<A> x;
  x.words = words;
  x.sums = sums;
  const Matrix<A, float> matrices[4] = {{w, scales, biases, nullptr, kRows0, kBits0},
                                        {nullptr, nullptr, nullptr, nullptr, 0, kBits0},
                                        {nullptr, nullptr, nullptr, nullptr, 0, kBits0},
                                        {nullptr, nullptr, nullptr, nullptr, 0, kBits0}};
  BestRow<A> put;
  put.logits = logits;
  put.best = no_best();
  device A* no_copy = nullptr;
  Products::run(matrices, h, norm_weight, no_copy, x, scratch, put, group.x, tid, simdgroup, lane);
  threadgroup_best(put.best, values, ids, simdgroup, lane, kSimdgroups);
  if (tid == 0) {
    partial_values[group.x] = put.best.value;
    partial_ids[group.x] = put.best.id;
  }
}

template <typename A>
[[kernel]] void embed_row(const device uint* token [[buffer(0)]],
                          const device uint* w [[buffer(1)]],
                          const device A* scales [[buffer(2), function_constant(kQuantized0)]],
                          const device A* biases [[buffer(3), function_constant(kQuantized0)]],
                          device A* h [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]]) {
  const int k = (int(group.x) * kSimdgroups * 32 + int(tid)) * 8;
  if (k >= kK) {
    return;
  }
  const int row = int(min(token[0], uint(kRows0 - 1)));
  if (!kQuantized0) {
    for (int i = 0; i < 8; ++i) {
      h[k + i] = ((const device A*)w)[row * kK + k + i];
    }
    return;
  }
  const int g = (row * kK + k) / at_least_1(kGroup);
  const float scale = float(scales[g]);
  const float bias = float(biases[g]);
  const device uint* codes = w + row * (kK * kBits0 / 32);
  for (int i = 0; i < 8; ++i) {
    h[k + i] = A(fma(scale, float(code_in(codes, k, i, kBits0)), bias));
  }
}

}  // namespace lily
