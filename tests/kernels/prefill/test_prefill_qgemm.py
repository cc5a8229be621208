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

THREADS = (128, 1, 1)
# The kernels round weights to A before the product; against such weights they are fp32-exact.
FP32 = 2e-5


def constants(nbits, group):
    return {0: nbits, 1: group}


def tolerance(a, output):
    return FP32 + (ULP[a] if output == "A" else 0.0)


def product(x, w, a):
    return values(x, a).astype(np.float64) @ rnd(w, a).astype(np.float64).T


def gemm(
    a, rows, n, k, nbits=4, group=64, block=32, output="A", residual=False, host="cpu", prefix=""
):
    rng = np.random.default_rng(rows * 1000 + n)
    x = normal(rng, (rows, k), a)
    w, s, b, full = quantize(rng, n, k, a, nbits, group)
    h = normal(rng, (rows, n), a)
    y = np.zeros((rows, n), np.uint16 if output == "A" else np.float32)
    kernel = f"{prefix}qgemm_{a}_{a if output == 'A' else 'fp32'}_m{block}"
    buffers = [x, w, s, b, h, y, ints(rows, n, k, residual)]
    suffix, (columns, threads) = UNITS[prefix][0], UNITS[prefix][1][block]
    grid = (-(-n // columns), -(-rows // block), 1)
    group_size = (threads, 1, 1)
    run("qgemm" + suffix, kernel, buffers, grid, group_size, host, constants(nbits, group))
    want = product(x, full, a)
    if residual:
        want = values(h, a) + want
    assert_close(values(y, a) if output == "A" else y, want, tolerance(a, output))


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_block_edges(a, block):
    for rows in (1, block - 1, block, block + 1, 2 * block + 3):
        gemm(a, rows, 64, 64, block=block)
    gemm(a, 5, 192, 256, block=block)


def test_depths_of_the_35b_model():
    gemm("bf16", 17, 64, 2048, block=32)
    gemm("bf16", 3, 64, 4096, block=16, residual=True)


@pytest.mark.parametrize("n", [1, 3, 4, 32, 63, 65, 68, 130])
@pytest.mark.parametrize("output", ["A", "fp32"])
def test_ragged_columns(n, output):
    gemm("bf16", 5, n, 128, output=output)
    gemm("bf16", 5, n, 128, residual=output == "A", output=output)


@pytest.mark.parametrize("nbits,group", [(4, 32), (8, 128)])
@pytest.mark.parametrize("a", TYPES)
def test_formats(nbits, group, a):
    gemm(a, 18, 64, 256, nbits, group)
    gemm(a, 3, 64, 256, nbits, group, block=16, output="fp32")


@pytest.mark.parametrize("a", TYPES)
def test_residual(a):
    gemm(a, 33, 100, 128, block=64, residual=True)


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
    y = np.zeros((4, 64), np.float32)
    buffers = [x, w, s, b, x, y, ints(4, 64, 128, 0)]
    run("qgemm", "qgemm_bf16_fp32_m16", buffers, (1, 1, 1), THREADS, "cpu", constants(4, 64))
    for rows in (slice(0, 4), slice(4, 8), slice(8, 16), slice(16, 64)):
        assert_close(y[:, rows], product(x, full[rows], "bf16"), FP32)
    assert (y[:, 4:8] == 0).all()


def multi(a, rows, sizes, k, output="A", block=32, host="cpu", prefix=""):
    rng = np.random.default_rng(rows)
    x = normal(rng, (rows, k), a)
    buffers, wanted, outs = [x], [], []
    for n in sizes:
        w, s, b, full = quantize(rng, max(n, 1), k, a, 4, 64)
        y = np.full((rows, max(n, 1)), 7, np.uint16 if output == "A" else np.float32)
        buffers += [w, s, b, y]
        wanted.append(product(x, full, a))
        outs.append(y)
    kernel = f"{prefix}qgemm_multi_{a}_{a if output == 'A' else 'fp32'}_m{block}"
    suffix, (columns, threads) = UNITS[prefix][0], UNITS[prefix][1][block]
    grid = (sum(-(-n // columns) for n in sizes), -(-rows // block), 1)
    p = ints(rows, k, *sizes)
    group_size = (threads, 1, 1)
    run("qgemm" + suffix, kernel, [*buffers, p], grid, group_size, host, constants(4, 64))
    for n, y, want in zip(sizes, outs, wanted, strict=True):
        if n:
            got = values(y, a) if output == "A" else y
            assert_close(got, want, tolerance(a, output))
        else:
            assert (y == 7).all()


@pytest.mark.parametrize("a", TYPES)
def test_several_matrices(a):
    multi(a, 5, (130, 64, 4, 4), 128)
    multi(a, 35, (64, 0, 70, 1), 64)
    multi(a, 2, (32, 1, 0, 0), 128, output="fp32", block=16)
    multi(a, 65, (1, 1, 1, 65), 64, block=64)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("nbits,group", [(4, 64), (8, 128)])
@pytest.mark.parametrize("host", ["cpu", "checked"])
def test_separate_dequantization(a, nbits, group, host):
    rng = np.random.default_rng(0)
    n, k = 70, 128
    w, s, b, full = quantize(rng, n, k, a, nbits, group)
    out = np.zeros((n, k), np.uint16)
    runs = n * k // 16
    buffers = [w, s, b, out, np.array([runs], np.int32)]
    grid = (-(-runs // 256), 1, 1)
    kernel = f"dequantize_rows_{a}"
    run("qgemm", kernel, buffers, grid, (256, 1, 1), host, constants(nbits, group))
    assert_close(values(out, a), rnd(full, a), ULP[a])
    x, y = normal(rng, (9, k), a), np.zeros((9, n), np.float32)
    buffers = [x, out.view(np.uint32), s, b, x, y, ints(9, n, k, 0)]
    kernel = f"qgemm_{a}_fp32_m16"
    run("qgemm", kernel, buffers, (2, 1, 1), THREADS, "cpu", constants(16, group))
    assert_close(y, product(x, values(out, a), a), 1e-5)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_checked(block):
    gemm("bf16", block + 1, 68, 64, block=block, residual=True, host="checked")
    gemm("bf16", 2, 3, 64, block=block, output="fp32", host="checked")
    gemm("bf16", 2, 7, 64, block=block, residual=True, host="checked")
    multi("bf16", 3, (64, 1, 3, 5), 64, block=block, host="checked")
    multi("bf16", 3, (1, 0, 65, 0), 64, block=block, output="fp32", host="checked")


def test_checked_formats():
    gemm("fp16", 3, 65, 128, 8, 128, block=16, host="checked")
