"""The decode step, launch by launch on the Metal host: its words, its caches, its other forms."""

import mlx.core as mx
import numpy as np
import pytest
import small
from mlx_lm.generate import generate_step as stock_generate_step

import lily_mlx
from lily_mlx import decode, kernels, selection, spec
from lily_mlx.float32 import to_float32

# A step's logits and caches against the reference's, over the largest value: bf16 rounds to 8 bits,
# and two layers round some ten times one after another.
LOGITS = {mx.bfloat16: 2e-2, mx.float16: 3e-3}
CACHES = {mx.bfloat16: 2e-2, mx.float16: 3e-3}


def words(step, model, ids, count=64):
    return [token for token, _ in step(ids, model, max_tokens=count)]


@pytest.fixture(scope="module")
def bundled():
    with mx.stream(mx.cpu):
        return lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))


@pytest.fixture(scope="module")
def half():
    ours, twin = small.model(mx.bfloat16)
    return ours, twin


def margins(twin, ids, count):
    """Greedy tokens of a float32 model and by how much each beats the second best."""
    tokens, gaps = [], []
    for token, logprobs in stock_generate_step(ids, twin, max_tokens=count):
        top = mx.sort(logprobs)[-2:]
        gaps.append((top[1] - top[0]).item())
        tokens.append(token)
    return tokens, gaps


def test_64_tokens_of_the_bundled_model_equal_stocks_in_float32(bundled):
    """bf16 cannot tell tokens apart whose logits are nearer than its noise, so the prompt is, of
    some, the one whose nearest pair is farthest apart."""
    model, tokenizer = bundled
    twin = to_float32(lily_mlx.load(str(lily_mlx.BUNDLED_MODEL), engine="stock")[0])
    best = (-1.0, None, None)
    for text in PROMPTS:
        ids = mx.array(tokenizer.encode(text))
        tokens, gaps = margins(twin, ids, 64)
        best = max(best, (min(gaps), text, tokens))
    ids = mx.array(tokenizer.encode(best[1]))
    with kernels.metal_host():
        got = words(lily_mlx.generate_step, model, ids)
    assert got == best[2], f"the nearest pair is {best[0]:.3f} apart"
    ran = {(kind, kernel) for kind, kernel, _, _ in kernels.report()}
    assert ("decode_step", "decode_step") in ran and ("moe", "reference") not in ran


PROMPTS = [
    "The old house stood at the end of the lane, and",
    "When the captain came on deck the next morning, he",
    "It was a cold night in the middle of winter. The",
    '"I do not know," said the girl,',
    "The king had three sons, and the youngest",
    "There was once a poor man who lived",
]


@pytest.mark.parametrize("dtype", list(LOGITS), ids=str)
def test_logits_and_caches_are_the_references(dtype):
    ours, _ = small.model(dtype, num_hidden_layers=4)
    ids = mx.array(np.random.default_rng(0).integers(0, 301, 12))
    tokens = [5, 9, 250, 7]
    plain, host = small.prefilled(ours, ids), small.prefilled(ours, ids)
    expected, _ = small.steps(ours, tokens, plain)
    with small.only("decode_step"):
        got, following = small.steps(ours, tokens, host)
        mx.eval(got)
    assert small.error(got, expected) < LOGITS[dtype]
    assert following.tolist() == mx.argmax(got, axis=-1).tolist()
    for a, b in zip(small.arrays(host, 16), small.arrays(plain, 16), strict=True):
        assert small.error(a, b) < CACHES[dtype]


@pytest.mark.parametrize("target", ["metal", "metal_nax", "cuda"])
@pytest.mark.parametrize("bits", [6, small.MIXED], ids=["6 bits", "4, 6 and 8 bits"])
@pytest.mark.parametrize("dtype", list(LOGITS), ids=str)
def test_a_model_with_6_bits_has_every_kernel(dtype, bits, target):
    """Its prompt by GEMMs and by row products, and its steps."""
    ours, _ = small.model(dtype, bits, group=32)
    assert selection.step(spec.model(ours.language_model), on=target)
    ids = mx.array(np.random.default_rng(4).integers(0, 301, 23))

    def run():
        caches = ours.make_cache()
        for part in (ids[:20], ids[20:]):
            ours(part[None], cache=caches)
        return small.steps(ours, [3, 4], caches)[0]

    expected = run()
    with kernels.metal_host(target=target):
        got = run()
    assert small.error(got, expected) < 1.5 * LOGITS[dtype]
    ran = {(kind, kernel) for kind, kernel, _, _ in kernels.report()}
    assert {kind for kind, kernel in ran if kernel == "reference"} <= {"attend"}
    assert {("moe", "moe_gemm"), ("moe", "moe_rows"), ("decode_step", "decode_step")} <= ran


def test_chunked_prefill_then_decode_end_to_end(half):
    """Chunks of 40, 16 and 2 rows, by GEMMs and by row products, then three steps."""
    ours, _ = half
    ids = mx.array(np.random.default_rng(1).integers(0, 301, 58))

    def run():
        caches, at = ours.make_cache(), 0
        for n in (40, 16, 2):
            ours(ids[None, at : at + n], cache=caches)
            mx.eval([c.state for c in caches])
            at += n
        return small.steps(ours, [3, 4, 5], caches)[0], small.arrays(caches, 61)

    expected, states = run()
    with kernels.metal_host():
        got, host_states = run()
    assert small.error(got, expected) < 3e-2
    for a, b in zip(host_states, states, strict=True):
        assert small.error(a, b) < 3e-2
    ran = {(kind, kernel) for kind, kernel, _, _ in kernels.report()}
    assert {kind for kind, kernel in ran if kernel == "reference"} <= {"attend"}
    assert {("moe", "moe_gemm"), ("moe", "moe_rows"), ("gated_delta", "gated_delta_scan")} <= ran


FORMS = {
    "as it is": {},
    "norm apart": dict(fuse_norm=False),
    "projections and delta apart": dict(fuse_projections=False, fuse_delta=False),
    "residual and pick apart": dict(fuse_residual=False, fuse_route=False),
    "all apart": dict.fromkeys(
        ("fuse_norm", "fuse_projections", "fuse_residual", "fuse_delta", "fuse_route"), False,
    ),
    "uncoalesced": dict(coalesced=False),
    "serial levels": dict(serial_levels=True),
}  # fmt: skip


@pytest.mark.parametrize("target", ["metal", "cuda"])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_of_the_step_agrees(half, form, target):
    ours, _ = half
    ids = mx.array([7, 8, 9])
    results = []
    for options, on in (({}, "metal"), (FORMS[form], target)):
        caches = small.prefilled(ours, ids)
        with small.only("decode_step", step=options, target=on):
            results.append(small.steps(ours, [1, 2], caches))
            mx.eval(results[-1])
    (a, x), (b, y) = results
    assert small.error(b, a) < 1e-2
    assert x.tolist() == y.tolist()


def test_packed_and_unpacked_heads_give_the_same_bytes(half):
    ours, _ = half
    results = []
    for pack in (1, 2, 4):
        caches = small.prefilled(ours, mx.array([7, 8, 9]))
        with kernels.metal_host(step={"pack": pack}):
            results.append(np.array(small.steps(ours, [1, 2], caches)[0]))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_splits_of_fixed_length_agree_with_splits_of_equal_length():
    """Eight query heads on one KV head, a context over two blocks of 1024."""
    ours, _ = small.model(mx.bfloat16, num_attention_heads=8)
    ids = mx.array(np.random.default_rng(2).integers(0, 301, 1100))
    results = []
    for start in (-1, 1024):
        caches = small.prefilled(ours, ids)
        with small.only("decode_step", step={"fixed_block_from": start}):
            results.append(small.steps(ours, [1, 2], caches)[0])
            mx.eval(results[-1])
    assert small.error(*results) < 1e-2


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_launches_and_threads_does_not_change_a_bit(half, seed):
    ours, _ = half
    results = []
    for s in (0, seed):
        caches = small.prefilled(ours, mx.array([4, 5]))
        with kernels.metal_host(seed=s):
            logits, _ = small.steps(ours, [1, 2], caches)
            results.append(
                [
                    np.array(logits),
                    *(np.array(a.astype(mx.float32)) for a in small.arrays(caches, 4)),
                ]
            )
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_checked_host_finds_no_fault(half):
    ours, _ = half
    caches = small.prefilled(ours, mx.array([4, 5]))
    plain = small.prefilled(ours, mx.array([4, 5]))
    expected, _ = small.steps(ours, [1], plain)
    with small.only("decode_step", checked=True, seed=3):
        got, _ = small.steps(ours, [1], caches)
        mx.eval(got)
    assert small.error(got, expected) < LOGITS[mx.bfloat16]


def test_keys_and_values_that_outgrow_their_buffers(half):
    """Capacity 256 is full: the Program is built again for the next, the old rows are there."""
    ours, _ = half
    ids = mx.array(np.random.default_rng(3).integers(0, 301, 255))
    plain, host = small.prefilled(ours, ids), small.prefilled(ours, ids)
    expected, _ = small.steps(ours, [1, 2, 3], plain)
    with small.only("decode_step"):
        got, _ = small.steps(ours, [1, 2, 3], host)
        mx.eval(got)
    assert small.error(got, expected) < LOGITS[mx.bfloat16]


def test_sequences_share_programs():
    """One for each capacity and each set of options that was used; few are kept."""
    ours, _ = small.model(mx.bfloat16)
    plan = ours.language_model.decode_plan().native

    def used(options, tokens=(1,)):
        with kernels.metal_host(step=options):
            mx.eval(small.steps(ours, tokens, small.prefilled(ours, mx.array([4, 5]))))
        return plan.programs

    first = used({})
    assert first > 0 and used({}) == first
    second = used({"fuse_norm": False})
    assert second > first and used({}) == used({"fuse_norm": False}) == second
    for block in range(1024, 1024 + 20):
        used({"fixed_block_from": block})
    assert plan.programs == 8


def test_two_steps_in_flight_and_no_copies(half):
    ours, _ = half
    caches = small.prefilled(ours, mx.array([4, 5]))
    with small.only("decode_step"):
        first = decode.step(ours.language_model, mx.array([[1]]), caches)
        second = decode.step(ours.language_model, first[0], caches)
        third = decode.step(ours.language_model, second[0], caches)
        mx.eval(third)
        before = caches[0]._loan[0].copied_bytes
        again = decode.step(ours.language_model, third[0], caches)
        mx.eval(again)
        assert caches[0]._loan[0].copied_bytes == before


def test_a_model_without_kernels_runs_the_reference_and_says_why():
    ours, _ = small.model(mx.bfloat16, head_dim=128)
    caches = small.prefilled(ours, mx.array([4, 5]))
    with small.only("reference"):
        mx.eval(small.steps(ours, [1], caches))
    [(kind, _, reason, count)] = kernels.report()
    assert (kind, count) == ("decode_step", 1) and "heads of 256" in reason
