"""norm + GEMV over several matrices, the residual and the fp32 form, and the norm apart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.harness import MMA, gemv_constants, gemv_grid, gemv_name, launch, weight_buffers
from tests.kernels.reference import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    Dtype,
    assert_rounded,
    make_weight,
    product,
    rms_norm,
)


def run(
    host: str,
    a: Dtype,
    k: int,
    rows: list[int],
    bits: list[int],
    group: int = 64,
    out: Dtype | None = None,
    h_scale: float = 1.0,
    seed: int = 0,
    mma: bool = False,
    **shape,
) -> None:
    """One launch against the reference; mma: of gemv_mma.h."""
    out = out or a
    rng = np.random.default_rng(seed)
    weights = [make_weight(rng, (n, k), a, b, group) for n, b in zip(rows, bits, strict=True)]
    h = a.store(rng.standard_normal(k) * h_scale)
    norm_weight = a.store(rng.standard_normal(k))
    c = gemv_constants(k, weights, **shape)
    buffers = {0: h}
    x = a.load(h)
    if c[16]:
        buffers[1] = norm_weight
        x = rms_norm(x, a.load(norm_weight), c[19], a)
    if c[17]:
        buffers[2] = a.store(rng.standard_normal(rows[0]))
    x_out = a.empty(k)
    if c[18]:
        buffers[3] = x_out
    ys = []
    for i, w in enumerate(weights):
        buffers.update(weight_buffers(w, 4 + 4 * i))
        ys.append(out.empty(rows[i]))
        buffers[7 + 4 * i] = ys[i]
    name = ("mma_" if mma else "") + gemv_name(a, out, k)
    launch(name, buffers, gemv_grid(c), 32 * c[14], host, c)
    if c[18]:
        # The norm's fp32 sum is added in another order: one rounding step either way, seldom.
        got = a.load(x_out)
        assert np.abs(got - x).max() <= a.ulp * np.abs(x).max()
        assert (got != x).mean() < 0.02
        x = got
    # The fp32 sums of gemv_mma.h carry 128 x, or 1024 x, besides code * x.
    base = (8 if a is BF16 else 64) if mma else 1
    for i, w in enumerate(weights):
        exact, size = product(w, x)
        slack = size * (0 if not c[16] or c[18] else a.ulp * 0.02)
        what = f"matrix {i}"
        if c[17]:
            r = a.load(buffers[2])
            exact = r + exact
            assert_rounded(
                a.load(ys[i]),
                exact,
                a,
                size * base + slack * 5e5 + np.abs(exact - r) * a.ulp * 2.6e5,
                what,
            )
        else:
            assert_rounded(out.load(ys[i]), exact, out, size * base + slack * 5e5, what)


# Every (R, U) that is compiled in, each with another format, on tiny shapes that end inside a
# block.
SHAPES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]


@pytest.mark.parametrize("i", range(len(SHAPES)), ids=[f"r{r}u{u}" for r, u in SHAPES])
def test_every_shape_checked(i: int) -> None:
    r, u = SHAPES[i]
    bits = [4, 6, 8][i % 3]
    lanes = 8
    k = lanes * u * {4: 32, 6: 16, 8: 16}[bits] * (1 + i % 3)
    group = 32 if k % 64 else 64
    run(
        "checked",
        [BF16, FP16][i // 2 % 2],
        k,
        [r * 4 * 2 + 3],
        [bits],
        group,
        lanes=lanes,
        r=r,
        u=u,
        simdgroups=2,
    )


def test_four_matrices_of_different_bits_with_norm_checked() -> None:
    run(
        "checked",
        BF16,
        512,
        [9, 5, 1, 3],
        [4, 8, 16, 6],
        64,
        lanes=8,
        r=2,
        u=1,
        simdgroups=2,
        norm=True,
        write_x=True,
    )


@pytest.mark.parametrize("split", [2, 4])
def test_split_of_k_checked(split: int) -> None:
    run(
        "checked",
        FP16,
        1024,
        [13],
        [4],
        128,
        lanes=8,
        r=2,
        u=1,
        split=split,
        simdgroups=4,
        residual=True,
    )


def test_several_blocks_a_simdgroup_across_matrices_checked() -> None:
    run(
        "checked",
        BF16,
        256,
        [21, 7],
        [4, 8],
        32,
        lanes=8,
        r=1,
        u=1,
        simdgroups=2,
        blocks=3,
        norm=True,
    )


def test_more_pieces_than_threads_checked() -> None:
    run(
        "checked",
        BF16,
        1024,
        [3],
        [4],
        64,
        lanes=32,
        r=1,
        u=1,
        simdgroups=1,
        norm=True,
        write_x=True,
    )


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("a", ["bf16", "fp16"])
def test_formats(a: str, bits: int, group: int) -> None:
    # lanes * u units of 4 bits are 2048 values, of 6 or 8 bits 1024.
    run("cpu", DTYPES[a], 2048, [37], [bits], group, lanes=32, r=2, u=2, norm=True, write_x=True)


@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
def test_delta_net_input_projections(a: Dtype) -> None:
    """[qkv | z | b | a] of the 35B model, its long matrices cut short."""
    run(
        "cpu",
        a,
        2048,
        [515, 256, 32, 32],
        [4] * 4,
        lanes=32,
        r=4,
        u=2,
        simdgroups=8,
        norm=True,
        write_x=True,
    )


def test_out_projection_with_residual() -> None:
    run("cpu", BF16, 4096, [260], [4], lanes=32, r=1, u=4, simdgroups=8, residual=True)


def test_router_and_shared_gate_in_float32() -> None:
    run(
        "cpu",
        BF16,
        2048,
        [256, 1],
        [8, 8],
        out=FP32,
        lanes=32,
        r=1,
        u=1,
        split=4,
        simdgroups=8,
        norm=True,
        write_x=True,
    )


def test_bundled_input_projections() -> None:
    run(
        "cpu",
        BF16,
        256,
        [1024, 512, 4, 4],
        [4] * 4,
        lanes=8,
        r=2,
        u=1,
        simdgroups=4,
        norm=True,
        write_x=True,
    )


@pytest.mark.parametrize("host", ["checked", "cpu"])
@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
def test_tensor_cores(host: str, a: Dtype) -> None:
    """Matrices that end inside a block of 16 rows, blocks that cross matrices, a team a threadgroup
    and two, one and several rounds of gathering."""
    run(host, a, 512, [21, 16, 3], [4] * 3, mma=True, **MMA, u=2, split=2, simdgroups=4,
        blocks=3, norm=True, write_x=True)  # fmt: skip
    run(host, a, 512, [70], [4], mma=True, **MMA, u=4, split=1, simdgroups=1, blocks=5,
        residual=True)  # fmt: skip


def test_tensor_cores_at_35b_shapes() -> None:
    shape = dict(mma=True, **MMA, u=2)
    run("cpu", BF16, 2048, [515, 256, 32, 32], [4] * 4, **shape, split=8, simdgroups=8, blocks=9,
        norm=True, write_x=True)  # fmt: skip
    run("cpu", BF16, 4096, [260], [4], **shape, split=16, simdgroups=16, residual=True)


@pytest.mark.parametrize("h_scale", [0.0, 1e-4, 3e3])
def test_row_scales(h_scale: float) -> None:
    """A zero row, one below eps, and a large one."""
    run("cpu", BF16, 2048, [64], [4], h_scale=h_scale, lanes=32, r=2, u=2, norm=True, write_x=True)


@pytest.mark.parametrize("host,k,n", [("checked", 1024, 5), ("cpu", 2048, 40)])
def test_fused_norm_rounds_as_the_norm_apart(host: str, k: int, n: int) -> None:
    """norm_row, then the plain product: the same bits as the fused form."""
    rng = np.random.default_rng(3)
    a = BF16
    w = make_weight(rng, (n, k), a, 4, 64)
    h, weight = a.store(rng.standard_normal(k)), a.store(rng.standard_normal(k))
    c = gemv_constants(k, [w], lanes=32, r=2, u=1, simdgroups=4, norm=True)
    fused, apart, x = a.empty(n), a.empty(n), a.empty(k)
    matrix = weight_buffers(w, 4)
    launch("gemv_bf16_k2048", {0: h, 1: weight, **matrix, 7: fused}, gemv_grid(c), 128, host, c)
    launch("norm_row_bf16", {0: h, 1: weight, 2: x}, 1, 128, host, c)
    c = {**c, 16: False}
    launch("gemv_bf16_k2048", {0: x, **matrix, 7: apart}, gemv_grid(c), 128, host, c)
    np.testing.assert_array_equal(fused, apart)


@pytest.mark.parametrize("host,n", [("checked", 35), ("cpu", 260)])
@pytest.mark.parametrize("mma", [False, True], ids=["lanes", "tensor_cores"])
@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
def test_residual_is_added_to_the_rounded_product(a: Dtype, mma: bool, host: str, n: int) -> None:
    """rnd(residual + rnd(product)), bit for bit, where one rounding would give other values."""
    k, rng = 512, np.random.default_rng(4)
    w, x = make_weight(rng, (n, k), a, 4, 64), a.store(rng.standard_normal(k))
    exact, _ = product(w, a.load(x))
    residual = a.store(rng.standard_normal(n) * exact.std())
    r = a.load(residual)
    assert (a.rnd(r + exact) != a.rnd(r + a.rnd(exact))).sum() > 1
    shape = dict(**MMA, u=2, split=2) if mma else dict(lanes=8, r=2, u=1)
    prefix = "mma_" if mma else ""
    alone, added = a.empty(n), a.empty(n)
    for y, more in ((alone, {}), (added, {2: residual})):
        c = gemv_constants(k, [w], **shape, residual=bool(more))
        buffers = {0: x, **more, **weight_buffers(w, 4), 7: y}
        launch(prefix + gemv_name(a, a, k), buffers, gemv_grid(c), 32 * c[14], host, c)
    np.testing.assert_array_equal(added, a.store(r + a.load(alone)))
