"""Gated DeltaNet: the convolution, the gates, the recurrence, the gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .numbers import F64, Dtype, head_norm, sigmoid, silu, softplus


@dataclass
class GatedDeltaShape:
    """Heads and head sizes of a Gated DeltaNet layer; channels are [q | k | v heads]."""

    key_heads: int
    value_heads: int
    dk: int = 128
    dv: int = 128

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dk + self.value_heads * self.dv


def _convolve(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """SiLU of the width-4 convolution: rows [..., T + 3, C], weight [C, 4] -> [..., T, C]."""
    tokens = rows.shape[-2] - 3
    rows = rows.astype(F64)
    return silu(sum(rows[..., i : i + tokens, :] * weight[:, i] for i in range(4)))


def gated_delta_conv(
    qkv: np.ndarray, conv_state: np.ndarray, conv_weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(SiLU of the width-4 convolution [C], new conv state [3, C])."""
    rows = np.concatenate([conv_state, qkv[None]])
    return _convolve(rows, conv_weight)[0], rows[1:].astype(np.float32)


def gated_delta_split(
    conv: np.ndarray, s: GatedDeltaShape, a: Dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounded q^ [..., Hk, Dk], k^ [..., Hk, Dk], v^ [..., Hv, Dv]."""
    n, lead = s.key_heads * s.dk, conv.shape[:-1]
    q = conv[..., :n].reshape(*lead, s.key_heads, s.dk)
    k = conv[..., n : 2 * n].reshape(*lead, s.key_heads, s.dk)
    v = conv[..., 2 * n :].reshape(*lead, s.value_heads, s.dv)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * s.dk**-0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    return a.rnd(q), a.rnd(k), a.rnd(v)


def gated_delta_gates(
    av: np.ndarray, bv: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(decay g, beta) of each value head."""
    return np.exp(-np.exp(a_log.astype(F64)) * softplus(av.astype(F64) + dt_bias)), sigmoid(bv)


def gated_delta_conv_rows(
    qkv: np.ndarray,
    conv_state: np.ndarray,
    weight: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    mask: np.ndarray | None,
    lengths: np.ndarray | None,
    shape: GatedDeltaShape,
    dtype: Dtype,
) -> tuple[np.ndarray, ...]:
    """The operands of many rows: qkv [B, T, C], conv_state [B, 3, C], a, b [B, T, Hv].

    mask [B, T] bool or None, lengths [B] or None. Returns q^, k^, v^ [B, T, heads, 128], g, beta
    [B, T, Hv] and the new conv state.
    """
    batch, tokens, _ = qkv.shape
    if mask is not None:
        qkv = np.where(mask[..., None], qkv, 0)
    rows = np.concatenate([conv_state, qkv], 1)
    g, beta = gated_delta_gates(a, b, a_log, dt_bias)
    if mask is not None:
        g, beta = np.where(mask[..., None], g, 1.0), np.where(mask[..., None], beta, 0.0)
    ends = np.full(batch, tokens) if lengths is None else np.clip(lengths, 0, tokens)
    state = np.stack([rows[i, e : e + 3] for i, e in enumerate(ends)])
    return *gated_delta_split(_convolve(rows, weight), shape, dtype), g, beta, state


def gated_delta_delta(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    s: GatedDeltaShape,
) -> tuple[np.ndarray, np.ndarray]:
    """(y [..., Hv, Dv], new state [..., Hv, Dv, Dk]) of one token."""
    share = s.value_heads // s.key_heads
    q, k = (np.repeat(x.astype(F64), share, axis=-2) for x in (q, k))
    state = state.astype(F64) * g[..., None, None]
    d = (v - np.einsum("...hvk,...hk->...hv", state, k)) * beta[..., None]
    state = state + d[..., :, None] * k[..., None, :]
    return np.einsum("...hvk,...hk->...hv", state, q), state


def gated_delta(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    s: GatedDeltaShape,
) -> tuple[np.ndarray, np.ndarray]:
    """y [B, T, Hv, D] and the new state of the tokens in their order.

    q, k [B, T, Hk, D], v [B, T, Hv, D], g, beta [B, T, Hv], state [B, Hv, D, D].
    """
    y = np.zeros(v.shape)
    for t in range(v.shape[1]):
        token = (x[:, t] for x in (q, k, v, g, beta))
        y[:, t], state = gated_delta_delta(*token, state, s)
    return y, state


def gated_delta_gated_norm(
    y: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float
) -> np.ndarray:
    """norm(y) * weight * silu(z), unrounded."""
    return head_norm(y, weight, eps) * silu(z)
