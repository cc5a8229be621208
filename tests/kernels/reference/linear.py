"""Weight matrices and their products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .numbers import F64, Dtype


@dataclass
class Weight:
    """A weight matrix [..., N, K] as it is stored, and its exact values as float32.

    bits up to 8: `w` holds uint32 words [..., N, K * bits / 32]; else values of the dtype.
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
    scale: float | None = None,
) -> Weight:
    """A random matrix: any code, scales of either sign, some groups with scale and bias 0.

    scale: of a value; by default a product with a row of ones' size is of about that size.
    """
    *lead, n, k = shape
    scale = k**-0.5 if scale is None else scale
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
    """Codes to little-endian uint32 words, lowest bits first; a code may cross words."""
    ones = (codes.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    rows = ones.reshape(*codes.shape[:-1], -1)
    return np.packbits(rows, axis=-1, bitorder="little").view("<u4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`."""
    ones = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    ones = ones.reshape(*words.shape[:-1], -1, bits)
    return np.packbits(ones, axis=-1, bitorder="little")[..., 0].astype(np.uint32)


def dequantize(
    codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, a: Dtype, group: int
) -> np.ndarray:
    """scale * code + bias in float32."""
    s = np.repeat(a.load(scales), group, axis=-1)
    b = np.repeat(a.load(biases), group, axis=-1)
    return (s.astype(F64) * codes + b).astype(np.float32)


def product(w: Weight, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(w x, |w| |x|) of rows x [..., K]: the exact product and the size of what was added up."""
    values, x = w.values.astype(F64).T, x.astype(F64)
    return x @ values, np.abs(x) @ np.abs(values)
