// Gated DeltaNet, one row: convolution, SiLU, q/k norm, gates, delta update, gated norm.
//
// gated_delta_step: all of it, a threadgroup a value head. Convolution and SiLU of the head's 3 * 128
// channels; q^ = rnd(q / |q| / sqrt(128)), k^ = rnd(k / |k|), v^ = rnd(v);
// g = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b);
// S = g S; S += ((v^ - S k^) beta) k^T; y = S q^; out = rnd(norm(y) * weight * silu(z)).
// The value heads of a key head each do its convolution; the first writes its new conv rows.
//
// gated_delta_conv_step, gated_delta_delta_step, gated_delta_gated_norm: the same in three dispatches (ablation; the delta
// update may then be spread over several threadgroups a head).
//
// Layout of threads. A state row (one value channel, 128 fp32) belongs to 8 lanes, 16 values each,
// four rows a simdgroup: a load reads four whole 128-byte lines, a sum over the row is three
// shuffles. A simdgroup holds 32 / kGatedDeltaSimdgroups such sets of four rows in registers; all of its
// state is asked for before qkv is there. The state may be written where it is read: a threadgroup
// owns its rows. The conv state goes to another buffer.
//
// Bytes a value head: 128 KiB of state read and written; conv state 6 * 384 * 2 and conv weight 3
// KiB. 35B layer (32 heads): 4.2 MB, of which all but 0.1 MB is the state.
//
// Dk = Dv = 128, conv width 4, value heads a multiple of key heads.
#pragma once

#include "common.h"

namespace lily {

constant int kKeyHeads [[function_constant(40)]];
constant int kValueHeads [[function_constant(41)]];
constant int kGatedDeltaSimdgroups [[function_constant(42)]];  // a threadgroup: 8, 16 or 32
constant float kGatedDeltaEps [[function_constant(43)]];       // of the gated norm

constant constexpr int kHeadDim = 128;
constant constexpr float kQkEps = 1e-6f;

METAL_FUNC int conv_channels() {
  return (2 * kKeyHeads + kValueHeads) * kHeadDim;
}

// What the convolution of one channel needs beside its new row: older rows and the taps.
template <typename A>
struct ConvChannel {
  A x[3];
  A w[4];
};

template <typename A>
METAL_FUNC void load_conv(thread ConvChannel<A>& c, int channel, const device A* conv_state,
                          const device A* conv_weight) {
  for (int i = 0; i < 3; ++i) {
    c.x[i] = conv_state[i * conv_channels() + channel];
  }
  for (int i = 0; i < 4; ++i) {
    c.w[i] = conv_weight[channel * 4 + i];
  }
}

// Convolution and SiLU of one channel; writes its new conv rows when `owner`.
template <typename A>
METAL_FUNC float conv_channel(thread const ConvChannel<A>& c, int channel, bool owner,
                              const device A* qkv, device A* conv_state_out) {
  const int channels = conv_channels();
  const A x3 = qkv[channel];
  float sum = float(c.x[0]) * float(c.w[0]);
  sum = fma(float(c.x[1]), float(c.w[1]), sum);
  sum = fma(float(c.x[2]), float(c.w[2]), sum);
  sum = fma(float(x3), float(c.w[3]), sum);
  if (owner) {
    conv_state_out[channel] = c.x[1];
    conv_state_out[channels + channel] = c.x[2];
    conv_state_out[2 * channels + channel] = x3;
  }
  return silu(sum);
}

// 1 / sqrt(sum of squares + 1e-6) of 128 values in threadgroup memory, by one simdgroup.
METAL_FUNC float inverse_length(const threadgroup float4* x, uint lane) {
  const float4 v = x[lane];
  const float squares = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, v.w * v.w)));
  return precise::rsqrt(group_sum(squares, 32) + kQkEps);
}

template <typename A>
METAL_FUNC float4 round4(float4 v) {
  return float4(float(A(v.x)), float(A(v.y)), float(A(v.z)), float(A(v.w)));
}

METAL_FUNC float dot4(float4 a, float4 b, float sum) {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// g and beta of one value head.
METAL_FUNC float2 gated_delta_gates(float a, float b, float a_log, float dt_bias) {
  const float rate = precise::exp(a_log) * softplus(a + dt_bias);
  return float2(precise::exp(-rate), sigmoid(b));
}

// The part of a row's 128 values that a lane holds: 4 * i + 32 * j, i = lane % 8, j < 4.
struct RowPart {
  float4 v[4];
};

METAL_FUNC RowPart load_row_part(const device float* row, uint lane) {
  RowPart p;
  for (int j = 0; j < 4; ++j) {
    p.v[j] = ((const device float4*)row)[j * 8 + int(lane % 8)];
  }
  return p;
}

METAL_FUNC void store_row_part(device float* row, uint lane, thread const RowPart& p) {
  for (int j = 0; j < 4; ++j) {
    ((device float4*)row)[j * 8 + int(lane % 8)] = p.v[j];
  }
}

// Updates one row's part in place; returns y of the row, on each of its lanes.
METAL_FUNC float delta_row(thread RowPart& s, thread const RowPart& q, thread const RowPart& k,
                           float v, float g, float beta) {
  float m = 0.0f;
  for (int j = 0; j < 4; ++j) {
    s.v[j] = s.v[j] * g;
    m = dot4(s.v[j], k.v[j], m);
  }
  const float d = (v - group_sum(m, 8)) * beta;
  float y = 0.0f;
  for (int j = 0; j < 4; ++j) {
    s.v[j] = fma(float4(d), k.v[j], s.v[j]);
    y = dot4(s.v[j], q.v[j], y);
  }
  return group_sum(y, 8);
}

// The gated norm's factor of one head, 1 / rms(y), by one simdgroup.
METAL_FUNC float inverse_rms(float4 y, float eps) {
  const float squares = fma(y.x, y.x, fma(y.y, y.y, fma(y.z, y.z, y.w * y.w)));
  return precise::rsqrt(group_sum(squares, 32) / float(kHeadDim) + eps);
}

template <typename A, int SIMDGROUPS>
METAL_FUNC void gated_delta_step_body(const device A* qkv, const device A* z, const device A* b,
                              const device A* a, const device A* conv_state,
                              const device A* conv_weight, const device float* a_log,
                              const device A* dt_bias, const device A* norm_weight,
                              const device float* state, device A* conv_state_out,
                              device float* state_out, device A* out, threadgroup float4* x,
                              threadgroup float4* y, threadgroup float2* gates, int head, uint tid,
                              uint simdgroup, uint lane) {
  constexpr int kThreads = SIMDGROUPS * 32;
  constexpr int kBlocks = 32 / SIMDGROUPS;                             // of four rows a simdgroup
  constexpr int kChannels = (3 * kHeadDim + kThreads - 1) / kThreads;  // a thread
  const int ratio = kValueHeads / at_least_1(kKeyHeads);
  const int key_head = head / ratio;

  // All that the previous dispatch has no part in, before the wait: it comes from memory.
  RowPart s[kBlocks];
  for (int r = 0; r < kBlocks; ++r) {
    const int row = (r * SIMDGROUPS + int(simdgroup)) * 4 + int(lane / 8);
    s[r] = load_row_part(state + (head * kHeadDim + row) * kHeadDim, lane);
  }
  ConvChannel<A> conv[kChannels];
  int channel[kChannels];
  for (int c = 0; c < kChannels; ++c) {
    const int i = min(int(tid) + c * kThreads, 3 * kHeadDim - 1);
    const int first = i < kHeadDim       ? key_head
                      : i < 2 * kHeadDim ? kKeyHeads + key_head
                                         : 2 * kKeyHeads + head;
    channel[c] = first * kHeadDim + i % kHeadDim;
    load_conv(conv[c], channel[c], conv_state, conv_weight);
  }
  const A weight = norm_weight[tid % kHeadDim];
  const float head_a_log = a_log[head];
  const A head_dt_bias = dt_bias[head];
  issue_loads();
  wait_for_previous();
  const A zv = z[head * kHeadDim + int(tid) % kHeadDim];
  if (int(tid) == kThreads - 1) {
    gates[0] = gated_delta_gates(float(a[head]), float(b[head]), head_a_log, float(head_dt_bias));
  }
  for (int c = 0; c < kChannels; ++c) {
    const int i = int(tid) + c * kThreads;
    if (i < 3 * kHeadDim) {
      const bool owner = i >= 2 * kHeadDim || head % ratio == 0;
      ((threadgroup float*)x)[i] = conv_channel(conv[c], channel[c], owner, qkv, conv_state_out);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const float q_scale = inverse_length(x, lane);
  const float k_scale = inverse_length(x + 32, lane);
  RowPart q;
  RowPart k;
  for (int j = 0; j < 4; ++j) {
    q.v[j] = round4<A>(x[j * 8 + int(lane % 8)] * q_scale * precise::rsqrt(float(kHeadDim)));
    k.v[j] = round4<A>(x[32 + j * 8 + int(lane % 8)] * k_scale);
  }
  const float2 gate = gates[0];
  for (int r = 0; r < kBlocks; ++r) {
    const int row = (r * SIMDGROUPS + int(simdgroup)) * 4 + int(lane / 8);
    const float v = float(A(((const threadgroup float*)x)[2 * kHeadDim + row]));
    const float sum = delta_row(s[r], q, k, v, gate.x, gate.y);
    store_row_part(state_out + (head * kHeadDim + row) * kHeadDim, lane, s[r]);
    if (lane % 8 == 0) {
      ((threadgroup float*)y)[row] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (int(simdgroup) < kHeadDim / 32) {
    const float scale = inverse_rms(y[lane], kGatedDeltaEps);
    out[head * kHeadDim + int(tid)] =
        A(((const threadgroup float*)y)[tid] * scale * float(weight) * silu(float(zv)));
  }
}

template <typename A>
[[kernel]] void gated_delta_step(
    const device A* qkv [[buffer(0)]], const device A* z [[buffer(1)]],
    const device A* b [[buffer(2)]], const device A* a [[buffer(3)]],
    const device A* conv_state [[buffer(4)]], const device A* conv_weight [[buffer(5)]],
    const device float* a_log [[buffer(6)]], const device A* dt_bias [[buffer(7)]],
    const device A* norm_weight [[buffer(8)]], const device float* state [[buffer(9)]],
    device A* conv_state_out [[buffer(10)]], device float* state_out [[buffer(11)]],
    device A* out [[buffer(12)]], uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 x[3 * kHeadDim / 4];
  threadgroup float4 y[kHeadDim / 4];
  threadgroup float2 gates[1];
#define LILY_CASE(SIMDGROUPS)                                                                     \
  if (kGatedDeltaSimdgroups == SIMDGROUPS) {                                                             \
    gated_delta_step_body<A, SIMDGROUPS>(qkv, z, b, a, conv_state, conv_weight, a_log, dt_bias,           \
                                 norm_weight, state, conv_state_out, state_out, out, x, y, gates, \
                                 int(group.x), tid, simdgroup, lane);                             \
  }
  LILY_CASE(8)
  LILY_CASE(16)
  LILY_CASE(32)
#undef LILY_CASE
}

// Convolution, SiLU and q/k norm apart: a threadgroup of 128 threads a head of q, k and v; hat
// holds q^, k^, v^. Bytes: 16 a channel (four rows and four taps read, three rows written, one
// result).
template <typename A>
[[kernel]] void gated_delta_conv_step(const device A* qkv [[buffer(0)]],
                              const device A* conv_state [[buffer(1)]],
                              const device A* conv_weight [[buffer(2)]],
                              device A* conv_state_out [[buffer(3)]], device A* hat [[buffer(4)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint tid [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 x[kHeadDim / 4];
  const int head = int(group.x);
  const int channel = head * kHeadDim + int(tid);
  ConvChannel<A> conv;
  load_conv(conv, channel, conv_state, conv_weight);
  const float v = conv_channel(conv, channel, true, qkv, conv_state_out);
  ((threadgroup float*)x)[tid] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float scale = inverse_length(x, lane);
  const float q = v * scale * precise::rsqrt(float(kHeadDim));
  const float k = v * scale;
  hat[channel] = A(head < kKeyHeads ? q : head < 2 * kKeyHeads ? k : v);
}

// The delta update apart: grid (slabs, value heads), 4 * kGatedDeltaSimdgroups rows a threadgroup,
// kGatedDeltaSimdgroups dividing 32; y is fp32.
template <typename A>
[[kernel]] void gated_delta_delta_step(const device A* hat [[buffer(0)]], const device A* b [[buffer(1)]],
                               const device A* a [[buffer(2)]],
                               const device float* a_log [[buffer(3)]],
                               const device A* dt_bias [[buffer(4)]],
                               const device float* state [[buffer(5)]],
                               device float* state_out [[buffer(6)]], device float* y [[buffer(7)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  const int head = int(group.y);
  const int key_head = head / (kValueHeads / at_least_1(kKeyHeads));
  const int row = (int(group.x) * kGatedDeltaSimdgroups + int(simdgroup)) * 4 + int(lane / 8);
  RowPart s = load_row_part(state + (head * kHeadDim + row) * kHeadDim, lane);
  RowPart q;
  RowPart k;
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int c = j * 32 + int(lane % 8) * 4 + i;
      q.v[j][i] = float(hat[key_head * kHeadDim + c]);
      k.v[j][i] = float(hat[(kKeyHeads + key_head) * kHeadDim + c]);
    }
  }
  const float v = float(hat[(2 * kKeyHeads + head) * kHeadDim + row]);
  const float2 gate = gated_delta_gates(float(a[head]), float(b[head]), a_log[head], float(dt_bias[head]));
  const float sum = delta_row(s, q, k, v, gate.x, gate.y);
  store_row_part(state_out + (head * kHeadDim + row) * kHeadDim, lane, s);
  if (lane % 8 == 0) {
    y[head * kHeadDim + row] = sum;
  }
}

// The gated norm apart: a threadgroup of 128 threads a value head.
template <typename A>
[[kernel]] void gated_delta_gated_norm(const device float* y [[buffer(0)]], const device A* z [[buffer(1)]],
                               const device A* norm_weight [[buffer(2)]],
                               device A* out [[buffer(3)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint tid [[thread_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  const int first = int(group.x) * kHeadDim;
  const float scale = inverse_rms(((const device float4*)(y + first))[lane], kGatedDeltaEps);
  const int i = first + int(tid);
  out[i] = A(y[i] * scale * float(norm_weight[tid]) * silu(float(z[i])));
}

}  // namespace lily
