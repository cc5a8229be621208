// What stands before mx.fast.scaled_dot_product_attention in prefill.
//
// attention_prepare. For every row: RMS norm over head_dim of the q and k heads (weights q_norm,
// k_norm), rotary embedding on the first RD dims (pairs (i, i + RD / 2), position offset[batch] +
// row index), rounded to A once; q goes to [B, Hq, T, D], k and v to rows first_row .. of the cache
// [B, Hkv, capacity, D]. q_proj's output is [head][q D | gate D]; the gate stays where it is.
//
// Layout of threads. attention_prepare: grid (ceil(T / 4), Hq + 2 Hkv, B), a simdgroup one head of one
// row, a lane the dims lane, lane + 32, ..., so that both members of a rotary pair are in one lane.
//
// Bytes: 2 (2 Hq D + 4 Hkv D) a row. Flops: about 8 a value.
#pragma once

#include "params.h"
#include "rows_common.h"

using namespace lily;

template <typename A, int D, int RD>
[[kernel]] void attention_prepare(
    const device A* qg [[buffer(0)]],
    const device A* k [[buffer(1)]],
    const device A* v [[buffer(2)]],
    const device A* q_norm [[buffer(3)]],
    const device A* k_norm [[buffer(4)]],
    const device float* inv_freq [[buffer(5)]],
    const device int* offset [[buffer(6)]],
    device A* q_out [[buffer(7)]],
    device A* k_cache [[buffer(8)]],
    device A* v_cache [[buffer(9)]],
    constant AttentionPrepParams& p [[buffer(10)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kLane = D / 32;    // values a lane
  constexpr int kPairs = RD / 64;  // rotary pairs a lane
  const int t = int(tg.x) * 4 + int(sg);
  const int batch = int(tg.z);
  if (t >= p.tokens) {
    return;
  }
  const size_t row = size_t(batch) * p.tokens + t;
  const bool is_q = int(tg.y) < p.q_heads;
  const bool is_k = !is_q && int(tg.y) < p.q_heads + p.kv_heads;
  const int head = int(tg.y) - (is_q ? 0 : is_k ? p.q_heads : p.q_heads + p.kv_heads);
  const size_t cache_row = (size_t(batch) * p.kv_heads + head) * p.capacity + p.first_row + t;
  const size_t kv_row = row * p.kv_heads + head;

  const device A* in = is_q ? qg + (row * p.q_heads + head) * 2 * D
                            : (is_k ? k : v) + kv_row * D;
  device A* out = is_q ? q_out + ((size_t(batch) * p.q_heads + head) * p.tokens + t) * D
                       : (is_k ? k_cache : v_cache) + cache_row * D;
  if (!is_q && !is_k) {
    for (int i = 0; i < kLane; ++i) {
      out[i * 32 + int(lane)] = in[i * 32 + int(lane)];
    }
    return;
  }

  float x[kLane];
  float sum = 0.0f;
  for (int i = 0; i < kLane; ++i) {
    x[i] = float(in[i * 32 + int(lane)]);
    sum = fma(x[i], x[i], sum);
  }
  const float scale = precise::rsqrt(simd_sum(sum) / float(D) + p.eps);
  const device A* weight = is_q ? q_norm : k_norm;
  for (int i = 0; i < kLane; ++i) {
    x[i] = x[i] * scale * float(weight[i * 32 + int(lane)]);
  }
  const float position = float(offset[batch * p.offset_stride] + t);
  for (int i = 0; i < kPairs; ++i) {
    const float angle = position * inv_freq[i * 32 + int(lane)];
    const float c = precise::cos(angle);
    const float s = precise::sin(angle);
    const float lo = x[i];
    const float hi = x[i + kPairs];
    x[i] = lo * c - hi * s;
    x[i + kPairs] = lo * s + hi * c;
  }
  for (int i = 0; i < kLane; ++i) {
    out[i * 32 + int(lane)] = A(x[i]);
  }
}
