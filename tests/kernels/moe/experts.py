"""Random experts, and the kernels that compute them for several rows."""

import numpy as np

from tests.kernels import reference as ref
from tests.kernels.harness import UNITS, bound, ceil_div, launch, params, weight_format
from tests.kernels.reference import F64, assert_close, make_weight

EXACT = 2e-5


class Experts:
    """Random quantized experts and rows of x."""

    def __init__(self, a, tokens, hidden, width, count, bits=4, group=64, seed=0):
        rng = np.random.default_rng(seed)
        self.a, self.hidden, self.width, self.count = a, hidden, width, count
        self.x = a.store(rng.standard_normal((tokens, hidden)))
        self.gate, self.up = (
            make_weight(rng, (count, width, hidden), a, bits, group) for _ in range(2)
        )
        self.down = make_weight(rng, (count, hidden, width), a, bits, group)

    @property
    def constants(self):
        return weight_format(self.gate)

    def values(self, rounded):
        """Gate, up and down, rounded to A or as they are."""
        weights = (self.gate.values, self.up.values, self.down.values)
        return tuple(self.a.rnd(w) if rounded else w for w in weights)

    def reference(self, ids, rounded):
        return ref.experts(self.a.load(self.x), ids, *self.values(rounded), self.a)

    def check(self, ids, act, down, rounded):
        """act [S, W] as stored, in (token, slot) order, and down [S, H]; weights rounded or not."""
        act = self.a.load(act).reshape(*ids.shape, -1)
        want, _ = self.reference(ids, rounded)
        assert_close(act, want, self.a.ulp + EXACT, "act")
        # The down product is judged on the act that it was given.
        full = self.values(rounded)[2][ids].astype(F64)
        want = np.einsum("tkhw,tkw->tkh", full, act)
        assert_close(down.reshape(want.shape), want, EXACT, "down")


def routing_tables(ids, count, block):
    order, offsets = ref.sort_by_expert(ids, count)
    bmap = ref.block_map(offsets, block, ceil_div(ids.size, block) + count)
    return order.astype(np.uint32), offsets.astype(np.uint32), bmap


def spread_ids(tokens, k, count, seed=1):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(count)[:k] for _ in range(tokens)])


def unsorted(act, order):
    """Rows of act in (token, slot) order."""
    out = np.zeros_like(act)
    out[order] = act
    return out


def grouped(e, ids, block, host="cpu", prefix=""):
    """Act [S, W] and down [S, H] in (token, slot) order, by moe_gate_up and moe_down."""
    order, offsets, bmap = tables = routing_tables(ids, e.count, block)
    columns, threads = UNITS[prefix][block]
    act = e.a.empty(ids.size, e.width)
    p = params(ids.size, e.width, e.hidden, ids.shape[1], 1)
    buffers = [e.x, *bound(e.gate), *bound(e.up), *tables, act, p]
    grid = (ceil_div(e.width, columns // 2), len(bmap))
    name = f"{prefix}moe_gate_up_{e.a.name}_m{block}"
    launch(name, buffers, grid, threads, host, e.constants)
    down = np.full((ids.size, e.hidden), np.nan, np.float32)
    buffers = [act, *bound(e.down), *tables, down, params(e.hidden, e.width)]
    grid = (ceil_div(e.hidden, columns), len(bmap))
    name = f"{prefix}moe_down_{e.a.name}_m{block}"
    launch(name, buffers, grid, threads, host, e.constants)
    return unsorted(act, order), down


def check_grouped(e, ids, block, host="cpu", prefix=""):
    e.check(ids, *grouped(e, ids, block, host, prefix), rounded=True)
