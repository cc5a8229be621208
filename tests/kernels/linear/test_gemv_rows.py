"""2 to 16 rows with up to four matrices; weights unrounded, each read once."""

import numpy as np
import pytest

from tests.kernels.harness import halves, multi
from tests.kernels.reference import BF16, FP32, assert_close, make_weight, product

EXACT = 2e-5


def most_rows(rows):
    """Rows of x that the kernel holds."""
    return next(most for most in (4, 8, 16) if rows <= most)


def lanes_for(k):
    return next(n for n in (32, 16, 8, 4, 2, 1) if n * 16 <= k)


def made(lanes):
    """Weight rows of a threadgroup: two a lane."""
    return 4 * 2 * (32 // lanes)


def check(a, rows, sizes, k, bits=4, group=64, out=None, host="cpu", lanes=None):
    """sizes: rows of each matrix, 0 for none."""
    out, lanes = out or a, lanes or lanes_for(k)
    rng = np.random.default_rng(rows * 1000 + sizes[0])
    x = a.store(rng.standard_normal((rows, k)))
    weights = [make_weight(rng, (n, k), a, bits, group) if n else None for n in sizes]
    name = f"gemv_rows_multi_{a.name}_{out.name}_m{most_rows(rows)}"
    results = multi(name, x, weights, out, (rows, k, lanes), made(lanes), 1, 128, host)
    for got, w in zip(results, filter(None, weights), strict=True):
        want, _ = product(w, a.load(x))
        assert_close(got, want, EXACT + (out.ulp if out is a else 0.0))


@halves
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 15, 16])
def test_rows(a, rows):
    check(a, rows, [33], 512)
    check(a, rows, [33], 64, out=FP32)


@pytest.mark.parametrize("n", [1, 7, 15, 16, 17, 64])
def test_columns(n):
    check(BF16, 3, [n], 256)
    check(BF16, 9, [n], 256)


@pytest.mark.parametrize("k", [64, 192, 320, 512, 1024, 2048])
def test_depths(k):
    for rows in (2, 7, 12):
        check(BF16, rows, [8], k)


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_lanes_a_row(lanes):
    check(BF16, 5, [21], 512, lanes=lanes, out=FP32)


@pytest.mark.parametrize("bits,group", [(4, 32), (6, 32), (6, 64), (6, 128), (8, 128)])
@halves
def test_formats(bits, group, a):
    for rows in (2, 6, 16):
        check(a, rows, [20], 256, bits, group, FP32)
    check(a, 1, [3], 3 * group, bits, group, FP32, "checked")


@halves
def test_unquantized_weights(a):
    check(a, 5, [9], 128, 16, 64, FP32)


@halves
def test_several_matrices(a):
    check(a, 3, (40, 32, 4, 4), 256)
    check(a, 12, (16, 0, 33, 1), 64)
    check(a, 8, (32, 1, 0, 0), 512, out=FP32)


@pytest.mark.parametrize("rows", [3, 7, 12])
def test_checked(rows):
    check(BF16, rows, [35], 320, host="checked")
    check(BF16, rows, [5], 64, out=FP32, host="checked")
    check(BF16, rows, (5, 3, 7, 1), 64, host="checked")
    check(BF16, rows, (5, 0, 7, 1), 64, out=FP32, host="checked")
