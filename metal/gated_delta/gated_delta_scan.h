// Gated DeltaNet over a prefill chunk: the scan with the state in registers.
//
// What it computes, for each batch row, value head and token, state S [Dv, Dk] fp32, Dk = Dv = 128:
//   S *= g;  d = (v - S k) * beta;  S += d k^T;  y = S q
// y comes as (g S) q + d (k . q), so that the three sums of a token (S k, S q, k . q) are reduced
// together. All products are explicit fma, so that a chunk gives the same bits in one piece and in
// several, and the three kernels below give the same state. A padded position has g = 1 and beta =
// 0 (see gated_delta_conv.h) and leaves the state as it is.
//
// Layout of threads. A simdgroup holds 4 R rows of S: eight lanes a row, a lane 16 of its 128
// values (k = 64 i + 8 part + c, so that loads of q and k are 16 bytes a lane), R rows a lane. A
// sum over Dk is three shuffles for four rows at once. The next token's q, k, v, g, beta are loaded
// before this one's use; in gated_delta_scan those of the next three before three tokens, since on NVIDIA a token
// takes less time than memory, and a simdgroup can wait for few loads apart.
//   gated_delta_scan        4 simdgroups; grid (Dv / (16 R), Hv, B); y fp32 to memory, normalised by
//                   gated_norm
//   gated_delta_scan_norm   a threadgroup a head, Dv / (4 R) simdgroups; y of a block of tokens is staged
//                   in threadgroup memory and leaves as rnd(y * rsqrt(mean y^2 + eps) * weight *
//                   silu(z))
//   gated_delta_scan_block  gated_delta_scan with q and k staged for 16 tokens in threadgroup memory (for
//                   comparison)
//   gated_norm      a simdgroup a row of 128
//
// Bytes a token and value head: q, k 512 (read by each of the threadgroups of a head, from cache),
// v 256, y 512; the state 128 KB once a chunk. Flops a token and head: 8 * 128 * 128.
#pragma once

#include "params.h"
#include "rows_common.h"

namespace lily {

constant constexpr int kGatedDeltaDim = 128;
constant constexpr int kGatedDeltaBlockTokens = 16;  // staged by gated_delta_scan_block
constant constexpr int kGatedDeltaAhead = 3;         // tokens that gated_delta_scan loads at once

// A token's operands as a lane needs them, not yet converted.
template <typename A, int R>
struct GatedDeltaToken {
  uint4 q[2];
  uint4 k[2];
  A v[R];
  float g;
  float beta;
};

template <typename A, int R>
struct GatedDeltaTokens {
  GatedDeltaToken<A, R> t[kGatedDeltaAhead];
};

// The lane's share of R rows of the state.
template <int R>
struct GatedDeltaRows {
  float4 s[R][4];
};

template <int R>
METAL_FUNC void gated_delta_load_state(const device float* state, int part, thread GatedDeltaRows<R>& rows) {
  for (int j = 0; j < R; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int k = (i / 2) * 64 + part * 8 + (i % 2) * 4;
      rows.s[j][i] = *(const device float4*)(state + j * 4 * kGatedDeltaDim + k);
    }
  }
}

template <int R>
METAL_FUNC void gated_delta_store_state(device float* state, int part, thread const GatedDeltaRows<R>& rows) {
  for (int j = 0; j < R; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int k = (i / 2) * 64 + part * 8 + (i % 2) * 4;
      *(device float4*)(state + j * 4 * kGatedDeltaDim + k) = rows.s[j][i];
    }
  }
}

METAL_FUNC float gated_delta_row_sum(float4 x) {
  float t = (x[0] + x[1]) + (x[2] + x[3]);
  t += simd_shuffle_xor(t, ushort(1));
  t += simd_shuffle_xor(t, ushort(2));
  return t + simd_shuffle_xor(t, ushort(4));
}

// One token; y[j] of the lane's rows is the same in the eight lanes of a row.
template <typename A, int R>
METAL_FUNC void gated_delta_step(
    thread GatedDeltaRows<R>& rows, thread const GatedDeltaToken<A, R>& x, thread float* y) {
  float4 q[4];
  float4 k[4];
  for (int i = 0; i < 2; ++i) {
    q[2 * i] = unpack4<A>(x.q[i][0], x.q[i][1]);
    q[2 * i + 1] = unpack4<A>(x.q[i][2], x.q[i][3]);
    k[2 * i] = unpack4<A>(x.k[i][0], x.k[i][1]);
    k[2 * i + 1] = unpack4<A>(x.k[i][2], x.k[i][3]);
  }
  float4 kq4 = k[0] * q[0];
  for (int i = 1; i < 4; ++i) {
    kq4 = fma(k[i], q[i], kq4);
  }
  const float kq = gated_delta_row_sum(kq4);
  for (int j = 0; j < R; ++j) {
    for (int i = 0; i < 4; ++i) {
      rows.s[j][i] *= x.g;
    }
    float4 m4 = rows.s[j][0] * k[0];
    float4 u4 = rows.s[j][0] * q[0];
    for (int i = 1; i < 4; ++i) {
      m4 = fma(rows.s[j][i], k[i], m4);
      u4 = fma(rows.s[j][i], q[i], u4);
    }
    const float m = gated_delta_row_sum(m4);
    const float u = gated_delta_row_sum(u4);
    const float d = (float(x.v[j]) - m) * x.beta;
    const float4 d4 = float4(d);
    for (int i = 0; i < 4; ++i) {
      rows.s[j][i] = fma(d4, k[i], rows.s[j][i]);
    }
    y[j] = fma(d, kq, u);
  }
}

// Where one (batch row, value head) reads: strides are the layouts [B, T, heads, 128] and [B, T,
// Hv].
template <typename A>
struct GatedDeltaStream {
  const device A* q;
  const device A* k;
  const device A* v;
  const device float* g;
  const device float* beta;
  int key_stride;
  int value_stride;
  int gate_stride;
};

template <typename A>
METAL_FUNC GatedDeltaStream<A> gated_delta_stream(
    const device A* q,
    const device A* k,
    const device A* v,
    const device float* g,
    const device float* beta,
    constant GatedDeltaParams& p,
    int batch,
    int head) {
  const size_t first = size_t(batch) * p.tokens;
  const int key_head = head / (p.value_heads / p.key_heads);
  GatedDeltaStream<A> x;
  x.key_stride = p.key_heads * kGatedDeltaDim;
  x.value_stride = p.value_heads * kGatedDeltaDim;
  x.gate_stride = p.value_heads;
  x.q = q + first * x.key_stride + key_head * kGatedDeltaDim;
  x.k = k + first * x.key_stride + key_head * kGatedDeltaDim;
  x.v = v + first * x.value_stride + head * kGatedDeltaDim;
  x.g = g + first * x.gate_stride + head;
  x.beta = beta + first * x.gate_stride + head;
  return x;
}

template <typename A, int R>
METAL_FUNC void gated_delta_load_values(
    thread const GatedDeltaStream<A>& x, int t, int row, thread GatedDeltaToken<A, R>& token) {
  for (int j = 0; j < R; ++j) {
    token.v[j] = x.v[size_t(t) * x.value_stride + row + 4 * j];
  }
  token.g = x.g[size_t(t) * x.gate_stride];
  token.beta = x.beta[size_t(t) * x.gate_stride];
}

template <typename A, int R>
METAL_FUNC void gated_delta_load_token(
    thread const GatedDeltaStream<A>& x, int t, int row, int part, thread GatedDeltaToken<A, R>& token) {
  const size_t at = size_t(t) * x.key_stride + part * 8;
  for (int i = 0; i < 2; ++i) {
    token.q[i] = *(const device uint4*)(x.q + at + 64 * i);
    token.k[i] = *(const device uint4*)(x.k + at + 64 * i);
  }
  gated_delta_load_values<A, R>(x, t, row, token);
}

// Tokens from `first` on; past the end, the last.
template <typename A, int R>
METAL_FUNC void gated_delta_load_tokens(
    thread const GatedDeltaStream<A>& x,
    int first,
    int count,
    int row,
    int part,
    thread GatedDeltaTokens<A, R>& tokens) {
#pragma clang loop unroll(full)
  for (int i = 0; i < kGatedDeltaAhead; ++i) {
    gated_delta_load_token<A, R>(x, min(first + i, count - 1), row, part, tokens.t[i]);
  }
}

// The lane with part == j stores row j, so that a simdgroup stores 4 R neighbouring values at once.
template <int R>
METAL_FUNC float gated_delta_pick(thread const float* y, int part) {
  float out = y[0];
  for (int j = 1; j < R; ++j) {
    out = part == j ? y[j] : out;
  }
  return out;
}

// rnd(y * rsqrt(mean y^2 + eps) * weight * silu(z)) for one row of 128, four values a lane.
template <typename A>
METAL_FUNC void gated_delta_norm_row(
    float4 y, const device A* z, const device A* weight, device A* out, float eps, uint lane) {
  const float4 square = y * y;
  const float mean = simd_sum((square[0] + square[1]) + (square[2] + square[3])) / float(kGatedDeltaDim);
  const float scale = precise::rsqrt(mean + eps);
  const float4 gate = load4(z + 4 * lane);
  const float4 w = load4(weight + 4 * lane);
  float4 r;
  for (int c = 0; c < 4; ++c) {
    r[c] = y[c] * scale * w[c] * silu(gate[c]);
  }
  store4(out + 4 * lane, r);
}

}  // namespace lily

using namespace lily;

template <typename A, int R>
[[kernel]] void gated_delta_scan(
    const device A* q [[buffer(0)]],
    const device A* k [[buffer(1)]],
    const device A* v [[buffer(2)]],
    const device float* g [[buffer(3)]],
    const device float* beta [[buffer(4)]],
    const device float* state_in [[buffer(5)]],
    device float* state_out [[buffer(6)]],
    device float* y [[buffer(7)]],
    constant GatedDeltaParams& p [[buffer(8)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int head = int(tg.y);
  const int batch = int(tg.z);
  const int part = int(lane) % 8;
  const int first = (int(tg.x) * 4 + int(sg)) * 4 * R;
  const int row = first + int(lane) / 8;
  const size_t at = ((size_t(batch) * p.value_heads + head) * kGatedDeltaDim + row) * kGatedDeltaDim;
  const GatedDeltaStream<A> x = gated_delta_stream(q, k, v, g, beta, p, batch, head);
  device float* y_head = y + (size_t(batch) * p.tokens * p.value_heads + head) * kGatedDeltaDim;

  GatedDeltaRows<R> rows;
  gated_delta_load_state<R>(state_in + at, part, rows);
  GatedDeltaTokens<A, R> next;
  gated_delta_load_tokens<A, R>(x, 0, p.tokens, row, part, next);
  for (int first_token = 0; first_token < p.tokens; first_token += kGatedDeltaAhead) {
    const GatedDeltaTokens<A, R> now = next;
    issue_loads();
    if (first_token + kGatedDeltaAhead < p.tokens) {
      gated_delta_load_tokens<A, R>(x, first_token + kGatedDeltaAhead, p.tokens, row, part, next);
    }
    issue_loads();
#pragma clang loop unroll(full)
    for (int i = 0; i < kGatedDeltaAhead; ++i) {
      const int t = first_token + i;
      if (t < p.tokens) {
        float out[R];
        gated_delta_step<A, R>(rows, now.t[i], out);
        if (part < R) {
          y_head[size_t(t) * x.value_stride + row + 4 * part] = gated_delta_pick<R>(out, part);
        }
      }
    }
  }
  gated_delta_store_state<R>(state_out + at, part, rows);
}

template <typename A, int R>
[[kernel]] void gated_delta_scan_norm(
    const device A* q [[buffer(0)]],
    const device A* k [[buffer(1)]],
    const device A* v [[buffer(2)]],
    const device float* g [[buffer(3)]],
    const device float* beta [[buffer(4)]],
    const device float* state_in [[buffer(5)]],
    device float* state_out [[buffer(6)]],
    const device A* z [[buffer(7)]],
    const device A* weight [[buffer(8)]],
    device A* out [[buffer(9)]],
    constant GatedDeltaParams& p [[buffer(10)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kTokens = kGatedDeltaDim / (4 * R);  // a block: one token a simdgroup at the norm
  threadgroup float staged[2][kTokens][kGatedDeltaDim];
  const int head = int(tg.x);
  const int batch = int(tg.y);
  const int part = int(lane) % 8;
  const int row = int(sg) * 4 * R + int(lane) / 8;
  const size_t at = ((size_t(batch) * p.value_heads + head) * kGatedDeltaDim + row) * kGatedDeltaDim;
  const GatedDeltaStream<A> x = gated_delta_stream(q, k, v, g, beta, p, batch, head);
  const size_t head_at = (size_t(batch) * p.tokens * p.value_heads + head) * kGatedDeltaDim;

  GatedDeltaRows<R> rows;
  gated_delta_load_state<R>(state_in + at, part, rows);
  GatedDeltaToken<A, R> token;
  gated_delta_load_token<A, R>(x, 0, row, part, token);
  for (int first = 0; first < p.tokens; first += kTokens) {
    const int half_block = (first / kTokens) % 2;
    const int n = min(kTokens, p.tokens - first);
    for (int i = 0; i < n; ++i) {
      const GatedDeltaToken<A, R> now = token;
      gated_delta_load_token<A, R>(x, min(first + i + 1, p.tokens - 1), row, part, token);
      float y[R];
      gated_delta_step<A, R>(rows, now, y);
      if (part < R) {
        staged[half_block][i][row + 4 * part] = gated_delta_pick<R>(y, part);
      }
    }
    // Two halves: the next block may be written while this one is read, so one barrier is enough.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(sg) < n) {
      const size_t o = head_at + size_t(first + int(sg)) * x.value_stride;
      float4 y4;
      for (int c = 0; c < 4; ++c) {
        y4[c] = staged[half_block][sg][4 * lane + c];
      }
      gated_delta_norm_row<A>(y4, z + o, weight, out + o, p.eps, lane);
    }
  }
  gated_delta_store_state<R>(state_out + at, part, rows);
}

template <typename A, int R>
[[kernel]] void gated_delta_scan_block(
    const device A* q [[buffer(0)]],
    const device A* k [[buffer(1)]],
    const device A* v [[buffer(2)]],
    const device float* g [[buffer(3)]],
    const device float* beta [[buffer(4)]],
    const device float* state_in [[buffer(5)]],
    device float* state_out [[buffer(6)]],
    device float* y [[buffer(7)]],
    constant GatedDeltaParams& p [[buffer(8)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kWords = kGatedDeltaDim / 8;  // 16-byte words a row
  threadgroup uint4 staged_q[kGatedDeltaBlockTokens * kWords];
  threadgroup uint4 staged_k[kGatedDeltaBlockTokens * kWords];
  const int head = int(tg.y);
  const int batch = int(tg.z);
  const int part = int(lane) % 8;
  const int row = (int(tg.x) * 4 + int(sg)) * 4 * R + int(lane) / 8;
  const size_t at = ((size_t(batch) * p.value_heads + head) * kGatedDeltaDim + row) * kGatedDeltaDim;
  const GatedDeltaStream<A> x = gated_delta_stream(q, k, v, g, beta, p, batch, head);
  device float* y_head = y + (size_t(batch) * p.tokens * p.value_heads + head) * kGatedDeltaDim;

  GatedDeltaRows<R> rows;
  gated_delta_load_state<R>(state_in + at, part, rows);
  for (int first = 0; first < p.tokens; first += kGatedDeltaBlockTokens) {
    const int n = min(kGatedDeltaBlockTokens, p.tokens - first);
    for (int i = int(tid); i < n * kWords; i += 128) {
      const size_t o = size_t(first + i / kWords) * x.key_stride + (i % kWords) * 8;
      staged_q[i] = *(const device uint4*)(x.q + o);
      staged_k[i] = *(const device uint4*)(x.k + o);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < n; ++i) {
      GatedDeltaToken<A, R> token;
      for (int h = 0; h < 2; ++h) {
        token.q[h] = staged_q[i * kWords + 8 * h + part];
        token.k[h] = staged_k[i * kWords + 8 * h + part];
      }
      gated_delta_load_values<A, R>(x, first + i, row, token);
      float out[R];
      gated_delta_step<A, R>(rows, token, out);
      if (part < R) {
        y_head[size_t(first + i) * x.value_stride + row + 4 * part] = gated_delta_pick<R>(out, part);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  gated_delta_store_state<R>(state_out + at, part, rows);
}

// y, z, out [rows, 128]; four rows a threadgroup of 128 threads.
template <typename A>
[[kernel]] void gated_norm(
    const device float* y [[buffer(0)]],
    const device A* z [[buffer(1)]],
    const device A* weight [[buffer(2)]],
    device A* out [[buffer(3)]],
    constant int& rows [[buffer(4)]],
    constant float& eps [[buffer(5)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int row = int(tg.x) * 4 + int(sg);
  if (row < rows) {
    const size_t o = size_t(row) * kGatedDeltaDim;
    const float4 y4 = *(const device float4*)(y + o + 4 * lane);
    gated_delta_norm_row<A>(y4, z + o, weight, out + o, eps, lane);
  }
}
