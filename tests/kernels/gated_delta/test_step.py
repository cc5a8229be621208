"""Gated DeltaNet, one row: the fused step, its three parts, and a few steps in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.kernels.harness import launch
from tests.kernels.reference import (
    BF16,
    DTYPES,
    FP16,
    Dtype,
    GatedDeltaShape,
    assert_rounded,
    gated_delta_conv,
    gated_delta_delta,
    gated_delta_gated_norm,
    gated_delta_gates,
    gated_delta_split,
)

EPS = 1e-6


@dataclass
class Layer:
    """Parameters and state of one layer, as stored."""

    shape: GatedDeltaShape
    a: Dtype
    conv_weight: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    norm_weight: np.ndarray
    conv_state: np.ndarray
    state: np.ndarray


@dataclass
class Row:
    """Projections of one token, as stored."""

    qkv: np.ndarray
    z: np.ndarray
    b: np.ndarray
    a: np.ndarray


def make_layer(shape: GatedDeltaShape, a: Dtype, seed: int = 0, fresh: bool = False) -> Layer:
    rng = np.random.default_rng(seed)
    c, hv = shape.channels, shape.value_heads
    return Layer(
        shape,
        a,
        conv_weight=a.store(rng.standard_normal((c, 4)) * 0.5),
        a_log=np.log(rng.uniform(0.01, 16, hv)).astype(np.float32),
        dt_bias=a.store(rng.standard_normal(hv) * 2),
        norm_weight=a.store(rng.standard_normal(shape.dv)),
        conv_state=a.store(rng.standard_normal((3, c)) * (not fresh)),
        state=(rng.standard_normal((hv, shape.dv, shape.dk)) * 0.1 * (not fresh)).astype(
            np.float32
        ),
    )


def make_row(shape: GatedDeltaShape, a: Dtype, seed: int = 1, scale: float = 1.0) -> Row:
    rng = np.random.default_rng(seed)
    hv = shape.value_heads
    return Row(
        a.store(rng.standard_normal(shape.channels) * scale),
        a.store(rng.standard_normal(hv * shape.dv) * 2),
        a.store(rng.standard_normal(hv) * 2),
        a.store(rng.standard_normal(hv) * 3),
    )


def reference(layer: Layer, row: Row, hat: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """(exact output [Hv, Dv], new conv state, new state, y, q^ k^ v^ as one row)."""
    s, a = layer.shape, layer.a
    conv, conv_state = gated_delta_conv(
        a.load(row.qkv), a.load(layer.conv_state), a.load(layer.conv_weight)
    )
    q, k, v = gated_delta_split(conv, s, a)
    if hat is not None:
        n = s.key_heads * s.dk
        q, k, v = (
            hat[:n].reshape(q.shape),
            hat[n : 2 * n].reshape(k.shape),
            hat[2 * n :].reshape(v.shape),
        )
    g, beta = gated_delta_gates(a.load(row.a), a.load(row.b), layer.a_log, a.load(layer.dt_bias))
    y, state = gated_delta_delta(q, k, v, g, beta, layer.state, s)
    out = gated_delta_gated_norm(y, a.load(row.z).reshape(y.shape), a.load(layer.norm_weight), EPS)
    return out, conv_state, state, y, np.concatenate([q.ravel(), k.ravel(), v.ravel()])


def constants(shape: GatedDeltaShape, simdgroups: int) -> dict:
    return {40: shape.key_heads, 41: shape.value_heads, 42: simdgroups, 43: EPS}


def fused(
    host: str, layer: Layer, row: Row, simdgroups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    s, a = layer.shape, layer.a
    conv_out, state_out = a.empty(3, s.channels), np.full_like(layer.state, np.nan)
    out = a.empty(s.value_heads, s.dv)
    parameters = (layer.conv_state, layer.conv_weight, layer.a_log, layer.dt_bias)
    buffers = [row.qkv, row.z, row.b, row.a, *parameters, layer.norm_weight, layer.state]
    buffers += [conv_out, state_out, out]
    c = constants(s, simdgroups)
    launch(f"gated_delta_step_{a.name}", buffers, s.value_heads, 32 * simdgroups, host, c)
    return out, conv_out, state_out


def check(
    layer: Layer, row: Row, out: np.ndarray, conv_out: np.ndarray, state_out: np.ndarray
) -> None:
    a = layer.a
    want, conv_state, state, y, _ = reference(layer, row)
    np.testing.assert_array_equal(a.load(conv_out), conv_state)
    # A value of q^ or k^ on the edge between two roundings moves the state by one ulp of it.
    slack = a.ulp * np.abs(state).max() * 0.6 + 1e-6
    assert np.abs(state_out - state).max() <= slack
    assert np.abs(state_out - state).mean() <= 2e-6 + slack * 0.02
    rms = np.sqrt((want**2).mean(-1, keepdims=True))
    assert_rounded(a.load(out), want, a, 1 + rms * a.ulp * 5e5, "out")


BUNDLED = GatedDeltaShape(key_heads=2, value_heads=4)


@pytest.mark.parametrize("simdgroups", [8, 16, 32])
def test_step_checked(simdgroups: int) -> None:
    layer, row = make_layer(GatedDeltaShape(1, 2), BF16), make_row(GatedDeltaShape(1, 2), BF16)
    check(layer, row, *fused("checked", layer, row, simdgroups))


@pytest.mark.parametrize("simdgroups", [8, 16, 32])
@pytest.mark.parametrize("a", ["bf16", "fp16"])
def test_bundled_layer(a: str, simdgroups: int) -> None:
    layer, row = make_layer(BUNDLED, DTYPES[a]), make_row(BUNDLED, DTYPES[a])
    check(layer, row, *fused("cpu", layer, row, simdgroups))


@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
def test_35b_layer(a: Dtype) -> None:
    shape = GatedDeltaShape(16, 32)
    layer, row = make_layer(shape, a), make_row(shape, a)
    check(layer, row, *fused("cpu", layer, row, 32))


def test_equal_key_and_value_heads() -> None:
    shape = GatedDeltaShape(3, 3)
    layer, row = make_layer(shape, BF16), make_row(shape, BF16)
    check(layer, row, *fused("cpu", layer, row, 16))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 50.0])
def test_row_scales_from_an_empty_state(scale: float) -> None:
    """Zero q and k divide by sqrt(1e-6), not by zero; the state starts at zero."""
    layer, row = make_layer(BUNDLED, BF16, fresh=True), make_row(BUNDLED, BF16, scale=scale)
    check(layer, row, *fused("cpu", layer, row, 32))


def test_extreme_gates_stay_finite() -> None:
    layer, row = make_layer(BUNDLED, BF16), make_row(BUNDLED, BF16)
    row.a[:] = BF16.store(np.array([80.0, -80.0, 0.0, -12.0]))
    row.b[:] = BF16.store(np.array([90.0, -90.0, 30.0, 0.0]))
    out, conv_out, state_out = fused("checked", layer, row, 8)
    assert np.isfinite(BF16.load(out)).all() and np.isfinite(state_out).all()
    check(layer, row, out, conv_out, state_out)


def test_small_decay_keeps_its_digits() -> None:
    """softplus of a very negative input is exp of it, not 0: a plain log(1 + e) would lose it."""
    layer, row = make_layer(BUNDLED, BF16), make_row(BUNDLED, BF16, scale=0.0)
    layer.a_log[:] = np.log(16)
    layer.dt_bias[:] = 0
    row.a[:] = BF16.store(np.full(4, -9.0))
    layer.conv_state[:] = 0
    _, _, state_out = fused("cpu", layer, row, 32)
    decay = (state_out.astype(np.float64) / layer.state)[np.abs(layer.state) > 0.05]
    rate = 16 * np.log1p(np.exp(-9.0))
    np.testing.assert_allclose(decay, np.exp(-rate), rtol=2.5e-7)


def test_steps_in_a_row() -> None:
    layer = make_layer(BUNDLED, BF16, fresh=True)
    for step in range(5):
        row = make_row(BUNDLED, BF16, seed=10 + step)
        out, conv_out, state_out = fused("cpu", layer, row, 32)
        check(layer, row, out, conv_out, state_out)
        layer.conv_state, layer.state = conv_out, state_out


def test_thread_counts_agree_to_the_bit() -> None:
    layer, row = make_layer(BUNDLED, BF16), make_row(BUNDLED, BF16)
    results = [fused("cpu", layer, row, n) for n in (8, 16, 32)]
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "host,a,shape", [("checked", BF16, GatedDeltaShape(1, 2)), ("cpu", FP16, BUNDLED)]
)
def test_unfused_parts(host: str, a: Dtype, shape: GatedDeltaShape) -> None:
    layer, row = make_layer(shape, a), make_row(shape, a)
    c = constants(shape, 8)
    conv_out, hat = a.empty(3, shape.channels), a.empty(shape.channels)
    buffers = [row.qkv, layer.conv_state, layer.conv_weight, conv_out, hat]
    heads = 2 * shape.key_heads + shape.value_heads
    launch(f"gated_delta_conv_step_{a.name}", buffers, heads, 128, host, c)
    want = reference(layer, row)[4]
    assert np.abs(a.load(hat) - want).max() <= a.ulp * np.abs(want).max()
    assert (a.load(hat) != want).mean() < 0.01
    state_out, y = (
        np.full_like(layer.state, np.nan),
        np.full((shape.value_heads, 128), np.nan, np.float32),
    )
    buffers = [hat, row.b, row.a, layer.a_log, layer.dt_bias, layer.state, state_out, y]
    launch(f"gated_delta_delta_step_{a.name}", buffers, (4, shape.value_heads), 256, host, c)
    _, conv_state, state, y_want, _ = reference(layer, row, a.load(hat))
    np.testing.assert_array_equal(a.load(conv_out), conv_state)
    np.testing.assert_allclose(state_out, state, atol=3e-6)
    np.testing.assert_allclose(y, y_want, atol=3e-6)
    out = a.empty(shape.value_heads, 128)
    buffers = [y, row.z, layer.norm_weight, out]
    launch(f"gated_delta_gated_norm_{a.name}", buffers, shape.value_heads, 128, host, c)
    f_out, f_conv, f_state = fused(host, layer, row, 8)
    np.testing.assert_array_equal(conv_out, f_conv)
    np.testing.assert_array_equal(state_out, f_state)
    np.testing.assert_array_equal(out, f_out)
