// What stands between the input projections of Gated DeltaNet and its scan, for a prefill chunk.
//
// What it computes. Depthwise convolution of width 4 over [conv_state (3 rows) | qkv], SiLU, and
// for the q and k heads the l2 norm, all fp32, rounded to A once:
//   q^ = rnd(q * rsqrt(sum q^2 + 1e-6) * Dk^-0.5), k^ = rnd(k * rsqrt(sum k^2 + 1e-6)), v^ =
//   rnd(v).
// Gates: g = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b), fp32. The new conv state:
// the last three raw rows, ending at the row's `lengths` entry where there is one. A padded
// position (mask 0) has a qkv row of zeros, g = 1 and beta = 0, which leaves the state as it is.
// Channels are ordered [q heads | k heads | v heads], 128 a head.
//
// Layout of threads. Grid (ceil(T / 32) + 1, 2 Hk + Hv + 1, B), 128 threads. A simdgroup takes one
// head for eight tokens, a lane four channels, the window of three rows in registers, so that a row
// is read once and a halo of three once in eight. The last column of the grid writes the conv
// state, the last row the gates. conv_state_out must not overlap conv_state.
//
// Bytes: 11/8 of qkv read, qkv written, gates 12 Hv a token. Flops: 2 * 4 * C a token.
#pragma once

#include "params.h"
#include "rows_common.h"

namespace lily {

constant constexpr int kConvDim = 128;     // channels a head
constant constexpr int kConvRun = 8;       // tokens a simdgroup
constant constexpr int kConvTokens = 32;   // tokens a threadgroup
constant constexpr float kL2Eps = 1e-6f;

METAL_FUNC bool conv_visible(const device uchar* mask, constant ConvParams& p, int batch, int t) {
  return p.has_mask == 0 || mask[batch * p.tokens + t] != 0;
}

// Row t of [conv_state | qkv], t >= -3, four channels from `channel`.
template <typename A>
METAL_FUNC float4 conv_row(
    const device A* qkv,
    const device A* state,
    const device uchar* mask,
    constant ConvParams& p,
    int batch,
    int t,
    int channel,
    int channels) {
  if (t < 0) {
    return load4(state + size_t(batch * 3 + 3 + t) * channels + channel);
  }
  if (!conv_visible(mask, p, batch, t)) {
    return float4(0.0f);
  }
  return load4(qkv + (size_t(batch) * p.tokens + t) * channels + channel);
}

// One head for the tokens [first, last).
template <typename A>
METAL_FUNC void conv_head(
    const device A* qkv,
    const device A* state,
    const device A* weight,
    const device uchar* mask,
    device A* q,
    device A* k,
    device A* v,
    constant ConvParams& p,
    int batch,
    int head,
    int first,
    int last,
    uint lane) {
  const int channels = (2 * p.key_heads + p.value_heads) * kConvDim;
  const int channel = head * kConvDim + int(lane) * 4;
  float4 taps[4];  // taps[i][c] = weight of row t - 3 + i for channel c
  for (int c = 0; c < 4; ++c) {
    const float4 w = load4(weight + size_t(channel + c) * 4);
    for (int i = 0; i < 4; ++i) {
      taps[i][c] = w[i];
    }
  }
  const bool is_q = head < p.key_heads;
  const bool is_k = !is_q && head < 2 * p.key_heads;
  device A* out = is_q ? q : is_k ? k : v;
  const int heads = is_q || is_k ? p.key_heads : p.value_heads;
  const int local_head = is_q ? head : is_k ? head - p.key_heads : head - 2 * p.key_heads;

  float4 window[3];
  for (int i = 0; i < 3; ++i) {
    window[i] = conv_row(qkv, state, mask, p, batch, first - 3 + i, channel, channels);
  }
  for (int t = first; t < last; ++t) {
    const float4 row = conv_row(qkv, state, mask, p, batch, t, channel, channels);
    float4 x = window[0] * taps[0];
    x = fma(window[1], taps[1], x);
    x = fma(window[2], taps[2], x);
    x = fma(row, taps[3], x);
    window[0] = window[1];
    window[1] = window[2];
    window[2] = row;
    for (int c = 0; c < 4; ++c) {
      x[c] = silu(x[c]);
    }
    if (is_q || is_k) {
      const float4 square = x * x;
      const float sum = simd_sum((square[0] + square[1]) + (square[2] + square[3]));
      float scale = precise::rsqrt(sum + kL2Eps);
      if (is_q) {
        scale *= precise::rsqrt(float(kConvDim));
      }
      x *= scale;
    }
    const size_t row_out = (size_t(batch) * p.tokens + t) * heads + local_head;
    store4(out + row_out * kConvDim + 4 * lane, x);
  }
}

}  // namespace lily

using namespace lily;

template <typename A>
[[kernel]] void gated_delta_conv_rows(
    const device A* qkv [[buffer(0)]],
    const device A* conv_state [[buffer(1)]],
    const device A* weight [[buffer(2)]],
    const device A* a [[buffer(3)]],
    const device A* b [[buffer(4)]],
    const device float* a_log [[buffer(5)]],
    const device A* dt_bias [[buffer(6)]],
    const device uchar* mask [[buffer(7)]],
    const device int* lengths [[buffer(8)]],
    device A* q [[buffer(9)]],
    device A* k [[buffer(10)]],
    device A* v [[buffer(11)]],
    device float* g [[buffer(12)]],
    device float* beta [[buffer(13)]],
    device A* conv_state_out [[buffer(14)]],
    constant ConvParams& p [[buffer(15)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int batch = int(tg.z);
  const int head = int(tg.y);
  const int heads = 2 * p.key_heads + p.value_heads;
  const bool last_column = tg.x == groups.x - 1;

  if (head == heads) {
    if (last_column) {
      return;
    }
    const int first = int(tg.x) * kConvTokens;
    const int n = min(kConvTokens, p.tokens - first) * p.value_heads;
    for (int i = int(tid); i < n; i += 128) {
      const int t = first + i / p.value_heads;
      const int h = i % p.value_heads;
      const size_t at = (size_t(batch) * p.tokens + t) * p.value_heads + h;
      const bool visible = conv_visible(mask, p, batch, t);
      const float rate = precise::exp(a_log[h]) * softplus(float(a[at]) + float(dt_bias[h]));
      g[at] = visible ? precise::exp(-rate) : 1.0f;
      beta[at] = visible ? sigmoid(float(b[at])) : 0.0f;
    }
    return;
  }

  if (last_column) {
    const int channels = heads * kConvDim;
    const int channel = head * kConvDim + int(lane) * 4;
    const int end = p.has_lengths != 0 ? clamp(lengths[batch], 0, p.tokens) : p.tokens;
    const int i = int(sg);
    if (i < 3) {
      const float4 row =
          conv_row(qkv, conv_state, mask, p, batch, end - 3 + i, channel, channels);
      store4(conv_state_out + size_t(batch * 3 + i) * channels + channel, row);
    }
    return;
  }

  const int first = int(tg.x) * kConvTokens + int(sg) * kConvRun;
  const int last = min(first + kConvRun, p.tokens);
  if (first < last) {
    conv_head(
        qkv, conv_state, weight, mask, q, k, v, p, batch, head, first, last, lane);
  }
}
