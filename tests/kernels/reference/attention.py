"""Rotary embedding and attention of one row."""

from __future__ import annotations

import numpy as np

from .numbers import F64


def rope(x: np.ndarray, position: int | np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Rotary on pairs (i, i + n) of the last axis, n = len(inv_freq); position: of each vector."""
    n = len(inv_freq)
    angle = np.asarray(position, np.float32)[..., None] * inv_freq.astype(np.float32)
    c, s = np.cos(angle.astype(F64)), np.sin(angle.astype(F64))
    out = x.astype(F64)
    low, high = x[..., :n], x[..., n : 2 * n]
    out[..., :n] = low * c - high * s
    out[..., n : 2 * n] = high * c + low * s
    return out


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """q [H, D] over keys and values [Hkv, T, D]: o [H, D], unrounded."""
    h, d = q.shape
    group = h // keys.shape[0]
    out = np.empty((h, d))
    for i in range(h):
        s = keys[i // group].astype(F64) @ q[i].astype(F64) * d**-0.5
        p = np.exp(s - s.max())
        out[i] = p @ values[i // group].astype(F64) / p.sum()
    return out
