// The layer primitives: lazy MLX ops over any batch and length. lily_mlx/ops.py documents each for
// users.
#pragma once

#include <optional>
#include <vector>

#include "primitives/common.h"
#include "reference/ops.h"

namespace lily {

// rnd(x * rsqrt(mean(x^2) + eps) * weight) over the last axis.
mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps,
                   mx::StreamOrDevice s = {});

// x W^T for each weight, all in one dispatch; outputs have x's dtype, or float32.
std::vector<mx::array> project(const mx::array& x, const std::vector<Weight>& weights,
                               bool float32_out, mx::StreamOrDevice s = {});

// Rows of an embedding, dequantized to `dtype`.
mx::array embed(const mx::array& ids, const Weight& weight, mx::Dtype dtype,
                mx::StreamOrDevice s = {});

// Returns {out [B, T, Hv * Dv], conv_state [B, width - 1, channels], state [B, Hv, Dv, Dk]}.
std::vector<mx::array> gated_delta(
    const mx::array& qkv, const mx::array& z, const mx::array& b, const mx::array& a,
    const mx::array& conv_weight, const mx::array& A_log, const mx::array& dt_bias,
    const mx::array& norm_weight, float eps, int key_heads, int value_heads, int key_dim,
    int value_dim, const std::optional<mx::array>& conv_state,
    const std::optional<mx::array>& state, const std::optional<mx::array>& mask,
    const std::optional<mx::array>& lengths, mx::StreamOrDevice s = {});

// Returns {q [B, H, T, D], k [B, Hkv, T, D]}: normed and turned. offset: [1] or [B] int32.
std::vector<mx::array> attention_prepare(const mx::array& q_gate, const mx::array& k,
                                         const mx::array& q_norm, const mx::array& k_norm,
                                         const mx::array& offset, int heads, int kv_heads,
                                         int rotary, float base, float eps,
                                         mx::StreamOrDevice s = {});

// Returns [B, T, H * D] = softmax(q k^T D^-0.5) v * sigmoid(gate).
mx::array attend(const mx::array& q, const mx::array& keys, const mx::array& values,
                 const mx::array& q_gate, const std::optional<mx::array>& mask, bool causal,
                 mx::StreamOrDevice s = {});

using MoeLayer = Moe<Weights>;
// Throws unless the shapes fit each other and `hidden`.
void check(const MoeLayer& layer, int hidden);

// x [..., hidden] -> y of the same shape and dtype.
// logits and shared_logit: in place of the routers' products, float32, on a GPU.
mx::array moe(const mx::array& x, const MoeLayer& layer,
              const std::optional<mx::array>& logits = std::nullopt,
              const std::optional<mx::array>& shared_logit = std::nullopt,
              mx::StreamOrDevice s = {});

}  // namespace lily
