"""lily's primitives as functions on mx.arrays: lazy, any batch, any length, on MLX's streams.

Sums, gates and states are float32; a result is rounded to the dtype of its inputs once. A row's
result does not depend on what else is computed with it, so chunks, single steps and one pass
agree bit for bit on the CPU. Gradients are refused: call `model.train()` to run the stock ops.
"""

from __future__ import annotations

import mlx.core as mx

from lily_mlx import _ext

Weight = _ext.Weight
MoeLayer = _ext.MoeLayer


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
        x: [..., dim], float32, float16 or bfloat16.
        weight: [dim].
        eps: added to the mean of squares.

    Returns:
        An array of x's shape and dtype.

    Raises:
        ValueError: shapes that do not fit, or another dtype.
    """
    return _ext.rms_norm(x, weight, eps)


def project(x: mx.array, weights: list[Weight], float32_out: bool = False) -> list[mx.array]:
    """x W^T for several weights at once.

    Args:
        x: [..., cols].
        weights: each [rows, cols]; plain, or affine codes of 4, 6 or 8 bits in groups of 32,
            64 or 128 columns. Dequantized as scale * code + bias in float32.
        float32_out: return the float32 sums instead of rounding them to x's dtype.

    Returns:
        For each weight, [..., rows].

    Raises:
        ValueError: a weight whose columns are not x's.
    """
    return _ext.project(x, weights, float32_out)


def embed(ids: mx.array, weight: Weight, dtype: mx.Dtype) -> mx.array:
    """Rows of an embedding.

    Args:
        ids: [...] whole numbers below the vocabulary's size.
        weight: [vocabulary, dim].
        dtype: of the result.

    Returns:
        [..., dim].
    """
    return _ext.embed(ids, weight, dtype)


def gated_delta(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv_weight: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    eps: float,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_state: mx.array | None = None,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The Gated DeltaNet mixer between its input and output projections.

    A causal depthwise convolution with SiLU; q and k divided by their lengths (q also by
    sqrt(key_dim)); then for each value head and token, with g = exp(-exp(A_log) *
    softplus(a + dt_bias)) and beta = sigmoid(b), the gated delta rule of Yang et al., "Gated
    Delta Networks" (2024):

        S = g S;  d = beta (v - S k);  S = S + d k^T;  y = S q

    and y * rsqrt(mean(y^2) + eps) * norm_weight * silu(z).

    Args:
        qkv: [B, T, channels], channels ordered q heads, k heads, v heads.
        z: [B, T, value_heads * value_dim].
        b, a: [B, T, value_heads].
        conv_weight: [channels, width, 1].
        A_log, dt_bias: [value_heads].
        norm_weight: [value_dim].
        conv_state: [B, width - 1, channels], the raw rows before qkv; None for zeros.
        state: [B, value_heads, value_dim, key_dim] float32; None for zeros.
        mask: [B, T] bool, False where a row is padding: it counts as zeros and leaves the state.
        lengths: [B], the rows in use; the new conv state ends there.

    Returns:
        (out [B, T, value_heads * value_dim], conv_state, state).

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return tuple(
        _ext.gated_delta(
            qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight, eps,
            key_heads, value_heads, key_dim, value_dim, conv_state, state, mask, lengths,
        )
    )  # fmt: skip


def attention_prepare(
    q_gate: mx.array,
    k: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    offset: mx.array | int,
    *,
    heads: int,
    kv_heads: int,
    rotary: int,
    base: float,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """RMS norm of q and k over head_dim, then rotary embedding of the first `rotary` dims.

    Args:
        q_gate: [B, T, heads * 2 * head_dim]: for each head its query, then its gate.
        k: [B, T, kv_heads * head_dim].
        q_norm, k_norm: [head_dim].
        offset: the position of the first row, one for all or [B].
        rotary: dims turned, in pairs (i, i + rotary / 2), by position * base^(-2i / rotary).

    Returns:
        (q [B, heads, T, head_dim], k [B, kv_heads, T, head_dim]).
    """
    if not isinstance(offset, mx.array):
        offset = mx.array([offset], mx.int32)
    return tuple(
        _ext.attention_prepare(
            q_gate, k, q_norm, k_norm, offset, heads, kv_heads, rotary, base, eps
        )
    )


def attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    q_gate: mx.array,
    mask: mx.array | None = None,
    causal: bool = False,
) -> mx.array:
    """softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate), grouped-query.

    Args:
        q: [B, heads, T, head_dim].
        keys, values: [B, kv_heads, L, head_dim], contiguous along head_dim.
        q_gate: as in `attention_prepare`; its gates are used.
        mask: bool, broadcastable to [B, 1, T, L], True where a key is seen.
        causal: row t sees the keys up to L - T + t.

    Returns:
        [B, T, heads * head_dim]. A row that sees no key is zero.
    """
    return _ext.attend(q, keys, values, q_gate, mask, causal)


def moe(x: mx.array, layer: MoeLayer) -> mx.array:
    """The sparse MoE block: router, top-k experts with SwiGLU, shared expert, combination.

    The router's softmax is float32 over all experts; of equal probabilities the lowest expert
    goes first. The experts' results are added in the order of falling probability, then the
    shared expert's times sigmoid(shared_expert_gate x).

    Args:
        x: [..., hidden].
        layer: the weights, top_k, and whether the kept probabilities are divided by their sum.

    Returns:
        An array of x's shape and dtype.
    """
    return _ext.moe(x, layer)
