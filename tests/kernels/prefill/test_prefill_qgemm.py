"""Dense quantized GEMM: block edges, ragged columns, outputs, formats, several matrices."""

import numpy as np
import pytest

from tests.kernels.prefill.harness import (
    TYPES,
    ULP,
    UNITS,
    assert_close,
    ints,
    normal,
    quantize,
    rnd,
    run,
    values,
)

# The kernels round weights to A before the product; against such weights they are fp32-exact.
FP32 = 2e-5


def constants(nbits, group):
    return {0: nbits, 1: group}


def tolerance(a, output):
    return FP32 + (ULP[a] if output == "A" else 0.0)


def product(x, w, a):
    return values(x, a).astype(np.float64) @ rnd(w, a).astype(np.float64).T


def launch(a, x, matrices, nbits=4, group=64, block=32, output="A", host="cpu", prefix=""):
    """The products of x with up to four (codes, scales, biases, rows), None for no matrix."""
    rows, k = x.shape
    kernel = f"{prefix}qgemm_multi_{a}_{a if output == 'A' else 'fp32'}_m{block}"
    suffix, (columns, threads) = UNITS[prefix][0], UNITS[prefix][1][block]
    buffers, outs, sizes, groups = [x], [], [], 0
    for m in [*matrices, None, None, None, None][:4]:
        n = m[3] if m else 0
        y = np.full((rows, max(n, 1)), 7, np.uint16 if output == "A" else np.float32)
        buffers += [*(m[:3] if m else (x, x, x)), y]
        outs.append(y)
        sizes.append(n)
        groups += -(-n // columns)
    grid = (groups, -(-rows // block), 1)
    buffers.append(ints(rows, k, *sizes))
    run("qgemm" + suffix, kernel, buffers, grid, (threads, 1, 1), host, constants(nbits, group))
    for n, y in zip(sizes, outs, strict=True):
        assert n or (y == 7).all(), "an absent matrix was written"
    return [values(y, a) if output == "A" else y for n, y in zip(sizes, outs, strict=True) if n]


def multi(a, rows, sizes, k, nbits=4, group=64, output="A", **options):
    """sizes: rows of each matrix, 0 for none."""
    rng = np.random.default_rng(rows * 1000 + sizes[0])
    x = normal(rng, (rows, k), a)
    made = [quantize(rng, n, k, a, nbits, group) if n else None for n in sizes]
    matrices = [(*m[:3], n) if m else None for m, n in zip(made, sizes, strict=True)]
    outs = launch(a, x, matrices, nbits, group, output=output, **options)
    for got, m in zip(outs, filter(None, made), strict=True):
        assert_close(got, product(x, m[3], a), tolerance(a, output))


def gemm(a, rows, n, k, *format, **options):
    multi(a, rows, (n,), k, *format, **options)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_block_edges(a, block):
    for rows in (1, block - 1, block, block + 1, 2 * block + 3):
        gemm(a, rows, 64, 64, block=block)
    gemm(a, 5, 192, 256, block=block)


def test_depths_of_the_35b_model():
    gemm("bf16", 17, 64, 2048, block=32)
    gemm("bf16", 3, 64, 4096, block=16)


@pytest.mark.parametrize("n", [1, 3, 4, 32, 63, 65, 68, 130])
@pytest.mark.parametrize("output", ["A", "fp32"])
def test_ragged_columns(n, output):
    gemm("bf16", 5, n, 128, output=output)


@pytest.mark.parametrize("nbits,group", [(4, 32), (8, 128)])
@pytest.mark.parametrize("a", TYPES)
def test_formats(nbits, group, a):
    gemm(a, 18, 64, 256, nbits, group)
    gemm(a, 3, 64, 256, nbits, group, block=16, output="fp32")


def test_scales_of_zero_and_large():
    rng = np.random.default_rng(5)
    x = normal(rng, (4, 128), "bf16")
    w, s, b, _ = quantize(rng, 64, 128, "bf16", 4, 64)
    s[:8] = 0
    b[4:8] = 0
    s[8:16] = 0x4480  # 1024
    codes = (w[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    full = codes.reshape(64, 128) * np.repeat(values(s, "bf16"), 64, 1)
    full = full + np.repeat(values(b, "bf16"), 64, 1)
    (y,) = launch("bf16", x, [(w, s, b, 64)], block=16, output="fp32")
    for rows in (slice(0, 4), slice(4, 8), slice(8, 16), slice(16, 64)):
        assert_close(y[:, rows], product(x, full[rows], "bf16"), FP32)
    assert (y[:, 4:8] == 0).all()


@pytest.mark.parametrize("a", TYPES)
def test_several_matrices(a):
    multi(a, 5, (130, 64, 4, 4), 128)
    multi(a, 35, (64, 0, 70, 1), 64)
    multi(a, 2, (32, 1, 0, 0), 128, output="fp32", block=16)
    multi(a, 65, (1, 1, 1, 65), 64, block=64)


@pytest.mark.parametrize("a", TYPES)
def test_plain_weights(a):
    rng = np.random.default_rng(0)
    x, w = normal(rng, (9, 128), a), normal(rng, (70, 128), a)
    (y,) = launch(a, x, [(w.view(np.uint32), x, x, 70)], 16, 32, block=16, output="fp32")
    assert_close(y, product(x, values(w, a), a), 1e-5)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_checked(block):
    gemm("bf16", block + 1, 68, 64, block=block, host="checked")
    gemm("bf16", 2, 3, 64, block=block, output="fp32", host="checked")
    gemm("bf16", 2, 7, 64, block=block, host="checked")
    multi("bf16", 3, (64, 1, 3, 5), 64, block=block, host="checked")
    multi("bf16", 3, (1, 0, 65, 0), 64, block=block, output="fp32", host="checked")


def test_checked_formats():
    gemm("fp16", 3, 65, 128, 8, 128, block=16, host="checked")
