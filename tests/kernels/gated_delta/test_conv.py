"""Conv, SiLU, l2 norm and gates of a prefill chunk: padding, lengths, chunk edges."""

import numpy as np
import pytest

from tests.kernels.harness import ceil_div, halves, launch, params
from tests.kernels.reference import BF16, GatedDeltaShape, assert_close, gated_delta_conv_rows


def operands(a, batch, tokens, hk, hv, seed=0):
    rng = np.random.default_rng(seed)
    channels = (2 * hk + hv) * 128

    def normal(*shape, scale=1.0):
        return a.store(rng.standard_normal(shape) * scale)

    return dict(
        qkv=normal(batch, tokens, channels),
        conv_state=normal(batch, 3, channels),
        weight=normal(channels, 4, scale=0.5),
        a=normal(batch, tokens, hv, scale=3.0),
        b=normal(batch, tokens, hv, scale=3.0),
        a_log=rng.uniform(-4, 3, hv).astype(np.float32),
        dt_bias=normal(hv),
    )


def conv(a, x, hk, mask=None, lengths=None, host="cpu"):
    batch, tokens, _ = x["qkv"].shape
    hv = x["a"].shape[2]
    outs = [a.empty(batch, tokens, n, 128) for n in (hk, hk, hv)]
    gates = [np.full((batch, tokens, hv), np.nan, np.float32) for _ in range(2)]
    state = np.zeros_like(x["conv_state"])
    no_mask, no_lengths = np.zeros(1, np.uint8), np.zeros(1, np.int32)
    buffers = [
        *x.values(),
        no_mask if mask is None else mask.astype(np.uint8),
        no_lengths if lengths is None else np.asarray(lengths, np.int32),
        *outs,
        *gates,
        state,
        params(tokens, hk, hv, mask is not None, lengths is not None),
    ]
    grid = (ceil_div(tokens, 32) + 1, 2 * hk + hv + 1, batch)
    launch(f"gated_delta_conv_rows_{a.name}", buffers, grid, 128, host)
    return *outs, *gates, state


def check(a, x, hk, mask=None, lengths=None, host="cpu"):
    q, k, v, g, beta, state = conv(a, x, hk, mask, lengths, host)
    f = {n: y if n == "a_log" else a.load(y) for n, y in x.items()}
    shape = GatedDeltaShape(hk, x["a"].shape[2])
    want = gated_delta_conv_rows(**f, mask=mask, lengths=lengths, shape=shape, dtype=a)
    for name, got, w in zip("qkv", (q, k, v), want[:3], strict=True):
        assert_close(a.load(got), w, a.ulp, name)
    assert_close(g, want[3], 4e-6, "g")
    assert_close(beta, want[4], 4e-6, "beta")
    np.testing.assert_array_equal(a.load(state), want[5])


@halves
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 65])
def test_lengths_of_a_chunk(a, tokens):
    check(a, operands(a, 1, tokens, 2, 4, tokens), 2)


def test_heads_of_the_35b_model():
    check(BF16, operands(BF16, 1, 5, 16, 32), 16)


@halves
def test_padding_and_lengths(a):
    tokens = 37
    x = operands(a, 4, tokens, 1, 2)
    t = np.arange(tokens)
    left = np.stack([t >= n for n in (0, 5, 36, 37)])
    check(a, x, 1, mask=left)
    lengths = [0, 2, 30, 99]
    right = np.stack([t < n for n in lengths])
    check(a, x, 1, mask=right, lengths=lengths)
    check(a, x, 1, lengths=lengths)


def test_one_piece_and_chunks_give_the_same_bits():
    x = operands(BF16, 2, 45, 1, 2)
    whole = conv(BF16, x, 1)
    state, parts, at = x["conv_state"], [], 0
    for n in (32, 1, 2, 10):
        piece = dict(x, conv_state=state)
        for name in ("qkv", "a", "b"):
            piece[name] = np.ascontiguousarray(x[name][:, at : at + n])
        *out, state = conv(BF16, piece, 1)
        parts.append(out)
        at += n
    for i in range(5):
        np.testing.assert_array_equal(np.concatenate([p[i] for p in parts], 1), whole[i])
    np.testing.assert_array_equal(state, whole[5])


def test_zero_rows_and_large_gates():
    x = operands(BF16, 1, 6, 1, 2)
    x["qkv"][:, 2:] = 0
    x["conv_state"][:] = 0
    for gate in (x["a"], x["b"]):
        gate[0, 0], gate[0, 1] = BF16.store([100.0, -100.0])
    check(BF16, x, 1)


def test_checked():
    x = operands(BF16, 2, 34, 1, 1)
    mask = np.arange(34) < np.array([[34], [20]])
    x["a"][0, 0] = BF16.store(-100.0)  # the softplus of a value below the smallest step of 1
    check(BF16, x, 1, mask=mask, lengths=[34, 20], host="checked")
    check(BF16, operands(BF16, 1, 2, 1, 1), 1, host="checked")
