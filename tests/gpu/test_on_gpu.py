"""On an NVIDIA GPU: kernels at the 35B shapes, and whole models against stock and the CPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

import lily_mlx
from benchmarks import gpu, gpu_checks
from lily_mlx import _ext, decode, ptx

from . import executors, kernels


@pytest.fixture(autouse=True)
def card():
    if mx.default_device().type != mx.DeviceType.gpu or mx.metal.is_available():
        pytest.skip("MLX has no NVIDIA GPU here")
    if not _ext.built_with_cuda:
        pytest.skip("lily_mlx was built without NVIDIA support")


@pytest.fixture(scope="module")
def pair():
    """Four layers at the 35B shapes: the kernels of all forty."""
    return gpu.both_models(layers=4)


def test_every_kernel_of_a_step_at_the_35b_shapes():
    assert kernels.run(executors.Gpu()) == []


def test_the_decode_step_serves_the_35b_shapes(pair):
    choice = pair[0].language_model.decode_plan().choice
    assert choice, choice.reason


@pytest.mark.parametrize("context", [1, 255, 256, 1025, 5000])
def test_decode_from_filled_caches_is_stocks(pair, context):
    found = gpu.forced_from_caches(*pair, context)
    assert found["largest_difference"] < 0.02 and found["same_top_1"] > 0.9, found


def test_a_prompt_and_tokens_one_by_one_are_stocks(pair):
    for found in (gpu_checks.prompt(*pair), gpu_checks.teacher_forced(*pair)):
        assert found["largest_difference"] < 0.02 and found["same_top_1"] > 0.9, found


def test_a_repeated_prompt_gives_the_same_bits(pair):
    assert gpu_checks.repeated(pair[0])["equal"]


def test_the_bundled_model():
    assert gpu_checks.bundled_greedy()["equal"]
    found = gpu_checks.bundled_forced()
    assert found["largest_difference"] < 0.05 and found["same_top_1"] > 0.9, found
    model, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))
    assert gpu_checks.repeated(model)["equal"]


@pytest.fixture(scope="module")
def bundled():
    return lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))[0]


def ids_of(model, count):
    return mx.random.randint(
        0, model.language_model.args.vocab_size, (count,), key=mx.random.key(count)
    )


def greedy(model, length, count=20):
    """What a prompt of `length` goes on with, a token at a time: (token, log probabilities)."""
    for token, logprobs in decode.generate_step(ids_of(model, length), model, max_tokens=count):
        mx.eval(logprobs)
        yield token, logprobs


def same(one, other):
    return all(a[0] == b[0] and mx.array_equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


def test_a_sequence_takes_over_what_another_left(bundled):
    """Graphs bound to new caches, of other lengths and of prompts that fill their last block."""
    lengths = (300, 512, 40, 511, 1100, 300)
    first = {n: list(greedy(bundled, n)) for n in lengths}
    for n in (40, 1100, 512, 300, 511):
        assert same(greedy(bundled, n), first[n]), n


def test_sequences_side_by_side(bundled):
    alone = [list(greedy(bundled, n)) for n in (300, 512, 40)]
    together = list(zip(*(greedy(bundled, n) for n in (300, 512, 40)), strict=True))
    for one, other in zip(alone, zip(*together, strict=True), strict=True):
        assert same(one, other)


def test_nothing_is_copied_after_a_prompt(bundled):
    caches = bundled.make_cache()
    bundled(ids_of(bundled, 100)[None], cache=caches)
    mx.eval([c.state for c in caches])
    mx.synchronize()
    token = mx.array([[3]])
    for _ in range(20):
        token, _ = decode.step(bundled.language_model, token, caches)
        mx.eval(token)
    assert caches[0]._loan[0].copied_bytes == 0


@pytest.mark.parametrize("by_layers", [True, False])
def test_what_somebody_holds_is_not_written(bundled, by_layers):
    caches = bundled.make_cache()
    ids = ids_of(bundled, 40)
    for part in [ids[None]] if by_layers else [i.reshape(1, 1) for i in ids]:
        bundled(part, cache=caches)
    held = [caches[0][1], caches[0][0], caches[2].state[0][1]]
    held += [caches[3].keys[..., :40, :], mx.contiguous(caches[3].values)[..., :40, :]]
    before = [a.astype(mx.float32) + 0 for a in held]
    mx.eval(held, before)
    token = mx.array([[3]])
    for _ in range(10):
        token, _ = decode.step(bundled.language_model, token, caches)
        mx.eval(token)
    for i, (array, value) in enumerate(zip(held, before, strict=True)):
        assert mx.array_equal(array.astype(mx.float32), value), i
    assert caches[0]._loan[0].copied_bytes > 0


@pytest.mark.parametrize("done", [0, 1])
def test_a_step_that_fails_changes_nothing(bundled, done):
    """Kernels that cannot be read, before the first graph of a sequence and before its second."""
    sequences = []
    for fails in (False, True):
        caches = bundled.make_cache()
        bundled(ids_of(bundled, 256)[None], cache=caches)  # full: the first step grows them
        logits = []
        for i in range(4):
            step = decode.step(bundled.language_model, mx.array([[3 + i]]), caches)
            if fails and i == done:
                ptx.register(lambda key, _, entry: _ext.cuda_add_kernel(key, "no PTX", entry))
                try:
                    for _ in range(2):
                        with pytest.raises(RuntimeError, match="NVIDIA: loading"):
                            mx.eval(step)
                finally:
                    ptx.register(_ext.cuda_add_kernel)
            mx.eval(step)
            logits.append(step[1])
        sequences.append(logits)
    assert all(mx.array_equal(a, b) for a, b in zip(*sequences, strict=True))
