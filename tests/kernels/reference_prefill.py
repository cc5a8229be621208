"""Numpy reference of the prefill kernels, one function a kernel family.

Arrays are fp32 values (already representable in the activation type where that matters); `rnd` is
the rounding to the activation type. Sums run in float64: a kernel is judged on the exact result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Round = Callable[[np.ndarray], np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64) * sigmoid(x)


def route(logits: np.ndarray, top_k: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] -> ids [T, k] by descending probability (ties: lowest id), weights [T, k]."""
    x = logits.astype(np.float64)
    e = np.exp(x - x.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :top_k]
    w = np.take_along_axis(p, ids, 1)
    if renormalise:
        w = w / w.sum(1, keepdims=True)
    return ids, w


def sort_by_expert(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [T, k] -> order [T * k] of assignments by expert then (token, slot), offsets [E + 1]."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    return order, np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))])


def block_map(offsets: np.ndarray, block_rows: int, max_blocks: int) -> np.ndarray:
    """[max_blocks, 2] uint32 (expert, first sorted row), 0xffffffff past the last block."""
    out = [
        (e, r)
        for e in range(len(offsets) - 1)
        for r in range(offsets[e], offsets[e + 1], block_rows)
    ]
    out += [(0xFFFFFFFF, 0)] * (max_blocks - len(out))
    return np.array(out, np.uint32)


def gated_delta(q, k, v, g, beta, state):
    """DeltaNet recurrence. q, k [B, T, Hk, D], v [B, T, Hv, D], g, beta [B, T, Hv].

    state [B, Hv, D, D]. Returns y [B, T, Hv, D] and the new state, float64.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    s = np.array(state, np.float64)
    share = v.shape[2] // k.shape[2]
    y = np.zeros(v.shape)
    for t in range(v.shape[1]):
        kt, qt = (np.repeat(x[:, t], share, axis=1) for x in (k, q))
        s *= g[:, t, :, None, None]
        d = (v[:, t] - np.einsum("bhvk,bhk->bhv", s, kt)) * beta[:, t, :, None]
        s += d[..., None] * kt[:, :, None]
        y[:, t] = np.einsum("bhvk,bhk->bhv", s, qt)
    return y, s


def gated_norm(y, z, weight, eps: float, rnd: Round) -> np.ndarray:
    """y, z [..., D], weight [D] -> rnd(y * rsqrt(mean y^2 + eps) * weight * silu(z))."""
    y = np.asarray(y, np.float64)
    return rnd(y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * weight * silu(z))


def conv_prefill(qkv, conv_state, weight, a, b, a_log, dt_bias, mask, lengths, hk: int, rnd: Round):
    """DeltaNet's operands. qkv [B, T, C], conv_state [B, 3, C], weight [C, 4], a, b [B, T, Hv].

    mask [B, T] bool or None, lengths [B] or None. Returns q^, k^, v^ [B, T, heads, 128], g, beta
    [B, T, Hv] and the new conv state.
    """
    batch, tokens, channels = qkv.shape
    if mask is not None:
        qkv = np.where(mask[..., None], qkv, 0)
    rows = np.concatenate([conv_state, qkv], 1).astype(np.float64)
    x = silu(sum(rows[:, i : i + tokens] * weight[:, i] for i in range(4)))
    q, k, v = np.split(x.reshape(batch, tokens, channels // 128, 128), [hk, 2 * hk], 2)

    def unit(y):
        return y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)

    rate = np.exp(np.float64(a_log)) * np.logaddexp(0.0, np.float64(a) + dt_bias)
    g, beta = np.exp(-rate), sigmoid(b)
    if mask is not None:
        g = np.where(mask[..., None], g, 1.0)
        beta = np.where(mask[..., None], beta, 0.0)
    ends = np.full(batch, tokens) if lengths is None else np.clip(lengths, 0, tokens)
    state = np.stack([rows[i, e : e + 3] for i, e in enumerate(ends)])
    return rnd(unit(q) * 128**-0.5), rnd(unit(k)), rnd(v), g, beta, state


def rms_norm(h, weight, eps: float) -> np.ndarray:
    h = np.asarray(h, np.float64)
    return h / np.sqrt((h**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x, inv_freq, positions) -> np.ndarray:
    """Non-traditional rotary embedding of x [..., T, heads, D]; positions [..., T]."""
    n = len(inv_freq)
    angle = np.float32(positions)[..., None] * np.float32(inv_freq)
    c, s = (f(np.float64(angle))[..., None, :] for f in (np.cos, np.sin))
    lo, hi, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([lo * c - hi * s, lo * s + hi * c, rest], -1)


def combine(down, weights, shared_down, shared_gate, h, rnd: Round) -> np.ndarray:
    """down [T, k, H], weights [T, k], shared_gate [T]; shared_down and h [T, H] or None."""
    y = (np.float64(weights)[..., None] * down).sum(1)
    if shared_down is not None:
        y = y + sigmoid(shared_gate)[:, None] * shared_down
    return rnd(y) if h is None else rnd(h + rnd(y))


def experts(x, ids, gate, up, down, rnd: Round):
    """x [T, H], ids [T, k], gate, up [E, W, H], down [E, H, W].

    Returns act [T, k, W] (rounded) and the down products [T, k, H] of the rounded act.
    """
    x = np.asarray(x, np.float64)
    act = silu(np.einsum("tkwh,th->tkw", gate[ids], x)) * np.einsum("tkwh,th->tkw", up[ids], x)
    act = rnd(act)
    return act, np.einsum("tkhw,tkw->tkh", down[ids].astype(np.float64), act)
