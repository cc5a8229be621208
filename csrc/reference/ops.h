// The CPU reference of every primitive: plain and threaded. Sums, gates and states are fp32; rnd()
// marks where a value is rounded to the activation dtype. Rows are computed independently and each
// in one fixed order, so a result does not depend on how many rows, chunks or threads took part.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/types.h"

namespace lily::reference {

// out = rnd(x * rsqrt(mean(x^2) + eps) * weight), rows of `dim`.
void rms_norm(Type t, const void* x, Type weight_type, const void* weight, float eps, int64_t rows,
              int dim, void* out);

// One product of a set that shares x: y [rows, m.rows] of type `out`, leading dimension ldy.
struct Product {
  Matrix m;
  Type out = Type::fp32;
  void* y = nullptr;
  int64_t ldy = 0;
};

// y = x W^T for each product; x [rows, cols] of type t, leading dimension ldx.
void project(const std::vector<Product>& products, Type t, const void* x, int64_t ldx, int rows);

// out[i] = rnd(row ids[i] of m), each of m.cols elements of type t.
void embed(const Matrix& m, Type t, const uint32_t* ids, int64_t count, void* out);

// out = rnd(a + b).
void add(Type t, const void* a, const void* b, int64_t n, void* out);

struct DeltaShape {
  Type t;
  int B, T, Hk, Hv, Dk, Dv;
  int width;  // of the convolution
  float eps;  // of the gated norm
  int channels() const {
    return 2 * Hk * Dk + Hv * Dv;
  }
};

struct DeltaWeights {
  Type conv_type;
  const void* conv;  // [channels, width]
  Type A_log_type;
  const void* A_log;  // [Hv]
  Type dt_bias_type;
  const void* dt_bias;  // [Hv]
  Type norm_type;
  const void* norm;  // [Dv]
};

struct DeltaInputs {
  const void* qkv;                   // [B, T, channels]
  const void* z;                     // [B, T, Hv, Dv]
  const void* b;                     // [B, T, Hv]
  const void* a;                     // [B, T, Hv]
  const bool* mask = nullptr;        // [B, T], false = padding
  const int32_t* lengths = nullptr;  // [B]: the conv state ends at min(max(length, 0), T)
  const void* conv_state = nullptr;  // [B, width - 1, channels], null = zeros
  const float* state = nullptr;      // [B, Hv, Dv, Dk], null = zeros
};

// conv + SiLU + q/k norm + gates + delta rule + gated norm. state may be updated in place;
// conv_state may not.
void gated_delta(const DeltaShape& s, const DeltaWeights& w, const DeltaInputs& in,
                 void* conv_state, float* state, void* out);

struct AttentionShape {
  Type t;
  int B, T, H, Hkv, D;
  int rotary;      // dims turned
  float base;      // of the rotary frequencies
  float eps;       // of the q and k norms
  Type norm_type;  // of q_norm, k_norm
};

// From projections q_gate [B, T, H, 2, D] and k [B, T, Hkv, D]: normed and turned q [B, H, T, D]
// and k, the latter to keys + (b * Hkv + h) * head_stride + (t) * D. offsets [B] are the positions
// of the first row.
void attention_prepare(const AttentionShape& s, const void* q_gate, const void* k,
                       const void* q_norm, const void* k_norm, const int32_t* offsets, void* q,
                       void* keys, int64_t key_head_stride);

// Strides in elements; the last axis is contiguous.
struct KeyValues {
  const void* keys;
  const void* values;
  int64_t key_batch, key_head, key_row;
  int64_t value_batch, value_head, value_row;
  int L;
};

// mask [B or 1, 1, T, L] with strides in elements, or null; causal: row t sees keys 0 .. L - T + t.
struct Mask {
  const bool* data = nullptr;
  int64_t batch = 0, row = 0;
  bool causal = false;
};

// out [B, T, H, D] = rnd(softmax(q k^T * D^-0.5) v * sigmoid(gate)); gate: the second half of
// q_gate rows.
void attend(const AttentionShape& s, const void* q, const KeyValues& kv, const Mask& mask,
            const void* q_gate, void* out);

struct MoeWeights {
  Type t;  // activations
  Matrix router;
  Matrix gate, up, down;  // [experts, ...]
  Matrix shared_gate, shared_up, shared_down, shared_router;
  int top_k;
  bool normalize;
};

// x, y [rows, hidden] of type t. With `experts` ([rows, top_k]) the chosen ids are also written.
void moe(const MoeWeights& w, const void* x, int rows, void* y, uint32_t* experts = nullptr);

// The lowest id of the largest value; NaN counts as the largest, as in mx.argmax.
uint32_t argmax(const float* x, int64_t n);

}  // namespace lily::reference
