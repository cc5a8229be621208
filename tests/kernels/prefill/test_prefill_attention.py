"""q/k norm, rotary and cache write of prefill attention."""

import numpy as np
import pytest

from tests.kernels import reference_prefill as ref
from tests.kernels.prefill.harness import (
    TYPES,
    ULP,
    assert_close,
    normal,
    params,
    rnd,
    run,
    values,
)

EPS = 1e-6


def prep(a, batch, tokens, hq, hkv, d=256, rd=64, offsets=(0,), capacity=None, first=0, host="cpu"):
    rng = np.random.default_rng(tokens)
    qg = normal(rng, (batch, tokens, hq, 2, d), a)
    k, v = (normal(rng, (batch, tokens, hkv, d), a) for _ in range(2))
    qw, kw = (normal(rng, d, a) for _ in range(2))
    inv_freq = (1e7 ** (-np.arange(rd // 2) / (rd // 2))).astype(np.float32)
    capacity = capacity or first + tokens
    q_out = np.zeros((batch, hq, tokens, d), np.uint16)
    caches = [np.full((batch, hkv, capacity, d), 0x1234, np.uint16) for _ in range(2)]
    stride = int(len(offsets) > 1)
    p = params(tokens, hq, hkv, capacity, first, stride, EPS)
    buffers = [qg, k, v, qw, kw, inv_freq, np.array(offsets, np.int32), q_out, *caches, p]
    grid = (-(-tokens // 4), hq + 2 * hkv, batch)
    run("attention_prep", f"attention_prep_{a}_d{d}_r{rd}", buffers, grid, (128, 1, 1), host)

    positions = np.broadcast_to(np.array(offsets)[:, None], (batch, 1)) + np.arange(tokens)

    def expected(x, w):
        y = ref.rotate(ref.rms_norm(values(x, a), values(w, a), EPS), inv_freq, positions)
        return rnd(y, a).transpose(0, 2, 1, 3)

    assert_close(values(q_out, a), expected(qg[..., 0, :], qw), ULP[a], "q")
    rows = slice(first, first + tokens)
    assert_close(values(caches[0][:, :, rows], a), expected(k, kw), ULP[a], "k")
    np.testing.assert_array_equal(caches[1][:, :, rows], v.transpose(0, 2, 1, 3))
    for cache in caches:
        outside = np.delete(cache, np.arange(first, first + tokens), 2)
        assert (outside == 0x1234).all()


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17])
def test_lengths(a, tokens):
    prep(a, 1, tokens, 8, 1)


@pytest.mark.parametrize("a", TYPES)
def test_position_and_cache_row(a):
    prep(a, 1, 5, 16, 2, offsets=(1000,), capacity=64, first=59)
    prep(a, 1, 3, 2, 1, offsets=(131071,), capacity=8, first=2)


def test_batch_with_one_offset_and_with_its_own():
    prep("bf16", 3, 5, 2, 1, offsets=(7,), capacity=16, first=7)
    prep("bf16", 3, 5, 2, 1, offsets=(7, 0, 300), capacity=16, first=7)


def test_prep_checked():
    prep("bf16", 2, 5, 2, 1, offsets=(3, 4), capacity=9, first=2, host="checked")
