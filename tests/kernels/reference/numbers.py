"""Dtypes and their rounding, comparisons, elementwise functions, the norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F64 = np.float64


@dataclass(frozen=True)
class Dtype:
    """A dtype: `name` is bf16, fp16 or fp32; `ulp` the spacing of values just above 1."""

    name: str
    ulp: float

    def store(self, x: np.ndarray) -> np.ndarray:
        """Values, rounded to nearest even, as the array that a kernel reads (uint16 for bf16)."""
        x = np.ascontiguousarray(x, np.float32)
        if self.name == "fp32":
            return x.copy()
        if self.name == "fp16":
            return x.astype(np.float16)
        u = x.view(np.uint32)
        return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)

    def load(self, a: np.ndarray) -> np.ndarray:
        """The float32 values of a stored array."""
        if self.name == "bf16":
            return (a.astype(np.uint32) << 16).view(np.float32)
        return a.astype(np.float32)

    def rnd(self, x: np.ndarray) -> np.ndarray:
        """Values rounded to this dtype, as float32."""
        return self.load(self.store(x))

    def empty(self, *shape: int) -> np.ndarray:
        """A stored array of NaN: what a kernel does not write shows."""
        return self.store(np.full(shape, np.nan, np.float32))


BF16 = Dtype("bf16", 2.0**-7)
FP16 = Dtype("fp16", 2.0**-10)
FP32 = Dtype("fp32", 2.0**-23)
DTYPES = {d.name: d for d in (BF16, FP16, FP32)}


def sigmoid(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, F64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F64) * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.asarray(x, F64), 0.0)


def head_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis, unrounded."""
    x = np.asarray(x, F64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rms_norm(h: np.ndarray, weight: np.ndarray, eps: float, a: Dtype) -> np.ndarray:
    """RMS norm over the last axis, rounded once."""
    return a.rnd(head_norm(h, weight, eps))


def rounding_excess(
    got: np.ndarray, exact: np.ndarray, a: Dtype, size: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """(error over what is allowed, what is allowed) of each value.

    `exact` after fp32 sums over terms of total magnitude `size` and one rounding to a is allowed.
    """
    spacing = a.ulp * 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14)))
    allowed = 0.5 * spacing + np.asarray(size) * 2e-6 + 1e-30
    return np.nan_to_num(np.abs(got.astype(F64) - exact) / allowed, nan=np.inf), allowed


def assert_rounded(
    got: np.ndarray, exact: np.ndarray, a: Dtype, size: np.ndarray | float, what: str = ""
) -> None:
    """got is `exact` within `rounding_excess`."""
    excess, allowed = rounding_excess(got, exact, a, size)
    bad = ~(excess <= 1)
    if bad.any():
        i = np.unravel_index(np.argmax(np.where(bad, excess, 0)), bad.shape)
        raise AssertionError(
            f"{what}: {bad.sum()} of {bad.size} values off, worst at {i}: got {got[i]!r}, "
            f"want {exact[i]!r}, "
            f"allowed {np.broadcast_to(allowed, bad.shape)[i]:.3g}"
        )


def assert_close(got: np.ndarray, want: np.ndarray, rel: float, what: str = "") -> None:
    """|got - want| <= rel * (|want| + rms), rms over the row or all of `want`, the larger."""
    got, want = np.asarray(got, F64), np.asarray(want, F64)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), f"{what}: output is not finite"
    rms = np.sqrt(np.maximum(np.mean(want**2), np.mean(want**2, -1, keepdims=True)))
    bound = rel * (np.abs(want) + rms + 1e-30)
    worst = np.max(np.abs(got - want) / bound) if got.size else 0.0
    assert worst <= 1.0, f"{what}: {worst:.2f} times the tolerance"
