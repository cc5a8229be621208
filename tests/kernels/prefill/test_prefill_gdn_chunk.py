"""DeltaNet in matrix form against the recurrence: block edges, padding, extreme gates."""

import numpy as np
import pytest

from tests.kernels.prefill.harness import TYPES, assert_close, ints, run
from tests.kernels.prefill.test_prefill_gdn_scan import Case, scan

D, C = 128, 32
TOLERANCE = 5e-5


def chunked(c, host="cpu"):
    blocks = -(-c.tokens // C)
    inverse, mix = (np.full((c.batch, c.hv, blocks, C, C), np.nan, np.float32) for _ in range(2))
    decay = np.full((c.batch, c.hv, blocks, C), np.nan, np.float32)
    p = ints(c.tokens, c.hk, c.hv, blocks)
    buffers = [c.q, c.k, c.g, c.beta, inverse, mix, decay, p]
    grid = (blocks, c.hv, c.batch)
    run("gdn_chunk", f"gdn_chunk_prepare_{c.a}", buffers, grid, (128, 1, 1), host)
    y, state = np.full(c.v.shape, np.nan, np.float32), np.full_like(c.state, np.nan)
    buffers = [c.q, c.k, c.v, c.beta, inverse, mix, decay, c.state, state, y, p]
    grid = (D // 16, c.hv, c.batch)
    run("gdn_chunk", f"gdn_chunk_scan_{c.a}", buffers, grid, (128, 1, 1), host)
    return y, state


def check(c, host="cpu"):
    y, state = chunked(c, host)
    want_y, want_state = c.reference()
    assert_close(y, want_y, TOLERANCE, "y")
    assert_close(state, want_state, TOLERANCE, "state")


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 70])
def test_block_edges(a, tokens):
    check(Case(a, 1, tokens, 1, 2, tokens))


def test_batch_and_shared_key_heads():
    check(Case("bf16", 2, 35, 2, 4))


def test_gates_at_their_ends():
    c = Case("bf16", 1, 40, 1, 2)
    c.g[0, 3], c.g[0, 20:23], c.g[0, 30] = 0.0, 0.0, 1.0
    c.beta[0, 5], c.beta[0, 6] = 1.0, 0.0
    check(c)


def test_the_same_key_again_and_again_without_decay():
    c = Case("bf16", 1, 64, 1, 1)
    c.k[:], c.g[:], c.beta[:] = c.k[:, :1], 1.0, 1.0
    check(c)


def test_padding_leaves_the_state_alone():
    c = Case("bf16", 1, 50, 1, 1)
    c.g[0, 20:], c.beta[0, 20:] = 1.0, 0.0
    _, state = chunked(c)
    _, short = chunked(c.part(0, 20, c.state))
    assert_close(state, short, 1e-6)


def test_chunks_continue_one_another():
    c = Case("bf16", 1, 70, 1, 1)
    y, state = chunked(c)
    head, middle = chunked(c.part(0, 37, c.state))
    rest, end = chunked(c.part(37, 70, middle))
    assert_close(np.concatenate([head, rest], 1), y, TOLERANCE)
    assert_close(end, state, TOLERANCE)
    scan_y, scan_state = scan(c)
    assert_close(y, scan_y, TOLERANCE)
    assert_close(state, scan_state, TOLERANCE)


def test_checked():
    check(Case("bf16", 1, 34, 1, 1), "checked")
