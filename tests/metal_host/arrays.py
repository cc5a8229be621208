"""bfloat16 as uint16, and affine quantized weights."""

import numpy as np


def bf16(x) -> np.ndarray:
    """float32 -> bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def f32(x) -> np.ndarray:
    """bfloat16 bits (uint16) or any float array -> float32."""
    x = np.asarray(x)
    return (
        (x.astype(np.uint32) << 16).view(np.float32)
        if x.dtype == np.uint16
        else x.astype(np.float32)
    )


def quantized(rng, *shape, bits=4, group=64):
    """Random affine weights [..., K] -> (codes, scales, biases, float32 values)."""
    codes = rng.integers(0, 2**bits, shape, dtype=np.uint32)
    groups = (*shape[:-1], shape[-1] // group)
    scales, biases = bf16(rng.uniform(0.005, 0.02, groups)), bf16(rng.uniform(-0.1, 0.0, groups))
    per_word = 32 // bits
    words = codes.reshape(*shape[:-1], -1, per_word) << (
        bits * np.arange(per_word, dtype=np.uint32)
    )
    values = codes.reshape(*groups, group) * f32(scales)[..., None] + f32(biases)[..., None]
    return words.sum(-1, dtype=np.uint32), scales, biases, values.reshape(shape)
