"""Grouped expert GEMMs over sorted assignments: block edges, empty experts, one expert for all."""

import numpy as np
import pytest

from tests.kernels import reference_prefill as ref
from tests.kernels.prefill.harness import (
    TYPES,
    ULP,
    UNITS,
    assert_close,
    ints,
    normal,
    quantize,
    rnd,
    run,
    values,
)

THREADS = (128, 1, 1)
# The kernels round weights to A before the product. Against such weights they are fp32-exact,
# and what is left is the rounding of act; against unrounded ones the errors average over the sum.
FP32 = 2e-5
UNROUNDED = {"bf16": 2.0**-6, "fp16": 2.0**-9}


class Experts:
    """Random quantized experts and rows of x."""

    def __init__(self, a, tokens, hidden, width, count, nbits=4, group=64, seed=0):
        rng = np.random.default_rng(seed)
        self.a, self.tokens, self.hidden, self.width, self.count = a, tokens, hidden, width, count
        self.constants = {0: nbits, 1: group}
        self.x = normal(rng, (tokens, hidden), a)
        self.gate = quantize(rng, count * width, hidden, a, nbits, group)
        self.up = quantize(rng, count * width, hidden, a, nbits, group)
        self.down = quantize(rng, count * hidden, width, a, nbits, min(group, width))

    def full(self, name, rounded=True):
        shape = (self.hidden, self.width) if name == "down" else (self.width, self.hidden)
        w = getattr(self, name)[3].reshape(self.count, *shape)
        return rnd(w, self.a) if rounded else w

    def reference(self, ids, rounded=True):
        weights = (self.full(name, rounded) for name in ("gate", "up", "down"))
        return ref.experts(values(self.x, self.a), ids, *weights, lambda y: rnd(y, self.a))


def routing_tables(ids, count, block):
    order, offsets = ref.sort_by_expert(ids, count)
    max_blocks = -(-ids.size // block) + count
    bmap = ref.block_map(offsets, block, max_blocks)
    return order.astype(np.uint32), offsets.astype(np.uint32), bmap


def run_experts(e, ids, block, host="cpu", prefix=""):
    """Returns act [T, k, W] and down [T, k, H] in (token, slot) order."""
    tokens, k = ids.shape
    order, offsets, bmap = routing_tables(ids, e.count, block)
    suffix, (columns, threads) = UNITS[prefix][0], UNITS[prefix][1][block]
    file, group_size = "moe_gemm" + suffix, (threads, 1, 1)
    act = np.zeros((ids.size, e.width), np.uint16)
    p = ints(ids.size, e.width, e.hidden, k, 1)
    buffers = [e.x, *e.gate[:3], *e.up[:3], order, offsets, bmap, act, p]
    grid = (-(-e.width // (columns // 2)), len(bmap), 1)
    run(file, f"{prefix}moe_gate_up_{e.a}_m{block}", buffers, grid, group_size, host, e.constants)
    down = np.full((ids.size, e.hidden), np.nan, np.float32)
    buffers = [act, *e.down[:3], order, offsets, bmap, down, ints(e.hidden, e.width)]
    grid = (-(-e.hidden // columns), len(bmap), 1)
    run(file, f"{prefix}moe_down_{e.a}_m{block}", buffers, grid, group_size, host, e.constants)
    unsorted = np.zeros_like(act)
    unsorted[order] = act
    return unsorted.reshape(tokens, k, -1), down.reshape(tokens, k, -1)


def check(e, ids, block, host="cpu", prefix=""):
    act, down = run_experts(e, ids, block, host, prefix)
    want_act, _ = e.reference(ids)
    assert_close(values(act, e.a), want_act, ULP[e.a] + FP32, "act")
    # The down product is judged on the act that it was given.
    full = e.full("down")[ids].astype(np.float64)
    assert_close(down, np.einsum("tkhw,tkw->tkh", full, values(act, e.a)), FP32, "down")


def spread_ids(tokens, k, count, seed=1):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(count)[:k] for _ in range(tokens)])


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_spread_over_experts(a, block):
    e = Experts(a, 21, 128, 64, 6)
    check(e, spread_ids(21, 3, 6), block)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_block_edges_of_one_expert(block):
    for rows in (1, block - 1, block, block + 1):
        e = Experts("bf16", rows, 64, 64, 3, seed=rows)
        check(e, np.full((rows, 1), 1), block)


def test_first_and_last_expert_alone():
    e = Experts("bf16", 18, 64, 64, 4)
    for expert in (0, 3):
        check(e, np.full((18, 1), expert), 16)


@pytest.mark.parametrize("a", TYPES)
def test_8_bits(a):
    check(Experts(a, 9, 128, 64, 4, nbits=8), spread_ids(9, 2, 4), 16)


def test_a_hidden_size_that_is_no_multiple_of_the_column_block():
    check(Experts("bf16", 9, 96, 32, 4, group=32), spread_ids(9, 2, 4), 16)


def test_widths_of_the_35b_model():
    check(Experts("bf16", 4, 2048, 512, 4), spread_ids(4, 2, 4), 16)


def test_widths_of_the_bundled_model():
    check(Experts("bf16", 16, 256, 64, 32), spread_ids(16, 8, 32), 16)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("host", ["cpu", "checked"])
def test_shared_expert_ungrouped(block, host):
    for rows in (1, block, block + 1):
        e = Experts("bf16", rows, 128, 64, 1)
        act = np.zeros((rows, 64), np.uint16)
        nothing = np.zeros(2, np.uint32)
        p = ints(rows, 64, 128, 1, 0)
        buffers = [e.x, *e.gate[:3], *e.up[:3], nothing, nothing, nothing, act, p]
        grid = (2, -(-rows // block), 1)
        run("moe_gemm", f"moe_gate_up_bf16_m{block}", buffers, grid, THREADS, host, e.constants)
        want, _ = e.reference(np.zeros((rows, 1), int))
        assert_close(values(act, "bf16"), want[:, 0], ULP["bf16"] + FP32)


@pytest.mark.parametrize("a", TYPES)
def test_distance_from_unrounded_weights(a):
    e = Experts(a, 16, 256, 64, 4)
    ids = spread_ids(16, 2, 4)
    _, down = run_experts(e, ids, 16)
    _, want = e.reference(ids, rounded=False)
    assert np.sqrt(np.mean((down - want) ** 2)) <= UNROUNDED[a] * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_checked(block):
    e = Experts("bf16", 18, 96, 32, 3, group=32)
    ids = np.zeros((18, 1), int)
    ids[17] = 2
    check(e, ids, block, "checked")
