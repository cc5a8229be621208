"""MLX kernels whose source no wheel holds, from an MLX checkout that MLX_SOURCE names."""

import os

import numpy as np
import pytest

from metal.host import Library

from .arrays import bf16, f32

KERNELS = "mlx/backend/metal/kernels"
SOURCE = os.environ.get("MLX_SOURCE", "")
pytestmark = pytest.mark.skipif(
    not SOURCE,
    reason="rms_norm.metal and rope.metal are in no wheel: set MLX_SOURCE to an MLX checkout",
)


def library(name, constants, host):
    path = os.path.join(SOURCE, KERNELS, name)
    return Library(path, constants=constants, host=host, include=[SOURCE], rules="metal")


@pytest.mark.parametrize("host", ["cpu", "checked"])
@pytest.mark.parametrize(
    "kernel, size, threads", [("rmsbfloat16", 250, 64), ("rms_loopedbfloat16", 5000, 1024)]
)
def test_rms_norm(kernel, size, threads, host):
    rng = np.random.default_rng(0)
    x, w = bf16(rng.normal(size=(3, size))), bf16(rng.normal(size=size))
    out = np.zeros_like(x)
    compiled = library("rms_norm.metal", {20: True}, host)
    compiled[kernel]([x, w, out, 1e-5, size, 1], 3, threads, outputs={2})
    expected = f32(x) / np.sqrt((f32(x) ** 2).mean(-1, keepdims=True) + 1e-5) * f32(w)
    assert np.abs(f32(out) - expected).max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("host", ["cpu", "checked"])
@pytest.mark.parametrize("traditional", [False, True])
def test_rope(traditional, host):
    heads, dims, offset, base = 4, 64, 37, 10000.0
    x = bf16(np.random.default_rng(1).normal(size=(heads, dims)))
    out = np.zeros_like(x)
    constants = {"forward": True, "traditional": traditional, "hs_transpose": False}
    buffers = {0: x, 1: out, 2: offset, 3: 1.0, 4: dims, 10: float(np.log2(base))}
    compiled = library("rope.metal", constants, host)
    compiled["rope_single_bfloat16"](buffers, (1, heads), (dims // 2, 1), outputs={1})
    angle = offset * base ** (-np.arange(dims // 2) / (dims // 2))
    a, b = (slice(0, None, 2), slice(1, None, 2)) if traditional else (slice(0, 32), slice(32, 64))
    expected = np.empty((heads, dims))
    expected[:, a] = f32(x)[:, a] * np.cos(angle) - f32(x)[:, b] * np.sin(angle)
    expected[:, b] = f32(x)[:, a] * np.sin(angle) + f32(x)[:, b] * np.cos(angle)
    assert np.abs(f32(out) - expected).max() < 0.01 * np.abs(expected).max()
