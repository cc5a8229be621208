"""q/k norm, rotary and cache write of prefill attention."""

import numpy as np
import pytest

from tests.kernels.harness import ceil_div, halves, launch, params
from tests.kernels.reference import BF16, assert_close, head_norm, rope

EPS = 1e-6


def prep(a, batch, tokens, hq, hkv, d=256, rd=64, offsets=(0,), capacity=None, first=0, host="cpu"):
    rng = np.random.default_rng(tokens)
    qg = a.store(rng.standard_normal((batch, tokens, hq, 2, d)))
    k, v = (a.store(rng.standard_normal((batch, tokens, hkv, d))) for _ in range(2))
    qw, kw = (a.store(rng.standard_normal(d)) for _ in range(2))
    inv_freq = (1e7 ** (-np.arange(rd // 2) / (rd // 2))).astype(np.float32)
    capacity = capacity or first + tokens
    q_out = a.empty(batch, hq, tokens, d)
    caches = [a.store(np.full((batch, hkv, capacity, d), 7.0)) for _ in range(2)]
    stride = int(len(offsets) > 1)
    p = params(tokens, hq, hkv, capacity, first, stride, EPS)
    buffers = [qg, k, v, qw, kw, inv_freq, np.array(offsets, np.int32), q_out, *caches, p]
    grid = (ceil_div(tokens, 4), hq + 2 * hkv, batch)
    launch(f"attention_prepare_rows_{a.name}_d{d}_r{rd}", buffers, grid, 128, host)

    positions = np.broadcast_to(np.array(offsets)[:, None], (batch, 1)) + np.arange(tokens)

    def expected(x, w):
        y = rope(head_norm(a.load(x), a.load(w), EPS), positions[..., None], inv_freq)
        return a.rnd(y).transpose(0, 2, 1, 3)

    assert_close(a.load(q_out), expected(qg[..., 0, :], qw), a.ulp, "q")
    rows = slice(first, first + tokens)
    assert_close(a.load(caches[0][:, :, rows]), expected(k, kw), a.ulp, "k")
    np.testing.assert_array_equal(caches[1][:, :, rows], v.transpose(0, 2, 1, 3))
    for cache in caches:
        outside = np.delete(cache, np.arange(first, first + tokens), 2)
        assert (a.load(outside) == 7).all()


@halves
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17])
def test_lengths(a, tokens):
    prep(a, 1, tokens, 8, 1)


@halves
def test_position_and_cache_row(a):
    prep(a, 1, 5, 16, 2, offsets=(1000,), capacity=64, first=59)
    prep(a, 1, 3, 2, 1, offsets=(131071,), capacity=8, first=2)


def test_batch_with_one_offset_and_with_its_own():
    prep(BF16, 3, 5, 2, 1, offsets=(7,), capacity=16, first=7)
    prep(BF16, 3, 5, 2, 1, offsets=(7, 0, 300), capacity=16, first=7)


def test_prep_checked():
    prep(BF16, 2, 5, 2, 1, offsets=(3, 4), capacity=9, first=2, host="checked")
