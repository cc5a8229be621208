"""Numpy reference of the prefill kernels, one function a kernel family.

Arrays are fp32 values (already representable in the activation type where that matters); `rnd` is the
rounding to the activation type. Sums run in float64, so a kernel is judged against the exact result.
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
    """logits [T, E] fp32 -> ids [T, k] by descending probability (ties: lowest id), weights [T, k]."""
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
    """[max_blocks, 2] uint32 (expert, first sorted row), sentinel 0xffffffff past the last block."""
    out = [
        (e, r)
        for e in range(len(offsets) - 1)
        for r in range(offsets[e], offsets[e + 1], block_rows)
    ]
    out += [(0xFFFFFFFF, 0)] * (max_blocks - len(out))
    return np.array(out, np.uint32)


def gated_delta(q, k, v, g, beta, state):
    """DeltaNet recurrence. q, k [B, T, Hk, D], v [B, T, Hv, D], g, beta [B, T, Hv], state [B, Hv, D, D].

    Returns y [B, T, Hv, D] and the new state, float64.
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
