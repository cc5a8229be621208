"""Experts of 1 to 16 rows; weights unrounded, each read once."""

import numpy as np
import pytest

from tests.kernels.harness import HOSTS, bound, ceil_div, halves, launch, params
from tests.kernels.linear.test_gemv_rows import lanes_for, made, most_rows
from tests.kernels.moe.experts import Experts, routing_tables, spread_ids, unsorted
from tests.kernels.reference import BF16


def check(e, ids, host="cpu"):
    tokens, k = ids.shape
    order, offsets, bmap = routing_tables(ids, e.count, 16)
    tables = order, offsets, bmap[: ids.size]
    suffix = f"rows_{e.a.name}_m{most_rows(tokens)}"
    act, lanes = e.a.empty(ids.size, e.width), lanes_for(e.hidden)
    p = params(e.hidden, e.width, k, lanes)
    buffers = [e.x, *bound(e.gate), *bound(e.up), *tables, act, p]
    grid = (ceil_div(e.width, made(lanes) // 2), len(tables[2]))
    launch(f"moe_gate_up_{suffix}", buffers, grid, 128, host, e.constants)
    down, lanes = np.full((ids.size, e.hidden), np.nan, np.float32), lanes_for(e.width)
    p = params(e.hidden, e.width, k, lanes)
    buffers = [act, *bound(e.down), *tables, down, p]
    grid = (ceil_div(e.hidden, made(lanes)), len(tables[2]))
    launch(f"moe_down_{suffix}", buffers, grid, 128, host, e.constants)
    e.check(ids, unsorted(act, order), down, rounded=False)


@halves
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 16])
def test_experts(a, tokens):
    check(Experts(a, tokens, 256, 64, 8), spread_ids(tokens, 3, 8))


def test_experts_of_the_35b_model():
    check(Experts(BF16, 4, 2048, 512, 4), spread_ids(4, 2, 4))


def test_all_on_one_and_all_apart():
    for tokens in (2, 16):
        e = Experts(BF16, tokens, 128, 64, 18)
        check(e, np.full((tokens, 1), 17))
        check(e, np.arange(tokens)[:, None])


@halves
@pytest.mark.parametrize("bits", [6, 8])
def test_formats(a, bits):
    check(Experts(a, 5, 96, 32, 4, bits, 32), spread_ids(5, 2, 4), "checked")


@pytest.mark.parametrize("host", HOSTS)
def test_width_that_is_no_multiple_of_the_columns(host):
    for hidden in (32, 96):
        check(Experts(BF16, 3, hidden, 32, 4, group=32), spread_ids(3, 2, 4), host)


@pytest.mark.parametrize("rows", [3, 7, 12])
def test_checked(rows):
    ids = np.zeros((rows, 1), int)
    ids[-1] = 2
    check(Experts(BF16, rows, 96, 32, 3, group=32), ids, "checked")
