"""The GEMMs on NVIDIA's tensor cores, emulated: as on simdgroup_matrix, and the same bits whatever
the block."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.prefill import test_prefill_moe as moe
from tests.kernels.prefill import test_prefill_qgemm as dense
from tests.kernels.prefill.harness import (
    KERNELS,
    TYPES,
    assert_close,
    bits,
    normal,
    quantize,
    rnd,
    values,
)

SYNC = "sync_"
BLOCKS = (16, 32, 64)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_dense(a, block):
    for rows in (1, 17, block - 1, block, block + 1):
        dense.gemm(a, rows, 136, 64, block=block, prefix=SYNC)
    dense.gemm(a, 5, 3, 128, block=block, output="fp32", prefix=SYNC)
    dense.gemm(a, 5, 100, 128, block=block, prefix=SYNC)
    for depth in (32, 96, 224, 544):  # ends in each part of a step
        dense.gemm(a, 11, 40, depth, 4, 32, block=block, prefix=SYNC)
    dense.multi(a, 35, (64, 0, 150, 1), 64, block=block, prefix=SYNC)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("nbits,group", [(4, 32), (4, 128), (8, 64)])
@pytest.mark.parametrize("block", BLOCKS)
def test_formats(a, nbits, group, block):
    dense.gemm(a, 18, 72, 256, nbits, group, block=block, prefix=SYNC)
    dense.gemm(a, 3, 65, 128, nbits, group, block=block, output="fp32", prefix=SYNC)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_plain_weights(a, block):
    rng = np.random.default_rng(2)
    x, w = normal(rng, (9, 128), a), normal(rng, (70, 128), a)
    matrix = (w.view(np.uint32), x, x, 70)
    (y,) = dense.launch(a, x, [matrix], 16, 32, block=block, output="fp32", prefix=SYNC)
    assert_close(y, dense.product(x, values(w, a), a), 1e-5)


@pytest.mark.parametrize("a", TYPES)
def test_a_code_is_dequantized_exactly_and_rounded_once(a):
    """Against one row of x that picks single weights, each is rnd(scale * code + bias)."""
    rng = np.random.default_rng(3)
    w, s, b, _ = quantize(rng, 128, 128, a, 4, 32)
    codes = (w[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    exact = np.repeat(values(s, a), 32, 1).astype(np.float64) * codes.reshape(128, 128)
    exact = exact + np.repeat(values(b, a), 32, 1)
    x = np.zeros((128, 128), np.float32)
    np.fill_diagonal(x, 1.0)
    matrix = (w, s, b, 128)
    (y,) = dense.launch(a, bits(x, a), [matrix], 4, 32, block=64, output="fp32", prefix=SYNC)
    # numpy rounds the float64 sum to float32 first; where that is a tie of A, nothing is said.
    twice = rnd(exact.astype(np.float32), a)
    assert (y.T == twice).mean() > 0.999
    assert np.abs(y.T - exact).max() <= np.abs(exact).max() * 2.0**-8


def test_bits_do_not_depend_on_the_block():
    rng = np.random.default_rng(4)
    depth, n = 288, 130
    x = normal(rng, (130, depth), "bf16")
    w, s, b, _ = quantize(rng, n, depth, "bf16", 4, 32)
    outs = []
    for block in BLOCKS:
        for rows in (130, 3):
            some = x[:rows].copy()
            options = dict(block=block, output="fp32", prefix=SYNC)
            (y,) = dense.launch("bf16", some, [(w, s, b, n)], 4, 32, **options)
            outs.append(y[:3])
    assert all((y == outs[0]).all() for y in outs)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_experts(a, block):
    e = moe.Experts(a, 37, 128, 96, 3, group=32)
    moe.check(e, moe.spread_ids(37, 2, 3), block, prefix=SYNC)
    e = moe.Experts(a, block + 1, 64, 64, 2, nbits=8)
    moe.check(e, np.full((block + 1, 1), 1), block, prefix=SYNC)


@pytest.mark.parametrize("block", BLOCKS)
def test_checked(block):
    dense.gemm("bf16", 19, 132, 64, block=block, host="checked", prefix=SYNC)
    dense.gemm("fp16", block + 1, 3, 64, 8, 64, block=block, host="checked", prefix=SYNC)
    dense.multi("bf16", 3, (64, 1, 3, 5), 64, block=block, host="checked", prefix=SYNC)
    e = moe.Experts("bf16", 5, 64, 96, 2, group=32)
    moe.check(e, moe.spread_ids(5, 1, 2), block, "checked", prefix=SYNC)


def test_no_mac_compiles_what_only_nvidia_has():
    """The NVIDIA header is reached from the _sync files alone."""

    def includes(file: Path) -> set[str]:
        found = re.findall(r'#include [<"]([^>"]+)[>"]', file.read_text())
        return set(found).union(*(includes(KERNELS / f) for f in found if (KERNELS / f).exists()))

    users = {f.stem for f in KERNELS.glob("*.metal") if "nvidia_simdgroup" in includes(f)}
    assert users and all(name.endswith("_sync") for name in users)
