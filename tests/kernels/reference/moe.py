"""Routing, experts and their sum."""

from __future__ import annotations

import numpy as np

from .numbers import F64, Dtype, sigmoid, silu


def route(logits: np.ndarray, top_k: int, norm: bool) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) [..., top_k] of the experts in descending order of float32 softmax, ties to
    the lowest id.
    """
    x = logits.astype(np.float32)
    p = np.exp((x - x.max(-1, keepdims=True)).astype(np.float32)).astype(np.float32)
    p = (p / p.sum(-1, keepdims=True, dtype=np.float32)).astype(np.float32)
    ids = np.argsort(-p, axis=-1, kind="stable")[..., :top_k]
    w = np.take_along_axis(p, ids, -1)
    if norm:
        w = w / w.sum(-1, keepdims=True, dtype=np.float32)
    return ids.astype(np.uint32), w.astype(np.float32)


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


def experts(
    x: np.ndarray, ids: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, a: Dtype
) -> tuple[np.ndarray, np.ndarray]:
    """x [T, H], ids [T, k], gate, up [E, W, H], down [E, H, W].

    Returns act [T, k, W] (rounded) and the down products [T, k, H] of the rounded act.
    """
    x = np.asarray(x, F64)
    act = silu(np.einsum("tkwh,th->tkw", gate[ids], x)) * np.einsum("tkwh,th->tkw", up[ids], x)
    act = a.rnd(act)
    return act, np.einsum("tkhw,tkw->tkh", down[ids].astype(F64), act)


def combine(
    down: np.ndarray,
    weights: np.ndarray,
    shared_down: np.ndarray | None,
    shared_gate: np.ndarray,
    h: np.ndarray | None,
    a: Dtype,
) -> np.ndarray:
    """down [T, k, H], weights [T, k], shared_gate [T]; shared_down and h [T, H] or None."""
    y = (np.asarray(weights, F64)[..., None] * down).sum(1)
    if shared_down is not None:
        y = y + sigmoid(shared_gate)[:, None] * shared_down
    return a.rnd(y) if h is None else a.rnd(h + a.rnd(y))
