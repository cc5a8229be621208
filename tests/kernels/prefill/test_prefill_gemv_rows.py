"""2 to 16 rows: dense, several matrices, experts; weights unrounded, each read once."""

import numpy as np
import pytest

from tests.kernels.prefill.harness import (
    TYPES,
    ULP,
    assert_close,
    ints,
    normal,
    quantize,
    run,
    values,
)
from tests.kernels.prefill.test_prefill_moe import Experts, routing_tables, spread_ids

THREADS = (128, 1, 1)
FP32 = 2e-5


def most_rows(rows):
    """Rows of x that the kernel holds, and weight rows a lane."""
    return next((mt, r) for mt, r in ((4, 2), (8, 2), (16, 2)) if rows <= mt)


def lanes_for(k):
    return next(n for n in (32, 16, 8, 4, 2, 1) if n * 16 <= k)


def product(x, w, a):
    return values(x, a).astype(np.float64) @ w.astype(np.float64).T


def launch(a, x, matrices, nbits=4, group=64, output="A", host="cpu", lanes=None):
    """The products of x with up to four (codes, scales, biases, rows), None for no matrix."""
    rows, k = x.shape
    mt, r = most_rows(rows)
    lanes = lanes or lanes_for(k)
    buffers, outs, sizes, groups = [x], [], [], 0
    for m in [*matrices, None, None, None, None][:4]:
        n = m[3] if m else 0
        y = np.full((rows, max(n, 1)), 7, np.uint16 if output == "A" else np.float32)
        buffers += [*(m[:3] if m else (x, x, x)), y]
        outs.append(y)
        sizes.append(n)
        groups += -(-n // (4 * r * (32 // lanes)))
    kernel = f"gemv_rows_multi_{a}_{a if output == 'A' else 'fp32'}_m{mt}"
    buffers.append(ints(rows, k, lanes, *sizes))
    run("gemv_rows", kernel, buffers, (groups, 1, 1), THREADS, host, {0: nbits, 1: group})
    for n, y in zip(sizes, outs, strict=True):
        assert n or (y == 7).all(), "an absent matrix was written"
    return [values(y, a) if output == "A" else y for n, y in zip(sizes, outs, strict=True) if n]


def multi(a, rows, sizes, k, nbits=4, group=64, output="A", **options):
    """sizes: rows of each matrix, 0 for none."""
    rng = np.random.default_rng(rows * 1000 + sizes[0])
    x = normal(rng, (rows, k), a)
    made = [quantize(rng, n, k, a, nbits, group) if n else None for n in sizes]
    matrices = [(*m[:3], n) if m else None for m, n in zip(made, sizes, strict=True)]
    outs = launch(a, x, matrices, nbits, group, output, **options)
    for got, m in zip(outs, filter(None, made), strict=True):
        assert_close(got, product(x, m[3], a), FP32 + (ULP[a] if output == "A" else 0.0))


def dense(a, rows, n, k, *format, **options):
    multi(a, rows, (n,), k, *format, **options)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 15, 16])
def test_rows(a, rows):
    dense(a, rows, 33, 512)
    dense(a, rows, 33, 64, output="fp32")


@pytest.mark.parametrize("n", [1, 7, 15, 16, 17, 64])
def test_columns(n):
    dense("bf16", 3, n, 256)
    dense("bf16", 9, n, 256)


@pytest.mark.parametrize("k", [64, 192, 320, 512, 1024, 2048])
def test_depths(k):
    for rows in (2, 7, 12):
        dense("bf16", rows, 8, k)


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_lanes_a_row(lanes):
    dense("bf16", 5, 21, 512, lanes=lanes, output="fp32")


@pytest.mark.parametrize("nbits,group", [(4, 32), (8, 128)])
@pytest.mark.parametrize("a", TYPES)
def test_formats(nbits, group, a):
    for rows in (2, 6, 16):
        dense(a, rows, 20, 256, nbits, group, output="fp32")


@pytest.mark.parametrize("a", TYPES)
def test_unquantized_weights(a):
    rng = np.random.default_rng(0)
    x, w = normal(rng, (5, 128), a), normal(rng, (9, 128), a)
    (y,) = launch(a, x, [(w.view(np.uint32), x, x, 9)], 16, 64, output="fp32")
    assert_close(y, product(x, values(w, a), a), FP32)


@pytest.mark.parametrize("a", TYPES)
def test_several_matrices(a):
    multi(a, 3, (40, 32, 4, 4), 256)
    multi(a, 12, (16, 0, 33, 1), 64)
    multi(a, 8, (32, 1, 0, 0), 512, output="fp32")


def experts(e, ids, host="cpu"):
    tokens, k = ids.shape
    mt, r = most_rows(tokens)
    order, offsets, bmap = routing_tables(ids, e.count, 16)
    bmap = bmap[: ids.size]
    act = np.zeros((ids.size, e.width), np.uint16)
    lanes = lanes_for(e.hidden)
    p = ints(e.hidden, e.width, k, lanes)
    buffers = [e.x, *e.gate[:3], *e.up[:3], order, offsets, bmap, act, p]
    grid = (-(-e.width // (2 * r * (32 // lanes))), len(bmap), 1)
    kernel = f"moe_gate_up_rows_{e.a}_m{mt}"
    run("gemv_rows", kernel, buffers, grid, THREADS, host, e.constants)
    down = np.full((ids.size, e.hidden), np.nan, np.float32)
    lanes = lanes_for(e.width)
    p = ints(e.hidden, e.width, k, lanes)
    buffers = [act, *e.down[:3], order, offsets, bmap, down, p]
    grid = (-(-e.hidden // (4 * r * (32 // lanes))), len(bmap), 1)
    run("gemv_rows", f"moe_down_rows_{e.a}_m{mt}", buffers, grid, THREADS, host, e.constants)
    unsorted = np.zeros_like(act)
    unsorted[order] = act
    act, down = values(unsorted, e.a).reshape(tokens, k, -1), down.reshape(tokens, k, -1)
    want_act, _ = e.reference(ids, rounded=False)
    assert_close(act, want_act, ULP[e.a] + FP32, "act")
    full = e.full("down", rounded=False)[ids].astype(np.float64)
    assert_close(down, np.einsum("tkhw,tkw->tkh", full, act), FP32, "down")


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 16])
def test_experts(a, tokens):
    experts(Experts(a, tokens, 256, 64, 8), spread_ids(tokens, 3, 8))


def test_experts_of_the_35b_model():
    experts(Experts("bf16", 4, 2048, 512, 4), spread_ids(4, 2, 4))


def test_experts_all_on_one_and_all_apart():
    for tokens in (2, 16):
        e = Experts("bf16", tokens, 128, 64, 18)
        experts(e, np.full((tokens, 1), 17))
        experts(e, np.arange(tokens)[:, None])


@pytest.mark.parametrize("host", ["cpu", "checked"])
def test_expert_width_that_is_no_multiple_of_the_columns(host):
    for hidden in (32, 96):
        experts(Experts("bf16", 3, hidden, 32, 4, group=32), spread_ids(3, 2, 4), host)


@pytest.mark.parametrize("rows", [3, 7, 12])
def test_checked(rows):
    dense("bf16", rows, 35, 320, host="checked")
    dense("bf16", rows, 5, 64, output="fp32", host="checked")
    multi("bf16", rows, (5, 3, 7, 1), 64, host="checked")
    multi("bf16", rows, (5, 0, 7, 1), 64, output="fp32", host="checked")
    e = Experts("bf16", rows, 96, 32, 3, group=32)
    ids = np.zeros((rows, 1), int)
    ids[-1] = 2
    experts(e, ids, "checked")
