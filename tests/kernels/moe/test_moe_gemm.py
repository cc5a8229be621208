"""Grouped expert GEMMs over sorted assignments: block edges, empty experts, one expert for all."""

import numpy as np
import pytest

from tests.kernels.harness import HOSTS, bound, ceil_div, halves, launch, params
from tests.kernels.moe.experts import EXACT, Experts, check_grouped, grouped, spread_ids
from tests.kernels.reference import BF16, assert_close


@halves
@pytest.mark.parametrize("block", [16, 32, 64])
def test_spread_over_experts(a, block):
    check_grouped(Experts(a, 21, 128, 64, 6), spread_ids(21, 3, 6), block)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_block_edges_of_one_expert(block):
    for rows in (1, block - 1, block, block + 1):
        e = Experts(BF16, rows, 64, 64, 3, seed=rows)
        check_grouped(e, np.full((rows, 1), 1), block)


def test_first_and_last_expert_alone():
    e = Experts(BF16, 18, 64, 64, 4)
    for expert in (0, 3):
        check_grouped(e, np.full((18, 1), expert), 16)


@halves
@pytest.mark.parametrize("bits", [6, 8])
@pytest.mark.parametrize("prefix", ["", "mma_"])
def test_formats(a, bits, prefix):
    check_grouped(Experts(a, 9, 128, 64, 4, bits), spread_ids(9, 2, 4), 16, prefix=prefix)


@halves
@pytest.mark.parametrize("bits", [6, 8])
def test_nax_formats(a, bits):
    check_grouped(Experts(a, 9, 128, 64, 4, bits), spread_ids(9, 2, 4), 32, prefix="nax_")


def test_a_hidden_size_that_is_no_multiple_of_the_column_block():
    check_grouped(Experts(BF16, 9, 96, 32, 4, group=32), spread_ids(9, 2, 4), 16)


def test_widths_of_the_35b_model():
    check_grouped(Experts(BF16, 4, 2048, 512, 4), spread_ids(4, 2, 4), 16)


def test_widths_of_the_bundled_model():
    check_grouped(Experts(BF16, 16, 256, 64, 32), spread_ids(16, 8, 32), 16)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("host", HOSTS)
def test_shared_expert_ungrouped(block, host):
    for rows in (1, block, block + 1):
        e = Experts(BF16, rows, 128, 64, 1)
        act, nothing = BF16.empty(rows, 64), np.zeros(2, np.uint32)
        p = params(rows, 64, 128, 1, 0)
        buffers = [e.x, *bound(e.gate), *bound(e.up), nothing, nothing, nothing, act, p]
        grid = (2, ceil_div(rows, block))
        launch(f"moe_gate_up_bf16_m{block}", buffers, grid, 128, host, e.constants)
        want, _ = e.reference(np.zeros((rows, 1), int), rounded=True)
        assert_close(BF16.load(act), want[:, 0], BF16.ulp + EXACT)


@halves
def test_distance_from_unrounded_weights(a):
    """Errors of rounded weights average over the sum."""
    e = Experts(a, 16, 256, 64, 4)
    ids = spread_ids(16, 2, 4)
    _, down = grouped(e, ids, 16)
    _, want = e.reference(ids, rounded=False)
    error = np.sqrt(np.mean((down.reshape(want.shape) - want) ** 2))
    assert error <= 2 * a.ulp * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_checked(block):
    ids = np.zeros((18, 1), int)
    ids[17] = 2
    check_grouped(Experts(BF16, 18, 96, 32, 3, group=32), ids, block, "checked")


# ---------------------------------------------------------------- other matrix units


@halves
@pytest.mark.parametrize("block", [32, 64])
def test_nax(a, block):
    """Metal 4 tensor operations."""
    check_grouped(Experts(a, 37, 128, 64, 3), spread_ids(37, 2, 3), block, prefix="nax_")


@pytest.mark.parametrize("block", [32, 64])
def test_nax_checked(block):
    e = Experts(BF16, 5, 64, 64, 2)
    check_grouped(e, spread_ids(5, 1, 2), block, "checked", "nax_")


@halves
@pytest.mark.parametrize("block", [16, 32, 64])
def test_mma(a, block):
    """NVIDIA's tensor cores, emulated."""
    e = Experts(a, 37, 128, 96, 3, group=32)
    check_grouped(e, spread_ids(37, 2, 3), block, prefix="mma_")
    e = Experts(a, block + 1, 64, 64, 2, bits=8)
    check_grouped(e, np.full((block + 1, 1), 1), block, prefix="mma_")


@pytest.mark.parametrize("block", [16, 32, 64])
def test_mma_checked(block):
    e = Experts(BF16, 5, 64, 96, 2, group=32)
    check_grouped(e, spread_ids(5, 1, 2), block, "checked", "mma_")
