"""lm_head with argmax, its two stages, ties, and the embedding of the slot's token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.harness import ceil_div, gemv_constants, gemv_grid, kmax, launch, weight_buffers
from tests.kernels.reference import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    Dtype,
    Weight,
    assert_rounded,
    make_weight,
    product,
    rms_norm,
)


def run_head(
    host: str, a: Dtype, w: Weight, h: np.ndarray, norm_weight: np.ndarray, logits: bool, **shape
) -> tuple[int, np.ndarray]:
    """(token, logits) after head_gemv and argmax_final."""
    n, k = w.values.shape
    c = gemv_constants(k, [w], norm=True, **shape)
    groups = gemv_grid(c)
    c |= {20: logits, 21: groups}
    values, ids = np.full(groups, np.nan, np.float32), np.full(groups, 7, np.uint32)
    out = np.full(n, np.nan, np.float32)
    buffers = {0: h, 1: norm_weight, 6: values, 7: ids}
    buffers.update(weight_buffers(w, 2))
    if logits:
        buffers[5] = out
    threads = 32 * c[14]
    launch(f"head_gemv_{a.name}_k{kmax(k)}", buffers, groups, threads, host, c)
    token = np.zeros(1, np.uint32)
    launch("argmax_final", [values, ids, token], 1, threads, host, c)
    return int(token[0]), out


def head_case(
    a: Dtype, n: int, k: int, bits: int, seed: int = 0
) -> tuple[Weight, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    w = make_weight(rng, (n, k), a, bits, 64)
    h, norm_weight = a.store(rng.standard_normal(k)), a.store(rng.random(k) + 0.5)
    return w, h, norm_weight, rms_norm(a.load(h), a.load(norm_weight), 1e-6, a)


def check_head(host: str, a: Dtype, n: int, k: int, bits: int, **shape) -> None:
    w, h, norm_weight, x = head_case(a, n, k, bits)
    token, logits = run_head(host, a, w, h, norm_weight, True, **shape)
    exact, size = product(w, x)
    # The norm may round a few values of x the other way.
    assert_rounded(logits, exact, FP32, size * (1 + a.ulp * 1e4))
    assert token == int(np.argmax(logits))
    assert run_head(host, a, w, h, norm_weight, False, **shape)[0] == token


def test_head_checked() -> None:
    check_head("checked", BF16, 45, 256, 4, lanes=8, r=2, u=1, simdgroups=2, blocks=2)


def test_head_bundled() -> None:
    check_head("cpu", FP16, 4096, 256, 4, lanes=8, r=4, u=1, simdgroups=8, blocks=2)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_head_35b_rows(bits: int) -> None:
    check_head("cpu", BF16, 1003, 2048, bits, lanes=32, r=4, u=2, simdgroups=8, blocks=3)


@pytest.mark.parametrize("twins", [(3, 4), (40, 2), (7, 44), (0, 1)])
@pytest.mark.parametrize("host", ["checked", "cpu"])
def test_equal_logits_choose_the_lowest_id(host: str, twins: tuple[int, int]) -> None:
    """Twin rows in one lane group, in two simdgroups, in two threadgroups."""
    a, n, k = BF16, 45, 256
    w, h, norm_weight, x = head_case(a, n, k, 4)
    best = int(np.argmax(w.values @ x))
    for t in twins:
        for part in (w.w, w.scales, w.biases, w.values):
            part[t] = part[best]
    shape = {"lanes": 8, "r": 2, "u": 1, "simdgroups": 2, "blocks": 2}
    token, logits = run_head(host, a, w, h, norm_weight, True, **shape)
    assert logits[twins[0]] == logits[twins[1]]
    assert token == min(*twins, best)


def test_all_logits_equal_or_nan() -> None:
    a, n, k = BF16, 45, 256
    w, h, norm_weight, _ = head_case(a, n, k, 4)
    shape = {"lanes": 8, "r": 2, "u": 1, "simdgroups": 2, "blocks": 2}
    assert run_head("cpu", a, w, a.store(np.zeros(k)), norm_weight, False, **shape)[0] == 0
    assert (
        run_head("checked", a, w, a.store(np.full(k, np.nan)), norm_weight, False, **shape)[0] == 0
    )


@pytest.mark.parametrize("a", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_embedding(a: str, bits: int) -> None:
    a = DTYPES[a]
    rng = np.random.default_rng(6)
    k, n, group = 320, 11, 32
    w = make_weight(rng, (n, k), a, bits, group)
    c = gemv_constants(k, [w], simdgroups=1) | {20: False, 21: 1}
    for token, row in ((0, 0), (10, 10), (11, 10), (2**32 - 1, 10)):
        h = a.empty(k)
        buffers = {0: np.array([token], np.uint32), 4: h, **weight_buffers(w, 1)}
        launch(f"embed_row_{a.name}", buffers, ceil_div(k // 8, 32), 32, "checked", c)
        np.testing.assert_array_equal(h, a.store(w.values[row]))
