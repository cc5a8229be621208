"""Routing: top-k, counting sort and block map, against the numpy reference."""

import numpy as np
import pytest

from tests.kernels import reference as ref
from tests.kernels.harness import HOSTS, ceil_div, launch, params


def route_on_host(logits, top_k, renormalise, block_rows, host, small):
    tokens, experts = logits.shape
    epl = next(e for e in (1, 2, 4, 8, 16) if experts <= 32 * e)
    blocks = ceil_div(tokens, 32)
    max_blocks = ceil_div(tokens * top_k, block_rows) + experts
    ids = np.full((tokens, top_k), 7777, np.uint32)
    weights = np.full((tokens, top_k), np.nan, np.float32)
    order = np.full(tokens * top_k, 0xABABABAB, np.uint32)
    offsets = np.zeros(experts + 1, np.uint32)
    bmap = np.zeros((max_blocks, 2), np.uint32)
    p = params(tokens, experts, top_k, int(renormalise), block_rows, max_blocks)
    if small:
        buffers = [logits, ids, weights, order, offsets, bmap, p]
        launch(f"route_small_e{epl}", buffers, 1, 256, host)
    else:
        counts = np.full((blocks, experts), 0xCDCDCDCD, np.uint32)
        buffers = [logits, ids, weights, counts, p]
        launch(f"route_topk_e{epl}", buffers, blocks, 256, host)
        launch("route_scan", [counts, offsets, bmap, p], 1, 256, host)
        launch("route_scatter", [ids, counts, order, p], blocks, 256, host)
    return ids, weights, order, offsets, bmap


def check(logits, top_k=8, renormalise=True, block_rows=16, host="cpu", small=False):
    ids, weights, order, offsets, bmap = route_on_host(
        logits, top_k, renormalise, block_rows, host, small
    )
    want_ids, want_weights = ref.route(logits, top_k, renormalise)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)
    want_order, want_offsets = ref.sort_by_expert(want_ids, logits.shape[1])
    np.testing.assert_array_equal(order, want_order)
    np.testing.assert_array_equal(offsets, want_offsets)
    np.testing.assert_array_equal(bmap, ref.block_map(want_offsets, block_rows, len(bmap)))


def random_logits(tokens, experts, seed=0):
    return np.random.default_rng(seed).standard_normal((tokens, experts)).astype(np.float32) * 2


@pytest.mark.parametrize("tokens", [1, 2, 7, 31, 32])
@pytest.mark.parametrize("small", [False, True])
def test_one_token_block(tokens, small):
    check(random_logits(tokens, 32, tokens), small=small)


@pytest.mark.parametrize("tokens", [33, 64, 65, 257])
@pytest.mark.parametrize("block_rows", [16, 32, 64])
def test_many_token_blocks(tokens, block_rows):
    check(random_logits(tokens, 256, tokens), block_rows=block_rows)


@pytest.mark.parametrize("experts", [8, 33, 64, 100, 128, 256, 512])
def test_expert_counts(experts):
    check(random_logits(40, experts, experts))
    check(random_logits(20, experts, experts), small=True)


@pytest.mark.parametrize("top_k", [1, 2, 16])
@pytest.mark.parametrize("renormalise", [False, True])
def test_top_k(top_k, renormalise):
    check(random_logits(45, 64, top_k), top_k=top_k, renormalise=renormalise)
    check(random_logits(32, 64, top_k), top_k=top_k, renormalise=renormalise, small=True)


@pytest.mark.parametrize("small", [False, True])
def test_ties_go_to_the_lowest_id(small):
    logits = np.zeros((32, 256), np.float32)
    logits[1] = np.arange(256) // 16  # ties inside the top
    logits[2, 255] = 1.0
    logits[3] = np.where(np.arange(256) % 32 == 5, 1.0, 0.0)  # ties inside one lane
    check(logits, small=small)


@pytest.mark.parametrize("small", [False, True])
def test_one_expert_gets_everything_and_the_rest_nothing(small):
    logits = np.full((32 if small else 70, 64), -4.0, np.float32)
    logits[:, 63] = 4.0
    check(logits, top_k=1, small=small)
    logits[:, 63] = -5.0
    logits[:, 0] = 4.0
    check(logits, top_k=1, small=small)


@pytest.mark.parametrize("host", HOSTS)
def test_a_row_of_nan_poisons_its_weights_and_keeps_its_ids_valid(host):
    logits = random_logits(33, 32)
    logits[1, 3] = np.nan
    logits[2] = np.nan
    logits[3, 1] = np.inf
    ids, weights, order, _, _ = route_on_host(logits, 8, True, 16, host, False)
    assert np.isnan(weights[1:4]).all() and np.isfinite(weights[[0, 4]]).all()
    assert ids.max() < 32 and all(len(set(row)) == 8 for row in ids)
    np.testing.assert_array_equal(np.sort(order), np.arange(33 * 8))


@pytest.mark.parametrize("experts", [32, 40, 100, 256, 500])
@pytest.mark.parametrize("small", [False, True])
def test_checked(experts, small):
    check(random_logits(5 if small else 37, experts), host="checked", small=small)
    check(random_logits(3, experts), 1, False, host="checked", small=small)
