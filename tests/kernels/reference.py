"""What the kernels must compute, in numpy: the numerics contract, with sums in float64.

Arrays travel as float32 (or float64) values; `Dtype` stores them in the activation dtype. A value
is rounded to it only where the contract says so, by `Dtype.rnd`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F64 = np.float64


@dataclass(frozen=True)
class Dtype:
    """An activation dtype: `name` is bf16, f16 or f32; `ulp` the spacing of values just above 1."""

    name: str
    ulp: float

    def store(self, x: np.ndarray) -> np.ndarray:
        """Values, rounded to nearest even, as the array that a kernel reads (uint16 for bf16)."""
        x = np.ascontiguousarray(x, np.float32)
        if self.name == "f32":
            return x.copy()
        if self.name == "f16":
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
F16 = Dtype("f16", 2.0**-10)
F32 = Dtype("f32", 2.0**-23)
DTYPES = {d.name: d for d in (BF16, F16, F32)}


@dataclass
class Weight:
    """A weight matrix [..., N, K] as it is stored, and its exact values as float32.

    bits 4 or 8: `w` holds uint32 words [..., N, K * bits / 32]; else `w` holds values of the dtype.
    """

    w: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None
    values: np.ndarray
    bits: int
    group: int


def make_weight(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    a: Dtype,
    bits: int,
    group: int,
    scale: float = 0.05,
) -> Weight:
    """A random matrix: any code, scales of either sign, some groups with scale and bias 0."""
    *lead, n, k = shape
    if bits > 8:
        w = a.store(rng.standard_normal(shape).astype(np.float32) * scale)
        return Weight(w, None, None, a.load(w), bits, group)
    codes = rng.integers(0, 2**bits, shape, dtype=np.uint32)
    s = rng.standard_normal((*lead, n, k // group)).astype(np.float32) * (scale * 4 / 2**bits)
    b = -s * 2 ** (bits - 1) + rng.standard_normal(s.shape).astype(np.float32) * scale * 0.1
    none = rng.random(s.shape) < 0.05
    s[none] = 0
    b[none] = 0
    scales, biases = a.store(s), a.store(b)
    return Weight(
        pack(codes, bits), scales, biases, dequantize(codes, scales, biases, a, group), bits, group
    )


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes to little-endian uint32 words, lowest bits first."""
    per = 32 // bits
    c = codes.reshape(*codes.shape[:-1], -1, per).astype(np.uint32)
    return np.bitwise_or.reduce(c << (np.arange(per, dtype=np.uint32) * bits), axis=-1)


def dequantize(
    codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, a: Dtype, group: int
) -> np.ndarray:
    """scale * code + bias in float32."""
    s = np.repeat(a.load(scales), group, axis=-1)
    b = np.repeat(a.load(biases), group, axis=-1)
    return (s.astype(F64) * codes + b).astype(np.float32)


# ------------------------------------------------------------------------------- functions


def sigmoid(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, F64)
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F64) * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.asarray(x, F64), 0.0)


def rms_norm(h: np.ndarray, weight: np.ndarray, eps: float, a: Dtype) -> np.ndarray:
    """Row norm over the last axis, rounded once."""
    h = h.astype(F64)
    return a.rnd(h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * weight)


def product(w: Weight, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(w x, |w| |x|): the exact product and the size of what was added up."""
    return w.values.astype(F64) @ x.astype(F64), np.abs(w.values).astype(F64) @ np.abs(x).astype(
        F64
    )


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


# ------------------------------------------------------------------------------- layers, one row


@dataclass
class GdnShape:
    """Heads and head sizes of a Gated DeltaNet layer; channels are [q | k | v heads]."""

    key_heads: int
    value_heads: int
    dk: int = 128
    dv: int = 128

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dk + self.value_heads * self.dv


def gdn_conv(
    qkv: np.ndarray, conv_state: np.ndarray, conv_weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(SiLU of the width-4 convolution [C], new conv state [3, C])."""
    window = np.concatenate([conv_state, qkv[None]], 0).astype(F64)
    return silu((window * conv_weight.T).sum(0)), window[1:].astype(np.float32)


def gdn_split(conv: np.ndarray, s: GdnShape, a: Dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounded q^ [Hk, Dk], k^ [Hk, Dk], v^ [Hv, Dv]."""
    n = s.key_heads * s.dk
    q = conv[:n].reshape(s.key_heads, s.dk)
    k = conv[n : 2 * n].reshape(s.key_heads, s.dk)
    v = conv[2 * n :].reshape(s.value_heads, s.dv)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * s.dk**-0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    return a.rnd(q), a.rnd(k), a.rnd(v)


def gdn_gates(
    av: np.ndarray, bv: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(decay g, beta) of each value head."""
    return np.exp(-np.exp(a_log.astype(F64)) * softplus(av.astype(F64) + dt_bias)), sigmoid(bv)


def gdn_delta(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    s: GdnShape,
) -> tuple[np.ndarray, np.ndarray]:
    """(y [Hv, Dv], new state [Hv, Dv, Dk])."""
    head = np.arange(s.value_heads) // (s.value_heads // s.key_heads)
    q, k = q[head].astype(F64), k[head].astype(F64)
    state = state.astype(F64) * g[:, None, None]
    m = np.einsum("hvk,hk->hv", state, k)
    d = (v - m) * beta[:, None]
    state = state + d[:, :, None] * k[:, None, :]
    return np.einsum("hvk,hk->hv", state, q), state


def gdn_gated_norm(y: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The exact value before the last rounding."""
    return y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * weight * silu(z)


def rope(x: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    """Rotary on pairs (i, i + n) of the last axis, n = len(inv_freq)."""
    n = len(inv_freq)
    angle = (np.float32(position) * inv_freq.astype(np.float32)).astype(np.float32).astype(F64)
    c, s = np.cos(angle), np.sin(angle)
    out = x.astype(F64).copy()
    out[..., :n] = x[..., :n] * c - x[..., n : 2 * n] * s
    out[..., n : 2 * n] = x[..., n : 2 * n] * c + x[..., :n] * s
    return out


def head_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over head_dim, unrounded."""
    x = x.astype(F64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


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


def route(logits: np.ndarray, top_k: int, norm: bool) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) of the top_k experts in descending order of float32 softmax, ties to the
    lowest id.
    """
    x = logits.astype(np.float32)
    p = np.exp((x - x.max()).astype(np.float32)).astype(np.float32)
    p = (p / p.sum(dtype=np.float32)).astype(np.float32)
    ids = np.lexsort((np.arange(len(p)), -p))[:top_k]
    w = p[ids]
    return ids.astype(np.uint32), (w / w.sum(dtype=np.float32) if norm else w).astype(np.float32)
