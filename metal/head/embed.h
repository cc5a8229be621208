// Embedding of a prefill chunk: out[i] = rnd(scale * code + bias) of row ids[i].
//
// Layout of threads. Grid (ceil(columns / 1024), rows of out), 128 threads, eight values a thread. An id
// past the vocabulary reads the last row instead of memory that is not there.
//
// Bytes: a row of codes, scales and biases read and columns * sizeof(A) written, for each id. Function
// constants: 0 = bits (16: weights of type A), 1 = group. Columns are a multiple of 8 and of the group.
#pragma once

#include "params.h"
#include "quant.h"

constant int kBits [[function_constant(0)]];
constant int kGroup [[function_constant(1)]];

using namespace lily;

template <typename A>
[[kernel]] void embed_rows(
    const device uint* ids [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device A* scales [[buffer(2)]],
    const device A* biases [[buffer(3)]],
    device A* out [[buffer(4)]],
    constant EmbedParams& p [[buffer(5)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  const int k = (int(tg.x) * 128 + int(tid)) * 8;
  if (k >= p.columns) {
    return;
  }
  const size_t row = min(ids[tg.y], uint(p.vocabulary - 1));
  device A* to = out + size_t(tg.y) * p.columns + k;
  if (kBits > 8) {
    const device A* from = (const device A*)w + row * p.columns + k;
    for (int i = 0; i < 8; ++i) {
      to[i] = from[i];
    }
    return;
  }
  const size_t group = row * size_t(p.columns / at_least_1(kGroup)) + k / at_least_1(kGroup);
  const float scale = float(scales[group]);
  const float bias = float(biases[group]);
  const device uint* codes = w + row * size_t(p.columns * kBits / 32);
  for (int i = 0; i < 8; ++i) {
    to[i] = A(fma(scale, float(code_in(codes, k, i, kBits)), bias));
  }
}
