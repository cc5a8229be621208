"""Attention of one row: preparation and cache write, split attention in all its forms, merge and
gate.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.harness import ceil_div, launch
from tests.kernels.reference import (
    BF16,
    DTYPES,
    FP16,
    Dtype,
    assert_rounded,
    attend,
    head_norm,
    rope,
    sigmoid,
)

D = 256
EPS = 1e-6


def constants(
    heads: int = 8,
    kv_heads: int = 1,
    *,
    simdgroups: int = 4,
    splits: int = 4,
    block: int = 0,
    pack: int = 4,
    prepare: int = 2,
    merge: int = 4,
    rotary: int = 64,
) -> dict:
    return {
        60: heads,
        61: kv_heads,
        62: rotary,
        63: EPS,
        64: simdgroups,
        65: splits,
        66: block,
        67: pack,
        68: prepare,
        69: merge,
    }


def frequencies(rotary: int) -> np.ndarray:
    return (1e7 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)


@pytest.mark.parametrize(
    "host,a,heads,kv_heads,position,rotary",
    [
        ("checked", "bf16", 2, 1, 0, 64),
        ("checked", "fp16", 3, 1, 5, 16),
        ("cpu", "bf16", 16, 2, 131071, 64),
        ("cpu", "fp16", 8, 1, 7, 128),
        ("cpu", "bf16", 8, 1, 63, 256),
    ],
)
def test_prepare(host: str, a: str, heads: int, kv_heads: int, position: int, rotary: int) -> None:
    a = DTYPES[a]
    rng = np.random.default_rng(0)
    capacity = 64 if position < 64 else 131072
    c = constants(heads, kv_heads, rotary=rotary)
    q_gate, k, v = (
        a.store(rng.standard_normal(n) * 2) for n in (heads * 2 * D, kv_heads * D, kv_heads * D)
    )
    q_norm, k_norm = a.store(rng.standard_normal(D)), a.store(rng.standard_normal(D))
    inv_freq = frequencies(rotary)
    q_out, k_cache, v_cache = (
        a.empty(heads, D),
        a.empty(kv_heads, capacity, D),
        a.empty(kv_heads, capacity, D),
    )
    untouched = k_cache.copy()
    at = np.array([position], np.int32)
    buffers = [q_gate, k, v, q_norm, k_norm, inv_freq, at, capacity, q_out, k_cache, v_cache]
    grid = ceil_div(heads + 2 * kv_heads, c[68])
    launch(f"attention_prepare_{a.name}", buffers, grid, 32 * c[68], host, c)
    q = rope(
        head_norm(a.load(q_gate).reshape(heads, 2, D)[:, 0], a.load(q_norm), EPS),
        position,
        inv_freq,
    )
    kk = rope(head_norm(a.load(k).reshape(kv_heads, D), a.load(k_norm), EPS), position, inv_freq)
    assert_rounded(a.load(q_out), q, a, 2 + np.abs(q).max(), "q")
    assert_rounded(a.load(k_cache[:, position]), kk, a, 2 + np.abs(kk).max(), "k")
    np.testing.assert_array_equal(v_cache[:, position], v.reshape(kv_heads, D))
    others = np.delete(np.arange(capacity), position)
    np.testing.assert_array_equal(k_cache[:, others], untouched[:, others])
    np.testing.assert_array_equal(v_cache[:, others], untouched[:, others])


class Case:
    """Random q and caches; rows past the context hold NaN, so that reading one shows."""

    def __init__(
        self,
        a: Dtype,
        length: int,
        capacity: int,
        heads: int = 8,
        kv_heads: int = 1,
        scale: float = 1.0,
    ):
        rng = np.random.default_rng(length)
        self.a, self.length, self.capacity, self.heads, self.kv_heads = (
            a,
            length,
            capacity,
            heads,
            kv_heads,
        )
        self.q_gate = a.store(rng.standard_normal((heads, 2 * D)))
        self.q = a.store(rng.standard_normal((heads, D)) * scale)
        self.k, self.v = a.empty(kv_heads, capacity, D), a.empty(kv_heads, capacity, D)
        self.k[:, :length] = a.store(rng.standard_normal((kv_heads, length, D)) * scale)
        self.v[:, :length] = a.store(rng.standard_normal((kv_heads, length, D)))
        self.position = np.array([length - 1], np.int32)

    def run(self, c: dict, host: str, kernel: str = "attention_decode") -> tuple[np.ndarray, ...]:
        """(output, max and sum, o) over c's splits."""
        a, splits = self.a, c[65]
        ml = np.full((self.heads, splits, 2), np.nan, np.float32)
        o = np.full((self.heads, splits, D), np.nan, np.float32)
        out = a.empty(self.heads, D)
        buffers = [self.q, self.k, self.v, self.position, self.capacity, ml, o]
        grid = (splits, self.heads // c[67])
        launch(f"{kernel}_{a.name}", buffers, grid, 32 * c[64], host, c)
        buffers = [ml, o, self.q_gate, self.position, out]
        grid = (D // 64, self.heads)
        launch(f"attention_merge_{a.name}", buffers, grid, 32 * c[69], host, c)
        return out, ml, o

    def check(self, out: np.ndarray) -> None:
        a, n = self.a, self.length
        want = attend(a.load(self.q), a.load(self.k[:, :n]), a.load(self.v[:, :n]))
        want = want * sigmoid(a.load(self.q_gate)[:, D:])
        assert_rounded(a.load(out), want, a, 4.0, f"context {n}")


# Tiles of 4 keys and 2 simdgroups: 8 tokens a round.
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 31])
def test_general_checked(length: int) -> None:
    case = Case(BF16, length, 40, heads=4)
    case.check(case.run(constants(4, simdgroups=2, splits=3, merge=2), "checked")[0])


@pytest.mark.parametrize("pack", [1, 2, 8])
def test_packs_checked(pack: int) -> None:
    case = Case(FP16, 13, 16, heads=8)
    case.check(case.run(constants(8, simdgroups=2, splits=2, pack=pack, merge=1), "checked")[0])


@pytest.mark.parametrize("length", [15, 16, 17])
def test_fixed_block_checked(length: int) -> None:
    case = Case(BF16, length, 48, heads=4)
    case.check(case.run(constants(4, simdgroups=2, splits=3, block=16, merge=2), "checked")[0])


@pytest.mark.parametrize("length", [1, 33, 70])
def test_strided_checked(length: int) -> None:
    case = Case(BF16, length, 96, heads=4)
    case.check(
        case.run(
            constants(4, simdgroups=2, splits=2, merge=2), "checked", "attention_decode_strided"
        )[0]
    )


@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
@pytest.mark.parametrize("merge", [2, 16])
def test_many_splits_checked(a: Dtype, merge: int) -> None:
    """38 of 41 splits in use: the merge takes weights of 32 and then of 6."""
    case = Case(a, 150, 152, heads=1)
    case.check(case.run(constants(1, simdgroups=1, splits=41, pack=1, merge=merge), "checked")[0])


@pytest.mark.parametrize("splits", [31, 32, 33, 63, 64, 65, 96, 130])
def test_numbers_of_splits(splits: int) -> None:
    case = Case(BF16, 4 * splits, 4 * splits, heads=2)
    out = case.run(constants(2, simdgroups=1, splits=splits, pack=2, merge=8), "cpu")[0]
    case.check(out)


@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 1000])
def test_lengths(a: Dtype, length: int) -> None:
    """16 query heads on 2 KV heads; more splits than tiles at the short end."""
    case = Case(a, length, 1024, heads=16, kv_heads=2)
    case.check(case.run(constants(16, 2, simdgroups=4, splits=16), "cpu")[0])


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1535])
def test_fixed_blocks(length: int) -> None:
    case = Case(BF16, length, 1536)
    out, ml, _ = case.run(constants(8, simdgroups=8, splits=3, block=512), "cpu")
    case.check(out)
    used = ceil_div(length, 512)
    assert np.isfinite(ml[:, :used]).all() and np.isnan(ml[:, used:]).all()


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("simdgroups", [2, 16])
def test_packed_equals_unpacked_to_the_bit(block: int, simdgroups: int) -> None:
    case = Case(BF16, 213, 256, heads=16, kv_heads=2, scale=1.5)
    results = [
        case.run(constants(16, 2, simdgroups=simdgroups, splits=4, block=block, pack=pack), "cpu")
        for pack in (1, 2, 4, 8)
    ]
    case.check(results[0][0])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 70, 150])
def test_tensor_cores_checked(length: int) -> None:
    """Tiles of 16 keys: simdgroups that have none, a last tile that ends early."""
    case = Case(BF16, length, 152)
    c = constants(8, simdgroups=2, splits=3, pack=8, merge=2)
    case.check(case.run(c, "checked", "mma_attention_decode")[0])


@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
@pytest.mark.parametrize("length", [2, 255, 256, 257, 1000])
def test_tensor_cores(a: Dtype, length: int) -> None:
    case = Case(a, length, 1024, heads=16, kv_heads=2, scale=1.5)
    c = constants(16, 2, simdgroups=8, splits=5, pack=8)
    case.check(case.run(c, "cpu", "mma_attention_decode")[0])


def test_uncoalesced_form() -> None:
    case = Case(FP16, 300, 320, heads=16, kv_heads=2)
    case.check(
        case.run(constants(16, 2, simdgroups=4, splits=2), "cpu", "attention_decode_strided")[0]
    )


@pytest.mark.parametrize("kernel,pack", [("attention_decode", 4), ("mma_attention_decode", 8)])
def test_large_scores_do_not_overflow(kernel: str, pack: int) -> None:
    """Scores of some thousands, growing along the context: the running maximum changes often."""
    case = Case(BF16, 64, 64, scale=1.0)
    ramp = np.linspace(1, 40, 64)[None, :, None] * np.sign(BF16.load(case.q))[0]
    case.k[:] = BF16.store(ramp * np.ones((1, 64, D)))
    case.check(case.run(constants(8, simdgroups=2, splits=2, pack=pack), "cpu", kernel)[0])


def test_equal_scores_average_the_values() -> None:
    case = Case(BF16, 100, 100)
    case.q[:] = 0
    out = case.run(constants(8, simdgroups=4, splits=3), "cpu")[0]
    case.check(out)
