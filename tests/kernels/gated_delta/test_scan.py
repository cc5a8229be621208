"""DeltaNet scans: against the recurrence, bit-equal across forms and chunkings."""

import numpy as np
import pytest

from tests.kernels.harness import ceil_div, halves, launch, params
from tests.kernels.reference import (
    BF16,
    GatedDeltaShape,
    assert_close,
    gated_delta,
    gated_delta_gated_norm,
)

D = 128
NORM_EPS = 1e-6


class Case:
    """Random operands of one call, as stored."""

    def __init__(self, a, batch, tokens, hk, hv, seed=0):
        rng = np.random.default_rng(seed)
        self.a, self.batch, self.tokens, self.hk, self.hv = a, batch, tokens, hk, hv

        def unit(shape, scale):
            x = rng.standard_normal(shape)
            return a.store(x / np.linalg.norm(x, axis=-1, keepdims=True) * scale)

        self.q = unit((batch, tokens, hk, D), D**-0.5)
        self.k = unit((batch, tokens, hk, D), 1.0)
        self.v = a.store(rng.standard_normal((batch, tokens, hv, D)))
        self.g = np.exp(-rng.exponential(0.2, (batch, tokens, hv))).astype(np.float32)
        self.beta = rng.uniform(0, 1, (batch, tokens, hv)).astype(np.float32)
        self.state = (rng.standard_normal((batch, hv, D, D)) * 0.3).astype(np.float32)
        self.z = a.store(rng.standard_normal((batch, tokens, hv, D)))
        self.weight = a.store(rng.uniform(0.5, 1.5, D))

    def part(self, first, last, state):
        out = object.__new__(Case)
        out.__dict__.update(self.__dict__)
        out.tokens, out.state = last - first, state
        for name in ("q", "k", "v", "g", "beta", "z"):
            setattr(out, name, np.ascontiguousarray(getattr(self, name)[:, first:last]))
        return out

    def reference(self):
        q, k, v = (self.a.load(x) for x in (self.q, self.k, self.v))
        return gated_delta(
            q, k, v, self.g, self.beta, self.state, GatedDeltaShape(self.hk, self.hv)
        )


def scan(c, kernel="gated_delta_scan", host="cpu"):
    """Returns y [B, T, Hv, D], fp32 or, from gated_delta_scan_norm, as stored, and the state."""
    state = np.full_like(c.state, np.nan)
    p = params(c.tokens, c.hk, c.hv, NORM_EPS)
    buffers = [c.q, c.k, c.v, c.g, c.beta, c.state, state]
    if kernel == "gated_delta_scan_norm":
        y = c.a.empty(*c.v.shape)
        buffers += [c.z, c.weight, y, p]
        grid, threads = (c.hv, c.batch), 32 * D // 8
    else:
        y = np.full(c.v.shape, np.nan, np.float32)
        buffers += [y, p]
        grid, threads = (D // 32, c.hv, c.batch), 128
    launch(f"{kernel}_{c.a.name}_r2", buffers, grid, threads, host)
    return y, state


def norm(c, y, host="cpu"):
    out = c.a.empty(*y.shape)
    rows = c.batch * c.tokens * c.hv
    buffers = [y, c.z, c.weight, out, rows, NORM_EPS]
    launch(f"gated_norm_{c.a.name}", buffers, ceil_div(rows, 4), 128, host)
    return out


def check_norm(c, got, y, tolerance):
    want = c.a.rnd(gated_delta_gated_norm(y, c.a.load(c.z), c.a.load(c.weight), NORM_EPS))
    assert_close(c.a.load(got), want, tolerance)


@halves
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 37])
def test_scan(a, tokens):
    c = Case(a, 1, tokens, 2, 4, tokens)
    y, state = scan(c)
    want_y, want_state = c.reference()
    assert_close(y, want_y, 2e-6)
    assert_close(state, want_state, 2e-6)
    check_norm(c, norm(c, y), y, a.ulp)


@halves
def test_fused_norm_equals_scan_then_norm(a):
    for tokens in (1, 15, 16, 17, 49):
        c = Case(a, 1, tokens, 1, 2, tokens)
        y, state = scan(c)
        fused, fused_state = scan(c, "gated_delta_scan_norm")
        np.testing.assert_array_equal(fused_state, state)
        np.testing.assert_array_equal(fused, norm(c, y))


@halves
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_block_scan_gives_the_same_bits(a, tokens):
    c = Case(a, 2, tokens, 1, 2, tokens)
    for got, want in zip(scan(c, "gated_delta_scan_block"), scan(c), strict=True):
        np.testing.assert_array_equal(got, want)


def test_one_piece_and_chunks_give_the_same_bits():
    c = Case(BF16, 2, 41, 2, 4)
    for kernel in ("gated_delta_scan", "gated_delta_scan_norm"):
        y, state = scan(c, kernel)
        at, s, parts = 0, c.state, []
        for n in (16, 1, 7, 17):
            part, s = scan(c.part(at, at + n, s), kernel)
            parts.append(part)
            at += n
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), y)
        np.testing.assert_array_equal(s, state)


@pytest.mark.parametrize("left", [True, False])
def test_padding_leaves_the_state_alone(left):
    c = Case(BF16, 2, 13, 1, 2)
    pad = slice(0, 5) if left else slice(8, 13)
    c.g[1, pad], c.beta[1, pad] = 1.0, 0.0
    keep = (5, 13) if left else (0, 8)
    y, state = scan(c)
    short, short_state = scan(c.part(*keep, c.state))
    np.testing.assert_array_equal(state[1], short_state[1])
    np.testing.assert_array_equal(y[1, slice(*keep)], short[1])


def test_extreme_gates():
    c = Case(BF16, 1, 9, 1, 2)
    c.g[0, 2], c.g[0, 3], c.beta[0, 4], c.beta[0, 5] = 0.0, 1.0, 1.0, 0.0
    y, state = scan(c)
    want_y, want_state = c.reference()
    assert_close(y, want_y, 2e-6)
    assert_close(state, want_state, 2e-6)


def test_head_counts_of_the_35b_model():
    c = Case(BF16, 1, 3, 16, 32)
    y, state = scan(c)
    want_y, want_state = c.reference()
    assert_close(y, want_y, 2e-6)
    assert_close(state, want_state, 2e-6)


@halves
@pytest.mark.parametrize(
    "kernel", ["gated_delta_scan", "gated_delta_scan_block", "gated_delta_scan_norm"]
)
def test_checked(a, kernel):
    # No multiple of the tokens that are loaded at once: a load past the end would be seen.
    c = Case(a, 1, 17, 1, 1)
    y, _ = scan(c, kernel, "checked")
    if kernel == "gated_delta_scan":
        check_norm(c, norm(c, y, "checked"), y, a.ulp)
