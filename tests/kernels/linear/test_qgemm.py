"""Dense quantized GEMM: block edges, ragged columns, outputs, formats, several matrices."""

import numpy as np
import pytest

from tests.kernels.harness import UNITS, ceil_div, halves, multi
from tests.kernels.reference import (
    BF16,
    F64,
    FP16,
    FP32,
    assert_close,
    dequantize,
    make_weight,
    unpack,
)

# The kernels round weights to A before the product; against such weights they are fp32-exact.
EXACT = 2e-5


def exact(w, x, a):
    return a.load(x).astype(F64) @ a.rnd(w.values).astype(F64).T


def products(a, x, weights, out, *, block=32, host="cpu", prefix=""):
    """The products of x with up to four matrices, None for no matrix."""
    columns, threads = UNITS[prefix][block]
    name = f"{prefix}qgemm_multi_{a.name}_{out.name}_m{block}"
    blocks = ceil_div(len(x), block)
    return multi(name, x, weights, out, x.shape, columns, blocks, threads, host)


def check(a, rows, sizes, k, bits=4, group=64, out=None, **options):
    """sizes: rows of each matrix, 0 for none."""
    out = out or a
    rng = np.random.default_rng(rows * 1000 + sizes[0])
    x = a.store(rng.standard_normal((rows, k)))
    weights = [make_weight(rng, (n, k), a, bits, group) if n else None for n in sizes]
    results = products(a, x, weights, out, **options)
    for got, w in zip(results, filter(None, weights), strict=True):
        assert_close(got, exact(w, x, a), EXACT + (out.ulp if out is a else 0.0))


@halves
@pytest.mark.parametrize("block", [32, 64])
def test_block_edges(a, block):
    for rows in (1, block - 1, block, block + 1, 2 * block + 3):
        check(a, rows, [64], 64, block=block)
    check(a, 5, [192], 256, block=block)


def test_depths_of_the_35b_model():
    check(BF16, 17, [64], 2048, block=32)
    check(BF16, 3, [64], 4096, block=64)


@pytest.mark.parametrize("n", [1, 3, 4, 32, 63, 65, 68, 130])
@pytest.mark.parametrize("out", [BF16, FP32], ids=lambda a: a.name)
def test_ragged_columns(n, out):
    check(BF16, 5, [n], 128, out=out)


@pytest.mark.parametrize("bits,group", [(4, 32), (6, 32), (6, 64), (6, 128), (8, 128)])
@halves
def test_formats(bits, group, a):
    check(a, 18, [64], 256, bits, group)
    check(a, 3, [64], 256, bits, group, FP32, block=64)


def test_scales_of_zero_and_large():
    rng = np.random.default_rng(5)
    x = BF16.store(rng.standard_normal((4, 128)))
    w = make_weight(rng, (64, 128), BF16, 4, 64)
    w.scales[:8] = 0
    w.biases[4:8] = 0
    w.scales[8:16] = BF16.store(1024.0)
    w.values = dequantize(unpack(w.w, 4), w.scales, w.biases, BF16, 64)
    (y,) = products(BF16, x, [w], FP32, block=32)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 16), slice(16, 64)):
        assert_close(y[:, rows], exact(w, x, BF16)[:, rows], EXACT)
    assert (y[:, 4:8] == 0).all()


@halves
def test_several_matrices(a):
    check(a, 5, (130, 64, 4, 4), 128)
    check(a, 35, (64, 0, 70, 1), 64)
    check(a, 2, (32, 1, 0, 0), 128, out=FP32, block=32)
    check(a, 65, (1, 1, 1, 65), 64, block=64)


@halves
def test_plain_weights(a):
    check(a, 9, [70], 128, 16, 32, FP32, block=32)


@pytest.mark.parametrize("block", [32, 64])
def test_checked(block):
    options = dict(block=block, host="checked")
    check(BF16, block + 1, [68], 64, **options)
    check(BF16, 2, [3], 64, out=FP32, **options)
    check(BF16, 2, [7], 64, **options)
    check(BF16, 3, (64, 1, 3, 5), 64, **options)
    check(BF16, 3, (1, 0, 65, 0), 64, out=FP32, **options)


def test_checked_formats():
    check(FP16, 3, [65], 128, 8, 128, block=32, host="checked")
    check(BF16, 3, [65], 96, 6, 32, block=32, host="checked")


# ---------------------------------------------------------------- other matrix units

NAX = dict(prefix="nax_")
MMA = dict(prefix="mma_")
MMA_BLOCKS = (16, 32, 64)


@halves
@pytest.mark.parametrize("block", [32, 64])
def test_nax(a, block):
    """Metal 4 tensor operations."""
    options = dict(block=block, **NAX)
    for rows in (1, block - 1, block, block + 1):
        check(a, rows, [68], 64, **options)
    check(a, 5, [3], 128, out=FP32, **options)
    check(a, 5, [100], 128, **options)
    check(a, 35, (64, 0, 70, 1), 64, **options)


@pytest.mark.parametrize("block", [32, 64])
def test_nax_checked(block):
    options = dict(block=block, host="checked", **NAX)
    check(BF16, 3, [68], 64, **options)
    check(BF16, 3, (64, 1, 3, 5), 64, **options)


@halves
@pytest.mark.parametrize("block", MMA_BLOCKS)
def test_mma(a, block):
    """NVIDIA's tensor cores, emulated."""
    options = dict(block=block, **MMA)
    for rows in (1, 17, block - 1, block, block + 1):
        check(a, rows, [136], 64, **options)
    check(a, 5, [3], 128, out=FP32, **options)
    check(a, 5, [100], 128, **options)
    for depth in (32, 96, 224, 544):  # ends in each part of a step
        check(a, 11, [40], depth, 4, 32, **options)
    check(a, 35, (64, 0, 150, 1), 64, **options)


@halves
@pytest.mark.parametrize("bits,group", [(4, 32), (4, 128), (6, 32), (6, 64), (6, 128), (8, 64)])
@pytest.mark.parametrize("block", MMA_BLOCKS)
def test_mma_formats(a, bits, group, block):
    check(a, 18, [72], 256, bits, group, block=block, **MMA)
    check(a, 3, [65], 128, bits, group, FP32, block=block, **MMA)


@halves
@pytest.mark.parametrize("block", MMA_BLOCKS)
def test_mma_plain_weights(a, block):
    check(a, 9, [70], 128, 16, 32, FP32, block=block, **MMA)


@halves
def test_mma_dequantizes_a_code_exactly_and_rounds_it_once(a):
    """Against one row of x that picks single weights, each is rnd(scale * code + bias)."""
    w = make_weight(np.random.default_rng(3), (128, 128), a, 4, 32)
    (y,) = products(a, a.store(np.eye(128)), [w], FP32, block=64, **MMA)
    # numpy rounds the float64 sum to float32 first; where that is a tie of A, nothing is said.
    assert (y.T == a.rnd(w.values)).mean() > 0.999
    assert np.abs(y.T - w.values).max() <= np.abs(w.values).max() * 2.0**-8


def test_mma_gives_the_same_bits_whatever_the_block():
    rng = np.random.default_rng(4)
    x = BF16.store(rng.standard_normal((130, 288)))
    w = make_weight(rng, (130, 288), BF16, 4, 32)
    results = [
        products(BF16, x[:rows].copy(), [w], FP32, block=block, **MMA)[0][:3]
        for block in MMA_BLOCKS
        for rows in (130, 3)
    ]
    assert all((y == results[0]).all() for y in results)


@pytest.mark.parametrize("block", MMA_BLOCKS)
def test_mma_checked(block):
    options = dict(block=block, host="checked", **MMA)
    check(BF16, 19, [132], 64, **options)
    check(FP16, block + 1, [3], 64, 8, 64, **options)
    check(BF16, 3, [65], 96, 6, 32, **options)
    check(BF16, 3, (64, 1, 3, 5), 64, **options)
