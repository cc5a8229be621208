"""Running one prefill kernel on the Metal host from numpy arrays.

Activations of type bf16 or fp16 travel as uint16 bit patterns. Buffers are written in place.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from metal.host import Library

KERNELS = Path(__file__).resolve().parents[3] / "metal"
TYPES = ("bf16", "fp16")
ULP = {"bf16": 2.0**-7, "fp16": 2.0**-10}  # largest step between neighbours, relative


@functools.cache
def _library(name: str, host: str, constants: tuple) -> Library:
    metal = "4.0" if name.endswith("_nax") else "3.1"
    return Library(KERNELS / f"{name}.metal", constants=dict(constants), host=host, metal=metal)


def run(file, kernel, buffers, grid, threadgroup, host="cpu", constants=None) -> None:
    """Runs `kernel` of metal/`file`.metal over `grid` threadgroups; outputs are in `buffers`."""
    lib = _library(file, host, tuple(sorted((constants or {}).items())))
    lib[kernel](buffers, grid, threadgroup)


# By the prefix of a kernel's name: file suffix and, by the rows of a block, its (columns, threads).
UNITS = {
    "": ("", dict.fromkeys((16, 32, 64), (64, 128))),
    "nax_": ("_nax", dict.fromkeys((32, 64), (64, 128))),
    "sync_": ("_sync", {16: (128, 128), 32: (128, 128), 64: (256, 256)}),
}


def ints(*values: int) -> np.ndarray:
    """A parameter struct of int32 fields."""
    return np.array(values, np.int32)


def params(*values: float) -> np.ndarray:
    """A parameter struct of int32 and float32 fields, by the Python type of each value."""
    out = np.zeros(len(values), np.int32)
    for i, v in enumerate(values):
        out[i : i + 1] = (
            np.array([v], np.float32).view(np.int32) if isinstance(v, float) else np.int32(v)
        )
    return out


def bits(x: np.ndarray, a: str) -> np.ndarray:
    """Rounds fp32 values to activation type `a` (nearest even) and returns the uint16 patterns."""
    x = np.ascontiguousarray(x, np.float32)
    if a == "fp16":
        return x.astype(np.float16).view(np.uint16)
    u = x.view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def values(b: np.ndarray, a: str) -> np.ndarray:
    """The fp32 values of uint16 patterns of activation type `a`."""
    if a == "fp16":
        return b.view(np.float16).astype(np.float32)
    return (b.astype(np.uint32) << 16).view(np.float32)


def rnd(x: np.ndarray, a: str) -> np.ndarray:
    """fp32 values rounded once to activation type `a`."""
    return values(bits(x, a), a)


def normal(rng: np.random.Generator, shape, a: str, scale: float = 1.0) -> np.ndarray:
    """uint16 patterns of random normal values."""
    return bits(rng.standard_normal(shape) * scale, a)


def quantize(rng: np.random.Generator, n: int, k: int, a: str, nbits: int, group: int):
    """Random affine weights [n, k]: packed uint32 codes, scales, biases (patterns), fp32 values."""
    codes = rng.integers(0, 1 << nbits, (n, k), dtype=np.uint32)
    per = 32 // nbits
    packed = np.zeros((n, k // per), np.uint32)
    for i in range(per):
        packed |= codes[:, i::per] << np.uint32(nbits * i)
    spread = 2.0 / ((1 << nbits) * np.sqrt(k))
    scales = bits(rng.uniform(0.3, 1.0, (n, k // group)) * spread, a)
    biases = bits(-values(scales, a) * (1 << (nbits - 1)) * rng.uniform(0.8, 1.2, scales.shape), a)
    s = np.repeat(values(scales, a), group, axis=1)
    b = np.repeat(values(biases, a), group, axis=1)
    return packed, scales, biases, s * codes.astype(np.float32) + b


def assert_close(got, want, rel, err_msg: str = "") -> None:
    """|got - want| <= rel * (|want| + rms), rms over the row or all of `want`, the larger."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), f"{err_msg}: output is not finite"
    rms = np.sqrt(np.maximum(np.mean(want**2), np.mean(want**2, -1, keepdims=True)))
    bound = rel * (np.abs(want) + rms + 1e-30)
    worst = np.max(np.abs(got - want) / bound) if got.size else 0.0
    assert worst <= 1.0, f"{err_msg}: {worst:.2f} times the tolerance"
