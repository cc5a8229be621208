"""The experts of one row: the pick with its ties, gate + up + SwiGLU, down + combine, and the pick
apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.kernels.harness import (
    ceil_div,
    kmax,
    launch,
    weight_buffers,
)
from tests.kernels.reference import (
    BF16,
    DTYPES,
    FP16,
    Dtype,
    Weight,
    assert_rounded,
    make_weight,
    product,
    route,
    sigmoid,
    silu,
)


@dataclass
class Shape:
    experts: int
    top_k: int
    hidden: int
    width: int
    shared: int
    bits: int = 4
    shared_bits: int = 4
    group: int = 64
    up: tuple[int, int, int, int] = (8, 2, 1, 4)  # lanes, R, U, simdgroups
    down: tuple[int, int, int] = (2, 2, 1)  # lanes, R, U
    norm: bool = True


def constants(s: Shape, *, select: bool = True) -> dict:
    """select: moe_gate_up picks; else ids are given."""
    return {
        80: s.experts,
        81: s.top_k,
        82: s.norm,
        83: s.hidden,
        84: s.width,
        85: s.shared,
        86: s.bits,
        87: s.shared_bits,
        88: s.group,
        89: s.up[0],
        90: s.up[1],
        91: s.up[2],
        92: s.up[3],
        93: s.down[0],
        94: s.down[1],
        95: s.down[2],
        98: s.bits <= 8,
        99: s.shared_bits <= 8,
        100: select,
        101: not select,
        104: False,
    }


class Layer:
    """Random weights of one MoE block, and a row."""

    def __init__(self, s: Shape, a: Dtype, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.s, self.a = s, a

        def experts(n: int, k: int) -> Weight:
            return make_weight(rng, (s.experts, n, k), a, s.bits, s.group)

        def shared(n: int, k: int) -> Weight:
            return make_weight(rng, (n, k), a, s.shared_bits, s.group)

        self.gate, self.up, self.down = (
            experts(s.width, s.hidden),
            experts(s.width, s.hidden),
            experts(s.hidden, s.width),
        )
        self.shared_gate, self.shared_up, self.shared_down = (
            shared(s.shared, s.hidden),
            shared(s.shared, s.hidden),
            shared(s.hidden, s.shared),
        )
        self.x = a.store(rng.standard_normal(s.hidden))
        self.h = a.store(rng.standard_normal(s.hidden) * 2)
        self.logits = (rng.standard_normal(s.experts) * 2).astype(np.float32)
        self.gate_logit = rng.standard_normal(1).astype(np.float32)

    def gate_up(self, host: str, c: dict, ids: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """(act, ids, weights) as moe_gate_up writes them."""
        s, a = self.s, self.a
        top_k, width, shared = c[81], c[84], c[85]
        act = a.empty(top_k * width + shared)
        out_ids, weights = (
            np.full(top_k, 2**31, np.uint32),
            np.full(top_k, np.nan, np.float32),
        )
        buffers = {0: self.x, 15: act}
        if c[100]:
            buffers |= {1: self.logits, 16: out_ids, 17: weights}
        if c[101]:
            buffers[2] = ids
        buffers |= weight_buffers(self.gate, 3) | weight_buffers(self.up, 6)
        buffers |= weight_buffers(self.shared_gate, 9) | weight_buffers(self.shared_up, 12)
        rows = c[92] * c[90] * (32 // c[89])
        grid = top_k * ceil_div(width, rows) + ceil_div(shared, rows)
        name = f"moe_gate_up_{a.name}_k{kmax(s.hidden)}"
        launch(name, buffers, grid, 32 * c[92], host, c)
        return act, out_ids, weights

    def down_rows(
        self,
        host: str,
        c: dict,
        act: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
    ) -> np.ndarray:
        s, a = self.s, self.a
        out = a.empty(s.hidden)
        buffers = {0: act, 1: ids, 2: weights, 9: self.gate_logit, 10: self.h, 11: out}
        buffers |= weight_buffers(self.down, 3) | weight_buffers(self.shared_down, 6)
        rows = c[94] * (32 // c[93])
        threads = 32 * (c[81] + 1)
        launch(f"moe_down_{a.name}", buffers, ceil_div(s.hidden, rows), threads, host, c)
        return out

    # ---- reference
    def check_act(self, act: np.ndarray, ids: np.ndarray) -> None:
        s, a = self.s, self.a
        x, got = a.load(self.x), a.load(act)
        for i, e in enumerate(ids):
            self._check_slot(
                got[i * s.width : (i + 1) * s.width], self.gate, self.up, int(e), x, f"slot {i}"
            )
        self._check_slot(
            got[len(ids) * s.width :], self.shared_gate, self.shared_up, None, x, "shared"
        )

    def _check_slot(
        self, got: np.ndarray, gate: Weight, up: Weight, e: int | None, x: np.ndarray, what: str
    ) -> None:
        g, g_size = product(_one(gate, e), x)
        u, u_size = product(_one(up, e), x)
        assert_rounded(
            got, silu(g) * u, self.a, g_size * np.abs(u) + u_size * np.abs(silu(g)), what
        )

    def check_out(
        self, out: np.ndarray, act: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> None:
        s, a = self.s, self.a
        x = a.load(act)
        y, size = np.zeros(s.hidden), np.zeros(s.hidden)
        for i, (e, w) in enumerate(zip(ids, weights, strict=True)):
            p, n = product(_one(self.down, int(e)), x[i * s.width : (i + 1) * s.width])
            y, size = y + float(w) * p, size + float(w) * n
        p, n = product(self.shared_down, x[len(ids) * s.width :])
        gate = float(sigmoid(self.gate_logit)[0])
        y, size = y + gate * p, size + gate * n
        # y is rounded before the residual is added.
        want = a.load(self.h).astype(np.float64) + y
        assert_rounded(a.load(out), want, a, size + np.abs(y) * a.ulp * 2.6e5, "out")


def _one(w: Weight, e: int | None) -> Weight:
    return w if e is None else Weight(w.w, None, None, w.values[e], w.bits, w.group)


def check_layer(host: str, s: Shape, a: Dtype, seed: int = 0) -> None:
    layer = Layer(s, a, seed)
    c = constants(s)
    act, ids, weights = layer.gate_up(host, c)
    want_ids, want_weights = route(layer.logits, s.top_k, s.norm)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)
    layer.check_act(act, ids)
    layer.check_out(layer.down_rows(host, c, act, ids, weights), act, ids, weights)


TINY = Shape(experts=64, top_k=2, hidden=256, width=64, shared=64, up=(8, 2, 1, 2), down=(2, 1, 1))


def test_layer_checked() -> None:
    check_layer("checked", TINY, BF16)


@pytest.mark.parametrize(
    "up,down",
    [
        ((8, 1, 1, 2), (1, 2, 1)),
        ((4, 1, 2, 1), (1, 2, 2)),
        ((8, 4, 1, 1), (2, 2, 1)),
        ((4, 2, 2, 2), (1, 2, 2)),
    ],
)
def test_shapes_checked(up: tuple, down: tuple) -> None:
    """Widths that end inside a block; more rounds of candidates than threads."""
    check_layer("checked", Shape(96, 3, 256, 64, 128, up=up, down=down, group=32), FP16)


def test_ragged_rows_checked() -> None:
    """Neither the width nor the hidden size is a multiple of a threadgroup's rows."""
    check_layer(
        "checked", Shape(32, 2, 288, 96, 96, group=32, up=(1, 1, 1, 2), down=(1, 2, 1)), BF16
    )


def test_mixed_bits_checked() -> None:
    check_layer(
        "checked",
        Shape(32, 2, 256, 128, 64, bits=4, shared_bits=8, up=(8, 1, 1, 2), down=(4, 4, 1)),
        BF16,
    )
    check_layer(
        "checked",
        Shape(32, 2, 256, 128, 64, bits=6, shared_bits=4, up=(8, 1, 1, 2), down=(2, 4, 1)),
        BF16,
    )
    check_layer(
        "checked",
        Shape(32, 2, 256, 64, 64, bits=16, shared_bits=16, up=(8, 1, 2, 2), down=(8, 8, 1)),
        BF16,
    )


def test_no_renormalising_checked() -> None:
    check_layer("checked", Shape(64, 4, 256, 64, 64, norm=False), BF16)


@pytest.mark.parametrize("a", ["bf16", "fp16"])
@pytest.mark.parametrize("bits,group", [(4, 32), (4, 64), (6, 32), (6, 64), (8, 32), (8, 64)])
def test_bundled_layer(a: str, bits: int, group: int) -> None:
    s = Shape(
        32,
        8,
        256,
        64,
        64,
        bits=bits,
        shared_bits=bits,
        group=group,
        up=(8, 2, 1, 4),
        down=(2, 2, 1),
    )
    check_layer("cpu", s, DTYPES[a])


@pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)
def test_35b_layer(a: Dtype) -> None:
    """All dims of the 35B model but the number of experts' weights: 32 of 256."""
    s = Shape(32, 8, 2048, 512, 512, up=(32, 2, 2, 8), down=(16, 4, 1))
    check_layer("cpu", s, a)


def test_group_128() -> None:
    check_layer(
        "cpu", Shape(32, 8, 512, 128, 128, group=128, up=(16, 2, 1, 4), down=(4, 2, 1)), BF16
    )


# ---------------------------------------------------------------- the pick


def pick(
    host: str, logits: np.ndarray, top_k: int, norm: bool = True, simdgroups: int = 8,
    ahead: int = 0,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """ahead: threadgroups that ask for weights meanwhile."""
    s = Shape(len(logits), top_k, 256, 64, 64, norm=norm, up=(8, 1, 1, simdgroups))
    ids, weights = np.full(top_k, 2**31, np.uint32), np.full(top_k, np.nan, np.float32)
    buffers = {0: logits, 1: ids, 2: weights, 4: 128}
    if ahead:
        buffers[3] = np.zeros(4096, np.uint32)
    c = constants(s) | {104: ahead > 0}
    launch("moe_route", buffers, 1 + ahead, 32 * simdgroups, host, c)
    return ids, weights


@pytest.mark.parametrize("experts,top_k", [(32, 8), (64, 1), (256, 8), (512, 10), (512, 16)])
@pytest.mark.parametrize("norm", [True, False])
def test_pick(experts: int, top_k: int, norm: bool) -> None:
    for seed in range(4):
        logits = (np.random.default_rng(seed).standard_normal(experts) * 3).astype(np.float32)
        ids, weights = pick("cpu", logits, top_k, norm)
        want_ids, want_weights = route(logits, top_k, norm)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_allclose(weights, want_weights, rtol=3e-6)


def test_equal_probabilities_choose_the_lowest_ids() -> None:
    rng = np.random.default_rng(1)
    for _ in range(6):
        logits = rng.integers(0, 3, 256).astype(np.float32)
        np.testing.assert_array_equal(pick("cpu", logits, 8)[0], route(logits, 8, True)[0])
    np.testing.assert_array_equal(
        pick("checked", np.zeros(64, np.float32), 8, simdgroups=2)[0], np.arange(8)
    )


def test_weights_asked_for_meanwhile_change_no_pick() -> None:
    logits = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    for host in ("cpu", "checked"):
        alone = pick(host, logits, 8, simdgroups=2)
        for a, b in zip(pick(host, logits, 8, simdgroups=2, ahead=3), alone, strict=True):
            np.testing.assert_array_equal(a, b)


def test_pick_of_far_apart_and_of_broken_logits() -> None:
    """Probabilities that underflow tie at 0; NaN and infinity still give distinct, valid ids."""
    logits = np.full(256, -500.0, np.float32)
    logits[[200, 100]] = [5.0, 4.0]
    ids, weights = pick("cpu", logits, 8)
    np.testing.assert_array_equal(ids, [200, 100, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(weights[2:], 0)
    for bad in (np.nan, np.inf):
        logits[7] = bad
        ids = pick("checked", logits, 8, simdgroups=2)[0]
        assert len(set(ids.tolist())) == 8 and ids.max() < 256


@pytest.mark.parametrize("simdgroups", [1, 4, 16])
def test_pick_does_not_depend_on_the_threads(simdgroups: int) -> None:
    logits = np.random.default_rng(2).standard_normal(256).astype(np.float32)
    for x, y in zip(
        pick("cpu", logits, 8, simdgroups=simdgroups), pick("cpu", logits, 8), strict=True
    ):
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- the pick apart


@pytest.mark.parametrize("host", ["checked", "cpu"])
def test_given_ids_equal_those_picked_inside(host: str) -> None:
    s = Shape(32, 8, 256, 64, 64) if host == "cpu" else TINY
    layer = Layer(s, BF16, seed=5)
    c = constants(s)
    act, ids, weights = layer.gate_up(host, c)
    picked_ids, picked_weights = pick(host, layer.logits, s.top_k)
    np.testing.assert_array_equal(picked_ids, ids)
    np.testing.assert_array_equal(picked_weights, weights)
    given = constants(s, select=False)
    np.testing.assert_array_equal(layer.gate_up(host, given, ids)[0], act)
    out = layer.down_rows(host, given, act, ids, weights)
    np.testing.assert_array_equal(out, layer.down_rows(host, c, act, ids, weights))
